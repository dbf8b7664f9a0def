//! VolumeSnapshots: carries out what was decided about them.

pub(super) mod plan;

use std::sync::Arc;

use berth_kube::{Cache, Key, Next};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource as _, ResourceExt as _};

use self::plan::{Group, Seen, Step};
use super::{Controller, claim_of, creation, error_now, group_of, status};
use crate::failure::Failure;
use crate::snapshots::{
    VolumeGroupSnapshot, VolumeSnapshot, VolumeSnapshotContent, VolumeSnapshotStatus, names,
};
use berth_kube::finalizers;

impl Controller {
    pub(super) async fn sync_snapshot(&self, key: &Key) -> Result<Next, Failure> {
        let Some(snapshot) = self.snapshots.get(key) else { return Ok(Next::Done) };
        let content = self.content_of(&snapshot).await?;
        let group = group_of(&snapshot);
        let handle = content
            .as_ref()
            .and_then(|content| content.status.as_ref()?.volume_group_snapshot_handle.clone());
        let taken_with = handle.map(|handle| self.groups.get().map(|groups| groups.by_handle.get(&handle)));
        let steps = plan::plan(&Seen {
            snapshot: &snapshot,
            content: content.as_deref(),
            group: match &group {
                None => Group::None,
                Some(group) => self.group_state(group),
            },
            content_group: match &taken_with {
                None => Group::None,
                Some(None) => Group::Unknown,
                Some(Some(contents)) => match contents.first() {
                    None => Group::Gone,
                    Some(content) => Group::Live(
                        content.spec.volume_group_snapshot_ref.name.as_deref().unwrap_or_default(),
                    ),
                },
            },
            restoring: !self.restoring.get(key).is_empty(),
        });
        let mut current = snapshot;
        for step in steps {
            match self.carry_out(&current, content.as_ref(), step).await? {
                Some(next) => current = next,
                None => return Ok(Next::Done),
            }
        }
        Ok(Next::Done)
    }

    /// The content of a snapshot, as far as it is known here; whether a snapshot that goes leaves one behind is asked.
    async fn content_of(
        &self,
        snapshot: &VolumeSnapshot,
    ) -> Result<Option<Arc<VolumeSnapshotContent>>, Failure> {
        let Some(name) = plan::content_name(snapshot) else { return Ok(None) };
        match self.contents.named(&name) {
            None if snapshot.metadata.deletion_timestamp.is_some() => {
                Ok(self.cluster.fetch(&Key::cluster(name)).await?)
            }
            known => Ok(known),
        }
    }

