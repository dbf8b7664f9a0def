//! The local backend on a real directory: what is promised, what is kept, and what a restart makes of a mess.

mod calls;

use std::{fs, path::Path};

use berth_core::{Access, AccessMode, Capacity, CapacityRange, Name, NodeId, VolumeCapability};

use super::{Config, Kind, Local};
use crate::{
    Attachment as _, CapacityInfo as _, Cloning as _, Context, Error, Expansion as _, GroupSnapshots as _,
    Health as _, Listing as _, NewSnapshot, NewVolume, NodeVolume, PageRequest, Parameters, Result, Severity,
    Snapshots as _, Sources as _, Staging as _, Stats as _, Volume, Volumes as _,
};

const MIB: i64 = 1 << 20;

fn config(dir: &Path) -> Config {
    Config { kind: Some(Kind::Dir), ..Config::new(dir.to_owned(), "node-1".parse().unwrap()) }
}

async fn open(dir: &Path) -> Local {
    Local::open(config(dir)).await.unwrap()
}

fn mounted() -> VolumeCapability {
    VolumeCapability {
        access: Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None },
        mode: AccessMode::SingleNodeWriter,
    }
}

fn named(name: &str, mebibytes: i64) -> NewVolume {
    NewVolume {
        name: name.parse().unwrap(),
        range: CapacityRange::new(mebibytes * MIB, 0).unwrap(),
        capabilities: vec![mounted()],
        parameters: Parameters::new(),
        mutable: Parameters::new(),
        ephemeral: false,
    }
}

fn with_kind(name: &str, kind: &str) -> NewVolume {
    NewVolume { parameters: Parameters::from([("kind".into(), kind.into())]), ..named(name, 8) }
}

fn ctx() -> &'static Context {
    static CONTEXT: std::sync::LazyLock<Context> = std::sync::LazyLock::new(Context::default);
    &CONTEXT
}

async fn create(local: &Local, new: NewVolume) -> Result<Volume> {
    local.create(ctx(), local.plan(ctx(), &new)?).await
}

fn on_node(volume: &Volume, capability: VolumeCapability) -> NodeVolume {
    NodeVolume {
        id: volume.id.clone(),
        capability,
        read_only: false,
        context: Parameters::new(),
        publish_context: Parameters::new(),
        staging: None,
    }
}

async fn stage(local: &Local, volume: &Volume, staging: &Path) -> Result<()> {
    local.stage(ctx(), &on_node(volume, mounted()), staging).await
}

async fn grow(local: &Local, volume: &Volume, mebibytes: i64) -> Result<crate::Expanded> {
    local.expand(ctx(), volume, CapacityRange::new(mebibytes * MIB, 0).unwrap()).await
}

async fn data_of(local: &Local, volume: &Volume) -> std::path::PathBuf {
    local.source(ctx(), &on_node(volume, mounted())).await.unwrap().path()
}

async fn ids(local: &Local) -> Vec<String> {
    let page = local.list(ctx(), &PageRequest { after: None, limit: 1000 }).await.unwrap();
    page.entries.iter().map(|volume| volume.id.to_string()).collect()
}

fn entries(path: &Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

#[tokio::test]
async fn volumes_snapshots_and_attachments_outlive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, named("a", 8)).await.unwrap();
    fs::write(data_of(&local, &volume).await.join("file"), "kept").unwrap();
    let node: NodeId = "node-1".parse().unwrap();
    local.attach(ctx(), &volume, &node, &mounted()).await.unwrap();
    let new =
        NewSnapshot { name: "s".parse().unwrap(), source: volume.id.clone(), parameters: Parameters::new() };
    let snapshot = local.take_snapshot(ctx(), new, &volume).await.unwrap();
    grow(&local, &volume, 16).await.unwrap();
    drop(local);

    let local = open(dir.path()).await;
    let plan = local.plan(ctx(), &named("a", 8)).unwrap();
    let again = local.find(ctx(), &plan).await.unwrap().unwrap();
    assert_eq!((again.id.clone(), again.capacity), (volume.id, Capacity::mebibytes(16)));
    let attached = crate::Attached { node, read_only: false, mode: Some(AccessMode::SingleNodeWriter) };
    assert_eq!(again.attachments, [attached]);
    assert_eq!(local.0.state().attached_to("node-1"), 1);
    assert_eq!(local.snapshot(ctx(), &snapshot.id).await.unwrap().unwrap().created, snapshot.created);
    let plan = local.plan(ctx(), &named("b", 8)).unwrap();
    let restored = local.restore(ctx(), plan, &snapshot).await.unwrap();
    assert_eq!(fs::read_to_string(data_of(&local, &restored).await.join("file")).unwrap(), "kept");
}

