//! Clients that lie, cut and forge: they get an error, and change nothing.

use std::{fs, net::SocketAddr, os::unix::fs::MetadataExt as _, path::Path};

use berth_nfs::{
    Change,
    v3::{MOUNT_PROGRAM, PROGRAM, procedure, wire},
    xdr::Encoder,
};
use berth_nfsd::{Error, Options, Server};

use crate::world::{Client, World, arguments};

/// How RPC refuses arguments: GARBAGE_ARGS.
const GARBAGE: u32 = 4;

/// Everything in a directory, with what it is.
fn tree(path: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        let of = fs::symlink_metadata(&path).unwrap();
        let times = (of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec());
        found.push(format!("{} {:o} {} {} {times:?}", path.display(), of.mode(), of.uid(), of.size()));
        if of.is_dir() {
            found.extend(tree(&path));
        }
    }
    found.sort();
    found
}

/// The arguments of every procedure, such that each would change or read something.
fn every_procedure(top: &[u8], dir: &[u8], file: &[u8], link: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let change = Change { mode: Some(0o777), uid: Some(1), size: Some(1), ..Change::default() };
    let call =
        |number: u32, write: &dyn Fn(&mut Encoder)| (number, arguments(|to| write(to)).finish().concat());
    vec![
        call(procedure::GETATTR, &|to| {
            to.opaque(file);
        }),
        call(procedure::SETATTR, &|to| {
            wire::change(to.opaque(file), &change);
            to.bool(false);
        }),
        call(procedure::LOOKUP, &|to| {
            to.opaque(top).opaque(b"file");
        }),
        call(procedure::ACCESS, &|to| {
            to.opaque(top).u32(0x3f);
        }),
        call(procedure::READLINK, &|to| {
            to.opaque(link);
        }),
        call(procedure::READ, &|to| {
            to.opaque(file).u64(0).u32(10);
        }),
        call(procedure::WRITE, &|to| {
            to.opaque(file).u64(0).u32(3).u32(2).opaque(b"new");
        }),
        call(procedure::CREATE, &|to| wire::change(to.opaque(dir).opaque(b"made").u32(1), &change)),
        call(procedure::CREATE, &|to| {
            to.opaque(dir).opaque(b"made").u32(2).fixed(b"verifier");
        }),
        call(procedure::MKDIR, &|to| wire::change(to.opaque(dir).opaque(b"made"), &change)),
        call(procedure::SYMLINK, &|to| {
            wire::change(to.opaque(dir).opaque(b"made"), &change);
            to.opaque(b"target");
        }),
        call(procedure::MKNOD, &|to| {
            wire::change(to.opaque(dir).opaque(b"made").u32(4), &change);
            to.u32(1).u32(3);
        }),
        call(procedure::REMOVE, &|to| {
            to.opaque(top).opaque(b"file");
        }),
        call(procedure::RMDIR, &|to| {
            to.opaque(top).opaque(b"dir");
        }),
        call(procedure::RENAME, &|to| {
            to.opaque(top).opaque(b"file").opaque(dir).opaque(b"made");
        }),
        call(procedure::LINK, &|to| {
            to.opaque(file).opaque(dir).opaque(b"made");
        }),
        call(procedure::READDIR, &|to| {
            to.opaque(top).u64(0).fixed(&[0; 8]).u32(4096);
        }),
        call(procedure::READDIRPLUS, &|to| {
            to.opaque(top).u64(0).fixed(&[0; 8]).u32(512).u32(4096);
        }),
        call(procedure::FSSTAT, &|to| {
            to.opaque(top);
        }),
        call(procedure::FSINFO, &|to| {
            to.opaque(top);
        }),
        call(procedure::PATHCONF, &|to| {
            to.opaque(top);
        }),
        call(procedure::COMMIT, &|to| {
            to.opaque(file).u64(0).u32(0);
        }),
    ]
}

/// Arguments as they are, whatever their length.
fn raw(client: &mut Client, program: u32, number: u32, bytes: &[u8]) -> Vec<u8> {
    [client.message(program, number, Encoder::default()), bytes.to_vec()].concat()
}

