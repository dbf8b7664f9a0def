//! Joins clients with the standard streams of a container's command, besides the log (`attach`).
//!
//! A container's directory holds a socket, [`SOCKET_FILE`], on which its process 1 listens. A client sends the pipes that it
//! wants the outputs in, and gets what the command's input is written to: a pipe, or the terminal. The connection stays open
//! until either side ends. Input therefore goes straight to the command; outputs pass process 1, which also logs them.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
        socket_with,
    },
    pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
};
use tokio::{io::unix::AsyncFd, net::unix::pipe};

use crate::{
    cri::{Control, Remote},
    exec::{ExecInput, ExecOutput},
    joiner::{self, TerminalSize},
    launcher::{receive, send},
    runtime::{Error, Result, pollable},
};

/// The socket in a container's directory.
const SOCKET_FILE: &str = "attach";
/// So many clients may wait to be accepted.
const BACKLOG: i32 = 8;
/// How much output may wait for a client to read it.
const PIPE_SIZE: usize = 1 << 20;
/// How long a client may leave its output unread when that much waits. The command waits, too, and then the client is let go.
const UNREAD_TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

const WANTS_STDIN: u8 = 1;
const WANTS_STDOUT: u8 = 2;
const WANTS_STDERR: u8 = 4;
const REPLY: &[u8] = b"attached";

/// Which streams of a container are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttachCall {
    /// Whether input is written to it.
    pub stdin: bool,
    /// Whether its output is read, or that of its terminal.
    pub stdout: bool,
    /// Whether its error output is read.
    pub stderr: bool,
}

/// The standard streams of a container; it is detached when this is dropped.
#[derive(Debug)]
pub struct Attached {
    /// The input of the container, if it was asked for and the container has one.
    pub stdin: Option<ExecInput>,
    /// What the container writes from now on.
    pub stdout: Option<ExecOutput>,
    /// What it writes to its standard error, if it has no terminal.
    pub stderr: Option<ExecOutput>,
    connection: Connected,
}

/// What the connection to a container is watched by.
#[derive(Debug)]
enum Connected {
    Shim { terminal: Option<OwnedFd>, connection: AsyncFd<OwnedFd> },
    Remote(Control),
}

impl Attached {
    pub(crate) fn open(client: Client, tty: bool) -> Result<Self> {
        let failed = |error: io::Error| Error::Exec(format!("open the streams of a container: {error}"));
        let Client { connection, stdin, stdout, stderr } = client;
        let output = |fd| pipe::Receiver::from_owned_fd_unchecked(fd).map(ExecOutput::new).map_err(failed);
        let terminal = stdin.as_ref().filter(|_| tty).map(OwnedFd::try_clone).transpose().map_err(failed)?;
        let stdin = stdin.map(pipe::Sender::from_owned_fd_unchecked).transpose().map_err(failed)?;
        Ok(Self {
            stdin: stdin.map(ExecInput::new),
            stdout: stdout.map(output).transpose()?,
            stderr: stderr.map(output).transpose()?,
            connection: Connected::Shim { terminal, connection: pollable(connection).map_err(failed)? },
        })
    }

    /// The streams of a container of another runtime.
    pub(crate) fn remote(remote: Remote) -> Self {
        let Remote { stdin, stdout, stderr, control } = remote;
        Self { stdin, stdout, stderr, connection: Connected::Remote(control) }
    }

    /// Sets the new size of the terminal, if the container has one and its input was asked for.
    pub fn resize(&self, size: TerminalSize) -> Result<()> {
        match &self.connection {
            Connected::Shim { terminal: None, .. } => Ok(()),
            Connected::Shim { terminal: Some(terminal), .. } => {
                joiner::resize(terminal, size).map_err(|error| Error::Exec(error.sentence()))
            }
            Connected::Remote(control) => {
                control.resize(size);
                Ok(())
            }
        }
    }

    /// Returns when the container has ended, or has let us go because its output was not read.
    pub async fn ended(&self) {
        match &self.connection {
            Connected::Shim { connection, .. } => {
                // An error would mean that the reactor is gone, and with it everybody who waits.
                let _ = connection.readable().await;
            }
            Connected::Remote(control) => {
                let _ = control.wait().await;
            }
        }
    }
}

/// Makes the socket of a container in its directory.
pub(crate) fn listener(directory: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &address(directory)?)?;
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// The path of a socket has at most 107 bytes, and a container's directory may have a longer one.
fn address(directory: BorrowedFd<'_>) -> rustix::io::Result<SocketAddrUnix> {
    let path = format!("/proc/self/fd/{}/{SOCKET_FILE}", directory.as_raw_fd());
    SocketAddrUnix::new(std::ffi::OsStr::from_bytes(path.as_bytes()))
}

