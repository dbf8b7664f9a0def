//! Filesystems made, probed, grown and mounted for real, on sparse images and loop devices.

use std::os::unix::fs::{FileExt as _, chown};

use super::*;
use crate::{
    loopdev::LoopDevice,
    mount::{
        self,
        testing::{TestDirectory, is_detached, shut_down},
    },
};

const ALL: [Filesystem; 3] = [Filesystem::Ext4, Filesystem::Xfs, Filesystem::Btrfs];
const MINUTE: Duration = Duration::from_secs(60);

const DEVICE: loopdev::Options = loopdev::Options { read_only: false, direct_io: false, autoclear: true };

fn write_at(image: &Path, bytes: &[u8], offset: u64) {
    OpenOptions::new().write(true).open(image).unwrap().write_all_at(bytes, offset).unwrap();
}

fn resize(image: &Path, size: u64) {
    OpenOptions::new().write(true).open(image).unwrap().set_len(size).unwrap();
}

fn read(image: &Path, length: usize, offset: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    File::open(image).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

fn other(name: &str) -> Content {
    Content::Other(name.into())
}

/// Online growth of ext4 wants CAP_SYS_RESOURCE, which is number 24.
fn may_grow_ext4_mounted() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap() & 1 << 24 != 0
}

#[test]
fn names_are_read_back_and_unknown_ones_refused() {
    for fs in ALL {
        assert_eq!(fs.as_str().parse(), Ok(fs));
    }
    assert_eq!("ext3".parse::<Filesystem>(), Err(UnknownFilesystem("ext3".into())));
}

#[test]
fn each_filesystem_is_made_recognised_mounted_and_its_device_gone_after() {
    for fs in ALL {
        let directory = TestDirectory::new();
        let image = directory.formatted("image", fs, minimum_size(fs));
        assert_eq!(probe(&image).unwrap(), Content::Filesystem(fs));
        assert_eq!(filesystem_size(&image, fs).unwrap(), minimum_size(fs), "{fs}");
        check(fs, &image, MINUTE).unwrap();

        let (target, number) = directory.mounted(&image, fs);
        assert_eq!(mount::mount_of(&target).unwrap().map(|mount| mount.fs_type), Some(fs.to_string()));
        assert!(loopdev::is_in_use(Path::new(&format!("/dev/loop{number}"))).unwrap());
        fs::write(target.join("file"), "kept").unwrap();
        mount::unmount(&target).unwrap();
        assert!(is_detached(&image), "{fs}");

        let (target, _) = directory.mounted(&image, fs);
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "kept");
    }
}

#[test]
fn a_new_filesystem_takes_little_of_a_large_image() {
    let directory = TestDirectory::new();
    for (fs, at_most) in
        [(Filesystem::Ext4, 2 * MIB), (Filesystem::Xfs, 80 * MIB), (Filesystem::Btrfs, 8 * MIB)]
    {
        let image = directory.formatted(fs.as_str(), fs, 1024 * MIB);
        let taken = fs::metadata(&image).unwrap().blocks() * 512;
        assert!(taken <= at_most, "{fs} takes {taken}");
    }
}

#[test]
fn an_image_too_small_is_refused_with_the_minimum() {
    for (fs, minimum) in
        [(Filesystem::Ext4, "2 MiB"), (Filesystem::Xfs, "300 MiB"), (Filesystem::Btrfs, "109 MiB")]
    {
        let directory = TestDirectory::new();
        let image = directory.image("image", minimum_size(fs) - 4096);
        let error = make(&image, fs, MINUTE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(error.sentence().contains(minimum), "{}", error.sentence());
    }
}

#[test]
fn make_refuses_what_is_not_blank_and_leaves_it_as_it_was() {
    let directory = TestDirectory::new();
    let image = directory.image("image", 16 * MIB);
    write_at(&image, b"x", 16 * MIB - 1);
    let inode = fs::metadata(&image).unwrap().ino();
    let error = make(&image, Filesystem::Ext4, MINUTE).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists, "{}", error.sentence());
    assert_eq!(read(&image, 1, 16 * MIB - 1), b"x");

    write_at(&image, b"\0", 16 * MIB - 1);
    make(&image, Filesystem::Ext4, MINUTE).unwrap();
    assert_ne!(fs::metadata(&image).unwrap().ino(), inode);
    let uuid = read(&image, 16, 1024 + 0x68);
    let error = make(&image, Filesystem::Ext4, MINUTE).unwrap_err();
    assert!(error.sentence().ends_with("there is already ext4"), "{}", error.sentence());
    assert_eq!(read(&image, 16, 1024 + 0x68), uuid);
}

