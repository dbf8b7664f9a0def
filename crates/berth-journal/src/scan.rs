//! Reading a journal when it is opened: which records are live, and what is damaged or missing.
//!
//! A line that cannot be read is not skipped: its key, as far as it can still be read, has no value until it is written again,
//! because what an earlier line says of it is out of date. Numbers that are missing between lines, or between the last line and
//! the high-water mark, are counted.
//!
//! A writer that was killed, or lost its power, in the middle of a write leaves the same traces at the end of the file: half a
//! line, or lines of the last write with a hole before them. No caller got the answer that these are stored, and the mark, which is
//! moved after a sync, does not reach them. They are no damage.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead, BufReader},
    os::unix::fs::FileExt,
};

use super::{
    HEADER, OLD_HEADER, Span, hash,
    line::{self, Line, Link},
};

/// What a journal's file holds.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) live: HashMap<u128, Span>,
    pub(super) live_bytes: u64,
    /// Where the next line goes: behind the last whole one.
    pub(super) end: u64,
    /// The bytes of the header and the checkpoint.
    pub(super) preamble: u64,
    pub(super) has_header: bool,
    /// The end of the chain of lines.
    pub(super) last: Link,
    /// Lines that cannot be read, and were acknowledged.
    pub(super) bad: Vec<BadLine>,
    /// How many acknowledged lines are not there at all.
    pub(super) missing: u64,
    /// What was being written when the writer ended, and was not acknowledged.
    pub(super) unfinished: Vec<u8>,
    /// Whether the file has holes that the next reader should not find.
    pub(super) has_holes: bool,

    /// The checkpoint's number, and how many of the lines copied behind it are still to come.
    copied: Option<(u64, u64)>,
    /// Whether numbers can be compared: not if the beginning of the file is damaged.
    is_unchained: bool,
    gaps: u64,
    damaged_end: Option<DamagedEnd>,
}

/// A line that cannot be read.
#[derive(Debug)]
pub(super) struct BadLine {
    pub(super) bytes: Vec<u8>,
    /// The keys that it may have been about, each with its line before, unless they were written again.
    pub(super) keys: HashMap<u128, (Option<String>, Option<Span>)>,
}

/// Lines at the end of what was read so far that are damaged or missing.
#[derive(Debug)]
struct DamagedEnd {
    /// The number of the first line that is missing.
    from: u64,
    bad: Vec<BadLine>,
}

impl Scan {
    /// Reads the file from its beginning; `mark` is what is known to have been in it.
    pub(super) fn read(file: &File, mark: Option<Link>) -> io::Result<Self> {
        let mut scan = Self::default();
        let mut reader = BufReader::with_capacity(1 << 18, file.try_clone()?);
        let mut line = Vec::new();
        let mut offset = 0u64;
        loop {
            line.clear();
            reader.read_until(b'\n', &mut line)?;
            // Room that nothing was written to before the next line, by hand or by a disk that lost its last writes.
            let zeros = line.iter().take_while(|byte| **byte == 0).count();
            line.drain(..zeros);
            offset += zeros as u64;
            if line.last() != Some(&b'\n') {
                break;
            }
            let length = line.len() as u64;
            scan.line(file, &line, offset)?;
            offset += length;
            scan.end = offset;
        }
        while line.last() == Some(&0) {
            line.pop();
        }
        scan.unended(file, &line, offset, true)?;
        scan.conclude(mark);
        Ok(scan)
    }

    fn line(&mut self, file: &File, line: &[u8], offset: u64) -> io::Result<()> {
        if self.good_line(line, offset) {
            return Ok(());
        }
        if offset == 0 && (line == HEADER.as_bytes() || line == OLD_HEADER.as_bytes()) {
            self.has_header = true;
            self.preamble = line.len() as u64;
            return Ok(());
        }
        // A damaged line break joins two lines.
        let Some(second) = line::hidden_line(line) else {
            self.bad_line(line);
            return Ok(());
        };
        self.unended(file, &line[..second], offset, false)?;
        self.line(file, &line[second..], offset + second as u64)
    }

    /// Takes bytes that do not end in a line break: of a line whose line break was changed or, at the end of the file, cut
    /// off, which is then mended; or of a line that was never completed.
    fn unended(&mut self, file: &File, bytes: &[u8], offset: u64, is_end: bool) -> io::Result<()> {
        let Some(last) = bytes.len().checked_sub(1) else { return Ok(()) };
        for kept in [last, last + usize::from(is_end)] {
            let whole = [&bytes[..kept], b"\n"].concat();
            if self.good_line(&whole, offset) {
                file.write_all_at(b"\n", offset + kept as u64)?;
                self.end = self.end.max(offset + whole.len() as u64);
                return Ok(());
            }
        }
        self.bad_line(bytes);
        Ok(())
    }

