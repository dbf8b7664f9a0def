//! Create, update, patch and delete.

use super::*;

#[tokio::test]
async fn a_new_object_gets_what_only_the_server_gives() {
    let api = Api::new().await;
    let mut body = map("a");
    body["metadata"]["uid"] = "mine".into();
    let made = api.post(MAPS, &body).await;
    let metadata = &made["metadata"];
    assert_eq!(metadata["namespace"], "default");
    assert_eq!(metadata["uid"].as_str().unwrap().len(), 36);
    assert!(metadata["creationTimestamp"].is_string() && metadata["resourceVersion"].is_string());
    let (code, status) = api.send(Method::POST, MAPS, &map("a")).await;
    assert_eq!((code, reason(&status)), (409, "AlreadyExists"));
    assert_eq!(status["message"], "configmaps \"a\" already exists");
    assert_eq!(status["details"], json!({ "name": "a", "kind": "configmaps" }));
}

#[tokio::test]
async fn names_are_made_up_on_request() {
    let api = Api::new().await;
    let mut body = map("");
    body["metadata"] = json!({ "generateName": "some-" });
    let made = api.post(MAPS, &body).await;
    let name = made["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("some-") && name.len() == 10, "{name}");
}

#[tokio::test]
async fn bodies_that_make_no_sense_are_refused() {
    let api = Api::new().await;
    for (media, body, code, text) in [
        ("application/json", "{", 400, "the object provided is unrecognized (must be of type ConfigMap)"),
        ("application/json", "[]", 400, "the body is not an object"),
        ("application/json", "", 400, "(<empty>)"),
        ("text/plain", "{}", 415, "accepted media types include"),
        (
            "application/json",
            r#"{"kind":"Pod","apiVersion":"v1"}"#,
            400,
            "Pod in version \"v1\" cannot be handled as a ConfigMap",
        ),
        (
            "application/json",
            r#"{"kind":"ConfigMap","apiVersion":"v2"}"#,
            400,
            "no kind \"ConfigMap\" is registered for version \"v2\"",
        ),
        (
            "application/json",
            r#"{"metadata":{"name":"a","namespace":"other"}}"#,
            400,
            "does not match the namespace sent",
        ),
        (
            "application/json",
            r#"{"metadata":{"name":"a","resourceVersion":"1"}}"#,
            500,
            "resourceVersion should not be set",
        ),
        ("application/json", r#"{"metadata":{"name":"a"},"data":[]}"#, 400, "cannot unmarshal array"),
    ] {
        let (got, status) = api.raw(Method::POST, MAPS, media, body).await;
        assert_eq!(got, code, "{body}: {status}");
        assert!(status["message"].as_str().unwrap().contains(text), "{body}: {status}");
    }
    let deep = format!("{{\"data\":{}1{}}}", "{\"a\":".repeat(20_000), "}".repeat(20_000));
    assert_eq!(api.raw(Method::POST, MAPS, "application/json", deep).await.0, 400);
    let large = vec![b' '; crate::rest::content::BODY_LIMIT + 1];
    let (code, status) = api.raw(Method::POST, MAPS, "application/json", large).await;
    assert_eq!((code, reason(&status)), (413, "RequestEntityTooLarge"));
}

#[tokio::test]
async fn unknown_fields_are_refused_mentioned_or_dropped() {
    let api = Api::new().await;
    let mut body = map("a");
    body["extra"] = 1.into();
    let (code, status) = api.send(Method::POST, &format!("{MAPS}?fieldValidation=Strict"), &body).await;
    assert_eq!(code, 400);
    let message = status["message"].as_str().unwrap();
    assert!(message.ends_with("strict decoding error: unknown field \"extra\""), "{message}");
    let request = Request::post(MAPS).body(Full::from(body.to_string())).unwrap();
    let response = api.response(request).await;
    assert_eq!(response.headers()["warning"], "299 - \"unknown field \\\"extra\\\"\"");
    let (_, made) = read(response).await;
    assert_eq!(made.get("extra"), None);
    body["metadata"]["name"] = "b".into();
    let request = Request::post(format!("{MAPS}?fieldValidation=Ignore")).body(Full::from(body.to_string()));
    assert_eq!(api.response(request.unwrap()).await.headers().get("warning"), None);
}

#[tokio::test]
async fn yaml_and_protobuf_bodies_are_read() {
    let api = Api::new().await;
    let yaml = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: y\ndata:\n  a: b\n";
    let (code, made) = api.raw(Method::POST, MAPS, "application/yaml", yaml).await;
    assert_eq!((code, &made["data"]["a"]), (201, &json!("b")));
    let type_ = crate::schema::built_in("", "v1", "ConfigMap").unwrap();
    let bytes = crate::schema::protobuf::encode(&type_, &map("p")).unwrap();
    let (code, made) = api.raw(Method::POST, MAPS, "application/vnd.kubernetes.protobuf", bytes).await;
    assert_eq!((code, &made["data"]["a"]), (201, &json!("1")));
    let (code, _) = api.raw(Method::POST, MAPS, "application/vnd.kubernetes.protobuf", "k8s\0junk").await;
    assert_eq!(code, 400);
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let api = Api::new().await;
    let (code, _) = api.send(Method::POST, &format!("{MAPS}?dryRun=All"), &map("a")).await;
    assert_eq!(code, 201);
    assert_eq!(api.get(&format!("{MAPS}/a")).await.0, 404);
    api.post(MAPS, &map("a")).await;
    let path = format!("{MAPS}/a?dryRun=All");
    assert_eq!(api.merge(&path, &json!({ "data": { "a": "2" } })).await.1["data"]["a"], "2");
    assert_eq!(api.delete(&path).await.0, 200);
    assert_eq!(api.get(&format!("{MAPS}/a")).await.1["data"]["a"], "1");
}

#[tokio::test]
async fn an_update_with_an_old_version_conflicts_and_one_that_changes_nothing_keeps_the_version() {
    let api = Api::new().await;
    let made = api.post(MAPS, &map("a")).await;
    let path = format!("{MAPS}/a");
    let (code, same) = api.put(&path, &made).await;
    assert_eq!((code, &same["metadata"]["resourceVersion"]), (200, &made["metadata"]["resourceVersion"]));
    let mut changed = made.clone();
    changed["data"]["a"] = "2".into();
    let (code, changed) = api.put(&path, &changed).await;
    assert_eq!(code, 200);
    assert_ne!(changed["metadata"]["resourceVersion"], made["metadata"]["resourceVersion"]);
    let mut late = made.clone();
    late["data"]["a"] = "3".into();
    let (code, status) = api.put(&path, &late).await;
    assert_eq!((code, reason(&status)), (409, "Conflict"));
    assert_eq!(
        status["message"],
        "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; please apply your changes to \
         the latest version and try again"
    );
    late["metadata"]["resourceVersion"] = "".into();
    assert_eq!(api.put(&path, &late).await.1["data"]["a"], "3");
    late["metadata"]["uid"] = "other".into();
    assert_eq!(api.put(&path, &late).await.0, 409);
    late["metadata"]["name"] = "b".into();
    let (code, status) = api.put(&path, &late).await;
    assert_eq!(code, 400);
    assert_eq!(status["message"], "the name of the object (b) does not match the name on the URL (a)");
    assert_eq!(api.put(&format!("{MAPS}/none"), &map("none")).await.0, 404);
}

#[tokio::test]
async fn leases_are_created_by_an_update() {
    let api = Api::new().await;
    let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/leader";
    let lease = json!({ "metadata": { "name": "leader" }, "spec": { "holderIdentity": "me" } });
    assert_eq!(api.put(path, &lease).await.0, 201);
    let (code, status) = api.put(path, &lease).await;
    assert_eq!((code, reason(&status)), (422, "Invalid"), "{status}");
}

#[tokio::test]
async fn patches_of_every_kind_change_the_object() {
    let api = Api::new().await;
    api.post(MAPS, &map("a")).await;
    let path = format!("{MAPS}/a");
    let (_, merged) = api.merge(&path, &json!({ "data": { "b": "2", "a": null } })).await;
    assert_eq!(merged["data"], json!({ "b": "2" }));
    let operations = json!([{ "op": "test", "path": "/data/b", "value": "2" }, { "op": "add", "path": "/data/c", "value": "3" }]);
    let json_patch = "application/json-patch+json";
    let (_, patched) = api.raw(Method::PATCH, &path, json_patch, operations.to_string()).await;
    assert_eq!(patched["data"], json!({ "b": "2", "c": "3" }));
    let failing = json!([{ "op": "test", "path": "/data/b", "value": "9" }]);
    let (code, status) = api.raw(Method::PATCH, &path, json_patch, failing.to_string()).await;
    assert_eq!((code, reason(&status)), (422, "Invalid"));
    let strategic = "application/strategic-merge-patch+json";
    let finalizers = json!({ "metadata": { "finalizers": ["a/b"] } });
    api.raw(Method::PATCH, &path, strategic, finalizers.to_string()).await;
    let more = json!({ "metadata": { "finalizers": ["c/d"] } });
    let (_, patched) = api.raw(Method::PATCH, &path, strategic, more.to_string()).await;
    assert_eq!(patched["metadata"]["finalizers"].as_array().unwrap().len(), 2);
    assert_eq!(api.raw(Method::PATCH, &path, "application/json", "{}").await.0, 415);
    assert_eq!(api.raw(Method::PATCH, &path, strategic, "{").await.0, 400);
    let old = json!({ "metadata": { "resourceVersion": "1" }, "data": { "z": "1" } });
    assert_eq!(reason(&api.merge(&path, &old).await.1), "Conflict");
}

#[tokio::test]
async fn an_applied_value_that_its_type_cannot_hold_is_refused_in_kubernetes_words() {
    let api = Api::new().await;
    let applied = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "a", "creationTimestamp": "yesterday" },
    });
    let path = format!("{MAPS}/a?fieldManager=x");
    let media = "application/apply-patch+yaml";
    let (code, status) = api.raw(Method::PATCH, &path, media, applied.to_string()).await;
    assert_eq!((code, status.get("reason")), (500, None));
    assert_eq!(
        status["message"],
        "failed to convert new object (/a; /v1, Kind=ConfigMap) to proper version: unable to convert unstructured \
         object to /v1, Kind=ConfigMap: parsing time \"yesterday\" as \"2006-01-02T15:04:05Z07:00\": cannot parse \
         \"yesterday\" as \"2006\""
    );
}

