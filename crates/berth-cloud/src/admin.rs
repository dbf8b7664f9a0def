//! The paths below `/_twin`, by which people and tests look into a twin and steer it. They need no credentials.

use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::account::Refusal;
use crate::faults::Fault;
use crate::server::{Call, Counts, InstanceOptions, Reply, Twin};

/// The body of a request for a new server.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewInstance {
    id: String,
    #[serde(default)]
    zone: Option<String>,
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default = "yes")]
    devices: bool,
}

fn yes() -> bool {
    true
}

/// The body of a request to switch a server on or off.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Power {
    on: bool,
}

/// The body of a request for another rate limit.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewLimit {
    limit: String,
}

pub(crate) fn answer(twin: &Twin, call: &Call, path: &[&str]) -> Reply {
    match steer(twin, call, path) {
        Ok(value) => Reply::json(StatusCode::OK, value),
        Err((status, why)) => Reply::json(status, json!({"message": why})),
    }
}

type Outcome = Result<Value, (StatusCode, String)>;

fn steer(twin: &Twin, call: &Call, path: &[&str]) -> Outcome {
    let bad = |why: String| (StatusCode::BAD_REQUEST, why);
    match (&call.method, path) {
        (&Method::GET, ["calls"]) => Ok(json!(twin.counts.lock().clone())),
        (&Method::DELETE, ["calls"]) => {
            *twin.counts.lock() = Counts::default();
            Ok(json!({}))
        }
        (&Method::GET, ["faults"]) => Ok(faults(twin)),
        (&Method::POST, ["faults"]) => {
            let faults: Result<Vec<_>, _> =
                lines(call).map_err(bad)?.iter().map(|line| Fault::parse(line)).collect();
            twin.faults.add(faults.map_err(bad)?);
            Ok(self::faults(twin))
        }
        (&Method::DELETE, ["faults"]) => {
            twin.faults.clear();
            Ok(faults(twin))
        }
        (&Method::GET, ["state"]) => {
            let records = twin.account.records();
            Ok(json!({
                "instances": records.instances, "disks": records.disks, "snapshots": records.snapshots,
                "groups": records.groups,
                "operations": records.operations.values().collect::<Vec<_>>(),
            }))
        }
        (&Method::POST, ["instances"]) => {
            let new: NewInstance = parse(call)?;
            let options =
                InstanceOptions { id: new.id, zone: new.zone, kind: new.kind, devices: new.devices };
            let instance = twin.api.instance(&options).map_err(bad)?;
            twin.account.put_instance(&instance).map_err(refused)?;
            Ok(json!({"metadata": twin.metadata_url(&instance.id), "devices": twin.devices_of(&instance.id)}))
        }
        (&Method::DELETE, ["instances", id]) => {
            twin.account.remove_instance(id).map_err(refused)?;
            Ok(json!({}))
        }
        (&Method::PUT, ["instances", id, "power"]) => {
            let power: Power = parse(call)?;
            Ok(json!(twin.account.set_power(id, power.on).map_err(refused)?))
        }
        (&Method::PUT, ["delays"]) => {
            let delays: std::collections::BTreeMap<String, String> = parse(call)?;
            for (name, value) in &delays {
                twin.account.set_delay(name, value).map_err(bad)?;
            }
            Ok(json!({}))
        }
        (&Method::PUT, ["rate-limit"]) => {
            let new: NewLimit = parse(call)?;
            twin.limiter.set(new.limit.parse().map_err(bad)?);
            Ok(json!({}))
        }
        _ => Err((
            StatusCode::NOT_FOUND,
            "there are /_twin/calls, /_twin/faults, /_twin/state, /_twin/instances, /_twin/delays and /_twin/rate-limit"
                .to_owned(),
        )),
    }
}

fn faults(twin: &Twin) -> Value {
    let faults = twin.faults.list().into_iter();
    json!(faults.map(|(fault, left)| json!({"fault": fault, "left": left})).collect::<Vec<_>>())
}

/// The lines of a body, or the strings of a JSON list in it.
fn lines(call: &Call) -> Result<Vec<String>, String> {
    let text = std::str::from_utf8(&call.body).map_err(|error| error.to_string())?.trim();
    if text.starts_with('[') {
        return serde_json::from_str(text).map_err(|error| error.to_string());
    }
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect())
}

fn parse<'a, T: Deserialize<'a>>(call: &'a Call) -> Result<T, (StatusCode, String)> {
    serde_json::from_slice(&call.body).map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()))
}

fn refused(refusal: Refusal) -> (StatusCode, String) {
    match refusal {
        Refusal::NoInstance => (StatusCode::NOT_FOUND, "there is no such instance".to_owned()),
        Refusal::Broken(why) => (StatusCode::INTERNAL_SERVER_ERROR, why),
        other => (StatusCode::CONFLICT, format!("{other:?}")),
    }
}
