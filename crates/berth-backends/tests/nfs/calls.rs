//! Calls of an NFS backend as the framework makes them, without secrets unless they are said.

use std::path::Path;

use berth_backends::{
    AvailableCapacity, CapacityInfo as _, Cloning as _, Condition, ContentSource, Context, Error, Expanded,
    Expansion as _, Health as _, Listing as _, NewSnapshot, NodeExpanded, NodeExpansion as _, Page,
    PageRequest, Parameters, Result, Snapshot, Snapshots as _, Stats as _, Usage, Volume, Volumes as _,
    nfs::Nfs,
};
use berth_core::{CapacityRange, Name, SnapshotId, VolumeCapability, VolumeId};

/// A volume to be made, with its source.
#[derive(Debug, Clone)]
pub(crate) struct NewVolume {
    pub(crate) name: Name,
    pub(crate) range: CapacityRange,
    pub(crate) capabilities: Vec<VolumeCapability>,
    pub(crate) parameters: Parameters,
    pub(crate) source: Option<ContentSource>,
}

impl NewVolume {
    fn request(&self) -> berth_backends::NewVolume {
        berth_backends::NewVolume {
            name: self.name.clone(),
            range: self.range,
            capabilities: self.capabilities.clone(),
            parameters: self.parameters.clone(),
            mutable: Parameters::new(),
            ephemeral: false,
        }
    }
}

fn nothing() -> Context {
    Context::default()
}

/// The calls of the backend as tests make them: without secrets, and with the plan made on the way.
pub(crate) trait Calls {
    async fn find_made(&self, new: &NewVolume) -> Result<Option<Volume>>;
    async fn create_volume(&self, new: NewVolume) -> Result<Volume>;
    async fn create_volume_with(&self, ctx: &Context, new: NewVolume) -> Result<Volume>;
    async fn volume(&self, id: &VolumeId) -> Result<Option<Volume>>;
    async fn delete_volume(&self, id: &VolumeId) -> Result<()>;
    async fn expand_volume(&self, id: &VolumeId, range: CapacityRange) -> Result<Expanded>;
    async fn list_volumes(&self, page: PageRequest) -> Result<Page<Volume>>;
    async fn room(&self, parameters: &Parameters) -> Result<AvailableCapacity>;
    async fn volume_health(&self, id: &VolumeId) -> Result<Vec<Condition>>;
    async fn list_unhealthy(&self, page: PageRequest) -> Result<Page<(VolumeId, Vec<Condition>)>>;
    async fn find_taken(
        &self,
        name: &Name,
        source: &VolumeId,
        class: &Parameters,
    ) -> Result<Option<Snapshot>>;
    async fn create_snapshot(&self, name: Name, source: &VolumeId, class: &Parameters) -> Result<Snapshot>;
    async fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>>;
    async fn delete_snapshot(&self, id: &SnapshotId) -> Result<()>;
    async fn list_snapshots(&self, source: Option<&VolumeId>, page: PageRequest) -> Result<Page<Snapshot>>;
    fn snapshot_progress(&self, id: &SnapshotId) -> Option<String>;
    async fn usage(&self, volume: &Volume, path: &Path) -> Result<Usage>;
    async fn expand_on_node(
        &self,
        volume: &Volume,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded>;
}

impl Calls for Nfs {
    async fn find_made(&self, new: &NewVolume) -> Result<Option<Volume>> {
        let plan = self.controller.plan(&nothing(), &new.request())?;
        self.controller.find(&nothing(), &plan).await
    }

    async fn create_volume(&self, new: NewVolume) -> Result<Volume> {
        self.create_volume_with(&nothing(), new).await
    }

    async fn create_volume_with(&self, ctx: &Context, new: NewVolume) -> Result<Volume> {
        let plan = self.controller.plan(ctx, &new.request())?;
        match new.source {
            None => self.controller.create(ctx, plan).await,
            Some(ContentSource::Volume(id)) => {
                let source = self.controller.get(ctx, &id).await?.ok_or_else(|| Error::no_volume(&id))?;
                self.controller.clone_volume(ctx, plan, &source).await
            }
            Some(ContentSource::Snapshot(id)) => {
                let source =
                    self.controller.snapshot(ctx, &id).await?.ok_or_else(|| Error::no_snapshot(&id))?;
                self.controller.restore(ctx, plan, &source).await
            }
        }
    }

    async fn volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        self.controller.get(&nothing(), id).await
    }

    async fn delete_volume(&self, id: &VolumeId) -> Result<()> {
        self.controller.delete(&nothing(), id).await
    }

    async fn expand_volume(&self, id: &VolumeId, range: CapacityRange) -> Result<Expanded> {
        let volume = self.volume(id).await?.ok_or_else(|| Error::no_volume(id))?;
        self.controller.expand(&nothing(), &volume, range).await
    }

    async fn list_volumes(&self, page: PageRequest) -> Result<Page<Volume>> {
        self.controller.list(&nothing(), &page).await
    }

    async fn room(&self, parameters: &Parameters) -> Result<AvailableCapacity> {
        self.controller.available_capacity(&nothing(), parameters, None).await
    }

    async fn volume_health(&self, id: &VolumeId) -> Result<Vec<Condition>> {
        self.controller.health(&nothing(), id).await
    }

    async fn list_unhealthy(&self, page: PageRequest) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        self.controller.list_unhealthy(&nothing(), &page).await
    }

    async fn find_taken(
        &self,
        name: &Name,
        source: &VolumeId,
        class: &Parameters,
    ) -> Result<Option<Snapshot>> {
        let new = NewSnapshot { name: name.clone(), source: source.clone(), parameters: class.clone() };
        self.controller.find_snapshot(&nothing(), &new).await
    }

    async fn create_snapshot(&self, name: Name, source: &VolumeId, class: &Parameters) -> Result<Snapshot> {
        let volume = self.volume(source).await?.ok_or_else(|| Error::no_volume(source))?;
        let new = NewSnapshot { name, source: source.clone(), parameters: class.clone() };
        self.controller.take_snapshot(&nothing(), new, &volume).await
    }

    async fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>> {
        self.controller.snapshot(&nothing(), id).await
    }

    async fn delete_snapshot(&self, id: &SnapshotId) -> Result<()> {
        self.controller.delete_snapshot(&nothing(), id).await
    }

    async fn list_snapshots(&self, source: Option<&VolumeId>, page: PageRequest) -> Result<Page<Snapshot>> {
        self.controller.list_snapshots(&nothing(), source, &page).await
    }

    fn snapshot_progress(&self, id: &SnapshotId) -> Option<String> {
        self.controller.progress(id)
    }

    async fn usage(&self, volume: &Volume, path: &Path) -> Result<Usage> {
        self.node.usage(&nothing(), &volume.id, path).await
    }

    async fn expand_on_node(
        &self,
        volume: &Volume,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded> {
        self.node.expand_on_node(&nothing(), &volume.id, path, range).await
    }
}
