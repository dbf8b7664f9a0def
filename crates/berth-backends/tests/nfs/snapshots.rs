//! Snapshots: whole or not there, and the same archives as csi-driver-nfs's.

use std::{
    fs,
    os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown},
    path::Path,
    sync::Once,
    time::Duration,
};

use berth_backends::{ContentSource, Error, PageRequest, Parameters, Snapshot, nfs::Nfs};
use berth_core::SnapshotId;
use berth_csi::{
    Endpoint,
    v1::{DeleteSnapshotRequest, controller_client::ControllerClient},
};
use parking_lot::Mutex;

use crate::{
    between::{Asked, Fate},
    calls::{Calls as _, NewVolume},
    served::Served,
    server::{Server, VERSIONS},
};

const SOON: Duration = Duration::from_secs(20);

fn tar(args: &[&str]) -> String {
    String::from_utf8_lossy(&berth_host::exec::run("tar", args, SOON).unwrap().stdout).into_owned()
}

/// A directory with one of everything.
fn fill(dir: &Path) {
    fs::create_dir_all(dir.join("sub/empty")).unwrap();
    fs::write(dir.join("small"), "hello").unwrap();
    chown(dir.join("small"), Some(1000), Some(2000)).unwrap();
    fs::set_permissions(dir.join("small"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::write(dir.join("sub/large"), (0..5_000_000_u32).map(|i| (i % 251) as u8).collect::<Vec<_>>())
        .unwrap();
    fs::hard_link(dir.join("small"), dir.join("sub/again")).unwrap();
    std::os::unix::fs::symlink("../../etc/passwd", dir.join("sub/link")).unwrap();
    let sparse = fs::File::create(dir.join("sparse")).unwrap();
    sparse.set_len(16 << 20).unwrap();
    sparse.write_at(b"middle", 8 << 20).unwrap();
    fs::write(dir.join("x".repeat(200)), "long").unwrap();
    let old = std::time::UNIX_EPOCH + Duration::new(1_600_000_000, 123_456_789);
    fs::File::open(dir.join("sub/large")).unwrap().set_modified(old).unwrap();
    fs::set_permissions(dir.join("sub"), fs::Permissions::from_mode(0o2750)).unwrap();
}

fn check(dir: &Path) {
    assert_eq!(fs::read_to_string(dir.join("small")).unwrap(), "hello");
    let small = fs::metadata(dir.join("small")).unwrap();
    assert_eq!((small.uid(), small.gid(), small.mode() & 0o7777), (1000, 2000, 0o4755));
    assert_eq!(small.ino(), fs::metadata(dir.join("sub/again")).unwrap().ino());
    let large = fs::read(dir.join("sub/large")).unwrap();
    assert!(
        large.len() == 5_000_000 && large.iter().zip(0_u32..).all(|(&byte, i)| u32::from(byte) == i % 251)
    );
    let meta = fs::metadata(dir.join("sub/large")).unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec()), (1_600_000_000, 123_456_789));
    assert_eq!(fs::read_link(dir.join("sub/link")).unwrap(), Path::new("../../etc/passwd"));
    let sparse = fs::metadata(dir.join("sparse")).unwrap();
    assert!(sparse.len() == 16 << 20 && sparse.blocks() * 512 < 1 << 20, "{} blocks", sparse.blocks());
    assert_eq!(&fs::read(dir.join("sparse")).unwrap()[8 << 20..][..6], b"middle");
    assert_eq!(fs::read_to_string(dir.join("x".repeat(200))).unwrap(), "long");
    assert_eq!(fs::metadata(dir.join("sub")).unwrap().mode() & 0o7777, 0o2750);
    assert!(dir.join("sub/empty").is_dir());
}

async fn take(backend: &Nfs, name: &str, source: &berth_core::VolumeId) -> Snapshot {
    let name = name.parse().unwrap();
    let parameters = Parameters::new();
    let mut snapshot = match backend.find_taken(&name, source, &parameters).await.unwrap() {
        Some(snapshot) => snapshot,
        None => backend.create_snapshot(name.clone(), source, &parameters).await.unwrap(),
    };
    while !snapshot.ready {
        snapshot = backend.find_taken(&name, source, &parameters).await.unwrap().unwrap();
    }
    snapshot
}

