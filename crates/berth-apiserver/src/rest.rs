//! The REST verbs over the store: a tower service that speaks the Kubernetes API.
//!
//! [`ApiServer`] is used by the TLS listener and, without a socket, by `kube::Client::new`. It trusts whoever calls it:
//! the listener finds out who that is and leaves an [`Identity`] in the request's extensions.

mod addresses;
mod apply;
mod bootstrap;
mod content;
mod crd;
mod delete;
mod discovery;
mod error;
mod list;
mod metrics;
mod object;
mod openapi;
mod pods;
mod registry;
mod request;
mod review;
mod scale;
mod status;
mod subresource;
mod watch;
mod write;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{Method, Request, Response, request::Parts};
use parking_lot::RwLock;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use self::content::{Accept, Include, Presenter, Shape};
use self::registry::{Registry, Served};
use self::request::Query;
use crate::auth::{Credentials, Identity};
use crate::metrics::{JournalMetrics, RequestMetrics, ResourceLabels, Watching};
use crate::pods::Pods;
use crate::resource::Subresource;
use crate::store::{Key, Store, WriteError};

pub use self::addresses::{ServiceRange, api_service_address, move_services};
pub use crate::rules::TolerationSeconds;
pub(crate) use bootstrap::{has_furniture, is_furniture};
pub use content::Body;
pub use error::{Answer, Failure};

/// Gives the text of `/metrics`.
pub type MetricsHook = Arc<dyn Fn() -> String + Send + Sync>;

/// What an [`ApiServer`] may be given besides its store.
#[derive(Clone, Default)]
pub struct Options {
    /// What signs service account tokens.
    pub credentials: Option<Arc<Credentials>>,
    /// Who serves logs and exec.
    pub pods: Option<Arc<dyn Pods>>,
    /// The function that is called for every request for `/metrics`; without one the answer is empty.
    pub metrics: Option<MetricsHook>,
    /// How long pods that do not say stay on a node that fails.
    pub toleration_seconds: TolerationSeconds,
    /// The addresses that Services get; they get none if `None`.
    pub service_range: Option<ServiceRange>,
    /// Ends all watches when cancelled.
    pub shutdown: CancellationToken,
}

/// The Kubernetes API over a store; cheap to clone.
#[derive(Clone)]
pub struct ApiServer {
    inner: Arc<Inner>,
}

struct Inner {
    store: Store,
    registry: RwLock<Arc<Registry>>,
    openapi: openapi::Cache,
    options: Options,
    meters: RequestMetrics,
    /// Taken by each request with a large body while it is answered.
    large_bodies: Arc<Semaphore>,
    /// Held while a Service gets its address.
    addresses: Arc<tokio::sync::Mutex<()>>,
}

/// Larger bodies are read and checked by a thread beside the runtime's own, whose other requests would wait for it.
const LARGE_BODY: usize = 64 * 1024;
/// So many of them at a time: as values they take tens of times their own size.
const LARGE_BODIES: usize = 4;

/// One request for a resource.
pub(crate) struct Call {
    pub(crate) api: ApiServer,
    pub(crate) registry: Arc<Registry>,
    pub(crate) served: Arc<Served>,
    /// Empty for all namespaces and in the scope of the cluster.
    pub(crate) namespace: String,
    /// Empty for the whole collection.
    pub(crate) name: String,
    pub(crate) subresource: Option<Subresource>,
    pub(crate) query: Query,
    pub(crate) accept: Accept,
    pub(crate) parts: Parts,
    pub(crate) identity: Identity,
}

impl Call {
    pub(crate) fn store(&self) -> &Store {
        &self.api.inner.store
    }

    pub(crate) fn key(&self, name: &str) -> Key {
        Key::new(self.served.collection.clone(), self.namespace.as_str(), name)
    }

