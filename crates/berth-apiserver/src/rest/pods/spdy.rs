//! Forwards ports over SPDY/3.1, which is what clients speak for that: directly, or within a WebSocket.
//!
//! For each connection to a port the client opens two streams with the same request id, one for its bytes and one for the
//! text of an error. SPDY's windows are not kept: Kubernetes' clients have none either.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use bytes::{BufMut as _, Bytes, BytesMut};
use flate2::{Decompress, FlushDecompress};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::pods::{Connection, Pods};

const VERSION: u16 = 3;
const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;
const FIN: u8 = 1;
const CONTROL: u8 = 0x80;
/// The status of a stream that is refused.
const REFUSED_STREAM: u32 = 3;

/// A frame of a client may not be longer.
const LONGEST_FRAME: usize = 4 << 20;
/// The headers of a stream may not be longer.
const LONGEST_HEADERS: usize = 64 << 10;
/// As much as is read from a port at a time.
const PIECE: usize = 32 << 10;
/// As many pieces may wait to be written, to the client or to a port.
const WAITING: usize = 16;
/// As many ports may be connected at a time.
const MOST_FORWARDS: usize = 1024;

/// The header that a compressed stream begins with, and its flag for a dictionary that both sides know.
const ZLIB_HEADER: [u8; 2] = [0x78, 0x01];
const HAS_DICTIONARY: u8 = 0x20;

/// The words of the dictionary that headers are compressed with (SPDY 3, section 2.6.10.1), each of them behind its length.
const WORDS: &str = "options head post put delete trace accept accept-charset accept-encoding accept-language \
    accept-ranges age allow authorization cache-control connection content-base content-encoding content-language \
    content-length content-location content-md5 content-range content-type date etag expect expires from host if-match \
    if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma \
    proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade \
    user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie \
    keep-alive origin";
/// The text behind the words of the dictionary.
const TEXT: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505203 \
    Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden404 Not \
    Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug Sept Oct Nov \
    Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,application/xml,\
    application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=\
    iso-8859-1,utf-,*,enq=0.";

fn dictionary() -> Vec<u8> {
    let mut all = Vec::new();
    for word in WORDS.split(' ') {
        all.extend_from_slice(&u32::try_from(word.len()).unwrap_or_default().to_be_bytes());
        all.extend_from_slice(word.replace('_', " ").as_bytes());
    }
    all.extend_from_slice(TEXT.as_bytes());
    all
}

/// Reads the headers of streams, which are one compressed stream over all of them.
struct HeaderReader {
    inflate: Decompress,
    has_begun: bool,
}

impl HeaderReader {
    fn new() -> Self {
        Self { inflate: Decompress::new(false), has_begun: false }
    }

    /// The names and values of a block.
    fn read(&mut self, block: &[u8]) -> io::Result<HashMap<String, String>> {
        let mut block = block;
        if !self.has_begun {
            self.has_begun = true;
            let with_dictionary = block.get(1).is_some_and(|flags| flags & HAS_DICTIONARY != 0);
            block = block.get(if with_dictionary { 6 } else { 2 }..).ok_or(io::ErrorKind::InvalidData)?;
            if with_dictionary {
                // What was uncompressed before is the dictionary of what follows: it comes as a block of its own, and what
                // that gives is dropped.
                self.inflate(&stored(&dictionary()))?;
            }
        }
        let plain = self.inflate(block)?;
        let mut rest = plain.as_slice();
        let mut headers = HashMap::new();
        for _ in 0..number(&mut rest)? {
            let (name, value) = (text(&mut rest)?, text(&mut rest)?);
            headers.insert(name.to_ascii_lowercase(), value);
        }
        Ok(headers)
    }

    fn inflate(&mut self, mut block: &[u8]) -> io::Result<Vec<u8>> {
        let (mut plain, mut buffer) = (Vec::new(), vec![0; 4096]);
        loop {
            let (taken, given) = (self.inflate.total_in(), self.inflate.total_out());
            self.inflate
                .decompress(block, &mut buffer, FlushDecompress::Sync)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            let size = |count: u64| usize::try_from(count).unwrap_or(usize::MAX);
            let (taken, given) =
                (size(self.inflate.total_in() - taken), size(self.inflate.total_out() - given));
            block = block.get(taken..).unwrap_or_default();
            plain.extend_from_slice(buffer.get(..given).unwrap_or_default());
            if plain.len() > LONGEST_HEADERS {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the headers are too long"));
            }
            if given < buffer.len() && (block.is_empty() || taken == 0) {
                return Ok(plain);
            }
        }
    }
}

