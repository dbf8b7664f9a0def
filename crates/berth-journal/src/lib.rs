//! A journal of keyed records: a process's memory across restarts.
//!
//! One file of lines, each `<crc32> ["<key>",<json>]`; the last line of a key counts, and a line without a value
//! removes it. A line is the unit of everything: of a write, of damage (a bad line is set aside, the others live
//! on), and of repair by hand. The file is rewritten with only its live lines when more than half of it is dead.
//!
//! [`Journal`] survives a killed process; [`GroupCommit`] on top of it survives a power cut, with one fsync for all
//! callers that wait at the same time.

mod group_commit;
#[cfg(test)]
mod tests;

use std::{
    borrow::Cow,
    collections::HashMap,
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    os::{fd::AsFd, unix::fs::FileExt},
};

use berth_host::path::Dir;
use rustix::fs::{FallocateFlags, fallocate, fdatasync, ftruncate};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

pub use self::group_commit::{Barrier, GroupCommit};

const HEADER: &str = "berth-journal 1\n";
/// Room is allocated ahead in steps of this.
const STEP: u64 = 1 << 20;
/// What only removals may use, so that a full disk can be emptied.
const RESERVE: u64 = 64 << 10;
/// Below this size rewriting is not worth it.
const SMALL: u64 = 4 << 20;
/// Damaged lines are kept here, below the journal's directory.
const CORRUPT: &str = "corrupt";

/// One change to a journal.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// Sets a key's record, JSON without line breaks.
    Put {
        /// The key.
        key: &'a str,
        /// The record.
        json: &'a [u8],
    },
    /// Forgets a key.
    Remove {
        /// The key.
        key: &'a str,
    },
}

/// What was wrong with a journal when it was opened.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Lines set aside.
    pub lines: usize,
}

/// Why a journal could not be read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The disk is full.
    #[error("no room left to record the change: {0}")]
    Full(String),
    /// Anything else.
    #[error("{0}")]
    Broken(String),
}