#[tokio::test]
async fn what_a_crash_left_without_a_record_is_gone_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, named("kept", 8)).await.unwrap();
    drop(local);
    let orphan = "0123456789abcdef0123456789abcdef";
    for part in ["volumes", "snapshots", "incoming"] {
        fs::create_dir_all(dir.path().join(part).join(orphan).join("data/deep")).unwrap();
    }
    fs::create_dir_all(dir.path().join("trash/17-old/data")).unwrap();

    let local = open(dir.path()).await;
    local.drain(std::time::Duration::from_secs(10)).await;
    assert_eq!(ids(&local).await, [volume.id.to_string()]);
    for (part, count) in [("volumes", 1), ("snapshots", 0), ("incoming", 0), ("trash", 0), ("lost", 0)] {
        assert_eq!(entries(&dir.path().join(part)), count, "{part}");
    }
}

#[tokio::test]
async fn a_damaged_record_costs_no_data_and_no_other_volume() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let lost = create(&local, named("lost", 8)).await.unwrap();
    let kept = create(&local, named("kept", 8)).await.unwrap();
    fs::write(data_of(&local, &lost).await.join("file"), "precious").unwrap();
    drop(local);
    let journal = dir.path().join("state/volumes.journal");
    let text = fs::read_to_string(&journal).unwrap();
    fs::write(&journal, text.replace(r#""name":"lost""#, r#""name":"l0st""#)).unwrap();

    for _ in 0..2 {
        let local = open(dir.path()).await;
        assert_eq!(ids(&local).await, [kept.id.to_string()]);
        let health = local.health(ctx(), &lost.id).await.unwrap();
        assert_eq!((health[0].severity, health[0].reason), (Severity::Inaccessible, "CorruptMetadata"));
        let listed = local.list_unhealthy(ctx(), &PageRequest { after: None, limit: 10 }).await.unwrap();
        assert_eq!(listed.entries.len(), 1);
        assert!(local.health(ctx(), &kept.id).await.unwrap().is_empty());
    }
    let key = lost.id.as_str().strip_prefix("vol-").unwrap();
    let file = dir.path().join("lost").join(key).join("data/file");
    assert_eq!(fs::read_to_string(file).unwrap(), "precious");
}

#[tokio::test]
async fn records_that_are_lost_as_a_whole_cost_no_data() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    for (name, lose) in [
        ("gone", (&|| fs::remove_dir_all(&state).unwrap()) as &dyn Fn()),
        ("empty", &|| fs::write(state.join("volumes.journal"), "").unwrap()),
        ("zeros", &|| fs::write(state.join("volumes.journal"), [0; 8192]).unwrap()),
        // As if the one who set a record aside was killed before it kept the data.
        ("earlier", &|| {
            fs::create_dir_all(state.join("corrupt")).unwrap();
            fs::write(state.join("corrupt/volumes.journal-1"), "").unwrap();
            let journal = fs::read_to_string(state.join("volumes.journal")).unwrap();
            let others: Vec<&str> = journal.lines().filter(|line| !line.contains("earlier")).collect();
            fs::write(state.join("volumes.journal"), others.join("\n") + "\n").unwrap();
        }),
    ] {
        let local = open(dir.path()).await;
        let volume = create(&local, named(name, 8)).await.unwrap();
        fs::write(data_of(&local, &volume).await.join("file"), name).unwrap();
        drop(local);
        lose();
        let local = open(dir.path()).await;
        assert_eq!(ids(&local).await, Vec::<String>::new(), "{name}");
        let key = volume.id.as_str().strip_prefix("vol-").unwrap();
        let kept = fs::read_to_string(dir.path().join("lost").join(key).join("data/file"));
        assert_eq!(kept.unwrap(), name);
    }
}

