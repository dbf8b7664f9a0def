//! Reads an archive, bytes as they come. Nothing in it is believed: lengths are bounded, and numbers checked.

use std::ops::Range;

use bytes::{Buf as _, Bytes, BytesMut};

use super::{BLOCK, BLOCK_BYTES, Damaged, EntryKind, Header, MAX_PIECES, MAX_RECORDS};

/// What comes next in an archive.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// An entry begins, with this header.
    Entry(Header),
    /// Data of the entry that began last, at this offset of the file.
    Data(u64, Bytes),
    /// The entry that began last is complete.
    EntryEnd,
}

/// Reads an archive part by part, as the parts arrive.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: BytesMut,
    state: State,
    /// What records say about the next entry.
    records: Records,
    /// What global records say about all that follow.
    global: Records,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Header,
    /// Records of so many bytes are to come.
    Records(RecordKind, u64),
    /// The map of an entry with holes is to come; so much of the entry is left.
    Map(Header, u64),
    /// Data is to come: where it goes, and how much padding follows.
    Data(Vec<Range<u64>>, u64),
    /// Padding is to come.
    Padding(u64),
    End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordKind {
    Next,
    All,
    LongName,
    LongLink,
}

#[derive(Debug, Default, Clone)]
struct Records {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    modified: Option<(i64, u32)>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    sparse_version: (u32, u32),
    sparse_name: Option<Vec<u8>>,
    sparse_size: Option<u64>,
}

type Read<T> = Result<T, Damaged>;

impl Decoder {
    /// More of the archive.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// What comes next; `None` until more is pushed, or after the end.
    pub fn next_event(&mut self) -> Read<Option<Event>> {
        loop {
            match std::mem::take(&mut self.state) {
                State::Header => {
                    if self.bytes.len() < BLOCK {
                        return Ok(None);
                    }
                    let block = self.bytes.split_to(BLOCK);
                    if let Some(event) = self.header(&block)? {
                        return Ok(Some(event));
                    }
                }
                State::Records(kind, length) => {
                    let whole = length.next_multiple_of(BLOCK_BYTES);
                    let Some(bytes) = self.take(whole) else {
                        self.state = State::Records(kind, length);
                        return Ok(None);
                    };
                    self.records(kind, &bytes[..to_usize(length)])?;
                }
                State::Map(header, left) => match self.map()? {
                    None => {
                        self.state = State::Map(header, left);
                        return Ok(None);
                    }
                    Some((pieces, used)) => return self.sparse(header, pieces, left, used).map(Some),
                },
                State::Data(mut pieces, padding) => {
                    pieces.retain(|piece| !piece.is_empty());
                    if pieces.is_empty() {
                        self.state = State::Padding(padding);
                        continue;
                    }
                    let event = self.data(&mut pieces[0]);
                    self.state = State::Data(pieces, padding);
                    return Ok(event);
                }
                State::Padding(length) => {
                    if self.take(length).is_none() {
                        self.state = State::Padding(length);
                        return Ok(None);
                    }
                    return Ok(Some(Event::EntryEnd));
                }
                State::End => {
                    self.state = State::End;
                    self.bytes.clear();
                    return Ok(None);
                }
            }
        }
    }

    /// Whether the archive came to its end; one that was cut off did not.
    pub fn is_complete(&self) -> bool {
        matches!(self.state, State::End)
    }

    fn take(&mut self, length: u64) -> Option<Bytes> {
        let length = to_usize(length);
        (self.bytes.len() >= length).then(|| self.bytes.split_to(length).freeze())
    }

    fn header(&mut self, block: &[u8]) -> Read<Option<Event>> {
        if block.iter().all(|&byte| byte == 0) {
            self.state = State::End;
            return Ok(None);
        }
        check_sum(block)?;
        let size = self.records.size.unwrap_or(number(&block[124..136])?);
        let kind = match block[156] {
            flag @ (b'x' | b'X' | b'g' | b'L' | b'K') => {
                let kind = match flag {
                    b'g' => RecordKind::All,
                    b'L' => RecordKind::LongName,
                    b'K' => RecordKind::LongLink,
                    _ => RecordKind::Next,
                };
                let size = number(&block[124..136])?;
                if size > MAX_RECORDS {
                    return Err(Damaged::new(format!(
                        "the archive has {size} bytes of records for one entry"
                    )));
                }
                self.state = State::Records(kind, size);
                return Ok(None);
            }
            b'0' | b'\0' | b'7' if field(&block[0..100]).ends_with(b"/") => EntryKind::Directory,
            b'0' | b'\0' | b'7' => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' => EntryKind::Character,
            b'4' => EntryKind::Block,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            other => {
                return Err(Damaged::new(format!(
                    "the archive has an entry of the type {:?}, which is not known here",
                    char::from(other)
                )));
            }
        };
        self.entry(block, kind, size)
    }

