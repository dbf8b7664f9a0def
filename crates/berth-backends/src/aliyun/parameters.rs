//! What StorageClasses, VolumeAttributesClasses and VolumeSnapshotClasses may ask for, and the categories of disks.

use std::collections::BTreeMap;

use berth_core::{AccessKind, CapacityRange, VolumeCapability, names::KUBERNETES_PARAMETER_PREFIX};
use serde::Deserialize;

use super::api::{Disk, NewSpec, Tags};
use crate::{Error, FromParameters as _, Parameters, Result, cloud::Sizes};

/// The prefix of parameters that are tags.
const DISK_TAG: &str = "diskTags/";
/// And of those that take tags away.
const REMOVED_DISK_TAG: &str = "-diskTags/";
const SNAPSHOT_TAG: &str = "snapshotTags/";
/// The key of a KMS key as upstream's provisioner copies it from a claim.
const CLAIM_KMS_KEY: &str = "alibabacloud.com/kms-key-id";

/// A category of disks: the sizes that it comes in, in GiB, and what it takes.
#[derive(Debug)]
pub(super) struct Category {
    pub(super) name: &'static str,
    least: u64,
    most: u64,
    levels: &'static [(&'static str, u64, u64)],
    /// Whether it takes provisioned IOPS, and bursts.
    tunable: bool,
    /// Whether it belongs to a region and not to a zone.
    pub(super) regional: bool,
}

const fn zonal(name: &'static str, least: u64, most: u64) -> Category {
    Category { name, least, most, levels: &[], tunable: false, regional: false }
}

/// The categories, with the sizes of upstream's table; those without a size there have the widest range, and the API decides.
const CATEGORIES: &[Category] = &[
    zonal("cloud", 1, 65_536),
    zonal("cloud_efficiency", 20, 65_536),
    zonal("cloud_ssd", 20, 65_536),
    Category {
        levels: &[("PL0", 1, 65_536), ("PL1", 20, 65_536), ("PL2", 461, 65_536), ("PL3", 1261, 65_536)],
        ..zonal("cloud_essd", 20, 65_536)
    },
    zonal("cloud_essd_xc0", 40, 65_536),
    zonal("cloud_essd_xc1", 40, 65_536),
    zonal("cloud_essd_entry", 10, 65_536),
    Category { tunable: true, ..zonal("cloud_auto", 1, 65_536) },
    Category { regional: true, ..zonal("cloud_regional_disk_auto", 10, 65_536) },
    zonal("cloud_pperf", 1, 65_536),
    zonal("cloud_sperf", 1, 65_536),
];

/// What is tried where a class names no type, as upstream does.
const USUAL: [&str; 2] = ["cloud_ssd", "cloud_efficiency"];
/// Disks that stay with the instance they were first attached to, and are lost with it.
const EPHEMERAL: &str = "elastic_ephemeral_disk_";

/// The category of that name.
pub(super) fn category(name: &str) -> Result<&'static Category> {
    let known = CATEGORIES.iter().find(|category| category.name == name);
    known.ok_or_else(|| {
        if name.starts_with(EPHEMERAL) {
            return Error::Invalid(format!(
                "parameter \"type\": {name:?} stays with one instance and is lost with it; such disks are not supported"
            ));
        }
        let known: Vec<_> = CATEGORIES.iter().map(|category| category.name).collect();
        Error::Invalid(format!("parameter \"type\": {name:?} is not one of {}", known.join(", ")))
    })
}

/// The sizes of a disk of that category and level; the widest range for one that is not known.
pub(super) fn sizes(category: &str, level: Option<&str>) -> Sizes {
    let known = CATEGORIES.iter().find(|known| known.name == category);
    let (least, most) = known.map_or((1, 65_536), |known| {
        let level = known.levels.iter().find(|(name, ..)| Some(*name) == level);
        level.map_or((known.least, known.most), |(_, least, most)| (*least, *most))
    });
    Sizes { least, most, default: least.max(20) }
}

