//! Disks of Alibaba Cloud: their actions, their JSON and their tasks.

use std::collections::BTreeMap;

use http::StatusCode;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::catalogue::{self, CATEGORIES};
use super::{Answered, Failure, Request, page, time};
use crate::account::{NewDisk, random_hex};
use crate::records::{Disk, DiskStatus, Operation, Progress, Records, Work};

/// Parameters of CreateDisk that are kept as they are and told again.
const KEPT: &[&str] = &[
    "BurstingEnabled",
    "Description",
    "Encrypted",
    "KMSKeyId",
    "ProvisionedIops",
    "ResourceGroupId",
    "StorageClusterId",
];

/// The serial number of a disk's device.
pub(super) fn serial(id: &str) -> &str {
    id.strip_prefix("d-").unwrap_or(id)
}

impl Request<'_> {
    pub(super) fn create_disk(&self, mut properties: BTreeMap<String, String>) -> Result<String, Failure> {
        let asked = &self.parameters;
        asked.required("RegionId")?;
        let category = asked.get("DiskCategory").unwrap_or("cloud_essd").to_owned();
        let regional = category.contains("_regional_");
        let zones = catalogue::zones(self.region);
        let zone = match asked.get("ZoneId") {
            None if regional => zones[0].clone(),
            None => return Err(Failure::missing("ZoneId")),
            Some(zone) => zone.to_owned(),
        };
        if !zones.contains(&zone) {
            return Err(Failure::new(
                StatusCode::NOT_FOUND,
                "InvalidZoneId.NotFound",
                "The specified zone does not exist.",
            ));
        }
        let snapshot = asked.get("SnapshotId").map(str::to_owned);
        let mut size_gib = asked.number("Size")?;
        if let Some(id) = &snapshot {
            let records = self.twin.account.records();
            let source = records.snapshots.get(id).ok_or_else(|| {
                Failure::new(
                    StatusCode::NOT_FOUND,
                    "InvalidSnapshotId.NotFound",
                    "The specified snapshot does not exist.",
                )
            })?;
            if !source.ready {
                return Err(Failure::forbidden(
                    "InvalidSnapshot.NotReady",
                    "The specified snapshot has not completed yet.",
                ));
            }
            let size = *size_gib.get_or_insert(source.size_gib);
            if size < source.size_gib {
                return Err(Failure::new(
                    StatusCode::BAD_REQUEST,
                    "InvalidDiskSize.TooSmall",
                    "Specified disk size is less than the size of snapshot.",
                ));
            }
        }
        let size_gib = size_gib.ok_or_else(|| Failure::missing("Size"))?;
        let level = asked.get("PerformanceLevel");
        check_size(&category, level, size_gib)?;
        check_iops(&category, asked.number("ProvisionedIops")?, size_gib)?;
        properties.insert("Category".to_owned(), category.clone());
        if let Some(level) = level.or((category == "cloud_essd").then_some("PL1")) {
            properties.insert("PerformanceLevel".to_owned(), level.to_owned());
        }
        let multiple = asked.get("MultiAttach").unwrap_or("Disabled");
        properties.insert("MultiAttach".to_owned(), multiple.to_owned());
        for name in KEPT {
            if let Some(value) = asked.get(name) {
                properties.insert((*name).to_owned(), value.to_owned());
            }
        }
        let new = NewDisk {
            id: format!("d-{}", random_hex(10)),
            name: asked.get("DiskName").unwrap_or_default().to_owned(),
            zone,
            size_gib,
            snapshot,
            tags: asked.tags(),
            properties,
        };
        let (disk, _) = self.twin.account.create_disk(new, self.effects)?;
        Ok(disk.id)
    }

    pub(super) fn describe_disks(&self) -> Answered {
        let asked = &self.parameters;
        let (ids, tags) = (asked.array("DiskIds")?, asked.tags());
        if ids.as_ref().is_some_and(|ids| ids.len() > 100) {
            return Err(Failure::invalid("DiskIds", "more than 100 ids"));
        }
        let now = Timestamp::now();
        let is =
            |name: &str, value: &str| asked.get(name).is_none_or(|wanted| wanted == value || wanted == "All");
        let wanted = |disk: &&Disk| {
            disk.listed_from <= now
                && ids.as_ref().is_none_or(|ids| ids.contains(&disk.id))
                && tags.iter().all(|(key, value)| {
                    disk.tags.get(key).is_some_and(|own| value.is_empty() || own == value)
                })
                && asked.get("InstanceId").is_none_or(|instance| disk.is_attached_to(instance))
                && is("Status", status(disk))
                && is("ZoneId", &disk.zone)
                && is("Category", disk.property("Category"))
                && is("DiskName", &disk.name)
                && asked.get("SnapshotId").is_none_or(|id| disk.source_snapshot.as_deref() == Some(id))
                && is("DiskType", "data")
        };
        let records = self.twin.account.records();
        let mut disks: Vec<_> = records.disks.values().filter(wanted).collect();
        disks.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        let disks = disks.into_iter().map(|disk| describe(self.region, &records, disk)).collect();
        page(asked, ("Disks", "Disk"), disks)
    }

    pub(super) fn attach_disk(&self) -> Answered {
        let (id, instance) = (self.parameters.required("DiskId")?, self.parameters.required("InstanceId")?);
        let multiple = {
            let records = self.twin.account.records();
            let disk = records.disks.get(id);
            // A disk that is being detached, or attached, is in neither state.
            if disk.is_some_and(|disk| matches!(disk.status, DiskStatus::Attaching | DiskStatus::Detaching)) {
                return Err(crate::account::Refusal::DiskBusy.into());
            }
            disk.is_some_and(|disk| disk.property("MultiAttach") == "Enabled")
        };
        self.twin.account.attach(id, instance, multiple, self.effects)?;
        Ok(json!({}))
    }

    pub(super) fn detach_disk(&self) -> Answered {
        let (id, instance) = (self.parameters.required("DiskId")?, self.parameters.required("InstanceId")?);
        self.twin.account.detach(id, instance, self.effects)?;
        Ok(json!({}))
    }

    pub(super) fn delete_disk(&self) -> Answered {
        self.twin.account.delete_disk(self.parameters.required("DiskId")?)?;
        Ok(json!({}))
    }

    /// The new size is there when this is answered, as drivers expect.
    pub(super) async fn resize_disk(&self) -> Answered {
        let id = self.parameters.required("DiskId")?;
        let size = self.parameters.number("NewSize")?.ok_or_else(|| Failure::missing("NewSize"))?;
        let disk = self.twin.account.records().disks.get(id).cloned();
        if let Some(disk) = &disk {
            let level = disk.properties.get("PerformanceLevel").map(String::as_str);
            check_size(disk.property("Category"), level, size)?;
            let online = self.parameters.get("Type") == Some("online");
            if disk.status == DiskStatus::InUse && !online {
                return Err(crate::account::Refusal::DiskBusy.into());
            }
        }
        let operation = self.twin.account.resize(id, size, self.effects)?;
        let ended = self.twin.account.wait(operation.id).await;
        if ended.is_none_or(|one| one.progress != Progress::Completed) {
            return Err(Failure::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "InternalError",
                "The request processing has failed due to some unknown error.",
            ));
        }
        Ok(json!({"OrderId": ""}))
    }

    pub(super) fn modify_disk_spec(&self) -> Answered {
        let asked = &self.parameters;
        let id = asked.required("DiskId")?;
        let disk = self.twin.account.records().disks.get(id).cloned();
        let disk = disk.ok_or(crate::account::Refusal::NoDisk)?;
        let category = asked.get("DiskCategory").unwrap_or_else(|| disk.property("Category")).to_owned();
        let level = asked.get("PerformanceLevel").map(str::to_owned);
        let iops = asked.number("ProvisionedIops")?;
        let same_level = level.as_ref().is_none_or(|level| level == disk.property("PerformanceLevel"));
        let same_iops = iops.is_none_or(|iops| disk.property("ProvisionedIops").parse().unwrap_or(0) == iops);
        if category == disk.property("Category") && same_level && same_iops {
            return Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "NoChangeInDiskCategoryAndPerformanceLevel",
                "The specified disk category and performance level are those of the disk.",
            ));
        }
        if level.is_some() && category != "cloud_essd" {
            return Err(Failure::forbidden(
                "OperationDenied.PerformanceLevelNotMatch",
                "The specified performance level is not that of the category.",
            ));
        }
        check_size(&category, level.as_deref(), disk.size_gib)?;
        check_iops(&category, iops, disk.size_gib)?;
        if asked.flag("DryRun") {
            return Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "DryRunOperation",
                "Request validation has been passed with DryRun flag set.",
            ));
        }
        let level = level.or((category == "cloud_essd").then(|| "PL1".to_owned())).unwrap_or_default();
        let mut properties =
            BTreeMap::from([("Category".to_owned(), category), ("PerformanceLevel".to_owned(), level)]);
        if let Some(iops) = iops {
            properties.insert("ProvisionedIops".to_owned(), iops.to_string());
        }
        let operation = self.twin.account.modify(id, properties, self.effects)?;
        Ok(json!({"TaskId": task_id(&operation), "OrderId": ""}))
    }

    pub(super) fn modify_disk_attribute(&self) -> Answered {
        let asked = &self.parameters;
        let mut records = self.twin.account.records();
        let disk = records.disks.get(asked.required("DiskId")?).cloned();
        let mut disk = disk.ok_or(crate::account::Refusal::NoDisk)?;
        if asked.get("BurstingEnabled").is_some() && !disk.property("Category").ends_with("_auto") {
            return Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "InvalidParameter.BurstingEnabled",
                "Only disks of the category cloud_auto can burst.",
            ));
        }
        for name in ["BurstingEnabled", "Description", "DeleteWithInstance"] {
            if let Some(value) = asked.get(name) {
                disk.properties.insert(name.to_owned(), value.to_owned());
            }
        }
        if let Some(name) = asked.get("DiskName") {
            name.clone_into(&mut disk.name);
        }
        records.put(&disk)?;
        Ok(json!({}))
    }

    pub(super) fn describe_tasks(&self) -> Answered {
        let asked = &self.parameters;
        let ids = asked.get("TaskIds").map(|ids| ids.split(',').map(str::to_owned).collect::<Vec<_>>());
        let disks = asked.list("ResourceIds");
        let records = self.twin.account.records();
        let wanted = |one: &&Operation| {
            matches!(one.work, Work::Modify { .. })
                && ids.as_ref().is_none_or(|ids| ids.contains(&task_id(one)))
                && (disks.is_empty() || disks.contains(&one.disk))
                && asked.get("TaskAction").is_none_or(|action| action == "ModifyDiskSpec")
                && asked.get("TaskStatus").is_none_or(|wanted| wanted == task_status(one))
        };
        let tasks = records.operations.values().rev().filter(wanted);
        let tasks = tasks
            .map(|one| {
                json!({
                    "TaskId": task_id(one), "TaskAction": "ModifyDiskSpec", "TaskStatus": task_status(one),
                    "SupportCancel": "false", "CreationTime": time(one.started),
                    "FinishedTime": one.completed.map(time).unwrap_or_default(), "ResourceId": one.disk,
                })
            })
            .collect();
        let mut answer = page(asked, ("TaskSet", "Task"), tasks)?;
        answer["RegionId"] = self.region.into();
        Ok(answer)
    }
}

