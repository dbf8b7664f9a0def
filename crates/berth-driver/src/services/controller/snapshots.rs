//! What the calls about snapshots take.

use std::sync::Arc;

use berth_core::{SnapshotId, Topology};

use crate::{
    Driver, Feature,
    backend::{About, Error, Page, Result, Secrets, Snapshot},
    call::snapshots::{CreateSnapshot, ListSnapshots},
    locks::{Hold, Key},
    services::rules,
};

impl Driver {
    /// The snapshot of that name, taken if it is not there.
    ///
    /// A caller that named the snapshot's place and no other is not told it again: the field is optional, and
    /// csi-sanity 5.6.0 compares it with the caller's by the inner state of its protobuf library, where two equal
    /// places differ. GetSnapshot and ListSnapshots always tell.
    pub(super) async fn ensure_snapshot(&self, call: CreateSnapshot) -> Result<Snapshot> {
        let places = call.places.clone();
        let mut snapshot = self.find_or_take_snapshot(call).await?;
        let is_named = |place: &Arc<Topology>| places.as_ref().is_some_and(|places| places.are_only(place));
        snapshot.topology = snapshot.topology.filter(|place| !is_named(place));
        Ok(snapshot)
    }

    async fn find_or_take_snapshot(&self, call: CreateSnapshot) -> Result<Snapshot> {
        let _guard = self.lock([
            (Key::SnapshotName(call.name.clone()), Hold::Exclusive),
            (Key::Volume(call.source.clone()), Hold::Exclusive),
        ])?;
        self.backend.heed(About::Volume(&call.source), &call.secrets);
        self.backend.heed(About::Class(&call.parameters), &call.secrets);
        let existing = self.backend.find_taken(&call.name, &call.source, &call.parameters).await?;
        if let Some(existing) = existing {
            if existing.source == call.source {
                return Ok(existing);
            }
            let (name, source) = (&call.name, &existing.source);
            return Err(Error::Conflict(format!(
                "there is a snapshot named {name:?} already, of volume {source:?}"
            )));
        }
        let volume = self.volume(&call.source).await?;
        if self.features.has(Feature::Topology) {
            rules::check_places(call.places.as_ref(), volume.topology.as_deref())?;
        }
        self.backend.create_snapshot(call.name, &call.source, &call.parameters).await
    }

    /// Makes sure that there is no such snapshot.
    pub(super) async fn ensure_no_snapshot(&self, id: &SnapshotId, secrets: &Secrets) -> Result<()> {
        let _guard = self.lock([(Key::Snapshot(id.clone()), Hold::Exclusive)])?;
        self.backend.heed(About::Snapshot(id), secrets);
        // Only where it can matter: asking for a snapshot makes a backend go on with one that it was taking.
        if self.features.has(Feature::GroupSnapshots)
            && let Some(group) = self.backend.snapshot(id).await?.and_then(|snapshot| snapshot.group)
        {
            let sentence = format!("snapshot {id:?} belongs to group {group:?} and goes only with it");
            return Err(Error::Invalid(sentence));
        }
        match self.backend.delete_snapshot(id).await {
            Err(Error::NotFound { what: "snapshot", .. }) => Ok(()),
            other => other,
        }
    }

    /// The snapshots asked for: one, those of a volume, or all.
    pub(super) async fn snapshots(&self, call: ListSnapshots) -> Result<Page<Snapshot>> {
        let Some(id) = &call.snapshot else {
            let source = call.source.as_ref();
            return self.gather(call.listing, |page| self.backend.list_snapshots(source, page)).await;
        };
        let found = self.backend.snapshot(id).await?;
        let is_meant =
            |snapshot: &Snapshot| call.source.as_ref().is_none_or(|source| snapshot.source == *source);
        Ok(Page { entries: found.into_iter().filter(is_meant).collect(), next: None })
    }
}
