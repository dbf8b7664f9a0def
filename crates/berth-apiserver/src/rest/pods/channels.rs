//! One command's input and output over a WebSocket: every message begins with the number of its channel.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::future::BoxFuture;
use futures_util::{Sink, SinkExt as _, Stream, StreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream};
use tokio::sync::mpsc;
use tokio::time::{interval, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig, frame::coding::CloseCode};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_util::sync::CancellationToken;

use super::super::error::Failure;
use crate::pods::ExecSession;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const STATUS: u8 = 3;
const RESIZE: u8 = 4;
/// Its second byte is the channel that the client sends no more on.
const CLOSE: u8 = 255;

/// As much output as is put into one message.
const PIECE: usize = 32 << 10;
/// A client's message may not be longer.
const LONGEST: usize = 4 << 20;
/// As many messages of input may wait for the command to read them.
const WAITING: usize = 16;
/// How often the client is asked whether it is still there.
const PING: Duration = Duration::from_secs(20);
/// A child may hold the command's output open after it; what it wrote itself has come by then.
const QUIET: Duration = Duration::from_secs(1);
/// How long a client may take to read what is left, of which the last is how the command ended.
const DELIVERY: Duration = Duration::from_secs(60);
/// How long it may then take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(2);

/// The way the channels are spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// `v4.channel.k8s.io`: input ends with the connection.
    V4,
    /// `v5.channel.k8s.io`: a client can end its input.
    V5,
}

impl Protocol {
    pub(super) fn named(name: &str) -> Option<Self> {
        [Self::V5, Self::V4].into_iter().find(|protocol| protocol.name() == name)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::V4 => "v4.channel.k8s.io",
            Self::V5 => "v5.channel.k8s.io",
        }
    }
}

