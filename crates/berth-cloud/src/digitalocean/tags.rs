//! Tags of volumes and snapshots: names that exist by themselves, and that resources have or do not have.

use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::json::paged;
use super::{Answered, error, not_found, parse, refused, unprocessable};
use crate::account::Refusal;
use crate::records::Records;
use crate::server::{Call, Reply, Twin};

/// The body of a request for a new tag.
#[derive(Deserialize)]
struct CreateTag {
    name: String,
}

/// The body of a request to tag resources.
#[derive(Deserialize)]
struct Resources {
    resources: Vec<Resource>,
}

#[derive(Deserialize)]
struct Resource {
    resource_id: String,
    resource_type: String,
}

pub(super) fn answer(twin: &Twin, call: &Call, path: &[&str]) -> Answered {
    let mut records = twin.account.records();
    let failed = |failure: berth_journal::Error| refused(call, &Refusal::from(failure), "tag");
    match (&call.method, path) {
        (&Method::GET, []) => {
            let tags = records.tags.iter().map(|tag| describe(&records, tag)).collect();
            Ok(paged(call, "tags", tags))
        }
        (&Method::POST, []) => {
            let body: CreateTag = parse(call)?;
            if body.name.is_empty() {
                return Err(unprocessable(call, "Name can't be blank"));
            }
            records.put_tag(&body.name).map_err(failed)?;
            Ok(Reply::json(StatusCode::CREATED, json!({"tag": describe(&records, &body.name)})))
        }
        (&Method::GET, [tag]) if records.tags.contains(*tag) => {
            Ok(Reply::json(StatusCode::OK, json!({"tag": describe(&records, tag)})))
        }
        (&Method::DELETE, [tag]) if records.tags.contains(*tag) => {
            let disks: Vec<_> =
                records.disks.values().filter(|disk| disk.tags.contains_key(*tag)).cloned().collect();
            for mut disk in disks {
                disk.tags.remove(*tag);
                records.put(&disk).map_err(failed)?;
            }
            records.remove_tag(tag).map_err(failed)?;
            Ok(Reply::empty(StatusCode::NO_CONTENT))
        }
        (&Method::POST | &Method::DELETE, [tag, "resources"]) if records.tags.contains(*tag) => {
            let body: Resources = parse(call)?;
            for resource in &body.resources {
                mark(&mut records, call, tag, resource, call.method == Method::POST)?;
            }
            Ok(Reply::empty(StatusCode::NO_CONTENT))
        }
        _ => Err(not_found(call)),
    }
}

fn mark(
    records: &mut Records,
    call: &Call,
    tag: &str,
    resource: &Resource,
    is_tagged: bool,
) -> Result<(), Reply> {
    let failed = |failure: berth_journal::Error| refused(call, &Refusal::from(failure), "tag");
    let change = |tags: &mut std::collections::BTreeMap<String, String>| {
        if is_tagged {
            tags.insert(tag.to_owned(), String::new());
        } else {
            tags.remove(tag);
        }
    };
    match resource.resource_type.as_str() {
        "volume" => {
            let disk = records.disks.get(&resource.resource_id).cloned();
            let mut disk = disk.ok_or_else(|| not_found(call))?;
            change(&mut disk.tags);
            records.put(&disk).map_err(failed)
        }
        "volume_snapshot" => {
            let snapshot = records.snapshots.get(&resource.resource_id).cloned();
            let mut snapshot = snapshot.ok_or_else(|| not_found(call))?;
            change(&mut snapshot.tags);
            records.put(&snapshot).map_err(failed)
        }
        other => {
            let text = format!("resources of type {other} cannot be tagged here");
            Err(error(call, StatusCode::UNPROCESSABLE_ENTITY, "unprocessable_entity", &text))
        }
    }
}

/// Makes the tags that a new resource names.
pub(super) fn ensure<'a>(twin: &Twin, tags: impl Iterator<Item = &'a String>) -> Result<(), Refusal> {
    let mut records = twin.account.records();
    for tag in tags {
        if !records.tags.contains(tag) {
            records.put_tag(tag)?;
        }
    }
    Ok(())
}

fn describe(records: &Records, tag: &str) -> Value {
    let volumes = records.disks.values().filter(|disk| disk.tags.contains_key(tag)).count();
    let snapshots = records.snapshots.values().filter(|snapshot| snapshot.tags.contains_key(tag)).count();
    json!({"name": tag, "resources": {
        "count": volumes + snapshots, "volumes": {"count": volumes}, "volume_snapshots": {"count": snapshots},
    }})
}
