//! The streams of a process in a container of another runtime: `exec` and `attach` by the runtime's streaming server.
//!
//! The interface answers such a call with a URL. There, an HTTP request becomes a connection of SPDY 3.1 with one stream each
//! for errors, input, outputs and sizes of the terminal, by the protocol `v4.channel.k8s.io`. Of SPDY only what that needs is here:
//! streams that we open, data, and the end of each side. Header blocks are sent uncompressed in zlib's format, those that come
//! are not read.
//!
//! WebSocket, the other way, cannot end the input and leave the output open before version 5 of the protocol, which older
//! runtimes do not have.

use std::{collections::HashMap, io};

use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, duplex},
    net::TcpStream,
    sync::{mpsc, watch},
    task::AbortHandle,
};

use crate::{
    exec::{ExecInput, ExecOutput},
    joiner::TerminalSize,
};

/// How much may wait to be read of each stream.
const BUFFER: usize = 64 << 10;
/// How long the head of an HTTP answer may be.
const LONGEST_HEAD: usize = 16 << 10;
/// What a frame of data carries at most.
const LONGEST_FRAME: usize = 32 << 10;
const LOST: &str = "the connection to the container runtime is lost";
const PROTOCOL: &str = "v4.channel.k8s.io";

const SYN_STREAM: u16 = 1;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const FIN: u8 = 1;

/// Which streams are wanted.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "the fields of ExecRequest and AttachRequest")]
pub(super) struct Streams {
    pub(super) stdin: bool,
    pub(super) stdout: bool,
    pub(super) stderr: bool,
    pub(super) tty: bool,
}

/// How a process ended, or why it could not be started.
pub(crate) type Ended = std::result::Result<i32, String>;

/// A process at the other end of a connection; the connection ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) stdin: Option<ExecInput>,
    pub(crate) stdout: Option<ExecOutput>,
    pub(crate) stderr: Option<ExecOutput>,
    pub(crate) control: Control,
}

/// The rest of such a connection, without its streams.
#[derive(Debug)]
pub(crate) struct Control {
    sizes: mpsc::UnboundedSender<TerminalSize>,
    ended: watch::Receiver<Option<Ended>>,
    task: AbortHandle,
}

impl Drop for Control {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Control {
    /// Sets the size of the terminal.
    pub(crate) fn resize(&self, size: TerminalSize) {
        // Who has ended has no terminal.
        let _ = self.sizes.send(size);
    }

    /// Waits for the end.
    pub(crate) async fn wait(&self) -> Ended {
        let mut ended = self.ended.clone();
        let found = ended.wait_for(Option::is_some).await;
        let lost = || Err(LOST.to_owned());
        found.map_or_else(|_| lost(), |ended| ended.clone().unwrap_or_else(lost))
    }
}

/// Connects to the streams behind a URL of the runtime.
pub(super) async fn connect(url: &str, wanted: Streams) -> io::Result<Remote> {
    let (host, path) = split(url)?;
    let mut connection = TcpStream::connect(host).await?;
    connection.set_nodelay(true)?;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         X-Stream-Protocol-Version: {PROTOCOL}\r\nContent-Length: 0\r\n\r\n"
    );
    connection.write_all(request.as_bytes()).await?;
    let rest = upgraded(&mut connection).await?;
    Ok(Remote::start(connection, rest, wanted))
}

/// The address and the path of a URL such as `http://127.0.0.1:41237/exec/token`.
fn split(url: &str) -> io::Result<(&str, &str)> {
    let refused = || {
        io::Error::other(format!(
            "the runtime's streaming server is at {url:?}, not at http://HOST:PORT/PATH"
        ))
    };
    let rest = url.strip_prefix("http://").ok_or_else(refused)?;
    let at = rest.find('/').ok_or_else(refused)?;
    Ok(rest.split_at(at))
}

/// Reads the head of the answer; gives what came behind it.
async fn upgraded(connection: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let end = loop {
        if let Some(end) = head.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break end + 4;
        }
        if head.len() > LONGEST_HEAD || connection.read_buf(&mut head).await? == 0 {
            return Err(io::Error::other("the runtime's streaming server does not answer by HTTP"));
        }
    };
    let rest = head.split_off(end);
    let head = String::from_utf8_lossy(&head);
    let status = head.split_ascii_whitespace().nth(1).unwrap_or_default();
    if status != "101" {
        let why =
            format!("the runtime's streaming server answers {status}: {}", String::from_utf8_lossy(&rest));
        return Err(io::Error::other(why.trim_end().to_owned()));
    }
    Ok(rest)
}

