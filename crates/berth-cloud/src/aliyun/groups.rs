//! Snapshot-consistent groups: snapshots of several disks, taken and removed together.
//!
//! The service takes them at one instant. Here the disks are copied one after the other when they are due, so they are of one instant
//! only if nobody writes meanwhile.

use std::collections::BTreeMap;

use http::StatusCode;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Answered, Failure, Request, disks, page, time};
use crate::account::{NewSnapshot, Refusal, random_hex};
use crate::records::{Disk, Records, SnapshotGroup};

/// How many disks a group may have.
const MOST_DISKS: usize = 16;
/// The categories of disks that can be in a group.
const CATEGORIES: [&str; 3] = ["cloud_essd", "cloud_auto", "cloud_essd_entry"];

impl Request<'_> {
    pub(super) fn create_snapshot_group(
        &self,
        mut properties: BTreeMap<String, String>,
    ) -> Result<String, Failure> {
        let asked = &self.parameters;
        for name in ["Description", "ResourceGroupId"] {
            if let Some(value) = asked.get(name) {
                properties.insert(name.to_owned(), value.to_owned());
            }
        }
        let sources = asked.list("DiskId");
        self.check_sources(&sources)?;
        let id = format!("ssg-{}", random_hex(10));
        let snapshots: Vec<String> = sources.iter().map(|_| format!("s-{}", random_hex(10))).collect();
        let now = Timestamp::now();
        let group = SnapshotGroup {
            id: id.clone(),
            name: asked.get("Name").unwrap_or_default().to_owned(),
            snapshots: snapshots.clone(),
            created: now,
            listed_from: now + self.twin.account.delays().listed,
            tags: asked.tags(),
            properties,
        };
        // Before its members: a group that lacks some of them has failed.
        self.twin.account.records().put(&group)?;
        for (snapshot, disk) in snapshots.into_iter().zip(sources) {
            let new = NewSnapshot {
                id: snapshot,
                name: format!("Created_from_{id}"),
                disk,
                tags: BTreeMap::new(),
                properties: BTreeMap::new(),
            };
            self.twin.account.snapshot(new, self.effects)?;
        }
        Ok(id)
    }

    /// Refuses disks that cannot be in one group.
    fn check_sources(&self, sources: &[String]) -> Result<(), Failure> {
        if sources.is_empty() {
            return Err(Failure::missing("DiskId"));
        }
        if sources.len() > MOST_DISKS {
            let text = format!("{} disks, of at most {MOST_DISKS}", sources.len());
            return Err(Failure::invalid("DiskId", &text));
        }
        let records = self.twin.account.records();
        let disks = sources.iter().map(|id| records.disks.get(id).ok_or(Refusal::NoDisk));
        let disks: Vec<&Disk> = disks.collect::<Result<_, _>>()?;
        if disks.iter().any(|disk| disk.zone != disks[0].zone) {
            return Err(Refusal::OtherZone.into());
        }
        let is_supported = |disk: &&Disk| {
            CATEGORIES.contains(&disk.property("Category")) && disk.property("MultiAttach") != "Enabled"
        };
        if !disks.iter().all(is_supported) {
            return Err(Failure::forbidden(
                "InvalidDiskCategory.NotSupported",
                "Snapshot-consistent groups are for ESSDs that one instance at a time can have.",
            ));
        }
        for disk in disks {
            let taken = records.snapshots.values().filter(|snapshot| snapshot.disk == disk.id).count() as u64;
            if taken >= self.twin.account.quotas.snapshots_per_disk {
                return Err(Refusal::TooManySnapshots.into());
            }
            if disk.status == crate::records::DiskStatus::Creating {
                return Err(Refusal::DiskBusy.into());
            }
        }
        Ok(())
    }

    pub(super) fn describe_snapshot_groups(&self) -> Answered {
        let asked = &self.parameters;
        let (ids, statuses, tags) = (asked.list("SnapshotGroupId"), asked.list("Status"), asked.tags());
        let now = Timestamp::now();
        let records = self.twin.account.records();
        let wanted = |one: &&SnapshotGroup| {
            one.listed_from <= now
                && (ids.is_empty() || ids.contains(&one.id))
                && (statuses.is_empty() || statuses.iter().any(|wanted| wanted == status(one, &records)))
                && asked.get("Name").is_none_or(|name| one.name == name)
                && tags
                    .iter()
                    .all(|(key, value)| one.tags.get(key).is_some_and(|own| value.is_empty() || own == value))
        };
        let mut found: Vec<_> = records.groups.values().filter(wanted).collect();
        found.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        let found = found.into_iter().map(|one| describe(one, &records)).collect();
        page(asked, ("SnapshotGroups", "SnapshotGroup"), found)
    }

    pub(super) fn delete_snapshot_group(&self) -> Answered {
        let id = self.parameters.required("SnapshotGroupId")?.to_owned();
        let group = self.twin.account.records().groups.get(&id).cloned();
        let group = group.ok_or_else(|| {
            Failure::new(
                StatusCode::NOT_FOUND,
                "InvalidSnapshotGroupId.NotFound",
                "The specified snapshot group does not exist.",
            )
        })?;
        for snapshot in &group.snapshots {
            match self.twin.account.delete_snapshot(snapshot) {
                Ok(()) | Err(Refusal::NoSnapshot) => {}
                Err(Refusal::DiskBusy) => {
                    return Err(Failure::forbidden(
                        "IncorrectSnapshotStatus",
                        "The current status of a snapshot of the group does not support this operation.",
                    ));
                }
                Err(other) => return Err(other.into()),
            }
        }
        self.twin.account.records().remove::<SnapshotGroup>(&id)?;
        Ok(json!({"OperationProgressSet": {"OperationProgress": []}}))
    }
}

fn status(group: &SnapshotGroup, records: &Records) -> &'static str {
    let members = group.snapshots.iter().map(|id| records.snapshots.get(id));
    let members: Option<Vec<_>> = members.collect();
    match members {
        None => "failed",
        Some(members) if members.iter().all(|member| member.ready) => "accomplished",
        Some(_) => "progressing",
    }
}

fn describe(group: &SnapshotGroup, records: &Records) -> Value {
    let property = |name: &str| group.properties.get(name).map_or("", String::as_str);
    let members = group.snapshots.iter().filter_map(|id| records.snapshots.get(id));
    // Sizes and times are in the descriptions of the snapshots alone.
    let members = members.map(|member| {
        json!({
            "SnapshotId": member.id, "SourceDiskId": member.disk, "SourceDiskType": "data",
            "Available": member.ready, "Progress": if member.ready { "100%" } else { "50%" },
            "InstantAccess": true, "Tags": disks::tags(&member.tags),
        })
    });
    json!({
        "SnapshotGroupId": group.id, "Name": group.name, "Description": property("Description"),
        "Status": status(group, records), "CreationTime": time(group.created), "InstanceId": "",
        "ResourceGroupId": property("ResourceGroupId"), "Tags": disks::tags(&group.tags),
        "Snapshots": {"Snapshot": members.collect::<Vec<_>>()},
    })
}
