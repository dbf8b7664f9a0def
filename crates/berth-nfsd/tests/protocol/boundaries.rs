//! Handles that stay good, and what no handle, name or path leads to.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use berth_nfs::{Change, v3::procedure, v3::wire};
use berth_nfsd::Handles;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::world::{Client, World, arguments};

#[test]
fn a_handle_means_the_same_file_over_restarts() {
    for handles in [Handles::Kernel, Handles::Search] {
        let mut world = World::with(|options| options.handles = Some(handles));
        let mut client = world.client(0);
        let top = client.root();
        let dir = client.make_directory(&top, "dir", 0o755).unwrap().handle;
        let deep = client.make_directory(&dir, "deep", 0o755).unwrap().handle;
        let file = client.create(&deep, "file", 0o644).unwrap().handle;
        client.write(&file, 0, b"content", 2).unwrap();
        let gone = client.create(&deep, "gone", 0o644).unwrap().handle;
        client.status(procedure::LINK, |to| {
            to.opaque(&file).opaque(&top).opaque(b"linked");
        });
        world.restart();
        let mut client = world.client(0);
        assert_eq!(client.root(), top);
        assert_eq!(client.read(&file, 0, 10).unwrap().0, b"content");
        // Moved by a client, and by somebody on the server's disk while no server ran.
        let status = client.status(procedure::RENAME, |to| {
            to.opaque(&top).opaque(b"dir").opaque(&top).opaque(b"other");
        });
        assert_eq!(status, 0);
        assert_eq!(client.read(&file, 0, 10).unwrap().0, b"content");
        fs::remove_file(world.export().join("linked")).unwrap();
        assert_eq!(client.read(&file, 0, 10).unwrap().0, b"content");
        fs::remove_file(world.export().join("other/deep/gone")).unwrap();
        fs::rename(world.export().join("other/deep"), world.export().join("shallow")).unwrap();
        world.restart();
        let mut client = world.client(0);
        assert_eq!(client.read(&file, 0, 10).unwrap().0, b"content", "{handles:?}");
        assert_eq!(
            client.attributes(&deep).unwrap().fileid,
            client.lookup(&top, "shallow").unwrap().of.fileid
        );
        assert_eq!(client.attributes(&gone).unwrap_err(), 70);
        // A file with the number of one that is gone is another file.
        for number in 0..50 {
            client.create(&deep, &format!("new-{number}"), 0o644).unwrap();
        }
        assert_eq!(client.attributes(&gone).unwrap_err(), 70);
    }
}

#[test]
fn handles_of_another_key_or_kind_are_stale() {
    let mut world = World::with(|options| options.handles = Some(Handles::Kernel));
    let mut client = world.client(0);
    let top = client.root();
    world.set(|options| options.handles = Some(Handles::Search));
    let mut client = world.client(0);
    assert_eq!(client.attributes(&top).unwrap_err(), 70);
    world.set(|options| options.handles = None);
    let mut client = world.client(0);
    assert!(client.attributes(&top).is_ok());
    fs::remove_dir_all(world.outside_export("state")).unwrap();
    world.restart();
    let mut client = world.client(0);
    assert_eq!(client.attributes(&top).unwrap_err(), 70);
}

