//! Which parts of an image file hold data, and in which parts two images differ.
//!
//! Both are read lazily, in ascending order, so that an image of any size takes the same memory.

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    fs::File,
    os::{fd::AsFd as _, unix::fs::FileExt as _},
};

use rustix::{fs::SeekFrom, io::Errno};

use crate::error::{Error, Result};

/// What is compared at once, and the granularity of the answer.
const BLOCK: u64 = 4096;
/// What is read at once.
const WINDOW: u64 = 256 << 10;

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// In bytes from the start.
    pub offset: u64,
    /// The length in bytes.
    pub length: u64,
}

impl Range {
    fn end(&self) -> u64 {
        self.offset + self.length
    }
}

/// The parts of `file` from `from` on that hold data; the rest reads as zeros and takes no space.
pub fn allocated(file: &File, from: u64) -> Result<impl Iterator<Item = Result<Range>> + Send + 'static> {
    let file = duplicate(file)?;
    let mut next = Some(from);
    Ok(std::iter::from_fn(move || {
        let found = data_after(&file, next?);
        next = found.as_ref().ok().and_then(|range| range.as_ref().map(Range::end));
        found.transpose()
    }))
}

/// The parts from `from` on in which `target` reads differently from `base`.
///
/// Where both share their blocks on disk, as copies by reference do, nothing is read. Beyond the end of `base` all
/// data is a change.
pub fn changed(
    base: &File,
    target: &File,
    from: u64,
) -> Result<impl Iterator<Item = Result<Range>> + Send + 'static> {
    let mut changes = Changes::new(duplicate(base)?, duplicate(target)?, from - from % BLOCK)?;
    let mut pending: Option<Range> = None;
    let mut finished = false;
    Ok(std::iter::from_fn(move || {
        while !finished {
            match changes.next_block_run() {
                Err(error) => {
                    finished = true;
                    return Some(Err(error));
                }
                Ok(None) => finished = true,
                Ok(Some(run)) => match &mut pending {
                    Some(last) if last.end() == run.offset => last.length += run.length,
                    last => {
                        if let Some(done) = last.replace(run) {
                            return Some(Ok(done));
                        }
                    }
                },
            }
        }
        pending.take().map(Ok)
    }))
}

/// Walks both files side by side.
struct Changes {
    base: File,
    base_length: u64,
    target: File,
    length: u64,
    position: u64,
    /// Runs of the last window that were not yet returned.
    found: VecDeque<Range>,
    base_bytes: Vec<u8>,
    target_bytes: Vec<u8>,
}

impl Changes {
    fn new(base: File, target: File, position: u64) -> Result<Self> {
        let length = |file: &File| {
            file.metadata()
                .map(|metadata| metadata.len())
                .map_err(|error| Error::new("read the extents of an image", error))
        };
        Ok(Self {
            base_length: length(&base)?,
            base,
            length: length(&target)?,
            target,
            position,
            found: VecDeque::new(),
            base_bytes: Vec::new(),
            target_bytes: Vec::new(),
        })
    }

    /// The next run of blocks that differ, at most a window long.
    fn next_block_run(&mut self) -> Result<Option<Range>> {
        while self.found.is_empty() && self.position < self.length {
            let Some(start) = self.next_data()? else { return Ok(None) };
            self.position = start - start % BLOCK;
            let shared = shared_until(&self.base, &self.target, self.position)?;
            if shared > self.position {
                self.position = shared;
            } else if self.position < self.base_length {
                self.compare_window()?;
            } else {
                self.take_all_data()?;
            }
        }
        Ok(self.found.pop_front())
    }

    /// Where either file has data again; where neither has, both read as zeros.
    fn next_data(&self) -> Result<Option<u64>> {
        let in_base = data_after(&self.base, self.position)?.map(|range| range.offset.max(self.position));
        let in_target = data_after(&self.target, self.position)?.map(|range| range.offset.max(self.position));
        let first = in_base.into_iter().chain(in_target).min();
        Ok(first.filter(|start| *start < self.length))
    }

    /// Compares a window from the position on.
    fn compare_window(&mut self) -> Result<()> {
        // The window ends with the block the base ends in.
        let end = self.length.min(self.base_length.next_multiple_of(BLOCK));
        let window = WINDOW.min(end - self.position);
        read_padded(&self.base, self.position, window, &mut self.base_bytes)?;
        read_padded(&self.target, self.position, window, &mut self.target_bytes)?;
        let block = usize::try_from(BLOCK).expect("a block fits into memory");
        for (base, target) in self.base_bytes.chunks(block).zip(self.target_bytes.chunks(block)) {
            let run = Range { offset: self.position, length: target.len() as u64 };
            self.position = run.end();
            match self.found.back_mut() {
                _ if base == target && run.end() <= self.base_length => {}
                Some(last) if last.end() == run.offset => last.length += run.length,
                _ => self.found.push_back(run),
            }
        }
        Ok(())
    }

