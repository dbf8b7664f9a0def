//! Packs a directory of a share into an archive on a share.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use berth_core::hex;
use berth_host::archive::{EntryKind, Header, MAX_PIECES, encode, end, padding, stored_length};
use berth_nfs::{
    Attributes, Cookie, DirEntry, Entry, FileKind, Handle, Kind, NextData, Share, tree::TreeEntry,
};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures_util::{
    StreamExt as _, TryStreamExt as _,
    future::BoxFuture,
    stream::{self, FuturesUnordered},
};
use sha2::{Digest as _, Sha256};

use crate::{
    Error, Result,
    nfs::{
        controller::{ahead::begin, progress::Progress},
        shares::failed,
    },
};

/// How much is read and written at once.
const CHUNK: u32 = 1 << 20;
/// How much is compressed without another thread.
const LITTLE: usize = 16 << 10;
/// Files up to this length are read ahead of their turn.
const SMALL: u64 = 64 << 10;
/// How many requests are under way at once.
const AT_ONCE: usize = 8;
/// So often a file is packed again because it was replaced meanwhile.
const REPLACED: u32 = 16;
/// Holes are searched in pieces of this length where the server does not report them.
const GRAIN: usize = 4096;

/// What is known of an archive when it is whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::nfs) struct Packed {
    /// The length of all files.
    pub(in crate::nfs) unpacked: u64,
    /// The digest of the archive, in hexadecimal.
    pub(in crate::nfs) sha256: String,
}

/// Packs what is in `dir` into the empty file `to`, which is complete and on disk when this returns; counts what it has
/// packed. What goes away meanwhile is left out.
pub(in crate::nfs) async fn pack(
    from: &Share,
    dir: &Handle,
    to: &Share,
    file: &Handle,
    compress: bool,
    progress: &Progress,
) -> Result<Packed> {
    let mut packer = Packer {
        from,
        output: Output::new(to, file, compress),
        links: HashMap::new(),
        unpacked: 0,
        has_xattrs: Arc::new(AtomicBool::new(true)),
        progress,
    };
    let attributes = from.attributes(dir).await.map_err(failed)?;
    let xattrs = xattrs_of(from, dir, &packer.has_xattrs).await.map_err(failed)?;
    packer
        .output
        .push(encode(&header(b"./".to_vec(), EntryKind::Directory, &attributes, xattrs)).into())
        .await?;
    packer.directory(b"./", TreeEntry::top(Entry { handle: dir.clone(), attributes })).await?;
    packer.output.push(end().into()).await?;
    let unpacked = packer.unpacked;
    let sha256 = packer.output.finish().await?;
    Ok(Packed { unpacked, sha256 })
}

/// A file of the source: its filesystem and its number there.
type Inode = ((u64, u64), u64);

struct Packer<'a> {
    from: &'a Share,
    output: Output,
    /// Files with several names: where the first one is.
    links: HashMap<Inode, Vec<u8>>,
    unpacked: u64,
    /// Whether the server has extended attributes.
    has_xattrs: Arc<AtomicBool>,
    progress: &'a Progress,
}