#[tokio::test]
async fn patches_at_the_same_time_all_take_effect() {
    let api = std::sync::Arc::new(Api::new().await);
    api.post(MAPS, &map("a")).await;
    let mut tasks = tokio::task::JoinSet::new();
    for index in 0..20 {
        let api = api.clone();
        tasks.spawn(async move {
            let patch = json!({ "data": { format!("key-{index}"): "x" } });
            assert_eq!(api.merge(&format!("{MAPS}/a"), &patch).await.0, 200);
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let (_, after) = api.get(&format!("{MAPS}/a")).await;
    assert_eq!(after["data"].as_object().unwrap().len(), 21);
}

#[tokio::test]
async fn spec_and_status_are_written_apart() {
    let api = Api::new().await;
    api.post(CLAIMS, &claim("a")).await;
    let path = format!("{CLAIMS}/a");
    let status = json!({ "status": { "phase": "Bound" }, "spec": { "volumeName": "v" } });
    let (code, after) = api.merge(&format!("{path}/status"), &status).await;
    assert_eq!((code, &after["status"]["phase"]), (200, &json!("Bound")), "{after}");
    assert_eq!(after["spec"].get("volumeName"), None);
    let (_, after) = api.merge(&path, &json!({ "status": { "phase": "Lost" } })).await;
    assert_eq!(after["status"]["phase"], "Bound");
    assert_eq!(api.get(&format!("{path}/status")).await.1["status"]["phase"], "Bound");
    assert_eq!(api.get(&format!("{MAPS}/a/status")).await.0, 404);
}

#[tokio::test]
async fn a_deleted_object_is_gone_or_waits_for_its_finalizers() {
    let api = Api::new().await;
    let made = api.post(MAPS, &map("a")).await;
    let path = format!("{MAPS}/a");
    let (code, status) = api.delete(&path).await;
    assert_eq!((code, &status["status"]), (200, &json!("Success")));
    assert_eq!(status["details"]["uid"], made["metadata"]["uid"]);
    assert_eq!(reason(&api.delete(&path).await.1), "NotFound");
    let mut kept = map("a");
    kept["metadata"]["finalizers"] = json!(["example.com/keep"]);
    api.post(MAPS, &kept).await;
    let (_, marked) = api.delete(&path).await;
    assert_eq!(marked["kind"], "ConfigMap");
    assert!(marked["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(marked["metadata"]["deletionGracePeriodSeconds"], 0);
    let (_, again) = api.delete(&path).await;
    assert_eq!(again["metadata"]["resourceVersion"], marked["metadata"]["resourceVersion"]);
    let (code, _) = api.merge(&path, &json!({ "metadata": { "finalizers": null } })).await;
    assert_eq!(code, 200);
    assert_eq!(api.get(&path).await.0, 404);
}

#[tokio::test]
async fn a_deletion_heeds_its_preconditions_and_propagation() {
    let api = Api::new().await;
    api.post(MAPS, &map("a")).await;
    let path = format!("{MAPS}/a");
    let options = |body: Value| async {
        let body = body;
        api.send(Method::DELETE, &path, &body).await
    };
    let (code, status) = options(json!({ "preconditions": { "uid": "other" } })).await;
    assert_eq!((code, reason(&status)), (409, "Conflict"));
    assert_eq!(options(json!({ "preconditions": { "resourceVersion": "1" } })).await.0, 409);
    assert_eq!(options(json!({ "propagationPolicy": "Sideways" })).await.0, 422);
    let (_, marked) =
        options(json!({ "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground" }))
            .await;
    assert_eq!(marked["metadata"]["finalizers"], json!(["foregroundDeletion"]));
    let (_, marked) = api.delete(&format!("{path}?propagationPolicy=Orphan")).await;
    assert_eq!(marked["metadata"]["finalizers"], json!(["orphan"]));
}

#[tokio::test]
async fn a_collection_is_deleted_by_selector() {
    let api = Api::new().await;
    for name in ["a", "b", "c"] {
        let mut one = map(name);
        one["metadata"]["labels"] = json!({ "keep": if name == "b" { "yes" } else { "no" } });
        api.post(MAPS, &one).await;
    }
    let (code, list) = api.delete(&format!("{MAPS}?labelSelector=keep%3Dno")).await;
    assert_eq!((code, list["items"].as_array().unwrap().len()), (200, 2));
    assert_eq!(api.get(&format!("{MAPS}/b")).await.0, 200);
    assert_eq!(api.get(&format!("{MAPS}/a")).await.0, 404);
}

#[tokio::test]
async fn both_event_groups_show_the_same_events() {
    let api = Api::new().await;
    let event = json!({
        "metadata": { "name": "e", "namespace": "default" }, "eventTime": "2026-01-01T00:00:00.000000Z",
        "regarding": { "kind": "Pod", "name": "p", "namespace": "default" }, "reason": "Because", "note": "so",
        "type": "Normal", "action": "Doing", "reportingController": "c", "reportingInstance": "i",
    });
    api.post("/apis/events.k8s.io/v1/namespaces/default/events", &event).await;
    let (_, core) = api.get("/api/v1/namespaces/default/events/e").await;
    assert_eq!((&core["message"], &core["involvedObject"]["name"]), (&json!("so"), &json!("p")));
    let (_, list) = api.get("/apis/events.k8s.io/v1/namespaces/default/events").await;
    assert_eq!((&list["kind"], &list["items"][0]["note"]), (&json!("EventList"), &json!("so")));
    let (_, selected) =
        api.get("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name%3Dp").await;
    assert_eq!(selected["items"].as_array().unwrap().len(), 1);
    let path = "/apis/events.k8s.io/v1/namespaces/default/events/e";
    let series = json!({ "series": { "count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z" } });
    let (_, patched) = api.merge(path, &series).await;
    assert_eq!(patched["series"]["count"], 2, "{patched}");
}

#[tokio::test]
async fn a_namespace_stays_until_it_is_finalized() {
    let api = Api::new().await;
    api.post("/api/v1/namespaces", &json!({ "metadata": { "name": "work" } })).await;
    let path = "/api/v1/namespaces/work";
    let (_, marked) = api.delete(path).await;
    assert_eq!(marked["status"]["phase"], "Terminating", "{marked}");
    let (code, status) = api.send(Method::POST, "/api/v1/namespaces/work/configmaps", &map("late")).await;
    assert_eq!((code, reason(&status)), (403, "Forbidden"), "{status}");
    let mut empty = marked.clone();
    empty["spec"] = json!({});
    assert_eq!(api.put(&format!("{path}/finalize"), &empty).await.0, 200);
    assert_eq!(api.get(path).await.0, 404);
}

#[tokio::test]
async fn a_namespace_is_finalized_under_its_own_name_and_by_the_rules() {
    let api = Api::new().await;
    let path = "/api/v1/namespaces/default/finalize";
    let (_, namespace) = api.get("/api/v1/namespaces/default").await;
    let with = |change: &dyn Fn(&mut Value)| {
        let mut changed = namespace.clone();
        change(&mut changed);
        changed
    };
    let (code, status) = api.put(path, &with(&|it| it["metadata"]["name"] = "other".into())).await;
    assert_eq!(code, 400);
    assert_eq!(
        status["message"],
        "the name of the object (other) does not match the name on the URL (default)"
    );
    assert_eq!(api.put(path, &with(&|it| it["metadata"] = json!({}))).await.0, 400);
    let (code, status) = api.put(path, &with(&|it| it["spec"]["finalizers"] = json!(["mine"]))).await;
    assert_eq!((code, reason(&status)), (422, "Invalid"));
    assert_eq!(
        status["message"],
        "Namespace \"default\" is invalid: spec.finalizers[0]: Invalid value: \"mine\": name is neither a standard \
         finalizer name nor is it fully qualified"
    );
    let bad = with(&|it| it["metadata"]["labels"] = json!({ "bad label": "" }));
    assert_eq!(reason(&api.put(path, &bad).await.1), "Invalid");
    assert_eq!(api.get("/api/v1/namespaces/default").await.1, namespace);
    let good = with(&|it| {
        it["spec"]["finalizers"] = json!(["kubernetes", "example.com/x"]);
        it["status"]["phase"] = "Terminating".into();
    });
    let (code, finalized) = api.put(path, &good).await;
    assert_eq!((code, &finalized["spec"]), (200, &good["spec"]), "{finalized}");
    assert_eq!(finalized["status"]["phase"], "Active");
}

#[tokio::test]
async fn a_namespace_without_a_name_is_none_at_all() {
    let api = Api::new().await;
    api.post(CLAIMS, &claim("a")).await;
    let nameless = "/api/v1/namespaces//persistentvolumeclaims";
    let (code, status) = api.delete(nameless).await;
    assert_eq!((code, reason(&status)), (404, "NotFound"), "{status}");
    assert_eq!(status["message"], "the server could not find the requested resource");
    assert_eq!(api.get(nameless).await.0, 404);
    assert_eq!(api.get(&format!("{CLAIMS}/a")).await.1["metadata"].get("deletionTimestamp"), None);
}

const PODS: &str = "/api/v1/namespaces/default/pods";

fn pod(name: &str) -> Value {
    json!({ "metadata": { "name": name }, "spec": { "containers": [{ "name": "c", "image": "x" }] } })
}

#[tokio::test]
async fn a_binding_is_of_the_pod_that_it_was_decided_for() {
    let api = Api::new().await;
    let made = api.post(PODS, &pod("p")).await;
    let uid = made["metadata"]["uid"].as_str().unwrap();
    let version = made["metadata"]["resourceVersion"].as_str().unwrap();
    let bind = |metadata: Value| {
        let body = json!({ "metadata": metadata, "target": { "kind": "Node", "name": "n" } });
        let api = &api;
        async move { api.send(Method::POST, &format!("{PODS}/p/binding"), &body).await }
    };
    let (code, status) = bind(json!({ "name": "p", "uid": "other" })).await;
    assert_eq!((code, reason(&status)), (409, "Conflict"));
    assert_eq!(
        status["message"],
        format!(
            "Operation cannot be fulfilled on pods \"p\": StorageError: invalid object, Code: 4, Key: \
             /registry/pods/default/p, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: UID in \
             precondition: other, UID in object meta: {uid}"
        )
    );
    let (code, status) = bind(json!({ "name": "p", "uid": uid, "resourceVersion": "1" })).await;
    assert_eq!((code, reason(&status)), (409, "Conflict"));
    let why = format!("ResourceVersion in precondition: 1, ResourceVersion in object meta: {version}");
    assert!(status["message"].as_str().unwrap().ends_with(&why), "{status}");
    assert_eq!(api.get(&format!("{PODS}/p")).await.1["spec"].get("nodeName"), None);
    assert_eq!(bind(json!({ "name": "p", "uid": uid, "resourceVersion": version })).await.0, 201);
    assert_eq!(api.get(&format!("{PODS}/p")).await.1["spec"]["nodeName"], "n");
}

#[tokio::test]
async fn a_pod_with_scheduling_gates_is_not_bound() {
    let api = Api::new().await;
    let mut gated = pod("p");
    gated["spec"]["schedulingGates"] = json!([{ "name": "example.com/wait" }]);
    api.post(PODS, &gated).await;
    let binding = json!({ "metadata": { "name": "p" }, "target": { "kind": "Node", "name": "n" } });
    let (code, status) = api.send(Method::POST, &format!("{PODS}/p/binding"), &binding).await;
    assert_eq!((code, reason(&status)), (409, "Conflict"));
    assert!(status["message"].as_str().unwrap().ends_with("pod p has non-empty .spec.schedulingGates"));
}

#[tokio::test]
async fn an_eviction_that_is_a_dry_run_leaves_the_pod() {
    let api = Api::new().await;
    api.post(PODS, &pod("p")).await;
    let eviction = json!({ "metadata": { "name": "p" }, "deleteOptions": { "gracePeriodSeconds": 0 } });
    let path = format!("{PODS}/p/eviction");
    assert_eq!(api.send(Method::POST, &format!("{path}?dryRun=All"), &eviction).await.0, 201);
    assert_eq!(api.get(&format!("{PODS}/p")).await.0, 200);
    assert_eq!(api.send(Method::POST, &path, &eviction).await.0, 201);
    assert_eq!(api.get(&format!("{PODS}/p")).await.0, 404);
}

#[tokio::test]
async fn a_pod_that_becomes_ready_during_its_eviction_is_protected_or_was_gone_before() {
    const BUDGETS: &str = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    let api = Api::new().await;
    let budget = json!({
        "metadata": { "name": "all" }, "spec": { "minAvailable": "100%", "selector": {} },
    });
    api.post(BUDGETS, &budget).await;
    let counted = json!({ "status": {
        "observedGeneration": 1, "disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 1, "expectedPods": 1,
    } });
    assert_eq!(api.merge(&format!("{BUDGETS}/all/status"), &counted).await.0, 200);
    let running = json!({ "status": {
        "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }],
    } });
    let mut outcomes = [0, 0];
    for number in 0..100 {
        let name = format!("p{number}");
        api.post(PODS, &pod(&name)).await;
        let (pod, status) = (format!("{PODS}/{name}"), format!("{PODS}/{name}/status"));
        let eviction = json!({ "metadata": { "name": name }, "deleteOptions": { "gracePeriodSeconds": 0 } });
        let path = format!("{pod}/eviction");
        let becomes_ready = async {
            for _ in 0..number % 10 {
                tokio::task::yield_now().await;
            }
            api.merge(&status, &running).await.0
        };
        let ((evicted, refusal), became_ready) =
            tokio::join!(api.send(Method::POST, &path, &eviction), becomes_ready);
        match (evicted, became_ready) {
            (201, 404) => outcomes[0] += 1,
            (429, 200) => outcomes[1] += 1,
            other => panic!("{name}: {other:?} {refusal}"),
        }
        assert_eq!(api.get(&pod).await.0, if evicted == 201 { 404 } else { 200 });
    }
    assert!(outcomes[1] > 0, "{outcomes:?}");
}

/// A pod whose only container has an argument of this many bytes.
fn pod_with_argument(name: &str, bytes: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": { "containers": [{ "name": "a", "image": "a", "args": ["x".repeat(bytes)] }] },
    })
}

#[tokio::test]
async fn an_object_is_as_large_as_etcd_takes_and_no_larger() {
    const PODS: &str = "/api/v1/namespaces/default/pods";
    let api = Api::new().await;
    let limit = store::MAX_OBJECT;
    api.post(PODS, &pod_with_argument("fits", limit - 8192)).await;
    let (code, refusal) = api.send(Method::POST, PODS, &pod_with_argument("large", limit)).await;
    assert_eq!((code, &refusal["message"]), (500, &json!("etcdserver: request is too large")));
    assert_eq!(refusal.get("reason"), None);
    let path = format!("{PODS}/fits");
    let grown = json!({ "metadata": { "annotations": { "a": "x".repeat(9000) } } });
    let (code, refusal) = api.merge(&path, &grown).await;
    assert_eq!((code, &refusal["message"]), (500, &json!("etcdserver: request is too large")));
}

#[tokio::test]
async fn an_object_that_was_stored_larger_can_still_be_changed_if_it_does_not_grow() {
    let api = Api::new().await;
    let mut pod = api
        .post("/api/v1/namespaces/default/pods", &pod_with_argument("old", store::MAX_OBJECT - 8192))
        .await;
    pod["metadata"]["annotations"] = json!({ "a": "x".repeat(20_000) });
    let key = store::Key::new("pods".into(), "default", "old");
    let stored = api.server.store().write(key, store::Expect::Present, super::super::write::put(&pod)).await;
    assert!(stored.unwrap().bytes.len() > store::MAX_OBJECT);
    let path = "/api/v1/namespaces/default/pods/old";
    let (code, answer) = api.merge(path, &json!({ "metadata": { "labels": { "more": "yes" } } })).await;
    assert_eq!((code, &answer["message"]), (500, &json!("etcdserver: request is too large")));
    let (code, answer) = api.merge(path, &json!({ "metadata": { "annotations": null } })).await;
    assert_eq!(code, 200, "{answer}");
}

#[tokio::test]
async fn yaml_that_expands_beyond_a_request_is_refused() {
    let api = Api::new().await;
    // Half a gigabyte in 100 KB.
    let bomb = format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: bomb}}\ndata:\n  a: &a {}\n  b: [{}]\n",
        "x".repeat(50_000),
        "*a,".repeat(16_000)
    );
    let (code, refusal) = api.raw(Method::POST, MAPS, "application/yaml", bomb.clone()).await;
    assert_eq!(code, 400, "{refusal}");
    assert!(refusal["message"].as_str().unwrap().contains("expands to more than a request may hold"));
    let path = format!("{MAPS}/bomb?fieldManager=test");
    let (code, refusal) = api.raw(Method::PATCH, &path, "application/apply-patch+yaml", bomb).await;
    assert_eq!(code, 400, "{refusal}");
    assert!(refusal["message"].as_str().unwrap().contains("expands to more than a request may hold"));
}

