//! DigitalOcean's API, version 2, as far as block storage needs it: volumes, their actions and snapshots, droplets, tags, the account.
//!
//! Paths, JSON, status codes and the texts that drivers look for are those of the public API. A volume's name is unique in its
//! region; a droplet takes one attach or detach at a time and refuses others with "Droplet already has a pending event".

mod json;
mod tags;

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, StatusCode};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use self::json::{action, droplet, paged, region, snapshot, volume};
use crate::account::{NewDisk, NewSnapshot, Refusal, Rules, uuid};
use crate::faults::Effects;
use crate::limits::Allowance;
use crate::records::{Disk, DiskStatus, Instance, Operation, Progress, Work};
use crate::server::{Api, Call, InstanceOptions, Reply, Twin};

/// The largest volume that there is.
const LARGEST_GIB: u64 = 16_384;
const LONGEST_NAME: usize = 64;
/// The size of a droplet that nothing is said of.
const USUAL_SIZE: &str = "s-2vcpu-4gb";

/// The API of one region, for one token.
pub(crate) struct DigitalOcean {
    token: String,
    region: String,
}

/// The body of a request for a new volume. Clients send fields that they do not set as "" or null.
#[derive(Deserialize)]
struct CreateVolume {
    name: Option<String>,
    size_gigabytes: Option<u64>,
    region: Option<String>,
    snapshot_id: Option<String>,
    description: Option<String>,
    filesystem_type: Option<String>,
    filesystem_label: Option<String>,
    tags: Option<Vec<String>>,
}

/// The body of a request for an action of a volume.
#[derive(Deserialize)]
struct VolumeAction {
    #[serde(rename = "type")]
    kind: String,
    droplet_id: Option<u64>,
    volume_name: Option<String>,
    size_gigabytes: Option<u64>,
    region: Option<String>,
}

/// The body of a request for a snapshot.
#[derive(Deserialize)]
struct CreateSnapshot {
    name: Option<String>,
    tags: Option<Vec<String>>,
}

/// The body of a request for a droplet.
#[derive(Deserialize)]
struct CreateDroplet {
    name: String,
    region: Option<String>,
    size: Option<String>,
}

/// An answer, or the error that takes its place.
type Answered = Result<Reply, Reply>;

impl DigitalOcean {
    pub(crate) const RULES: Rules = Rules {
        one_action_per_instance: true,
        unique_names: true,
        link_name: |disk| format!("scsi-0DO_Volume_{}", disk.name),
        other_link_name: |disk| format!("scsi-SDO_Volume_{}", disk.name),
        disks_of_kind: |_| None,
    };

    pub(crate) fn new(token: String, region: String) -> Self {
        Self { token, region }
    }

    async fn route(&self, twin: &Twin, call: &Call, effects: &Effects) -> Answered {
        let segments = call.segments();
        let Some(("v2", path)) = segments.split_first().map(|(first, rest)| (*first, rest)) else {
            return Err(not_found(call));
        };
        match (&call.method, path) {
            (&Method::GET, ["account"]) => Ok(account(twin)),
            (&Method::GET, ["regions"]) => Ok(paged(call, "regions", vec![region(&self.region)])),
            (&Method::GET, ["volumes"]) => Ok(list_volumes(twin, call)),
            (&Method::POST, ["volumes"]) => self.create_volume(twin, call, effects).await,
            (&Method::DELETE, ["volumes"]) => {
                let id = self.find_by_name(twin, &call.parameter("name").unwrap_or_default(), call)?;
                delete_volume(twin, call, &id)
            }
            (&Method::POST, ["volumes", "actions"]) => {
                let body: VolumeAction = parse(call)?;
                let name = body.volume_name.clone().unwrap_or_default();
                let id = self.find_by_name(twin, &name, call)?;
                self.act(twin, call, &id, &body, effects)
            }
            (&Method::GET, ["volumes", "snapshots", id] | ["snapshots", id]) => get_snapshot(twin, call, id),
            (&Method::DELETE, ["volumes", "snapshots", id] | ["snapshots", id]) => {
                delete_snapshot(twin, call, id)
            }
            (&Method::GET, ["volumes", id]) => Ok(Reply::json(
                StatusCode::OK,
                json!({"volume": volume(&visible_volume(twin, id).ok_or_else(|| not_found(call))?)}),
            )),
            (&Method::DELETE, ["volumes", id]) => delete_volume(twin, call, id),
            (&Method::POST, ["volumes", id, "actions"]) => self.act(twin, call, id, &parse(call)?, effects),
            (&Method::GET, ["volumes", id, "actions"]) => {
                visible_volume(twin, id).ok_or_else(|| not_found(call))?;
                Ok(list_actions(twin, call, |one| one.disk == *id))
            }
            (&Method::GET, ["volumes", id, "actions", number]) => get_action(twin, call, Some(id), number),
            (&Method::GET, ["actions"]) => Ok(list_actions(twin, call, |_| true)),
            (&Method::GET, ["actions", number]) => get_action(twin, call, None, number),
            (&Method::GET, ["volumes", id, "snapshots"]) => {
                visible_volume(twin, id).ok_or_else(|| not_found(call))?;
                Ok(list_snapshots(twin, call, Some(id)))
            }
            (&Method::POST, ["volumes", id, "snapshots"]) => {
                self.create_snapshot(twin, call, id, effects).await
            }
            (&Method::GET, ["snapshots"]) => Ok(list_snapshots(twin, call, None)),
            (_, ["droplets", rest @ ..]) => self.droplets(twin, call, rest),
            (_, ["tags", rest @ ..]) => tags::answer(twin, call, rest),
            _ => Err(not_found(call)),
        }
    }

