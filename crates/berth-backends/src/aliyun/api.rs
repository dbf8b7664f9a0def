//! The part of the ECS API (version 2014-05-26) that the driver uses, one function for each action.
//!
//! What is sent again is what cannot do harm twice: descriptions, deletions, tags, and creations with a client token, which
//! make one thing however often they are sent. Everything else may be unclear, and its caller looks what became of it.

use std::{collections::BTreeMap, sync::atomic::AtomicU32};

use serde::{Deserialize, de::DeserializeOwned};

use super::{
    protocol::{Call, Signing, is_code, is_gone},
    signing::AccessKey,
};
use crate::{
    Result,
    cloud::{Client, Deadline, Endpoint, Limiter, Outcome, null_is_default, parse},
};

/// How many ids one description takes.
pub(super) const BATCH: usize = 100;
/// How many entries a page has.
const PAGE: &str = "100";
/// After a refusal for the rate: less than most actions allow.
const CAREFUL_RATE: f64 = 10.0;

/// Tags of a disk or snapshot.
pub(super) type Tags = BTreeMap<String, String>;

/// Lists of the API are wrapped twice: `{"Disks": {"Disk": […]}}`.
macro_rules! lists {
    ($($name:ident { $field:literal: $type:ty })*) => {$(
        #[derive(Debug, Clone, Default, Deserialize)]
        pub(super) struct $name {
            #[serde(rename = $field, default, deserialize_with = "null_is_default")]
            entries: Vec<$type>,
        }
    )*};
}
lists! {
    Disks { "Disk": Disk }
    Snapshots { "Snapshot": EcsSnapshot }
    Groups { "SnapshotGroup": EcsGroup }
    TaskSet { "Task": Task }
    InstanceTypes { "InstanceType": InstanceType }
    TagList { "Tag": Tag }
    Attachments { "Attachment": DiskAttachment }
    AttributeItems { "AccountAttributeItem": AttributeItem }
    ValueItems { "ValueItem": ValueItem }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Tag {
    #[serde(alias = "Key")]
    tag_key: String,
    #[serde(alias = "Value", default, deserialize_with = "null_is_default")]
    tag_value: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DiskAttachment {
    instance_id: String,
}

/// A disk as the API has it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Disk {
    #[serde(rename = "DiskId", deserialize_with = "null_is_default")]
    pub(super) id: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) zone_id: String,
    /// `Available`, `In_use`, `Attaching`, `Detaching`, `Creating` and others.
    #[serde(deserialize_with = "null_is_default")]
    pub(super) status: String,
    /// Whether it is a `data` disk or the `system` disk of its instance.
    #[serde(rename = "Type", deserialize_with = "null_is_default")]
    pub(super) kind: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) category: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) performance_level: String,
    pub(super) size: u64,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) encrypted: bool,
    #[serde(rename = "KMSKeyId", deserialize_with = "null_is_default")]
    pub(super) kms_key_id: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) source_snapshot_id: String,
    /// What the device says of itself; disks from before 2020 have none.
    #[serde(deserialize_with = "null_is_default")]
    pub(super) serial_number: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) multi_attach: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) resource_group_id: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) storage_cluster_id: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) provisioned_iops: u64,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) bursting_enabled: bool,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) tags: TagList,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) attachments: Attachments,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) instance_id: String,
}

impl Disk {
    /// A disk of which only the tags are known.
    pub(super) fn tagged(tags: Tags) -> Self {
        let entries = tags.into_iter().map(|(tag_key, tag_value)| Tag { tag_key, tag_value }).collect();
        Self { tags: TagList { entries }, ..Self::default() }
    }

    /// The value of a tag.
    pub(super) fn tag(&self, key: &str) -> Option<&str> {
        tag(&self.tags, key)
    }

    /// The instances that it is attached to.
    pub(super) fn instances(&self) -> Vec<&str> {
        let listed: Vec<&str> = self.attachments.entries.iter().map(|one| one.instance_id.as_str()).collect();
        // Some answers have only the first, and only here.
        if listed.is_empty() && self.status == "In_use" && !self.instance_id.is_empty() {
            return vec![&self.instance_id];
        }
        listed
    }

