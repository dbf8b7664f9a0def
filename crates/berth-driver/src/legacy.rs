//! Lets the services run on a [`Backend`] that has not been taken apart into the traits of each capability yet.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use berth_core::{
    Access, AccessKind, AccessMode, CapacityRange, GroupSnapshotId, Name, NodeId, SnapshotId, Topology,
    VolumeCapability, VolumeId,
};
use berth_host::mount::Attributes;
use futures_util::FutureExt as _;

use crate::{
    Attached, Attachment, AvailableCapacity, Backend, Blocks, CapacityInfo, ChangedBlocks, Cloning,
    Condition, ContentSource, Context, Controller, Driver, Error, Expanded, Expansion, Feature,
    GroupSnapshot, GroupSnapshots, Health, InlineVolumes, Listing, Modification, NewSnapshot, NewVolume,
    Node, NodeExpanded, NodeExpansion, NodeHealth, NodeVolume, Page, PageRequest, Parameters, Placement,
    ReadOnlyAttachment, Readiness, Result, Snapshot, Snapshots, Source, Sources, StagedVolume, Staging,
    Stats, Supports, TargetMounts, TopologyRequirement, Usage, Volume, Volumes,
    backend::{self, Mounts, Publication},
    services::Mode,
};

struct Legacy {
    backend: Arc<dyn Backend>,
    /// Held while a node's attachments are counted and one is added.
    attaching: tokio::sync::Mutex<()>,
}

/// A driver over the backend, composed of what its features promise.
pub fn driver(name: &str, version: &str, mode: Mode, backend: Arc<dyn Backend>) -> Driver {
    let (features, info, mounts) = (backend.features(), backend.node(), backend.mounts());
    let has = |feature| features.has(feature);
    let legacy = Arc::new(Legacy { backend, attaching: tokio::sync::Mutex::default() });
    let mut driver = Driver::new(name, version).readiness(&legacy);
    if mode != Mode::Node && has(Feature::Volumes) {
        let mut controller = Controller::new(&legacy);
        if has(Feature::ListVolumes) {
            controller = controller.listing(&legacy);
        }
        if has(Feature::Attach) {
            controller = controller.read_only_attachment(&legacy);
        }
        if has(Feature::Capacity) {
            controller = controller.capacity(&legacy);
        }
        if has(Feature::Snapshots) {
            controller = controller.snapshots(&legacy);
        }
        if has(Feature::Clone) {
            controller = controller.cloning(&legacy);
        }
        if has(Feature::ControllerExpand) {
            controller = controller.expansion(&legacy);
        }
        if has(Feature::Modify) {
            controller = controller.modification(&legacy);
        }
        if has(Feature::GroupSnapshots) {
            controller = controller.group_snapshots(&legacy);
        }
        if has(Feature::SnapshotMetadata) {
            controller = controller.changed_blocks(&legacy);
        }
        if has(Feature::Topology) {
            controller = controller.placement(&legacy);
        }
        if has(Feature::Health) {
            controller = controller.health(&legacy);
        }
        driver = driver.controller(controller);
    }
    if mode != Mode::Controller {
        let mut node = Node::binding(info.id, &legacy).mounts(Arc::new(LegacyMounts(mounts)));
        if has(Feature::Stage) {
            node = node.staging(&legacy);
        }
        if has(Feature::Stats) {
            node = node.stats(&legacy);
        }
        if has(Feature::NodeExpand) {
            node = node.expansion(&legacy);
        }
        if has(Feature::Health) {
            node = node.health(&legacy);
        }
        if has(Feature::MountGroup) {
            node = node.mount_group();
        }
        if let Some(topology) = info.topology.filter(|_| has(Feature::Topology)) {
            node = node.topology(topology);
        }
        if let Some(most) = info.max_volumes {
            node = node.max_volumes(most);
        }
        node = if has(Feature::InlineByReference) {
            node.inline_by_reference()
        } else {
            node.inline_volumes(&legacy)
        };
        driver = driver.node(node);
    }
    driver
}

