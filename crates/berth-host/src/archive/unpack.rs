//! Unpacks the layers of a container image, one upon the other, into a directory.
//!
//! Nothing in a layer is believed. Every path is resolved with the directory as its root, so that a symbolic link, of this
//! layer or of one below, leads to another place in the directory and never out of it; `..` is refused. Devices are left
//! out, as are set-user-ID bits: what is unpacked is content and not a system.

use std::{
    collections::HashSet,
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, ffi::OsStringExt as _, fs::FileExt as _},
    },
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};

use super::{Decoder, EntryKind, Event, Header};
use crate::{
    error::{Doing as _, Error, Result},
    namespace::Ids,
    path::Dir,
};

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// What begins the name of an entry that says that another one of the layers below is gone.
const WHITEOUT: &[u8] = b".wh.";
/// Says that nothing of the layers below is left in a directory.
const OPAQUE: &[u8] = b".wh..wh..opq";
/// How much is read at once.
const CHUNK: usize = 256 << 10;

/// Unpacks a layer, which is a tar archive, upon what is in `root`.
pub fn unpack_layer(root: &Dir, layer: &mut dyn Read) -> Result<()> {
    let mut unpacker =
        Unpacker { root, ids: Ids::read(), made: HashSet::new(), file: None, directories: Vec::new() };
    let (mut decoder, mut chunk) = (Decoder::default(), vec![0; CHUNK]);
    let read = |error| Error::new("read a layer", error);
    loop {
        let length = layer.read(&mut chunk).map_err(read)?;
        decoder.push(&chunk[..length]);
        while let Some(event) = decoder.next_event().map_err(|damaged| read(io::Error::other(damaged)))? {
            unpacker.take(event)?;
        }
        if length == 0 {
            break;
        }
    }
    if !decoder.is_complete() {
        return Err(read(io::Error::other("it ends too early")));
    }
    unpacker.finish()
}

struct Unpacker<'a> {
    root: &'a Dir,
    ids: Ids,
    /// What this layer has made, with the directories around it.
    made: HashSet<PathBuf>,
    file: Option<OpenFile>,
    /// Directories whose mode and time are set when all is in them.
    directories: Vec<(PathBuf, Header)>,
}

struct OpenFile {
    file: File,
    header: Header,
    path: PathBuf,
}