    fn find_by_name(&self, twin: &Twin, name: &str, call: &Call) -> Result<String, Reply> {
        let region = call.parameter("region").filter(|region| !region.is_empty());
        let region = region.unwrap_or_else(|| self.region.clone());
        let records = twin.account.records();
        let found = records.disks.values().find(|disk| disk.name == name && disk.zone == region);
        found.map(|disk| disk.id.clone()).ok_or_else(|| not_found(call))
    }

    async fn create_volume(&self, twin: &Twin, call: &Call, effects: &Effects) -> Answered {
        let body: CreateVolume = parse(call)?;
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let name = given(body.name).ok_or_else(|| unprocessable(call, "Name can't be blank"))?;
        if !is_name(&name) {
            return Err(unprocessable(
                call,
                "Name must be lowercase, begin with a letter, have at most 64 characters, and contain only letters, numbers and \
                 hyphens",
            ));
        }
        let snapshot = given(body.snapshot_id);
        let size_gib = body.size_gigabytes.unwrap_or_default();
        if snapshot.is_none() && !(1..=LARGEST_GIB).contains(&size_gib) {
            return Err(unprocessable(
                call,
                &format!("Size gigabytes must be between 1 and {LARGEST_GIB}, not {size_gib}"),
            ));
        }
        let zone = given(body.region);
        if zone.is_none() && snapshot.is_none() {
            return Err(unprocessable(call, "Region can't be blank"));
        }
        let zone = zone.unwrap_or_else(|| self.region.clone());
        if zone != self.region {
            return Err(unprocessable(call, &format!("Region {zone} is not available")));
        }
        let mut properties = BTreeMap::new();
        for (key, value) in [
            ("description", body.description),
            ("filesystem_type", body.filesystem_type),
            ("filesystem_label", body.filesystem_label),
        ] {
            properties.insert(key.to_owned(), value.unwrap_or_default());
        }
        let tags: BTreeMap<_, _> =
            body.tags.unwrap_or_default().into_iter().map(|tag| (tag, String::new())).collect();
        // From a snapshot the size field is ignored: the volume gets the snapshot's.
        let size_gib = if snapshot.is_some() { 0 } else { size_gib };
        let new = NewDisk { id: uuid(), name, zone, size_gib, snapshot, tags: tags.clone(), properties };
        let (disk, operation) =
            twin.account.create_disk(new, effects).map_err(|refusal| refused(call, &refusal, "volume"))?;
        tags::ensure(twin, tags.keys()).map_err(|refusal| refused(call, &refusal, "tag"))?;
        let ended = twin.account.wait(operation).await;
        match ended.map(|one| one.progress) {
            Some(Progress::Completed) => {
                Ok(Reply::json(StatusCode::CREATED, json!({"volume": volume(&disk)})))
            }
            _ => Err(self.failure(call, StatusCode::INTERNAL_SERVER_ERROR)),
        }
    }

