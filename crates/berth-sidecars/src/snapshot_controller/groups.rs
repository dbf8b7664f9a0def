//! VolumeGroupSnapshots: carries out what was decided about them and their members.

mod creation;
mod plan;

use std::sync::Arc;

use berth_kube::{Cache, Index, Key, Kind, Next, Queue};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;
use kube::core::{Selector, SelectorExt as _};

use self::creation::Chosen;
use self::plan::{Seen, Step};
use super::metrics::{self, Operations};
use super::{Controller, contents, error_now, status};
use crate::failure::{Failure, settled};
use crate::snapshots::{
    VolumeGroupSnapshot, VolumeGroupSnapshotClass, VolumeGroupSnapshotContent, VolumeGroupSnapshotStatus,
    VolumeSnapshotInfo, VolumeSnapshotStatus, names,
};
use berth_kube::finalizers;

/// What is kept of groups.
pub(super) struct Groups {
    pub(super) cache: Cache<VolumeGroupSnapshot>,
    /// Contents by the driver's id of their group.
    pub(super) by_handle: Index<VolumeGroupSnapshotContent, String>,
    /// Groups that have no content yet, by their namespace.
    open: Index<VolumeGroupSnapshot, String>,
    by_content: Index<VolumeGroupSnapshot, String>,
    contents: Cache<VolumeGroupSnapshotContent>,
    classes: Cache<VolumeGroupSnapshotClass>,
    claims: Index<PersistentVolumeClaim, String>,
    /// Volumes by driver and handle.
    volumes: Index<PersistentVolume, (String, String)>,
    queue: Queue<Key>,
    content_queue: Queue<Key>,
}

/// Works on groups until the cluster's shutdown.
pub(super) async fn run(controller: Arc<Controller>) {
    let shutdown = controller.cluster.shutdown().clone();
    let groups = Groups::new(&controller);
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = groups.synced() => {}
    }
    let groups = controller.groups.get_or_init(|| groups);
    groups.start(&controller);
    let workers = controller.options.workers;
    let work = groups.queue.run(workers, shutdown.clone(), |key| {
        let controller = controller.clone();
        async move { settled(controller.sync_group(&key).await) }
    });
    let contents = groups.content_queue.run(workers, shutdown.clone(), |key| {
        let controller = controller.clone();
        async move { settled(controller.sync_group_content(&key).await) }
    });
    tokio::join!(work, contents);
}

impl Groups {
    fn new(controller: &Controller) -> Self {
        let cluster = &controller.cluster;
        let groups = cluster.cache::<VolumeGroupSnapshot>();
        let contents = cluster.cache::<VolumeGroupSnapshotContent>();
        let retry = controller.options.retry;
        let bound = |group: &VolumeGroupSnapshot| {
            group.status.as_ref().and_then(|status| status.bound_volume_group_snapshot_content_name.clone())
        };
        Self {
            by_handle: contents.index(|content: &VolumeGroupSnapshotContent| {
                let status = content.status.as_ref();
                status.and_then(|status| status.volume_group_snapshot_handle.clone()).into_iter().collect()
            }),
            open: groups.index(move |group: &VolumeGroupSnapshot| {
                if bound(group).is_some() { Vec::new() } else { group.namespace().into_iter().collect() }
            }),
            by_content: groups.index(move |group: &VolumeGroupSnapshot| {
                let named = group.spec.source.volume_group_snapshot_content_name.clone();
                bound(group).into_iter().chain(named).collect()
            }),
            cache: groups,
            contents,
            classes: cluster.cache(),
            claims: controller
                .claims
                .index(|claim: &PersistentVolumeClaim| claim.namespace().into_iter().collect()),
            volumes: controller.volumes.index(|volume: &PersistentVolume| {
                let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
                csi.map(|csi| (csi.driver.clone(), csi.volume_handle.clone())).into_iter().collect()
            }),
            queue: cluster.queue("snapshot-controller-group-snapshot", retry),
            content_queue: cluster.queue("snapshot-controller-group-content", retry),
        }
    }

    async fn synced(&self) {
        self.cache.synced().await;
        self.contents.synced().await;
        self.classes.synced().await;
    }