/// One kind of disk that would do, with the size that it would have.
#[derive(Debug, Clone)]
pub(super) struct Attempt {
    pub(super) category: &'static Category,
    pub(super) level: Option<String>,
    pub(super) size: u64,
}

impl std::fmt::Display for Attempt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.category.name)?;
        self.level.as_ref().map_or(Ok(()), |level| write!(f, ".{level}"))
    }
}

/// The keys of a StorageClass besides tags.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Keys {
    r#type: Option<String>,
    performance_level: Option<String>,
    zone_id: Option<String>,
    /// An older spelling of the same.
    zoneid: Option<String>,
    region_id: Option<String>,
    encrypted: Option<String>,
    kms_key_id: Option<String>,
    #[serde(rename = "alibabacloud.com/kms-key-id")]
    claim_kms_key_id: Option<String>,
    multi_attach: Option<String>,
    disk_tags: Option<String>,
    resource_group_id: Option<String>,
    storage_cluster_id: Option<String>,
    provisioned_iops: Option<u64>,
    bursting_enabled: Option<String>,
    /// Sizes are always rounded up to what the category has.
    volume_size_auto_available: Option<String>,
    /// Without effect, as upstream.
    read_only: Option<String>,
    volume_expand_auto_snapshot: Option<String>,
}

/// What a StorageClass asks for.
#[derive(Debug, Clone)]
pub(super) struct Class {
    categories: Vec<&'static Category>,
    levels: Vec<String>,
    /// The zones that are acceptable, if the class names any.
    pub(super) zones: Option<Vec<String>>,
    pub(super) region: Option<String>,
    pub(super) encrypted: bool,
    pub(super) kms_key: Option<String>,
    pub(super) multi_attach: bool,
    pub(super) tags: Tags,
    pub(super) resource_group: Option<String>,
    pub(super) storage_cluster: Option<String>,
    provisioned_iops: Option<u64>,
    bursting: Option<bool>,
}

impl Class {
    /// Reads a StorageClass, and what a VolumeAttributesClass changes of it.
    pub(super) fn parse(parameters: &Parameters, mutable: &Parameters) -> Result<Self> {
        let (tags, others) = split(parameters, DISK_TAG);
        let keys = Keys::from_parameters(&others)?;
        let mut categories = Vec::new();
        for name in keys
            .r#type
            .as_deref()
            .filter(|names| *names != "available")
            .map_or_else(|| USUAL.to_vec(), |names| names.split(',').map(str::trim).collect())
        {
            categories.push(category(name)?);
        }
        let levels: Vec<String> = list(keys.performance_level.as_deref());
        for level in &levels {
            check_level(level)?;
        }
        let mut all_tags = old_tags(keys.disk_tags.as_deref())?;
        all_tags.extend(tags);
        let flag = |key: &str, value: &Option<String>| {
            value.as_deref().map_or(Ok(None), |value| read_flag(key, value).map(Some))
        };
        if keys.storage_cluster_id.is_some() && levels.is_empty() {
            return Err(Error::invalid("parameter \"storageClusterId\" needs \"performanceLevel\""));
        }
        flag("volumeSizeAutoAvailable", &keys.volume_size_auto_available)?;
        flag("readOnly", &keys.read_only)?;
        let mut class = Self {
            categories,
            levels,
            zones: keys.zone_id.or(keys.zoneid).map(|zones| list(Some(&zones))),
            region: keys.region_id,
            encrypted: flag("encrypted", &keys.encrypted)?.unwrap_or(false),
            kms_key: keys.claim_kms_key_id.or(keys.kms_key_id).filter(|key| !key.is_empty()),
            multi_attach: flag("multiAttach", &keys.multi_attach)?.unwrap_or(false),
            tags: all_tags,
            resource_group: keys.resource_group_id,
            storage_cluster: keys.storage_cluster_id,
            provisioned_iops: keys.provisioned_iops,
            bursting: flag("burstingEnabled", &keys.bursting_enabled)?,
        };
        if class.kms_key.is_some() && !class.encrypted {
            return Err(Error::Invalid(format!(
                "parameter \"kmsKeyId\" (or {CLAIM_KMS_KEY:?}) needs \"encrypted\": \"true\""
            )));
        }
        class.change(&Changes::parse(mutable)?)?;
        Ok(class)
    }

