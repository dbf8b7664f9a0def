//! What became of a container: the file `status` in its directory, and the process that writes it.
//!
//! The file only ever grows, by whole lines: `pid`, then `started` or `failed`, then `exited`. Its lock is taken before
//! the container is started and handed down to it, so it is held as long as the container lives or can still come to
//! life, and as long as it is held the pid is that of this container and no other.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::Path,
    thread,
    time::{Duration, Instant},
};

use berth_host::{Doing as _, Error, Result};
use jiff::Timestamp;
use rustix::{
    fs::{FallocateFlags, FlockOperation},
    io::Errno,
    process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open},
};
use tokio::sync::watch;

use crate::{ContainerId, TERMINATION_FILE, sys};

pub(crate) const STATUS_FILE: &str = "status";

/// Asks a shim to kill everything in its container; what it then reports is that.
pub(crate) const KILL_ALL: i32 = libc::SIGPWR;

/// Room for every line that will be written, so that a full disk does not cost the exit code.
const ROOM: u64 = 4096;
const LONGEST_MESSAGE: usize = 2048;
/// As much of a termination message as Kubernetes shows.
const LONGEST_TERMINATION_MESSAGE: u64 = 4096;
const START_FAILED: i32 = 128;
/// The exit code of what was killed.
pub(crate) const KILLED: i32 = 128 + libc::SIGKILL;
/// A container that was being started when its starter died writes its pid within microseconds.
const PID_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);

/// What the first process of a container has written about it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// Its process 1, as the host counts.
    pub(crate) pid: Option<i32>,
    /// When its command was running.
    pub(crate) started: Option<Timestamp>,
    /// How it ended, without its termination message.
    pub(crate) exit: Option<Exit>,
}

/// Whether a container runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The command of the container runs.
    Running {
        /// When the command was started.
        started: Timestamp,
    },
    /// It has ended, and nothing of it is left but its directory and its log.
    Exited(Exit),
}

/// How a container ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// The exit code; 128 and the signal when one ended it.
    pub code: i32,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The reason in one word, as the container status of a pod has it.
    pub reason: Reason,
    /// What the container left as its termination message, or why it did not start.
    pub message: String,
    /// When its command was started, if it was.
    pub started: Option<Timestamp>,
    /// When the command ended, or was found to have ended.
    pub finished: Timestamp,
}

/// How a container ended, in Kubernetes' words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// With exit code 0.
    Completed,
    /// With another exit code, or by a signal.
    Error,
    /// With another exit code, after it or a process of it was killed for want of memory.
    OutOfMemory,
    /// Before its command ran.
    StartError,
    /// It ended without being able to record how.
    ContainerStatusUnknown,
}

impl Reason {
    /// The word as Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "Completed",
            Self::Error => "Error",
            Self::OutOfMemory => "OOMKilled",
            Self::StartError => "StartError",
            Self::ContainerStatusUnknown => "ContainerStatusUnknown",
        }
    }
}

impl Exit {
    /// An end of which nothing is known but what is in the message.
    pub(crate) fn unknown(message: String) -> Self {
        let reason = Reason::ContainerStatusUnknown;
        Self { code: KILLED, signal: None, reason, message, started: None, finished: Timestamp::now() }
    }

    /// The end of a container whose `state` is given if there is such a container.
    pub(crate) async fn awaited(id: &ContainerId, state: Option<watch::Receiver<Option<State>>>) -> Self {
        let Some(mut state) = state else {
            return Self::unknown(format!("there is no container {id}"));
        };
        match state.wait_for(|state| matches!(state, Some(State::Exited(_)))).await.as_deref() {
            Ok(Some(State::Exited(exit))) => exit.clone(),
            _ => Self::unknown(format!("container {id} was not started")),
        }
    }

    /// How the container of a directory ended, whose shim was `killed` by us or not.
    pub(crate) fn read(directory: &Path, killed: bool) -> Self {
        let status = read_status(directory).unwrap_or_default();
        match status.exit {
            Some(exit) if exit.reason == Reason::StartError => exit,
            Some(exit) => Self { message: termination_message(directory), ..exit },
            None if killed => Self {
                code: KILLED,
                signal: Some(libc::SIGKILL),
                reason: Reason::Error,
                message: termination_message(directory),
                started: status.started,
                finished: Timestamp::now(),
            },
            None => {
                let why = "The container ended without being able to record its exit code";
                Self { started: status.started, ..Self::unknown(why.to_owned()) }
            }
        }
    }
}

/// The end of what the container wrote there.
pub(crate) fn termination_message(directory: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(directory.join(TERMINATION_FILE))?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LONGEST_TERMINATION_MESSAGE)))?;
        let mut message = Vec::new();
        file.take(LONGEST_TERMINATION_MESSAGE).read_to_end(&mut message)?;
        Ok(message)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// A container as read from its directory.
