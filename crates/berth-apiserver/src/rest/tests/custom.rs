//! Custom resources: served as soon as they are defined, gone with their definition.

use super::*;

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const SNAPS: &str = "/apis/example.com/v1/namespaces/default/snaps";

fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "snaps.example.com" },
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": { "plural": "snaps", "singular": "snap", "kind": "Snap", "listKind": "SnapList", "shortNames": ["sn"] },
            "versions": [
                {
                    "name": "v1", "served": true, "storage": true,
                    "subresources": { "status": {}, "scale": { "specReplicasPath": ".spec.copies", "statusReplicasPath": ".status.copies" } },
                    "additionalPrinterColumns": [{ "name": "Source", "type": "string", "jsonPath": ".spec.source" }],
                    "schema": { "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": { "type": "object", "required": ["source"], "properties": {
                                "source": { "type": "string" },
                                "copies": { "type": "integer", "default": 1, "minimum": 0 },
                            } },
                            "status": { "type": "object", "properties": { "ready": { "type": "boolean" }, "copies": { "type": "integer" } } },
                        },
                    } },
                },
                {
                    "name": "v1beta1", "served": true, "storage": false,
                    "schema": { "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } },
                },
            ],
        },
    })
}

fn snap(name: &str) -> Value {
    json!({ "apiVersion": "example.com/v1", "kind": "Snap", "metadata": { "name": name }, "spec": { "source": "disk" } })
}

async fn defined() -> Api {
    let api = Api::new().await;
    api.post(DEFINITIONS, &definition()).await;
    api
}

#[tokio::test]
async fn a_definition_is_established_and_discovered() {
    let api = defined().await;
    let (_, made) = api.get(&format!("{DEFINITIONS}/snaps.example.com")).await;
    let conditions = made["status"]["conditions"].as_array().unwrap();
    assert!(conditions.iter().any(|one| one["type"] == "Established" && one["status"] == "True"), "{made}");
    assert_eq!(made["status"]["storedVersions"], json!(["v1"]));
    let (code, group) = api.get("/apis/example.com").await;
    assert_eq!((code, &group["preferredVersion"]["version"]), (200, &json!("v1")));
    let (_, list) = api.get("/apis/example.com/v1").await;
    assert_eq!(list["resources"][0]["shortNames"], json!(["sn"]));
    assert_eq!(api.get("/openapi/v3/apis/example.com/v1").await.0, 200);
}

#[tokio::test]
async fn custom_objects_are_defaulted_pruned_and_validated() {
    let api = defined().await;
    let mut body = snap("a");
    body["spec"]["color"] = "red".into();
    body["status"] = json!({ "ready": true });
    let made = api.post(SNAPS, &body).await;
    assert_eq!(made["spec"], json!({ "source": "disk", "copies": 1 }));
    assert_eq!((made.get("status"), &made["metadata"]["generation"]), (None, &json!(1)));
    let (code, status) = api.send(Method::POST, SNAPS, &json!({ "apiVersion": "example.com/v1", "kind": "Snap", "metadata": { "name": "b" }, "spec": {} })).await;
    assert_eq!((code, reason(&status)), (422, "Invalid"), "{status}");
    let (code, _) = api.merge(&format!("{SNAPS}/a"), &json!({ "spec": { "copies": -1 } })).await;
    assert_eq!(code, 422);
    let strategic = "application/strategic-merge-patch+json";
    assert_eq!(api.raw(Method::PATCH, &format!("{SNAPS}/a"), strategic, "{}").await.0, 415);
}

