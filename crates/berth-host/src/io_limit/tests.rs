//! Limits on a real loop device, and on a mock tree of control groups for the version this kernel does not run.

use std::{
    fs::OpenOptions,
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _},
    time::{Duration, Instant},
};

use super::*;
use crate::{
    loopdev::{self, LoopDevice},
    mount::testing::TestDirectory,
};

const MIB: u64 = 1 << 20;

/// How long it takes to read 1 MiB of the device past all caches.
fn read_time(device: &Path) -> Duration {
    const PIECE: usize = 64 << 10;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(device).unwrap();
    let mut memory = vec![0; PIECE + 4096];
    let aligned = memory.as_ptr().align_offset(4096);
    let start = Instant::now();
    for offset in (0..MIB).step_by(PIECE) {
        file.read_exact_at(&mut memory[aligned..aligned + PIECE], offset).unwrap();
    }
    start.elapsed()
}

/// Leaves the device without limits, also when the test fails.
struct Cleared((u32, u32));

impl Drop for Cleared {
    fn drop(&mut self) {
        let _ = apply(self.0, &Limits::default());
    }
}

#[test]
fn a_limit_bounds_the_rate_until_it_is_cleared() {
    let directory = TestDirectory::new();
    let image = directory.image("image", MIB);
    let options = loopdev::Options { autoclear: true, ..loopdev::Options::default() };
    let device = LoopDevice::attach(&image, options).unwrap();
    let number = fs::metadata(device.path()).unwrap().rdev();
    let number = (rustix::fs::major(number), rustix::fs::minor(number));
    let _cleared = Cleared(number);

    let by_bytes = Limits { read_bps: Some(2 * MIB), ..Limits::default() };
    let by_count = Limits { read_iops: Some(32), ..Limits::default() };
    if !available() {
        assert_eq!(apply(number, &by_bytes).unwrap_err().kind(), io::ErrorKind::Unsupported);
        assert_eq!(apply(number, &Limits::default()).unwrap(), Applied { groups: 0 });
        return;
    }
    for limits in [by_bytes, by_count] {
        // Half a second at this rate; the kernel counts in slices of time, so not to the millisecond.
        assert!(apply(number, &limits).unwrap().groups > 0);
        let limited = read_time(device.path());
        assert!(limited > Duration::from_millis(300), "{limited:?} with {limits:?}");
        apply(number, &Limits::default()).unwrap();
        // The best of several: a busy machine is slow at times, and a limit always.
        let unlimited = (0..10).map(|_| read_time(device.path())).min().unwrap();
        assert!(unlimited < limited / 2, "{unlimited:?} without, {limited:?} with {limits:?}");
    }
}

#[test]
fn a_limit_of_nothing_is_refused() {
    let error = apply((7, 0), &Limits { write_iops: Some(0), ..Limits::default() }).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn a_device_that_does_not_exist_is_an_error() {
    let limits = Limits { read_bps: Some(MIB), ..Limits::default() };
    assert!(apply((4000, 7), &limits).is_err());
}

#[test]
fn v2_limits_the_first_level_and_spells_out_every_limit() {
    let directory = TestDirectory::new();
    for group in ["kubepods.slice/pod", "system.slice", "without-controller"] {
        directory.dir(group);
    }
    for group in ["kubepods.slice", "kubepods.slice/pod", "system.slice"] {
        directory.file(&format!("{group}/io.max"), "");
    }
    let hierarchy = Hierarchy::V2(directory.path(""));
    let limits = Limits { read_bps: Some(1000), write_iops: Some(50), ..Limits::default() };
    assert_eq!(hierarchy.apply("7:3", &limits).unwrap(), Applied { groups: 2 });
    for group in ["kubepods.slice", "system.slice"] {
        let written = fs::read_to_string(directory.path(group).join("io.max")).unwrap();
        assert_eq!(written, "7:3 rbps=1000 wbps=max riops=max wiops=50");
    }
    assert_eq!(fs::read_to_string(directory.path("kubepods.slice/pod/io.max")).unwrap(), "");
}

#[test]
fn v1_limits_every_group_and_clears_with_zero() {
    const FILES: [&str; 4] = ["read_bps", "write_bps", "read_iops", "write_iops"];
    let directory = TestDirectory::new();
    let groups = ["", "kubepods", "kubepods/pod", "kubepods/pod/container"];
    for group in groups {
        directory.dir(group);
        for file in FILES {
            directory.file(format!("{group}/blkio.throttle.{file}_device").trim_start_matches('/'), "");
        }
    }
    let hierarchy = Hierarchy::V1(directory.path(""));
    let limits = Limits { read_bps: Some(1 << 40), write_iops: Some(1 << 40), ..Limits::default() };
    assert_eq!(hierarchy.apply("7:3", &limits).unwrap(), Applied { groups: 4 });
    for group in groups {
        let written = FILES.map(|file| {
            fs::read_to_string(directory.path(group).join(format!("blkio.throttle.{file}_device"))).unwrap()
        });
        assert_eq!(written, ["7:3 1099511627776", "7:3 0", "7:3 0", "7:3 4294967295"], "{group}");
    }
}
