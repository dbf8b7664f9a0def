//! Contents of groups of snapshots.

use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_csi::code;
use berth_csi::v1::{
    CreateVolumeGroupSnapshotRequest, DeleteVolumeGroupSnapshotRequest, GetVolumeGroupSnapshotRequest,
    VolumeGroupSnapshot,
};
use berth_kube::{Cache, Index, Key, Next, Queue};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::SecretReference;
use kube::ResourceExt as _;

use super::contents::{annotated_secret, tell};
use super::plan::{self, Plan, Seen};
use super::{Context, csi_name, poll, taken};
use crate::failure::Failure;
use crate::names::RESERVED;
use crate::secrets::{self, SnapshotPurpose};
use crate::snapshots::names;
use crate::snapshots::{VolumeGroupSnapshotClass, VolumeGroupSnapshotContent};
use crate::suspects::Suspects;
use crate::{edit, finalizers};

/// Works on contents of groups until the cluster's shutdown.
pub(super) async fn run(context: Arc<Context>) {
    let shutdown = context.cluster.shutdown().clone();
    let this = Arc::new(Groups::new(context));
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = this.start() => {}
    }
    let work = this.queue.run(this.context.options.workers, shutdown, |key| {
        let this = this.clone();
        async move {
            let (driver, look) = (&this.context.driver, this.sync(&key));
            this.suspects.look(driver, &this.queue, key.clone(), look).await
        }
    });
    let again = this.context.driver.when_back(this.context.cluster.shutdown(), || {
        for content in this.ours.get(&()) {
            this.suspects.again(&this.queue, Key::of(content.as_ref()));
        }
    });
    tokio::join!(work, again);
}

struct Groups {
    context: Arc<Context>,
    contents: Cache<VolumeGroupSnapshotContent>,
    /// The contents of this driver, under one value.
    ours: Index<VolumeGroupSnapshotContent, ()>,
    by_class: Index<VolumeGroupSnapshotContent, String>,
    classes: Cache<VolumeGroupSnapshotClass>,
    queue: Queue<Key>,
    suspects: Suspects,
}

impl Groups {
    fn new(context: Arc<Context>) -> Self {
        let contents = context.cluster.cache::<VolumeGroupSnapshotContent>();
        let (ours, unready) = (context.name.clone(), context.name.clone());
        Self {
            ours: contents.index(
                move |content: &VolumeGroupSnapshotContent| {
                    if content.spec.driver == ours { vec![()] } else { Vec::new() }
                },
            ),
            by_class: contents.index(move |content: &VolumeGroupSnapshotContent| {
                let seen = Seen::group(content, &unready);
                let class = content.spec.volume_group_snapshot_class_name.clone();
                class.filter(|_| seen.ours && !seen.ready).into_iter().collect()
            }),
            contents,
            classes: context.cluster.cache(),
            suspects: Suspects::default(),
            queue: context.cluster.queue("csi-snapshotter-groupsnapshotcontent", context.options.retry),
            context,
        }
    }

    async fn start(&self) {
        self.contents.synced().await;
        self.classes.synced().await;
        let (queue, name) = (self.queue.clone(), self.context.name.clone());
        self.contents.subscribe(move |before, after| {
            let Some(after) = after else { return };
            let seen = Seen::group(after, &name);
            let changed = before.is_none_or(|before| {
                let was = (before.as_ref(), Seen::group(before, &name));
                plan::matters(was, (after.as_ref(), seen), names::GROUP_BEING_CREATED)
            });
            if seen.ours && changed {
                queue.add(Key::of(after.as_ref()));
            }
        });
        let (queue, contents) = (self.queue.clone(), self.by_class.clone());
        self.classes.subscribe(move |_, after| {
            for content in after.iter().flat_map(|class| contents.get(&class.name_any())) {
                queue.add(Key::of(content.as_ref()));
            }
        });
    }

    async fn sync(&self, key: &Key) -> Result<Next, Failure> {
        let Some(content) = self.contents.get(key) else { return Ok(Next::Done) };
        match plan::plan(Seen::group(&content, &self.context.name)) {
            Plan::Nothing => Ok(Next::Done),
            Plan::Unmark => {
                self.unmark(&content).await?;
                // A deletion may have waited for this, and our own writes do not bring the content back.
                Ok(Next::After(Duration::ZERO))
            }
            Plan::Release => self.release(&content).await,
            Plan::Create => self.create(&content).await,
            Plan::Check => self.check(&content).await,
            Plan::Delete => self.delete(&content).await,
        }
    }

