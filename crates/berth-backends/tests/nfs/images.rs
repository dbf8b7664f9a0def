//! Volumes that are images, from the controller's side.

use std::{
    collections::BTreeSet,
    fs,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::Path,
    time::Duration,
};

use berth_backends::{
    ContentSource, Error, Parameters, Severity,
    nfs::{Config, Nfs},
};
use berth_core::{AccessMode, CapacityRange};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use crate::{
    calls::{Calls as _, NewVolume},
    server::{Server, VERSIONS, mounted},
};

fn new_image(server: &Server, name: &str, more: &[(&str, &str)]) -> NewVolume {
    let more: Vec<_> = [("kind", "image")].iter().chain(more).copied().collect();
    let mut new = server.new_volume(name, &more);
    new.capabilities = vec![mounted()];
    new.capabilities[0].mode = AccessMode::SingleNodeWriter;
    new
}

/// Lets a server see what was done behind its back.
fn forget(server: &mut Server) {
    server.send("kill");
    server.send("start");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_sparse_and_made_whole_or_not_at_all() {
    for version in VERSIONS {
        let mut server = Server::start(version, &[]);
        let backend = server.backend().await;
        let new = new_image(&server, "pvc-1", &[("subDir", "team/data")]);
        assert!(backend.find_made(&new).await.unwrap().is_none());
        let volume = backend.create_volume(new.clone()).await.unwrap();
        assert_eq!((volume.capacity.bytes(), volume.context["kind"].as_str()), (1 << 30, "image"));
        let image = fs::metadata(server.export().join("team/data/image")).unwrap();
        assert_eq!((image.len(), image.blocks(), image.mode() & 0o777), (1 << 30, 0, 0o600));
        let found = server.backend().await.find_made(&new).await.unwrap().unwrap();
        assert_eq!((found.id, found.capacity), (volume.id.clone(), volume.capacity));

        // As if its maker had been killed before the last step, and in the middle of another attempt.
        let key = fs::read_dir(server.export().join(".berth/volumes"))
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .file_name();
        let key = key.to_str().unwrap().replace(".json", "");
        let aside = server.export().join(".berth/incoming").join(key);
        fs::rename(server.export().join("team/data"), &aside).unwrap();
        fs::write(aside.join("image"), "half").unwrap();
        fs::write(aside.join("stray"), "").unwrap();
        forget(&mut server);
        let next = server.backend().await;
        assert!(next.find_made(&new).await.unwrap().is_none());
        next.create_volume(new).await.unwrap();
        let names: Vec<_> = fs::read_dir(server.export().join("team/data")).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(fs::metadata(server.export().join("team/data/image")).unwrap().len(), 1 << 30);

        // Another volume's directory is not used.
        let taken = new_image(&server, "pvc-2", &[("subDir", "team/data")]);
        assert!(matches!(next.create_volume(taken).await, Err(Error::Precondition(_))));
        assert_eq!(fs::metadata(server.export().join("team/data/image")).unwrap().len(), 1 << 30);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_grows_and_its_loss_is_reported() {
    let mut server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let volume = backend.create_volume(new_image(&server, "pvc-1", &[])).await.unwrap();
    let image = server.export().join("pvc-1/image");
    for bytes in [3 << 30, 3 << 30, 2 << 30] {
        let grown = server
            .backend()
            .await
            .expand_volume(&volume.id, CapacityRange::new(bytes, 0).unwrap())
            .await
            .unwrap();
        assert!(grown.node_expansion_required);
        assert_eq!((grown.capacity.bytes(), fs::metadata(&image).unwrap().len()), (3 << 30, 3 << 30));
    }
    // Not all of it was done the last time.
    fs::File::options().write(true).open(&image).unwrap().set_len(1 << 30).unwrap();
    backend.expand_volume(&volume.id, CapacityRange::new(3 << 30, 0).unwrap()).await.unwrap();
    assert_eq!(fs::metadata(&image).unwrap().len(), 3 << 30);
    let odd =
        backend.expand_volume(&volume.id, CapacityRange::new((3 << 30) + 1, (3 << 30) + 2).unwrap()).await;
    assert!(matches!(odd, Err(Error::OutOfRange(_))), "{odd:?}");
    assert!(backend.volume_health(&volume.id).await.unwrap().is_empty());
    fs::remove_file(&image).unwrap();
    forget(&mut server);
    let health = backend.volume_health(&volume.id).await.unwrap();
    assert_eq!(health[0].severity, Severity::DataLoss);
    let grown = backend.expand_volume(&volume.id, CapacityRange::new(4 << 30, 0).unwrap()).await;
    assert!(matches!(grown, Err(Error::Precondition(_))), "{grown:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_has_the_capacity_that_was_asked_for_although_its_file_is_longer() {
    const ASKED: u64 = (1 << 20) + 1;
    const LENGTH: u64 = 2 << 20;
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let new = |name: &str, source| NewVolume {
        range: CapacityRange::new(ASKED.cast_signed(), 0).unwrap(),
        source,
        ..new_image(&server, name, &[])
    };
    let file = |name: &str| fs::metadata(server.export().join(name).join("image")).unwrap().len();
    let source = backend.create_volume(new("source", None)).await.unwrap();
    assert_eq!((source.capacity.bytes(), file("source")), (ASKED, LENGTH));
    let mut snapshot =
        backend.create_snapshot("snap".parse().unwrap(), &source.id, &Parameters::new()).await.unwrap();
    while !snapshot.ready {
        snapshot = backend.snapshot(&snapshot.id).await.unwrap().unwrap();
    }
    assert_eq!(snapshot.size.bytes(), ASKED);
    let clone = new("clone", Some(ContentSource::Volume(source.id.clone())));
    let restored = new("restored", Some(ContentSource::Snapshot(snapshot.id)));
    for (name, copy) in [("clone", clone), ("restored", restored)] {
        let copy = backend.create_volume(copy).await.unwrap();
        assert_eq!((copy.capacity.bytes(), file(name)), (ASKED, LENGTH), "{name}");
    }
    let wanted: u64 = (3 << 20) + 1;
    let range = CapacityRange::new(wanted.cast_signed(), 0).unwrap();
    let grown = backend.expand_volume(&source.id, range).await.unwrap();
    assert_eq!((grown.capacity.bytes(), file("source")), (wanted, (3 << 20) + 4096));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_in_use_is_not_copied_and_a_copy_is_nobodys() {
    for version in VERSIONS {
        let server = Server::start(version, &[]);
        let backend = server.backend().await;
        let source = backend.create_volume(new_image(&server, "source", &[])).await.unwrap();
        let dir = server.export().join("source");
        let image = fs::File::options().write(true).open(dir.join("image")).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&image, b"data", 512 << 20).unwrap();
        let copy = |name: &str, source| NewVolume { source: Some(source), ..new_image(&server, name, &[]) };
        let claim = |read_only: bool| {
            let text = format!(r#"{{"node":"node-9","place":"/x","read_only":{read_only},"since":0}}"#);
            fs::write(dir.join(".used-by-other.json"), text).unwrap();
        };
        let snap = async |name: &str| {
            backend.create_snapshot(name.parse().unwrap(), &source.id, &Parameters::new()).await
        };
        claim(false);
        let clone = copy("clone", ContentSource::Volume(source.id.clone()));
        for refused in [backend.create_volume(clone.clone()).await.err(), snap("snap").await.err()] {
            let Some(Error::Precondition(sentence)) = refused else { panic!("{refused:?}") };
            assert!(sentence.contains("node-9"), "{sentence}");
        }
        assert!(!server.export().join(".berth/snapshots").exists(), "nothing is written down");
        fs::write(dir.join(".used-by-other.json"), "half").unwrap();
        assert!(snap("snap").await.is_err(), "who cannot be read may write");

        // Those who only read do no harm, and do not read the copy.
        claim(true);
        let mut snapshot = snap("snap").await.unwrap();
        while !snapshot.ready {
            snapshot = backend.snapshot(&snapshot.id).await.unwrap().unwrap();
        }
        assert!(snapshot.size.bytes() >= 1 << 30, "{snapshot:?}");
        backend.create_volume(clone).await.unwrap();
        backend.create_volume(copy("restored", ContentSource::Snapshot(snapshot.id))).await.unwrap();
        for name in ["clone", "restored"] {
            let dir = server.export().join(name);
            let mut names: Vec<_> =
                fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            assert_eq!(names, ["copied", "image"], "{name}");
            let image = fs::File::open(dir.join("image")).unwrap();
            let mut data = [0; 4];
            std::os::unix::fs::FileExt::read_exact_at(&image, &mut data, 512 << 20).unwrap();
            assert_eq!(&data, b"data");
            let seen = image.metadata().unwrap();
            assert!(
                seen.len() == 1 << 30 && seen.blocks() * 512 < 1 << 20,
                "{name}: {} blocks",
                seen.blocks()
            );
        }
        let directory = backend.create_volume(server.new_volume("directory", &[])).await.unwrap();
        let wrong = copy("wrong", ContentSource::Volume(directory.id));
        assert!(matches!(backend.create_volume(wrong).await, Err(Error::Invalid(_))));
        let wrong = NewVolume {
            source: Some(ContentSource::Volume(source.id.clone())),
            ..server.new_volume("wrong", &[])
        };
        assert!(matches!(backend.create_volume(wrong).await, Err(Error::Invalid(_))));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_told_while_an_image_is_copied() {
    let server = Server::start("4.2", &[]);
    let backend = server.backend().await;
    let source = backend.create_volume(new_image(&server, "source", &[])).await.unwrap();
    let dir = server.export().join("source");
    fs::write(dir.join("image"), vec![7; 16 << 20]).unwrap();
    fs::File::options().write(true).open(dir.join("image")).unwrap().set_len(1 << 30).unwrap();
    let names = Names::watch(&dir);
    let clone = NewVolume {
        source: Some(ContentSource::Volume(source.id.clone())),
        ..new_image(&server, "clone", &[])
    };
    backend.create_volume(clone).await.unwrap();
    let of_clone = names.since();
    let mut snapshot =
        backend.create_snapshot("snap".parse().unwrap(), &source.id, &Parameters::new()).await.unwrap();
    while !snapshot.ready {
        snapshot = backend.snapshot(&snapshot.id).await.unwrap().unwrap();
    }
    let of_snapshot = names.since();
    for notes in [&of_clone, &of_snapshot] {
        let notes: BTreeSet<_> = notes.iter().filter(|name| name.starts_with(".copied-by-")).collect();
        assert_eq!(notes.len(), 1, "{of_clone:?}, {of_snapshot:?}");
        assert!(!dir.join(notes.first().unwrap()).exists(), "{notes:?} stays");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_are_not_told_any_more_of_a_snapshot_that_was_deleted() {
    let mut server = Server::start("4.2", &[]);
    let config = Config { snapshot_patience: Duration::from_millis(200), ..server.config() };
    let backend = Nfs::start(config).await.unwrap();
    let source = backend.create_volume(new_image(&server, "source", &[])).await.unwrap();
    let dir = server.export().join("source");
    let mut snapshot =
        backend.create_snapshot("snap".parse().unwrap(), &source.id, &Parameters::new()).await.unwrap();
    while !snapshot.ready {
        snapshot = backend.snapshot(&snapshot.id).await.unwrap().unwrap();
    }
    // The copy is made again, and waits for the node to leave the image.
    fs::remove_file(server.export().join("snap/source.tar.gz")).unwrap();
    forget(&mut server);
    let claim = r#"{"node":"node-9","place":"/x","read_only":false,"since":0}"#;
    fs::write(dir.join(".used-by-other.json"), claim).unwrap();
    assert!(!backend.snapshot(&snapshot.id).await.unwrap().unwrap().ready);
    until_notes(1, &dir).await;
    backend.delete_snapshot(&snapshot.id).await.unwrap();
    until_notes(0, &dir).await;
}

/// Waits until there are so many notes that the image in a directory is being copied.
async fn until_notes(wanted: usize, dir: &Path) {
    let notes = || {
        let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(".copied-by-")).count()
    };
    let there = async {
        while notes() != wanted {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), there).await.unwrap();
}

/// The names that appear in a directory, however short they stay.
struct Names(OwnedFd);

impl Names {
    fn watch(directory: &Path) -> Self {
        let events = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        inotify::add_watch(&events, directory, WatchFlags::CREATE | WatchFlags::MOVED_TO).unwrap();
        Self(events)
    }

    /// Those that appeared since the last time.
    fn since(&self) -> Vec<String> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(&self.0, &mut buffer);
        let mut names = Vec::new();
        while let Ok(event) = reader.next() {
            names.extend(event.file_name().map(|name| name.to_string_lossy().into_owned()));
        }
        names
    }
}