impl Legacy {
    async fn existing(&self, id: &VolumeId, context: &BTreeMap<String, String>) -> Result<Volume> {
        self.backend.volume_on_node(id, context).await?.ok_or_else(|| Error::no_volume(id))
    }

    async fn create(&self, new: backend::NewVolume) -> Result<Volume> {
        self.backend.check_parameters(&new.parameters, &new.mutable, &new.capabilities).await?;
        self.backend.create_volume(new).await
    }
}

impl Readiness for Legacy {
    async fn ready(&self) -> Result<()> {
        self.backend.ready().await
    }
}

impl Volumes for Legacy {
    type Plan = backend::NewVolume;

    fn supports(&self) -> Supports {
        Supports::filesystem().and_block().on_many_nodes()
    }

    fn plan(&self, _: &Context, new: &NewVolume) -> Result<Self::Plan> {
        let NewVolume { name, range, capabilities, parameters, mutable, ephemeral } = new.clone();
        Ok(backend::NewVolume { name, range, capabilities, parameters, mutable, source: None, ephemeral })
    }

    fn check(&self, _: &Context, new: &NewVolume) -> Result<()> {
        self.backend
            .check_parameters(&new.parameters, &new.mutable, &new.capabilities)
            .now_or_never()
            .unwrap_or(Ok(()))
    }

    fn agrees(&self, volume: &Volume, known: &Parameters, pair: (&str, &str)) -> bool {
        self.backend.agrees(volume, known, pair)
    }

    async fn find(&self, _: &Context, plan: &Self::Plan) -> Result<Option<Volume>> {
        self.backend.find_made(plan).await
    }

    async fn create(&self, _: &Context, plan: Self::Plan) -> Result<Volume> {
        Legacy::create(self, plan).await
    }

    async fn get(&self, _: &Context, id: &VolumeId) -> Result<Option<Volume>> {
        self.backend.volume(id).await
    }

    async fn delete(&self, _: &Context, id: &VolumeId) -> Result<()> {
        match self.backend.volume(id).await? {
            Some(_) => self.backend.delete_volume(id).await,
            None => self.backend.clear_volume(id).await,
        }
    }
}

impl Cloning for Legacy {
    async fn clone_volume(&self, _: &Context, mut plan: Self::Plan, source: &Volume) -> Result<Volume> {
        plan.source = Some(ContentSource::Volume(source.id.clone()));
        Legacy::create(self, plan).await
    }
}

impl Listing for Legacy {
    async fn list(&self, _: &Context, page: &PageRequest) -> Result<Page<Volume>> {
        self.backend.list_volumes(page.clone()).await
    }
}

impl Placement for Legacy {
    async fn place(
        &self,
        _: &Context,
        _: &mut Self::Plan,
        wanted: Option<&TopologyRequirement>,
    ) -> Result<Topology> {
        let here = self.backend.node().topology;
        TopologyRequirement::check(wanted, here.as_ref())?;
        here.ok_or(Error::Unsupported("topology"))
    }
}

impl CapacityInfo for Legacy {
    async fn available_capacity(
        &self,
        _: &Context,
        parameters: &Parameters,
        topology: Option<&Topology>,
    ) -> Result<AvailableCapacity> {
        let elsewhere = match (topology, self.backend.node().topology) {
            (Some(wanted), Some(here)) => !here.satisfies(wanted),
            _ => false,
        };
        if elsewhere {
            let available = berth_core::Capacity::ZERO;
            return Ok(AvailableCapacity { available, largest_volume: None, smallest_volume: None });
        }
        self.backend.room(parameters, topology).await
    }
}

impl Legacy {
    async fn attach_as(&self, volume: &Volume, attached: Attached) -> Result<BTreeMap<String, String>> {
        if !self.backend.node_exists(&attached.node).await? {
            return Err(Error::not_found("node", &attached.node));
        }
        let repeated = volume.attachments.iter().any(|known| known.node == attached.node);
        let Some(limit) = self.backend.node().max_volumes.filter(|_| !repeated) else {
            return self.backend.attach(&volume.id, attached).await;
        };
        let _turn = self.attaching.lock().await;
        let count = self.backend.attached_count(&attached.node).await?;
        if count >= usize::try_from(limit).unwrap_or(usize::MAX) {
            let node = &attached.node;
            return Err(Error::Exhausted(format!("node {node:?} has {count} volumes, its limit is {limit}")));
        }
        self.backend.attach(&volume.id, attached).await
    }
}