fn task_id(operation: &Operation) -> String {
    format!("t-{:016x}", operation.id)
}

fn task_status(operation: &Operation) -> &'static str {
    match operation.progress {
        Progress::UnderWay => "Processing",
        Progress::Completed => "Finished",
        Progress::Errored => "Failed",
    }
}

fn status(disk: &Disk) -> &'static str {
    match disk.status {
        DiskStatus::Creating => "Creating",
        DiskStatus::Available => "Available",
        DiskStatus::Attaching => "Attaching",
        DiskStatus::InUse => "In_use",
        DiskStatus::Detaching => "Detaching",
    }
}

/// Refuses sizes that a category, or its performance level, does not come in.
fn check_size(category: &str, level: Option<&str>, size_gib: u64) -> Result<(), Failure> {
    let known = CATEGORIES.iter().find(|known| known.name == category).ok_or_else(|| {
        Failure::forbidden(
            "InvalidDataDiskCategory.NotSupported",
            "Specified disk category is not supported in this zone.",
        )
    })?;
    let (smallest, largest) = match level {
        Some(level) if category == "cloud_essd" => catalogue::performance_level(level).ok_or_else(|| {
            Failure::new(
                StatusCode::BAD_REQUEST,
                "InvalidPerformanceLevel.Malformed",
                "The specified parameter PerformanceLevel is not valid.",
            )
        })?,
        _ => (known.smallest_gib, known.largest_gib),
    };
    if (smallest..=largest).contains(&size_gib) {
        return Ok(());
    }
    Err(Failure::new(
        StatusCode::BAD_REQUEST,
        "InvalidDiskSize.NotSupported",
        format!(
            "The specified disk size {size_gib} is not supported: {category} has {smallest} to {largest} GiB."
        ),
    ))
}