impl Remote {
    fn start<C>(connection: C, rest: Vec<u8>, wanted: Streams) -> Self
    where
        C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let pair = |is_wanted: bool| is_wanted.then(|| duplex(BUFFER)).unzip();
        let ((stdin, their_stdin), (stdout, their_stdout)) = (pair(wanted.stdin), pair(wanted.stdout));
        let (stderr, their_stderr) = pair(wanted.stderr && !wanted.tty);
        let (sizes, their_sizes) = mpsc::unbounded_channel();
        let (end, ended) = watch::channel(None);
        let session = Session {
            wanted,
            stdin: their_stdin,
            stdout: their_stdout,
            stderr: their_stderr,
            sizes: their_sizes,
            end,
        };
        let task = tokio::spawn(session.run(connection, rest)).abort_handle();
        Self {
            stdin: stdin.map(ExecInput::remote),
            stdout: stdout.map(ExecOutput::remote),
            stderr: stderr.map(ExecOutput::remote),
            control: Control { sizes, ended, task },
        }
    }
}

/// Our side of a connection.
struct Session {
    wanted: Streams,
    stdin: Option<DuplexStream>,
    stdout: Option<DuplexStream>,
    stderr: Option<DuplexStream>,
    sizes: mpsc::UnboundedReceiver<TerminalSize>,
    end: watch::Sender<Option<Ended>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Error,
    Stdin,
    Stdout,
    Stderr,
    Resize,
}

impl Kind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Stdin => "stdin",
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::Resize => "resize",
        }
    }
}

impl Session {
    async fn run<C>(mut self, connection: C, rest: Vec<u8>)
    where
        C: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (read, mut write) = tokio::io::split(connection);
        let opened = self.open(&mut write).await;
        let streams = match opened {
            Ok(streams) => streams,
            Err(error) => {
                self.end.send_replace(Some(Err(format!("open the streams of a process: {error}"))));
                return;
            }
        };
        let number =
            |kind| streams.iter().find(|(_, found)| **found == kind).map_or(0, |(number, _)| *number);
        let (input, terminal) = (number(Kind::Stdin), number(Kind::Resize));
        let (replies, answers) = mpsc::unbounded_channel();
        let writer = write_all(write, self.stdin.take(), input, self.sizes, terminal, answers);
        let reader = Reader {
            streams,
            stdout: self.stdout.take(),
            stderr: self.stderr.take(),
            errors: Vec::new(),
            replies,
        };
        let ended = tokio::select! {
            ended = reader.run(read, rest) => ended,
            // Only when the connection breaks.
            () = writer => Err(LOST.to_owned()),
        };
        self.end.send_replace(Some(ended));
    }

    /// Opens every stream; gives their numbers.
    async fn open<W: AsyncWrite + Unpin>(&self, write: &mut W) -> io::Result<HashMap<u32, Kind>> {
        let kinds = [
            (Kind::Error, true),
            (Kind::Stdin, self.wanted.stdin),
            (Kind::Stdout, self.wanted.stdout),
            (Kind::Stderr, self.wanted.stderr && !self.wanted.tty),
            (Kind::Resize, self.wanted.tty),
        ];
        let (mut streams, mut frames) = (HashMap::new(), Vec::new());
        let mut is_first = true;
        for ((kind, _), number) in kinds.into_iter().filter(|(_, wanted)| *wanted).zip((1..).step_by(2)) {
            frames.extend(syn_stream(number, kind, is_first));
            is_first = false;
            streams.insert(number, kind);
        }
        write.write_all(&frames).await?;
        Ok(streams)
    }
}

/// A frame that opens a stream whose one header says what it is for.
fn syn_stream(number: u32, kind: Kind, is_first: bool) -> Vec<u8> {
    let mut headers = Vec::new();
    headers.extend(1_u32.to_be_bytes());
    for text in ["streamtype", kind.as_str()] {
        headers.extend(u32::try_from(text.len()).unwrap_or(0).to_be_bytes());
        headers.extend(text.as_bytes());
    }
    let mut payload = Vec::new();
    payload.extend(number.to_be_bytes());
    // Associated with no other, of the highest priority.
    payload.extend([0; 6]);
    if is_first {
        // The head of a zlib stream, of which each header block is a part.
        payload.extend([0x78, 0x01]);
    }
    // A stored block, and an empty one, after which a reader has all of it.
    let length = u16::try_from(headers.len()).unwrap_or(0);
    payload.push(0);
    payload.extend(length.to_le_bytes());
    payload.extend((!length).to_le_bytes());
    payload.extend(headers);
    payload.extend([0, 0, 0, 0xff, 0xff]);
    control(SYN_STREAM, &payload)
}

fn control(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x80, 3];
    frame.extend(kind.to_be_bytes());
    frame.extend(u32::try_from(payload.len()).unwrap_or(0).to_be_bytes());
    frame.extend(payload);
    frame
}