    /// Whether it is attached to that instance.
    pub(super) fn is_on(&self, instance: &str) -> bool {
        self.instances().contains(&instance)
    }

    /// Whether several instances may have it.
    pub(super) fn is_shared(&self) -> bool {
        self.multi_attach == "Enabled"
    }
}

/// A snapshot as the API has it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct EcsSnapshot {
    #[serde(deserialize_with = "null_is_default")]
    pub(super) snapshot_id: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) snapshot_name: String,
    #[serde(deserialize_with = "null_is_default")]
    description: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) source_disk_id: String,
    /// In GiB, as text.
    #[serde(deserialize_with = "null_is_default")]
    pub(super) source_disk_size: String,
    /// Empty until the content is fixed.
    #[serde(deserialize_with = "null_is_default")]
    pub(super) creation_time: String,
    /// Whether disks can be made of it.
    #[serde(deserialize_with = "null_is_default")]
    pub(super) available: bool,
    /// `progressing`, `accomplished` or `failed`.
    #[serde(deserialize_with = "null_is_default")]
    pub(super) status: String,
    #[serde(deserialize_with = "null_is_default")]
    tags: TagList,
}

impl EcsSnapshot {
    /// The value of a tag.
    pub(super) fn tag(&self, key: &str) -> Option<&str> {
        tag(&self.tags, key)
    }

    /// The id of the group that it was taken with.
    pub(super) fn group(&self) -> Option<&str> {
        [&self.snapshot_name, &self.description]
            .into_iter()
            .find_map(|text| text.strip_prefix("Created_from_").filter(|id| id.starts_with("ssg-")))
            .map(str::trim)
    }
}

fn tag<'a>(tags: &'a TagList, key: &str) -> Option<&'a str> {
    tags.entries.iter().find(|tag| tag.tag_key == key).map(|tag| tag.tag_value.as_str())
}

/// A group of snapshots as the API has it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct EcsGroup {
    #[serde(deserialize_with = "null_is_default")]
    pub(super) snapshot_group_id: String,
    /// `progressing`, `accomplished` or `failed`.
    #[serde(deserialize_with = "null_is_default")]
    pub(super) status: String,
    #[serde(deserialize_with = "null_is_default")]
    pub(super) creation_time: String,
    #[serde(deserialize_with = "null_is_default")]
    snapshots: Snapshots,
}

impl EcsGroup {
    /// The ids of its snapshots.
    pub(super) fn members(&self) -> Vec<&str> {
        self.snapshots.entries.iter().map(|member| member.snapshot_id.as_str()).collect()
    }
}

/// Something that the provider does to a disk and that takes time.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Task {
    pub(super) task_id: String,
    /// `Processing`, `Finished`, `Failed` and others.
    pub(super) task_status: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InstanceType {
    instance_type_id: String,
    #[serde(default, deserialize_with = "null_is_default")]
    disk_quantity: u32,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AttributeItem {
    attribute_name: String,
    #[serde(default, deserialize_with = "null_is_default")]
    attribute_values: ValueItems,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ValueItem {
    #[serde(default, deserialize_with = "null_is_default")]
    zone_id: String,
    #[serde(default, deserialize_with = "null_is_default")]
    disk_category: String,
    #[serde(default, deserialize_with = "null_is_default")]
    value: String,
}

/// What may still be made of one category in one zone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Quota {
    pub(super) zone: String,
    pub(super) category: String,
    pub(super) left_gib: u64,
}

/// A disk to make.
#[derive(Debug, Clone, Default)]
pub(super) struct NewDisk {
    /// None for a disk of the whole region.
    pub(super) zone: Option<String>,
    pub(super) name: Option<String>,
    pub(super) size: u64,
    pub(super) category: String,
    pub(super) performance_level: Option<String>,
    pub(super) snapshot: Option<String>,
    pub(super) encrypted: bool,
    pub(super) kms_key: Option<String>,
    pub(super) multi_attach: bool,
    pub(super) provisioned_iops: Option<u64>,
    pub(super) bursting: Option<bool>,
    pub(super) storage_cluster: Option<String>,
    pub(super) resource_group: Option<String>,
    pub(super) tags: Tags,
}

/// A snapshot to take.
#[derive(Debug, Clone, Default)]
pub(super) struct NewEcsSnapshot {
    pub(super) disk: String,
    pub(super) name: String,
    pub(super) retention_days: Option<u32>,
    pub(super) resource_group: Option<String>,
    pub(super) tags: Tags,
}

/// A group of snapshots to take.
#[derive(Debug, Clone, Default)]
pub(super) struct NewEcsGroup {
    pub(super) disks: Vec<String>,
    pub(super) name: String,
    pub(super) resource_group: Option<String>,
    pub(super) tags: Tags,
}

/// How a disk is to change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NewSpec {
    pub(super) category: Option<String>,
    pub(super) performance_level: Option<String>,
    pub(super) provisioned_iops: Option<u64>,
}