#[tokio::test]
async fn missing_data_is_reported_as_data_loss_and_never_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, named("a", 8)).await.unwrap();
    fs::remove_dir(data_of(&local, &volume).await).unwrap();
    assert_eq!(local.health(ctx(), &volume.id).await.unwrap()[0].severity, Severity::DataLoss);
    let staged = stage(&local, &volume, Path::new("/nowhere")).await;
    assert!(matches!(staged, Err(Error::Precondition(_))));
    drop(local);
    let local = open(dir.path()).await;
    assert_eq!(local.health(ctx(), &volume.id).await.unwrap()[0].reason, "DataMissing");
}

#[tokio::test]
async fn a_second_driver_on_the_same_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let _first = open(dir.path()).await;
    let error = Local::open(config(dir.path())).await.unwrap_err();
    assert!(error.to_string().contains("another driver"), "{error}");
}

#[tokio::test]
async fn pages_go_through_all_volumes_once_also_while_they_come_and_go() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    for index in 0..25 {
        create(&local, named(&format!("v{index}"), 1)).await.unwrap();
    }
    let all = ids(&local).await;
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let page = local.list(ctx(), &PageRequest { after, limit: 10 }).await.unwrap();
        seen.extend(page.entries.iter().map(|volume| volume.id.to_string()));
        // The last volume of a page may be gone before the next page is asked for.
        local.delete(ctx(), &page.entries.last().unwrap().id).await.unwrap();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, all);
    let strange = PageRequest { after: Some("invalid-token".to_owned()), limit: 10 };
    assert!(matches!(local.list(ctx(), &strange).await, Err(Error::Busy(_))));
}

#[tokio::test]
async fn no_more_is_promised_than_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let pools = [("fast".to_owned(), Capacity::mebibytes(100))].into();
    let local = Local::open(Config { pools, ..config(dir.path()) }).await.unwrap();
    let pooled =
        |name: &str, size| NewVolume { parameters: with_kind("x", "fast").parameters, ..named(name, size) };
    let room = |local: &Local| {
        let local = local.clone();
        async move {
            let parameters = with_kind("x", "fast").parameters;
            local.available_capacity(ctx(), &parameters, None).await.unwrap().available
        }
    };
    let first = create(&local, pooled("a", 60)).await.unwrap();
    assert_eq!(room(&local).await, Capacity::mebibytes(40));
    assert!(matches!(create(&local, pooled("b", 60)).await, Err(Error::Exhausted(_))));
    create(&local, pooled("c", 40)).await.unwrap();
    let grown = grow(&local, &first, 61).await;
    assert!(matches!(grown, Err(Error::Exhausted(_))));
    local.delete(ctx(), &first.id).await.unwrap();
    assert_eq!(room(&local).await, Capacity::mebibytes(60));
    assert!(matches!(create(&local, with_kind("d", "slow")).await, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn a_volume_larger_than_the_disk_is_out_of_range_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let huge = NewVolume { range: CapacityRange::new(i64::MAX, 0).unwrap(), ..named("huge", 1) };
    assert!(matches!(create(&local, huge).await, Err(Error::OutOfRange(_))));
    assert!(ids(&local).await.is_empty());
    assert_eq!(entries(&dir.path().join("volumes")) + entries(&dir.path().join("incoming")), 0);
}

#[tokio::test]
async fn parameters_that_mean_nothing_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    for (key, value) in [("kind", "tape"), ("colour", "red"), ("../../etc", "x")] {
        let parameters = Parameters::from([(key.to_owned(), value.to_owned())]);
        let error =
            crate::Volumes::check(&local, ctx(), &NewVolume { parameters, ..named("x", 8) }).unwrap_err();
        assert!(matches!(&error, Error::Invalid(message) if message.contains(key)), "{error}");
    }
}

