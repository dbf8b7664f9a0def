//! Whole trees are measured, copied and removed.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
    path::Path,
};

use berth_nfs::{Change, Create, Kind, Name, Node, Share, Version};
use bytes::Bytes;

use super::{
    between::{Asked, Fate, Request, between},
    server::{Server, chain},
};

async fn open(share: &Share, path: &str) -> berth_nfs::Handle {
    share.open_dir(path).await.unwrap_or_else(|error| panic!("{path}: {}", chain(&error))).handle
}

#[tokio::test]
async fn paths_never_leave_the_share_nor_follow_a_symlink() {
    let server = Server::start();
    fs::create_dir_all(server.export().join("real/below")).unwrap();
    fs::write(server.export().join("file"), "").unwrap();
    symlink("/", server.export().join("out")).unwrap();
    symlink("real", server.export().join("inside")).unwrap();
    for version in Version::ALL {
        let share = server.share(version).await;
        assert_eq!(open(&share, "").await, share.root());
        assert_eq!(open(&share, "/real//./below/").await, open(&share, "real/below").await);
        for path in ["..", "real/../..", "real/..", "a\0b"] {
            assert_eq!(share.open_dir(path).await.unwrap_err().kind(), Kind::Invalid, "{path}");
            assert_eq!(share.make_dirs(path, &Change::default()).await.unwrap_err().kind(), Kind::Invalid);
        }
        for path in ["out", "out/etc", "inside", "inside/below", "file", "file/x"] {
            let error = share.open_dir(path).await.unwrap_err();
            assert_eq!(error.kind(), Kind::NotDirectory, "{path}: {}", chain(&error));
            let error = share.make_dirs(path, &Change::default()).await.unwrap_err();
            assert_eq!(error.kind(), Kind::NotDirectory, "{path}: {}", chain(&error));
        }
        assert_eq!(share.open_dir("real/none").await.unwrap_err().kind(), Kind::NotFound);
    }
    assert!(!Path::new("/tmp/none").exists());
}

#[tokio::test]
async fn directories_are_made_with_those_above_them() {
    let server = Server::start();
    for version in Version::ALL {
        let share = server.share(version).await;
        let path = format!("{version}/b/c");
        let change = Change { mode: Some(0o1777), uid: Some(7), gid: Some(8), ..Change::default() };
        let (made, new) = share.make_dirs(&path, &change).await.unwrap();
        assert!(new);
        let (again, new) = share.make_dirs(&path, &Change::mode(0o700)).await.unwrap();
        assert!(!new);
        assert_eq!(made.handle, again.handle);
        let is = fs::metadata(server.export().join(&path)).unwrap();
        assert_eq!((is.mode() & 0o7777, is.uid(), is.gid()), (0o1777, 7, 8));
        let above = fs::metadata(server.export().join(&path).parent().unwrap()).unwrap();
        assert_eq!((above.mode() & 0o7777, above.uid()), (0o755, 0));
    }
}

/// Some ninety directories, one of them deep, one large.
fn plant(top: &Path, large_size: u64) {
    for n in 0..20 {
        let dir = top.join(format!("dir {n}/sub"));
        fs::create_dir_all(&dir).unwrap();
        for m in 0..n {
            fs::write(dir.join(format!("file {m}")), vec![b'x'; n * 100]).unwrap();
        }
    }
    let deep = top.join(vec!["d"; 50].join("/"));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("bottom"), "found").unwrap();
    let large = top.join("large");
    fs::create_dir(&large).unwrap();
    for n in 0..large_size {
        fs::write(large.join(format!("a file with a rather long name, number {n}")), "").unwrap();
        if n % 5 == 0 {
            fs::create_dir(large.join(format!("a directory with a rather long name, number {n}"))).unwrap();
        }
    }
    symlink("/etc/passwd", top.join("absolute")).unwrap();
    symlink("nowhere", top.join("dangling")).unwrap();
}

