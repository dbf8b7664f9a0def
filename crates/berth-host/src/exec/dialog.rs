//! A program of somebody else that is asked something on its standard input and answers on its standard output.

use std::{
    ffi::OsStr,
    fs::File,
    io::{ErrorKind, Write as _},
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    fs::OFlags,
    pipe::{PipeFlags, pipe_with},
};

use super::{Group, STDERR_KEPT, Stream, spawn::spawn, wait};
use crate::error::{Doing as _, Result};

/// What a program printed, and how it ended if it did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// The code that the program exited with, or else the signal that it died of; `None` while it runs.
    pub status: Option<std::result::Result<i32, i32>>,
    /// The beginning of what it wrote to its standard output; of a program that runs, one line without its end.
    pub output: Vec<u8>,
    /// Whether it wrote more than `output` holds.
    pub truncated: bool,
    /// The last 4 KiB it wrote to its standard error.
    pub errors: Vec<u8>,
}

/// A program that runs, with its standard input and output. Dropped, it is killed with all its process group.
///
/// It has the environment of this process and dies with the thread that started it.
#[derive(Debug)]
pub struct Dialog {
    program: PathBuf,
    group: Group,
    input: Option<File>,
    output: Stream,
    errors: Stream,
}

impl Dialog {
    /// Starts a program, with further variables in its environment.
    pub fn start<A: AsRef<OsStr>>(
        program: &Path,
        args: impl IntoIterator<Item = A>,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        let environment: Vec<_> = environment.into_iter().collect();
        Self::over(program, args, &environment).doing("run", program)
    }

    fn over<A: AsRef<OsStr>>(
        program: &Path,
        args: impl IntoIterator<Item = A>,
        environment: &[(String, String)],
    ) -> std::io::Result<Self> {
        let [(read_input, input), (output, written_output), (errors, written_errors)] =
            [pipe_with(PipeFlags::CLOEXEC)?, pipe_with(PipeFlags::CLOEXEC)?, pipe_with(PipeFlags::CLOEXEC)?];
        let streams = [read_input, written_output, written_errors];
        let group = Group(spawn(program.as_os_str(), args, environment, streams)?);
        rustix::fs::fcntl_setfl(&input, OFlags::NONBLOCK)?;
        let (output, errors) = (Stream::new(output, usize::MAX)?, Stream::new(errors, STDERR_KEPT)?);
        Ok(Self { program: program.to_owned(), group, input: Some(input.into()), output, errors })
    }

    /// Writes all of its input, ends it, and waits for the program's end.
    ///
    /// Up to `limit` bytes of its output are kept; the rest is read and dropped. What the program leaves running when it
    /// exits stays, and is not waited for. At the deadline the program is killed with all its process group: an error with
    /// errno `ETIMEDOUT`.
    pub fn finish(mut self, input: &[u8], deadline: Duration, limit: usize) -> Result<Said> {
        let program = self.program.clone();
        let deadline = Instant::now() + deadline;
        let (mut rest, mut truncated) = (input, false);
        loop {
            let exited = self.step(&mut rest, deadline).doing("run", &program)?;
            if rest.is_empty() {
                self.input = None;
            }
            truncated |= self.output.kept.len() > limit;
            self.output.kept.truncate(limit);
            if exited {
                break;
            }
        }
        let status = self.status().doing("wait for", &program)?;
        let (output, errors) = (std::mem::take(&mut self.output.kept), std::mem::take(&mut self.errors.kept));
        Ok(Said { status: Some(status), output, truncated, errors })
    }

    /// Writes one line, and reads one.
    ///
    /// What the program printed since the last time, without being asked, counts as the beginning of its answer. If the
    /// program ends instead of answering, its status says so. At the deadline it is killed with all its process group: an
    /// error with errno `ETIMEDOUT`.
    pub fn exchange(&mut self, line: &[u8], deadline: Duration, limit: usize) -> Result<Said> {
        let program = self.program.clone();
        let deadline = Instant::now() + deadline;
        let line = [line, b"\n"].concat();
        let mut rest = &line[..];
        loop {
            let exited = match self.step(&mut rest, deadline) {
                Err(error) => {
                    self.group.kill();
                    return Err(error).doing("run", &program);
                }
                Ok(exited) => exited,
            };
            let kept = &mut self.output.kept;
            let end = kept.iter().position(|byte| *byte == b'\n');
            let truncated = end.unwrap_or(kept.len()) > limit;
            if exited || end.is_some() || truncated {
                let mut output: Vec<u8> = kept.drain(..end.map_or(kept.len(), |end| end + 1)).collect();
                output.truncate(end.unwrap_or(output.len()).min(limit));
                let status = if exited { Some(self.status().doing("wait for", &program)?) } else { None };
                let errors = std::mem::take(&mut self.errors.kept);
                return Ok(Said { status, output, truncated, errors });
            }
        }
    }