    /// Whether a snapshot's group exists.
    fn group_state<'a>(&self, group: &'a Key) -> Group<'a> {
        match self.groups.get() {
            None => Group::Unknown,
            Some(groups) => match groups.cache.get(group) {
                None => Group::Gone,
                Some(there) if there.metadata.deletion_timestamp.is_some() => Group::Leaving,
                Some(_) => Group::Live(&group.name),
            },
        }
    }

    /// One step; the snapshot as it is afterwards, or `None` if nothing more can be done now.
    async fn carry_out(
        &self,
        snapshot: &Arc<VolumeSnapshot>,
        content: Option<&Arc<VolumeSnapshotContent>>,
        step: Step,
    ) -> Result<Option<Arc<VolumeSnapshot>>, Failure> {
        match (step, content) {
            (Step::Protect(added), _) => {
                let protect = |snapshot: &mut VolumeSnapshot| {
                    if snapshot.metadata.deletion_timestamp.is_none() {
                        for finalizer in &added {
                            finalizers::add(snapshot, finalizer);
                        }
                    }
                };
                let protected = self.cluster.edit(snapshot.as_ref(), protect).await?;
                // One that is going already, by a word that has not come here yet, gets no content any more.
                Ok(protected.filter(|snapshot| snapshot.metadata.deletion_timestamp.is_none()))
            }
            (Step::Release(removed), _) => {
                let release = |snapshot: &mut VolumeSnapshot| {
                    for finalizer in &removed {
                        finalizers::remove(snapshot, finalizer);
                    }
                };
                Ok(self.cluster.edit(snapshot.as_ref(), release).await?)
            }
            (Step::Create, _) => self.create(snapshot).await,
            (Step::Status(after), _) => self.tell(snapshot, after).await,
            (Step::Own, _) => self.own(snapshot).await,
            (Step::Fail(reason, message), _) => {
                self.fail(snapshot, reason, &message).await?;
                Ok(None)
            }
            (Step::Pending(message), _) => {
                self.recorder.warning(snapshot.as_ref(), "SnapshotDeletePending", message);
                Ok(None)
            }
            (Step::Bind, Some(content)) => self.bind(snapshot, content).await,
            (Step::MarkContent, Some(content)) => {
                self.cluster
                    .edit(content.as_ref(), |content| {
                        content.annotations_mut().insert(names::BEING_DELETED.to_owned(), "yes".to_owned());
                        // One that was bound only now may not be kept yet, and would go without its snapshot.
                        let taken =
                            content.status.as_ref().is_some_and(|status| status.snapshot_handle.is_some());
                        if taken && content.metadata.deletion_timestamp.is_none() {
                            finalizers::add(content, names::CONTENT);
                        }
                    })
                    .await?;
                Ok(Some(snapshot.clone()))
            }
            (Step::DeleteContent, Some(content)) => {
                if let Err(error) = self.cluster.delete(content.as_ref()).await {
                    let text = format!("Failed to delete snapshot content API object: {}", error.chain());
                    self.recorder.warning(snapshot.as_ref(), "SnapshotContentObjectDeleteError", text);
                    return Err(error.into());
                }
                Ok(Some(snapshot.clone()))
            }
            (Step::Bind | Step::MarkContent | Step::DeleteContent, None) => Ok(None),
        }
    }

    /// Makes the content of a snapshot of a claim: class, then the claim's finalizer, then the content.
    async fn create(&self, snapshot: &Arc<VolumeSnapshot>) -> Result<Option<Arc<VolumeSnapshot>>, Failure> {
        let claim = claim_of(snapshot).and_then(|claim| self.claims.get(&claim));
        let volume = claim.as_ref().and_then(|claim| claim.spec.as_ref()?.volume_name.clone());
        let volume = volume.and_then(|name| self.volumes.named(&name));
        let nodes = self.nodes.as_ref().map(Cache::list);
        let content = creation::content(&creation::Seen {
            snapshot,
            claim: claim.as_deref(),
            volume: volume.as_deref(),
            classes: &self.classes.list(),
            keep_mode: self.options.prevent_volume_mode_conversion,
            nodes: nodes.as_deref(),
        });
        let content = match content {
            Ok(content) => content,
            Err(refusal) => {
                self.fail(snapshot, refusal.reason, &refusal.message).await?;
                return Ok(None);
            }
        };
        let class = content.spec.volume_snapshot_class_name.clone();
        let chosen = self.cluster.edit(snapshot.as_ref(), |snapshot| {
            let own = &mut snapshot.spec.volume_snapshot_class_name;
            if own.is_none() {
                own.clone_from(&class);
            }
        });
        let Some(snapshot) = chosen.await? else { return Ok(None) };
        if let Some(claim) = claim {
            self.cluster.update(claim.as_ref(), |claim| finalizers::add(claim, names::CLAIM)).await?;
        }
        match self.cluster.create(&content).await {
            Ok(_) => {}
            // Whose it is shows at the next look, which its own arrival in the cache brings.
            Err(error) if error.is_already_exists() => {
                self.cluster.fetch::<VolumeSnapshotContent>(&Key::of(&content)).await?;
                return Ok(None);
            }
            Err(error) => {
                let key = Key::of(snapshot.as_ref());
                let text = format!(
                    "Error creating volume snapshot content object for snapshot {key}: {}.",
                    error.chain()
                );
                self.recorder.warning(snapshot.as_ref(), "CreateSnapshotContentFailed", text);
                return Err(error.into());
            }
        }
        let key = Key::of(snapshot.as_ref());
        let text = format!("Waiting for a snapshot {key} to be created by the CSI driver.");
        self.recorder.normal(snapshot.as_ref(), "CreatingSnapshot", text);
        Ok(Some(snapshot))
    }

    /// Binds an existing content to its snapshot.
    async fn bind(
        &self,
        snapshot: &Arc<VolumeSnapshot>,
        content: &Arc<VolumeSnapshotContent>,
    ) -> Result<Option<Arc<VolumeSnapshot>>, Failure> {
        let bound = self.cluster.update(content.as_ref(), |content| {
            content.spec.volume_snapshot_ref.uid = snapshot.uid();
            let class = &mut content.spec.volume_snapshot_class_name;
            if class.is_none() {
                class.clone_from(&snapshot.spec.volume_snapshot_class_name);
            }
        });
        match bound.await {
            Ok(_) => Ok(Some(snapshot.clone())),
            Err(error) if error.is_conflict() => Err(error.into()),
            Err(error) => {
                let text = format!("Snapshot failed to bind VolumeSnapshotContent, {}", error.chain());
                self.fail(snapshot, "SnapshotBindFailed", &text).await?;
                Err(error.into())
            }
        }
    }

    /// Writes a new status, and tells what it means.
    async fn tell(
        &self,
        snapshot: &Arc<VolumeSnapshot>,
        after: VolumeSnapshotStatus,
    ) -> Result<Option<Arc<VolumeSnapshot>>, Failure> {
        let key = Key::of(snapshot.as_ref());
        let before = snapshot.status.as_ref();
        let taken = !status::is_taken(before) && status::is_taken(Some(&after));
        let ready = !status::is_ready(snapshot) && after.ready_to_use == Some(true);
        let written =
            self.cluster.update_status(snapshot.as_ref(), |snapshot| snapshot.status = Some(after)).await?;
        if taken {
            let text = format!("Snapshot {key} was successfully created by the CSI driver.");
            self.recorder.normal(snapshot.as_ref(), "SnapshotCreated", text);
        }
        if ready {
            let text = format!("Snapshot {key} is ready to use.");
            self.recorder.normal(snapshot.as_ref(), "SnapshotReady", text);
        }
        Ok(Some(written))
    }

    /// Makes a snapshot go with its group.
    async fn own(&self, snapshot: &Arc<VolumeSnapshot>) -> Result<Option<Arc<VolumeSnapshot>>, Failure> {
        let group = group_of(snapshot).and_then(|key| self.groups.get()?.cache.get(&key));
        let Some(group) = group else { return Ok(None) };
        let owned = self.cluster.edit(snapshot.as_ref(), |snapshot| {
            snapshot.owner_references_mut().push(owner(&group));
        });
        Ok(owned.await?)
    }

    /// Tells of what cannot go on: in the status, and once by an event. It is looked at again when something changes.
    async fn fail(&self, snapshot: &Arc<VolumeSnapshot>, reason: &str, message: &str) -> Result<(), Failure> {
        let known = snapshot.status.as_ref().and_then(|status| status.error.as_ref()?.message.as_deref());
        if known == Some(message) {
            return Ok(());
        }
        self.recorder.warning(snapshot.as_ref(), reason, message);
        self.cluster
            .edit_status(snapshot.as_ref(), |snapshot| {
                let status = snapshot.status.get_or_insert_default();
                status.error = Some(error_now(message));
                status.ready_to_use = Some(false);
            })
            .await?;
        Ok(())
    }
}

/// A member's owner.
pub(super) fn owner(group: &VolumeGroupSnapshot) -> OwnerReference {
    OwnerReference {
        api_version: VolumeGroupSnapshot::api_version(&()).into_owned(),
        kind: VolumeGroupSnapshot::kind(&()).into_owned(),
        name: group.name_any(),
        uid: group.uid().unwrap_or_default(),
        ..OwnerReference::default()
    }
}
