//! `berth flex migrate`: PersistentVolumes of FlexVolume drivers become PersistentVolumes of CSI drivers, and back.
//!
//! A volume's source cannot be changed, so the object is replaced by one of the same name that is reserved for the same
//! claim, by its UID. The claim is `Lost` for the moment in between and bound again after it; its data is not touched.
//!
//! ```text
//! observe -> plan (pure) -> for each volume that is not attached:
//!   1. a ConfigMap with the new object                       from here on a repeated run can finish
//!   2. delete the volume; remove the protection's finalizer
//!   3. create the new object; remove the ConfigMap
//! ```
//!
//! Killed anywhere, the next run finishes what the ConfigMap says. The original object is kept as an annotation of the new
//! one, from which `--undo` restores it by the same steps.
//!
//! A pod that runs keeps what is mounted, and its next start gets the volume by the new driver. Until then a kubelet may mount the
//! volume by both drivers for the same pod, as it would for two pods of the node; that does no harm as long as nothing is
//! attached. A volume that is attached is left alone: the detachment of one driver would take the device from the other.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use berth_backends::flex::{DRIVER, csi_name_of};
use berth_core::names::{self, VOLUME_PROTECTION};
use berth_flex::DriverName;
use clap::Args as ClapArgs;
use k8s_openapi::Resource as _;
use k8s_openapi::api::storage::v1::{CSINode, VolumeAttachment};
use kube::Client;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
    PostParams,
};
use serde_json::{Map, Value, json};

use crate::machine::ClusterArgs;

/// On a volume that was changed over: the object that it was before.
const ORIGINAL: &str = "flex.berth.dev/original";
/// The label of the ConfigMaps of changes that are under way.
const UNDER_WAY: &str = "flex.berth.dev/under-way";
/// The namespace of those ConfigMaps.
const NAMESPACE: &str = "default";
/// The key in such a ConfigMap.
const OBJECT: &str = "object";
/// How long a deleted object may take to go.
const GONE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it is asked for.
const PAUSE: Duration = Duration::from_millis(50);

/// Change PersistentVolumes of FlexVolume drivers over to CSI drivers, or back.
#[derive(Debug, ClapArgs)]
pub(super) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// The PersistentVolumes to change [default: all of FlexVolume drivers]
    #[arg(value_name = "VOLUME")]
    volumes: Vec<String>,

    /// Only print what would be done
    #[arg(long)]
    dry_run: bool,

    /// Restore the FlexVolume sources of volumes that were changed over
    #[arg(long)]
    undo: bool,

    /// The CSI driver for NFS shares
    #[arg(long, default_value = names::NFS_DRIVER, value_name = "NAME")]
    nfs_driver: String,

    /// Serve NFS shares by their FlexVolume driver too (berth driver flex)
    #[arg(long)]
    keep_driver: bool,
}

/// What the cluster has that matters.
struct Observed {
    volumes: Vec<DynamicObject>,
    /// The CSI drivers that some node has.
    drivers: BTreeSet<String>,
    /// By namespace and name of a claim: the pods that use it.
    users: BTreeMap<(String, String), Vec<User>>,
    /// By the name of a volume: the nodes that it is attached to.
    attached: BTreeMap<String, Vec<String>>,
    /// What nodes say of attached volumes and of those in use.
    on_nodes: Vec<(String, String)>,
    inline: Vec<String>,
}

/// A pod that uses a claim, and has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct User {
    /// Its namespace and its name, with a slash between.
    pod: String,
    /// It may have its volumes attached at any moment.
    is_starting: bool,
}

/// What becomes of a volume.
#[derive(Debug, PartialEq)]
enum Verdict {
    Change { to: Box<DynamicObject>, how: String },
    Refused(String),
}