    /// Puts what there is, and then what changes, into the queues.
    fn start(&self, controller: &Controller) {
        self.measure(controller);
        let (queue, snapshots) = (self.queue.clone(), controller.snapshot_queue.clone());
        let members = controller.by_group.clone();
        self.cache.on_change(move |group| {
            let key = Key::of(group.as_ref());
            for member in members.get(&key) {
                snapshots.add(Key::of(member.as_ref()));
            }
            queue.add(key);
        });
        // Members whose group went while nobody looked.
        for key in controller.by_group.values() {
            for member in controller.by_group.get(&key) {
                controller.snapshot_queue.add(Key::of(member.as_ref()));
            }
        }
        let (queue, own, by_content) =
            (self.queue.clone(), self.content_queue.clone(), self.by_content.clone());
        let (snapshots, by_handle) = (controller.snapshot_queue.clone(), controller.by_group_handle.clone());
        self.contents.on_change(move |content| {
            own.add(Key::of(content.as_ref()));
            let back = &content.spec.volume_group_snapshot_ref;
            queue.add(Key::new(
                back.namespace.clone().unwrap_or_default(),
                back.name.clone().unwrap_or_default(),
            ));
            for group in by_content.get(&content.name_any()) {
                queue.add(Key::of(group.as_ref()));
            }
            let handle =
                content.status.as_ref().and_then(|status| status.volume_group_snapshot_handle.as_ref());
            for member in handle.iter().flat_map(|handle| by_handle.get(*handle)) {
                snapshots.add(super::snapshot_of(&member));
            }
        });
        let (queue, open) = (self.queue.clone(), self.open.clone());
        self.classes.on_change(move |_| {
            for group in open.values().iter().flat_map(|namespace| open.get(namespace)) {
                queue.add(Key::of(group.as_ref()));
            }
        });
        let (queue, open, members) = (self.queue.clone(), self.open.clone(), controller.by_group.clone());
        let snapshots = controller.snapshots.clone();
        controller.claims.subscribe(move |before, after| {
            let namespace = after.or(before).and_then(|claim| claim.namespace()).unwrap_or_default();
            for group in open.get(&namespace) {
                queue.add(Key::of(group.as_ref()));
            }
            // A group that is being deleted waits for claims that are restored from its members.
            for restored in before.iter().flat_map(|claim| super::claims::restored_from(claim)) {
                let group = snapshots.get(&restored).and_then(|snapshot| super::group_of(&snapshot));
                if let Some(group) = group.filter(|group| !members.get(group).is_empty()) {
                    queue.add(group);
                }
            }
        });
    }

    /// Lets the metrics see what groups go through.
    fn measure(&self, controller: &Controller) {
        let operations = Operations::new(&controller.options.metrics, metrics::GROUP);
        let (contents, classes) = (self.contents.clone(), self.classes.clone());
        self.cache.subscribe(move |before, after| {
            let Some(group) = after.or(before) else { return };
            let status = group.status.as_ref();
            let class = group.spec.volume_group_snapshot_class_name.as_deref().unwrap_or_default();
            let of_class = || classes.named(class).map(|class| class.driver.clone());
            let content = contents.named(&plan::content_name(group));
            let seen = metrics::Seen {
                uid: group.uid().unwrap_or_default(),
                driver: content.map(|content| content.spec.driver.clone()).or_else(of_class),
                given: group.spec.source.volume_group_snapshot_content_name.is_some(),
                taken: status.is_some_and(|status| status.creation_time.is_some()),
                ready: status::is_group_ready(group),
                deleting: group.metadata.deletion_timestamp.is_some(),
            };
            if after.is_some() { operations.observe(&seen) } else { operations.gone(&seen) }
        });
    }

    /// The claims that a group's selector chooses, in a stable order, with their volumes.
    fn chosen(
        &self,
        group: &VolumeGroupSnapshot,
        volumes: &Cache<PersistentVolume>,
    ) -> Result<Vec<Chosen>, String> {
        let selector = group.spec.source.selector.clone().unwrap_or_default();
        let selector =
            Selector::try_from(selector).map_err(|wrong| format!("the selector is invalid: {wrong}"))?;
        let mut claims: Vec<_> = self
            .claims
            .get(&group.namespace().unwrap_or_default())
            .into_iter()
            .filter(|claim| selector.matches(claim.labels()))
            .collect();
        claims.sort_by_key(|claim| claim.name_any());
        let volume = |claim: &PersistentVolumeClaim| {
            volumes
                .named(claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default())
        };
        Ok(claims.into_iter().map(|claim| (claim.clone(), volume(&claim))).collect())
    }
}

