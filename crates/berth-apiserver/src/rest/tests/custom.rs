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
