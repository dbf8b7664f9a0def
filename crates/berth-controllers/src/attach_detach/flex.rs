//! Volumes that a FlexVolume driver attaches: the driver's `attach` and `detach` are run here.
//!
//! No object but the Node says what is attached. A volume is attached only once its node reports that it will use it
//! (`volumesInUse`), and reported to the node once it is attached (`volumesAttached`). Before that report is taken back, so
//! that the volume can be detached, an annotation of the node names it, until it is detached. So after a crash at any
//! point one of the three names it: what may be attached is attached again or, if nobody wants it, detached.
//!
//! A call runs beside the control loop, one at a time for a volume; the volume is reconciled again when it ended. What
//! failed is repeated after a pause that grows. Every minute the driver is asked whether what is attached still is.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use berth_flex::{Call, Driver, DriverName, Drivers, Options, Reply};
use berth_kube::storage::{flex_unique_name, node_of_pod, split_flex_unique_name, volumes_of_pod};
use berth_kube::timeline::Step;
use berth_kube::{Backoff, Queue, Result};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, Pod};
use kube::ResourceExt as _;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Controller;
use super::observe::{self, VolumeMemory};
use super::plan::Attachment;

/// On a node: the FlexVolumes that are being detached from it, which its status no longer names; separated by spaces.
const DETACHING_VOLUMES: &str = "attach-detach.berth.dev/detaching";
/// How often drivers are asked whether what is attached still is, as kube-controller-manager does.
const VERIFY_AFTER: Duration = Duration::from_secs(60);
/// The pauses before a call that failed is repeated.
const RETRY: Backoff = Backoff { first: Duration::from_millis(500), longest: Duration::from_secs(122) };

/// What FlexVolume drivers have attached since the start, and the calls under way.
pub(super) struct FlexAttachments {
    drivers: Drivers,
    queue: Queue<String>,
    /// By the volume's name in nodes' statuses.
    volumes: Mutex<HashMap<String, VolumeState>>,
}

#[derive(Default)]
struct VolumeState {
    /// A call is under way.
    busy: bool,
    failures: u32,
    /// Before this time nothing is called.
    retry_at: Option<Instant>,
    nodes: HashMap<String, NodeState>,
}

/// Whether a volume is attached to a node, where that is more than the node's status says.
enum NodeState {
    /// With the path of its device.
    Attached(String),
    /// An attempt to attach or detach it failed, or its outcome is not known.
    Uncertain,
}

impl FlexAttachments {
    pub(super) fn new(drivers: Drivers, queue: Queue<String>) -> Self {
        Self { drivers, queue, volumes: Mutex::default() }
    }

    fn driver(&self, unique: &str) -> std::result::Result<Arc<Driver>, String> {
        let (driver, _) =
            split_flex_unique_name(unique).ok_or_else(|| format!("{unique} is no FlexVolume"))?;
        let name: DriverName = driver.parse().map_err(|error: berth_flex::InvalidName| error.to_string())?;
        self.drivers.get(&name)
    }

    /// Whether the volume's driver is installed: nothing is decided before.
    pub(super) fn is_known(&self, unique: &str) -> bool {
        self.driver(unique).is_ok()
    }

    /// Whether the volume's driver attaches volumes.
    pub(super) fn is_attachable(&self, unique: &str) -> bool {
        self.driver(unique).is_ok_and(|driver| driver.capabilities().attach)
    }

    pub(super) fn is_busy(&self, unique: &str) -> bool {
        self.volumes.lock().get(unique).is_some_and(|volume| volume.busy)
    }

    /// The path of an attached volume's device; empty if it is not known.
    pub(super) fn device(&self, unique: &str, node: &str) -> String {
        match self.volumes.lock().get(unique).and_then(|volume| volume.nodes.get(node)) {
            Some(NodeState::Attached(device)) => device.clone(),
            Some(NodeState::Uncertain) | None => String::new(),
        }
    }

    /// A volume on a node as planning knows attachments. What is uncertain is attached again where it is wanted, and
    /// undone where it is not.
    pub(super) fn attachment(
        &self,
        unique: &str,
        node: &str,
        reported: bool,
        wanted: bool,
    ) -> Option<Attachment> {
        let volumes = self.volumes.lock();
        let attached = match volumes.get(unique).and_then(|volume| volume.nodes.get(node)) {
            Some(NodeState::Attached(_)) => true,
            Some(NodeState::Uncertain) if wanted => return None,
            Some(NodeState::Uncertain) => false,
            None if reported => true,
            None => return None,
        };
        Some(Attachment { attached, deleting: false, error: None })
    }

