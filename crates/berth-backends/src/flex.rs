//! Any FlexVolume driver as a backend: its executable is called for what CSI asks.
//!
//! ```text
//!  ControllerPublishVolume  attach                        the device travels in the publish context
//!  NodeStageVolume          waitforattach, mountdevice    only where the driver attaches
//!  NodePublishVolume        mount                         or a bind of what is staged, where it is not supported
//!  NodeExpandVolume         expandvolume, expandfs
//!  NodeUnpublishVolume      unmount
//!  NodeUnstageVolume        unmountdevice
//!  ControllerUnpublish      detach
//! ```
//!
//! What a volume is, its options say: the attributes of a PersistentVolume that somebody wrote, or the parameters of a class in
//! which `${volume.id}` stands for the volume's id. Where a class has the parameter `flex.berth.dev/directory`, a volume is that directory of
//! what the driver mounts for the other options: it is made and removed by mounting that for a moment.
//!
//! FlexVolume gives the driver nothing but paths when something is removed, and CSI gives no options when a volume
//! grows, so what is mounted has a record, which is written before the driver is called. It holds no secret.

mod plugin;
mod record;
mod volumes;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use self::{plugin::Plugin, record::Record, volumes::FlexVolumes};
use crate::{
    Amounts, Attachment, Context, Controller, Driver, Error, Node, NodeExpanded, NodeExpansion, NodeVolume,
    Recorded, Result, Source, Sources, Staging, Stats, TargetMounts, Usage, Volume, blocking, image,
    records::{self, Records},
    services::Mode,
};
use berth_core::{
    Access, AccessKind, Capacity, CapacityRange, NodeId, VolumeCapability, VolumeId,
    names::{KUBERNETES_PARAMETER_PREFIX, PROVISIONER_IDENTITY},
};
use berth_flex::{Call, DriverName, Options, PodInfo, Reply, Timeouts};
use berth_host::{
    format::{self, Content},
    mount::{self, Attributes},
    path::Dir,
    remote::RemoteMounts,
    usage::Space,
};

/// The parameter of a class, and the attribute of a volume, that names a directory of what the driver mounts.
const DIRECTORY: &str = "flex.berth.dev/directory";
/// The attribute that says which FlexVolume driver a volume was of; no driver gets it.
pub const DRIVER: &str = "flex.berth.dev/driver";
/// What stands for the volume's id in a class.
const ID_VARIABLE: &str = "${volume.id}";
/// The key of the publish context under which the device travels that `attach` answered.
const DEVICE: &str = "device";
/// How long a filesystem may take to say how full it is.
const SPACE_TIMEOUT: Duration = Duration::from_secs(10);

/// How a FlexVolume driver is served.
#[derive(Debug, Clone)]
pub struct Config {
    /// The driver's executable, in a directory `vendor~driver`.
    pub plugin: PathBuf,
    /// The id of this node, which is the name of its Node object.
    pub node: NodeId,
    /// Where records of what is mounted and of volumes are kept.
    pub state_dir: PathBuf,
    /// How long a call-out may take.
    pub call_timeout: Duration,
}

/// A FlexVolume driver as a backend; cheap to clone.
#[derive(Debug, Clone)]
pub struct Flex(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    plugin: Plugin,
    node: NodeId,
    state_dir: PathBuf,
    records: Records<Record>,
    remote: RemoteMounts,
    /// Set where controller and node are one process, so that there is no other node.
    only_node: bool,
}

/// What is to be mounted at a target, until the framework asks for it.
struct Pending {
    record: Record,
    options: Options,
    staging: Option<PathBuf>,
}

/// The name of the FlexVolume driver whose executable this is, by the directory that it lies in.
pub fn driver_name_of(plugin: &Path) -> Result<DriverName> {
    let directory = plugin.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let name = directory.and_then(|directory| DriverName::from_directory(directory).ok());
    name.filter(|name| plugin.file_name().is_some_and(|file| file == name.executable())).ok_or_else(|| {
        Error::Invalid(format!(
            "{} is not the path of a FlexVolume driver, which is vendor~driver/driver",
            plugin.display()
        ))
    })
}

