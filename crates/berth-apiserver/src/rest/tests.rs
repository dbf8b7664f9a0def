//! The service in process, as clients use it.

mod custom;
mod lists;
mod paths;
mod reviews;
mod watches;
mod writes;

use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{ApiServer, Body, Options};
use crate::store::{self, Store};

const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// A server on a store of its own.
struct Api {
    server: ApiServer,
    _directory: tempfile::TempDir,
}

impl Api {
    async fn new() -> Self {
        Self::with(store::Options::default()).await
    }

    async fn with(options: store::Options) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(&directory.path().join("store"), options).unwrap();
        let credentials =
            crate::auth::Credentials::ensure(&directory.path().join("pki"), jiff::Timestamp::now());
        let options = Options { credentials: Some(credentials.unwrap().into()), ..Options::default() };
        let server = ApiServer::new(store, options);
        server.bootstrap().await.unwrap();
        Self { server, _directory: directory }
    }

    async fn response(&self, request: Request<Full<Bytes>>) -> Response<Body> {
        self.server.clone().oneshot(request).await.unwrap()
    }

    async fn raw(&self, method: Method, path: &str, media: &str, body: impl Into<Bytes>) -> (u16, Value) {
        let request = Request::builder().method(method).uri(path).header(CONTENT_TYPE, media);
        read(self.response(request.body(Full::new(body.into())).unwrap()).await).await
    }

    async fn send(&self, method: Method, path: &str, body: &Value) -> (u16, Value) {
        self.raw(method, path, "application/json", body.to_string()).await
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.raw(Method::GET, path, "", "").await
    }

    async fn get_as(&self, path: &str, accept: &str) -> Response<Body> {
        let request = Request::builder().uri(path).header(ACCEPT, accept).body(Full::default()).unwrap();
        self.response(request).await
    }

    async fn post(&self, path: &str, body: &Value) -> Value {
        let (code, value) = self.send(Method::POST, path, body).await;
        assert_eq!(code, 201, "{value}");
        value
    }

    async fn put(&self, path: &str, body: &Value) -> (u16, Value) {
        self.send(Method::PUT, path, body).await
    }

    async fn delete(&self, path: &str) -> (u16, Value) {
        self.raw(Method::DELETE, path, "application/json", "").await
    }

    async fn merge(&self, path: &str, body: &Value) -> (u16, Value) {
        self.raw(Method::PATCH, path, "application/merge-patch+json", body.to_string()).await
    }
}

async fn read(response: Response<Body>) -> (u16, Value) {
    let code = response.status().as_u16();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let text = || String::from_utf8_lossy(&bytes).into_owned();
    (code, serde_json::from_slice(&bytes).unwrap_or_else(|_| Value::from(text())))
}

fn map(name: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": { "a": "1" } })
}

fn claim(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
    })
}

