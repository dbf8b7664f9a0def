//! What Alibaba Cloud sells: zones, categories of disks with their sizes, and types of instances with the disks they take.

use serde_json::{Value, json};

/// A category of disks and the sizes it comes in.
pub(super) struct Category {
    pub(super) name: &'static str,
    pub(super) smallest_gib: u64,
    pub(super) largest_gib: u64,
}

const fn category(name: &'static str, smallest_gib: u64, largest_gib: u64) -> Category {
    Category { name, smallest_gib, largest_gib }
}

/// The categories that every zone has. Older ones (`cloud`, `cloud_pperf`, `cloud_sperf`) are known and no longer sold.
pub(super) const CATEGORIES: &[Category] = &[
    category("cloud_efficiency", 20, 32_768),
    category("cloud_ssd", 20, 32_768),
    category("cloud_essd", 20, 65_536),
    category("cloud_auto", 1, 65_536),
    category("cloud_essd_entry", 10, 32_768),
    category("cloud_essd_xc0", 40, 65_536),
    category("cloud_essd_xc1", 40, 65_536),
    category("cloud_regional_disk_auto", 10, 65_536),
    category("elastic_ephemeral_disk_standard", 64, 8_192),
    category("elastic_ephemeral_disk_premium", 64, 8_192),
];

/// The sizes of a performance level of `cloud_essd`.
pub(super) fn performance_level(name: &str) -> Option<(u64, u64)> {
    match name {
        "PL0" => Some((1, 65_536)),
        "PL1" => Some((20, 65_536)),
        "PL2" => Some((461, 65_536)),
        "PL3" => Some((1261, 65_536)),
        _ => None,
    }
}

/// How many provisioned IOPS a `cloud_auto` disk of this size takes.
pub(super) fn most_provisioned_iops(size_gib: u64) -> u64 {
    let baseline = (1800 + 50 * size_gib).min(50_000);
    (1000 * size_gib).saturating_sub(baseline).min(50_000)
}

/// The types of instances, with processors, memory in GiB, and the disks they take, the system disk among them.
pub(super) const INSTANCE_TYPES: &[(&str, u64, u64, u64)] = &[
    ("ecs.g7.large", 2, 8, 17),
    ("ecs.g7.xlarge", 4, 16, 17),
    ("ecs.c7.large", 2, 4, 17),
    ("ecs.t6-c1m1.large", 2, 2, 9),
];

pub(super) fn zones(region: &str) -> Vec<String> {
    ["h", "i", "j"].iter().map(|letter| format!("{region}-{letter}")).collect()
}

/// What of the disks is there in a zone, as `DescribeAvailableResource` says it; the zone is empty for the whole region.
pub(super) fn available(region: &str, zone: &str) -> Value {
    let regional = |category: &&Category| category.name.contains("_regional_") == zone.is_empty();
    let disks: Vec<_> = CATEGORIES
        .iter()
        .filter(regional)
        .map(|category| {
            json!({
                "Value": category.name, "Status": "Available", "StatusCategory": "WithStock", "Unit": "GiB",
                "Min": category.smallest_gib, "Max": category.largest_gib,
            })
        })
        .collect();
    json!({
        "ZoneId": zone, "RegionId": region, "Status": "Available", "StatusCategory": "WithStock",
        "AvailableResources": {"AvailableResource": [
            {"Type": "DataDisk", "SupportedResources": {"SupportedResource": disks}},
        ]},
    })
}

pub(super) fn instance_type((name, processors, memory, disks): &(&str, u64, u64, u64)) -> Value {
    let family = name.rsplit_once('.').map_or(*name, |(family, _)| family);
    json!({
        "InstanceTypeId": name, "InstanceTypeFamily": family, "CpuCoreCount": processors, "MemorySize": memory,
        "DiskQuantity": disks, "EniQuantity": 2, "CpuArchitecture": "X86", "NvmeSupport": "unsupported",
        "InstanceFamilyLevel": "EnterpriseLevel",
    })
}