impl Controller {
    fn known_groups(&self) -> &Groups {
        self.groups.get().expect("the queues of groups run only after they are known")
    }

    async fn sync_group_content(&self, key: &Key) -> Result<Next, Failure> {
        let Some(content) = self.known_groups().contents.get(key) else { return Ok(Next::Done) };
        match contents::of_group(&content) {
            contents::Plan::Nothing => {}
            contents::Plan::Invalid => {
                let text = "Exactly one of GroupSnapshotHandles and VolumeHandles should be specified";
                self.recorder.warning(content.as_ref(), "GroupContentValidationError", text);
            }
            contents::Plan::Protect => {
                self.cluster
                    .edit(content.as_ref(), |content| {
                        if content.metadata.deletion_timestamp.is_none() {
                            finalizers::add(content, names::GROUP_CONTENT);
                        }
                    })
                    .await?;
            }
        }
        Ok(Next::Done)
    }

    async fn sync_group(&self, key: &Key) -> Result<Next, Failure> {
        let groups = self.known_groups();
        let Some(group) = groups.cache.get(key) else { return Ok(Next::Done) };
        let name = plan::content_name(&group);
        let content = match groups.contents.named(&name) {
            // Whether a group that goes leaves a content behind is asked, not believed.
            None if group.metadata.deletion_timestamp.is_some() => {
                self.cluster.fetch(&Key::cluster(name)).await?
            }
            known => known,
        };
        let members = self.by_group.get(key);
        let restoring =
            members.iter().find(|member| !self.restoring.get(&Key::of(member.as_ref())).is_empty());
        let restoring = restoring.map(|member| member.name_any());
        let steps = plan::plan(&Seen {
            group: &group,
            content: content.as_deref(),
            restoring: restoring.as_deref(),
            has_members: members.iter().any(|member| member.metadata.deletion_timestamp.is_none()),
        });
        let mut current = group;
        for step in steps {
            match self.carry_out_for_group(&current, content.as_ref(), step).await? {
                Some(next) => current = next,
                None => return Ok(Next::Done),
            }
        }
        Ok(Next::Done)
    }

    /// One step; the group as it is afterwards, or `None` if nothing more can be done now.
    async fn carry_out_for_group(
        &self,
        group: &Arc<VolumeGroupSnapshot>,
        content: Option<&Arc<VolumeGroupSnapshotContent>>,
        step: Step,
    ) -> Result<Option<Arc<VolumeGroupSnapshot>>, Failure> {
        match (step, content) {
            (Step::Protect, _) => {
                let protected = self.cluster.edit(group.as_ref(), |group| {
                    if group.metadata.deletion_timestamp.is_none() {
                        finalizers::add(group, names::GROUP_BOUND);
                    }
                });
                Ok(protected.await?)
            }
            (Step::Release, _) => {
                let released =
                    self.cluster.edit(group.as_ref(), |group| finalizers::remove(group, names::GROUP_BOUND));
                Ok(released.await?)
            }
            (Step::Create, _) => self.create_group(group).await,
            (Step::Status(after), _) => self.tell_group(group, after).await,
            (Step::Fail(reason, message), _) => {
                self.fail_group(group, reason, &message).await?;
                Ok(None)
            }
            (Step::Pending(message), _) => {
                self.recorder.warning(group.as_ref(), "SnapshotDeletePending", message);
                Ok(None)
            }
            (Step::DeleteMembers, _) => self.delete_members(group).await,
            (Step::Bind, Some(content)) => {
                self.cluster
                    .update(content.as_ref(), |content| {
                        content.spec.volume_group_snapshot_ref.uid = group.uid();
                        let class = &mut content.spec.volume_group_snapshot_class_name;
                        if class.is_none() {
                            class.clone_from(&group.spec.volume_group_snapshot_class_name);
                        }
                    })
                    .await?;
                Ok(Some(group.clone()))
            }
            (Step::Members, Some(content)) => {
                self.make_members(group, content).await?;
                Ok(Some(group.clone()))
            }
            (Step::MarkContent, Some(content)) => {
                self.cluster
                    .edit(content.as_ref(), |content| {
                        content
                            .annotations_mut()
                            .insert(names::GROUP_BEING_DELETED.to_owned(), "yes".to_owned());
                        // One that was bound only now may not be kept yet, and would go without its group.
                        let status = content.status.as_ref();
                        let taken =
                            status.is_some_and(|status| status.volume_group_snapshot_handle.is_some());
                        if taken && content.metadata.deletion_timestamp.is_none() {
                            finalizers::add(content, names::GROUP_CONTENT);
                        }
                    })
                    .await?;
                Ok(Some(group.clone()))
            }
            (Step::DeleteContent, Some(content)) => {
                if let Err(error) = self.cluster.delete(content.as_ref()).await {
                    let text =
                        format!("Failed to delete group snapshot content API object: {}", error.chain());
                    self.recorder.warning(group.as_ref(), "GroupSnapshotContentObjectDeleteError", text);
                    return Err(error.into());
                }
                Ok(Some(group.clone()))
            }
            (Step::Bind | Step::Members | Step::MarkContent | Step::DeleteContent, None) => Ok(None),
        }
    }

