//! What claims are made from: found, kept while a claim needs it, and let go afterwards.
//!
//! A source carries a finalizer of ours from before the call that copies it. A snapshot loses it as soon as no claim needs
//! it any more; a claim, whose finalizer hinders nobody before it is deleted, when that is so and it is being deleted.
//! Which claims need a source stands in an index, so a process that died in between finds out again from the objects.

use std::sync::Arc;
use std::time::Duration;

use berth_csi::v1::{VolumeContentSource, volume_content_source};
use berth_kube::{Key, Next};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::Api;
use kube::api::ListParams;

use super::source::{self, Source};
use super::{Provisioner, claim, matters, request, settled};
use crate::driver::{ControllerCapability, Identity};
use crate::failure::Failure;
use crate::names::{CLONING_PROTECTION, SNAPSHOT_SOURCE_PROTECTION};
use crate::snapshots::{VolumeSnapshot, VolumeSnapshotContent, served};
use crate::{edit, finalizers};

/// How often a cluster without snapshots is looked at again.
const KINDS: Duration = Duration::from_secs(30);

/// Finding a source.
impl Provisioner {
    /// The driver's id of a claim's source, which is protected from now on.
    pub(super) async fn look_up_source(
        &self,
        claim: &PersistentVolumeClaim,
        source: Option<Source>,
    ) -> Result<Option<VolumeContentSource>, Failure> {
        // Whoever lets a source go either knows that this claim needs it, or is done before it is read here.
        let _protecting = self.protecting.read().await;
        if source.is_some() {
            self.check_granted(claim).await?;
        }
        let kind = match source {
            None | Some(Source::Foreign) => return Ok(None),
            Some(Source::Snapshot(key)) => {
                let snapshot_id = self.look_up_snapshot(claim, &key).await?;
                volume_content_source::Type::Snapshot(volume_content_source::SnapshotSource { snapshot_id })
            }
            Some(Source::Claim(key)) => {
                let volume_id = self.look_up_clone(claim, &key).await?;
                volume_content_source::Type::Volume(volume_content_source::VolumeSource { volume_id })
            }
        };
        Ok(Some(VolumeContentSource { r#type: Some(kind) }))
    }

    async fn look_up_snapshot(&self, claim: &PersistentVolumeClaim, key: &Key) -> Result<String, Failure> {
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
        let handle = source::restorable(
            claim,
            &snapshot,
            content.as_deref(),
            &self.name,
            self.options.prevent_volume_mode_conversion,
        )?;
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

    async fn look_up_clone(&self, claim: &PersistentVolumeClaim, key: &Key) -> Result<String, Failure> {
        let gone = || {
            Failure::refused(format!(
                "error getting PVC {key} (namespace and name) from api server: it does not exist"
            ))
        };
        let source = self.claims.get(key).ok_or_else(gone)?;
        let name = source.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
        let volume = self.volumes.named(&name);
        let handle = source::cloneable(claim, &source, volume.as_deref(), &self.name)?;
        self.cluster.update(source.as_ref(), |source| finalizers::add(source, CLONING_PROTECTION)).await?;
        Ok(handle)
    }
}

/// Letting a source go.
impl Provisioner {
    /// A claim may not need its source any more.
    pub(super) fn let_go_of_source(&self, claim: &PersistentVolumeClaim) {
        if let Some(source) = Source::named(claim) {
            self.source_queue.add(source);
        }
    }

    pub(super) async fn look_at_source(self: Arc<Self>, source: Source) -> Result<Next, Failure> {
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
        let waits = claim::is_begun(claim) || !name.is_ok_and(|name| self.volumes.named(&name).is_some());
        waits
            && Source::of(claim, self.options.cross_namespace_sources).is_ok()
            && !matches!(self.check_granted(claim).await, Err(Failure::Refused(_)))
    }

    async fn let_claim_go(&self, key: &Key) -> Result<(), Failure> {
        let Some(source) = self.claims.get(key) else { return Ok(()) };
        if is_deleted_clone_source(&source) {
            edit::object(&self.cluster, &source, |source| finalizers::remove(source, CLONING_PROTECTION))
                .await?;
        }
        Ok(())
    }

    async fn let_snapshot_go(&self, key: &Key) -> Result<(), Failure> {
        let Some(snapshot) = self.cluster.fetch::<VolumeSnapshot>(key).await? else { return Ok(()) };
        if !finalizers::has(snapshot.as_ref(), SNAPSHOT_SOURCE_PROTECTION) {
            return Ok(());
        }
        let freed = edit::object(&self.cluster, &snapshot, |snapshot| {
            finalizers::remove(snapshot, SNAPSHOT_SOURCE_PROTECTION);
        });
        match freed.await {
            Err(Failure::Kube(error)) if error.status() == Some(403) => {
                tracing::warn!(snapshot = %key, error = error.chain(), "not allowed to let the snapshot go");
                Ok(())
            }
            freed => freed.map(drop),
        }
    }
}

fn is_deleted_clone_source(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some() && finalizers::has(claim, CLONING_PROTECTION)
}

/// The changes that lead to another look.
impl Provisioner {
    /// Follows claims, as sources and as what is made from them, and the volumes of sources.
    pub(super) fn follow_sources(&self) {
        let (sources, waiting) = (self.source_queue.clone(), self.claim_queue.clone());
        let by_source = self.claims_by_source.clone();
        self.claims.subscribe(move |before, after| {
            let needed = before.and_then(|before| Source::needed(before));
            if let Some(source) = needed
                && after.and_then(|after| Source::needed(after)).as_ref() != Some(&source)
            {
                sources.add(source);
            }
            let Some(claim) = after.or(before) else { return };
            let source = Source::Claim(Key::of(claim.as_ref()));
            if before.zip(after).is_none_or(|(before, after)| matters(before, after)) {
                for claim in by_source.get(&source) {
                    waiting.add(Key::of(claim.as_ref()));
                }
            }
            if after.is_some_and(|after| is_deleted_clone_source(after)) {
                sources.add(source);
            }
        });
        let (waiting, by_source) = (self.claim_queue.clone(), self.claims_by_source.clone());
        self.volumes.subscribe(move |before, after| {
            let phase = |volume: &Arc<PersistentVolume>| volume.status.as_ref()?.phase.clone();
            let owner = after.and_then(|volume| volume.spec.as_ref()?.claim_ref.as_ref());
            if let Some(owner) = owner
                && before.and_then(phase) != after.and_then(phase)
            {
                let name = |part: &Option<String>| part.clone().unwrap_or_default();
                let source = Source::Claim(Key::new(name(&owner.namespace), name(&owner.name)));
                for claim in by_source.get(&source) {
                    waiting.add(Key::of(claim.as_ref()));
                }
            }
        });
    }

    /// Follows snapshots, once there are any.
    pub(super) async fn follow_snapshots(&self, identity: &Identity) {
        if !identity.can(ControllerCapability::CreateDeleteSnapshot)
            || !served::wait(&self.cluster, served::SNAPSHOTS, "provisioner", KINDS).await
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
