//! A driver is composed of a controller part and a node part, and each part of what its backend implements.
//!
//! What is announced follows from the composition ([`Driver::announces`]), so that nothing can be announced and not
//! implemented: a line whose type lacks the trait does not compile.
//! ```compile_fail
//! # use berth_driver::*;
//! # use std::sync::Arc;
//! fn compose<V: Volumes>(volumes: &Arc<V>) -> Controller {
//!     Controller::new(volumes).cloning(volumes).into()
//! }
//! ```
//! ```
//! # use berth_driver::*;
//! # use std::sync::Arc;
//! fn compose<V: Cloning>(volumes: &Arc<V>) -> Controller {
//!     Controller::new(volumes).cloning(volumes).into()
//! }
//! ```

use std::sync::Arc;

use berth_core::{NodeId, Topology, VolumeId};
use prometheus_client::registry::Registry;

use crate::{
    Attachment, CapacityInfo, ChangedBlocks, Cloning, Context, Error, Expansion, GroupSnapshots, Health,
    InlineVolumes, Listing, MachineMounts, Modification, NewVolume, NodeExpansion, NodeHealth, Parameters,
    Placement, ReadOnlyAttachment, Readiness, Result, Snapshot, Snapshots, Sources, Staging, Stats, Supports,
    TargetMounts, TopologyRequirement, Volume, Volumes,
    erased::{
        Boxed, DynAttachment, DynCapacityInfo, DynChangedBlocks, DynCloning, DynExpansion, DynGroupSnapshots,
        DynHealth, DynInlineVolumes, DynListing, DynModification, DynNodeExpansion, DynNodeHealth,
        DynPlacement, DynReadOnlyAttachment, DynReadiness, DynRestoring, DynSnapshots, DynSources,
        DynStaging, DynStats, DynTargetMounts, DynVolumes,
    },
    services::{Config, Services},
};

/// How volumes come to be, for one type of plan.
struct Provisioner<P> {
    volumes: Arc<dyn DynVolumes<P>>,
    cloning: Option<Arc<dyn DynCloning<P>>>,
    restoring: Option<Arc<dyn DynRestoring<P>>>,
    placement: Option<Arc<dyn DynPlacement<P>>>,
}

/// What a content source was found to be.
pub(crate) enum Origin {
    Nothing,
    Volume(Box<Volume>),
    Snapshot(Box<Snapshot>),
}

/// A [`Provisioner`] without its type of plan: the only place where the type is forgotten.
pub(crate) trait AnyProvisioner: Send + Sync {
    /// Plans, finds, and makes what is not there; whether it was there. `origin` looks up the content source.
    fn ensure<'a>(
        &'a self,
        ctx: &'a Context,
        new: &'a NewVolume,
        wanted: Option<&'a TopologyRequirement>,
        origin: Boxed<'a, Origin>,
    ) -> Boxed<'a, (Volume, bool)>;
    fn get<'a>(&'a self, ctx: &'a Context, id: &'a VolumeId) -> Boxed<'a, Option<Volume>>;
    fn delete<'a>(&'a self, ctx: &'a Context, id: &'a VolumeId) -> Boxed<'a, ()>;
    fn supports(&self) -> Supports;
    fn check(&self, ctx: &Context, new: &NewVolume) -> Result<()>;
    fn agrees(&self, volume: &Volume, known: &Parameters, pair: (&str, &str)) -> bool;
    fn clones(&self) -> bool;
    fn has_topology(&self) -> bool;
    /// The topology in the keys of volumes; `None` where volumes are not placed, and topologies mean nothing.
    fn canonical(&self, topology: Topology) -> Option<Topology>;
}

