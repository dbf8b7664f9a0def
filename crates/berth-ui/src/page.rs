//! The web page: one static bundle, a stream of what changes, and answers about one volume, for any cluster or for a recording.
//!
//! ```text
//!  WatchedCluster ──change──▶ ClusterState ──▶ judge ──▶ rows, sections ──what differs──▶ every open page (/api/live)
//!  files of berth up ─┘                                       └▶ /api/volume, /api/flow, /api/landing: made when asked for
//! ```
//!
//! The page never judges: states, words and sentences come from the diagnosis. Nothing is computed while nobody looks. What is sent are the
//! rows and sections that differ from what was sent before, at most a few times a second. Everything goes through `security`.

mod actions;
mod changes;
mod flow;
mod landing;
mod life;
mod recording;
mod sections;
mod security;
mod volume;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use berth_kube::{Cluster, Key};
use futures_util::Stream;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;

use self::changes::Changes;
pub use self::recording::Recording;
use self::security::Gate;
pub use self::security::Token;
use self::volume::{Kept, Parts};
use crate::calls::CallCounts;
use crate::diagnose::{Observed, judge};
use crate::finding::Finding;
use crate::records::{CALLS, CallRecord, STEPS, Step, read_lines_with};
use crate::rows::{self, Row, Table};
use crate::state::ClusterState;
use crate::watched::WatchedCluster;

/// How often is looked again without a change: what only time can show is a finding after a while.
const LOOK: Duration = Duration::from_secs(20);

/// How a page is served.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the header calls the cluster.
    pub name: String,
    /// The token of the link.
    pub token: Token,
    /// Whether viewers may expand, snapshot, clone and delete.
    pub allow_actions: bool,
    /// As whom that is done, in words.
    pub user: String,
    /// Where `berth up` keeps the steps and calls of this cluster, if this machine runs it.
    pub records: Option<PathBuf>,
}

/// The page of one cluster or recording; cheap to clone.
#[derive(Clone)]
pub struct Page {
    inner: Arc<Inner>,
}

enum Source {
    Watched(Arc<WatchedCluster>),
    Recorded(Arc<ClusterState>),
}

struct Inner {
    source: Source,
    options: Options,
    changes: Arc<Mutex<Changes>>,
    calls: Mutex<CallCounts>,
    viewers: watch::Sender<usize>,
    published: Mutex<Published>,
    updates: broadcast::Sender<Arc<Update>>,
}

/// What every open page has.
#[derive(Default)]
struct Published {
    version: u64,
    rows: BTreeMap<String, Arc<str>>,
    sections: BTreeMap<&'static str, Arc<str>>,
}

/// What an open page is told.
struct Update {
    version: u64,
    text: String,
}

/// A cluster at one moment, judged.
struct Judged {
    findings: Vec<Finding>,
    table: Table,
}

impl Page {
    /// The page of a cluster, whose objects are watched from now on. Kinds that may not be read are left out and named; `probe` finds
    /// out which these are, and fails if the API server does not answer.
    pub async fn watch(cluster: &Cluster, options: Options, probe: bool) -> berth_kube::Result<Self> {
        let watched = WatchedCluster::new(cluster, probe).await?;
        let changes = Arc::default();
        changes::note_changes(cluster, watched.unreadable(), &changes);
        Ok(Self::new(Source::Watched(Arc::new(watched)), options, changes))
    }

    /// The page of a recording.
    pub fn recorded(recording: Recording, options: Options) -> Self {
        Self::new(
            Source::Recorded(Arc::new(recording.state)),
            options,
            Arc::new(Mutex::new(recording.changes)),
        )
    }

    fn new(source: Source, options: Options, changes: Arc<Mutex<Changes>>) -> Self {
        let calls = CallCounts::follow(options.records.as_deref());
        let inner = Inner {
            source,
            options,
            changes,
            calls: Mutex::new(calls),
            viewers: watch::channel(0).0,
            published: Mutex::default(),
            updates: broadcast::channel(64).0,
        };
        Self { inner: Arc::new(inner) }
    }