#[test]
fn make_survives_a_leftover_and_keeps_length_owner_and_mode() {
    let directory = TestDirectory::new();
    let image = directory.image("image", 16 * MIB);
    chown(&image, Some(1234), Some(5678)).unwrap();
    fs::set_permissions(&image, Permissions::from_mode(0o640)).unwrap();
    let leftover = directory.file("image.mkfs", "half a filesystem, longer than nothing");
    make(&image, Filesystem::Ext4, MINUTE).unwrap();
    let seen = fs::metadata(&image).unwrap();
    assert_eq!((seen.uid(), seen.gid(), seen.mode() & 0o7777, seen.len()), (1234, 5678, 0o640, 16 * MIB));
    assert!(!leftover.exists());
}

#[test]
fn a_make_that_misses_its_deadline_leaves_a_blank_image_and_no_draft() {
    let directory = TestDirectory::new();
    let image = directory.image("image", 16 * MIB);
    let error = make(&image, Filesystem::Ext4, Duration::ZERO).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ETIMEDOUT));
    assert_eq!(probe(&image).unwrap(), Content::Blank);
    assert!(!directory.path("image.mkfs").exists());
}

#[test]
fn make_and_probe_refuse_what_is_no_file() {
    let directory = TestDirectory::new();
    assert_eq!(
        make(&directory.dir("dir"), Filesystem::Ext4, MINUTE).unwrap_err().kind(),
        io::ErrorKind::InvalidInput
    );
    assert!(probe(&directory.dir("dir")).is_err());
    assert!(probe(Path::new("/dev/zero")).is_err());
    assert_eq!(probe(&directory.path("missing")).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn blank_is_what_has_no_data_or_only_zeros() {
    let directory = TestDirectory::new();
    for (name, size) in [("empty", 0), ("small", 100), ("large", 3 << 40)] {
        assert_eq!(probe(&directory.image(name, size)).unwrap(), Content::Blank, "{name}");
    }
    let image = directory.image("image", 8 * MIB + 100);
    write_at(&image, &vec![0; 3 << 20], 12345);
    assert_eq!(probe(&image).unwrap(), Content::Blank);
    for offset in [0, 12345 + (3 << 20), 8 * MIB + 99] {
        write_at(&image, b"\x01", offset);
        assert_eq!(probe(&image).unwrap(), other("unrecognised data"), "{offset}");
        write_at(&image, b"\0", offset);
    }
    assert_eq!(probe(&image).unwrap(), Content::Blank);
}

#[test]
fn a_block_device_is_blank_only_if_all_of_it_is() {
    let directory = TestDirectory::new();
    let image = directory.image("image", 16 * MIB);
    let device = LoopDevice::attach(&image, DEVICE).unwrap();
    assert_eq!(probe(device.path()).unwrap(), Content::Blank);
    write_at(device.path(), b"\x01", 16 * MIB - 1);
    assert_eq!(probe(device.path()).unwrap(), other("unrecognised data"));
}

#[test]
fn a_half_overwritten_image_is_neither_blank_nor_a_filesystem() {
    for fs in ALL {
        let directory = TestDirectory::new();
        let image = directory.formatted("image", fs, minimum_size(fs));
        write_at(&image, &vec![0; 70_000], 0);
        assert_eq!(probe(&image).unwrap(), other("unrecognised data"), "{fs}");
        assert!(filesystem_size(&image, fs).is_err());
    }
}

#[test]
fn an_image_with_two_signatures_is_neither_of_them() {
    let directory = TestDirectory::new();
    let image = directory.formatted("image", Filesystem::Btrfs, minimum_size(Filesystem::Btrfs));
    write_at(&image, b"XFSB", 0);
    assert_eq!(probe(&image).unwrap(), other("xfs and btrfs"));
}

#[test]
fn others_are_called_by_their_name() {
    let directory = TestDirectory::new();
    for (tool, options, expected) in [
        ("mkfs.ext2", &["-q", "-F"][..], "ext2"),
        ("mkfs.ext3", &["-q", "-F"], "ext3"),
        ("mkswap", &[], "swap space"),
    ] {
        let image = directory.image(tool, 16 * MIB);
        let args = options.iter().map(OsStr::new).chain([image.as_os_str()]);
        exec::run(tool, args, MINUTE).unwrap();
        assert_eq!(probe(&image).unwrap(), other(expected));
    }
    for (offset, magic, expected) in [
        (0, &b"LUKS\xba\xbe\0\x02"[..], "LUKS"),
        (512, b"LABELONE\x01\0\0\0\0\0\0\0\0\0\0\0 \0\0\0LVM2 001", "LVM2"),
        (510, b"\x55\xaaEFI PART", "a boot sector or DOS partition table and a GPT partition table"),
    ] {
        let image = directory.image("image", MIB);
        write_at(&image, magic, offset);
        assert_eq!(probe(&image).unwrap(), other(expected));
    }
}

#[test]
fn what_cannot_be_read_is_an_error_and_never_blank() {
    let directory = TestDirectory::new();
    let outer = directory.formatted("outer", Filesystem::Xfs, minimum_size(Filesystem::Xfs));
    let (target, _) = directory.mounted(&outer, Filesystem::Xfs);
    let inner = target.join("inner");
    File::create(&inner).unwrap().set_len(MIB).unwrap();
    let device = LoopDevice::attach(&inner, DEVICE).unwrap();
    shut_down(&target);
    for path in [inner.as_path(), device.path()] {
        assert_eq!(probe(path).unwrap_err().errno(), Some(libc::EIO), "{}", path.display());
    }
}

#[test]
fn xfs_and_btrfs_grow_mounted() {
    for fs in [Filesystem::Xfs, Filesystem::Btrfs] {
        let directory = TestDirectory::new();
        let size = minimum_size(fs);
        let image = directory.formatted("image", fs, size);
        let (target, number) = directory.mounted(&image, fs);
        let blocks = || rustix::fs::statvfs(&target).unwrap().f_blocks;
        fs::write(target.join("file"), "kept").unwrap();
        let before = blocks();
        assert_eq!(grow_mounted(fs, &target).unwrap(), Growth::AlreadyFull, "{fs}");

        resize(&image, size + 200 * MIB);
        loopdev::refresh_capacity(number).unwrap();
        assert_eq!(grow_mounted(fs, &target).unwrap(), Growth::Grown, "{fs}");
        assert!(blocks() > before);
        assert_eq!(grow_mounted(fs, &target).unwrap(), Growth::AlreadyFull, "{fs}");
        mount::unmount(&target).unwrap();
        // The filesystem writes its last words when its last user is gone, and with him goes the device.
        assert!(is_detached(&image), "{fs}");
        assert_eq!(filesystem_size(&image, fs).unwrap(), size + 200 * MIB);
        let (target, _) = directory.mounted(&image, fs);
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "kept");
    }
}

#[test]
fn a_btrfs_too_small_for_the_kernel_to_resize_says_so() {
    let directory = TestDirectory::new();
    let image = directory.formatted("image", Filesystem::Btrfs, 109 * MIB);
    let (target, number) = directory.mounted(&image, Filesystem::Btrfs);
    resize(&image, 200 * MIB);
    loopdev::refresh_capacity(number).unwrap();
    let error = grow_mounted(Filesystem::Btrfs, &target).unwrap_err();
    assert!(error.sentence().contains("256 MiB"), "{}", error.sentence());
}

#[test]
fn ext4_grows_mounted_where_the_kernel_lets_us_and_says_so_where_not() {
    let directory = TestDirectory::new();
    let image = directory.formatted("image", Filesystem::Ext4, 32 * MIB);
    let (target, number) = directory.mounted(&image, Filesystem::Ext4);
    assert_eq!(grow_mounted(Filesystem::Ext4, &target).unwrap(), Growth::AlreadyFull);
    resize(&image, 64 * MIB);
    loopdev::refresh_capacity(number).unwrap();
    let growth = grow_mounted(Filesystem::Ext4, &target);
    if may_grow_ext4_mounted() {
        assert_eq!(growth.unwrap(), Growth::Grown);
        assert_eq!(filesystem_size(&image, Filesystem::Ext4).unwrap(), 64 * MIB);
    } else {
        assert_eq!(growth.unwrap_err().errno(), Some(libc::EPERM));
    }
}

#[test]
fn ext4_grows_unmounted_and_keeps_its_files() {
    let directory = TestDirectory::new();
    let image = directory.formatted("image", Filesystem::Ext4, 16 * MIB);
    let (target, _) = directory.mounted(&image, Filesystem::Ext4);
    fs::write(target.join("file"), "kept").unwrap();
    mount::unmount(&target).unwrap();
    assert!(is_detached(&image));

    assert_eq!(grow_unmounted(Filesystem::Ext4, &image, MINUTE).unwrap(), Growth::AlreadyFull);
    resize(&image, 100 * MIB);
    assert_eq!(grow_unmounted(Filesystem::Ext4, &image, MINUTE).unwrap(), Growth::Grown);
    assert_eq!(filesystem_size(&image, Filesystem::Ext4).unwrap(), 100 * MIB);
    assert_eq!(grow_unmounted(Filesystem::Ext4, &image, MINUTE).unwrap(), Growth::AlreadyFull);
    let (target, _) = directory.mounted(&image, Filesystem::Ext4);
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "kept");
    assert!(rustix::fs::statvfs(&target).unwrap().f_blocks * 4096 > 80 * MIB);
}

