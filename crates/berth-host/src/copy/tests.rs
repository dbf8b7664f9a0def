//! Tests of copies: made by us, checked with other tools.

use std::{
    fs::{self, File},
    io::Write as _,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink},
        unix::net::UnixListener,
    },
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{fs::Mode, io::Errno};

use super::{LINKS, can_reflink, file, fingerprint, tree};
use crate::{
    btrfs::{
        self,
        loopfs::{Bind, LoopFs, run},
    },
    path::Dir,
    usage,
};

const MIB: u64 = 1 << 20;
/// What of each entry must be the same in the copy; `find` prints times to the nanosecond.
const FIND: &str = "%P|%y|%m|%U:%G|%l|%T@\n";
/// What says nothing about a directory; reading a symbolic link counts as access to it.
const FIND_FILE: &str = "%P|%n|%s\n";
const FIND_ACCESS: &str = "%P|%A@\n";

fn shell(directory: &Path, script: &str) -> String {
    let script = format!("set -eu; cd '{}'; {script}", directory.display());
    run("bash", &["-c", &script])
}

/// A tree with everything a user may have.
fn make_tree(top: &Path) {
    fs::create_dir_all(top.join("directory/empty")).unwrap();
    fs::write(top.join("directory/file"), "content").unwrap();
    fs::hard_link(top.join("directory/file"), top.join("same file")).unwrap();
    fs::hard_link(top.join("directory/file"), top.join("directory/empty/same file")).unwrap();
    symlink("/etc", top.join("etc")).unwrap();
    symlink("directory/no such file", top.join("dangling")).unwrap();
    symlink("/usr", top.join("directory/linked link")).unwrap();
    fs::write(top.join("nothing"), "").unwrap();
    fs::write(top.join("odd \n name"), "odd").unwrap();
    let sparse = File::create(top.join("sparse")).unwrap();
    sparse.set_len(64 * MIB).unwrap();
    sparse.write_all_at(&[7; 10_000], 8 * MIB).unwrap();
    sparse.write_all_at(&[8; 5_000], 32 * MIB + 77).unwrap();
    drop(UnixListener::bind(top.join("socket")).unwrap());
    shell(
        top,
        "mkfifo -m 640 pipe; mknod null c 1 3; mknod disk b 7 77; mknod whiteout c 0 0
        ln 'directory/linked link' 'linked link'; ln pipe 'directory/pipe'
        cp /bin/true setuid; chown 1000:2000 setuid directory pipe; chown -h 11:22 etc dangling
        setfattr -n user.colour -v blue directory/file; setfattr -n user.colour -v red directory
        setfattr -n trusted.secret -v yes pipe; setfattr -h -n trusted.secret -v link etc
        setfattr -n user.big -v \"$(head -c 2000 /dev/zero | tr '\\0' x)\" nothing
        setfattr -n security.capability -v 0x0100000200040000000000000000000000000000 setuid
        setfacl -m u:1234:rwx,g:55:r,m::rwx directory/file; setfacl -m d:u:77:rwx,u:77:rx directory
        chmod 4755 setuid; chmod 3777 directory/empty; chmod 000 nothing
        touch -h -d '2001-02-03 04:05:06.123456789' dangling; touch -d '1999-01-01 00:00:00.000000001' sparse pipe
        touch -d '2033-03-03 03:03:03.333333333' directory directory/empty; touch -d '2005-05-05' .; chmod 1770 .",
    );
}

/// Compares two trees by tools that know nothing of us.
fn assert_same(source: &Path, destination: &Path) {
    let ask = |directory: &Path| {
        [
            shell(directory, &format!("find . ! -type s ! -type d ! -type l -printf '{FIND_ACCESS}' | sort")),
            shell(directory, &format!("find . ! -type s -printf '{FIND}' | sort")),
            shell(directory, &format!("find . ! -type s ! -type d -printf '{FIND_FILE}' | sort")),
            shell(directory, "find . ! -type s ! -type l -print0 | sort -z | xargs -0 getfacl --numeric"),
            shell(directory, "find . ! -type s -print0 | sort -z | xargs -0 getfattr -h -d -m - -e hex"),
            shell(directory, "find . -type f -print0 | sort -z | xargs -0 sha256sum"),
            shell(directory, "find . ! -type s -print0 | sort -z | xargs -0 stat -c '%n %t:%T'"),
        ]
    };
    // Times of access first, before anything is read.
    for (expected, found) in ask(source).iter().zip(ask(destination)) {
        assert_eq!(*expected, found);
    }
}

fn copy_between(source: &Path, destination: &Path) -> super::Copied {
    fs::create_dir(source).unwrap();
    fs::create_dir(destination).unwrap();
    make_tree(source);
    // As in a directory whose parent hands down an ACL: nothing of it may get into the copy.
    run("setfacl", &["-m", "d:u:99:rwx,u:99:rwx", destination.to_str().unwrap()]);
    let copied = tree(&Dir::open(source).unwrap(), &Dir::open(destination).unwrap()).unwrap();
    assert_same(source, destination);
    let sparse = usage::file_allocated(&destination.join("sparse")).unwrap();
    assert!(sparse < MIB, "the holes are still holes, {sparse} bytes are allocated");
    assert_eq!(copied.files, shell(source, "find . ! -type d ! -type s -printf x").len() as u64);
    assert_eq!((copied.sockets_skipped, copied.changed), (1, 0));
    assert!(!destination.join("socket").exists());
    copied
}

