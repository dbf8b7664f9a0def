//! Unpacks a snapshot's archive into a new directory, entry by entry and never outside of it.

use std::collections::HashMap;

use berth_core::{SnapshotId, hex};
use berth_host::archive::{Decoder, EntryKind, Event, Header};
use berth_nfs::{Change, Create, Entry, FileKind, Handle, Kind, Name, Node, Share, Time, TimeChange};
use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::{
    StreamExt as _, TryStreamExt as _,
    future::BoxFuture,
    stream::{self, FuturesUnordered},
};
use sha2::{Digest as _, Sha256};

use super::{
    NfsController,
    ahead::begin,
    id::SnapshotRef,
    pack::write_all,
    shares::{failed, found},
    snapshots::{expected_digest, find_archive},
};
use crate::{Error, Result};

/// How much of an archive is read at once.
const CHUNK: u64 = 512 << 10;
/// How much of it is uncompressed at once: a thousand times that may come out.
const SLICE: usize = 16 << 10;
/// How many requests are under way at once.
const AT_ONCE: usize = 4;
const GZIP: [u8; 2] = [0x1f, 0x8b];

impl NfsController {
    /// Unpacks a snapshot on the share `from` into an empty directory.
    pub(super) async fn unpack_snapshot(
        &self,
        (id, snapshot): (&SnapshotId, &SnapshotRef),
        from: &Share,
        share: &Share,
        to: &Handle,
    ) -> Result<()> {
        let archive = find_archive(from, snapshot).await?.ok_or_else(|| Error::no_snapshot(id))?;
        let digest = expected_digest(from, snapshot).await?;
        let read = unpack(from, &archive, share, to).await.map_err(|error| match error {
            Error::Precondition(why) => {
                Error::Precondition(format!("snapshot {id:?} cannot be restored: {why}"))
            }
            other => other,
        })?;
        match digest {
            Some(digest) if digest != read => Err(Error::Precondition(format!(
                "snapshot {id:?} cannot be restored: its archive is not what was written, by its digest"
            ))),
            _ => Ok(()),
        }
    }
}

/// Unpacks an archive, and gives its digest.
async fn unpack(from: &Share, archive: &Entry, to: &Share, root: &Handle) -> Result<String> {
    let size = archive.attributes.size;
    let mut chunks = stream::iter((0..size).step_by(usize::try_from(CHUNK).unwrap_or(usize::MAX)))
        .map(|start| {
            let (from, file) = (from.clone(), archive.handle.clone());
            begin(async move { read_exactly(&from, &file, start, CHUNK.min(size - start)).await })
        })
        .buffered(AT_ONCE);
    let mut sum = Sha256::new();
    let mut inflate = Inflate::Unknown;
    let mut decoder = Decoder::default();
    let mut tree = Tree::new(to, root);
    while let Some(chunk) = chunks.try_next().await? {
        sum.update(&chunk);
        for start in (0..chunk.len()).step_by(SLICE) {
            let slice = chunk.slice(start..chunk.len().min(start + SLICE));
            let plain = inflate.push(&slice)?;
            decoder.push(&plain);
            while let Some(event) =
                decoder.next_event().map_err(|error| Error::Precondition(error.to_string()))?
            {
                tree.apply(event).await?;
            }
        }
        // Uncompressing is work, and others want to work as well.
        tokio::task::yield_now().await;
    }
    decoder.push(&inflate.finish()?);
    while let Some(event) = decoder.next_event().map_err(|error| Error::Precondition(error.to_string()))? {
        tree.apply(event).await?;
    }
    if !decoder.is_complete() {
        return Err(Error::Precondition("its archive ends too early".to_owned()));
    }
    tree.finish().await?;
    Ok(hex(&sum.finalize()))
}

async fn read_exactly(share: &Share, file: &Handle, start: u64, length: u64) -> Result<Bytes> {
    let wanted = usize::try_from(length).unwrap_or(usize::MAX);
    let mut data = Vec::with_capacity(wanted);
    while data.len() < wanted {
        let offset = start + u64::try_from(data.len()).unwrap_or(u64::MAX);
        let left = u32::try_from(wanted - data.len()).unwrap_or(u32::MAX);
        let (bytes, is_end) = share.read(file, offset, left).await.map_err(failed)?;
        data.extend_from_slice(&bytes);
        if is_end || bytes.is_empty() {
            break;
        }
    }
    Ok(data.into())
}

/// Uncompresses what is compressed.
enum Inflate {
    Unknown,
    Plain,
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
}

impl Inflate {
    fn push(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        use std::io::Write as _;
        if let Self::Unknown = self {
            *self = if bytes.starts_with(&GZIP) {
                Self::Gzip(Box::new(MultiGzDecoder::new(Vec::new())))
            } else {
                Self::Plain
            };
        }
        match self {
            Self::Unknown | Self::Plain => Ok(bytes.to_vec()),
            Self::Gzip(decoder) => {
                decoder.write_all(bytes).map_err(|error| compressed_badly(&error))?;
                Ok(std::mem::take(decoder.get_mut()))
            }
        }
    }