#[test]
fn ext4_whose_growth_is_cut_off_at_any_point_is_as_it_was() {
    let directory = TestDirectory::new();
    let image = directory.formatted("image", Filesystem::Ext4, 16 * MIB);
    let (target, _) = directory.mounted(&image, Filesystem::Ext4);
    fs::write(target.join("file"), vec![7; 4 << 20]).unwrap();
    mount::unmount(&target).unwrap();
    assert!(is_detached(&image));
    resize(&image, 100 * MIB);
    let before = fs::read(&image).unwrap();
    // Until one run is let through; each attempt is killed a little later than the one before, and soon a fifth later,
    // as it may take long.
    let step = Duration::from_micros(1500);
    let mut deadline = step;
    let mut cut_off = 0;
    loop {
        match grow_unmounted(Filesystem::Ext4, &image, deadline) {
            Ok(growth) => {
                assert_eq!(growth, Growth::Grown);
                break;
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{}", error.sentence());
                assert!(
                    fs::read(&image).unwrap() == before,
                    "cut off after {deadline:?}, it changed the image"
                );
                cut_off += 1;
                deadline += if deadline < Duration::from_millis(50) { step } else { deadline / 5 };
            }
        }
    }
    assert!(cut_off > 0);
    assert_eq!(fs::read_dir(image.parent().unwrap()).unwrap().count(), 2, "the image and its mount point");
    let (target, _) = directory.mounted(&image, Filesystem::Ext4);
    assert!(fs::read(target.join("file")).unwrap() == vec![7; 4 << 20]);
}