#[tokio::test]
async fn applying_more_than_an_object_may_hold_is_refused() {
    let api = Api::new().await;
    let path = format!("{MAPS}/large?fieldManager=test");
    let head = r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"large"},"#;
    let fields = format!(r#"{head}"data":[{}0]}}"#, "0,".repeat(300_000));
    let bytes = format!(r#"{head}"data":{{"a":"{}"}}}}"#, "x".repeat(1600 * 1024));
    for body in [fields, bytes] {
        let (code, refusal) = api.raw(Method::PATCH, &path, "application/apply-patch+yaml", body).await;
        assert_eq!((code, reason(&refusal)), (413, "RequestEntityTooLarge"), "{refusal}");
        assert!(refusal["message"].as_str().unwrap().contains("at most"), "{refusal}");
    }
}

#[tokio::test]
async fn large_bodies_are_decoded_beside_the_threads_of_the_runtime() {
    let api = Api::new().await;
    for (bytes, is_beside) in [(100, false), (500_000, true)] {
        let mut map = map("a");
        map["data"]["a"] = "x".repeat(bytes).into();
        let request = Request::post(format!("{MAPS}?dryRun=All")).header(CONTENT_TYPE, "application/json");
        let request = request.body(Full::new(Bytes::from(map.to_string()))).unwrap();
        // Nothing is waited for in a dry run: what is not answered at once is worked on elsewhere.
        let mut answer = std::pin::pin!(api.response(request));
        let first = futures_util::poll!(answer.as_mut());
        assert_eq!(first.is_pending(), is_beside, "{bytes} bytes");
        let answer = match first {
            std::task::Poll::Ready(answer) => answer,
            std::task::Poll::Pending => answer.await,
        };
        assert_eq!(answer.status(), 201);
    }
}