#[tokio::test]
async fn defaults_that_would_make_an_object_too_large_are_not_filled_in() {
    let api = Api::new().await;
    let mut definition = definition();
    let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    schema["properties"]["spec"]["properties"]["parts"] = json!({
        "type": "array",
        "items": { "type": "object", "properties": { "text": { "type": "string", "default": "x".repeat(100_000) } } },
    });
    api.post(DEFINITIONS, &definition).await;
    let mut snap = snap("large");
    snap["spec"]["parts"] = vec![json!({}); 2000].into();
    let (code, refusal) = api.send(Method::POST, SNAPS, &snap).await;
    assert_eq!((code, &refusal["message"]), (500, &json!("etcdserver: request is too large")));
    let apply = format!("{SNAPS}/large?fieldManager=test");
    let (code, refusal) =
        api.raw(Method::PATCH, &apply, "application/apply-patch+yaml", snap.to_string()).await;
    assert_eq!((code, &refusal["message"]), (500, &json!("etcdserver: request is too large")));
    snap["spec"]["parts"] = vec![json!({}); 10].into();
    let made = api.post(SNAPS, &snap).await;
    assert_eq!(made["spec"]["parts"][9]["text"].as_str().unwrap().len(), 100_000);
    let more = json!([{ "op": "replace", "path": "/spec/parts", "value": vec![json!({}); 20] }]);
    let path = format!("{SNAPS}/large");
    let (code, refusal) =
        api.raw(Method::PATCH, &path, "application/json-patch+json", more.to_string()).await;
    assert_eq!((code, &refusal["message"]), (500, &json!("etcdserver: request is too large")));
}

#[tokio::test]
async fn generation_counts_changes_of_the_spec_and_status_is_apart() {
    let api = defined().await;
    api.post(SNAPS, &snap("a")).await;
    let path = format!("{SNAPS}/a");
    let (_, after) = api
        .merge(&format!("{path}/status"), &json!({ "status": { "ready": true }, "spec": { "source": "x" } }))
        .await;
    assert_eq!((&after["status"]["ready"], &after["spec"]["source"]), (&json!(true), &json!("disk")));
    assert_eq!(after["metadata"]["generation"], 1);
    let (_, after) = api.merge(&path, &json!({ "spec": { "source": "y" }, "status": null })).await;
    assert_eq!((&after["metadata"]["generation"], &after["status"]["ready"]), (&json!(2), &json!(true)));
    let (_, scale) = api.merge(&format!("{path}/scale"), &json!({ "spec": { "replicas": 4 } })).await;
    assert_eq!((&scale["kind"], &scale["spec"]["replicas"]), (&json!("Scale"), &json!(4)), "{scale}");
    assert_eq!(api.get(&path).await.1["spec"]["copies"], 4);
}

#[tokio::test]
async fn other_versions_and_printer_columns_are_served() {
    let api = defined().await;
    api.post(SNAPS, &snap("a")).await;
    let (_, beta) = api.get("/apis/example.com/v1beta1/namespaces/default/snaps/a").await;
    assert_eq!(beta["apiVersion"], "example.com/v1beta1");
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let (_, rows) = read(api.get_as(SNAPS, table).await).await;
    assert_eq!(rows["columnDefinitions"][1]["name"], "Source");
    assert_eq!(rows["rows"][0]["cells"], json!(["a", "disk"]));
}

#[tokio::test]
async fn a_definition_goes_with_its_objects_once_they_let_it() {
    let api = defined().await;
    let mut kept = snap("kept");
    kept["metadata"]["finalizers"] = json!(["example.com/keep"]);
    api.post(SNAPS, &kept).await;
    api.post(SNAPS, &snap("free")).await;
    let path = format!("{DEFINITIONS}/snaps.example.com");
    assert_eq!(api.delete(&path).await.0, 200);
    assert_eq!(api.get(&format!("{SNAPS}/free")).await.0, 404);
    assert_eq!(api.get(&path).await.0, 200);
    let (code, status) = api.send(Method::POST, SNAPS, &snap("late")).await;
    assert_eq!((code, reason(&status)), (405, "MethodNotAllowed"));
    api.merge(&format!("{SNAPS}/kept"), &json!({ "metadata": { "finalizers": null } })).await;
    assert_eq!(api.get(&path).await.0, 404);
    assert_eq!(api.get(SNAPS).await.0, 404);
}

