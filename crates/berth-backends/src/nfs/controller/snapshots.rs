//! Snapshots: archives of a volume's directory, `<share>/<name>/<source>.tar.gz`, as csi-driver-nfs has them.
//!
//! An archive is written in the background to a name in `.berth/incoming`, and renamed into place when it is whole and on
//! disk: a snapshot is ready exactly when its archive is in its place. Whoever asks for a snapshot that has a record but
//! no archive begins it again, so one whose writer died is finished by the process that is asked next.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::Arc,
    time::{Duration, SystemTime},
};

use berth_core::{AccessKind, SnapshotId, VolumeId};
use berth_nfs::{Change, Cookie, Create, Entry, Handle, Kind, Share};
use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::watch, task::AbortHandle};

use super::{
    NfsController, capacity,
    content::{at_rest, copy_at_rest},
    id::{ShareName, SnapshotRef, SubPath, VolumeRef},
    pack::pack,
    parameters::{VolumeKind, snapshot_share},
    progress::Progress,
    record::{self, ArchiveRecord, RecordDir, SnapshotRecord, key_of, nonce, now},
    shares::{Reach, failed, find_dir, found},
    volumes::{VolumePlan, parse_id, token},
};
use crate::{
    ContentSource, Context, Error, NewSnapshot, Page, PageRequest, Result, Snapshot, Snapshots, Volume,
};

/// What is being done, in sentences that refuse it.
const SNAPSHOT: &str = "a snapshot";
const COMPRESSED: &str = ".tar.gz";
const PLAIN: &str = ".tar";

/// The archives this process is writing.
#[derive(Debug, Default)]
pub(super) struct Building(Mutex<HashMap<String, Arc<Build>>>);

#[derive(Debug)]
struct Build {
    ended: watch::Receiver<bool>,
    /// Why it failed, for the next who asks.
    failure: Mutex<Option<Error>>,
    progress: Progress,
    abort: Mutex<Option<AbortHandle>>,
}

impl Building {
    fn map(&self) -> MutexGuard<'_, HashMap<String, Arc<Build>>> {
        self.0.lock()
    }

    /// Forgets one that has failed once its failure was answered: the next call begins anew.
    fn forget(&self, key: &str, build: &Arc<Build>) {
        let mut builds = self.map();
        if builds.get(key).is_some_and(|known| Arc::ptr_eq(known, build)) {
            builds.remove(key);
        }
    }
}

/// A snapshot to take, with the ways to reach both shares.
struct SnapshotPlan {
    snapshot: SnapshotRef,
    reach: Reach,
    source_reach: Reach,
}

impl SnapshotPlan {
    fn new(ctx: &Context, new: &NewSnapshot, source: &VolumeRef) -> Result<Self> {
        let (share, options) = snapshot_share(&new.parameters, &source.share)?;
        let source_reach = Reach::by_id(ctx);
        let reach = if options.is_empty() { source_reach.clone() } else { Reach::by_class(options, ctx) };
        Ok(Self { snapshot: SnapshotRef::new(share, new.name.as_str(), source)?, reach, source_reach })
    }
}

impl Snapshots for NfsController {
    async fn find_snapshot(&self, ctx: &Context, new: &NewSnapshot) -> Result<Option<Snapshot>> {
        // A volume with an impossible id is reported as missing by the lookup that follows.
        let Ok(volume) = VolumeRef::parse(new.source.as_str()) else { return Ok(None) };
        let plan = SnapshotPlan::new(ctx, new, &volume)?;
        let (share, snapshot) = (self.visit(&plan.snapshot.share, &plan.reach).await?, plan.snapshot);
        if let Some(record) = read_record(&share, &snapshot).await? {
            let known = SnapshotRef::parse(&record.id)?;
            return self.known(&share, &known, record, &plan.source_reach).await.map(Some);
        }
        let Some(directory) = find_dir(&share, &snapshot.name).await? else { return Ok(None) };
        if let Some(archive) = find_archive(&share, &snapshot).await? {
            return Ok(Some(adopted(&snapshot, new.source.clone(), &archive)));
        }
        // Another volume's snapshot has that name.
        let page = share.read_dir(&directory.handle, Cookie::default()).await.map_err(failed)?;
        let other = page.entries.iter().find_map(|entry| {
            let name = entry.name.to_str()?;
            name.strip_suffix(COMPRESSED).or_else(|| name.strip_suffix(PLAIN)).map(str::to_owned)
        });
        Ok(other.and_then(|source| {
            let other = SnapshotRef { source, ..snapshot };
            let archive = Entry { handle: directory.handle, attributes: directory.attributes };
            Some(adopted(&other, guessed_source(&other)?, &archive))
        }))
    }

