//! Snapshots of recorded volumes, with a record each, in a directory of their own.

use std::{
    future::Future,
    time::{Duration, SystemTime},
};

use berth_core::{AccessKind, Capacity, SnapshotId, VolumeId};
use berth_host::path::Dir;
use serde::{Deserialize, Serialize};

use super::{Plan, Provision, Recorded, State, page, read, remove, stem_of, stem_of_id, unused_id, write};
use crate::{
    ContentSource, Context, Error, NewSnapshot, NewVolume, Page, PageRequest, Parameters, Result, Snapshot,
    Snapshots, Volume,
};

/// Where the records of snapshots lie, beside those of volumes.
const DIRECTORY: &str = "snapshots";

/// Snapshots of recorded volumes can be taken, and volumes made of them.
pub trait ProvisionSnapshots: Provision {
    /// Takes the snapshot of that id, and says how large a volume that is restored from it has to be. It may find what an
    /// attempt has left that was cut off.
    fn take(
        &self,
        ctx: &Context,
        id: &SnapshotId,
        source: &Volume,
        parameters: &Parameters,
    ) -> impl Future<Output = Result<Capacity>> + Send;

    /// Removes it, or what is left of it; `Ok` if nothing is there.
    fn remove(
        &self,
        ctx: &Context,
        id: &SnapshotId,
        source: &VolumeId,
    ) -> impl Future<Output = Result<()>> + Send;

    /// As [`Provision::create`], with the snapshot's content.
    fn restore(
        &self,
        ctx: &Context,
        id: &VolumeId,
        new: &NewVolume,
        class: &Self::Class,
        snapshot: &Snapshot,
    ) -> impl Future<Output = Result<Volume>> + Send;
}

/// What is written down about a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    id: String,
    state: State,
    source: String,
    block: bool,
    /// When it was taken, in nanoseconds since 1970.
    taken: u64,
    #[serde(default)]
    size: u64,
}

impl Record {
    fn snapshot(self) -> Result<Snapshot> {
        let broken = |error: berth_core::InvalidId| Error::internal(format!("a snapshot's record: {error}"));
        Ok(Snapshot {
            id: self.id.parse().map_err(broken)?,
            source: self.source.parse().map_err(broken)?,
            size: Capacity::new(self.size),
            access: Some(if self.block { AccessKind::Block } else { AccessKind::Mount }),
            created: SystemTime::UNIX_EPOCH + Duration::from_nanos(self.taken),
            ready: true,
            group: None,
            topology: None,
        })
    }
}

impl<B: ProvisionSnapshots> Recorded<B> {
    async fn with_snapshots<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Dir) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.blocking(move |records| work(&Dir::ensure(&records.path().join(DIRECTORY), 0o700)?)).await
    }

    async fn snapshot_record(&self, stem: &str) -> Result<Option<Record>> {
        let stem = stem.to_owned();
        self.with_snapshots(move |records| read(records, &stem)).await
    }

    async fn write_snapshot(&self, stem: &str, record: &Record) -> Result<()> {
        let (stem, record) = (stem.to_owned(), record.clone());
        self.with_snapshots(move |records| write(records, &stem, &record)).await
    }

    async fn forget_snapshot(&self, stem: &str) -> Result<()> {
        let stem = stem.to_owned();
        self.with_snapshots(move |records| remove(records, &stem)).await
    }

    async fn snapshot_record_of(&self, id: &SnapshotId) -> Result<Option<(String, Record)>> {
        let Some(stem) = stem_of_id(id.as_str()) else { return Ok(None) };
        let found = self.snapshot_record(stem).await?.filter(|record| record.id == id.as_str());
        Ok(found.map(|record| (stem.to_owned(), record)))
    }
}

impl<B: ProvisionSnapshots> Snapshots for Recorded<B> {
    async fn find_snapshot(&self, _: &Context, new: &NewSnapshot) -> Result<Option<Snapshot>> {
        let found = self.snapshot_record(&stem_of(new.name.as_str())).await?;
        found.filter(|record| record.state == State::Created).map(Record::snapshot).transpose()
    }

    async fn take_snapshot(&self, ctx: &Context, new: NewSnapshot, source: &Volume) -> Result<Snapshot> {
        let stem = stem_of(new.name.as_str());
        // An attempt that was cut off, or a deletion that did not come to its end. One of another volume is taken back.
        let begun = match self.snapshot_record(&stem).await? {
            Some(begun) if begun.source != source.id.as_str() => {
                self.delete_snapshot(ctx, &begun.snapshot()?.id).await?;
                None
            }
            begun => begun,
        };
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let record = Record {
            id: begun.map_or_else(|| unused_id(&stem), |begun| begun.id),
            state: State::Creating,
            source: source.id.to_string(),
            block: source.access == Some(AccessKind::Block),
            taken: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
            size: source.capacity.bytes(),
        };
        let id = record.clone().snapshot()?.id;
        self.write_snapshot(&stem, &record).await?;
        let taken = match self.backend.take(ctx, &id, source, &new.parameters).await {
            Ok(size) => {
                let record = Record { state: State::Created, size: size.bytes(), ..record };
                self.write_snapshot(&stem, &record).await.and_then(|()| record.snapshot())
            }
            Err(error @ Error::Busy(_)) => return Err(error),
            Err(error) => Err(error),
        };
        let Err(error) = taken else { return taken };
        let taken_back = async {
            self.backend.remove(ctx, &id, &source.id).await?;
            self.forget_snapshot(&stem).await
        };
        match taken_back.await {
            Ok(()) => Err(error),
            Err(left) => Err(error.unfinished(&left)),
        }
    }

    async fn snapshot(&self, _: &Context, id: &SnapshotId) -> Result<Option<Snapshot>> {
        let found = self.snapshot_record_of(id).await?.map(|(_, record)| record);
        found.filter(|record| record.state == State::Created).map(Record::snapshot).transpose()
    }

    async fn delete_snapshot(&self, ctx: &Context, id: &SnapshotId) -> Result<()> {
        let Some((stem, record)) = self.snapshot_record_of(id).await? else { return Ok(()) };
        self.write_snapshot(&stem, &Record { state: State::Deleting, ..record.clone() }).await?;
        self.backend.remove(ctx, id, &record.snapshot()?.source).await?;
        self.forget_snapshot(&stem).await
    }

    async fn list_snapshots(
        &self,
        _: &Context,
        source: Option<&VolumeId>,
        wanted: &PageRequest,
    ) -> Result<Page<Snapshot>> {
        let (source, wanted) = (source.cloned(), wanted.clone());
        self.with_snapshots(move |records| {
            page(records, &wanted, |record: Record| {
                let is_meant = source.as_ref().is_none_or(|source| record.source == source.as_str());
                (is_meant && record.state == State::Created).then(|| record.snapshot()).transpose()
            })
        })
        .await
    }

    async fn restore(&self, ctx: &Context, plan: Self::Plan, snapshot: &Snapshot) -> Result<Volume> {
        let source = Some(ContentSource::Snapshot(snapshot.id.clone()));
        let backend = self.backend.clone();
        self.make(ctx, plan, source, async |id, Plan { new, class, .. }| {
            backend.restore(ctx, id, new, class, snapshot).await
        })
        .await
    }
}