#[tokio::test]
async fn a_tree_is_measured_and_removed() {
    let server = Server::start();
    let outside = server.export().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("keep"), "me").unwrap();
    for version in Version::ALL {
        let share = server.share(version).await;
        let top = server.export().join("tree");
        fs::create_dir(&top).unwrap();
        plant(&top, 1300);
        symlink(&outside, top.join("escape")).unwrap();
        fs::hard_link(outside.join("keep"), top.join("kept")).unwrap();
        fs::hard_link(outside.join("keep"), top.join("kept twice")).unwrap();

        let usage = share.usage(&open(&share, "tree").await).await.unwrap();
        assert_eq!(usage.directories, 40 + 50 + 1 + 260, "{share:?}");
        assert_eq!(usage.files, 190 + 1 + 1300 + 3 + 1);
        assert_eq!(usage.size, (0..20).map(|n| n * n * 100).sum::<u64>() + 5 + 2);
        assert!(usage.used >= 190 * 512);

        share.remove_tree(&share.root(), "tree").await.unwrap_or_else(|e| panic!("{share:?} {}", chain(&e)));
        assert!(!top.exists());
        share.remove_tree(&share.root(), "tree").await.unwrap();
        assert_eq!(fs::read_to_string(outside.join("keep")).unwrap(), "me");
        assert_eq!(share.usage(&open(&share, "outside").await).await.unwrap().size, 2);
    }
}

/// All about a tree, in words.
fn describe(top: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut inodes = std::collections::HashMap::new();
    let mut todo = vec![top.to_owned()];
    while let Some(dir) = todo.pop() {
        let mut entries: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        entries.sort();
        for path in entries.into_iter().chain((dir == top).then(|| dir.clone())) {
            let is = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(top).unwrap().display().to_string();
            let same = inodes.entry(is.ino()).or_insert_with(|| name.clone()).clone();
            let content = match is.file_type() {
                kind if kind.is_symlink() => fs::read_link(&path).unwrap().display().to_string(),
                kind if kind.is_file() => format!("{:x?}", crc(&fs::read(&path).unwrap())),
                kind => format!("{} {}", kind.is_fifo(), is.rdev()),
            };
            let size = if is.is_dir() { 0 } else { is.len() };
            // Not every server sets the times of symlinks.
            let modified = if is.is_symlink() { (0, 0) } else { (is.mtime(), is.mtime_nsec()) };
            lines.push(format!(
                "{name} {:o} {}:{} {size} {modified:?} {content} {} {same}",
                is.mode(),
                is.uid(),
                is.gid(),
                is.nlink()
            ));
            if is.is_dir() && path != top {
                todo.push(path);
            }
        }
    }
    lines.sort();
    lines
}

/// Compares line by line, since all of it is too much to read.
fn same(is: &[String], should: &[String]) {
    for (is, should) in is.iter().zip(should) {
        assert_eq!(is, should);
    }
    assert_eq!(is.len(), should.len());
}

fn crc(data: &[u8]) -> u64 {
    data.iter().fold(7, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)))
}

async fn plant_odd_things(share: &Share, top: &Path) {
    let dir = open(share, "from").await;
    share.make_node(&dir, "fifo", Node::Fifo, &Change::mode(0o640)).await.unwrap();
    share.make_node(&dir, "device", Node::Character(1, 3), &Change::mode(0o666)).await.unwrap();
    let change = Change { mode: Some(0o4755), uid: Some(1000), gid: Some(100), ..Change::default() };
    let file = share.create(&dir, "setuid", Create::New, &Change::default()).await.unwrap().handle;
    share.write(&file, 0, Bytes::from_static(b"#!/bin/sh"), true).await.unwrap();
    let owner = Change { mode: None, ..change.clone() };
    share.set_attributes(&file, &owner).await.unwrap();
    share.set_attributes(&file, &Change::mode(0o4755)).await.unwrap();
    fs::hard_link(top.join("setuid"), top.join("dir 3/same")).unwrap();
    fs::hard_link(top.join("setuid"), top.join("dir 7/same again")).unwrap();
    fs::set_permissions(top.join("dir 5"), fs::Permissions::from_mode(0o2500)).unwrap();
    let big: Vec<u8> = (0..2_500_001_u32).map(|n| (n % 249) as u8).collect();
    fs::write(top.join("big"), big).unwrap();
    let sparse = fs::File::create(top.join("sparse")).unwrap();
    sparse.set_len(8 << 20).unwrap();
    std::os::unix::fs::FileExt::write_at(&sparse, b"in the middle", 4 << 20).unwrap();
}

