//! Records (RFC 5531, section 11): how messages follow each other on a connection.

use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{io::AsyncReadExt, net::tcp::OwnedReadHalf};

use crate::status::Fault;

/// No answer is longer: we never ask for more than 1 MiB of anything.
const LONGEST_RECORD: usize = (1 << 20) + (64 << 10);
pub(super) const LAST_FRAGMENT: u32 = 1 << 31;
/// Pieces up to this size are sent together.
pub(super) const SMALL: usize = 16 << 10;

pub(super) async fn receive_record(
    socket: &mut OwnedReadHalf,
    buffer: &mut BytesMut,
    received: &AtomicU64,
) -> Result<Bytes, Fault> {
    let mut record = Bytes::new();
    loop {
        fill(socket, buffer, 4, received).await?;
        let header = buffer.get_u32();
        let length = (header & !LAST_FRAGMENT) as usize;
        if length + record.len() > LONGEST_RECORD {
            return Err(Fault::Malformed("it is longer than anything we ask for"));
        }
        fill(socket, buffer, length, received).await?;
        let fragment = buffer.split_to(length).freeze();
        record = if record.is_empty() { fragment } else { [record, fragment].concat().into() };
        if header & LAST_FRAGMENT != 0 {
            return Ok(record);
        }
    }
}

/// Reads until the buffer holds this much.
async fn fill(
    socket: &mut OwnedReadHalf,
    buffer: &mut BytesMut,
    length: usize,
    received: &AtomicU64,
) -> Result<(), Fault> {
    while buffer.len() < length {
        buffer.reserve((length - buffer.len()).max(SMALL));
        match socket.read_buf(buffer).await {
            Ok(0) => return Err(Fault::Broken("the server closed it".to_owned())),
            Ok(_) => received.fetch_add(1, Ordering::Relaxed),
            Err(error) => return Err(Fault::Broken(error.to_string())),
        };
    }
    Ok(())
}
