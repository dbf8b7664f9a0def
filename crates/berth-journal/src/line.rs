//! The lines of a journal.
//!
//! A record is `<crc> <number> <index> <previous> <key hash> ["<key>",<json>]`, all but the last in hexadecimal digits: the
//! checksum of what follows it; the line's number, counted over the life of the journal; which line of its write it is; the
//! checksum of the line with the number before; and a hash of the key, so that a line whose key was damaged still says whose
//! it was. Journals of earlier versions have lines without the four in the middle, which stay valid.
//!
//! A rewritten journal begins with a checkpoint, `<crc> {"number":…,"crc":…,"lines":…}`: how many lines were copied, and
//! after which line the numbers go on without a gap.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::Entry;

/// The checksum and the space after it.
const CHECKSUM: usize = 9;
/// Everything before the key and the value.
const PREFIX: usize = CHECKSUM + 13 + 7 + 9 + 17;

/// Where a line stands in the chain of lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    /// The first line that was ever written has the number 1.
    pub(super) number: u64,
    /// Which line of the write that it belongs to, from 0.
    pub(super) index: u32,
    /// The checksum of the line before.
    pub(super) previous: u32,
}

/// The end of the chain: a line's number and checksum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Link {
    pub(super) number: u64,
    pub(super) crc: u32,
}

/// What a rewritten journal begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Checkpoint {
    #[serde(flatten)]
    pub(super) link: Link,
    /// How many lines were copied behind it.
    pub(super) lines: u64,
}

/// A record that was read.
#[derive(Debug)]
pub(super) struct Record<'a> {
    pub(super) key: Cow<'a, str>,
    /// None where the line removes the key.
    pub(super) value: Option<&'a [u8]>,
    pub(super) crc: u32,
    /// None in lines of earlier versions.
    pub(super) position: Option<Position>,
}

/// A line whose checksum is right.
#[derive(Debug)]
pub(super) enum Line<'a> {
    Record(Record<'a>),
    Checkpoint(Checkpoint),
}

/// Appends the entry's line, and returns its checksum.
pub(super) fn encode(entry: &Entry<'_>, key_hash: u64, position: Position, buffer: &mut Vec<u8>) -> u32 {
    let start = buffer.len();
    let Position { number, index, previous } = position;
    buffer.extend_from_slice(
        format!("00000000 {number:012x} {index:06x} {previous:08x} {key_hash:016x} [").as_bytes(),
    );
    let (key, json) = match entry {
        Entry::Put { key, json } => (key, *json),
        Entry::Remove { key } => (key, b"null".as_slice()),
    };
    serde_json::to_writer(&mut *buffer, key).expect("a string always becomes JSON");
    buffer.push(b',');
    let value = buffer.len();
    buffer.extend_from_slice(json);
    // JSON has them between its tokens only, where a space does as well.
    for byte in &mut buffer[value..] {
        if *byte == b'\n' {
            *byte = b' ';
        }
    }
    buffer.push(b']');
    seal(buffer, start)
}

/// The line of a checkpoint.
pub(super) fn encode_checkpoint(checkpoint: &Checkpoint) -> Vec<u8> {
    let mut buffer = b"00000000 ".to_vec();
    serde_json::to_writer(&mut buffer, checkpoint).expect("numbers always become JSON");
    seal(&mut buffer, 0);
    buffer
}

fn seal(buffer: &mut Vec<u8>, start: usize) -> u32 {
    let crc = crc32fast::hash(&buffer[start + CHECKSUM..]);
    buffer[start..start + 8].copy_from_slice(format!("{crc:08x}").as_bytes());
    buffer.push(b'\n');
    crc
}

/// Reads a line, if it is whole.
pub(super) fn decode(line: &[u8]) -> Option<Line<'_>> {
    let (checksum, body) = line.strip_suffix(b"\n")?.split_at_checked(CHECKSUM)?;
    let crc = u32::try_from(hex(checksum, 0, 8)?).ok()?;
    if checksum[8] != b' ' || crc32fast::hash(body) != crc {
        return None;
    }
    if body.starts_with(b"{") {
        return serde_json::from_slice(body).ok().map(Line::Checkpoint);
    }
    let (key, value) = decode_checked(line)?;
    Some(Line::Record(Record { key, value, crc, position: position(line) }))
}

/// Reads the key and the value of a line whose checksum is known to be right.
pub(super) fn decode_checked(line: &[u8]) -> Option<(Cow<'_, str>, Option<&[u8]>)> {
    let line = line.strip_suffix(b"\n")?;
    let body = match line.get(CHECKSUM)? {
        b'[' => &line[CHECKSUM..],
        _ => line.get(PREFIX..)?,
    };
    let (key, value) = match split_plain(body) {
        Some((key, value)) => (Cow::Borrowed(key), value),
        None => split_any(body)?,
    };
    Some((key, (value != b"null").then_some(value)))
}

fn position(line: &[u8]) -> Option<Position> {
    Some(Position {
        number: hex(line, CHECKSUM, 12)?,
        index: u32::try_from(hex(line, CHECKSUM + 13, 6)?).ok()?,
        previous: u32::try_from(hex(line, CHECKSUM + 20, 8)?).ok()?,
    })
}

fn hex(bytes: &[u8], start: usize, length: usize) -> Option<u64> {
    let digits = std::str::from_utf8(bytes.get(start..start + length)?).ok()?;
    u64::from_str_radix(digits, 16).ok()
}

/// What a damaged line still says of its key: the key as it stands there, and the hash beside it. Either may be wrong.
pub(super) fn legible_key(line: &[u8]) -> (Option<String>, Option<u64>) {
    let hash = hex(line, CHECKSUM + 29, 16);
    // Where the key belongs, or one byte before where the first byte of the line is gone.
    let starts = [PREFIX, PREFIX - 1, CHECKSUM, CHECKSUM - 1];
    let is_key = |start: &usize| line.get(*start) == Some(&b'[') || line.get(start + 1) == Some(&b'"');
    let text = starts.into_iter().find(is_key).and_then(|start| {
        let text = line.get(start + 2..)?;
        let end = text.windows(2).position(|pair| pair == b"\",")?;
        serde_json::from_slice(&[b"\"", &text[..end], b"\""].concat()).ok()
    });
    (text, hash)
}

/// Where within `line` a whole line begins, whose line break before was damaged.
pub(super) fn hidden_line(line: &[u8]) -> Option<usize> {
    let may_begin = |start: &usize| line.get(start + 8) == Some(&b' ') && hex(line, *start, 8).is_some();
    (1..line.len().saturating_sub(CHECKSUM)).filter(may_begin).find(|start| decode(&line[*start..]).is_some())
}

/// Splits what [`encode`] wrote for a key without escapes, and leaves the value unread: the checksum vouches for it.
fn split_plain(body: &[u8]) -> Option<(&str, &[u8])> {
    let rest = body.strip_prefix(b"[\"")?.strip_suffix(b"]")?;
    let end = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    let (key, rest) = rest.split_at(end);
    Some((std::str::from_utf8(key).ok()?, rest.strip_prefix(b"\",")?))
}

fn split_any(body: &[u8]) -> Option<(Cow<'_, str>, &[u8])> {
    #[derive(serde::Deserialize)]
    struct Pair<'a>(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] &'a RawValue);
    let Pair(key, value) = serde_json::from_slice(body).ok()?;
    Some((key, value.get().as_bytes()))
}
