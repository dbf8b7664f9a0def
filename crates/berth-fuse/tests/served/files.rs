//! What programs do to files.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::{
        FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, symlink,
    },
    path::Path,
    time::{Duration, SystemTime},
};

use rustix::{
    fs::{CWD, FileType, FlockOperation, Mode, RenameFlags, XattrFlags},
    io::Errno,
};

use crate::world::{Mounted, PATIENCE, Server, command, until};

const VERSIONS: [&str; 4] = ["3", "4.0", "4.1", "4.2"];

fn each_version(test: impl Fn(&Server, &Mounted)) {
    let server = Server::start(&[]);
    for version in VERSIONS {
        eprintln!("version {version}");
        let mounted = server.mount(version, "");
        test(&server, &mounted);
        // Not behind the server's back, which would remember it.
        for entry in fs::read_dir(mounted.path("")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        }
    }
}

#[test]
fn a_program_is_started_while_a_file_is_open() {
    each_version(|_, mounted| {
        // Not handed down, it is closed by the kernel in the middle of the start.
        let mut open = File::create(mounted.path("file")).unwrap();
        open.write_all(b"content").unwrap();
        let (tell, reported) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(command("true").status()));
        assert!(reported.recv_timeout(PATIENCE).expect("it starts").unwrap().success());
    });
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn content_is_written_read_cut_and_added_to() {
    each_version(|server, mounted| {
        let path = mounted.path("file");
        let content: Vec<u8> = (0..5_000_000_u32).map(|n| (n * 7 % 251) as u8).collect();
        fs::write(&path, &content).unwrap();
        assert!(fs::read(server.export().join("file")).unwrap() == content, "it is on the server's disk");
        assert!(fs::read(&path).unwrap() == content);
        let mut file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        file.write_all_at(b"middle", 2_500_000).unwrap();
        file.set_len(2_500_003).unwrap();
        file.seek(SeekFrom::Start(2_499_998)).unwrap();
        let mut end = Vec::new();
        file.read_to_end(&mut end).unwrap();
        assert_eq!(end, [&content[2_499_998..2_500_000], b"mid"].concat());
        file.set_len(3_000_000).unwrap();
        file.sync_all().unwrap();
        drop(file);
        assert_eq!(fs::metadata(&path).unwrap().len(), 3_000_000);
        let mut more = OpenOptions::new().append(true).open(&path).unwrap();
        more.write_all(b"one").unwrap();
        more.write_all(b"two").unwrap();
        drop(more);
        let mut synced = OpenOptions::new().write(true).custom_flags(0o4_010_000).open(&path).unwrap();
        synced.write_all(b"first").unwrap();
        drop(synced);
        let there = fs::read(server.export().join("file")).unwrap();
        assert!(there.starts_with(b"first") && there.ends_with(b"\0onetwo"));
    });
}

