//! Volumes of FlexVolume drivers: `flexVolume` in a pod or in a PersistentVolume.
//!
//! Reads: Secret (live); Node (cached, for the path of an attached device). Writes nothing to Kubernetes. Events:
//! `FailedMount` while a driver takes long. On disk: the kubelet's layout, `pods/UID/volumes/vendor~driver/NAME` and,
//! for drivers that attach, `plugins/kubernetes.io/flexvolume/vendor/driver/mounts/NAME`. The directory is made before
//! the driver is called and removed after it undid its work, so that what a crash leaves is known.
//!
//! Calls and their order are the kubelet's: `mount` and `unmount` for a driver that does not attach; for one that does
//! `waitforattach` and `mountdevice` for the first pod of a node, `waitforattach` for each other, then `mount`, and at
//! the end `unmount` and `unmountdevice`. What is already a mount point is not mounted again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use berth_flex::{Call, Driver, DriverName, Drivers, Options, PodInfo, Reply};
use berth_host::format::{self, Content};
use berth_host::mount::{self, Attributes};
use berth_kube::storage::capacity;
use berth_kube::{Cache, Cluster, Key, Recorder, storage};
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::{Node, Secret};
use parking_lot::Mutex;

use super::mount_points::{
    is_mounted, is_there, mount_device, prepare, remove_directory, settled, undo_mount, unmount,
};
use super::{fs_group, give_to_group, record_step, record_undone_step};
use crate::layout::Layout;
use crate::plugin::{Device, Failed, Placed, Plugin, PodVolume, Ready, Source};
use crate::volumes::names;

/// The plugin's own name; directories and devices carry those of the drivers.
const NAME: &str = berth_core::names::FLEX_PLUGIN;
/// How long a call-out may take before there is an event about it on the pod.
const SLOW: Duration = Duration::from_secs(60);

/// The plugin for all FlexVolume drivers.
pub(crate) struct Flex {
    cluster: Cluster,
    layout: Layout,
    node: String,
    nodes: Cache<Node>,
    drivers: Drivers,
    recorder: Recorder,
    /// What is known of the devices that were staged since the start, by unique name.
    devices: Mutex<HashMap<String, StagedDevice>>,
    /// The volumes of pods for which `waitforattach` was called just now, by the pod's uid and the volume's name.
    awaited: Mutex<HashSet<(String, String)>>,
}

/// A device that pods use.
#[derive(Clone)]
struct StagedDevice {
    /// The device's path, as `waitforattach` gave it.
    path: String,
    options: Options,
}

/// What a volume says to its driver.
struct FlexVolume {
    driver: DriverName,
    fs_type: String,
    options: Options,
    secret: Option<Key>,
}

impl FlexVolume {
    fn read(volume: &PodVolume) -> Result<Self, Failed> {
        let namespace = volume.pod.metadata.namespace.as_deref().unwrap_or_default();
        let (driver, fs_type, user, secret) = match &volume.source {
            Source::Inline(inline) => {
                let flex = inline.flex_volume.as_ref().ok_or_else(|| not_flex(volume))?;
                let secret = flex.secret_ref.as_ref().map(|secret| Key::new(namespace, &secret.name));
                (&flex.driver, &flex.fs_type, &flex.options, secret)
            }
            Source::Persistent { volume: persistent, .. } => {
                let spec = persistent.spec.as_ref().ok_or_else(|| not_flex(volume))?;
                let flex = spec.flex_volume.as_ref().ok_or_else(|| not_flex(volume))?;
                if spec.mount_options.as_ref().is_some_and(|options| !options.is_empty()) {
                    return Err(Failed::unchanged("mount options are not supported for this volume type"));
                }
                let secret = flex.secret_ref.as_ref().map(|secret| {
                    let own = secret.namespace.as_deref().filter(|own| !own.is_empty());
                    Key::new(own.unwrap_or(namespace), secret.name.as_deref().unwrap_or_default())
                });
                (&flex.driver, &flex.fs_type, &flex.options, secret)
            }
        };
        let refused = |error: &dyn std::error::Error| Failed::unchanged(error.to_string());
        let driver = driver.parse().map_err(|error: berth_flex::InvalidName| refused(&error))?;
        let fs_type = fs_type.clone().unwrap_or_default();
        let none = BTreeMap::new();
        let user = user.as_ref().unwrap_or(&none);
        let options = Options::new(user, &fs_type, volume.read_only, volume.spec_name())
            .map_err(|error| refused(&error))?;
        Ok(Self { driver, fs_type, options, secret })
    }

