//! Tests of the patches that need no peer; the comparison with Kubernetes' libraries is in `tests/server/kubernetes.rs`.

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

#[test]
fn long_lists_are_merged_without_comparing_each_item_with_each() {
    // With a comparison of each with each this takes minutes.
    const COUNT: usize = 50_000;
    const KEYED: usize = 10_000;
    let pod = built_in("", "v1", "Pod").unwrap();
    let texts = |from: usize| -> Vec<Value> {
        (from..from + COUNT).map(|number| format!("example.com/{number}").into()).collect()
    };
    let named = |from: usize| -> Vec<Value> {
        (from..from + KEYED).map(|number| json!({"name": format!("n{number}"), "value": "x"})).collect()
    };
    let object = |from: usize| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "finalizers": texts(from)},
            "spec": {"containers": [{"name": "c", "env": named(from)}]}})
    };
    let lengths = |object: &Value| {
        ["/metadata/finalizers", "/spec/containers/0/env"]
            .map(|path| object.pointer(path).unwrap().as_array().unwrap().len())
    };
    let half = KEYED / 2;
    assert_eq!(lengths(&strategically(object(0), object(half)).unwrap()), [COUNT + half, KEYED + half]);
    let gone: Vec<Value> =
        named(0).iter().map(|item| json!({"name": item["name"], "$patch": "delete"})).collect();
    let patch = json!({
        "metadata": {"$deleteFromPrimitiveList/finalizers": texts(half)},
        "spec": {"containers": [{"name": "c", "env": gone}]},
    });
    let left = strategically(object(half), patch).unwrap();
    assert_eq!(left["metadata"]["finalizers"], json!([]));
    let left = left["spec"]["containers"][0]["env"].as_array().unwrap().clone();
    assert_eq!((left.len(), &left[0]["name"]), (half, &format!("n{KEYED}").into()));
    let mut order = object(half);
    order["metadata"]["$setElementOrder/finalizers"] = texts(half).into();
    assert!(strategically(object(0), order).is_ok());

    let writer = Writer {
        manager: "me",
        api_version: "v1",
        subresource: "",
        reset: &["status"],
        now: "2026-01-01T00:00:00Z".parse().unwrap(),
    };
    let first = apply(&pod, &json!({}), &object(0), &writer, false).unwrap();
    let other = Writer { manager: "other", ..writer };
    let second = apply(&pod, &first, &object(half), &other, true).unwrap();
    assert_eq!(lengths(&second), [COUNT + half, KEYED + half]);
    let mut updated = object(half);
    track_update(&pod, &second, &mut updated, &writer);
}

/// Numbers that are the same in every run (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        usize::try_from((mixed ^ (mixed >> 31)) % bound).unwrap_or_default()
    }

    /// Nonsense that uses the words of objects and patches.
    fn junk(&mut self, depth: u64) -> Value {
        const WORDS: [&str; 20] = [
            "metadata",
            "labels",
            "finalizers",
            "spec",
            "containers",
            "ports",
            "env",
            "volumes",
            "name",
            "containerPort",
            "$patch",
            "$retainKeys",
            "$setElementOrder/containers",
            "$setElementOrder/finalizers",
            "$deleteFromPrimitiveList/finalizers",
            "managedFields",
            "fieldsV1",
            "f:spec",
            "delete",
            "replace",
        ];
        match self.below(if depth == 0 { 4 } else { 9 }) {
            0 => Value::Null,
            1 => json!(self.below(3)),
            2 | 3 => json!(WORDS[self.below(20)]),
            4 | 5 => (0..self.below(4)).map(|_| self.junk(depth - 1)).collect(),
            _ => (0..self.below(5))
                .map(|_| (WORDS[self.below(20)].to_owned(), self.junk(depth - 1)))
                .collect::<Map<_, _>>()
                .into(),
        }
    }

    /// An object that is at least laid out like one.
    fn object(&mut self) -> Value {
        let names = ["a", "b", "c"];
        let items = (0..self.below(4)).map(|_| {
            let mut item = self.junk(2);
            if let Value::Object(fields) = &mut item {
                fields.insert("name".to_owned(), names[self.below(3)].into());
            }
            item
        });
        let containers: Vec<Value> = items.collect();
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": self.junk(3), "spec": {"containers": containers,
            "volumes": self.junk(2), "nodeSelector": self.junk(1)}})
    }
}

#[test]
fn nonsense_is_refused_or_applied_but_never_fatal() {
    let pod = built_in("", "v1", "Pod").unwrap();
    let mut random = Random(1);
    let writer = Writer {
        manager: "kubectl",
        api_version: "v1",
        subresource: "",
        reset: &["status"],
        now: "2026-01-01T00:00:00Z".parse().unwrap(),
    };
    for _ in 0..3000 {
        let (object, patch) = (random.object(), random.object());
        drop(strategically(object.clone(), patch.clone()));
        drop(strategically(object.clone(), random.junk(4)));
        let mut updated = patch.clone();
        track_update(&pod, &object, &mut updated, &writer);
        if let Ok(applied) = apply(&pod, &object, &patch, &writer, true) {
            drop(apply(&pod, &applied, &object, &writer, random.below(2) == 0));
        }
        drop(json(&mut updated, &random.junk(4)));
        drop(crate::schema::decode(&pod, &mut updated));
        drop(crate::schema::protobuf::encode(&pod, &updated));
    }
}

#[test]
fn a_json_patch_that_moves_too_much_is_refused() {
    let mut object = json!({ "items": vec![0; 500_000], "nested": vec![json!([]); 50_000] });
    let shift = json!({ "op": "move", "from": "/items/0", "path": "/items/0" });
    let patch = Value::Array(vec![shift; MAX_OPERATIONS]);
    assert_eq!(super::json(&mut object, &patch), Err(PatchError::TooMuchWork));
    let away = json!({ "op": "move", "from": "/nested", "path": "/other" });
    let back = json!({ "op": "move", "from": "/other", "path": "/nested" });
    let patch = Value::Array([away, back].into_iter().cycle().take(MAX_OPERATIONS).collect());
    assert_eq!(super::json(&mut object, &patch), Err(PatchError::TooMuchWork));
    let patch =
        json!([{ "op": "add", "path": "/items/-", "value": 1 }, { "op": "remove", "path": "/items/0" }]);
    assert_eq!(super::json(&mut object, &patch), Ok(()));
}
