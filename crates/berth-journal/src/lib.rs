//! A journal of keyed records: a process's memory across restarts.
//!
//! One file of lines, each with a checksum, a key and JSON; the last line of a key counts, and a line without a value removes
//! the key. [`Journal`] survives a killed process; [`GroupCommit`] on top of it survives a power cut, with one fsync for all
//! callers that wait at the same time.
//!
//! ```text
//!  callers ──► GroupCommit ──► Journal::write ──► one write of all their lines
//!                              Journal::sync  ──► one fdatasync, then the high-water mark (no sync of its own)
//!  next start: Journal::open ─► Scan reads every line ─► live records, Damage
//! ```
//!
//! # Guarantees
//!
//! - What [`GroupCommit`] acknowledged is there after a power cut.
//! - Damage is never served as something else. Lines are numbered and carry the checksum of the line before; the number of the
//!   last line that was synced stands in a second file, the high-water mark (`<name>.mark`). So a line that was changed, a
//!   piece that is missing and an end that was cut off are all noticed. A key whose newest line is damaged is *quarantined*: it
//!   has no value, neither an older one nor, if the line removed it, the one before that ([`Damage::quarantined`]).
//! - Nothing is thrown away: damaged lines, with what was known of their keys before, are kept in `corrupt/`, and what a killed
//!   writer left of a line in `<name>.unfinished`.
//! - A writer that is killed between the write and the acknowledgement leaves no damage.
//!
//! The file is rewritten with only its live lines when more than half of it is dead, by a thread beside the writers; the disk is
//! never filled so far that this could not be done. Read [`Journal::open`] first, then `scan.rs`.
//!
//! ```
//! use berth_host::path::Dir;
//! use berth_journal::{Entry, Journal};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! let directory = Dir::open(directory.path())?;
//! let (mut journal, _) = Journal::open(&directory, "volumes", &mut |_, _| {})?;
//! journal.write(&[Entry::Put { key: "a", json: b"1" }])?;
//! journal.sync()?;
//! drop(journal);
//!
//! let mut found = Vec::new();
//! Journal::open(&directory, "volumes", &mut |key, json| found.push((key.to_owned(), json.to_vec())))?;
//! assert_eq!(found, [("a".to_owned(), b"1".to_vec())]);
//! # Ok(())
//! # }
//! ```

mod group_commit;
mod line;
mod rewrite;
mod scan;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom},
    os::{fd::AsFd, unix::fs::FileExt},
    path::Path,
};

use berth_host::path::Dir;
use rustix::fs::{FallocateFlags, fallocate, fdatasync, ftruncate};
use sha2::{Digest, Sha256};

pub use self::group_commit::{Barrier, GroupCommit};
use self::{
    line::{Checkpoint, Link, Position},
    rewrite::Rewrite,
    scan::{BadLine, Scan, low},
};

const HEADER: &str = "berth-journal 2\n";
/// What journals of earlier versions begin with: their lines have no numbers.
const OLD_HEADER: &str = "berth-journal 1\n";
/// Room is allocated ahead, and filled with zeros, in steps of this.
const STEP: u64 = 1 << 20;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// What only removals may use, so that a full disk can be emptied.
const RESERVE: u64 = 64 << 10;
/// Below this size rewriting is not worth it.
const SMALL: u64 = 4 << 20;
/// Damaged lines are kept here, below the journal's directory.
pub const CORRUPT: &str = "corrupt";
/// What stands before the key in a file there.
const QUARANTINED: &str = "quarantined: ";

/// One change to a journal.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// Sets a key's record.
    Put {
        /// The key that the record is found by.
        key: &'a str,
        /// The record, as JSON; its line breaks, if any, become spaces.
        json: &'a [u8],
    },
    /// Removes a key and its record.
    Remove {
        /// The key whose record is removed; none need exist.
        key: &'a str,
    },
}