    /// Takes a line, if it is whole.
    fn good_line(&mut self, line: &[u8], offset: u64) -> bool {
        let record = match line::decode(line) {
            Some(Line::Record(record)) => record,
            Some(Line::Checkpoint(checkpoint)) => {
                self.copied = Some((checkpoint.link.number, checkpoint.lines));
                self.last = checkpoint.link;
                self.preamble += line.len() as u64;
                return true;
            }
            None => return false,
        };
        match record.position {
            // Lines of an earlier version have no numbers.
            None => {
                self.count_copied();
                if self.copied.is_none() {
                    self.last.crc = record.crc;
                    self.confirm();
                }
            }
            Some(position) if position.number > self.last.number => {
                let gap = position.number - self.last.number - 1;
                if !self.is_unchained && (gap > 0 || position.previous != self.last.crc) {
                    self.gaps += gap.max(1);
                    self.damaged_end
                        .get_or_insert(DamagedEnd { from: self.last.number + 1, bad: Vec::new() });
                }
                // A later write began, so the one before was acknowledged.
                let began = position.number - u64::from(position.index);
                if self.damaged_end.as_ref().is_some_and(|damaged_end| began > damaged_end.from) {
                    self.confirm();
                }
                self.last = Link { number: position.number, crc: record.crc };
            }
            Some(position) if self.copied.is_some_and(|(number, _)| position.number <= number) => {
                self.count_copied();
            }
            Some(_) if self.is_unchained => {}
            // An old line that came back: what is there already is newer.
            Some(_) => return true,
        }
        let key = hash(&record.key);
        let bad = self
            .bad
            .iter_mut()
            .chain(self.damaged_end.iter_mut().flat_map(|damaged_end| &mut damaged_end.bad));
        for bad in bad {
            bad.keys.remove(&key);
        }
        let span = Span { offset, length: u32::try_from(line.len()).unwrap_or(u32::MAX) };
        let old = match record.value {
            Some(_) => {
                self.live_bytes += u64::from(span.length);
                self.live.insert(key, span)
            }
            None => self.live.remove(&key),
        };
        self.live_bytes -= old.map_or(0, |old| u64::from(old.length));
        true
    }

    fn count_copied(&mut self) {
        if let Some((_, left)) = &mut self.copied {
            *left = left.saturating_sub(1);
        }
    }

    fn bad_line(&mut self, bytes: &[u8]) {
        let mut keys = self.keys_of(bytes);
        // A byte that became a line break makes two pieces of one line.
        let before = self.damaged_end.as_ref().map_or(self.bad.last(), |damaged_end| damaged_end.bad.last());
        if let Some(before) = before {
            keys.extend(self.keys_of(&[&before.bytes, bytes].concat()));
        }
        let bad = BadLine { bytes: bytes.to_vec(), keys };
        if self.end == 0 {
            // The header, which was synced before the file got its name.
            self.bad.push(bad);
            return;
        }
        match &mut self.copied {
            // What was copied was synced before the file got its name.
            Some((number, left)) if *left > 0 && self.last.number == *number => {
                *left -= 1;
                self.bad.push(bad);
                return;
            }
            // It may have been the checkpoint.
            None if self.last == Link::default() => self.is_unchained = true,
            _ => {}
        }
        let from = self.last.number + 1;
        self.damaged_end.get_or_insert(DamagedEnd { from, bad: Vec::new() }).bad.push(bad);
    }

    /// The keys that a damaged line may be about.
    fn keys_of(&self, bytes: &[u8]) -> HashMap<u128, (Option<String>, Option<Span>)> {
        let (text, key_hash) = line::legible_key(bytes);
        let mut keys = HashMap::new();
        let by_hash = key_hash.and_then(|wanted| self.live.keys().find(|key| low(**key) == wanted).copied());
        if let Some(key) = by_hash {
            keys.insert(key, (None, self.live.get(&key).copied()));
        } else if let Some(text) = text {
            let key = hash(&text);
            keys.insert(key, (Some(text), self.live.get(&key).copied()));
        }
        keys
    }

    fn confirm(&mut self) {
        if let Some(damaged_end) = self.damaged_end.take() {
            self.bad.extend(damaged_end.bad);
        }
    }

    fn conclude(&mut self, mark: Option<Link>) {
        if self.gaps > 0 {
            self.has_holes = true;
        }
        if let Some(damaged_end) = self.damaged_end.take() {
            let is_acknowledged = match mark {
                Some(mark) => {
                    mark.number >= damaged_end.from || (mark.number == self.last.number && mark != self.last)
                }
                // Without a mark, only what has no end was never acknowledged.
                None => damaged_end.bad.iter().any(|bad| bad.bytes.ends_with(b"\n")),
            };
            if is_acknowledged {
                self.bad.extend(damaged_end.bad);
            } else {
                self.gaps = 0;
                self.has_holes |= damaged_end.bad.iter().any(|bad| bad.bytes.ends_with(b"\n"));
                self.unfinished = damaged_end.bad.into_iter().flat_map(|bad| bad.bytes).collect();
            }
        }
        let lost_copies = self.copied.map_or(0, |(_, left)| left);
        let at_end = mark.map_or(0, |mark| {
            let differs = mark.number == self.last.number && mark != self.last && !self.is_unchained;
            mark.number.saturating_sub(self.last.number).max(u64::from(differs && self.bad.is_empty()))
        });
        self.missing = (self.gaps + lost_copies + at_end).saturating_sub(self.bad.len() as u64);
        if let Some(mark) = mark {
            // A number is never given twice.
            self.last.number = self.last.number.max(mark.number);
        }
        for key in self.bad.iter().flat_map(|bad| bad.keys.keys()) {
            if let Some(old) = self.live.remove(key) {
                self.live_bytes -= u64::from(old.length);
            }
        }
    }
}

/// The part of a key's hash that stands in its lines.
pub(super) fn low(key: u128) -> u64 {
    u64::try_from(key & u128::from(u64::MAX)).unwrap_or_default()
}
