//! Volumes at targets, by the kernel's client.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use berth_backends::{Error, Result, TargetMounts as _, Volume, nfs::Nfs};
use berth_core::{AccessMode, Capacity, VolumeId};

use crate::{
    calls::Calls as _,
    kernel::{self, EXPORT, Scratch, VERSIONS, backend, class, new_volume, publish_as, serve, unpublish},
    suite,
};

async fn create(backend: &Nfs, version: &str, name: &str) -> Volume {
    let new = new_volume(name, 1024, AccessMode::MultiNodeMultiWriter, class(version, &[]));
    assert!(backend.find_made(&new).await.unwrap().is_none());
    backend.create_volume(new).await.unwrap()
}

async fn publish(backend: &Nfs, volume: &Volume, target: &Path) -> Result<()> {
    publish_as(backend, volume, target, AccessMode::MultiNodeMultiWriter).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_whole_driver_conforms_in_every_version() {
    serve();
    for version in VERSIONS {
        let scratch = Scratch::new();
        let outcome =
            suite::run(scratch.path(), backend(scratch.path()).await, &class(version, &[]), "").await;
        eprintln!("version {version}: {} passed, {} skipped", outcome.passed, outcome.skipped);
        assert!(outcome.passed > 60, "{} passed", outcome.passed);
        assert!(scratch.mounts().is_empty(), "{:?}", scratch.mounts());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_share_is_mounted_once_and_goes_with_its_last_volume() {
    serve();
    for version in VERSIONS {
        let scratch = Scratch::new();
        let backend = backend(scratch.path()).await;
        let name = |number: u32| format!("shared-{}-{number}", version.replace('.', "-"));
        let (one, two) =
            (create(&backend, version, &name(1)).await, create(&backend, version, &name(2)).await);
        let (first, second) = (scratch.path().join("first"), scratch.path().join("second"));
        publish(&backend, &one, &first).await.unwrap();
        publish(&backend, &two, &second).await.unwrap();
        assert_eq!(scratch.mounts().len(), 3, "{:?}", scratch.mounts());
        fs::write(first.join("file"), "here").unwrap();
        assert_eq!(fs::read_to_string(Path::new(EXPORT).join(name(1)).join("file")).unwrap(), "here");
        assert!(!second.join("file").exists());
        fs::write(first.join("large"), vec![1; 1 << 20]).unwrap();
        let usage = backend.usage(&one, &first).await.unwrap();
        assert!(usage.bytes.total > 0 && (1 << 20..2 << 20).contains(&usage.bytes.used), "{usage:?}");
        assert_eq!(usage.inodes.unwrap().used, 2);
        unpublish(&backend, &first).await;
        assert_eq!(scratch.mounts().len(), 2);
        unpublish(&backend, &second).await;
        assert!(scratch.mounts().is_empty(), "{:?}", scratch.mounts());
        for volume in [one, two] {
            backend.delete_volume(&volume.id).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_static_volume_is_published_by_its_context_and_a_link_is_not_followed() {
    serve();
    let scratch = Scratch::new();
    let backend = backend(scratch.path()).await;
    fs::create_dir_all(Path::new(EXPORT).join("static/dir")).unwrap();
    std::os::unix::fs::symlink("/etc", Path::new(EXPORT).join("static/evil")).unwrap();
    let context = |dir: &str| {
        BTreeMap::from([
            ("server".to_owned(), "127.0.0.1".to_owned()),
            ("share".to_owned(), "/".to_owned()),
            ("subDir".to_owned(), dir.to_owned()),
        ])
    };
    let id: VolumeId = "any-handle".parse().unwrap();
    let target = scratch.path().join("target");
    for (dir, works) in [("static/dir", true), ("static/evil", false), ("static/missing", false)] {
        let volume = Volume { context: context(dir), ..Volume::new(id.clone(), Capacity::ZERO) };
        let published = publish(&backend, &volume, &target).await;
        assert_eq!(published.is_ok(), works, "{dir}: {published:?}");
        unpublish(&backend, &target).await;
    }
}

async fn is_bound(backend: &Nfs, target: &Path) -> bool {
    backend.node.is_mounted(target).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_volume_is_found_out_and_published_again() {
    serve();
    for version in VERSIONS {
        let scratch = Scratch::new();
        let backend = backend(scratch.path()).await;
        let name = format!("stale-{}", version.replace('.', "-"));
        let volume = create(&backend, version, &name).await;
        let target = scratch.path().join("target");
        publish(&backend, &volume, &target).await.unwrap();
        assert!(is_bound(&backend, &target).await);
        // Restored from a backup, say: the same path, another directory.
        let dir = Path::new(EXPORT).join(&name);
        fs::remove_dir(&dir).unwrap();
        fs::create_dir(&dir).unwrap();
        assert!(!is_bound(&backend, &target).await, "version {version}");
        unpublish(&backend, &target).await;
        publish(&backend, &volume, &target).await.unwrap();
        fs::write(target.join("file"), "new").unwrap();
        assert_eq!(fs::read_to_string(dir.join("file")).unwrap(), "new");
        unpublish(&backend, &target).await;
        backend.delete_volume(&volume.id).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_gone_holds_nobody_up() {
    serve();
    let soon = Duration::from_secs(60);
    for version in ["3", "4.2"] {
        let scratch = Scratch::new();
        let backend = backend(scratch.path()).await;
        let name = |number: u32| format!("gone-{}-{number}", version.replace('.', "-"));
        let (one, two) =
            (create(&backend, version, &name(1)).await, create(&backend, version, &name(2)).await);
        let (first, second) = (scratch.path().join("first"), scratch.path().join("second"));
        publish(&backend, &one, &first).await.unwrap();
        kernel::run("rpc.nfsd", &["0"]);
        let begun = Instant::now();
        let gone = async {
            let refused = publish(&backend, &two, &second).await;
            assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
            assert!(is_bound(&backend, &first).await, "it is there, if silent");
            assert!(backend.usage(&one, &first).await.is_err());
            let health = backend.volume_health(&one.id).await.unwrap();
            assert_eq!(health[0].reason, "ServerUnreachable");
            unpublish(&backend, &first).await;
            assert!(!is_bound(&backend, &first).await);
        };
        let ended = tokio::time::timeout(Duration::from_secs(120), gone).await;
        kernel::start_again();
        ended.expect("no call outlives its deadline");
        eprintln!("version {version}: without a server for {:?}", begun.elapsed());
        tokio::time::timeout(soon, publish(&backend, &two, &second)).await.unwrap().unwrap();
        fs::write(second.join("file"), "back").unwrap();
        unpublish(&backend, &second).await;
        for volume in [one, two] {
            backend.delete_volume(&volume.id).await.unwrap();
        }
        assert!(scratch.mounts().is_empty(), "{:?}", scratch.mounts());
    }
}