    fn act(&self, twin: &Twin, call: &Call, id: &str, body: &VolumeAction, effects: &Effects) -> Answered {
        if visible_volume(twin, id).is_none() {
            return Err(not_found(call));
        }
        if body.region.as_ref().is_some_and(|region| !region.is_empty() && *region != self.region) {
            return Err(unprocessable(call, "Region does not match that of the volume"));
        }
        let account = &twin.account;
        let started = match body.kind.as_str() {
            "attach" | "detach" => {
                let droplet = body.droplet_id.ok_or_else(|| unprocessable(call, "Droplet can't be blank"))?;
                let droplet = droplet.to_string();
                if body.kind == "attach" {
                    account.attach(id, &droplet, false, effects)
                } else {
                    account.detach(id, &droplet, effects)
                }
            }
            "resize" => {
                let size = body.size_gigabytes.unwrap_or_default();
                if !(1..=LARGEST_GIB).contains(&size) {
                    return Err(unprocessable(
                        call,
                        &format!("Size gigabytes must be between 1 and {LARGEST_GIB}, not {size}"),
                    ));
                }
                account.resize(id, size, effects)
            }
            other => return Err(unprocessable(call, &format!("{other} is not a valid action type"))),
        };
        let operation = started.map_err(|refusal| refused(call, &refusal, "volume"))?;
        Ok(Reply::json(StatusCode::ACCEPTED, json!({"action": action(&operation)})))
    }

    async fn create_snapshot(&self, twin: &Twin, call: &Call, id: &str, effects: &Effects) -> Answered {
        let body: CreateSnapshot = parse(call)?;
        let name = body.name.filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| unprocessable(call, "Name can't be blank"))?;
        let tags: BTreeMap<_, _> =
            body.tags.unwrap_or_default().into_iter().map(|tag| (tag, String::new())).collect();
        let new = NewSnapshot {
            id: uuid(),
            name,
            disk: id.to_owned(),
            tags: tags.clone(),
            ..NewSnapshot::default()
        };
        let (taken, operation) =
            twin.account.snapshot(new, effects).map_err(|refusal| refused(call, &refusal, "snapshot"))?;
        tags::ensure(twin, tags.keys()).map_err(|refusal| refused(call, &refusal, "tag"))?;
        let ended = twin.account.wait(operation).await;
        match ended.map(|one| one.progress) {
            Some(Progress::Completed) => {
                Ok(Reply::json(StatusCode::CREATED, json!({"snapshot": snapshot(&taken)})))
            }
            _ => Err(self.failure(call, StatusCode::INTERNAL_SERVER_ERROR)),
        }
    }

    fn droplets(&self, twin: &Twin, call: &Call, path: &[&str]) -> Answered {
        let of = |instance: &Instance| {
            let records = twin.account.records();
            droplet(instance, records.disks.values().filter(|disk| disk.is_attached_to(&instance.id)))
        };
        let get = |id: &str| twin.account.records().instances.get(id).cloned().ok_or_else(|| not_found(call));
        match (&call.method, path) {
            (&Method::GET, []) => {
                let instances: Vec<_> = twin.account.records().instances.values().cloned().collect();
                Ok(paged(call, "droplets", instances.iter().map(of).collect()))
            }
            (&Method::POST, []) => {
                let body: CreateDroplet = parse(call)?;
                let known =
                    twin.account.records().instances.keys().filter_map(|id| id.parse::<u64>().ok()).max();
                let options = InstanceOptions {
                    id: (known.unwrap_or(0) + 1).to_string(),
                    zone: body.region,
                    kind: body.size,
                    devices: false,
                };
                let mut instance = self.instance(&options).map_err(|why| unprocessable(call, &why))?;
                instance.name = body.name;
                twin.account.put_instance(&instance).map_err(|refusal| refused(call, &refusal, "droplet"))?;
                Ok(Reply::json(StatusCode::ACCEPTED, json!({"droplet": of(&instance), "links": {}})))
            }
            (&Method::GET, [id]) => {
                let instance = get(id)?;
                Ok(Reply::json(StatusCode::OK, json!({"droplet": of(&instance)})))
            }
            (&Method::DELETE, [id]) => {
                twin.account.remove_instance(id).map_err(|refusal| refused(call, &refusal, "droplet"))?;
                Ok(Reply::empty(StatusCode::NO_CONTENT))
            }
            (&Method::POST, [id, "actions"]) => {
                let body: VolumeAction = parse(call)?;
                let on = match body.kind.as_str() {
                    "power_on" => true,
                    "power_off" | "shutdown" => false,
                    other => return Err(unprocessable(call, &format!("{other} is not supported here"))),
                };
                let instance =
                    twin.account.set_power(id, on).map_err(|refusal| refused(call, &refusal, "droplet"))?;
                let now = Timestamp::now();
                let done = json!({"action": {
                    "id": now.as_microsecond(), "status": "completed", "type": body.kind, "started_at": json::time(now),
                    "completed_at": json::time(now), "resource_id": instance.id.parse::<u64>().ok(),
                    "resource_type": "droplet", "region": region(&instance.zone), "region_slug": instance.zone,
                }});
                Ok(Reply::json(StatusCode::CREATED, done))
            }
            _ => Err(not_found(call)),
        }
    }
}

