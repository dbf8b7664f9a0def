//! A program as a backend: it is run for what CSI asks, with one JSON document each way (docs/exec.md).
//!
//! ```text
//!  CreateVolume               create, clone, restore      what exists is recorded here: a repeated call is answered
//!  DeleteVolume               delete                      without asking the program
//!  CreateSnapshot, Delete     snapshot, delete-snapshot
//!  ControllerExpandVolume     grow
//!  ControllerPublishVolume    attach, detach
//!  NodeStageVolume            stage, unstage              a device that it answers is formatted if blank, and mounted
//!  NodePublishVolume          publish, unpublish          a source that it answers is bound at the target
//!  NodeExpandVolume           node-grow
//! ```
//!
//! What the driver announces is what `describe` answers. Records, locks, idempotency, target mounts and recovery are the
//! framework's. What a node's program needs to undo something is recorded before the program is asked to do it, without secrets.

mod program;
mod protocol;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_core::{AccessKind, Capacity, CapacityRange, NodeId, SnapshotId, VolumeCapability, VolumeId};
use berth_host::{
    format::{self, Content, Filesystem},
    mount::{self, Attributes},
    path::Dir,
    remote::RemoteMounts,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use self::{
    program::Program,
    protocol::{
        AttachReply, CapacityReply, Created, Described, Done, Fields, Grown, Operation, PublishReply,
        StageReply, StatsReply, Taken, map, volume_document,
    },
};
use crate::{
    Amounts, AvailableCapacity, CapacityInfo, Context, Controller, Driver, Error, Expanded, FromParameters,
    InvalidParameter, MachineMounts, NewVolume, Node, NodeExpanded, NodeExpansion, NodeVolume, Parameters,
    Provision, ProvisionAttachment, ProvisionCloning, ProvisionExpansion, ProvisionSnapshots, Readiness,
    Recorded, Result, Snapshot, Source, Sources, Staging, Stats, Supports, TargetMounts, Usage, Volume,
    blocking,
    flex::{is_kubernetes, is_mount_point},
    image,
    records::{self, Records},
    services::Mode,
};

/// How long a filesystem may take to say how full it is.
const SPACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why an ext4 on a program's device stays as large as it is.
const NO_RIGHT_TO_GROW: &str =
    "the filesystem has not grown: without CAP_SYS_RESOURCE the kernel lets nobody grow a mounted ext4";

/// How a program is run.
#[derive(Debug, Clone)]
pub struct Config {
    /// The program that is run for each operation.
    pub program: PathBuf,
    /// The id of this node, which is the name of its Node object.
    pub node: NodeId,
    /// Where records of volumes and of what is mounted are kept.
    pub state_dir: PathBuf,
    /// How long one operation may take.
    pub call_timeout: Duration,
    /// How many processes stay and answer line by line; the program is run for each operation if `None`.
    pub processes: Option<usize>,
}

/// A program as a backend; cheap to clone.
#[derive(Debug, Clone)]
pub struct Exec(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    program: Program,
    described: Described,
    node: NodeId,
    state_dir: PathBuf,
    staged: Records<StagedRecord>,
    targets: Records<TargetRecord>,
    remote: RemoteMounts,
}

/// A volume that is staged, with what the framework has to undo of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StagedRecord {
    /// The device that `stage` answered.
    device: Option<PathBuf>,
}

/// What is at a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TargetRecord {
    id: String,
}

/// What is to appear at a target, until the framework asks for it.
struct Pending {
    ctx: Context,
    volume: NodeVolume,
}

/// The parameters of a class, which the program reads; those that Kubernetes adds are not among them.
#[derive(Debug, Clone)]
pub struct Class(Parameters);

impl FromParameters for Class {
    fn from_parameters(parameters: &Parameters) -> std::result::Result<Self, InvalidParameter> {
        Ok(Self(own(parameters)))
    }
}

/// The pairs that a person wrote.
fn own(pairs: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let own = pairs.iter().filter(|(key, _)| !is_kubernetes(key));
    own.map(|(key, value)| (key.clone(), value.clone())).collect()
}