/// Bytes as a block of a compressed stream that compresses nothing, and is not the last.
fn stored(bytes: &[u8]) -> Vec<u8> {
    let length = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
    let mut block = vec![0];
    block.extend_from_slice(&length.to_le_bytes());
    block.extend_from_slice(&(!length).to_le_bytes());
    block.extend_from_slice(bytes);
    block
}

fn number(rest: &mut &[u8]) -> io::Result<u32> {
    let (number, after) = rest.split_first_chunk::<4>().ok_or(io::ErrorKind::InvalidData)?;
    *rest = after;
    Ok(u32::from_be_bytes(*number))
}

fn text(rest: &mut &[u8]) -> io::Result<String> {
    let length = usize::try_from(number(rest)?).map_err(io::Error::other)?;
    let (text, after) = rest.split_at_checked(length).ok_or(io::ErrorKind::InvalidData)?;
    *rest = after;
    Ok(String::from_utf8_lossy(text).into_owned())
}

fn control(kind: u16, flags: u8, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(8 + payload.len());
    frame.put_u8(CONTROL);
    frame.put_u8(u8::try_from(VERSION).unwrap_or_default());
    frame.put_u16(kind);
    frame.put_u8(flags);
    frame.put_uint(payload.len() as u64, 3);
    frame.put_slice(payload);
    frame.freeze()
}

fn data(stream: u32, flags: u8, bytes: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(8 + bytes.len());
    frame.put_u32(stream);
    frame.put_u8(flags);
    frame.put_uint(bytes.len() as u64, 3);
    frame.put_slice(bytes);
    frame.freeze()
}

/// A frame of the client.
struct Frame {
    /// The kind of a control frame; `None` for bytes of a stream.
    kind: Option<u16>,
    /// The stream that its bytes belong to.
    stream: u32,
    flags: u8,
    payload: Vec<u8>,
}

async fn read_frame(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Frame> {
    let mut head = [0; 8];
    reader.read_exact(&mut head).await?;
    let [a, b, c, d, flags, rest @ ..] = head;
    let length =
        usize::try_from(u32::from_be_bytes([0, rest[0], rest[1], rest[2]])).map_err(io::Error::other)?;
    if length > LONGEST_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame is too long"));
    }
    let mut payload = vec![0; length];
    reader.read_exact(&mut payload).await?;
    let kind = (a & CONTROL != 0).then(|| u16::from_be_bytes([c, d]));
    Ok(Frame { kind, stream: u32::from_be_bytes([a & !CONTROL, b, c, d]), flags, payload })
}

/// A connection to a port that is wanted, as far as its streams have come.
#[derive(Default)]
struct Request {
    port: u16,
    data: Option<u32>,
    error: Option<u32>,
}

/// What the client sends to a port.
struct Input {
    /// Gone when the client has no more.
    sender: Option<mpsc::Sender<Bytes>>,
    cancelled: CancellationToken,
}

struct Session {
    pods: Arc<dyn Pods>,
    pod: Arc<Value>,
    frames: mpsc::Sender<Bytes>,
    headers: HeaderReader,
    has_replied: bool,
    requests: HashMap<String, Request>,
    inputs: HashMap<u32, Input>,
    forwards: JoinSet<u32>,
}

/// Forwards ports of a pod until the client goes or the server ends.
pub(super) async fn serve(
    connection: impl AsyncRead + AsyncWrite + Send + 'static,
    pods: Arc<dyn Pods>,
    pod: Value,
    shutdown: &CancellationToken,
) {
    let (mut reader, mut writer) = tokio::io::split(connection);
    let (frames, mut outgoing) = mpsc::channel::<Bytes>(WAITING);
    let mut session = Session {
        pods,
        pod: Arc::new(pod),
        frames,
        headers: HeaderReader::new(),
        has_replied: false,
        requests: HashMap::new(),
        inputs: HashMap::new(),
        forwards: JoinSet::new(),
    };
    let writing = async {
        while let Some(frame) = outgoing.recv().await {
            if writer.write_all(&frame).await.is_err() || writer.flush().await.is_err() {
                return;
            }
        }
    };
    let reading = async {
        // A client that goes, and one that does not speak SPDY, get no answer.
        while let Ok(frame) = read_frame(&mut reader).await {
            match session.deal_with(frame).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::debug!(%error, "a client that forwards ports sent what is no SPDY");
                    return;
                }
            }
        }
    };
    tokio::select! {
        () = writing => {}
        () = reading => {}
        () = shutdown.cancelled() => {}
    }
}

