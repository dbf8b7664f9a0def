//! What is read from logs.

use std::{fs, future, io, path::Path, pin::pin};

use berth_runtime::{LogOptions, LogStream, Runtime as _, log_files, logs};
use futures_util::StreamExt as _;

use crate::scratch::{SOON, Scratch, mount};

const LOG: &str = "\
2026-11-15T12:00:00.000000001Z stdout F one
2026-11-15T12:00:01.000000000Z stderr F bad
2026-11-15T12:00:02.000000000Z stdout P tw
2026-11-15T12:00:02.500000000Z stdout F o
2026-11-15T12:00:03.000000000Z stdout P rest
";

async fn read(path: &Path, options: LogOptions) -> String {
    let chunks: Vec<io::Result<_>> = logs(path, options, future::ready(())).await.unwrap().collect().await;
    chunks.into_iter().map(|chunk| String::from_utf8(chunk.unwrap().to_vec()).unwrap()).collect()
}

#[tokio::test]
async fn options_choose_what_is_read() {
    let scratch = Scratch::new();
    let path = scratch.path("0.log");
    fs::write(&path, LOG).unwrap();
    let all = LogOptions::default;
    let since = "2026-11-15T12:00:02Z".parse().ok();
    let cases = [
        (all(), "one\nbad\ntwo\nrest"),
        (LogOptions { tail_lines: Some(3), ..all() }, "two\nrest"),
        (LogOptions { tail_lines: Some(0), ..all() }, ""),
        (LogOptions { tail_lines: Some(100), ..all() }, "one\nbad\ntwo\nrest"),
        (LogOptions { since, ..all() }, "two\nrest"),
        (LogOptions { limit_bytes: Some(5), ..all() }, "one\nb"),
        (LogOptions { limit_bytes: Some(0), ..all() }, ""),
        (LogOptions { stream: Some(LogStream::Stderr), ..all() }, "bad\n"),
        (LogOptions { follow: true, ..all() }, "one\nbad\ntwo\nrest"),
        (
            LogOptions { timestamps: true, tail_lines: Some(3), ..all() },
            "2026-11-15T12:00:02.000000000Z two\n2026-11-15T12:00:03.000000000Z rest",
        ),
    ];
    for (options, text) in cases {
        assert_eq!(read(&path, options.clone()).await, text, "{options:?}");
    }
    assert!(logs(&scratch.path("none.log"), all(), future::ready(())).await.is_err());
}

#[tokio::test]
async fn what_a_container_writes_is_read_back() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let spec = scratch.sh("echo out; echo err >&2; head -c 40000 /dev/zero | tr '\\0' x; echo; printf end");
    let log = spec.log.clone();
    scratch.run(&runtime, spec).await;
    let stdout = read(&log, LogOptions { stream: Some(LogStream::Stdout), ..Default::default() }).await;
    assert_eq!(stdout, format!("out\n{}\nend", "x".repeat(40_000)));
    let stderr = read(&log, LogOptions { stream: Some(LogStream::Stderr), ..Default::default() }).await;
    assert_eq!(stderr, "err\n");
    let entries = fs::read_to_string(&log).unwrap();
    assert_eq!(entries.lines().filter(|line| line.contains(" stdout P xxx")).count(), 2);
}

#[tokio::test]
async fn following_ends_with_the_container_and_misses_nothing() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let gate = scratch.dir("gate");
    let mut spec =
        scratch.sh("echo first; until test -e /gate/open; do sleep 0.01; done; seq 1 20000; echo last");
    spec.mounts = vec![mount(&gate, "/gate", false)];
    let log = spec.log.clone();
    let id = runtime.start(spec).await.unwrap();
    let ended = {
        let (runtime, id) = (runtime.clone(), id.clone());
        async move {
            runtime.exited(&id).await;
        }
    };
    let mut stream =
        pin!(logs(&log, LogOptions { follow: true, ..Default::default() }, ended).await.unwrap());
    let follow = async {
        let mut text = Vec::new();
        while let Some(chunk) = stream.next().await {
            text.extend_from_slice(&chunk.unwrap());
            // Only when the first line has come out may the container go on.
            fs::write(gate.join("open"), "").unwrap();
        }
        String::from_utf8(text).unwrap()
    };
    let text = tokio::time::timeout(SOON, follow).await.expect("following ends");
    let expected: Vec<String> = ["first".to_owned()]
        .into_iter()
        .chain((1..=20_000).map(|n| n.to_string()))
        .chain(["last".to_owned()])
        .collect();
    assert!(text.lines().eq(expected.iter().map(String::as_str)), "{} lines", text.lines().count());
}

#[tokio::test]
async fn a_log_that_is_full_goes_on_in_a_new_file_and_followers_with_it() {
    let scratch = Scratch::new();
    let path = scratch.path("0.log");
    let entry = |text: &str| format!("2026-11-15T12:00:00.000000000Z stdout F {text}\n");
    fs::write(&path, entry("one")).unwrap();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let ended = async move {
        let _ = ended.await;
    };
    let mut stream =
        pin!(logs(&path, LogOptions { follow: true, ..Default::default() }, ended).await.unwrap());
    let mut next = async || tokio::time::timeout(SOON, stream.next()).await.unwrap().map(Result::unwrap);
    assert_eq!(next().await.unwrap(), "one\n");
    fs::write(&path, entry("one") + &entry("two")).unwrap();
    fs::rename(&path, scratch.path("0.log.1")).unwrap();
    fs::write(&path, entry("three")).unwrap();
    let mut text = Vec::new();
    while text != b"two\nthree\n" {
        text.extend_from_slice(&next().await.unwrap());
    }
    drop(end);
    assert_eq!(next().await, None);
}