/// The name of a CSI driver that serves a FlexVolume driver: `driver.vendor.flex.berth.dev`.
pub fn csi_name_of(name: &DriverName) -> String {
    let vendor = name.vendor().map(|vendor| format!("{vendor}.")).unwrap_or_default();
    format!("{}.{vendor}flex.berth.dev", name.executable()).replace('_', "-").to_ascii_lowercase()
}

impl Flex {
    /// Asks the driver what it can do.
    pub async fn start(config: Config, mode: Mode) -> Result<Self> {
        let name = driver_name_of(&config.plugin)?;
        let timeouts = Timeouts { call: config.call_timeout, ..Timeouts::default() };
        let plugin = Plugin::start(name, config.plugin, timeouts).await?;
        let flex = Self(Arc::new(Inner {
            plugin,
            node: config.node,
            records: Records::open(&config.state_dir.join("mounted"))?,
            state_dir: config.state_dir,
            remote: RemoteMounts::new(Path::new("/proc/self/exe")),
            only_node: mode == Mode::All,
        }));
        flex.remove_leftovers().await;
        Ok(flex)
    }

    /// A driver with the parts that the mode wants and the FlexVolume driver can fill.
    pub fn driver(&self, name: &str, version: &str, mode: Mode) -> Result<Driver> {
        let (flex, capabilities) = (Arc::new(self.clone()), self.0.plugin.capabilities());
        let mut driver = Driver::new(name, version);
        if mode != Mode::Node {
            let recorded = Recorded::open(&flex, self.0.state_dir.join("volumes"))?;
            let volumes = Arc::new(FlexVolumes { recorded: recorded.clone() });
            let controller = Controller::new(&volumes);
            driver = driver.controller(if capabilities.attach {
                controller.attachment(&flex)
            } else {
                controller.listing(&recorded)
            });
        }
        if mode != Mode::Controller {
            let mut node = Node::binding(self.0.node.clone(), &flex).mounts(&flex);
            // An inline volume is neither attached nor staged.
            node = if capabilities.attach { node.staging(&flex) } else { node.inline_by_reference() };
            if capabilities.supports_metrics {
                node = node.stats(&flex);
            }
            if capabilities.requires_fs_resize {
                node = node.expansion(&flex);
            }
            driver = driver.node(node);
        }
        Ok(driver)
    }

    /// The FlexVolume driver's name, as it stands in objects.
    pub fn name(&self) -> &DriverName {
        self.0.plugin.name()
    }

    /// Whether volumes are attached before they are mounted.
    pub fn attaches(&self) -> bool {
        self.0.plugin.capabilities().attach
    }

    async fn call(&self, call: Call) -> Result<Option<Reply>> {
        self.0.plugin.call(call).await
    }

    /// Where what the driver mounts is kept out of sight, for a directory of it to be used.
    fn hidden(&self, name: &str) -> PathBuf {
        self.0.state_dir.join("mounts").join(name)
    }

    /// Unmounts what a killed process left mounted to make or remove a directory.
    async fn remove_leftovers(&self) {
        let here = self.hidden("");
        let Ok(here) = std::fs::canonicalize(&here) else { return };
        let Ok(mounts) = mount::mounts() else { return };
        for left in mounts.into_iter().filter(|mount| mount.target.parent() == Some(&here)) {
            let is_for_a_moment = left.target.extension().is_some_and(|extension| extension == "incoming");
            if is_for_a_moment && let Err(error) = self.unmount_by_driver(&left.target).await {
                tracing::warn!(path = %left.target.display(), %error, "what a killed call had mounted stays mounted");
            }
        }
    }

