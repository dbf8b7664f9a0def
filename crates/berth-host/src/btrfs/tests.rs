//! Tests on a real btrfs.

use std::{
    fs::{self, File, OpenOptions},
    io::Write as _,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use rustix::io::Errno;

use super::{
    Compression, QuotaUsage, compression, create_subvolume, delete_subvolume, enable_quota, inodes, ioctl,
    is_btrfs, is_subvolume,
    loopfs::{LoopFs, run},
    quota, quota_enabled, quota_usage, remove_stale_qgroups, set_compression, set_limit, set_read_only,
    snapshot, snapshot_together, subvolume_id, sync,
};
use crate::{
    error::{Change, Error},
    path::Dir,
    usage,
};

const MIB: u64 = 1 << 20;

fn errno<T: std::fmt::Debug>(result: Result<T, Error>) -> Errno {
    Errno::from_raw_os_error(result.unwrap_err().errno().unwrap())
}

fn btrfs() -> (LoopFs, Dir) {
    let filesystem = LoopFs::new("btrfs");
    let dir = filesystem.dir();
    (filesystem, dir)
}

fn subvolume(parent: &Dir, name: &str) -> Dir {
    create_subvolume(parent, name).unwrap();
    parent.dir(name).unwrap()
}

/// Writes bytes that do not compress, and flushes them.
fn fill(dir: &Dir, name: &str, bytes: u64) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(dir.child_path(name))?;
    let mut random = File::open("/dev/urandom")?;
    std::io::copy(&mut std::io::Read::take(&mut random, bytes), &mut file)?;
    file.sync_all()
}

#[test]
fn a_filesystem_is_recognized_by_its_magic() {
    let (filesystem, _dir) = btrfs();
    assert!(is_btrfs(&filesystem.path()).unwrap());
    assert!(!is_btrfs(Path::new("/proc")).unwrap());
}

#[test]
fn a_subvolume_is_created_recognized_and_deleted() {
    let (_filesystem, dir) = btrfs();
    let made = subvolume(&dir, "made");
    assert!(is_subvolume(&made).unwrap());
    assert_eq!(errno(create_subvolume(&dir, "made")), Errno::EXIST);
    let plain = made.ensure_dir("plain", 0o755).unwrap();
    assert!(!is_subvolume(&plain).unwrap());
    assert_eq!(subvolume_id(&plain).unwrap(), subvolume_id(&made).unwrap());
    assert_ne!(subvolume_id(&dir).unwrap(), subvolume_id(&made).unwrap());

    assert_eq!(errno(delete_subvolume(&made, "plain")), Errno::INVAL);
    assert_eq!(delete_subvolume(&dir, "made").unwrap(), Change::Made);
    assert_eq!(delete_subvolume(&dir, "made").unwrap(), Change::AlreadyTrue);
    for name in ["..", "a/b", "a\0b", ""] {
        assert_eq!(errno(create_subvolume(&dir, name)), Errno::INVAL);
        assert_eq!(errno(snapshot(&dir, &dir, name, false)), Errno::INVAL);
        assert_eq!(errno(delete_subvolume(&dir, name)), Errno::INVAL);
    }
    assert_eq!(errno(create_subvolume(&dir, &"n".repeat(256))), Errno::NAMETOOLONG);
}

#[test]
fn a_snapshot_keeps_what_its_source_was() {
    let (_filesystem, dir) = btrfs();
    let source = subvolume(&dir, "source");
    fs::write(source.child_path("file"), "before").unwrap();
    snapshot(&source, &dir, "kept", true).unwrap();
    fs::write(source.child_path("file"), "after").unwrap();
    let kept = dir.dir("kept").unwrap();
    assert_eq!(fs::read(kept.child_path("file")).unwrap(), b"before");
    let refused = fs::write(kept.child_path("file"), "changed").unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));

    set_read_only(&kept, false).unwrap();
    fs::write(kept.child_path("file"), "changed").unwrap();
    assert_eq!(fs::read(source.child_path("file")).unwrap(), b"after");
    assert_eq!(errno(snapshot(&source, &dir, "kept", true)), Errno::EXIST);
}