/// Five files of five lines each, line 0 the oldest; each line was written at the second of its number.
fn rotated(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.path("0.log");
    for (file, path) in log_files(&path).enumerate() {
        let lines = (0..5).map(|line| (4 - file) * 5 + line);
        let text: Vec<String> = lines
            .map(|line| format!("2026-11-15T12:00:{line:02}.000000000Z stdout F line {line}\n"))
            .collect();
        fs::write(&path, text.concat()).unwrap();
        let last = "2026-11-15T12:00:00Z".parse::<jiff::Timestamp>().unwrap().as_second();
        let last = last + i64::try_from((4 - file) * 5 + 4).unwrap();
        let times = fs::FileTimes::new()
            .set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(last.try_into().unwrap()));
        fs::File::options().write(true).open(&path).unwrap().set_times(times).unwrap();
    }
    path
}

#[tokio::test]
async fn all_files_of_a_log_are_read_as_one() {
    let scratch = Scratch::new();
    let path = rotated(&scratch);
    let lines = |from: u32| (from..25).map(|line| format!("line {line}\n")).collect::<Vec<_>>().concat();
    let all = LogOptions::default;
    let since = |second: u32| format!("2026-11-15T12:00:{second:02}Z").parse().ok();
    for follow in [false, true] {
        for (options, from) in [
            (all(), 0),
            (LogOptions { tail_lines: Some(1), ..all() }, 24),
            (LogOptions { tail_lines: Some(5), ..all() }, 20),
            (LogOptions { tail_lines: Some(6), ..all() }, 19),
            (LogOptions { tail_lines: Some(17), ..all() }, 8),
            (LogOptions { tail_lines: Some(25), ..all() }, 0),
            (LogOptions { tail_lines: Some(u64::MAX), ..all() }, 0),
            (LogOptions { since: since(0), ..all() }, 0),
            (LogOptions { since: since(14), ..all() }, 14),
            (LogOptions { since: since(15), ..all() }, 15),
            (LogOptions { since: since(23), ..all() }, 23),
            (LogOptions { since: since(30), ..all() }, 25),
            (LogOptions { since: since(3), tail_lines: Some(12), ..all() }, 13),
        ] {
            let options = LogOptions { follow, ..options };
            assert_eq!(read(&path, options.clone()).await, lines(from), "{options:?}");
        }
    }
    let cut = LogOptions { limit_bytes: Some(45), ..all() };
    assert_eq!(read(&path, cut).await, lines(0)[..45]);
}

#[tokio::test]
async fn a_container_that_writes_much_takes_five_files_and_a_follower_misses_nothing() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    // 70 MB; the container waits for the reader now and then, which else would be too slow to see every file.
    let gate = scratch.dir("gate");
    let script = "line=$(printf '%07990d' 0); for part in 1 2 3 4 5 6 7; do \
                  for i in $(seq 1250); do echo $part $i $line; done; until test -e /gate/$part; do sleep 0.01; done; done";
    let mut spec = scratch.sh(script);
    spec.mounts = vec![mount(&gate, "/gate", false)];
    let log = spec.log.clone();
    let id = runtime.start(spec).await.unwrap();
    let ended = {
        let (runtime, id) = (runtime.clone(), id.clone());
        async move {
            runtime.exited(&id).await;
        }
    };
    let mut stream =
        pin!(logs(&log, LogOptions { follow: true, ..Default::default() }, ended).await.unwrap());
    let follow = async {
        let (mut lines, mut unfinished) = (0, Vec::new());
        while let Some(chunk) = stream.next().await {
            unfinished.extend_from_slice(&chunk.unwrap());
            while let Some(end) = unfinished.iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8(unfinished.drain(..=end).collect()).unwrap();
                let mut words = line.split(' ');
                let number = |word: Option<&str>| word.unwrap().parse::<u32>().unwrap();
                let (part, index) = (number(words.next()), number(words.next()));
                assert_eq!((part, index), (lines / 1250 + 1, lines % 1250 + 1));
                lines += 1;
                if index == 1250 {
                    fs::write(gate.join(part.to_string()), "").unwrap();
                }
            }
        }
        lines
    };
    let lines = tokio::time::timeout(SOON * 3, follow).await.expect("following ends");
    assert_eq!(lines, 7 * 1250);
    let size = |path: &Path| fs::metadata(path).unwrap().len();
    let files: Vec<u64> = log_files(&log).map(|path| size(&path)).collect();
    assert!(files[1..].iter().all(|size| ((10 << 20)..(11 << 20)).contains(size)), "{files:?}");
    assert!((1..(11 << 20)).contains(&files[0]));
    assert_eq!(fs::read_dir(scratch.path("logs")).unwrap().count(), 5);
}
