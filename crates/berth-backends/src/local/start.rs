//! Opening a data directory: everything a crash could have left behind is finished or undone here.

use std::{path::Path, sync::Arc};

use berth_core::Topology;
use berth_host::{btrfs, copy, freeze, loopdev, mount, namespace, path::Dir, usage};
use parking_lot::Mutex;

use berth_journal::{Damage, GroupCommit, Journal};

use super::{
    Config, Inner,
    devices::Devices,
    kind::Kind,
    record::{GROUP, GroupRecord, Key, SNAPSHOT, SnapshotRecord, VOLUME, VolumeRecord},
    state::State,
    trash::Trash,
};
use crate::{Error, Result, image::IMAGE};

const JOURNAL: &str = "volumes.journal";

/// Opens the data directory and returns the backend in the state of the last acknowledged call.
pub(super) fn open(config: Config) -> Result<Inner> {
    let root = Dir::ensure(&config.data_dir, 0o700)?;
    let lock = root.lock_exclusively("lock").map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => {
            Error::Precondition(format!("another driver is running on {}", root.path().display()))
        }
        _ => error.into(),
    })?;
    thaw_all(&root)?;
    let is_btrfs = btrfs::is_btrfs(root.path())?;
    let restricted = namespace::is_restricted();
    let offers_btrfs = is_btrfs && !restricted && enable_quota(root.path());
    let part = |name| root.ensure_dir(name, 0o700);
    let (volumes, snapshots, incoming, lost) =
        (part("volumes")?, part("snapshots")?, part("incoming")?, part("lost")?);
    let trash = Trash::start(part("trash")?, is_btrfs)?;

    let mut state = State::default();
    let mut unreadable = 0;
    let (journal, damage) = Journal::open(&part("state")?, JOURNAL, &mut |key, json| {
        if let Err(error) = load(&mut state, key, json) {
            tracing::error!(record = key, error, "a record cannot be understood; what it describes is kept");
            unreadable += 1;
        }
    })?;
    // Also if they were lost as a whole, or damaged when somebody was killed who was about to see to it.
    let intact = damage == Damage::default() && unreadable == 0;
    discard_all(&incoming, &trash)?;
    keep_only(&volumes, |key| state.volume(key).is_some(), &trash, &lost, intact)?;
    keep_only(&snapshots, |key| state.snapshot(key).is_some(), &trash, &lost, intact)?;

    let synced = vec![Dir::open(volumes.path())?, Dir::open(snapshots.path())?];
    let journal = GroupCommit::start(journal, synced)
        .map_err(|error| Error::State(format!("start the journal's thread: {error}")))?;
    let reflink = copy::can_reflink(&incoming)?;
    note_use(&mut state, &volumes);
    let inner = Inner {
        default_kind: config.kind.unwrap_or_else(|| best_kind(offers_btrfs, restricted)),
        topology: config
            .topology
            .then(|| Arc::new(Topology::single(config.topology_key.as_str(), config.node.as_str()))),
        config,
        is_btrfs,
        offers_btrfs,
        reflink,
        root,
        volumes,
        snapshots,
        incoming,
        lost,
        state: Mutex::new(state),
        journal,
        devices: Devices::default(),
        trash,
        walks: Mutex::default(),
        attaching: tokio::sync::Mutex::default(),
        _lock: lock,
    };
    inner.find_devices()?;
    Ok(inner)
}

/// A driver killed while it took a snapshot leaves filesystems frozen: whoever touches them would wait for ever.
fn thaw_all(root: &Dir) -> Result<()> {
    let ours = loopdev::attached_below(root.path())?;
    if ours.is_empty() {
        return Ok(());
    }
    for mounted in mount::mounts()? {
        if ours.iter().any(|device| mounted.device == (loopdev::MAJOR, device.number)) {
            freeze::thaw(&mounted.target)?;
        }
    }
    Ok(())
}

/// Quotas make the kind btrfs; without them the disk is used like any other.
fn enable_quota(root: &Path) -> bool {
    match btrfs::enable_quota(root) {
        Ok(_) => {
            // The group of a deleted subvolume can be removed only when the kernel's cleaner is done with the subvolume.
            if let Err(error) = btrfs::remove_stale_qgroups(root) {
                tracing::warn!(error = error.sentence(), "quota groups of deleted volumes stay");
            }
            true
        }
        Err(error) => {
            tracing::warn!(
                error = error.sentence(),
                "btrfs quotas cannot be switched on; kind btrfs is not offered"
            );
            false
        }
    }
}

fn best_kind(offers_btrfs: bool, restricted: bool) -> Kind {
    if offers_btrfs {
        Kind::Btrfs
    } else if !restricted && Path::new("/dev/loop-control").exists() {
        Kind::Image
    } else {
        Kind::Dir
    }
}

fn load(state: &mut State, key: &str, json: &[u8]) -> std::result::Result<(), String> {
    let parse = |error: serde_json::Error| error.to_string();
    if let Some(key) = Key::parse(VOLUME, key) {
        state.put_volume(key, serde_json::from_slice::<VolumeRecord>(json).map_err(parse)?);
    } else if let Some(key) = Key::parse(SNAPSHOT, key) {
        state.put_snapshot(key, serde_json::from_slice::<SnapshotRecord>(json).map_err(parse)?);
    } else if let Some(key) = Key::parse(GROUP, key) {
        state.put_group(key, serde_json::from_slice::<GroupRecord>(json).map_err(parse)?);
    } else {
        return Err("its key is unknown".to_owned());
    }
    Ok(())
}

fn discard_all(dir: &Dir, trash: &Trash) -> Result<()> {
    for entry in dir.entries()? {
        if let Some(name) = entry.name.to_str() {
            trash.discard(dir, name)?;
        }
    }
    Ok(())
}

/// Removes what has no record: half-made or half-deleted. After damage to the records, until somebody removes what was
/// set aside of them, it is kept instead.
fn keep_only(dir: &Dir, known: impl Fn(Key) -> bool, trash: &Trash, lost: &Dir, intact: bool) -> Result<()> {
    for entry in dir.entries()? {
        let Some(name) = entry.name.to_str() else { continue };
        if Key::from_hex(name).is_some_and(&known) {
            continue;
        }
        if intact {
            tracing::info!(path = %dir.child_path(name).display(), "removing what no record speaks of");
            trash.discard(dir, name)?;
        } else {
            let kept = lost.child_path(name);
            tracing::error!(kept_in = %kept.display(), "data without a record is kept, because records were damaged or lost");
            if let Err(error) = dir.rename(name, lost, name) {
                tracing::error!(error = error.sentence(), "it stays where it is");
            }
        }
    }
    Ok(())
}

/// Notes how much of its size each image occupies already. The usage of directories is known only after their files were counted.
fn note_use(state: &mut State, volumes: &Dir) {
    let images: Vec<Key> = state
        .volumes_after(None)
        .filter(|(_, record)| record.kind == Kind::Image)
        .map(|(key, _)| key)
        .collect();
    for key in images {
        if let Ok(bytes) = usage::file_allocated(&volumes.path().join(key.to_string()).join(IMAGE)) {
            state.set_used(key, bytes);
        }
    }
    let subvolumes: Vec<Key> = state
        .volumes_after(None)
        .filter(|(_, record)| record.kind == Kind::Btrfs)
        .map(|(key, _)| key)
        .collect();
    for key in subvolumes {
        let data = volumes.dir(&format!("{key}/{}", super::content::DATA));
        if let Ok(quota) = data.and_then(|data| btrfs::quota_usage(&data)) {
            state.set_used(key, quota.referenced);
        }
    }
}