/// Joins a client with the command that runs for it, until either ends; the command is then dropped.
pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(
    connection: S,
    protocol: Protocol,
    session: Result<ExecSession, Failure>,
    shutdown: &CancellationToken,
) {
    let config = WebSocketConfig::default().max_message_size(Some(LONGEST)).max_frame_size(Some(LONGEST));
    let socket = WebSocketStream::from_raw_socket(connection, Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let (code, status) = match session {
        Err(failure) => (CloseCode::Normal, Some(failure.status())),
        Ok(ExecSession { stdin, stdout, stderr, resize, exit }) => {
            tokio::select! {
                ended = output(&mut sink, stdout, stderr, exit) => match ended {
                    Ok(ended) => (CloseCode::Normal, Some(outcome(ended))),
                    Err(_) => return,
                },
                () = input(&mut stream, protocol, stdin, resize) => return,
                () = shutdown.cancelled() => (CloseCode::Away, None),
            }
        }
    };
    if let Some(status) = status {
        let sent = timeout(DELIVERY, sink.send(message(STATUS, status.to_string().as_bytes())));
        tokio::select! {
            sent = sent => match sent {
                Ok(Ok(())) => {}
                _ => return,
            },
            () = shutdown.cancelled() => return,
        }
    }
    let goodbye = async {
        sink.send(Message::Close(Some(CloseFrame { code, reason: "".into() }))).await?;
        while let Some(Ok(_)) = stream.next().await {}
        Ok::<(), Error>(())
    };
    let _ = timeout(GOODBYE, goodbye).await;
}

/// Carries a stream of bytes within a WebSocket, as binary messages of any size, until either side ends.
pub(super) async fn tunnel<S: AsyncRead + AsyncWrite + Unpin>(connection: S, inner: DuplexStream) {
    let config = WebSocketConfig::default().max_message_size(Some(LONGEST)).max_frame_size(Some(LONGEST));
    let socket = WebSocketStream::from_raw_socket(connection, Role::Server, Some(config)).await;
    let (mut sink, mut stream) = socket.split();
    let (mut reader, mut writer) = tokio::io::split(inner);
    let outgoing = async {
        let mut ping = interval(PING);
        let mut buffer = vec![0; PIECE];
        loop {
            let message = tokio::select! {
                read = reader.read(&mut buffer) => match read {
                    Ok(length @ 1..) => Message::Binary(Bytes::copy_from_slice(&buffer[..length])),
                    _ => return,
                },
                _ = ping.tick() => Message::Ping(Bytes::new()),
            };
            if sink.send(message).await.is_err() {
                return;
            }
        }
    };
    let incoming = async {
        while let Some(Ok(message)) = stream.next().await {
            let written = match message {
                Message::Binary(bytes) => writer.write_all(&bytes).await,
                Message::Close(_) => return,
                _ => Ok(()),
            };
            if written.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = outgoing => {}
        () = incoming => {}
    }
}

fn message(channel: u8, bytes: &[u8]) -> Message {
    let mut message = BytesMut::with_capacity(bytes.len() + 1);
    message.put_u8(channel);
    message.put_slice(bytes);
    Message::Binary(message.freeze())
}

/// The `Status` that says how a command ended.
fn outcome(ended: Result<i32, String>) -> Value {
    match ended {
        Ok(0) => json!({ "metadata": {}, "status": "Success" }),
        Ok(code) => json!({
            "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
            "message": format!("command terminated with non-zero exit code: {code}"),
            "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
        }),
        Err(why) => Failure::internal(format!("error executing command in container: {why}")).status(),
    }
}

/// One of the command's outputs.
struct Output {
    channel: u8,
    reader: Option<Box<dyn AsyncRead + Send + Unpin>>,
    buffer: Vec<u8>,
}

impl Output {
    fn new(channel: u8, reader: Option<Box<dyn AsyncRead + Send + Unpin>>) -> Self {
        let length = if reader.is_some() { PIECE } else { 0 };
        Self { channel, reader, buffer: vec![0; length] }
    }

    fn is_open(&self) -> bool {
        self.reader.is_some()
    }

    /// The next message, or `None` at the end; a terminal ends with an error.
    async fn next(&mut self) -> Option<Message> {
        let read = self.reader.as_mut()?.read(&mut self.buffer).await.unwrap_or(0);
        if read == 0 {
            self.reader = None;
            return None;
        }
        Some(message(self.channel, &self.buffer[..read]))
    }
}

/// Sends all output, and returns how the command ended.
async fn output(
    sink: &mut (impl Sink<Message, Error = Error> + Unpin),
    stdout: Option<Box<dyn AsyncRead + Send + Unpin>>,
    stderr: Option<Box<dyn AsyncRead + Send + Unpin>>,
    mut exit: BoxFuture<'static, Result<i32, String>>,
) -> Result<Result<i32, String>, Error> {
    let (mut stdout, mut stderr) = (Output::new(STDOUT, stdout), Output::new(STDERR, stderr));
    let mut ping = interval(PING);
    let mut ended = None;
    loop {
        if let Some(ended) = ended.take_if(|_| !stdout.is_open() && !stderr.is_open()) {
            return Ok(ended);
        }
        let has_ended = ended.is_some();
        let said = async {
            tokio::select! {
                message = stdout.next(), if stdout.is_open() => message,
                message = stderr.next(), if stderr.is_open() => message,
                result = &mut exit, if !has_ended => {
                    ended = Some(result);
                    None
                }
            }
        };
        let message = tokio::select! {
            // Before the quiet after the end: whatever can be read is not over yet, however late we come to it.
            biased;
            message = said => message,
            () = sleep(QUIET), if has_ended => {
                (stdout.reader, stderr.reader) = (None, None);
                None
            }
            _ = ping.tick() => Some(Message::Ping(Bytes::new())),
        };
        if let Some(message) = message {
            sink.send(message).await?;
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Size {
    width: u16,
    height: u16,
}

/// Takes what the client sends, until it goes.
async fn input(
    stream: &mut (impl Stream<Item = Result<Message, Error>> + Unpin),
    protocol: Protocol,
    stdin: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    resize: Option<mpsc::Sender<(u16, u16)>>,
) {
    let (sender, receiver) = mpsc::channel(WAITING);
    let mut sender = stdin.is_some().then_some(sender);
    let reading = async {
        while let Some(Ok(message)) = stream.next().await {
            let bytes = match message {
                Message::Binary(bytes) => bytes,
                Message::Text(text) => text.into(),
                Message::Close(_) => return,
                _ => continue,
            };
            match (bytes.first(), bytes.get(1..).unwrap_or_default()) {
                (Some(&STDIN), _) => {
                    if let Some(stdin) = &sender {
                        // A command that reads no more is no reason to end.
                        let _ = stdin.send(bytes.slice(1..)).await;
                    }
                }
                (Some(&RESIZE), size) => {
                    if let (Some(resize), Ok(size)) = (&resize, serde_json::from_slice::<Size>(size)) {
                        let _ = resize.send((size.width, size.height)).await;
                    }
                }
                (Some(&CLOSE), [STDIN]) if protocol == Protocol::V5 => sender = None,
                _ => {}
            }
        }
    };
    let feeding = async {
        if let Some(stdin) = stdin {
            feed(stdin, receiver).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = reading => {}
        () = feeding => {}
    }
}

/// Gives the command its input, and its end.
async fn feed(mut stdin: Box<dyn AsyncWrite + Send + Unpin>, mut receiver: mpsc::Receiver<Bytes>) {
    while let Some(bytes) = receiver.recv().await {
        let written = async {
            stdin.write_all(&bytes).await?;
            stdin.flush().await
        };
        if written.await.is_err() {
            return;
        }
    }
    let _ = stdin.shutdown().await;
}