/// Fails unless nothing that is outside is reached.
fn stays_inside(world: &World, client: &mut Client) {
    let top = client.root();
    let export = world.export();
    fs::create_dir(world.outside_export("outside")).unwrap();
    fs::write(world.outside_export("outside/secret"), "secret").unwrap();
    symlink(world.outside_export("outside"), export.join("absolute")).unwrap();
    symlink("../outside", export.join("relative")).unwrap();
    symlink("/etc/passwd", export.join("passwd")).unwrap();
    for name in ["absolute", "relative"] {
        let link = client.lookup(&top, name).unwrap().handle;
        assert_eq!(client.lookup(&link, "secret").err(), Some(20), "{name}");
        assert_eq!(client.create(&link, "new", 0o644).err(), Some(20));
        assert_eq!(client.mount(&format!("/export/{name}")).err(), Some(20));
    }
    let link = client.lookup(&top, "passwd").unwrap().handle;
    assert_eq!(client.read(&link, 0, 10).unwrap_err(), 22);
    assert_eq!(client.write(&link, 0, b"x", 0).unwrap_err(), 22);
    let change = Change { mode: Some(0o777), size: Some(0), ..Change::default() };
    let cut = client.make(procedure::CREATE, &top, "passwd", |to| wire::change(to.u32(0), &change));
    assert_eq!(cut.err(), Some(17));
    client.status(procedure::SETATTR, |to| {
        wire::change(to.opaque(&link), &Change::mode(0o777));
        to.bool(false);
    });
    assert_ne!(fs::metadata("/etc/passwd").unwrap().permissions().mode() & 0o777, 0o777);
    // Above the top is the top.
    assert_eq!(client.lookup(&top, "..").unwrap().handle, top);
    assert_eq!(client.lookup(&top, ".").unwrap().handle, top);
    for (name, status) in [("../outside", 22), ("a/b", 22), ("", 22), ("/", 22), ("x\0y", 22)] {
        assert_eq!(client.lookup(&top, name).err(), Some(status), "{name:?}");
        assert_eq!(client.make_directory(&top, name, 0o755).err(), Some(status), "{name:?}");
    }
    assert_eq!(client.lookup(&top, &"x".repeat(256)).err(), Some(63));
    for path in ["/", "/export/../outside", "/exports", "export", "", "/etc", "/export/none\0"] {
        let refused = client.mount(path).unwrap_err();
        assert!(matches!(refused, 13 | 10006 | 2), "{path:?}: {refused}");
    }
    assert_eq!(client.mount(export.to_str().unwrap()).unwrap(), top);
}

#[test]
fn nothing_outside_the_directory_is_reached() {
    for handles in [Handles::Kernel, Handles::Search] {
        let world = World::with(|options| options.handles = Some(handles));
        let mut client = world.client(0);
        stays_inside(&world, &mut client);
        // What somebody moves out of the directory is out.
        let top = client.root();
        let dir = client.make_directory(&top, "dir", 0o755).unwrap().handle;
        let below = client.make_directory(&dir, "below", 0o755).unwrap().handle;
        fs::rename(world.export().join("dir"), world.outside_export("moved")).unwrap();
        for handle in [&dir, &below] {
            assert_eq!(client.attributes(handle).unwrap_err(), 70, "{handles:?}");
            assert_eq!(client.lookup(handle, "..").err(), Some(70));
            assert_eq!(client.create(handle, "new", 0o644).err(), Some(70));
        }
        assert_eq!(fs::read_dir(world.outside_export("moved/below")).unwrap().count(), 0);
    }
}

#[test]
fn another_filesystem_in_the_directory_is_not_entered() {
    for handles in [Handles::Kernel, Handles::Search] {
        let world = World::with(|options| options.handles = Some(handles));
        let mut client = world.client(0);
        let top = client.root();
        let at = world.export().join("mounted");
        fs::create_dir(&at).unwrap();
        rustix::mount::mount("none", &at, "tmpfs", MountFlags::empty(), None).unwrap();
        fs::write(at.join("secret"), "secret").unwrap();
        let refused = client.lookup(&top, "mounted").err();
        let removed = client.status(procedure::RMDIR, |to| {
            to.opaque(&top).opaque(b"mounted");
        });
        let (status, _) = client.nfs(
            procedure::READDIRPLUS,
            arguments(|to| {
                to.opaque(&top).u64(0).fixed(&[0; 8]).u32(4096).u32(32768);
            }),
        );
        let by_path = client.mount("/export/mounted").err();
        rustix::mount::unmount(&at, UnmountFlags::DETACH).unwrap();
        assert_eq!((refused, removed, status, by_path), (Some(13), 13, 0, Some(13)), "{handles:?}");
        assert!(client.lookup(&top, "mounted").is_ok());
    }
}