    pub(crate) fn presenter(&self) -> Answer<Presenter<'_>> {
        let include = Include::parse(self.query.get("includeObject"))?;
        Ok(Presenter { served: &self.served, accept: self.accept, include })
    }
}

impl ApiServer {
    /// The API over `store`; serves the custom resources that are defined in it.
    pub fn new(store: Store, options: Options) -> Self {
        let registry = RwLock::new(Arc::new(Registry::new(&[], options.pods.is_some(), 0)));
        let openapi = openapi::Cache::default();
        let large_bodies = Arc::new(Semaphore::new(LARGE_BODIES));
        let api = Self {
            inner: Arc::new(Inner {
                store,
                registry,
                openapi,
                options,
                meters: RequestMetrics::default(),
                large_bodies,
                addresses: Arc::default(),
            }),
        };
        api.reload_definitions();
        api
    }

    /// The store that this API reads and writes, for callers in the same process that need objects as they are stored.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// The answer that refuses a request, for whoever stands before the API.
    pub fn refuse(failure: &Failure) -> Response<Body> {
        content::respond(failure.code, Accept::default(), &failure.status())
    }

    /// What is measured of requests and of the journal.
    pub(crate) fn meters(&self) -> (&RequestMetrics, &JournalMetrics) {
        (&self.inner.meters, self.inner.store.meters())
    }

    /// How many objects there are of each resource that is stored.
    pub(crate) fn stored_objects(&self) -> Vec<(String, usize)> {
        let registry = self.registry();
        let mut counts = std::collections::BTreeMap::new();
        for served in registry
            .groups
            .iter()
            .flat_map(|group| &group.versions)
            .flat_map(|version| version.resources.iter())
        {
            let resource = &served.resource;
            if !resource.verbs.contains(&"list") || &*resource.group == metrics::GROUP {
                continue;
            }
            let name = if resource.group.is_empty() {
                resource.plural.to_string()
            } else {
                format!("{}.{}", resource.plural, resource.group)
            };
            counts.entry(name).or_insert_with(|| self.inner.store.view(&served.collection).len());
        }
        counts.into_iter().collect()
    }

    pub(crate) fn registry(&self) -> Arc<Registry> {
        self.inner.registry.read().clone()
    }

    /// Serves what the stored definitions say now.
    pub(crate) fn reload_definitions(&self) {
        let view = self.inner.store.view(&crd::definitions());
        let definitions: Vec<Value> =
            view.range(None, None).filter_map(|object| serde_json::from_slice(&object.bytes).ok()).collect();
        let registry = Registry::new(&definitions, self.inner.options.pods.is_some(), view.revision());
        let mut current = self.inner.registry.write();
        // Of two that reload at the same time, the one that saw more wins.
        if registry.generation >= current.generation {
            *current = Arc::new(registry);
        }
    }

    async fn answer<B>(self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (parts, body) = request.into_parts();
        let accept = content::negotiate(&parts.headers, true).unwrap_or_default();
        let large_bodies = self.inner.large_bodies.clone();
        let meters = self.inner.meters.clone();
        let begun = Instant::now();
        let mut labels = None;
        let answer = async {
            let route = parse_path(parts.uri.path()).ok_or_else(|| self.lost(parts.uri.path()))?;
            let Route::Objects(target) = route else {
                let reads = matches!(parts.method, Method::GET | Method::HEAD);
                if !reads && !matches!(route, Route::Health { .. }) {
                    return Err(Failure::method_not_allowed());
                }
                if let Route::NodeStats(node) = &route {
                    return self.node_stats(node, accept).await;
                }
                return self.document(&route, &parts);
            };
            let call = Call::new(self, target, parts)?;
            labels = Some(call.labels());
            let bytes = match call.parts.method {
                Method::GET | Method::HEAD => return call.dispatch(Bytes::new()).await,
                _ => content::read_body(body).await?,
            };
            if bytes.len() > LARGE_BODY {
                let turn = large_bodies.acquire_owned().await.map_err(Failure::internal)?;
                let runtime = tokio::runtime::Handle::current();
                let call = move || {
                    let answer = runtime.block_on(call.dispatch(bytes));
                    drop(turn);
                    answer
                };
                return tokio::task::spawn_blocking(call)
                    .await
                    .unwrap_or_else(|error| Err(Failure::internal(error)));
            }
            if !call.has_sequel() {
                return call.dispatch(bytes).await;
            }
            // A client that goes away takes its request's future along, and the store writes all the same. What has to
            // follow the write must not be lost with the client.
            tokio::spawn(call.dispatch(bytes)).await.unwrap_or_else(|error| Err(Failure::internal(error)))
        };
        let response = answer.await.unwrap_or_else(|failure: Failure| {
            if failure.is_plain() {
                return content::respond_text(failure.code, failure.message);
            }
            content::respond_status(failure.code, accept, &failure.status())
        });
        if let Some(labels) = labels {
            meters.answered(&labels, response.status().as_u16(), begun);
        }
        response
    }