    fn unique_name(&self, volume: &PodVolume) -> String {
        storage::flex_unique_name(self.driver.as_str(), volume.spec_name())
    }
}

fn not_flex(volume: &PodVolume) -> Failed {
    Failed::unchanged(format!("volume {} is not a FlexVolume", volume.name))
}

impl Flex {
    /// The plugin on the node of this name, for the drivers of a plugin directory.
    pub(crate) fn new(
        cluster: &Cluster,
        layout: &Layout,
        node: &str,
        drivers: Drivers,
        recorder: Recorder,
    ) -> Self {
        Self {
            cluster: cluster.clone(),
            layout: layout.clone(),
            node: node.to_owned(),
            nodes: cluster.cache(),
            drivers,
            recorder,
            devices: Mutex::default(),
            awaited: Mutex::default(),
        }
    }

    fn driver(&self, name: &DriverName) -> Result<Arc<Driver>, Failed> {
        self.drivers.get(name).map_err(Failed::unchanged)
    }

    fn device_directory(&self, driver: &str, spec_name: &str) -> PathBuf {
        self.layout.flex_mounts(driver).join(spec_name)
    }

    /// Has the driver do something for a pod's volume; the pod has an event when that takes long.
    async fn call(
        &self,
        volume: &PodVolume,
        driver: &Driver,
        call: Call,
    ) -> Result<Option<Reply>, berth_flex::Error> {
        let name = call.name();
        let mut answer = pin!(driver.call(call));
        if let Ok(answer) = tokio::time::timeout(SLOW, &mut answer).await {
            return answer;
        }
        let message = format!(
            "FlexVolume driver {} has not answered {name} for volume {:?} within {SLOW:?}; it is killed when its time is up",
            driver.name(),
            volume.spec_name()
        );
        self.recorder.warning(volume.pod.as_ref(), "FailedMount", message);
        answer.await
    }

    /// The kubelet asks for the volume's name at these points, and uses only that the driver does not fail.
    async fn check_name(&self, driver: &Driver, options: &Options) -> Result<(), Failed> {
        let call = Call::GetVolumeName { options: options.clone() };
        let answer = driver.call(call).await;
        answer.map(drop).map_err(|error| Failed::unchanged(error.to_string()))
    }

    /// Has the driver wait for the device that the Node says is attached; gives the path of the device.
    async fn wait_for_attach(
        &self,
        volume: &PodVolume,
        flex: &FlexVolume,
        driver: &Driver,
    ) -> Result<String, Failed> {
        let unique = flex.unique_name(volume);
        let attached = self.nodes.named(&self.node).and_then(|node| {
            let attached = node.status.as_ref()?.volumes_attached.as_ref()?;
            attached.iter().find(|volume| volume.name == unique).map(|volume| volume.device_path.clone())
        });
        let device = attached.unwrap_or_default();
        let call = Call::WaitForAttach { device: device.clone(), options: flex.options.clone() };
        match self.call(volume, driver, call).await {
            Ok(Some(reply)) => Ok(reply.device.unwrap_or_default()),
            Ok(None) => Ok(device),
            Err(error) => Err(Failed::unchanged(error.to_string())),
        }
    }