fn restored(server: &Server, name: &str, snapshot: &SnapshotId) -> NewVolume {
    NewVolume { source: Some(ContentSource::Snapshot(snapshot.clone())), ..server.new_volume(name, &[]) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_holds_everything_and_is_restored_as_it_was() {
    for version in VERSIONS {
        for compress in [true, false] {
            let server = Server::start(version, &[]);
            let mut config = server.config();
            config.compress_snapshots = compress;
            let backend = Nfs::start(config).await.unwrap();
            let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap();
            let dir = server.export().join("pvc-1");
            fill(&dir);
            let snapshot = take(&backend, "snap-1", &source.id).await;
            let share = server.share();
            let id = format!("127.0.0.1#{}#snap-1#snap-1#pvc-1", share.trim_start_matches('/'));
            assert_eq!((snapshot.id.as_str(), &snapshot.source), (id.as_str(), &source.id));
            let archive =
                server.export().join("snap-1").join(if compress { "pvc-1.tar.gz" } else { "pvc-1.tar" });
            assert!(archive.is_file());
            assert!(fs::metadata(&archive).unwrap().len() < 8 << 20, "holes take no room");

            // As it was then, not as it is now.
            fs::write(dir.join("small"), "changed").unwrap();
            server.backend().await.create_volume(restored(&server, "pvc-2", &snapshot.id)).await.unwrap();
            check(&server.export().join("pvc-2"));

            // GNU tar, which csi-driver-nfs may run, agrees.
            let out = server.dir().join("out");
            fs::create_dir(&out).unwrap();
            tar(&["-xpf", archive.to_str().unwrap(), "-C", out.to_str().unwrap()]);
            check(&out);

            backend.delete_snapshot(&snapshot.id).await.unwrap();
            assert!(backend.snapshot(&snapshot.id).await.unwrap().is_none());
            assert!(!server.export().join("snap-1").exists());
        }
    }
}

/// A backend whose callers wait for nothing, and a volume that takes a while to be copied.
async fn impatient(server: &Server) -> (Nfs, berth_core::VolumeId) {
    let mut config = server.config();
    (config.compress_snapshots, config.snapshot_patience) = (false, Duration::from_millis(1));
    let backend = Nfs::start(config).await.unwrap();
    let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap().id;
    for number in 0..64 {
        fs::write(server.export().join(format!("pvc-1/{number}")), vec![7; 1 << 20]).unwrap();
    }
    (backend, source)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_another_completed_meanwhile_stays_as_it_is() {
    let server = Server::start("4.2", &[]);
    let (backend, source) = impatient(&server).await;
    let name = "snap-1".parse().unwrap();
    let snapshot = backend.create_snapshot(name, &source, &Parameters::new()).await.unwrap();
    assert!(!snapshot.ready && backend.snapshot_progress(&snapshot.id).is_some());
    let archive = server.export().join("snap-1/pvc-1.tar");
    fs::create_dir(server.export().join("snap-1")).unwrap();
    fs::write(&archive, "another's").unwrap();
    while backend.snapshot_progress(&snapshot.id).is_some() {
        assert!(backend.snapshot(&snapshot.id).await.unwrap().unwrap().ready);
    }
    assert_eq!(fs::read_to_string(&archive).unwrap(), "another's");
    assert_eq!(fs::read_dir(server.export().join(".berth/incoming")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_takes_long_reports_its_progress_until_it_is_ready() {
    let server = Server::start("4.2", &[]);
    let (backend, source) = impatient(&server).await;
    let name = "snap-1".parse().unwrap();
    let mut snapshot = backend.create_snapshot(name, &source, &Parameters::new()).await.unwrap();
    let mut reported = Vec::new();
    while !snapshot.ready {
        reported.extend(backend.snapshot_progress(&snapshot.id));
        snapshot = backend.snapshot(&snapshot.id).await.unwrap().unwrap();
    }
    assert!(reported.iter().all(|words| words.starts_with("copied ")), "{reported:?}");
    assert!(reported.iter().any(|words| words.contains(" of 64 MiB (")), "{reported:?}");
    // It is in its place a moment before its writer hears of that.
    while backend.snapshot_progress(&snapshot.id).is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unfinished_snapshot_whose_source_is_gone_is_deleted() {
    let server = Server::start("4.2", &[]);
    let (backend, source) = impatient(&server).await;
    let begun =
        backend.create_snapshot("snap-1".parse().unwrap(), &source, &Parameters::new()).await.unwrap();
    assert!(!begun.ready);
    backend.delete_volume(&source).await.unwrap();
    backend.drain(SOON).await;
    // No caller got the failure yet, and a deletion need not care.
    let driver = Served::start(&server.dir().join("served"), backend.clone()).await;
    let endpoint = Endpoint::Unix(driver.socket.clone());
    let mut controller = ControllerClient::new(berth_csi::connect(&endpoint));
    let request = DeleteSnapshotRequest { snapshot_id: begun.id.to_string(), ..Default::default() };
    controller.delete_snapshot(request).await.unwrap();
    driver.end().await;
    assert_eq!(fs::read_dir(server.export().join(".berth/snapshots")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reason_why_a_snapshot_failed_is_kept_for_callers_that_come_later() {
    let server = Server::start("4.2", &[]);
    let (backend, source) = impatient(&server).await;
    let (name, parameters) = ("snap-1".parse().unwrap(), Parameters::new());
    let begun = backend.create_snapshot(name, &source, &parameters).await.unwrap();
    assert!(!begun.ready);
    backend.delete_volume(&source).await.unwrap();
    backend.drain(SOON).await;
    // From now on it could be taken.
    backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap();
    let reported = backend.snapshot(&begun.id).await;
    assert!(reported.is_err(), "{reported:?}");
    let taken = take(&backend, "snap-1", &source).await;
    assert!(taken.ready && server.export().join("snap-1/pvc-1.tar").is_file());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_csi_driver_nfs_took_is_restored_and_deleted() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let packed = server.dir().join("packed");
    fs::create_dir(&packed).unwrap();
    fill(&packed);
    let share = server.share();
    let share = share.trim_start_matches('/');
    for (name, flag, ending) in [("snap-gz", "-czf", "tar.gz"), ("snap-tar", "-cf", "tar")] {
        let place = server.export().join(name);
        fs::create_dir(&place).unwrap();
        let archive = place.join(format!("pvc-9.{ending}"));
        tar(&[
            "-C",
            packed.to_str().unwrap(),
            flag,
            archive.to_str().unwrap(),
            "--sparse",
            "--format=pax",
            ".",
        ]);
        let id: SnapshotId = format!("127.0.0.1#{share}#{name}#{name}#pvc-9").parse().unwrap();
        let snapshot = backend.snapshot(&id).await.unwrap().unwrap();
        assert!(snapshot.ready && snapshot.size.bytes() > 0);
        assert_eq!(snapshot.source.as_str(), format!("127.0.0.1#{share}#pvc-9##"));
        let volume = format!("restored-{name}");
        backend.create_volume(restored(&server, &volume, &id)).await.unwrap();
        check(&server.export().join(&volume));
        // Taking it again finds it.
        let again =
            backend.find_taken(&name.parse().unwrap(), &snapshot.source, &Parameters::new()).await.unwrap();
        assert_eq!(again.unwrap().id, id);
        backend.delete_snapshot(&id).await.unwrap();
        assert!(!place.exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_belongs_to_one_source_and_snapshots_are_listed() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let one = backend.create_volume(server.new_volume("one", &[])).await.unwrap().id;
    let two = backend.create_volume(server.new_volume("two", &[])).await.unwrap().id;
    let mut taken = Vec::new();
    for number in 0..5 {
        taken
            .push(take(&backend, &format!("snap-{number}"), if number % 2 == 0 { &one } else { &two }).await);
    }
    let found =
        backend.find_taken(&"snap-0".parse().unwrap(), &two, &Parameters::new()).await.unwrap().unwrap();
    assert_eq!(found.source, one, "the services refuse it by this");
    let page = |after| PageRequest { after, limit: 2 };
    let first = backend.list_snapshots(None, page(None)).await.unwrap();
    assert_eq!(first.entries.len(), 2);
    let second = backend.list_snapshots(None, page(first.next)).await.unwrap();
    let third = backend.list_snapshots(None, page(second.next)).await.unwrap();
    assert_eq!((second.entries.len(), third.entries.len(), third.next), (2, 1, None));
    let of_two = backend.list_snapshots(Some(&two), PageRequest { after: None, limit: 10 }).await.unwrap();
    assert!(of_two.entries.len() == 2 && of_two.entries.iter().all(|snapshot| snapshot.source == two));
    // A volume that happens to be called like a snapshot loses nothing, not even its empty directory.
    let share = server.share();
    let id = format!("127.0.0.1#{}#snap-9#snap-9#snap-9", share.trim_start_matches('/')).parse().unwrap();
    let volume = backend.create_volume(server.new_volume("snap-9", &[])).await.unwrap();
    assert!(matches!(backend.delete_snapshot(&id).await, Err(Error::NotFound { .. })));
    assert!(server.export().join("snap-9").is_dir());
    fs::write(server.export().join("snap-9/file"), "precious").unwrap();
    assert!(matches!(backend.delete_snapshot(&id).await, Err(Error::NotFound { .. })));
    assert!(backend.volume(&volume.id).await.unwrap().is_some());
    assert_eq!(fs::read_to_string(server.export().join("snap-9/file")).unwrap(), "precious");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_process_left_unfinished_is_finished_by_the_next() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap();
    fill(&server.export().join("pvc-1"));
    let snapshot = take(&backend, "snap-1", &source.id).await;
    // As if it had died before the rename: the archive is still aside.
    let archive = server.export().join("snap-1/pvc-1.tar.gz");
    let key = names(&server.export().join(".berth/snapshots")).remove(0).replace(".json", "");
    fs::rename(&archive, server.export().join(format!(".berth/incoming/{key}.dead"))).unwrap();
    fs::remove_dir(server.export().join("snap-1")).unwrap();
    let next = server.backend().await;
    let found = take(&next, "snap-1", &source.id).await;
    assert_eq!((found.id, found.created), (snapshot.id.clone(), snapshot.created));
    assert!(archive.is_file());
    assert!(names(&server.export().join(".berth/incoming")).is_empty());
    next.create_volume(restored(&server, "pvc-2", &snapshot.id)).await.unwrap();
    check(&server.export().join("pvc-2"));
}

fn names(dir: &Path) -> Vec<String> {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_or_evil_archive_is_refused_and_makes_no_volume() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap();
    fill(&server.export().join("pvc-1"));
    let snapshot = take(&backend, "snap-1", &source.id).await;
    let archive = server.export().join("snap-1/pvc-1.tar.gz");
    let whole = fs::read(&archive).unwrap();
    let outside = server.dir().join("outside");
    fs::create_dir(&outside).unwrap();
    let evil = evil_archives(&server, &outside);
    let cases = [whole[..whole.len() / 2].to_vec(), b"not an archive at all, however long it is".repeat(50)];
    for content in cases.into_iter().chain(evil) {
        fs::write(&archive, content).unwrap();
        let refused = backend.create_volume(restored(&server, "pvc-2", &snapshot.id)).await;
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        assert!(!server.export().join("pvc-2").exists());
    }
    assert!(names(&outside).is_empty());
    fs::write(&archive, whole).unwrap();
    backend.create_volume(restored(&server, "pvc-2", &snapshot.id)).await.unwrap();
    check(&server.export().join("pvc-2"));
}

/// Archives that try to leave their directory: by their names, by a link they bring, by a hard link.
fn evil_archives(server: &Server, outside: &Path) -> Vec<Vec<u8>> {
    let dir = server.dir().join("evil");
    fs::create_dir_all(dir.join("a/link")).unwrap();
    fs::write(dir.join("a/file"), "evil").unwrap();
    fs::write(dir.join("a/link/file"), "evil").unwrap();
    let packed = dir.join("evil.tar");
    let packed = packed.to_str().unwrap();
    let at = dir.to_str().unwrap();
    let make = |args: &[&str]| {
        let mut all = vec!["-C", at, "-P", "-cf", packed];
        all.extend_from_slice(args);
        tar(&all);
        fs::read(packed).unwrap()
    };
    let mut evil = vec![
        make(&["--transform=s,^a/file,../../outside/x,", "a/file"]),
        make(&["--transform=s,^a/file,/tmp/outside,", "a/file"]),
        make(&["--transform=s,^a/file,b/../../../x,", "a/file"]),
    ];
    // First a link that leads outside, then a file "in" it.
    fs::create_dir(dir.join("b")).unwrap();
    std::os::unix::fs::symlink(outside, dir.join("b/link")).unwrap();
    make(&["--transform=s,^b/,a/,", "b/link"]);
    tar(&["-C", at, "-rf", packed, "a/link/file"]);
    evil.push(fs::read(packed).unwrap());
    evil
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_away_while_a_snapshot_is_taken_is_left_out() {
    // No record is as long.
    const LENGTH: u32 = 12_345;
    for version in VERSIONS {
        let server = Server::start(version, &[]);
        let content = |byte| vec![byte; usize::try_from(LENGTH).unwrap()];
        let (once, export) = (Once::new(), server.export());
        // When the first content is asked for, its directory has been listed.
        let backend = server
            .meddled(move |request| {
                let is_content = request.range().is_some_and(|(_, length)| length == LENGTH);
                if is_content || request.asked() == Asked::ReadLink {
                    once.call_once(|| {
                        let dir = export.join("pvc-1");
                        for name in ["gone", "gone link"] {
                            fs::remove_file(dir.join(name)).unwrap();
                        }
                        fs::remove_dir_all(dir.join("gone dir")).unwrap();
                        fs::rename(export.join("new"), dir.join("replaced")).unwrap();
                    });
                }
                Fate::Passed
            })
            .await;
        let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap().id;
        let dir = server.export().join("pvc-1");
        for below in ["gone dir/below", "kept dir"] {
            fs::create_dir_all(dir.join(below)).unwrap();
        }
        for name in ["gone", "gone dir/file", "kept", "kept dir/file", "replaced"] {
            fs::write(dir.join(name), content(1)).unwrap();
        }
        std::os::unix::fs::symlink("nowhere", dir.join("gone link")).unwrap();
        fs::write(server.export().join("new"), content(2)).unwrap();
        let snapshot = take(&backend, "snap-1", &source).await;
        server.backend().await.create_volume(restored(&server, "pvc-2", &snapshot.id)).await.unwrap();
        let copy = server.export().join("pvc-2");
        let mut left = names(&copy);
        // Its entry may have been written before it went.
        left.retain(|name| name != "gone dir");
        left.sort();
        assert_eq!(left, ["kept", "kept dir", "replaced"], "{version}");
        assert!(!copy.join("gone dir").exists() || names(&copy.join("gone dir")).is_empty());
        assert!(fs::read(copy.join("kept dir/file")).unwrap() == content(1));
        assert!(fs::read(copy.join("replaced")).unwrap() == content(2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_goes_away_while_it_is_packed_spoils_nothing_else() {
    const STALE: u32 = 70;
    const KEPT: u64 = 2 << 20;
    let old: Vec<u8> = (0..5_000_000_u32).map(|i| (i % 251) as u8).collect();
    let new: Vec<u8> = (0..4_000_000_u32).map(|i| (i % 241) as u8).collect();
    for is_replaced in [false, true] {
        let server = Server::start("3", &[]);
        let (lost, once, export) = (Mutex::new(None), Once::new(), server.export());
        let backend = server
            .meddled(move |request| {
                let mut lost = lost.lock();
                if request.range().is_some_and(|(offset, _)| offset >= KEPT) {
                    let handle = request.handle();
                    if *lost.get_or_insert_with(|| handle.clone()) == handle {
                        return request.failed(STALE);
                    }
                }
                // It is looked for again when all that could be read was.
                if lost.is_some() && request.asked() == Asked::Lookup {
                    once.call_once(|| {
                        let file = export.join("pvc-1/large");
                        if is_replaced {
                            fs::rename(export.join("new"), file)
                        } else {
                            fs::remove_file(file)
                        }
                        .unwrap();
                    });
                }
                Fate::Passed
            })
            .await;
        let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap().id;
        fs::write(server.export().join("pvc-1/large"), &old).unwrap();
        fs::write(server.export().join("pvc-1/next"), "next").unwrap();
        fs::write(server.export().join("new"), &new).unwrap();
        let snapshot = take(&backend, "snap-1", &source).await;
        server.backend().await.create_volume(restored(&server, "pvc-2", &snapshot.id)).await.unwrap();
        let out = server.dir().join("out");
        fs::create_dir(&out).unwrap();
        let archive = server.export().join("snap-1/pvc-1.tar.gz");
        tar(&["-xpf", archive.to_str().unwrap(), "-C", out.to_str().unwrap()]);
        for copy in [server.export().join("pvc-2"), out] {
            let large = fs::read(copy.join("large")).unwrap();
            let (kept, rest) = large.split_at(usize::try_from(KEPT).unwrap());
            let is_padded = kept == &old[..kept.len()] && rest.iter().all(|&byte| byte == 0);
            assert!(if is_replaced { large == new } else { is_padded && large.len() == old.len() });
            assert_eq!(fs::read_to_string(copy.join("next")).unwrap(), "next");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_with_other_handles_makes_no_empty_snapshot() {
    const STALE: u32 = 70;
    const LENGTH: u32 = 12_345;
    let server = Server::start("3", &[]);
    let lost = std::sync::atomic::AtomicBool::new(false);
    let backend = server
        .meddled(move |request| {
            use std::sync::atomic::Ordering::SeqCst;
            if request.range().is_some_and(|(_, length)| length == LENGTH) {
                lost.store(true, SeqCst);
            }
            if lost.load(SeqCst) { request.failed(STALE) } else { Fate::Passed }
        })
        .await;
    let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap().id;
    fs::write(server.export().join("pvc-1/file"), vec![1; usize::try_from(LENGTH).unwrap()]).unwrap();
    let taken = backend.create_snapshot("snap-1".parse().unwrap(), &source, &Parameters::new()).await;
    assert!(matches!(taken, Err(Error::Unavailable(_))), "{taken:?}");
    assert!(!server.export().join("snap-1").exists());
}
