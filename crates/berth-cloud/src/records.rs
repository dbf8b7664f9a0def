//! What an account of a cloud holds, and the journal that keeps it.
//!
//! Every change is appended to the journal before it is answered, in the order in which it was made, so that a twin that is
//! killed knows at its next start what it told its callers. Writes are not synced: a power cut also ends the devices.

use std::collections::{BTreeMap, BTreeSet};

use berth_host::path::Dir;
use berth_journal::{Entry, Journal};
use jiff::Timestamp;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The journal's name in the data directory.
const JOURNAL: &str = "account.journal";
/// Ended operations beyond this number are forgotten, the oldest first.
const KEPT_OPERATIONS: usize = 10_000;

/// A server of the account: a droplet, or an ECS instance.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Instance {
    pub(crate) id: String,
    pub(crate) name: String,
    /// The zone, or the region where the provider's disks know no zones.
    pub(crate) zone: String,
    /// The provider's name of its size, such as `ecs.g7.large`.
    pub(crate) kind: String,
    /// Whether attached disks appear as block devices of this machine.
    pub(crate) devices: bool,
    pub(crate) powered_on: bool,
    pub(crate) created: Timestamp,
}

/// How far a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DiskStatus {
    Creating,
    Available,
    Attaching,
    InUse,
    Detaching,
}

/// One instance that a disk is attached to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Attachment {
    pub(crate) instance: String,
    pub(crate) since: Timestamp,
    /// The name of its link in the instance's directory of devices; a disk whose device never appears has none.
    pub(crate) link: Option<String>,
    /// When the link appears.
    pub(crate) link_from: Timestamp,
}

/// A disk of the account.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Disk {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) zone: String,
    pub(crate) size_gib: u64,
    pub(crate) status: DiskStatus,
    pub(crate) created: Timestamp,
    /// When lists begin to show it.
    pub(crate) listed_from: Timestamp,
    pub(crate) source_snapshot: Option<String>,
    pub(crate) tags: BTreeMap<String, String>,
    /// What only one provider knows, by its own names.
    pub(crate) properties: BTreeMap<String, String>,
    pub(crate) attachments: Vec<Attachment>,
}

impl Disk {
    pub(crate) fn is_attached_to(&self, instance: &str) -> bool {
        self.attachments.iter().any(|attachment| attachment.instance == instance)
    }

    pub(crate) fn property(&self, name: &str) -> &str {
        self.properties.get(name).map_or("", String::as_str)
    }
}

/// A snapshot of a disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) disk: String,
    pub(crate) zone: String,
    pub(crate) size_gib: u64,
    /// Its bytes are copied.
    pub(crate) ready: bool,
    pub(crate) created: Timestamp,
    pub(crate) listed_from: Timestamp,
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) properties: BTreeMap<String, String>,
}

/// Snapshots of several disks that were taken together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SnapshotGroup {
    pub(crate) id: String,
    pub(crate) name: String,
    /// The ids of its members.
    pub(crate) snapshots: Vec<String>,
    pub(crate) created: Timestamp,
    pub(crate) listed_from: Timestamp,
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) properties: BTreeMap<String, String>,
}

/// What an operation does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Work {
    Create,
    Attach,
    Detach,
    Resize { size_gib: u64 },
    Snapshot { snapshot: String },
    Modify { properties: BTreeMap<String, String> },
}

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Progress {
    UnderWay,
    Completed,
    Errored,
}

/// Work that was accepted and is, or was, carried out after the answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Operation {
    pub(crate) id: u64,
    pub(crate) work: Work,
    pub(crate) disk: String,
    pub(crate) instance: Option<String>,
    pub(crate) zone: String,
    pub(crate) progress: Progress,
    pub(crate) started: Timestamp,
    /// When the work is done, and not before.
    pub(crate) due: Timestamp,
    pub(crate) completed: Option<Timestamp>,
    /// It ends in an error, with nothing done.
    pub(crate) doomed: bool,
}

/// The answer to a request that carried a client token.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TokenUse {
    pub(crate) parameters: String,
    pub(crate) answer: String,
}

/// Everything of one account, in memory and in the journal.
pub(crate) struct Records {
    journal: Journal,
    pub(crate) instances: BTreeMap<String, Instance>,
    pub(crate) disks: BTreeMap<String, Disk>,
    pub(crate) snapshots: BTreeMap<String, Snapshot>,
    pub(crate) groups: BTreeMap<String, SnapshotGroup>,
    pub(crate) operations: BTreeMap<u64, Operation>,
    pub(crate) tokens: BTreeMap<String, TokenUse>,
    /// Tags that exist by themselves, as DigitalOcean's do.
    pub(crate) tags: BTreeSet<String>,
}

/// A record of the journal: the kind that its key begins with, and the map that holds it.
pub(crate) trait Record: Serialize + DeserializeOwned + Clone {
    const KIND: &'static str;
    type Id: Ord + Clone + ToString;
    fn id(&self) -> Self::Id;
    fn map(records: &mut Records) -> &mut BTreeMap<Self::Id, Self>;
}