    async fn take_snapshot(&self, ctx: &Context, new: NewSnapshot, of: &Volume) -> Result<Snapshot> {
        let source = &new.source;
        let volume = VolumeRef::parse(source.as_str()).map_err(|_| Error::no_volume(source))?;
        let SnapshotPlan { snapshot, reach, source_reach } = SnapshotPlan::new(ctx, &new, &volume)?;
        let share = self.visit(&snapshot.share, &reach).await?;
        let from = self.visit(&volume.share, &source_reach).await?;
        let kind = self.volume_kind(&from, &volume).await?;
        if kind == VolumeKind::Image {
            // Told before anything is written down.
            let dir = find_dir(&from, volume.dir.as_str()).await?.ok_or_else(|| Error::no_volume(source))?;
            at_rest(&from, &dir.handle, SNAPSHOT).await?;
        }
        if let Some(record) = read_record(&share, &snapshot).await?
            && record.id == snapshot.to_string()
        {
            return self.known(&share, &snapshot, record, &source_reach).await;
        }
        let dir = SubPath::new("the snapshot's name", &snapshot.name)?;
        if let Some(users) = self.volumes_in(&share, &snapshot.share, &dir).await? {
            return Err(Error::Precondition(format!(
                "directory {:?} on {}, where the snapshot's archive belongs, is used by {users}",
                dir.as_str(),
                snapshot.share
            )));
        }
        let record = SnapshotRecord {
            id: snapshot.to_string(),
            source: source.to_string(),
            created: now(),
            compressed: self.0.config.compress_snapshots,
            kind,
            capacity: (kind == VolumeKind::Image).then(|| of.capacity.bytes()),
            archive: None,
        };
        record::write(&share, RecordDir::Snapshots, &key(&snapshot), &record).await?;
        self.known(&share, &snapshot, record, &source_reach).await
    }

    async fn snapshot(&self, ctx: &Context, id: &SnapshotId) -> Result<Option<Snapshot>> {
        let Ok(snapshot) = SnapshotRef::parse(id.as_str()) else { return Ok(None) };
        let reach = Reach::by_id(ctx);
        let share = self.visit(&snapshot.share, &reach).await?;
        match read_record(&share, &snapshot).await? {
            Some(record) if record.id == id.as_str() => {
                self.known(&share, &snapshot, record, &reach).await.map(Some)
            }
            _ => {
                let archive = find_archive(&share, &snapshot).await?;
                let source = guessed_source(&snapshot);
                Ok(archive.zip(source).map(|(archive, source)| adopted(&snapshot, source, &archive)))
            }
        }
    }

    async fn delete_snapshot(&self, ctx: &Context, id: &SnapshotId) -> Result<()> {
        let snapshot = SnapshotRef::parse(id.as_str()).map_err(|_| Error::no_snapshot(id))?;
        let share = self.visit(&snapshot.share, &Reach::by_id(ctx)).await?;
        let build = self.0.building.map().remove(&key(&snapshot));
        if let Some(build) = build {
            if let Some(task) = build.abort.lock().take() {
                task.abort();
            }
            // The sender goes with the task, whichever way that ends.
            let _ = build.ended.clone().wait_for(|ended| *ended).await;
        }
        if read_record(&share, &snapshot).await?.is_some_and(|record| record.id == id.as_str()) {
            record::remove(&share, RecordDir::Snapshots, &key(&snapshot)).await?;
        } else if find_archive(&share, &snapshot).await?.is_none() {
            // What has that name may be an empty volume.
            return Err(Error::no_snapshot(id));
        }
        remove_leftovers(&share, &key(&snapshot)).await?;
        let Some(directory) = find_dir(&share, &snapshot.name).await? else { return Ok(()) };
        for ending in [COMPRESSED, PLAIN] {
            found(share.remove(&directory.handle, format!("{}{ending}", snapshot.source)).await)?;
        }
        // Whatever else is in the directory is nobody's snapshot, and stays.
        match share.remove_dir(&share.root(), &snapshot.name).await {
            Err(error) if !matches!(error.kind(), Kind::NotFound | Kind::NotEmpty | Kind::Exists) => {
                Err(failed(error))
            }
            _ => Ok(()),
        }
    }