    /// The refusal of a path that leads nowhere: within a group it has the form of that group's refusals.
    fn lost(&self, path: &str) -> Failure {
        let mut parts = path.split('/').skip(1);
        let group = match parts.next() {
            Some("api") => "",
            Some("apis") => parts.next().unwrap_or("?"),
            _ => return Failure::nowhere(),
        };
        if self.registry().group(group).is_some() { Failure::no_such_path() } else { Failure::nowhere() }
    }
}

/// What a path names.
#[derive(Debug, PartialEq, Eq)]
enum Route {
    /// `/` lists all paths that are served.
    Paths,
    /// `/version` says which version of Kubernetes is served.
    Version,
    /// `/healthz`, `/livez` or `/readyz`, perhaps with one check's name.
    Health { which: &'static str, check: Option<String> },
    /// `/metrics` has the text of [`MetricsHook`].
    Metrics,
    /// `/openapi/v2` is one document with all types and paths.
    OpenApiV2,
    /// `/openapi/v3` lists the documents of the versions.
    OpenApiV3Index,
    /// `/openapi/v3/apis/G/V`, without the prefix.
    OpenApiV3(String),
    /// `/api` lists the versions of the core group.
    CoreVersions,
    /// `/apis` lists all other groups.
    Groups,
    /// `/apis/G` lists the versions of the group of this name.
    Group(String),
    /// `/api/v1` or `/apis/G/V` lists the resources of a version.
    Resources { group: String, version: String },
    /// `/api/v1/nodes/NAME/proxy/stats/summary` has what the node of this name counts.
    NodeStats(String),
    /// A resource, one of its objects, or what is below that.
    Objects(Target),
    /// The keys that verify service account tokens, and where to find them.
    OpenIdConfiguration,
    /// `/openid/v1/jwks` has the public keys that verify service account tokens.
    Keys,
}

/// A resource, one of its objects, or a subresource of that.
#[derive(Debug, Default, PartialEq, Eq)]
struct Target {
    group: String,
    version: String,
    /// The old `/watch/` prefix was there.
    watch: bool,
    namespace: Option<String>,
    plural: String,
    name: Option<String>,
    subresource: Option<String>,
}

/// Reads a path; `None` when nothing is served there.
fn parse_path(path: &str) -> Option<Route> {
    let path = path.strip_prefix('/').unwrap_or(path);
    let path = path.strip_suffix('/').unwrap_or(path);
    let mut parts = Vec::with_capacity(8);
    for part in path.split('/') {
        parts.push(request::decode(part)?);
    }
    let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
    Some(match parts.as_slice() {
        [""] => Route::Paths,
        ["version"] => Route::Version,
        ["healthz", rest @ ..] => health("healthz", rest)?,
        ["livez", rest @ ..] => health("livez", rest)?,
        ["readyz", rest @ ..] => health("readyz", rest)?,
        ["metrics"] => Route::Metrics,
        ["openapi", "v2"] => Route::OpenApiV2,
        ["openapi", "v3"] => Route::OpenApiV3Index,
        ["openapi", "v3", rest @ ..] => Route::OpenApiV3(rest.join("/")),
        [".well-known", "openid-configuration"] => Route::OpenIdConfiguration,
        ["openid", "v1", "jwks"] => Route::Keys,
        ["api"] => Route::CoreVersions,
        ["apis"] => Route::Groups,
        ["api", version] => Route::Resources { group: String::new(), version: (*version).to_owned() },
        ["apis", group] => Route::Group((*group).to_owned()),
        ["apis", group, version] => {
            Route::Resources { group: (*group).to_owned(), version: (*version).to_owned() }
        }
        ["api", "v1", "nodes", node, "proxy", "stats", "summary"] => Route::NodeStats((*node).to_owned()),
        ["api", version, rest @ ..] => Route::Objects(target("", version, rest)?),
        ["apis", group, version, rest @ ..] => Route::Objects(target(group, version, rest)?),
        _ => return None,
    })
}

fn health(which: &'static str, rest: &[&str]) -> Option<Route> {
    match rest {
        [] => Some(Route::Health { which, check: None }),
        [check] => Some(Route::Health { which, check: Some((*check).to_owned()) }),
        _ => None,
    }
}

fn target(group: &str, version: &str, rest: &[&str]) -> Option<Target> {
    let (watch, rest) = match rest {
        ["watch", rest @ ..] if !rest.is_empty() => (true, rest),
        rest => (false, rest),
    };
    let mut target =
        Target { group: group.to_owned(), version: version.to_owned(), watch, ..Target::default() };
    // `namespaces/x/status` is the namespace's own; `namespaces/x/pods` lies in it.
    let rest = match rest {
        // Without a name it is not all namespaces, but none.
        ["namespaces", namespace, _, ..] if namespace.is_empty() || namespace.contains('/') => return None,
        ["namespaces", namespace, sub @ ("status" | "finalize")] => {
            "namespaces".clone_into(&mut target.plural);
            target.name = Some((*namespace).to_owned());
            target.subresource = Some((*sub).to_owned());
            return Some(target);
        }
        ["namespaces", namespace, plural, rest @ ..] => {
            target.namespace = Some((*namespace).to_owned());
            (*plural).clone_into(&mut target.plural);
            rest
        }
        [plural, rest @ ..] => {
            (*plural).clone_into(&mut target.plural);
            rest
        }
        [] => return None,
    };
    match rest {
        [] => {}
        [name] => target.name = Some((*name).to_owned()),
        [name, subresource] => {
            target.name = Some((*name).to_owned());
            target.subresource = Some((*subresource).to_owned());
        }
        _ => return None,
    }
    if target.plural.is_empty()
        || target.name.as_deref().is_some_and(|name| name.is_empty() || name.contains('/'))
    {
        return None;
    }
    Some(target)
}

impl Call {
    /// The request for what a path names, if that is served and may be asked for this way.
    fn new(api: ApiServer, target: Target, parts: Parts) -> Answer<Call> {
        let registry = api.registry();
        if registry.group(&target.group).is_none() {
            return Err(Failure::nowhere());
        }
        if parts.method == Method::HEAD {
            return Err(Failure::method_not_allowed());
        }
        let found = registry.find(&target.group, &target.version, &target.plural);
        let served = found.ok_or_else(Failure::no_such_path)?.clone();
        let resource = &served.resource;
        let name = target.name.unwrap_or_default();
        if target.namespace.is_some() != resource.namespaced {
            if !resource.namespaced || !name.is_empty() {
                return Err(Failure::no_such_path());
            }
            // Over all namespaces there is only reading.
            if !matches!(parts.method, Method::GET | Method::HEAD) && resource.verbs.contains(&"list") {
                return Err(Failure::method_not_allowed());
            }
        }
        let subresource = match target.subresource {
            None => None,
            Some(wanted) => Some(resource.subresource(&wanted).ok_or_else(Failure::no_such_path)?),
        };
        let mut query = Query::parse(parts.uri.query().unwrap_or_default());
        if target.watch {
            query.set("watch", "true");
        }
        let mut accept = match content::negotiate(&parts.headers, served.resource.built_in) {
            // A log is plain text, and a command's output is nothing at all that HTTP knows.
            Err(_)
                if matches!(
                    subresource,
                    Some(
                        Subresource::Log | Subresource::Exec | Subresource::Attach | Subresource::PortForward
                    )
                ) =>
            {
                Accept::default()
            }
            negotiated => negotiated?,
        };
        accept.pretty = query.flag("pretty");
        let identity = parts.extensions.get::<Identity>().cloned().unwrap_or_else(Identity::in_process);
        let namespace = target.namespace.unwrap_or_default();
        Ok(Self { api, registry, served, namespace, name, subresource, query, accept, parts, identity })
    }

