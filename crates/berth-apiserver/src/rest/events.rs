//! Events of both groups are one and the same objects: kept as the core group's, shown as the other's.

use serde_json::{Map, Value};

/// Core field, and the same field in events.k8s.io.
const NAMES: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// From events.k8s.io to the core group.
pub(crate) fn to_core(event: &mut Value) {
    rename(event, "v1", |(core, new)| (new, core));
}

/// From the core group to events.k8s.io.
pub(crate) fn from_core(event: &mut Value) {
    rename(event, "events.k8s.io/v1", |(core, new)| (core, new));
}

fn rename(
    event: &mut Value,
    api_version: &str,
    direction: fn((&'static str, &'static str)) -> (&'static str, &'static str),
) {
    let Some(fields) = event.as_object_mut() else { return };
    let mut moved = Map::new();
    for (from, to) in NAMES.iter().copied().map(direction) {
        if let Some(value) = fields.remove(from) {
            moved.insert(to.to_owned(), value);
        }
    }
    fields.append(&mut moved);
    fields.retain(|name, value| !(name.starts_with("reporting") && value == ""));
    fields.insert("apiVersion".to_owned(), api_version.into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_survives_the_way_there_and_back() {
        let core = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e" }, "message": "m", "reason": "r",
            "involvedObject": { "kind": "Pod" }, "count": 2, "source": { "component": "c" },
        });
        let mut event = core.clone();
        from_core(&mut event);
        assert_eq!((&event["note"], &event["regarding"]["kind"]), (&json!("m"), &json!("Pod")));
        assert_eq!(event.get("message"), None);
        to_core(&mut event);
        assert_eq!(event, core);
    }
}