    /// Keeps in mind that a volume is, or may be, attached to a node whose status will no longer say so.
    fn keep(&self, unique: &str, node: &str) {
        let mut volumes = self.volumes.lock();
        let volume = volumes.entry(unique.to_owned()).or_default();
        volume.nodes.entry(node.to_owned()).or_insert(NodeState::Uncertain);
    }

    /// Begins a call about a volume, unless one is under way or failed just now.
    fn begin(&self, unique: &str) -> bool {
        let mut volumes = self.volumes.lock();
        let volume = volumes.entry(unique.to_owned()).or_default();
        if volume.busy {
            return false;
        }
        if let Some(left) = volume.retry_at.map(|at| at.saturating_duration_since(Instant::now()))
            && !left.is_zero()
        {
            self.queue.add_after(unique.to_owned(), left);
            return false;
        }
        volume.busy = true;
        true
    }

    /// Takes in what a call has made of a volume on a node, and has the volume reconciled again.
    fn end(&self, unique: &str, node: &str, state: Option<NodeState>, failed: bool) {
        let pause = {
            let mut volumes = self.volumes.lock();
            let volume = volumes.entry(unique.to_owned()).or_default();
            volume.busy = false;
            match state {
                Some(state) => volume.nodes.insert(node.to_owned(), state),
                None => volume.nodes.remove(node),
            };
            volume.failures = if failed { volume.failures.saturating_add(1) } else { 0 };
            let pause = failed.then(|| RETRY.pause(volume.failures));
            volume.retry_at = pause.map(|pause| Instant::now() + pause);
            if volume.nodes.is_empty() && !failed {
                volumes.remove(unique);
            }
            pause
        };
        match pause {
            Some(pause) => self.queue.add_after(unique.to_owned(), pause),
            None => self.queue.add(unique.to_owned()),
        }
    }
}

impl Controller {
    /// Takes in what an earlier life of this process may have attached without reporting it.
    pub(super) fn recover_flex(&self, flex: &FlexAttachments) {
        let mut volumes = flex.volumes.lock();
        for node in self.world.nodes.list() {
            let unreported =
                observe::in_use(&node).filter(|name| observe::attached(&node).all(|other| other != *name));
            let detaching =
                detaching(&node).filter(|name| observe::attached(&node).all(|other| other != *name));
            let unreported = unreported.chain(detaching);
            for name in unreported.filter(|name| split_flex_unique_name(name).is_some()) {
                let volume = volumes.entry(name.to_owned()).or_default();
                volume.nodes.insert(node.name_any(), NodeState::Uncertain);
            }
        }
    }

    /// Looks at all FlexVolumes again when a driver comes, changes or goes, and verifies attachments, until the
    /// shutdown.
    pub(super) async fn follow_flex(self: Arc<Self>, flex: Option<Arc<FlexAttachments>>) {
        let Some(flex) = flex else { return };
        let shutdown = self.cluster.shutdown().clone();
        let mut verify_at = Instant::now() + VERIFY_AFTER;
        loop {
            let changed = flex.drivers.changed();
            for unique in self.world.flex_volumes() {
                flex.queue.add(unique);
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = changed => {
                    // A driver that was replaced may do now what it could not.
                    for volume in flex.volumes.lock().values_mut() {
                        volume.retry_at = None;
                    }
                }
                () = tokio::time::sleep_until(verify_at) => {
                    verify_at = Instant::now() + VERIFY_AFTER;
                    self.verify_flex(&flex);
                }
            }
        }
    }

    /// Asks drivers whether what nodes' statuses say is attached still is.
    fn verify_flex(self: &Arc<Self>, flex: &Arc<FlexAttachments>) {
        for node in self.world.nodes.list() {
            let name = node.name_any();
            for unique in observe::attached(&node).filter(|unique| flex.is_attachable(unique)) {
                let Ok(driver) = flex.driver(unique) else { continue };
                let Ok(options) = self.flex_options(unique, &name) else { continue };
                if !flex.begin(unique) {
                    continue;
                }
                let (flex, unique, name) = (flex.clone(), unique.to_owned(), name.clone());
                tokio::spawn(async move {
                    let call = Call::IsAttached { options, node: name.clone() };
                    let lost = match driver.call(call).await {
                        Ok(Some(reply)) => !reply.attached.unwrap_or(false),
                        Ok(None) => false,
                        Err(error) => {
                            tracing::warn!(volume = unique, node = name, %error, "not known whether it is attached");
                            false
                        }
                    };
                    let device = flex.device(&unique, &name);
                    let state = if lost {
                        tracing::warn!(
                            volume = unique,
                            node = name,
                            "no longer attached; attaching it again"
                        );
                        Some(NodeState::Uncertain)
                    } else if device.is_empty() {
                        None
                    } else {
                        Some(NodeState::Attached(device))
                    };
                    flex.end(&unique, &name, state, false);
                });
            }
        }
    }

