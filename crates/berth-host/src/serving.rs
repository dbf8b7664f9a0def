//! Processes that serve something long after their parent is gone: a filesystem in user space.
//!
//! The parent gives its words on the child's standard input and waits on its standard output for one answer: ready, or
//! why not. Then each is on its own.
#![expect(unsafe_code, reason = "a child leaves its parent's session between fork and exec")]

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::process::CommandExt as _},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::error::{Doing as _, Error, Result};

/// The answer of a child that serves.
const READY: &str = "ready";
/// No sentence about a failure is longer.
const LONGEST_ANSWER: usize = 4096;
/// Who waits for a child's end needs little.
const WAITER_STACK: usize = 64 << 10;

/// Starts `program` in a session of its own and waits until it says that it serves; it outlives this process.
///
/// A child that says something else is an error with the errno that it names; one that says nothing until the deadline
/// is killed: errno `ETIMEDOUT`.
pub fn start<A: AsRef<OsStr>>(
    program: &Path,
    args: impl IntoIterator<Item = A>,
    words: &[&OsStr],
    deadline: Duration,
) -> Result<()> {
    let mut child = spawn(program, args).doing("start", program)?;
    let answer = send_words(&mut child, words).and_then(|()| listen(&mut child, deadline));
    if !matches!(&answer, Ok(text) if text == READY) {
        let _ = child.kill();
    }
    // Somebody has to see it end one day; if we end first, that is somebody else.
    let waiting = std::thread::Builder::new().name("serving".to_owned()).stack_size(WAITER_STACK);
    waiting.spawn(move || child.wait()).doing("wait for", program)?;
    match answer.doing("start", program)?.as_str() {
        READY => Ok(()),
        said => Err(understand(said)),
    }
}

fn spawn<A: AsRef<OsStr>>(program: &Path, args: impl IntoIterator<Item = A>) -> io::Result<Child> {
    #[expect(
        clippy::disallowed_methods,
        reason = "this one is meant to outlive its parent, so it has no deadline"
    )]
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir("/");
    // SAFETY: setsid is async-signal-safe and touches nothing of this process.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into));
    }
    command.spawn()
}

/// Each word ends with a zero byte, as no path and no option can hold one.
fn send_words(child: &mut Child, words: &[&OsStr]) -> io::Result<()> {
    let mut input = child.stdin.take().expect("the child was started with a pipe for its standard input");
    let message: Vec<u8> =
        words.iter().flat_map(|word| [word.as_encoded_bytes(), &[0]]).flatten().copied().collect();
    match input.write_all(&message) {
        // It ended without listening, and has perhaps said why.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        reported => reported,
    }
}

fn listen(child: &mut Child, deadline: Duration) -> io::Result<String> {
    let deadline = Instant::now() + deadline;
    let output = child.stdout.take().expect("the child was started with a pipe for its standard output");
    let mut output = File::from(OwnedFd::from(output));
    let mut heard = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT.into());
        }
        match poll(&mut [PollFd::new(&output, PollFlags::IN)], Timespec::try_from(left).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) => continue,
            Ok(_) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut buffer = [0; LONGEST_ANSWER];
        let length = output.read(&mut buffer)?;
        heard.extend_from_slice(&buffer[..length]);
        if length == 0 || heard.ends_with(b"\n") || heard.len() >= LONGEST_ANSWER {
            return Ok(String::from_utf8_lossy(&heard).trim().to_owned());
        }
    }
}

/// An errno and a sentence, as [`answer`] writes them.
fn understand(said: &str) -> Error {
    let (number, sentence) = said.split_once(' ').unwrap_or_default();
    match number.parse() {
        Ok(errno) => Error::new(sentence, io::Error::from_raw_os_error(errno)),
        Err(_) => Error::new("start a process that serves", io::Error::other("it ended without a word")),
    }
}

/// In the child: the words that [`start`] was given.
pub fn words() -> Result<Vec<Vec<u8>>> {
    let mut input = Vec::new();
    io::stdin().read_to_end(&mut input).doing("read", "standard input")?;
    let mut words: Vec<_> = input.split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
    words.pop();
    Ok(words)
}

/// In the child: reports the outcome to the parent, and closes the pipe to it.
pub fn answer(outcome: std::result::Result<(), (i32, &str)>) {
    let text = match outcome {
        Ok(()) => READY.to_owned(),
        Err((errno, sentence)) => format!("{errno} {}", sentence.replace('\n', " ")),
    };
    let mut output = io::stdout();
    let _ = writeln!(output, "{text}").and_then(|()| output.flush());
    // The parent may go on to wait for the end of its pipe.
    if let Ok(nothing) = File::options().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(nothing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn shell(script: &str, deadline: Duration) -> Result<()> {
        start(Path::new("/bin/sh"), ["-c", script], &[OsStr::new("one"), OsStr::new("two words")], deadline)
    }

    #[test]
    fn a_child_that_is_ready_goes_on_alone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let script = format!(
            "mkfifo {0}.go; words=$(tr '\\0' ,); echo ready; read x <{0}.go; printf %s \"$words\" >{0}",
            file.display()
        );
        shell(&script, SOON).unwrap();
        std::fs::write(dir.path().join("file.go"), "x\n").unwrap();
        let deadline = Instant::now() + SOON;
        while std::fs::read_to_string(&file).unwrap_or_default() != "one,two words," {
            assert!(Instant::now() < deadline, "it does not go on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_child_that_cannot_says_why() {
        let error = shell("cat >/dev/null; echo '116 find the share'", SOON).unwrap_err();
        assert_eq!(error.errno(), Some(116));
        assert!(error.sentence().starts_with("find the share: "), "{}", error.sentence());
        assert!(shell("exit 3", SOON).unwrap_err().sentence().contains("without a word"));
    }

    #[test]
    fn a_child_that_says_nothing_is_killed() {
        let error = shell("exec sleep 600", Duration::from_millis(100)).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::TIMEDOUT.raw_os_error()));
    }
}