#[test]
fn deleting_takes_the_subvolumes_a_user_made_inside_even_read_only_ones() {
    let (filesystem, dir) = btrfs();
    enable_quota(&filesystem.path()).unwrap();
    let volume = subvolume(&dir, "volume");
    let deep = volume.ensure_dir("a", 0o755).unwrap().ensure_dir("b", 0o755).unwrap();
    let nested = subvolume(&deep, "nested");
    let innermost = subvolume(&nested, "innermost");
    fs::write(innermost.child_path("file"), "content").unwrap();
    snapshot(&nested, &volume, "copy", true).unwrap();
    set_read_only(&innermost, true).unwrap();
    set_read_only(&nested, true).unwrap();
    set_read_only(&volume, true).unwrap();
    drop((deep, nested, innermost));

    assert_eq!(delete_subvolume(&dir, "volume").unwrap(), Change::Made);
    assert_eq!(dir.entries().unwrap(), []);
    drop(volume);
    assert_eq!(run("btrfs", &["subvolume", "list", filesystem.path().to_str().unwrap()]), "");
}

#[test]
fn deleting_takes_subvolumes_whose_root_is_immutable_or_append_only() {
    let (filesystem, dir) = btrfs();
    for attribute in ["+i", "+a"] {
        let volume = subvolume(&dir, "volume");
        let nested = subvolume(&volume, "nested");
        for root in [&nested, &volume] {
            run("chattr", &[attribute, root.path().to_str().unwrap()]);
        }
        set_read_only(&nested, true).unwrap();
        drop((volume, nested));
        assert_eq!(delete_subvolume(&dir, "volume").unwrap(), Change::Made, "{attribute}");
        assert_eq!(dir.entries().unwrap(), []);
    }
    assert_eq!(run("btrfs", &["subvolume", "list", filesystem.path().to_str().unwrap()]), "");
}

#[test]
fn no_quota_group_stays_behind() {
    let (filesystem, dir) = btrfs();
    let path = filesystem.path();
    let path = path.to_str().unwrap();
    enable_quota(&filesystem.path()).unwrap();
    let qgroups = || run("btrfs", &["qgroup", "show", path]).lines().filter(|l| l.starts_with("0/")).count();
    for name in ["a", "b", "c"] {
        fill(&subvolume(&dir, name), "file", MIB).unwrap();
    }
    assert_eq!(qgroups(), 4);
    // A tool that deletes without a thought for quota groups.
    run("btrfs", &["subvolume", "delete", dir.child_path("a").to_str().unwrap()]);
    delete_subvolume(&dir, "b").unwrap();
    // Wakes the cleaner, which sleeps for half a minute otherwise.
    sync(&filesystem.path()).unwrap();
    run("btrfs", &["subvolume", "sync", path]);
    remove_stale_qgroups(&filesystem.path()).unwrap();
    assert_eq!(qgroups(), 2);
    assert!(quota_usage(&dir.dir("c").unwrap()).unwrap().referenced >= MIB);
    // One that no subvolume ever had is as stale as they come; the kernel refuses it for greater ids.
    run("btrfs", &["qgroup", "create", "0/77", path]);
    run("btrfs", &["qgroup", "create", "1/5", path]);
    assert_eq!(remove_stale_qgroups(&filesystem.path()).unwrap(), 1);
    assert!(run("btrfs", &["qgroup", "show", path]).contains("1/5"));
    assert_eq!(qgroups(), 2);
}

#[test]
fn quotas_are_enabled_once() {
    let (filesystem, dir) = btrfs();
    fill(&subvolume(&dir, "earlier"), "file", 8 * MIB).unwrap();
    assert!(!quota_enabled(&filesystem.path()).unwrap());
    assert!(quota_usage(&dir.dir("earlier").unwrap()).is_err());
    assert_eq!(enable_quota(&filesystem.path()).unwrap(), Change::Made);
    assert!(quota_enabled(&filesystem.path()).unwrap());
    assert_eq!(enable_quota(&filesystem.path()).unwrap(), Change::AlreadyTrue);
    // What was there before has been counted by then.
    assert!(quota_usage(&dir.dir("earlier").unwrap()).unwrap().referenced >= 8 * MIB);
}