/// What was wrong with a journal when it was opened.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Damage {
    /// How many lines could not be read, and were set aside.
    pub lines: usize,
    /// How many lines, written and acknowledged, are not there at all.
    pub missing: u64,
    /// Keys of which nothing is known because a line about them is damaged, now or since an earlier start. They have no value
    /// until somebody writes them again.
    pub quarantined: BTreeSet<String>,
    /// Something of this journal was set aside at an earlier start, and nobody has removed it since.
    pub earlier: bool,
    /// It was not there, or not even its beginning.
    pub new: bool,
}

impl Damage {
    /// Whether something that was acknowledged cannot be read, or is missing, as far as can still be seen.
    pub fn is_damaged(&self) -> bool {
        self.lines > 0 || self.missing > 0 || self.earlier || !self.quarantined.is_empty()
    }
}

/// Why a journal could not be read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The disk is full.
    #[error("no room left to record the change: {0}")]
    Full(String),
    /// The journal could not be read or written for another reason.
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
    /// Where the high-water mark is written; none where there was no room to make the file.
    mark: Option<File>,
    /// What the mark says.
    marked: Option<Link>,
    /// The last line that was written.
    last: Link,
    /// Where the next line goes.
    length: u64,
    /// How many bytes of the file are no records: its header and its checkpoint.
    preamble: u64,
    /// How far room has been allocated.
    allocated: u64,
    /// Where each key's line is.
    live: HashMap<u128, Span>,
    live_bytes: u64,
    rewrite: Option<Rewrite>,
    /// After a rewrite that failed, the length at which it is tried again.
    patience: u64,
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
        let exists = dir.exists(name)?;
        if !exists {
            dir.write_atomically(name, HEADER.as_bytes())?;
        }
        let file = dir.open_file(name, true)?;
        let broken = |error: io::Error| Error::Broken(format!("read the journal {name}: {error}"));
        let marked = read_mark(dir, name)?;
        let mut scan = Scan::read(&file, marked).map_err(broken)?;
        let mut journal = Self {
            dir: Dir::open(dir.path())?,
            name: name.to_owned(),
            file,
            mark: None,
            marked,
            last: scan.last,
            length: scan.end,
            preamble: scan.preamble,
            allocated: 0,
            live: std::mem::take(&mut scan.live),
            live_bytes: scan.live_bytes,
            rewrite: None,
            patience: 0,
            broken: None,
        };
        let earlier = journal.has_set_aside()?;
        journal.set_aside_all(&scan)?;
        ftruncate(journal.file.as_fd(), journal.length).map_err(|error| broken(error.into()))?;
        journal.replay(on_record).map_err(broken)?;
        if !scan.bad.is_empty() || scan.missing > 0 || scan.has_holes {
            journal.rewrite_now()?;
        }
        journal.open_mark();
        // So that a disk that fills up from now on can be emptied; one that is full has to do without.
        let _ = journal.allocate(journal.length + RESERVE);
        let damage = Damage {
            lines: scan.bad.len(),
            missing: scan.missing,
            quarantined: journal.quarantined()?,
            earlier,
            new: !exists || !scan.has_header,
        };
        Ok((journal, damage))
    }

    /// Appends the entries in one write. They survive a killed process at once, a power cut after [`Journal::sync`].
    pub fn write(&mut self, entries: &[Entry<'_>]) -> Result<(), Error> {
        self.append(entries, entries.iter().all(|entry| matches!(entry, Entry::Remove { .. })))
    }

    /// Like [`Journal::write`], for the few small records without which nothing can be removed from a full disk.
    pub fn write_from_reserve(&mut self, entries: &[Entry<'_>]) -> Result<(), Error> {
        self.append(entries, true)
    }

    fn append(&mut self, entries: &[Entry<'_>], from_reserve: bool) -> Result<(), Error> {
        if let Some(why) = &self.broken {
            return Err(Error::Broken(format!(
                "the journal {} is out of order until a restart: {why}",
                self.name
            )));
        }
        self.advance_rewrite();
        let mut buffer = Vec::with_capacity(256 * entries.len());
        let mut spans = Vec::with_capacity(entries.len());
        let mut last = self.last;
        for (entry, index) in entries.iter().zip(0..) {
            let start = buffer.len();
            let (Entry::Put { key, .. } | Entry::Remove { key }) = entry;
            let key = hash(key);
            let position = Position { number: last.number + 1, index, previous: last.crc };
            let crc = line::encode(entry, low(key), position, &mut buffer);
            last = Link { number: position.number, crc };
            let length = u32::try_from(buffer.len() - start)
                .map_err(|_| Error::Broken("a record is larger than 4 GiB".to_owned()))?;
            spans.push((key, Span { offset: start as u64, length }));
        }
        self.make_room(buffer.len() as u64, from_reserve)?;
        if let Err(error) = self.file.write_all_at(&buffer, self.length) {
            // A part of a line may be there: cut it off, or nothing may be appended after it.
            if let Err(cut) = ftruncate(self.file.as_fd(), self.length) {
                self.broken = Some(format!("cut off half a line: {cut}"));
            }
            self.allocated = 0;
            return Err(self.failed(&error));
        }
        let keys: Vec<u128> = entries
            .iter()
            .zip(spans)
            .map(|(entry, (key, span))| {
                let span = Span { offset: self.length + span.offset, ..span };
                self.track(key, matches!(entry, Entry::Put { .. }).then_some(span));
                key
            })
            .collect();
        self.length += buffer.len() as u64;
        self.last = last;
        if let Some(rewrite) = &mut self.rewrite {
            rewrite.note(keys.into_iter(), self.length);
        }
        Ok(())
    }

    /// Makes everything written so far survive a power cut.
    pub fn sync(&mut self) -> Result<(), Error> {
        fdatasync(self.file.as_fd()).map_err(|error| {
            // The kernel drops the dirty pages of a failed fsync: what is on disk is unknown from here on.
            self.broken = Some(format!("fsync: {error}"));
            // Also where a thin disk has no room: it is too late to take the change back.
            Error::Broken(format!("write the journal {}: {error}", self.name))
        })?;
        self.move_mark();
        Ok(())
    }

    /// Notes that everything up to the last line is on the disk.
    ///
    /// The mark is not synced: it may be older than the journal, which then has more than it says, and never newer. It is
    /// overwritten in place, within a sector, so that it needs no room and is never half written.
    fn move_mark(&mut self) {
        if self.marked == Some(self.last) {
            return;
        }
        if let Some(mark) = &self.mark
            && mark.write_all_at(&encode_mark(self.last), 0).is_ok()
        {
            self.marked = Some(self.last);
        }
    }

    /// Opens the mark, and moves it to the end of what was read, once that is on the disk.
    fn open_mark(&mut self) {
        let name = mark_name(&self.name);
        if self.marked.is_none() {
            if self.dir.write_atomically(&name, &encode_mark(Link::default())).is_err() {
                // A full disk: without a mark, an end that is cut off later cannot be noticed.
                return;
            }
            self.marked = Some(Link::default());
        }
        self.mark = self.dir.open_file(&name, true).ok();
        if self.marked != Some(self.last) && fdatasync(self.file.as_fd()).is_ok() {
            self.move_mark();
        }
    }

    fn failed(&self, error: &io::Error) -> Error {
        let sentence = format!("write the journal {}: {error}", self.name);
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Error::Full(sentence),
            _ => Error::Broken(sentence),
        }
    }

    fn make_room(&mut self, needed: u64, from_reserve: bool) -> Result<(), Error> {
        if from_reserve {
            if self.length + needed > self.allocated {
                // When this fails on a full disk, the write itself will fail.
                let _ = self.allocate(self.length + needed);
            }
            return Ok(());
        }
        if self.length + needed + RESERVE <= self.allocated {
            return Ok(());
        }
        if !self.leaves_room_to_rewrite(needed)?
            && (self.rewrite.is_some() || self.dead_bytes() * 8 > self.length)
        {
            self.rewrite_now()?;
        }
        if !self.leaves_room_to_rewrite(needed)? {
            return Err(Error::Full(format!(
                "the journal {} holds {} bytes, and the disk has not as many left to rewrite it one day",
                self.name, self.live_bytes
            )));
        }
        self.allocate((self.length + needed + RESERVE).next_multiple_of(STEP))
    }

    fn allocate(&mut self, target: u64) -> Result<(), Error> {
        match fallocate(self.file.as_fd(), FallocateFlags::KEEP_SIZE, 0, target) {
            Ok(()) => {
                self.fill_with_zeros(self.allocated.max(self.length), target);
                self.allocated = target;
            }
            Err(error) if io::Error::from(error).kind() == io::ErrorKind::StorageFull => {
                return Err(self.failed(&error.into()));
            }
            // A filesystem without fallocate: the write itself will fail.
            Err(_) => {}
        }
        Ok(())
    }

    /// Makes later writes overwrite what is there: a sync then has only their own bytes to wait for, not the change of
    /// the file's length, which takes half as long again. What the zeros do not reach is merely slower.
    fn fill_with_zeros(&self, from: u64, to: u64) {
        // Where nothing is ever overwritten in place, there is nothing to gain.
        if berth_host::btrfs::is_btrfs(self.dir.path()).unwrap_or(true) {
            return;
        }
        let mut offset = from;
        while offset < to {
            let length = usize::try_from(to - offset).map_or(ZEROS.len(), |left| left.min(ZEROS.len()));
            if self.file.write_all_at(&ZEROS[..length], offset).is_err() {
                return;
            }
            offset += length as u64;
        }
    }

    /// Whether, after `needed` more bytes, the live lines still fit on the disk a second time.
    fn leaves_room_to_rewrite(&self, needed: u64) -> Result<bool, Error> {
        Ok(self.dir.free_space()?.available >= self.live_bytes + needed + STEP)
    }

    fn track(&mut self, key: u128, span: Option<Span>) {
        let old = match span {
            Some(span) => {
                self.live_bytes += u64::from(span.length);
                self.live.insert(key, span)
            }
            None => self.live.remove(&key),
        };
        self.live_bytes -= old.map_or(0, |old| u64::from(old.length));
    }

    fn dead_bytes(&self) -> u64 {
        self.length.saturating_sub(self.preamble + self.live_bytes)
    }

    fn is_mostly_dead(&self) -> bool {
        self.length > SMALL && self.live_bytes * 2 < self.length
    }

    fn replay(&self, on_record: &mut dyn FnMut(&str, &[u8])) -> io::Result<()> {
        self.each_live_line(&mut |line| {
            if let Some((key, Some(value))) = line::decode_checked(line) {
                on_record(&key, value);
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

    /// Begins a rewrite when it is time, and completes one that is ready.
    fn advance_rewrite(&mut self) {
        let outcome = match &self.rewrite {
            // Writers that outrun the copying thread wait for it, or the file would grow without bound.
            Some(rewrite) if rewrite.is_ready() || self.length > 2 * rewrite.began_at + SMALL => {
                self.switch_over()
            }
            None if self.is_mostly_dead() && self.length > self.patience => self.begin_rewrite(),
            _ => Ok(()),
        };
        if let Err(error) = outcome {
            // The old file is still whole and in use: nothing is lost but room.
            self.patience = self.length + (self.length / 4).max(STEP);
            tracing::warn!(journal = %self.name, %error, "the journal could not be rewritten; it stays as it is");
        }
    }

    fn rewrite_now(&mut self) -> Result<(), Error> {
        if self.rewrite.is_none() {
            self.begin_rewrite()?;
        }
        self.switch_over()
    }

    fn begin_rewrite(&mut self) -> Result<(), Error> {
        let new_name = format!("{}.new", self.name);
        self.dir.remove_file(&new_name)?;
        let new = self.dir.create_file(&new_name, 0o600)?;
        let live: Vec<_> = self.live.iter().map(|(key, span)| (*key, *span)).collect();
        let checkpoint = Checkpoint { link: self.last, lines: live.len() as u64 };
        let preamble = [HEADER.as_bytes(), &line::encode_checkpoint(&checkpoint)].concat();
        let started =
            self.file.try_clone().and_then(|old| Rewrite::start(old, self.length, live, &preamble, new));
        self.rewrite = Some(started.map_err(|error| self.failed(&error))?);
        Ok(())
    }

    /// Puts the rewritten file in the place of the old one.
    fn switch_over(&mut self) -> Result<(), Error> {
        let Some(rewrite) = self.rewrite.take() else { return Ok(()) };
        let new_name = format!("{}.new", self.name);
        let renamed = rewrite.finish(&self.file, self.length, &self.live).and_then(|copy| {
            rustix::fs::renameat(self.dir.as_fd(), &new_name, self.dir.as_fd(), &self.name)?;
            Ok(copy)
        });
        let copy = match renamed {
            Ok(copy) => copy,
            Err(error) => {
                let _ = self.dir.remove_file(&new_name);
                return Err(self.failed(&error));
            }
        };
        let old = std::mem::replace(&mut self.file, copy.file);
        (self.live, self.length, self.preamble, self.allocated) = (copy.live, copy.length, copy.preamble, 0);
        rewrite::free_gently(old);
        if let Err(error) = rustix::fs::fsync(self.dir.as_fd()) {
            // After a power cut the old file may be back, and with it the time before this moment.
            self.broken = Some(format!("fsync of the directory: {error}"));
            return Err(self.failed(&error.into()));
        }
        Ok(())
    }

    fn has_set_aside(&self) -> Result<bool, Error> {
        if !self.dir.exists(CORRUPT)? {
            return Ok(false);
        }
        let prefix = format!("{}-", self.name);
        let entries = Dir::open(&self.dir.child_path(CORRUPT))?.entries()?;
        Ok(entries.iter().any(|entry| entry.name.to_str().is_some_and(|name| name.starts_with(&prefix))))
    }

    /// Keeps what cannot be read, and notes what is missing.
    fn set_aside_all(&self, scan: &Scan) -> Result<(), Error> {
        for bad in &scan.bad {
            self.set_aside(bad)?;
        }
        if scan.missing > 0 {
            let corrupt = self.dir.ensure_dir(CORRUPT, 0o700)?;
            let name = format!("{}-missing-{}", self.name, self.last.number);
            let note = format!("{} acknowledged records of {} are missing\n", scan.missing, self.name);
            corrupt.write_atomically(&name, note.as_bytes())?;
            tracing::error!(
                journal = %self.name,
                missing = scan.missing,
                noted_in = %corrupt.child_path(&name).display(),
                "acknowledged records are missing from the journal; restore a backup, or remove the note to go on without them"
            );
        }
        if !scan.unfinished.is_empty() {
            let name = format!("{}.unfinished", self.name);
            // On a full disk it is lost; no caller got the answer that it was stored.
            let _ = self.dir.write_atomically(&name, &scan.unfinished);
            tracing::info!(
                journal = %self.name,
                bytes = scan.unfinished.len(),
                kept_in = %self.dir.child_path(&name).display(),
                "a write that was never acknowledged was cut off"
            );
        }
        Ok(())
    }

    /// Keeps a damaged line in a file: the line, then for each key that it may be about the key and the line before.
    fn set_aside(&self, bad: &BadLine) -> Result<(), Error> {
        let corrupt = self.dir.ensure_dir(CORRUPT, 0o700)?;
        let name = format!("{}-{:032x}", self.name, hash(&String::from_utf8_lossy(&bad.bytes)));
        let mut content = bad.bytes.clone();
        if !content.ends_with(b"\n") {
            content.push(b'\n');
        }
        for (text, previous) in bad.keys.values() {
            let mut line = Vec::new();
            if let Some(span) = previous {
                line.resize(span.length as usize, 0);
                self.file.read_exact_at(&mut line, span.offset).map_err(|error| self.failed(&error))?;
            }
            let before = line::decode_checked(&line).map(|(key, _)| key.into_owned());
            let Some(key) = text.clone().or(before) else { continue };
            content.extend_from_slice(QUARANTINED.as_bytes());
            content.extend_from_slice(serde_json::to_string(&key).unwrap_or_default().as_bytes());
            content.push(b'\n');
            content.extend_from_slice(&line);
        }
        corrupt.write_atomically(&name, &content)?;
        tracing::error!(
            journal = %self.name,
            kept_in = %corrupt.child_path(&name).display(),
            "a damaged record was set aside; the data it described is kept, not deleted"
        );
        Ok(())
    }

    /// The keys that files in `corrupt` name, and that were not written again.
    fn quarantined(&self) -> Result<BTreeSet<String>, Error> {
        let mut keys = BTreeSet::new();
        if !self.dir.exists(CORRUPT)? {
            return Ok(keys);
        }
        let corrupt = self.dir.dir(CORRUPT)?;
        let prefix = format!("{}-", self.name);
        for entry in corrupt.entries()? {
            let Some(name) = entry.name.to_str().filter(|name| name.starts_with(&prefix)) else { continue };
            let mut content = Vec::new();
            let read = corrupt.open_file(name, false)?.read_to_end(&mut content);
            read.map_err(|error| self.failed(&error))?;
            // The first line is the damaged one.
            for line in content.split(|byte| *byte == b'\n').skip(1) {
                let key = line.strip_prefix(QUARANTINED.as_bytes()).map(serde_json::from_slice::<String>);
                if let Some(Ok(key)) = key
                    && !self.live.contains_key(&hash(&key))
                {
                    keys.insert(key);
                }
            }
        }
        Ok(keys)
    }
}

/// The records of the journal at `path`, without changing it, also while somebody writes it. Damaged lines are left out: whoever
/// has to know of them opens it.
pub fn read(path: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut records = BTreeMap::new();
    for line in std::fs::read(path)?.split_inclusive(|byte| *byte == b'\n') {
        let zeros = line.iter().take_while(|byte| **byte == 0).count();
        if let Some(line::Line::Record(record)) = line::decode(&line[zeros..]) {
            match record.value {
                Some(value) => records.insert(record.key.into_owned(), value.to_vec()),
                None => records.remove(&*record.key),
            };
        }
    }
    Ok(records)
}

/// The checksum that lines carry, for others who want to know whether bytes have changed.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

fn mark_name(journal: &str) -> String {
    format!("{journal}.mark")
}

/// A mark, of the same length whatever it says.
fn encode_mark(link: Link) -> Vec<u8> {
    let text = format!("berth-mark 1 {:012x} {:08x}", link.number, link.crc);
    format!("{text} {:08x}\n", crc32fast::hash(text.as_bytes())).into_bytes()
}

/// Reads the mark; none is there of a journal that is new, or was last written by an earlier version.
fn read_mark(dir: &Dir, journal: &str) -> Result<Option<Link>, Error> {
    let name = mark_name(journal);
    if !dir.exists(&name)? {
        return Ok(None);
    }
    let mut text = String::new();
    let read = dir.open_file(&name, false)?.read_to_string(&mut text);
    let mut words = text.split_ascii_whitespace().skip(2).map(|word| u64::from_str_radix(word, 16));
    let link = match (words.next(), words.next()) {
        (Some(Ok(number)), Some(Ok(crc))) => u32::try_from(crc).ok().map(|crc| Link { number, crc }),
        _ => None,
    };
    let valid = link.filter(|link| read.is_ok() && encode_mark(*link) == text.as_bytes());
    if valid.is_none() {
        tracing::warn!(
            journal,
            "the high-water mark cannot be read; whether the end is missing is not known"
        );
    }
    Ok(valid)
}

impl Drop for Journal {
    fn drop(&mut self) {
        if self.broken.is_none() {
            // A stopped journal is text and nothing else. Left as it is, it would be cut when it is opened.
            let _ = ftruncate(self.file.as_fd(), self.length);
        }
    }
}

fn hash(key: &str) -> u128 {
    let digest = Sha256::digest(key.as_bytes());
    u128::from_le_bytes(std::array::from_fn(|index| digest[index]))
}
