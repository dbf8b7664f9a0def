//! What claims are made from: found, kept while a claim needs it, and let go afterwards.
//!
//! A source carries a finalizer of ours from before the call that copies it. A snapshot loses it as soon as no claim needs
//! it any more; a claim, whose finalizer hinders nobody before it is deleted, when that is so and it is being deleted.
//! Which claims need a source stands in an index, so a process that died in between finds out again from the objects.

use std::sync::Arc;
use std::time::Duration;

use berth_core::names::{CLONING_PROTECTION, SELECTED_NODE, SNAPSHOT_SOURCE_PROTECTION};
use berth_csi::v1::{VolumeContentSource, volume_content_source};
use berth_kube::{Key, Loop, Next, finalizers};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::ListParams;
use kube::{Api, CustomResource, ResourceExt as _};
use serde::{Deserialize, Serialize};

use super::per_node::OwnNode;
use super::request::{self, requested};
use super::{Provisioner, Unprepared, is_begun};
use crate::driver::{ControllerCapability, Identity};
use crate::failure::{Failure, settled};
use crate::size;
use crate::snapshots::names::{ALLOW_MODE_CHANGE, GROUP as SNAPSHOT_GROUP, MANAGED_BY};
use crate::snapshots::{VolumeSnapshot, VolumeSnapshotContent, served};

/// How often a cluster without snapshots is asked for them again.
const CRD_RETRY: Duration = Duration::from_secs(30);
/// Where a claim's data comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Source {
    /// The VolumeSnapshot that it is restored from.
    Snapshot(Key),
    /// The claim that it is cloned from.
    Claim(Key),
    /// Something that an external populator knows.
    Foreign,
}

impl Source {
    /// The source that a claim may be made from; `elsewhere` says whether it may be in another namespace.
    pub(super) fn of(claim: &PersistentVolumeClaim, elsewhere: bool) -> Result<Option<Self>, Failure> {
        let Some(Reference { key, .. }) = Reference::of(claim) else { return Ok(None) };
        if !elsewhere && Some(&key.namespace) != claim.namespace().as_ref() {
            return Err(Failure::refused(
                "dataSourceRef names another namespace, which needs the feature gate CrossNamespaceVolumeDataSource",
            ));
        }
        if key.name.is_empty() {
            return Err(Failure::refused("the claim's data source has no name"));
        }
        Ok(Self::named(claim))
    }

    /// The source that a claim names, be it one that we would refuse.
    pub(super) fn named(claim: &PersistentVolumeClaim) -> Option<Self> {
        let Reference { group, kind, key } = Reference::of(claim)?;
        Some(match (group, kind) {
            (SNAPSHOT_GROUP, "VolumeSnapshot") => Self::Snapshot(key),
            ("", "PersistentVolumeClaim") => Self::Claim(key),
            _ => Self::Foreign,
        })
    }

    /// The source that a claim still needs: a volume may be, or may be about to be, copied from it for the claim.
    pub(super) fn needed(by: &PersistentVolumeClaim) -> Option<Self> {
        let phase = by.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default();
        let waits = matches!(phase, "" | "Pending") && by.metadata.deletion_timestamp.is_none();
        if waits || is_begun(by) { Self::named(by) } else { None }
    }
}

/// What stands in a claim's `dataSourceRef`, or else in its `dataSource`.
struct Reference<'a> {
    group: &'a str,
    kind: &'a str,
    key: Key,
}

impl<'a> Reference<'a> {
    fn of(claim: &'a PersistentVolumeClaim) -> Option<Self> {
        let spec = claim.spec.as_ref()?;
        let (group, kind, name, namespace) = match (&spec.data_source_ref, &spec.data_source) {
            (Some(from), _) => (&from.api_group, &from.kind, &from.name, from.namespace.as_ref()),
            (None, Some(from)) => (&from.api_group, &from.kind, &from.name, None),
            (None, None) => return None,
        };
        let namespace = namespace.filter(|namespace| !namespace.is_empty()).cloned();
        let key = Key::new(namespace.or_else(|| claim.namespace()).unwrap_or_default(), name.clone());
        Some(Self { group: group.as_deref().unwrap_or_default(), kind, key })
    }
}