impl Attachment for Legacy {
    async fn attach(
        &self,
        _: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        let attached = Attached { node: node.clone(), read_only: false, mode: Some(capability.mode) };
        self.attach_as(volume, attached).await
    }

    async fn detach(&self, _: &Context, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        self.backend.detach(id, node).await
    }
}

impl ReadOnlyAttachment for Legacy {
    async fn attach_read_only(
        &self,
        _: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        let attached = Attached { node: node.clone(), read_only: true, mode: Some(capability.mode) };
        self.attach_as(volume, attached).await
    }
}

impl Expansion for Legacy {
    async fn expand(&self, _: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        self.backend.expand_volume(&volume.id, range).await
    }
}

impl Modification for Legacy {
    async fn modify(&self, _: &Context, volume: &Volume, mutable: Parameters) -> Result<()> {
        let access = match volume.access {
            AccessKind::Block => Access::Block,
            AccessKind::Mount => Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None },
        };
        let capability = VolumeCapability { access, mode: AccessMode::SingleNodeWriter };
        self.backend.check_parameters(&volume.parameters, &mutable, &[capability]).await?;
        self.backend.modify_volume(&volume.id, mutable).await
    }
}

impl Snapshots for Legacy {
    async fn find_snapshot(&self, _: &Context, new: &NewSnapshot) -> Result<Option<Snapshot>> {
        self.backend.find_taken(&new.name, &new.source, &new.parameters).await
    }

    async fn take_snapshot(&self, _: &Context, new: NewSnapshot, _: &Volume) -> Result<Snapshot> {
        self.backend.create_snapshot(new.name, &new.source, &new.parameters).await
    }

    async fn snapshot(&self, _: &Context, id: &SnapshotId) -> Result<Option<Snapshot>> {
        self.backend.snapshot(id).await
    }

    async fn delete_snapshot(&self, _: &Context, id: &SnapshotId) -> Result<()> {
        self.backend.delete_snapshot(id).await
    }

    async fn list_snapshots(
        &self,
        _: &Context,
        source: Option<&VolumeId>,
        page: &PageRequest,
    ) -> Result<Page<Snapshot>> {
        self.backend.list_snapshots(source, page.clone()).await
    }

    async fn restore(&self, _: &Context, mut plan: Self::Plan, snapshot: &Snapshot) -> Result<Volume> {
        plan.source = Some(ContentSource::Snapshot(snapshot.id.clone()));
        Legacy::create(self, plan).await
    }

    fn progress(&self, id: &SnapshotId) -> Option<String> {
        self.backend.snapshot_progress(id)
    }
}

impl GroupSnapshots for Legacy {
    async fn find_group(&self, _: &Context, name: &Name) -> Result<Option<GroupSnapshot>> {
        self.backend.find_group(name).await
    }

    async fn take_group_snapshot(
        &self,
        _: &Context,
        name: &Name,
        sources: &[Volume],
        parameters: &Parameters,
    ) -> Result<GroupSnapshot> {
        let sources: Vec<VolumeId> = sources.iter().map(|volume| volume.id.clone()).collect();
        self.backend.create_group(name.clone(), &sources, parameters).await
    }

    async fn group(&self, _: &Context, id: &GroupSnapshotId) -> Result<Option<GroupSnapshot>> {
        self.backend.group(id).await
    }

    async fn delete_group(&self, _: &Context, id: &GroupSnapshotId) -> Result<()> {
        self.backend.delete_group(id).await
    }
}

impl ChangedBlocks for Legacy {
    async fn allocated(&self, _: &Context, snapshot: &Snapshot, from: u64) -> Result<Blocks> {
        self.backend.allocated_blocks(&snapshot.id, from).await
    }

    async fn changed(&self, _: &Context, base: &Snapshot, target: &Snapshot, from: u64) -> Result<Blocks> {
        self.backend.changed_blocks(&base.id, &target.id, from).await
    }
}

