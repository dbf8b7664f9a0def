//! Rewriting a journal while it is written to.
//!
//! A thread copies the live lines into a new file and then, round after round, whatever was appended meanwhile. When
//! only a little is missing, the next writer copies that and switches over: it waits for two small syncs, however
//! large the journal is.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Write},
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use rustix::fs::{fdatasync, ftruncate};

use super::Span;

/// The copy is synced in steps of this: a sync of the journal itself waits for what else the disk has to do.
const STEP: u64 = 4 << 20;
/// So little may be left to the writer that switches over.
const REST: u64 = 256 << 10;

/// A rewrite under way.
#[derive(Debug)]
pub(super) struct Rewrite {
    /// The journal's length when it began.
    pub(super) began_at: u64,
    /// How far the journal has been written.
    written: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// Keys written or removed since it began.
    touched: Vec<u128>,
    thread: Option<JoinHandle<io::Result<Copy>>>,
}

/// A new journal file that holds everything up to some point of the old one.
#[derive(Debug)]
pub(super) struct Copy {
    pub(super) file: File,
    pub(super) length: u64,
    /// How many of its bytes come before the first record.
    pub(super) preamble: u64,
    pub(super) live: HashMap<u128, Span>,
    /// Where the lines begin that were appended after the rewrite began: here, in the old file and in the new one.
    appended: (u64, u64),
    /// How far the old file has been copied.
    copied: u64,
}

impl Rewrite {
    /// Starts to copy `live` and everything after `length` from `old` into `new`, behind a preamble.
    pub(super) fn start(
        old: File,
        length: u64,
        live: Vec<(u128, Span)>,
        preamble: &[u8],
        mut new: File,
    ) -> io::Result<Self> {
        new.write_all(preamble)?;
        let preamble = preamble.len() as u64;
        let written = Arc::new(AtomicU64::new(length));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new().name("journal-rewrite".to_owned()).spawn({
            let (written, stop) = (written.clone(), stop.clone());
            move || {
                let mut copy = Copy::of_live_lines(&old, length, live, preamble, new, &stop)?;
                copy.catch_up(&old, &written, &stop)?;
                Ok(copy)
            }
        })?;
        Ok(Self { began_at: length, written, stop, touched: Vec::new(), thread: Some(thread) })
    }

    /// Takes note of a change and of the journal's new length.
    pub(super) fn note(&mut self, keys: impl Iterator<Item = u128>, length: u64) {
        self.touched.extend(keys);
        self.written.store(length, Ordering::Release);
    }

    /// Whether [`Rewrite::finish`] has little left to do.
    pub(super) fn is_ready(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the thread, and completes the copy: all of `old` up to `length`, with `live` as the index of the old.
    pub(super) fn finish(mut self, old: &File, length: u64, live: &HashMap<u128, Span>) -> io::Result<Copy> {
        let thread = self.thread.take().ok_or_else(|| io::Error::other("the rewrite was finished before"))?;
        let mut copy = thread.join().map_err(|_| io::Error::other("the rewriting thread panicked"))??;
        copy.append(old, length, &AtomicBool::new(false))?;
        let (from, to) = copy.appended;
        for key in &self.touched {
            match live.get(key) {
                Some(span) => {
                    let moved = Span { offset: span.offset - from + to, length: span.length };
                    copy.live.insert(*key, moved);
                }
                None => {
                    copy.live.remove(key);
                }
            }
        }
        copy.file.sync_all()?;
        Ok(copy)
    }
}

/// Gives back the room of a file that has no name any more.
///
/// Freed in one go, hundreds of megabytes are one large transaction of the filesystem, and every sync waits for it.
pub(super) fn free_gently(file: File) {
    let free = move || {
        let mut length = file.metadata().map_or(0, |metadata| metadata.len());
        while length > STEP {
            length -= STEP;
            if ftruncate(file.as_fd(), length).is_err() {
                break;
            }
        }
    };
    // Without a thread the file is closed at once, which does the same with less grace.
    let _ = std::thread::Builder::new().name("journal-free".to_owned()).spawn(free);
}

impl Drop for Rewrite {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // What it was about to say concerns a file that nobody wants any more.
            let _ = thread.join();
        }
    }
}

impl Copy {
    fn of_live_lines(
        old: &File,
        end: u64,
        mut lines: Vec<(u128, Span)>,
        preamble: u64,
        file: File,
        stop: &AtomicBool,
    ) -> io::Result<Self> {
        lines.sort_unstable_by_key(|(_, span)| span.offset);
        let mut copy = Self {
            file,
            length: preamble,
            preamble,
            live: HashMap::with_capacity(lines.len()),
            appended: (end, 0),
            copied: 0,
        };
        let mut run = 0..0;
        for (key, span) in lines {
            if span.offset != run.end {
                copy.transfer(old, run, stop)?;
                run = span.offset..span.offset;
            }
            let offset = copy.length + (run.end - run.start);
            copy.live.insert(key, Span { offset, length: span.length });
            run.end += u64::from(span.length);
        }
        copy.transfer(old, run, stop)?;
        copy.appended.1 = copy.length;
        copy.copied = end;
        Ok(copy)
    }

    fn catch_up(&mut self, old: &File, written: &AtomicU64, stop: &AtomicBool) -> io::Result<()> {
        loop {
            let before = self.copied;
            self.append(old, written.load(Ordering::Acquire), stop)?;
            fdatasync(self.file.as_fd())?;
            if self.copied - before < REST {
                return Ok(());
            }
        }
    }

    fn append(&mut self, old: &File, end: u64, stop: &AtomicBool) -> io::Result<()> {
        self.transfer(old, self.copied..end, stop)?;
        self.copied = end;
        Ok(())
    }

    /// Copies bytes as they are: a line that went bad meanwhile is found, and reported, when the journal is opened.
    fn transfer(&mut self, old: &File, range: std::ops::Range<u64>, stop: &AtomicBool) -> io::Result<()> {
        let mut buffer = Vec::new();
        let mut offset = range.start;
        while offset < range.end {
            if stop.load(Ordering::Relaxed) {
                return Err(io::Error::other("the journal was closed"));
            }
            let length = (range.end - offset).min(REST);
            buffer.resize(usize::try_from(length).map_err(io::Error::other)?, 0);
            old.read_exact_at(&mut buffer, offset)?;
            self.file.write_all(&buffer)?;
            offset += length;
            if (self.length + length) / STEP != self.length / STEP {
                fdatasync(self.file.as_fd())?;
            }
            self.length += length;
        }
        Ok(())
    }
}
