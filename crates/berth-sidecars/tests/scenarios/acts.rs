//! What people ask for, each act alone: what is there before, what is asked, what is to be there afterwards, and what
//! is to be there if they take it back.

use berth_testkit::{delete, patch};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::ResourceExt as _;
use serde_json::json;

use crate::snapshot_bench::from_snapshot;
use crate::world::{Goal, Goals, World};

/// One thing that is asked for a subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Provision,
    Clone,
    Restore,
    Attach,
    Detach,
    Grow,
    Modify,
    Snapshot,
    DeleteSnapshot,
    Group,
    DeleteGroup,
    DeleteVolume,
    /// Everything that a subject has goes at once.
    Leave,
}

const NOTHING: Goal = Goal { volumes: 0, snapshots: 0, attached: 0 };
const VOLUME: Goal = Goal { volumes: 1, ..NOTHING };
const ATTACHED: Goal = Goal { attached: 1, ..VOLUME };
const SNAPSHOT: Goal = Goal { snapshots: 1, ..VOLUME };

impl Act {
    /// What there is before.
    pub(crate) fn before(self) -> Goal {
        match self {
            Self::Provision => NOTHING,
            Self::Clone | Self::Attach | Self::Grow | Self::Modify | Self::Snapshot | Self::DeleteVolume => {
                VOLUME
            }
            Self::Restore | Self::DeleteSnapshot => SNAPSHOT,
            Self::Detach => ATTACHED,
            Self::Group => Goal { volumes: 2, ..NOTHING },
            Self::DeleteGroup => Goal { volumes: 2, snapshots: 2, ..NOTHING },
            Self::Leave => Goal { volumes: 1, snapshots: 1, attached: 1 },
        }
    }

    /// What there is afterwards.
    pub(crate) fn after(self) -> Goal {
        match self {
            Self::Provision | Self::Detach | Self::Grow | Self::Modify | Self::DeleteSnapshot => VOLUME,
            Self::Clone => Goal { volumes: 2, ..NOTHING },
            Self::Restore => Goal { volumes: 2, ..SNAPSHOT },
            Self::Attach => ATTACHED,
            Self::Snapshot => SNAPSHOT,
            Self::Group => Self::DeleteGroup.before(),
            Self::DeleteGroup => Self::Group.before(),
            Self::DeleteVolume | Self::Leave => NOTHING,
        }
    }

    /// What there is if it was taken back.
    pub(crate) fn taken_back(self) -> Goal {
        match self {
            Self::Provision | Self::Grow | Self::Modify | Self::Detach => NOTHING,
            Self::Clone | Self::Attach | Self::Snapshot => VOLUME,
            Self::Restore => SNAPSHOT,
            Self::Group => self.before(),
            Self::DeleteSnapshot | Self::DeleteGroup | Self::DeleteVolume | Self::Leave => self.after(),
        }
    }

    /// Makes what there is before, for all subjects at once.
    pub(crate) async fn prepare(self, world: &World, subjects: &[String]) {
        let before = self.before();
        for subject in subjects {
            if before.volumes > 0 {
                world.claim(subject, json!({})).await;
            }
            if before.volumes > 1 {
                world.claim(&format!("{subject}-more"), json!({})).await;
            }
        }
        let ours = |whose: &str| subjects.iter().any(|subject| subject == whose);
        let volumes = Goal { volumes: before.volumes, ..NOTHING };
        world.settles(&goals(subjects, volumes), ours, "preparing volumes").await;
        for subject in subjects {
            match self {
                Self::Detach => Self::Attach.ask(world, subject).await,
                Self::Restore | Self::DeleteSnapshot => Self::Snapshot.ask(world, subject).await,
                Self::DeleteGroup => Self::Group.ask(world, subject).await,
                Self::Leave => {
                    Self::Attach.ask(world, subject).await;
                    Self::Snapshot.ask(world, subject).await;
                }
                _ => {}
            }
        }
        world.settles(&goals(subjects, before), ours, "preparing").await;
    }

    /// Writes the object that asks for the act.
    pub(crate) async fn ask(self, world: &World, subject: &str) {
        let server = &world.server;
        let copy = format!("{subject}-copy");
        match self {
            Self::Provision => world.claim(subject, json!({})).await,
            Self::Clone => {
                let source = json!({ "kind": "PersistentVolumeClaim", "name": subject });
                world.claim(&copy, json!({ "spec": { "dataSource": source } })).await;
            }
            Self::Restore => world.claim(&copy, from_snapshot(subject)).await,
            Self::Attach => {
                server.attachment(subject, &world.volume(subject).await).await;
            }
            Self::Detach => delete(&server.all::<VolumeAttachment>(), subject).await,
            Self::Grow => {
                let more = json!({ "spec": { "resources": { "requests": { "storage": "32Mi" } } } });
                patch(&server.claims(), subject, more).await;
            }
            Self::Modify => {
                let gold = json!({ "spec": { "volumeAttributesClassName": "gold" } });
                patch(&server.claims(), subject, gold).await;
            }
            Self::Snapshot => {
                server.snapshot(subject, subject).await;
            }
            Self::DeleteSnapshot => delete(&server.snapshots(), subject).await,
            Self::Group => {
                let labels = json!({ "matchLabels": { "subject": subject } });
                server.group(subject, json!({ "source": { "selector": labels } })).await;
            }
            Self::DeleteGroup => delete(&server.groups(), subject).await,
            Self::DeleteVolume => delete(&server.claims(), subject).await,
            Self::Leave => {
                delete(&server.claims(), subject).await;
                delete(&server.snapshots(), subject).await;
                delete(&server.all::<VolumeAttachment>(), subject).await;
            }
        }
    }

    /// Asks for it, and returns what is in the driver's names and ids of what it is asked for.
    pub(crate) async fn asked(self, world: &World, subject: &str) -> String {
        let server = &world.server;
        let snapshot = async || server.snapshots().get(subject).await.unwrap().uid().unwrap();
        let group = async || server.groups().get(subject).await.unwrap().uid().unwrap();
        let known = match self {
            Self::Provision | Self::Snapshot | Self::Group => None,
            Self::DeleteSnapshot => Some(snapshot().await),
            Self::DeleteGroup => Some(group().await),
            _ => Some(world.uid(subject).await),
        };
        self.ask(world, subject).await;
        match (known, self) {
            (Some(known), _) => known,
            (None, Self::Snapshot) => snapshot().await,
            (None, Self::Group) => group().await,
            (None, _) => world.uid(subject).await,
        }
    }

    /// Takes it back: what was asked for is deleted, or what it was asked for.
    pub(crate) async fn take_back(self, world: &World, subject: &str) {
        let server = &world.server;
        match self {
            Self::Provision | Self::Grow | Self::Modify | Self::Detach => {
                delete(&server.claims(), subject).await;
            }
            Self::Clone | Self::Restore => delete(&server.claims(), &format!("{subject}-copy")).await,
            Self::Attach => delete(&server.all::<VolumeAttachment>(), subject).await,
            Self::Snapshot => delete(&server.snapshots(), subject).await,
            Self::Group => delete(&server.groups(), subject).await,
            Self::DeleteSnapshot | Self::DeleteGroup | Self::DeleteVolume | Self::Leave => {}
        }
    }
}

/// The same goal for all subjects.
pub(crate) fn goals(subjects: &[String], goal: Goal) -> Goals {
    subjects.iter().map(|subject| (subject.clone(), goal)).collect()
}