impl Exec {
    /// Asks the program what it can do.
    pub async fn start(config: Config) -> Result<Self> {
        let program = Program::new(&config.program, config.call_timeout, config.processes);
        let fields = Fields::default().with("node", config.node.as_str());
        let reply = program.ask(&Context::default(), Operation::Describe, fields, ("program", "")).await?;
        let mounted = config.state_dir.join("mounted");
        Ok(Self(Arc::new(Inner {
            program,
            described: Described::read(reply)?,
            node: config.node,
            staged: Records::open(&mounted)?,
            targets: Records::open(&mounted)?,
            state_dir: config.state_dir,
            remote: RemoteMounts::new(Path::new("/proc/self/exe")),
        })))
    }

    /// The name that the program gives itself, if it does.
    pub fn name(&self) -> Option<&str> {
        self.0.described.name.as_deref()
    }

    /// A driver with the parts that the mode wants and the program described.
    pub fn driver(&self, name: &str, version: &str, mode: Mode) -> Result<Driver> {
        use Operation::{Attach, Clone, Create, Grow, NodeGrow, Probe, Snapshot, Stage};
        let (exec, described) = (Arc::new(self.clone()), &self.0.described);
        let has = |operation| described.has(operation);
        let mut driver = Driver::new(name, version);
        if mode != Mode::Node && has(Create) {
            let volumes = Recorded::open(&exec, self.0.state_dir.join("volumes"))?;
            let mut controller = Controller::new(&volumes).listing(&volumes);
            if has(Clone) {
                controller = controller.cloning(&volumes);
            }
            if has(Snapshot) {
                controller = controller.snapshots(&volumes);
            }
            if has(Grow) {
                controller = controller.expansion(&volumes);
            }
            if has(Attach) {
                controller = controller.read_only_attachment(&volumes);
            }
            if has(Operation::Capacity) {
                controller = controller.capacity(&exec);
            }
            driver = driver.controller(controller);
        } else if mode == Mode::Controller {
            return Err(Error::invalid(
                "the program has no \"create\", so there is nothing for a controller",
            ));
        }
        if mode != Mode::Controller {
            let mut node = Node::binding(self.0.node.clone(), &exec).mounts(&exec);
            if has(Stage) {
                node = node.staging(&exec);
            }
            if has(NodeGrow) {
                node = node.expansion(&exec);
            }
            if has(Operation::Stats) {
                node = node.stats(&exec);
            }
            if let Some(most) = described.max_volumes {
                node = node.max_volumes(most);
            }
            driver = driver.node(node);
        }
        Ok(if has(Probe) { driver.readiness(&exec) } else { driver })
    }

    /// Has the program do something, and reads its answer. `what` is the thing that NOT_FOUND is about.
    async fn ask<T: DeserializeOwned>(
        &self,
        ctx: &Context,
        operation: Operation,
        fields: Fields,
        what: (&'static str, &str),
    ) -> Result<T> {
        protocol::read(operation, self.0.program.ask(ctx, operation, fields, what).await?)
    }

    async fn make(
        &self,
        ctx: &Context,
        operation: Operation,
        id: &VolumeId,
        new: &NewVolume,
        (class, fields): (&Class, Fields),
        least: Capacity,
    ) -> Result<Volume> {
        let chosen = new.range.choose(image::DEFAULT_SIZE).max(least);
        let mut fields = fields
            .with("id", id.as_str())
            .with("name", new.name.as_str())
            .with("parameters", map(&class.0))
            .with_range(&new.range, chosen);
        if let Some(capability) = new.capabilities.first() {
            fields = fields.with_capability(capability);
        }
        let made: Created = self.ask(ctx, operation, fields, ("volume", id.as_str())).await?;
        let capacity = made.capacity.map_or(chosen, Capacity::new);
        if !new.range.contains(capacity) {
            return Err(Error::Unavailable(format!(
                "{}: the program made a volume of {capacity}, which is not the size that was asked for",
                operation.name()
            )));
        }
        Ok(Volume { context: made.context, ..Volume::new(id.clone(), capacity) })
    }
}

impl Provision for Exec {
    type Class = Class;

