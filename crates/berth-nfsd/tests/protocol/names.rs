//! What directories hold, and how it is listed.

use std::{collections::BTreeMap, fs};

use berth_nfs::{Change, FileKind, v3::PROGRAM, v3::procedure, v3::wire};
use berth_nfsd::Handles;

use crate::world::{Client, World, arguments, changed};

#[test]
fn a_file_is_created_once_by_whoever_created_it() {
    let world = World::start();
    let mut client = world.client(2001);
    let top = client.root();
    let exclusive = |client: &mut Client, verifier: &[u8; 8]| {
        client.make(procedure::CREATE, &top, "file", |to| {
            to.u32(2).fixed(verifier);
        })
    };
    let first = exclusive(&mut client, b"\xff\x01\x02\x03\xf4\x05\x06\x07").unwrap();
    assert_eq!(exclusive(&mut client, b"\xff\x01\x02\x03\xf4\x05\x06\x07").unwrap().handle, first.handle);
    assert_eq!(exclusive(&mut client, b"\xff\x01\x02\x03\xf4\x05\x06\x08").err(), Some(17));
    assert_eq!(client.create(&top, "file", 0o644).err(), Some(17));
    // One that is there may be used, and cut.
    client.write(&first.handle, 0, b"content", 0).unwrap();
    let unchecked = |client: &mut Client, size: Option<u64>| {
        let change = Change { size, mode: Some(0o600), ..Change::default() };
        client.make(procedure::CREATE, &top, "file", |to| wire::change(to.u32(0), &change))
    };
    assert_eq!(unchecked(&mut client, None).unwrap().of.size, 7);
    assert_eq!(unchecked(&mut client, Some(0)).unwrap().of.size, 0);
    client.make_directory(&top, "dir", 0o755).unwrap();
    let change = Change::default();
    assert_eq!(
        client.make(procedure::CREATE, &top, "dir", |to| wire::change(to.u32(0), &change)).err(),
        Some(17)
    );
}

#[test]
fn names_are_made_linked_moved_and_removed() {
    let world = World::start();
    let mut client = world.client(0);
    let top = client.root();
    let dir = client.make_directory(&top, "dir", 0o755).unwrap().handle;
    let file = client.create(&top, "file", 0o644).unwrap();
    let before = client.attributes(&dir).unwrap();
    let (status, mut results) = client.nfs(
        procedure::LINK,
        arguments(|to| {
            to.opaque(&file.handle).opaque(&dir).opaque(b"linked");
        }),
    );
    assert_eq!(status, 0);
    assert_eq!(wire::maybe_attributes(&mut results).unwrap().unwrap().links, 2);
    let (was, is) = changed(&mut results);
    assert_eq!(was.unwrap(), (before.size, before.modified.nanoseconds, before.changed.nanoseconds));
    assert_eq!(is, client.attributes(&dir).ok());
    assert_eq!(client.lookup(&dir, "linked").unwrap().handle, file.handle);
    let rename = |client: &mut Client, from: (&[u8], &str), to: (&[u8], &str)| {
        client.status(procedure::RENAME, |args| {
            args.opaque(from.0).opaque(from.1.as_bytes()).opaque(to.0).opaque(to.1.as_bytes());
        })
    };
    assert_eq!(rename(&mut client, (&top, "file"), (&dir, "moved")), 0);
    assert_eq!(rename(&mut client, (&top, "file"), (&dir, "moved")), 2);
    assert_eq!(rename(&mut client, (&top, "dir"), (&dir, "itself")), 22);
    assert_eq!(rename(&mut client, (&top, "."), (&dir, "dot")), 22);
    let remove = |client: &mut Client, number: u32, directory: &[u8], name: &str| {
        client.status(number, |to| {
            to.opaque(directory).opaque(name.as_bytes());
        })
    };
    assert_eq!(remove(&mut client, procedure::RMDIR, &top, "dir"), 66);
    assert_eq!(remove(&mut client, procedure::REMOVE, &top, "dir"), 21);
    assert_eq!(remove(&mut client, procedure::RMDIR, &dir, "moved"), 20);
    assert_eq!(remove(&mut client, procedure::RMDIR, &dir, "."), 22);
    assert_eq!(remove(&mut client, procedure::RMDIR, &dir, ".."), 17);
    for name in ["linked", "moved"] {
        assert_eq!(remove(&mut client, procedure::REMOVE, &dir, name), 0);
    }
    assert_eq!(client.attributes(&file.handle).unwrap_err(), 70);
    let link = client.make(procedure::SYMLINK, &dir, "link", |to| {
        wire::change(to, &Change::default());
        to.opaque(b"../anywhere");
    });
    let link = link.unwrap();
    assert_eq!(link.of.kind, FileKind::Symlink);
    let (status, mut results) = client.nfs(
        procedure::READLINK,
        arguments(|to| {
            to.opaque(&link.handle);
        }),
    );
    assert_eq!(status, 0);
    wire::maybe_attributes(&mut results).unwrap();
    assert_eq!(results.opaque(100).unwrap(), "../anywhere");
    assert_eq!(
        client.status(procedure::READLINK, |to| {
            to.opaque(&top);
        }),
        22
    );
    assert_eq!(remove(&mut client, procedure::REMOVE, &dir, "link"), 0);
    assert_eq!(remove(&mut client, procedure::RMDIR, &top, "dir"), 0);
    assert_eq!(fs::read_dir(world.export()).unwrap().count(), 0);
}

