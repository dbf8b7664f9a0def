//! Whole requests for an API server in process: whatever is sent, it answers.

use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::store::{self, Store};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use serde_json::Value;
use tower::ServiceExt;

use super::fuzz;
use super::making::{any, mutate, named};
use crate::kubernetes::random::Random;

const MEDIA: &[&str] = &[
    "application/json",
    "application/yaml",
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
    "application/apply-patch+yaml",
];
const QUERIES: &[&str] = &[
    "",
    "dryRun=All",
    "fieldValidation=Strict",
    "fieldManager=a&force=true",
    "limit=1",
    "limit=-1&continue=x",
    "labelSelector=a%3Db&fieldSelector=metadata.name%3Da",
    "resourceVersion=1&resourceVersionMatch=Exact",
    "propagationPolicy=Foreground&gracePeriodSeconds=0",
    "watch=true&timeoutSeconds=0&sendInitialEvents=maybe",
    "%ff=%00&&=",
];

/// Every collection the server has, in the default namespace where that applies.
async fn collections(api: &ApiServer) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let (_, groups) = ask(api, Method::GET, "/apis", "", Bytes::new()).await;
    let mut roots = vec!["/api/v1".to_owned()];
    for group in groups["groups"].as_array().unwrap() {
        roots.push(format!("/apis/{}", group["preferredVersion"]["groupVersion"].as_str().unwrap()));
    }
    for root in roots {
        let (_, list) = ask(api, Method::GET, &root, "", Bytes::new()).await;
        for resource in list["resources"].as_array().unwrap() {
            let (name, kind) = (resource["name"].as_str().unwrap(), resource["kind"].as_str().unwrap());
            let scope = if resource["namespaced"] == true { "/namespaces/default" } else { "" };
            if !name.contains('/') {
                found.push((kind.to_owned(), format!("{root}{scope}/{name}")));
            }
        }
    }
    found
}

async fn ask(api: &ApiServer, method: Method, path: &str, media: &str, body: Bytes) -> (u16, Value) {
    let goes_on = method == Method::GET && path.contains("watch=true");
    let mut request = Request::builder().method(method).uri(path);
    if !media.is_empty() {
        request = request.header("content-type", media);
    }
    let response = api.clone().oneshot(request.body(Full::new(body)).unwrap()).await.unwrap();
    let status = response.status().as_u16();
    if goes_on && status == 200 {
        return (status, Value::Null);
    }
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

async fn one(api: &ApiServer, collections: &[(String, String)], random: &mut Random) {
    let (_, object) = named(random);
    let kind = object["kind"].as_str().unwrap();
    let Some((_, path)) = collections.iter().find(|(known, _)| known == kind) else { return };
    let query = random.pick(QUERIES);
    let bytes = object.to_string().into_bytes();
    let (status, answer) =
        ask(api, Method::POST, &format!("{path}?{query}"), "application/json", bytes.clone().into()).await;
    assert!(status < 500 || is_known(&answer), "POST {path}: {answer}\n{object}");
    let mut body = if random.once_in(2) { bytes } else { any(random, 5).to_string().into_bytes() };
    if random.once_in(3) {
        mutate(random, &mut body);
    }
    let methods = [Method::GET, Method::PUT, Method::PATCH, Method::PATCH, Method::DELETE, Method::POST];
    let method = random.pick(&methods).clone();
    let rest = *random.pick(&["/fuzzed", "/fuzzed/status", "", "/fuzzed/scale", "/other", "/fuzzed/nothing"]);
    let path = format!("{path}{rest}?{}", random.pick(QUERIES));
    let media = *random.pick(MEDIA);
    let (status, answer) = ask(api, method.clone(), &path, media, body.into()).await;
    assert!(status < 500 || is_known(&answer), "{method} {path} as {media}: {answer}");
}

/// What kube-apiserver answers with 500, too.
fn is_known(answer: &Value) -> bool {
    const KNOWN: [&str; 11] = [
        "resourceVersion should not be set on objects to be created",
        "failed to create typed patch",
        "failed to convert new object",
        // Strategic merge patches that their type does not allow.
        "no elements in any of the given slices",
        "The order in patch list:",
        "list element types are not identical:",
        "cannot merge lists without merge key for",
        "unknown patch type:",
        "merging lists cannot yet be specified",
        "expected a ",
        "map: ",
    ];
    let message = answer["message"].as_str().unwrap_or_default();
    KNOWN.iter().any(|known| message.starts_with(known))
}

#[test]
fn whatever_is_asked_is_answered() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (store, _) = Store::open(directory.path(), store::Options::default()).unwrap();
    let api = ApiServer::new(store, Options::default());
    let collections = runtime.block_on(async {
        api.bootstrap().await.unwrap();
        collections(&api).await
    });
    assert!(collections.len() > 20, "{collections:?}");
    fuzz(|random| runtime.block_on(one(&api, &collections, random)));
}