fn data(number: u32, flags: u8, bytes: &[u8]) -> Vec<u8> {
    let mut frame = number.to_be_bytes().to_vec();
    let length = u32::try_from(bytes.len()).unwrap_or(0).to_be_bytes();
    frame.extend([flags, length[1], length[2], length[3]]);
    frame.extend(bytes);
    frame
}

/// Sends input, sizes and answers until the connection breaks.
async fn write_all<W: AsyncWrite + Unpin>(
    mut write: W,
    mut stdin: Option<DuplexStream>,
    input: u32,
    mut sizes: mpsc::UnboundedReceiver<TerminalSize>,
    terminal: u32,
    mut answers: mpsc::UnboundedReceiver<Vec<u8>>,
) {
    let mut buffer = vec![0; LONGEST_FRAME];
    loop {
        let read = async {
            match &mut stdin {
                Some(stdin) => stdin.read(&mut buffer).await.unwrap_or(0),
                None => std::future::pending().await,
            }
        };
        let frame = tokio::select! {
            length = read => {
                if length == 0 {
                    stdin = None;
                }
                data(input, if length == 0 { FIN } else { 0 }, &buffer[..length])
            }
            Some(size) = sizes.recv() => {
                let TerminalSize { width, height } = size;
                if terminal == 0 {
                    continue;
                }
                data(terminal, 0, format!("{{\"Width\":{width},\"Height\":{height}}}\n").as_bytes())
            }
            Some(answer) = answers.recv() => answer,
            else => return std::future::pending().await,
        };
        if write.write_all(&frame).await.is_err() {
            return;
        }
    }
}

/// Takes what the runtime sends.
struct Reader {
    streams: HashMap<u32, Kind>,
    stdout: Option<DuplexStream>,
    stderr: Option<DuplexStream>,
    errors: Vec<u8>,
    replies: mpsc::UnboundedSender<Vec<u8>>,
}

impl Reader {
    /// Reads until the process has ended or the connection does.
    async fn run<R: AsyncRead + Unpin>(mut self, read: R, rest: Vec<u8>) -> Ended {
        let mut read = io::Cursor::new(rest).chain(read);
        loop {
            let mut head = [0; 8];
            if read.read_exact(&mut head).await.is_err() {
                return self.ended();
            }
            let length = u32::from_be_bytes([0, head[5], head[6], head[7]]);
            let mut payload = vec![0; usize::try_from(length).unwrap_or(0)];
            if read.read_exact(&mut payload).await.is_err() {
                return self.ended();
            }
            if head[0] & 0x80 == 0 {
                let number = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
                if self.take(number, head[4], &payload).await {
                    return self.ended();
                }
                continue;
            }
            match u16::from_be_bytes([head[2], head[3]]) {
                PING => {
                    // The writer ends with us.
                    let _ = self.replies.send(control(PING, &payload));
                }
                RST_STREAM => {
                    let number = payload.first_chunk().map_or(0, |number| u32::from_be_bytes(*number));
                    if self.close(number) {
                        return self.ended();
                    }
                }
                GOAWAY => return self.ended(),
                _ => {}
            }
        }
    }

    /// Takes data of a stream; whether everything is over.
    async fn take(&mut self, number: u32, flags: u8, bytes: &[u8]) -> bool {
        let output = match self.streams.get(&number) {
            Some(Kind::Error) => {
                self.errors.extend_from_slice(bytes);
                None
            }
            Some(Kind::Stdout) => self.stdout.as_mut(),
            Some(Kind::Stderr) => self.stderr.as_mut(),
            _ => None,
        };
        if let Some(output) = output {
            // Nobody has to read it.
            let _ = output.write_all(bytes).await;
        }
        flags & FIN != 0 && self.close(number)
    }

    /// Ends a stream; whether everything is over with it.
    fn close(&mut self, number: u32) -> bool {
        match self.streams.remove(&number) {
            Some(Kind::Stdout) => self.stdout = None,
            Some(Kind::Stderr) => self.stderr = None,
            Some(Kind::Error) => return true,
            _ => {}
        }
        false
    }