    async fn stage_device(&self, volume: &PodVolume) -> Result<(), Failed> {
        let flex = FlexVolume::read(volume)?;
        let driver = self.driver(&flex.driver)?;
        self.check_name(&driver, &flex.options).await?;
        let path = self.wait_for_attach(volume, &flex, &driver).await?;
        self.awaited.lock().insert((volume.pod_uid().to_owned(), volume.spec_name().to_owned()));
        let staged = StagedDevice { path: path.clone(), options: flex.options.clone() };
        self.devices.lock().insert(flex.unique_name(volume), staged);
        self.check_name(&driver, &flex.options).await?;
        let directory = self.device_directory(flex.driver.as_str(), volume.spec_name());
        if prepare(&directory).await? {
            return Ok(());
        }
        let call = Call::MountDevice {
            directory: directory.clone(),
            device: path.clone(),
            options: flex.options.clone(),
        };
        let mounted = match self.call(volume, &driver, call).await {
            Ok(Some(_)) => Ok(()),
            // A driver that attaches without a device has nothing to be mounted.
            Ok(None) if path.is_empty() => Ok(()),
            Ok(None) => {
                let (fs_type, read_only) = (flex.fs_type.clone(), volume.read_only);
                let target = directory.clone();
                let options = mount::Options {
                    attributes: Attributes { read_only, ..Attributes::default() },
                    ..mount::Options::default()
                };
                blocking(move || mount_device(Path::new(&path), &target, &fs_type, &options))
                    .await
                    .map_err(|error| Failed::finally(error.sentence()))
            }
            Err(error) => Err(failed(&error)),
        };
        settled(mounted, directory).await
    }

    async fn unstage_device(&self, unique: &str) -> Result<(), Failed> {
        let Some((driver_name, spec_name)) = storage::split_flex_unique_name(unique) else {
            return Err(Failed::finally(format!("{unique:?} is not the name of a FlexVolume")));
        };
        let directory = self.device_directory(driver_name, spec_name);
        if is_there(&directory).await? {
            let name = driver_name
                .parse()
                .map_err(|error: berth_flex::InvalidName| Failed::uncertain(error.to_string()))?;
            let driver = self.driver(&name)?;
            let known = self.devices.lock().get(unique).map(|device| device.options.clone());
            // After a restart, as the kubelet does: the directories say the driver and the name, and nothing else.
            let options = known.map_or_else(|| Options::new(&BTreeMap::new(), "", false, spec_name), Ok);
            let options = options.map_err(|error| Failed::uncertain(error.to_string()))?;
            self.check_name(&driver, &options).await?;
            if is_mounted(&directory).await? {
                match driver.call(Call::UnmountDevice { directory: directory.clone() }).await {
                    Ok(Some(_)) => {}
                    Ok(None) => unmount(&directory).await?,
                    Err(error) => return Err(Failed::uncertain(error.to_string())),
                }
            }
            remove_directory(&directory).await?;
        }
        self.devices.lock().remove(unique);
        Ok(())
    }

    /// The volume's options for `mount`: with those of the pod and of the Secret.
    async fn mount_options(&self, volume: &PodVolume, flex: &FlexVolume) -> Result<Options, Failed> {
        let (meta, spec) = (&volume.pod.metadata, volume.pod.spec.as_ref());
        let mut options = flex.options.clone().with_pod(PodInfo {
            name: meta.name.clone().unwrap_or_default(),
            namespace: meta.namespace.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            service_account: spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
            fs_group: fs_group(&volume.pod),
        });
        let Some(key) = &flex.secret else { return Ok(options) };
        let failed = |why: &str| Failed::finally(format!("couldn't get secret {key} err: {why}"));
        let secret = self.cluster.fetch::<Secret>(key).await.map_err(|error| failed(&error.chain()))?;
        let secret = secret.ok_or_else(|| failed(&format!("secrets {:?} not found", key.name)))?;
        let kind = secret.type_.as_deref().unwrap_or_default();
        if kind != flex.driver.as_str() {
            let driver = &flex.driver;
            return Err(failed(&format!(
                "its type is {kind:?}, and must be the driver's name, {:?}",
                driver.as_str()
            )));
        }
        for (name, value) in secret.data.iter().flatten() {
            options = options.with_secret(name, &value.0);
        }
        Ok(options)
    }

