//! Volumes: where they are, what becomes of them, and that any process can take over from any other.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    time::{Duration, Instant},
};

use berth_backends::{
    ContentSource, Context, Error, PageRequest, Parameters, Secrets, Severity, Volumes as _,
    nfs::{Nfs, OnDelete},
};
use berth_core::CapacityRange;

use crate::{
    between::{Asked, Fate},
    calls::{Calls as _, NewVolume},
    server::{Server, VERSIONS},
};

const SOON: Duration = Duration::from_secs(20);

async fn listed(backend: &Nfs) -> Vec<String> {
    let page = backend.list_volumes(PageRequest { after: None, limit: 1000 }).await.unwrap();
    page.entries.iter().map(|volume| volume.id.to_string()).collect()
}

/// What is in a directory, but for the driver's own.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != ".berth")
        .collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_a_directory_that_any_process_finds_again_and_removes() {
    for version in VERSIONS {
        let server = Server::start(version, &[]);
        let new =
            server.new_volume("pvc-1", &[("mountPermissions", "0770"), ("uid", "1000"), ("gid", "2000")]);
        let first = server.backend().await;
        assert!(first.find_made(&new).await.unwrap().is_none());
        let volume = first.create_volume(new.clone()).await.unwrap();
        let share = server.share();
        assert_eq!(volume.id.as_str(), format!("127.0.0.1#{}#pvc-1##", share.trim_start_matches('/')));
        let found = fs::metadata(server.export().join("pvc-1")).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o770, 1000, 2000));
        assert_eq!(volume.context["subdir"], "pvc-1");

        // Another process, on another node: nothing was kept by the first.
        let second = server.backend().await;
        let again = second.find_made(&new).await.unwrap().unwrap();
        assert_eq!((&again.id, again.capacity.bytes()), (&volume.id, 1 << 30));
        assert_eq!(*again.parameters, new.parameters);
        assert_eq!(listed(&second).await, [volume.id.to_string()]);

        fs::create_dir_all(server.export().join("pvc-1/a/b")).unwrap();
        fs::write(server.export().join("pvc-1/a/b/file"), "data").unwrap();
        let third = server.backend().await;
        third.delete_volume(&volume.id).await.unwrap();
        assert!(third.volume(&volume.id).await.unwrap().is_none());
        assert!(third.find_made(&new).await.unwrap().is_none());
        third.drain(SOON).await;
        assert_eq!(names(&server.export()), Vec::<String>::new());
        assert_eq!(names(&server.export().join(".berth/trash")), Vec::<String>::new());
        assert_eq!(names(&server.export().join(".berth/volumes")), Vec::<String>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_or_the_class_says_how_to_reach_the_server() {
    let server = Server::start("4.2", &[]);
    let mut config = server.config();
    let options = std::mem::take(&mut config.mount_options).remove(0);
    let secrets = Secrets::from(BTreeMap::from([("MountOptions".to_owned(), options.clone())]));
    assert_eq!(format!("{secrets:?}"), "Secrets");
    let new = server.new_volume("pvc-1", &[]);
    let backend = Nfs::start(config.clone()).await.unwrap();
    assert!(matches!(backend.find_made(&new).await, Err(Error::Unavailable(_))));
    let with_secret = Context::new(None, secrets, &BTreeMap::new());
    let volume = backend.create_volume_with(&with_secret, new).await.unwrap();
    assert!(!format!("{backend:?}").contains(&options));

    // A deletion says no more than the id, and perhaps a secret.
    let next = Nfs::start(config.clone()).await.unwrap();
    assert!(next.delete_volume(&volume.id).await.is_err());
    next.controller.delete(&with_secret, &volume.id).await.unwrap();

    // What the class said is remembered for it.
    let backend = Nfs::start(config).await.unwrap();
    let mut new = server.new_volume("pvc-2", &[("mountOptions", &options)]);
    assert!(backend.find_made(&new).await.unwrap().is_none());
    let volume = backend.create_volume(new.clone()).await.unwrap();
    backend.delete_volume(&volume.id).await.unwrap();
    new.parameters.insert("mountOptions".into(), "vers=nonsense".into());
    assert!(matches!(backend.find_made(&new).await, Err(Error::Invalid(_))));

    // A secret that makes no sense stays one.
    let secrets = Secrets::from(BTreeMap::from([("mountOptions".to_owned(), "hard,key=TOKEN".to_owned())]));
    let with_secret = Context::new(None, secrets, &BTreeMap::new());
    let Err(Error::Invalid(sentence)) = backend.controller.delete(&with_secret, &volume.id).await else {
        panic!("it is refused")
    };
    assert!(sentence.contains("secret") && !sentence.contains("TOKEN"), "{sentence}");
    backend.drain(SOON).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_csi_driver_nfs_made_is_served_grown_and_deleted() {
    let server = Server::start("4.2", &[]);
    let share = server.share();
    let share = share.trim_start_matches('/');
    for id in [
        format!("127.0.0.1#{share}#old-1##"),
        format!("127.0.0.1/{share}/old-2"),
        format!("127.0.0.1#{share}#a/b#pvc-3#"),
    ] {
        let backend = server.backend().await;
        let id: berth_core::VolumeId = id.parse().unwrap();
        assert!(backend.volume(&id).await.unwrap().is_none(), "{id}");
        let dir = if id.as_str().contains("a/b") {
            "a/b"
        } else {
            &id.as_str()[id.as_str().find("old").unwrap()..][..5]
        };
        fs::create_dir_all(server.export().join(dir)).unwrap();
        fs::write(server.export().join(dir).join("file"), "precious").unwrap();
        let volume = backend.volume(&id).await.unwrap().unwrap();
        assert_eq!((volume.capacity.bytes(), volume.context["subdir"].as_str()), (0, dir));
        let grown = backend.expand_volume(&id, CapacityRange::new(5 << 30, 0).unwrap()).await.unwrap();
        assert_eq!((grown.capacity.bytes(), grown.node_expansion_required), (5 << 30, false));
        assert_eq!(server.backend().await.volume(&id).await.unwrap().unwrap().capacity.bytes(), 5 << 30);
        backend.delete_volume(&id).await.unwrap();
        assert!(backend.volume(&id).await.unwrap().is_none());
    }
    assert_eq!(names(&server.export()), Vec::<String>::new(), "the empty directory above goes, too");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_volume_is_kept_or_archived_where_its_class_says_so() {
    let server = Server::start("4.2", &[]);
    let mut config = server.config();
    config.on_delete = Some(OnDelete::Archive);
    let backend = Nfs::start(config).await.unwrap();
    let make = async |more: &[(&str, &str)]| {
        let volume = backend.create_volume(server.new_volume("pvc-1", more)).await.unwrap();
        let dir = volume.context["subdir"].clone();
        fs::write(server.export().join(&dir).join("file"), "precious").unwrap_or_else(|_| {
            fs::write(server.export().join(volume.context["subDir"].as_str()).join("file"), "precious")
                .unwrap();
        });
        volume.id
    };
    let kept = make(&[("onDelete", "retain")]).await;
    assert!(kept.as_str().ends_with("##retain"), "{kept}");
    backend.delete_volume(&kept).await.unwrap();
    assert_eq!(names(&server.export()), ["pvc-1"]);
    assert!(listed(&backend).await.is_empty(), "a volume that was deleted is no volume");

    for expected in [&["archived-pvc-1"][..], &["archived-pvc-1", "archived-pvc-1-2"]] {
        let archived = make(&[]).await;
        assert!(archived.as_str().ends_with("##archive"), "{archived}");
        backend.delete_volume(&archived).await.unwrap();
        assert_eq!(names(&server.export()), expected);
    }
    assert_eq!(fs::read_to_string(server.export().join("archived-pvc-1/file")).unwrap(), "precious");

    let mut config = server.config();
    config.replace_archived = true;
    let replacing = Nfs::start(config).await.unwrap();
    fs::write(server.export().join("archived-pvc-1/old"), "older").unwrap();
    let archived = make(&[]).await;
    replacing.delete_volume(&archived).await.unwrap();
    assert_eq!(names(&server.export()), ["archived-pvc-1", "archived-pvc-1-2"]);
    assert!(!server.export().join("archived-pvc-1/old").exists());

    let mut config = server.config();
    config.keep_archived = Some(Duration::ZERO);
    let forgetful = Nfs::start(config).await.unwrap();
    fs::create_dir(server.export().join("archived-by-hand")).unwrap();
    forgetful.volume(&archived).await.unwrap();
    forgetful.drain(SOON).await;
    assert_eq!(names(&server.export()), ["archived-by-hand"], "only what the driver archived goes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_has_everything_and_its_source_stays() {
    for version in VERSIONS {
        let server = Server::start(version, &[]);
        let backend = server.backend().await;
        let source = backend.create_volume(server.new_volume("source", &[])).await.unwrap();
        let dir = server.export().join("source");
        fs::create_dir(dir.join("sub")).unwrap();
        fs::write(dir.join("sub/file"), vec![7; 3 << 20]).unwrap();
        fs::set_permissions(dir.join("sub/file"), fs::Permissions::from_mode(0o4711)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.join("link")).unwrap();
        fs::hard_link(dir.join("sub/file"), dir.join("again")).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o1777)).unwrap();

        let new = NewVolume {
            source: Some(ContentSource::Volume(source.id.clone())),
            ..server.new_volume("clone", &[("subDir", "deep/clone")])
        };
        let clone = backend.create_volume(new.clone()).await.unwrap();
        assert_eq!(clone.source, new.source);
        let copy = server.export().join("deep/clone");
        assert_eq!(fs::read(copy.join("sub/file")).unwrap(), vec![7; 3 << 20]);
        assert_eq!(fs::metadata(copy.join("sub/file")).unwrap().mode() & 0o7777, 0o4711);
        assert_eq!(fs::metadata(&copy).unwrap().mode() & 0o7777, 0o1777);
        assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("/etc/passwd"));
        assert_eq!(
            fs::metadata(copy.join("again")).unwrap().ino(),
            fs::metadata(copy.join("sub/file")).unwrap().ino()
        );
        assert_eq!(server.backend().await.find_made(&new).await.unwrap().unwrap().source, new.source);
        assert!(names(&server.export().join(".berth/incoming")).is_empty());

        // A directory that has something in it is not written over.
        fs::create_dir(server.export().join("taken")).unwrap();
        fs::write(server.export().join("taken/mine"), "precious").unwrap();
        let taken =
            NewVolume { source: new.source.clone(), ..server.new_volume("x", &[("subDir", "taken")]) };
        assert!(matches!(backend.create_volume(taken).await, Err(Error::Conflict(_))));
        assert_eq!(names(&server.export().join("taken")), ["mine"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_on_the_share_leads_to_no_other_place() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let outside = server.dir().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), "precious").unwrap();
    std::os::unix::fs::symlink(&outside, server.export().join("evil")).unwrap();
    let share = server.share();
    let id = |dir: &str| format!("127.0.0.1#{}#{dir}##", share.trim_start_matches('/')).parse().unwrap();
    for dir in ["evil", "evil/x"] {
        assert!(backend.volume(&id(dir)).await.unwrap().is_none(), "{dir}");
        let _ = backend.delete_volume(&id(dir)).await;
        let made = backend.create_volume(server.new_volume("pvc-1", &[("subDir", dir)])).await;
        assert!(made.is_err(), "{dir}: {made:?}");
    }
    backend.drain(SOON).await;
    assert_eq!(names(&outside), ["file"]);
    assert_eq!(fs::read_to_string(outside.join("file")).unwrap(), "precious");
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_listed_page_by_page_and_the_share_reports_its_room() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let mut made = Vec::new();
    fs::create_dir(server.export().join("other")).unwrap();
    let other = format!("{}/other", server.share());
    for number in 0..7 {
        let on_other = [("share", other.as_str())];
        let parameters: &[(&str, &str)] = if number < 5 { &[] } else { &on_other };
        let new = server.new_volume(&format!("pvc-{number}"), parameters);
        made.push(backend.create_volume(new).await.unwrap().id.to_string());
    }
    fs::remove_dir(server.export().join("pvc-3")).unwrap();
    made.remove(3);
    made.sort();
    let mut config = server.config();
    config.shares = [server.share(), other].map(|share| format!("127.0.0.1:{share}")).to_vec();
    // A process that no call has told of the shares.
    let backend = Nfs::start(config).await.unwrap();
    // A page may end in a share, or with it.
    for limit in 1..=made.len() {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = backend.list_volumes(PageRequest { after, limit }).await.unwrap();
            assert!(page.entries.len() <= limit);
            all.extend(page.entries.iter().map(|volume| volume.id.to_string()));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        all.sort();
        assert_eq!(all, made, "{limit}");
    }
    let odd = PageRequest { after: Some("nonsense".into()), limit: 2 };
    assert!(matches!(backend.list_volumes(odd).await, Err(Error::Busy(_))));
    let all = backend.room(&Parameters::new()).await.unwrap();
    let one = backend.room(&server.class(&[])).await.unwrap();
    assert!(all.available.bytes() > 0 && one.available.bytes() > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_frozen_fails_its_calls_and_no_others() {
    let mut frozen = Server::start("4.2", &[]);
    let well = Server::start("3", &[]);
    let mut config = frozen.config();
    config.mount_options[0] += ",timeo=20,retrans=1";
    let (backend, other) = (Nfs::start(config).await.unwrap(), well.backend().await);
    let volume = backend.create_volume(frozen.new_volume("pvc-1", &[])).await.unwrap();
    frozen.send("stop");
    let begun = Instant::now();
    let failing = async {
        let failed = backend.create_volume(frozen.new_volume("pvc-2", &[])).await;
        assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
    };
    let working = async {
        other.create_volume(well.new_volume("pvc-3", &[])).await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5));
    };
    let both = Box::pin(async { tokio::join!(failing, working) });
    tokio::time::timeout(Duration::from_secs(60), both).await.unwrap();
    let health = backend.volume_health(&volume.id).await.unwrap();
    assert_eq!((health[0].severity, health[0].reason), (Severity::Inaccessible, "ServerUnreachable"));
    frozen.send("cont");
    backend.create_volume(frozen.new_volume("pvc-2", &[])).await.unwrap();
    assert!(backend.volume_health(&volume.id).await.unwrap().is_empty());
    fs::remove_dir(frozen.export().join("pvc-1")).unwrap();
    let health = backend.volume_health(&volume.id).await.unwrap();
    assert_eq!((health[0].severity, health[0].reason), (Severity::DataLoss, "DirectoryMissing"));
    let unhealthy = backend.list_unhealthy(PageRequest { after: None, limit: 10 }).await.unwrap();
    assert_eq!(unhealthy.entries.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_that_make_and_delete_the_same_volumes_agree() {
    let server = Server::start("4.2", &[]);
    let (one, two) = (server.backend().await, server.backend().await);
    for round in 0..5 {
        let new =
            server.new_volume(&format!("pvc-{round}"), &[("subDir", "team/shared/${pv.metadata.name}")]);
        let (first, second) = tokio::join!(one.create_volume(new.clone()), two.create_volume(new.clone()));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_eq!(first.id, second.id);
        assert_eq!(two.find_made(&new).await.unwrap().unwrap().capacity, first.capacity);
        let (first, second) = tokio::join!(one.delete_volume(&first.id), two.delete_volume(&first.id));
        assert!(first.is_ok() || second.is_ok());
        assert!(one.volume(&server_id(&server, round)).await.unwrap().is_none());
    }
    one.drain(SOON).await;
    two.drain(SOON).await;
    assert_eq!(names(&server.export()), Vec::<String>::new());
}

fn server_id(server: &Server, round: u32) -> berth_core::VolumeId {
    let share = server.share();
    let share = share.trim_start_matches('/');
    format!("127.0.0.1#{share}#team/shared/pvc-{round}#pvc-{round}#").parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_is_used_again_and_a_read_only_one_is_reported() {
    for version in VERSIONS {
        let mut server = Server::start(version, &[]);
        let backend = server.backend().await;
        let volume = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap();
        server.send("kill");
        let failed = backend.create_volume(server.new_volume("pvc-2", &[])).await;
        assert!(matches!(failed, Err(Error::Unavailable(_))), "{failed:?}");
        server.send("start");
        backend.create_volume(server.new_volume("pvc-2", &[])).await.unwrap();

        server.send("kill");
        server.send("set access=RO");
        server.send("start");
        let refused = backend.create_volume(server.new_volume("pvc-3", &[])).await;
        assert!(matches!(refused, Err(Error::Precondition(_))), "{refused:?}");
        let health = backend.volume_health(&volume.id).await.unwrap();
        assert_eq!((health[0].severity, health[0].reason), (Severity::Degraded, "ReadOnly"), "{health:?}");
        assert!(backend.delete_volume(&volume.id).await.is_err());
        assert!(server.export().join("pvc-1").is_dir());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_that_is_tried_again_has_nothing_that_its_source_lost_meanwhile() {
    const IO: u32 = 5;
    const LENGTH: u32 = 12_345;
    let mut server = Server::start("3", &[]);
    let fails = std::sync::atomic::AtomicBool::new(true);
    let backend = server
        .meddled(move |request| {
            use std::sync::atomic::Ordering::SeqCst;
            let is_last = request.range().is_some_and(|(_, length)| length == LENGTH);
            if is_last && fails.swap(false, SeqCst) { request.failed(IO) } else { Fate::Passed }
        })
        .await;
    let source = backend.create_volume(server.new_volume("pvc-1", &[])).await.unwrap().id;
    let dir = server.export().join("pvc-1");
    fs::create_dir(dir.join("sub")).unwrap();
    fs::write(dir.join("deleted"), "deleted").unwrap();
    fs::write(dir.join("renamed"), "renamed").unwrap();
    // What is in a directory comes after what is beside it.
    fs::write(dir.join("sub/last"), vec![1; usize::try_from(LENGTH).unwrap()]).unwrap();
    let clone = NewVolume { source: Some(ContentSource::Volume(source)), ..server.new_volume("pvc-2", &[]) };
    assert!(backend.create_volume(clone.clone()).await.is_err());
    // So that the server remembers none of it.
    server.send("kill");
    fs::remove_file(dir.join("deleted")).unwrap();
    fs::rename(dir.join("renamed"), dir.join("with a new name")).unwrap();
    server.send("start");
    backend.create_volume(clone).await.unwrap();
    assert_eq!(names(&server.export().join("pvc-2")), ["sub", "with a new name"]);
    assert_eq!(names(&server.export().join("pvc-2/sub")), ["last"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_cannot_be_finished_leaves_nothing_or_is_asked_for_again() {
    const DENIED: u32 = 13;
    let server = Server::start("3", &[]);
    let owned = [("uid", "4242")];
    let backend = server
        .meddled(|request| match request.asked() {
            Asked::SetAttributes => request.failed(DENIED),
            _ => Fate::Passed,
        })
        .await;
    let refused = backend.create_volume(server.new_volume("pvc-1", &owned)).await;
    assert!(matches!(refused, Err(Error::Denied(_))), "{refused:?}");
    backend.drain(SOON).await;
    assert_eq!(names(&server.export()), Vec::<String>::new(), "nobody may ever ask for it again");
    assert_eq!(listed(&server.backend().await).await, Vec::<String>::new());

    // One that cannot be taken back is not forgotten by whoever asked for it.
    let denied = std::sync::atomic::AtomicBool::new(false);
    let backend = server
        .meddled(move |request| {
            use std::sync::atomic::Ordering::SeqCst;
            match request.asked() {
                Asked::SetAttributes => {
                    denied.store(true, SeqCst);
                    request.failed(DENIED)
                }
                Asked::Rename if denied.load(SeqCst) => request.failed(DENIED),
                _ => Fate::Passed,
            }
        })
        .await;
    let unclear = backend.create_volume(server.new_volume("pvc-2", &owned)).await;
    assert!(matches!(&unclear, Err(Error::Unavailable(why)) if why.contains("taken back")), "{unclear:?}");
    let (backend, again) = (server.backend().await, server.new_volume("pvc-2", &owned));
    let made = backend.create_volume(again).await.unwrap();
    assert_eq!(fs::metadata(server.export().join("pvc-2")).unwrap().uid(), 4242);
    backend.delete_volume(&made.id).await.unwrap();
    backend.drain(SOON).await;
    assert_eq!(names(&server.export()), Vec::<String>::new());
}