    // Those that have a record, share by share.
    async fn list_snapshots(
        &self,
        _: &Context,
        source: Option<&VolumeId>,
        page: &PageRequest,
    ) -> Result<Page<Snapshot>> {
        let mut entries = Vec::new();
        for (name, share, keys) in self.listing(RecordDir::Snapshots, page).await? {
            for key in keys {
                let Some(record) = record::read::<SnapshotRecord>(&share, RecordDir::Snapshots, &key).await?
                else {
                    continue;
                };
                let Ok(snapshot) = SnapshotRef::parse(&record.id) else { continue };
                if source.is_some_and(|source| record.source != source.as_str()) {
                    continue;
                }
                let is_ready = find_archive(&share, &snapshot).await?.is_some();
                let record = if is_ready { whole(&share, &snapshot, record).await? } else { record };
                entries.push(describe(&snapshot, &record, is_ready)?);
                if entries.len() == page.limit {
                    return Ok(Page { entries, next: Some(token(&name, &key)) });
                }
            }
        }
        Ok(Page { entries, next: None })
    }

    async fn restore(&self, _: &Context, plan: VolumePlan, snapshot: &Snapshot) -> Result<Volume> {
        self.make(plan, Some(ContentSource::Snapshot(snapshot.id.clone()))).await
    }

    fn progress(&self, id: &SnapshotId) -> Option<String> {
        let snapshot = SnapshotRef::parse(id.as_str()).ok()?;
        self.0.building.map().get(&key(&snapshot)).map(|build| build.progress.words())
    }
}

impl NfsController {
    /// A snapshot that has a record; its archive is begun again if it is neither there nor being written. `source` is how
    /// the volume is reached.
    async fn known(
        &self,
        share: &Share,
        snapshot: &SnapshotRef,
        record: SnapshotRecord,
        source: &Reach,
    ) -> Result<Snapshot> {
        if find_archive(share, snapshot).await?.is_some() {
            return describe(snapshot, &whole(share, snapshot, record).await?, true);
        }
        let build = self.begin(share, snapshot, &record, source);
        let mut ended = build.ended.clone();
        let has_ended = tokio::time::timeout(self.0.config.snapshot_patience, ended.wait_for(|ended| *ended))
            .await
            .is_ok();
        let failure = build.failure.lock().take();
        if let Some(failure) = failure {
            self.0.building.forget(&key(snapshot), &build);
            return Err(failure);
        }
        let is_ready = has_ended && find_archive(share, snapshot).await?.is_some();
        describe(snapshot, &whole(share, snapshot, record).await?, is_ready)
    }

    fn begin(
        &self,
        share: &Share,
        snapshot: &SnapshotRef,
        record: &SnapshotRecord,
        source: &Reach,
    ) -> Arc<Build> {
        let mut building = self.0.building.map();
        if let Some(build) = building.get(&key(snapshot)) {
            return build.clone();
        }
        let (end, ended) = watch::channel(false);
        let build = Arc::new(Build {
            ended,
            failure: Mutex::default(),
            progress: Progress::default(),
            abort: Mutex::default(),
        });
        building.insert(key(snapshot), build.clone());
        let (this, share, snapshot) = (self.clone(), share.clone(), snapshot.clone());
        let (record, source, begun) = (record.clone(), source.clone(), build.clone());
        let task = self.0.tasks.spawn(async move {
            match this.write_archive(&share, &snapshot, record, &source, &begun.progress).await {
                Ok(()) => this.0.building.forget(&key(&snapshot), &begun),
                // It stays until a caller got the failure, however late that came.
                Err(error) => {
                    tracing::warn!(snapshot.id = %snapshot, %error, "a snapshot's archive could not be written");
                    *begun.failure.lock() = Some(error);
                }
            }
            end.send_replace(true);
        });
        *build.abort.lock() = Some(task.abort_handle());
        build
    }

