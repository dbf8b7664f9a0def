//! Reads containers' logs: the CRI format back to what the container wrote.

use std::{
    fs::File,
    future::Future,
    io::{self, Read as _, Seek as _, SeekFrom},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    pin::Pin,
};

use berth_host::Doing as _;
use bytes::Bytes;
use futures_util::{Stream, stream};
use jiff::Timestamp;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

use crate::{blocking, log::log_files};

const CHUNK: usize = 64 << 10;

/// What of a log is wanted.
#[derive(Debug, Clone, Default)]
pub struct LogOptions {
    /// Whether to go on until the container has ended.
    pub follow: bool,
    /// Only so many entries from the end.
    pub tail_lines: Option<u64>,
    /// Only what was written then or later.
    pub since: Option<Timestamp>,
    /// No more bytes than these.
    pub limit_bytes: Option<u64>,
    /// Whether each line begins with its time.
    pub timestamps: bool,
    /// Only one of the two outputs.
    pub stream: Option<LogStream>,
}

/// One of the outputs of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogStream {
    /// What the container wrote to its standard output.
    Stdout,
    /// What the container wrote to its standard error.
    Stderr,
}

/// What a container wrote, from the log at `path` and the older files beside it.
///
/// With `follow` it ends when `ended` does and everything was read; without, `ended` is not asked. A log that is not
/// there is an error at once.
pub async fn logs<E>(
    path: &Path,
    options: LogOptions,
    ended: E,
) -> io::Result<impl Stream<Item = io::Result<Bytes>> + Send + use<E>>
where
    E: Future<Output = ()> + Send + 'static,
{
    let watch = match (options.follow, path.parent()) {
        (true, Some(directory)) => Some(watch(directory)?),
        _ => None,
    };
    let path = path.to_owned();
    let reader = blocking(move || Reader::open(path, options)).await?;
    let following = Following { reader: Some(reader), watch, ended: Some(Box::pin(ended)) };
    Ok(stream::unfold(following, |mut following| async move { Some((following.next().await?, following)) }))
}

fn watch(directory: &Path) -> io::Result<AsyncFd<Watch>> {
    crate::runtime::pollable(Watch::new(directory).map_err(io::Error::other)?)
}

struct Following {
    /// Gone when everything was read.
    reader: Option<Reader>,
    watch: Option<AsyncFd<Watch>>,
    /// Gone when it has happened.
    ended: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Following {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            let mut reader = self.reader.take()?;
            // Before reading: what happens from here on is not lost.
            if let Some(watch) = &self.watch {
                watch.get_ref().clear();
            }
            let (reader, read) = blocking(move || {
                let read = reader.read();
                (reader, read)
            })
            .await;
            match read {
                Ok(Some(text)) if text.is_empty() => self.reader = Some(reader),
                Ok(Some(text)) => {
                    self.reader = Some(reader);
                    return Some(Ok(text.into()));
                }
                Ok(None) if reader.text.is_full() || !self.wait().await => return None,
                Ok(None) => self.reader = Some(reader),
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Waits until there may be more; `false` when there will not be.
    async fn wait(&mut self) -> bool {
        let (Some(watch), Some(ended)) = (&self.watch, &mut self.ended) else { return false };
        tokio::select! {
            readable = watch.readable() => {
                let Ok(mut guard) = readable else { return false };
                guard.clear_ready();
            }
            () = ended => self.ended = None,
        }
        true
    }
}

/// Reads the files of a log, the oldest first.
struct Reader {
    path: PathBuf,
    file: File,
    /// How much of the file is still wanted: all that ever comes when the log is followed.
    wanted: u64,
    /// The files after it that were there at first, each with its length then.
    pending: Vec<(File, u64)>,
    follow: bool,
    unfinished: Vec<u8>,
    text: Text,
}

impl Reader {
    /// Begins where the last entries begin that are wanted, or at the oldest.
    fn open(path: PathBuf, options: LogOptions) -> io::Result<Self> {
        let mut pending = Vec::new();
        let mut left = options.tail_lines.map(|tail| tail.saturating_add(1));
        for mut file in files(&path)? {
            let seen = file.metadata()?;
            let is_old = |since: Timestamp| !pending.is_empty() && seen.mtime() < since.as_second();
            if options.since.is_some_and(is_old) {
                break;
            }
            let start = match &mut left {
                Some(left) => tail_start(&mut file, seen.len(), left)?,
                None => None,
            };
            file.seek(SeekFrom::Start(start.unwrap_or(0)))?;
            pending.push((file, seen.len() - start.unwrap_or(0)));
            if start.is_some() {
                break;
            }
        }
        let Some((file, wanted)) = pending.pop() else { return Err(io::ErrorKind::NotFound.into()) };
        let follow = options.follow;
        Ok(Self { path, file, wanted, pending, follow, unfinished: Vec::new(), text: Text::new(options) })
    }

    /// The text of what comes next, which may be none of what is wanted; `None` at the end.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.text.is_full() {
            return Ok(None);
        }
        let mut buffer = vec![0; CHUNK];
        let length = if self.follow {
            self.file.read(&mut buffer)?
        } else {
            self.file.by_ref().take(self.wanted).read(&mut buffer)?
        };
        if length == 0 {
            return Ok(self.turn_to_next_file()?.then(Vec::new));
        }
        self.wanted = self.wanted.saturating_sub(length as u64);
        self.unfinished.extend_from_slice(&buffer[..length]);
        let mut text = Vec::new();
        let mut rest = &self.unfinished[..];
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.text.add(&rest[..end], &mut text);
            rest = &rest[end + 1..];
        }
        self.unfinished = rest.to_vec();
        Ok(Some(text))
    }

    /// Whether there is one, or more to be read in this one.
    fn turn_to_next_file(&mut self) -> io::Result<bool> {
        let next = match self.pending.pop() {
            Some(next) => Some(next),
            None if self.follow => self.newer_file()?.map(|file| (file, 0)),
            None => None,
        };
        let Some((file, wanted)) = next else { return Ok(false) };
        // What was written to the file after we were at its end, and before another took its place.
        if self.follow && self.file.read(&mut [0])? > 0 {
            self.file.seek(SeekFrom::Current(-1))?;
            return Ok(true);
        }
        // Only a full disk cuts an entry off.
        self.unfinished.clear();
        (self.file, self.wanted) = (file, wanted);
        Ok(true)
    }

    /// The file that came after the one that is read, once that is an old one.
    fn newer_file(&self) -> io::Result<Option<File>> {
        let own = self.file.metadata()?.ino();
        let mut newer = None;
        for file in files(&self.path)? {
            if file.metadata()?.ino() == own {
                return Ok(newer);
            }
            newer = Some(file);
        }
        // It is not even an old one any more: the oldest that there is.
        Ok(newer)
    }
}