    fn change(&mut self, changes: &Changes) -> Result<()> {
        if let Some(name) = &changes.spec.category {
            self.categories = vec![category(name)?];
        }
        if let Some(level) = &changes.spec.performance_level {
            self.levels = vec![level.clone()];
        }
        self.provisioned_iops = changes.spec.provisioned_iops.or(self.provisioned_iops);
        self.bursting = changes.bursting.or(self.bursting);
        for key in &changes.removed_tags {
            self.tags.remove(key);
        }
        self.tags.extend(changes.tags.clone());
        Ok(())
    }

    /// The kinds of disks that would do, in the order in which they are tried.
    pub(super) fn attempts(&self, range: &CapacityRange, least: u64) -> Result<Vec<Attempt>> {
        let mut kinds: Vec<(&'static Category, Option<String>)> = Vec::new();
        for category in &self.categories {
            if category.levels.is_empty() || self.levels.is_empty() {
                kinds.push((category, None));
            } else {
                kinds.extend(self.levels.iter().map(|level| (*category, Some(level.clone()))));
            }
        }
        let (mut attempts, mut why) = (Vec::new(), None);
        for (category, level) in kinds {
            let sizes = sizes(category.name, level.as_deref());
            match sizes.choose(range).and_then(|size| sizes.grow(range, size.max(least))) {
                Ok(size) => attempts.push(Attempt { category, level, size }),
                Err(error) => {
                    why.get_or_insert(error);
                }
            }
        }
        match why {
            Some(error) if attempts.is_empty() => Err(error),
            _ => Ok(attempts),
        }
    }

    /// Whether every kind that would do belongs to the region and not to a zone.
    pub(super) fn is_regional(&self) -> bool {
        self.categories.iter().all(|category| category.regional)
    }

    /// The provisioned IOPS of a disk of that category.
    pub(super) fn iops(&self, category: &Category) -> Option<u64> {
        self.provisioned_iops.filter(|iops| category.tunable && *iops > 0)
    }

    /// Whether a disk of that category bursts, where it can.
    pub(super) fn bursting(&self, category: &Category) -> Option<bool> {
        category.tunable.then(|| self.bursting.unwrap_or(false))
    }

    /// The names of the categories that would do.
    pub(super) fn category_names(&self) -> impl Iterator<Item = &'static str> {
        self.categories.iter().map(|category| category.name)
    }

    /// In what a disk that exists is not what is asked for. What can be changed later is not compared.
    pub(super) fn difference(&self, disk: &Disk) -> Option<String> {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        if !self.category_names().any(|name| name == disk.category) {
            return Some(format!("its type is {:?}", disk.category));
        }
        let level = &disk.performance_level;
        if !self.levels.is_empty() && !level.is_empty() && !self.levels.contains(level) {
            return Some(format!("its performanceLevel is {level:?}"));
        }
        for (key, is, wanted) in [
            ("encrypted", disk.encrypted, self.encrypted),
            ("multiAttach", disk.is_shared(), self.multi_attach),
        ] {
            if is != wanted {
                return Some(format!("its {key} is {is}"));
            }
        }
        for (key, is, wanted) in [
            ("kmsKeyId", &disk.kms_key_id, self.kms_key.clone().filter(|_| self.encrypted)),
            // A disk that names no group is in the account's first one.
            ("resourceGroupId", &disk.resource_group_id, self.resource_group.clone()),
            ("storageClusterId", &disk.storage_cluster_id, Some(text(&self.storage_cluster))),
        ] {
            if wanted.is_some_and(|wanted| *is != wanted) {
                return Some(format!("its {key} is {is:?}"));
            }
        }
        None
    }
}