#[test]
fn names_are_made_moved_and_removed() {
    each_version(|server, mounted| {
        fs::create_dir(mounted.path("dir")).unwrap();
        assert_eq!(fs::create_dir(mounted.path("dir")).unwrap_err().kind(), ErrorKind::AlreadyExists);
        fs::write(mounted.path("dir/a"), "a").unwrap();
        fs::hard_link(mounted.path("dir/a"), mounted.path("b")).unwrap();
        let (a, b) = (fs::metadata(mounted.path("dir/a")).unwrap(), fs::metadata(mounted.path("b")).unwrap());
        assert_eq!((a.ino(), a.nlink()), (b.ino(), 2));
        symlink("dir/a", mounted.path("link")).unwrap();
        assert_eq!(fs::read_link(mounted.path("link")).unwrap(), Path::new("dir/a"));
        assert_eq!(fs::read_to_string(mounted.path("link")).unwrap(), "a");
        rustix::fs::mknodat(CWD, mounted.path("fifo"), FileType::Fifo, Mode::from_raw_mode(0o640), 0)
            .unwrap();
        let fifo = fs::symlink_metadata(mounted.path("fifo")).unwrap();
        assert!(fifo.file_type().is_fifo() && fifo.mode() & 0o777 == 0o640);
        assert_eq!(fs::remove_dir(mounted.path("dir")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
        fs::rename(mounted.path("dir/a"), mounted.path("c")).unwrap();
        fs::write(mounted.path("other"), "other").unwrap();
        fs::rename(mounted.path("other"), mounted.path("c")).unwrap();
        assert_eq!(fs::read_to_string(mounted.path("c")).unwrap(), "other");
        fs::remove_dir(mounted.path("dir")).unwrap();
        fs::remove_file(mounted.path("link")).unwrap();
        // A child of another test may have what was replaced open until it runs its program.
        until("nothing else is left", || names(&server.export()) == ["b", "c", "fifo"]);
        assert_eq!(fs::metadata(mounted.path("none")).unwrap_err().kind(), ErrorKind::NotFound);
        let long = fs::write(mounted.path(&"x".repeat(256)), "").unwrap_err();
        assert_eq!(long.raw_os_error(), Some(Errno::NAMETOOLONG.raw_os_error()));
        let exclusive = OpenOptions::new().write(true).create_new(true).open(mounted.path("c"));
        assert_eq!(exclusive.unwrap_err().kind(), ErrorKind::AlreadyExists);
    });
}

#[test]
fn a_rename_that_must_not_replace_does_not() {
    each_version(|_, mounted| {
        let rename = |from: &str, to: &str, flags| {
            rustix::fs::renameat_with(CWD, mounted.path(from), CWD, mounted.path(to), flags)
        };
        for (name, make) in [("file", false), ("dir", true)] {
            let other = format!("other-{name}");
            for path in [mounted.path(name), mounted.path(&other)] {
                if make { fs::create_dir(path) } else { fs::write(path, name) }.unwrap();
            }
            assert_eq!(rename(name, &other, RenameFlags::NOREPLACE), Err(Errno::EXIST));
            assert_eq!(rename(name, "new", RenameFlags::NOREPLACE), Ok(()));
            assert!(!mounted.path(name).exists() && mounted.path("new").exists());
            assert_eq!(rename("new", &other, RenameFlags::EXCHANGE), Err(Errno::INVAL));
            assert_eq!(rename("new", &other, RenameFlags::empty()), Ok(()));
        }
    });
}

#[test]
fn a_file_that_is_removed_while_open_stays_until_it_is_closed() {
    each_version(|server, mounted| {
        let open = |name: &str| {
            let mut file = OpenOptions::new()
                .create(true)
                .truncate(true)
                .read(true)
                .write(true)
                .open(mounted.path(name))
                .unwrap();
            file.write_all(name.as_bytes()).unwrap();
            file
        };
        let (removed, replaced) = (open("removed"), open("replaced"));
        fs::remove_file(mounted.path("removed")).unwrap();
        fs::write(mounted.path("new"), "new").unwrap();
        fs::rename(mounted.path("new"), mounted.path("replaced")).unwrap();
        assert!(!mounted.path("removed").exists());
        assert_eq!(fs::read_to_string(mounted.path("replaced")).unwrap(), "new");
        for (mut file, content) in [(removed, "removed and more"), (replaced, "replaced and more")] {
            file.write_all(b" and more").unwrap();
            file.rewind().unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, content);
        }
        until("hidden files go away at the last close", || names(&server.export()) == ["replaced"]);
    });
}

#[test]
fn attributes_are_set_and_told() {
    each_version(|server, mounted| {
        let path = mounted.path("file");
        let file = OpenOptions::new().write(true).create_new(true).mode(0o444).open(&path).unwrap();
        // Whoever creates a file may write it, whatever its mode.
        file.write_all_at(b"content", 0).unwrap();
        drop(file);
        fs::set_permissions(&path, Permissions::from_mode(0o4751)).unwrap();
        std::os::unix::fs::chown(&path, Some(1234), Some(4321)).unwrap();
        let (read, changed) = (
            SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789),
            SystemTime::UNIX_EPOCH + Duration::new(1_100_000_000, 987_654_321),
        );
        let times = fs::FileTimes::new().set_accessed(read).set_modified(changed);
        OpenOptions::new().write(true).open(&path).unwrap().set_times(times).unwrap();
        for path in [&path, &server.export().join("file")] {
            let is = fs::metadata(path).unwrap();
            assert_eq!((is.uid(), is.gid(), is.len()), (1234, 4321, 7), "{}", path.display());
            assert_eq!((is.accessed().unwrap(), is.modified().unwrap()), (read, changed));
        }
        let space = rustix::fs::statvfs(mounted.path("")).unwrap();
        assert!(space.f_blocks > 0 && space.f_bavail <= space.f_blocks && space.f_files > 0);
    });
}

#[test]
fn a_large_directory_is_listed_whole() {
    each_version(|server, mounted| {
        let dir = server.export().join("large");
        fs::create_dir(&dir).unwrap();
        let mut expected: Vec<_> = (0..3_000).map(|n| format!("a file with the number {n}")).collect();
        for name in &expected {
            fs::write(dir.join(name), "").unwrap();
        }
        expected.sort();
        assert_eq!(names(&mounted.path("large")), expected);
        // With attributes, as `ls -l` wants them.
        let sizes = fs::read_dir(mounted.path("large"))
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len());
        assert_eq!(sizes.sum::<u64>(), 0);
        fs::write(mounted.path("large/new"), "").unwrap();
        assert_eq!(names(&mounted.path("large")).len(), expected.len() + 1);
    });
}

#[test]
fn extended_attributes_are_there_where_the_server_has_them() {
    each_version(|_, mounted| {
        let path = mounted.path("file");
        fs::write(&path, "").unwrap();
        let set = |flags| rustix::fs::setxattr(&path, "user.colour", b"blue", flags);
        if let Err(errno) = set(XattrFlags::empty()) {
            // This server has none, and says so.
            assert_eq!(errno, Errno::OPNOTSUPP);
            return;
        }
        let mut value = [0; 16];
        assert_eq!(rustix::fs::getxattr(&path, "user.colour", &mut value[..]), Ok(4));
        assert_eq!(set(XattrFlags::CREATE), Err(Errno::EXIST));
        rustix::fs::removexattr(&path, "user.colour").unwrap();
        assert_eq!(set(XattrFlags::REPLACE), Err(Errno::NODATA));
    });
}

#[test]
fn whoever_opens_a_file_sees_what_another_machine_has_closed() {
    let server = Server::start(&[]);
    for version in ["3", "4.2"] {
        let (one, other) = (server.mount(version, ""), server.mount(version, ""));
        for round in 0..20 {
            let content = format!("round {round} {}", "x".repeat(round * 1000));
            fs::write(one.path("file"), &content).unwrap();
            assert_eq!(fs::read_to_string(other.path("file")).unwrap(), content);
            fs::write(other.path("answer"), &content).unwrap();
            assert_eq!(fs::read_to_string(one.path("answer")).unwrap(), content);
        }
    }
}

#[test]
fn locks_hold_on_this_machine() {
    let server = Server::start(&[]);
    let mounted = server.mount("4.1", "");
    let (one, other) =
        (File::create(mounted.path("file")).unwrap(), File::open(mounted.path("file")).unwrap());
    rustix::fs::flock(&one, FlockOperation::LockExclusive).unwrap();
    assert_eq!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared), Err(Errno::AGAIN));
    rustix::fs::flock(&one, FlockOperation::Unlock).unwrap();
    rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared).unwrap();
}