/// The API of one account in one region.
#[derive(Debug)]
pub(super) struct Api {
    client: Client<Signing>,
    region: String,
}

macro_rules! answers {
    ($($name:ident { $($field:ident: $type:ty),* })*) => {$(
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "PascalCase", default)]
        struct $name { $(#[serde(deserialize_with = "null_is_default")] $field: $type),* }
    )*};
}
answers! {
    DescribedDisks { disks: Disks, next_token: String }
    DescribedSnapshots { snapshots: Snapshots, next_token: String }
    DescribedGroups { snapshot_groups: Groups }
    DescribedTasks { task_set: TaskSet }
    DescribedTypes { instance_types: InstanceTypes }
    DescribedAttributes { account_attribute_items: AttributeItems }
    CreatedDisk { disk_id: String }
    CreatedSnapshot { snapshot_id: String }
    CreatedGroup { snapshot_group_id: String }
    Began { task_id: String }
    Nothing {}
}

impl Api {
    /// At most `rate` requests a second, if that is not 0.
    pub(super) fn new(endpoint: Endpoint, key: AccessKey, region: &str, rate: f64) -> Result<Self> {
        let signing = Signing { key, refused: AtomicU32::new(0) };
        let client = Client::new(signing, endpoint, Limiter::new(rate, CAREFUL_RATE))?;
        Ok(Self { client, region: region.to_owned() })
    }

    fn call(&self, action: &'static str) -> Call {
        Call { action, parameters: Vec::new() }.with("RegionId", &self.region)
    }

    /// Whether the API answers and takes the key.
    pub(super) async fn check(&self, until: Deadline) -> Outcome<()> {
        self.disks(&[], until).await.map(drop)
    }

    /// The disks of these ids, at most [`BATCH`]; one that is not there is not in the answer.
    pub(super) async fn disks(&self, ids: &[&str], until: Deadline) -> Outcome<Vec<Disk>> {
        let call = self.call("DescribeDisks").with("DiskIds", json(ids)).with("PageSize", PAGE);
        Ok(self.read::<DescribedDisks>(&call, until).await?.disks.entries)
    }

    /// The disks with a tag, of any value if none is given.
    pub(super) async fn disks_tagged(
        &self,
        key: &str,
        value: Option<&str>,
        until: Deadline,
    ) -> Outcome<Vec<Disk>> {
        self.all_disks(|call| call.with("Tag.1.Key", key).maybe("Tag.1.Value", value), until).await
    }

    /// All data disks of the region.
    pub(super) async fn data_disks(&self, until: Deadline) -> Outcome<Vec<Disk>> {
        self.all_disks(|call| call.with("DiskType", "data"), until).await
    }

    /// The disks of an instance.
    pub(super) async fn disks_of(&self, instance: &str, until: Deadline) -> Outcome<Vec<Disk>> {
        self.all_disks(|call| call.with("InstanceId", instance), until).await
    }

    async fn all_disks(&self, wanted: impl Fn(Call) -> Call, until: Deadline) -> Outcome<Vec<Disk>> {
        let (mut all, mut next) = (Vec::new(), None);
        loop {
            let call = wanted(self.call("DescribeDisks")).with("MaxResults", PAGE).maybe("NextToken", next);
            let page: DescribedDisks = self.read(&call, until).await?;
            all.extend(page.disks.entries);
            if page.next_token.is_empty() {
                return Ok(all);
            }
            next = Some(page.next_token);
        }
    }