#[test]
fn a_call_that_comes_again_is_not_done_again() {
    let world = World::start();
    let mut client = world.client(0);
    let top = client.root();
    client.create(&top, "file", 0o644).unwrap();
    let remove = |client: &mut Client| {
        client.message(
            PROGRAM,
            procedure::REMOVE,
            arguments(|to| {
                to.opaque(&top).opaque(b"file");
            }),
        )
    };
    let message = remove(&mut client);
    let status =
        |client: &mut Client, message: &[u8]| client.exchange(message).unwrap().unwrap().u32().unwrap();
    assert_eq!(status(&mut client, &message), 0);
    // The connection broke before the answer arrived: the client sends the same bytes by another one.
    let mut again = world.client(0);
    assert_eq!(status(&mut again, &message), 0);
    // Another call is another one.
    let other = remove(&mut client);
    assert_eq!(status(&mut client, &other), 2);
}

/// A page of a listing: names with their cookies, and whether it is the last.
fn page(
    client: &mut Client,
    directory: &[u8],
    cookie: u64,
    plus: bool,
    count: u32,
) -> (Vec<(String, u64)>, bool) {
    let number = if plus { procedure::READDIRPLUS } else { procedure::READDIR };
    let (status, mut results) = client.nfs(
        number,
        arguments(|to| {
            to.opaque(directory).u64(cookie).fixed(&[0; 8]).u32(count);
            if plus {
                to.u32(8 * count);
            }
        }),
    );
    assert_eq!(status, 0);
    wire::maybe_attributes(&mut results).unwrap().unwrap();
    results.fixed::<8>().unwrap();
    let mut names = Vec::new();
    while results.bool().unwrap() {
        let inode = results.u64().unwrap();
        let name = String::from_utf8(results.opaque(255).unwrap().to_vec()).unwrap();
        names.push((name.clone(), results.u64().unwrap()));
        if plus {
            let of = wire::maybe_attributes(&mut results).unwrap();
            let handle = wire::optional(&mut results, wire::handle).unwrap();
            assert_eq!(of.is_some(), handle.is_some());
            assert!(of.is_none_or(|of| of.fileid == inode), "{name}");
        }
    }
    let is_last = results.bool().unwrap();
    assert!(results.is_empty());
    (names, is_last)
}

#[test]
fn a_listing_has_everything_once_whatever_happens_meanwhile() {
    for (plus, handles) in [(false, Handles::Kernel), (true, Handles::Kernel), (true, Handles::Search)] {
        let mut world = World::with(|options| options.handles = Some(handles));
        let mut client = world.client(0);
        let top = client.root();
        let export = world.export();
        for number in 0..400 {
            fs::write(export.join(format!("stays-{number}")), "").unwrap();
            fs::write(export.join(format!("goes-{number}")), "").unwrap();
        }
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let (mut cookie, mut round) = (0, 0);
        loop {
            let (names, is_last) = page(&mut client, &top, cookie, plus, 1024);
            for (name, at) in names {
                *seen.entry(name).or_default() += 1;
                cookie = at;
            }
            if is_last {
                break;
            }
            // Some go, some come, some are renamed, and once the server is another.
            fs::remove_file(export.join(format!("goes-{round}"))).ok();
            fs::write(export.join(format!("comes-{round}")), "").unwrap();
            fs::rename(export.join(format!("goes-{}", round + 200)), export.join(format!("moved-{round}")))
                .ok();
            round += 1;
            if round == 5 {
                world.restart();
                client = world.client(0);
            }
        }
        assert!(round > 10, "it takes several pages");
        assert!(seen.values().all(|times| *times == 1), "{seen:?}");
        for name in
            [".", ".."].map(str::to_owned).into_iter().chain((0..400).map(|number| format!("stays-{number}")))
        {
            assert!(seen.contains_key(&name), "{name} was there all the time");
        }
    }
}

#[test]
fn a_page_that_is_too_small_is_refused() {
    let world = World::start();
    let mut client = world.client(0);
    let top = client.root();
    let status = client.status(procedure::READDIR, |to| {
        to.opaque(&top).u64(0).fixed(&[0; 8]).u32(64);
    });
    assert_eq!(status, 10005);
    let (names, is_last) = page(&mut client, &top, u64::MAX, true, 4096);
    assert!(names.is_empty() && is_last);
}

#[test]
fn space_and_limits_are_told() {
    let world = World::start();
    let mut client = world.client(0);
    let top = client.root();
    for number in [procedure::FSSTAT, procedure::FSINFO, procedure::PATHCONF] {
        let (status, mut results) = client.nfs(
            number,
            arguments(|to| {
                to.opaque(&top);
            }),
        );
        assert_eq!(status, 0);
        wire::maybe_attributes(&mut results).unwrap().unwrap();
        match number {
            procedure::FSSTAT => {
                let (total, free) = (results.u64().unwrap(), results.u64().unwrap());
                assert!(total > 0 && free <= total);
            }
            procedure::FSINFO => assert_eq!(results.u32(), Ok(1 << 20)),
            _ => assert_eq!((results.u32(), results.u32()), (Ok(65_000), Ok(255))),
        }
    }
}