    /// Has the driver mount something at a directory, which is made; nothing mounted there is an error.
    async fn mount_by_driver(&self, directory: &Path, options: Options) -> Result<Option<Reply>> {
        Dir::ensure(directory, 0o750)?;
        let call = Call::Mount { directory: directory.to_owned(), options };
        let reply = self.call(call).await?;
        if reply.is_some() && !is_mount_point(directory).await? {
            return Err(Error::State(format!(
                "mount command failed: the driver reports success, and nothing is mounted at {}",
                directory.display()
            )));
        }
        Ok(reply)
    }

    /// Has the driver unmount what is at a directory; what it does not support is done here.
    async fn unmount_by_driver(&self, directory: &Path) -> Result<()> {
        let was_mounted = is_mount_point(directory).await?;
        if !was_mounted && !directory.try_exists().unwrap_or(true) {
            return Ok(());
        }
        let unmounted = self.call(Call::Unmount { directory: directory.to_owned() }).await;
        if !is_mount_point(directory).await? {
            // Many drivers fail for what they have unmounted, or never mounted, before.
            if let Err(error) = unmounted
                && was_mounted
            {
                tracing::info!(path = %directory.display(), %error, "the driver failed, and nothing is mounted any more");
            }
            return Ok(());
        }
        if unmounted?.is_some() {
            return Err(Error::State(format!(
                "unmount command failed: the driver reports success, and something is still mounted at {}",
                directory.display()
            )));
        }
        let directory = directory.to_owned();
        blocking(move || Ok(mount::unmount(&directory).map(drop)?)).await
    }

    /// A volume as a node's call describes it, or else as the record of what is staged does.
    async fn record_of(&self, volume: &NodeVolume) -> Result<Record> {
        volume.check_access(AccessKind::Mount)?;
        let Access::Mount { fs_type, .. } = &volume.capability.access else {
            return Err(Error::Unsupported("raw block access"));
        };
        if volume.context.is_empty()
            && let Some(record) = self.0.records.read(&staged_key(&volume.id)).await?
        {
            return Ok(Record { read_only: volume.read_only, ..record });
        }
        Ok(Record {
            id: volume.id.to_string(),
            context: volume.context.iter().filter(|(key, _)| !is_kubernetes(key)).map(clone_pair).collect(),
            fs_type: fs_type.clone(),
            read_only: volume.read_only,
            device: volume.publish_context.get(DEVICE).cloned().unwrap_or_default(),
            size: None,
        })
    }
}

/// What the driver gets of a volume; `context` is what a person wrote about it.
fn options_of(
    id: &VolumeId,
    context: &BTreeMap<String, String>,
    fs_type: &str,
    read_only: bool,
) -> Result<Options> {
    let own = own_options(context);
    Options::new(&own, fs_type, read_only, id.as_str()).map_err(|error| Error::Invalid(error.to_string()))
}

/// The options that the driver gets, of what a person wrote.
fn own_options(context: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let own = context.iter().filter(|(key, _)| !is_kubernetes(key) && *key != DIRECTORY && *key != DRIVER);
    own.map(clone_pair).collect()
}

fn clone_pair((key, value): (&String, &String)) -> (String, String) {
    (key.clone(), value.clone())
}

/// Whether Kubernetes or a sidecar added the key.
pub(crate) fn is_kubernetes(key: &str) -> bool {
    key.starts_with(KUBERNETES_PARAMETER_PREFIX) || key == PROVISIONER_IDENTITY
}

pub(crate) async fn is_mount_point(path: &Path) -> Result<bool> {
    let path = path.to_owned();
    blocking(move || Ok(mount::is_mount_point(&path)?)).await
}

/// The name of the record of a volume that is staged.
fn staged_key(id: &VolumeId) -> String {
    records::key("staged", id.as_str().as_bytes())
}

/// The name of the record of a target.
fn target_key(target: &Path) -> String {
    records::key("target", target.as_os_str().as_encoded_bytes())
}

