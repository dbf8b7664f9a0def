//! A process in a running container, as asynchronous streams.

use std::{
    io,
    os::fd::OwnedFd,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, DuplexStream, ReadBuf},
    net::{UnixStream, unix::pipe},
};

use crate::{
    cri::{Control, Remote},
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
    process: Process,
}

/// What a process is watched and controlled by.
#[derive(Debug)]
enum Process {
    Joined { terminal: Option<OwnedFd>, control: UnixStream, received: Vec<u8> },
    Remote(Control),
}

/// Writes to a process.
#[derive(Debug)]
pub struct ExecInput(Input);

#[derive(Debug)]
enum Input {
    Pipe(pipe::Sender),
    Remote(DuplexStream),
}

/// Reads from a process.
#[derive(Debug)]
pub struct ExecOutput(Output);

#[derive(Debug)]
enum Output {
    Pipe(pipe::Receiver),
    Remote(DuplexStream),
}

impl Exec {
    /// Waits until the command runs.
    pub(crate) async fn open(joined: Joined, tty: bool) -> Result<Self> {
        let failed = |error: io::Error| Error::Exec(format!("open the streams of a process: {error}"));
        let Joined { control, stdin, stdout, stderr } = joined;
        control.set_nonblocking(true).map_err(failed)?;
        let output = |fd| pipe::Receiver::from_owned_fd_unchecked(fd).map(ExecOutput::new).map_err(failed);
        let terminal = if tty { Some(stdout.try_clone().map_err(failed)?) } else { None };
        let stdin = stdin.map(pipe::Sender::from_owned_fd_unchecked).transpose().map_err(failed)?;
        let mut exec = Self {
            stdin: stdin.map(ExecInput::new),
            stdout: Some(output(stdout)?),
            stderr: stderr.map(output).transpose()?,
            process: Process::Joined {
                terminal,
                control: UnixStream::from_std(control).map_err(failed)?,
                received: Vec::new(),
            },
        };
        match exec.reply().await {
            Some(Reply::Started) => Ok(exec),
            Some(Reply::Failed(why)) => Err(Error::Exec(why)),
            Some(Reply::Exited(_)) | None => Err(Error::Exec("the container has ended".to_owned())),
        }
    }

    /// A process of another runtime.
    pub(crate) fn remote(remote: Remote) -> Self {
        let Remote { stdin, stdout, stderr, control } = remote;
        Self { stdin, stdout, stderr, process: Process::Remote(control) }
    }

    /// Sets the new size of the terminal, if there is one.
    pub fn resize(&self, size: TerminalSize) -> Result<()> {
        match &self.process {
            Process::Joined { terminal: None, .. } => Ok(()),
            Process::Joined { terminal: Some(terminal), .. } => {
                joiner::resize(terminal, size).map_err(|error| Error::Exec(error.sentence()))
            }
            Process::Remote(control) => {
                control.resize(size);
                Ok(())
            }
        }
    }

    /// The exit code, when the process has ended; 128 and the signal when one ended it. May be dropped and repeated. An
    /// error says why the process could not be started, where that shows only now.
    pub async fn wait(&mut self) -> std::result::Result<i32, String> {
        if let Process::Remote(control) = &self.process {
            return control.wait().await;
        }
        match self.reply().await {
            Some(Reply::Exited(code)) => Ok(code),
            // Whoever watched over the process was killed, and the process with it.
            _ => Ok(KILLED),
        }
    }

    async fn reply(&mut self) -> Option<Reply> {
        let Process::Joined { control, received, .. } = &mut self.process else { return None };
        let mut ended = false;
        loop {
            if let Some((reply, length)) = Reply::parse(received, ended) {
                // An exit code can be asked for again.
                if !matches!(reply, Reply::Exited(_)) {
                    received.drain(..length);
                }
                return Some(reply);
            }
            if ended {
                return None;
            }
            ended = !matches!(control.read_buf(received).await, Ok(1..));
        }
    }
}

impl ExecInput {
    pub(crate) fn new(pipe: pipe::Sender) -> Self {
        Self(Input::Pipe(pipe))
    }

    pub(crate) fn remote(stream: DuplexStream) -> Self {
        Self(Input::Remote(stream))
    }

    fn stream(&mut self) -> Pin<&mut (dyn AsyncWrite + Send + Unpin)> {
        Pin::new(match &mut self.0 {
            Input::Pipe(pipe) => pipe,
            Input::Remote(stream) => stream,
        })
    }
}

impl ExecOutput {
    pub(crate) fn new(pipe: pipe::Receiver) -> Self {
        Self(Output::Pipe(pipe))
    }

    pub(crate) fn remote(stream: DuplexStream) -> Self {
        Self(Output::Remote(stream))
    }

    fn stream(&mut self) -> Pin<&mut (dyn AsyncRead + Send + Unpin)> {
        Pin::new(match &mut self.0 {
            Output::Pipe(pipe) => pipe,
            Output::Remote(stream) => stream,
        })
    }
}

impl AsyncWrite for ExecInput {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }
}

impl AsyncRead for ExecOutput {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.stream().poll_read(cx, buffer) {
            // What a terminal says when nobody has it open any more.
            Poll::Ready(Err(error)) if error.raw_os_error() == Some(EIO) => Poll::Ready(Ok(())),
            other => other,
        }
    }
}

const EIO: i32 = 5;
