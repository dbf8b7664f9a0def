//! OpenAPI: the served kinds as schemas, made from the same table that decodes them.

use http::Response;
use http::request::Parts;
use serde_json::json;

use super::ApiServer;
use super::content::{self, Accept, Body};
use super::error::{Answer, Failure};

/// The documents that were made already.
#[derive(Default)]
pub(crate) struct Cache {}

impl ApiServer {
    pub(super) fn openapi_index(&self, _parts: &Parts) -> Answer<Response<Body>> {
        Ok(content::respond(200, &Accept::default(), &json!({ "paths": {} })))
    }

    pub(super) fn openapi_v3(&self, _path: &str, _parts: &Parts) -> Answer<Response<Body>> {
        Err(Failure::no_such_path())
    }

    pub(super) fn openapi_v2(&self, _parts: &Parts) -> Answer<Response<Body>> {
        Err(Failure::no_such_path())
    }
}
