//! VolumeSnapshots: what is observed of them, and the content they get.

pub(super) mod plan;

use berth_core::names::events;
use std::sync::Arc;

use berth_kube::{Cache, finalizers};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolumeClaim};
use kube::ResourceExt as _;

use self::plan::{Group, ObservedSnapshot, Step};
use super::binding::{Bindable, Caches, Content, GroupStep, Words};
use super::{Controller, claim_of, creation, group_of, metrics, status};
use crate::failure::Failure;
use crate::snapshots::{
    SnapshotError, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, VolumeSnapshotStatus, names,
};

impl Bindable for VolumeSnapshot {
    type Status = VolumeSnapshotStatus;
    type Content = VolumeSnapshotContent;
    type Class = VolumeSnapshotClass;
    const WORDS: Words = Words {
        what: "snapshot",
        name: "Snapshot",
        content: "VolumeSnapshotContent",
        creating: events::CREATING_SNAPSHOT,
        not_created: events::CREATE_SNAPSHOT_CONTENT_FAILED,
        created: events::SNAPSHOT_CREATED,
        ready: events::SNAPSHOT_READY,
        not_bound: events::SNAPSHOT_BIND_FAILED,
        not_deleted: events::SNAPSHOT_CONTENT_OBJECT_DELETE_ERROR,
    };
    const OPERATIONS: metrics::Names = metrics::SNAPSHOT;

    fn caches(controller: &Controller) -> Option<Caches<'_, Self>> {
        let Controller { snapshots, contents, classes, .. } = controller;
        Some(Caches { objects: snapshots, contents, classes })
    }

    fn content_name(&self) -> Option<String> {
        plan::content_name(self)
    }

    fn is_given(&self) -> bool {
        self.spec.source.volume_snapshot_content_name.is_some()
    }

    fn is_taken(&self) -> bool {
        self.status.as_ref().is_some_and(|status| {
            status.creation_time.is_some() && status.bound_volume_snapshot_content_name.is_some()
        })
    }

    fn is_ready(&self) -> bool {
        status::is_ready(self)
    }

    fn error(&self) -> Option<&SnapshotError> {
        self.status.as_ref()?.error.as_ref()
    }

    fn fail(&mut self, error: SnapshotError) {
        let status = self.status.get_or_insert_default();
        status.error = Some(error);
        status.ready_to_use = Some(false);
    }

    fn set_status(&mut self, status: VolumeSnapshotStatus) {
        self.status = Some(status);
    }

    fn class_name(&self) -> Option<&String> {
        self.spec.volume_snapshot_class_name.as_ref()
    }

    fn class_name_mut(&mut self) -> &mut Option<String> {
        &mut self.spec.volume_snapshot_class_name
    }

    fn plan(&self, controller: &Controller, content: Option<&VolumeSnapshotContent>) -> Vec<Step> {
        let groups = controller.groups.get();
        let group = group_of(self);
        let handle =
            content.and_then(|content| content.status.as_ref()?.volume_group_snapshot_handle.clone());
        let taken_with = handle.map(|handle| groups.map(|groups| groups.by_handle.get(&handle)));
        let key = berth_kube::Key::of(self);
        plan::plan(&ObservedSnapshot {
            snapshot: self,
            content,
            group: match (&group, groups) {
                (None, _) => Group::None,
                (Some(_), None) => Group::Unknown,
                (Some(group), Some(groups)) => match groups.cache.get(group) {
                    None => Group::Gone,
                    Some(there) if there.metadata.deletion_timestamp.is_some() => Group::Leaving,
                    Some(_) => Group::Live(&group.name),
                },
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
            restoring: !controller.restoring.get(&key).is_empty(),
        })
    }

    fn new_content(&self, controller: &Controller) -> Result<VolumeSnapshotContent, creation::Refusal> {
        let claim = claim(self, controller);
        let volume = claim.as_ref().and_then(|claim| claim.spec.as_ref()?.volume_name.clone());
        let volume = volume.and_then(|name| controller.volumes.named(&name));
        let nodes = controller.nodes.as_ref().map(Cache::list);
        creation::content(&creation::ContentInputs {
            snapshot: self,
            claim: claim.as_deref(),
            volume: volume.as_deref(),
            classes: &controller.classes.list(),
            keep_mode: controller.options.prevent_volume_mode_conversion,
            nodes: nodes.as_deref(),
        })
    }

    async fn protect_source(&self, controller: &Controller) -> Result<(), Failure> {
        if let Some(claim) = claim(self, controller) {
            controller.cluster.update(claim.as_ref(), |claim| finalizers::add(claim, names::CLAIM)).await?;
        }
        Ok(())
    }

    /// Makes a snapshot go with its group.
    async fn group_step(
        self: &Arc<Self>,
        controller: &Controller,
        _content: Option<&Arc<VolumeSnapshotContent>>,
        _step: GroupStep,
    ) -> Result<Option<Arc<Self>>, Failure> {
        let group = group_of(self).and_then(|key| controller.groups.get()?.cache.get(&key));
        let Some(group) = group else { return Ok(None) };
        let owned = controller.cluster.edit(self.as_ref(), |snapshot| {
            snapshot.owner_references_mut().push(creation::owner(&group));
        });
        Ok(owned.await?)
    }
}

/// The claim that a snapshot is of, if it exists.
fn claim(snapshot: &VolumeSnapshot, controller: &Controller) -> Option<Arc<PersistentVolumeClaim>> {
    claim_of(snapshot).and_then(|claim| controller.claims.get(&claim))
}

impl Content for VolumeSnapshotContent {
    const FINALIZER: &'static str = names::CONTENT;
    const BEING_DELETED: &'static str = names::BEING_DELETED;
    const INVALID: (&'static str, &'static str) = (
        events::CONTENT_VALIDATION_ERROR,
        "Exactly one of VolumeHandle and SnapshotHandle should be specified",
    );

    fn driver(&self) -> &str {
        &self.spec.driver
    }

    fn sources(&self) -> usize {
        let source = &self.spec.source;
        usize::from(source.volume_handle.is_some()) + usize::from(source.snapshot_handle.is_some())
    }

    fn owner(&self) -> &ObjectReference {
        &self.spec.volume_snapshot_ref
    }

    fn bind(&mut self, uid: Option<String>) {
        self.spec.volume_snapshot_ref.uid = uid;
    }

    fn class_name(&self) -> Option<&String> {
        self.spec.volume_snapshot_class_name.as_ref()
    }

    fn class_name_mut(&mut self) -> &mut Option<String> {
        &mut self.spec.volume_snapshot_class_name
    }

    fn is_taken(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status.snapshot_handle.is_some())
    }
}