impl Unpacker<'_> {
    fn take(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Entry(header) => {
                let path = entry_path(&header.path)?;
                self.add(path.clone(), header).map_err(|error| failed("unpack", &path, error))
            }
            Event::Data(offset, bytes) => match &self.file {
                Some(open) => open.file.write_all_at(&bytes, offset).doing("write", &open.path),
                None => Ok(()),
            },
            Event::EntryEnd => match self.file.take() {
                Some(open) => self.complete(&open).map_err(|error| failed("unpack", &open.path, error)),
                None => Ok(()),
            },
        }
    }

    fn add(&mut self, path: PathBuf, header: Header) -> io::Result<()> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            if header.kind == EntryKind::Directory {
                self.directories.push((path, header));
            }
            return Ok(());
        };
        let directory = self.ensure_directory(parent)?;
        if name.as_bytes().starts_with(WHITEOUT) {
            return self.remove(&directory, parent, name);
        }
        self.made.extend(path.ancestors().map(Path::to_owned));
        if matches!(header.kind, EntryKind::Character | EntryKind::Block) {
            return Ok(());
        }
        let found = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
        let found = found.map(|found| FileType::from_raw_mode(found.st_mode));
        if header.kind == EntryKind::Directory {
            if found != Ok(FileType::Directory) {
                remove_entry(&directory, name)?;
                rustix::fs::mkdirat(&directory, name, Mode::RWXU)?;
            }
            self.directories.push((path, header));
            return Ok(());
        }
        if found.is_ok() {
            remove_entry(&directory, name)?;
        }
        match header.kind {
            EntryKind::File => {
                let flags =
                    OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = File::from(rustix::fs::openat(&directory, name, flags, Mode::RUSR | Mode::WUSR)?);
                file.set_len(header.size)?;
                self.file = Some(OpenFile { file, header, path });
            }
            EntryKind::HardLink => {
                let target = entry_path(&header.link).map_err(|error| io::Error::other(error.sentence()))?;
                self.link(&target, &directory, name)?;
            }
            EntryKind::Symlink => {
                rustix::fs::symlinkat(OsStr::from_bytes(&header.link), &directory, name)?;
                let (user, group) = self.owner(&header);
                rustix::fs::chownat(&directory, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            EntryKind::Fifo => {
                rustix::fs::mknodat(&directory, name, FileType::Fifo, mode_of(&header), 0)?;
            }
            EntryKind::Directory | EntryKind::Character | EntryKind::Block => {}
        }
        Ok(())
    }

    /// Gives a file its owner, its mode and its time: it is whole now.
    fn complete(&self, open: &OpenFile) -> io::Result<()> {
        let (user, group) = self.owner(&open.header);
        rustix::fs::fchown(&open.file, user, group)?;
        rustix::fs::fchmod(&open.file, mode_of(&open.header))?;
        for (name, value) in open.header.xattrs.iter().filter(|(name, _)| name.starts_with(b"user.")) {
            // A filesystem need not know them.
            let _ = rustix::fs::fsetxattr(&open.file, OsStr::from_bytes(name), value, XattrFlags::empty());
        }
        Ok(rustix::fs::futimens(&open.file, &times(&open.header))?)
    }

    fn finish(self) -> Result<()> {
        for (path, header) in self.directories.iter().rev() {
            let set = || -> io::Result<()> {
                // A later entry may have put something else there.
                let directory = match self.open(path, DIRECTORY) {
                    Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
                    opened => File::open(proc_path(&opened?))?,
                };
                let (user, group) = self.owner(header);
                rustix::fs::fchown(&directory, user, group)?;
                rustix::fs::fchmod(&directory, mode_of(header))?;
                Ok(rustix::fs::futimens(&directory, &times(header))?)
            };
            set().map_err(|error| failed("set the mode of", path, error))?;
        }
        Ok(())
    }

    fn open(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        rustix::fs::openat2(self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), IN_ROOT)
    }

    /// Opens a directory of the tree; what is missing of it is made.
    fn ensure_directory(&self, path: &Path) -> io::Result<OwnedFd> {
        match (self.open(path, DIRECTORY), path.parent(), path.file_name()) {
            (Err(Errno::NOENT), Some(parent), Some(name)) => {
                let parent = self.ensure_directory(parent)?;
                rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755))?;
                Ok(self.open(path, DIRECTORY)?)
            }
            (opened, ..) => Ok(opened?),
        }
    }

    /// Removes what a whiteout names, of the layers below.
    fn remove(&self, directory: &OwnedFd, path: &Path, whiteout: &OsStr) -> io::Result<()> {
        if whiteout.as_bytes() == OPAQUE {
            let listed =
                Dir::open(&proc_path(directory)).map_err(|error| io::Error::other(error.sentence()))?;
            for entry in listed.entries().map_err(|error| io::Error::other(error.sentence()))? {
                if !self.made.contains(&path.join(&entry.name)) {
                    remove_entry(directory, &entry.name)?;
                }
            }
            return Ok(());
        }
        let name = &whiteout.as_bytes()[WHITEOUT.len()..];
        match name {
            // Notes of old storage drivers for themselves.
            _ if name.starts_with(WHITEOUT) => Ok(()),
            b"" | b"." | b".." => Err(io::Error::other("the whiteout names nothing")),
            name => remove_entry(directory, OsStr::from_bytes(name)),
        }
    }

    fn link(&self, target: &Path, directory: &OwnedFd, name: &OsStr) -> io::Result<()> {
        let found = self.open(target, OFlags::PATH | OFlags::NOFOLLOW)?;
        if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) == FileType::Directory {
            return Err(io::Error::other("it is to be another name of a directory"));
        }
        Ok(rustix::fs::linkat(CWD, proc_path(&found), directory, name, AtFlags::SYMLINK_FOLLOW)?)
    }

    /// The owner of an entry, or root where there is no such user here.
    fn owner(&self, header: &Header) -> (Option<Uid>, Option<Gid>) {
        let user = if self.ids.has_user(header.uid) { header.uid } else { 0 };
        let group = if self.ids.has_group(header.gid) { header.gid } else { 0 };
        (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))
    }
}

fn failed(what: &str, path: &Path, error: io::Error) -> Error {
    Error::new(format!("{what} /{}", path.display()), error)
}

/// The path of an entry, relative to the root; empty for the root itself.
fn entry_path(bytes: &[u8]) -> Result<PathBuf> {
    let mut path = PathBuf::new();
    for part in bytes.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => {
                let shown = String::from_utf8_lossy(bytes);
                return Err(Error::new(
                    "read a layer",
                    io::Error::other(format!("{shown:?} leads out of it")),
                ));
            }
            part if part.contains(&0) => {
                return Err(Error::new("read a layer", io::Error::other("a name has a NUL byte")));
            }
            part => path.push(OsString::from_vec(part.to_vec())),
        }
    }
    Ok(path)
}

fn remove_entry(directory: &OwnedFd, name: &OsStr) -> io::Result<()> {
    let removed = Dir::open(&proc_path(directory)).and_then(|directory| directory.remove_tree(name));
    removed.map(drop).map_err(|error| io::Error::other(error.sentence()))
}

fn proc_path(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()).into()
}

fn mode_of(header: &Header) -> Mode {
    Mode::from_raw_mode(header.mode & 0o1777)
}