#[test]
fn a_copy_within_a_filesystem_has_everything_and_shares_data_where_it_can() {
    for (kind, clones) in [("ext4", false), ("xfs", true), ("btrfs", true)] {
        let filesystem = LoopFs::new(kind);
        let copied = copy_between(&filesystem.path().join("from"), &filesystem.path().join("to"));
        assert_eq!(copied.cloned, clones, "{kind}");
        assert_eq!(can_reflink(&filesystem.dir()).unwrap(), clones, "{kind}");
        let mut left = filesystem.dir().entries().unwrap();
        left.retain(|entry| entry.name != "lost+found");
        assert_eq!(left.len(), 2, "what was tried is gone: {left:?}");
        let data = shell(&filesystem.path().join("from"), "stat -c %s setuid").trim().parse::<u64>().unwrap();
        assert!((data + 15_000..data + 100_000).contains(&copied.bytes), "{kind}: {copied:?} of {data}");
    }
}

#[test]
fn a_copy_to_another_filesystem_has_everything() {
    let (from, to) = (LoopFs::new("btrfs"), LoopFs::new("ext4"));
    let copied = copy_between(&from.path().join("from"), &to.path().join("to"));
    assert!(!copied.cloned);
    let (from, to) = (LoopFs::new("xfs"), LoopFs::new("btrfs"));
    copy_between(&from.path().join("from"), &to.path().join("to"));
}

#[test]
fn links_are_copied_not_followed_and_mounts_are_left_out() {
    let holder = tempfile::tempdir().unwrap();
    let (from, to) = (holder.path().join("from"), holder.path().join("to"));
    for directory in ["from/mounted", "to", "outside"] {
        fs::create_dir_all(holder.path().join(directory)).unwrap();
    }
    fs::write(holder.path().join("outside/secret"), "secret").unwrap();
    fs::write(from.join("file mount"), "").unwrap();
    symlink(holder.path().join("outside"), from.join("link")).unwrap();
    symlink("/etc", from.join("etc")).unwrap();
    let _bound = Bind::new(&holder.path().join("outside"), &from.join("mounted"));
    let _bound_file = Bind::new(&holder.path().join("outside/secret"), &from.join("file mount"));

    tree(&Dir::open(&from).unwrap(), &Dir::open(&to).unwrap()).unwrap();
    assert_eq!(fs::read_link(to.join("etc")).unwrap(), Path::new("/etc"));
    assert_eq!(fs::read_link(to.join("link")).unwrap(), holder.path().join("outside"));
    assert_eq!(fs::read_dir(to.join("mounted")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(&to).unwrap().count(), 3);
}

#[test]
fn a_tree_deeper_than_any_path_is_copied() {
    let holder = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = Dir::open(holder.path()).unwrap();
    let (from, to) = (dir.ensure_dir("from", 0o755).unwrap(), dir.ensure_dir("to", 0o755).unwrap());
    from.create_file("file", 0o600).unwrap();
    let mut current: OwnedFd = from.as_fd().try_clone_to_owned().unwrap();
    for level in 0..5000 {
        rustix::fs::mkdirat(&current, c"directory", Mode::RWXU).unwrap();
        let flags = rustix::fs::OFlags::DIRECTORY;
        current = rustix::fs::openat(&current, c"directory", flags, Mode::empty()).unwrap();
        if level == 4000 {
            // A hard link from far below to the top.
            rustix::fs::linkat(&from, c"file", &current, c"file", rustix::fs::AtFlags::empty()).unwrap();
        }
    }
    let copied = tree(&from, &to).unwrap();
    assert_eq!(copied.files, 2);
    assert_eq!(usage::tree(&to).unwrap().inodes, 5002);
    assert_eq!(fs::metadata(to.child_path("file")).unwrap().nlink(), 2);
    // What drops the holder at the end would recurse.
    dir.remove_tree("from").unwrap();
    dir.remove_tree("to").unwrap();
}

#[test]
fn a_directory_named_like_ours_is_copied_like_any_other() {
    let holder = tempfile::tempdir().unwrap();
    let (from, to) = (holder.path().join("from"), holder.path().join("to"));
    fs::create_dir_all(from.join(LINKS)).unwrap();
    fs::create_dir(&to).unwrap();
    fs::write(from.join(LINKS).join("file"), "content").unwrap();
    fs::hard_link(from.join(LINKS).join("file"), from.join("again")).unwrap();
    tree(&Dir::open(&from).unwrap(), &Dir::open(&to).unwrap()).unwrap();
    assert_same(&from, &to);
}

#[test]
fn a_tree_is_not_copied_into_itself() {
    let holder = tempfile::tempdir().unwrap();
    let dir = Dir::open(holder.path()).unwrap();
    let inside = dir.ensure_dir("inside", 0o755).unwrap();
    let error = tree(&dir, &inside).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::INVAL.raw_os_error()));
}

