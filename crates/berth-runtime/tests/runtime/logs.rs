//! What is read from logs.

use std::{fs, future, io, path::Path, pin::pin};

use berth_runtime::{LogOptions, LogStream, logs};
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

#[tokio::test]
async fn a_container_that_writes_much_keeps_one_old_file() {
    let scratch = Scratch::new();
    let runtime = scratch.open();
    let line = "x".repeat(8000);
    let spec = scratch.sh(&format!("yes {line} | head -n 3000"));
    let log = spec.log.clone();
    let (_, exited) = scratch.run(&runtime, spec).await;
    assert_eq!(exited.code, 0);
    let size = |path: &Path| fs::metadata(path).unwrap().len();
    let old = log.with_extension("log.1");
    assert!(((10 << 20)..(11 << 20)).contains(&size(&old)), "{}", size(&old));
    assert!((1..(11 << 20)).contains(&size(&log)));
    assert_eq!(fs::read_dir(scratch.path("logs")).unwrap().count(), 2);
}
