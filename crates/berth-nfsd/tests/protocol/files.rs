//! What files hold and are, as the caller may have it.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};

use berth_nfs::{Change, FileKind, Time, TimeChange, v3::procedure, v3::wire};

use crate::world::{World, arguments, changed};

#[test]
fn each_call_is_done_as_its_user() {
    let world = World::start();
    let (mut root, mut one, mut other) = (world.client(0), world.client(2001), world.client(2002));
    let top = root.root();
    // The mode is what was asked for, whatever the mask of the server is.
    let file = one.create(&top, "file", 0o666).unwrap();
    assert_eq!((file.of.uid, file.of.gid, file.of.mode), (2001, 2001, 0o666));
    assert_eq!(
        one.status(procedure::SETATTR, |to| {
            wire::change(to.opaque(&file.handle), &Change::mode(0o600));
            to.bool(false);
        }),
        0
    );
    one.write(&file.handle, 0, b"secret", 2).unwrap();
    assert_eq!(one.read(&file.handle, 0, 100).unwrap(), (b"secret".to_vec(), true));
    assert_eq!(other.read(&file.handle, 0, 100).unwrap_err(), 13);
    assert_eq!(other.write(&file.handle, 0, b"x", 0).unwrap_err(), 13);
    // Not the owner: neither mode nor owner can be changed.
    for change in [Change::mode(0o777), Change { uid: Some(2002), ..Change::default() }] {
        let status = other.status(procedure::SETATTR, |to| {
            wire::change(to.opaque(&file.handle), &change);
            to.bool(false);
        });
        assert_eq!(status, 1, "{change:?}");
    }
    // A further group has rights, and what is made in a directory with the setgid bit is the group's.
    let shared = world.export().join("shared");
    fs::create_dir(&shared).unwrap();
    chown(&shared, Some(0), Some(3001)).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o2770)).unwrap();
    let shared = root.lookup(&top, "shared").unwrap().handle;
    assert_eq!(other.create(&shared, "file", 0o644).err(), Some(13));
    other.groups = vec![3000, 3001];
    let made = other.create(&shared, "file", 0o644).unwrap();
    assert_eq!((made.of.uid, made.of.gid), (2002, 3001));
    let made = other.make_directory(&shared, "dir", 0o755).unwrap();
    assert_eq!((made.of.gid, made.of.mode), (3001, 0o2755));
    // Nobody can be -1, who would be root.
    other.uid = u32::MAX;
    assert_eq!(other.create(&shared, "odd", 0o644).err(), Some(22));
    assert!(!world.export().join("shared/odd").exists());
}

#[test]
fn rights_are_those_of_the_kernel() {
    let world = World::start();
    let (mut root, mut user) = (world.client(0), world.client(2001));
    let top = root.root();
    let file = root.create(&top, "file", 0o754).unwrap().handle;
    let granted = |client: &mut crate::world::Client, handle: &[u8]| {
        let (status, mut results) = client.nfs(
            procedure::ACCESS,
            arguments(|to| {
                to.opaque(handle).u32(0x3f);
            }),
        );
        assert_eq!(status, 0);
        wire::maybe_attributes(&mut results).unwrap().unwrap();
        results.u32().unwrap()
    };
    assert_eq!(granted(&mut root, &file), 0x01 | 0x04 | 0x08 | 0x20);
    assert_eq!(granted(&mut user, &file), 0x01);
    assert_eq!(granted(&mut user, &top), 0x1f);
    user.groups = vec![0];
    assert_eq!(granted(&mut user, &file), 0x01 | 0x20);
    // The owner has a file that was opened before its mode changed, and who may execute a file may have it read.
    let own = user.create(&top, "own", 0o000).unwrap().handle;
    user.write(&own, 0, b"content", 0).unwrap();
    assert_eq!(user.read(&own, 0, 10).unwrap().0, b"content");
    let mut other = world.client(2002);
    assert_eq!(other.read(&own, 0, 10).unwrap_err(), 13);
    fs::set_permissions(world.export().join("own"), fs::Permissions::from_mode(0o711)).unwrap();
    assert_eq!(other.read(&own, 0, 10).unwrap().0, b"content");
    assert_eq!(other.write(&own, 0, b"x", 0).unwrap_err(), 13);
}

#[test]
fn root_is_nobody_where_it_is_to_be() {
    let world = World::with(|options| options.squash_root = true);
    let mut root = world.client(0);
    let top = root.root();
    let made = root.create(&top, "file", 0o600).unwrap();
    assert_eq!((made.of.uid, made.of.gid), (65534, 65534));
    let secret = world.export().join("secret");
    fs::write(&secret, "mine").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let found = root.lookup(&top, "secret").unwrap();
    assert_eq!(root.read(&found.handle, 0, 10).unwrap_err(), 13);
}