#[tokio::test]
async fn a_tree_is_copied_with_all_about_it_and_a_second_run_finds_nothing_to_do() {
    for version in Version::ALL {
        let server = Server::start();
        let top = server.export().join("from");
        fs::create_dir(&top).unwrap();
        plant(&top, 30);
        let share = server.share(version).await;
        plant_odd_things(&share, &top).await;
        let name = Name::new("colour").unwrap();
        let big = share.lookup(&open(&share, "from").await, "big").await.unwrap().handle;
        let xattrs = share.set_xattr(&big, &name, Bytes::from_static(b"red")).await.unwrap().is_some();
        assert!(xattrs || !Server::is_kernel() || version != Version::V4_2);
        fs::set_permissions(&top, fs::Permissions::from_mode(0o3771)).unwrap();
        let expected = describe(&top);

        let (from, to) =
            (open(&share, "from").await, share.make_dirs("to", &Change::default()).await.unwrap().0);
        let copied = share.copy_tree(&from, &share, &to.handle).await;
        let copied = copied.unwrap_or_else(|e| panic!("{share:?} {}", chain(&e)));
        assert_eq!(copied.skipped, 0);
        same(&describe(&server.export().join("to")), &expected);
        if xattrs {
            let copy = share.lookup(&to.handle, "big").await.unwrap().handle;
            assert_eq!(share.xattr(&copy, &name).await.unwrap().unwrap(), "red");
        }
        let sparse = fs::metadata(server.export().join("to/sparse")).unwrap();
        assert!(sparse.blocks() * 512 < 1 << 20, "{} blocks", sparse.blocks());

        // A crash left one file half written, one missing, and something else in the place of a third.
        let half = share.create(&to.handle, "big", Create::Truncate, &Change::default()).await.unwrap();
        share.write(&half.handle, 0, Bytes::from_static(b"half"), true).await.unwrap();
        share.remove(&open(&share, "to/dir 19/sub").await, "file 3").await.unwrap();
        share.remove(&to.handle, "fifo").await.unwrap();
        share.make_dirs("to/fifo/x", &Change::default()).await.unwrap();
        let again = share.copy_tree(&from, &share, &to.handle).await.unwrap();
        same(&describe(&server.export().join("to")), &expected);
        assert_eq!((again.entries, again.skipped), (3, copied.entries - 3), "{share:?}");
    }
}

#[tokio::test]
async fn a_tree_is_copied_between_servers_of_different_versions() {
    let (one, other) = (Server::start(), Server::start());
    let top = one.export().join("from");
    fs::create_dir(&top).unwrap();
    plant(&top, 30);
    let (from, to) = (one.share(Version::V3).await, other.share(Version::V4_2).await);
    from.copy_tree(&open(&from, "from").await, &to, &to.root()).await.unwrap();
    same(&describe(&other.export()), &describe(&top));
}

#[tokio::test]
async fn a_copy_that_is_tried_again_is_what_its_original_is_then() {
    for version in [Version::V3, Version::V4_2] {
        let server = Server::start();
        let top = server.export().join("from");
        for dir in ["sub/gone", "sub/becomes a file"] {
            fs::create_dir_all(top.join(dir)).unwrap();
            fs::write(top.join(dir).join("file"), dir).unwrap();
        }
        for name in ["deleted", "renamed", "sub/deleted", "sub/becomes a directory", "one", "three"] {
            fs::write(top.join(name), name).unwrap();
        }
        fs::hard_link(top.join("one"), top.join("two")).unwrap();
        fs::hard_link(top.join("three"), top.join("four")).unwrap();
        let share = server.share(version).await;
        let to = share.make_dirs("to", &Change::default()).await.unwrap().0;
        let from = open(&share, "from").await;
        share.copy_tree(&from, &share, &to.handle).await.unwrap();

        // Not behind the server's back, which would remember it.
        let sub = open(&share, "from/sub").await;
        share.remove(&from, "deleted").await.unwrap();
        share.rename(&from, "renamed", &from, "with a new name").await.unwrap();
        for name in ["deleted", "gone", "becomes a file", "becomes a directory"] {
            share.remove_tree(&sub, name).await.unwrap();
        }
        share.create(&sub, "becomes a file", Create::New, &Change::mode(0o644)).await.unwrap();
        share.make_dirs("from/sub/becomes a directory/below", &Change::mode(0o755)).await.unwrap();
        // What were two names of one file are two files, as alike as can be.
        let like = share.lookup(&from, "one").await.unwrap().attributes;
        share.remove(&from, "two").await.unwrap();
        let two = share.create(&from, "two", Create::New, &Change::mode(like.mode)).await.unwrap().handle;
        share.write(&two, 0, Bytes::from_static(b"one"), true).await.unwrap();
        let modified = Some(berth_nfs::TimeChange::At(like.modified));
        share.set_attributes(&two, &Change { modified, ..Change::default() }).await.unwrap();
        share.remove(&from, "four").await.unwrap();

        let again = share.copy_tree(&from, &share, &to.handle).await;
        again.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
        same(&describe(&server.export().join("to")), &describe(&top));
    }
}

