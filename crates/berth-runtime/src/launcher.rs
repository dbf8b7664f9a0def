//! The process that every container is a clone of, and how to talk to it.
//!
//! Cloning a small process with one thread is safe and fast, where a fork of the caller, with its threads and memory,
//! is neither; and all containers share the memory of the program. The launcher lives in a mount namespace with nothing
//! but the host's root, because a new mount namespace is a copy of the old one, and a node has thousands of mounts.

use std::{
    ffi::OsString,
    fs::OpenOptions,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt as _, ffi::OsStringExt as _, fs::OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use parking_lot::Mutex;
use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    mount::OpenTreeFlags,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
    pipe::{PipeFlags, pipe_with},
};

use crate::{
    ContainerSpec, SPEC_FILE, TERMINATION_FILE, joiner, root,
    shim::{self, Job},
    status::{self, Record},
    sys::{self, Kind},
};
use berth_host::{Doing as _, Error, Result};

/// The argument that makes a program the launcher.
pub(crate) const ARGUMENT: &str = "__containers";

const LAUNCH: u8 = b'L';
const JOIN: u8 = b'J';
const TERMINAL: u8 = 1;
const KEEP_STDIN: u8 = 2;
pub(crate) const MOST_FDS: usize = 6;
const LONGEST_MESSAGE: usize = 4096;

/// Starts containers, and processes in running ones.
#[derive(Debug)]
pub(crate) struct Launcher {
    program: PathBuf,
    process: Mutex<Process>,
}

impl Launcher {
    /// Starts a launcher from `program`, whose `main` intercepts [`crate::LAUNCHER`].
    pub(crate) fn start(program: &Path) -> Result<Self> {
        Ok(Self { program: program.to_owned(), process: Mutex::new(Process::start(program)?) })
    }

    /// Starts the container of an existing directory in which nothing was started before.
    ///
    /// What is returned is at its end when the command runs, or cannot: [`crate::status::read_status`] tells which.
    pub(crate) fn launch(&self, directory: &Path, spec: &ContainerSpec) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let state = rustix::fs::open(directory, flags, Mode::empty()).doing("open", directory)?;
        write_files(directory, spec)?;
        let (log_directory, log_name) = match (spec.log.parent(), spec.log.file_name()) {
            // The shim keeps it, and root in the container finds it in /proc: no `..` may lead from there to the host.
            (Some(parent), Some(name)) => (
                root::clone_tree(CWD, parent, OpenTreeFlags::empty())
                    .doing("open the log directory", parent)?,
                name,
            ),
            _ => return Err(Errno::INVAL).doing("open the log", &spec.log),
        };
        let status = status::create(directory)?;
        let (started, theirs) = pipe_with(PipeFlags::CLOEXEC).doing("start the container in", directory)?;
        let options = if spec.tty { TERMINAL } else { 0 } | if spec.stdin { KEEP_STDIN } else { 0 };
        let mut message = vec![LAUNCH, options];
        message.extend_from_slice(log_name.as_bytes());
        let fds = [status.as_fd(), theirs.as_fd(), state.as_fd(), log_directory.as_fd()];
        self.send(&message, &fds).doing("start the container in", directory)?;
        Ok(started)
    }

    /// Has a joiner talk over `control`, with a container and standard streams to use.
    pub(crate) fn join(&self, fds: &[BorrowedFd<'_>; MOST_FDS]) -> io::Result<()> {
        self.send(&[JOIN], fds)
    }

    fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut process = self.process.lock();
        match send(process.socket(), message, fds) {
            // Somebody has killed it; containers do not depend on it, so another one does as well.
            Err(Errno::PIPE | Errno::CONNRESET) => {
                *process = Process::start(&self.program).map_err(io::Error::other)?;
                Ok(send(process.socket(), message, fds)?)
            }
            sent => Ok(sent?),
        }
    }
}

fn write_files(directory: &Path, spec: &ContainerSpec) -> Result<()> {
    let path = directory.join(SPEC_FILE);
    let json = serde_json::to_vec(spec).map_err(io::Error::from).doing("write", &path)?;
    let create = |path: &Path, mode: u32| {
        OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)
    };
    create(&path, 0o600).and_then(|mut file| io::Write::write_all(&mut file, &json)).doing("write", &path)?;
    let path = directory.join(TERMINATION_FILE);
    let file = create(&path, 0o666).doing("create", &path)?;
    // Whoever the container runs as may write it, whatever our umask.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(0o666)).doing("set the mode of", &path)
}

