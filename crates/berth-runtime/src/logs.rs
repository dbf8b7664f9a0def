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

use crate::blocking;

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

/// What a container wrote, from the log at `path`.
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
    let (path, tail) = (path.to_owned(), options.tail_lines);
    let file = blocking({
        let path = path.clone();
        move || open(&path, tail)
    })
    .await?;
    let reader = Reader { path, file, unfinished: Vec::new(), text: Text::new(options) };
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

struct Reader {
    path: PathBuf,
    file: File,
    unfinished: Vec<u8>,
    text: Text,
}

impl Reader {
    /// The text of what comes next, which may be none of what is wanted; `None` at the end.
    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.text.is_full() {
            return Ok(None);
        }
        let mut buffer = vec![0; CHUNK];
        let length = self.file.read(&mut buffer)?;
        if length == 0 {
            return if self.turn_to_new_file()? { Ok(Some(Vec::new())) } else { Ok(None) };
        }
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

    /// A log that has grown too large was renamed, and goes on in a new file.
    fn turn_to_new_file(&mut self) -> io::Result<bool> {
        let new = match File::open(&self.path) {
            Ok(file) => file,
            // Between the two, or removed by somebody.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        if new.metadata()?.ino() == self.file.metadata()?.ino() {
            return Ok(false);
        }
        // What was written to the old file after we were at its end, and before it was renamed.
        let mut rest = Vec::new();
        self.file.read_to_end(&mut rest)?;
        if rest.is_empty() {
            self.file = new;
        } else {
            self.file.seek(SeekFrom::Current(-i64::try_from(rest.len()).map_err(io::Error::other)?))?;
        }
        Ok(true)
    }
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

/// Opens a log where its last `tail` entries begin.
fn open(path: &Path, tail: Option<u64>) -> io::Result<File> {
    let mut file = File::open(path)?;
    if let Some(tail) = tail {
        let start = tail_start(&mut file, tail)?;
        file.seek(SeekFrom::Start(start))?;
    }
    Ok(file)
}

fn tail_start(file: &mut File, tail: u64) -> io::Result<u64> {
    let mut end = file.metadata()?.len();
    if tail == 0 {
        return Ok(end);
    }
    // The last newline ends the last entry; the one before the entries wanted is the one after these.
    let mut left = tail + 1;
    let mut buffer = vec![0; CHUNK];
    while end > 0 {
        let start = end.saturating_sub(CHUNK as u64);
        let chunk = &mut buffer[..usize::try_from(end - start).map_err(io::Error::other)?];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(chunk)?;
        for (at, _) in chunk.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            left -= 1;
            if left == 0 {
                return Ok(start + at as u64 + 1);
            }
        }
        end = start;
    }
    Ok(0)
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