fn filled(world: &World) -> (Client, Vec<(u32, Vec<u8>)>) {
    let mut client = world.client(0);
    let top = client.root();
    let dir = client.make_directory(&top, "dir", 0o755).unwrap().handle;
    let file = client.create(&top, "file", 0o644).unwrap().handle;
    std::os::unix::fs::symlink("file", world.export().join("link")).unwrap();
    let link = client.lookup(&top, "link").unwrap().handle;
    let calls = every_procedure(&top, &dir, &file, &link);
    (client, calls)
}

#[test]
fn arguments_that_are_cut_or_have_more_behind_them_are_refused() {
    let world = World::start();
    let (mut client, calls) = filled(&world);
    let before = tree(&world.export());
    for (number, whole) in &calls {
        for length in 0..whole.len() {
            let message = raw(&mut client, PROGRAM, *number, &whole[..length]);
            assert!(matches!(client.exchange(&message), Some(Err(GARBAGE))), "{length} bytes of {number}");
        }
        for more in [&[0][..], &[0; 4], &[0xff; 100]] {
            let message = raw(&mut client, PROGRAM, *number, &[whole, more].concat());
            assert!(matches!(client.exchange(&message), Some(Err(GARBAGE))), "more behind {number}");
        }
    }
    for number in [1, 3] {
        let message = raw(&mut client, MOUNT_PROGRAM, number, &[0, 0, 0, 9, 1]);
        assert!(matches!(client.exchange(&message), Some(Err(GARBAGE))));
    }
    assert_eq!(tree(&world.export()), before);
}

#[test]
fn lengths_that_lie_are_refused() {
    let world = World::start();
    let (mut client, calls) = filled(&world);
    let before = tree(&world.export());
    for (number, whole) in &calls {
        // The handle is longer than any, and longer than what follows.
        for length in [65_u32, 1 << 16, 1 << 31, u32::MAX] {
            let message = raw(&mut client, PROGRAM, *number, &[&length.to_be_bytes(), &whole[4..]].concat());
            assert!(matches!(client.exchange(&message), Some(Err(GARBAGE))), "{length} in {number}");
        }
    }
    assert_eq!(tree(&world.export()), before);
}

#[test]
fn a_forged_handle_leads_nowhere() {
    let world = World::start();
    let (mut client, calls) = filled(&world);
    let before = tree(&world.export());
    for (number, whole) in &calls {
        let length = u32::from_be_bytes(whole[..4].try_into().unwrap()) as usize;
        for at in 4..4 + length {
            let mut forged = whole.clone();
            forged[at] ^= 0x10;
            let message = raw(&mut client, PROGRAM, *number, &forged);
            let status = client.exchange(&message).unwrap().unwrap().u32().unwrap();
            assert!(matches!(status, 70 | 10001), "byte {at} of {number}: {status}");
        }
    }
    assert_eq!(client.attributes(&[]).unwrap_err(), 10001);
    assert_eq!(tree(&world.export()), before);
}

#[test]
fn whatever_comes_the_server_goes_on() {
    let world = World::start();
    let (mut client, calls) = filled(&world);
    let mut seed = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for _ in 0..3000 {
        let (number, arguments) = &calls[usize::try_from(random()).unwrap() % calls.len()];
        let mut message = raw(&mut client, PROGRAM, *number, arguments);
        for _ in 0..=random() % 4 {
            // Behind the number by which the answer is known again; one word or one byte is any.
            let at = 4 + usize::try_from(random()).unwrap() % (message.len() - 4);
            message[at] = [0, 0xff, 0x7f, 1][usize::try_from(random()).unwrap() % 4];
        }
        if client.exchange(&message).is_none() {
            client = world.client(0);
        }
    }
    assert!(world.client(0).mount("/export").is_ok());
}

#[test]
fn other_services_versions_and_procedures_are_refused() {
    let world = World::start();
    let mut client = world.client(0);
    let bent = |client: &mut Client, at: usize, word: u32| {
        let mut message = client.message(PROGRAM, procedure::NULL, Encoder::default());
        message[at..at + 4].copy_from_slice(&word.to_be_bytes());
        client.exchange(&message).map(Result::err)
    };
    assert_eq!(bent(&mut client, 20, 0), Some(None), "it is there");
    assert_eq!(bent(&mut client, 12, 100_227), Some(Some(1)), "ACLs are another service");
    for version in [2, 4] {
        assert_eq!(bent(&mut client, 16, version), Some(Some(2)), "version {version}");
    }
    assert_eq!(bent(&mut client, 20, 22), Some(Some(3)));
    assert_eq!(bent(&mut client, 8, 3), Some(Some(1000)), "RPC has another version");
    assert_eq!(bent(&mut client, 24, 6), Some(Some(1001)), "the credential is Kerberos's");
    assert_eq!(bent(&mut client, 4, 1), None, "an answer is no call");
}