#[derive(Debug)]
pub enum Found {
    /// Process 1 of the container is alive.
    Running(Shim),
    /// It has run; its status file says how it ended, if that was recorded.
    Ended,
    /// Whoever wanted to start it died before doing so.
    NeverStarted,
}

/// Process 1 of a container.
#[derive(Debug)]
pub struct Shim {
    pid: Pid,
    pidfd: OwnedFd,
}

impl Shim {
    fn open(pid: i32) -> rustix::io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
        Ok(Self { pid, pidfd: pidfd_open(pid, PidfdFlags::empty())? })
    }

    /// The shim of a container that this process has launched and not reaped yet.
    pub(crate) fn launched(directory: &Path) -> Result<Self> {
        let pid = read_status(directory)?.pid.ok_or_else(|| {
            Error::new("start a container", io::Error::other("its launcher died or could not clone itself"))
        })?;
        Self::open(pid).doing("watch the container in", directory)
    }

    /// Its pid on the host.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Whether it is in the user namespace of this process. One in another is left of a predecessor without root whose
    /// namespaces are lost.
    pub(crate) fn is_reachable(&self) -> bool {
        let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/user"));
        match (namespace(&self.pid().to_string()), namespace("self")) {
            (Ok(theirs), Ok(ours)) => theirs == ours,
            (Err(error), Ok(_)) => error.kind() != io::ErrorKind::PermissionDenied,
            _ => true,
        }
    }

    /// Sends a signal to the container's command.
    pub(crate) fn signal(&self, signal: i32) -> Result<()> {
        self.send(signal)
    }

    /// Kills everything in the container, which then reports that.
    pub(crate) fn kill_all(&self) -> Result<()> {
        self.send(KILL_ALL)
    }

    /// Kills the shim itself, and with it the container; how it ended is then lost.
    pub fn kill(&self) -> Result<()> {
        self.send(libc::SIGKILL)
    }

    /// Takes away the zombie that an ended child of this process is; one that was adopted has another parent.
    pub fn reap(&self) {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let _ = rustix::process::waitid(WaitId::PidFd(self.pidfd.as_fd()), options);
    }

    fn send(&self, signal: i32) -> Result<()> {
        match sys::send_signal(self.pidfd.as_fd(), signal) {
            Err(error) if !gone(&error) => {
                Err(Error::new(format!("send signal {signal} to container process {}", self.pid()), error))
            }
            _ => Ok(()),
        }
    }
}

impl AsFd for Shim {
    /// Readable when the shim has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl AsRawFd for Shim {
    fn as_raw_fd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }
}

fn gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// Whether the container of a directory lives, and its process 1 if so.
pub fn find(directory: &Path) -> Result<Found> {
    let path = directory.join(STATUS_FILE);
    let file = match OpenOptions::new().read(true).write(true).open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::NeverStarted),
        Err(error) => return Err(error).doing("open", &path),
    };
    let deadline = Instant::now() + PID_TIMEOUT;
    loop {
        if is_free(&file).doing("try the lock of", &path)? {
            let status = read_status(directory)?;
            let lived = status.pid.is_some() || status.exit.is_some();
            return Ok(if lived { Found::Ended } else { Found::NeverStarted });
        }
        if let Some(pid) = read_status(directory)?.pid {
            match Shim::open(pid) {
                // Still locked now means that the pid was the container's when it was opened.
                Ok(shim) if !is_free(&file).doing("try the lock of", &path)? => {
                    return Ok(Found::Running(shim));
                }
                Ok(_) | Err(Errno::SRCH) => {}
                Err(errno) => return Err(errno).doing("watch the container in", directory),
            }
        }
        if Instant::now() > deadline {
            return Err(Errno::TIMEDOUT).doing("find the process of the container in", directory);
        }
        thread::sleep(PAUSE);
    }
}

fn is_free(file: &File) -> rustix::io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => rustix::fs::flock(file, FlockOperation::Unlock).map(|()| true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// What was written about the container of a directory so far.
pub(crate) fn read_status(directory: &Path) -> Result<Status> {
    let path = directory.join(STATUS_FILE);
    Ok(parse(&std::fs::read_to_string(&path).doing("read", &path)?))
}

/// Makes the status of a new container, locked.
pub(crate) fn create(directory: &Path) -> Result<File> {
    let path = directory.join(STATUS_FILE);
    let file =
        OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path).doing("create", &path)?;
    match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, ROOM) {
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(errno).doing("reserve room for", &path),
    }
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).doing("lock", &path)?;
    Ok(file)
}

/// The container's side of its status file.
pub(crate) struct Record(File);

impl Record {
    pub(crate) fn new(file: OwnedFd) -> Self {
        Self(file.into())
    }

    pub(crate) fn pid(&mut self, pid: Pid) {
        self.append(&format!("pid {}\n", pid.as_raw_nonzero()));
    }

    pub(crate) fn started(&mut self) {
        self.append(&format!("started {}\n", sys::now()));
    }

