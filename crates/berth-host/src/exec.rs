//! Child processes: the few tools that do what the kernel has no call for.
//!
//! A child runs in a process group of its own, which ends with the child: at the deadline, when the child exits,
//! or when this process dies. Nothing it started stays behind in that group.
#![expect(unsafe_code, reason = "a child asks to die with its parent between fork and exec")]

mod dialog;
mod spawn;

pub use self::dialog::{Dialog, Said};

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read as _},
    os::{
        fd::OwnedFd,
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::OFlags,
    io::Errno,
    pipe::{PipeFlags, pipe_with},
    process::{Signal, getppid, kill_process_group, set_parent_process_death_signal},
};

use self::spawn::Process;
use crate::error::{Doing as _, Error, Result};

const STDOUT_KEPT: usize = 64 << 10;
const STDERR_KEPT: usize = 4 << 10;
const PIPE_CAPACITY: usize = 64 << 10;
const KILL_GRACE: Duration = Duration::from_secs(5);

/// What a child left when it exited by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The code that the program exited with.
    pub code: i32,
    /// The last 64 KiB it wrote to its standard output.
    pub stdout: Vec<u8>,
    /// The last 4 KiB it wrote to its standard error.
    pub stderr: Vec<u8>,
}

/// How a program of somebody else ended by itself, and what it printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The code that the program exited with, or else the signal that it died of.
    pub status: std::result::Result<i32, i32>,
    /// The beginning of what it wrote to its standard output and its standard error, in the order of writing.
    pub output: Vec<u8>,
    /// Whether it wrote more than `output` holds.
    pub truncated: bool,
}

/// Runs a program of somebody else to its end, with the environment of this process and an empty standard input.
///
/// Up to `limit` bytes of its output are kept; the rest is read and dropped. What the program leaves running when it
/// exits stays, as a daemon that serves a mount should, and is not waited for even if it holds the output open. At the
/// deadline the program is killed with all its process group: an error with errno `ETIMEDOUT`.
pub fn run_foreign<A: AsRef<OsStr>>(
    program: &Path,
    args: impl IntoIterator<Item = A>,
    deadline: Duration,
    limit: usize,
) -> Result<Ended> {
    let deadline = Instant::now() + deadline;
    let (mut group, output) = spawn_foreign(program, args).doing("run", program)?;
    let mut stream = Stream::new(output, usize::MAX).doing("run", program)?;
    let mut truncated = false;
    loop {
        let mut fds = vec![PollFd::new(&group.0.exit, PollFlags::IN)];
        fds.extend(stream.pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        wait(&mut fds, deadline).doing("run", program)?;
        let exited = !fds[0].revents().is_empty();
        stream.read().doing("run", program)?;
        truncated |= stream.kept.len() > limit;
        stream.kept.truncate(limit);
        if exited {
            break;
        }
    }
    let status = group.0.wait().doing("wait for", program)?;
    let status = status.code().ok_or_else(|| status.signal().unwrap_or_default());
    Ok(Ended { status, output: stream.kept, truncated })
}

/// Starts a program whose standard output and standard error are one pipe.
fn spawn_foreign<A: AsRef<OsStr>>(
    program: &Path,
    args: impl IntoIterator<Item = A>,
) -> io::Result<(Group, OwnedFd)> {
    let (output, input) = pipe_with(PipeFlags::CLOEXEC)?;
    let streams = [empty_input()?, input.try_clone()?, input];
    Ok((Group(spawn::spawn(program.as_os_str(), args, &[], streams)?), output))
}

fn empty_input() -> io::Result<OwnedFd> {
    File::open("/dev/null").map(OwnedFd::from)
}

/// Runs `program` to its end; any exit code but 0 is an error that carries the end of its standard error.
///
/// Its standard input is empty and its language English. At the deadline it is killed with all its process group:
/// an error with errno `ETIMEDOUT`. A program that is not installed is errno `ENOENT`.
pub fn run<A: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = A>,
    deadline: Duration,
) -> Result<Output> {
    run_accepting(program, args, deadline, &[0])
}

/// Starts `program` in a session of its own, with its output appended to the file `log`; it outlives this process.
pub fn detach<A: AsRef<OsStr>>(
    program: &Path,
    args: impl IntoIterator<Item = A>,
    log: &Path,
) -> Result<Child> {
    let output = File::options().create(true).append(true).open(log).doing("open the log", log)?;
    let errors = output.try_clone().doing("open the log", log)?;
    #[expect(
        clippy::disallowed_methods,
        reason = "this one is meant to outlive its parent, so it has no deadline"
    )]
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(output).stderr(errors);
    // SAFETY: setsid is async-signal-safe and touches nothing of this process.
    unsafe {
        command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into));
    }
    command.spawn().doing("start", program)
}