    /// Takes the data of the target at the position as a change, whatever it reads as.
    fn take_all_data(&mut self) -> Result<()> {
        let data = data_after(&self.target, self.position)?;
        let end = data.map_or(self.length, |data| data.end().next_multiple_of(BLOCK).min(self.length));
        self.found.push_back(Range { offset: self.position, length: end - self.position });
        self.position = end;
        Ok(())
    }
}

fn duplicate(file: &File) -> Result<File> {
    file.try_clone().map_err(|error| Error::new("hold an image open", error))
}

/// The first part with data that ends after `from`, cut to begin there.
fn data_after(file: &File, from: u64) -> Result<Option<Range>> {
    let start = match rustix::fs::seek(file.as_fd(), SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(Error::new("find data in an image", error)),
    };
    let end = rustix::fs::seek(file.as_fd(), SeekFrom::Hole(start))
        .map_err(|error| Error::new("find the end of data in an image", error))?;
    Ok(Some(Range { offset: start, length: end - start }))
}

/// Reads `length` bytes; what is beyond the end of the file is zeros.
fn read_padded(file: &File, offset: u64, length: u64, buffer: &mut Vec<u8>) -> Result<()> {
    let length = usize::try_from(length).expect("a window fits into memory");
    buffer.clear();
    buffer.resize(length, 0);
    let mut filled = 0;
    while filled < length {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::new("read an image", error)),
        }
    }
    Ok(())
}

/// Up to where both files have the same blocks of the same disk, beginning at `offset`.
fn shared_until(base: &File, target: &File, offset: u64) -> Result<u64> {
    let (Some(in_base), Some(in_target)) =
        (fiemap::extent_at(base, offset), fiemap::extent_at(target, offset))
    else {
        return Ok(offset);
    };
    let same_disk = match (base.metadata(), target.metadata()) {
        (Ok(base), Ok(target)) => {
            std::os::unix::fs::MetadataExt::dev(&base) == std::os::unix::fs::MetadataExt::dev(&target)
        }
        (Err(error), _) | (_, Err(error)) => return Err(Error::new("read the extents of an image", error)),
    };
    if !same_disk || in_base.physical_at(offset) != in_target.physical_at(offset) {
        return Ok(offset);
    }
    let end = in_base.end().min(in_target.end());
    Ok((end - end % BLOCK).max(offset))
}

mod fiemap {
    //! The ioctl that returns where on disk a part of a file is.
    #![expect(unsafe_code, reason = "FIEMAP has no safe wrapper")]

    use std::{fs::File, os::fd::AsRawFd as _};

    const FS_IOC_FIEMAP: libc::c_ulong = 0xC020_660B;
    /// Write everything out first, so that every block is allocated.
    const FIEMAP_FLAG_SYNC: u32 = 1;
    /// Unknown, delayed, encoded, encrypted, unaligned, inline or tail-packed, unwritten: not plainly these bytes at
    /// that place.
    const NOT_PLAIN: u32 = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800;

    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    pub(super) struct Extent {
        logical: u64,
        physical: u64,
        length: u64,
        reserved: [u64; 2],
        flags: u32,
        reserved2: [u32; 3],
    }

    #[repr(C)]
    #[derive(Default)]
    struct Request {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        count: u32,
        reserved: u32,
        extents: [Extent; 1],
    }

    const _: () = assert!(size_of::<Request>() == 32 + 56);

    impl Extent {
        pub(super) fn end(&self) -> u64 {
            self.logical + self.length
        }

        pub(super) fn physical_at(&self, offset: u64) -> u64 {
            self.physical + (offset - self.logical)
        }
    }

    /// The extent that holds `offset`, if the filesystem reports it and it is plain data.
    pub(super) fn extent_at(file: &File, offset: u64) -> Option<Extent> {
        let mut request =
            Request { start: offset, length: 1, flags: FIEMAP_FLAG_SYNC, count: 1, ..Request::default() };
        // SAFETY: the request has the layout of `struct fiemap` with room for the one extent it announces.
        let answer = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP as _, &raw mut request) };
        let [extent] = request.extents;
        let holds = extent.logical <= offset && offset < extent.end();
        (answer == 0 && request.mapped == 1 && holds && extent.flags & NOT_PLAIN == 0).then_some(extent)
    }
}