/// Whether a StorageClass may have this parameter with this value.
pub(super) fn is_parameter(key: &str, value: &str) -> bool {
    let one = Parameters::from([(key.to_owned(), value.to_owned())]);
    Keys::from_parameters(&split(&one, DISK_TAG).1).is_ok()
}

/// Refuses access that a disk cannot give, as upstream does: several nodes need a disk that can be attached several times, and
/// write to it only as a raw device.
pub(super) fn check_access(capabilities: &[VolumeCapability], is_shared: bool) -> Result<()> {
    for capability in capabilities {
        let mode = capability.mode;
        if mode.is_single_node() {
            continue;
        }
        if !mode.is_read_only() && capability.access.kind() == AccessKind::Mount {
            return Err(Error::Invalid(format!(
                "access mode {mode:?}: several nodes write to a disk only as a raw block device"
            )));
        }
        if !is_shared {
            return Err(Error::Invalid(format!(
                "access mode {mode:?} needs parameter \"multiAttach\": \"true\""
            )));
        }
    }
    Ok(())
}

/// What a VolumeAttributesClass asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    pub(super) spec: NewSpec,
    pub(super) bursting: Option<bool>,
    pub(super) tags: Tags,
    pub(super) removed_tags: Vec<String>,
}

/// The keys of a VolumeAttributesClass besides tags.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct MutableKeys {
    r#type: Option<String>,
    performance_level: Option<String>,
    provisioned_iops: Option<u64>,
    bursting_enabled: Option<String>,
}

impl Changes {
    /// Reads a VolumeAttributesClass; nothing was done if it is refused.
    pub(super) fn parse(mutable: &Parameters) -> Result<Self> {
        let (removed, others) = split(mutable, REMOVED_DISK_TAG);
        let (tags, others) = split(&others, DISK_TAG);
        let keys = MutableKeys::from_parameters(&others)?;
        if let Some(name) = &keys.r#type {
            category(name)?;
        }
        if let Some(level) = &keys.performance_level {
            check_level(level)?;
        }
        let bursting = keys.bursting_enabled.map(|value| read_flag("burstingEnabled", &value)).transpose()?;
        if let (Some(true), Some(name)) = (bursting, &keys.r#type)
            && !category(name)?.tunable
        {
            return Err(Error::Invalid(format!("parameter \"burstingEnabled\": {name:?} cannot burst")));
        }
        if let Some(key) = tags.keys().find(|key| removed.contains_key(*key)) {
            return Err(Error::Invalid(format!("tag {key:?} is both set and removed")));
        }
        let spec = NewSpec {
            category: keys.r#type,
            performance_level: keys.performance_level,
            provisioned_iops: keys.provisioned_iops,
        };
        Ok(Self { spec, bursting, tags, removed_tags: removed.into_keys().collect() })
    }
}

/// What a VolumeSnapshotClass asks for.
#[derive(Debug, Default)]
pub(super) struct SnapshotClass {
    pub(super) retention_days: Option<u32>,
    pub(super) resource_group: Option<String>,
    pub(super) tags: Tags,
}

/// The keys of a VolumeSnapshotClass besides tags.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct SnapshotKeys {
    retention_days: Option<u32>,
    resource_group_id: Option<String>,
    /// Without effect, as upstream.
    snapshot_type: Option<String>,
    instant_access_retention_days: Option<String>,
}