pub(super) async fn run(args: Args) -> anyhow::Result<()> {
    let (cluster, _) = args.cluster.connect().await?;
    let client = cluster.client().clone();
    if !args.dry_run {
        finish_all(&client).await?;
    }
    let observed = observe(&client).await?;
    let (mut changed, mut refused) = (0, 0);
    for volume in &observed.volumes {
        let name = volume.metadata.name.as_deref().unwrap_or_default();
        if !args.volumes.is_empty() && !args.volumes.iter().any(|wanted| wanted == name) {
            continue;
        }
        let verdict = if args.undo { plan_undo(volume, &observed) } else { plan(volume, &observed, &args) };
        match verdict {
            None => {}
            Some(Verdict::Refused(why)) => {
                refused += 1;
                println!("PersistentVolume {name}: left as it is: {why}");
            }
            Some(Verdict::Change { to, how }) => {
                changed += 1;
                println!("PersistentVolume {name}: {how}");
                if !args.dry_run {
                    replace(&client, volume, &to)
                        .await
                        .with_context(|| format!("change PersistentVolume {name}"))?;
                }
            }
        }
    }
    for name in &args.volumes {
        let is_there = observed.volumes.iter().any(|volume| volume.metadata.name.as_ref() == Some(name));
        ensure!(is_there, "there is no PersistentVolume {name}");
    }
    if !args.undo {
        for line in &observed.inline {
            println!("{line}");
        }
    }
    let verb = if args.dry_run { "would be changed" } else { "changed" };
    println!("{changed} volumes {verb}, {refused} left as they are.");
    Ok(())
}

/// The pods that use a volume's claim.
fn users<'a>(volume: &DynamicObject, observed: &'a Observed) -> &'a [User] {
    let claim = &volume.data["spec"]["claimRef"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    observed.users.get(&(text(&claim["namespace"]), text(&claim["name"]))).map_or(&[], Vec::as_slice)
}

/// Why a volume cannot be replaced now: it is attached, or may be any moment. A share is never attached.
fn held(volume: &DynamicObject, observed: &Observed, is_share: bool) -> Option<String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let users = users(volume, observed);
    let later = if users.is_empty() { "repeat this later".to_owned() } else { stop(users) };
    if let Some(nodes) = observed.attached.get(name) {
        return Some(format!("it is attached to node {}; {later}", nodes.join(", node ")));
    }
    // As nodes call attached volumes of FlexVolume and of CSI: vendor/driver/NAME, and driver^HANDLE.
    let suffixes = [format!("/{name}"), format!("^{name}")];
    let is_this = |volume: &str| suffixes.iter().any(|suffix| volume.ends_with(suffix));
    if let Some((node, _)) = observed.on_nodes.iter().find(|(_, volume)| is_this(volume)) {
        return Some(format!("node {node} reports it in use; {later}"));
    }
    let starting = users.iter().find(|user| user.is_starting && !is_share)?;
    Some(format!("pod {} has not started yet, and its volume may be attached; {}", starting.pod, stop(users)))
}

fn stop(users: &[User]) -> String {
    format!("stop pod {}, and repeat this", pods(users))
}

fn pods(users: &[User]) -> String {
    users.iter().map(|user| user.pod.as_str()).collect::<Vec<_>>().join(", pod ")
}

/// What to say of the pods that use a volume while it is replaced.
fn change_over(users: &[User]) -> String {
    match users {
        [] => String::new(),
        [one] => format!("; pod {} changes over at its next start", one.pod),
        several => format!("; pod {} change over at their next start", pods(several)),
    }
}