    /// Makes a disk; with the same token and the same parameters it is the same disk.
    pub(super) async fn create_disk(&self, new: &NewDisk, token: &str, until: Deadline) -> Outcome<String> {
        let call = self
            .call("CreateDisk")
            .with("ClientToken", token)
            .maybe("ZoneId", new.zone.as_ref())
            .maybe("DiskName", new.name.as_ref())
            .with("Size", new.size.to_string())
            .with("DiskCategory", &new.category)
            .maybe("PerformanceLevel", new.performance_level.as_ref())
            .maybe("SnapshotId", new.snapshot.as_ref())
            .maybe("Encrypted", new.encrypted.then_some("true"))
            .maybe("KMSKeyId", new.kms_key.as_ref())
            .maybe("MultiAttach", new.multi_attach.then_some("Enabled"))
            .maybe("ProvisionedIops", new.provisioned_iops)
            .maybe("BurstingEnabled", new.bursting)
            .maybe("StorageClusterId", new.storage_cluster.as_ref())
            .maybe("ResourceGroupId", new.resource_group.as_ref())
            .tags(&new.tags);
        Ok(self.read::<CreatedDisk>(&call, until).await?.disk_id)
    }

    /// Removes a disk; one that is not there is removed.
    pub(super) async fn delete_disk(&self, id: &str, until: Deadline) -> Outcome<()> {
        self.delete(&self.call("DeleteDisk").with("DiskId", id), until).await
    }

    pub(super) async fn attach_disk(&self, id: &str, instance: &str, until: Deadline) -> Outcome<()> {
        self.write(&self.call("AttachDisk").with("DiskId", id).with("InstanceId", instance), until).await
    }

    pub(super) async fn detach_disk(&self, id: &str, instance: &str, until: Deadline) -> Outcome<()> {
        self.write(&self.call("DetachDisk").with("DiskId", id).with("InstanceId", instance), until).await
    }

    /// Makes a disk larger; one that is attached as well.
    pub(super) async fn resize_disk(
        &self,
        id: &str,
        size: u64,
        is_attached: bool,
        until: Deadline,
    ) -> Outcome<()> {
        let call = self.call("ResizeDisk").with("DiskId", id).with("NewSize", size.to_string());
        self.write(&call.maybe("Type", is_attached.then_some("online")), until).await
    }

    /// Begins to change a disk, and says by which task; `None` if there is nothing to change.
    pub(super) async fn modify_spec(
        &self,
        id: &str,
        spec: &NewSpec,
        until: Deadline,
    ) -> Outcome<Option<String>> {
        match self.client.once(&self.spec_call(id, spec), until).await {
            Err(failure) if is_code(&failure, &[NO_CHANGE]) => Ok(None),
            answer => Ok(Some(parse::<Began>("ModifyDiskSpec", &answer?)?.task_id)),
        }
    }

    /// Whether a disk could be changed like this, and would change; nothing is done.
    pub(super) async fn would_modify(&self, id: &str, spec: &NewSpec, until: Deadline) -> Outcome<bool> {
        let call = self.spec_call(id, spec).with("DryRun", "true");
        match self.client.repeated(&call, until).await {
            Err(failure) if is_code(&failure, &["DryRunOperation"]) => Ok(true),
            Err(failure) if is_code(&failure, &[NO_CHANGE]) => Ok(false),
            // It says what is wrong by an error, and that nothing is by another.
            answered => answered.map(|_| true),
        }
    }

    fn spec_call(&self, id: &str, spec: &NewSpec) -> Call {
        self.call("ModifyDiskSpec")
            .with("DiskId", id)
            .maybe("DiskCategory", spec.category.as_ref())
            .maybe("PerformanceLevel", spec.performance_level.as_ref())
            .maybe("ProvisionedIops", spec.provisioned_iops)
    }

    pub(super) async fn set_bursting(&self, id: &str, bursting: bool, until: Deadline) -> Outcome<()> {
        let call = self.call("ModifyDiskAttribute").with("DiskId", id);
        self.read::<Nothing>(&call.with("BurstingEnabled", bursting.to_string()), until).await.map(drop)
    }

