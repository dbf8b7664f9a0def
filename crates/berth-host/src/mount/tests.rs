//! Mounts on the real kernel, below a temporary directory each.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, symlink},
};

use super::{
    testing::{TestDirectory, is_detached, shut_down},
    *,
};
use crate::format::Filesystem;

const READ_ONLY: Attributes = Attributes {
    read_only: true,
    nosuid: false,
    nodev: false,
    noexec: false,
    nosymfollow: false,
    nodiratime: false,
    atime: Atime::Default,
};

fn options_of(target: &Path) -> Vec<String> {
    let mount = mount_of(target).unwrap().expect("something is mounted here");
    mount.options.split(',').map(str::to_owned).collect()
}

#[test]
fn a_read_only_bind_refuses_writes_while_its_source_takes_them() {
    let directory = TestDirectory::new();
    let (source, target) = (directory.dir("source"), directory.dir("target"));
    bind(&source, &target, READ_ONLY).unwrap();

    assert_eq!(fs::write(target.join("file"), "x").unwrap_err().kind(), io::ErrorKind::ReadOnlyFilesystem);
    fs::write(source.join("file"), "seen").unwrap();
    assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "seen");
    assert!(is_read_only(&target).unwrap());
    assert!(!is_read_only(&source).unwrap());
}

#[test]
fn every_attribute_of_a_bind_reaches_the_mount() {
    let directory = TestDirectory::new();
    let (source, target) = (directory.dir("source"), directory.dir("target"));
    let attributes = Attributes {
        read_only: true,
        nosuid: true,
        nodev: true,
        noexec: true,
        nosymfollow: true,
        nodiratime: true,
        atime: Atime::Noatime,
    };
    bind(&source, &target, attributes).unwrap();
    let options = options_of(&target);
    for option in ["ro", "nosuid", "nodev", "noexec", "nosymfollow", "nodiratime", "noatime"] {
        assert!(options.iter().any(|o| o == option), "{option} in {options:?}");
    }
}

#[test]
fn a_bind_inherits_attributes_and_only_adds_to_them() {
    let directory = TestDirectory::new();
    let source = directory.dir("source");
    let attributes = Attributes { nosuid: true, atime: Atime::Noatime, ..Attributes::default() };
    filesystem(Path::new("none"), &source, "tmpfs", attributes, &[]).unwrap();

    let same = directory.dir("same");
    bind(&source, &same, Attributes::default()).unwrap();
    assert!(["nosuid", "noatime"].iter().all(|option| options_of(&same).contains(&(*option).to_owned())));

    let strict = directory.dir("strict");
    bind(&source, &strict, Attributes { atime: Atime::Strictatime, ..Attributes::default() }).unwrap();
    let options = options_of(&strict);
    assert!(options.contains(&"nosuid".into()), "{options:?}");
    assert!(!options.iter().any(|option| option.ends_with("atime")), "{options:?}");
}

#[test]
fn a_file_and_a_device_node_can_be_bound() {
    let directory = TestDirectory::new();
    let (source, target) = (directory.file("source", "text"), directory.file("target", ""));
    bind(&source, &target, READ_ONLY).unwrap();
    assert_eq!(fs::read_to_string(&target).unwrap(), "text");
    assert!(is_mount_point(&target).unwrap());

    let node = directory.file("node", "");
    bind(Path::new("/dev/null"), &node, Attributes::default()).unwrap();
    let seen = fs::metadata(&node).unwrap();
    assert!(seen.file_type().is_char_device());
    assert_eq!(seen.rdev(), fs::metadata("/dev/null").unwrap().rdev());

    unmount(&target).unwrap();
    assert_eq!(fs::read_to_string(&target).unwrap(), "");
}

#[test]
fn a_bind_leaves_mounts_below_its_source_behind() {
    let directory = TestDirectory::new();
    let source = directory.dir("source");
    let below = directory.tmpfs("source/below");
    fs::write(below.join("file"), "").unwrap();
    let target = directory.dir("target");
    bind(&source, &target, Attributes::default()).unwrap();
    assert!(target.join("below").exists());
    assert!(!target.join("below/file").exists());
}

#[test]
fn a_symbolic_link_is_refused_as_source_and_as_target_with_or_without_a_slash() {
    let directory = TestDirectory::new();
    let (source, target) = (directory.dir("source"), directory.dir("target"));
    for (name, to) in [("to-source", &source), ("to-target", &target)] {
        symlink(to, directory.path(name)).unwrap();
    }
    for name in ["to-source", "to-source/", "to-source/."] {
        let error = bind(&directory.path(name), &target, Attributes::default()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ELOOP), "{}", error.sentence());
    }
    for name in ["to-target", "to-target/"] {
        let error = bind(&source, &directory.path(name), Attributes::default()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ELOOP), "{}", error.sentence());
    }
    assert!(!is_mount_point(&target).unwrap());
}

#[test]
fn unmount_through_a_symbolic_link_leaves_the_mount_alone() {
    let directory = TestDirectory::new();
    let target = directory.tmpfs("target");
    let link = directory.path("link");
    symlink(&target, &link).unwrap();
    assert!(!is_mount_point(&link.join("")).unwrap());
    assert_eq!(unmount(&link.join("")).unwrap(), Change::AlreadyTrue);
    assert!(is_mount_point(&target).unwrap());
}