impl Packer<'_> {
    /// Packs what is in a directory, and in those below it.
    async fn directory(&mut self, path: &[u8], top: TreeEntry) -> Result<()> {
        // The directories still to be packed, the next one last.
        let mut waiting = vec![(path.to_vec(), top)];
        while let Some((path, dir)) = waiting.pop() {
            let listed = self.from.at(&dir, |dir| entries_of(self.from, dir)).await.map_err(failed)?;
            // One that went away is as good as empty.
            let Some((dir, mut entries)) = listed else { continue };
            entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            let (from, has_xattrs) = (self.from.clone(), self.has_xattrs.clone());
            let ahead = |entry: DirEntry| {
                let (from, has_xattrs, name) = (from.clone(), has_xattrs.clone(), entry.name.clone());
                let place = dir.below(entry);
                begin(async move { Ok((name, ahead(&from, &place, &has_xattrs).await.map_err(failed)?)) })
            };
            let mut ready = stream::iter(entries).map(ahead).buffered(AT_ONCE);
            let mut below = Vec::new();
            while let Some((name, found)) = ready.try_next().await? {
                let Some((place, known)) = found else { continue };
                let path = [path.as_slice(), name.as_bytes()].concat();
                if place.attributes().kind == FileKind::Directory {
                    let path = [path.as_slice(), b"/"].concat();
                    let header = header(path.clone(), EntryKind::Directory, place.attributes(), known.xattrs);
                    self.output.push(encode(&header).into()).await?;
                    below.push((path, place));
                } else {
                    self.other(&path, place, known).await?;
                }
            }
            waiting.extend(below.into_iter().rev());
        }
        Ok(())
    }

    /// Packs what is no directory, or what has its name by then.
    async fn other(&mut self, path: &[u8], mut place: TreeEntry, mut known: PreparedEntry) -> Result<()> {
        for _ in 0..REPLACED {
            let Some(now) = self.once(path, &place, known).await? else { return Ok(()) };
            let found = ahead(self.from, &now, &self.has_xattrs).await.map_err(failed)?;
            match found {
                // The archive may have a file of that name by now, and nothing can be in that.
                Some((place, _)) if place.attributes().kind == FileKind::Directory => return Ok(()),
                Some(found) => (place, known) = found,
                None => return Ok(()),
            }
        }
        let path = String::from_utf8_lossy(path);
        Err(Error::Unavailable(format!("{path:?} is replaced faster than it can be read; repeat the call")))
    }

    /// Packs it once. If it goes away meanwhile, gives what is there now: of two entries with one name, the later counts.
    async fn once(
        &mut self,
        path: &[u8],
        place: &TreeEntry,
        known: PreparedEntry,
    ) -> Result<Option<TreeEntry>> {
        let attributes = place.attributes();
        let kind = match attributes.kind {
            FileKind::File => EntryKind::File,
            FileKind::Symlink => EntryKind::Symlink,
            FileKind::Fifo => EntryKind::Fifo,
            FileKind::Block => EntryKind::Block,
            FileKind::Character => EntryKind::Character,
            // A socket is of no use without the process that made it, and no archive has them.
            FileKind::Socket | FileKind::Directory => return Ok(None),
        };
        if attributes.links > 1 {
            if let Some(first) = self.links.get(&inode(attributes)) {
                let mut header = header(path.to_vec(), EntryKind::HardLink, attributes, Vec::new());
                header.link.clone_from(first);
                self.output.push(encode(&header).into()).await?;
                return Ok(None);
            }
            self.links.insert(inode(attributes), path.to_vec());
        }
        let mut header = header(path.to_vec(), kind, attributes, known.xattrs);
        match known.content {
            Content::Nothing => self.output.push(encode(&header).into()).await?,
            Content::Link(to) => {
                header.link = to.to_vec();
                self.output.push(encode(&header).into()).await?;
            }
            Content::Whole(data) => {
                header.size = length(&data);
                self.unpacked += header.size;
                let mut bytes = encode(&header);
                bytes.extend_from_slice(&data);
                bytes.resize(bytes.len() + padding(header.size), 0);
                self.output.push(bytes.into()).await?;
                self.progress.add(header.size);
            }
            Content::Large => return self.large(header, place).await,
        }
        Ok(None)
    }

    async fn large(&mut self, mut header: Header, place: &TreeEntry) -> Result<Option<TreeEntry>> {
        let (from, file, attributes) = (self.from, place.handle(), place.attributes());
        // A file that takes as much space as it is long has no holes.
        if attributes.used < attributes.size {
            header.pieces = match pieces_of(from, file, header.size).await {
                Ok(pieces) => pieces,
                Err(error) => return self.lost(place, error).await,
            };
        }
        let stored = stored_length(&header);
        let whole = 0..header.size;
        let pieces = header.pieces.clone().unwrap_or_else(|| Vec::from([whole]));
        let wanted = pieces.into_iter().flat_map(chunks);
        let read = |chunk| {
            let (from, file) = (from.clone(), file.clone());
            begin(async move { Ok(read_exactly(&from, &file, chunk).await) })
        };
        let mut read = stream::iter(wanted).map(read).buffered(AT_ONCE / 2);
        let mut data = match read.try_next().await?.transpose() {
            Ok(first) => first,
            // Nothing of it is in the archive yet.
            Err(error) => return self.lost(place, error).await,
        };
        self.unpacked += header.size;
        self.output.push(encode(&header).into()).await?;
        let (mut copied, mut now) = (0, None);
        while let Some(bytes) = data {
            copied += length(&bytes);
            self.progress.add(length(&bytes));
            self.output.push(bytes).await?;
            data = match read.try_next().await?.transpose() {
                Ok(next) => next,
                Err(error) => {
                    now = self.lost(place, error).await?;
                    let path = String::from_utf8_lossy(&header.path);
                    tracing::warn!(%path, "a file went away while it was packed; the rest of it becomes zeros");
                    // The archive has promised the rest, and has to keep that.
                    for rest in chunks(copied..stored) {
                        let zeros = usize::try_from(rest.end - rest.start).expect("a chunk fits in memory");
                        self.output.push(vec![0; zeros].into()).await?;
                    }
                    None
                }
            };
        }
        // Holes are copied by not being copied.
        self.progress.add(header.size.saturating_sub(copied));
        self.output.push(vec![0; padding(stored)].into()).await?;
        Ok(now)
    }

    /// What has the name of a file that could not be read, if that means that it went away; no other name leads to it.
    async fn lost(&mut self, place: &TreeEntry, error: berth_nfs::Error) -> Result<Option<TreeEntry>> {
        self.links.remove(&inode(place.attributes()));
        self.from.find_again(place, error).await.map_err(failed)
    }
}