    async fn write_archive(
        &self,
        share: &Share,
        snapshot: &SnapshotRef,
        record: SnapshotRecord,
        source: &Reach,
        progress: &Progress,
    ) -> Result<()> {
        // The caller has checked before, and another may have ended meanwhile. What was answered as ready stays as it is.
        if find_archive(share, snapshot).await?.is_some() {
            return Ok(());
        }
        let id: VolumeId = record
            .source
            .parse()
            .map_err(|error| Error::State(format!("read a snapshot's record: {error}")))?;
        let volume = VolumeRef::parse(id.as_str()).map_err(|_| Error::no_volume(&id))?;
        let from = self.visit(&volume.share, source).await?;
        let dir = find_dir(&from, volume.dir.as_str()).await?.ok_or_else(|| Error::no_volume(&id))?;
        let key = key(snapshot);
        let incoming = RecordDir::Incoming.ensure(share).await?;
        remove_leftovers(share, &key).await?;
        let aside = format!("{key}.{}", nonce());
        let file =
            share.create(&incoming, &aside, Create::New, &Change::mode(0o600)).await.map_err(failed)?;
        let packing = async {
            let copy = Box::pin(async {
                tokio::select! {
                    packed = pack(&from, &dir.handle, share, &file.handle, record.compressed, progress) => packed,
                    never = self.measure(&from, &dir.handle, progress) => match never {},
                }
            });
            let packed = match record.kind {
                VolumeKind::Directory => copy.await?,
                VolumeKind::Image => copy_at_rest(&from, &dir.handle, &key, SNAPSHOT, copy).await?,
            };
            // What went away was left out, and from a volume that is being deleted all of it goes.
            let still = find_dir(&from, volume.dir.as_str()).await?;
            if still.is_none_or(|still| still.attributes.fileid != dir.attributes.fileid) {
                return Err(Error::no_volume(&id));
            }
            Ok(packed)
        };
        let packed = match packing.await {
            Ok(packed) => packed,
            Err(error) => {
                let _ = share.remove(&incoming, &aside).await;
                return Err(error);
            }
        };
        let deleted = read_record(share, snapshot).await?.is_none_or(|now| now.id != record.id);
        if deleted || find_archive(share, snapshot).await?.is_some() {
            // Deleted or completed meanwhile, through another replica.
            return share.remove(&incoming, &aside).await.map_err(failed);
        }
        let archive = Some(ArchiveRecord { unpacked: packed.unpacked, sha256: packed.sha256 });
        let ending = if record.compressed { COMPRESSED } else { PLAIN };
        record::write(share, RecordDir::Snapshots, &key, &SnapshotRecord { archive, ..record }).await?;
        let (place, _) = share.make_dirs(&snapshot.name, &Change::mode(0o755)).await.map_err(failed)?;
        let name = format!("{}{ending}", snapshot.source);
        share.rename(&incoming, &aside, &place.handle, name).await.map_err(failed)
    }

    /// Finds out how much there is to copy, if that takes so long that somebody will want to know.
    async fn measure(&self, from: &Share, dir: &Handle, progress: &Progress) -> Infallible {
        tokio::time::sleep(self.0.config.snapshot_patience / 3).await;
        if let Ok(usage) = from.usage(dir).await {
            progress.set_total(usage.size);
        }
        std::future::pending().await
    }
}

/// The key of a snapshot's record. Of its name alone: two volumes cannot have snapshots of one name on one share.
fn key(snapshot: &SnapshotRef) -> String {
    key_of(&format!("{}#{}#{}", snapshot.share.server, snapshot.share.share, snapshot.name))
}

async fn read_record(share: &Share, snapshot: &SnapshotRef) -> Result<Option<SnapshotRecord>> {
    record::read(share, RecordDir::Snapshots, &key(snapshot)).await
}

