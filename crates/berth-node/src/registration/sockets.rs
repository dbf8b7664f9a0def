//! Watches a directory and all below it for sockets that come and go.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;

/// What happened to a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SocketChange {
    /// It is there, and was not, or is another one than before.
    Come(PathBuf),
    /// The socket was removed, or moved away.
    Gone(PathBuf),
}

/// What makes one socket of a name another one than the next.
type Identity = (u64, u64, i64, i64);

/// The sockets below a directory.
pub(super) struct Sockets {
    top: PathBuf,
    inotify: AsyncFd<OwnedFd>,
    watched: HashMap<i32, PathBuf>,
    known: HashMap<PathBuf, Identity>,
}

struct Event {
    path: PathBuf,
    flags: ReadFlags,
}

impl Sockets {
    /// Begins to watch; what is there already comes first.
    pub(super) fn watch(top: &Path) -> io::Result<(Self, Vec<SocketChange>)> {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe for types that could give up their descriptor; OwnedFd cannot"
        )]
        let inotify = AsyncFd::new(inotify)?;
        let mut sockets =
            Self { top: top.to_owned(), inotify, watched: HashMap::new(), known: HashMap::new() };
        sockets.add(top)?;
        let mut changes = Vec::new();
        sockets.scan(top, &mut changes);
        Ok((sockets, changes))
    }

    /// What happened since; waits until something did.
    pub(super) async fn next(&mut self) -> io::Result<Vec<SocketChange>> {
        loop {
            let events = {
                let mut ready = self.inotify.readable().await?;
                match ready.try_io(|inotify| read(inotify.get_ref(), &self.watched)) {
                    Ok(events) => events?,
                    Err(_would_block) => continue,
                }
            };
            let mut changes = Vec::new();
            for event in events {
                self.take(&event, &mut changes);
            }
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }

    fn take(&mut self, event: &Event, changes: &mut Vec<SocketChange>) {
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            tracing::warn!(directory = %self.top.display(), "too many changes at once; reading the whole directory again");
            self.rescan(changes);
        } else if event.flags.intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM) {
            let gone: Vec<PathBuf> =
                self.known.keys().filter(|path| path.starts_with(&event.path)).cloned().collect();
            for path in gone {
                self.known.remove(&path);
                changes.push(SocketChange::Gone(path));
            }
        } else if event.flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            self.inspect(&event.path, changes);
        }
    }

    fn rescan(&mut self, changes: &mut Vec<SocketChange>) {
        let before: HashSet<PathBuf> = self.known.keys().cloned().collect();
        for path in before.iter().filter(|path| identity(path).is_none()) {
            self.known.remove(path);
            changes.push(SocketChange::Gone(path.clone()));
        }
        let top = self.top.clone();
        self.scan(&top, changes);
    }

    fn scan(&mut self, directory: &Path, changes: &mut Vec<SocketChange>) {
        match fs::read_dir(directory) {
            Ok(entries) => {
                for entry in entries.filter_map(Result::ok) {
                    self.inspect(&entry.path(), changes);
                }
            }
            Err(error) => {
                tracing::warn!(directory = %directory.display(), %error, "a directory could not be listed");
            }
        }
    }

    fn inspect(&mut self, path: &Path, changes: &mut Vec<SocketChange>) {
        if path.file_name().is_none_or(|name| name.as_bytes().starts_with(b".")) {
            return;
        }
        if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
            match self.add(path) {
                Ok(()) => self.scan(path, changes),
                Err(error) => {
                    tracing::warn!(directory = %path.display(), %error, "a directory cannot be watched");
                }
            }
        } else if let Some(identity) = identity(path)
            && self.known.insert(path.to_owned(), identity) != Some(identity)
        {
            changes.push(SocketChange::Come(path.to_owned()));
        }
    }

    fn add(&mut self, directory: &Path) -> io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::ONLYDIR;
        let number = inotify::add_watch(self.inotify.get_ref(), directory, flags)?;
        self.watched.insert(number, directory.to_owned());
        Ok(())
    }
}

fn read(inotify: &OwnedFd, watched: &HashMap<i32, PathBuf>) -> io::Result<Vec<Event>> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(inotify, &mut buffer);
    let mut events = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => {
                let directory = watched.get(&event.wd());
                let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
                let path = match (directory, name) {
                    (Some(directory), Some(name)) => directory.join(name),
                    _ => PathBuf::new(),
                };
                let overflow = event.events().contains(ReadFlags::QUEUE_OVERFLOW);
                if overflow || path.file_name().is_some() {
                    events.push(Event { path, flags: event.events() });
                }
            }
            // What was read so far is returned first; the next call finds out again that there is no more.
            Err(_) if !events.is_empty() => return Ok(events),
            Err(error) => return Err(error.into()),
        }
    }
}

fn identity(path: &Path) -> Option<Identity> {
    let found = fs::metadata(path).ok().filter(|found| found.file_type().is_socket())?;
    Some((found.dev(), found.ino(), found.ctime(), found.ctime_nsec()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use super::*;

    async fn next(sockets: &mut Sockets) -> Vec<SocketChange> {
        tokio::time::timeout(Duration::from_secs(30), sockets.next()).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn sockets_are_seen_coming_and_going_in_every_directory() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path();
        fs::create_dir_all(top.join("old/deep")).unwrap();
        let _old = UnixListener::bind(top.join("old/deep/a.sock")).unwrap();
        fs::write(top.join("file.sock"), "").unwrap();
        let _hidden = UnixListener::bind(top.join(".hidden.sock")).unwrap();
        let (mut sockets, changes) = Sockets::watch(top).unwrap();
        assert_eq!(changes, [SocketChange::Come(top.join("old/deep/a.sock"))]);

        let _b = UnixListener::bind(top.join("b.sock")).unwrap();
        assert_eq!(next(&mut sockets).await, [SocketChange::Come(top.join("b.sock"))]);

        fs::create_dir(top.join("new")).unwrap();
        let _c = UnixListener::bind(top.join("new/c.sock")).unwrap();
        assert_eq!(next(&mut sockets).await, [SocketChange::Come(top.join("new/c.sock"))]);

        fs::remove_file(top.join("b.sock")).unwrap();
        let _again = UnixListener::bind(top.join("b.sock")).unwrap();
        assert_eq!(
            next(&mut sockets).await,
            [SocketChange::Gone(top.join("b.sock")), SocketChange::Come(top.join("b.sock"))]
        );

        fs::rename(top.join("new"), top.join(".away")).unwrap();
        assert_eq!(next(&mut sockets).await, [SocketChange::Gone(top.join("new/c.sock"))]);
    }

    #[tokio::test]
    async fn after_an_overflow_the_directory_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path();
        let _a = UnixListener::bind(top.join("a.sock")).unwrap();
        let (mut sockets, _) = Sockets::watch(top).unwrap();
        fs::remove_file(top.join("a.sock")).unwrap();
        let _b = UnixListener::bind(top.join("b.sock")).unwrap();
        let mut changes = Vec::new();
        sockets.take(&Event { path: PathBuf::new(), flags: ReadFlags::QUEUE_OVERFLOW }, &mut changes);
        assert_eq!(changes, [SocketChange::Gone(top.join("a.sock")), SocketChange::Come(top.join("b.sock"))]);
    }
}