    /// Waits until something happens; writes of `rest` and reads what it can. Whether the program has exited.
    fn step(&mut self, rest: &mut &[u8], deadline: Instant) -> std::io::Result<bool> {
        let mut fds = vec![PollFd::new(&self.group.0.exit, PollFlags::IN)];
        let writing = self.input.as_ref().filter(|_| !rest.is_empty());
        fds.extend(writing.map(|input| PollFd::new(input, PollFlags::OUT)));
        let streams = [&self.output, &self.errors].into_iter();
        fds.extend(streams.filter_map(|stream| Some(PollFd::new(stream.pipe.as_ref()?, PollFlags::IN))));
        wait(&mut fds, deadline)?;
        let exited = !fds[0].revents().is_empty();
        if let Some(input) = self.input.as_mut().filter(|_| !rest.is_empty()) {
            match input.write(rest) {
                Ok(written) => *rest = &rest[written..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                // A program need not read its input to answer.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => *rest = &[],
                Err(error) => return Err(error),
            }
        }
        self.output.read()?;
        self.errors.read()?;
        Ok(exited)
    }

    fn status(&mut self) -> std::io::Result<std::result::Result<i32, i32>> {
        let status = self.group.0.wait()?;
        Ok(status.code().ok_or_else(|| status.signal().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn sh(script: &str) -> Dialog {
        Dialog::start(Path::new("/bin/sh"), ["-c", script], [("GREETING".to_owned(), "hello".to_owned())])
            .unwrap()
    }

    #[test]
    fn a_program_gets_its_input_and_environment_and_is_waited_for() {
        let said = sh("echo $GREETING; cat; echo why >&2; exit 3").finish(b"input", MINUTE, 100).unwrap();
        assert_eq!(said.output, b"hello\ninput");
        assert_eq!((said.status, said.truncated, &said.errors[..]), (Some(Ok(3)), false, &b"why\n"[..]));
        // Larger than what a pipe holds, to a program that answers as much, or reads nothing.
        let large = vec![b'x'; 1 << 20];
        let said = sh("cat").finish(&large, MINUTE, 1 << 19).unwrap();
        assert_eq!((said.output.len(), said.truncated), (1 << 19, true));
        assert_eq!(sh("exit 0").finish(&large, MINUTE, 10).unwrap().status, Some(Ok(0)));
        assert_eq!(sh("kill -9 $$").finish(b"", MINUTE, 10).unwrap().status, Some(Err(9)));
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let pid = directory.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", pid.display());
        let error = sh(&script).finish(b"", Duration::from_millis(500), 10).unwrap_err();
        assert_eq!(error.errno(), Some(rustix::io::Errno::TIMEDOUT.raw_os_error()));
        let pid = std::fs::read_to_string(pid).unwrap();
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        // It was sent the signal, and dies when it is its turn.
        let begun = std::time::Instant::now();
        while !(stat().is_empty() || stat().contains(") Z ")) {
            assert!(begun.elapsed() < MINUTE, "{}", stat());
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_program_that_stays_answers_line_by_line_until_it_ends() {
        let mut dialog = sh("while read -r line; do [ \"$line\" = end ] && exit 4; echo \"<$line>\"; done");
        for word in ["one", "two"] {
            let said = dialog.exchange(word.as_bytes(), MINUTE, 100).unwrap();
            assert_eq!((said.status, said.output), (None, format!("<{word}>").into_bytes()));
        }
        let said = dialog.exchange(b"end", MINUTE, 100).unwrap();
        assert_eq!((said.status, said.output.len()), (Some(Ok(4)), 0));
        let mut endless = sh("cat /dev/zero");
        assert!(endless.exchange(b"x", MINUTE, 100).unwrap().truncated);
        let mut silent = sh("exec sleep 1000");
        let error = silent.exchange(b"x", Duration::from_millis(200), 100).unwrap_err();
        assert_eq!(error.errno(), Some(rustix::io::Errno::TIMEDOUT.raw_os_error()));
    }
}
