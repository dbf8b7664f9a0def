//! What is on a file or block device, read from it directly.
//!
//! Superblock layouts are those of the kernel's documentation (ext4, btrfs) and `xfs_format.h`.

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek as _, SeekFrom},
    num::NonZeroU64,
    os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use rustix::{fs::Advice, io::Errno};

use super::{Content, Filesystem};
use crate::error::{Doing as _, Result};

/// Everything recognised by name has its signature within this much.
const HEAD: usize = 0x11000;
const CHUNK: usize = 1 << 20;
/// A block device of this size is read from end to end.
const READ_WHOLE: u64 = 4 << 30;
/// A larger one at so many places, of so many bytes each.
const SAMPLES: u64 = 4096;
const SAMPLE: u64 = 64 << 10;
/// So many of them are requested from the disk before they are read.
const AHEAD: usize = 32;

const EXT: usize = 1024;
const EXT_MAGIC: [u8; 2] = [0x53, 0xEF];
const BTRFS: usize = 0x10000;

/// Signatures of what is not ours to touch: offset, bytes, name.
const OTHERS: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "LUKS"),
    (0, b"hsqs", "squashfs"),
    (3, b"NTFS    ", "NTFS"),
    (3, b"EXFAT   ", "exFAT"),
    (54, b"FAT1", "FAT"),
    (82, b"FAT32", "FAT"),
    (24, b"LVM2", "LVM2"),
    (536, b"LVM2", "LVM2"),
    (1048, b"LVM2", "LVM2"),
    (1560, b"LVM2", "LVM2"),
    (510, b"\x55\xaa", "a boot sector or DOS partition table"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (0, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (4096, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (1024, b"\x10\x20\xf5\xf2", "f2fs"),
    (1024, b"\xe2\xe1\xf5\xe0", "erofs"),
    (4086, b"SWAPSPACE2", "swap space"),
    (32769, b"CD001", "ISO 9660"),
    (0x10034, b"ReIsEr", "reiserfs"),
];

/// Says what is on a regular file or block device.
///
/// `Blank` is proven, never guessed: no block or no data in the file, or nothing but zeros in all of it. A block device of up
/// to 4 GiB is read from end to end for that. A larger one, which could take hours, is read where filesystems, partition tables
/// and volume managers keep what they are known by (the first and last 64 MiB, and the places of the copies of superblocks),
/// and at 4096 places between. What cannot be read is an error.
pub fn probe(image_or_device: &Path) -> Result<Content> {
    let (file, sparse) = open(image_or_device)?;
    content(&file, sparse).doing("probe", image_or_device)
}

/// The size in bytes that the superblock of `fs` states, to see whether growth is due.
///
/// While an XFS is mounted its superblock on disk may lag behind.
pub fn filesystem_size(image_or_device: &Path, fs: Filesystem) -> Result<u64> {
    let (file, _) = open(image_or_device)?;
    let head = read_head(&file).doing("read the superblock of", image_or_device)?;
    if !signatures(&head).contains(&Content::Filesystem(fs)) {
        let missing = io::Error::new(io::ErrorKind::InvalidData, format!("no {fs} superblock"));
        return Err(missing).doing("read the superblock of", image_or_device);
    }
    Ok(match fs {
        Filesystem::Ext4 => {
            let is_64bit = le32(&head, EXT + 0x60) & 0x80 != 0;
            let high = if is_64bit { le32(&head, EXT + 0x150) } else { 0 };
            (u64::from(high) << 32 | u64::from(le32(&head, EXT + 4))) << (10 + le32(&head, EXT + 0x18))
        }
        Filesystem::Xfs => {
            u64::from(be32(&head, 4)) * (u64::from(be32(&head, 8)) << 32 | u64::from(be32(&head, 12)))
        }
        Filesystem::Btrfs => {
            u64::from(le32(&head, BTRFS + 0x74)) << 32 | u64::from(le32(&head, BTRFS + 0x70))
        }
    })
}

/// Opens a regular file or block device, and says whether it can have holes.
fn open(path: &Path) -> Result<(File, bool)> {
    // A pipe would otherwise be waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).doing("open", path)?;
    let kind = file.metadata().doing("stat", path)?.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok((file, kind.is_file()));
    }
    let neither = io::Error::new(io::ErrorKind::InvalidInput, "neither a regular file nor a block device");
    Err(neither).doing("probe", path)
}

fn content(file: &File, sparse: bool) -> io::Result<Content> {
    let mut found = signatures(&read_head(file)?);
    Ok(match found.len() {
        1 => found.remove(0),
        0 if is_zero(file, sparse)? => Content::Blank,
        0 => Content::Other("unrecognised data".into()),
        _ => Content::Other(found.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")),
    })
}

/// The first bytes, with zeros for what lies behind the end.
fn read_head(file: &File) -> io::Result<Vec<u8>> {
    let mut head = vec![0; HEAD];
    read_up_to(file, &mut head, 0)?;
    Ok(head)
}

fn signatures(head: &[u8]) -> Vec<Content> {
    let has = |offset: usize, magic: &[u8]| head[offset..].starts_with(magic);
    let mut found = Vec::new();
    if has(0, b"XFSB") {
        found.push(Content::Filesystem(Filesystem::Xfs));
    }
    if has(BTRFS + 0x40, b"_BHRfS_M") {
        found.push(Content::Filesystem(Filesystem::Btrfs));
    }
    if has(EXT + 0x38, &EXT_MAGIC) && le32(head, EXT + 0x18) <= 6 {
        found.push(ext_variant(head));
    }
    for (offset, magic, name) in OTHERS {
        let other = Content::Other((*name).into());
        if has(*offset, magic) && !found.contains(&other) {
            found.push(other);
        }
    }
    found
}

/// Distinguishes the members of the ext family by the features only the later ones have.
fn ext_variant(head: &[u8]) -> Content {
    let [compatible, incompatible, read_only] = [0x5C, 0x60, 0x64].map(|field| le32(head, EXT + field));
    // Journal device; then extents, 64bit, mmp, flex_bg, inline data and what came later.
    if incompatible & 0x8 != 0 {
        return Content::Other("an external ext4 journal".into());
    }
    // Likewise huge files, group checksums, many subdirectories, extra inode size and what came later.
    if incompatible & !0x1F != 0 || read_only & !0x7 != 0 {
        return Content::Filesystem(Filesystem::Ext4);
    }
    Content::Other(if compatible & 0x4 != 0 { "ext3" } else { "ext2" }.into())
}

fn is_zero(mut file: &File, sparse: bool) -> io::Result<bool> {
    let end = file.seek(SeekFrom::End(0))?;
    // On a share that does not report holes all of it would have to be read.
    if sparse && end > HEAD as u64 && file.metadata()?.blocks() == 0 {
        return Ok(true);
    }
    let mut buffers = (vec![0; CHUNK], vec![0; CHUNK]);
    if !sparse && end > READ_WHOLE {
        return are_zero(file, &sampled_ranges(end).collect::<Vec<_>>(), &mut buffers);
    }
    let mut position = 0;
    while position < end {
        let (start, stop) = if sparse {
            match data_extent(file, position)? {
                Some(extent) => extent,
                None => return Ok(true),
            }
        } else {
            (position, end)
        };
        if !is_zero_between(file, start, stop.min(end), &mut buffers)? {
            return Ok(false);
        }
        position = stop;
    }
    Ok(true)
}

/// Whether there are only zeros in these parts. Each is asked for ahead, so that a disk that is far away or busy answers many at a
/// time, and nobody waits for each by itself.
fn are_zero(file: &File, parts: &[(u64, u64)], buffers: &mut (Vec<u8>, Vec<u8>)) -> io::Result<bool> {
    let ask = |(start, stop): &(u64, u64)| {
        // Advice that is not taken costs time and nothing else.
        let _ = rustix::fs::fadvise(file, *start, NonZeroU64::new(stop - start), Advice::WillNeed);
    };
    parts.iter().take(AHEAD).for_each(ask);
    for (number, (start, stop)) in parts.iter().enumerate() {
        parts.iter().skip(number + AHEAD).take(1).for_each(ask);
        if !is_zero_between(file, *start, *stop, buffers)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether there are only zeros from `position` to `stop`; `buffers` are zeros, and room for what is read.
fn is_zero_between(
    file: &File,
    mut position: u64,
    stop: u64,
    (zeros, buffer): &mut (Vec<u8>, Vec<u8>),
) -> io::Result<bool> {
    while position < stop {
        let wanted = usize::try_from(stop - position).unwrap_or(CHUNK).min(CHUNK);
        let length = read_up_to(file, &mut buffer[..wanted], position)?;
        if length < wanted {
            // Someone cuts the file while we read it: nothing is proven.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if buffer[..length] != zeros[..length] {
            return Ok(false);
        }
        position += length as u64;
    }
    Ok(true)
}

/// The ranges of a large device that are read to find out whether anything was ever made on it.
fn sampled_ranges(end: u64) -> impl Iterator<Item = (u64, u64)> {
    const MIB: u64 = 1 << 20;
    let edges = [(0, 64 * MIB), (end - 64 * MIB, end)];
    // Copies of the superblocks of ext4 (128 MiB apart, with blocks of 4 KiB: 1, 3, 5, 7, 9 times), and of btrfs.
    let copies = [128 * MIB, 384 * MIB, 640 * MIB, 896 * MIB, 1152 * MIB, 256 << 30];
    let step = (end / SAMPLES).next_multiple_of(4096);
    let between = (1..SAMPLES).map(move |number| number * step);
    let around = copies.into_iter().chain(between).filter(move |start| start + SAMPLE <= end);
    edges.into_iter().chain(around.map(|start| (start, start + SAMPLE)))
}

/// The first extent with data at or after `position`.
fn data_extent(file: &File, position: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(position)) {
        Err(Errno::NXIO) => return Ok(None),
        start => start?,
    };
    Ok(Some((start, rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start))?)))
}

fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(length) => filled += length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn four(head: &[u8], offset: usize) -> [u8; 4] {
    head[offset..offset + 4].try_into().expect("four bytes are four bytes")
}

fn le32(head: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(four(head, offset))
}

fn be32(head: &[u8], offset: usize) -> u32 {
    u32::from_be_bytes(four(head, offset))
}