/// What a volume of a FlexVolume driver becomes; `None` for others.
fn plan(volume: &DynamicObject, observed: &Observed, args: &Args) -> Option<Verdict> {
    let spec = &volume.data["spec"];
    let flex = spec.get("flexVolume").filter(|flex| flex.is_object())?;
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let refuse = |why: String| Some(Verdict::Refused(why));
    let (csi, options) = match csi_source(name, flex, spec, args) {
        Ok(source) => source,
        Err(why) => return refuse(why),
    };
    let driver = csi["driver"].as_str().unwrap_or_default().to_owned();
    if !observed.drivers.contains(&driver) {
        let of_flex = flex["driver"].as_str().unwrap_or_default();
        let advice = if driver == args.nfs_driver {
            "install it, or give another with --nfs-driver".to_owned()
        } else {
            format!("install `berth node flex` for {of_flex} on the nodes")
        };
        return refuse(format!("no node has the CSI driver {driver}; {advice}"));
    }
    let is_share = driver == args.nfs_driver;
    if let Some(why) = held(volume, observed, is_share).or_else(|| strange_finalizer(volume)) {
        return refuse(why);
    }
    let mut to = renewed(volume);
    let spec = to.data["spec"].as_object_mut()?;
    spec.remove("flexVolume");
    spec.insert("csi".to_owned(), csi);
    if !options.is_empty() {
        spec.insert("mountOptions".to_owned(), json!(options));
    }
    let annotations = to.metadata.annotations.get_or_insert_default();
    annotations.insert(ORIGINAL.to_owned(), serde_json::to_string(&renewed(volume)).ok()?);
    let from = flex["driver"].as_str().unwrap_or_default();
    Some(Verdict::Change {
        to: Box::new(to),
        how: format!(
            "from FlexVolume driver {from} to CSI driver {driver}{}",
            change_over(users(volume, observed))
        ),
    })
}

/// What a volume that was changed over was before; `None` for others.
fn plan_undo(volume: &DynamicObject, observed: &Observed) -> Option<Verdict> {
    let original = volume.metadata.annotations.as_ref()?.get(ORIGINAL)?;
    let Ok(mut to) = serde_json::from_str::<DynamicObject>(original) else {
        return Some(Verdict::Refused(format!("its annotation {ORIGINAL} cannot be read")));
    };
    // Only the change to the driver of shares leaves out which FlexVolume driver it was.
    let is_share = volume.data["spec"]["csi"]["volumeAttributes"].get(DRIVER).is_none();
    if let Some(why) = held(volume, observed, is_share).or_else(|| strange_finalizer(volume)) {
        return Some(Verdict::Refused(why));
    }
    // The claim, the size and the policy may have changed since.
    for field in ["claimRef", "capacity", "persistentVolumeReclaimPolicy"] {
        match volume.data["spec"].get(field) {
            Some(value) => to.data["spec"][field] = value.clone(),
            None => drop(to.data["spec"].as_object_mut().map(|spec| spec.remove(field))),
        }
    }
    let from = volume.data["spec"]["csi"]["driver"].as_str().unwrap_or_default();
    let driver = to.data["spec"]["flexVolume"]["driver"].as_str().unwrap_or_default().to_owned();
    Some(Verdict::Change {
        to: Box::new(to),
        how: format!(
            "from CSI driver {from} back to FlexVolume driver {driver}{}",
            change_over(users(volume, observed))
        ),
    })
}