#[tokio::test]
async fn snapshots_of_a_group_come_and_go_together() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let mut sources = Vec::new();
    for name in ["a", "b"] {
        sources.push(create(&local, named(name, 8)).await.unwrap());
    }
    let name: Name = "g".parse().unwrap();
    let group = local.take_group_snapshot(ctx(), &name, &sources, &Parameters::new()).await.unwrap();
    assert_eq!(group.snapshots.len(), 2);
    drop(local);
    let local = open(dir.path()).await;
    let again = local.find_group(ctx(), &name).await.unwrap().unwrap();
    assert_eq!(again.snapshots.len(), 2);
    assert!(again.snapshots.iter().all(|snapshot| snapshot.group.as_ref() == Some(&again.id)));
    assert_eq!(entries(&dir.path().join("snapshots")), 2);
    local.delete_group(ctx(), &again.id).await.unwrap();
    assert_eq!(entries(&dir.path().join("snapshots")), 0);
    assert!(local.snapshot(ctx(), &again.snapshots[0].id).await.unwrap().is_none());
}

#[tokio::test]
async fn an_image_is_formatted_once_mounted_grown_and_released() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, with_kind("i", "image")).await.unwrap();
    let staging = dir.path().join("staging");
    stage(&local, &volume, &staging).await.unwrap();
    fs::write(staging.join("file"), "first").unwrap();
    stage(&local, &volume, &staging).await.unwrap();
    let before = local.usage(ctx(), &volume.id, &staging).await.unwrap().bytes.total;
    local.unstage(ctx(), &volume.id, &staging).await.unwrap();
    grow(&local, &volume, 64).await.unwrap();
    stage(&local, &volume, &staging).await.unwrap();
    assert_eq!(fs::read_to_string(staging.join("file")).unwrap(), "first");
    let after = local.usage(ctx(), &volume.id, &staging).await.unwrap().bytes.total;
    assert!(after > before * 4, "{before} grew to {after}");
    local.unstage(ctx(), &volume.id, &staging).await.unwrap();
    // A child of another test may have the device open until it runs its program; then the kernel lets go of it.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !berth_host::loopdev::attached_below(dir.path()).unwrap().is_empty() {
        assert!(std::time::Instant::now() < deadline, "the image is still attached");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    local.delete(ctx(), &volume.id).await.unwrap();
}

#[tokio::test]
async fn a_mounted_image_is_cloned_by_many_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, with_kind("i", "image")).await.unwrap();
    let staging = dir.path().join("staging");
    stage(&local, &volume, &staging).await.unwrap();
    fs::write(staging.join("file"), "copied").unwrap();
    let mut clones = tokio::task::JoinSet::new();
    for index in 0..4 {
        let clone = named(&format!("clone-{index}"), 8);
        let (local, volume) = (local.clone(), volume.clone());
        clones.spawn(async move {
            let plan = local.plan(ctx(), &clone)?;
            local.clone_volume(ctx(), plan, &volume).await
        });
    }
    let clones = clones.join_all().await;
    local.unstage(ctx(), &volume.id, &staging).await.unwrap();
    for clone in clones {
        let clone = clone.unwrap();
        stage(&local, &clone, &staging).await.unwrap();
        let read = fs::read_to_string(staging.join("file"));
        local.unstage(ctx(), &clone.id, &staging).await.unwrap();
        assert_eq!(read.unwrap(), "copied");
    }
}

#[tokio::test]
async fn an_image_with_something_unknown_on_it_is_never_formatted() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, with_kind("i", "image")).await.unwrap();
    let key = volume.id.as_str().strip_prefix("vol-").unwrap();
    let image = dir.path().join("volumes").join(key).join("image");
    let file = fs::OpenOptions::new().write(true).open(&image).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"somebody's bytes", 5 << 20).unwrap();
    let staged = stage(&local, &volume, &dir.path().join("staging")).await;
    assert!(matches!(staged, Err(Error::Precondition(_))), "{staged:?}");
    let mut bytes = [0; 16];
    let file = fs::File::open(&image).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 5 << 20).unwrap();
    assert_eq!(&bytes, b"somebody's bytes");
}

