//! What a store finds on its disk, and what it does when that is full.

use std::{fs, time::Duration};

use berth_apiserver::store::OpenError;
use berth_host::{
    format::{self, Filesystem},
    loopdev::{self, LoopDevice},
    mount,
};
use tokio::task::JoinSet;

use super::*;

#[tokio::test]
async fn objects_and_revisions_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    let kept = create(&store, pod("kept"), "first").await;
    create(&store, pod("gone"), "").await;
    create(&store, Key::new("nodes".into(), "", "n"), "node").await;
    let changed = store.write(pod("kept"), Expect::Revision(kept.revision), text("second")).await.unwrap();
    delete(&store, pod("gone")).await.unwrap();
    drop(store);
    let (store, opened) = open(dir.path());
    assert_eq!(opened, Opened { objects: 2, revision: 5, damaged: 0 });
    assert_eq!(store.get(&pod("kept")), Some(changed));
    assert_eq!(store.get(&pod("gone")), None);
    assert_eq!(
        create(&store, pod("gone"), "").await.revision,
        6,
        "the removed object's revision is not given again"
    );
}

#[tokio::test]
async fn after_a_restart_a_watch_goes_on_where_nothing_was_missed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    create(&store, Key::new("nodes".into(), "", "n"), "").await;
    create(&store, pod("a"), "").await;
    create(&store, pod("b"), "").await;
    delete(&store, pod("a")).await.unwrap();
    drop(store);
    let (store, _) = open(dir.path());
    assert!(store.watch(&pods(), 3).is_err(), "the removal at 4 is no longer in the history");
    assert!(store.watch(&"nodes".into(), 0).is_err());
    let mut watch = store.watch(&pods(), 4).unwrap();
    let mut nodes = store.watch(&"nodes".into(), 1).unwrap();
    create(&store, pod("c"), "").await;
    create(&store, Key::new("nodes".into(), "", "m"), "").await;
    assert_eq!(watch.next().await.unwrap()[0].revision, 5);
    assert_eq!(nodes.next().await.unwrap()[0].revision, 6);
    assert_eq!(store.view_at(&"nodes".into(), 3).unwrap().len(), 1);
}

#[tokio::test]
async fn a_directory_has_one_store_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/when/missing");
    let (store, _) = open(&path);
    assert!(matches!(Store::open(&path, Options::default()), Err(OpenError::InUse(_))));
    drop(store);
    open(&path);
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(Store::open(&file, Options::default()), Err(OpenError::Directory(_))));
}

#[tokio::test]
async fn damaged_records_are_reported_and_the_others_are_all_there() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    for index in 0..100 {
        create(&store, pod(&format!("p{index:03}")), &format!("text {index}")).await;
    }
    drop(store);
    let journal = dir.path().join("objects");
    let damaged =
        fs::read_to_string(&journal).unwrap().replace("text 42", "test 42").replace("text 99", "test 99");
    fs::write(&journal, damaged).unwrap();
    let (store, opened) = open(dir.path());
    assert_eq!((opened.objects, opened.damaged), (98, 2));
    assert_eq!(fs::read_dir(dir.path().join("corrupt")).unwrap().count(), 2);
    assert_eq!(
        (store.get(&pod("p042")), text_of(&store.get(&pod("p043")).unwrap())),
        (None, "text 43".to_owned())
    );
    assert!(opened.revision >= 100, "the lost object had the newest revision");
    assert!(store.watch(&pods(), 100).is_err(), "whoever saw the lost objects must look again");
    drop(store);
    let (store, again) = open(dir.path());
    assert_eq!(again, Opened { damaged: 0, ..opened });
    assert!(store.watch(&pods(), 100).is_err());
    assert!(store.watch(&"nodes".into(), 100).is_err());
}

/// The journal of a store with one object that was changed, one that was removed, and one that is new, and its mark.
async fn small_store(dir: &Path) -> (Vec<u8>, Vec<u8>) {
    let (store, _) = open(dir);
    let first = create(&store, pod("changed"), "old").await;
    create(&store, pod("gone"), "old").await;
    store.write(pod("changed"), Expect::Revision(first.revision), text("new")).await.unwrap();
    delete(&store, pod("gone")).await.unwrap();
    create(&store, pod("last"), "new").await;
    drop(store);
    (fs::read(dir.join("objects")).unwrap(), fs::read(dir.join("objects.mark")).unwrap())
}

/// What is found in a store with this journal: nothing of an older state, and not less than before without a word.
fn found_in(journal: &[u8], mark: &[u8], what: &str) -> Store {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    fs::write(dir.path().join("objects"), journal).unwrap();
    fs::write(dir.path().join("objects.mark"), mark).unwrap();
    let (store, opened) = open(dir.path());
    let names: Vec<_> =
        store.view(&pods()).range(None, None).map(|object| object.key.name.to_string()).collect();
    let is_whole = names == ["changed", "last"] && text_of(&store.get(&pod("changed")).unwrap()) == "new";
    assert!(is_whole || store.damage().is_some(), "{what}: {names:?} without a word");
    assert_eq!(opened.damaged > 0, store.damage().is_some(), "{what}");
    store
}

