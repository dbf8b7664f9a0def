//! OpenAPI: the served kinds as schemas, made from the same table that decodes them.

mod document;
mod protobuf;
mod schemas;

use std::collections::HashMap;

use bytes::Bytes;
use http::header::{ACCEPT, ETAG, HeaderValue, IF_NONE_MATCH};
use http::request::Parts;
use http::{Response, StatusCode};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::ApiServer;
use super::content::{self, Accept, Body};
use super::error::{Answer, Failure};
use super::registry::Registry;

/// How the older document is asked for as protobuf (a version follows), and what it is sent as.
const V2_PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2";
const V2_PROTOBUF_SENT: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";
const JSON: &str = "application/json";

/// The documents that were made already, by path, with the state of the registry they were made from.
#[derive(Default)]
pub(crate) struct Cache(Mutex<HashMap<String, Document>>);

#[derive(Clone)]
struct Document {
    generation: u64,
    bytes: Bytes,
    tag: String,
}

impl ApiServer {
    pub(super) fn openapi_index(&self) -> Response<Body> {
        let registry = self.registry();
        let mut paths = Map::new();
        for group in &registry.groups {
            for version in &group.versions {
                let path = if group.name.is_empty() {
                    format!("api/{}", version.name)
                } else {
                    format!("apis/{}/{}", group.name, version.name)
                };
                let built_in = version.resources.iter().all(|served| served.resource.built_in);
                // Built-in groups only change with the program; custom ones with their definitions.
                let generation = if built_in { 0 } else { registry.generation };
                let hash = digest(format!("{} {path} {generation}", env!("CARGO_PKG_VERSION")).as_bytes());
                let url = format!("/openapi/v3/{path}?hash={hash}");
                paths.insert(path, json!({ "serverRelativeURL": url }));
            }
        }
        content::respond(200, Accept::default(), &json!({ "paths": paths }))
    }

    pub(super) fn openapi_v3(&self, path: &str, parts: &Parts) -> Answer<Response<Body>> {
        let registry = self.registry();
        let (group, version) = match path.split('/').collect::<Vec<_>>().as_slice() {
            ["api", version] => (String::new(), (*version).to_owned()),
            ["apis", group, version] => ((*group).to_owned(), (*version).to_owned()),
            _ => return Err(Failure::no_such_path()),
        };
        if registry.version(&group, &version).is_none() {
            return Err(Failure::no_such_path());
        }
        let make = |registry: &Registry| json_bytes(&document::v3(registry, &group, &version));
        Ok(serve(&self.cached(path, &registry, make), JSON, parts))
    }

    pub(super) fn openapi_v2(&self, parts: &Parts) -> Response<Body> {
        let accept = parts.headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let registry = self.registry();
        if accept.starts_with(V2_PROTOBUF) {
            let make = |registry: &Registry| protobuf::encode(&document::v2(registry));
            return serve(&self.cached("v2 protobuf", &registry, make), V2_PROTOBUF_SENT, parts);
        }
        let document = self.cached("v2", &registry, |registry| json_bytes(&document::v2(registry)));
        serve(&document, JSON, parts)
    }

    fn cached(&self, path: &str, registry: &Registry, make: impl FnOnce(&Registry) -> Vec<u8>) -> Document {
        let lock = || self.inner.openapi.0.lock();
        if let Some(have) = lock().get(path)
            && have.generation == registry.generation
        {
            return have.clone();
        }
        let bytes = Bytes::from(make(registry));
        let tag = format!("\"{}\"", digest(&bytes));
        let document = Document { generation: registry.generation, bytes, tag };
        lock().insert(path.to_owned(), document.clone());
        document
    }
}

fn json_bytes(document: &Value) -> Vec<u8> {
    serde_json::to_vec(document).unwrap_or_default()
}

fn serve(document: &Document, media: &'static str, parts: &Parts) -> Response<Body> {
    let known = parts.headers.get(IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let gzip = content::negotiate(&parts.headers, false).is_ok_and(|accept| accept.gzip);
    let mut response = if known == Some(document.tag.as_str()) {
        let mut response = content::respond_bytes(304, media, false, Bytes::new());
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response
    } else {
        content::respond_bytes(200, media, gzip, document.bytes.clone())
    };
    if let Ok(tag) = HeaderValue::from_str(&document.tag) {
        response.headers_mut().insert(ETAG, tag);
    }
    response
}

fn digest(bytes: &[u8]) -> String {
    berth_core::hex(&Sha256::digest(bytes)).to_uppercase()
}