/// The CSI source of a volume, and the mount options that it needs; the error says why there is none.
fn csi_source(name: &str, flex: &Value, spec: &Value, args: &Args) -> Result<(Value, Vec<String>), String> {
    let driver = flex["driver"].as_str().unwrap_or_default();
    let parsed: DriverName = driver.parse().map_err(|error| format!("{error}"))?;
    let options: BTreeMap<String, String> =
        serde_json::from_value(flex.get("options").cloned().unwrap_or_else(|| json!({})))
            .map_err(|error| format!("its options: {error}"))?;
    if spec["volumeMode"] == "Block" {
        return Err("it is used as a raw block device, which FlexVolume does not have".to_owned());
    }
    if spec["mountOptions"].as_array().is_some_and(|options| !options.is_empty()) {
        return Err("it has mountOptions, which FlexVolume does not apply and CSI would".to_owned());
    }
    let fs_type = flex["fsType"].as_str().unwrap_or_default();
    if parsed.executable() == "nfs" && !args.keep_driver && flex.get("secretRef").is_none_or(Value::is_null) {
        return nfs_source(name, &options, fs_type, args);
    }
    let mut attributes = options;
    attributes.insert(DRIVER.to_owned(), driver.to_owned());
    let mut csi = Map::new();
    csi.insert("driver".to_owned(), json!(csi_name_of(&parsed)));
    csi.insert("volumeHandle".to_owned(), json!(name));
    csi.insert("volumeAttributes".to_owned(), json!(attributes));
    if !fs_type.is_empty() {
        csi.insert("fsType".to_owned(), json!(fs_type));
    }
    if let Some(secret) = flex["secretRef"]["name"].as_str() {
        let claim = spec["claimRef"]["namespace"].as_str();
        let Some(namespace) =
            flex["secretRef"]["namespace"].as_str().filter(|given| !given.is_empty()).or(claim)
        else {
            return Err("its secretRef names no namespace, and no claim says one; bind it first".to_owned());
        };
        csi.insert("nodePublishSecretRef".to_owned(), json!({ "name": secret, "namespace": namespace }));
    }
    Ok((Value::Object(csi), Vec::new()))
}

/// As `examples/nfs` has them: the attributes are csi-driver-nfs's.
fn nfs_source(
    name: &str,
    options: &BTreeMap<String, String>,
    fs_type: &str,
    args: &Args,
) -> Result<(Value, Vec<String>), String> {
    let (mut attributes, mut mount_options) = (Map::new(), Vec::new());
    for (key, value) in options {
        match key.to_ascii_lowercase().as_str() {
            "server" => drop(attributes.insert("server".to_owned(), json!(value))),
            "share" => drop(
                attributes.insert("share".to_owned(), json!(format!("/{}", value.trim_start_matches('/')))),
            ),
            "subdir" => drop(attributes.insert("subDir".to_owned(), json!(value))),
            "mountoptions" => {
                mount_options = value
                    .split(',')
                    .map(|option| option.trim().to_owned())
                    .filter(|o| !o.is_empty())
                    .collect();
            }
            "mountpermissions" => drop(attributes.insert("mountPermissions".to_owned(), json!(value))),
            _ => {
                return Err(format!(
                    "its option {key:?} means nothing to {}; --keep-driver serves it by its FlexVolume driver",
                    args.nfs_driver
                ));
            }
        }
    }
    if !attributes.contains_key("server") || !attributes.contains_key("share") {
        return Err(
            "it has not the options server and share; --keep-driver serves it by its FlexVolume driver"
                .to_owned(),
        );
    }
    if !matches!(fs_type, "" | "nfs" | "nfs4") {
        return Err(format!("its fsType {fs_type:?} is not NFS"));
    }
    let csi = json!({ "driver": args.nfs_driver, "volumeHandle": name, "volumeAttributes": attributes });
    Ok((csi, mount_options))
}

/// A finalizer that somebody else waits behind.
fn strange_finalizer(volume: &DynamicObject) -> Option<String> {
    let finalizers = volume.metadata.finalizers.iter().flatten();
    let strange = finalizers.into_iter().find(|finalizer| *finalizer != VOLUME_PROTECTION)?;
    Some(format!("it has the finalizer {strange:?}; whoever put it there has to remove it first"))
}

/// The object without what the API server gave it, as it can be created again.
fn renewed(volume: &DynamicObject) -> DynamicObject {
    let mut object = volume.clone();
    let metadata = &mut object.metadata;
    metadata.uid = None;
    metadata.resource_version = None;
    metadata.creation_timestamp = None;
    metadata.deletion_timestamp = None;
    metadata.deletion_grace_period_seconds = None;
    metadata.managed_fields = None;
    metadata.generation = None;
    metadata.finalizers = None;
    metadata.annotations = metadata.annotations.take().map(|mut annotations| {
        annotations.remove(ORIGINAL);
        annotations
    });
    if let Some(data) = object.data.as_object_mut() {
        data.remove("status");
    }
    // A version of the claim that has passed.
    if let Some(claim) = object.data["spec"]["claimRef"].as_object_mut() {
        claim.remove("resourceVersion");
    }
    object
}

