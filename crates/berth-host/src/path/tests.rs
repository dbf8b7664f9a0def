//! Tests of directories held open: what they do, and that nothing leads out of them.

use std::{
    ffi::CString,
    fs,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, Mode},
    io::Errno,
    process::{Gid, Uid},
};
use tempfile::TempDir;

use super::{DIRECTORY, Dir, Entry, Kind};
use crate::{
    btrfs::loopfs::{Bind, run},
    error::{Change, Error},
};

fn errno<T: std::fmt::Debug>(result: Result<T, Error>) -> Errno {
    Errno::from_raw_os_error(result.unwrap_err().errno().unwrap())
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

/// A directory, and next to it a file that must stay out of reach.
fn inside_and_outside() -> (TempDir, Dir) {
    let holder = tempfile::tempdir().unwrap();
    fs::create_dir(holder.path().join("inside")).unwrap();
    fs::create_dir(holder.path().join("outside")).unwrap();
    fs::write(holder.path().join("outside/secret"), "secret").unwrap();
    let dir = Dir::open(&holder.path().join("inside")).unwrap();
    (holder, dir)
}

/// Makes directories one in the other, `depth` levels, the deepest with a file.
fn make_deep(top: &Dir, depth: usize) {
    let mut current: OwnedFd = top.as_fd().try_clone_to_owned().unwrap();
    for _ in 0..depth {
        rustix::fs::mkdirat(&current, c"d", Mode::RWXU).unwrap();
        current = rustix::fs::openat(&current, c"d", DIRECTORY, Mode::empty()).unwrap();
    }
    rustix::fs::mkdirat(&current, c"end", Mode::RWXU).unwrap();
}

#[test]
fn a_name_that_is_no_single_name_is_refused() {
    let (_holder, dir) = inside_and_outside();
    for name in ["", ".", "..", "a/b", "/etc", "a\0b"] {
        assert_eq!(errno(dir.make_dir(name, 0o755)), Errno::INVAL, "{name:?}");
        assert_eq!(errno(dir.create_file(name, 0o644)), Errno::INVAL, "{name:?}");
        assert_eq!(errno(dir.remove_tree(name)), Errno::INVAL, "{name:?}");
        assert_eq!(errno(dir.remove_file(name)), Errno::INVAL, "{name:?}");
        assert_eq!(errno(dir.rename(name, &dir, "new")), Errno::INVAL, "{name:?}");
        assert_eq!(errno(dir.rename("old", &dir, name)), Errno::INVAL, "{name:?}");
        assert_eq!(errno(dir.write_atomically(name, b"")), Errno::INVAL, "{name:?}");
        assert_eq!(errno(dir.lock_exclusively(name)), Errno::INVAL, "{name:?}");
    }
}

#[test]
fn neither_dots_nor_an_absolute_path_nor_a_planted_link_leads_out() {
    let (holder, dir) = inside_and_outside();
    let outside = holder.path().join("outside");
    symlink(&outside, holder.path().join("inside/link")).unwrap();
    symlink(outside.join("secret"), holder.path().join("inside/file_link")).unwrap();
    symlink("/proc/self/root", holder.path().join("inside/magic")).unwrap();

    for way_out in ["..", "../outside", "/etc", outside.to_str().unwrap()] {
        assert_eq!(errno(dir.dir(way_out)), Errno::XDEV, "{way_out}");
        assert_eq!(errno(dir.exists(way_out)), Errno::XDEV, "{way_out}");
    }
    for way_out in ["../outside/secret", "/etc/passwd"] {
        assert_eq!(errno(dir.open_file(way_out, false)), Errno::XDEV, "{way_out}");
    }
    for link in ["link", "magic", "magic/etc"] {
        assert_eq!(errno(dir.dir(link)), Errno::LOOP, "{link}");
    }
    assert_eq!(errno(dir.open_file("link/secret", false)), Errno::LOOP);
    assert_eq!(errno(dir.open_file("file_link", true)), Errno::LOOP);
    assert_eq!(errno(dir.exists("link/secret")), Errno::LOOP);
    assert_eq!(errno(dir.make_dir("link", 0o755)), Errno::EXIST);
    assert_eq!(errno(dir.create_file("file_link", 0o644)), Errno::EXIST);
    assert_eq!(errno(dir.lock_exclusively("file_link")), Errno::LOOP);
}

#[test]
fn a_planted_fifo_is_not_opened_as_a_file() {
    let (holder, dir) = inside_and_outside();
    run("mkfifo", &[holder.path().join("inside/pipe").to_str().unwrap()]);
    assert_eq!(errno(dir.open_file("pipe", false)), Errno::INVAL);
}

#[test]
fn modes_are_exact_whatever_the_umask_is() {
    let (holder, dir) = inside_and_outside();
    let inside = holder.path().join("inside");
    assert_eq!(dir.make_dir("wide", 0o2777).unwrap(), Change::Made);
    assert_eq!(dir.make_dir("wide", 0o700).unwrap(), Change::AlreadyTrue);
    dir.create_file("file", 0o666).unwrap();
    Dir::ensure(&inside.join("a/b"), 0o773).unwrap();
    assert_eq!(mode(&inside.join("wide")), 0o2777);
    assert_eq!(mode(&inside.join("file")), 0o666);
    assert_eq!(mode(&inside.join("a")), 0o773);
    assert_eq!(mode(&inside.join("a/b")), 0o773);
}

#[test]
fn what_is_made_is_found_again() {
    let (holder, dir) = inside_and_outside();
    let below = dir.ensure_dir("below", 0o755).unwrap();
    assert_eq!(below.path(), holder.path().join("inside/below"));
    below.write_atomically("state", b"old").unwrap();
    below.write_atomically("state", b"new").unwrap();
    symlink("/nowhere", holder.path().join("inside/dangling")).unwrap();

    assert!(dir.exists("below/state").unwrap());
    assert!(dir.exists("dangling").unwrap());
    assert!(!dir.exists("below/state/deeper").unwrap());
    assert!(!dir.exists("missing").unwrap());
    assert_eq!(std::io::read_to_string(dir.open_file("below/state", false).unwrap()).unwrap(), "new");
    let expected = [("below", Kind::Directory), ("dangling", Kind::Symlink)];
    assert_eq!(dir.entries().unwrap(), expected.map(|(name, kind)| Entry { name: name.into(), kind }));
    // Listing must not depend on where an earlier listing of the same descriptor stopped.
    assert_eq!(dir.entries().unwrap().len(), 2);
    assert_eq!(below.entries().unwrap(), [Entry { name: "state".into(), kind: Kind::File }]);
}

#[test]
fn an_atomic_write_passes_over_what_a_crash_left_behind() {
    let (holder, dir) = inside_and_outside();
    let (leftover, _) = dir.create_temporary("state").unwrap();
    dir.write_atomically("state", b"content").unwrap();
    assert_eq!(fs::read(holder.path().join("inside/state")).unwrap(), b"content");
    assert!(dir.exists(&leftover).unwrap());
    assert_eq!(mode(&holder.path().join("inside/state")), 0o600);
}

#[test]
fn a_failed_atomic_write_leaves_the_old_content_and_nothing_else() {
    let (_holder, dir) = inside_and_outside();
    dir.make_dir("state", 0o755).unwrap();
    assert_eq!(errno(dir.write_atomically("state", b"content")), Errno::ISDIR);
    assert_eq!(dir.entries().unwrap(), [Entry { name: "state".into(), kind: Kind::Directory }]);
}

#[test]
fn a_rename_replaces_nothing() {
    let (holder, dir) = inside_and_outside();
    let to = dir.ensure_dir("to", 0o755).unwrap();
    dir.write_atomically("file", b"moved").unwrap();
    to.write_atomically("taken", b"kept").unwrap();
    assert_eq!(errno(dir.rename("file", &to, "taken")), Errno::EXIST);
    assert_eq!(errno(dir.rename("to", &to, "itself")), Errno::INVAL);
    dir.rename("file", &to, "file").unwrap();
    assert_eq!(fs::read(holder.path().join("inside/to/file")).unwrap(), b"moved");
    assert_eq!(fs::read(holder.path().join("inside/to/taken")).unwrap(), b"kept");
    assert_eq!(errno(dir.rename("file", &to, "again")), Errno::NOENT);
}

#[test]
fn a_lock_excludes_others_until_it_is_dropped() {
    let (_holder, dir) = inside_and_outside();
    let held = dir.lock_exclusively("lock").unwrap();
    assert_eq!(errno(dir.lock_exclusively("lock")), Errno::WOULDBLOCK);
    drop(held);
    dir.lock_exclusively("lock").unwrap();
}

#[test]
fn removing_takes_the_links_and_leaves_what_they_point_to() {
    let (holder, dir) = inside_and_outside();
    let inside = holder.path().join("inside");
    fs::create_dir_all(inside.join("tree/a/b")).unwrap();
    symlink("/etc", inside.join("tree/a/etc")).unwrap();
    symlink(holder.path().join("outside"), inside.join("tree/a/b/outside")).unwrap();
    fs::hard_link(holder.path().join("outside/secret"), inside.join("tree/hard")).unwrap();
    run("mkfifo", &[inside.join("tree/pipe").to_str().unwrap()]);
    symlink(holder.path().join("outside"), inside.join("link")).unwrap();

    assert_eq!(dir.remove_tree("tree").unwrap(), Change::Made);
    assert_eq!(dir.remove_tree("tree").unwrap(), Change::AlreadyTrue);
    assert_eq!(dir.remove_tree("link").unwrap(), Change::Made);
    assert_eq!(dir.remove_file("link").unwrap(), Change::AlreadyTrue);
    assert_eq!(dir.entries().unwrap(), []);
    assert_eq!(fs::read(holder.path().join("outside/secret")).unwrap(), b"secret");
    assert!(Path::new("/etc/passwd").exists());
}

#[test]
fn removing_stops_at_a_mount_point_and_names_it() {
    let (holder, dir) = inside_and_outside();
    let inside = holder.path().join("inside");
    fs::create_dir_all(inside.join("tree/a/mounted")).unwrap();
    fs::create_dir_all(inside.join("files")).unwrap();
    fs::write(inside.join("files/mounted"), "").unwrap();
    // A bind mount of the same filesystem: the device number does not give it away.
    let _bound = Bind::new(&holder.path().join("outside"), &inside.join("tree/a/mounted"));
    let _bound_file = Bind::new(&holder.path().join("outside/secret"), &inside.join("files/mounted"));

    for (name, mounted) in [("tree", "tree/a/mounted"), ("files", "files/mounted")] {
        let error = dir.remove_tree(name).unwrap_err();
        assert_eq!(error.errno(), Some(Errno::XDEV.raw_os_error()));
        assert!(error.to_string().ends_with(inside.join(mounted).to_str().unwrap()), "{error}");
    }
    let tree = dir.dir("tree/a").unwrap();
    assert_eq!(errno(tree.remove_tree("mounted")), Errno::XDEV);
    assert_eq!(fs::read(holder.path().join("outside/secret")).unwrap(), b"secret");
}

#[test]
fn a_tree_a_hundred_thousand_levels_deep_is_removed() {
    let holder = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = Dir::open(holder.path()).unwrap();
    let top = dir.ensure_dir("top", 0o755).unwrap();
    make_deep(&top, 100_000);
    assert_eq!(dir.remove_tree("top").unwrap(), Change::Made);
    assert_eq!(dir.entries().unwrap(), []);
}

#[test]
fn a_full_directory_is_removed() {
    let (holder, dir) = inside_and_outside();
    let full = holder.path().join("inside/full");
    fs::create_dir(&full).unwrap();
    for number in 0..5000 {
        fs::write(full.join(format!("a rather long name of the file {number}")), "").unwrap();
    }
    assert_eq!(dir.remove_tree("full").unwrap(), Change::Made);
    assert!(!full.exists());
}

#[test]
fn one_without_privileges_removes_directories_he_may_not_read() {
    let (holder, _dir) = inside_and_outside();
    let inside = holder.path().join("inside");
    fs::create_dir_all(inside.join("tree/closed/locked")).unwrap();
    fs::write(inside.join("tree/closed/file"), "").unwrap();
    fs::set_permissions(holder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    run("chown", &["-R", "1234:1234", inside.to_str().unwrap()]);
    for closed in ["tree/closed/locked", "tree/closed", "tree"] {
        fs::set_permissions(inside.join(closed), fs::Permissions::from_mode(0o000)).unwrap();
    }
    std::thread::spawn(move || {
        let (user, group) = (Uid::from_raw(1234), Gid::from_raw(1234));
        rustix::thread::set_thread_res_gid(group, group, group).unwrap();
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let dir = Dir::open(&inside).unwrap();
        assert_eq!(errno(dir.dir("tree")), Errno::ACCESS, "the thread has lost its privileges");
        assert_eq!(dir.remove_tree("tree").unwrap(), Change::Made);
        assert_eq!(dir.entries().unwrap(), []);
    })
    .join()
    .unwrap();
}

#[test]
fn immutable_and_append_only_entries_are_removed_and_the_directory_above_stays_protected() {
    for attribute in ["+i", "+a"] {
        let (holder, dir) = inside_and_outside();
        let inside = holder.path().join("inside");
        fs::create_dir_all(inside.join("tree/closed/empty")).unwrap();
        fs::set_permissions(inside.join("tree/closed"), fs::Permissions::from_mode(0o000)).unwrap();
        fs::write(inside.join("tree/file"), "").unwrap();
        fs::write(inside.join("single"), "").unwrap();
        for name in ["tree/closed/empty", "tree/closed", "tree/file", "tree", "single"] {
            run("chattr", &[attribute, inside.join(name).to_str().unwrap()]);
        }
        assert_eq!(dir.remove_tree("tree").unwrap(), Change::Made, "{attribute}");
        assert_eq!(dir.remove_tree("single").unwrap(), Change::Made, "{attribute}");
        assert_eq!(dir.entries().unwrap(), []);

        fs::write(inside.join("kept"), "").unwrap();
        run("chattr", &[attribute, inside.to_str().unwrap()]);
        let refused = errno(dir.remove_tree("kept"));
        run("chattr", &["-ia", inside.to_str().unwrap()]);
        assert_eq!(
            refused,
            Errno::PERM,
            "{attribute}: the attributes of a directory that stays are not ours"
        );
    }
}

#[test]
fn only_empty_directories_go_where_nothing_else_may() {
    let (holder, dir) = inside_and_outside();
    let inside = holder.path().join("inside");
    fs::create_dir_all(inside.join("tree/a/b")).unwrap();
    run("chattr", &["+i", inside.join("tree/a/b").to_str().unwrap()]);
    assert_eq!(dir.remove_empty_tree("tree").unwrap(), Change::Made);
    assert_eq!(dir.remove_empty_tree("tree").unwrap(), Change::AlreadyTrue);

    fs::create_dir_all(inside.join("tree/a")).unwrap();
    fs::write(inside.join("tree/a/file"), "kept").unwrap();
    assert_eq!(errno(dir.remove_empty_tree("tree")), Errno::NOTEMPTY);
    assert_eq!(fs::read(inside.join("tree/a/file")).unwrap(), b"kept");
}

#[test]
fn an_entry_that_is_no_utf8_does_not_disturb() {
    let (_holder, dir) = inside_and_outside();
    let tree = dir.ensure_dir("tree", 0o755).unwrap();
    let odd = CString::new(b"\xff\xfe".to_vec()).unwrap();
    rustix::fs::mkdirat(&tree, &odd, Mode::RWXU).unwrap();
    assert_eq!(tree.entries().unwrap().len(), 1);
    assert_eq!(dir.remove_tree("tree").unwrap(), Change::Made);
    assert_eq!(rustix::fs::unlinkat(&dir, c"tree", AtFlags::REMOVEDIR), Err(Errno::NOENT));
}