    /// What is still inside.
    fn finish(&mut self) -> Result<Vec<u8>> {
        match self {
            Self::Unknown | Self::Plain => Ok(Vec::new()),
            Self::Gzip(decoder) => {
                decoder.try_finish().map_err(|error| compressed_badly(&error))?;
                Ok(std::mem::take(decoder.get_mut()))
            }
        }
    }
}

fn compressed_badly(error: &std::io::Error) -> Error {
    Error::Precondition(format!("its archive cannot be uncompressed: {error}"))
}

/// The directory that is being filled.
struct Tree<'a> {
    share: &'a Share,
    /// By path, as far as they are known; the root is the empty path.
    directories: HashMap<Vec<u8>, Handle>,
    /// The attributes of directories, which are set last: filling a directory changes them, and may need permissions that
    /// they do not give.
    attributes: Vec<(Handle, Header)>,
    file: Option<(Handle, Header)>,
    sent: FuturesUnordered<BoxFuture<'static, Result<()>>>,
    /// Whether the server lets us give files away.
    may_give: bool,
    xattrs: bool,
}

impl<'a> Tree<'a> {
    fn new(share: &'a Share, root: &Handle) -> Self {
        Self {
            share,
            directories: HashMap::from([(Vec::new(), root.clone())]),
            attributes: Vec::new(),
            file: None,
            sent: FuturesUnordered::new(),
            may_give: true,
            xattrs: true,
        }
    }

