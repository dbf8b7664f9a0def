//! Who owns what: everything on the storage has exactly one object that knows it, every object has what it says, and
//! no object is kept by a finalizer or an annotation that somebody forgot.

use berth_sidecars::snapshots::{
    VolumeGroupSnapshot, VolumeGroupSnapshotContent, VolumeSnapshot, VolumeSnapshotContent,
};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt;
use kube::api::ListParams;

use super::{Goal, Goals, World, subject};

/// What stays on objects that are settled.
const USUAL: [&str; 10] = [
    "kubernetes.io/pvc-protection",
    "kubernetes.io/pv-protection",
    "external-provisioner.volume.kubernetes.io/finalizer",
    "external-attacher/local-berth-dev",
    // Hinders nobody before the claim is deleted, and goes then.
    "provisioner.storage.kubernetes.io/cloning-protection",
    "snapshot.storage.kubernetes.io/volumesnapshot-as-source-protection",
    "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection",
    "snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection",
    "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection",
    "groupsnapshot.storage.kubernetes.io/",
];

/// Something that is not as it should be.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) subject: String,
    #[expect(dead_code, reason = "read by whoever reads the failure")]
    what: String,
}

/// Every object of the kinds that the components work on, and what is wrong with them.
struct ObservedWorld {
    claims: Vec<PersistentVolumeClaim>,
    volumes: Vec<PersistentVolume>,
    attachments: Vec<VolumeAttachment>,
    snapshots: Vec<VolumeSnapshot>,
    contents: Vec<VolumeSnapshotContent>,
    groups: Vec<VolumeGroupSnapshot>,
    group_contents: Vec<VolumeGroupSnapshotContent>,
    wrong: Vec<Wrong>,
}

impl ObservedWorld {
    fn report(&mut self, subject: &str, what: String) {
        self.wrong.push(Wrong { subject: subject.to_owned(), what });
    }

    fn expect(&mut self, subject: &str, right: bool, what: impl FnOnce() -> String) {
        if !right {
            self.report(subject, what());
        }
    }

    /// An object that stays has no annotation of work under way.
    fn settled(&mut self, subject: &str, object: &impl ResourceExt) {
        let name = object.name_any();
        let leaving = object.meta().deletion_timestamp.is_some();
        self.expect(subject, !leaving, || format!("{name} is being deleted: {:?}", object.finalizers()));
        for finalizer in object.finalizers() {
            let usual = USUAL.iter().any(|usual| finalizer.starts_with(usual));
            self.expect(subject, usual, || format!("{name} is kept by {finalizer}"));
        }
        let annotated = object.annotations().keys().any(|key| key.contains("being-"));
        self.expect(subject, !annotated, || format!("{name} is annotated: {:?}", object.annotations()));
    }
}

impl World {
    /// Everything that is not as it should be.
    pub(super) async fn wrong(&self, goals: &Goals) -> Vec<Wrong> {
        let all = ListParams::default();
        let mut seen = ObservedWorld {
            claims: self.server.claims().list(&all).await.unwrap().items,
            volumes: self.server.all().list(&all).await.unwrap().items,
            attachments: self.server.all().list(&all).await.unwrap().items,
            snapshots: self.server.snapshots().list(&all).await.unwrap().items,
            contents: self.server.all().list(&all).await.unwrap().items,
            groups: self.server.groups().list(&all).await.unwrap().items,
            group_contents: self.server.all().list(&all).await.unwrap().items,
            wrong: Vec::new(),
        };
        self.check_storage(&mut seen, goals);
        self.check_volumes(&mut seen);
        check_claims(&mut seen);
        self.check_attachments(&mut seen);
        self.check_snapshots(&mut seen);
        check_groups(&mut seen);
        seen.wrong
    }

