//! One file at a time.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink},
    time::{Duration, Instant},
};

use berth_nfs::{
    Change, Cookie, Create, FileKind, Handle, Kind, Name, NextData, Node, Share, Time, TimeChange, Version,
};
use bytes::Bytes;

use super::server::{Server, chain};

/// Runs a test in each version, on one server.
async fn in_each_version<F: Future<Output = ()>>(server: &Server, test: impl Fn(Share, Handle) -> F) {
    for version in Version::ALL {
        let share = server.share(version).await;
        assert_eq!(share.version(), version);
        let dir = share.make_dir(&share.root(), format!("in {version}"), &Change::mode(0o755)).await;
        let dir = dir.unwrap_or_else(|error| panic!("{version}: {}", chain(&error)));
        test(share, dir.handle).await;
    }
}

#[tokio::test]
async fn directories_are_made_changed_and_removed() {
    let server = &Server::start();
    in_each_version(server, async |share, dir| {
        let on_disk = server.export().join(format!("in {}", share.version())).join("a");
        let change = Change { mode: Some(0o2770), uid: Some(1000), gid: Some(2000), ..Change::default() };
        let made = share.make_dir(&dir, "a", &change).await.unwrap();
        let is = fs::metadata(&on_disk).unwrap();
        assert_eq!((is.mode() & 0o7777, is.uid(), is.gid()), (0o2770, 1000, 2000), "{share:?}");
        assert_eq!(made.attributes.kind, FileKind::Directory);
        assert_eq!((made.attributes.mode, made.attributes.uid, made.attributes.gid), (0o2770, 1000, 2000));
        assert_eq!(made.attributes.fileid, is.ino());
        assert_eq!(share.lookup(&dir, "a").await.unwrap().handle, made.handle);

        let again = share.make_dir(&dir, "a", &change).await.unwrap_err();
        assert_eq!(again.kind(), Kind::Exists, "{}", chain(&again));
        let then = Time { seconds: 1_000_000_000, nanoseconds: 500 };
        let change = Change { mode: Some(0o700), modified: Some(TimeChange::At(then)), ..Change::default() };
        let changed = share.set_attributes(&made.handle, &change).await.unwrap();
        assert_eq!((changed.mode, changed.modified), (0o700, then));
        assert_eq!(fs::metadata(&on_disk).unwrap().permissions().mode() & 0o7777, 0o700);

        share.create(&made.handle, "full", Create::New, &Change::default()).await.unwrap();
        assert_eq!(share.remove_dir(&dir, "a").await.unwrap_err().kind(), Kind::NotEmpty);
        assert_eq!(share.remove(&dir, "a").await.unwrap_err().kind(), Kind::IsDirectory);
        assert_eq!(share.remove_dir(&made.handle, "full").await.unwrap_err().kind(), Kind::NotDirectory);
        share.remove(&made.handle, "full").await.unwrap();
        share.remove_dir(&dir, "a").await.unwrap();
        let gone = share.lookup(&dir, "a").await.unwrap_err();
        assert_eq!(gone.kind(), Kind::NotFound);
        assert_eq!(gone.to_string(), format!(r#"could not find "a" on {share}"#));
        // Asked at once, Ganesha may say that it cannot read what it is about to forget.
        let deadline = Instant::now() + Duration::from_secs(10);
        let gone = loop {
            match share.attributes(&made.handle).await.unwrap_err().kind() {
                Kind::Io if Instant::now() < deadline => tokio::time::sleep(Duration::from_millis(10)).await,
                kind => break kind,
            }
        };
        assert_eq!(gone, Kind::Stale);
    })
    .await;
}

#[tokio::test]
async fn what_is_written_is_read_and_lies_on_the_disk() {
    let server = &Server::start();
    in_each_version(server, async |share, dir| {
        let file = share.create(&dir, "data", Create::New, &Change::mode(0o640)).await.unwrap();
        assert_eq!((file.attributes.mode, file.attributes.size), (0o640, 0));
        let content: Vec<u8> = (0..3_000_017_u32).map(|n| (n % 251) as u8).collect();
        let content = Bytes::from(content);
        let mut at = 0;
        while at < content.len() {
            at += share.write(&file.handle, at as u64, content.slice(at..), false).await.unwrap() as usize;
        }
        share.commit(&file.handle).await.unwrap();
        let on_disk = server.export().join(format!("in {}", share.version())).join("data");
        assert!(fs::read(&on_disk).unwrap() == content);

        let mut read = Vec::new();
        loop {
            let (data, end) = share.read(&file.handle, read.len() as u64, u32::MAX).await.unwrap();
            read.extend_from_slice(&data);
            if end {
                break;
            }
            assert!(!data.is_empty());
        }
        assert!(read == content);
        share.write(&file.handle, 5, Bytes::from_static(b"durable"), true).await.unwrap();
        assert_eq!(
            &share.read(&file.handle, 4, 9).await.unwrap().0[..],
            [4, b'd', b'u', b'r', b'a', b'b', b'l', b'e', 12]
        );

        let cut =
            share.set_attributes(&file.handle, &Change { size: Some(7), ..Change::default() }).await.unwrap();
        assert_eq!(cut.size, 7);
        let same = share.create(&dir, "data", Create::New, &Change::default()).await.unwrap_err();
        assert_eq!(same.kind(), Kind::Exists);
        assert_eq!(fs::metadata(&on_disk).unwrap().len(), 7);
        let emptied = share.create(&dir, "data", Create::Truncate, &Change::mode(0o600)).await.unwrap();
        assert_eq!(
            (emptied.handle, emptied.attributes.size, emptied.attributes.mode),
            (file.handle, 0, 0o600)
        );
    })
    .await;
}

#[tokio::test]
async fn links_and_special_files_are_made() {
    let server = &Server::start();
    in_each_version(server, async |share, dir| {
        let on_disk = server.export().join(format!("in {}", share.version()));
        let file = share.create(&dir, "file", Create::New, &Change::default()).await.unwrap();
        share.link(&file.handle, &dir, "other name").await.unwrap();
        assert_eq!(share.attributes(&file.handle).await.unwrap().links, 2);
        assert_eq!(share.lookup(&dir, "other name").await.unwrap().handle, file.handle);

        let link = share.symlink(&dir, "link", b"../../etc/passwd", &Change::default()).await.unwrap();
        assert_eq!(link.attributes.kind, FileKind::Symlink);
        assert_eq!(&share.read_link(&link.handle).await.unwrap()[..], b"../../etc/passwd");
        assert_eq!(share.lookup(&dir, "link").await.unwrap().attributes.kind, FileKind::Symlink);
        assert!(share.lookup(&link.handle, "x").await.is_err());

        for (name, node, kind) in [
            ("fifo", Node::Fifo, FileKind::Fifo),
            ("socket", Node::Socket, FileKind::Socket),
            ("null", Node::Character(1, 3), FileKind::Character),
            ("loop", Node::Block(7, 200), FileKind::Block),
        ] {
            let made = share.make_node(&dir, name, node, &Change::mode(0o622)).await.unwrap();
            assert_eq!((made.attributes.kind, made.attributes.mode), (kind, 0o622), "{share:?}");
        }
        assert!(fs::metadata(on_disk.join("fifo")).unwrap().file_type().is_fifo());
        assert_eq!(share.lookup(&dir, "loop").await.unwrap().attributes.device, (7, 200));

        share.rename(&dir, "other name", &share.root(), format!("moved {}", share.version())).await.unwrap();
        assert!(!on_disk.join("other name").exists());
        assert!(server.export().join(format!("moved {}", share.version())).exists());
        let gone = share.rename(&dir, "nothing", &dir, "something").await.unwrap_err();
        assert_eq!(gone.kind(), Kind::NotFound);
    })
    .await;
}

#[tokio::test]
async fn a_large_directory_is_listed_page_by_page_with_names_of_any_bytes() {
    let server = &Server::start();
    let big = server.export().join("big");
    fs::create_dir(&big).unwrap();
    let mut expected: BTreeSet<Vec<u8>> =
        (0..3000).map(|n| format!("file number {n}").into_bytes()).collect();
    expected.insert(vec![0xff, 0xfe, b'x']);
    expected.insert(vec![b'y'; 255]);
    for name in &expected {
        use std::os::unix::ffi::OsStrExt;
        fs::write(big.join(std::ffi::OsStr::from_bytes(name)), name).unwrap();
    }
    symlink("nowhere", big.join("link")).unwrap();
    expected.insert(b"link".to_vec());
    in_each_version(server, async |share, _| {
        let dir = share.lookup(&share.root(), "big").await.unwrap().handle;
        let mut found = BTreeSet::new();
        let mut cookie = Cookie::default();
        let mut pages = 0;
        loop {
            let page =
                share.read_dir(&dir, cookie).await.unwrap_or_else(|e| panic!("{share:?} {}", chain(&e)));
            pages += 1;
            for entry in page.entries {
                if entry.name.as_bytes() != b"link" {
                    assert_eq!(entry.attributes.kind, FileKind::File);
                    assert_eq!(entry.attributes.size, entry.name.as_bytes().len() as u64);
                }
                assert!(found.insert(entry.name.as_bytes().to_vec()), "{} came twice", entry.name);
            }
            match page.next {
                Some(next) => cookie = next,
                None => break,
            }
        }
        assert!(pages > 1);
        assert!(found == expected, "{share:?} found {} of {}", found.len(), expected.len());
    })
    .await;
}

#[tokio::test]
async fn free_space_is_that_of_the_disk() {
    let server = &Server::start();
    let disk = rustix::fs::statvfs(server.export()).unwrap();
    in_each_version(server, async |share, dir| {
        let space = share.space(&dir).await.unwrap();
        assert_eq!(space.bytes_total, disk.f_blocks * disk.f_frsize);
        assert_eq!(space.files_total, disk.f_files);
        assert!(space.bytes_available > 0 && space.bytes_available <= space.bytes_free);
    })
    .await;
}

#[tokio::test]
async fn names_that_lead_elsewhere_are_not_even_sent() {
    let server = Server::start();
    let share = server.share(Version::V4_1).await;
    for name in ["..", ".", "a/b", ""] {
        let refused = share.make_dir(&share.root(), name, &Change::default()).await.unwrap_err();
        assert_eq!(refused.kind(), Kind::Invalid);
        assert_eq!(
            share.rename(&share.root(), "x", &share.root(), name).await.unwrap_err().kind(),
            Kind::Invalid
        );
        assert_eq!(share.remove(&share.root(), name).await.unwrap_err().kind(), Kind::Invalid);
        assert_eq!(share.lookup(&share.root(), name).await.unwrap_err().kind(), Kind::Invalid);
    }
}

#[tokio::test]
async fn what_only_some_servers_can_is_done_or_answered_by_none() {
    let server = &Server::start();
    in_each_version(server, async |share, dir| {
        let (from, to) = (
            share.create(&dir, "from", Create::New, &Change::default()).await.unwrap().handle,
            share.create(&dir, "to", Create::New, &Change::default()).await.unwrap().handle,
        );
        share.write(&from, 0, Bytes::from_static(b"content"), true).await.unwrap();
        // Linux can all of it.
        let must = Server::is_kernel() && share.version() == Version::V4_2;
        let copied = share.copy_range(&from, 0, &to, 0, 7).await.unwrap();
        assert!(copied.is_some() || !must);
        if let Some(copied) = copied {
            assert_eq!(copied, 7);
            assert_eq!(share.read(&to, 0, 100).await.unwrap().0, "content");
        }
        let name = Name::new("colour").unwrap();
        if share.set_xattr(&from, &name, Bytes::from_static(b"red")).await.unwrap().is_some() {
            assert_eq!(share.xattr(&from, &name).await.unwrap().unwrap(), "red");
            assert_eq!(share.xattrs(&from).await.unwrap().unwrap(), std::slice::from_ref(&name));
            share.remove_xattr(&from, &name).await.unwrap();
            assert_eq!(share.xattr(&from, &name).await.unwrap_err().kind(), Kind::NotFound);
        } else {
            assert!(!must);
            assert_eq!(share.xattrs(&from).await.unwrap(), None);
        }
        match share.next_data(&from, 0).await.unwrap() {
            NextData::At(extent) => assert_eq!(extent.start, 0),
            other => assert!(other == NextData::Unknown && !must, "{other:?}"),
        }
        let sparse = Change { size: Some(1 << 20), ..Change::default() };
        share.set_attributes(&to, &sparse).await.unwrap();
        let middle = share.next_data(&to, 512 << 10).await.unwrap();
        assert!(middle == NextData::None || (middle == NextData::Unknown && !must), "{middle:?}");
        assert!(share.allocate(&from, 0, 4096).await.unwrap().is_some() || !must);
    })
    .await;
}