impl Attachment for Flex {
    fn knows_attachments(&self) -> bool {
        false
    }

    async fn attach(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        if self.0.only_node && *node != self.0.node {
            return Err(Error::not_found("node", node));
        }
        let fs_type = match &capability.access {
            Access::Mount { fs_type, .. } => fs_type.as_str(),
            Access::Block => return Err(Error::Unsupported("raw block access")),
        };
        let context = if volume.context.is_empty() { ctx.volume_context() } else { &volume.context };
        let options = options_of(&volume.id, context, fs_type, capability.mode.is_read_only())?;
        let reply = self.call(Call::Attach { options, node: node.to_string() }).await?;
        let device = reply.and_then(|reply| reply.device).unwrap_or_default();
        Ok(BTreeMap::from([(DEVICE.to_owned(), device)]))
    }

    async fn detach(&self, _: &Context, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        let Some(node) = node else {
            return Err(Error::invalid(
                "node_id is missing: a FlexVolume driver detaches from one node at a time",
            ));
        };
        self.call(Call::Detach { volume: id.to_string(), node: node.to_string() }).await.map(drop)
    }
}

impl Staging for Flex {
    async fn stage(&self, ctx: &Context, volume: &NodeVolume, staging: &Path) -> Result<()> {
        let staged = self.stage_by_driver(volume, staging).await;
        if staged.is_err()
            && let Err(error) = self.unstage(ctx, &volume.id, staging).await
        {
            tracing::warn!(volume.id = %volume.id, %error, "a staging that failed could not be undone");
        }
        staged
    }

    async fn unstage(&self, _: &Context, id: &VolumeId, staging: &Path) -> Result<()> {
        if is_mount_point(staging).await? {
            let reply = self.call(Call::UnmountDevice { directory: staging.to_owned() }).await;
            if is_mount_point(staging).await? {
                if reply?.is_some() {
                    return Err(Error::State(format!(
                        "unmountdevice command failed: the driver reports success, and something is still mounted at {}",
                        staging.display()
                    )));
                }
                let staging = staging.to_owned();
                blocking(move || Ok(mount::unmount(&staging).map(drop)?)).await?;
            }
        }
        self.0.records.remove(&staged_key(id)).await
    }
}

impl Flex {
    async fn stage_by_driver(&self, volume: &NodeVolume, staging: &Path) -> Result<()> {
        let mut record = self.record_of(volume).await?;
        let key = staged_key(&volume.id);
        self.0.records.write(&key, &record).await?;
        let options = options_of(&volume.id, &record.context, &record.fs_type, record.read_only)?;
        let wait = Call::WaitForAttach { device: record.device.clone(), options: options.clone() };
        if let Some(reply) = self.call(wait).await? {
            record.device = reply.device.unwrap_or_default();
            self.0.records.write(&key, &record).await?;
        }
        if is_mount_point(staging).await? {
            return Ok(());
        }
        Dir::ensure(staging, 0o750)?;
        let device = record.device.clone();
        let call = Call::MountDevice { directory: staging.to_owned(), device, options };
        if self.call(call).await?.is_some() || record.device.is_empty() {
            return Ok(());
        }
        let at = staging.to_owned();
        blocking(move || mount_device(Path::new(&record.device), &at, &record.fs_type, record.read_only))
            .await
    }
}

impl Sources for Flex {
    async fn check(&self, _: &Context, volume: &NodeVolume) -> Result<()> {
        volume.check_access(AccessKind::Mount)?;
        options_of(&volume.id, &volume.context, "", false).map(drop)
    }