    async fn mount(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let flex = FlexVolume::read(volume)?;
        let driver = self.driver(&flex.driver)?;
        let attach = driver.capabilities().attach;
        if attach {
            self.refuse_other_volume(volume, &flex)?;
            let key = (volume.pod_uid().to_owned(), volume.spec_name().to_owned());
            if !self.awaited.lock().remove(&key) {
                self.wait_for_attach(volume, &flex, &driver).await?;
            }
        }
        let directory = self.layout.pod_volume(volume.pod_uid(), flex.driver.as_str(), volume.spec_name());
        if !prepare(&directory).await? {
            let mounted = match self.mount_options(volume, &flex).await {
                Err(failed) => Err(failed),
                Ok(options) => {
                    let call = Call::Mount { directory: directory.clone(), options };
                    match self.call(volume, &driver, call).await {
                        Ok(Some(_)) => Ok(()),
                        Ok(None) if attach => {
                            let device = self.device_directory(flex.driver.as_str(), volume.spec_name());
                            let target = directory.clone();
                            blocking(move || mount::bind(&device, &target, Attributes::default()))
                                .await
                                .map_err(|error| Failed::finally(error.sentence()))
                        }
                        Ok(None) => {
                            Err(Failed::finally(berth_flex::Error::Required { call: "mount" }.to_string()))
                        }
                        Err(error) => Err(failed(&error)),
                    }
                }
            };
            settled(mounted, directory.clone()).await?;
        }
        // The kubelet starts the pod also where files cannot be given to its group.
        if let Some(group) =
            fs_group(&volume.pod).filter(|_| driver.capabilities().fs_group && !volume.read_only)
            && let Err(error) = give_to_group(&volume.pod, &directory, group).await
        {
            let error = error.sentence();
            tracing::warn!(volume = volume.spec_name(), group, error, "not given to the pod's group");
        }
        Ok(Ready { path: directory })
    }

    /// Volumes that pods describe themselves are distinguished by their names only, as the kubelet does; two that differ
    /// in more would get each other's data.
    fn refuse_other_volume(&self, volume: &PodVolume, flex: &FlexVolume) -> Result<(), Failed> {
        if !matches!(volume.source, Source::Inline(_)) {
            return Ok(());
        }
        let other = self
            .devices
            .lock()
            .get(&flex.unique_name(volume))
            .is_some_and(|device| device.options != flex.options);
        if other {
            return Err(Failed::unchanged(format!(
                "another pod on this node has a volume {:?} of driver {} with other options; use a PersistentVolume, \
                 or another name for the volume",
                volume.spec_name(),
                flex.driver
            )));
        }
        Ok(())
    }

    async fn unmount_pod(&self, placed: &Placed) -> Result<(), Failed> {
        let directory = self.layout.pod_volume(&placed.pod_uid, &placed.plugin, &placed.spec_name);
        if !is_there(&directory).await? {
            return Ok(());
        }
        let name: DriverName = placed
            .plugin
            .parse()
            .map_err(|error: berth_flex::InvalidName| Failed::unchanged(error.to_string()))?;
        let driver = self.driver(&name)?;
        let undo = async || {
            match driver.call(Call::Unmount { directory: directory.clone() }).await {
                Ok(Some(_)) => {}
                Ok(None) => unmount(&directory).await?,
                Err(error) => return Err(Failed::uncertain(error.to_string())),
            }
            remove_directory(&directory).await
        };
        undo_mount(&directory, undo).await?;
        self.awaited.lock().remove(&(placed.pod_uid.clone(), placed.spec_name.clone()));
        Ok(())
    }

    async fn grow(&self, volume: &PodVolume) -> Result<Option<u64>, Failed> {
        let Source::Persistent { volume: persistent, claim } = &volume.source else { return Ok(None) };
        let again = |failed: Failed| Failed::uncertain(failed.message);
        let flex = FlexVolume::read(volume).map_err(again)?;
        let driver = self.driver(&flex.driver).map_err(again)?;
        if !driver.capabilities().requires_fs_resize {
            return Ok(None);
        }
        let size = |bytes: i128| u64::try_from(bytes).unwrap_or_default();
        let new_size = size(capacity(persistent));
        let before = claim.status.as_ref().and_then(|status| status.capacity.as_ref());
        let device = self.devices.lock().get(&flex.unique_name(volume)).map(|device| device.path.clone());
        let device = device.unwrap_or_default();
        let directory = self.layout.pod_volume(volume.pod_uid(), flex.driver.as_str(), volume.spec_name());
        let call = Call::ExpandFs {
            options: flex.options,
            device: device.clone(),
            directory: directory.clone(),
            new_size,
            old_size: size(storage::bytes(before).unwrap_or(0)),
        };
        match self.call(volume, &driver, call).await {
            Ok(Some(_)) => {}
            Ok(None) if device.is_empty() => {}
            Ok(None) => {
                blocking(move || match format::probe(Path::new(&device))? {
                    Content::Filesystem(filesystem) => format::grow_mounted(filesystem, &directory).map(drop),
                    Content::Blank | Content::Other(_) => Ok(()),
                })
                .await?;
            }
            Err(error) => return Err(Failed::uncertain(error.to_string())),
        }
        Ok(Some(new_size))
    }
}

