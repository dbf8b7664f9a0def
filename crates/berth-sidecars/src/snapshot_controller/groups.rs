//! VolumeGroupSnapshots: what is observed of them, the content they get, and the objects of their members.

mod plan;

use berth_core::names::events;
use std::sync::Arc;

use berth_kube::{Cache, Index, Key, Kind, Loop, Queue};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;
use kube::core::{Selector, SelectorExt as _};

use self::plan::{ObservedGroup, Step};
use super::binding::{Bindable, Caches, Content, GroupStep, Words};
use super::creation::{self, Chosen, Refusal};
use super::{Controller, metrics};
use crate::failure::{Failure, settled};
use crate::snapshots::{
    SnapshotError, VolumeGroupSnapshot, VolumeGroupSnapshotClass, VolumeGroupSnapshotContent,
    VolumeGroupSnapshotStatus, VolumeSnapshotInfo, VolumeSnapshotStatus, names,
};

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
    let cluster = &controller.cluster;
    let groups = Groups::new(&controller);
    let synced = async {
        groups.cache.synced().await;
        groups.contents.synced().await;
        groups.classes.synced().await;
    };
    tokio::select! {
        () = cluster.shutdown().cancelled() => return,
        () = synced => {}
    }
    let groups = controller.groups.get_or_init(|| groups);
    controller.measure::<VolumeGroupSnapshot>();
    groups.wake_members(&controller);
    let workers = controller.options.workers;
    let work = groups.group_loop(&controller).run(workers, |key| {
        let controller = controller.clone();
        async move { settled(controller.sync::<VolumeGroupSnapshot>(&key).await) }
    });
    let contents = Loop::new(cluster, &groups.content_queue).keyed(&groups.contents).run(workers, |key| {
        let controller = controller.clone();
        async move { settled(controller.sync_content::<VolumeGroupSnapshot>(&key).await) }
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

    /// Groups, when they, their contents, classes, claims or volumes, or the claims that are restored from their members
    /// change.
    fn group_loop(&self, controller: &Controller) -> Loop<Key> {
        let (by_content, snapshots) = (self.by_content.clone(), controller.snapshots.clone());
        let (open, unbound, waiting) = (self.open.clone(), self.open.clone(), self.open.clone());
        let members = controller.by_group.clone();
        let keys = |groups: Vec<Arc<VolumeGroupSnapshot>>| {
            groups.iter().map(|group| Key::of(group.as_ref())).collect::<Vec<_>>()
        };
        let groups = Loop::new(&controller.cluster, &self.queue)
            .keyed(&self.cache)
            .also(&self.contents, move |content| {
                let mut groups = keys(by_content.get(&content.name_any()));
                groups.push(super::owner_key(content.as_ref()));
                groups
            })
            .also(&self.classes, move |_| {
                let open = open.values().iter().flat_map(|namespace| open.get(namespace)).collect();
                keys(open)
            })
            .subscribe(&controller.claims, move |before, after| {
                let namespace = after.or(before).and_then(|claim| claim.namespace()).unwrap_or_default();
                let mut groups = keys(unbound.get(&namespace));
                // A group that is being deleted waits for claims that are restored from its members.
                for restored in before.iter().flat_map(|claim| super::claims::restored_from(claim)) {
                    let group = snapshots.get(&restored).and_then(|snapshot| super::group_of(&snapshot));
                    groups.extend(group.filter(|group| !members.get(group).is_empty()));
                }
                groups
            })
            // A claim may be seen to be bound before its volume is.
            .subscribe(&controller.volumes, move |_, after| {
                let claim = after.and_then(|volume| volume.spec.as_ref()?.claim_ref.as_ref());
                let namespace = claim.and_then(|claim| claim.namespace.as_deref());
                namespace.map_or_else(Vec::new, |namespace| keys(waiting.get(namespace)))
            })
            .reads(&controller.snapshots);
        match &controller.nodes {
            None => groups,
            Some(nodes) => groups.reads(nodes),
        }
    }

    /// Has members reconciled when their group or its content changes, and those whose group went while this controller did not run.
    fn wake_members(&self, controller: &Controller) {
        let (snapshots, members) = (controller.snapshot_queue.clone(), controller.by_group.clone());
        self.cache.on_change(move |group| {
            for member in members.get(&Key::of(group.as_ref())) {
                snapshots.add(Key::of(member.as_ref()));
            }
        });
        for key in controller.by_group.values() {
            for member in controller.by_group.get(&key) {
                controller.snapshot_queue.add(Key::of(member.as_ref()));
            }
        }
        let (snapshots, by_handle) = (controller.snapshot_queue.clone(), controller.by_group_handle.clone());
        self.contents.on_change(move |content| {
            let handle =
                content.status.as_ref().and_then(|status| status.volume_group_snapshot_handle.as_ref());
            for member in handle.iter().flat_map(|handle| by_handle.get(*handle)) {
                snapshots.add(super::owner_key(member.as_ref()));
            }
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

impl Bindable for VolumeGroupSnapshot {
    type Status = VolumeGroupSnapshotStatus;
    type Content = VolumeGroupSnapshotContent;
    type Class = VolumeGroupSnapshotClass;
    const WORDS: Words = Words {
        what: "group snapshot",
        name: "GroupSnapshot",
        content: "VolumeGroupSnapshotContent",
        creating: events::CREATING_GROUP_SNAPSHOT,
        not_created: events::CREATE_GROUP_SNAPSHOT_CONTENT_FAILED,
        created: events::GROUP_SNAPSHOT_CREATED,
        ready: events::GROUP_SNAPSHOT_READY,
        not_bound: events::GROUP_SNAPSHOT_BIND_FAILED,
        not_deleted: events::GROUP_SNAPSHOT_CONTENT_OBJECT_DELETE_ERROR,
    };
    const OPERATIONS: metrics::Names = metrics::GROUP;

    fn caches(controller: &Controller) -> Option<Caches<'_, Self>> {
        let Groups { cache, contents, classes, .. } = controller.groups.get()?;
        Some(Caches { objects: cache, contents, classes })
    }

    fn content_name(&self) -> Option<String> {
        Some(plan::content_name(self))
    }

    fn is_given(&self) -> bool {
        self.spec.source.volume_group_snapshot_content_name.is_some()
    }

    fn is_taken(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status.creation_time.is_some())
    }

    fn is_ready(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status.ready_to_use == Some(true))
    }

    fn error(&self) -> Option<&SnapshotError> {
        self.status.as_ref()?.error.as_ref()
    }

    fn fail(&mut self, error: SnapshotError) {
        let status = self.status.get_or_insert_default();
        status.error = Some(error);
        status.ready_to_use = Some(false);
    }

    fn set_status(&mut self, status: VolumeGroupSnapshotStatus) {
        self.status = Some(status);
    }

    fn class_name(&self) -> Option<&String> {
        self.spec.volume_group_snapshot_class_name.as_ref()
    }

    fn class_name_mut(&mut self) -> &mut Option<String> {
        &mut self.spec.volume_group_snapshot_class_name
    }

    fn plan(&self, controller: &Controller, content: Option<&VolumeGroupSnapshotContent>) -> Vec<Step> {
        let members = controller.by_group.get(&Key::of(self));
        let restoring =
            members.iter().find(|member| !controller.restoring.get(&Key::of(member.as_ref())).is_empty());
        let restoring = restoring.map(|member| member.name_any());
        plan::plan(&ObservedGroup {
            group: self,
            content,
            restoring: restoring.as_deref(),
            has_members: members.iter().any(|member| member.metadata.deletion_timestamp.is_none()),
        })
    }

    fn new_content(&self, controller: &Controller) -> Result<VolumeGroupSnapshotContent, Refusal> {
        let groups = controller.known_groups();
        let chosen = groups.chosen(self, &controller.volumes).map_err(|message| Refusal {
            reason: events::GROUP_SNAPSHOT_CONTENT_CREATION_FAILED,
            message: format!("failed to create group snapshot content with error {message}"),
        });
        let nodes = controller.nodes.as_ref().map(Cache::list);
        let classes = groups.classes.list();
        chosen.and_then(|chosen| creation::group_content(self, &chosen, &classes, nodes.as_deref()))
    }

    async fn protect_source(&self, _controller: &Controller) -> Result<(), Failure> {
        Ok(())
    }

    async fn group_step(
        self: &Arc<Self>,
        controller: &Controller,
        content: Option<&Arc<VolumeGroupSnapshotContent>>,
        step: GroupStep,
    ) -> Result<Option<Arc<Self>>, Failure> {
        match (step, content) {
            (GroupStep::DeleteMembers, _) => controller.delete_members(self).await?,
            (GroupStep::Members, Some(content)) => controller.make_members(self, content).await?,
            (GroupStep::Members | GroupStep::Own, _) => return Ok(None),
        }
        Ok(Some(self.clone()))
    }
}

impl Content for VolumeGroupSnapshotContent {
    const FINALIZER: &'static str = names::GROUP_CONTENT;
    const BEING_DELETED: &'static str = names::GROUP_BEING_DELETED;
    const INVALID: (&'static str, &'static str) = (
        events::GROUP_CONTENT_VALIDATION_ERROR,
        "Exactly one of GroupSnapshotHandles and VolumeHandles should be specified",
    );

    fn driver(&self) -> &str {
        &self.spec.driver
    }

    fn sources(&self) -> usize {
        let source = &self.spec.source;
        let volumes = source.volume_handles.as_ref().is_some_and(|handles| !handles.is_empty());
        usize::from(volumes) + usize::from(source.group_snapshot_handles.is_some())
    }

    fn owner(&self) -> &ObjectReference {
        &self.spec.volume_group_snapshot_ref
    }

    fn bind(&mut self, uid: Option<String>) {
        self.spec.volume_group_snapshot_ref.uid = uid;
    }

    fn class_name(&self) -> Option<&String> {
        self.spec.volume_group_snapshot_class_name.as_ref()
    }

    fn class_name_mut(&mut self) -> &mut Option<String> {
        &mut self.spec.volume_group_snapshot_class_name
    }

    fn is_taken(&self) -> bool {
        self.status.as_ref().is_some_and(|status| status.volume_group_snapshot_handle.is_some())
    }
}

impl Controller {
    fn known_groups(&self) -> &Groups {
        self.groups.get().expect("the queues of groups run only after they are known")
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
        let key = (content.spec.driver.clone(), info.volume_handle.clone());
        let volumes = self.known_groups().volumes.get(&key);
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

    async fn delete_members(&self, group: &VolumeGroupSnapshot) -> Result<(), Failure> {
        let key = Key::of(group);
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
                self.recorder.warning(group, events::SNAPSHOT_DELETE_ERROR, text);
                return Err(error.into());
            }
        }
        Ok(())
    }
}