/// Replaces a volume by an object of the same name, in steps of which each can be the last.
async fn replace(client: &Client, before: &DynamicObject, to: &DynamicObject) -> anyhow::Result<()> {
    let name = before.metadata.name.as_deref().unwrap_or_default();
    let under_way = config_map(name, before, to)?;
    let created = config_maps(client).create(&PostParams::default(), &under_way).await;
    match created {
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        created => drop(created.context("note the change in a ConfigMap")?),
    }
    finish(client, &under_way).await
}

/// A ConfigMap that says what a volume is to become, and which object it replaces.
fn config_map(name: &str, before: &DynamicObject, to: &DynamicObject) -> anyhow::Result<DynamicObject> {
    let object = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": format!("berth-flex-{name}"),
            "namespace": NAMESPACE,
            "labels": { UNDER_WAY: "true" },
        },
        "data": {
            OBJECT: serde_json::to_string(to)?,
            "volume": name,
            "replaces": before.metadata.uid.as_deref().unwrap_or_default(),
        },
    });
    Ok(serde_json::from_value(object)?)
}

/// Finishes what earlier runs have left.
async fn finish_all(client: &Client) -> anyhow::Result<()> {
    let left = config_maps(client).list(&ListParams::default().labels(UNDER_WAY)).await;
    for under_way in left.context("list the ConfigMaps of changes under way")?.items {
        let name = under_way.data["data"]["volume"].as_str().unwrap_or_default().to_owned();
        finish(client, &under_way)
            .await
            .with_context(|| format!("finish the change of PersistentVolume {name}"))?;
        println!("PersistentVolume {name}: finished what an earlier run began");
    }
    Ok(())
}

/// Makes sure that the volume is what the ConfigMap says, and removes that.
async fn finish(client: &Client, under_way: &DynamicObject) -> anyhow::Result<()> {
    let data = &under_way.data["data"];
    let text = |key: &str| data[key].as_str().unwrap_or_default();
    let (name, replaces) = (text("volume"), text("replaces"));
    let to: DynamicObject = serde_json::from_str(text(OBJECT)).context("read the ConfigMap")?;
    let volumes = api(client, "v1", "PersistentVolume", "persistentvolumes");
    // The object is named by its UID, so that nothing but that is deleted, however late this is.
    let is_old = |volume: &DynamicObject| volume.metadata.uid.as_deref() == Some(replaces);
    if volumes.get_opt(name).await?.is_some_and(|volume| is_old(&volume)) {
        // Whatever its policy, nobody is to take the volume for released while it is replaced.
        let retain = json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } });
        volumes.patch(name, &PatchParams::default(), &Patch::Merge(&retain)).await.context("set Retain")?;
        let precondition =
            kube::api::Preconditions { uid: Some(replaces.to_owned()), resource_version: None };
        let delete = DeleteParams { preconditions: Some(precondition), ..DeleteParams::default() };
        match volumes.delete(name, &delete).await {
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
            deleted => drop(deleted.context("delete it")?),
        }
    }
    let begun = tokio::time::Instant::now();
    while let Some(volume) = volumes.get_opt(name).await?.filter(is_old) {
        ensure!(
            begun.elapsed() < GONE_TIMEOUT,
            "it does not go: finalizers {:?}",
            volume.metadata.finalizers
        );
        let finalizers: Vec<&String> = volume
            .metadata
            .finalizers
            .iter()
            .flatten()
            .filter(|finalizer| *finalizer != VOLUME_PROTECTION)
            .collect();
        let patch = json!({ "metadata": {
            "finalizers": finalizers,
            "resourceVersion": volume.metadata.resource_version,
        } });
        match volumes.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => {}
            patched => drop(patched.context("remove its protection")?),
        }
        tokio::time::sleep(PAUSE).await;
    }
    match volumes.create(&PostParams::default(), &to).await {
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        created => drop(created.context("create it again")?),
    }
    let name = under_way.metadata.name.as_deref().unwrap_or_default();
    match config_maps(client).delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        removed => removed.map(drop).context("remove the ConfigMap of the change"),
    }
}

