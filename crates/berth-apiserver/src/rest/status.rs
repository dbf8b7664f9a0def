//! What is not a resource: version, health, metrics, discovery and OpenAPI.

use http::Response;
use http::header::{CONTENT_TYPE, ETAG, HeaderValue};
use http::request::Parts;
use serde_json::json;

use super::content::{self, Accept, Body, Shape};
use super::error::{Answer, Failure};
use super::request::Query;
use super::{ApiServer, Route, discovery};

/// The Kubernetes version that is spoken.
const MAJOR: &str = "1";
const MINOR: &str = "36";
const VERSION: &str = concat!("v1.36.3+berth-", env!("CARGO_PKG_VERSION"));
const CHECKS: &[&str] = &["ping", "store"];
const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

impl ApiServer {
    /// What a node counts: of the kubelet's paths that a cluster passes on, the only one that is served.
    pub(super) async fn node_stats(&self, node: &str, accept: Accept) -> Answer<Response<Body>> {
        let pods = self.inner.options.pods.as_ref().ok_or_else(Failure::no_such_path)?;
        let stats = pods.stats(node).await.ok_or_else(Failure::no_such_path)?;
        Ok(content::respond(200, accept, &stats))
    }

    pub(super) fn document(&self, route: &Route, parts: &Parts) -> Answer<Response<Body>> {
        let query = Query::parse(parts.uri.query().unwrap_or_default());
        let registry = self.registry();
        let accept = content::negotiate(&parts.headers, false);
        let value = match route {
            Route::Version => version(),
            Route::Health { which, check } => return self.health(which, check.as_deref(), &query),
            Route::Metrics => {
                let text = self.inner.options.metrics.as_ref().map(|metrics| metrics()).unwrap_or_default();
                let media = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                return Ok(content::respond_bytes(200, media, false, text.into()));
            }
            Route::OpenApiV2 => return Ok(self.openapi_v2(parts)),
            Route::OpenApiV3Index => return Ok(self.openapi_index()),
            Route::OpenApiV3(path) => return self.openapi_v3(path, parts),
            Route::OpenIdConfiguration | Route::Keys => return self.token_keys(route),
            Route::CoreVersions | Route::Groups
                if accept.as_ref().is_ok_and(|a| a.shape == Shape::Discovery) =>
            {
                let document = discovery::aggregated(&registry, *route == Route::CoreVersions);
                return Ok(aggregated(
                    &document,
                    accept.is_ok_and(|accept| accept.gzip),
                    registry.generation,
                ));
            }
            Route::CoreVersions => {
                let address = parts.headers.get(http::header::HOST).and_then(|host| host.to_str().ok());
                discovery::core_versions(address.unwrap_or("localhost"))
            }
            Route::Groups => discovery::groups(&registry),
            Route::Group(name) => {
                let group = registry.group(name).filter(|group| !group.name.is_empty());
                discovery::group(group.ok_or_else(Failure::nowhere)?)
            }
            Route::Resources { group, version } => {
                let lost = || {
                    if registry.group(group).is_some() { Failure::no_such_path() } else { Failure::nowhere() }
                };
                let found = registry.version(group, version).ok_or_else(lost)?;
                discovery::resources(group, found)
            }
            Route::Paths => paths(self),
            Route::Objects(_) | Route::NodeStats(_) => return Err(Failure::no_such_path()),
        };
        let accept = Accept { shape: Shape::Object, pretty: query.flag("pretty"), ..accept? };
        Ok(content::respond(200, accept, &value))
    }

    /// Liveness is about the process, readiness about the store as well: whoever waits for it learns that objects are missing.
    fn health(&self, which: &str, check: Option<&str>, query: &Query) -> Answer<Response<Body>> {
        let damage = self.inner.store.damage().filter(|_| which == "readyz").map(ToString::to_string);
        let failed = |name: &str| damage.as_ref().filter(|_| name == "store");
        if let Some(check) = check {
            if !CHECKS.contains(&check) {
                return Err(Failure::no_such_path());
            }
            return Ok(match failed(check) {
                Some(why) => content::respond_text(500, format!("{why}\n")),
                None => content::respond_text(200, "ok"),
            });
        }
        if damage.is_none() && !query.flag("verbose") {
            return Ok(content::respond_text(200, "ok"));
        }
        let lines: String = CHECKS
            .iter()
            .map(|check| match failed(check) {
                Some(why) => format!("[-]{check} failed: {why}\n"),
                None => format!("[+]{check} ok\n"),
            })
            .collect();
        let (code, end) = if damage.is_some() { (500, "failed") } else { (200, "passed") };
        Ok(content::respond_text(code, format!("{lines}{which} check {end}\n")))
    }

    fn token_keys(&self, route: &Route) -> Answer<Response<Body>> {
        let credentials = self.inner.options.credentials.as_ref().ok_or_else(Failure::no_such_path)?;
        let value = if *route == Route::Keys {
            credentials.tokens().keys()
        } else {
            json!({
                "issuer": "https://kubernetes.default.svc",
                "jwks_uri": "https://kubernetes.default.svc/openid/v1/jwks",
                "response_types_supported": ["id_token"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": ["ES256"],
            })
        };
        Ok(content::respond(200, Accept::default(), &value))
    }
}

fn aggregated(document: &serde_json::Value, gzip: bool, generation: u64) -> Response<Body> {
    let accept = Accept { gzip, ..Accept::default() };
    let mut response = content::respond(200, accept, document);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(AGGREGATED));
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{generation}\"")) {
        response.headers_mut().insert(ETAG, tag);
    }
    response
}

fn version() -> serde_json::Value {
    json!({
        "major": MAJOR, "minor": MINOR, "emulationMajor": MAJOR, "emulationMinor": MINOR,
        "minCompatibilityMajor": MAJOR, "minCompatibilityMinor": "35",
        "gitVersion": VERSION, "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "", "compiler": "rustc", "platform": format!("linux/{}", go_architecture()),
    })
}

fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn paths(api: &ApiServer) -> serde_json::Value {
    let mut paths: Vec<String> = vec!["/api".to_owned(), "/api/v1".to_owned(), "/apis".to_owned()];
    for group in api.registry().groups.iter().filter(|group| !group.name.is_empty()) {
        paths.push(format!("/apis/{}", group.name));
        paths.extend(group.versions.iter().map(|version| format!("/apis/{}/{}", group.name, version.name)));
    }
    let others = ["/healthz", "/livez", "/metrics", "/openapi/v2", "/openapi/v3", "/readyz", "/version"];
    paths.extend(others.iter().map(|&path| path.to_owned()));
    json!({ "paths": paths })
}