    fn supports(&self) -> Supports {
        let mut supports = Supports::filesystem();
        if self.0.described.block {
            supports = supports.and_block();
        }
        if self.0.described.multi_node {
            supports = supports.on_many_nodes();
        }
        supports
    }

    async fn create(&self, ctx: &Context, id: &VolumeId, new: &NewVolume, class: &Class) -> Result<Volume> {
        let fields = (class, Fields::default());
        self.make(ctx, Operation::Create, id, new, fields, Capacity::new(0)).await
    }

    async fn delete(&self, ctx: &Context, id: &VolumeId, class: &Class) -> Result<()> {
        let fields = Fields::default().with("id", id.as_str()).with("parameters", map(&class.0));
        gone(self.ask::<Done>(ctx, Operation::Delete, fields, ("volume", id.as_str())).await)
    }
}

/// What is not there is removed.
fn gone(removed: Result<Done>) -> Result<()> {
    match removed {
        Ok(Done {}) | Err(Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

impl ProvisionCloning for Exec {
    async fn clone_volume(
        &self,
        ctx: &Context,
        id: &VolumeId,
        new: &NewVolume,
        class: &Class,
        source: &Volume,
    ) -> Result<Volume> {
        let fields = Fields::default().with("sourceVolume", volume_document(source));
        self.make(ctx, Operation::Clone, id, new, (class, fields), source.capacity).await
    }
}

impl ProvisionSnapshots for Exec {
    async fn take(
        &self,
        ctx: &Context,
        id: &SnapshotId,
        source: &Volume,
        parameters: &Parameters,
    ) -> Result<Capacity> {
        let fields = Fields::default()
            .with("id", id.as_str())
            .with("parameters", map(&own(parameters)))
            .with("sourceVolume", volume_document(source));
        let taken: Taken = self.ask(ctx, Operation::Snapshot, fields, ("volume", source.id.as_str())).await?;
        Ok(taken.size.map_or(source.capacity, Capacity::new))
    }

    async fn remove(&self, ctx: &Context, id: &SnapshotId, source: &VolumeId) -> Result<()> {
        let source = serde_json::json!({"id": source.as_str()});
        let fields = Fields::default().with("id", id.as_str()).with("sourceVolume", source);
        gone(self.ask(ctx, Operation::DeleteSnapshot, fields, ("snapshot", id.as_str())).await)
    }

    async fn restore(
        &self,
        ctx: &Context,
        id: &VolumeId,
        new: &NewVolume,
        class: &Class,
        snapshot: &Snapshot,
    ) -> Result<Volume> {
        let source = serde_json::json!({
            "id": snapshot.id.as_str(), "size": snapshot.size.bytes(), "volume": snapshot.source.as_str(),
        });
        let fields = Fields::default().with("sourceSnapshot", source);
        self.make(ctx, Operation::Restore, id, new, (class, fields), snapshot.size).await
    }
}

impl ProvisionExpansion for Exec {
    fn online(&self) -> bool {
        self.0.described.online_grow
    }

    async fn grow(&self, ctx: &Context, volume: &Volume, range: CapacityRange) -> Result<Expanded> {
        let chosen = range.choose(volume.capacity).max(volume.capacity);
        let fields = Fields::default().with_volume(volume).with_range(&range, chosen);
        let grown: Grown = self.ask(ctx, Operation::Grow, fields, ("volume", volume.id.as_str())).await?;
        let capacity = grown.capacity.map_or(chosen, Capacity::new);
        if capacity < volume.capacity || !range.contains(capacity) {
            return Err(Error::Unavailable(format!(
                "grow: the program answered {capacity}, which is not a size that was asked for"
            )));
        }
        let on_node = self.0.described.has(Operation::NodeGrow);
        Ok(Expanded { capacity, node_expansion_required: grown.node_grow.unwrap_or(on_node) && on_node })
    }
}

impl ProvisionAttachment for Exec {
    async fn attach(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
        read_only: bool,
    ) -> Result<BTreeMap<String, String>> {
        let fields = Fields::default()
            .with_volume(volume)
            .with_capability(capability)
            .with("node", node.as_str())
            .with("readOnly", read_only);
        let reply: AttachReply = self.ask(ctx, Operation::Attach, fields, ("node", node.as_str())).await?;
        Ok(reply.context)
    }

    async fn detach(&self, ctx: &Context, id: &VolumeId, node: &NodeId) -> Result<()> {
        let fields = Fields::default().with("id", id.as_str()).with("node", node.as_str());
        gone(self.ask(ctx, Operation::Detach, fields, ("node", node.as_str())).await)
    }
}

impl CapacityInfo for Exec {
    async fn available_capacity(
        &self,
        ctx: &Context,
        parameters: &Parameters,
        _: Option<&berth_core::Topology>,
    ) -> Result<AvailableCapacity> {
        let fields = Fields::default().with("parameters", map(&own(parameters)));
        let reply: CapacityReply = self.ask(ctx, Operation::Capacity, fields, ("capacity", "")).await?;
        Ok(AvailableCapacity {
            available: Capacity::new(reply.available),
            largest_volume: reply.largest.map(Capacity::new),
            smallest_volume: reply.smallest.map(Capacity::new),
        })
    }
}

impl Readiness for Exec {
    async fn ready(&self) -> Result<()> {
        let fields = Fields::default().with("node", self.0.node.as_str());
        self.ask::<Done>(&Context::default(), Operation::Probe, fields, ("program", "")).await.map(drop)
    }
}

/// The name of the record of a volume that is staged.
fn staged_key(id: &VolumeId) -> String {
    records::key("staged", id.as_str().as_bytes())
}

/// The name of the record of a target.
fn target_key(target: &Path) -> String {
    records::key("target", target.as_os_str().as_encoded_bytes())
}

impl Staging for Exec {
    async fn stage(&self, ctx: &Context, volume: &NodeVolume, staging: &Path) -> Result<()> {
        let staged = self.stage_by_program(ctx, volume, staging).await;
        if staged.is_err()
            && let Err(error) = self.unstage(ctx, &volume.id, staging).await
        {
            tracing::warn!(volume.id = %volume.id, %error, "a staging that failed could not be undone");
        }
        staged
    }

    async fn unstage(&self, ctx: &Context, id: &VolumeId, staging: &Path) -> Result<()> {
        let key = staged_key(id);
        let at = staging.to_owned();
        let record = self.0.staged.read(&key).await?.unwrap_or_default();
        if record.device.is_some() {
            // The framework mounted it, and its device is in use until then.
            let at = at.clone();
            blocking(move || Ok(mount::unmount(&at).map(drop)?)).await?;
        }
        let fields = Fields::default().with("id", id.as_str()).with("stagingPath", text(staging)?);
        gone(self.ask(ctx, Operation::Unstage, fields, ("volume", id.as_str())).await)?;
        if is_mount_point(staging).await? {
            blocking(move || Ok(mount::unmount(&at).map(drop)?)).await?;
        }
        self.0.staged.remove(&key).await
    }
}

impl Exec {
    async fn stage_by_program(&self, ctx: &Context, volume: &NodeVolume, staging: &Path) -> Result<()> {
        let key = staged_key(&volume.id);
        Dir::ensure(staging, 0o750)?;
        let fields = Fields::default().with_node_volume(volume).with("stagingPath", text(staging)?);
        let reply: StageReply =
            self.ask(ctx, Operation::Stage, fields, ("volume", volume.id.as_str())).await?;
        let is_mount = volume.capability.access.kind() == AccessKind::Mount;
        self.0.staged.write(&key, &StagedRecord { device: reply.device.clone() }).await?;
        match reply.device {
            Some(device) if is_mount => {
                if is_mount_point(staging).await? {
                    return Ok(());
                }
                let (at, capability) = (staging.to_owned(), volume.capability.clone());
                let read_only = capability.mode.is_read_only();
                blocking(move || mount_device(&device, &at, &capability, read_only)).await
            }
            None if self.0.described.has(Operation::Publish) => Ok(()),
            None if is_mount && is_mount_point(staging).await? => Ok(()),
            None if is_mount => Err(Error::Unavailable(format!(
                "stage: the program succeeded, answered no \"device\", and mounted nothing at {}",
                staging.display()
            ))),
            Some(_) => Ok(()),
            None => Err(Error::Unavailable(
                "stage: the program succeeded, and answered no \"device\" for a raw block volume".to_owned(),
            )),
        }
    }
}

/// Mounts a device, formatted if it is provably blank, checked, and with its filesystem as large as the device.
fn mount_device(device: &Path, staging: &Path, capability: &VolumeCapability, read_only: bool) -> Result<()> {
    let berth_core::Access::Mount { fs_type, flags, .. } = &capability.access else {
        return Err(Error::Unsupported("a filesystem on a raw block volume"));
    };
    let wanted = image::parse_filesystem(fs_type)?;
    let filesystem = match format::probe(device)? {
        Content::Blank if !read_only => {
            let made = wanted.unwrap_or(Filesystem::Ext4);
            format::make_on_device(device, made, image::TOOL_DEADLINE)?;
            made
        }
        found => image::recognise(found, wanted)?,
    };
    if !read_only {
        format::check(filesystem, device, image::TOOL_DEADLINE)?;
    }
    let options = image::mount_options(filesystem, flags, read_only);
    let attributes = Attributes { read_only, ..options.attributes };
    mount::filesystem(device, staging, filesystem.as_str(), attributes, &options.filesystem)?;
    if !read_only {
        match format::grow_mounted(filesystem, staging) {
            Err(error) if image::grows_only_unmounted(filesystem, &error) => {
                tracing::warn!(path = %staging.display(), "{NO_RIGHT_TO_GROW}");
            }
            grown => grown.map(drop)?,
        }
    }
    Ok(())
}

/// A path as it stands in a document.
fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::Invalid(format!("{} is not a UTF-8 path", path.display())))
}

impl Sources for Exec {
    async fn check(&self, _: &Context, volume: &NodeVolume) -> Result<()> {
        match volume.capability.access.kind() {
            AccessKind::Block if !self.0.described.block => {
                Err(Error::invalid("raw block access is not supported by this driver"))
            }
            _ => Ok(()),
        }
    }

    async fn source(&self, ctx: &Context, volume: &NodeVolume) -> Result<Source> {
        let pending = Pending { ctx: ctx.clone(), volume: volume.clone() };
        let placeholder = volume.staging.clone().unwrap_or_default();
        Ok(match volume.capability.access.kind() {
            AccessKind::Mount => Source::directory(placeholder),
            AccessKind::Block => Source::device(placeholder),
        }
        .guarded_by(pending))
    }
}

impl TargetMounts for Exec {
    async fn is_mounted(&self, target: &Path) -> Result<bool> {
        MachineMounts.is_mounted(target).await
    }

    async fn bind(&self, source: &Source, target: &Path, attributes: Attributes) -> Result<()> {
        let pending = source.guard().and_then(|guard| guard.downcast_ref::<Pending>());
        let Some(Pending { ctx, volume }) = pending else {
            return Err(Error::internal("a source that is not the program's"));
        };
        if let Some(found) = self.found(ctx, volume, target).await? {
            return MachineMounts.bind(&found, target, attributes).await;
        }
        if !is_mount_point(target).await? {
            return Err(Error::Unavailable(format!(
                "publish: the program succeeded, answered no \"source\", and mounted nothing at {}",
                target.display()
            )));
        }
        let at = target.to_owned();
        blocking(move || Ok(mount::set_attributes(&at, attributes)?)).await
    }

    async fn unmount(&self, target: &Path) -> Result<()> {
        let key = target_key(target);
        let record = self.0.targets.read(&key).await?;
        if let Some(record) = record
            && self.0.described.has(Operation::Unpublish)
        {
            let fields = Fields::default().with("id", record.id.as_str()).with("targetPath", text(target)?);
            let ctx = Context::default();
            gone(self.ask(&ctx, Operation::Unpublish, fields, ("volume", &record.id)).await)?;
        }
        MachineMounts.unmount(target).await?;
        self.0.targets.remove(&key).await
    }
}

impl Exec {
    /// What is to be bound at a target; `None` if the program mounts there itself.
    async fn found(&self, ctx: &Context, volume: &NodeVolume, target: &Path) -> Result<Option<Source>> {
        let is_block = volume.capability.access.kind() == AccessKind::Block;
        let staged = || async {
            let staged = self.0.staged.read(&staged_key(&volume.id)).await?;
            Ok::<_, Error>(staged.and_then(|staged| staged.device))
        };
        if !self.0.described.has(Operation::Publish) {
            let missing = || Error::Precondition(format!("volume {:?} is not staged", volume.id));
            return Ok(Some(if is_block {
                Source::device(staged().await?.ok_or_else(missing)?)
            } else {
                Source::directory(volume.staging.clone().ok_or_else(missing)?)
            }));
        }
        let record = TargetRecord { id: volume.id.to_string() };
        self.0.targets.write(&target_key(target), &record).await?;
        let mut fields = Fields::default().with_node_volume(volume).with("targetPath", text(target)?);
        if let Some(staging) = &volume.staging {
            fields = fields.with("stagingPath", text(staging)?);
        }
        let reply: PublishReply =
            self.ask(ctx, Operation::Publish, fields, ("volume", volume.id.as_str())).await?;
        let wrong = |why: &str| Err(Error::Unavailable(format!("publish: the program answered {why}")));
        Ok(match (reply.source, reply.device) {
            (Some(_), Some(_)) => return wrong("both a \"source\" and a \"device\""),
            (Some(source), None) if !is_block && source.is_absolute() => Some(Source::directory(source)),
            (None, Some(device)) if is_block && device.is_absolute() => Some(Source::device(device)),
            (None, None) if is_block => {
                let device = staged().await?;
                let Some(device) = device else { return wrong("no \"device\" for a raw block volume") };
                Some(Source::device(device))
            }
            (None, None) => None,
            _ => {
                return wrong(
                    "a \"source\" or \"device\" that does not fit the volume, or is no absolute path",
                );
            }
        })
    }
}

impl NodeExpansion for Exec {
    async fn expand_on_node(
        &self,
        ctx: &Context,
        id: &VolumeId,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded> {
        let capacity = range.choose(Capacity::new(0));
        let fields =
            Fields::default().with("id", id.as_str()).with("path", text(path)?).with_range(&range, capacity);
        let grown: Grown = self.ask(ctx, Operation::NodeGrow, fields, ("volume", id.as_str())).await?;
        let staged = self.0.staged.read(&staged_key(id)).await?.unwrap_or_default();
        let at = path.to_owned();
        if let Some(device) = staged.device
            && at.is_dir()
        {
            blocking(move || match format::probe(&device)? {
                Content::Filesystem(filesystem) => match format::grow_mounted(filesystem, &at) {
                    Err(error) if image::grows_only_unmounted(filesystem, &error) => {
                        Err(Error::precondition(NO_RIGHT_TO_GROW))
                    }
                    grown => Ok(grown.map(drop)?),
                },
                Content::Blank | Content::Other(_) => Ok(()),
            })
            .await?;
        }
        Ok(NodeExpanded::Done(grown.capacity.map_or(capacity, Capacity::new)))
    }
}

impl Stats for Exec {
    async fn usage(&self, ctx: &Context, id: &VolumeId, path: &Path) -> Result<Usage> {
        let fields = Fields::default().with("id", id.as_str()).with("path", text(path)?);
        let reply: StatsReply = self.ask(ctx, Operation::Stats, fields, ("volume", id.as_str())).await?;
        let amounts = |total: u64, used: u64, available: u64| Amounts { total, used, available };
        if let Some(total) = reply.total {
            let used = reply.used.unwrap_or_else(|| total.saturating_sub(reply.available.unwrap_or(total)));
            let available = reply.available.unwrap_or_else(|| total.saturating_sub(used));
            return Ok(Usage { bytes: amounts(total, used, available), inodes: None });
        }
        let (exec, path) = (self.clone(), path.to_owned());
        blocking(move || {
            let space = exec.0.remote.space(&path, SPACE_TIMEOUT)?;
            let used = |total: u64, free: u64| total.saturating_sub(free);
            Ok(Usage {
                bytes: amounts(space.total, used(space.total, space.free), space.available),
                inodes: Some(amounts(
                    space.inodes_total,
                    used(space.inodes_total, space.inodes_free),
                    space.inodes_free,
                )),
            })
        })
        .await
    }
}