    async fn apply(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Entry(header) => self.entry(header).await,
            Event::Data(offset, data) => {
                let Some((file, _)) = &self.file else { return Ok(()) };
                let (share, file) = (self.share.clone(), file.clone());
                if self.sent.len() >= AT_ONCE {
                    self.sent.try_next().await?;
                }
                self.sent.push(begin(async move { write_all(&share, &file, offset, data).await }));
                Ok(())
            }
            Event::EntryEnd => self.entry_end().await,
        }
    }

    async fn entry(&mut self, header: Header) -> Result<()> {
        let names = names_in(&header.path)?;
        let Some((name, above)) = names.split_last() else {
            // The directory itself.
            let root = self.directories[&Vec::new()].clone();
            self.attributes.push((root, header));
            return Ok(());
        };
        let parent = self.directory(above, true).await?;
        match header.kind {
            EntryKind::Directory => {
                let made = self.directory(&names, true).await?;
                self.attributes.push((made, header));
                return Ok(());
            }
            EntryKind::File => {
                let share = self.share;
                let attempt = || share.create(&parent, *name, Create::New, PRIVATE_FILE);
                let made = anew(share, &parent, name, attempt).await?;
                self.file = Some((made.handle, header));
                return Ok(());
            }
            EntryKind::HardLink => return self.link(&parent, name, &header).await,
            EntryKind::Symlink => {
                let share = self.share;
                let attempt = || share.symlink(&parent, *name, &header.link, &NOTHING);
                let made = anew(share, &parent, name, attempt).await?;
                return self.set_attributes(&made.handle, &header).await;
            }
            EntryKind::Character | EntryKind::Block | EntryKind::Fifo => {}
        }
        let node = match header.kind {
            EntryKind::Character => Node::Character(header.device.0, header.device.1),
            EntryKind::Block => Node::Block(header.device.0, header.device.1),
            _ => Node::Fifo,
        };
        let share = self.share;
        let attempt = || share.make_node(&parent, *name, node, PRIVATE_FILE);
        match anew(share, &parent, name, attempt).await {
            Ok(made) => self.set_attributes(&made.handle, &header).await,
            Err(Error::Denied(why)) => {
                tracing::warn!("a device of a snapshot is left out: {why}");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn link(&mut self, parent: &Handle, name: &[u8], header: &Header) -> Result<()> {
        let target = names_in(&header.link)?;
        let missing =
            || Error::Precondition(format!("it links to {:?}, which it does not hold", shown(&header.link)));
        let (last, above) = target.split_last().ok_or_else(missing)?;
        let dir = self.directory(above, false).await?;
        let file = found(self.share.lookup(&dir, *last).await)?.ok_or_else(missing)?;
        if file.attributes.kind == FileKind::Directory {
            return Err(missing());
        }
        let share = self.share;
        anew(share, parent, name, || share.link(&file.handle, parent, name)).await
    }

    /// The directory of that path; what is in the way is never followed.
    async fn directory(&mut self, names: &[&[u8]], make: bool) -> Result<Handle> {
        let mut path = Vec::new();
        let mut handle = self.directories[&path].clone();
        for name in names {
            path.extend_from_slice(name);
            path.push(b'/');
            if let Some(known) = self.directories.get(&path) {
                handle = known.clone();
                continue;
            }
            let there = found(self.share.lookup(&handle, *name).await)?;
            handle = match there {
                Some(entry) if entry.attributes.kind == FileKind::Directory => entry.handle,
                None if make => {
                    self.share.make_dir(&handle, *name, &Change::mode(0o700)).await.map_err(failed)?.handle
                }
                _ => {
                    return Err(Error::Precondition(format!(
                        "{:?} is not a directory, but something shall be in it",
                        shown(&path)
                    )));
                }
            };
            self.directories.insert(path.clone(), handle.clone());
        }
        Ok(handle)
    }

    async fn entry_end(&mut self) -> Result<()> {
        let Some((file, header)) = self.file.take() else { return Ok(()) };
        let has_data = header.size > 0;
        while self.sent.try_next().await?.is_some() {}
        if header.pieces.is_some() {
            // A hole at the end is not written.
            let change = Change { size: Some(header.size), ..Change::default() };
            self.share.set_attributes(&file, &change).await.map_err(failed)?;
        }
        if has_data {
            self.share.commit(&file).await.map_err(failed)?;
        }
        self.set_attributes(&file, &header).await
    }

    /// Sets owner, mode, time and extended attributes.
    async fn set_attributes(&mut self, file: &Handle, header: &Header) -> Result<()> {
        for (name, value) in &header.xattrs {
            let Some(name) = name.strip_prefix(b"user.").and_then(|name| Name::new(name).ok()) else {
                continue;
            };
            if self.xattrs {
                let set =
                    self.share.set_xattr(file, &name, Bytes::copy_from_slice(value)).await.map_err(failed)?;
                self.xattrs = set.is_some();
            }
        }
        let is_link = header.kind == EntryKind::Symlink;
        let (seconds, nanoseconds) = header.modified;
        let rest = Change {
            // The mode comes after the owner, which takes setuid and setgid away.
            mode: Some(header.mode).filter(|_| !is_link),
            modified: Some(TimeChange::At(Time { seconds, nanoseconds })),
            ..Change::default()
        };
        if self.may_give {
            let owner = Change { uid: Some(header.uid), gid: Some(header.gid), ..Change::default() };
            match self.share.set_attributes(file, &owner).await {
                Ok(_) => {}
                Err(error) if error.kind() == Kind::Permission => {
                    tracing::warn!(%error, "the server lets nobody give files away (root_squash?): owners are not restored");
                    self.may_give = false;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        match self.share.set_attributes(file, &rest).await {
            // Not every server has times for links.
            Err(error) if is_link && matches!(error.kind(), Kind::Invalid | Kind::Unsupported) => Ok(()),
            Err(error) => Err(failed(error)),
            Ok(_) => Ok(()),
        }
    }

    async fn finish(mut self) -> Result<()> {
        // The innermost first, so that setting one does not change those above it again.
        for (directory, header) in std::mem::take(&mut self.attributes).into_iter().rev() {
            self.set_attributes(&directory, &header).await?;
        }
        Ok(())
    }
}

/// Makes something in the place of what an earlier entry of the same name made.
async fn anew<T, F>(share: &Share, parent: &Handle, name: &[u8], make: impl Fn() -> F) -> Result<T>
where
    F: Future<Output = berth_nfs::Result<T>>,
{
    match make().await {
        Err(error) if error.kind() == Kind::Exists => {
            share.remove(parent, name).await.map_err(failed)?;
            make().await.map_err(failed)
        }
        other => other.map_err(failed),
    }
}

const PRIVATE_FILE: &Change =
    &Change { mode: Some(0o600), uid: None, gid: None, size: None, accessed: None, modified: None };
const NOTHING: Change =
    Change { mode: None, uid: None, gid: None, size: None, accessed: None, modified: None };

/// The names in an entry's path; one that leads elsewhere makes the archive unusable.
fn names_in(path: &[u8]) -> Result<Vec<&[u8]>> {
    let refuse =
        |why: &str| Err(Error::Precondition(format!("its archive names {:?}, which {why}", shown(path))));
    if path.starts_with(b"/") {
        return refuse("is an absolute path");
    }
    let names: Vec<&[u8]> =
        path.split(|&byte| byte == b'/').filter(|name| !name.is_empty() && *name != b".").collect();
    if names.contains(&&b".."[..]) {
        return refuse("leads out of the volume");
    }
    if names.iter().any(|name| name.len() > 255 || name.contains(&0)) {
        return refuse("is no path of any filesystem");
    }
    Ok(names)
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(&path[..path.len().min(256)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_leads_elsewhere_is_refused() {
        for (path, count) in [("./", 0), ("./a/b", 2), ("a//b/", 2), ("a/./b", 2), ("..a/b..", 2)] {
            assert_eq!(names_in(path.as_bytes()).unwrap().len(), count, "{path}");
        }
        for path in ["/etc/passwd", "../x", "a/../../x", "a/..", "..", "./..", "a\0b"] {
            assert!(matches!(names_in(path.as_bytes()), Err(Error::Precondition(_))), "{path}");
        }
        assert!(names_in(&[b'x'; 256]).is_err());
    }
}