/// A record that says what is known of the archive, if that is in its place: it may have come there after the record was
/// read.
async fn whole(share: &Share, snapshot: &SnapshotRef, record: SnapshotRecord) -> Result<SnapshotRecord> {
    if record.archive.is_some() {
        return Ok(record);
    }
    Ok(read_record(share, snapshot).await?.filter(|now| now.id == record.id).unwrap_or(record))
}

/// The digest that a snapshot's archive should have, if it is known.
pub(super) async fn expected_digest(share: &Share, snapshot: &SnapshotRef) -> Result<Option<String>> {
    let record = read_record(share, snapshot).await?;
    let record = record.filter(|record| record.id == snapshot.to_string());
    Ok(record.and_then(|record| record.archive).map(|archive| archive.sha256))
}

/// Whether a directory of a share's root is that of a snapshot which has a record.
pub(super) async fn is_snapshot(share: &Share, name: &ShareName, dir: &str) -> Result<bool> {
    let snapshot = SnapshotRef { share: name.clone(), name: dir.to_owned(), source: String::new() };
    Ok(read_record(share, &snapshot).await?.is_some())
}

/// What a snapshot was taken of; one that another driver took is of a directory.
pub(super) async fn kind_of(share: &Share, snapshot: &SnapshotRef) -> Result<VolumeKind> {
    let record = read_record(share, snapshot).await?;
    let record = record.filter(|record| record.id == snapshot.to_string());
    Ok(record.map(|record| record.kind).unwrap_or_default())
}

/// The archive in its place, compressed or not.
pub(super) async fn find_archive(share: &Share, snapshot: &SnapshotRef) -> Result<Option<Entry>> {
    let Some(directory) = find_dir(share, &snapshot.name).await? else { return Ok(None) };
    for ending in [COMPRESSED, PLAIN] {
        let name = format!("{}{ending}", snapshot.source);
        if let Some(archive) = found(share.lookup(&directory.handle, name).await)? {
            return Ok(Some(archive));
        }
    }
    Ok(None)
}

/// Removes what earlier writers of the same archive left.
async fn remove_leftovers(share: &Share, key: &str) -> Result<()> {
    let Some(incoming) = RecordDir::Incoming.find(share).await? else { return Ok(()) };
    let prefix = format!("{key}.");
    for name in RecordDir::Incoming.names(share).await?.iter().filter(|name| name.starts_with(&prefix)) {
        found(share.remove(&incoming.handle, name).await)?;
    }
    Ok(())
}

fn describe(snapshot: &SnapshotRef, record: &SnapshotRecord, ready: bool) -> Result<Snapshot> {
    let bad = |error| Error::State(format!("read a snapshot's record: {error}"));
    Ok(Snapshot {
        id: snapshot.to_string().parse().map_err(bad)?,
        source: record.source.parse().map_err(bad)?,
        size: capacity(
            record.archive.as_ref().map_or(0, |archive| record.capacity.unwrap_or(archive.unpacked)),
        ),
        access: Some(AccessKind::Mount),
        created: SystemTime::UNIX_EPOCH + Duration::from_secs(record.created),
        ready,
        group: None,
        topology: None,
    })
}

/// A snapshot that another driver took: all that is known of it is its archive.
fn adopted(snapshot: &SnapshotRef, source: VolumeId, archive: &Entry) -> Snapshot {
    let seconds = u64::try_from(archive.attributes.modified.seconds).unwrap_or(0);
    Snapshot {
        id: snapshot.to_string().parse().expect("an id made of checked parts is an id"),
        source,
        size: capacity(archive.attributes.size),
        access: Some(AccessKind::Mount),
        created: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
        ready: true,
        group: None,
        topology: None,
    }
}

/// The volume whose directory has the archive's name.
fn guessed_source(snapshot: &SnapshotRef) -> Option<VolumeId> {
    let dir = SubPath::new("the archive's name", &snapshot.source).ok()?;
    let volume =
        VolumeRef { share: snapshot.share.clone(), dir, uuid: String::new(), on_delete: String::new() };
    Some(parse_id(&volume))
}