#[tokio::test]
async fn what_is_deleted_inside_an_image_goes_back_to_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    for (name, fs_type, size) in [("ext4", "ext4", 64), ("xfs", "xfs", 320)] {
        let mut new = NewVolume { parameters: with_kind("x", "image").parameters, ..named(name, size) };
        let capability = VolumeCapability {
            access: Access::Mount { fs_type: fs_type.to_owned(), flags: Vec::new(), group: None },
            ..mounted()
        };
        new.capabilities = vec![capability.clone()];
        let volume = create(&local, new).await.unwrap();
        let staging = dir.path().join(name);
        local.stage(ctx(), &on_node(&volume, capability), &staging).await.unwrap();
        let key = volume.id.as_str().strip_prefix("vol-").unwrap();
        let image = dir.path().join("volumes").join(key).join("image");
        let allocated = || berth_host::usage::file_allocated(&image).unwrap();
        let sync = || rustix::fs::syncfs(fs::File::open(&staging).unwrap()).unwrap();
        fs::write(staging.join("file"), vec![7; 32 << 20]).unwrap();
        sync();
        let full = allocated();
        fs::remove_file(staging.join("file")).unwrap();
        // Freeing and discarding go on in the background of commits, and nothing tells when they are done.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while full.saturating_sub(allocated()) < 24 << 20 && std::time::Instant::now() < deadline {
            sync();
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let left = allocated();
        local.unstage(ctx(), &volume.id, &staging).await.unwrap();
        assert!(full.saturating_sub(left) >= 24 << 20, "{fs_type}: {full} became {left}");
    }
}

/// A capability for a filesystem of this type.
fn formatted(fs_type: &str) -> VolumeCapability {
    let access = Access::Mount { fs_type: fs_type.to_owned(), flags: Vec::new(), group: None };
    VolumeCapability { access, ..mounted() }
}

fn of_size(name: &str, kind: &str, fs_type: &str, required: i64, limit: i64) -> NewVolume {
    NewVolume {
        range: CapacityRange::new(required, limit).unwrap(),
        capabilities: vec![formatted(fs_type)],
        ..with_kind(name, kind)
    }
}

#[tokio::test]
async fn a_volume_has_the_size_that_was_asked_for_and_a_restore_and_a_clone_of_that_size_work() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    for (name, kind, fs_type, size) in [
        ("tiny", "image", "ext4", MIB),
        ("odd", "image", "ext4", 5 * MIB + 1),
        ("xfs", "image", "xfs", 100 * MIB),
        ("dir", "dir", "", 12345),
    ] {
        let volume = create(&local, of_size(name, kind, fs_type, size, 0)).await.unwrap();
        assert_eq!(volume.capacity.as_i64(), size, "{name}");
        let staging = dir.path().join(format!("staging-{name}"));
        let node_volume = on_node(&volume, formatted(fs_type));
        local.stage(ctx(), &node_volume, &staging).await.unwrap();
        local.unstage(ctx(), &volume.id, &staging).await.unwrap();

        let new = NewSnapshot {
            name: format!("of-{name}").parse().unwrap(),
            source: volume.id.clone(),
            parameters: Parameters::new(),
        };
        let snapshot = local.take_snapshot(ctx(), new, &volume).await.unwrap();
        // What a provisioner compares with the request before it calls the driver.
        assert_eq!(snapshot.size.as_i64(), size, "{name}");
        let restored = of_size(&format!("restored-{name}"), kind, fs_type, size, 0);
        let restored = local.restore(ctx(), local.plan(ctx(), &restored).unwrap(), &snapshot).await.unwrap();
        let cloned = of_size(&format!("cloned-{name}"), kind, fs_type, size, 0);
        let cloned = local.clone_volume(ctx(), local.plan(ctx(), &cloned).unwrap(), &volume).await.unwrap();
        for copy in [restored, cloned] {
            assert_eq!(copy.capacity.as_i64(), size, "{name}");
            local.stage(ctx(), &on_node(&copy, formatted(fs_type)), &staging).await.unwrap();
            local.unstage(ctx(), &copy.id, &staging).await.unwrap();
        }
        let grown = local.expand(ctx(), &volume, CapacityRange::new(size + 1, 0).unwrap()).await.unwrap();
        assert_eq!(grown.capacity.as_i64(), size + 1, "{name}");
        assert!(local.health(ctx(), &volume.id).await.unwrap().is_empty(), "{name}");
    }
}