impl SnapshotClass {
    /// Reads a VolumeSnapshotClass or VolumeGroupSnapshotClass, and the name of the snapshot or group if the snapshotter says it.
    pub(super) fn parse(parameters: &Parameters) -> Result<Self> {
        let (mut tags, others) = split(parameters, SNAPSHOT_TAG);
        let SnapshotKeys {
            retention_days,
            resource_group_id,
            snapshot_type: _,
            instant_access_retention_days: _,
        } = SnapshotKeys::from_parameters(&others)?;
        if retention_days.is_some_and(|days| !(1..=65_536).contains(&days)) {
            return Err(Error::invalid("parameter \"retentionDays\" is not from 1 to 65536"));
        }
        for (key, tag) in [
            ("volumesnapshot/name", "csi.alibabacloud.com/snapshot/name"),
            ("volumesnapshot/namespace", "csi.alibabacloud.com/snapshot/namespace"),
            ("volumegroupsnapshot/name", "csi.alibabacloud.com/group-snapshot/name"),
            ("volumegroupsnapshot/namespace", "csi.alibabacloud.com/group-snapshot/namespace"),
        ] {
            if let Some(value) = parameters.get(&format!("{KUBERNETES_PARAMETER_PREFIX}{key}")) {
                tags.insert(tag.to_owned(), value.clone());
            }
        }
        Ok(Self { retention_days, resource_group: resource_group_id, tags })
    }
}

/// The parameters with that prefix, without it, and the others.
fn split(parameters: &Parameters, prefix: &str) -> (Tags, Parameters) {
    let (mut with, mut without) = (Tags::new(), BTreeMap::new());
    for (key, value) in parameters {
        match key.strip_prefix(prefix) {
            Some(key) => with.insert(key.to_owned(), value.clone()),
            None => without.insert(key.clone(), value.clone()),
        };
    }
    (with, without)
}

/// Tags as `diskTags` has them: `key:value,key:value`.
fn old_tags(text: Option<&str>) -> Result<Tags> {
    let pairs = list(text).into_iter().map(|pair| {
        let (key, value) = pair
            .split_once(':')
            .ok_or_else(|| Error::Invalid(format!("parameter \"diskTags\": {pair:?} is not KEY:VALUE")))?;
        Ok((key.to_owned(), value.to_owned()))
    });
    pairs.collect()
}

fn list(text: Option<&str>) -> Vec<String> {
    let words = text.into_iter().flat_map(|text| text.split(','));
    words.map(|word| word.trim().to_owned()).filter(|word| !word.is_empty()).collect()
}

fn check_level(level: &str) -> Result<()> {
    match level {
        "PL0" | "PL1" | "PL2" | "PL3" => Ok(()),
        _ => Err(Error::Invalid(format!(
            "parameter \"performanceLevel\": {level:?} is not one of PL0, PL1, PL2, PL3"
        ))),
    }
}

/// Reads a truth value in upstream's spellings. Upstream takes every other word for `false`; here it is refused.
fn read_flag(key: &str, value: &str) -> Result<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "1" | "enabled" => Ok(true),
        "false" | "no" | "0" | "disabled" => Ok(false),
        _ => Err(Error::Invalid(format!("parameter {key:?}: {value:?} is neither true nor false"))),
    }
}

#[cfg(test)]
mod tests {
    use berth_core::{Access, AccessMode};

    use super::*;

    const GIB: i64 = 1 << 30;