fn inode(of: &Attributes) -> Inode {
    (of.fsid, of.fileid)
}

/// What is known of an entry when its turn comes.
struct PreparedEntry {
    xattrs: Xattrs,
    content: Content,
}

/// With their full names.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

enum Content {
    Nothing,
    Link(Bytes),
    Whole(Bytes),
    Large,
}

/// Finds out about an entry, or about what has its name by then; nothing may.
async fn ahead(
    from: &Share,
    place: &TreeEntry,
    has_xattrs: &AtomicBool,
) -> berth_nfs::Result<Option<(TreeEntry, PreparedEntry)>> {
    from.at(place, |place| known(from, place, has_xattrs)).await
}

async fn known(from: &Share, place: TreeEntry, has_xattrs: &AtomicBool) -> berth_nfs::Result<PreparedEntry> {
    let (handle, attributes) = (place.handle(), place.attributes());
    let content = match attributes.kind {
        FileKind::Symlink => Content::Link(from.read_link(handle).await?),
        FileKind::File if attributes.size == 0 => Content::Whole(Bytes::new()),
        FileKind::File if attributes.size <= SMALL => {
            Content::Whole(read_exactly(from, handle, 0..attributes.size).await?)
        }
        FileKind::File => Content::Large,
        _ => Content::Nothing,
    };
    Ok(PreparedEntry { xattrs: xattrs_of(from, handle, has_xattrs).await?, content })
}

