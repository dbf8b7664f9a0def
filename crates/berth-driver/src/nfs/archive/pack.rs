//! Packs a directory of a share into an archive on a share.

use std::{collections::HashMap, ops::Range};

use berth_nfs::{Attributes, Cookie, DirEntry, FileKind, Handle, NextData, Share};
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use futures_util::{
    StreamExt as _, TryStreamExt as _,
    future::BoxFuture,
    stream::{self, FuturesUnordered},
};
use sha2::{Digest as _, Sha256};

use super::{EntryKind, Header, MAX_PIECES, encode, end, padding, stored_length};
use crate::{
    backend::{Error, Result},
    nfs::{ahead::begin, progress::Progress, record::hex, shares::failed},
};

/// How much is read and written at once.
const CHUNK: u32 = 1 << 20;
/// How much is compressed without another thread.
const LITTLE: usize = 16 << 10;
/// Files up to this length are read ahead of their turn.
const SMALL: u64 = 64 << 10;
/// How many requests are under way at once.
const AT_ONCE: usize = 8;
/// Holes are looked for in pieces of this length where the server does not tell them.
const GRAIN: usize = 4096;

/// What was packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::nfs) struct Packed {
    /// The length of all files.
    pub(in crate::nfs) unpacked: u64,
    /// The digest of the archive, in hexadecimal.
    pub(in crate::nfs) sha256: String,
}

/// Packs what is in `dir` into the empty file `to`, which is complete and on disk when this returns; counts what it has
/// packed.
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
        xattrs: true,
        progress,
    };
    let attributes = from.attributes(dir).await.map_err(failed)?;
    let xattrs = packer.xattrs(dir).await?;
    packer
        .output
        .push(encode(&header(b"./".to_vec(), EntryKind::Directory, &attributes, xattrs)).into())
        .await?;
    packer.directory(b"./", dir).await?;
    packer.output.push(end().into()).await?;
    let unpacked = packer.unpacked;
    let sha256 = packer.output.finish().await?;
    Ok(Packed { unpacked, sha256 })
}

struct Packer<'a> {
    from: &'a Share,
    output: Output,
    /// Files with several names: where the first one is.
    links: HashMap<((u64, u64), u64), Vec<u8>>,
    unpacked: u64,
    /// Whether the server has extended attributes.
    xattrs: bool,
    progress: &'a Progress,
}

