//! Tests of the patches that need no peer; the comparison with Kubernetes' libraries is in `tests/kubernetes.rs`.

use serde_json::json;

use super::*;
use crate::schema::built_in;

fn strategically(mut object: Value, patch: Value) -> Result<Value, PatchError> {
    let pod = built_in("", "v1", "Pod").unwrap();
    strategic(&pod, &mut object, patch).map(|()| object)
}

#[test]
fn a_merge_patch_follows_its_rfc() {
    // RFC 7396, appendix A.
    for (target, patch, expected) in [
        (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
        (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
        (json!({"a": "b"}), json!({"a": null}), json!({})),
        (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
        (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
        (json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]})),
        (json!({"a": "foo"}), json!("bar"), json!("bar")),
        (json!({"e": null}), json!({"a": 1}), json!({"e": null, "a": 1})),
        (json!([1, 2]), json!({"a": "b", "c": null}), json!({"a": "b"})),
        (json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
    ] {
        let mut merged = target.clone();
        merge(&mut merged, &patch);
        assert_eq!(merged, expected, "{target} {patch}");
    }
}

#[test]
fn a_test_for_null_passes_where_there_is_nothing() {
    let mut object = json!({"metadata": {}});
    let patch = json!([{"op": "test", "path": "/metadata/finalizers", "value": null},
        {"op": "add", "path": "/metadata/finalizers", "value": ["a"]}]);
    json(&mut object, &patch).unwrap();
    assert_eq!(object, json!({"metadata": {"finalizers": ["a"]}}));
    let error = json(&mut object, &patch).unwrap_err();
    assert_eq!(error.to_string(), "testing value /metadata/finalizers failed: test failed");
    assert_eq!(error.code(), 422);
}

#[test]
fn a_json_patch_is_bounded() {
    let one = json!({"op": "test", "path": "/a", "value": null});
    let error = json(&mut json!({}), &Value::from(vec![one; 10_001])).unwrap_err();
    assert_eq!(error.to_string(), "The allowed maximum operations in a JSON patch is 10000, got 10001");
    assert_eq!(error.code(), 413);
    assert_eq!(json(&mut json!({}), &json!({})).unwrap_err().code(), 400);
}

#[test]
fn items_of_keyed_lists_are_merged_by_their_keys() {
    let object = json!({"spec": {"containers": [{"name": "a", "image": "1"}, {"name": "b"}]}});
    let patch =
        json!({"spec": {"containers": [{"name": "a", "image": "2"}, {"$patch": "delete", "name": "b"}]}});
    assert_eq!(
        strategically(object, patch).unwrap(),
        json!({"spec": {"containers": [{"name": "a", "image": "2"}]}})
    );
}

#[test]
fn a_volume_changes_its_source_by_retaining_keys() {
    let object = json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}});
    let patch = json!({"spec": {"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/"}}]}});
    assert_eq!(
        strategically(object, patch).unwrap(),
        json!({"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}})
    );
}

#[test]
fn what_a_strategic_patch_may_not_ask_for_is_an_error() {
    let object = || json!({"spec": {"containers": [{"name": "a"}]}});
    let error = strategically(object(), json!({"spec": {"containers": [{"image": "x"}]}})).unwrap_err();
    assert!(error.to_string().contains("does not contain declared merge key: name"), "{error}");
    assert_eq!(error.code(), 500);
    assert_eq!(strategically(object(), json!([])).unwrap_err().code(), 400);
    let error = strategically(object(), json!({"spec": {"$retainKeys": 1}})).unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (400, "invalid patch format of retainKeys"));
}

#[test]
fn a_json_patch_can_neither_blow_up_nor_bury_an_object() {
    let double = json!({"op": "copy", "from": "/a", "path": "/a/-"});
    let mut object = json!({"a": ["some text"]});
    let error = json(&mut object, &Value::from(vec![double; 100])).unwrap_err();
    assert!(error.to_string().contains("exceed"), "{error}");
    let mut object = json!({"a": {}});
    let dig: Vec<_> =
        (1..5000).map(|depth| json!({"op": "add", "path": "/a".repeat(depth), "value": {"a": {}}})).collect();
    assert_eq!(json(&mut object, &dig.into()).unwrap_err().to_string(), "exceeded max depth");
}
