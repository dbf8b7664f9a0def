//! Copying the content of a file: by the server where it can, else through us; holes stay holes.

use std::{ops::Range, sync::atomic::Ordering};

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt, TryStreamExt, stream};

use super::{TreeEntry, copy::Copy};
use crate::{Change, Create, Handle, Kind, Name, NextData, Result};

/// What is read and written at once.
const CHUNK: u64 = 1 << 20;
/// Chunks of one file on their way at the same time.
const CHUNKS: usize = 4;
/// Zeros of this length become a hole where the original has holes.
const BLOCK: usize = 4096;
/// So often a file is written again because the server restarted meanwhile.
const TRIES: u32 = 3;

impl Copy<'_> {
    pub(super) async fn copy_file(&self, to: &Handle, name: &Name, from: &TreeEntry) -> Result<Handle> {
        let like = from.attributes();
        // Its length is set at once, so that what is not written is a hole.
        let change = Change { mode: Some(0o600), size: Some(like.size), ..Change::default() };
        let made = self.to.create(to, name, Create::New, &change).await?;
        if made.attributes.size != like.size {
            let size = Change { size: Some(like.size), ..Change::default() };
            self.to.set_attributes(&made.handle, &size).await?;
        }
        self.copy_content(from.handle(), &made.handle, like.size, like.used < like.size).await?;
        self.copy_xattrs(from.handle(), &made.handle).await?;
        self.finish(&made.handle, like).await?;
        Ok(made.handle)
    }

    async fn copy_content(&self, from: &Handle, to: &Handle, size: u64, sparse: bool) -> Result<()> {
        let mut at = 0;
        while at < size {
            // Servers are asked for holes only where there must be some.
            let (extent, known) =
                match if sparse { self.from.next_data(from, at).await? } else { NextData::Unknown } {
                    NextData::None => return Ok(()),
                    NextData::At(extent) => (extent.start.min(size)..extent.end.min(size), true),
                    NextData::Unknown => (at..size, false),
                };
            at = extent.end;
            self.copy_extent(from, to, extent, sparse && !known).await?;
        }
        Ok(())
    }

    async fn copy_extent(
        &self,
        from: &Handle,
        to: &Handle,
        extent: Range<u64>,
        find_holes: bool,
    ) -> Result<()> {
        let mut start = extent.start;
        while self.from.same_server(self.to) && start < extent.end && !find_holes {
            match self.from.copy_range(from, start, to, start, extent.end - start).await? {
                Some(copied @ 1..) => {
                    start += copied;
                    self.bytes.fetch_add(copied, Ordering::Relaxed);
                }
                Some(0) | None => break,
            }
        }
        let mut tries = 1;
        loop {
            let starts = (start..extent.end).step_by(usize::try_from(CHUNK).expect("a chunk fits in memory"));
            stream::iter(starts)
                .map(|at| self.copy_chunk(from, to, at..extent.end.min(at + CHUNK), find_holes))
                .buffer_unordered(CHUNKS)
                .try_for_each(async |()| Ok(()))
                .await?;
            match self.to.commit(to).await {
                Err(error) if error.kind() == Kind::Interrupted && tries < TRIES => tries += 1,
                other => return other,
            }
        }
    }

    async fn copy_chunk(
        &self,
        from: &Handle,
        to: &Handle,
        range: Range<u64>,
        find_holes: bool,
    ) -> Result<()> {
        let _room = self.chunks.acquire().await.expect("nobody closes the semaphore");
        let data = self.read_whole(from, range.clone()).await?;
        let all = 0..data.len();
        for run in if find_holes { runs_of_data(&data) } else { vec![all] } {
            let mut rest = data.slice(run.clone());
            let mut at = range.start + run.start as u64;
            while !rest.is_empty() {
                let written = self.to.write(to, at, rest.clone(), false).await?;
                rest = rest.slice(written as usize..);
                at += u64::from(written);
                self.bytes.fetch_add(written.into(), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Reads a range, or up to the file's end if it was cut meanwhile.
    async fn read_whole(&self, from: &Handle, range: Range<u64>) -> Result<Bytes> {
        let mut all = BytesMut::new();
        let mut at = range.start;
        while at < range.end {
            let length = u32::try_from(range.end - at).expect("a chunk is small");
            let (data, end) = self.from.read(from, at, length).await?;
            at += data.len() as u64;
            if all.is_empty() && at == range.end {
                return Ok(data);
            }
            all.extend_from_slice(&data);
            if end || data.is_empty() {
                break;
            }
        }
        Ok(all.freeze())
    }
}

/// The parts that are not only zeros, in whole blocks.
fn runs_of_data(data: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, block) in data.chunks(BLOCK).enumerate() {
        if block.iter().all(|byte| *byte == 0) {
            continue;
        }
        let start = number * BLOCK;
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = start + block.len(),
            _ => runs.push(start..start + block.len()),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_data_leave_out_blocks_of_zeros() {
        let mut data = vec![0; 5 * BLOCK + 10];
        assert_eq!(runs_of_data(&data), []);
        data[BLOCK + 1] = 1;
        data[2 * BLOCK] = 1;
        data[5 * BLOCK + 9] = 1;
        assert_eq!(runs_of_data(&data), [BLOCK..3 * BLOCK, 5 * BLOCK..5 * BLOCK + 10]);
    }
}