/// Our ends of a connection to a container.
#[derive(Debug)]
pub(crate) struct Client {
    connection: OwnedFd,
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

impl Client {
    /// Connects to the container of a directory, which must run.
    pub(crate) fn connect(directory: &std::path::Path, call: AttachCall) -> rustix::io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(directory, flags, Mode::empty())?;
        let connection = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        connect(&connection, &address(directory.as_fd())?)?;
        let pipe = |wanted: bool| -> rustix::io::Result<(Option<OwnedFd>, Option<OwnedFd>)> {
            if !wanted {
                return Ok((None, None));
            }
            let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
            // A smaller one does as well.
            let _ = fcntl_setpipe_size(&ours, PIPE_SIZE);
            Ok((Some(ours), Some(theirs)))
        };
        let ((stdout, their_stdout), (stderr, their_stderr)) = (pipe(call.stdout)?, pipe(call.stderr)?);
        let flag = |wanted: bool, flag: u8| if wanted { flag } else { 0 };
        let wants =
            flag(call.stdin, WANTS_STDIN) | flag(call.stdout, WANTS_STDOUT) | flag(call.stderr, WANTS_STDERR);
        let fds: Vec<BorrowedFd<'_>> =
            [&their_stdout, &their_stderr].into_iter().flatten().map(OwnedFd::as_fd).collect();
        send(&connection, &[wants], &fds)?;
        let mut reply = [0; 16];
        let (length, mut fds) = receive(&connection, &mut reply)?;
        if &reply[..length] != REPLY {
            return Err(Errno::CONNRESET);
        }
        let stdin = fds.pop();
        if let Some(stdin) = &stdin {
            rustix::fs::fcntl_setfl(stdin, OFlags::NONBLOCK)?;
        }
        Ok(Self { connection, stdin, stdout, stderr })
    }
}

/// Process 1's side: everybody who is attached.
pub(crate) struct Attachments {
    listener: Option<OwnedFd>,
    connections: Vec<Connection>,
}

struct Connection {
    socket: OwnedFd,
    /// Not there before the client has said what it wants.
    outputs: Option<[Option<OwnedFd>; 2]>,
}

impl Attachments {
    pub(crate) fn new(listener: Option<OwnedFd>) -> Self {
        Self { listener, connections: Vec::new() }
    }

    /// What to wait for.
    pub(crate) fn poll_fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let sockets = self.connections.iter().map(|connection| &connection.socket);
        self.listener.iter().chain(sockets).map(|fd| PollFd::new(fd, PollFlags::IN))
    }

    /// Deals with clients that came, said what they want, or went. `input` gives what the command's input is written to.
    pub(crate) fn serve(&mut self, mut input: impl FnMut() -> Option<OwnedFd>) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        if let Some(listener) = &self.listener {
            while let Ok(socket) = accept_with(listener, flags) {
                self.connections.push(Connection { socket, outputs: None });
            }
        }
        self.connections.retain_mut(|connection| {
            let mut message = [0; 8];
            match receive(&connection.socket, &mut message) {
                Err(Errno::AGAIN | Errno::INTR) => true,
                Ok((1, fds)) if connection.outputs.is_none() => connection.begin(message[0], fds, &mut input),
                _ => false,
            }
        });
    }

    /// Passes on what the command wrote to its standard output (0) or error (1).
    pub(crate) fn forward(&mut self, output: usize, bytes: &[u8]) {
        self.connections.retain(|connection| {
            let pipe = connection.outputs.as_ref().and_then(|outputs| outputs.get(output)?.as_ref());
            pipe.is_none_or(|pipe| write_all(pipe, bytes).is_ok())
        });
    }
}

impl Connection {
    /// Whether the client is attached.
    fn begin(&mut self, wants: u8, fds: Vec<OwnedFd>, input: &mut impl FnMut() -> Option<OwnedFd>) -> bool {
        let mut fds = fds.into_iter();
        let mut next = |flag: u8| if wants & flag == 0 { None } else { fds.next() };
        self.outputs = Some([next(WANTS_STDOUT), next(WANTS_STDERR)]);
        let stdin = if wants & WANTS_STDIN == 0 { None } else { input() };
        let fds: Vec<BorrowedFd<'_>> = stdin.iter().map(OwnedFd::as_fd).collect();
        send(&self.socket, REPLY, &fds).is_ok()
    }
}

fn write_all(pipe: &OwnedFd, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(pipe, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let mut fds = [PollFd::new(pipe, PollFlags::OUT)];
                if poll(&mut fds, Some(&UNREAD_TIMEOUT))? == 0 {
                    return Err(Errno::TIMEDOUT);
                }
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