impl<P: Send + Sync + 'static> AnyProvisioner for Provisioner<P> {
    fn ensure<'a>(
        &'a self,
        ctx: &'a Context,
        new: &'a NewVolume,
        wanted: Option<&'a TopologyRequirement>,
        origin: Boxed<'a, Origin>,
    ) -> Boxed<'a, (Volume, bool)> {
        Box::pin(async move {
            let mut plan = self.volumes.plan(ctx, new)?;
            if let Some(found) = self.volumes.find(ctx, &plan).await? {
                return Ok((found, true));
            }
            // Only now: a repeated call is answered although its source may be gone or its zone full.
            let topology = match &self.placement {
                Some(placement) => Some(placement.place(ctx, &mut plan, wanted).await?),
                None => None,
            };
            let mut made = match (origin.await?, &self.cloning, &self.restoring) {
                (Origin::Nothing, ..) => self.volumes.create(ctx, plan).await?,
                (Origin::Volume(source), Some(cloning), _) => {
                    cloning.clone_volume(ctx, plan, &source).await?
                }
                (Origin::Snapshot(source), _, Some(restoring)) => {
                    restoring.restore(ctx, plan, &source).await?
                }
                _ => return Err(Error::Unsupported("volume_content_source")),
            };
            made.topology = made.topology.or_else(|| topology.map(Arc::new));
            Ok((made, false))
        })
    }

    fn get<'a>(&'a self, ctx: &'a Context, id: &'a VolumeId) -> Boxed<'a, Option<Volume>> {
        self.volumes.get(ctx, id)
    }

    fn delete<'a>(&'a self, ctx: &'a Context, id: &'a VolumeId) -> Boxed<'a, ()> {
        self.volumes.delete(ctx, id)
    }

    fn supports(&self) -> Supports {
        self.volumes.supports()
    }

    fn check(&self, ctx: &Context, new: &NewVolume) -> Result<()> {
        self.volumes.check(ctx, new)
    }

    fn agrees(&self, volume: &Volume, known: &Parameters, pair: (&str, &str)) -> bool {
        self.volumes.agrees(volume, known, pair)
    }

    fn clones(&self) -> bool {
        self.cloning.is_some()
    }

    fn has_topology(&self) -> bool {
        self.placement.is_some()
    }

    fn canonical(&self, topology: Topology) -> Option<Topology> {
        self.placement.as_ref().map(|placement| placement.canonical(topology))
    }
}

impl dyn AnyProvisioner {
    /// What a caller wants, in the keys of volumes; `None` where volumes are not placed.
    pub(crate) fn wanted(&self, wanted: Option<TopologyRequirement>) -> Option<TopologyRequirement> {
        let all = |all: Vec<Topology>| all.into_iter().map(|one| self.canonical(one)).collect::<Option<_>>();
        let TopologyRequirement { requisite, preferred } = wanted?;
        Some(TopologyRequirement { requisite: all(requisite)?, preferred: all(preferred)? })
    }
}

#[derive(Default)]
pub(crate) struct ControllerParts {
    pub(crate) listing: Option<Arc<dyn DynListing>>,
    pub(crate) capacity: Option<Arc<dyn DynCapacityInfo>>,
    pub(crate) attachment: Option<Arc<dyn DynAttachment>>,
    pub(crate) read_only_attachment: Option<Arc<dyn DynReadOnlyAttachment>>,
    pub(crate) expansion: Option<Arc<dyn DynExpansion>>,
    pub(crate) modification: Option<Arc<dyn DynModification>>,
    pub(crate) snapshots: Option<Arc<dyn DynSnapshots>>,
    pub(crate) group_snapshots: Option<Arc<dyn DynGroupSnapshots>>,
    pub(crate) changed_blocks: Option<Arc<dyn DynChangedBlocks>>,
    pub(crate) health: Option<Arc<dyn DynHealth>>,
}

/// The part of a driver that needs no particular node.
pub struct Controller {
    pub(crate) provisioner: Box<dyn AnyProvisioner>,
    pub(crate) parts: ControllerParts,
}

/// Composes a [`Controller`]; `P` is the plan of its volumes.
#[must_use]
pub struct ControllerBuilder<P> {
    provisioner: Provisioner<P>,
    parts: ControllerParts,
}

impl Controller {
    /// Volumes, and nothing else yet.
    #[expect(clippy::new_ret_no_self, reason = "the builder is the way to a controller")]
    pub fn new<V: Volumes>(volumes: &Arc<V>) -> ControllerBuilder<V::Plan> {
        ControllerBuilder { provisioner: Provisioner::new(volumes), parts: ControllerParts::default() }
    }
}