    /// Has the driver attach a volume to a node, once the node says that it will use it.
    pub(super) fn attach_flex(self: &Arc<Self>, unique: &str, node: &str) {
        let Some(flex) = self.world.flex.clone() else { return };
        let object = self.world.nodes.named(node);
        if !object.is_some_and(|node| observe::in_use(&node).any(|name| name == unique)) {
            return;
        }
        let Ok(driver) = flex.driver(unique) else { return };
        if !flex.begin(unique) {
            return;
        }
        self.remember(unique, node, |known| {
            *known = VolumeMemory { attaching: Some(Instant::now()), ..VolumeMemory::default() };
        });
        let (controller, unique, node) = (self.clone(), unique.to_owned(), node.to_owned());
        tokio::spawn(async move {
            let begun = std::time::Instant::now();
            let attached = match controller.flex_options(&unique, &node) {
                Ok(options) => {
                    let call = Call::Attach { options: options.clone(), node: node.clone() };
                    call_named(&driver, options, call).await
                }
                Err(why) => Err(why),
            };
            record(&unique, "attach", &node, begun, attached.as_ref().err());
            match attached {
                Ok(reply) => {
                    let device = reply.and_then(|reply| reply.device).unwrap_or_default();
                    if let Err(error) = controller.annotate_detaching(&unique, &node, false).await {
                        // A restart would attach it once more.
                        tracing::debug!(
                            volume = unique,
                            node,
                            error = error.chain(),
                            "the node still says that it is detached"
                        );
                    }
                    flex.end(&unique, &node, Some(NodeState::Attached(device)), false);
                }
                Err(why) => {
                    controller.record_for_pods(&unique, &node, |_, name| {
                        Err(format!("AttachVolume.Attach failed for volume {name:?} : {why}"))
                    });
                    flex.end(&unique, &node, Some(NodeState::Uncertain), true);
                }
            }
        });
    }

    /// Notes that a volume is to be detached from a node, before the node's status no longer says that it is attached.
    pub(super) async fn note_detaching(&self, unique: &str, node: &str) -> Result<()> {
        if let Some(flex) = &self.world.flex {
            flex.keep(unique, node);
        }
        self.annotate_detaching(unique, node, true).await
    }

    /// Has the node's annotation name a volume, or no longer.
    async fn annotate_detaching(&self, unique: &str, node: &str, named: bool) -> Result<()> {
        let Some(object) = self.world.nodes.named(node) else { return Ok(()) };
        if detaching(&object).any(|name| name == unique) == named {
            return Ok(());
        }
        let change = |node: &mut Node| {
            let mut volumes: Vec<String> =
                detaching(node).filter(|name| *name != unique).map(str::to_owned).collect();
            volumes.extend(named.then(|| unique.to_owned()));
            let annotations = node.annotations_mut();
            if volumes.is_empty() {
                annotations.remove(DETACHING_VOLUMES);
            } else {
                annotations.insert(DETACHING_VOLUMES.to_owned(), volumes.join(" "));
            }
        };
        match self.cluster.edit(object.as_ref(), change).await {
            Err(error) if error.is_not_found() => Ok(()),
            edited => edited.map(drop),
        }
    }