impl Packer<'_> {
    /// Packs what is in a directory, and in those below it.
    async fn directory(&mut self, path: &[u8], dir: &Handle) -> Result<()> {
        // The directories still to be packed, the next one last.
        let mut waiting = vec![(path.to_vec(), dir.clone())];
        while let Some((path, dir)) = waiting.pop() {
            let mut entries = entries_of(self.from, &dir).await?;
            entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            let from = self.from;
            let mut ready =
                stream::iter(entries).map(|entry| begin(ahead(from.clone(), entry))).buffered(AT_ONCE);
            let mut below = Vec::new();
            while let Some((entry, content)) = ready.try_next().await? {
                let path = [path.as_slice(), entry.name.as_bytes()].concat();
                if entry.attributes.kind == FileKind::Directory {
                    let path = [path.as_slice(), b"/"].concat();
                    let xattrs = self.xattrs(&entry.handle).await?;
                    let header = header(path.clone(), EntryKind::Directory, &entry.attributes, xattrs);
                    self.output.push(encode(&header).into()).await?;
                    below.push((path, entry.handle));
                } else {
                    self.other(path, &entry, content).await?;
                }
            }
            waiting.extend(below.into_iter().rev());
        }
        Ok(())
    }

    async fn other(&mut self, path: Vec<u8>, entry: &DirEntry, content: Content) -> Result<()> {
        let attributes = &entry.attributes;
        if attributes.links > 1 {
            let key = (attributes.fsid, attributes.fileid);
            if let Some(first) = self.links.get(&key) {
                let mut header = header(path, EntryKind::HardLink, attributes, Vec::new());
                header.link.clone_from(first);
                return self.output.push(encode(&header).into()).await;
            }
            self.links.insert(key, path.clone());
        }
        let xattrs = self.xattrs(&entry.handle).await?;
        let kind = match attributes.kind {
            FileKind::File => EntryKind::File,
            FileKind::Symlink => EntryKind::Symlink,
            FileKind::Fifo => EntryKind::Fifo,
            FileKind::Block => EntryKind::Block,
            FileKind::Character => EntryKind::Character,
            // A socket is of no use without the process that made it, and no archive has them.
            FileKind::Socket | FileKind::Directory => return Ok(()),
        };
        let mut header = header(path, kind, attributes, xattrs);
        match content {
            Content::Nothing => self.output.push(encode(&header).into()).await,
            Content::Link(to) => {
                header.link = to.to_vec();
                self.output.push(encode(&header).into()).await
            }
            Content::Whole(data) => {
                header.size = length(&data);
                self.unpacked += header.size;
                let mut bytes = encode(&header);
                bytes.extend_from_slice(&data);
                bytes.resize(bytes.len() + padding(header.size), 0);
                self.output.push(bytes.into()).await?;
                self.progress.add(header.size);
                Ok(())
            }
            Content::Large => self.large(header, &entry.handle, attributes).await,
        }
    }

    async fn large(&mut self, mut header: Header, file: &Handle, attributes: &Attributes) -> Result<()> {
        // What takes as much as it is long has no holes worth a look.
        if attributes.used < attributes.size {
            header.pieces = pieces_of(self.from, file, header.size).await?;
        }
        self.unpacked += header.size;
        let stored = stored_length(&header);
        let whole = 0..header.size;
        let pieces = header.pieces.clone().unwrap_or_else(|| Vec::from([whole]));
        self.output.push(encode(&header).into()).await?;
        let from = self.from;
        let chunks = pieces.into_iter().flat_map(chunks);
        let read = |chunk| {
            let (from, file) = (from.clone(), file.clone());
            begin(async move { read_exactly(&from, &file, chunk).await })
        };
        let mut read = stream::iter(chunks).map(read).buffered(AT_ONCE / 2);
        let mut copied = 0;
        while let Some(data) = read.try_next().await? {
            let bytes = length(&data);
            self.output.push(data).await?;
            copied += bytes;
            self.progress.add(bytes);
        }
        // Holes are copied by not being copied.
        self.progress.add(header.size.saturating_sub(copied));
        self.output.push(vec![0; padding(stored)].into()).await
    }

    /// Extended attributes with their full names; none where the server has none.
    async fn xattrs(&mut self, of: &Handle) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        if !self.xattrs {
            return Ok(Vec::new());
        }
        let Some(names) = self.from.xattrs(of).await.map_err(failed)? else {
            self.xattrs = false;
            return Ok(Vec::new());
        };
        let mut xattrs = Vec::new();
        for name in names {
            if let Some(value) = self.from.xattr(of, &name).await.map_err(failed)? {
                xattrs.push(([b"user.", name.as_bytes()].concat(), value.to_vec()));
            }
        }
        Ok(xattrs)
    }
}

/// What is known of an entry's content when its turn comes.
enum Content {
    Nothing,
    Link(Bytes),
    Whole(Bytes),
    Large,
}

async fn ahead(from: Share, entry: DirEntry) -> Result<(DirEntry, Content)> {
    let attributes = &entry.attributes;
    let content = match attributes.kind {
        FileKind::Symlink => Content::Link(from.read_link(&entry.handle).await.map_err(failed)?),
        FileKind::File if attributes.size == 0 => Content::Whole(Bytes::new()),
        FileKind::File if attributes.size <= SMALL => {
            Content::Whole(read_exactly(&from, &entry.handle, 0..attributes.size).await?)
        }
        FileKind::File => Content::Large,
        _ => Content::Nothing,
    };
    Ok((entry, content))
}

async fn entries_of(share: &Share, dir: &Handle) -> Result<Vec<DirEntry>> {
    let mut entries = Vec::new();
    let mut next = Some(Cookie::default());
    while let Some(cookie) = next {
        let page = share.read_dir(dir, cookie).await.map_err(failed)?;
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
async fn read_exactly(share: &Share, file: &Handle, piece: Range<u64>) -> Result<Bytes> {
    let wanted = usize::try_from(piece.end - piece.start).unwrap_or(usize::MAX);
    let mut data = Vec::new();
    while data.len() < wanted {
        let offset = piece.start + length(&data);
        let left = u32::try_from(wanted - data.len()).unwrap_or(CHUNK).min(CHUNK);
        let (bytes, is_end) = share.read(file, offset, left).await.map_err(failed)?;
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
async fn pieces_of(share: &Share, file: &Handle, size: u64) -> Result<Option<Vec<Range<u64>>>> {
    let mut pieces: Vec<Range<u64>> = Vec::new();
    let mut offset = 0;
    while offset < size {
        match share.next_data(file, offset).await.map_err(failed)? {
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

/// As [`pieces_of`], by a look at the bytes.
async fn scanned(share: &Share, file: &Handle, size: u64) -> Result<Option<Vec<Range<u64>>>> {
    let mut pieces = Vec::new();
    let mut read = stream::iter(chunks(0..size))
        .map(|chunk| async { Ok::<_, Error>((chunk.start, read_exactly(share, file, chunk).await?)) })
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