/// The files of a log, the newest first; none twice, although they may be renamed meanwhile.
fn files(path: &Path) -> io::Result<Vec<File>> {
    let (mut files, mut known) = (Vec::new(), Vec::new());
    for path in log_files(path) {
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        // The numbers of files that are open are not given to others.
        let number = file.metadata()?.ino();
        if !known.contains(&number) {
            known.push(number);
            files.push(file);
        }
    }
    Ok(files)
}

/// Turns entries into text.
struct Text {
    options: LogOptions,
    left: Option<u64>,
    at_line_start: bool,
}

impl Text {
    fn new(options: LogOptions) -> Self {
        Self { left: options.limit_bytes, options, at_line_start: true }
    }

    fn is_full(&self) -> bool {
        self.left == Some(0)
    }

    /// Adds one entry, if it is wanted. What is no entry is passed over.
    fn add(&mut self, entry: &[u8], text: &mut Vec<u8>) {
        let mut fields = entry.splitn(4, |byte| *byte == b' ');
        let (Some(time), Some(stream), Some(tag), Some(line)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            return;
        };
        let wanted = match self.options.stream {
            None => true,
            Some(LogStream::Stdout) => stream == b"stdout",
            Some(LogStream::Stderr) => stream == b"stderr",
        };
        if !wanted || self.options.since.is_some_and(|since| is_before(time, since)) {
            return;
        }
        // Entries are in the order of their times.
        self.options.since = None;
        let start = text.len();
        if self.options.timestamps && self.at_line_start {
            text.extend_from_slice(time);
            text.push(b' ');
        }
        text.extend_from_slice(line);
        self.at_line_start = tag != b"P";
        if self.at_line_start {
            text.push(b'\n');
        }
        if let Some(left) = &mut self.left {
            let kept = usize::try_from(*left).map_or(text.len(), |left| text.len().min(start + left));
            text.truncate(kept);
            *left -= (kept - start) as u64;
        }
    }
}

fn is_before(time: &[u8], since: Timestamp) -> bool {
    let time = std::str::from_utf8(time).ok().and_then(|time| time.parse::<Timestamp>().ok());
    time.is_some_and(|time| time < since)
}

/// Where the entries of a file begin that are wanted: after the `left`th newline from its end. Counts those that it has.
fn tail_start(file: &mut File, length: u64, left: &mut u64) -> io::Result<Option<u64>> {
    // The last newline of all ends the last entry, so that one more is counted; of no entries it is the end.
    if *left == 1 {
        return Ok(Some(length));
    }
    let mut end = length;
    let mut buffer = vec![0; CHUNK];
    while end > 0 {
        let start = end.saturating_sub(CHUNK as u64);
        let chunk = &mut buffer[..usize::try_from(end - start).map_err(io::Error::other)?];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(chunk)?;
        for (at, _) in chunk.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            *left -= 1;
            if *left == 0 {
                return Ok(Some(start + at as u64 + 1));
            }
        }
        end = start;
    }
    Ok(None)
}

/// Readable when a file in the directory was written, created or renamed.
#[derive(Debug)]
struct Watch(OwnedFd);

impl Watch {
    /// Begins to watch a directory for files that are written, made or renamed in it.
    fn new(directory: &Path) -> berth_host::Result<Self> {
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).doing("watch", directory)?;
        let flags = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::MOVED_TO | WatchFlags::ONLYDIR;
        inotify::add_watch(&fd, directory, flags).doing("watch", directory)?;
        Ok(Self(fd))
    }

    /// Forgets what has happened so far.
    fn clear(&self) {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.0, &mut buffer);
        while reader.next().is_ok() {}
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