    pub(crate) fn exited(&mut self, code: i32, signal: Option<i32>, out_of_memory: bool) {
        let (signal, memory) = (signal.unwrap_or(0), u8::from(out_of_memory));
        self.append(&format!("exited {} {code} {signal} {memory}\n", sys::now()));
    }

    pub(crate) fn failed(&mut self, message: &str) {
        let mut message = message.replace(['\n', '\r'], " ");
        message.truncate(message.floor_char_boundary(LONGEST_MESSAGE));
        self.append(&format!("failed {} {message}\n", sys::now()));
    }

    // A line that cannot be written is missing, which a reader understands; there is nobody to report it to.
    fn append(&mut self, line: &str) {
        let _ = self.0.write_all(line.as_bytes());
    }
}

fn parse(text: &str) -> Status {
    let mut status = Status::default();
    // What has no newline was cut off.
    for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
        let (key, rest) = line.split_once(' ').unwrap_or((line, ""));
        match key {
            "pid" => status.pid = rest.parse().ok(),
            "started" => status.started = time(rest),
            "exited" => status.exit = exited(rest),
            "failed" => status.exit = failed(rest),
            _ => {}
        }
    }
    if let Some(exit) = &mut status.exit {
        exit.started = status.started;
    }
    status
}

fn exited(fields: &str) -> Option<Exit> {
    let mut fields = fields.split(' ');
    let finished = time(fields.next()?)?;
    let code = fields.next()?.parse().ok()?;
    let signal = fields.next()?.parse().ok().filter(|signal| *signal != 0);
    // Not written by earlier versions.
    let out_of_memory = fields.next() == Some("1");
    let reason = match (code, out_of_memory) {
        (0, _) => Reason::Completed,
        (_, true) => Reason::OutOfMemory,
        (_, false) => Reason::Error,
    };
    Some(Exit { code, signal, reason, message: String::new(), started: None, finished })
}

fn failed(fields: &str) -> Option<Exit> {
    let (at, message) = fields.split_once(' ')?;
    let (reason, message, finished) = (Reason::StartError, message.to_owned(), time(at)?);
    Some(Exit { code: START_FAILED, signal: None, reason, message, started: None, finished })
}

fn time(nanoseconds: &str) -> Option<Timestamp> {
    Timestamp::from_nanosecond(nanoseconds.parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_line_by_line_and_a_cut_line_is_not_there() {
        let at = |nanoseconds| Timestamp::from_nanosecond(nanoseconds).unwrap();
        let exit = |code, signal, reason, message: &str| {
            Some(Exit {
                code,
                signal,
                reason,
                message: message.into(),
                started: Some(at(7)),
                finished: at(9),
            })
        };
        assert_eq!(parse(""), Status::default());
        assert_eq!(parse("pid 4"), Status::default());
        let status = parse("pid 41\nstarted 7\nexited 9 137 9\n");
        let killed = exit(137, Some(9), Reason::Error, "");
        assert_eq!(status, Status { pid: Some(41), started: Some(at(7)), exit: killed });
        let status = parse("started 7\npid 41\nexited 9 3 0\n");
        assert_eq!(status.exit, exit(3, None, Reason::Error, ""));
        assert_eq!(parse("started 7\nexited 9 0 0\n").exit, exit(0, None, Reason::Completed, ""));
        assert_eq!(parse("started 7\nexited 9 0 0 1\n").exit, exit(0, None, Reason::Completed, ""));
        assert_eq!(parse("started 7\nexited 9 3 0 0\n").exit, exit(3, None, Reason::Error, ""));
        let out_of_memory = exit(137, Some(9), Reason::OutOfMemory, "");
        assert_eq!(parse("started 7\nexited 9 137 9 1\n").exit, out_of_memory);
        let status = parse("pid 41\nfailed 9 no such file: a b\nexited 1");
        let failed = exit(128, None, Reason::StartError, "no such file: a b");
        assert_eq!(status.exit, failed.map(|exit| Exit { started: None, ..exit }));
    }

    #[test]
    fn a_lock_decides_who_lives() {
        let place = tempfile::tempdir().unwrap();
        assert!(matches!(find(place.path()).unwrap(), Found::NeverStarted));
        let file = create(place.path()).unwrap();
        let mut record = Record::new(file.into());
        let me = rustix::process::getpid();
        record.pid(me);
        let Found::Running(shim) = find(place.path()).unwrap() else { panic!("it is locked, so it lives") };
        assert_eq!(shim.pid(), me.as_raw_nonzero().get());
        record.failed("two\nlines");
        drop(record);
        // A child of another test may have a copy of the file, and so the lock, until it runs its program.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !matches!(find(place.path()).unwrap(), Found::Ended) {
            assert!(Instant::now() < deadline, "the pid lives, but is another's");
            thread::sleep(PAUSE);
        }
        let exit = read_status(place.path()).unwrap().exit;
        assert!(
            matches!(exit, Some(Exit { reason: Reason::StartError, message, .. }) if message == "two lines")
        );
    }
}
