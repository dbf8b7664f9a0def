//! Contents of single snapshots.

use berth_core::names::events;
use berth_csi::remarks::Remarks;
use berth_csi::v1::{CreateSnapshotRequest, DeleteSnapshotRequest, ListSnapshotsRequest, Snapshot};
use berth_kube::Cache;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt as _;
use tonic::Status;

use super::plan::ObservedContent;
use super::worker::{Content, Secrets, Words, class_of, secret_of};
use super::{Context, Options, csi_name, parameters, taken};
use crate::driver::ControllerCapability;
use crate::failure::Failure;
use crate::secrets::{self, SnapshotPurpose};
use crate::snapshots::{SnapshotError, VolumeSnapshotClass, VolumeSnapshotContent, names};

impl Content for VolumeSnapshotContent {
    type Class = VolumeSnapshotClass;
    type Request = CreateSnapshotRequest;
    type Answer = Snapshot;

    const WORDS: Words = Words {
        what: "snapshot",
        queue: "csi-snapshotter-content",
        annotation: names::BEING_CREATED,
        finalizer: names::CONTENT,
        secret: (names::SECRET_NAME, names::SECRET_NAMESPACE),
        take: "CreateSnapshot",
        delete: "DeleteSnapshot",
        not_taken: events::SNAPSHOT_CREATION_FAILED,
        not_checked: events::SNAPSHOT_CONTENT_CHECK_AND_UPDATE_FAILED,
        not_deleted: events::SNAPSHOT_DELETE_ERROR,
    };

    fn observe(&self, driver: &str) -> ObservedContent {
        ObservedContent::content(self, driver)
    }

    fn driver(&self) -> &str {
        &self.spec.driver
    }

    fn class_name(&self) -> Option<&str> {
        self.spec.volume_snapshot_class_name.as_deref()
    }

    fn owner(&self) -> &ObjectReference {
        &self.spec.volume_snapshot_ref
    }

    fn volume_handle(&self) -> Option<&str> {
        self.spec.source.volume_handle.as_deref()
    }

    fn taking(&self) -> String {
        format!("failed to take snapshot of the volume {}", self.volume_handle().unwrap_or_default())
    }

    fn handle(&self) -> Option<&str> {
        self.status.as_ref()?.snapshot_handle.as_deref()
    }

    fn handle_in(said: &Snapshot) -> &str {
        &said.snapshot_id
    }

    fn request(&self, class: &VolumeSnapshotClass, options: &Options) -> Result<Self::Request, Failure> {
        let owner = &self.spec.volume_snapshot_ref;
        let parameters =
            parameters(class.parameters.as_ref(), options, "volumesnapshot", owner, self.name_any())?;
        Ok(CreateSnapshotRequest {
            source_volume_id: self.volume_handle().unwrap_or_default().to_owned(),
            name: csi_name(
                &options.snapshot_name_prefix,
                options.snapshot_name_uuid_length,
                owner.uid.as_deref().unwrap_or_default(),
            )?,
            parameters,
            ..CreateSnapshotRequest::default()
        })
    }

    fn created(&self) -> Option<i64> {
        self.status.as_ref()?.creation_time
    }

    fn error(&self) -> Option<&SnapshotError> {
        self.status.as_ref()?.error.as_ref()
    }

    fn fail(&mut self, error: SnapshotError) {
        let status = self.status.get_or_insert_default();
        status.error = Some(error);
        status.ready_to_use = Some(false);
    }

    fn save(&mut self, said: &Snapshot, _just_taken: bool, now: Timestamp) {
        self.status = Some(taken::snapshot(self.status.as_ref(), said, now));
    }

    fn is_ready(said: &Snapshot) -> bool {
        said.ready_to_use
    }

    fn clear(&mut self) {
        if let Some(status) = &mut self.status {
            status.snapshot_handle = None;
            status.ready_to_use = None;
            status.creation_time = None;
            status.restore_size = None;
        }
    }

    async fn take(
        context: &Context,
        mut request: CreateSnapshotRequest,
        secrets: Secrets,
    ) -> Result<(Snapshot, Remarks), Status> {
        request.secrets = secrets;
        let answer = context.driver.respond(context.options.timeout, request).await?;
        let mut remarks = Remarks::of(answer.metadata());
        let made = answer.into_inner().snapshot.filter(|snapshot| !snapshot.snapshot_id.is_empty());
        // Not final: a driver that answers like this has made something.
        let mut made = made
            .ok_or_else(|| Status::aborted("the CSI driver's answer to CreateSnapshot has no snapshot id"))?;
        remarks.progress = remarks.progress.filter(|_| !made.ready_to_use);
        // Only a group's own content says which snapshots are its members.
        made.group_snapshot_id.clear();
        Ok((made, remarks))
    }

    /// A driver that cannot answer that is believed to have it.
    async fn fetch_state(
        &self,
        context: &Context,
        classes: &Cache<VolumeSnapshotClass>,
    ) -> Result<Snapshot, Failure> {
        let status = self.status.clone().unwrap_or_default();
        let given = self.spec.source.snapshot_handle.clone();
        let snapshot_id = given.or(status.snapshot_handle).unwrap_or_default();
        if !context.driver.identity_of(&context.name)?.can(ControllerCapability::ListSnapshots) {
            return Ok(Snapshot { snapshot_id, ready_to_use: true, ..Snapshot::default() });
        }
        let secret = if status.volume_group_snapshot_handle.is_some() {
            secret_of(self)?
        } else if let Some(class) = class_of(self, classes)? {
            let parameters = class.parameters.clone().unwrap_or_default();
            secrets::snapshot_reference(&parameters, SnapshotPurpose::List, &self.name_any(), None)?
        } else {
            None
        };
        let request = ListSnapshotsRequest {
            snapshot_id: snapshot_id.clone(),
            secrets: context.secrets(secret.as_ref()).await?,
            ..ListSnapshotsRequest::default()
        };
        let answer = context.driver.call(context.options.timeout, request).await?;
        // What was not asked for must not be taken for it: it would be deleted instead one day.
        let mut found = answer.entries.into_iter().filter_map(|entry| entry.snapshot);
        found.find(|snapshot| snapshot.snapshot_id == snapshot_id).ok_or_else(|| {
            Failure::refused(format!(
                "can not find snapshot for snapshotID {snapshot_id}: the driver does not know it; check the handle"
            ))
        })
    }

    async fn delete(&self, context: &Context, secrets: Secrets) -> Result<(), Failure> {
        let snapshot_id = self.status.as_ref().and_then(|status| status.snapshot_handle.clone());
        let request = DeleteSnapshotRequest { snapshot_id: snapshot_id.unwrap_or_default(), secrets };
        context.driver.call(context.options.timeout, request).await?;
        Ok(())
    }
}