    fn labels(&self) -> ResourceLabels {
        let watch = self.subresource.is_none() && self.query.flag("watch");
        let (named, in_namespace) = (!self.name.is_empty(), !self.namespace.is_empty());
        ResourceLabels::new(
            &self.served.resource,
            self.subresource,
            &self.parts.method,
            named,
            in_namespace,
            watch,
        )
    }

    /// Counts a watch as running.
    pub(crate) fn watching(&self) -> Watching {
        self.api.inner.meters.watching(&self.served.resource, !self.namespace.is_empty())
    }

    async fn dispatch(self, body: Bytes) -> Answer<Response<Body>> {
        if let Some(subresource) = self.subresource {
            return self.subresource(subresource, body).await;
        }
        let allowed = |verb: &str| self.served.resource.verbs.contains(&verb);
        let method = self.parts.method.clone();
        let named = !self.name.is_empty();
        let verb = match method {
            Method::GET | Method::HEAD if !named => "list",
            Method::GET | Method::HEAD => "get",
            Method::POST if !named => "create",
            Method::PUT if named => "update",
            Method::PATCH if named => "patch",
            Method::DELETE if named => "delete",
            Method::DELETE => "deletecollection",
            _ => return Err(Failure::method_not_allowed()),
        };
        if !allowed(verb) {
            return Err(Failure::method_not_allowed());
        }
        match verb {
            "list" | "get" if &*self.served.resource.group == metrics::GROUP => self.usage().await,
            "list" | "get" if self.query.flag("watch") => self.watch().await,
            "list" => self.list().await,
            "get" => self.get(),
            "create" if review::is_review(&self.served.resource) => self.review(&body),
            "create" if &*self.served.resource.kind == "Binding" => self.bind(&body).await,
            "create" => self.create(&body).await,
            "update" => self.update(&body).await,
            "patch" => self.patch(&body).await,
            "delete" => self.delete(&body).await,
            _ => self.delete_collection(&body).await,
        }
    }

    /// The object as it is, or `None`.
    pub(crate) fn current(&self) -> Answer<Arc<crate::store::Object>> {
        let key = self.key(&self.name);
        let found = self.store().get(&key);
        found.ok_or_else(|| {
            let is_quarantined = self.store().is_quarantined(&key);
            let error = if is_quarantined { WriteError::Quarantined } else { WriteError::Missing };
            self.write_failure(&self.name, error)
        })
    }

    pub(crate) fn get(&self) -> Answer<Response<Body>> {
        let object = self.current()?;
        self.presenter()?.respond_stored(200, &object.bytes)
    }
}

impl<B> tower::Service<Request<B>> for ApiServer
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let api = self.clone();
        Box::pin(async move { Ok(api.answer(request).await) })
    }
}

#[cfg(test)]
mod tests;