    async fn source(&self, ctx: &Context, volume: &NodeVolume) -> Result<Source> {
        let record = self.record_of(volume).await?;
        let mut options = options_of(&volume.id, &record.context, &record.fs_type, record.read_only)?;
        let pod = ctx.pod().cloned();
        options = options.with_pod(pod.map_or_else(PodInfo::default, |pod| PodInfo {
            name: pod.name,
            namespace: pod.namespace,
            uid: pod.uid,
            service_account: pod.service_account,
            fs_group: None,
        }));
        for (key, value) in ctx.secrets().iter() {
            options = options.with_secret(key, value.as_bytes());
        }
        let staging = volume.staging.clone();
        let directory = staging.clone().unwrap_or_default();
        Ok(Source::directory(directory).guarded_by(Pending { record, options, staging }))
    }
}

impl TargetMounts for Flex {
    async fn is_mounted(&self, target: &Path) -> Result<bool> {
        is_mount_point(target).await
    }

    async fn bind(&self, source: &Source, target: &Path, attributes: Attributes) -> Result<()> {
        let pending = source.guard().and_then(|guard| guard.downcast_ref::<Pending>());
        let Some(Pending { record, options, staging }) = pending else {
            return Err(Error::internal("a source that is not the driver's"));
        };
        let key = target_key(target);
        self.0.records.write(&key, record).await?;
        let at = target.to_owned();
        if let Some(directory) = record.context.get(DIRECTORY).cloned() {
            let hidden = self.hidden(&key);
            if !is_mount_point(&hidden).await? {
                self.required_mount(&hidden, options.clone()).await?;
            }
            return blocking(move || {
                let directory = Dir::open(&hidden).and_then(|root| root.dir(&directory))?;
                Ok(mount::bind_directory(&directory, &at, attributes)?)
            })
            .await;
        }
        match (self.mount_by_driver(target, options.clone()).await?, staging.clone()) {
            (Some(_), _) => blocking(move || Ok(mount::set_attributes(&at, attributes)?)).await,
            (None, Some(staging)) => blocking(move || Ok(mount::bind(&staging, &at, attributes)?)).await,
            (None, None) => Err(Error::Precondition(
                "mount command failed: the driver does not support it, and attaches nothing that could be mounted"
                    .to_owned(),
            )),
        }
    }

    async fn unmount(&self, target: &Path) -> Result<()> {
        let key = target_key(target);
        let hidden = self.hidden(&key);
        if is_mount_point(&hidden).await? || hidden.try_exists().unwrap_or(true) {
            let at = target.to_owned();
            blocking(move || Ok(mount::unmount(&at).map(drop)?)).await?;
            self.unmount_by_driver(&hidden).await?;
            let _ = std::fs::remove_dir(&hidden);
        } else if self.0.records.read(&key).await?.is_some() || is_mount_point(target).await? {
            self.unmount_by_driver(target).await?;
        }
        self.0.records.remove(&key).await
    }
}

impl Flex {
    /// As [`Flex::mount_by_driver`], for a driver that cannot do without.
    async fn required_mount(&self, directory: &Path, options: Options) -> Result<()> {
        match self.mount_by_driver(directory, options).await? {
            Some(_) => Ok(()),
            None => Err(Error::Precondition(
                "mount command failed: the driver does not support it, and directories of its volumes need it".to_owned(),
            )),
        }
    }
}

impl Stats for Flex {
    async fn usage(&self, _: &Context, _: &VolumeId, path: &Path) -> Result<Usage> {
        let (flex, path) = (self.clone(), path.to_owned());
        blocking(move || {
            let space: Space = flex.0.remote.space(&path, SPACE_TIMEOUT)?;
            let amounts = |total: u64, free: u64, available| Amounts {
                total,
                used: total.saturating_sub(free),
                available,
            };
            Ok(Usage {
                bytes: amounts(space.total, space.free, space.available),
                inodes: Some(amounts(space.inodes_total, space.inodes_free, space.inodes_free)),
            })
        })
        .await
    }
}

