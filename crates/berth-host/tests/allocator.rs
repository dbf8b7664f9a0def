//! The allocator, in a process of its own where nothing else allocates.

use std::{fs, hint::black_box};

use berth_host::allocator::Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("a process can read its own status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("it says RssAnon");
    line.trim().trim_end_matches(" kB").parse().expect("in kB")
}

#[test]
fn memory_is_given_back_as_soon_as_it_is_free_and_not_taken_before_it_is_used() {
    let start = resident_kib();
    // Untuned, the first arena alone has some 4 MiB resident.
    assert!(start < 2048, "{start} KiB at the start");
    for size in [100, 5000, 100_000] {
        let blocks: Vec<_> = (0..64_000_000 / size).map(|_| black_box(vec![1_u8; size])).collect();
        let full = resident_kib();
        assert!(full > start + 60_000, "{full} KiB with all allocated");
        drop(blocks);
        let left = resident_kib();
        assert!(left < start + 8192, "{left} KiB left of {full} in blocks of {size}");
    }
}