fn check_iops(category: &str, iops: Option<u64>, size_gib: u64) -> Result<(), Failure> {
    let Some(iops) = iops.filter(|iops| *iops > 0) else { return Ok(()) };
    if !category.ends_with("_auto") {
        return Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "InvalidParameter.ProvisionedIops",
            "Only disks of the category cloud_auto have provisioned IOPS.",
        ));
    }
    if iops > catalogue::most_provisioned_iops(size_gib) {
        return Err(Failure::new(
            StatusCode::BAD_REQUEST,
            "InvalidProvisionedIops.LimitExceed",
            "The specified parameter ProvisionedIops exceeds the limit.",
        ));
    }
    Ok(())
}

/// The names of a disk or snapshot's tags and their values, as the API lists them.
pub(super) fn tags(tags: &BTreeMap<String, String>) -> Value {
    let tags: Vec<_> = tags.iter().map(|(key, value)| json!({"TagKey": key, "TagValue": value})).collect();
    json!({"Tag": tags})
}

fn describe(region: &str, records: &Records, disk: &Disk) -> Value {
    let attachments: Vec<_> = disk
        .attachments
        .iter()
        .map(|attachment| {
            let of_instance =
                records.disks.values().filter(|other| other.is_attached_to(&attachment.instance));
            let before = of_instance.take_while(|other| other.id != disk.id).count();
            let letter = char::from(b'b' + u8::try_from(before % 25).unwrap_or(0));
            json!({
                "InstanceId": attachment.instance, "Device": format!("/dev/xvd{letter}"),
                "AttachedTime": time(attachment.since),
            })
        })
        .collect();
    let first = attachments.first();
    let of_first = |name: &str| first.map_or_else(|| json!(""), |attachment| attachment[name].clone());
    let mut described = json!({
        "DiskId": disk.id, "DiskName": disk.name, "Description": disk.property("Description"), "RegionId": region,
        "ZoneId": disk.zone, "Status": status(disk), "Type": "data", "Category": disk.property("Category"),
        "Size": disk.size_gib, "Portable": true, "Encrypted": disk.property("Encrypted") == "true",
        "KMSKeyId": disk.property("KMSKeyId"), "SourceSnapshotId": disk.source_snapshot.as_deref().unwrap_or(""),
        "InstanceId": of_first("InstanceId"), "Device": of_first("Device"), "AttachedTime": of_first("AttachedTime"),
        "DetachedTime": "", "DeleteWithInstance": disk.property("DeleteWithInstance") == "true",
        "DeleteAutoSnapshot": false, "EnableAutoSnapshot": false, "CreationTime": time(disk.created),
        "DiskChargeType": "PostPaid", "ResourceGroupId": disk.property("ResourceGroupId"), "SerialNumber": serial(&disk.id),
        "MultiAttach": disk.property("MultiAttach"), "StorageClusterId": disk.property("StorageClusterId"),
        "ImageId": "", "ProductCode": "", "AutoSnapshotPolicyId": "", "ExpiredTime": "2999-09-08T16:00Z",
        "ProvisionedIops": disk.property("ProvisionedIops").parse::<u64>().unwrap_or(0),
        "BurstingEnabled": disk.property("BurstingEnabled").eq_ignore_ascii_case("true"),
    });
    if let Some(level) = disk.properties.get("PerformanceLevel").filter(|level| !level.is_empty()) {
        described["PerformanceLevel"] = json!(level);
    }
    described["Tags"] = tags(&disk.tags);
    described["Attachments"] = json!({"Attachment": attachments});
    described["MountInstances"] = json!({"MountInstance": attachments});
    described["OperationLocks"] = json!({"OperationLock": []});
    described
}