#[async_trait]
impl Api for DigitalOcean {
    fn kind(&self, call: &Call) -> String {
        let segments = call.segments();
        let path = segments.split_first().filter(|(first, _)| **first == "v2").map(|(_, rest)| rest);
        let of_action = || {
            let body: Option<VolumeAction> = serde_json::from_slice(&call.body).ok();
            let kind = body.map_or_else(|| "action".to_owned(), |body| body.kind);
            format!("volumes.{kind}")
        };
        let verb = |single: bool| match (&call.method, single) {
            (&Method::GET, false) => "list",
            (&Method::GET, true) => "get",
            (&Method::POST, _) => "create",
            (&Method::DELETE, _) => "delete",
            _ => "other",
        };
        let name = match path.unwrap_or_default() {
            ["volumes", "actions"] => return of_action(),
            ["volumes", _, "actions"] if call.method == Method::POST => return of_action(),
            ["volumes", _, "actions"] => "volume-actions.list",
            ["volumes", _, "actions", _] => "volume-actions.get",
            ["volumes", _, "snapshots"] if call.method == Method::POST => "volumes.snapshot",
            ["volumes", _, "snapshots"] => "volumes.snapshots",
            ["volumes", "snapshots", _] => return format!("snapshots.{}", verb(true)),
            ["account"] => "account.get",
            ["tags", _, "resources"] => return format!("tags.resources-{}", verb(true)),
            [collection @ ("volumes" | "snapshots" | "droplets" | "actions" | "tags" | "regions")] => {
                return format!("{collection}.{}", verb(false));
            }
            [collection @ ("volumes" | "snapshots" | "droplets" | "actions" | "tags"), _] => {
                return format!("{collection}.{}", verb(true));
            }
            ["droplets", _, "actions"] => "droplets.action",
            _ => "unknown",
        };
        name.to_owned()
    }

    fn authenticate(&self, call: &Call) -> Result<(), Reply> {
        let given = call.header("authorization").strip_prefix("Bearer ").unwrap_or_default();
        if given == self.token {
            return Ok(());
        }
        Err(error(call, StatusCode::UNAUTHORIZED, "Unauthorized", "Unable to authenticate you"))
    }

    /// The limit is one of the account's, whatever it is used for.
    fn limited_by(&self, _: &str) -> String {
        String::new()
    }

    async fn answer(&self, twin: &Twin, call: &Call, effects: &Effects) -> Reply {
        self.route(twin, call, effects).await.unwrap_or_else(|error| error)
    }

    fn failure(&self, call: &Call, status: StatusCode) -> Reply {
        error(call, status, "server_error", "Unexpected server-side error")
    }

    fn throttled(&self, call: &Call, retry_after: Duration) -> Reply {
        let text = "API Rate limit exceeded.";
        let seconds = retry_after.as_secs() + 1;
        error(call, StatusCode::TOO_MANY_REQUESTS, "too_many_requests", text)
            .with_header("retry-after", seconds.to_string())
    }

    fn decorate(&self, call: &Call, reply: Reply, allowance: Option<&Allowance>) -> Reply {
        let reply = reply.with_header("x-request-id", call.request_id.clone());
        match allowance {
            Some(allowance) => reply
                .with_header("ratelimit-limit", allowance.limit.to_string())
                .with_header("ratelimit-remaining", allowance.remaining.to_string())
                .with_header("ratelimit-reset", allowance.reset.as_second().to_string()),
            None => reply,
        }
    }