impl NodeExpansion for Flex {
    async fn expand_on_node(
        &self,
        _: &Context,
        id: &VolumeId,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded> {
        let keys = [target_key(path), staged_key(id)];
        let mut found = None;
        for key in keys {
            if let Some(record) = self.0.records.read(&key).await? {
                found = Some((key, record));
                break;
            }
        }
        let Some((key, record)) = found else {
            return Err(Error::Precondition(format!(
                "nothing is known of volume {id:?} at {}",
                path.display()
            )));
        };
        let old_size = if let Some(size) = record.size {
            size
        } else {
            let (flex, path) = (self.clone(), path.to_owned());
            blocking(move || Ok(flex.0.remote.space(&path, SPACE_TIMEOUT)?.total)).await?
        };
        let new_size = range.required().map_or(old_size, Capacity::bytes);
        let options = options_of(id, &record.context, &record.fs_type, record.read_only)?;
        let directory = path.to_owned();
        let volume =
            Call::ExpandVolume { options: options.clone(), directory: directory.clone(), new_size, old_size };
        self.call(volume).await?;
        let device = record.device.clone();
        let filesystem = Call::ExpandFs { options, device: device.clone(), directory, new_size, old_size };
        if self.call(filesystem).await?.is_none() && !device.is_empty() {
            let at = path.to_owned();
            blocking(move || match format::probe(Path::new(&device))? {
                Content::Filesystem(filesystem) => Ok(format::grow_mounted(filesystem, &at).map(drop)?),
                Content::Blank | Content::Other(_) => Ok(()),
            })
            .await?;
        }
        self.0.records.write(&key, &Record { size: Some(new_size), ..record }).await?;
        Ok(NodeExpanded::Done(Capacity::new(new_size)))
    }
}

/// Mounts a device for a driver that leaves it to its caller, checked before.
fn mount_device(device: &Path, target: &Path, fs_type: &str, read_only: bool) -> Result<()> {
    let wanted = image::parse_filesystem(fs_type)?;
    let filesystem = image::recognise(format::probe(device)?, wanted)?;
    if !read_only {
        format::check(filesystem, device, image::TOOL_DEADLINE)?;
    }
    let attributes = Attributes { read_only, ..Attributes::default() };
    Ok(mount::filesystem(device, target, filesystem.as_str(), attributes, &[])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_csi_driver_is_named_after_the_flexvolume_driver_and_its_vendor() {
        for (plugin, name) in [
            ("/plugins/k8s~nfs/nfs", "nfs.k8s.flex.berth.dev"),
            ("acme.com~Big_Disk/Big_Disk", "big-disk.acme.com.flex.berth.dev"),
            ("/plugins/dummy/dummy", "dummy.flex.berth.dev"),
        ] {
            assert_eq!(csi_name_of(&driver_name_of(Path::new(plugin)).unwrap()), name);
        }
        for plugin in ["/plugins/k8s~nfs/other", "nfs", "/", "/plugins/K8S~nfs/nfs", "/plugins/a~b~c/c"] {
            let error = driver_name_of(Path::new(plugin)).unwrap_err().to_string();
            assert!(error.contains("vendor~driver/driver"), "{error}");
        }
    }

    #[test]
    fn a_driver_gets_what_a_person_wrote_and_nothing_of_kubernetes_or_the_adapter() {
        let context = [
            ("lun", "7"),
            ("csi.storage.k8s.io/pod.name", "web"),
            (PROVISIONER_IDENTITY, "x"),
            (DIRECTORY, "volumes/v"),
            (DRIVER, "acme.com/disk"),
        ];
        let context = context.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let options = options_of(&"pv-1".parse().unwrap(), &context, "xfs", true).unwrap();
        assert_eq!(
            options.to_json(),
            r#"{"kubernetes.io/fsType":"xfs","kubernetes.io/pvOrVolumeName":"pv-1","kubernetes.io/readwrite":"ro","lun":"7"}"#
        );
        let reserved = [("k8s.io/x".to_owned(), String::new())].into();
        assert!(matches!(options_of(&"pv-1".parse().unwrap(), &reserved, "", false), Err(Error::Invalid(_))));
    }
}
