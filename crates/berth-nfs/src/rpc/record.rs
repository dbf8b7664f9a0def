//! Records (RFC 5531, section 11): how messages follow each other on a connection.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::xdr::Encoder;

/// No message is longer: nobody asks for more than 1 MiB of anything, or sends more.
pub const LONGEST: usize = (1 << 20) + (64 << 10);
const LAST_FRAGMENT: u32 = 1 << 31;
/// Pieces up to this size are sent together.
const SMALL: usize = 16 << 10;

/// Why no record came.
#[derive(Debug)]
pub enum Failure {
    /// The other side closed the connection.
    Closed,
    /// The connection broke, as the error says.
    Broken(io::Error),
    /// The record would be longer than [`LONGEST`].
    TooLong,
}

/// A message as it is sent: a record of one fragment, in pieces.
pub fn framed(message: Encoder) -> Vec<Bytes> {
    let length = u32::try_from(message.len()).expect("nobody sends 4 GiB in one message");
    let mut record = vec![Bytes::copy_from_slice(&(length | LAST_FRAGMENT).to_be_bytes())];
    record.append(&mut message.finish());
    record
}

/// Sends the pieces of records; small ones go together.
pub async fn send<S>(socket: &mut S, pieces: impl Iterator<Item = Bytes>) -> io::Result<()>
where
    S: AsyncWrite + Unpin,
{
    let mut together = BytesMut::new();
    for piece in pieces {
        if piece.len() <= SMALL {
            together.extend_from_slice(&piece);
            continue;
        }
        socket.write_all(&together).await?;
        together.clear();
        socket.write_all(&piece).await?;
    }
    socket.write_all(&together).await
}

/// Waits for the next record; `buffer` keeps what came behind it, and `arrived` is called whenever something comes.
pub async fn receive<S>(
    socket: &mut S,
    buffer: &mut BytesMut,
    mut arrived: impl FnMut(),
) -> Result<Bytes, Failure>
where
    S: AsyncRead + Unpin,
{
    let mut fragments = BytesMut::new();
    loop {
        fill(socket, buffer, 4, &mut arrived).await?;
        let header = buffer.get_u32();
        let length = (header & !LAST_FRAGMENT) as usize;
        if length + fragments.len() > LONGEST {
            return Err(Failure::TooLong);
        }
        fill(socket, buffer, length, &mut arrived).await?;
        let fragment = buffer.split_to(length);
        if header & LAST_FRAGMENT == 0 {
            fragments.extend_from_slice(&fragment);
        } else if fragments.is_empty() {
            return Ok(fragment.freeze());
        } else {
            fragments.extend_from_slice(&fragment);
            return Ok(fragments.freeze());
        }
    }
}

/// Reads until the buffer holds this much.
async fn fill<S>(
    socket: &mut S,
    buffer: &mut BytesMut,
    length: usize,
    arrived: &mut impl FnMut(),
) -> Result<(), Failure>
where
    S: AsyncRead + Unpin,
{
    while buffer.len() < length {
        buffer.reserve((length - buffer.len()).max(SMALL));
        match socket.read_buf(buffer).await {
            Ok(0) => return Err(Failure::Closed),
            Ok(_) => arrived(),
            Err(error) => return Err(Failure::Broken(error)),
        }
    }
    Ok(())
}