#[tokio::test]
async fn a_definition_without_a_served_version_goes_with_its_objects() {
    let api = defined().await;
    api.post(SNAPS, &snap("a")).await;
    let path = format!("{DEFINITIONS}/snaps.example.com");
    let mut versions = definition()["spec"]["versions"].clone();
    for version in versions.as_array_mut().unwrap() {
        version["served"] = json!(false);
    }
    api.merge(&path, &json!({ "spec": { "versions": versions } })).await;
    assert_eq!(api.get(SNAPS).await.0, 404, "it is not served");
    assert_eq!(api.delete(&path).await.0, 200);
    assert_eq!(api.get(&path).await.0, 404);
    api.post(DEFINITIONS, &definition()).await;
    assert_eq!(api.get(SNAPS).await.1["items"], json!([]));
}

#[tokio::test]
async fn a_dry_run_changes_neither_definitions_nor_their_objects() {
    let api = Api::new().await;
    assert_eq!(api.send(Method::POST, &format!("{DEFINITIONS}?dryRun=All"), &definition()).await.0, 201);
    assert_eq!(api.get(SNAPS).await.0, 404);
    api.post(DEFINITIONS, &definition()).await;
    api.post(SNAPS, &snap("a")).await;
    let path = format!("{DEFINITIONS}/snaps.example.com");
    let (code, marked) = api.delete(&format!("{path}?dryRun=All")).await;
    assert_eq!(code, 200);
    assert!(marked["metadata"]["deletionTimestamp"].is_string(), "{marked}");
    assert_eq!(api.delete(&format!("{DEFINITIONS}?dryRun=All")).await.0, 200);
    let options = json!({ "kind": "DeleteOptions", "apiVersion": "v1", "dryRun": ["All"] });
    assert_eq!(api.send(Method::DELETE, &path, &options).await.0, 200);
    assert_eq!(api.get(&format!("{SNAPS}/a")).await.0, 200);
    assert_eq!(api.get(&path).await.1["metadata"].get("deletionTimestamp"), None);
    api.post(SNAPS, &snap("b")).await;
}

#[tokio::test]
async fn a_definition_that_is_not_being_deleted_keeps_its_objects() {
    let api = defined().await;
    api.post(SNAPS, &snap("a")).await;
    api.server.clean_up("snaps.example.com").await.unwrap();
    assert_eq!(api.get(&format!("{SNAPS}/a")).await.0, 200);
}

/// Sends a request and goes away before the answer.
async fn cancelled(api: &Api, method: Method, path: &str, body: &Value) {
    let mut request = Box::pin(api.send(method, path, body));
    assert!(futures_util::poll!(&mut request).is_pending());
}

/// Waits until a path is answered like this; one that never is fails the test by its deadline.
async fn until(api: &Api, path: &str, code: u16) {
    let wait = async {
        while api.get(path).await.0 != code {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), wait).await.expect(path);
}

#[tokio::test]
async fn what_follows_a_write_follows_also_when_the_client_is_gone() {
    let api = Api::new().await;
    let path = format!("{DEFINITIONS}/snaps.example.com");
    cancelled(&api, Method::POST, DEFINITIONS, &definition()).await;
    until(&api, &path, 200).await;
    until(&api, SNAPS, 200).await;
    api.post(SNAPS, &snap("a")).await;
    cancelled(&api, Method::DELETE, &path, &json!({})).await;
    until(&api, &path, 404).await;
    until(&api, SNAPS, 404).await;
    let namespace = json!({ "metadata": { "name": "work" } });
    cancelled(&api, Method::POST, "/api/v1/namespaces", &namespace).await;
    until(&api, "/api/v1/namespaces/work", 200).await;
    until(&api, "/api/v1/namespaces/work/serviceaccounts/default", 200).await;
    until(&api, "/api/v1/namespaces/work/configmaps/kube-root-ca.crt", 200).await;
}