    /// A task by its id.
    pub(super) async fn task(&self, id: &str, until: Deadline) -> Outcome<Option<Task>> {
        let call = self.call("DescribeTasks").with("TaskIds", id);
        Ok(self.read::<DescribedTasks>(&call, until).await?.task_set.entries.pop())
    }

    /// The last task that changed or changes a disk.
    pub(super) async fn last_task_of(&self, disk: &str, until: Deadline) -> Outcome<Option<Task>> {
        let call = self
            .call("DescribeTasks")
            .list("ResourceIds", &[disk])
            .with("TaskAction", "ModifyDiskSpec")
            .with("PageSize", "1");
        Ok(self.read::<DescribedTasks>(&call, until).await?.task_set.entries.into_iter().next())
    }

    /// Puts tags on disks or on snapshots.
    pub(super) async fn tag(&self, kind: &str, ids: &[&str], tags: &Tags, until: Deadline) -> Outcome<()> {
        let call = self.call("TagResources").with("ResourceType", kind).list("ResourceId", ids).tags(tags);
        self.read::<Nothing>(&call, until).await.map(drop)
    }

    /// Takes tags off a disk.
    pub(super) async fn untag_disk(&self, id: &str, keys: &[&str], until: Deadline) -> Outcome<()> {
        let call = self.call("UntagResources").with("ResourceType", "disk").list("ResourceId", &[id]);
        self.read::<Nothing>(&call.list("TagKey", keys), until).await.map(drop)
    }

    /// The snapshots of these ids, at most [`BATCH`].
    pub(super) async fn snapshots(&self, ids: &[&str], until: Deadline) -> Outcome<Vec<EcsSnapshot>> {
        let call = self.call("DescribeSnapshots").with("SnapshotIds", json(ids)).with("PageSize", PAGE);
        Ok(self.read::<DescribedSnapshots>(&call, until).await?.snapshots.entries)
    }

    /// All snapshots that are so.
    pub(super) async fn snapshots_with(
        &self,
        (name, value): (&str, &str),
        until: Deadline,
    ) -> Outcome<Vec<EcsSnapshot>> {
        let (mut all, mut next) = (Vec::new(), None);
        loop {
            let call = self.call("DescribeSnapshots").with(name, value);
            let call = call.with("MaxResults", PAGE).maybe("NextToken", next);
            let page: DescribedSnapshots = self.read(&call, until).await?;
            all.extend(page.snapshots.entries);
            if page.next_token.is_empty() {
                return Ok(all);
            }
            next = Some(page.next_token);
        }
    }

    /// Takes a snapshot; with the same token and the same parameters it is the same one.
    pub(super) async fn create_snapshot(
        &self,
        new: &NewEcsSnapshot,
        token: &str,
        until: Deadline,
    ) -> Outcome<String> {
        let call = self
            .call("CreateSnapshot")
            .with("ClientToken", token)
            .with("DiskId", &new.disk)
            .with("SnapshotName", &new.name)
            .maybe("RetentionDays", new.retention_days)
            .maybe("ResourceGroupId", new.resource_group.as_ref())
            .tags(&new.tags);
        Ok(self.read::<CreatedSnapshot>(&call, until).await?.snapshot_id)
    }

    /// Removes a snapshot, also one that disks were made of; one that is not there is removed.
    pub(super) async fn delete_snapshot(&self, id: &str, until: Deadline) -> Outcome<()> {
        self.delete(&self.call("DeleteSnapshot").with("SnapshotId", id).with("Force", "true"), until).await
    }

    /// The groups of snapshots that are so.
    pub(super) async fn groups(
        &self,
        (name, value): (&str, &str),
        until: Deadline,
    ) -> Outcome<Vec<EcsGroup>> {
        let call = self.call("DescribeSnapshotGroups").with(name, value);
        Ok(self.read::<DescribedGroups>(&call, until).await?.snapshot_groups.entries)
    }

