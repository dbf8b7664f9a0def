//! A process in a running container, as asynchronous streams.

use std::{
    io,
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf},
    net::{UnixStream, unix::pipe},
};

use crate::{
    joiner::{self, Joined, Reply, TerminalSize},
    runtime::{Error, Result},
    status::KILLED,
};

/// A process that was started in a running container; it is killed when this is dropped.
#[derive(Debug)]
pub struct Exec {
    /// Its standard input, if it was asked for.
    pub stdin: Option<ExecInput>,
    /// Its standard output, or its terminal.
    pub stdout: Option<ExecOutput>,
    /// Its standard error, if it has no terminal.
    pub stderr: Option<ExecOutput>,
    terminal: Option<OwnedFd>,
    control: UnixStream,
    received: Vec<u8>,
}

/// Writes to a process.
#[derive(Debug)]
pub struct ExecInput(pipe::Sender);

/// Reads from a process.
#[derive(Debug)]
pub struct ExecOutput(pipe::Receiver);

impl Exec {
    /// Waits until the command runs.
    pub(crate) async fn open(joined: Joined, tty: bool) -> Result<Self> {
        let failed = |error: io::Error| Error::Exec(format!("open the streams of a process: {error}"));
        let Joined { control, stdin, stdout, stderr } = joined;
        control.set_nonblocking(true).map_err(failed)?;
        let output = |fd| pipe::Receiver::from_owned_fd_unchecked(fd).map(ExecOutput).map_err(failed);
        let terminal = if tty { Some(stdout.try_clone().map_err(failed)?) } else { None };
        let stdin = stdin.map(pipe::Sender::from_owned_fd_unchecked).transpose().map_err(failed)?;
        let mut exec = Self {
            stdin: stdin.map(ExecInput),
            stdout: Some(output(stdout)?),
            stderr: stderr.map(output).transpose()?,
            terminal,
            control: UnixStream::from_std(control).map_err(failed)?,
            received: Vec::new(),
        };
        match exec.reply().await {
            Some(Reply::Started) => Ok(exec),
            Some(Reply::Failed(why)) => Err(Error::Exec(why)),
            Some(Reply::Exited(_)) | None => Err(Error::Exec("the container has ended".to_owned())),
        }
    }

    /// Sets the new size of the terminal, if there is one.
    pub fn resize(&self, size: TerminalSize) -> Result<()> {
        let Some(terminal) = &self.terminal else { return Ok(()) };
        joiner::resize(terminal, size).map_err(|error| Error::Exec(error.sentence()))
    }

    /// The exit code, when the process has ended; 128 and the signal when one ended it. May be dropped and repeated.
    pub async fn wait(&mut self) -> i32 {
        match self.reply().await {
            Some(Reply::Exited(code)) => code,
            // Whoever watched over the process was killed, and the process with it.
            _ => KILLED,
        }
    }

    async fn reply(&mut self) -> Option<Reply> {
        let mut ended = false;
        loop {
            if let Some((reply, length)) = Reply::parse(&self.received, ended) {
                // An exit code can be asked for again.
                if !matches!(reply, Reply::Exited(_)) {
                    self.received.drain(..length);
                }
                return Some(reply);
            }
            if ended {
                return None;
            }
            ended = !matches!(self.control.read_buf(&mut self.received).await, Ok(1..));
        }
    }
}

impl ExecInput {
    pub(crate) fn new(pipe: pipe::Sender) -> Self {
        Self(pipe)
    }
}

impl ExecOutput {
    pub(crate) fn new(pipe: pipe::Receiver) -> Self {
        Self(pipe)
    }
}

impl AsyncWrite for ExecInput {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

impl AsyncRead for ExecOutput {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.0).poll_read(cx, buffer) {
            // What a terminal says when nobody has it open any more.
            Poll::Ready(Err(error)) if error.raw_os_error() == Some(EIO) => Poll::Ready(Ok(())),
            other => other,
        }
    }
}

const EIO: i32 = 5;