async fn observe(client: &Client) -> anyhow::Result<Observed> {
    let list = async |version: &str, kind: &str, plural: &str| -> anyhow::Result<Vec<DynamicObject>> {
        match api(client, version, kind, plural).list(&ListParams::default()).await {
            // A kind that the cluster does not have has no objects.
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
            listed => Ok(listed.with_context(|| format!("list the {plural}"))?.items),
        }
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut observed = Observed {
        volumes: list("v1", "PersistentVolume", "persistentvolumes").await?,
        drivers: BTreeSet::new(),
        users: BTreeMap::new(),
        attached: BTreeMap::new(),
        on_nodes: Vec::new(),
        inline: Vec::new(),
    };
    for node in list(CSINode::API_VERSION, CSINode::KIND, "csinodes").await? {
        let drivers = node.data["spec"]["drivers"].as_array().into_iter().flatten();
        observed.drivers.extend(drivers.map(|driver| text(&driver["name"])));
    }
    for pod in list("v1", "Pod", "pods").await? {
        let phase = pod.data["status"]["phase"].as_str();
        let finished = matches!(phase, Some("Succeeded" | "Failed"));
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let pod_name = pod.metadata.name.clone().unwrap_or_default();
        for volume in pod.data["spec"]["volumes"].as_array().into_iter().flatten().filter(|_| !finished) {
            if let Some(claim) = volume["persistentVolumeClaim"]["claimName"].as_str() {
                let users = observed.users.entry((namespace.clone(), claim.to_owned())).or_default();
                users.push(User {
                    pod: format!("{namespace}/{pod_name}"),
                    is_starting: phase != Some("Running"),
                });
            }
        }
        if pod.metadata.owner_references.as_ref().is_none_or(Vec::is_empty) {
            report_inline(&mut observed.inline, "Pod", &pod, &pod.data["spec"]);
        }
    }
    for attachment in list(VolumeAttachment::API_VERSION, VolumeAttachment::KIND, "volumeattachments").await?
    {
        let volume = text(&attachment.data["spec"]["source"]["persistentVolumeName"]);
        observed.attached.entry(volume).or_default().push(text(&attachment.data["spec"]["nodeName"]));
    }
    for node in list("v1", "Node", "nodes").await? {
        let name = node.metadata.name.clone().unwrap_or_default();
        let attached = node.data["status"]["volumesAttached"].as_array().into_iter().flatten();
        let used = node.data["status"]["volumesInUse"].as_array().into_iter().flatten();
        let all = attached.map(|volume| text(&volume["name"])).chain(used.map(&text));
        observed.on_nodes.extend(all.map(|volume| (name.clone(), volume)));
    }
    for (version, kind, plural, template) in [
        ("apps/v1", "Deployment", "deployments", "/spec/template/spec"),
        ("apps/v1", "StatefulSet", "statefulsets", "/spec/template/spec"),
        ("apps/v1", "DaemonSet", "daemonsets", "/spec/template/spec"),
        ("apps/v1", "ReplicaSet", "replicasets", "/spec/template/spec"),
        ("v1", "ReplicationController", "replicationcontrollers", "/spec/template/spec"),
        ("batch/v1", "Job", "jobs", "/spec/template/spec"),
        ("batch/v1", "CronJob", "cronjobs", "/spec/jobTemplate/spec/template/spec"),
    ] {
        for object in list(version, kind, plural).await? {
            if object.metadata.owner_references.as_ref().is_none_or(Vec::is_empty)
                && let Some(pod) = object.data.pointer(template)
            {
                report_inline(&mut observed.inline, kind, &object, pod);
            }
        }
    }
    Ok(observed)
}

/// Says which volumes of a pod's specification are of FlexVolume drivers, and what to write instead.
fn report_inline(lines: &mut Vec<String>, kind: &str, object: &DynamicObject, pod: &Value) {
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    let name = object.metadata.name.as_deref().unwrap_or_default();
    for volume in pod["volumes"].as_array().into_iter().flatten() {
        let Some(driver) = volume["flexVolume"]["driver"].as_str() else { continue };
        let csi = driver.parse().map_or_else(|_| "its CSI driver".to_owned(), |driver| csi_name_of(&driver));
        let inline = volume["name"].as_str().unwrap_or_default();
        lines.push(format!(
            "{kind} {namespace}/{name}: volume {inline} is of the FlexVolume driver {driver} and written in the pod template, which \
             is not changed here; replace `flexVolume` there by `csi` with `driver: {csi}` and the options as `volumeAttributes`"
        ));
    }
}

fn config_maps(client: &Client) -> Api<DynamicObject> {
    let resource = resource("v1", "ConfigMap", "configmaps");
    Api::namespaced_with(client.clone(), NAMESPACE, &resource)
}

fn api(client: &Client, version: &str, kind: &str, plural: &str) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &resource(version, kind, plural))
}