#[test]
fn a_missing_target_is_an_error_that_names_it() {
    let directory = TestDirectory::new();
    let missing = directory.path("missing");
    let error = bind(&directory.dir("source"), &missing, Attributes::default()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert!(error.sentence().contains("missing"), "{}", error.sentence());
}

#[test]
fn unmount_takes_all_that_is_stacked_on_the_target() {
    let directory = TestDirectory::new();
    let target = directory.tmpfs("target");
    bind(&directory.dir("other"), &target, READ_ONLY).unwrap();
    directory.tmpfs("target");
    let listed = mounts().unwrap().iter().filter(|mount| mount.target == target).count();
    assert_eq!(listed, 3);

    assert_eq!(unmount(&target).unwrap(), Change::Made);
    assert!(!is_mount_point(&target).unwrap());
    assert_eq!(mount_of(&target).unwrap(), None);
    assert_eq!(unmount(&target).unwrap(), Change::AlreadyTrue);
}

#[test]
fn what_is_missing_is_neither_mounted_nor_an_error() {
    let directory = TestDirectory::new();
    for path in [directory.path("missing/deeper"), directory.file("file", "").join("below")] {
        assert!(!is_mount_point(&path).unwrap());
        assert_eq!(mount_of(&path).unwrap(), None);
        assert_eq!(unmount(&path).unwrap(), Change::AlreadyTrue);
    }
}

#[test]
fn a_busy_mount_says_so_and_yields_only_to_a_lazy_unmount() {
    let directory = TestDirectory::new();
    let target = directory.tmpfs("target");
    let held = fs::File::create(target.join("held")).unwrap();
    assert_eq!(unmount(&target).unwrap_err().errno(), Some(libc::EBUSY));
    assert!(is_mount_point(&target).unwrap());
    assert_eq!(unmount_lazily(&target).unwrap(), Change::Made);
    assert!(!is_mount_point(&target).unwrap());
    drop(held);
}

#[test]
fn the_topmost_mount_is_found_under_a_name_with_spaces_and_backslashes() {
    let directory = TestDirectory::new();
    let name = "a b\\040\tc#\nd";
    let lower = directory.tmpfs(name);
    bind(&directory.dir("other"), &lower, READ_ONLY).unwrap();
    let mount = mount_of(&lower).unwrap().expect("the bind is on top");
    assert_eq!(mount.target, lower);
    assert!(mount.options.starts_with("ro"), "{mount:?}");
    assert!(mount.root.ends_with("other"), "{mount:?}");
    assert_eq!(mountinfo::listed_at(&lower).unwrap(), Some(mount));
}

#[test]
fn an_unknown_option_is_named_with_what_the_kernel_says_of_it() {
    let directory = TestDirectory::new();
    let target = directory.dir("target");
    for option in ["no-such-option", "no-such-option=7"] {
        let options = ["size=1M".to_owned(), option.to_owned()];
        let error =
            filesystem(Path::new("none"), &target, "tmpfs", Attributes::default(), &options).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EINVAL));
        let sentence = error.sentence();
        assert!(sentence.contains(option) && sentence.contains("Unknown parameter"), "{sentence}");
    }
    assert!(!is_mount_point(&target).unwrap());
}

#[test]
fn an_unknown_filesystem_type_is_named() {
    let directory = TestDirectory::new();
    let error = filesystem(Path::new("none"), &directory.dir("x"), "nosuchfs", Attributes::default(), &[])
        .unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENODEV));
    assert!(error.sentence().contains("nosuchfs"));
}

#[test]
fn options_and_attributes_of_a_filesystem_are_all_applied() {
    let directory = TestDirectory::new();
    let target = directory.dir("target");
    let attributes = Attributes { nodev: true, ..READ_ONLY };
    let options = ["size=1M".to_owned(), "noswap".to_owned(), "sync".to_owned()];
    filesystem(Path::new("berth-test"), &target, "tmpfs", attributes, &options).unwrap();
    let mount = mount_of(&target).unwrap().unwrap();
    assert_eq!((mount.fs_type.as_str(), mount.source.as_str()), ("tmpfs", "berth-test"));
    assert_eq!(mount.options, "ro,nodev,relatime");
    for option in ["ro", "size=1024k", "sync"] {
        assert!(mount.super_options.split(',').any(|o| o == option), "{option} in {mount:?}");
    }
}

#[test]
fn a_filesystem_that_has_failed_is_still_a_mount_point_and_can_be_unmounted() {
    let directory = TestDirectory::new();
    let image = directory.formatted("image", Filesystem::Xfs, 300 << 20);
    let (target, _) = directory.mounted(&image, Filesystem::Xfs);
    shut_down(&target);
    assert_eq!(fs::metadata(&target).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(is_mount_point(&target).unwrap());
    assert_eq!(mount_of(&target).unwrap().map(|mount| mount.fs_type), Some("xfs".into()));
    assert_eq!(unmount(&target).unwrap(), Change::Made);
    assert!(!is_mount_point(&target).unwrap());
    assert!(is_detached(&image));
}