#[test]
fn a_limit_is_enforced_and_a_snapshot_gets_its_own() {
    let (filesystem, dir) = btrfs();
    enable_quota(&filesystem.path()).unwrap();
    let volume = subvolume(&dir, "volume");
    set_limit(&volume, 16 * MIB).unwrap();
    fill(&volume, "file", 12 * MIB).unwrap();
    let full = fill(&volume, "more", 8 * MIB).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(Errno::DQUOT.raw_os_error()));
    fs::remove_file(volume.child_path("more")).unwrap();
    assert_eq!(quota_usage(&volume).unwrap().limit, Some(16 * MIB));

    snapshot(&volume, &dir, "clone", false).unwrap();
    let clone = dir.dir("clone").unwrap();
    assert_eq!(quota_usage(&clone).unwrap().limit, Some(16 * MIB), "at first it is that of the source");
    set_limit(&clone, 64 * MIB).unwrap();
    fill(&clone, "more", 32 * MIB).unwrap();
    assert!(fill(&clone, "too much", 32 * MIB).is_err());
    assert!(fill(&volume, "more", 8 * MIB).is_err(), "the limit of the source is still its own");

    set_limit(&volume, u64::MAX).unwrap();
    assert_eq!(quota_usage(&volume).unwrap().limit, None);
    fill(&volume, "more", 32 * MIB).unwrap();
}

#[test]
fn usage_is_fresh_after_a_flush_and_the_same_on_disk_after_a_commit() {
    let (filesystem, dir) = btrfs();
    enable_quota(&filesystem.path()).unwrap();
    let volume = subvolume(&dir, "volume");
    set_limit(&volume, 100 * MIB).unwrap();
    let empty = quota_usage(&volume).unwrap();
    assert!(empty.referenced < MIB);
    fill(&volume, "file", 20 * MIB).unwrap();
    let flushed = quota_usage(&volume).unwrap();
    assert!((20 * MIB..21 * MIB).contains(&flushed.referenced), "{flushed:?}");

    sync(&filesystem.path()).unwrap();
    let committed = quota_usage(&volume).unwrap();
    assert!((20 * MIB..21 * MIB).contains(&committed.referenced), "{committed:?}");
    let id = subvolume_id(&volume).unwrap();
    let on_disk = quota::usage_on_disk(std::os::fd::AsFd::as_fd(&volume), id).unwrap();
    assert_eq!(on_disk, QuotaUsage { referenced: committed.referenced, limit: Some(100 * MIB) });
}

#[test]
fn inodes_are_counted_like_a_walk_does() {
    let (_filesystem, dir) = btrfs();
    let volume = subvolume(&dir, "volume");
    assert_eq!(inodes(&volume).unwrap(), 1);
    let deep = volume.ensure_dir("directory", 0o755).unwrap();
    for number in 0..3000 {
        fs::write(deep.child_path(&format!("file {number}")), "content").unwrap();
    }
    fs::hard_link(deep.child_path("file 0"), volume.child_path("again")).unwrap();
    // A file of so many extents that its items alone fill more than one answer of the kernel.
    let holed = volume.create_file("holed", 0o600).unwrap();
    for number in 0..5000 {
        holed.write_all_at(&[1; 4096], number * 8192).unwrap();
    }
    holed.sync_all().unwrap();
    assert_eq!(inodes(&volume).unwrap(), usage::tree(&volume).unwrap().inodes);
    assert_eq!(inodes(&volume).unwrap(), 3003);
    for number in 0..1000 {
        fs::remove_file(deep.child_path(&format!("file {number}"))).unwrap();
    }
    assert_eq!(inodes(&volume).unwrap(), usage::tree(&volume).unwrap().inodes);
}