impl Health for Legacy {
    async fn health(&self, _: &Context, id: &VolumeId) -> Result<Vec<Condition>> {
        self.backend.volume_health(id).await
    }

    async fn list_unhealthy(
        &self,
        _: &Context,
        page: &PageRequest,
    ) -> Result<Page<(VolumeId, Vec<Condition>)>> {
        self.backend.list_unhealthy(page.clone()).await
    }
}

impl InlineVolumes for Legacy {
    async fn find_inline(&self, _: &Context, name: &Name) -> Result<Option<Volume>> {
        self.backend.find_volume(name).await
    }
}

impl Sources for Legacy {
    async fn check(&self, _: &Context, volume: &NodeVolume) -> Result<()> {
        volume.check_access(self.existing(&volume.id, &volume.context).await?.access)
    }

    async fn source(&self, ctx: &Context, volume: &NodeVolume) -> Result<Source> {
        let existing = self.existing(&volume.id, &volume.context).await?;
        let how = Publication {
            staging: volume.staging.as_deref(),
            capability: &volume.capability,
            read_only: volume.read_only,
            secrets: ctx.secrets(),
        };
        let path = self.backend.publish_source(&existing, how).await?;
        let source = match volume.capability.access.kind() {
            AccessKind::Mount => Source::directory(path.clone()),
            AccessKind::Block => Source::device(path.clone()),
        };
        let mounts = self.backend.mounts();
        Ok(source.guarded_by(Unbound { mounts, path, bound: AtomicBool::new(false) }))
    }
}

/// Tells the backend that its source could not be put at a target.
struct Unbound {
    mounts: Arc<dyn Mounts>,
    path: PathBuf,
    bound: AtomicBool,
}

impl Drop for Unbound {
    fn drop(&mut self) {
        if !self.bound.load(Ordering::Relaxed) {
            self.mounts.let_go(&self.path);
        }
    }
}

struct LegacyMounts(Arc<dyn Mounts>);

impl TargetMounts for LegacyMounts {
    fn is_mounted(&self, target: &Path) -> Result<bool> {
        self.0.is_bound(target)
    }

    fn bind(&self, source: &Source, target: &Path, attributes: Attributes) -> Result<()> {
        self.0.bind(&source.path(), target, attributes)?;
        if let Some(guard) = source.guard().and_then(|guard| guard.downcast_ref::<Unbound>()) {
            guard.bound.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn unmount(&self, target: &Path) -> Result<()> {
        self.0.unbind(target)
    }
}

impl Staging for Legacy {
    async fn stage(&self, _: &Context, volume: &NodeVolume, staging: &Path) -> Result<()> {
        let existing = self.existing(&volume.id, &volume.context).await?;
        self.backend.stage(&existing, staging, &volume.capability).await
    }

    async fn unstage(&self, _: &Context, id: &VolumeId, staging: &Path) -> Result<()> {
        self.backend.unstage(id, staging).await
    }

    async fn recover(&self, staged: Vec<StagedVolume>) -> Result<()> {
        self.backend.recover(staged).await
    }
}

impl Stats for Legacy {
    async fn usage(&self, _: &Context, id: &VolumeId, path: &Path) -> Result<Usage> {
        let existing = self.existing(id, &BTreeMap::new()).await?;
        self.backend.usage(&existing, path).await
    }
}

impl NodeExpansion for Legacy {
    async fn expand_on_node(
        &self,
        _: &Context,
        id: &VolumeId,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded> {
        let existing = self.existing(id, &BTreeMap::new()).await?;
        self.backend.expand_on_node(&existing, path, range).await
    }
}

impl NodeHealth for Legacy {
    async fn volume_health(
        &self,
        _: &Context,
        id: &VolumeId,
        staging: Option<&Path>,
        targets: &[PathBuf],
    ) -> Result<Vec<Condition>> {
        let existing = self.existing(id, &BTreeMap::new()).await?;
        self.backend.node_health(&existing, staging, targets).await
    }

    async fn storage_health(&self, _: &Context) -> Result<Vec<Condition>> {
        self.backend.storage_health().await
    }
}