    fn map(pairs: &[(&str, &str)]) -> Parameters {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    fn class(pairs: &[(&str, &str)]) -> Class {
        Class::parse(&map(pairs), &map(&[])).unwrap()
    }

    fn sizes_of(pairs: &[(&str, &str)], required: i64, limit: i64) -> String {
        let range = CapacityRange::new(required, limit).unwrap();
        match class(pairs).attempts(&range, 0) {
            Ok(attempts) => {
                let all: Vec<_> = attempts.iter().map(|one| format!("{one}={}", one.size)).collect();
                all.join(" ")
            }
            Err(Error::OutOfRange(_)) => "out of range".to_owned(),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn sizes_are_rounded_up_to_what_each_category_has() {
        let half = GIB / 2;
        for (pairs, required, limit, expected) in [
            (&[][..], 0, 0, "cloud_ssd=20 cloud_efficiency=20"),
            (&[("type", "available")], 41 * half, 0, "cloud_ssd=21 cloud_efficiency=21"),
            (&[("type", "cloud_auto")], 3 * half, 0, "cloud_auto=2"),
            (&[("type", "cloud_auto")], 0, 0, "cloud_auto=20"),
            (&[("type", "cloud_essd")], GIB, 0, "cloud_essd=20"),
            (&[("type", "cloud_essd"), ("performanceLevel", "PL0")], GIB, 0, "cloud_essd.PL0=1"),
            (
                &[("type", "cloud_essd, cloud_ssd"), ("performanceLevel", "PL3,PL1")],
                30 * GIB,
                0,
                "cloud_essd.PL3=1261 cloud_essd.PL1=30 cloud_ssd=30",
            ),
            // Only what fits below the limit is tried.
            (
                &[("type", "cloud_essd"), ("performanceLevel", "PL3,PL1")],
                30 * GIB,
                40 * GIB,
                "cloud_essd.PL1=30",
            ),
            (&[("type", "cloud_ssd")], 5 * GIB, 10 * GIB, "out of range"),
            (&[("type", "cloud_auto")], 65_537 * GIB, 0, "out of range"),
            (&[("type", "cloud_essd_entry")], GIB, 0, "cloud_essd_entry=10"),
            (&[("type", "cloud_regional_disk_auto")], GIB, 0, "cloud_regional_disk_auto=10"),
        ] {
            assert_eq!(sizes_of(pairs, required, limit), expected, "{pairs:?} {required} {limit}");
        }
        let range = CapacityRange::new(20 * GIB, 0).unwrap();
        let restored = class(&[("type", "cloud_ssd")]).attempts(&range, 50).unwrap();
        assert_eq!(restored[0].size, 50, "not smaller than the snapshot");
    }

    #[test]
    fn what_is_not_known_is_refused_by_its_name() {
        let refused = |pairs: &[(&str, &str)], mutable: &[(&str, &str)]| {
            Class::parse(&map(pairs), &map(mutable)).unwrap_err().to_string()
        };
        for (pairs, word) in [
            (&[("fast", "true")][..], "parameter \"fast\" is not known; known are type,"),
            (&[("dataCacheSize", "10Gi")], "\"dataCacheSize\""),
            (&[("type", "cloud_fast")], "\"cloud_fast\" is not one of cloud,"),
            (&[("type", "elastic_ephemeral_disk_premium")], "stays with one instance"),
            (&[("performanceLevel", "PL9")], "\"PL9\""),
            (&[("encrypted", "maybe")], "parameter \"encrypted\""),
            (&[("provisionedIops", "-1")], "parameter \"provisionedIops\""),
            (&[("diskTags", "a=b")], "parameter \"diskTags\""),
            (&[("kmsKeyId", "k")], "needs \"encrypted\""),
            (&[("storageClusterId", "c")], "needs \"performanceLevel\""),
        ] {
            let said = refused(pairs, &[]);
            assert!(said.contains(word), "{said}");
        }
        for (mutable, word) in [
            (&[("XXX_FakeKey", "x")][..], "parameter \"XXX_FakeKey\" is not known"),
            (&[("zoneId", "x")], "parameter \"zoneId\" is not known"),
            (&[("type", "cloud_ssd"), ("burstingEnabled", "true")], "cannot burst"),
            (&[("diskTags/a", "x"), ("-diskTags/a", "")], "both set and removed"),
        ] {
            let said = refused(&[], mutable);
            assert!(said.contains(word), "{said}");
        }
        let refused = |pairs| SnapshotClass::parse(&map(pairs)).unwrap_err().to_string();
        assert!(refused(&[("ttl", "1")]).contains("parameter \"ttl\" is not known"));
        assert!(refused(&[("retentionDays", "0")]).contains("retentionDays"));
    }

    #[test]
    fn classes_are_read_as_upstream_reads_them() {
        let read = Class::parse(
            &map(&[
                ("type", "cloud_auto"),
                ("zoneid", "cn-hangzhou-h,cn-hangzhou-i"),
                ("encrypted", "Yes"),
                ("kmsKeyId", "key"),
                ("multiAttach", "enabled"),
                ("diskTags", "a:1,b:2"),
                ("diskTags/b", "3"),
                ("diskTags/c", "4"),
                ("provisionedIops", "100"),
                ("volumeSizeAutoAvailable", "true"),
                ("csi.storage.k8s.io/pvc/name", "data"),
            ]),
            &map(&[("provisionedIops", "200"), ("burstingEnabled", "true"), ("-diskTags/a", "")]),
        )
        .unwrap();
        let auto = category("cloud_auto").unwrap();
        assert_eq!((read.iops(auto), read.bursting(auto)), (Some(200), Some(true)));
        assert_eq!(read.bursting(category("cloud_ssd").unwrap()), None);
        assert_eq!(read.tags, map(&[("b", "3"), ("c", "4")]));
        assert_eq!(read.zones.as_ref().unwrap().len(), 2);
        assert!(read.encrypted && read.multi_attach && !read.is_regional());

        let snapshots = SnapshotClass::parse(&map(&[
            ("retentionDays", "7"),
            ("snapshotType", "InstantAccess"),
            ("snapshotTags/x", "y"),
            ("csi.storage.k8s.io/volumesnapshot/name", "n"),
        ]))
        .unwrap();
        let expected = map(&[("csi.alibabacloud.com/snapshot/name", "n"), ("x", "y")]);
        assert_eq!((snapshots.retention_days, snapshots.tags), (Some(7), expected));
    }

    #[test]
    fn a_disk_that_exists_is_compared_with_what_is_asked_for() {
        let disk = Disk {
            category: "cloud_essd".to_owned(),
            performance_level: "PL1".to_owned(),
            resource_group_id: "rg-1".to_owned(),
            ..Disk::default()
        };
        let differs = |pairs: &[(&str, &str)]| class(pairs).difference(&disk).unwrap_or_default();
        assert_eq!(differs(&[("type", "cloud_ssd,cloud_essd")]), "");
        assert_eq!(differs(&[("type", "cloud_essd"), ("resourceGroupId", "rg-1")]), "");
        for (pairs, word) in [
            (&[("type", "cloud_ssd")][..], "type"),
            (&[("type", "cloud_essd"), ("performanceLevel", "PL0")], "performanceLevel"),
            (&[("type", "cloud_essd"), ("encrypted", "true")], "encrypted"),
            (&[("type", "cloud_essd"), ("multiAttach", "true")], "multiAttach"),
            (&[("type", "cloud_essd"), ("resourceGroupId", "rg-2")], "resourceGroupId"),
        ] {
            assert!(differs(pairs).contains(word), "{pairs:?}: {}", differs(pairs));
        }
    }

    #[test]
    fn several_nodes_need_a_disk_for_several_and_write_to_it_raw() {
        let mount = Access::Mount { fs_type: String::new(), flags: vec![], group: None };
        let check = |access: &Access, mode, is_shared| {
            check_access(&[VolumeCapability { access: access.clone(), mode }], is_shared).is_ok()
        };
        for (access, mode, alone, shared) in [
            (&mount, AccessMode::SingleNodeWriter, true, true),
            (&mount, AccessMode::MultiNodeReaderOnly, false, true),
            (&mount, AccessMode::MultiNodeMultiWriter, false, false),
            (&Access::Block, AccessMode::MultiNodeMultiWriter, false, true),
        ] {
            assert_eq!((check(access, mode, false), check(access, mode, true)), (alone, shared), "{mode:?}");
        }
    }
}