impl<P> Provisioner<P> {
    fn new<V: Volumes<Plan = P>>(volumes: &Arc<V>) -> Self {
        Self { volumes: volumes.clone(), cloning: None, restoring: None, placement: None }
    }
}

macro_rules! parts {
    ($($(#[$doc:meta])* $field:ident: $trait:path;)*) => {$(
        $(#[$doc])*
        pub fn $field(mut self, part: &Arc<impl $trait>) -> Self {
            self.parts.$field = Some(part.clone());
            self
        }
    )*};
}

impl<P: Send + Sync + 'static> ControllerBuilder<P> {
    parts! {
        /// Volumes can be listed.
        listing: Listing;
        /// The storage knows how much can still be created.
        capacity: CapacityInfo;
        /// Volumes are attached to nodes.
        attachment: Attachment;
        /// Volumes can be made larger.
        expansion: Expansion;
        /// Volumes have parameters that can change.
        modification: Modification;
        /// The storage knows what is wrong with its volumes.
        health: Health;
    }

    /// Volumes are attached to nodes, also for reading only.
    pub fn read_only_attachment(mut self, part: &Arc<impl ReadOnlyAttachment>) -> Self {
        self.parts.read_only_attachment = Some(part.clone());
        self.attachment(part)
    }

    /// Volumes are accessible only from some topologies.
    pub fn placement(mut self, part: &Arc<impl Placement<Plan = P>>) -> Self {
        self.provisioner.placement = Some(part.clone());
        self
    }

    /// Volumes can be made of volumes.
    pub fn cloning(mut self, part: &Arc<impl Cloning<Plan = P>>) -> Self {
        self.provisioner.cloning = Some(part.clone());
        self
    }

    /// Snapshots can be taken, and volumes made of them.
    pub fn snapshots(mut self, part: &Arc<impl Snapshots<Plan = P>>) -> Self {
        self.provisioner.restoring = Some(part.clone());
        self.parts.snapshots = Some(part.clone());
        self
    }

    /// Snapshots of several volumes can be taken at one instant; brings single snapshots with it.
    pub fn group_snapshots(mut self, part: &Arc<impl GroupSnapshots<Plan = P>>) -> Self {
        self.parts.group_snapshots = Some(part.clone());
        self.snapshots(part)
    }

    /// The storage knows which blocks a snapshot holds; brings snapshots with it.
    pub fn changed_blocks(mut self, part: &Arc<impl ChangedBlocks<Plan = P>>) -> Self {
        self.parts.changed_blocks = Some(part.clone());
        self.snapshots(part)
    }
}

impl<P: Send + Sync + 'static> From<ControllerBuilder<P>> for Controller {
    fn from(builder: ControllerBuilder<P>) -> Self {
        Self { provisioner: Box::new(builder.provisioner), parts: builder.parts }
    }
}

#[derive(Default)]
pub(crate) struct NodeParts {
    pub(crate) staging: Option<Arc<dyn DynStaging>>,
    pub(crate) stats: Option<Arc<dyn DynStats>>,
    pub(crate) expansion: Option<Arc<dyn DynNodeExpansion>>,
    pub(crate) health: Option<Arc<dyn DynNodeHealth>>,
}

/// What a volume in a pod's own specification is.
pub(crate) enum Inline {
    Unsupported,
    /// Storage that is there: nothing is made for it, and nothing removed.
    Reference,
    /// Made when its pod starts and removed when it ends.
    Made {
        provisioner: Box<dyn AnyProvisioner>,
        finder: Arc<dyn DynInlineVolumes>,
    },
}

/// The part of a driver that works where volumes are used.
#[must_use]
pub struct Node {
    pub(crate) id: NodeId,
    pub(crate) sources: Arc<dyn DynSources>,
    pub(crate) mounts: Arc<dyn DynTargetMounts>,
    pub(crate) parts: NodeParts,
    pub(crate) topology: Option<Topology>,
    pub(crate) max_volumes: Option<u32>,
    pub(crate) mount_group: bool,
    pub(crate) inline: Inline,
}