    /// Asks for the group, for the first time or again.
    async fn create(&self, content: &Arc<VolumeGroupSnapshotContent>) -> Result<Next, Failure> {
        let (mut request, secret) = match self.prepare(content) {
            Ok(prepared) => prepared,
            Err(failure) => return self.failed(content, CREATE, "", failure).await,
        };
        if let Err(failure) = self.context.driver_now() {
            return self.failed(content, CREATE, "", failure).await;
        }
        request.secrets = match self.context.secrets(secret.as_ref()).await {
            Ok(secrets) => secrets,
            Err(failure) => return self.failed(content, CREATE, "", failure).await,
        };
        // The mark and the finalizer are one write, so what may be taken is never without a content that is kept.
        let marked = edit::object(&self.context.cluster, content, |content| {
            content.annotations_mut().insert(names::GROUP_BEING_CREATED.to_owned(), "yes".to_owned());
            if content.metadata.deletion_timestamp.is_none() {
                finalizers::add(content, names::GROUP_CONTENT);
            }
        });
        let Some(content) = marked.await? else { return Ok(Next::Done) };
        let begun = Instant::now();
        let volumes = request.source_volume_ids.join(" ");
        let made = self.context.driver.create_group_snapshot(self.context.options.timeout, request).await;
        tell("CreateVolumeGroupSnapshot", None, begun, made.as_ref().err());
        match made {
            Ok(made) => self.save(&content, &made, true).await,
            Err(status) => {
                if code::is_final(status.code()) {
                    self.unmark(&content).await?;
                }
                let text = format!("failed to take group snapshot of the volumes [{volumes}]: ");
                self.failed(&content, CREATE, &text, status.into()).await
            }
        }
    }

    /// Everything that the request needs, but for what the secret holds.
    fn prepare(
        &self,
        content: &VolumeGroupSnapshotContent,
    ) -> Result<(CreateVolumeGroupSnapshotRequest, Option<SecretReference>), Failure> {
        let (spec, options) = (&content.spec, &self.context.options);
        let class = self.class(content)?.ok_or_else(|| {
            let name = content.name_any();
            Failure::refused(format!("failed to take group snapshot {name} without a group snapshot class"))
        })?;
        let mut parameters = secrets::snapshot_parameters(&class.parameters.clone().unwrap_or_default())?;
        let owner = &spec.volume_group_snapshot_ref;
        if options.extra_create_metadata {
            let mut add = |key: &str, value: String| parameters.insert(format!("{RESERVED}{key}"), value);
            add("volumegroupsnapshot/name", owner.name.clone().unwrap_or_default());
            add("volumegroupsnapshot/namespace", owner.namespace.clone().unwrap_or_default());
            add("volumegroupsnapshotcontent/name", content.name_any());
        }
        let request = CreateVolumeGroupSnapshotRequest {
            name: csi_name(
                &options.group_snapshot_name_prefix,
                options.group_snapshot_name_uuid_length,
                owner.uid.as_deref().unwrap_or_default(),
            )?,
            source_volume_ids: spec.source.volume_handles.clone().unwrap_or_default(),
            parameters,
            ..CreateVolumeGroupSnapshotRequest::default()
        };
        Ok((request, secret_of(content)?))
    }

    fn class(
        &self,
        content: &VolumeGroupSnapshotContent,
    ) -> Result<Option<Arc<VolumeGroupSnapshotClass>>, Failure> {
        let Some(name) = content.spec.volume_group_snapshot_class_name.as_deref() else { return Ok(None) };
        let class = self.classes.named(name).ok_or_else(|| {
            Failure::refused(format!(
                "failed to get group snapshot class {name} for group snapshot content {}: it does not exist",
                content.name_any()
            ))
        })?;
        Ok(Some(class))
    }

    /// Asks how a group that exists is.
    async fn check(&self, content: &Arc<VolumeGroupSnapshotContent>) -> Result<Next, Failure> {
        match self.look_up(content).await {
            Ok(found) => self.save(content, &found, false).await,
            Err(failure) => self.failed(content, CHECK, "", failure).await,
        }
    }