#[tokio::test]
async fn a_flipped_bit_neither_brings_a_removed_object_back_nor_an_older_state() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, mark) = small_store(dir.path()).await;
    for index in 0..journal.len() {
        for bit in [1, 0x20] {
            let mut damaged = journal.clone();
            damaged[index] ^= bit;
            let what = format!("byte {index} ^ {bit}");
            let store = found_in(&damaged, &mark, &what);
            assert_eq!(store.get(&pod("gone")), None, "{what}");
            for name in ["changed", "last"] {
                match store.get(&pod(name)) {
                    Some(object) => assert_eq!(text_of(&object), "new", "{what}"),
                    // The key of the only record of an object cannot be told if it is damaged itself.
                    None => assert!(name == "last" || store.is_quarantined(&pod(name)), "{what}: {name}"),
                }
            }
        }
    }
}

#[tokio::test]
async fn a_cut_end_of_the_store_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (journal, mark) = small_store(dir.path()).await;
    for length in 0..journal.len() - 1 {
        let store = found_in(&journal[..length], &mark, &format!("cut at {length}"));
        assert!(store.damage().is_some(), "cut at {length}");
    }
}

#[tokio::test]
async fn a_quarantined_object_is_not_written_again_until_somebody_decides() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    create(&store, pod("a"), "text").await;
    drop(store);
    let path = dir.path().join("objects");
    fs::write(&path, fs::read_to_string(&path).unwrap().replace("text", "test")).unwrap();
    for _ in 0..2 {
        let (store, _) = open(dir.path());
        assert!(store.is_quarantined(&pod("a")));
        let refused = store.write(pod("a"), Expect::Absent, text("new")).await;
        assert!(matches!(refused, Err(WriteError::Quarantined)), "{refused:?}");
        let damage = store.damage().unwrap().to_string();
        assert!(damage.contains("pods default/a") && damage.contains("berth restore"), "{damage}");
    }
    fs::remove_dir_all(dir.path().join("corrupt")).unwrap();
    let (store, _) = open(dir.path());
    assert_eq!(store.damage(), None);
    create(&store, pod("a"), "new").await;
}

/// A small filesystem, gone when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = [format!("size={size}")];
        let attributes = mount::Attributes::default();
        mount::filesystem("none".as_ref(), dir.path(), "tmpfs", attributes, &options).unwrap();
        Self(dir)
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("store")
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        mount::unmount_lazily(self.0.path()).unwrap();
    }
}

