//! One line of a journal: `<crc32> ["<key>",<json>]`.

use std::borrow::Cow;

use serde_json::value::RawValue;

use super::Entry;

/// The checksum and the space after it.
const PREFIX: usize = 9;

/// A key and its value; none where the line removes the key.
pub(super) type Decoded<'a> = (Cow<'a, str>, Option<&'a [u8]>);

/// Appends the entry's line.
pub(super) fn encode(entry: &Entry<'_>, buffer: &mut Vec<u8>) {
    let start = buffer.len();
    buffer.extend_from_slice(b"00000000 [");
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
    let checksum = format!("{:08x}", crc32fast::hash(&buffer[start + PREFIX..]));
    buffer[start..start + 8].copy_from_slice(checksum.as_bytes());
    buffer.push(b'\n');
}

/// Reads a line, if it is whole.
pub(super) fn decode(line: &[u8]) -> Option<Decoded<'_>> {
    let body = line.strip_suffix(b"\n")?;
    let (checksum, body) = body.split_at_checked(PREFIX)?;
    let checksum = u32::from_str_radix(std::str::from_utf8(checksum).ok()?.strip_suffix(' ')?, 16).ok()?;
    if crc32fast::hash(body) != checksum {
        return None;
    }
    decode_checked(line)
}

/// Reads a line whose checksum is known to be right.
pub(super) fn decode_checked(line: &[u8]) -> Option<Decoded<'_>> {
    let body = line.strip_suffix(b"\n")?.get(PREFIX..)?;
    let (key, value) = match split_plain(body) {
        Some((key, value)) => (Cow::Borrowed(key), value),
        None => split_any(body)?,
    };
    Some((key, (value != b"null").then_some(value)))
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
    struct Line<'a>(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] &'a RawValue);
    let Line(key, value) = serde_json::from_slice(body).ok()?;
    Some((key, value.get().as_bytes()))
}
