//! Carries out a placement: reserves volumes, asks for new ones, waits until they are bound, binds the pod.
//!
//! Every step is idempotent, and is taken again from the start whenever a claim changes.

use std::time::Duration;

use berth_kube::{Cluster, Error, Key, Result};
use k8s_openapi::api::core::v1::{
    Binding, ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod, PodCondition,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{ObjectMeta, PostParams};
use kube::{Resource as _, ResourceExt as _};
use tokio::time::Instant;

use super::board::nominated_node;
use super::decide::Placement;
use super::world::{Caches, World as _};
use berth_core::names::{BOUND_BY_CONTROLLER, SELECTED_NODE};
use berth_kube::selectors::volume_on_node;
use berth_kube::storage;

/// How long volumes may take to be bound before another node is tried.
pub(super) const BIND_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// How long claims with a data source may take to be bound before the pod's other claims are no longer held back. It is not for
/// ever, because the source may be a snapshot of one of those.
pub(super) const SOURCE_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// A placement under way.
#[derive(Debug, Clone)]
pub(super) struct Reservation {
    pub(super) uid: Option<String>,
    pub(super) placement: Placement,
    pub(super) since: Instant,
    pub(super) written: Written,
    pub(super) stage: Stage,
}

/// Which wishes of a placement are written; should one of them be gone, somebody took it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    Nothing,
    /// Those of the claims whose source may be on another node than the one that was chosen.
    Sources,
    Everything,
}

/// How far a placement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Volumes are made and bound. Until that is done, the node may be given to a pod that is more important.
    Volumes,
    /// The pod is being bound.
    Binding,
    /// The pod is bound, and was not yet seen on its node.
    Bound,
}

/// Why a placement is given up, or what must be tried again.
#[derive(Debug, thiserror::Error)]
pub(super) enum Setback {
    /// Another node, or the same one anew.
    #[error("running PreBind plugin \"VolumeBinding\": {0}")]
    Volumes(String),
    /// The API server refused a write, or could not be reached.
    #[error(transparent)]
    Write(#[from] Error),
}

fn volumes(why: impl Into<String>) -> Setback {
    Setback::Volumes(why.into())
}

/// Writes what the placement asks of volumes and claims; says what is written now.
///
/// A claim with a data source comes first. Where each node has a provisioner of its own, the one of the chosen node gives the claim
/// to the node that has the source, and the pod has to follow. It could not if another claim of it had a volume on the first node.
pub(super) async fn write(cluster: &Cluster, caches: &Caches, of: &Reservation) -> Result<Written, Setback> {
    let volumes = &of.placement.volumes;
    let (sources, others) = sources_first(caches, &volumes.provision)?;
    for key in &sources {
        select(cluster, caches, of, key, of.written != Written::Nothing).await?;
    }
    let held_back = !volumes.bind.is_empty() || !others.is_empty();
    let waits = of.written != Written::Everything && of.since.elapsed() < SOURCE_TIMEOUT;
    if held_back && waits && !are_bound(caches, of, sources.iter().copied())? {
        return Ok(Written::Sources);
    }
    let written = of.written == Written::Everything;
    for (key, name) in &volumes.bind {
        let claim = claim(caches, key)?;
        if storage::is_bound(&claim) {
            continue;
        }
        let volume = caches.volumes.named(name).ok_or_else(|| {
            self::volumes(format!("failed to check binding: persistentvolume {name:?} not found"))
        })?;
        reserve(cluster, &volume, &claim, written).await?;
    }
    for key in others {
        select(cluster, caches, of, key, written).await?;
    }
    Ok(Written::Everything)
}

/// The claims that are made from something that is there already, and the others. A clone of another claim of the pod can be no
/// reason to wait with that claim.
fn sources_first<'a>(caches: &Caches, claims: &'a [Key]) -> Result<(Vec<&'a Key>, Vec<&'a Key>), Setback> {
    let (mut sources, mut others) = (Vec::new(), Vec::new());
    for key in claims {
        let claim = claim(caches, key)?;
        let spec = claim.spec.as_ref();
        let reference = spec.and_then(|spec| spec.data_source_ref.as_ref());
        let reference = reference.map(|from| (from.kind.as_str(), from.name.as_str()));
        let source = spec.and_then(|spec| spec.data_source.as_ref());
        let source = reference.or_else(|| source.map(|from| (from.kind.as_str(), from.name.as_str())));
        let is_there = source.is_some_and(|(kind, name)| {
            kind != "PersistentVolumeClaim" || !claims.iter().any(|claim| claim.name == name)
        });
        if is_there { sources.push(key) } else { others.push(key) }
    }
    Ok((sources, others))
}

/// Asks that a claim's volume be made for the node of the placement; `written` says whether that was asked before.
async fn select(
    cluster: &Cluster,
    caches: &Caches,
    of: &Reservation,
    key: &Key,
    written: bool,
) -> Result<(), Setback> {
    let claim = claim(caches, key)?;
    match claim.annotations().get(SELECTED_NODE) {
        Some(node) if *node == of.placement.node => {}
        _ if storage::is_bound(&claim) => {}
        Some(_) => {
            return Err(volumes(format!("binding volumes: provisioning failed for PVC {:?}", key.name)));
        }
        None if written => {
            let why = format!("binding volumes: selectedNode annotation reset for PVC {:?}", key.name);
            return Err(volumes(why));
        }
        None => {
            let node = of.placement.node.clone();
            cluster
                .update(claim.as_ref(), |claim| {
                    claim.annotations_mut().insert(SELECTED_NODE.to_owned(), node);
                })
                .await?;
        }
    }
    Ok(())
}