    /// The link that lets a browser in.
    pub fn link(address: SocketAddr, token: &Token) -> String {
        format!("http://{address}/?token={}", token.text())
    }

    /// Serves the page until the shutdown.
    pub async fn serve(self, listener: TcpListener, shutdown: CancellationToken) -> std::io::Result<()> {
        let gate =
            Arc::new(Gate { token: self.inner.options.token.clone(), address: listener.local_addr()? });
        let running = tokio::spawn(self.clone().run(shutdown.clone()));
        let state = Served { page: self, shutdown: shutdown.clone() };
        let router = Router::new()
            .route(
                "/",
                get(|| async { file("text/html; charset=utf-8", include_str!("page/assets/index.html")) }),
            )
            .route(
                "/page.js",
                get(|| async { file("text/javascript; charset=utf-8", include_str!("page/assets/page.js")) }),
            )
            .route(
                "/page.css",
                get(|| async { file("text/css; charset=utf-8", include_str!("page/assets/page.css")) }),
            )
            .route("/api/live", get(live))
            .route("/api/volume", get(one_volume))
            .route("/api/flow", get(one_flow))
            .route("/api/landing", get(landing_place))
            .route("/api/act", post(act))
            .with_state(state)
            .layer(axum::middleware::from_fn_with_state(gate, security::guard));
        let served =
            axum::serve(listener, router).with_graceful_shutdown(shutdown.clone().cancelled_owned()).await;
        running.abort();
        served
    }

    /// Publishes what changes while somebody looks at the page.
    async fn run(self, shutdown: CancellationToken) {
        let mut viewers = self.inner.viewers.subscribe();
        while !shutdown.is_cancelled() {
            tokio::select! {
                seen = viewers.wait_for(|count| *count > 0) => if seen.is_err() { return },
                () = shutdown.cancelled() => return,
            }
            tokio::select! {
                () = self.publish_changes() => {}
                _ = viewers.wait_for(|count| *count == 0) => {}
                () = shutdown.cancelled() => return,
            }
            if let Source::Watched(watched) = &self.inner.source {
                watched.pause();
            }
        }
    }

    async fn publish_changes(&self) {
        let inner = self.inner.clone();
        match &self.inner.source {
            Source::Watched(watched) => {
                watched.resume(|progress| self.inner.loading(&progress)).await;
                watched.follow(LOOK, move || inner.refresh()).await;
            }
            Source::Recorded(_) => {
                let _ = tokio::task::spawn_blocking(move || inner.refresh()).await;
                std::future::pending::<()>().await;
            }
        }
    }
}

impl Inner {
    /// Tells how far the first lists are.
    fn loading(&self, progress: &[(String, bool, usize)]) {
        let text = json!({ "loading": progress, "now": Timestamp::now().as_millisecond() }).to_string();
        let version = self.published.lock().version;
        let _ = self.updates.send(Arc::new(Update { version: version + 1, text }));
    }

    /// The cluster as it is now.
    fn state(&self) -> ClusterState {
        match &self.source {
            Source::Watched(watched) => watched.state(),
            Source::Recorded(state) => ClusterState::clone(state),
        }
    }

    fn judged(observed: &Observed<'_>) -> Judged {
        let findings = judge(observed);
        let table = rows::table(observed, &findings);
        Judged { findings, table }
    }

    /// Looks at everything, and tells what differs from what was told before.
    fn refresh(&self) {
        let state = self.state();
        let observed = Observed::new(&state);
        let Judged { findings, table } = Self::judged(&observed);
        let mut sections = {
            let mut calls = self.calls.lock();
            calls.read_on();
            sections::all(&observed, &findings, &table, &calls)
        };
        sections.insert("about", self.about(&state));
        sections.insert("flows", self.flows(&table.rows));
        sections.insert("recent", recent(&self.changes.lock()));
        let lost = match &self.source {
            Source::Watched(watched) => watched.lost(),
            Source::Recorded(_) => None,
        };
        sections.insert(
            "lost",
            json!(lost.map(|(since, why)| json!({ "since": since.as_millisecond(), "why": why }))),
        );
        self.publish(&state, &table.rows, &sections);
    }

