//! Which grants allow which reference.

use berth_kube::Key;
use serde_json::{Value, json};

use super::*;

fn allows(grant: Value) -> bool {
    let grant: ReferenceGrant = serde_json::from_value(json!({ "metadata": {}, "spec": grant })).unwrap();
    let wanted = Reference {
        group: "snapshot.storage.k8s.io",
        kind: "VolumeSnapshot",
        key: Key::new("golden", "image"),
    };
    grant.spec.allows("dev", &wanted)
}

#[test]
fn a_grant_must_name_the_claims_namespace_and_the_sources_kind_and_may_name_the_source() {
    let from = json!({ "group": "", "kind": "PersistentVolumeClaim", "namespace": "dev" });
    let to = json!({ "group": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot" });
    let with = |object: &Value, key: &str, value: &str| {
        let mut object = object.clone();
        object[key] = value.into();
        object
    };
    let rows = [
        ("all of a kind", vec![from.clone()], vec![to.clone()], true),
        ("this one", vec![from.clone()], vec![with(&to, "name", "image")], true),
        ("no name is every name", vec![from.clone()], vec![with(&to, "name", "")], true),
        ("another one", vec![from.clone()], vec![with(&to, "name", "other")], false),
        (
            "one of several",
            vec![with(&from, "namespace", "other"), from.clone()],
            vec![with(&to, "name", "other"), to.clone()],
            true,
        ),
        ("another kind", vec![from.clone()], vec![with(&to, "kind", "PersistentVolumeClaim")], false),
        ("another group", vec![from.clone()], vec![with(&to, "group", "")], false),
        ("another namespace", vec![with(&from, "namespace", "prod")], vec![to.clone()], false),
        ("not for claims", vec![with(&from, "kind", "Pod")], vec![to.clone()], false),
        ("not for core's claims", vec![with(&from, "group", "x")], vec![to.clone()], false),
        ("from nobody", vec![], vec![to], false),
        ("to nothing", vec![from], vec![], false),
    ];
    for (row, from, to, expected) in rows {
        assert_eq!(allows(json!({ "from": from, "to": to })), expected, "{row}");
    }
    assert!(!allows(json!({})));
}
