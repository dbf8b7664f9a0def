//! Copies the bytes of one file: by reference where the filesystem can, else without its holes.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
};

use rustix::{fs::SeekFrom, io::Errno};

const BUFFER: usize = 1 << 20;
/// So much is a hole in the copy where it is all zeros, and the filesystem does not tell where the holes are.
const HOLE: usize = 64 << 10;

/// How the bytes got there.
pub(super) enum Data {
    /// Both files share them.
    Cloned,
    /// So many were copied, holes not counted.
    Copied(u64),
}

/// Gives the empty `destination` the first `size` bytes of `source`.
pub(super) fn copy(source: &File, destination: &File, size: u64) -> io::Result<Data> {
    // Whatever speaks against sharing, the bytes can still be copied, and then a real trouble shows itself.
    if size > 0 && rustix::fs::ioctl_ficlone(destination, source).is_ok() {
        return Ok(Data::Cloned);
    }
    let has_holes = source.metadata()?.blocks() * 512 < size;
    let mut copied = 0;
    let mut position = 0;
    while let Some((start, end)) = next_data(source, position, size)? {
        // Such as FUSE: who cannot tell holes from data calls all of it data.
        copied += if has_holes && (start, end) == (0, size) {
            copy_by_hand(source, destination, start, end, Zeros::Hole)?
        } else {
            copy_range(source, destination, start, end)?
        };
        position = end;
    }
    destination.set_len(size)?;
    Ok(Data::Copied(copied))
}

/// The first part with data that begins at `from` or later, up to `size`.
fn next_data(file: &File, from: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= size {
        return Ok(None);
    }
    let found = rustix::fs::seek(file, SeekFrom::Data(from))
        .and_then(|start| Ok((start, rustix::fs::seek(file, SeekFrom::Hole(start))?)));
    match found {
        Ok((start, end)) => Ok(Some((start, end.min(size))).filter(|_| start < size)),
        // No data up to the end, or the file became shorter just now.
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Copies the bytes from `start` to `end`, fewer when the file became shorter, and says how many.
fn copy_range(source: &File, destination: &File, start: u64, end: u64) -> io::Result<u64> {
    let (mut from, mut to) = (start, start);
    while from < end {
        let length = usize::try_from(end - from).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(source, Some(&mut from), destination, Some(&mut to), length) {
            Ok(0) => return Ok(from - start),
            Ok(_) | Err(Errno::INTR) => {}
            // Two filesystems, or one that cannot.
            Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                return Ok(from - start + copy_by_hand(source, destination, from, end, Zeros::Copied)?);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(from - start)
}

/// What becomes of zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Zeros {
    Copied,
    Hole,
}

/// Copies the bytes from `start` to `end`, fewer when the file became shorter, and says how many it wrote.
fn copy_by_hand(source: &File, destination: &File, start: u64, end: u64, zeros: Zeros) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER];
    let mut position = start;
    let mut written = 0;
    while position < end {
        let length = usize::try_from(end - position).unwrap_or(BUFFER).min(BUFFER);
        let read = match source.read_at(&mut buffer[..length], position) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let piece = if zeros == Zeros::Hole { HOLE } else { BUFFER };
        for bytes in buffer[..read].chunks(piece) {
            if zeros == Zeros::Copied || bytes.iter().any(|&byte| byte != 0) {
                destination.write_all_at(bytes, position)?;
                written += bytes.len() as u64;
            }
            position += bytes.len() as u64;
        }
    }
    Ok(written)
}