#[tokio::test]
async fn a_deletion_that_broke_off_is_ended_at_the_next_start() {
    let api = defined().await;
    api.post(SNAPS, &snap("a")).await;
    api.post(SNAPS, &snap("b")).await;
    // All that a server did which was killed after it had marked the definition.
    let store = api.server.store();
    let key = crate::store::Key::new(crate::rest::crd::definitions(), "", "snaps.example.com");
    let stored = store.get(&key).unwrap();
    let mut marked: Value = serde_json::from_slice(&stored.bytes).unwrap();
    marked["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    marked["metadata"]["finalizers"] = json!([crate::rest::crd::CLEANUP]);
    let change = crate::rest::write::put(&marked);
    store.write(key.clone(), crate::store::Expect::Revision(stored.revision), change).await.unwrap();
    let restarted = ApiServer::new(store.clone(), Options::default());
    restarted.bootstrap().await.unwrap();
    assert!(store.get(&key).is_none());
    assert!(store.view(&crate::store::Collection::new("snaps.example.com")).is_empty());
}

#[tokio::test]
async fn metadata_of_custom_objects_has_the_types_of_all_metadata() {
    let api = defined().await;
    api.post(SNAPS, &snap("a")).await;
    let path = format!("{SNAPS}/a");
    let into = |found: &str, place: &str| format!("json: cannot unmarshal {found} into Go {place}");
    let (labels, annotations) = ("struct field ObjectMeta.labels", "struct field ObjectMeta.annotations");
    for (metadata, why) in [
        (json!({ "labels": { "version": 1 } }), into("number", &format!("{labels} of type string"))),
        (json!({ "annotations": { "x": true } }), into("bool", &format!("{annotations} of type string"))),
        (json!({ "finalizers": "a" }), into("string", "struct field ObjectMeta.finalizers of type []string")),
        (
            json!({ "ownerReferences": [{ "name": 1 }] }),
            into("number", "struct field OwnerReference.ownerReferences.name of type string"),
        ),
    ] {
        let mut body = snap("b");
        crate::patch::merge(&mut body["metadata"], &metadata);
        let (code, status) = api.send(Method::POST, SNAPS, &body).await;
        let said = format!("Snap in version \"v1\" cannot be handled as a Snap: {why}");
        assert_eq!((code, status["message"].as_str()), (400, Some(said.as_str())), "{status}");
        let (_, mut body) = api.get(&path).await;
        crate::patch::merge(&mut body["metadata"], &metadata);
        assert_eq!(api.put(&path, &body).await.0, 400, "{metadata}");
        // What comes of a patch is told as an invalid patch.
        let (code, status) = api.merge(&path, &json!({ "metadata": metadata })).await;
        assert_eq!((code, reason(&status)), (422, "Invalid"), "{status}");
        assert!(status["message"].as_str().unwrap().ends_with(&why), "{status}");
    }
    let operations = json!([{ "op": "add", "path": "/metadata/labels", "value": { "a": 1 } }]);
    let json_patch = "application/json-patch+json";
    assert_eq!(api.raw(Method::PATCH, &path, json_patch, operations.to_string()).await.0, 422);
    let (code, status) = api.merge(&path, &json!({ "metadata": "a" })).await;
    assert_eq!(code, 422, "{status}");
    let mut body = snap("b");
    body["spec"]["source"] = 1.into();
    // The rest is for the schema to refuse.
    assert_eq!(api.send(Method::POST, SNAPS, &body).await.0, 422);
    assert_eq!(api.get(SNAPS).await.1["items"].as_array().map(Vec::len), Some(1));
}

/// The definition as it is stored, changed.
async fn redefine(api: &Api, change: impl FnOnce(&mut Value)) -> Value {
    let path = format!("{DEFINITIONS}/snaps.example.com");
    let (_, mut definition) = api.get(&path).await;
    change(&mut definition);
    let (code, definition) = api.put(&path, &definition).await;
    assert_eq!(code, 200, "{definition}");
    definition
}

#[tokio::test]
async fn objects_of_an_earlier_storage_version_are_served_and_written_in_the_new_one() {
    const BETA: &str = "/apis/example.com/v1beta1/namespaces/default/snaps";
    let api = Api::new().await;
    let mut first = definition();
    first["spec"]["versions"][0]["storage"] = false.into();
    first["spec"]["versions"][1]["storage"] = true.into();
    api.post(DEFINITIONS, &first).await;
    for name in ["a", "b", "c"] {
        api.post(SNAPS, &snap(name)).await;
    }
    let changed = redefine(&api, |definition| {
        definition["spec"]["versions"][0]["storage"] = true.into();
        definition["spec"]["versions"][1]["storage"] = false.into();
    })
    .await;
    assert_eq!(changed["status"]["storedVersions"], json!(["v1beta1", "v1"]));
    for (path, version) in [(SNAPS, "example.com/v1"), (BETA, "example.com/v1beta1")] {
        assert_eq!(api.get(&format!("{path}/a")).await.1["apiVersion"], version);
        let (_, list) = api.get(path).await;
        assert!(list["items"].as_array().unwrap().iter().all(|item| item["apiVersion"] == version), "{list}");
        let mut watch = api.get_as(&format!("{path}?watch=1"), "application/json").await.into_body();
        let frame = watch.frame().await.unwrap().unwrap().into_data().unwrap();
        let line = frame.split(|&byte| byte == b'\n').next().unwrap();
        let event: Value = serde_json::from_slice(line).unwrap();
        assert_eq!(event["object"]["apiVersion"], version);
    }
    let (code, patched) = api.merge(&format!("{SNAPS}/a"), &json!({ "spec": { "source": "x" } })).await;
    assert_eq!((code, &patched["apiVersion"]), (200, &json!("example.com/v1")), "{patched}");
    let stored = |name: &str| {
        let collection = crate::store::Collection::new("snaps.example.com");
        let object = api.server.store().get(&crate::store::Key::new(collection, "default", name)).unwrap();
        serde_json::from_slice::<Value>(&object.bytes).unwrap()
    };
    assert_eq!(stored("a")["apiVersion"], "example.com/v1");
    // An unchanged object is written anew, which is how objects are moved; that is no change of what it says.
    let (_, body) = api.get(&format!("{SNAPS}/b")).await;
    let (code, after) = api.put(&format!("{SNAPS}/b"), &body).await;
    assert_eq!((code, &after["metadata"]["generation"]), (200, &json!(1)), "{after}");
    assert_eq!(stored("b")["apiVersion"], "example.com/v1");
    assert_eq!(api.put(&format!("{SNAPS}/b"), &after).await.1, after);
    api.merge(&format!("{SNAPS}/c/status"), &json!({ "status": { "ready": true } })).await;
    assert_eq!(stored("c")["apiVersion"], "example.com/v1");
    // Whoever has moved all objects says so.
    let path = format!("{DEFINITIONS}/snaps.example.com/status");
    let (code, moved) = api.merge(&path, &json!({ "status": { "storedVersions": ["v1"] } })).await;
    assert_eq!((code, &moved["status"]["storedVersions"]), (200, &json!(["v1"])));
    assert_eq!(api.get(&format!("{SNAPS}/a")).await.1["apiVersion"], "example.com/v1");
}

#[tokio::test]
async fn selectable_fields_select() {
    let api = Api::new().await;
    let mut selectable = definition();
    selectable["spec"]["versions"][0]["selectableFields"] =
        json!([{ "jsonPath": ".spec.source" }, { "jsonPath": ".status.ready" }]);
    api.post(DEFINITIONS, &selectable).await;
    for (name, source) in [("a", "disk"), ("b", "tape"), ("c", "disk")] {
        let mut body = snap(name);
        body["spec"]["source"] = source.into();
        api.post(SNAPS, &body).await;
    }
    api.merge(&format!("{SNAPS}/a/status"), &json!({ "status": { "ready": true } })).await;
    let names = |list: &Value| -> Vec<String> {
        let items = list["items"].as_array().unwrap().iter();
        items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    };
    for (selector, expected) in [
        ("spec.source%3Ddisk", &["a", "c"][..]),
        ("spec.source!%3Ddisk", &["b"]),
        ("spec.source%3Ddisk,metadata.name!%3Da", &["c"]),
        ("spec.source%3Ddisk,metadata.namespace%3Ddefault", &["a", "c"]),
        ("status.ready%3Dtrue", &["a"]),
        ("status.ready!%3Dtrue", &["b", "c"]),
        ("status.ready%3D", &["b", "c"]),
    ] {
        let (code, list) = api.get(&format!("{SNAPS}?fieldSelector={selector}")).await;
        assert_eq!(
            (code, names(&list)),
            (200, expected.iter().map(|&name| name.to_owned()).collect()),
            "{selector}"
        );
    }
    let watch = format!("{SNAPS}?watch=1&fieldSelector=spec.source%3Dtape");
    let mut watch = api.get_as(&watch, "application/json").await.into_body();
    let event = watch.frame().await.unwrap().unwrap().into_data().unwrap();
    let event: Value = serde_json::from_slice(&event).unwrap();
    assert_eq!(event["object"]["metadata"]["name"], "b");
    assert_eq!(api.get(&format!("{SNAPS}?fieldSelector=spec.copies%3D1")).await.0, 400);
    assert_eq!(api.delete(&format!("{SNAPS}?fieldSelector=spec.source!%3Ddisk")).await.0, 200);
    assert_eq!(names(&api.get(SNAPS).await.1), ["a", "c"]);
}

#[tokio::test]
async fn what_is_stored_can_be_read_and_deleted_however_deep_it_is() {
    const FREE: &str = "/apis/example.com/v1beta1/namespaces/default/snaps";
    let api = defined().await;
    let nested = |levels: usize| (0..levels).fold(json!(1), |inner, _| json!({ "a": inner }));
    let body = |name: &str, levels: usize| {
        json!({
            "apiVersion": "example.com/v1beta1", "kind": "Snap", "metadata": { "name": name },
            "spec": { "source": "disk", "free": nested(levels) },
        })
    };
    // Whatever is accepted can be read, also by those who put lists and events around it.
    let mut accepted = 0;
    for levels in 100..124 {
        let name = format!("deep-{levels}");
        let (code, status) = api.send(Method::POST, FREE, &body(&name, levels)).await;
        if code == 201 {
            accepted = levels;
            continue;
        }
        assert_eq!((code, reason(&status)), (422, "Invalid"), "{status}");
        assert!(
            status["message"].as_str().unwrap().contains("may be nested at most 120 levels deep"),
            "{status}"
        );
        let (code, _) = api.send(Method::POST, &format!("{FREE}?dryRun=All"), &body(&name, levels)).await;
        assert_eq!(code, 422);
    }
    assert!((100..120).contains(&accepted), "{accepted}");
    let path = format!("{FREE}/deep-100");
    assert_eq!(api.merge(&path, &json!({ "spec": { "free": nested(119) } })).await.0, 422);
    let dig = |depth: usize| {
        let path = format!("/spec/free{}", "/a".repeat(99));
        json!([{ "op": "replace", "path": path, "value": nested(depth) }]).to_string()
    };
    let json_patch = "application/json-patch+json";
    assert_eq!(api.raw(Method::PATCH, &path, json_patch, dig(1)).await.0, 200);
    for depth in [19, 60, 100] {
        assert_eq!(api.raw(Method::PATCH, &path, json_patch, dig(depth)).await.0, 422, "{depth}");
    }
    let apply = format!("{FREE}/applied?fieldManager=me");
    let media = "application/apply-patch+yaml";
    assert_eq!(api.raw(Method::PATCH, &apply, media, body("applied", accepted + 1).to_string()).await.0, 422);
    let yaml = read(api.get_as(FREE, "application/yaml").await).await;
    assert_eq!(yaml.0, 200);
    let deepest = format!("{FREE}/deep-{accepted}");
    assert_eq!(api.merge(&deepest, &json!({ "metadata": { "labels": { "a": "b" } } })).await.0, 200);
    assert_eq!(api.delete(&deepest).await.0, 200);
    assert_eq!(api.delete(FREE).await.0, 200);
    assert_eq!(api.get(FREE).await.1["items"], json!([]));
}

#[tokio::test]
async fn an_object_that_a_stricter_schema_makes_invalid_can_still_be_let_go() {
    let api = defined().await;
    let mut body = snap("a");
    body["metadata"]["finalizers"] = json!(["example.com/keep"]);
    api.post(SNAPS, &body).await;
    let path = format!("{SNAPS}/a");
    redefine(&api, |definition| {
        let schema = &mut definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        schema["required"] = json!(["spec", "owner"]);
        let spec = &mut schema["properties"]["spec"];
        spec["required"] = json!(["source", "place"]);
        spec["properties"]["place"] = json!({ "type": "string" });
        spec["properties"]["speed"] = json!({ "type": "integer", "default": 1 });
        spec["properties"]["source"]["enum"] = json!(["tape"]);
        schema["properties"]["owner"] = json!({ "type": "string" });
    })
    .await;
    let (code, status) = api.send(Method::POST, SNAPS, &snap("b")).await;
    assert_eq!((code, status["details"]["causes"].as_array().map(Vec::len)), (422, Some(3)), "{status}");
    let (code, labelled) = api.merge(&path, &json!({ "metadata": { "labels": { "a": "b" } } })).await;
    assert_eq!(code, 200, "{labelled}");
    // What is changed has to be right, and so has what it is part of.
    let (code, status) = api.merge(&path, &json!({ "spec": { "copies": 2 } })).await;
    let causes = status["details"]["causes"].as_array().unwrap().iter();
    let fields: Vec<&str> = causes.map(|cause| cause["field"].as_str().unwrap()).collect();
    assert_eq!((code, fields), (422, vec!["owner", "spec.place"]), "{status}");
    let (code, _) =
        api.merge(&path, &json!({ "owner": "me", "spec": { "place": "here", "copies": 2 } })).await;
    assert_eq!(code, 200);
    let (code, _) = api.merge(&path, &json!({ "spec": { "source": "paper" } })).await;
    assert_eq!(code, 422);
    api.delete(&path).await;
    assert_eq!(api.merge(&path, &json!({ "metadata": { "finalizers": null } })).await.0, 200);
    assert_eq!(api.get(&path).await.0, 404);
}

#[tokio::test]
async fn rules_that_are_not_evaluated_are_warned_about() {
    let api = Api::new().await;
    let warnings = async |method: Method, path: &str, body: &Value| {
        let request = Request::builder().method(method).uri(path).header(CONTENT_TYPE, "application/json");
        let response = api.response(request.body(Full::new(body.to_string().into())).unwrap()).await;
        assert!(response.status().is_success(), "{response:?}");
        let warnings = response.headers().get_all(http::header::WARNING).iter();
        warnings.map(|warning| warning.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let mut body = definition();
    assert_eq!(warnings(Method::POST, DEFINITIONS, &body).await, Vec::<String>::new());
    let path = format!("{DEFINITIONS}/snaps.example.com");
    (_, body) = api.get(&path).await;
    body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["source"]
        ["x-kubernetes-validations"] =
        json!([{ "rule": "self == oldSelf", "message": "source is immutable" }]);
    assert_eq!(
        warnings(Method::PUT, &path, &body).await,
        [
            "299 - \"spec.versions[0].schema.openAPIV3Schema: x-kubernetes-validations are kept, but this server \
             does not evaluate them\""
        ]
    );
}