#[tokio::test]
async fn a_limit_below_the_smallest_filesystem_is_refused_with_the_smallest_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let refused = create(&local, of_size("small", "image", "xfs", MIB, 100 * MIB)).await.unwrap_err();
    let Error::OutOfRange(sentence) = refused else { panic!("{refused}") };
    for smallest in ["ext4 2 MiB", "btrfs 109 MiB", "xfs 300 MiB"] {
        assert!(sentence.contains(smallest), "{sentence}");
    }
    create(&local, of_size("fits", "image", "xfs", MIB, 300 * MIB)).await.unwrap();
}

/// Changes two files of a directory, one after the other, until it is dropped.
struct Writer {
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Writer {
    fn start(dir: std::path::PathBuf) -> Self {
        let stop = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            for number in 0u64.. {
                if stopped.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
                for file in ["first", "second"] {
                    fs::write(dir.join(file), number.to_string()).unwrap();
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

#[tokio::test]
async fn a_directory_that_changes_is_snapshotted_only_where_the_class_accepts_it_and_then_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, named("busy", 8)).await.unwrap();
    let data = data_of(&local, &volume).await;
    // Enough to copy that the writer has its turn meanwhile.
    for index in 0..200 {
        fs::write(data.join(format!("file-{index}")), [7; 512]).unwrap();
    }
    let snapshot = |name: String, consistency: Option<&str>| NewSnapshot {
        name: name.parse().unwrap(),
        source: volume.id.clone(),
        parameters: consistency
            .map(|value| ("consistency".to_owned(), value.to_owned()))
            .into_iter()
            .collect(),
    };
    let writer = Writer::start(data);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    // The writer may rest by chance for as long as a copy takes; such a copy is a whole one, and is tried again.
    for attempt in 0.. {
        assert!(std::time::Instant::now() < deadline, "the directory was never seen to change");
        match local.take_snapshot(ctx(), snapshot(format!("strict-{attempt}"), None), &volume).await {
            Ok(taken) => local.delete_snapshot(ctx(), &taken.id).await.unwrap(),
            Err(Error::Precondition(sentence)) => {
                assert!(sentence.contains("consistency: best-effort"), "{sentence}");
                break;
            }
            Err(other) => panic!("{other}"),
        }
    }
    for attempt in 0.. {
        assert!(std::time::Instant::now() < deadline, "no snapshot was ever torn");
        let context = Context::default();
        let new = snapshot(format!("relaxed-{attempt}"), Some("best-effort"));
        local.take_snapshot(&context, new.clone(), &volume).await.unwrap();
        if context.warnings().is_empty() {
            continue;
        }
        assert!(context.warnings()[0].contains("different moments"), "{:?}", context.warnings());
        // Whoever died before it recorded the warning is warned again.
        let again = Context::default();
        assert!(local.find_snapshot(&again, &new).await.unwrap().unwrap().ready);
        assert_eq!(again.warnings(), context.warnings());
        break;
    }
    drop(writer);
    let wrong = snapshot("wrong".to_owned(), Some("sometimes"));
    assert!(matches!(local.take_snapshot(ctx(), wrong, &volume).await, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn parameters_of_a_snapshot_class_that_are_not_known_are_ignored_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let local = open(dir.path()).await;
    let volume = create(&local, named("v", 8)).await.unwrap();
    // As Kubernetes' own tests write their classes.
    let parameters = Parameters::from([("deletionPolicy".to_owned(), "Delete".to_owned())]);
    let new = NewSnapshot { name: "s".parse().unwrap(), source: volume.id.clone(), parameters };
    let context = Context::default();
    local.take_snapshot(&context, new.clone(), &volume).await.unwrap();
    assert!(context.warnings()[0].contains("\"deletionPolicy\""), "{:?}", context.warnings());

    let (name, context): (Name, _) = ("g".parse().unwrap(), Context::default());
    local.take_group_snapshot(&context, &name, &[volume], &new.parameters).await.unwrap();
    assert!(context.warnings()[0].contains("\"deletionPolicy\""), "{:?}", context.warnings());
}
