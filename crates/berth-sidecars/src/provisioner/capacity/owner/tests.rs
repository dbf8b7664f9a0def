//! The way up from a pod, on an API server.

use serde_json::{Value, json};

use super::*;

/// A client that knows some objects by their paths, and which of them were read.
fn client(objects: Vec<(&'static str, Value)>) -> Client {
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let path = request.uri().path().to_owned();
        let found = objects.iter().find(|(known, _)| *known == path).map(|(_, object)| object.clone());
        let (status, body) = match found {
            Some(object) => (200, object),
            None => (
                404,
                json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "reason": "NotFound", "code": 404, "message": format!("{path} not found") }),
            ),
        };
        let answer = http::Response::builder()
            .status(status)
            .body(kube::client::Body::from(serde_json::to_vec(&body).unwrap()))
            .unwrap();
        async move { Ok::<_, std::convert::Infallible>(answer) }
    });
    Client::new(service, "default")
}

fn object(kind: &str, name: &str, owners: &Value) -> Value {
    let version = if kind == "Pod" { "v1" } else { "apps/v1" };
    json!({ "apiVersion": version, "kind": kind,
        "metadata": { "name": name, "namespace": "ns", "uid": format!("uid-{name}"), "ownerReferences": owners } })
}

fn by(kind: &str, name: &str, controller: bool) -> Value {
    json!({ "apiVersion": "apps/v1", "kind": kind, "name": name, "uid": format!("uid-{name}"), "controller": controller })
}

async fn found(client: &Client, level: u8) -> Result<(String, String, String), String> {
    let owner = Owner { pod: "pod".to_owned(), level };
    let found = find(client, "ns", &owner).await.map_err(|error| error.sentence())?;
    assert_eq!(found.controller, Some(true));
    assert_eq!(found.uid, format!("uid-{}", found.name));
    Ok((found.api_version, found.kind, found.name))
}

#[tokio::test]
async fn the_owner_is_the_pod_or_what_is_above_it() {
    let owners = json!([by("Other", "other", false), by("ReplicaSet", "set", true)]);
    let client = client(vec![
        ("/api/v1/namespaces/ns/pods/pod", object("Pod", "pod", &owners)),
        (
            "/apis/apps/v1/namespaces/ns/replicasets/set",
            object("ReplicaSet", "set", &json!([by("Deployment", "deployment", true)])),
        ),
    ]);
    let owner = |version: &str, kind: &str, name: &str| Ok((version.into(), kind.into(), name.into()));
    assert_eq!(found(&client, 0).await, owner("v1", "Pod", "pod"));
    assert_eq!(found(&client, 1).await, owner("apps/v1", "ReplicaSet", "set"));
    assert_eq!(found(&client, 2).await, owner("apps/v1", "Deployment", "deployment"), "unread");
}

#[tokio::test]
async fn without_an_owner_a_sentence_says_what_to_change() {
    let alone = client(vec![("/api/v1/namespaces/ns/pods/pod", object("Pod", "pod", &json!([])))]);
    assert!(found(&alone, 0).await.is_ok());
    let refused = found(&alone, 1).await.unwrap_err();
    assert_eq!(refused, "Pod pod belongs to nothing; lower --capacity-ownerref-level");
    let refused = found(&client(vec![]), 0).await.unwrap_err();
    assert!(refused.starts_with("look up Pod pod in namespace ns: "), "{refused}");
}