macro_rules! records {
    ($($record:ty, $kind:literal, $id:ty, $map:ident;)*) => {$(
        impl Record for $record {
            const KIND: &'static str = $kind;
            type Id = $id;
            fn id(&self) -> $id {
                self.id.clone()
            }
            fn map(records: &mut Records) -> &mut BTreeMap<$id, Self> {
                &mut records.$map
            }
        }
    )*};
}

records! {
    Instance, "instance", String, instances;
    Disk, "disk", String, disks;
    Snapshot, "snapshot", String, snapshots;
    SnapshotGroup, "group", String, groups;
    Operation, "operation", u64, operations;
}

impl Records {
    pub(crate) fn open(directory: &Dir) -> Result<Self, berth_journal::Error> {
        let mut lines = Vec::new();
        let (journal, damage) = Journal::open(directory, JOURNAL, &mut |key, json| {
            lines.push((key.to_owned(), json.to_vec()));
        })?;
        if damage.is_damaged() {
            tracing::error!(?damage, "the account's journal is damaged; what is left of it is served");
        }
        let mut records = Self {
            journal,
            instances: BTreeMap::new(),
            disks: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            groups: BTreeMap::new(),
            operations: BTreeMap::new(),
            tokens: BTreeMap::new(),
            tags: BTreeSet::new(),
        };
        for (key, json) in lines {
            let Some((kind, id)) = key.split_once('/') else { continue };
            match kind {
                "instance" => records.load::<Instance>(&json),
                "disk" => records.load::<Disk>(&json),
                "snapshot" => records.load::<Snapshot>(&json),
                "group" => records.load::<SnapshotGroup>(&json),
                "operation" => records.load::<Operation>(&json),
                "token" => {
                    if let Ok(used) = serde_json::from_slice(&json) {
                        records.tokens.insert(id.to_owned(), used);
                    }
                }
                "tag" => {
                    records.tags.insert(id.to_owned());
                }
                _ => {}
            }
        }
        records.forget_old_operations()?;
        Ok(records)
    }

    fn load<R: Record>(&mut self, json: &[u8]) {
        match serde_json::from_slice::<R>(json) {
            Ok(record) => {
                R::map(self).insert(record.id(), record);
            }
            Err(error) => tracing::error!(%error, kind = R::KIND, "a record of the account cannot be read"),
        }
    }

    fn write(&mut self, key: &str, json: &[u8]) -> Result<(), berth_journal::Error> {
        self.journal.write(&[Entry::Put { key, json }])
    }

    /// Keeps a record, new or changed.
    pub(crate) fn put<R: Record>(&mut self, record: &R) -> Result<(), berth_journal::Error> {
        let json = serde_json::to_vec(record).expect("records are made of plain fields");
        self.write(&format!("{}/{}", R::KIND, record.id().to_string()), &json)?;
        R::map(self).insert(record.id(), record.clone());
        Ok(())
    }

    /// Forgets a record, if it is there.
    pub(crate) fn remove<R: Record>(&mut self, id: &R::Id) -> Result<(), berth_journal::Error> {
        self.journal.write(&[Entry::Remove { key: &format!("{}/{}", R::KIND, id.to_string()) }])?;
        R::map(self).remove(id);
        Ok(())
    }

    /// Keeps the answer to a request with a client token.
    pub(crate) fn put_token(&mut self, token: &str, used: TokenUse) -> Result<(), berth_journal::Error> {
        let json = serde_json::to_vec(&used).expect("records are made of plain fields");
        self.write(&format!("token/{token}"), &json)?;
        self.tokens.insert(token.to_owned(), used);
        Ok(())
    }

    /// Keeps a tag that exists by itself.
    pub(crate) fn put_tag(&mut self, tag: &str) -> Result<(), berth_journal::Error> {
        self.write(&format!("tag/{tag}"), b"true")?;
        self.tags.insert(tag.to_owned());
        Ok(())
    }

    /// Forgets a tag, if it is there.
    pub(crate) fn remove_tag(&mut self, tag: &str) -> Result<(), berth_journal::Error> {
        self.journal.write(&[Entry::Remove { key: &format!("tag/{tag}") }])?;
        self.tags.remove(tag);
        Ok(())
    }

    /// The number of the next operation; numbers are never used twice.
    pub(crate) fn next_operation(&self) -> u64 {
        self.operations.last_key_value().map_or(1, |(last, _)| last + 1)
    }

    fn forget_old_operations(&mut self) -> Result<(), berth_journal::Error> {
        let excess = self.operations.len().saturating_sub(KEPT_OPERATIONS);
        let ended = |operation: &&Operation| operation.progress != Progress::UnderWay;
        let old: Vec<u64> =
            self.operations.values().filter(ended).take(excess).map(|operation| operation.id).collect();
        for id in old {
            self.remove::<Operation>(&id)?;
        }
        Ok(())
    }
}