    fn about(&self, state: &ClusterState) -> Value {
        json!({
            "name": self.options.name,
            "actions": self.options.allow_actions && matches!(self.source, Source::Watched(_)),
            "user": self.options.user,
            "recorded": if matches!(self.source, Source::Recorded(_)) { json!(state.now.as_millisecond()) } else { Value::Null },
            "version": env!("CARGO_PKG_VERSION"),
        })
    }

    fn flows(&self, rows: &[Row]) -> Value {
        let choices = flow::choices(&self.changes.lock());
        let choice = |(claim, time): (Key, Timestamp)| {
            let id = claim.to_string();
            let row = rows.iter().find(|row| row.id == id);
            json!({ "id": id, "at": time.as_millisecond(), "state": row.map_or("gone", |row| row.state.0) })
        };
        Value::Array(choices.into_iter().map(choice).collect())
    }

    fn publish(&self, state: &ClusterState, rows: &[Row], sections: &BTreeMap<&'static str, Value>) {
        let text = |value: &Value| -> Arc<str> { value.to_string().into() };
        let rows: BTreeMap<String, Arc<str>> = rows
            .iter()
            .filter_map(|row| Some((row.id.clone(), serde_json::to_string(row).ok()?.into())))
            .collect();
        let sections: BTreeMap<&'static str, Arc<str>> =
            sections.iter().map(|(name, value)| (*name, text(value))).collect();
        let mut published = self.published.lock();
        let new = |(id, row): &(&String, &Arc<str>)| published.rows.get(*id) != Some(*row);
        let changed: Vec<&str> = rows.iter().filter(new).map(|(_, row)| &**row).collect();
        let gone: Vec<&String> = published.rows.keys().filter(|id| !rows.contains_key(*id)).collect();
        let differs =
            |(name, value): &(&&'static str, &Arc<str>)| published.sections.get(*name) != Some(*value);
        let parts: Vec<_> = sections.iter().filter(differs).collect();
        if changed.is_empty() && gone.is_empty() && parts.is_empty() && published.version > 0 {
            return;
        }
        let version = published.version + 1;
        let body = message(
            version,
            published.version == 0,
            state.now,
            &changed,
            &gone,
            parts.into_iter().map(|(name, value)| (*name, value)),
        );
        *published = Published { version, rows, sections };
        // Nobody listens if the last viewer has just left.
        let _ = self.updates.send(Arc::new(Update { version, text: body }));
    }

    /// Everything that was published, for a page that has just been opened.
    fn everything(&self) -> Update {
        let published = self.published.lock();
        let rows: Vec<&str> = published.rows.values().map(|row| &**row).collect();
        if published.version == 0 {
            let progress = match &self.source {
                Source::Watched(watched) => watched.progress(),
                Source::Recorded(_) => Vec::new(),
            };
            let text = json!({ "loading": progress, "now": Timestamp::now().as_millisecond() }).to_string();
            return Update { version: 0, text };
        }
        let sections = published.sections.iter().map(|(name, value)| (*name, value));
        Update {
            version: published.version,
            text: message(published.version, true, self.now(), &rows, &[], sections),
        }
    }

    fn now(&self) -> Timestamp {
        match &self.source {
            Source::Recorded(state) => state.now,
            Source::Watched(_) => Timestamp::now(),
        }
    }

    /// The steps and calls that `berth up` keeps of a volume.
    fn kept(&self, parts: &Parts<'_>) -> Kept {
        let Some(directory) = &self.options.records else {
            return Kept { known: false, steps: Vec::new(), calls: Vec::new() };
        };
        let names = parts.names();
        let steps = read_lines_with::<Step>(directory.join(STEPS), |line| {
            names.iter().any(|name| line.contains(name))
        });
        let steps = steps.filter(|step| parts.concerns(step)).collect();
        let quoted = parts.quoted();
        // In a line of JSON, quotes are escaped.
        let escaped: Vec<String> = quoted.iter().map(|name| name.trim_matches('"').to_owned()).collect();
        let calls = read_lines_with::<CallRecord>(directory.join(CALLS), |line| {
            escaped.iter().any(|name| line.contains(name))
        });
        let calls = calls.filter(|call| call.concerns(&quoted)).collect();
        Kept { known: true, steps, calls }
    }

    fn volume(&self, id: &str) -> Option<Value> {
        let state = self.state();
        let observed = Observed::new(&state);
        let parts = Parts::of(&observed, id)?;
        let Judged { findings, table } = Self::judged(&observed);
        let row = table.rows.iter().find(|row| row.id == id)?;
        let mut detail = volume::detail(&observed, &findings, row, &parts, &self.kept(&parts));
        let (namespace, name) = id.split_once('/').unwrap_or_default();
        let key = Key::new(namespace, name);
        let (usage, rate) = match &self.source {
            Source::Watched(watched) => watched.history(&key),
            Source::Recorded(_) => (json!([]), None),
        };
        detail["usage"] = usage;
        detail["rate"] = json!(rate);
        detail["now"] = json!(state.now.as_millisecond());
        Some(detail)
    }

    fn flow(&self, id: &str) -> Value {
        let state = self.state();
        let observed = Observed::new(&state);
        let (namespace, name) = id.split_once('/').unwrap_or_default();
        let claim = Key::new(namespace, name);
        let Some(parts) = Parts::of(&observed, id) else {
            let subject = flow::Subject {
                claim: &claim,
                volume: "",
                class: "",
                driver: "",
                pod: "",
                node: "",
                stuck: false,
            };
            return flow::flow(&subject, &self.changes.lock(), &[]);
        };
        let table = rows::table(&observed, &judge(&observed));
        let row = table.rows.into_iter().find(|row| row.id == id).unwrap_or_default();
        let steps = self.kept(&parts).steps;
        let subject = flow::Subject {
            claim: &claim,
            volume: &row.pv,
            class: &row.cls,
            driver: &row.driver,
            pod: &row.pod,
            node: &row.node,
            stuck: row.trouble.is_some(),
        };
        flow::flow(&subject, &self.changes.lock(), &steps)
    }
}

/// The last changes, the newest first, for the overview.
fn recent(changes: &Changes) -> Value {
    let told = changes.iter().rev().filter(|change| change.set.is_some() && !change.claims.is_empty());
    let line = |change: &changes::Change| {
        let shape = change.set.as_ref().map_or("off", |(_, shape, _)| *shape);
        json!({ "at": change.time.as_millisecond(), "id": change.claims[0].to_string(), "state": shape, "what": change.what, "say": change.say })
    };
    Value::Array(told.take(8).map(line).collect())
}

/// One message of the stream.
fn message<'a>(
    version: u64,
    all: bool,
    now: Timestamp,
    rows: &[&str],
    gone: &[&String],
    sections: impl Iterator<Item = (&'static str, &'a Arc<str>)>,
) -> String {
    let sections: Vec<String> = sections.map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!(
        "{{\"version\":{version},\"all\":{all},\"now\":{},\"rows\":[{}],\"gone\":{},\"sections\":{{{}}}}}",
        now.as_millisecond(),
        rows.join(","),
        json!(gone),
        sections.join(",")
    )
}

