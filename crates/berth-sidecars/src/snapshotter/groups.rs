//! Contents of groups of snapshots.

use berth_core::names::events;
use berth_csi::remarks::Remarks;
use berth_csi::v1::{
    CreateVolumeGroupSnapshotRequest, DeleteVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotRequest,
    VolumeGroupSnapshot,
};
use berth_kube::Cache;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt as _;
use tonic::Status;

use super::plan::ObservedContent;
use super::worker::{Content, Secrets, Words, class_of};
use super::{Context, Options, csi_name, parameters, taken};
use crate::failure::Failure;
use crate::secrets::{self, SnapshotPurpose};
use crate::snapshots::{SnapshotError, VolumeGroupSnapshotClass, VolumeGroupSnapshotContent, names};

impl Content for VolumeGroupSnapshotContent {
    type Class = VolumeGroupSnapshotClass;
    type Request = CreateVolumeGroupSnapshotRequest;
    type Answer = VolumeGroupSnapshot;

    const WORDS: Words = Words {
        what: "group snapshot",
        queue: "csi-snapshotter-groupsnapshotcontent",
        annotation: names::GROUP_BEING_CREATED,
        finalizer: names::GROUP_CONTENT,
        secret: (names::GROUP_SECRET_NAME, names::GROUP_SECRET_NAMESPACE),
        take: "CreateVolumeGroupSnapshot",
        delete: "DeleteVolumeGroupSnapshot",
        not_taken: events::GROUP_SNAPSHOT_CREATION_FAILED,
        not_checked: events::GROUP_SNAPSHOT_CONTENT_CHECK_AND_UPDATE_FAILED,
        not_deleted: events::GROUP_SNAPSHOT_DELETE_ERROR,
    };

    fn observe(&self, driver: &str) -> ObservedContent {
        ObservedContent::group(self, driver)
    }

    fn driver(&self) -> &str {
        &self.spec.driver
    }

    fn class_name(&self) -> Option<&str> {
        self.spec.volume_group_snapshot_class_name.as_deref()
    }

    fn owner(&self) -> &ObjectReference {
        &self.spec.volume_group_snapshot_ref
    }

    fn volume_handle(&self) -> Option<&str> {
        None
    }

    fn taking(&self) -> String {
        let volumes = self.spec.source.volume_handles.as_deref().unwrap_or_default();
        format!("failed to take group snapshot of the volumes [{}]", volumes.join(" "))
    }

    fn handle(&self) -> Option<&str> {
        self.status.as_ref()?.volume_group_snapshot_handle.as_deref()
    }

    fn handle_in(said: &VolumeGroupSnapshot) -> &str {
        &said.group_snapshot_id
    }

    fn request(&self, class: &VolumeGroupSnapshotClass, options: &Options) -> Result<Self::Request, Failure> {
        let owner = &self.spec.volume_group_snapshot_ref;
        let parameters =
            parameters(class.parameters.as_ref(), options, "volumegroupsnapshot", owner, self.name_any())?;
        Ok(CreateVolumeGroupSnapshotRequest {
            name: csi_name(
                &options.group_snapshot_name_prefix,
                options.group_snapshot_name_uuid_length,
                owner.uid.as_deref().unwrap_or_default(),
            )?,
            source_volume_ids: self.spec.source.volume_handles.clone().unwrap_or_default(),
            parameters,
            ..CreateVolumeGroupSnapshotRequest::default()
        })
    }

    fn created(&self) -> Option<i64> {
        self.status.as_ref()?.creation_time.as_ref().map(|time| taken::since_1970(time.0))
    }

    fn error(&self) -> Option<&SnapshotError> {
        self.status.as_ref()?.error.as_ref()
    }

    fn fail(&mut self, error: SnapshotError) {
        let status = self.status.get_or_insert_default();
        status.error = Some(error);
        status.ready_to_use = Some(false);
    }

    fn save(&mut self, said: &VolumeGroupSnapshot, just_taken: bool, now: Timestamp) {
        self.status = Some(taken::group(self.status.as_ref(), said, just_taken, now));
    }

    fn is_ready(said: &VolumeGroupSnapshot) -> bool {
        said.ready_to_use
    }

    fn clear(&mut self) {
        if let Some(status) = &mut self.status {
            status.volume_group_snapshot_handle = None;
            status.ready_to_use = None;
            status.creation_time = None;
            status.error = None;
        }
    }

    async fn take(
        context: &Context,
        mut request: CreateVolumeGroupSnapshotRequest,
        secrets: Secrets,
    ) -> Result<(VolumeGroupSnapshot, Remarks), Status> {
        request.secrets = secrets;
        let answer = context.driver.respond(context.options.timeout, request).await?;
        let remarks = Remarks { progress: None, ..Remarks::of(answer.metadata()) };
        let made = answer.into_inner().group_snapshot.filter(|group| !group.group_snapshot_id.is_empty());
        // Not final: a driver that answers like this has made something.
        let made = made.ok_or_else(|| {
            Status::aborted("the CSI driver's answer to CreateVolumeGroupSnapshot has no group snapshot id")
        })?;
        Ok((made, remarks))
    }

    async fn fetch_state(
        &self,
        context: &Context,
        classes: &Cache<VolumeGroupSnapshotClass>,
    ) -> Result<VolumeGroupSnapshot, Failure> {
        context.driver.identity_of(&context.name)?;
        let secret = match class_of(self, classes)? {
            None => None,
            Some(class) => {
                let parameters = class.parameters.clone().unwrap_or_default();
                secrets::snapshot_reference(&parameters, SnapshotPurpose::GetGroup, &self.name_any(), None)?
            }
        };
        let handles = self.spec.source.group_snapshot_handles.clone().unwrap_or_default();
        let request = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: handles.volume_group_snapshot_handle.clone(),
            snapshot_ids: handles.volume_snapshot_handles,
            secrets: context.secrets(secret.as_ref()).await?,
        };
        let answer = context.driver.call(context.options.timeout, request).await?;
        let mut found = answer
            .group_snapshot
            .ok_or_else(|| Status::internal("the CSI driver's answer to GetVolumeGroupSnapshot is empty"))?;
        found.group_snapshot_id = handles.volume_group_snapshot_handle;
        Ok(found)
    }

    async fn delete(&self, context: &Context, secrets: Secrets) -> Result<(), Failure> {
        let status = self.status.clone().unwrap_or_default();
        let members = status.volume_snapshot_info_list.unwrap_or_default();
        let mut snapshot_ids: Vec<String> =
            members.into_iter().map(|member| member.snapshot_handle).collect();
        if let (true, Some(given)) = (snapshot_ids.is_empty(), &self.spec.source.group_snapshot_handles) {
            snapshot_ids.clone_from(&given.volume_snapshot_handles);
        }
        if snapshot_ids.is_empty() {
            return Err(Failure::refused(format!(
                "the group's content {} names no snapshots, without which the driver cannot delete the group; delete it on \
                 the storage system and remove the finalizer {}",
                self.name_any(),
                names::GROUP_CONTENT
            )));
        }
        let request = DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: status.volume_group_snapshot_handle.unwrap_or_default(),
            snapshot_ids,
            secrets,
        };
        context.driver.call(context.options.timeout, request).await?;
        Ok(())
    }
}
