//! Bytes that can be told apart: written durably, and checked later without having been kept.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::FileExt as _,
    path::Path,
};

use anyhow::{Context, Result, ensure};

/// A small generator of reproducible pseudo-random numbers (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number of the sequence.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// One of the given things.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[usize::try_from(self.below(from.len() as u64)).expect("an index fits")]
    }
}

/// `length` bytes that only `seed` gives.
pub fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        out.extend_from_slice(&random.number().to_le_bytes());
    }
    out.truncate(length);
    out
}

/// Writes a file anew and makes it durable.
pub fn write(path: &Path, data: &[u8]) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(data)?;
    file.sync_all()
}

/// Writes into an existing file or block device at `offset` and makes it durable.
pub fn write_at(path: &Path, data: &[u8], offset: u64) -> io::Result<()> {
    let file = fs::File::options().write(true).open(path)?;
    file.write_all_at(data, offset)?;
    file.sync_all()
}

/// Reads `length` bytes at `offset` of a file or block device.
pub fn read_at(path: &Path, length: usize, offset: u64) -> io::Result<Vec<u8>> {
    let mut data = vec![0; length];
    fs::File::open(path)?.read_exact_at(&mut data, offset)?;
    Ok(data)
}

/// Checks that a file holds exactly the bytes of `seed`.
pub fn check(path: &Path, seed: u64, length: usize) -> Result<()> {
    let found = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    ensure!(found.len() == length, "{} has {} bytes instead of {length}", path.display(), found.len());
    ensure!(found == bytes(seed, length), "{} has other bytes than were written", path.display());
    Ok(())
}

/// Writes files of 1 MiB into `dir` until the filesystem refuses; returns how many fitted, and the refusal.
pub fn fill(dir: &Path, at_most_mib: u64) -> (u64, Option<io::Error>) {
    let block = bytes(7, 1 << 20);
    for written in 0..at_most_mib {
        if let Err(error) = write(&dir.join(format!("fill-{written}")), &block) {
            return (written, Some(error));
        }
    }
    (at_most_mib, None)
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn a_seed_always_gives_the_same_bytes_and_another_gives_others() {
        assert_eq!(bytes(1, 1001), bytes(1, 1001));
        assert_ne!(bytes(1, 64), bytes(2, 64));
        assert_eq!(bytes(3, 5).len(), 5);
    }
}