    /// Makes the content of a group: class, then the content.
    async fn create_group(
        &self,
        group: &Arc<VolumeGroupSnapshot>,
    ) -> Result<Option<Arc<VolumeGroupSnapshot>>, Failure> {
        let groups = self.known_groups();
        let chosen = groups.chosen(group, &self.volumes).map_err(|message| super::creation::Refusal {
            reason: "GroupSnapshotContentCreationFailed",
            message: format!("failed to create group snapshot content with error {message}"),
        });
        let content = chosen.and_then(|chosen| creation::content(group, &chosen, &groups.classes.list()));
        let content = match content {
            Ok(content) => content,
            Err(refusal) => {
                self.fail_group(group, refusal.reason, &refusal.message).await?;
                return Ok(None);
            }
        };
        let class = content.spec.volume_group_snapshot_class_name.clone();
        let chosen = self.cluster.edit(group.as_ref(), |group| {
            let own = &mut group.spec.volume_group_snapshot_class_name;
            if own.is_none() {
                own.clone_from(&class);
            }
        });
        let Some(group) = chosen.await? else { return Ok(None) };
        let key = Key::of(group.as_ref());
        if self.create_or_find(&content).await?.is_none() {
            return Ok(None);
        }
        let text = format!("Waiting for a group snapshot {key} to be created by the CSI driver.");
        self.recorder.normal(group.as_ref(), "CreatingGroupSnapshot", text);
        Ok(Some(group))
    }

    /// Makes the objects of all members, and binds them to each other; what is done already stays as it is.
    async fn make_members(
        &self,
        group: &VolumeGroupSnapshot,
        content: &VolumeGroupSnapshotContent,
    ) -> Result<(), Failure> {
        let status = content.status.clone().unwrap_or_default();
        let handle = status.volume_group_snapshot_handle.unwrap_or_default();
        for info in status.volume_snapshot_info_list.unwrap_or_default() {
            self.make_member(group, content, &info, &handle).await?;
        }
        Ok(())
    }