    /// The storage has what it should, and an object for each.
    fn check_storage(&self, seen: &mut ObservedWorld, goals: &Goals) {
        let volumes = self.fake.storage.volumes.lock().clone();
        let snapshots = self.fake.storage.snapshots.lock().clone();
        let attached = self.fake.storage.attached.lock().clone();
        let mut there = Goals::new();
        for name in volumes.keys() {
            let whose = self.subject_of(name);
            let owners = seen.volumes.iter().filter(|volume| handle(volume) == format!("id-{name}")).count();
            seen.expect(&whose, owners == 1, || format!("volume {name} has {owners} PersistentVolumes"));
            there.entry(whose).or_default().volumes += 1;
        }
        for (name, volume) in &snapshots {
            let whose = self.subject_of(volume);
            let id = format!("id-{name}");
            let owners = seen.contents.iter().filter(|content| snapshot_handle(content) == id).count();
            seen.expect(&whose, owners == 1, || format!("snapshot {name} has {owners} contents"));
            there.entry(whose).or_default().snapshots += 1;
        }
        for (volume, node) in &attached {
            let whose = self.subject_of(volume);
            let owned = seen.attachments.iter().any(|attachment| {
                let name = attachment.spec.source.persistent_volume_name.as_deref().unwrap_or_default();
                format!("id-{name}") == *volume && attachment.spec.node_name == *node
            });
            seen.expect(&whose, owned, || format!("{volume} is attached to {node} for nobody"));
            there.entry(whose).or_default().attached += 1;
        }
        for whose in goals.keys().chain(there.keys()) {
            let wanted = goals.get(whose).copied().unwrap_or_default();
            let found = there.get(whose).copied().unwrap_or_default();
            seen.expect(whose, found == wanted, || format!("there is {found:?} instead of {wanted:?}"));
        }
        let objects = Goal {
            volumes: seen.volumes.len(),
            snapshots: seen.contents.len(),
            attached: seen.attachments.len(),
        };
        let stored = Goal { volumes: volumes.len(), snapshots: snapshots.len(), attached: attached.len() };
        seen.expect("all", objects == stored, || format!("objects {objects:?}, storage {stored:?}"));
    }

    /// Every volume exists as it says, with a claim that is bound to it.
    fn check_volumes(&self, seen: &mut ObservedWorld) {
        for volume in seen.volumes.clone() {
            let name = volume.name_any();
            let whose = self.subject_of(&name);
            seen.settled(&whose, &volume);
            let spec = volume.spec.clone().unwrap();
            let owner = spec.claim_ref.unwrap().uid;
            let claim = seen.claims.iter().find(|claim| claim.uid() == owner).cloned();
            let bound = claim
                .as_ref()
                .is_some_and(|claim| claim.spec.as_ref().unwrap().volume_name == Some(name.clone()));
            seen.expect(&whose, bound, || format!("{name} has no claim that is bound to it"));
            let stored = self.fake.storage.volumes.lock().get(&name).copied();
            let size = spec.capacity.unwrap()["storage"].0.clone();
            let shown = stored.map(|bytes| format!("{}Mi", bytes >> 20));
            seen.expect(&whose, shown.as_ref() == Some(&size), || {
                format!("{name} has {shown:?}, not {size}")
            });
            let level = self
                .fake
                .storage
                .attributes
                .lock()
                .get(&name)
                .and_then(|attributes| attributes.get("level").cloned());
            let class = spec.volume_attributes_class_name;
            seen.expect(&whose, level == class, || format!("{name} has level {level:?}, not {class:?}"));
        }
    }

    /// Every attachment is attached.
    fn check_attachments(&self, seen: &mut ObservedWorld) {
        for attachment in seen.attachments.clone() {
            let name = attachment.name_any();
            seen.settled(subject(&name), &attachment);
            let status = attachment.status.clone().unwrap_or_default();
            let volume = attachment.spec.source.persistent_volume_name.clone().unwrap_or_default();
            let attachment_key = (format!("id-{volume}"), attachment.spec.node_name.clone());
            let really = self.fake.storage.attached.lock().contains(&attachment_key);
            let right = status.attached && really && status.attach_error.is_none();
            seen.expect(subject(&name), right, || format!("{name} really attached: {really}, {status:?}"));
        }
    }