    /// What the stream of errors says of the end.
    fn ended(&self) -> Ended {
        if self.errors.is_empty() {
            let is_closed = !self.streams.values().any(|kind| *kind == Kind::Error);
            return if is_closed { Ok(0) } else { Err(LOST.to_owned()) };
        }
        let status: Value = serde_json::from_slice(&self.errors).unwrap_or_default();
        if status["status"] == "Success" {
            return Ok(0);
        }
        let causes = status["details"]["causes"].as_array().into_iter().flatten();
        let mut codes = causes.filter(|cause| cause["reason"] == "ExitCode");
        let code = codes.next().and_then(|cause| cause["message"].as_str()?.parse().ok());
        let message = status["message"].as_str().map(str::to_owned);
        code.ok_or_else(|| message.unwrap_or_else(|| String::from_utf8_lossy(&self.errors).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a frame: its first word, its flags, what it carries.
    async fn frame(connection: &mut DuplexStream) -> (u32, u8, Vec<u8>) {
        let mut head = [0; 8];
        connection.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[5], head[6], head[7]]) as usize];
        connection.read_exact(&mut payload).await.unwrap();
        (u32::from_be_bytes([head[0], head[1], head[2], head[3]]), head[4], payload)
    }

    /// A process whose runtime is at the other end, which has got the streams that were opened.
    async fn process(wanted: Streams, streams: &[&str]) -> (Remote, DuplexStream) {
        let (ours, mut theirs) = duplex(1 << 20);
        let remote = Remote::start(ours, Vec::new(), wanted);
        for (place, kind) in streams.iter().enumerate() {
            let (word, _, payload) = frame(&mut theirs).await;
            assert_eq!(word, 0x8003_0001, "it opens a stream");
            assert_eq!(payload[..4], u32::try_from(2 * place + 1).unwrap().to_be_bytes());
            let block = if place == 0 { &payload[12..] } else { &payload[10..] };
            let length = usize::from(u16::from_le_bytes([block[1], block[2]]));
            assert_eq!((block[0], block.len()), (0, 5 + length + 5), "one stored block and an empty one");
            assert!(block[5..5 + length].ends_with(kind.as_bytes()));
        }
        (remote, theirs)
    }

    #[tokio::test]
    async fn input_output_and_exit_code_go_by_their_streams() {
        let wanted = Streams { stdin: true, stdout: true, stderr: true, tty: false };
        let (remote, mut theirs) = process(wanted, &["error", "stdin", "stdout", "stderr"]).await;
        let Remote { stdin, stdout, stderr, control } = remote;
        let mut stdin = stdin.unwrap();
        stdin.write_all(b"in").await.unwrap();
        assert_eq!(frame(&mut theirs).await, (3, 0, b"in".to_vec()));
        drop(stdin);
        assert_eq!(frame(&mut theirs).await, (3, FIN, Vec::new()), "the end of the input is told");
        theirs.write_all(&self::control(PING, &[0, 0, 0, 2])).await.unwrap();
        assert_eq!(frame(&mut theirs).await, (0x8003_0006, 0, vec![0, 0, 0, 2]));
        let status = br#"{"status":"Failure","details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#;
        for bytes in [data(5, 0, b"out"), data(7, FIN, b"err"), data(5, FIN, b""), data(1, FIN, status)] {
            theirs.write_all(&bytes).await.unwrap();
        }
        let (mut printed, mut failed) = (String::new(), String::new());
        stdout.unwrap().read_to_string(&mut printed).await.unwrap();
        stderr.unwrap().read_to_string(&mut failed).await.unwrap();
        assert_eq!((printed.as_str(), failed.as_str()), ("out", "err"));
        assert_eq!((control.wait().await, control.wait().await), (Ok(7), Ok(7)));
    }

    #[tokio::test]
    async fn a_terminal_gets_its_size_and_a_failure_its_message() {
        let wanted = Streams { stdin: false, stdout: true, stderr: true, tty: true };
        let (remote, mut theirs) = process(wanted, &["error", "stdout", "resize"]).await;
        assert!(remote.stderr.is_none() && remote.stdin.is_none());
        remote.control.resize(TerminalSize { width: 80, height: 24 });
        let (stream, _, size) = frame(&mut theirs).await;
        assert_eq!((stream, size), (5, b"{\"Width\":80,\"Height\":24}\n".to_vec()));
        let status = br#"{"status":"Failure","message":"no such program"}"#;
        theirs.write_all(&data(1, FIN, status)).await.unwrap();
        assert_eq!(remote.control.wait().await, Err("no such program".to_owned()));
    }

    #[tokio::test]
    async fn what_breaks_off_is_no_success() {
        let wanted = Streams { stdout: true, ..Streams::default() };
        let (remote, theirs) = process(wanted, &["error", "stdout"]).await;
        drop(theirs);
        assert_eq!(remote.control.wait().await, Err(LOST.to_owned()));
        let (remote, mut theirs) = process(wanted, &["error", "stdout"]).await;
        theirs.write_all(&data(1, FIN, b"")).await.unwrap();
        assert_eq!(remote.control.wait().await, Ok(0), "attach ends without a word");
        assert!(split("https://host:1/x").is_err());
        assert_eq!(split("http://[::1]:5/a/b?c").unwrap(), ("[::1]:5", "/a/b?c"));
    }
}