impl Provisioner {
    /// The driver's id of a claim's source, which is protected from now on; if every node has its own provisioner, the node
    /// that has the source, should that be another.
    pub(super) async fn resolve_source(
        &self,
        claim: &PersistentVolumeClaim,
        source: Option<Source>,
    ) -> Result<Option<VolumeContentSource>, Unprepared> {
        // Whoever lets a source go either knows that this claim needs it, or is done before it is read here.
        let _protecting = self.protecting.read().await;
        if source.is_some() {
            self.check_granted(claim).await?;
        }
        let kind = match source {
            None | Some(Source::Foreign) => return Ok(None),
            Some(Source::Snapshot(key)) => {
                let snapshot_id = self.resolve_snapshot(claim, &key).await?;
                volume_content_source::Type::Snapshot(volume_content_source::SnapshotSource { snapshot_id })
            }
            Some(Source::Claim(key)) => {
                let volume_id = self.resolve_clone(claim, &key).await?;
                volume_content_source::Type::Volume(volume_content_source::VolumeSource { volume_id })
            }
        };
        Ok(Some(VolumeContentSource { r#type: Some(kind) }))
    }

    async fn resolve_snapshot(&self, claim: &PersistentVolumeClaim, key: &Key) -> Result<String, Unprepared> {
        let gone = || {
            Failure::refused(format!(
                "error getting snapshot {} from api server: it does not exist",
                key.name
            ))
        };
        let snapshot = self.cluster.fetch::<VolumeSnapshot>(key).await?.ok_or_else(gone)?;
        let bound =
            snapshot.status.as_ref().and_then(|status| status.bound_volume_snapshot_content_name.clone());
        let content = match bound.filter(|name| !name.is_empty()) {
            Some(name) => self.cluster.fetch::<VolumeSnapshotContent>(&Key::cluster(name)).await?,
            None => None,
        };
        let handle = restorable(
            claim,
            &snapshot,
            content.as_deref(),
            &self.name,
            self.options.prevent_volume_mode_conversion,
        )?;
        self.check_here(claim, content.as_deref().and_then(node_of_content))?;
        let protected = self.cluster.update(snapshot.as_ref(), |snapshot| {
            finalizers::add(snapshot, SNAPSHOT_SOURCE_PROTECTION);
        });
        match protected.await {
            // Older installations do not allow it; the restore works without.
            Err(error) if error.status() == Some(403) => {}
            result => {
                result?;
            }
        }
        Ok(handle)
    }

    async fn resolve_clone(&self, claim: &PersistentVolumeClaim, key: &Key) -> Result<String, Unprepared> {
        let gone = || {
            Failure::refused(format!(
                "error getting PVC {key} (namespace and name) from api server: it does not exist"
            ))
        };
        let source = self.claims.get(key).ok_or_else(gone)?;
        let name = source.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
        let volume = self.volumes.named(&name);
        let handle = cloneable(claim, &source, volume.as_deref(), &self.name)?;
        self.check_here(claim, self.node_of_volume(&source, volume.as_deref()))?;
        self.cluster.update(source.as_ref(), |source| finalizers::add(source, CLONING_PROTECTION)).await?;
        Ok(handle)
    }

    /// Whether this provisioner's node has the source of a claim. A call that was begun here is finished here.
    fn check_here(&self, claim: &PersistentVolumeClaim, node: Option<&str>) -> Result<(), Unprepared> {
        let Some(own_node) = &self.own_node else { return Ok(()) };
        match node.filter(|node| *node != own_node.name()) {
            Some(node) if !finalizers::has(claim, &self.claim_finalizer) => {
                Err(Unprepared::Elsewhere(node.to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// The node whose provisioner made the volume of a claim, if this one does not reach it.
    fn node_of_volume<'a>(
        &self,
        source: &'a PersistentVolumeClaim,
        volume: Option<&PersistentVolume>,
    ) -> Option<&'a str> {
        let reaches = |own_node: &OwnNode| volume.is_none_or(|volume| own_node.reaches(volume));
        let away = !self.own_node.as_ref().is_none_or(reaches);
        source.annotations().get(SELECTED_NODE).map(String::as_str).filter(|node| away && !node.is_empty())
    }

    /// The node that has a claim's source, as far as is known by now: `None` if any may have it. Of a source that the claim may
    /// not be made from nothing is said.
    pub(super) async fn node_of_source(
        &self,
        claim: &PersistentVolumeClaim,
        own_node: &OwnNode,
    ) -> Result<Option<String>, Failure> {
        let source = Source::of(claim, self.options.cross_namespace_sources)?;
        self.check_granted(claim).await?;
        match source {
            None | Some(Source::Foreign) => Ok(None),
            Some(Source::Claim(key)) => {
                let Some(source) = self.claims.get(&key) else { return Ok(None) };
                let name = source.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
                let Some(volume) = self.volumes.named(&name) else { return Ok(None) };
                let elsewhere = self.node_of_volume(&source, Some(volume.as_ref())).map(str::to_owned);
                Ok(elsewhere.or_else(|| own_node.reaches(&volume).then(|| own_node.name().to_owned())))
            }
            Some(Source::Snapshot(key)) => {
                let snapshot = self.cluster.fetch::<VolumeSnapshot>(&key).await?;
                let bound = snapshot.and_then(|snapshot| {
                    snapshot.status.as_ref()?.bound_volume_snapshot_content_name.clone()
                });
                let Some(bound) = bound.filter(|name| !name.is_empty()) else { return Ok(None) };
                let content = self.cluster.fetch::<VolumeSnapshotContent>(&Key::cluster(bound)).await?;
                Ok(content.as_deref().and_then(node_of_content).map(str::to_owned))
            }
        }
    }

    /// Refuses a claim whose source is in another namespace that does not grant it.
    async fn check_granted(&self, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
        let own = claim.namespace().unwrap_or_default();
        let Some(wanted) = Reference::of(claim).filter(|wanted| wanted.key.namespace != own) else {
            return Ok(());
        };
        let namespace = wanted.key.namespace.as_str();
        let grants: Api<ReferenceGrant> = Api::namespaced(self.cluster.client().clone(), namespace);
        let grants =
            grants.list(&ListParams::default()).await.map_err(|source| berth_kube::Error::Request {
                action: "list",
                kind: "ReferenceGrant".to_owned(),
                name: namespace.to_owned(),
                source: Box::new(source),
            })?;
        if grants.iter().any(|grant| grant.spec.allows(&own, &wanted)) {
            return Ok(());
        }
        Err(Failure::refused(format!(
            "accessing {namespace}/{} of {} dataSource from {own}/{} isn't allowed; it needs a ReferenceGrant in \
             namespace {namespace}",
            wanted.key.name,
            wanted.kind,
            claim.name_any()
        )))
    }
}

/// Letting a source go.
impl Provisioner {
    /// A claim may not need its source any more.
    pub(super) fn release_source(&self, claim: &PersistentVolumeClaim) {
        if let Some(source) = Source::named(claim) {
            self.source_queue.add(source);
        }
    }

    pub(super) async fn sync_source(self: Arc<Self>, source: Source) -> Result<Next, Failure> {
        let _alone = self.protecting.write().await;
        for claim in self.claims_by_source.get(&source) {
            if self.needs_source(&claim).await {
                return Ok(Next::Done);
            }
        }
        let done = match source {
            Source::Claim(key) => self.let_claim_go(&key).await,
            Source::Snapshot(key) => self.let_snapshot_go(&key).await,
            Source::Foreign => Ok(()),
        };
        settled(done.map(|()| Next::Done))
    }

    /// Whether a claim that waits has no volume yet, or may have another in the making. One that is not granted the
    /// source must not keep other people's objects.
    pub(super) async fn needs_source(&self, claim: &PersistentVolumeClaim) -> bool {
        let name = request::volume_name(claim, &self.options);
        let waits = is_begun(claim) || !name.is_ok_and(|name| self.volumes.named(&name).is_some());
        waits
            && Source::of(claim, self.options.cross_namespace_sources).is_ok()
            && !matches!(self.check_granted(claim).await, Err(Failure::Refused(_)))
    }

    async fn let_claim_go(&self, key: &Key) -> Result<(), Failure> {
        let Some(source) = self.claims.get(key) else { return Ok(()) };
        if is_deleted_clone_source(&source) {
            self.cluster
                .edit(source.as_ref(), |source| finalizers::remove(source, CLONING_PROTECTION))
                .await?;
        }
        Ok(())
    }

    async fn let_snapshot_go(&self, key: &Key) -> Result<(), Failure> {
        let Some(snapshot) = self.cluster.fetch::<VolumeSnapshot>(key).await? else { return Ok(()) };
        if !finalizers::has(snapshot.as_ref(), SNAPSHOT_SOURCE_PROTECTION) {
            return Ok(());
        }
        let freed = self.cluster.edit(snapshot.as_ref(), |snapshot| {
            finalizers::remove(snapshot, SNAPSHOT_SOURCE_PROTECTION);
        });
        match freed.await {
            Err(error) if error.status() == Some(403) => {
                tracing::warn!(snapshot = %key, error = error.chain(), "not allowed to let the snapshot go");
                Ok(())
            }
            freed => Ok(freed.map(drop)?),
        }
    }
}

fn is_deleted_clone_source(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some() && finalizers::has(claim, CLONING_PROTECTION)
}

/// The changes that lead to another reconciliation.
impl Provisioner {
    /// Sources that a claim does not need any more, and claims that are deleted while they are one.
    pub(super) fn source_loop(&self) -> Loop<Source> {
        Loop::new(&self.cluster, &self.source_queue)
            .subscribe(&self.claims, |before, after| {
                let needed = before.and_then(|before| Source::needed(before));
                let needs = after.and_then(|after| Source::needed(after));
                let released = needed.filter(|source| needs.as_ref() != Some(source));
                let mut sources: Vec<Source> = released.into_iter().collect();
                sources.extend(
                    after
                        .filter(|after| is_deleted_clone_source(after))
                        .map(|after| Source::Claim(Key::of(after.as_ref()))),
                );
                sources
            })
            .reads(&self.volumes)
    }

    /// Follows snapshots, once there are any.
    pub(super) async fn follow_snapshots(&self, identity: &Identity) {
        if !identity.can(ControllerCapability::CreateDeleteSnapshot)
            || !served::wait(&self.cluster, served::SNAPSHOTS, "provisioner", CRD_RETRY).await
        {
            return;
        }
        let all: Api<VolumeSnapshot> = Api::all(self.cluster.client().clone());
        let one = all.list_metadata(&ListParams::default().limit(1)).await;
        if matches!(one, Err(kube::Error::Api(status)) if status.code == 403) {
            tracing::warn!(
                "not allowed to list VolumeSnapshots: a protection that a crash leaves on one stays there"
            );
            return;
        }
        let (sources, waiting) = (self.source_queue.clone(), self.claim_queue.clone());
        let by_source = self.claims_by_source.clone();
        self.cluster.cache::<VolumeSnapshot>().subscribe(move |before, after| {
            let Some(snapshot) = after.or(before) else { return };
            let source = Source::Snapshot(Key::of(snapshot.as_ref()));
            let said = |snapshot: &Arc<VolumeSnapshot>| {
                (snapshot.status.clone(), snapshot.metadata.deletion_timestamp.clone())
            };
            if before.map(said) != after.map(said) {
                for claim in by_source.get(&source) {
                    waiting.add(Key::of(claim.as_ref()));
                }
            }
            if after.is_some_and(|after| finalizers::has(after.as_ref(), SNAPSHOT_SOURCE_PROTECTION)) {
                sources.add(source);
            }
        });
    }
}

/// The node whose driver has a snapshot, where every node has a snapshotter of its own.
fn node_of_content(content: &VolumeSnapshotContent) -> Option<&str> {
    content.labels().get(MANAGED_BY).map(String::as_str).filter(|node| !node.is_empty())
}

/// The handle of a snapshot that a claim may be restored from.
fn restorable(
    claim: &PersistentVolumeClaim,
    snapshot: &VolumeSnapshot,
    content: Option<&VolumeSnapshotContent>,
    driver: &str,
    prevent_mode_change: bool,
) -> Result<String, Failure> {
    let name = snapshot.name_any();
    let no = |why: &str| {
        Err(Failure::refused(format!(
            "error getting handle for DataSource Type VolumeSnapshot by Name {name}: {why}"
        )))
    };
    if snapshot.metadata.deletion_timestamp.is_some()
        && !finalizers::has(snapshot, SNAPSHOT_SOURCE_PROTECTION)
    {
        return no("snapshot is currently being deleted");
    }
    let status = snapshot.status.clone().unwrap_or_default();
    if status.bound_volume_snapshot_content_name.as_deref().unwrap_or_default().is_empty() {
        return no("snapshot is not bound; wait until it is ready");
    }
    let Some(content) = content else { return no("its VolumeSnapshotContent does not exist") };
    let back = &content.spec.volume_snapshot_ref;
    if back.uid != snapshot.uid()
        || back.namespace != snapshot.namespace()
        || back.name.as_ref() != Some(&name)
    {
        return no("its VolumeSnapshotContent is bound to a different snapshot");
    }
    if content.spec.driver != driver {
        return no(&format!(
            "it was taken by driver {:?}, and the claim's class uses {driver:?}",
            content.spec.driver
        ));
    }
    if status.ready_to_use != Some(true) {
        return no("snapshot is not Ready");
    }
    let handle = content.status.clone().unwrap_or_default().snapshot_handle.unwrap_or_default();
    if handle.is_empty() {
        return no("its VolumeSnapshotContent has no snapshot handle");
    }
    if let Some(least) = status.restore_size.as_ref().and_then(size::bytes)
        && requested(claim)? < least
    {
        return no(&format!("requested volume size is less than the size {least} for the source snapshot"));
    }
    let allowed = content.annotations().get(ALLOW_MODE_CHANGE).is_some_and(|value| value == "true");
    if let Some(mode) = &content.spec.source_volume_mode
        && prevent_mode_change
        && !allowed
        && *mode != mode_of(claim)
    {
        return no(&format!(
            "requested volume {} modifies the mode of the source volume but does not have permission to do so. {ALLOW_MODE_CHANGE} annotation is not present on snapshotcontent {}",
            claim.name_any(),
            content.name_any()
        ));
    }
    Ok(handle)
}

/// The handle of a volume that a claim may be cloned from.
fn cloneable(
    claim: &PersistentVolumeClaim,
    source: &PersistentVolumeClaim,
    volume: Option<&PersistentVolume>,
    driver: &str,
) -> Result<String, Failure> {
    let name = source.name_any();
    let no = |why: &str| {
        Err(Failure::refused(format!(
            "error getting handle for DataSource Type PersistentVolumeClaim by Name {name}: {why}"
        )))
    };
    let spec = source.spec.clone().unwrap_or_default();
    let phase = source.status.as_ref().and_then(|status| status.phase.as_deref());
    if phase != Some("Bound") {
        return no("the claim to clone is not in Bound phase");
    }
    // A call that was made before must be made again to learn what became of it; until then the source stays.
    let begun = is_begun(claim) && finalizers::has(source, CLONING_PROTECTION);
    if source.metadata.deletion_timestamp.is_some() && !begun {
        return no("the claim to clone is being deleted");
    }
    if spec.storage_class_name.as_deref().unwrap_or_default().is_empty() {
        return no("the claim to clone has no StorageClass");
    }
    let Some(volume) = volume else { return no("the volume of the claim to clone does not exist") };
    let volume_spec = volume.spec.clone().unwrap_or_default();
    let Some(csi) = volume_spec.csi else { return no("its volume is no CSI volume") };
    if csi.driver != driver {
        return no(&format!(
            "its volume belongs to driver {:?}, and the claim's class uses {driver:?}",
            csi.driver
        ));
    }
    if volume.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound") {
        return no("its volume is not Bound");
    }
    let back = volume_spec.claim_ref.unwrap_or_default();
    if back.uid != source.uid() || back.namespace != source.namespace() || back.name.as_ref() != Some(&name) {
        return no("its volume is bound to a different claim");
    }
    let least =
        volume_spec.capacity.as_ref().and_then(|capacity| size::bytes(capacity.get("storage")?)).unwrap_or(0);
    if requested(claim)? < least {
        return no(&format!("new claim requests less than the size {least} of the volume to clone"));
    }
    if mode_of(claim) != mode_of(source) {
        return no("the claim to clone has another volume mode (Filesystem or Block)");
    }
    Ok(csi.volume_handle)
}

fn mode_of(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()).unwrap_or("Filesystem")
}

/// Whom a namespace allows to refer to which of its objects; of it, what is read here.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[kube(
    group = "gateway.networking.k8s.io",
    version = "v1beta1",
    kind = "ReferenceGrant",
    namespaced,
    schema = "disabled"
)]
struct ReferenceGrantSpec {
    #[serde(default)]
    from: Vec<From>,
    #[serde(default)]
    to: Vec<To>,
}

/// A namespace and kind that may refer to the grant's objects.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
struct From {
    #[serde(default)]
    group: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    namespace: String,
}

/// To what; to all of a kind if there is no name.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
struct To {
    #[serde(default)]
    group: String,
    #[serde(default)]
    kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl ReferenceGrantSpec {
    fn allows(&self, namespace: &str, wanted: &Reference<'_>) -> bool {
        let from = self.from.iter().any(|from| {
            from.group.is_empty() && from.kind == "PersistentVolumeClaim" && from.namespace == namespace
        });
        let to = |to: &To| {
            let name = to.name.as_deref().filter(|name| !name.is_empty());
            to.group == wanted.group
                && to.kind == wanted.kind
                && name.is_none_or(|name| name == wanted.key.name)
        };
        from && self.to.iter().any(to)
    }
}

#[cfg(test)]
mod tests;