    fn entry(&mut self, block: &[u8], kind: EntryKind, size: u64) -> Read<Option<Event>> {
        let next = std::mem::take(&mut self.records);
        let global = &self.global;
        let path = next.path.or_else(|| global.path.clone()).unwrap_or_else(|| plain_path(block));
        let header = Header {
            path,
            kind,
            mode: small(&block[100..108])? & 0o7777,
            uid: next.uid.or(global.uid).map_or_else(|| small(&block[108..116]), Ok)?,
            gid: next.gid.or(global.gid).map_or_else(|| small(&block[116..124]), Ok)?,
            size: if kind == EntryKind::File { size } else { 0 },
            modified: match next.modified.or(global.modified) {
                Some(time) => time,
                None => (i64::try_from(number(&block[136..148])?).unwrap_or(i64::MAX), 0),
            },
            device: match kind {
                EntryKind::Character | EntryKind::Block => {
                    (small(&block[329..337])?, small(&block[337..345])?)
                }
                _ => (0, 0),
            },
            link: next.link.unwrap_or_else(|| field(&block[157..257]).to_vec()),
            xattrs: next.xattrs,
            pieces: None,
        };
        // Some writers give links and directories a size, and then no data.
        let stored = if kind == EntryKind::File { size } else { 0 };
        if next.sparse_version == (1, 0) && kind == EntryKind::File {
            let real =
                next.sparse_size.ok_or_else(|| Damaged::new("an entry with holes does not tell its size"))?;
            let path = next.sparse_name.unwrap_or(header.path);
            let header = Header { path, size: real, ..header };
            self.state = State::Map(header, stored);
            return Ok(None);
        }
        if next.sparse_version != (0, 0) || next.sparse_size.is_some() {
            return Err(Damaged::new("the archive has an entry with holes in a form that is not known here"));
        }
        let whole = 0..stored;
        self.state = State::Data(vec![whole], padding(stored));
        Ok(Some(Event::Entry(header)))
    }

    /// The map at the beginning of an entry with holes, and how long it is; `None` until it is all there.
    fn map(&self) -> Read<Option<(Vec<Range<u64>>, u64)>> {
        let mut numbers = Vec::new();
        let mut used = 0;
        while let Some(end) = self.bytes[used..].iter().position(|&byte| byte == b'\n') {
            let line = std::str::from_utf8(&self.bytes[used..used + end]).ok();
            let number: u64 = line.and_then(|line| line.parse().ok()).ok_or_else(bad_map)?;
            used += end + 1;
            numbers.push(number);
            let count = to_usize(numbers[0]);
            if count > MAX_PIECES + 1 {
                return Err(bad_map());
            }
            if numbers.len() == 1 + 2 * count {
                let whole = used.next_multiple_of(BLOCK);
                if self.bytes.len() < whole {
                    return Ok(None);
                }
                let pieces = numbers[1..].chunks(2).map(|piece| {
                    let end = piece[0].checked_add(piece[1]).ok_or_else(bad_map)?;
                    Ok(piece[0]..end)
                });
                return Ok(Some((
                    pieces.collect::<Read<_>>()?,
                    u64::try_from(whole).map_err(|_| bad_map())?,
                )));
            }
        }
        // A number has at most twenty digits.
        let limit = (MAX_PIECES * 2 + 3) * 21;
        if self.bytes.len() > limit || self.bytes.len() - used > 21 { Err(bad_map()) } else { Ok(None) }
    }

    fn sparse(&mut self, header: Header, pieces: Vec<Range<u64>>, left: u64, used: u64) -> Read<Event> {
        let sorted = pieces.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let stored: u64 = pieces.iter().map(|piece| piece.end - piece.start).sum();
        let inside = pieces.last().is_none_or(|last| last.end <= header.size);
        if !sorted || !inside || used.checked_add(stored) != Some(left) {
            return Err(bad_map());
        }
        let _ = self.take(used);
        let pieces: Vec<Range<u64>> = pieces.into_iter().filter(|piece| !piece.is_empty()).collect();
        self.state = State::Data(pieces.clone(), padding(left));
        Ok(Event::Entry(Header { pieces: Some(pieces), ..header }))
    }