impl From<berth_host::Error> for Error {
    fn from(error: berth_host::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full(error.sentence()),
            _ => Self::Broken(error.sentence()),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Span {
    offset: u64,
    length: u32,
}

/// A journal file, open for appending.
#[derive(Debug)]
pub struct Journal {
    dir: Dir,
    name: String,
    file: File,
    /// Where the next line goes.
    length: u64,
    /// How far room has been allocated.
    allocated: u64,
    /// Where each key's line is.
    live: HashMap<u128, Span>,
    live_bytes: u64,
    /// Set when the file's content is no longer known, after a failed fsync or truncation.
    broken: Option<String>,
}

impl Journal {
    /// Opens or makes the journal `name` in `dir` and hands over every live record, in the order written.
    pub fn open(
        dir: &Dir,
        name: &str,
        on_record: &mut dyn FnMut(&str, &[u8]),
    ) -> Result<(Self, Damage), Error> {
        dir.remove_file(&format!("{name}.new"))?;
        if !dir.exists(name)? {
            dir.write_atomically(name, HEADER.as_bytes())?;
        }
        let mut journal = Self {
            dir: Dir::open(dir.path())?,
            name: name.to_owned(),
            file: dir.open_file(name, true)?,
            length: 0,
            allocated: 0,
            live: HashMap::new(),
            live_bytes: 0,
            broken: None,
        };
        let broken = |error: io::Error| Error::Broken(format!("read the journal {name}: {error}"));
        let bad = journal.index().map_err(broken)?;
        for line in &bad {
            journal.set_aside(line)?;
        }
        journal.replay(on_record).map_err(broken)?;
        if !bad.is_empty() || journal.is_mostly_dead() {
            journal.rewrite()?;
        }
        Ok((journal, Damage { lines: bad.len() }))
    }

    /// Appends the entries in one write. They survive a killed process at once, a power cut after [`Journal::sync`].
    pub fn write(&mut self, entries: &[Entry<'_>]) -> Result<(), Error> {
        if let Some(why) = &self.broken {
            return Err(Error::Broken(format!("the journal {} is out of order until a restart: {why}", self.name)));
        }
        if self.is_mostly_dead() {
            self.rewrite()?;
        }
        let mut buffer = Vec::with_capacity(256 * entries.len());
        let mut spans = Vec::with_capacity(entries.len());
        for entry in entries {
            let start = buffer.len();
            encode(entry, &mut buffer);
            let length = u32::try_from(buffer.len() - start)
                .map_err(|_| Error::Broken("a record is larger than 4 GiB".to_owned()))?;
            spans.push(Span { offset: self.length + start as u64, length });
        }
        self.make_room(buffer.len() as u64, entries.iter().all(|entry| matches!(entry, Entry::Remove { .. })))?;
        if let Err(error) = self.file.write_all_at(&buffer, self.length) {
            // A part of a line may be there: cut it off, or nothing may be appended after it.
            if let Err(cut) = ftruncate(self.file.as_fd(), self.length) {
                self.broken = Some(format!("cut off half a line: {cut}"));
            }
            return Err(self.failed(&error));
        }
        self.length += buffer.len() as u64;
        for (entry, span) in entries.iter().zip(spans) {
            match entry {
                Entry::Put { key, .. } => self.track(key, Some(span)),
                Entry::Remove { key } => self.track(key, None),
            }
        }
        Ok(())
    }

    /// Makes everything written so far survive a power cut.
    pub fn sync(&mut self) -> Result<(), Error> {
        fdatasync(self.file.as_fd()).map_err(|error| {
            // The kernel drops the dirty pages of a failed fsync: what is on disk is unknown from here on.
            self.broken = Some(format!("fsync: {error}"));
            self.failed(&error.into())
        })
    }

    fn failed(&self, error: &io::Error) -> Error {
        let sentence = format!("write the journal {}: {error}", self.name);
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::Full(sentence),
            _ => Error::Broken(sentence),
        }
    }

    fn make_room(&mut self, needed: u64, only_removals: bool) -> Result<(), Error> {
        let wanted = self.length + needed + if only_removals { 0 } else { RESERVE };
        if wanted <= self.allocated {
            return Ok(());
        }
        let target = wanted.next_multiple_of(STEP);
        match fallocate(self.file.as_fd(), FallocateFlags::KEEP_SIZE, 0, target) {
            Ok(()) => self.allocated = target,
            Err(error) if !only_removals && io::Error::from(error).kind() == io::ErrorKind::StorageFull => {
                return Err(self.failed(&error.into()));
            }
            // A filesystem without fallocate, or a removal on a full disk: the write itself will tell.
            Err(_) => {}
        }
        Ok(())
    }

    fn track(&mut self, key: &str, span: Option<Span>) {
        let old = match span {
            Some(span) => {
                self.live_bytes += u64::from(span.length);
                self.live.insert(hash(key), span)
            }
            None => self.live.remove(&hash(key)),
        };
        self.live_bytes -= old.map_or(0, |old| u64::from(old.length));
    }

    fn is_mostly_dead(&self) -> bool {
        self.length > SMALL && self.live_bytes * 2 < self.length
    }

    /// Reads the file once, notes where each key's last line is, and returns the lines that make no sense.
    fn index(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut bad = Vec::new();
        let mut reader = BufReader::with_capacity(1 << 18, self.file.try_clone()?);
        let mut line = Vec::new();
        let mut offset = 0u64;
        loop {
            line.clear();
            let length = reader.read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n') {
                // Nothing, or the beginning of a line whose writer was killed: it was never acknowledged.
                break;
            }
            let span = Span { offset, length: u32::try_from(length).unwrap_or(u32::MAX) };
            match decode(&line) {
                Some((key, value)) => self.track(&key, value.map(|_| span)),
                None if offset == 0 && line == HEADER.as_bytes() => {}
                None => bad.push(line.clone()),
            }
            offset += length as u64;
        }
        self.length = offset;
        ftruncate(self.file.as_fd(), offset)?;
        Ok(bad)
    }

    fn replay(&self, on_record: &mut dyn FnMut(&str, &[u8])) -> io::Result<()> {
        self.each_live_line(&mut |line| {
            if let Some((key, Some(value))) = decode(line) {
                on_record(&key, value.get().as_bytes());
            }
            Ok(())
        })
    }

    fn each_live_line(&self, visit: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let mut spans: Vec<Span> = self.live.values().copied().collect();
        spans.sort_unstable_by_key(|span| span.offset);
        let mut reader = BufReader::with_capacity(1 << 18, &self.file);
        let mut position = reader.seek(SeekFrom::Start(0))?;
        let mut line = Vec::new();
        for span in spans {
            reader.seek_relative(span.offset.cast_signed() - position.cast_signed())?;
            line.resize(span.length as usize, 0);
            reader.read_exact(&mut line)?;
            position = span.offset + u64::from(span.length);
            visit(&line)?;
        }
        Ok(())
    }

    /// Replaces the file by one with only the live lines.
    fn rewrite(&mut self) -> Result<(), Error> {
        let new_name = format!("{}.new", self.name);
        let broken = |error: &dyn std::fmt::Display| Error::Broken(format!("rewrite the journal: {error}"));
        self.dir.remove_file(&new_name).map_err(|error| broken(&error.sentence()))?;
        let file = self.dir.create_file(&new_name, 0o600).map_err(|error| broken(&error.sentence()))?;
        let mut live = HashMap::with_capacity(self.live.len());
        let mut length = HEADER.len() as u64;
        let written = (|| {
            let mut writer = BufWriter::with_capacity(1 << 18, &file);
            writer.write_all(HEADER.as_bytes())?;
            self.each_live_line(&mut |line| {
                if let Some((key, _)) = decode(line) {
                    live.insert(hash(&key), Span { offset: length, length: u32::try_from(line.len()).unwrap_or(0) });
                    length += line.len() as u64;
                    writer.write_all(line)?;
                }
                Ok(())
            })?;
            writer.flush()?;
            drop(writer);
            file.sync_all()?;
            rustix::fs::renameat(self.dir.as_fd(), &new_name, self.dir.as_fd(), &self.name)?;
            rustix::fs::fsync(self.dir.as_fd())?;
            io::Result::Ok(())
        })();
        if let Err(error) = written {
            // The old file is still whole and still open, so nothing is lost; a half-made new one is removed.
            let _ = self.dir.remove_file(&new_name);
            return Err(self.failed(&error));
        }
        self.file = self.dir.open_file(&self.name, true).map_err(|error| broken(&error.sentence()))?;
        self.live_bytes = length - HEADER.len() as u64;
        (self.live, self.length, self.allocated) = (live, length, 0);
        Ok(())
    }

    fn set_aside(&self, line: &[u8]) -> Result<(), Error> {
        let corrupt = self.dir.ensure_dir(CORRUPT, 0o700)?;
        let name = format!("{}-{:032x}", self.name, hash(&String::from_utf8_lossy(line)));
        corrupt.write_atomically(&name, line)?;
        tracing::error!(
            journal = %self.name,
            kept_in = %corrupt.child_path(&name).display(),
            "a damaged record was set aside; the data it described is kept, not deleted"
        );
        Ok(())
    }
}

fn hash(key: &str) -> u128 {
    let digest = Sha256::digest(key.as_bytes());
    u128::from_le_bytes(std::array::from_fn(|index| digest[index]))
}

fn encode(entry: &Entry<'_>, buffer: &mut Vec<u8>) {
    let start = buffer.len();
    buffer.extend_from_slice(b"00000000 [");
    let (key, json) = match entry {
        Entry::Put { key, json } => (key, *json),
        Entry::Remove { key } => (key, b"null".as_slice()),
    };
    serde_json::to_writer(&mut *buffer, key).expect("a string always becomes JSON");
    buffer.push(b',');
    buffer.extend_from_slice(json);
    buffer.push(b']');
    let checksum = format!("{:08x}", crc32fast::hash(&buffer[start + 9..]));
    buffer[start..start + 8].copy_from_slice(checksum.as_bytes());
    buffer.push(b'\n');
}

type Decoded<'a> = (Cow<'a, str>, Option<&'a RawValue>);

fn decode(line: &[u8]) -> Option<Decoded<'_>> {
    let body = line.strip_suffix(b"\n")?;
    let (checksum, body) = body.split_at_checked(9)?;
    let checksum = u32::from_str_radix(std::str::from_utf8(checksum).ok()?.strip_suffix(' ')?, 16).ok()?;
    if crc32fast::hash(body) != checksum {
        return None;
    }
    #[derive(serde::Deserialize)]
    struct Line<'a>(#[serde(borrow)] Cow<'a, str>, #[serde(borrow)] &'a RawValue);
    let Line(key, value) = serde_json::from_slice(body).ok()?;
    Some((key, (value.get() != "null").then_some(value)))
}
