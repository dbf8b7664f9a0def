//! A power switch: cuts one life of the components off from API server and driver at any step, before it is done or
//! right after.
//!
//! A step is a write to the API server or a call of the driver, seen from the outside: nothing in the components knows
//! of it. Steps of one kind are counted apart, because components work side by side, and which of two kinds comes first
//! is by chance: whoever goes through all kinds, and counts on until a life ends by itself, has been at every step.

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use berth_apiserver::rest::ApiServer;
use kube::Client;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::service::Routes;
use tower::{ServiceExt as _, service_fn};

/// The power of one life.
#[derive(Clone)]
pub(crate) struct Power {
    shared: Arc<Switch>,
}

struct Switch {
    steps: Mutex<Vec<String>>,
    last: Option<Cut>,
    off: CancellationToken,
}

/// Where the power goes off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cut {
    /// The kind of step.
    pub(crate) step: String,
    /// Which of that kind, counted from 1.
    pub(crate) number: usize,
    /// The step is done, but nobody hears of it.
    pub(crate) done: bool,
}

impl Power {
    /// Goes off at a step.
    pub(crate) fn until(last: Cut) -> Self {
        Self::new(Some(last))
    }

    /// A power that never goes off.
    pub(crate) fn on() -> Self {
        Self::new(None)
    }

    fn new(last: Option<Cut>) -> Self {
        Self { shared: Arc::new(Switch { steps: Mutex::default(), last, off: CancellationToken::new() }) }
    }

    /// Returns when it goes off.
    pub(crate) async fn off(&self) {
        self.shared.off.cancelled().await;
    }

    /// Whether it went off.
    pub(crate) fn is_off(&self) -> bool {
        self.shared.off.is_cancelled()
    }

    /// The steps so far; the last one is the one at which it went off.
    pub(crate) fn steps(&self) -> Vec<String> {
        self.shared.steps.lock().clone()
    }

    /// Counts a step; `Err` if it must not be done, `Ok(true)` if it must be done and not be heard of.
    fn step(&self, what: String) -> Result<bool, ()> {
        let mut steps = self.shared.steps.lock();
        let of_kind = |steps: &[String], kind: &str| steps.iter().filter(|step| *step == kind).count();
        let Some(last) = &self.shared.last else {
            steps.push(what);
            return Ok(false);
        };
        if self.is_off() || of_kind(&steps, &last.step) >= last.number {
            return Err(());
        }
        let is_last = what == last.step && of_kind(&steps, &what) + 1 == last.number;
        steps.push(what);
        if is_last && !last.done {
            self.shared.off.cancel();
            return Err(());
        }
        Ok(is_last)
    }

    /// A client whose writes count as steps; events do not, as nothing depends on them.
    pub(crate) fn client(&self, api: ApiServer) -> Client {
        let power = self.clone();
        let service = service_fn(move |request: http::Request<kube::client::Body>| {
            let (power, api) = (power.clone(), api.clone());
            async move {
                let cut = || Err::<_, tower::BoxError>("the power is off".into());
                let step = match write_of(request.method(), request.uri().path()) {
                    Some(write) => power.step(write),
                    None if power.is_off() => Err(()),
                    None => Ok(false),
                };
                let Ok(unheard) = step else { return cut() };
                // Off also when the caller does not wait for the answer, because a write beside this one failed.
                let _off = unheard.then(|| power.shared.off.clone().drop_guard());
                let answer = api.oneshot(request).await.map_err(tower::BoxError::from)?;
                if unheard {
                    return cut();
                }
                Ok(answer)
            }
        });
        Client::new(service, "default")
    }

    /// A driver's services whose calls count as steps; questions about what the driver is do not.
    pub(crate) fn calls(&self, routes: Routes) -> Routes {
        let power = self.clone();
        let cut = middleware::from_fn(move |request: Request, next: Next| {
            let power = power.clone();
            async move { power.call(request, next).await }
        });
        Routes::from(routes.into_axum_router().layer(cut))
    }

    async fn call(&self, request: Request, next: Next) -> Response {
        let off = || Status::unavailable("the power is off").into_http();
        let (service, method) = request.uri().path().rsplit_once('/').unwrap_or_default();
        let asked = service.ends_with("Identity") || method.ends_with("GetCapabilities");
        let step = if asked { Ok(false) } else { self.step(method.to_owned()) };
        let Ok(unheard) = step else { return off() };
        let _off = unheard.then(|| self.shared.off.clone().drop_guard());
        let answer = next.run(request).await;
        if unheard { off() } else { answer }
    }
}

/// What a request writes: its method and kind, as in `PATCH persistentvolumeclaims/status`.
fn write_of(method: &http::Method, path: &str) -> Option<String> {
    if method == http::Method::GET {
        return None;
    }
    let mut parts = path.trim_start_matches('/').split('/');
    // `api/v1/…` or `apis/group/version/…`.
    let skipped = if parts.next() == Some("api") { 1 } else { 2 };
    let mut parts: Vec<&str> = parts.skip(skipped).collect();
    if parts.len() > 2 && parts[0] == "namespaces" {
        parts.drain(..2);
    }
    let kind = *parts.first()?;
    let status = if parts.last() == Some(&"status") { "/status" } else { "" };
    (kind != "events").then(|| format!("{method} {kind}{status}"))
}