#[test]
fn records_are_bounded() {
    let world = World::start();
    // Longer than anything, by its header alone.
    let mut client = world.client(0);
    client.send(&[0xff, 0xff, 0xff, 0xff, 0, 0]).unwrap();
    assert!(client.receive().is_none());
    // And by its fragments.
    let mut client = world.client(0);
    let fragment = [&(1_u32 << 20).to_be_bytes()[..], &vec![0; 1 << 20]].concat();
    let _ = client.send(&fragment).and_then(|()| client.send(&fragment));
    assert!(client.receive().is_none());
    // In small pieces it is a call like any other.
    let mut client = world.client(0);
    let message = client.message(PROGRAM, procedure::NULL, Encoder::default());
    for (at, byte) in message.iter().enumerate() {
        let last = if at + 1 == message.len() { 1 << 31 } else { 0 };
        client.send(&[&(last | 1_u32).to_be_bytes()[..], &[*byte]].concat()).unwrap();
    }
    assert!(client.receive().is_some());
    // Nothing is too short to be answered.
    for length in 0..12 {
        let mut client = world.client(0);
        client.send_record(&vec![0; length]).unwrap();
        assert!(client.receive().is_none(), "{length} bytes");
    }
}

#[test]
fn there_are_so_many_connections_and_no_more() {
    let world = World::start();
    let mut clients: Vec<Client> = (0..128).map(|_| world.unprivileged()).collect();
    let is_served = |client: &mut Client| {
        let message = client.message(PROGRAM, procedure::NULL, Encoder::default());
        client.exchange(&message).is_some()
    };
    assert!(clients.iter_mut().all(is_served));
    assert!(!is_served(&mut world.unprivileged()));
    clients.clear();
    let begun = std::time::Instant::now();
    while !is_served(&mut world.unprivileged()) {
        assert!(begun.elapsed().as_secs() < 60, "there is no room again");
    }
}

#[test]
fn a_user_of_this_machine_cannot_pass_for_root() {
    let world = World::start();
    let mut privileged = world.client(0);
    let top = privileged.root();
    let mut client = world.unprivileged();
    assert_eq!(client.mount("/export").err(), Some(13));
    assert_eq!(client.attributes(&top).unwrap_err(), 1);
    assert_eq!(client.create(&top, "file", 0o644).err(), Some(1));
    assert_eq!(fs::read_dir(world.export()).unwrap().count(), 0);
    let world = World::with(|options| options.allow_unprivileged_ports = true);
    assert!(world.unprivileged().mount("/export").is_ok());
}

#[test]
fn what_would_be_open_to_all_or_cannot_be_served_is_refused_at_the_start() {
    let world = World::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let start = |change: &dyn Fn(&mut Options)| {
        let mut options = world.options();
        options.listen = "127.0.0.1:0".parse::<SocketAddr>().unwrap();
        change(&mut options);
        runtime.block_on(Server::start(options)).err()
    };
    assert!(start(&|_| {}).is_none());
    let open = |options: &mut Options| options.listen = "0.0.0.0:0".parse().unwrap();
    assert!(matches!(start(&open), Some(Error::NotLoopback(_))));
    let network = |options: &mut Options| {
        open(options);
        options.allow = vec!["192.0.2.0/24".parse().unwrap()];
    };
    assert!(start(&network).is_none());
    let missing = |options: &mut Options| options.directory = "/nowhere/at/all".into();
    assert!(matches!(start(&missing), Some(Error::Directory { .. })));
    let file = |options: &mut Options| options.directory = "/etc/passwd".into();
    assert!(matches!(start(&file), Some(Error::Directory { .. })));
    let relative = |options: &mut Options| options.names = vec!["export".into()];
    assert!(matches!(start(&relative), Some(Error::Name(_))));
    let inside = |options: &mut Options| options.state_directory = options.directory.join("state");
    assert!(matches!(start(&inside), Some(Error::KeyIsServed(_))));
    let taken = |options: &mut Options| options.listen = world.address;
    assert!(matches!(start(&taken), Some(Error::Listen { .. })));
}