    async fn look_up(&self, content: &VolumeGroupSnapshotContent) -> Result<VolumeGroupSnapshot, Failure> {
        self.context.driver_now()?;
        let secret = match self.class(content)? {
            None => None,
            Some(class) => {
                let parameters = class.parameters.clone().unwrap_or_default();
                let name = content.name_any();
                secrets::snapshot_reference(&parameters, SnapshotPurpose::GetGroup, &name, None)?
            }
        };
        let handles = content.spec.source.group_snapshot_handles.clone().unwrap_or_default();
        let request = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: handles.volume_group_snapshot_handle.clone(),
            snapshot_ids: handles.volume_snapshot_handles,
            secrets: self.context.secrets(secret.as_ref()).await?,
        };
        let mut found =
            self.context.driver.find_group_snapshot(self.context.options.timeout, request).await?;
        found.group_snapshot_id = handles.volume_group_snapshot_handle;
        Ok(found)
    }

    /// Saves what the driver said, takes the mark away and says when to ask again.
    async fn save(
        &self,
        content: &Arc<VolumeGroupSnapshotContent>,
        said: &VolumeGroupSnapshot,
        list_members: bool,
    ) -> Result<Next, Failure> {
        let now = Timestamp::now();
        let saved = edit::status(&self.context.cluster, content, |content| {
            content.status = Some(taken::group(content.status.as_ref(), said, list_members, now));
        });
        let Some(content) = saved.await? else { return Ok(Next::Done) };
        self.unmark(&content).await?;
        if said.ready_to_use {
            return Ok(Next::Done);
        }
        let created = content.status.as_ref().and_then(|status| status.creation_time.clone());
        let age = poll::age(created.map(|time| taken::since_1970(time.0)), taken::since_1970(now));
        Ok(Next::After(poll::pause(age, self.context.options.poll)))
    }

    async fn delete(&self, content: &Arc<VolumeGroupSnapshotContent>) -> Result<Next, Failure> {
        self.context.driver_now()?;
        // Data is about to be deleted: what the cache says is not enough.
        let live =
            self.context.cluster.fetch::<VolumeGroupSnapshotContent>(&Key::of(content.as_ref())).await?;
        let Some(live) = live.filter(|live| live.uid() == content.uid()) else { return Ok(Next::Done) };
        if plan::plan(Seen::group(&live, &self.context.name)) != Plan::Delete {
            return Ok(Next::Done);
        }
        if let Err(failure) = self.call_delete(&live).await {
            let text = format!("Failed to delete group snapshot: {}{}", failure.sentence(), failure.hint());
            self.context.recorder.warning(live.as_ref(), "GroupSnapshotDeleteError", text);
            return Err(failure);
        }
        // A deletion that is repeated after a crash finds no handle and does not call again.
        let cleared = edit::status(&self.context.cluster, &live, |content| {
            if let Some(status) = &mut content.status {
                status.volume_group_snapshot_handle = None;
                status.ready_to_use = None;
                status.creation_time = None;
                status.error = None;
            }
        });
        match cleared.await? {
            Some(content) => self.release(&content).await,
            None => Ok(Next::Done),
        }
    }

    async fn call_delete(&self, content: &VolumeGroupSnapshotContent) -> Result<(), Failure> {
        let status = content.status.clone().unwrap_or_default();
        let members = status.volume_snapshot_info_list.unwrap_or_default();
        let mut snapshot_ids: Vec<String> =
            members.into_iter().map(|member| member.snapshot_handle).collect();
        if let (true, Some(given)) = (snapshot_ids.is_empty(), &content.spec.source.group_snapshot_handles) {
            snapshot_ids.clone_from(&given.volume_snapshot_handles);
        }
        if snapshot_ids.is_empty() {
            return Err(Failure::refused(format!(
                "the group's content {} names no snapshots, without which the driver cannot delete the group; delete it on \
                 the storage system and remove the finalizer {}",
                content.name_any(),
                names::GROUP_CONTENT
            )));
        }
        // An annotation that names half a secret is as good as none.
        let secret = secret_of(content).unwrap_or(None);
        let request = DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: status.volume_group_snapshot_handle.unwrap_or_default(),
            snapshot_ids,
            secrets: self.context.secrets_to_delete(&content.name_any(), secret.as_ref()).await?,
        };
        let begun = Instant::now();
        let deleted = self.context.driver.delete_group_snapshot(self.context.options.timeout, request).await;
        tell("DeleteVolumeGroupSnapshot", None, begun, deleted.as_ref().err());
        Ok(deleted?)
    }

    async fn unmark(&self, content: &Arc<VolumeGroupSnapshotContent>) -> Result<Next, Failure> {
        edit::object(&self.context.cluster, content, |content| {
            if content.annotations().contains_key(names::GROUP_BEING_CREATED) {
                content.annotations_mut().remove(names::GROUP_BEING_CREATED);
            }
        })
        .await?;
        Ok(Next::Done)
    }

    async fn release(&self, content: &Arc<VolumeGroupSnapshotContent>) -> Result<Next, Failure> {
        edit::object(&self.context.cluster, content, |content| {
            finalizers::remove(content, names::GROUP_CONTENT);
        })
        .await?;
        Ok(Next::Done)
    }

    /// Tells of a failure where people look: in the status, and once by an event.
    async fn failed(
        &self,
        content: &Arc<VolumeGroupSnapshotContent>,
        (reason, doing): (&str, &str),
        more: &str,
        failure: Failure,
    ) -> Result<Next, Failure> {
        if failure.is_conflict() {
            return Err(failure);
        }
        let message = format!("{doing}: {more}{}{}", failure.sentence(), failure.hint());
        let now = Timestamp::now();
        let known = content.status.as_ref().and_then(|status| status.error.as_ref()?.message.as_deref());
        if known != Some(message.as_str()) {
            self.context.recorder.warning(content.as_ref(), reason, message.clone());
        }
        edit::status(&self.context.cluster, content, |content| {
            let status = content.status.get_or_insert_default();
            status.error = Some(taken::error(status.error.as_ref(), &message, now));
            status.ready_to_use = Some(false);
        })
        .await?;
        Err(failure)
    }
}

const CREATE: (&str, &str) = ("GroupSnapshotCreationFailed", "Failed to create group snapshot");
const CHECK: (&str, &str) =
    ("GroupSnapshotContentCheckandUpdateFailed", "Failed to check and update group snapshot content");

/// The secret that a content's annotations name.
fn secret_of(content: &VolumeGroupSnapshotContent) -> Result<Option<SecretReference>, Failure> {
    annotated_secret(content.annotations(), names::GROUP_SECRET_NAME, names::GROUP_SECRET_NAMESPACE)
}