#[test]
fn only_ext4_grows_unmounted() {
    for fs in [Filesystem::Xfs, Filesystem::Btrfs] {
        let error = grow_unmounted(fs, Path::new("/nonexistent"), MINUTE).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    }
}

#[test]
fn check_repairs_what_is_safe_and_reports_what_is_not() {
    let directory = TestDirectory::new();
    let image = directory.formatted("image", Filesystem::Ext4, 16 * MIB);
    let (target, _) = directory.mounted(&image, Filesystem::Ext4);
    fs::write(target.join("file"), "kept").unwrap();
    shut_down(&target);
    mount::unmount(&target).unwrap();
    check(Filesystem::Ext4, &image, MINUTE).unwrap();

    // The root directory, whose inode is the second, made to look like nothing at all.
    let script = directory.file("script", "clri <2>\nset_super_value state 2\n");
    let args = [OsStr::new("-w"), OsStr::new("-f"), script.as_os_str(), image.as_os_str()];
    exec::run("debugfs", args, MINUTE).unwrap();
    let error = check(Filesystem::Ext4, &image, MINUTE).unwrap_err();
    assert!(error.sentence().contains("MANUALLY"), "{}", error.sentence());
    for fs in [Filesystem::Xfs, Filesystem::Btrfs] {
        check(fs, &image, MINUTE).unwrap();
    }
}