/// Extended attributes; none where the server has none.
async fn xattrs_of(from: &Share, of: &Handle, has_xattrs: &AtomicBool) -> berth_nfs::Result<Xattrs> {
    if !has_xattrs.load(Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let Some(names) = from.xattrs(of).await? else {
        has_xattrs.store(false, Ordering::Relaxed);
        return Ok(Vec::new());
    };
    let mut xattrs = Vec::new();
    for name in names {
        match from.xattr(of, &name).await {
            Ok(None) => {}
            Ok(Some(value)) => xattrs.push(([b"user.", name.as_bytes()].concat(), value.to_vec())),
            // Removed meanwhile.
            Err(error) if error.kind() == Kind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(xattrs)
}

async fn entries_of(share: &Share, dir: TreeEntry) -> berth_nfs::Result<Vec<DirEntry>> {
    let mut entries = Vec::new();
    // Something else may have its name by now.
    let mut next = (dir.attributes().kind == FileKind::Directory).then(Cookie::default);
    while let Some(cookie) = next {
        let page = share.read_dir(dir.handle(), cookie).await?;
        entries.extend(page.entries);
        next = page.next;
    }
    Ok(entries)
}

fn header(path: Vec<u8>, kind: EntryKind, of: &Attributes, xattrs: Vec<(Vec<u8>, Vec<u8>)>) -> Header {
    Header {
        path,
        kind,
        mode: of.mode,
        uid: of.uid,
        gid: of.gid,
        size: if kind == EntryKind::File { of.size } else { 0 },
        modified: (of.modified.seconds, of.modified.nanoseconds),
        device: of.device,
        link: Vec::new(),
        xattrs,
        pieces: None,
    }
}

fn chunks(piece: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let step = u64::from(CHUNK);
    (piece.start..piece.end)
        .step_by(usize::try_from(CHUNK).unwrap_or(usize::MAX))
        .map(move |start| start..piece.end.min(start + step))
}

/// Reads a piece of a file; where it has become shorter meanwhile, zeros.
async fn read_exactly(share: &Share, file: &Handle, piece: Range<u64>) -> berth_nfs::Result<Bytes> {
    let wanted = usize::try_from(piece.end - piece.start).unwrap_or(usize::MAX);
    let mut data = Vec::new();
    while data.len() < wanted {
        let offset = piece.start + length(&data);
        let left = u32::try_from(wanted - data.len()).unwrap_or(CHUNK).min(CHUNK);
        let (bytes, is_end) = share.read(file, offset, left).await?;
        if data.is_empty() && bytes.len() == wanted {
            return Ok(bytes);
        }
        data.extend_from_slice(&bytes[..bytes.len().min(wanted - data.len())]);
        if is_end || bytes.is_empty() {
            break;
        }
    }
    data.resize(wanted, 0);
    Ok(data.into())
}

/// The pieces of a file that are no holes; `None` if it has none, or more pieces than are worth it.
async fn pieces_of(share: &Share, file: &Handle, size: u64) -> berth_nfs::Result<Option<Vec<Range<u64>>>> {
    let mut pieces: Vec<Range<u64>> = Vec::new();
    let mut offset = 0;
    while offset < size {
        match share.next_data(file, offset).await? {
            NextData::Unknown => return scanned(share, file, size).await,
            NextData::None => break,
            NextData::At(found) => {
                let piece = found.start.max(offset)..found.end.min(size);
                if piece.is_empty() {
                    break;
                }
                offset = piece.end;
                add(&mut pieces, piece);
            }
        }
        if pieces.len() > MAX_PIECES {
            return Ok(None);
        }
    }
    Ok(Some(pieces).filter(|pieces| !is_whole(pieces, size)))
}

/// As [`pieces_of`], by reading the bytes.
async fn scanned(share: &Share, file: &Handle, size: u64) -> berth_nfs::Result<Option<Vec<Range<u64>>>> {
    let mut pieces = Vec::new();
    let mut read = stream::iter(chunks(0..size))
        .map(|chunk| async {
            Ok::<_, berth_nfs::Error>((chunk.start, read_exactly(share, file, chunk).await?))
        })
        .buffered(AT_ONCE / 2);
    while let Some((start, data)) = read.try_next().await? {
        for (grain, index) in data.chunks(GRAIN).zip(0_u64..) {
            if grain.iter().any(|&byte| byte != 0) {
                let at = start + index * u64::try_from(GRAIN).unwrap_or(0);
                add(&mut pieces, at..at + length(grain));
            }
        }
        if pieces.len() > MAX_PIECES {
            return Ok(None);
        }
    }
    Ok(Some(pieces).filter(|pieces| !is_whole(pieces, size)))
}

fn is_whole(pieces: &[Range<u64>], size: u64) -> bool {
    matches!(pieces, [piece] if *piece == (0..size))
}

fn add(pieces: &mut Vec<Range<u64>>, piece: Range<u64>) {
    match pieces.last_mut() {
        Some(last) if last.end == piece.start => last.end = piece.end,
        _ => pieces.push(piece),
    }
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).expect("a length in memory fits")
}

/// The archive being written: compressed, summed up, and sent with several requests under way.
struct Output {
    share: Share,
    file: Handle,
    encoder: Option<GzEncoder<Vec<u8>>>,
    waiting: Vec<u8>,
    sum: Sha256,
    offset: u64,
    sent: FuturesUnordered<BoxFuture<'static, Result<()>>>,
}

impl Output {
    fn new(share: &Share, file: &Handle, compress: bool) -> Self {
        Self {
            share: share.clone(),
            file: file.clone(),
            encoder: compress.then(|| GzEncoder::new(Vec::new(), Compression::fast())),
            waiting: Vec::new(),
            sum: Sha256::new(),
            offset: 0,
            sent: FuturesUnordered::new(),
        }
    }

    async fn push(&mut self, data: Bytes) -> Result<()> {
        match self.encoder.take() {
            None => self.waiting.extend_from_slice(&data),
            Some(encoder) => {
                let (encoder, packed) = compress(encoder, data).await?;
                self.encoder = Some(encoder);
                self.waiting.extend_from_slice(&packed);
            }
        }
        while length(&self.waiting) >= u64::from(CHUNK) {
            let rest = self.waiting.split_off(usize::try_from(CHUNK).unwrap_or(usize::MAX));
            let chunk = std::mem::replace(&mut self.waiting, rest);
            self.send(chunk).await?;
        }
        Ok(())
    }

    async fn send(&mut self, chunk: Vec<u8>) -> Result<()> {
        self.sum.update(&chunk);
        let chunk = Bytes::from(chunk);
        let (share, file, offset) = (self.share.clone(), self.file.clone(), self.offset);
        self.offset += length(&chunk);
        if self.sent.len() >= AT_ONCE / 2 {
            self.sent.try_next().await?;
        }
        self.sent.push(begin(async move { write_all(&share, &file, offset, chunk).await }));
        Ok(())
    }

    /// Brings everything to disk, and gives the digest.
    async fn finish(mut self) -> Result<String> {
        if let Some(encoder) = self.encoder.take() {
            let rest =
                encoder.finish().map_err(|error| Error::State(format!("compress a snapshot: {error}")))?;
            self.waiting.extend_from_slice(&rest);
        }
        let last = std::mem::take(&mut self.waiting);
        if !last.is_empty() {
            self.send(last).await?;
        }
        while self.sent.try_next().await?.is_some() {}
        self.share.commit(&self.file).await.map_err(failed)?;
        Ok(hex(&self.sum.finalize()))
    }
}

/// Compresses, on another thread if it is much.
async fn compress(mut encoder: GzEncoder<Vec<u8>>, data: Bytes) -> Result<(GzEncoder<Vec<u8>>, Vec<u8>)> {
    use std::io::Write as _;
    let little = data.len() <= LITTLE;
    let work = move || {
        encoder.write_all(&data)?;
        let packed = std::mem::take(encoder.get_mut());
        Ok::<_, std::io::Error>((encoder, packed))
    };
    let done = if little {
        work()
    } else {
        let joined = tokio::task::spawn_blocking(work).await;
        joined.map_err(|error| Error::State(format!("compress a snapshot: {error}")))?
    };
    done.map_err(|error| Error::State(format!("compress a snapshot: {error}")))
}

/// Writes all of it, not yet on disk.
pub(in crate::nfs) async fn write_all(
    share: &Share,
    file: &Handle,
    mut offset: u64,
    mut data: Bytes,
) -> Result<()> {
    while !data.is_empty() {
        let written = share.write(file, offset, data.clone(), false).await.map_err(failed)?;
        offset += u64::from(written);
        data = data.slice(usize::try_from(written).unwrap_or(usize::MAX).min(data.len())..);
    }
    Ok(())
}