/// The share by way of somebody who decides about requests.
async fn meddled(
    server: &Server,
    version: Version,
    fate: impl Fn(&Request<'_>) -> Fate + Send + Sync + 'static,
) -> Share {
    let mut target = server.target(version);
    target.options.port = Some(between(server.port(), fate).unwrap());
    berth_nfs::Nfs::new().share(&target).await.unwrap_or_else(|error| panic!("{}", chain(&error)))
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn what_goes_away_while_a_tree_is_copied_is_left_out() {
    for version in Version::ALL {
        let server = Server::start();
        let top = server.export().join("from");
        for dir in ["gone dir/below", "kept dir", "replaced dir"] {
            fs::create_dir_all(top.join(dir)).unwrap();
        }
        for name in ["gone", "gone dir/file", "kept", "kept dir/file", "replaced", "replaced dir/old"] {
            fs::write(top.join(name), "old").unwrap();
        }
        symlink("nowhere", top.join("gone link")).unwrap();
        fs::create_dir(server.export().join("aside")).unwrap();
        fs::write(server.export().join("aside/new"), "new").unwrap();
        fs::write(server.export().join("aside/replaced"), "replaced").unwrap();
        let (once, export) = (std::sync::Once::new(), server.export());
        // When the first content is asked for, its directory has been listed.
        let share = meddled(&server, version, move |request| {
            if matches!(request.asked(), Asked::Read | Asked::ReadLink) {
                once.call_once(|| {
                    let top = export.join("from");
                    fs::remove_file(top.join("gone")).unwrap();
                    fs::remove_file(top.join("gone link")).unwrap();
                    fs::remove_dir_all(top.join("gone dir")).unwrap();
                    fs::remove_dir_all(top.join("replaced dir")).unwrap();
                    fs::create_dir(top.join("replaced dir")).unwrap();
                    fs::rename(export.join("aside/new"), top.join("replaced dir/new")).unwrap();
                    fs::rename(export.join("aside/replaced"), top.join("replaced")).unwrap();
                });
            }
            Fate::Passed
        })
        .await;
        let from = open(&share, "from").await;
        let to = share.make_dirs("to", &Change::default()).await.unwrap().0;
        // An earlier run copied some of it.
        share.make_dirs("to/gone dir/below/more", &Change::default()).await.unwrap();
        share.create(&to.handle, "gone", Create::New, &Change::default()).await.unwrap();
        let copied = share.copy_tree(&from, &share, &to.handle).await;
        copied.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
        let copy = server.export().join("to");
        assert_eq!(names(&copy), ["gone dir", "kept", "kept dir", "replaced", "replaced dir"], "{version}");
        assert_eq!(names(&copy.join("gone dir")), Vec::<String>::new());
        assert_eq!(fs::read_to_string(copy.join("kept dir/file")).unwrap(), "old");
        assert_eq!(fs::read_to_string(copy.join("replaced")).unwrap(), "replaced");
        assert_eq!(names(&copy.join("replaced dir")), ["new"]);
    }
}

#[tokio::test]
async fn a_server_that_knows_no_handle_any_more_has_not_lost_single_files() {
    const STALE: u32 = 70;
    for version in [Version::V3, Version::V4_0] {
        let server = Server::start();
        fs::create_dir_all(server.export().join("from/sub")).unwrap();
        fs::write(server.export().join("from/sub/file"), "content").unwrap();
        let is_other = std::sync::atomic::AtomicBool::new(false);
        let share = meddled(&server, version, move |request| {
            use std::sync::atomic::Ordering::SeqCst;
            if request.asked() == Asked::Read {
                is_other.store(true, SeqCst);
            }
            if is_other.load(SeqCst) { request.failed(STALE) } else { Fate::Passed }
        })
        .await;
        let to = server.share(version).await;
        let from = open(&share, "from").await;
        let copy = to.make_dirs("to", &Change::default()).await.unwrap().0;
        let error = share.copy_tree(&from, &to, &copy.handle).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Stale, "{version}: {}", chain(&error));
    }
}
