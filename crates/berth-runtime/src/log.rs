//! A container's log in the format of the CRI: `<time> <stream> <F or P> <text>`, one entry a line.
//!
//! An entry has at most 16 KiB of text: longer lines are several entries marked P (partial), the last one F (full). So is
//! the end of an output that stops in the middle of a line.
//!
//! A file that has grown to 10 MiB becomes `<log>.1`, what was that becomes `<log>.2`, and so on to `<log>.4`, the oldest that is
//! kept: a container takes at most a little more than 50 MiB of the disk, however much it writes.

use std::{
    ffi::{OsStr, OsString},
    io::{self, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};

use crate::sys;

/// The longest text of an entry.
const LONGEST: usize = 16 << 10;
/// When the file has grown to this it becomes an old file.
pub(crate) const ROTATE_AT: u64 = 10 << 20;
/// How many old files are kept.
const OLD_FILES: u32 = 4;
const NANOS: u128 = 1_000_000_000;

/// The log of one container, written by its shim alone.
pub(crate) struct Log {
    directory: OwnedFd,
    name: OsString,
    file: std::fs::File,
    size: u64,
    rotate_at: u64,
    entries: Vec<u8>,
}

/// One of the two outputs, and the unfinished line it stands in.
pub(crate) struct Stream {
    name: &'static str,
    line: Vec<u8>,
}

impl Stream {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, line: Vec::new() }
    }
}

impl Log {
    /// Opens, or makes, the log `name` in a directory.
    pub(crate) fn open(directory: OwnedFd, name: OsString) -> io::Result<Self> {
        let (file, size) = open(&directory, &name)?;
        Ok(Self { directory, name, file, size, rotate_at: ROTATE_AT, entries: Vec::new() })
    }

    /// Writes what came out of a stream.
    pub(crate) fn write(&mut self, stream: &mut Stream, mut bytes: &[u8]) {
        let time = timestamp(sys::now());
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            stream.line.extend_from_slice(&bytes[..end]);
            self.partial(&time, stream);
            entry(&mut self.entries, &time, stream.name, b'F', &stream.line);
            stream.line.clear();
            bytes = &bytes[end + 1..];
        }
        stream.line.extend_from_slice(bytes);
        self.partial(&time, stream);
        self.flush();
    }

    /// Writes the unfinished line of a stream that has ended.
    pub(crate) fn finish(&mut self, stream: &mut Stream) {
        if !stream.line.is_empty() {
            entry(&mut self.entries, &timestamp(sys::now()), stream.name, b'P', &stream.line);
            stream.line.clear();
            self.flush();
        }
    }

    fn partial(&mut self, time: &str, stream: &mut Stream) {
        while stream.line.len() > LONGEST {
            entry(&mut self.entries, time, stream.name, b'P', &stream.line[..LONGEST]);
            stream.line.drain(..LONGEST);
        }
    }

    // A log that cannot be written is lost; the container goes on, and there is nobody to report it to.
    fn flush(&mut self) {
        if self.file.write_all(&self.entries).is_ok() {
            self.size += self.entries.len() as u64;
        }
        self.entries.clear();
        if self.size >= self.rotate_at {
            self.rotate();
        }
    }

    /// The oldest first: a reader that walks the files from the newest on may meet one twice, and misses none.
    fn rotate(&mut self) {
        let names: Vec<OsString> = names(&self.name).collect();
        let mut renamed = Ok(());
        for pair in names.windows(2).rev() {
            if let [newer, older] = pair {
                // Those that are not there yet are no reason to stop.
                renamed = rustix::fs::renameat(&self.directory, newer, &self.directory, older);
            }
        }
        if let (Ok(()), Ok((file, size))) = (renamed, open(&self.directory, &self.name)) {
            (self.file, self.size) = (file, size);
        }
    }
}

/// The names that the files of a log can have, the newest first.
fn names(log: &OsStr) -> impl Iterator<Item = OsString> {
    let old = (1..=OLD_FILES).map(move |number| {
        let mut name = log.to_owned();
        name.push(format!(".{number}"));
        name
    });
    std::iter::once(log.to_owned()).chain(old)
}

/// The paths that the files of a container's log can have, the newest first.
pub fn log_files(log: &Path) -> impl Iterator<Item = PathBuf> {
    names(log.as_os_str()).map(PathBuf::from)
}

fn open(directory: &OwnedFd, name: &OsString) -> io::Result<(std::fs::File, u64)> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(0o640))?;
    let file = std::fs::File::from(fd);
    let size = file.metadata()?.len();
    Ok((file, size))
}

fn entry(entries: &mut Vec<u8>, time: &str, stream: &str, tag: u8, text: &[u8]) {
    entries.extend_from_slice(time.as_bytes());
    entries.push(b' ');
    entries.extend_from_slice(stream.as_bytes());
    entries.extend_from_slice(&[b' ', tag, b' ']);
    entries.extend_from_slice(text);
    entries.push(b'\n');
}

/// RFC 3339 with nine digits, as the CRI wants it; written here because a shim carries no calendar library.
fn timestamp(nanoseconds: u128) -> String {
    let (seconds, nanos) = (nanoseconds / NANOS, nanoseconds % NANOS);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(i64::try_from(days).unwrap_or(0));
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z")
}

/// The civil date of a day since 1970, in eras of 400 years that begin in March.
fn date(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests;