fn times(header: &Header) -> Timestamps {
    let (seconds, nanoseconds) = header.modified;
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() };
    Timestamps { last_access: time, last_modification: time }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    };

    use super::*;
    use crate::archive::{encode, end, padding};

    fn header(path: &str, kind: EntryKind) -> Header {
        Header {
            path: path.into(),
            kind,
            mode: if kind == EntryKind::Directory { 0o755 } else { 0o4644 },
            uid: 0,
            gid: 0,
            size: 0,
            modified: (1_700_000_000, 0),
            device: (1, 3),
            link: Vec::new(),
            xattrs: Vec::new(),
            pieces: None,
        }
    }

    fn file(path: &str, data: &str) -> (Header, String) {
        let size = data.len().try_into().unwrap();
        (Header { size, ..header(path, EntryKind::File) }, data.to_owned())
    }

    fn entry(path: &str, kind: EntryKind) -> (Header, String) {
        (header(path, kind), String::new())
    }

    fn link(path: &str, kind: EntryKind, target: &str) -> (Header, String) {
        (Header { link: target.into(), ..header(path, kind) }, String::new())
    }

    fn unpack(root: &Path, entries: &[(Header, String)]) -> Result<()> {
        let mut layer = Vec::new();
        for (header, data) in entries {
            layer.extend(encode(header));
            layer.extend(data.as_bytes());
            layer.extend(vec![0; padding(header.size)]);
        }
        layer.extend(end());
        unpack_layer(&Dir::open(root)?, &mut layer.as_slice())
    }

    fn read(root: &Path, path: &str) -> Option<String> {
        fs::read_to_string(root.join(path)).ok()
    }

    #[test]
    fn layers_lie_upon_each_other() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let below = [
            entry("./", EntryKind::Directory),
            file("etc/a", "old"),
            file("etc/b", "kept"),
            file("gone/deep/x", "x"),
            file("opaque/below", "x"),
            file("turns/into", "file"),
            entry("null", EntryKind::Character),
            link("etc/second", EntryKind::HardLink, "etc/b"),
        ];
        unpack(root, &below).unwrap();
        assert!(!root.join("null").exists(), "there are no devices");
        let (a, b) = (root.join("etc/b"), root.join("etc/second"));
        assert_eq!(fs::metadata(a).unwrap().ino(), fs::metadata(b).unwrap().ino());
        assert_eq!(fs::metadata(root.join("etc/a")).unwrap().permissions().mode() & 0o7777, 0o644);
        let upon = [
            file("etc/a", "new"),
            file(".wh.gone", ""),
            file("opaque/first", "of this layer"),
            file("opaque/.wh..wh..opq", ""),
            file("opaque/last", "of this layer"),
            file("turns", "now a file"),
            file("etc/.wh.missing", ""),
            file(".wh..wh.plnk", ""),
        ];
        unpack(root, &upon).unwrap();
        assert_eq!(read(root, "etc/a").as_deref(), Some("new"));
        assert_eq!(read(root, "etc/b").as_deref(), Some("kept"));
        assert_eq!(read(root, "turns").as_deref(), Some("now a file"));
        assert!(!root.join("gone").exists() && !root.join("opaque/below").exists());
        assert!(root.join("opaque/first").exists() && root.join("opaque/last").exists());
        let names: Vec<_> = Dir::open(root).unwrap().entries().unwrap();
        assert!(names.iter().all(|entry| !entry.name.as_bytes().starts_with(WHITEOUT)), "{names:?}");
    }

    #[test]
    fn no_link_leads_out_of_the_directory() {
        let outer = tempfile::tempdir().unwrap();
        let (root, outside) = (outer.path().join("root"), outer.path().join("outside"));
        fs::create_dir(&root).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "untouched").unwrap();
        let there = outside.display().to_string();
        for target in [there.as_str(), "../outside", "/..//../outside"] {
            let entries = [
                link("escape", EntryKind::Symlink, target),
                file("escape/file", "overwritten"),
                file("escape/.wh.file", ""),
                link("hard", EntryKind::HardLink, "escape/file"),
            ];
            // Where the link leads nowhere in the directory, the layer makes no sense; either is good.
            let _ = unpack(&root, &entries);
            assert_eq!(read(&outside, "file").as_deref(), Some("untouched"), "{target}");
            assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "{target}");
        }
        for (path, target) in [("../file", ""), ("a/../../file", ""), ("hard", "../outside/file")] {
            let kind = if target.is_empty() { EntryKind::File } else { EntryKind::HardLink };
            let error = unpack(&root, &[link(path, kind, target)]).unwrap_err().sentence();
            assert!(error.contains("leads out of it"), "{error}");
        }
        let error = unpack(&root, &[link("dir", EntryKind::HardLink, "/")]).unwrap_err().sentence();
        assert!(error.contains("another name of a directory"), "{error}");
    }

    #[test]
    fn an_entry_through_a_link_lands_where_the_link_leads_in_the_directory() {
        let root = tempfile::tempdir().unwrap();
        let entries = [
            entry("run", EntryKind::Directory),
            link("var/run", EntryKind::Symlink, "/run"),
            file("var/run/x", "1"),
        ];
        unpack(root.path(), &entries).unwrap();
        assert_eq!(read(root.path(), "run/x").as_deref(), Some("1"));
    }

    #[test]
    fn a_layer_that_is_cut_off_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let layer = encode(&file("a", "data").0);
        let error = unpack_layer(&Dir::open(root.path()).unwrap(), &mut layer.as_slice()).unwrap_err();
        assert!(error.sentence().contains("ends too early"), "{}", error.sentence());
    }
}
