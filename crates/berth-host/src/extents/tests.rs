//! Ranges against what was really written.

use std::{
    fs::{self, OpenOptions},
    path::Path,
};

use super::*;
use crate::btrfs::loopfs::LoopFs;

const MIB: u64 = 1 << 20;

fn image(path: &Path, length: u64, writes: &[(u64, &[u8])]) -> File {
    let file = OpenOptions::new().create(true).truncate(true).read(true).write(true).open(path).unwrap();
    file.set_len(length).unwrap();
    for (offset, bytes) in writes {
        file.write_all_at(bytes, *offset).unwrap();
    }
    file.sync_all().unwrap();
    file
}

fn ranges(found: impl Iterator<Item = Result<Range>>) -> Vec<(u64, u64)> {
    found.map(|range| range.unwrap()).map(|range| (range.offset, range.length)).collect()
}

#[test]
fn data_is_found_and_holes_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = image(&dir.path().join("a"), 8 * MIB, &[(0, &[1; 4096]), (4 * MIB, &[2; 8192])]);
    assert_eq!(ranges(allocated(&file, 0).unwrap()), [(0, 4096), (4 * MIB, 8192)]);
    assert_eq!(ranges(allocated(&file, 4 * MIB + 4096).unwrap()), [(4 * MIB + 4096, 4096)]);
    assert!(ranges(allocated(&file, 5 * MIB).unwrap()).is_empty());
    assert!(ranges(allocated(&file, 99 * MIB).unwrap()).is_empty());
}

#[test]
fn exactly_the_blocks_that_read_differently_are_changed() {
    let dir = tempfile::tempdir().unwrap();
    let start = vec![1; 65536];
    let base =
        image(&dir.path().join("a"), 4 * MIB, &[(0, &start), (MIB, &[5; 4096]), (2 * MIB, &[0; 4096])]);
    let writes: &[(u64, &[u8])] =
        &[(0, &start), (8192, &[9; 100]), (12288, &[9; 4096]), (3 * MIB, &[7; 4096])];
    let target = image(&dir.path().join("b"), 5 * MIB, writes);
    target.write_all_at(&[3; 4096], 4 * MIB + 4096).unwrap();
    let expected = [(8192, 8192), (MIB, 4096), (3 * MIB, 4096), (4 * MIB + 4096, 4096)];
    assert_eq!(ranges(changed(&base, &target, 0).unwrap()), expected);
    assert_eq!(ranges(changed(&base, &target, 2 * MIB).unwrap()), expected[2..]);
    assert!(ranges(changed(&base, &base, 0).unwrap()).is_empty());
}

#[test]
fn a_random_history_gives_the_same_answer_as_comparing_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let mut seed = 7u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for round in 0..20 {
        let length = (1 + random(512)) * BLOCK;
        let (a, b) = (image(&dir.path().join("a"), length, &[]), image(&dir.path().join("b"), length, &[]));
        for _ in 0..random(40) {
            let offset = random(length);
            let bytes = vec![u8::try_from(random(3)).unwrap(); usize::try_from(random(20_000)).unwrap()];
            let bytes = &bytes[..bytes.len().min(usize::try_from(length - offset).unwrap())];
            if random(2) == 0 {
                a.write_all_at(bytes, offset).unwrap();
            }
            b.write_all_at(bytes, offset).unwrap();
        }
        let (mut left, mut right) = (Vec::new(), Vec::new());
        read_padded(&a, 0, length, &mut left).unwrap();
        read_padded(&b, 0, length, &mut right).unwrap();
        let block = usize::try_from(BLOCK).unwrap();
        let expected: Vec<u64> = (0..length / BLOCK)
            .filter(|index| {
                let at = usize::try_from(*index).unwrap() * block;
                left[at..at + block] != right[at..at + block]
            })
            .collect();
        let found: Vec<u64> = ranges(changed(&a, &b, 0).unwrap())
            .into_iter()
            .flat_map(|(offset, length)| offset / BLOCK..(offset + length) / BLOCK)
            .collect();
        assert_eq!(found, expected, "round {round}");
    }
}

#[test]
fn beyond_the_end_of_the_base_all_data_is_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let base = image(&dir.path().join("a"), 10_000, &[(0, &[1; 10_000])]);
    let zeros = vec![0; 8192];
    let target =
        image(&dir.path().join("b"), 4 * MIB, &[(0, &[1; 10_000]), (MIB, &zeros), (2 * MIB, &[2; 1])]);
    let expected = [(8192, 4096), (MIB, 8192), (2 * MIB, 4096)];
    assert_eq!(ranges(changed(&base, &target, 0).unwrap()), expected);
    let shorter = [(8192, 10_000 - 8192)];
    base.write_all_at(&[3], 9_999).unwrap();
    target.set_len(10_000).unwrap();
    assert_eq!(ranges(changed(&base, &target, 0).unwrap()), shorter);
    base.set_len(MIB).unwrap();
    base.write_all_at(&[3], 500_000).unwrap();
    assert_eq!(ranges(changed(&base, &target, 0).unwrap()), shorter);
}

#[test]
fn what_is_shared_is_not_read_and_what_was_written_since_is_found() {
    for kind in ["xfs", "btrfs"] {
        let filesystem = LoopFs::new(kind);
        let content: Vec<u8> = (0..32 * MIB).map(|index| u8::try_from(index / 7 % 251).unwrap()).collect();
        let base = image(&filesystem.path().join("base"), 512 * MIB, &[(0, &content), (256 * MIB, &content)]);
        let target = image(&filesystem.path().join("target"), 0, &[]);
        rustix::fs::ioctl_ficlone(&target, &base).unwrap();
        // Never flushed by us: a write must be seen although its blocks have no place on disk yet.
        target.write_all_at(&[255; 10], 5 * MIB).unwrap();
        target.write_all_at(&[255; 4096], 256 * MIB).unwrap();
        target.write_all_at(&[255; 4096], 400 * MIB).unwrap();
        // Written, but the same as before.
        target.write_all_at(&content[..8192], 0).unwrap();

        let before = bytes_read();
        let found = ranges(changed(&base, &target, 0).unwrap());
        let read = bytes_read() - before;
        assert_eq!(found, [(5 * MIB, 4096), (256 * MIB, 4096), (400 * MIB, 4096)], "{kind}");
        assert!(read < 8 * MIB, "{kind}: {read} bytes were read");
    }
}

/// How many bytes this thread has read so far.
fn bytes_read() -> u64 {
    let io = fs::read_to_string("/proc/thread-self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}