/// As `run`, for programs that also succeed with other exit codes than 0.
pub fn run_accepting<A: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = A>,
    deadline: Duration,
    accepted: &[i32],
) -> Result<Output> {
    let deadline = Instant::now() + deadline;
    let (mut group, pipes) = spawn_tool(program, args).doing("run", program)?;
    let [stdout, stderr] = collect(&group, pipes, deadline).doing("run", program)?;
    let status = group.end().doing("wait for", program)?;
    match status.code() {
        Some(code) if accepted.contains(&code) => Ok(Output { code, stdout, stderr }),
        _ => Err(Error::new(format!("run {program}"), failure(status, &stdout, &stderr))),
    }
}

fn failure(status: ExitStatus, stdout: &[u8], stderr: &[u8]) -> io::Error {
    let ended = match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, signal) => format!("killed by signal {}", signal.unwrap_or_default()),
    };
    // Some tools, e2fsck among them, complain on their standard output.
    let complaint = if stderr.trim_ascii().is_empty() { stdout } else { stderr };
    let said = String::from_utf8_lossy(&complaint[complaint.len().saturating_sub(STDERR_KEPT)..]);
    io::Error::other(if said.trim().is_empty() { ended } else { format!("{ended}: {}", said.trim()) })
}

/// Starts a program with a pipe for each of its outputs. Its language is English.
fn spawn_tool<A: AsRef<OsStr>>(
    program: &str,
    args: impl IntoIterator<Item = A>,
) -> io::Result<(Group, [OwnedFd; 2])> {
    let (stdout, output) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, errors) = pipe_with(PipeFlags::CLOEXEC)?;
    let streams = [empty_input()?, output, errors];
    let process = spawn::spawn(program.as_ref(), args, &[("LC_ALL".to_owned(), "C".to_owned())], streams)?;
    Ok((Group(process), [stdout, stderr]))
}

/// Has the kernel kill the child when the thread that starts it ends, which waits for it in this module.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let die_with_parent = move || {
        // The signal follows the thread that forked; it is blocked in `run` for as long as the child lives.
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before that call: the child then has another.
        if getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
    };
    // SAFETY: between fork and exec only prctl(2) and getppid(2) are called, and nothing is allocated.
    unsafe { command.pre_exec(die_with_parent) };
}

/// Reads what the child writes until it exits or the deadline passes.
fn collect(group: &Group, pipes: [OwnedFd; 2], deadline: Instant) -> io::Result<[Vec<u8>; 2]> {
    let [stdout, stderr] = pipes;
    let mut streams = [Stream::new(stdout, STDOUT_KEPT)?, Stream::new(stderr, STDERR_KEPT)?];
    loop {
        let mut fds = vec![PollFd::new(&group.0.exit, PollFlags::IN)];
        fds.extend(
            streams.iter().filter_map(|stream| Some(PollFd::new(stream.pipe.as_ref()?, PollFlags::IN))),
        );
        wait(&mut fds, deadline)?;
        let exited = !fds[0].revents().is_empty();
        for stream in &mut streams {
            stream.read()?;
        }
        if exited {
            return Ok(streams.map(|stream| stream.kept));
        }
    }
}

fn wait(fds: &mut [PollFd<'_>], deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Errno::TIMEDOUT.into());
    }
    match poll(fds, Timespec::try_from(left).ok().as_ref()) {
        Ok(0) => Err(Errno::TIMEDOUT.into()),
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A pipe, and the end of what came out of it.
#[derive(Debug)]
struct Stream {
    pipe: Option<File>,
    kept: Vec<u8>,
    limit: usize,
}

impl Stream {
    fn new(pipe: OwnedFd, limit: usize) -> io::Result<Self> {
        rustix::fs::fcntl_setfl(&pipe, OFlags::NONBLOCK)?;
        Ok(Self { pipe: Some(pipe.into()), kept: Vec::new(), limit })
    }

    /// Reads once what is there. As much as a pipe holds, so that nothing is left when the child has exited.
    fn read(&mut self) -> io::Result<()> {
        let Some(pipe) = &mut self.pipe else { return Ok(()) };
        let mut buffer = vec![0; PIPE_CAPACITY];
        match pipe.read(&mut buffer) {
            Ok(0) => self.pipe = None,
            Ok(length) => {
                self.kept.extend_from_slice(&buffer[..length]);
                self.kept.drain(..self.kept.len().saturating_sub(self.limit));
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// A child and all of its process group, ended when dropped.
#[derive(Debug)]
struct Group(Process);

impl Group {
    /// Ends what the exited child left running, and says how the child itself ended.
    fn end(&mut self) -> io::Result<ExitStatus> {
        self.kill();
        self.0.wait()
    }

    /// The child must not have been waited for yet: until then it keeps the number of the group from being reused.
    fn kill(&self) {
        let _ = kill_process_group(self.0.pid, Signal::KILL);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            self.kill();
            // A child stuck in the kernel on a dead disk outlives any signal, and must not keep us as well.
            let exit = &mut [PollFd::new(&self.0.exit, PollFlags::IN)];
            let _ = wait(exit, Instant::now() + KILL_GRACE);
            let _ = self.0.try_wait();
        }
    }
}

#[cfg(test)]
mod tests;