fn claim(caches: &Caches, key: &Key) -> Result<std::sync::Arc<PersistentVolumeClaim>, Setback> {
    caches.claim(key).ok_or_else(|| {
        volumes(format!("failed to check provisioning pvc: persistentvolumeclaim {:?} not found", key.name))
    })
}

async fn reserve(
    cluster: &Cluster,
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
    written: bool,
) -> Result<(), Setback> {
    let current = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let ours = storage::refers_to(volume, claim);
    if current.is_none() && written || current.is_some() && !ours {
        return Err(volumes(format!("binding volumes: ClaimRef got reset for pv {:?}", volume.name_any())));
    }
    if current.is_some_and(|current| current.uid == claim.metadata.uid) {
        return Ok(());
    }
    let reference = berth_kube::reference(claim);
    cluster
        .update(volume, |volume| {
            if !ours {
                volume.annotations_mut().insert(BOUND_BY_CONTROLLER.to_owned(), "yes".to_owned());
            }
            volume.spec.get_or_insert_default().claim_ref = Some(reference);
        })
        .await?;
    Ok(())
}

/// Whether all claims of the placement are bound, to volumes that the node can use.
pub(super) fn is_bound(caches: &Caches, of: &Reservation) -> Result<bool, Setback> {
    let bind = of.placement.volumes.bind.iter().map(|(key, _)| key);
    are_bound(caches, of, bind.chain(&of.placement.volumes.provision))
}

fn are_bound<'a>(
    caches: &Caches,
    of: &Reservation,
    claims: impl Iterator<Item = &'a Key>,
) -> Result<bool, Setback> {
    let node = caches
        .nodes
        .named(&of.placement.node)
        .ok_or_else(|| volumes(format!("binding volumes: node {:?} not found", of.placement.node)))?;
    for key in claims {
        let claim = claim(caches, key)?;
        let name = storage::volume_name(&claim);
        if name.is_empty() {
            return Ok(false);
        }
        // A volume that is not there may be on its way.
        let Some(volume) = caches.volumes.named(name) else { return Ok(false) };
        if !volume_on_node(&volume, &node) {
            let node = &of.placement.node;
            return Err(volumes(format!(
                "binding volumes: pv {name:?} node affinity doesn't match node {node:?}: no matching NodeSelectorTerms"
            )));
        }
        if !storage::is_bound(&claim) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Assigns a pod to a node.
pub(super) async fn bind(cluster: &Cluster, pod: &Pod, node: &str) -> Result<()> {
    let (name, namespace) = (pod.name_any(), pod.namespace().unwrap_or_default());
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            uid: pod.uid(),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };
    let failed = |source: kube::Error| Error::Request {
        action: "bind",
        kind: "Pod".to_owned(),
        name: format!("{namespace}/{name}"),
        source: Box::new(source),
    };
    let body = serde_json::to_vec(&binding).map_err(|error| failed(kube::Error::SerdeError(error)))?;
    let request = kube::core::Request::new(Pod::url_path(&(), Some(&namespace)))
        .create_subresource("binding", &name, &PostParams::default(), body)
        .map_err(|error| failed(kube::Error::BuildRequest(error)))?;
    cluster.client().request_text(request).await.map_err(failed)?;
    Ok(())
}

/// What a pod's status says of the node on which others make room for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Nomination {
    /// It stays as it is.
    Keep,
    /// No room is kept for the pod any more.
    Clear,
    /// Others make room for the pod on this node.
    Set(String),
}

impl Nomination {
    fn of(&self, pod: &Pod) -> Option<String> {
        match self {
            Self::Keep => nominated_node(pod).map(str::to_owned),
            Self::Clear => None,
            Self::Set(node) => Some(node.clone()),
        }
    }
}

/// Takes the node from a pod's status on which others made room for it.
pub(super) async fn withdraw(cluster: &Cluster, pod: &Pod) -> Result<()> {
    if nominated_node(pod).is_some() {
        cluster.edit_status(pod, |pod| pod.status.get_or_insert_default().nominated_node_name = None).await?;
    }
    Ok(())
}

/// Says in a pod's status why it has no node; nothing is written if it says so already.
pub(super) async fn refuse(
    cluster: &Cluster,
    pod: &Pod,
    reason: &str,
    message: &str,
    nomination: &Nomination,
) -> Result<()> {
    let nominated = nomination.of(pod);
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let known = conditions.iter().find(|condition| condition.type_ == "PodScheduled");
    let same = known.is_some_and(|known| {
        known.status == "False"
            && known.reason.as_deref() == Some(reason)
            && known.message.as_deref() == Some(message)
    });
    if same && nominated.as_deref() == nominated_node(pod) {
        return Ok(());
    }
    let since = known
        .filter(|known| known.status == "False")
        .and_then(|known| known.last_transition_time.clone())
        .unwrap_or_else(|| Time(jiff::Timestamp::now()));
    let condition = PodCondition {
        type_: "PodScheduled".to_owned(),
        status: "False".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        observed_generation: pod.metadata.generation,
        last_transition_time: Some(since),
        last_probe_time: None,
    };
    cluster
        .update_status(pod, |pod| {
            let status = pod.status.get_or_insert_default();
            status.nominated_node_name = nominated;
            let conditions = status.conditions.get_or_insert_default();
            conditions.retain(|known| known.type_ != "PodScheduled");
            conditions.push(condition);
        })
        .await?;
    Ok(())
}