#[test]
fn btrfs_copies_with_their_own_identity_are_mounted_next_to_the_original() {
    let directory = TestDirectory::new();
    let fs = Filesystem::Btrfs;
    let image = directory.formatted("original", fs, minimum_size(fs));
    let (original, _) = directory.mounted(&image, fs);
    fs::write(original.join("file"), "from the original").unwrap();
    mount::unmount(&original).unwrap();

    let names = ["copy", "copy-of-copy"];
    let mut identities = vec![read(&image, 16, 0x10020)];
    let mut from = image.clone();
    for name in names {
        let copied = directory.path(name);
        fs::copy(&from, &copied).unwrap();
        renew_identity(fs, &copied, MINUTE).unwrap();
        // The second superblock, for whoever needs to rescue the filesystem, says the same.
        assert_eq!(read(&copied, 16, 0x10020), read(&copied, 16, (64 << 20) + 0x20));
        identities.push(read(&copied, 16, 0x10020));
        exec::run("btrfs", [OsStr::new("check"), OsStr::new("--readonly"), copied.as_os_str()], MINUTE)
            .unwrap();
        from = copied;
    }
    identities.sort();
    identities.dedup();
    assert_eq!(identities.len(), 3);

    let (original, _) = directory.mounted(&image, fs);
    let copies = names.map(|name| directory.mounted(&directory.path(name), fs).0);
    fs::write(original.join("file"), "changed").unwrap();
    for copy in copies {
        assert_eq!(fs::read_to_string(copy.join("file")).unwrap(), "from the original");
    }
}

#[test]
fn a_btrfs_copied_in_use_keeps_what_only_its_log_has() {
    let directory = TestDirectory::new();
    let fs = Filesystem::Btrfs;
    let image = directory.formatted("original", fs, minimum_size(fs));
    let (original, _) = directory.mounted(&image, fs);
    rustix::fs::syncfs(File::open(&original).unwrap()).unwrap();
    let file = File::create(original.join("file")).unwrap();
    file.write_all_at(b"written and synced", 0).unwrap();
    file.sync_all().unwrap();
    let copied = directory.path("copy");
    fs::copy(&image, &copied).unwrap();
    assert_ne!(read(&copied, 8, 0x10060), [0; 8], "the copy has a log");

    renew_identity(fs, &copied, MINUTE).unwrap();
    let (copy, _) = directory.mounted(&copied, fs);
    assert_eq!(fs::read_to_string(copy.join("file")).unwrap(), "written and synced");
}

#[test]
fn what_is_no_btrfs_gets_no_identity() {
    let directory = TestDirectory::new();
    let image = directory.image("image", 128 * MIB);
    assert_eq!(
        renew_identity(Filesystem::Btrfs, &image, MINUTE).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
    assert_eq!(probe(&image).unwrap(), Content::Blank);
}

#[test]
fn a_missing_tool_is_named_with_its_package() {
    for fs in ALL {
        let error = tool(fs, "berth-no-such-tool", &[], Path::new("x"), MINUTE, &[0]).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT));
        let sentence = error.sentence();
        assert!(sentence.contains("berth-no-such-tool") && sentence.contains(fs.package()), "{sentence}");
    }
}