async fn fill(store: &Store, prefix: &str) -> usize {
    let content = "x".repeat(4000);
    for index in 0.. {
        match store.write(pod(&format!("{prefix}{index}")), Expect::Absent, text(&content)).await {
            Ok(_) => {}
            Err(WriteError::Full(why)) => {
                assert!(!why.is_empty());
                return index;
            }
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!()
}

#[tokio::test]
async fn a_full_disk_refuses_writes_serves_reads_and_recovers_by_removals() {
    let disk = SmallDisk::new("24m");
    let options = Options { history_bytes: 1 << 30, ..Options::default() };
    let (store, _) = Store::open(&disk.path(), options).unwrap();
    let mut watch = store.watch(&pods(), 0).unwrap();
    for round in ["a", "b", "c", "d"] {
        let written = fill(&store, round).await;
        assert!(written > 1000, "{written} in round {round}");
        assert!(matches!(
            store.write(pod("more"), Expect::Absent, text(&"x".repeat(4000))).await,
            Err(WriteError::Full(_))
        ));
        assert_eq!(store.view(&pods()).len(), written);
        assert!(store.get(&pod("more")).is_none());
        for index in 0..written {
            delete(&store, pod(&format!("{round}{index}"))).await.unwrap();
        }
    }
    create(&store, pod("last"), "ok").await;
    let mut seen = 0;
    while watch.revision() < store.revision() {
        let events = watch.next().await.unwrap();
        assert!(events.iter().all(|event| event.revision > seen));
        seen = events.last().unwrap().revision;
    }
    let revision = store.revision();
    drop((store, watch));
    let (store, opened) = open(&disk.path());
    assert_eq!(opened, Opened { objects: 1, revision, damaged: 0 });
    drop(store);
}

/// Leaves no room on the disk of `file`.
fn hog(file: &Path) {
    let mut size = 1 << 20;
    let mut file = fs::File::create(file).unwrap();
    while size > 0 {
        if std::io::Write::write_all(&mut file, &vec![1; size]).is_err() {
            size /= 2;
        }
    }
}

#[tokio::test]
async fn when_others_fill_the_disk_objects_can_still_be_removed() {
    let disk = SmallDisk::new("24m");
    let (store, _) = open(&disk.path());
    for index in 0..300 {
        create(&store, pod(&format!("p{index}")), &"x".repeat(1000)).await;
    }
    let others = disk.0.path().join("others");
    hog(&others);
    let written = fill(&store, "more").await;
    for index in 0..300 {
        delete(&store, pod(&format!("p{index}"))).await.unwrap();
    }
    assert_eq!(store.view(&pods()).len(), written);
    fs::remove_file(&others).unwrap();
    create(&store, pod("again"), "room").await;
    drop(store);
    let (store, opened) = open(&disk.path());
    assert_eq!((opened.objects, opened.damaged), (written + 1, 0));
    drop(store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn on_a_full_disk_removals_are_made_though_the_writes_beside_them_are_not() {
    let disk = SmallDisk::new("24m");
    let (store, _) = open(&disk.path());
    for index in 0..200 {
        create(&store, pod(&format!("p{index}")), &"x".repeat(1000)).await;
    }
    hog(&disk.0.path().join("others"));
    let written = fill(&store, "more").await;
    let before = store.revision();
    let mut watch = store.watch(&pods(), before).unwrap();
    let mut writers = JoinSet::new();
    for index in 0..200 {
        let (store, key) = (store.clone(), pod(&format!("p{index}")));
        writers.spawn(async move {
            let big = text(&"x".repeat(4000));
            if index % 2 == 0 {
                assert!(matches!(store.write(key, Expect::Present, big).await, Err(WriteError::Full(_))));
            } else {
                delete(&store, key.clone()).await.unwrap();
                assert!(matches!(store.write(key, Expect::Absent, big).await, Err(WriteError::Full(_))));
            }
        });
    }
    writers.join_all().await;
    assert_eq!(store.view(&pods()).len(), written + 100);
    let (mut seen, mut newest) = (0, before);
    while seen < 100 {
        for event in watch.next().await.unwrap() {
            assert!(event.revision > newest && event.object.key.name.starts_with('p'));
            (seen, newest) = (seen + 1, event.revision);
        }
    }
    let objects: Vec<_> = store.view(&pods()).range(None, None).cloned().collect();
    drop((store, watch));
    let (store, opened) = open(&disk.path());
    assert_eq!((opened.damaged, opened.revision), (0, newest));
    assert!(store.view(&pods()).range(None, None).eq(&objects));
    drop(store);
}

/// A filesystem on a loop device, taken down when dropped.
struct LoopDisk {
    device: u32,
    target: tempfile::TempDir,
}

impl LoopDisk {
    fn mount(image: &Path) -> Self {
        let device = LoopDevice::attach(image, loopdev::Options::default()).unwrap();
        let target = tempfile::tempdir().unwrap();
        mount::filesystem(device.path(), target.path(), "ext4", mount::Attributes::default(), &[]).unwrap();
        Self { device: device.number(), target }
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        mount::unmount(self.target.path()).unwrap();
        loopdev::detach(self.device).unwrap();
    }
}

#[tokio::test]
async fn a_disk_that_fails_refuses_writes_serves_reads_and_has_all_that_was_acknowledged() {
    // The disk has no room behind it for what it promises, as a thin one whose pool is full.
    let pool = SmallDisk::new("12m");
    let image = pool.0.path().join("image");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    format::make(&image, Filesystem::Ext4, Duration::from_secs(60)).unwrap();
    let disk = LoopDisk::mount(&image);
    let (store, _) = open(disk.target.path());
    let mut acknowledged = Vec::new();
    let failure = loop {
        if acknowledged.len() == 20 {
            hog(&pool.0.path().join("others"));
        }
        let key = pod(&format!("p{}", acknowledged.len()));
        match store.write(key, Expect::Absent, text(&"x".repeat(20_000))).await {
            Ok(object) => acknowledged.push(object),
            Err(failure) => break failure,
        }
    };
    assert!(matches!(&failure, WriteError::Storage(why) if !why.is_empty()), "{failure}");
    assert!(matches!(delete(&store, pod("p0")).await, Err(WriteError::Storage(_))));
    assert_eq!(store.view(&pods()).len(), acknowledged.len());
    assert_eq!(store.revision(), acknowledged.len() as u64);
    let (mut watch, mut seen) = (store.watch(&pods(), 0).unwrap(), 0);
    while seen < acknowledged.len() {
        seen += tokio::time::timeout(Duration::from_secs(10), watch.next()).await.unwrap().unwrap().len();
    }
    assert_eq!(seen, acknowledged.len());
    drop((watch, store));
    drop(disk);
    fs::remove_file(pool.0.path().join("others")).unwrap();
    let disk = LoopDisk::mount(&image);
    let (store, _) = open(disk.target.path());
    for object in &acknowledged {
        assert_eq!(store.get(&object.key).as_ref(), Some(object));
    }
    create(&store, pod("again"), "works").await;
    drop(store);
}