    /// Takes a group of snapshots; with the same token and the same parameters it is the same one.
    pub(super) async fn create_group(
        &self,
        new: &NewEcsGroup,
        token: &str,
        until: Deadline,
    ) -> Outcome<String> {
        let disks: Vec<&str> = new.disks.iter().map(String::as_str).collect();
        let call = self
            .call("CreateSnapshotGroup")
            .with("ClientToken", token)
            .with("Name", &new.name)
            .list("DiskId", &disks)
            .maybe("ResourceGroupId", new.resource_group.as_ref())
            .tags(&new.tags);
        Ok(self.read::<CreatedGroup>(&call, until).await?.snapshot_group_id)
    }

    /// Removes a group and its snapshots; one that is not there is removed.
    pub(super) async fn delete_group(&self, id: &str, until: Deadline) -> Outcome<()> {
        self.delete(&self.call("DeleteSnapshotGroup").with("SnapshotGroupId", id), until).await
    }

    /// How many disks an instance of that type takes, the system disk among them.
    pub(super) async fn disk_quantity(&self, instance_type: &str, until: Deadline) -> Outcome<Option<u32>> {
        let call = self.call("DescribeInstanceTypes").list("InstanceTypes", &[instance_type]);
        let found = self.read::<DescribedTypes>(&call, until).await?.instance_types.entries;
        let found = found.into_iter().find(|one| one.instance_type_id == instance_type);
        Ok(found.map(|one| one.disk_quantity).filter(|quantity| *quantity > 0))
    }

    /// What the account may still have of pay-as-you-go disks; empty where the account has no such quota.
    pub(super) async fn quotas(&self, until: Deadline) -> Outcome<Vec<Quota>> {
        const MOST: &str = "max-postpaid-yundisk-capacity";
        const USED: &str = "used-postpaid-yundisk-capacity";
        let call = self.call("DescribeAccountAttributes").list("AttributeName", &[MOST, USED]);
        let items = self.read::<DescribedAttributes>(&call, until).await?.account_attribute_items.entries;
        let values = |name: &'static str| {
            let named = items.iter().filter(move |item| item.attribute_name == name);
            named.flat_map(|item| &item.attribute_values.entries)
        };
        let used = |of: &ValueItem| {
            let same = |one: &&ValueItem| one.zone_id == of.zone_id && one.disk_category == of.disk_category;
            values(USED).find(same).and_then(|one| one.value.parse::<u64>().ok()).unwrap_or(0)
        };
        let quotas = values(MOST).filter_map(|most| {
            let left_gib = most.value.parse::<u64>().ok()?.saturating_sub(used(most));
            Some(Quota { zone: most.zone_id.clone(), category: most.disk_category.clone(), left_gib })
        });
        Ok(quotas.collect())
    }

    /// Sends what can be sent twice.
    async fn read<T: DeserializeOwned>(&self, call: &Call, until: Deadline) -> Outcome<T> {
        parse(call.action, &self.client.repeated(call, until).await?)
    }

    /// Sends what must not be sent twice without a look.
    async fn write(&self, call: &Call, until: Deadline) -> Outcome<()> {
        self.client.once(call, until).await.map(drop)
    }

    async fn delete(&self, call: &Call, until: Deadline) -> Outcome<()> {
        match self.client.repeated(call, until).await {
            Err(failure) if is_gone(&failure) => Ok(()),
            deleted => deleted.map(drop),
        }
    }
}

/// What the provider says where a disk is as it shall become.
const NO_CHANGE: &str = "NoChangeInDiskCategoryAndPerformanceLevel";

fn json(ids: &[&str]) -> String {
    serde_json::to_string(ids).expect("text always becomes JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_with_nulls_and_without_fields() {
        let text = r#"{"DiskId": "d-1", "Size": 20, "Status": "In_use", "InstanceId": "i-1", "Attachments": null,
            "Tags": {"Tag": [{"TagKey": "a", "TagValue": "b"}, {"Key": "c"}]}, "PerformanceLevel": null}"#;
        let disk: Disk = serde_json::from_str(text).unwrap();
        assert_eq!((disk.instances(), disk.tag("a"), disk.tag("c")), (vec!["i-1"], Some("b"), Some("")));
        assert!(disk.is_on("i-1") && !disk.is_shared() && disk.performance_level.is_empty());
    }
}