#[test]
fn a_copy_of_a_tree_in_use_succeeds_and_says_what_changed() {
    let holder = tempfile::tempdir().unwrap();
    let (from, to) = (holder.path().join("from"), holder.path().join("to"));
    fs::create_dir(&from).unwrap();
    let log = from.join("log");
    fs::write(&log, vec![1; 4 << 20]).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut log = File::options().append(true).open(&log).unwrap();
            while !stop.load(Ordering::Relaxed) {
                log.write_all(b"more").unwrap();
                for name in ["a", "b", "c"] {
                    fs::create_dir_all(from.join("comes and goes")).unwrap();
                    fs::write(from.join("comes and goes").join(name), "content").unwrap();
                }
                fs::remove_dir_all(from.join("comes and goes")).unwrap();
            }
        });
        let mut changed = 0;
        for _ in 0..20 {
            fs::create_dir(&to).unwrap();
            let copied = tree(&Dir::open(&from).unwrap(), &Dir::open(&to).unwrap());
            fs::remove_dir_all(&to).unwrap();
            changed += copied.as_ref().map_or(0, |copied| copied.changed);
            if copied.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            copied.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        assert!(changed > 0, "the log grew all the time");
    });
}

#[test]
fn a_fingerprint_differs_after_every_change_and_nothing_else() {
    let holder = tempfile::tempdir().unwrap();
    let top = holder.path().join("top");
    fs::create_dir(&top).unwrap();
    make_tree(&top);
    let dir = Dir::open(&top).unwrap();
    let mut last = fingerprint(&dir).unwrap();
    fs::read(top.join("directory/file")).unwrap();
    assert_eq!(fingerprint(&dir).unwrap(), last);
    for change in [
        "touch new",
        "mv new renamed",
        "mv renamed directory/renamed",
        "rm directory/renamed",
        "printf x >> directory/file",
        "printf y | dd of=directory/file conv=notrunc status=none",
        "chmod 700 directory/empty",
        "chown 5 pipe",
        "setfattr -n user.colour -v green directory/file",
        "ln -sfn /var etc",
        "chmod 755 .",
    ] {
        shell(&top, change);
        let now = fingerprint(&dir).unwrap();
        assert_ne!(now, last, "{change}");
        last = now;
    }
    assert_eq!(fingerprint(&Dir::open(&top).unwrap()).unwrap(), last);
}

#[test]
fn an_image_is_copied_with_its_holes_and_its_mode() {
    for (kind, clones) in [("ext4", false), ("xfs", true), ("btrfs", true)] {
        let filesystem = LoopFs::new(kind);
        let (from, to) = (filesystem.path().join("from"), filesystem.path().join("to"));
        let image = File::create(&from).unwrap();
        image.set_len(256 * MIB).unwrap();
        image.write_all_at(&vec![3; 1 << 20], 100 * MIB).unwrap();
        fs::set_permissions(&from, fs::Permissions::from_mode(0o640)).unwrap();

        let copied = file(&from, &to).unwrap();
        assert_eq!(
            (copied.files, copied.bytes, copied.cloned, copied.changed),
            (1, MIB, clones, 0),
            "{kind}"
        );
        run("cmp", &[from.to_str().unwrap(), to.to_str().unwrap()]);
        assert_eq!(usage::file_allocated(&to).unwrap(), MIB, "{kind}");
        assert_eq!(fs::metadata(&to).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(file(&from, &to).unwrap_err().errno(), Some(Errno::EXIST.raw_os_error()));
        run("cmp", &[from.to_str().unwrap(), to.to_str().unwrap()]);
    }
}

#[test]
fn an_image_copied_to_another_filesystem_keeps_its_holes_and_a_failed_copy_leaves_nothing() {
    let (from, to) = (LoopFs::new("xfs"), LoopFs::new("ext4"));
    let image = from.path().join("image");
    let sparse = File::create(&image).unwrap();
    sparse.set_len(512 * MIB).unwrap();
    sparse.write_all_at(&vec![3; 3 << 20], 300 * MIB).unwrap();
    let copied = file(&image, &to.path().join("image")).unwrap();
    assert_eq!((copied.bytes, copied.cloned), (3 * MIB, false));
    run("cmp", &[image.to_str().unwrap(), to.path().join("image").to_str().unwrap()]);
    assert!(usage::file_allocated(&to.path().join("image")).unwrap() < 4 * MIB);

    let full = LoopFs::new("btrfs");
    btrfs::enable_quota(&full.path()).unwrap();
    btrfs::create_subvolume(&full.dir(), "small").unwrap();
    let small = full.dir().dir("small").unwrap();
    btrfs::set_limit(&small, MIB).unwrap();
    let error = file(&image, &small.child_path("image")).unwrap_err();
    assert_eq!(error.errno(), Some(Errno::DQUOT.raw_os_error()));
    assert_eq!(small.entries().unwrap(), []);
}
