//! Snapshots of disks, and tags of both.

use std::collections::BTreeMap;

use http::StatusCode;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{Answered, Failure, Request, disks, page, time};
use crate::account::{NewSnapshot, Refusal, random_hex};
use crate::records::Snapshot;

impl Request<'_> {
    pub(super) fn create_snapshot(
        &self,
        mut properties: BTreeMap<String, String>,
    ) -> Result<String, Failure> {
        let asked = &self.parameters;
        for name in ["Description", "ResourceGroupId", "RetentionDays"] {
            if let Some(value) = asked.get(name) {
                properties.insert(name.to_owned(), value.to_owned());
            }
        }
        if let Some(days) = asked.number("RetentionDays")?.filter(|days| !(1..=65_536).contains(days)) {
            return Err(Failure::invalid("RetentionDays", &days.to_string()));
        }
        let new = NewSnapshot {
            id: format!("s-{}", random_hex(10)),
            name: asked.get("SnapshotName").unwrap_or_default().to_owned(),
            disk: asked.required("DiskId")?.to_owned(),
            tags: asked.tags(),
            properties,
        };
        let (snapshot, _) = self.twin.account.snapshot(new, self.effects)?;
        Ok(snapshot.id)
    }

    pub(super) fn describe_snapshots(&self) -> Answered {
        let asked = &self.parameters;
        let (ids, tags) = (asked.array("SnapshotIds")?, asked.tags());
        let now = Timestamp::now();
        let wanted = |one: &&Snapshot| {
            one.listed_from <= now
                && ids.as_ref().is_none_or(|ids| ids.contains(&one.id))
                && asked.get("DiskId").is_none_or(|disk| one.disk == disk)
                && asked.get("SnapshotName").is_none_or(|name| one.name == name)
                && asked.get("Status").is_none_or(|wanted| wanted == status(one) || wanted == "all")
                && tags
                    .iter()
                    .all(|(key, value)| one.tags.get(key).is_some_and(|own| value.is_empty() || own == value))
        };
        let records = self.twin.account.records();
        let mut found: Vec<_> = records.snapshots.values().filter(wanted).collect();
        found.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        page(asked, ("Snapshots", "Snapshot"), found.into_iter().map(describe).collect())
    }

    pub(super) fn delete_snapshot(&self) -> Answered {
        let id = self.parameters.required("SnapshotId")?;
        let has_disks = {
            let records = self.twin.account.records();
            records.disks.values().any(|disk| disk.source_snapshot.as_deref() == Some(id))
        };
        if has_disks && !self.parameters.flag("Force") {
            return Err(Failure::forbidden(
                "SnapshotCreatedDisk",
                "The snapshot has been used to create disks and can only be deleted by force.",
            ));
        }
        self.twin.account.delete_snapshot(id).map_err(|refusal| match refusal {
            Refusal::DiskBusy => Failure::forbidden(
                "IncorrectSnapshotStatus",
                "The current status of the snapshot does not support this operation.",
            ),
            other => other.into(),
        })?;
        Ok(json!({}))
    }

    /// The ids that TagResources and UntagResources name in a list, and AddTags and RemoveTags alone.
    fn tagged(&self) -> Vec<String> {
        let listed = self.parameters.list("ResourceId");
        if listed.is_empty() {
            return self.parameters.get("ResourceId").map(str::to_owned).into_iter().collect();
        }
        listed
    }

    fn change_tags(&self, change: impl Fn(&mut BTreeMap<String, String>)) -> Answered {
        let kind = self.parameters.required("ResourceType")?;
        let ids = self.tagged();
        if ids.is_empty() {
            return Err(Failure::missing("ResourceId"));
        }
        let missing = || {
            Failure::new(
                StatusCode::NOT_FOUND,
                "InvalidResourceId.NotFound",
                "The specified ResourceIds are not found in our records",
            )
        };
        let mut records = self.twin.account.records();
        for id in &ids {
            match kind {
                "disk" => {
                    let mut disk = records.disks.get(id).cloned().ok_or_else(missing)?;
                    change(&mut disk.tags);
                    records.put(&disk)?;
                }
                "snapshot" => {
                    let mut snapshot = records.snapshots.get(id).cloned().ok_or_else(missing)?;
                    change(&mut snapshot.tags);
                    records.put(&snapshot)?;
                }
                other => return Err(Failure::invalid("ResourceType", other)),
            }
        }
        Ok(json!({}))
    }

    pub(super) fn tag(&self) -> Answered {
        let tags = self.parameters.tags();
        if tags.is_empty() {
            return Err(Failure::missing("Tag"));
        }
        self.change_tags(|own| own.extend(tags.clone()))
    }

    pub(super) fn untag(&self) -> Answered {
        let keys = self.parameters.list("TagKey");
        let (tags, all) = (self.parameters.tags(), self.parameters.flag("All"));
        self.change_tags(|own| own.retain(|key, _| !all && !keys.contains(key) && !tags.contains_key(key)))
    }

    pub(super) fn list_tag_resources(&self) -> Answered {
        let (ids, tags) = (self.tagged(), self.parameters.tags());
        let kind = self.parameters.required("ResourceType")?;
        let records = self.twin.account.records();
        let all: Vec<(&String, &BTreeMap<String, String>)> = match kind {
            "disk" => records.disks.iter().map(|(id, disk)| (id, &disk.tags)).collect(),
            "snapshot" => records.snapshots.iter().map(|(id, snapshot)| (id, &snapshot.tags)).collect(),
            other => return Err(Failure::invalid("ResourceType", other)),
        };
        let mut found = Vec::new();
        for (id, own) in all.into_iter().filter(|(id, _)| ids.is_empty() || ids.contains(id)) {
            for (key, value) in own {
                if tags.is_empty() || tags.get(key).is_some_and(|wanted| wanted.is_empty() || wanted == value)
                {
                    found.push(json!({
                        "ResourceId": id, "ResourceType": kind, "TagKey": key, "TagValue": value,
                    }));
                }
            }
        }
        Ok(json!({"NextToken": "", "TagResources": {"TagResource": found}}))
    }

    pub(super) fn describe_tags(&self) -> Answered {
        let records = self.twin.account.records();
        let wanted = self.parameters.get("ResourceId");
        let of_disks = records.disks.values().map(|disk| (&disk.id, &disk.tags));
        let of_snapshots = records.snapshots.values().map(|snapshot| (&snapshot.id, &snapshot.tags));
        let mut counts = BTreeMap::new();
        for (_, tags) in
            of_disks.chain(of_snapshots).filter(|(id, _)| wanted.is_none_or(|wanted| *id == wanted))
        {
            for tag in tags {
                *counts.entry(tag).or_insert(0) += 1;
            }
        }
        let tags = counts.into_iter().map(|((key, value), count)| {
            json!({"TagKey": key, "TagValue": value, "ResourceTypeCount": {"Disk": count}})
        });
        page(&self.parameters, ("Tags", "Tag"), tags.collect())
    }
}

fn status(snapshot: &Snapshot) -> &'static str {
    if snapshot.ready { "accomplished" } else { "progressing" }
}

fn describe(snapshot: &Snapshot) -> Value {
    let property = |name: &str| snapshot.properties.get(name).map_or("", String::as_str);
    json!({
        "SnapshotId": snapshot.id, "SnapshotName": snapshot.name, "Description": property("Description"),
        "Status": status(snapshot), "Progress": if snapshot.ready { "100%" } else { "50%" }, "Available": snapshot.ready,
        "CreationTime": time(snapshot.created), "LastModifiedTime": time(snapshot.created),
        "SourceDiskId": snapshot.disk, "SourceDiskSize": snapshot.size_gib.to_string(), "SourceDiskType": "data",
        "SourceStorageType": "disk", "SnapshotType": "user", "Category": "standard", "Usage": "none", "Encrypted": false,
        "RetentionDays": property("RetentionDays").parse::<u64>().ok(), "ResourceGroupId": property("ResourceGroupId"),
        "InstantAccess": true, "RemainTime": if snapshot.ready { 0 } else { 60 }, "ProductCode": "",
        "Tags": disks::tags(&snapshot.tags),
    })
}
