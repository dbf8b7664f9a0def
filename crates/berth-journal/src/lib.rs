//! A journal of keyed records: a process's memory across restarts.
//!
//! One file of lines, each `<crc32> ["<key>",<json>]`; the last line of a key counts, and a line without a value
//! removes it. A line is the unit of everything: of a write, of damage (a bad line is set aside, the others live
//! on), and of repair by hand. The file is rewritten with only its live lines when more than half of it is dead, by a
//! thread beside the writers; the disk is never filled so far that this could not be done.
//!
//! [`Journal`] survives a killed process; [`GroupCommit`] on top of it survives a power cut, with one fsync for all
//! callers that wait at the same time.

mod group_commit;
mod line;
mod rewrite;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    os::{fd::AsFd, unix::fs::FileExt},
};

use berth_host::path::Dir;
use rustix::fs::{FallocateFlags, fallocate, fdatasync, ftruncate};
use sha2::{Digest, Sha256};

pub use self::group_commit::{Barrier, GroupCommit};
use self::rewrite::Rewrite;

const HEADER: &str = "berth-journal 1\n";
/// Room is allocated ahead, and filled with zeros, in steps of this.
const STEP: u64 = 1 << 20;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// What only removals may use, so that a full disk can be emptied.
const RESERVE: u64 = 64 << 10;
/// Below this size rewriting is not worth it.
const SMALL: u64 = 4 << 20;
/// Damaged lines are kept here, below the journal's directory.
const CORRUPT: &str = "corrupt";

/// One change to a journal.
#[derive(Debug, Clone, Copy)]
pub enum Entry<'a> {
    /// Sets a key's record.
    Put {
        /// The key.
        key: &'a str,
        /// The record, as JSON; its line breaks, if any, become spaces.
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
    /// Something of this journal was set aside at an earlier start, and nobody has removed it since.
    pub earlier: bool,
    /// It was not there, or not even its beginning.
    pub new: bool,
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
        let mut journal = Self {
            dir: Dir::open(dir.path())?,
            name: name.to_owned(),
            file: dir.open_file(name, true)?,
            length: 0,
            allocated: 0,
            live: HashMap::new(),
            live_bytes: 0,
            rewrite: None,
            patience: 0,
            broken: None,
        };
        let broken = |error: io::Error| Error::Broken(format!("read the journal {name}: {error}"));
        let earlier = journal.has_set_aside()?;
        let (has_header, bad) = journal.index().map_err(broken)?;
        for line in &bad {
            journal.set_aside(line)?;
        }
        journal.replay(on_record).map_err(broken)?;
        if !bad.is_empty() {
            journal.rewrite_now()?;
        }
        // So that a disk that fills up from now on can be emptied; one that is full has to do without.
        let _ = journal.allocate(journal.length + RESERVE);
        Ok((journal, Damage { lines: bad.len(), earlier, new: !exists || !has_header }))
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
        for entry in entries {
            let start = buffer.len();
            line::encode(entry, &mut buffer);
            let length = u32::try_from(buffer.len() - start)
                .map_err(|_| Error::Broken("a record is larger than 4 GiB".to_owned()))?;
            spans.push(Span { offset: start as u64, length });
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
            .map(|(entry, span)| match entry {
                Entry::Put { key, .. } => {
                    self.track(key, Some(Span { offset: self.length + span.offset, ..span }))
                }
                Entry::Remove { key } => self.track(key, None),
            })
            .collect();
        self.length += buffer.len() as u64;
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
        })
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
                // When this fails on a full disk, the write itself will tell.
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
            // A filesystem without fallocate: the write itself will tell.
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

    fn track(&mut self, key: &str, span: Option<Span>) -> u128 {
        let hash = hash(key);
        let old = match span {
            Some(span) => {
                self.live_bytes += u64::from(span.length);
                self.live.insert(hash, span)
            }
            None => self.live.remove(&hash),
        };
        self.live_bytes -= old.map_or(0, |old| u64::from(old.length));
        hash
    }

    fn dead_bytes(&self) -> u64 {
        self.length - HEADER.len() as u64 - self.live_bytes
    }

    fn is_mostly_dead(&self) -> bool {
        self.length > SMALL && self.live_bytes * 2 < self.length
    }

    /// Reads the file once, notes where each key's last line is, and returns whether it begins as a journal does and the
    /// lines that make no sense.
    fn index(&mut self) -> io::Result<(bool, Vec<Vec<u8>>)> {
        let mut bad = Vec::new();
        let mut has_header = false;
        let mut reader = BufReader::with_capacity(1 << 18, self.file.try_clone()?);
        let mut line = Vec::new();
        let (mut offset, mut end) = (0u64, 0u64);
        loop {
            line.clear();
            reader.read_until(b'\n', &mut line)?;
            // Room that nothing was written to before the next line, by hand or by a disk that lost its last writes.
            let zeros = line.iter().take_while(|byte| **byte == 0).count();
            line.drain(..zeros);
            offset += zeros as u64;
            let length = line.len();
            if line.last() != Some(&b'\n') {
                // Nothing, or the beginning of a line whose writer was killed: it was never acknowledged.
                break;
            }
            let span = Span { offset, length: u32::try_from(length).unwrap_or(u32::MAX) };
            match line::decode(&line) {
                Some((key, value)) => {
                    self.track(&key, value.map(|_| span));
                }
                None if offset == 0 && line == HEADER.as_bytes() => has_header = true,
                None => bad.push(line.clone()),
            }
            offset += length as u64;
            end = offset;
        }
        self.length = end;
        ftruncate(self.file.as_fd(), end)?;
        Ok((has_header, bad))
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
        let live = self.live.iter().map(|(key, span)| (*key, *span)).collect();
        let started = self.file.try_clone().and_then(|old| Rewrite::start(old, self.length, live, new));
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
        (self.live, self.length, self.allocated) = (copy.live, copy.length, 0);
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