    fn metadata(&self, instance: &Instance, path: &str, call: &Call) -> Reply {
        if call.method != Method::GET {
            return Reply::text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed");
        }
        let text = match path {
            "metadata/v1/id" => &instance.id,
            "metadata/v1/region" => &instance.zone,
            "metadata/v1/hostname" => &instance.name,
            "metadata/v1.json" => {
                let all = json!({
                    "droplet_id": instance.id.parse::<u64>().ok(), "hostname": instance.name, "region": instance.zone,
                    "tags": [], "interfaces": {}, "features": {"dhcp_enabled": false},
                });
                return Reply::json(StatusCode::OK, all);
            }
            "metadata/v1" => "id\nhostname\nregion",
            _ => return Reply::text(StatusCode::NOT_FOUND, "not found"),
        };
        Reply::text(StatusCode::OK, text)
    }

    fn instance(&self, options: &InstanceOptions) -> Result<Instance, String> {
        if options.id.parse::<u64>().is_err() {
            return Err(format!("the id of a droplet is a number, not `{}`", options.id));
        }
        let zone = options.zone.clone().unwrap_or_else(|| self.region.clone());
        if zone != self.region {
            return Err(format!("this account's region is {}, not {zone}", self.region));
        }
        Ok(Instance {
            id: options.id.clone(),
            name: format!("droplet-{}", options.id),
            zone,
            kind: options.kind.clone().unwrap_or_else(|| USUAL_SIZE.to_owned()),
            devices: options.devices,
            powered_on: true,
            created: Timestamp::now(),
        })
    }
}

fn account(twin: &Twin) -> Reply {
    let body = json!({"account": {
        "droplet_limit": 25, "floating_ip_limit": 3, "reserved_ip_limit": 3, "volume_limit": twin.account.quotas.disks,
        "email": "twin@example.com", "name": "Twin", "uuid": "b6fc48dbf6d9906cace5f3c78dc9851e757381ef",
        "email_verified": true, "status": "active", "status_message": "",
    }});
    Reply::json(StatusCode::OK, body)
}

fn list_volumes(twin: &Twin, call: &Call) -> Reply {
    let (name, region) = (call.parameter("name"), call.parameter("region"));
    let now = Timestamp::now();
    let wanted = |disk: &&Disk| {
        disk.status != DiskStatus::Creating
            && disk.listed_from <= now
            && name.as_ref().is_none_or(|name| name.is_empty() || *name == disk.name)
            && region.as_ref().is_none_or(|region| region.is_empty() || *region == disk.zone)
    };
    let mut disks: Vec<_> = twin.account.records().disks.values().filter(wanted).cloned().collect();
    disks.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
    paged(call, "volumes", disks.iter().map(volume).collect())
}