#[async_trait]
impl Plugin for Flex {
    fn name(&self) -> &'static str {
        NAME
    }

    fn name_of(&self, volume: &PodVolume) -> String {
        FlexVolume::read(volume).map_or_else(|_| NAME.to_owned(), |flex| flex.driver.as_str().to_owned())
    }

    fn owns(&self, name: &str) -> bool {
        name.parse::<DriverName>().is_ok() && !name.starts_with(berth_core::names::IN_TREE_PLUGIN_PREFIX)
    }

    fn serves(&self, source: &Source) -> bool {
        match source {
            Source::Inline(volume) => volume.flex_volume.is_some(),
            Source::Persistent { volume, .. } => {
                volume.spec.as_ref().is_some_and(|spec| spec.flex_volume.is_some())
            }
        }
    }

    fn device(&self, volume: &PodVolume) -> Result<Option<Device>, Failed> {
        let flex = FlexVolume::read(volume)?;
        if volume.block {
            return Err(Failed::unchanged("FlexVolume drivers serve no block devices (volumeMode Block)"));
        }
        let attach = self.driver(&flex.driver)?.capabilities().attach;
        let unique_name = flex.unique_name(volume);
        Ok(attach.then_some(Device { unique_name, attach: true, stage: true }))
    }

    async fn stage(&self, volume: &PodVolume) -> Result<(), Failed> {
        let begun = Instant::now();
        let staged = self.stage_device(volume).await;
        record_step(&self.node, "mountdevice", "VOL_READY", volume, begun, staged.as_ref().err());
        staged
    }

    async fn unstage(&self, device: &str) -> Result<(), Failed> {
        let begun = Instant::now();
        let undone = self.unstage_device(device).await;
        record_undone_step(&self.node, "unmountdevice", device, begun, undone.as_ref().err());
        undone
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let begun = Instant::now();
        let mounted = self.mount(volume).await;
        record_step(&self.node, "mount", "PUBLISHED", volume, begun, mounted.as_ref().err());
        mounted
    }

    async fn expand(&self, volume: &PodVolume) -> Result<Option<u64>, Failed> {
        let begun = Instant::now();
        let grown = self.grow(volume).await;
        if !matches!(grown, Ok(None)) {
            record_step(&self.node, "expandfs", "", volume, begun, grown.as_ref().err());
        }
        grown
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        let begun = Instant::now();
        let undone = self.unmount_pod(placed).await;
        record_undone_step(&self.node, "unmount", &placed.spec_name, begun, undone.as_ref().err());
        undone
    }

    fn staged(&self) -> Vec<Device> {
        let mut devices = Vec::new();
        let top = self.layout.flex_devices();
        for vendor in names(&top) {
            for driver in names(&top.join(&vendor)) {
                // Without a vendor, the devices lie one directory higher.
                let driver = if driver == "mounts" { vendor.clone() } else { format!("{vendor}/{driver}") };
                for spec_name in names(&self.layout.flex_mounts(&driver)) {
                    devices.push(Device {
                        unique_name: storage::flex_unique_name(&driver, &spec_name),
                        attach: true,
                        stage: true,
                    });
                }
            }
        }
        devices
    }

    fn device_of(&self, placed: &Placed) -> Option<Device> {
        let there = names(&self.layout.flex_mounts(&placed.plugin)).contains(&placed.spec_name);
        let unique_name = storage::flex_unique_name(&placed.plugin, &placed.spec_name);
        there.then_some(Device { unique_name, attach: true, stage: true })
    }
}

/// What a driver's answer to something that brings a volume means.
fn failed(error: &berth_flex::Error) -> Failed {
    let message = error.to_string();
    if error.is_interrupted() { Failed::uncertain(message) } else { Failed::finally(message) }
}