    /// Has the driver detach a volume from a node whose status no longer names it.
    pub(super) async fn detach_flex(self: &Arc<Self>, unique: &str, node: &str, verify: bool) -> Result<()> {
        let Some(flex) = self.world.flex.clone() else { return Ok(()) };
        if verify && self.is_spoken_of(unique, node).await? {
            return Ok(());
        }
        let Some((_, name)) = split_flex_unique_name(unique) else { return Ok(()) };
        let Ok(driver) = flex.driver(unique) else { return Ok(()) };
        if !flex.begin(unique) {
            return Ok(());
        }
        let call = Call::Detach { volume: name.to_owned(), node: node.to_owned() };
        let options = self.flex_options(unique, node);
        let (controller, unique, node) = (self.clone(), unique.to_owned(), node.to_owned());
        tokio::spawn(async move {
            let begun = std::time::Instant::now();
            let detached = match options {
                Ok(options) => call_named(&driver, options, call).await,
                Err(why) => Err(why),
            };
            record(&unique, "detach", &node, begun, detached.as_ref().err());
            match detached {
                Ok(_) => match controller.annotate_detaching(&unique, &node, false).await {
                    Ok(()) => flex.end(&unique, &node, None, false),
                    // Detached once more, which drivers must allow, and the annotation with it.
                    Err(_) => flex.end(&unique, &node, Some(NodeState::Uncertain), true),
                },
                Err(error) => {
                    tracing::warn!(volume = unique, node, error, "DetachVolume.Detach failed; trying again");
                    flex.end(&unique, &node, Some(NodeState::Uncertain), true);
                }
            }
        });
        Ok(())
    }

    /// The options of a volume, as the pod on the node or the volume object has them; only its name if neither is left.
    fn flex_options(&self, unique: &str, node: &str) -> std::result::Result<Options, String> {
        let (_, name) = split_flex_unique_name(unique).unwrap_or_default();
        let user = self.world.users(unique).into_iter().find(|user| node_of_pod(&user.pod) == node);
        let volume = user.as_ref().and_then(|user| user.volume.clone());
        let volume = volume.or_else(|| self.world.volumes_by_unique.get(unique).pop());
        let no_options = BTreeMap::new();
        let made = if let Some(volume) = &volume {
            let flex = volume.spec.as_ref().and_then(|spec| spec.flex_volume.as_ref());
            let options = flex.and_then(|flex| flex.options.as_ref()).unwrap_or(&no_options);
            let fs_type = flex.and_then(|flex| flex.fs_type.as_deref()).unwrap_or_default();
            let read_only = user.as_ref().is_some_and(|user| claims_read_only(&user.pod, volume));
            Options::new(options, fs_type, read_only, name)
        } else {
            let pod = user.as_ref().map(|user| volumes_of_pod(&user.pod)).unwrap_or_default();
            let inline = pod.iter().filter_map(|volume| Some((&volume.name, volume.flex_volume.as_ref()?)));
            let inline =
                inline.into_iter().find(|(name, flex)| flex_unique_name(&flex.driver, name) == unique);
            let flex = inline.map(|(_, flex)| flex);
            let options = flex.and_then(|flex| flex.options.as_ref()).unwrap_or(&no_options);
            let fs_type = flex.and_then(|flex| flex.fs_type.as_deref()).unwrap_or_default();
            Options::new(options, fs_type, flex.and_then(|flex| flex.read_only).unwrap_or(false), name)
        };
        made.map_err(|error| error.to_string())
    }
}

/// The volumes that a node's annotation says are being detached.
fn detaching(node: &Node) -> impl Iterator<Item = &str> {
    node.annotations().get(DETACHING_VOLUMES).map(String::as_str).unwrap_or_default().split_whitespace()
}

/// Whether a pod uses the claim of a volume read-only.
fn claims_read_only(pod: &Pod, volume: &PersistentVolume) -> bool {
    let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let claim = reference.and_then(|reference| reference.name.as_deref()).unwrap_or_default();
    volumes_of_pod(pod).iter().any(|volume| {
        let source = volume.persistent_volume_claim.as_ref();
        source.is_some_and(|source| source.claim_name == claim && source.read_only == Some(true))
    })
}

/// Makes a call after `getvolumename`, as kube-controller-manager does, which uses only that the driver does not fail.
async fn call_named(
    driver: &Driver,
    options: Options,
    call: Call,
) -> std::result::Result<Option<Reply>, String> {
    let named = driver.call(Call::GetVolumeName { options }).await;
    named.map_err(|error| error.to_string())?;
    driver.call(call).await.map_err(|error| error.to_string())
}

fn record(unique: &str, call: &str, node: &str, begun: std::time::Instant, failed: Option<&String>) {
    let (_, volume) = split_flex_unique_name(unique).unwrap_or_default();
    let state = if call == "attach" { "NODE_READY" } else { "" };
    Step { component: "attach-detach", call, state, volume, node, ..Step::default() }
        .ended(begun, failed.map(String::as_str));
}