fn is_name(name: &str) -> bool {
    name.len() <= LONGEST_NAME
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

fn visible_volume(twin: &Twin, id: &str) -> Option<Disk> {
    let records = twin.account.records();
    records.disks.get(id).filter(|disk| disk.status != DiskStatus::Creating).cloned()
}

fn delete_volume(twin: &Twin, call: &Call, id: &str) -> Answered {
    twin.account.delete_disk(id).map_err(|refusal| match refusal {
        Refusal::Attached => {
            error(call, StatusCode::CONFLICT, "conflict", "attached volume cannot be deleted")
        }
        other => refused(call, &other, "volume"),
    })?;
    Ok(Reply::empty(StatusCode::NO_CONTENT))
}

fn list_actions(twin: &Twin, call: &Call, wanted: impl Fn(&Operation) -> bool) -> Reply {
    let records = twin.account.records();
    let shown = |one: &&Operation| wanted(one) && !matches!(one.work, Work::Create | Work::Snapshot { .. });
    let actions = records.operations.values().rev().filter(shown).map(action).collect();
    drop(records);
    paged(call, "actions", actions)
}

fn get_action(twin: &Twin, call: &Call, disk: Option<&str>, number: &str) -> Answered {
    let records = twin.account.records();
    let operation = number.parse().ok().and_then(|number| records.operations.get(&number));
    let operation = operation.filter(|one| disk.is_none_or(|disk| one.disk == disk));
    let found = operation.map(action).ok_or_else(|| not_found(call))?;
    Ok(Reply::json(StatusCode::OK, json!({"action": found})))
}

fn list_snapshots(twin: &Twin, call: &Call, disk: Option<&str>) -> Reply {
    let now = Timestamp::now();
    // There are no other snapshots than those of volumes.
    let of_droplets = call.parameter("resource_type").is_some_and(|kind| kind == "droplet");
    let region = call.parameter("region").filter(|region| !region.is_empty());
    let records = twin.account.records();
    let mut found: Vec<_> = records
        .snapshots
        .values()
        .filter(|one| !of_droplets && one.ready && one.listed_from <= now)
        .filter(|one| disk.is_none_or(|disk| one.disk == disk))
        .filter(|one| region.as_ref().is_none_or(|region| one.zone == *region))
        .collect();
    found.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
    let found = found.into_iter().map(snapshot).collect();
    drop(records);
    paged(call, "snapshots", found)
}

fn get_snapshot(twin: &Twin, call: &Call, id: &str) -> Answered {
    let records = twin.account.records();
    let found = records.snapshots.get(id).filter(|one| one.ready).ok_or_else(|| not_found(call))?;
    Ok(Reply::json(StatusCode::OK, json!({"snapshot": snapshot(found)})))
}

fn delete_snapshot(twin: &Twin, call: &Call, id: &str) -> Answered {
    twin.account.delete_snapshot(id).map_err(|refusal| refused(call, &refusal, "snapshot"))?;
    Ok(Reply::empty(StatusCode::NO_CONTENT))
}

fn parse<'a, T: Deserialize<'a>>(call: &'a Call) -> Result<T, Reply> {
    serde_json::from_slice(&call.body).map_err(|wrong| {
        error(call, StatusCode::BAD_REQUEST, "bad_request", &format!("Invalid request body: {wrong}"))
    })
}

/// What a refusal is called by this API.
fn refused(call: &Call, refusal: &Refusal, what: &str) -> Reply {
    let (status, text) = match refusal {
        Refusal::NoDisk | Refusal::NoInstance | Refusal::NoSnapshot => return not_found(call),
        Refusal::NameTaken => {
            let text = format!("a {what} with that name already exists");
            return error(call, StatusCode::CONFLICT, "conflict", &text);
        }
        Refusal::TooManyDisks => {
            (StatusCode::FORBIDDEN, "failed to create volume: volume count limit exceeded".to_owned())
        }
        Refusal::NoCapacity => (
            StatusCode::FORBIDDEN,
            format!("failed to create {what}: volume/snapshot capacity limit exceeded"),
        ),
        Refusal::TooManySnapshots => {
            (StatusCode::FORBIDDEN, "failed to create snapshot: snapshot limit exceeded".to_owned())
        }
        Refusal::InstanceFull(limit) => (
            StatusCode::UNPROCESSABLE_ENTITY,
            format!("cannot attach more volumes to the Droplet: it has {limit} volumes, the maximum"),
        ),
        Refusal::Attached => (StatusCode::UNPROCESSABLE_ENTITY, "This volume is already attached".to_owned()),
        Refusal::NotAttached => (StatusCode::UNPROCESSABLE_ENTITY, "Attachment not found".to_owned()),
        Refusal::DiskBusy => {
            (StatusCode::UNPROCESSABLE_ENTITY, format!("This {what} already has a pending event."))
        }
        Refusal::InstanceBusy => {
            (StatusCode::UNPROCESSABLE_ENTITY, "Droplet already has a pending event.".to_owned())
        }
        Refusal::OtherZone => (
            StatusCode::UNPROCESSABLE_ENTITY,
            "The volume and the Droplet are not in the same region".to_owned(),
        ),
        Refusal::Smaller(size) => (
            StatusCode::UNPROCESSABLE_ENTITY,
            format!("Size gigabytes must be greater than the current size, {size}"),
        ),
        Refusal::Broken(why) => {
            tracing::error!("the twin's own storage failed: {why}");
            return error(call, StatusCode::INTERNAL_SERVER_ERROR, "server_error", why);
        }
    };
    let id = if status == StatusCode::FORBIDDEN { "forbidden" } else { "unprocessable_entity" };
    error(call, status, id, &text)
}

fn error(call: &Call, status: StatusCode, id: &str, message: &str) -> Reply {
    let body: Value = json!({"id": id, "message": message, "request_id": call.request_id});
    Reply::json(status, body)
}

fn not_found(call: &Call) -> Reply {
    error(call, StatusCode::NOT_FOUND, "not_found", "The resource you were accessing could not be found.")
}

fn unprocessable(call: &Call, message: &str) -> Reply {
    error(call, StatusCode::UNPROCESSABLE_ENTITY, "unprocessable_entity", message)
}
