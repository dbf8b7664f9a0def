//! Writes what comes before an entry's data.

use super::{BLOCK, BLOCK_BYTES, EntryKind, Header};

/// The most that fits the fields of a plain header.
const MAX_NAME: usize = 100;
const MAX_SIZE: u64 = 0o777_7777_7777;
const MAX_ID: u32 = 0o777_7777;

/// The header of an entry with all records it needs, and the map of its holes: whole blocks.
pub fn encode(header: &Header) -> Vec<u8> {
    let map = header.pieces.as_ref().map(|pieces| map_of(pieces, header.size));
    let stored = stored_length(header) + map.as_ref().map_or(0, |map| length(map));
    let mut records = Vec::new();
    if map.is_some() {
        put(&mut records, b"GNU.sparse.major", b"1");
        put(&mut records, b"GNU.sparse.minor", b"0");
        put(&mut records, b"GNU.sparse.name", &header.path);
        put(&mut records, b"GNU.sparse.realsize", header.size.to_string().as_bytes());
    } else if header.path.len() > MAX_NAME {
        put(&mut records, b"path", &header.path);
    }
    if header.link.len() > MAX_NAME {
        put(&mut records, b"linkpath", &header.link);
    }
    if stored > MAX_SIZE {
        put(&mut records, b"size", stored.to_string().as_bytes());
    }
    for (key, id) in [(&b"uid"[..], header.uid), (b"gid", header.gid)] {
        if id > MAX_ID {
            put(&mut records, key, id.to_string().as_bytes());
        }
    }
    let (seconds, nanoseconds) = header.modified;
    if nanoseconds != 0 || plain_time(seconds).is_none() {
        put(&mut records, b"mtime", time(seconds, nanoseconds).as_bytes());
    }
    for (name, value) in &header.xattrs {
        put(&mut records, &[b"SCHILY.xattr.", name.as_slice()].concat(), value);
    }
    let mut bytes = Vec::new();
    if !records.is_empty() {
        let about = Header { mode: 0o644, kind: EntryKind::File, link: Vec::new(), ..header.clone() };
        let name = [b"./PaxHeaders/", last_name(&header.path)].concat();
        bytes.extend_from_slice(&block(&about, &name, b'x', length(&records)));
        bytes.extend_from_slice(&records);
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
    }
    let name = if map.is_some() {
        [b"./GNUSparseFile.0/", last_name(&header.path)].concat()
    } else {
        header.path.clone()
    };
    bytes.extend_from_slice(&block(header, &name, flag(header.kind), stored));
    bytes.extend(map.into_iter().flatten());
    bytes
}

/// How many bytes of data follow an entry, without its map and its padding.
pub fn stored_length(header: &Header) -> u64 {
    match (header.kind, &header.pieces) {
        (EntryKind::File, None) => header.size,
        (EntryKind::File, Some(pieces)) => pieces.iter().map(|piece| piece.end - piece.start).sum(),
        _ => 0,
    }
}

/// The zeros that follow so much data.
pub fn padding(stored: u64) -> usize {
    let rest = stored.next_multiple_of(BLOCK_BYTES) - stored;
    usize::try_from(rest).expect("padding is less than a block")
}

/// The end of an archive.
pub fn end() -> Vec<u8> {
    vec![0; 2 * BLOCK]
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).expect("a length in memory fits")
}

fn last_name(path: &[u8]) -> &[u8] {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
    &name[..name.len().min(64)]
}

fn flag(kind: EntryKind) -> u8 {
    match kind {
        EntryKind::File => b'0',
        EntryKind::HardLink => b'1',
        EntryKind::Symlink => b'2',
        EntryKind::Character => b'3',
        EntryKind::Block => b'4',
        EntryKind::Directory => b'5',
        EntryKind::Fifo => b'6',
    }
}

fn block(header: &Header, name: &[u8], flag: u8, size: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    text(&mut block[0..100], name);
    octal(&mut block[100..108], u64::from(header.mode & 0o7777));
    octal(&mut block[108..116], u64::from(if header.uid > MAX_ID { 0 } else { header.uid }));
    octal(&mut block[116..124], u64::from(if header.gid > MAX_ID { 0 } else { header.gid }));
    octal(&mut block[124..136], if size > MAX_SIZE { 0 } else { size });
    octal(&mut block[136..148], plain_time(header.modified.0).unwrap_or(0));
    block[156] = flag;
    text(&mut block[157..257], &header.link);
    block[257..265].copy_from_slice(b"ustar\x0000");
    if matches!(header.kind, EntryKind::Character | EntryKind::Block) {
        octal(&mut block[329..337], u64::from(header.device.0));
        octal(&mut block[337..345], u64::from(header.device.1));
    }
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|&byte| u64::from(byte)).sum();
    octal(&mut block[148..155], sum);
    block
}

fn text(field: &mut [u8], value: &[u8]) {
    let kept = value.len().min(field.len());
    field[..kept].copy_from_slice(&value[..kept]);
}

/// Digits up to the last byte of the field, which stays zero.
fn octal(field: &mut [u8], value: u64) {
    let mut rest = value;
    for digit in field.iter_mut().rev().skip(1) {
        *digit = b'0' + u8::try_from(rest % 8).expect("a digit is below eight");
        rest /= 8;
    }
}

fn plain_time(seconds: i64) -> Option<u64> {
    u64::try_from(seconds).ok().filter(|seconds| *seconds <= MAX_SIZE)
}

/// Nanoseconds count upwards, also from a moment before 1970; in a decimal fraction they do not.
fn time(seconds: i64, nanoseconds: u32) -> String {
    if seconds >= 0 || nanoseconds == 0 {
        return format!("{seconds}.{nanoseconds:09}");
    }
    format!("-{}.{:09}", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanoseconds)
}

/// `LENGTH KEY=VALUE\n`, where the length counts its own digits.
fn put(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut total = rest + 1;
    while total != rest + total.to_string().len() {
        total = rest + total.to_string().len();
    }
    records.extend_from_slice(total.to_string().as_bytes());
    records.push(b' ');
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// How many pieces, and where each is; an empty one at the end says that the file ends with a hole.
fn map_of(pieces: &[std::ops::Range<u64>], size: u64) -> Vec<u8> {
    use std::io::Write as _;
    let tail = pieces.last().is_none_or(|last| last.end < size).then_some(size..size);
    let mut map = Vec::new();
    let _ = writeln!(map, "{}", pieces.len() + usize::from(tail.is_some()));
    for piece in pieces.iter().chain(tail.as_ref()) {
        let _ = write!(map, "{}\n{}\n", piece.start, piece.end - piece.start);
    }
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}