#[test]
fn a_change_says_what_was_before_and_what_is_after() {
    let world = World::start();
    let mut client = world.client(0);
    let top = client.root();
    let file = client.create(&top, "file", 0o644).unwrap();
    let set = |client: &mut crate::world::Client, change: &Change, guard: Option<Time>| {
        let (status, mut results) = client.nfs(
            procedure::SETATTR,
            arguments(|to| {
                wire::change(to.opaque(&file.handle), change);
                to.bool(guard.is_some());
                if let Some(guard) = guard {
                    wire::write_time(to, guard);
                }
            }),
        );
        (status, changed(&mut results))
    };
    let size = |size| Change { size: Some(size), ..Change::default() };
    let before = client.attributes(&file.handle).unwrap();
    let (status, (was, is)) = set(&mut client, &size(5000), None);
    assert_eq!(status, 0);
    assert_eq!(was.unwrap(), (0, before.modified.nanoseconds, before.changed.nanoseconds));
    assert_eq!(is.as_ref().unwrap().size, 5000);
    assert_eq!(is, client.attributes(&file.handle).ok());
    // A guard is what the time of the last change must be.
    assert_eq!(set(&mut client, &size(7), Some(before.changed)).0, 10002);
    assert_eq!(client.attributes(&file.handle).unwrap().size, 5000);
    assert_eq!(set(&mut client, &size(7), Some(is.unwrap().changed)).0, 0);
    let at = |seconds| Some(TimeChange::At(Time { seconds, nanoseconds: 7 }));
    let times = Change { accessed: at(1), modified: at(2_000_000_000), ..Change::default() };
    let (_, (_, is)) = set(&mut client, &times, None);
    let is = is.unwrap();
    assert_eq!((is.accessed.seconds, is.modified.seconds, is.modified.nanoseconds), (1, 2_000_000_000, 7));
    assert_eq!(set(&mut client, &size(1 << 63), None).0, 27);
}

#[test]
fn what_was_written_is_there_and_a_restart_shows() {
    let mut world = World::with(|options| options.is_asynchronous = false);
    let mut client = world.client(0);
    let top = client.root();
    let file = client.create(&top, "file", 0o644).unwrap().handle;
    let data: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
    let verifier = client.write(&file, 10, &data, 0).unwrap();
    assert_eq!(client.write(&file, 0, b"0123456789", 2).unwrap(), verifier);
    let commit = |client: &mut crate::world::Client| {
        let (status, mut results) = client.nfs(
            procedure::COMMIT,
            arguments(|to| {
                to.opaque(&file).u64(0).u32(0);
            }),
        );
        assert_eq!(status, 0);
        let (before, after) = changed(&mut results);
        assert_eq!(before.unwrap().0, after.unwrap().size);
        results.fixed::<8>().unwrap()
    };
    assert_eq!(commit(&mut client), verifier);
    assert!(fs::read(world.export().join("file")).unwrap()[10..] == data);
    let (read, end) = client.read(&file, 299_999, 1 << 30).unwrap();
    assert!(read == data[299_989..] && end);
    assert_eq!(client.read(&file, 5, 5).unwrap(), (b"56789".to_vec(), false));
    assert_eq!(client.read(&file, 1 << 40, 5).unwrap(), (Vec::new(), true));
    assert_eq!(client.write(&file, u64::MAX - 2, b"x", 0).unwrap_err(), 27);
    world.restart();
    let mut client = world.client(0);
    // The handle is good, and the verifier says that what was not committed may be lost.
    assert_ne!(commit(&mut client), verifier);
    assert_eq!(client.read(&file, 0, 10).unwrap().0, b"0123456789");
    let top = client.root();
    assert_eq!(client.read(&top, 0, 10).unwrap_err(), 21);
    let fifo =
        client.make(procedure::MKNOD, &top, "fifo", |to| wire::change(to.u32(7), &Change::mode(0o644)));
    assert_eq!(client.read(&fifo.unwrap().handle, 0, 10).unwrap_err(), 22);
}

#[test]
fn special_files_are_made_by_whom_the_kernel_lets() {
    let world = World::start();
    let (mut root, mut user) = (world.client(0), world.client(2001));
    let top = root.root();
    let node = |client: &mut crate::world::Client, name: &str, kind: u32, device: Option<(u32, u32)>| {
        client.make(procedure::MKNOD, &top, name, |to| {
            wire::change(to.u32(kind), &Change::mode(0o640));
            if let Some((major, minor)) = device {
                to.u32(major).u32(minor);
            }
        })
    };
    let device = node(&mut root, "null", 4, Some((1, 3))).unwrap().of;
    assert_eq!((device.kind, device.device, device.mode), (FileKind::Character, (1, 3), 0o640));
    assert_eq!(node(&mut root, "disk", 3, Some((7, 9))).unwrap().of.kind, FileKind::Block);
    assert_eq!(node(&mut user, "disk2", 3, Some((7, 9))).err(), Some(1));
    assert_eq!(node(&mut root, "disk3", 3, Some((1 << 20, 0))).err(), Some(22));
    assert_eq!(node(&mut user, "socket", 6, None).unwrap().of.kind, FileKind::Socket);
    assert_eq!(node(&mut user, "fifo", 7, None).unwrap().of.kind, FileKind::Fifo);
    assert_eq!(fs::metadata(world.export().join("null")).unwrap().rdev(), rustix::fs::makedev(1, 3));
    // A regular file is none of these.
    let status = root.status(procedure::MKNOD, |to| {
        to.opaque(&top).opaque(b"file").u32(1);
    });
    assert_eq!(status, 10007);
}
