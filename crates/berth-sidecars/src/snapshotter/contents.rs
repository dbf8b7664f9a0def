//! Contents of single snapshots.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_csi::code;
use berth_csi::v1::{CreateSnapshotRequest, DeleteSnapshotRequest, ListSnapshotsRequest, Snapshot};
use berth_kube::timeline::Step;
use berth_kube::{Cache, Index, Key, Next, Queue};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, SecretReference};
use kube::ResourceExt as _;

use super::plan::{self, Plan, Seen};
use super::{COMPONENT, Context, csi_name, poll, taken};
use crate::driver::ControllerCapability;
use crate::failure::Failure;
use crate::names::RESERVED;
use crate::secrets::{self, SnapshotPurpose};
use crate::snapshots::names;
use crate::snapshots::{VolumeSnapshotClass, VolumeSnapshotContent};
use crate::suspects::Suspects;
use crate::{edit, finalizers};

/// Works on contents until the cluster's shutdown.
pub(super) async fn run(context: Arc<Context>) {
    let shutdown = context.cluster.shutdown().clone();
    let this = Arc::new(Contents::new(context));
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

struct Contents {
    context: Arc<Context>,
    cache: Cache<VolumeSnapshotContent>,
    /// The contents of this driver, under one value.
    ours: Index<VolumeSnapshotContent, ()>,
    by_class: Index<VolumeSnapshotContent, String>,
    /// The contents of this driver that have a snapshot, by its id.
    by_handle: Index<VolumeSnapshotContent, String>,
    classes: Cache<VolumeSnapshotClass>,
    volumes: Index<PersistentVolume, String>,
    queue: Queue<Key>,
    suspects: Suspects,
}

impl Contents {
    fn new(context: Arc<Context>) -> Self {
        let contents: Cache<VolumeSnapshotContent> = match &context.options.node {
            None => context.cluster.cache(),
            Some(node) => context.cluster.cache_labelled(&format!("{}={node}", names::MANAGED_BY)),
        };
        let (ours, unready, volumes) = (context.name.clone(), context.name.clone(), context.name.clone());
        let taken = context.name.clone();
        Self {
            ours: contents.index(
                move |content: &VolumeSnapshotContent| {
                    if content.spec.driver == ours { vec![()] } else { Vec::new() }
                },
            ),
            by_class: contents.index(move |content: &VolumeSnapshotContent| {
                let seen = Seen::content(content, &unready);
                let class = content.spec.volume_snapshot_class_name.clone();
                class.filter(|_| seen.ours && !seen.ready).into_iter().collect()
            }),
            by_handle: contents.index(move |content: &VolumeSnapshotContent| {
                let handle = content.status.as_ref().and_then(|status| status.snapshot_handle.clone());
                handle.filter(|_| content.spec.driver == taken).into_iter().collect()
            }),
            cache: contents,
            classes: context.cluster.cache(),
            volumes: context.cluster.cache::<PersistentVolume>().index(move |volume: &PersistentVolume| {
                let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
                let csi = csi.filter(|csi| csi.driver == volumes);
                csi.map(|csi| csi.volume_handle.clone()).into_iter().collect()
            }),
            suspects: Suspects::default(),
            queue: context.cluster.queue("csi-snapshotter-content", context.options.retry),
            context,
        }
    }

    async fn start(&self) {
        self.cache.synced().await;
        self.classes.synced().await;
        self.context.cluster.cache::<PersistentVolume>().synced().await;
        let (queue, name) = (self.queue.clone(), self.context.name.clone());
        self.cache.subscribe(move |before, after| {
            let Some(after) = after else { return };
            let seen = Seen::content(after, &name);
            let changed = before.is_none_or(|before| {
                let was = (before.as_ref(), Seen::content(before, &name));
                plan::matters(was, (after.as_ref(), seen), names::BEING_CREATED)
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
        let Some(content) = self.cache.get(key) else { return Ok(Next::Done) };
        match plan::plan(Seen::content(&content, &self.context.name)) {
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

    /// Asks for the snapshot, for the first time or again.
    async fn create(&self, content: &Arc<VolumeSnapshotContent>) -> Result<Next, Failure> {
        let (mut request, secret) = match self.prepare(content) {
            Ok(prepared) => prepared,
            Err(failure) => return self.failed(content, CREATE, failure).await,
        };
        if let Err(failure) = self.context.driver_now() {
            return self.failed(content, CREATE, failure).await;
        }
        let volume = self.volume_of(&request.source_volume_id);
        let (queue, again) = (self.queue.clone(), Key::of(content.as_ref()));
        let held = volume.as_ref().map(|name| self.context.driver.try_hold(name, move || queue.add(again)));
        if matches!(held, Some(None)) {
            return Ok(Next::Done);
        }
        request.secrets = match self.context.secrets(secret.as_ref()).await {
            Ok(secrets) => secrets,
            Err(failure) => return self.failed(content, CREATE, failure).await,
        };
        // The mark and the finalizer are one write, so what may be taken is never without a content that is kept.
        let marked = edit::object(&self.context.cluster, content, |content| {
            content.annotations_mut().insert(names::BEING_CREATED.to_owned(), "yes".to_owned());
            if content.metadata.deletion_timestamp.is_none() {
                finalizers::add(content, names::CONTENT);
            }
        });
        let Some(content) = marked.await? else { return Ok(Next::Done) };
        let begun = Instant::now();
        let handle = request.source_volume_id.clone();
        let made = self.context.driver.create_snapshot(self.context.options.timeout, request).await;
        tell("CreateSnapshot", volume.as_deref(), begun, made.as_ref().err());
        match made.and_then(|made| self.not_of_another(made, &content)) {
            Ok(mut made) => {
                // Only a group's own content says which snapshots are its members.
                made.group_snapshot_id.clear();
                self.save(&content, &made).await
            }
            Err(status) => {
                if code::is_final(status.code()) {
                    self.unmark(&content).await?;
                }
                let failure = Failure::from(status);
                let text = format!("failed to take snapshot of the volume {handle}: ");
                self.failed_saying(&content, CREATE, &text, failure).await
            }
        }
    }

    /// Everything that the request needs, but for what the secret holds.
    fn prepare(
        &self,
        content: &VolumeSnapshotContent,
    ) -> Result<(CreateSnapshotRequest, Option<SecretReference>), Failure> {
        let spec = &content.spec;
        let options = &self.context.options;
        let class = spec.volume_snapshot_class_name.as_deref().unwrap_or_default();
        let class = self.classes.named(class).ok_or_else(|| {
            let name = content.name_any();
            Failure::refused(if class.is_empty() {
                format!("failed to take snapshot {name} without a snapshot class")
            } else {
                format!("VolumeSnapshotClass {class:?} of content {name} does not exist")
            })
        })?;
        let mut parameters = secrets::snapshot_parameters(&class.parameters.clone().unwrap_or_default())?;
        let owner = &spec.volume_snapshot_ref;
        if options.extra_create_metadata {
            let mut add = |key: &str, value: String| parameters.insert(format!("{RESERVED}{key}"), value);
            add("volumesnapshot/name", owner.name.clone().unwrap_or_default());
            add("volumesnapshot/namespace", owner.namespace.clone().unwrap_or_default());
            add("volumesnapshotcontent/name", content.name_any());
        }
        let name = csi_name(
            &options.snapshot_name_prefix,
            options.snapshot_name_uuid_length,
            owner.uid.as_deref().unwrap_or_default(),
        )?;
        let request = CreateSnapshotRequest {
            source_volume_id: spec.source.volume_handle.clone().unwrap_or_default(),
            name,
            parameters,
            ..CreateSnapshotRequest::default()
        };
        Ok((request, secret_of(content)?))
    }

    /// Asks how a snapshot that exists is; a driver that cannot tell is believed to have it.
    async fn check(&self, content: &Arc<VolumeSnapshotContent>) -> Result<Next, Failure> {
        match self.look_up(content).await {
            Ok(found) => self.save(content, &found).await,
            Err(failure) => self.failed(content, CHECK, failure).await,
        }
    }

    async fn look_up(&self, content: &VolumeSnapshotContent) -> Result<Snapshot, Failure> {
        let status = content.status.clone().unwrap_or_default();
        let given = content.spec.source.snapshot_handle.clone();
        let snapshot_id = given.or_else(|| status.snapshot_handle.clone()).unwrap_or_default();
        if !self.context.driver_now()?.can(ControllerCapability::ListSnapshots) {
            return Ok(Snapshot { snapshot_id, ready_to_use: true, ..Snapshot::default() });
        }
        let secret = match content.spec.volume_snapshot_class_name.as_deref() {
            _ if status.volume_group_snapshot_handle.is_some() => secret_of(content)?,
            None => None,
            Some(class) => {
                let class = self.classes.named(class).ok_or_else(|| {
                    Failure::refused(format!(
                        "failed to get snapshot class {class} for snapshot content {}: it does not exist",
                        content.name_any()
                    ))
                })?;
                let parameters = class.parameters.clone().unwrap_or_default();
                secrets::snapshot_reference(&parameters, SnapshotPurpose::List, &content.name_any(), None)?
            }
        };
        let secrets = self.context.secrets(secret.as_ref()).await?;
        let request = ListSnapshotsRequest {
            snapshot_id: snapshot_id.clone(),
            secrets,
            ..ListSnapshotsRequest::default()
        };
        let found = self.context.driver.find_snapshot(self.context.options.timeout, request).await?;
        found.ok_or_else(|| {
            Failure::refused(format!(
                "can not find snapshot for snapshotID {snapshot_id}: the driver does not know it; check the handle"
            ))
        })
    }

    /// Saves what the driver said, takes the mark away and says when to ask again.
    async fn save(&self, content: &Arc<VolumeSnapshotContent>, said: &Snapshot) -> Result<Next, Failure> {
        let now = Timestamp::now();
        let saved = edit::status(&self.context.cluster, content, |content| {
            content.status = Some(taken::snapshot(content.status.as_ref(), said, now));
        });
        let Some(content) = saved.await? else { return Ok(Next::Done) };
        if said.ready_to_use {
            return self.unmark(&content).await;
        }
        self.unmark(&content).await?;
        let created = content.status.as_ref().and_then(|status| status.creation_time);
        let age = poll::age(created, taken::since_1970(now));
        Ok(Next::After(poll::pause(age, self.context.options.poll)))
    }

    async fn delete(&self, content: &Arc<VolumeSnapshotContent>) -> Result<Next, Failure> {
        self.context.driver_now()?;
        // Data is about to be deleted: what the cache says is not enough.
        let live = self.context.cluster.fetch::<VolumeSnapshotContent>(&Key::of(content.as_ref())).await?;
        let Some(live) = live.filter(|live| live.uid() == content.uid()) else { return Ok(Next::Done) };
        if plan::plan(Seen::content(&live, &self.context.name)) != Plan::Delete {
            return Ok(Next::Done);
        }
        let deleted = self.call_delete(&live).await;
        if let Err(failure) = deleted {
            let text = format!("Failed to delete snapshot: {}{}", failure.sentence(), failure.hint());
            self.context.recorder.warning(live.as_ref(), "SnapshotDeleteError", text);
            return Err(failure);
        }
        // A deletion that is repeated after a crash finds no handle and does not call again.
        let cleared = edit::status(&self.context.cluster, &live, |content| {
            if let Some(status) = &mut content.status {
                status.snapshot_handle = None;
                status.ready_to_use = None;
                status.creation_time = None;
                status.restore_size = None;
            }
        });
        match cleared.await? {
            Some(content) => self.release(&content).await,
            None => Ok(Next::Done),
        }
    }

    async fn call_delete(&self, content: &VolumeSnapshotContent) -> Result<(), Failure> {
        let snapshot_id = content.status.as_ref().and_then(|status| status.snapshot_handle.clone());
        // An annotation that names half a secret is as good as none.
        let secret = secret_of(content).unwrap_or(None);
        let secrets = self.context.secrets_to_delete(&content.name_any(), secret.as_ref()).await?;
        let request = DeleteSnapshotRequest { snapshot_id: snapshot_id.unwrap_or_default(), secrets };
        let volume = content.spec.source.volume_handle.as_deref().and_then(|handle| self.volume_of(handle));
        let begun = Instant::now();
        let deleted = self.context.driver.delete_snapshot(self.context.options.timeout, request).await;
        tell("DeleteSnapshot", volume.as_deref(), begun, deleted.as_ref().err());
        Ok(deleted?)
    }

    async fn unmark(&self, content: &Arc<VolumeSnapshotContent>) -> Result<Next, Failure> {
        edit::object(&self.context.cluster, content, |content| {
            if content.annotations().contains_key(names::BEING_CREATED) {
                content.annotations_mut().remove(names::BEING_CREATED);
            }
        })
        .await?;
        Ok(Next::Done)
    }

    async fn release(&self, content: &Arc<VolumeSnapshotContent>) -> Result<Next, Failure> {
        edit::object(&self.context.cluster, content, |content| finalizers::remove(content, names::CONTENT))
            .await?;
        Ok(Next::Done)
    }

    async fn failed(
        &self,
        content: &Arc<VolumeSnapshotContent>,
        what: (&str, &str),
        failure: Failure,
    ) -> Result<Next, Failure> {
        self.failed_saying(content, what, "", failure).await
    }

    /// Tells of a failure where people look: in the status, and once by an event.
    async fn failed_saying(
        &self,
        content: &Arc<VolumeSnapshotContent>,
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

    /// Refuses a snapshot that another content has: a driver that confuses two must not have the one deleted with the
    /// other. What was asked for may exist all the same.
    fn not_of_another(
        &self,
        made: Snapshot,
        content: &VolumeSnapshotContent,
    ) -> Result<Snapshot, tonic::Status> {
        let owners = self.by_handle.get(&made.snapshot_id);
        match owners.iter().map(|owner| owner.name_any()).find(|owner| *owner != content.name_any()) {
            None => Ok(made),
            Some(owner) => Err(tonic::Status::aborted(format!(
                "the CSI driver's answer to CreateSnapshot is snapshot {:?}, which belongs to VolumeSnapshotContent \
                 {owner}; this is an error of the driver",
                made.snapshot_id
            ))),
        }
    }

    /// The PersistentVolume of a handle, under whose name all components hold a volume.
    fn volume_of(&self, handle: &str) -> Option<String> {
        self.volumes.get(handle).first().map(|volume| volume.name_any())
    }
}

const CREATE: (&str, &str) = ("SnapshotCreationFailed", "Failed to create snapshot");
const CHECK: (&str, &str) =
    ("SnapshotContentCheckandUpdateFailed", "Failed to check and update snapshot content");

/// The secret that a content's annotations name.
fn secret_of(content: &VolumeSnapshotContent) -> Result<Option<SecretReference>, Failure> {
    annotated_secret(content.annotations(), names::SECRET_NAME, names::SECRET_NAMESPACE)
}

/// The secret that annotations name; half a name is refused.
pub(super) fn annotated_secret(
    annotations: &BTreeMap<String, String>,
    name: &str,
    namespace: &str,
) -> Result<Option<SecretReference>, Failure> {
    match (annotations.get(name), annotations.get(namespace)) {
        (Some(name), Some(namespace)) if !name.is_empty() && !namespace.is_empty() => {
            Ok(Some(SecretReference { name: Some(name.clone()), namespace: Some(namespace.clone()) }))
        }
        (Some(_), Some(_)) => Err(Failure::refused(format!(
            "cannot retrieve secrets for snapshot content: secret name or namespace not specified; correct its annotations \
             {name} and {namespace}"
        ))),
        _ => Ok(None),
    }
}

pub(super) fn tell(call: &str, volume: Option<&str>, begun: Instant, error: Option<&tonic::Status>) {
    let step = Step { component: COMPONENT, call, volume: volume.unwrap_or_default(), ..Step::default() };
    step.ended(begun, error.map(tonic::Status::message));
}