#[test]
fn compression_is_set_read_and_applied() {
    let (filesystem, dir) = btrfs();
    enable_quota(&filesystem.path()).unwrap();
    let volume = subvolume(&dir, "volume");
    assert_eq!(compression(&volume).unwrap(), Compression::None);
    for algorithm in [Compression::Zlib, Compression::Lzo, Compression::Zstd] {
        set_compression(&volume, algorithm).unwrap();
        assert_eq!(compression(&volume).unwrap(), algorithm);
        let inside = volume.ensure_dir(algorithm.property(), 0o755).unwrap();
        assert_eq!(compression(&inside).unwrap(), algorithm);
    }
    fs::write(volume.child_path("dull"), vec![b'x'; 32 << 20]).unwrap();
    sync(&filesystem.path()).unwrap();
    assert!(quota_usage(&volume).unwrap().referenced < 4 * MIB);
    set_compression(&volume, Compression::None).unwrap();
    assert_eq!(compression(&volume).unwrap(), Compression::None);
}

#[test]
fn snapshots_taken_together_show_one_instant() {
    const ROUNDS: usize = 25;
    let (_filesystem, dir) = btrfs();
    let (a, b) = (subvolume(&dir, "a"), subvolume(&dir, "b"));
    let snapshots = dir.ensure_dir("snapshots", 0o755).unwrap();
    let stop = AtomicBool::new(false);
    let open = |dir: &Dir| dir.create_file("log", 0o600).unwrap();
    let (mut log_a, mut log_b) = (open(&a), open(&b));
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1_u64.. {
                for log in [&mut log_a, &mut log_b] {
                    log.write_all(&number.to_ne_bytes()).unwrap();
                    log.sync_all().unwrap();
                }
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        // Stops the writer when an assertion below fails, too.
        let _stopping = StopOnDrop(&stop);
        for round in 0..ROUNDS {
            let (name_a, name_b) = (format!("a{round}"), format!("b{round}"));
            snapshot_together(&[(&a, &name_a), (&b, &name_b)], &snapshots, true).unwrap();
        }
    });
    for round in 0..ROUNDS {
        let last = |name: String| {
            let log = fs::read(snapshots.child_path(&name).join("log")).unwrap();
            log.last_chunk::<8>().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
        };
        let (last_a, last_b) = (last(format!("a{round}")), last(format!("b{round}")));
        assert!(last_a == last_b || last_a == last_b + 1, "round {round}: {last_a} and {last_b}");
        let taken = snapshots.dir(&format!("a{round}")).unwrap();
        assert!(ioctl::is_read_only(std::os::fd::AsFd::as_fd(&taken)).unwrap());
    }
    assert_eq!(snapshots.entries().unwrap().len(), 2 * ROUNDS, "nothing but the snapshots is left");
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn snapshots_taken_together_are_all_there_or_none_is() {
    let (_filesystem, dir) = btrfs();
    let (a, b) = (subvolume(&dir, "a"), subvolume(&dir, "b"));
    let snapshots = dir.ensure_dir("snapshots", 0o755).unwrap();
    // What a crash in the middle of an earlier try left behind does not disturb.
    let stage = snapshots.ensure_dir(&super::stage_name("one"), 0o700).unwrap();
    snapshot(&a, &stage, super::STAGED, false).unwrap();
    snapshots.make_dir("two", 0o755).unwrap();
    fs::write(snapshots.child_path("two").join("file"), "kept").unwrap();

    assert_eq!(errno(snapshot_together(&[(&a, "one"), (&b, "two")], &snapshots, true)), Errno::EXIST);
    assert_eq!(snapshots.entries().unwrap().len(), 1);
    assert_eq!(fs::read(snapshots.child_path("two").join("file")).unwrap(), b"kept");
    snapshots.remove_tree("two").unwrap();
    snapshot_together(&[(&a, "one"), (&b, "two")], &snapshots, true).unwrap();
    assert_eq!(snapshots.entries().unwrap().len(), 2);
}