/// What the handlers of requests share.
#[derive(Clone)]
struct Served {
    page: Page,
    shutdown: CancellationToken,
}

/// Counts somebody who looks.
struct Viewer(Arc<Inner>);

impl Viewer {
    fn come(inner: &Arc<Inner>) -> Self {
        inner.viewers.send_modify(|count| *count += 1);
        Self(inner.clone())
    }
}

impl Drop for Viewer {
    fn drop(&mut self) {
        self.0.viewers.send_modify(|count| *count -= 1);
    }
}

fn file(kind: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, kind)], text).into_response()
}

async fn live(State(served): State<Served>) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    struct Following {
        updates: broadcast::Receiver<Arc<Update>>,
        viewer: Viewer,
        known: Option<u64>,
        shutdown: CancellationToken,
    }
    let inner = served.page.inner;
    let updates = inner.updates.subscribe();
    let following =
        Following { updates, viewer: Viewer::come(&inner), known: None, shutdown: served.shutdown };
    let stream = futures_util::stream::unfold(following, |mut at| async move {
        if at.known.is_none() {
            let all = at.viewer.0.everything();
            at.known = Some(all.version);
            return Some((Ok(Event::default().data(all.text)), at));
        }
        loop {
            let update = tokio::select! {
                update = at.updates.recv() => update,
                () = at.shutdown.cancelled() => return None,
            };
            match update {
                Ok(update) if at.known.is_some_and(|known| update.version > known) => {
                    // How far a first list is has no version of its own.
                    if !update.text.starts_with("{\"loading\"") {
                        at.known = Some(update.version);
                    }
                    return Some((Ok(Event::default().data(update.text.clone())), at));
                }
                Ok(_) => {}
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    let all = at.viewer.0.everything();
                    at.known = Some(all.version);
                    return Some((Ok(Event::default().data(all.text)), at));
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    });
    Sse::new(stream).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

#[derive(Deserialize)]
struct ById {
    id: String,
}

fn answer(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// Runs what may take long outside of the threads that serve.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, StatusCode> {
    tokio::task::spawn_blocking(work).await.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

async fn one_volume(State(served): State<Served>, Query(ask): Query<ById>) -> Result<Response, StatusCode> {
    let inner = served.page.inner;
    let found = aside(move || inner.volume(&ask.id)).await?;
    Ok(found.map_or_else(|| StatusCode::NOT_FOUND.into_response(), |found| answer(&found)))
}

async fn one_flow(State(served): State<Served>, Query(ask): Query<ById>) -> Result<Response, StatusCode> {
    let inner = served.page.inner;
    Ok(answer(&aside(move || inner.flow(&ask.id)).await?))
}

#[derive(Deserialize)]
struct Landing {
    class: String,
    /// The size that is asked for, in GiB.
    size: u32,
}

async fn landing_place(
    State(served): State<Served>,
    Query(ask): Query<Landing>,
) -> Result<Response, StatusCode> {
    let inner = served.page.inner;
    let found = aside(move || {
        let state = inner.state();
        let question = landing::Question { class: &ask.class, size: i128::from(ask.size) << 30 };
        landing::answer(&Observed::new(&state), &question)
    });
    Ok(answer(&found.await?))
}

async fn act(State(served): State<Served>, body: String) -> Response {
    let inner = served.page.inner;
    let refused = |status: u16, why: &str| {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
        (status, [(CONTENT_TYPE, "application/json")], json!({ "error": why }).to_string()).into_response()
    };
    let Source::Watched(watched) = &inner.source else {
        return refused(403, "This is a recording: nothing can be changed.");
    };
    if !inner.options.allow_actions {
        return refused(403, "The page is read-only: berth was started without --allow-actions.");
    }
    let action = match serde_json::from_str::<actions::Action>(&body) {
        Ok(action) => action,
        Err(error) => return refused(400, &error.to_string()),
    };
    match actions::act(&watched.cluster, &action).await {
        Ok(said) => answer(&json!({ "said": said })),
        Err((status, why)) => refused(status, &why),
    }
}

#[cfg(test)]
mod tests;
