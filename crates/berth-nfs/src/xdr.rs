//! XDR (RFC 4506): writing messages, and reading those of others, which nobody vouches for.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Data of at least this size is sent from where it is instead of being copied.
const WORTH_SHARING: usize = 4096;

/// An answer that is not what the protocol says: names what was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Encodes the values of a message, one after the other.
#[derive(Debug, Default)]
pub struct Encoder {
    done: Vec<Bytes>,
    current: BytesMut,
}

impl Encoder {
    /// A number of 32 bits.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.current.put_u32(value);
        self
    }

    /// A number of 64 bits.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.current.put_u64(value);
        self
    }

    /// A truth value, 0 or 1.
    pub fn bool(&mut self, value: bool) -> &mut Self {
        self.u32(value.into())
    }

    /// Bytes whose number both sides know.
    pub fn fixed(&mut self, bytes: &[u8]) -> &mut Self {
        self.current.put_slice(bytes);
        self.pad(bytes.len())
    }

    /// Bytes with their number in front; strings too.
    pub fn opaque(&mut self, bytes: &[u8]) -> &mut Self {
        self.length(bytes.len()).fixed(bytes)
    }

    /// As [`opaque`](Self::opaque), without copying.
    pub fn data(&mut self, data: Bytes) -> &mut Self {
        if data.len() < WORTH_SHARING {
            return self.opaque(&data);
        }
        let length = data.len();
        self.length(length);
        self.done.push(self.current.split().freeze());
        self.done.push(data);
        self.pad(length)
    }

    /// Appends what another encoder wrote.
    pub fn append(&mut self, mut other: Self) -> &mut Self {
        if other.done.is_empty() {
            self.current.put_slice(&other.current);
        } else {
            self.done.push(self.current.split().freeze());
            self.done.append(&mut other.done);
            self.current = other.current;
        }
        self
    }

    /// The number of bytes or things that follow.
    pub fn length(&mut self, length: usize) -> &mut Self {
        self.u32(u32::try_from(length).expect("nobody sends 4 GiB in one message"))
    }

    fn pad(&mut self, length: usize) -> &mut Self {
        self.current.put_bytes(0, length.next_multiple_of(4) - length);
        self
    }

    /// How many bytes were written.
    pub fn len(&self) -> usize {
        self.done.iter().map(Bytes::len).sum::<usize>() + self.current.len()
    }

    /// Whether nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The message in pieces.
    pub fn finish(mut self) -> Vec<Bytes> {
        if !self.current.is_empty() {
            self.done.push(self.current.freeze());
        }
        self.done
    }
}

/// Reads a message; what it hands out shares the message's memory.
#[derive(Debug, Clone)]
pub struct Decoder {
    rest: Bytes,
}

impl Decoder {
    /// Reads a message from its beginning.
    pub fn new(message: Bytes) -> Self {
        Self { rest: message }
    }

    /// A number of 32 bits.
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.rest.try_get_u32().map_err(|_| Malformed("it ends early"))
    }

    /// A number of 64 bits.
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.rest.try_get_u64().map_err(|_| Malformed("it ends early"))
    }

    /// A truth value, 0 or 1.
    pub fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a truth value is neither 0 nor 1")),
        }
    }

    /// Bytes whose number both sides know.
    pub fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let bytes = self.bytes(N)?;
        Ok(bytes.as_ref().try_into().expect("that many bytes were taken"))
    }

    /// Bytes with their number in front, of which there are at most `most`.
    pub fn opaque(&mut self, most: usize) -> Result<Bytes, Malformed> {
        let length = self.u32()? as usize;
        if length > most {
            return Err(Malformed("something in it is longer than the protocol allows"));
        }
        self.bytes(length)
    }

    /// The number of things that follow, each of at least `size` bytes.
    pub fn count(&mut self, size: usize) -> Result<usize, Malformed> {
        let count = self.u32()? as usize;
        if count > self.rest.len() / size {
            return Err(Malformed("it ends early"));
        }
        Ok(count)
    }

    fn bytes(&mut self, length: usize) -> Result<Bytes, Malformed> {
        let padded = length.next_multiple_of(4);
        if padded > self.rest.len() {
            return Err(Malformed("it ends early"));
        }
        let mut taken = self.rest.split_to(padded);
        taken.truncate(length);
        Ok(taken)
    }

    /// Whether all of it was read.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Encoder)) -> Bytes {
        let mut encoder = Encoder::default();
        write(&mut encoder);
        let length = encoder.len();
        let whole: Bytes = encoder.finish().concat().into();
        assert_eq!(whole.len(), length);
        whole
    }

    #[test]
    fn what_is_written_is_read() {
        let long = Bytes::from(vec![7; WORTH_SHARING + 1]);
        let message = written(|to| {
            to.u32(1).u64(2).bool(true).opaque(b"abcde").fixed(b"xyz").data(long.clone()).u32(3);
        });
        assert_eq!(message.len() % 4, 0);
        let mut from = Decoder::new(message);
        assert_eq!((from.u32(), from.u64(), from.bool()), (Ok(1), Ok(2), Ok(true)));
        assert_eq!(from.opaque(5).unwrap(), "abcde");
        assert_eq!(from.fixed::<3>().unwrap(), *b"xyz");
        assert_eq!(from.opaque(long.len()).unwrap(), long);
        assert_eq!(from.u32(), Ok(3));
        assert!(from.is_empty());
    }

    #[test]
    fn appending_keeps_the_order() {
        let mut second = Encoder::default();
        second.u32(2).data(Bytes::from(vec![9; WORTH_SHARING])).u32(3);
        let whole = written(|to| {
            to.u32(1).append(second).u32(4);
        });
        assert_eq!(whole.len(), 5 * 4 + WORTH_SHARING);
        assert_eq!(&whole[..8], [0, 0, 0, 1, 0, 0, 0, 2]);
        assert_eq!(&whole[whole.len() - 8..], [0, 0, 0, 3, 0, 0, 0, 4]);
    }

    #[test]
    fn no_length_is_believed_before_the_bytes_are_there() {
        let lie = Bytes::from_static(&[0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4]);
        assert!(Decoder::new(lie.clone()).opaque(usize::MAX).is_err());
        assert!(Decoder::new(lie.clone()).opaque(64).is_err());
        assert!(Decoder::new(lie.clone()).count(1).is_err());
        assert!(Decoder::new(lie).bool().is_err());
        assert!(
            Decoder::new(Bytes::from_static(&[0, 0, 0, 5, 1, 2, 3, 4, 5])).opaque(5).is_err(),
            "no padding"
        );
        assert!(Decoder::new(Bytes::from_static(&[0, 0])).u32().is_err());
        assert!(Decoder::new(Bytes::from_static(&[0, 0, 0, 0])).u64().is_err());
    }
}