impl Session {
    /// Whether there is more to come.
    async fn deal_with(&mut self, frame: Frame) -> io::Result<bool> {
        while let Some(Ok(stream)) = self.forwards.try_join_next() {
            self.inputs.remove(&stream);
        }
        let payload = frame.payload.as_slice();
        match frame.kind {
            None => self.input(frame.stream, frame.flags, payload).await,
            Some(SYN_STREAM) => {
                let mut rest = payload;
                let stream = number(&mut rest)? & 0x7fff_ffff;
                // The stream that it belongs to, its priority and its slot.
                let block = rest.get(6..).ok_or(io::ErrorKind::InvalidData)?;
                let headers = self.headers.read(block)?;
                self.open(stream, &headers).await;
            }
            Some(HEADERS) => {
                // Read, because what follows refers to them.
                self.headers.read(payload.get(4..).ok_or(io::ErrorKind::InvalidData)?)?;
            }
            Some(RST_STREAM) => {
                let stream = number(&mut &payload[..])? & 0x7fff_ffff;
                if let Some(input) = self.inputs.remove(&stream) {
                    input.cancelled.cancel();
                }
            }
            Some(PING) => self.send(control(PING, 0, payload)).await,
            Some(GOAWAY) => return Ok(false),
            // Settings and windows.
            Some(_) => {}
        }
        Ok(true)
    }

    // Nobody is there to be told when this fails; the reader notices it as well.
    async fn send(&self, frame: Bytes) {
        let _ = self.frames.send(frame).await;
    }

    async fn input(&mut self, stream: u32, flags: u8, bytes: &[u8]) {
        let Some(input) = self.inputs.get_mut(&stream) else { return };
        if let Some(sender) = input.sender.as_ref().filter(|_| !bytes.is_empty()) {
            // A port that takes no more is no reason to end.
            let _ = sender.send(Bytes::copy_from_slice(bytes)).await;
        }
        if flags & FIN != 0 {
            input.sender = None;
        }
    }

    /// Takes a new stream, and connects to its port when it is the second of two.
    async fn open(&mut self, stream: u32, headers: &HashMap<String, String>) {
        let port = headers.get("port").and_then(|port| port.parse().ok()).filter(|port| *port > 0);
        let (kind, id) = (headers.get("streamtype").map(String::as_str), headers.get("requestid"));
        let (Some(port), Some(id), true) = (port, id, self.inputs.len() < MOST_FORWARDS) else {
            let payload = [stream.to_be_bytes(), REFUSED_STREAM.to_be_bytes()].concat();
            return self.send(control(RST_STREAM, 0, &payload)).await;
        };
        // No headers: a number of them that is zero. The empty block behind it makes clients give out what they have read.
        let begin: &[u8] = if self.has_replied { &[] } else { &ZLIB_HEADER };
        self.has_replied = true;
        let payload = [&stream.to_be_bytes(), begin, &stored(&0_u32.to_be_bytes()), &stored(&[])].concat();
        self.send(control(SYN_REPLY, 0, &payload)).await;
        let request = self.requests.entry(id.clone()).or_default();
        request.port = port;
        match kind {
            Some("data") => request.data = Some(stream),
            _ => request.error = Some(stream),
        }
        if let (Some(data), Some(error)) = (request.data, request.error) {
            self.requests.remove(id);
            self.forward(port, data, error);
        }
    }

    fn forward(&mut self, port: u16, stream: u32, error: u32) {
        let (sender, receiver) = mpsc::channel(WAITING);
        let cancelled = CancellationToken::new();
        self.inputs.insert(stream, Input { sender: Some(sender), cancelled: cancelled.clone() });
        let (pods, pod, frames) = (self.pods.clone(), self.pod.clone(), self.frames.clone());
        self.forwards.spawn(async move {
            let forwarding = async {
                match pods.connect(&pod, port).await {
                    Ok(connection) => copy(connection, stream, receiver, &frames).await,
                    Err(why) => {
                        let _ = frames.send(data(error, 0, why.to_string().as_bytes())).await;
                    }
                }
            };
            cancelled.run_until_cancelled(forwarding).await;
            for ended in [stream, error] {
                let _ = frames.send(data(ended, FIN, &[])).await;
            }
            stream
        });
    }
}

/// Copies both ways until the port has no more to say.
async fn copy(
    connection: Connection,
    stream: u32,
    mut input: mpsc::Receiver<Bytes>,
    frames: &mpsc::Sender<Bytes>,
) {
    let (mut reader, mut writer) = tokio::io::split(connection);
    let sending = async {
        while let Some(bytes) = input.recv().await {
            if writer.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _ = writer.shutdown().await;
        std::future::pending::<()>().await;
    };
    let receiving = async {
        let mut buffer = vec![0; PIECE];
        while let Ok(length @ 1..) = reader.read(&mut buffer).await {
            if frames.send(data(stream, 0, &buffer[..length])).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = sending => {}
        () = receiving => {}
    }
}

#[cfg(test)]
mod tests;
