//! Lets clients in that name a Unix socket's path where HTTP/2 wants a host.
//!
//! gRPC in Go and C does, and the kubelet with it when it asks a driver who it is; hyper would refuse every call of
//! theirs. So what comes in passes through here: `%` and `/` in the literal `:authority` of a call become `-`. In HPACK's
//! Huffman code the three are of the same length, so that nothing else changes, not even the sizes by which both
//! sides decide what is still in their tables.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::poll_read_buf;
use tonic::transport::server::Connected;

/// What a client begins with.
const PREFACE: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// The longest frame that hyper takes; what is longer is not held back for it to refuse.
const LONGEST: usize = 1 << 14;
/// How much is read at a time.
const CHUNK: usize = 8 << 10;
/// `:authority` in HPACK's static table.
const AUTHORITY: usize = 1;

/// A connection on which the authority of every call is one.
#[derive(Debug)]
pub struct Lenient<I> {
    inner: I,
    held: BytesMut,
    /// How much of what is held can be read.
    ready: usize,
    /// How much of what follows is ignored.
    passing: usize,
}

impl<I> Lenient<I> {
    /// Reads a connection of which nothing was read yet.
    pub fn new(inner: I) -> Self {
        Self { inner, held: BytesMut::new(), ready: 0, passing: PREFACE }
    }

    /// Gives out whatever is complete.
    fn release(&mut self) {
        loop {
            let step = self.passing.min(self.held.len() - self.ready);
            self.ready += step;
            self.passing -= step;
            let Some(head) = self.held.get(self.ready..self.ready + FRAME_HEAD) else { return };
            let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            let (kind, flags) = (head[3], head[4]);
            self.passing = FRAME_HEAD + length;
            if kind == HEADERS && length <= LONGEST {
                let payload = self.ready + FRAME_HEAD..self.ready + self.passing;
                let Some(payload) = self.held.get_mut(payload) else {
                    self.passing = 0;
                    return;
                };
                // A block that is wrong is for hyper to refuse.
                let _ = block(payload, flags).and_then(correct);
            }
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Lenient<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.ready == 0 {
            this.held.reserve(CHUNK);
            if ready!(poll_read_buf(Pin::new(&mut this.inner), context, &mut this.held))? == 0 {
                this.ready = this.held.len();
                break;
            }
            this.release();
        }
        let step = this.ready.min(buffer.remaining());
        buffer.put_slice(&this.held[..step]);
        this.held.advance(step);
        this.ready -= step;
        Poll::Ready(Ok(()))
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Lenient<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

impl<I: Connected> Connected for Lenient<I> {
    type ConnectInfo = I::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}

/// The header block in a frame.
fn block(payload: &mut [u8], flags: u8) -> Option<&mut [u8]> {
    let (mut begin, mut end) = (0, payload.len());
    if flags & PADDED != 0 {
        end = end.checked_sub(usize::from(*payload.first()?))?;
        begin += 1;
    }
    if flags & PRIORITY != 0 {
        begin += 5;
    }
    payload.get_mut(begin..end)
}

/// Corrects the literal authority of a header block, if it has one.
fn correct(block: &mut [u8]) -> Option<()> {
    let mut at = 0;
    while at < block.len() {
        let (name, next) = match block[at] {
            0x80.. => (None, integer(block, at, 7)?.1),
            0x40.. => some(integer(block, at, 6)?),
            0x20.. => (None, integer(block, at, 5)?.1),
            _ => some(integer(block, at, 4)?),
        };
        at = next;
        let Some(name) = name else { continue };
        if name == 0 {
            at = text(block, at)?.1.end;
        }
        let (coded, value) = text(block, at)?;
        at = value.end;
        if name == AUTHORITY {
            let value = &mut block[value];
            if coded { correct_coded(value) } else { correct_plain(value) }
        }
    }
    Some(())
}

fn some((number, next): (usize, usize)) -> (Option<usize>, usize) {
    (Some(number), next)
}

/// A number that begins in the last bits of the byte at `at`, and where it ends.
fn integer(block: &[u8], mut at: usize, bits: u8) -> Option<(usize, usize)> {
    let most = (1 << bits) - 1;
    let mut number = usize::from(block.get(at)? & most);
    at += 1;
    if number < usize::from(most) {
        return Some((number, at));
    }
    for shift in [0, 7, 14] {
        let byte = *block.get(at)?;
        at += 1;
        number += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some((number, at));
        }
    }
    None
}

/// Whether a text is Huffman coded, and where it lies.
fn text(block: &[u8], at: usize) -> Option<(bool, Range<usize>)> {
    let coded = block.get(at)? & 0x80 != 0;
    let (length, begin) = integer(block, at, 7)?;
    let end = begin.checked_add(length).filter(|end| *end <= block.len())?;
    Some((coded, begin..end))
}

fn correct_plain(text: &mut [u8]) {
    for byte in text.iter_mut().filter(|byte| is_of_a_path(**byte)) {
        *byte = b'-';
    }
}

fn is_of_a_path(symbol: u8) -> bool {
    matches!(symbol, b'%' | b'/')
}

/// HPACK's Huffman code as far as a path can need it: the symbols of each length, in the order of their codes, which
/// follow each other without a gap.
const CODE: [(usize, &[u8]); 10] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b"!\"()?"),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\0$@[]~"),
    (14, b"^}"),
    (15, b"<`{"),
];
/// The code of `-`, as long as those of `%` and `/`.
const MINUS: usize = 0b01_0110;

fn correct_coded(text: &mut [u8]) {
    let mut at = 0;
    while let Some((symbol, length)) = symbol(text, at) {
        if is_of_a_path(symbol) {
            for bit in 0..length {
                let (byte, mask) = place(at + bit);
                text[byte] &= !mask;
                text[byte] |= if MINUS >> (length - 1 - bit) & 1 == 1 { mask } else { 0 };
            }
        }
        at += length;
    }
}

/// The symbol whose code begins at a bit, and how long the code is.
fn symbol(text: &[u8], at: usize) -> Option<(u8, usize)> {
    let (mut first, mut before) = (0, 0);
    for (length, symbols) in CODE {
        first <<= length - before;
        before = length;
        let mut code = 0;
        for bit in at..at + length {
            let (byte, mask) = place(bit);
            code = code << 1 | usize::from(text.get(byte)? & mask != 0);
        }
        if let Some(found) = symbols.get(code.checked_sub(first)?) {
            return Some((*found, length));
        }
        first += symbols.len();
    }
    None
}

/// The byte of a bit, and the bit in it.
fn place(bit: usize) -> (usize, u8) {
    (bit / 8, 0x80 >> (bit % 8))
}

#[cfg(test)]
mod tests;