    /// Every snapshot is ready, and its content has one that exists.
    fn check_snapshots(&self, seen: &mut ObservedWorld) {
        for content in seen.contents.clone() {
            let name = content.name_any();
            let whose = self.subject_of(content.spec.source.volume_handle.as_deref().unwrap_or_default());
            seen.settled(&whose, &content);
            let id = snapshot_handle(&content);
            let exists = self.fake.storage.snapshots.lock().contains_key(id.trim_start_matches("id-"));
            seen.expect(&whose, exists, || format!("{name} has no snapshot {id:?}"));
            let uid = content.spec.volume_snapshot_ref.uid.clone();
            let owned = seen.snapshots.iter().any(|snapshot| snapshot.uid() == uid);
            seen.expect(&whose, owned, || format!("{name} has no VolumeSnapshot"));
        }
        for snapshot in seen.snapshots.clone() {
            let claim = snapshot.spec.source.persistent_volume_claim_name.clone().unwrap_or_default();
            let (name, whose) = (snapshot.name_any(), subject(&claim).to_owned());
            seen.settled(&whose, &snapshot);
            let status = snapshot.status.clone().unwrap_or_default();
            let right = status.ready_to_use == Some(true) && status.error.is_none();
            seen.expect(&whose, right, || format!("{name} is {status:?}"));
            let content = status.bound_volume_snapshot_content_name.unwrap_or_default();
            let there = seen.contents.iter().any(|known| known.name_any() == content);
            seen.expect(&whose, there, || format!("{name} has no content {content:?}"));
        }
    }
}

/// Every claim is bound, as large as it says, and nothing is under way.
fn check_claims(seen: &mut ObservedWorld) {
    for claim in seen.claims.clone() {
        let name = claim.name_any();
        let whose = subject(&name).to_owned();
        seen.settled(&whose, &claim);
        let (spec, status) = (claim.spec.clone().unwrap(), claim.status.clone().unwrap_or_default());
        let volume = spec.volume_name.clone().unwrap_or_default();
        let there = seen.volumes.iter().find(|known| known.name_any() == volume).cloned();
        seen.expect(&whose, there.is_some(), || format!("claim {name} has no volume: {:?}", status.phase));
        let wanted = spec.resources.unwrap().requests.unwrap()["storage"].clone();
        let has = status.capacity.as_ref().and_then(|capacity| capacity.get("storage").cloned());
        seen.expect(&whose, has.as_ref() == Some(&wanted), || {
            format!("claim {name} has {has:?}, not {wanted:?}")
        });
        let class = status.current_volume_attributes_class_name;
        let right = spec.volume_attributes_class_name == class;
        seen.expect(&whose, right, || format!("claim {name} has attributes {class:?}"));
        let idle = status.allocated_resource_statuses.is_none()
            && status.modify_volume_status.is_none()
            && status.conditions.iter().flatten().count() == 0;
        seen.expect(&whose, idle, || format!("claim {name} is at work: {:?}", status.conditions));
    }
}

/// Every group is ready and has its content.
fn check_groups(seen: &mut ObservedWorld) {
    for group in seen.groups.clone() {
        let name = group.name_any();
        seen.settled(subject(&name), &group);
        let status = group.status.clone().unwrap_or_default();
        let content = status.bound_volume_group_snapshot_content_name.clone().unwrap_or_default();
        let there = seen.group_contents.iter().any(|known| known.name_any() == content);
        let right = there && status.ready_to_use == Some(true) && status.error.is_none();
        seen.expect(subject(&name), right, || format!("group {name} is {status:?}"));
    }
    for content in seen.group_contents.clone() {
        let back = content.spec.volume_group_snapshot_ref.clone();
        let whose = subject(back.name.as_deref().unwrap_or_default()).to_owned();
        seen.settled(&whose, &content);
        let owned = seen.groups.iter().any(|group| group.uid() == back.uid);
        seen.expect(&whose, owned, || format!("{} has no group", content.name_any()));
    }
}

fn handle(volume: &PersistentVolume) -> String {
    let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.map(|csi| csi.volume_handle.clone()).unwrap_or_default()
}

fn snapshot_handle(content: &VolumeSnapshotContent) -> String {
    content.status.as_ref().and_then(|status| status.snapshot_handle.clone()).unwrap_or_default()
}