    /// What is there of a piece, which is shorter by that then.
    fn data(&mut self, piece: &mut Range<u64>) -> Option<Event> {
        let length = self.bytes.len().min(to_usize(piece.end - piece.start));
        if length == 0 {
            return None;
        }
        let offset = piece.start;
        piece.start += u64::try_from(length).unwrap_or(u64::MAX);
        Some(Event::Data(offset, self.bytes.split_to(length).freeze()))
    }

    fn records(&mut self, kind: RecordKind, bytes: &[u8]) -> Read<()> {
        match kind {
            RecordKind::LongName => self.records.path = Some(field(bytes).to_vec()),
            RecordKind::LongLink => self.records.link = Some(field(bytes).to_vec()),
            RecordKind::Next => self.records.read(bytes)?,
            RecordKind::All => self.global.read(bytes)?,
        }
        Ok(())
    }
}

impl Records {
    fn read(&mut self, mut bytes: &[u8]) -> Read<()> {
        let bad = || Damaged::new("the archive has a record that makes no sense");
        while !bytes.is_empty() {
            let space = bytes.iter().position(|&byte| byte == b' ').ok_or_else(bad)?;
            let length: usize = std::str::from_utf8(&bytes[..space])
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(bad)?;
            if length <= space + 1 || length > bytes.len() || bytes[length - 1] != b'\n' {
                return Err(bad());
            }
            let record = &bytes[space + 1..length - 1];
            let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(bad)?;
            self.set(&record[..equals], &record[equals + 1..]).ok_or_else(bad)?;
            bytes.advance(length);
        }
        Ok(())
    }

    /// `None` if the value makes no sense; keys that are not known are nobody's business.
    fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let number = || std::str::from_utf8(value).ok()?.parse::<u64>().ok();
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(number()?),
            b"uid" => self.uid = Some(number()?.try_into().ok()?),
            b"gid" => self.gid = Some(number()?.try_into().ok()?),
            b"mtime" => self.modified = Some(time(std::str::from_utf8(value).ok()?)?),
            b"GNU.sparse.major" => self.sparse_version.0 = number()?.try_into().ok()?,
            b"GNU.sparse.minor" => self.sparse_version.1 = number()?.try_into().ok()?,
            b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.sparse_size = Some(number()?),
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    self.xattrs.push((name.to_vec(), value.to_vec()));
                }
            }
        }
        Some(())
    }
}

fn bad_map() -> Damaged {
    Damaged::new("the archive has a map of holes that makes no sense")
}

fn to_usize(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

fn padding(stored: u64) -> u64 {
    stored.next_multiple_of(BLOCK_BYTES) - stored
}

/// The field up to its first NUL.
fn field(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

/// The name of a plain header; ustar has its beginning in another field.
fn plain_path(block: &[u8]) -> Vec<u8> {
    let name = field(&block[0..100]);
    let prefix = field(&block[345..500]);
    if &block[257..263] == b"ustar\0" && !prefix.is_empty() {
        return [prefix, b"/", name].concat();
    }
    name.to_vec()
}

fn check_sum(block: &[u8]) -> Read<()> {
    let said = number(&block[148..156])?;
    let counted =
        |(index, &byte): (usize, &u8)| u64::from(if (148..156).contains(&index) { b' ' } else { byte });
    let sum: u64 = block.iter().enumerate().map(counted).sum();
    if said == sum {
        Ok(())
    } else {
        Err(Damaged::new("the archive is damaged: a header's checksum is wrong"))
    }
}

/// Octal digits, or GNU's binary numbers, whose first bit is set.
fn number(bytes: &[u8]) -> Read<u64> {
    let bad = || Damaged::new("the archive is damaged: a header has a number that is none");
    if bytes[0] & 0x80 != 0 {
        let mut value = u128::from(bytes[0] & 0x7f);
        for &byte in &bytes[1..] {
            value = value << 8 | u128::from(byte);
        }
        return u64::try_from(value).map_err(|_| bad());
    }
    let text = field(bytes).trim_ascii();
    if text.is_empty() {
        return Ok(0);
    }
    let text = std::str::from_utf8(text).map_err(|_| bad())?;
    u64::from_str_radix(text, 8).map_err(|_| bad())
}

fn small(bytes: &[u8]) -> Read<u32> {
    u32::try_from(number(bytes)?).map_err(|_| Damaged::new("the archive is damaged: a number is too large"))
}

/// Seconds with a fraction, of which nanoseconds count.
fn time(text: &str) -> Option<(i64, u32)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let seconds: i64 = if whole.is_empty() || whole == "-" { 0 } else { whole.parse().ok()? };
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanoseconds: u32 = digits.parse().ok()?;
    if text.starts_with('-') && nanoseconds > 0 {
        return Some((seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds));
    }
    Some((seconds, nanoseconds))
}