fn reason(status: &Value) -> &str {
    status["reason"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn health_and_version_are_told() {
    let api = Api::new().await;
    assert_eq!(api.get("/healthz").await, (200, "ok".into()));
    let (_, verbose) = api.get("/readyz?verbose").await;
    assert!(verbose.as_str().unwrap().ends_with("readyz check passed\n"), "{verbose}");
    assert_eq!(api.get("/version").await.1["minor"], "36");
    assert_eq!(api.get("/livez/ping").await.0, 200);
    assert_eq!(api.get("/livez/nothing").await.0, 404);
}

#[tokio::test]
async fn damage_is_told_by_readyz_and_an_event_and_the_object_is_not_taken_for_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let start = || {
        let (store, _) = Store::open(directory.path(), store::Options::default()).unwrap();
        ApiServer::new(store, Options::default())
    };
    let api = Api { server: start(), _directory: tempfile::tempdir().unwrap() };
    api.server.bootstrap().await.unwrap();
    api.post(CLAIMS, &claim("data")).await;
    drop(api);
    let path = directory.path().join("objects");
    let journal = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, journal.replace(r#""name":"data""#, r#""name":"dada""#)).unwrap();
    let api = Api { server: start(), _directory: tempfile::tempdir().unwrap() };
    api.server.bootstrap().await.unwrap();
    assert_eq!(api.get("/livez").await.0, 200);
    let (code, said) = api.get("/readyz").await;
    let said = said.as_str().unwrap();
    assert_eq!(code, 500);
    assert!(said.contains("persistentvolumeclaims default/data") && said.contains("berth restore"), "{said}");
    assert_eq!(api.get("/readyz/store").await.0, 500);
    assert_eq!(api.get("/readyz/ping").await.0, 200);
    let (_, events) = api.get("/api/v1/namespaces/default/events").await;
    assert_eq!(events["items"][0]["reason"], "StoreDamaged", "{events}");
    // A claim that is not found would be taken for deleted, and its volume with it.
    let (code, answer) = api.get(&format!("{CLAIMS}/data")).await;
    assert_eq!((code, reason(&answer)), (500, "InternalError"), "{answer}");
    let (code, _) = api.send(Method::POST, CLAIMS, &claim("data")).await;
    assert_eq!(code, 500);
    let (code, _) = api.delete(&format!("{CLAIMS}/data")).await;
    assert_eq!(code, 500);
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused_as_kubernetes_does() {
    let api = Api::new().await;
    let (code, status) = api.get("/api/v1/unicorns").await;
    assert_eq!((code, reason(&status)), (404, "NotFound"));
    assert_eq!(status["message"], "the server could not find the requested resource");
    assert_eq!(api.get("/apis/none/v1/things").await.0, 404);
    assert_eq!(api.get("/api/v1/namespaces/default/nodes").await.0, 404);
    let (code, status) = api.send(Method::POST, &format!("{MAPS}/a"), &map("a")).await;
    assert_eq!((code, reason(&status)), (405, "MethodNotAllowed"));
    let (code, status) = api.get("/apis/authentication.k8s.io/v1/tokenreviews").await;
    assert_eq!((code, reason(&status)), (405, "MethodNotAllowed"));
}

#[tokio::test]
async fn discovery_lists_groups_resources_and_subresources() {
    let api = Api::new().await;
    assert_eq!(api.get("/api").await.1["versions"], json!(["v1"]));
    let (_, groups) = api.get("/apis").await;
    let names: Vec<&str> =
        groups["groups"].as_array().unwrap().iter().map(|group| group["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"storage.k8s.io") && names.contains(&"apps"), "{names:?}");
    let (_, core) = api.get("/api/v1").await;
    let find =
        |name: &str| core["resources"].as_array().unwrap().iter().find(|one| one["name"] == name).cloned();
    assert_eq!(find("persistentvolumeclaims").unwrap()["shortNames"], json!(["pvc"]));
    assert_eq!(find("serviceaccounts/token").unwrap()["kind"], "TokenRequest");
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
    let response = api.get_as("/apis", accept).await;
    assert!(response.headers()[CONTENT_TYPE].to_str().unwrap().contains("APIGroupDiscoveryList"));
    let (_, document) = read(response).await;
    assert_eq!(document["items"][0]["versions"][0]["freshness"], "Current");
}

#[tokio::test]
async fn every_kind_has_a_schema_and_every_reference_leads_somewhere() {
    let api = Api::new().await;
    let (_, index) = api.get("/openapi/v3").await;
    for (path, entry) in index["paths"].as_object().unwrap() {
        let (code, document) = api.get(entry["serverRelativeURL"].as_str().unwrap()).await;
        assert_eq!(code, 200, "{path}");
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert!(
            schemas.values().any(|schema| schema.get("x-kubernetes-group-version-kind").is_some()),
            "{path}"
        );
        let text = document.to_string();
        for reference in text.split("\"#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{path}: {name}");
        }
    }
    assert_eq!(api.get("/openapi/v3/apis/none/v1").await.0, 404);
    assert_eq!(api.get("/openapi/v2").await.1["swagger"], "2.0");
}

#[tokio::test]
async fn a_document_that_the_client_has_is_not_sent_again() {
    let api = Api::new().await;
    let first = api.get_as("/openapi/v3/api/v1", "application/json").await;
    let tag = first.headers()[http::header::ETAG].clone();
    let request = Request::builder().uri("/openapi/v3/api/v1").header(http::header::IF_NONE_MATCH, tag);
    let second = api.response(request.body(Full::default()).unwrap()).await;
    assert_eq!(second.status(), 304);
}

#[tokio::test]
async fn answers_come_as_tables_metadata_or_yaml() {
    let api = Api::new().await;
    api.post(CLAIMS, &claim("a")).await;
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let (_, rows) = read(api.get_as(CLAIMS, table).await).await;
    assert_eq!(rows["kind"], "Table");
    assert_eq!(rows["columnDefinitions"][0]["name"], "Name");
    assert_eq!(rows["rows"][0]["cells"][0], "a");
    assert_eq!(rows["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    let path = format!("{CLAIMS}?includeObject=Object");
    let (_, rows) = read(api.get_as(&path, table).await).await;
    assert_eq!(rows["rows"][0]["object"]["kind"], "PersistentVolumeClaim");
    let partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    let (_, metadata) = read(api.get_as(&format!("{CLAIMS}/a"), partial).await).await;
    assert_eq!((&metadata["kind"], &metadata["spec"]), (&json!("PartialObjectMetadata"), &Value::Null));
    let (_, yaml) = read(api.get_as(&format!("{CLAIMS}/a"), "application/yaml").await).await;
    assert!(yaml.as_str().unwrap().contains("kind: PersistentVolumeClaim"), "{yaml}");
    let (code, status) = read(api.get_as(CLAIMS, "text/html").await).await;
    assert_eq!((code, reason(&status)), (406, "NotAcceptable"));
}

#[tokio::test]
async fn large_answers_are_compressed_for_those_who_can_read_that() {
    let api = Api::new().await;
    for index in 0..3 {
        let mut big = map(&format!("big-{index}"));
        big["data"]["text"] = "x".repeat(100_000).into();
        api.post(MAPS, &big).await;
    }
    let request =
        Request::builder().uri(MAPS).header("accept-encoding", "gzip").body(Full::default()).unwrap();
    let response = api.response(request).await;
    assert_eq!(response.headers()["content-encoding"], "gzip");
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let list: Value = serde_json::from_reader(flate2::read::GzDecoder::new(&bytes[..])).unwrap();
    assert!(list["items"].as_array().unwrap().len() >= 3);
}

#[tokio::test]
async fn programs_that_ask_for_protobuf_get_it() {
    use crate::schema::{built_in, protobuf};
    let api = Api::new().await;
    api.post(CLAIMS, &claim("a")).await;
    let accept = "application/vnd.kubernetes.protobuf,application/json";
    let response = api.get_as(&format!("{CLAIMS}/a"), accept).await;
    assert_eq!(response.headers()[CONTENT_TYPE], "application/vnd.kubernetes.protobuf");
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    let type_ = built_in("", "v1", "PersistentVolumeClaim").unwrap();
    let object = protobuf::decode(&type_, &bytes).unwrap();
    assert_eq!(
        (&object["metadata"]["name"], &object["kind"]),
        (&json!("a"), &json!("PersistentVolumeClaim"))
    );
    let response = api.get_as(CLAIMS, accept).await;
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(protobuf::Envelope::open(&bytes).unwrap().kind, "PersistentVolumeClaimList");
    let mut body = api.get_as(&format!("{CLAIMS}?watch=1"), accept).await.into_body();
    let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let length = usize::try_from(u32::from_be_bytes(frame[..4].try_into().unwrap())).unwrap();
    assert_eq!(length, frame.len() - 4);
    assert_eq!(&frame[4..11], b"\x0a\x05ADDED");
}