/// A launcher that runs; it ends when this is dropped.
#[derive(Debug)]
struct Process {
    socket: Option<OwnedFd>,
    child: Child,
}

impl Process {
    fn start(program: &Path) -> Result<Self> {
        let start = "start the launcher of containers from";
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .doing(start, program)?;
        #[expect(clippy::disallowed_methods, reason = "the launcher ends by itself when we close its socket")]
        let child = Command::new(program)
            .arg(ARGUMENT)
            .env_clear()
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .doing(start, program)?;
        let process = Self { socket: Some(ours), child };
        let mut greeting = [0; LONGEST_MESSAGE];
        let (length, _) = receive(process.socket(), &mut greeting).doing(start, program)?;
        match &greeting[..length] {
            b"ready" => Ok(process),
            [] => Err(io::Error::other("it ended at once")).doing(start, program),
            why => Err(io::Error::other(String::from_utf8_lossy(why).into_owned())).doing(start, program),
        }
    }

    fn socket(&self) -> &OwnedFd {
        self.socket.as_ref().expect("the socket is there until the process is dropped")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.socket = None;
        let _ = self.child.wait();
    }
}

/// Is the launcher until its caller is gone.
pub(crate) fn serve() -> ! {
    sys::close_inherited();
    sys::reset_signals();
    sys::ignore_children();
    let _ = rustix::process::setsid();
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let socket = rustix::stdio::stdin();
    let host = match open_host_namespace().and_then(|host| root::leave_host_mounts().map(|()| host)) {
        Ok(host) => host,
        Err(error) => {
            let _ = send(socket, error.sentence().as_bytes(), &[]);
            sys::exit(1);
        }
    };
    let _ = send(socket, b"ready", &[]);
    loop {
        let mut message = [0; LONGEST_MESSAGE];
        match receive(socket, &mut message) {
            Ok((0, _)) => sys::exit(0),
            Ok((length, fds)) => answer(&message[..length], fds, &host),
            Err(Errno::INTR) => {}
            Err(_) => sys::exit(1),
        }
    }
}

fn open_host_namespace() -> Result<OwnedFd> {
    let path = "/proc/self/ns/mnt";
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).doing("open", path)
}

fn answer(message: &[u8], fds: Vec<OwnedFd>, host: &OwnedFd) {
    match message {
        [LAUNCH, options, log_name @ ..] => {
            let Ok([status, started, state, log_directory]) = <[OwnedFd; 4]>::try_from(fds) else { return };
            let log_name = OsString::from_vec(log_name.to_vec());
            let mut record = Record::new(status);
            match sys::clone(Kind::Container) {
                Ok(Some(pid)) => record.pid(pid),
                Ok(None) => {
                    let Some(host) = leave_launcher(host) else { sys::exit(1) };
                    let (terminal, keep_stdin) = (options & TERMINAL != 0, options & KEEP_STDIN != 0);
                    shim::run(Job {
                        record,
                        started,
                        state,
                        log_directory,
                        log_name,
                        host,
                        terminal,
                        keep_stdin,
                    });
                }
                Err(error) => record.failed(&Error::new("make the container's namespaces", error).sentence()),
            }
        }
        [JOIN, ..] => {
            let Ok(fds) = <[OwnedFd; MOST_FDS]>::try_from(fds) else { return };
            // Without a clone there is no answer, and the caller sees the control socket closed.
            if let Ok(None) = sys::clone(Kind::Child) {
                let _ = leave_launcher(host);
                joiner::run(fds);
            }
        }
        _ => {}
    }
}

/// In a clone: lets go of the socket, by which the caller and the launcher learn of each other's end.
fn leave_launcher(host: &OwnedFd) -> Option<OwnedFd> {
    rustix::stdio::dup2_stdin(rustix::stdio::stdout()).ok()?;
    host.try_clone().ok()
}

/// Sends one message with descriptors.
pub(crate) fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    rustix::io::retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives one message with its descriptors; length 0 is the end.
pub(crate) fn receive(socket: impl AsFd, message: &mut [u8]) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(&socket, &mut [IoSliceMut::new(message)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    Ok((received.bytes, fds.collect()))
}