    async fn make_member(
        &self,
        group: &VolumeGroupSnapshot,
        content: &VolumeGroupSnapshotContent,
        info: &VolumeSnapshotInfo,
        handle: &str,
    ) -> Result<(), Failure> {
        let place = (content.spec.driver.clone(), info.volume_handle.clone());
        let volumes = self.known_groups().volumes.get(&place);
        let volume = if volumes.len() == 1 { volumes.first() } else { None };
        let (mut its, snapshot) =
            creation::member(group, content, &info.volume_handle, volume.map(Arc::as_ref));
        // The snapshot comes first, and the content knows it from its first moment: so it goes with the snapshot, and
        // the snapshot with the group, whatever happens in between.
        let Some(snapshot) = self.create_or_find(&snapshot).await? else { return Ok(()) };
        its.spec.volume_snapshot_ref.uid = snapshot.uid();
        let Some(its) = self.create_or_find(&its).await? else { return Ok(()) };
        let uid = its.spec.volume_snapshot_ref.uid.as_deref().unwrap_or_default();
        if !uid.is_empty() && Some(uid) != snapshot.uid().as_deref() {
            return Err(Failure::refused(format!(
                "VolumeSnapshotContent {} of group {} is bound to a different snapshot",
                its.name_any(),
                Key::of(group)
            )));
        }
        let bound = self.cluster.edit(its.as_ref(), |content| {
            content.spec.volume_snapshot_ref.uid = snapshot.uid();
        });
        let Some(its) = bound.await? else { return Ok(()) };
        if its.status.as_ref().and_then(|status| status.snapshot_handle.as_ref()).is_none() {
            let status = creation::member_status(info, handle);
            self.cluster.edit_status(its.as_ref(), |content| content.status = Some(status.clone())).await?;
        }
        self.cluster
            .edit_status(snapshot.as_ref(), |snapshot| {
                let status: &mut VolumeSnapshotStatus = snapshot.status.get_or_insert_default();
                status.bound_volume_snapshot_content_name.get_or_insert_with(|| its.name_any());
            })
            .await?;
        Ok(())
    }

    /// Creates an object, or gives the one that is there; `None` if it went in between.
    async fn create_or_find<K: Kind>(&self, object: &K) -> Result<Option<Arc<K>>, Failure> {
        match self.cluster.create(object).await {
            Ok(created) => Ok(Some(created)),
            Err(error) if error.is_already_exists() => Ok(self.cluster.fetch(&Key::of(object)).await?),
            Err(error) => Err(error.into()),
        }
    }

    async fn delete_members(
        &self,
        group: &Arc<VolumeGroupSnapshot>,
    ) -> Result<Option<Arc<VolumeGroupSnapshot>>, Failure> {
        let key = Key::of(group.as_ref());
        for member in self.by_group.get(&key) {
            if member.metadata.deletion_timestamp.is_some() {
                continue;
            }
            if let Err(error) = self.cluster.delete(member.as_ref()).await {
                let text = format!(
                    "failed to delete snapshot API object {} part of group snapshot {key}: {}",
                    Key::of(member.as_ref()),
                    error.chain()
                );
                self.recorder.warning(group.as_ref(), "SnapshotDeleteError", text);
                return Err(error.into());
            }
        }
        Ok(Some(group.clone()))
    }

    /// Writes a new status, and tells what it means.
    async fn tell_group(
        &self,
        group: &Arc<VolumeGroupSnapshot>,
        after: VolumeGroupSnapshotStatus,
    ) -> Result<Option<Arc<VolumeGroupSnapshot>>, Failure> {
        let key = Key::of(group.as_ref());
        let before = group.status.as_ref().and_then(|status| status.creation_time.as_ref());
        let taken = before.is_none() && after.creation_time.is_some();
        let ready = !status::is_group_ready(group) && after.ready_to_use == Some(true);
        let written = self.cluster.update_status(group.as_ref(), |group| group.status = Some(after)).await?;
        if taken {
            let text = format!("GroupSnapshot {key} was successfully created by the CSI driver.");
            self.recorder.normal(group.as_ref(), "GroupSnapshotCreated", text);
        }
        if ready {
            let text = format!("GroupSnapshot {key} is ready to use.");
            self.recorder.normal(group.as_ref(), "GroupSnapshotReady", text);
        }
        Ok(Some(written))
    }

    /// Tells of what cannot go on: in the status, and once by an event. It is looked at again when something changes.
    async fn fail_group(
        &self,
        group: &Arc<VolumeGroupSnapshot>,
        reason: &str,
        message: &str,
    ) -> Result<(), Failure> {
        let known = group.status.as_ref().and_then(|status| status.error.as_ref()?.message.as_deref());
        if known == Some(message) {
            return Ok(());
        }
        self.recorder.warning(group.as_ref(), reason, message);
        self.cluster
            .edit_status(group.as_ref(), |group| {
                let status = group.status.get_or_insert_default();
                status.error = Some(error_now(message));
                status.ready_to_use = Some(false);
            })
            .await?;
        Ok(())
    }
}