impl Node {
    /// A node on which the framework binds what the backend says.
    pub fn binding(id: NodeId, sources: &Arc<impl Sources>) -> Self {
        Self {
            id,
            sources: sources.clone(),
            mounts: Arc::new(MachineMounts),
            parts: NodeParts::default(),
            topology: None,
            max_volumes: None,
            mount_group: false,
            inline: Inline::Unsupported,
        }
    }

    parts! {
        /// Volumes are prepared once per node before they are published.
        staging: Staging;
        /// The node can say how full a volume is.
        stats: Stats;
        /// What is on a volume is grown on the node.
        expansion: NodeExpansion;
        /// The node knows what is wrong with volumes and with the storage.
        health: NodeHealth;
    }

    /// Where the node is; for a driver whose controller has a placement.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// How many volumes the node takes.
    pub fn max_volumes(mut self, most: u32) -> Self {
        self.max_volumes = Some(most);
        self
    }

    /// The framework shows the files as the group's that a call names, or gives them to it; for sources on this machine, which
    /// always answer.
    pub fn mount_group(mut self) -> Self {
        self.mount_group = true;
        self
    }

    /// How sources are put at targets, where those of this machine do not do.
    pub fn mounts(mut self, mounts: &Arc<impl TargetMounts>) -> Self {
        self.mounts = mounts.clone();
        self
    }

    /// Inline volumes are made when their pod starts, and removed when it ends.
    pub fn inline_volumes(mut self, volumes: &Arc<impl InlineVolumes>) -> Self {
        self.inline =
            Inline::Made { provisioner: Box::new(Provisioner::new(volumes)), finder: volumes.clone() };
        self
    }

    /// Inline volumes name storage that is there.
    pub fn inline_by_reference(mut self) -> Self {
        self.inline = Inline::Reference;
        self
    }
}

/// A driver: a name and one or two parts. Which parts it has is its mode.
#[must_use]
pub struct Driver {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) controller: Option<Controller>,
    pub(crate) node: Option<Node>,
    pub(crate) readiness: Option<Arc<dyn DynReadiness>>,
    pub(crate) metrics: Option<RegisterMetrics>,
}

/// Registers the metrics of a backend.
pub(crate) type RegisterMetrics = Box<dyn Fn(&mut Registry) + Send + Sync>;

impl Driver {
    /// A driver that can do nothing yet. The name is what StorageClass.provisioner says.
    pub fn new(name: impl Into<String>, version: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            version: version.into(),
            controller: None,
            node: None,
            readiness: None,
            metrics: None,
        }
    }

    /// With this controller part.
    pub fn controller(mut self, part: impl Into<Controller>) -> Self {
        self.controller = Some(part.into());
        self
    }

    /// With this node part.
    pub fn node(mut self, part: Node) -> Self {
        self.node = Some(part);
        self
    }

    /// Whether the storage can be used now is asked here; it always can be otherwise.
    pub fn readiness(mut self, part: &Arc<impl Readiness>) -> Self {
        self.readiness = Some(part.clone());
        self
    }

    /// With metrics of the backend's own, beside those of the calls; `register` is called for each registry that shows them.
    pub fn metrics(mut self, register: impl Fn(&mut Registry) + Send + Sync + 'static) -> Self {
        self.metrics = Some(Box::new(register));
        self
    }

    /// The driver's services, which know what was mounted before they were started; [`Services::recover`] comes next.
    pub fn open(self, config: Config) -> Result<Arc<Services>> {
        Services::open(self, config)
    }

    /// Refuses parts that contradict each other.
    pub(crate) fn check(&self) -> Result<()> {
        let (Some(controller), Some(node)) = (&self.controller, &self.node) else { return Ok(()) };
        match (controller.provisioner.has_topology(), node.topology.is_some()) {
            (true, false) => {
                Err(Error::invalid("the controller places volumes, and the node has no topology"))
            }
            (false, true) => {
                Err(Error::invalid("the node has a topology, and the controller does not place volumes"))
            }
            _ => Ok(()),
        }
    }
}