fn resource(version: &str, kind: &str, plural: &str) -> ApiResource {
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed() -> Observed {
        Observed {
            volumes: Vec::new(),
            drivers: BTreeSet::new(),
            users: BTreeMap::new(),
            attached: BTreeMap::new(),
            on_nodes: Vec::new(),
            inline: Vec::new(),
        }
    }

    fn user(is_starting: bool) -> BTreeMap<(String, String), Vec<User>> {
        let user = User { pod: "shop/web".to_owned(), is_starting };
        BTreeMap::from([(("shop".to_owned(), "data".to_owned()), vec![user])])
    }

    #[test]
    fn a_volume_is_held_while_it_is_attached_or_may_be_any_moment() {
        let volume: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": "pv" },
            "spec": { "claimRef": { "namespace": "shop", "name": "data" } },
        }))
        .unwrap();
        let node = |name: &str| vec![("n".to_owned(), name.to_owned())];
        let rows = [
            (observed(), false, None),
            (Observed { users: user(false), ..observed() }, false, None),
            (Observed { users: user(true), ..observed() }, true, None),
            (Observed { users: user(true), ..observed() }, false, Some("pod shop/web has not started yet")),
            (Observed { on_nodes: node("acme.com/disk/pv"), ..observed() }, false, Some("repeat this later")),
            (
                Observed { users: user(false), on_nodes: node("acme.com/disk/pv"), ..observed() },
                false,
                Some("node n reports it in use; stop pod shop/web, and repeat this"),
            ),
            (
                Observed { on_nodes: node("kubernetes.io/csi/disk.acme.com^pv"), ..observed() },
                true,
                Some("node n"),
            ),
            (Observed { on_nodes: node("acme.com/disk/other-pv2"), ..observed() }, false, None),
            (
                Observed {
                    attached: BTreeMap::from([("pv".to_owned(), vec!["n".to_owned()])]),
                    ..observed()
                },
                true,
                Some("it is attached to node n"),
            ),
        ];
        for (number, (observed, is_share, expected)) in rows.into_iter().enumerate() {
            let why = held(&volume, &observed, is_share);
            match expected {
                None => assert_eq!(why, None, "row {number}"),
                Some(part) => {
                    assert!(why.as_ref().is_some_and(|why| why.contains(part)), "row {number}: {why:?}");
                }
            }
        }
    }
}
