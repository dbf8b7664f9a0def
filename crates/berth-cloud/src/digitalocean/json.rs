//! The JSON of DigitalOcean's objects, and the pages of their lists.

use http::StatusCode;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use crate::records::{Disk, Instance, Operation, Progress, Snapshot, Work};
use crate::server::{Call, Reply};

const USUAL_PAGE: usize = 20;
const LARGEST_PAGE: usize = 200;

/// A time as the API writes it: without fractions of seconds.
pub(super) fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

pub(super) fn region(slug: &str) -> Value {
    json!({
        "name": slug.to_uppercase(), "slug": slug, "features": ["backups", "ipv6", "metadata", "storage"], "available": true,
        "sizes": ["s-1vcpu-1gb", "s-2vcpu-4gb"],
    })
}

pub(super) fn volume(disk: &Disk) -> Value {
    let droplets = disk.attachments.iter().filter_map(|attachment| attachment.instance.parse::<u64>().ok());
    json!({
        "id": disk.id, "name": disk.name, "description": disk.property("description"), "size_gigabytes": disk.size_gib,
        "region": region(&disk.zone), "droplet_ids": droplets.collect::<Vec<_>>(), "created_at": time(disk.created),
        "filesystem_type": disk.property("filesystem_type"), "filesystem_label": disk.property("filesystem_label"),
        "tags": disk.tags.keys().collect::<Vec<_>>(),
    })
}

pub(super) fn snapshot(snapshot: &Snapshot) -> Value {
    json!({
        "id": snapshot.id, "name": snapshot.name, "regions": [snapshot.zone], "created_at": time(snapshot.created),
        "resource_id": snapshot.disk, "resource_type": "volume", "min_disk_size": snapshot.size_gib, "size_gigabytes": 0.0,
        "tags": snapshot.tags.keys().collect::<Vec<_>>(),
    })
}

pub(super) fn action(operation: &Operation) -> Value {
    let status = match operation.progress {
        Progress::UnderWay => "in-progress",
        Progress::Completed => "completed",
        Progress::Errored => "errored",
    };
    let kind = match operation.work {
        Work::Attach => "attach_volume",
        Work::Detach => "detach_volume",
        Work::Resize { .. } => "resize_volume",
        Work::Create | Work::Modify { .. } | Work::Snapshot { .. } => "create_volume",
    };
    json!({
        "id": operation.id, "status": status, "type": kind, "started_at": time(operation.started),
        "completed_at": operation.completed.map(time), "resource_id": null, "resource_type": "backend",
        "region": region(&operation.zone), "region_slug": operation.zone,
    })
}

pub(super) fn droplet<'a>(instance: &Instance, disks: impl Iterator<Item = &'a Disk>) -> Value {
    json!({
        "id": instance.id.parse::<u64>().ok(), "name": instance.name, "memory": 4096, "vcpus": 2, "disk": 80, "locked": false,
        "status": if instance.powered_on { "active" } else { "off" }, "created_at": time(instance.created),
        "features": [], "backup_ids": [], "snapshot_ids": [], "tags": [], "image": {}, "size": {"slug": instance.kind},
        "size_slug": instance.kind, "networks": {"v4": [], "v6": []}, "region": region(&instance.zone),
        "volume_ids": disks.map(|disk| disk.id.as_str()).collect::<Vec<_>>(),
    })
}

/// One page of a list, with links to the others.
pub(super) fn paged(call: &Call, name: &str, items: Vec<Value>) -> Reply {
    let number = |name: &str| call.parameter(name).and_then(|value| value.parse::<usize>().ok());
    let per_page = number("per_page").unwrap_or(USUAL_PAGE).clamp(1, LARGEST_PAGE);
    let page = number("page").unwrap_or(1).max(1);
    let total = items.len();
    let last = total.div_ceil(per_page).max(1);
    let link = |page: usize| {
        let kept = call.parameters().into_iter().filter(|(name, _)| name != "page" && name != "per_page");
        let query: Vec<_> = kept.map(|(name, value)| format!("{name}={value}")).collect();
        let query: Vec<_> = query.into_iter().chain([format!("page={page}&per_page={per_page}")]).collect();
        json!(format!("http://{}{}?{}", call.host(), call.path, query.join("&")))
    };
    let mut pages = Map::new();
    if page > 1 {
        pages.insert("first".to_owned(), link(1));
        pages.insert("prev".to_owned(), link(page - 1));
    }
    if page < last {
        pages.insert("next".to_owned(), link(page + 1));
        pages.insert("last".to_owned(), link(last));
    }
    let links = if pages.is_empty() { json!({}) } else { json!({"pages": pages}) };
    let shown: Vec<_> = items.into_iter().skip((page - 1).saturating_mul(per_page)).take(per_page).collect();
    Reply::json(StatusCode::OK, json!({name: shown, "links": links, "meta": {"total": total}}))
}
