//! Watch: a stream of events that takes from the store only what its reader takes from it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use berth_core::names::{INITIAL_EVENTS_END, META_V1};
use bytes::Bytes;
use http::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::content::{Accept, Format, Shape};
use super::content::{Include, Presenter, from_store};
use super::error::{Answer, Failure};
use super::list::{Filter, parse_version};
use super::registry::Served;
use super::request::{forbidden, not_supported};
use super::{ApiServer, Body, Call};
use crate::metrics::Watching;
use crate::resource::Cause;
use crate::schema::{self, Type, protobuf};
use crate::store::{Event, EventKind, Expired, Object, Watch};

const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// The last bookmark comes so long before the end.
const BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);
const SHORTEST: u64 = 1800;
/// As long as a watch may want to go on: a year.
const LONGEST: u64 = 365 * 24 * 3600;
/// Initial events are sent in pieces of about this size.
const PIECE: usize = 256 * 1024;
const VERSION_TIMEOUT: Duration = Duration::from_secs(3);

/// All that a running watch needs.
struct Stream {
    api: ApiServer,
    served: Arc<Served>,
    filter: Filter,
    namespace: Option<String>,
    accept: Accept,
    include: Include,
    phase: Phase,
    bookmarks: bool,
    /// Whether the end of the initial events is marked.
    mark_initial: bool,
    /// Whether a table's columns were sent.
    columns_sent: bool,
    next_bookmark: Instant,
    deadline: Instant,
    watching: Watching,
}

enum Phase {
    /// The state at this revision, after this namespace and name.
    Initial {
        revision: u64,
        after: Option<(Arc<str>, Arc<str>)>,
    },
    Live(Watch),
    /// Why it cannot even begin, sent as an event: clients list anew for that, but not for a plain refusal.
    Refused(Failure),
    Over,
}

impl Call {
    pub(crate) async fn watch(&self) -> Answer<Response<Body>> {
        let filter = self.filter()?;
        let presenter = self.presenter()?;
        let causes = self.watch_causes();
        if !causes.is_empty() {
            return Err(Failure::invalid_options("ListOptions", &causes));
        }
        let phase = self.first_phase().await?;
        let seconds = match self.query.number("timeoutSeconds")? {
            Some(seconds) if seconds > 0 => u64::try_from(seconds).unwrap_or(SHORTEST).min(LONGEST),
            // Not all at once: watches that began together should not end together.
            _ => SHORTEST + crate::auth::random::<1>().map_or(0, |[byte]| u64::from(byte) * 7),
        };
        let now = Instant::now();
        let deadline = now + Duration::from_secs(seconds);
        let bookmarks = self.query.flag("allowWatchBookmarks");
        let stream = Stream {
            api: self.api.clone(),
            served: self.served.clone(),
            filter,
            namespace: self.namespace_filter().map(str::to_owned),
            accept: self.accept,
            include: presenter.include,
            phase,
            bookmarks,
            mark_initial: bookmarks && self.query.flag_if_given("sendInitialEvents") == Some(true),
            columns_sent: false,
            next_bookmark: next_bookmark(now, deadline),
            deadline,
            watching: self.watching(),
        };
        let media = match self.accept.format {
            Format::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
            Format::Json | Format::Yaml => "application/json",
        };
        let mut response =
            Response::new(Unfold { step: None, stream: Some(Box::new(stream)) }.boxed_unsync());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(media));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        Ok(response)
    }

    async fn first_phase(&self) -> Answer<Phase> {
        let store = self.store();
        let version = self.query.get("resourceVersion");
        let initial = self.query.flag_if_given("sendInitialEvents");
        let wanted = version.map_or(Ok(0), parse_version).map_err(|why| Failure::plain(500, why))?;
        let patience = self.query.number("timeoutSeconds")?.and_then(|seconds| u64::try_from(seconds).ok());
        let patience = patience.map_or(VERSION_TIMEOUT, Duration::from_secs);
        if wanted > store.revision() && !store.wait_for(wanted, patience.min(VERSION_TIMEOUT)).await {
            // The watch was over before its beginning came.
            if patience < VERSION_TIMEOUT {
                return Ok(Phase::Over);
            }
            return Err(Failure::too_large_version(wanted, store.revision()));
        }
        let from_state = match initial {
            Some(initial) => initial,
            None => wanted == 0,
        };
        if from_state {
            return Ok(Phase::Initial { revision: store.revision(), after: None });
        }
        let after = if wanted == 0 { store.revision() } else { wanted };
        match store.watch(&self.served.collection, after) {
            Ok(watch) => Ok(Phase::Live(watch)),
            Err(expired) => Ok(Phase::Refused(too_old(expired))),
        }
    }

    fn watch_causes(&self) -> Vec<Cause> {
        let field = "resourceVersionMatch";
        let matching = self.query.get("resourceVersionMatch");
        let initial = self.query.flag_if_given("sendInitialEvents").is_some();
        let mut causes = Vec::new();
        if initial && matching != Some("NotOlderThan") {
            let why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
            causes.push(forbidden(field, why));
        }
        if let Some(matching) = matching {
            if !initial {
                let why = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
                causes.push(forbidden(field, why));
            }
            if matching != "NotOlderThan" {
                causes.push(not_supported(field, &format!("{matching:?}"), &["NotOlderThan"]));
            }
            if self.query.get("continue").is_some() {
                causes.push(forbidden(field, "resourceVersionMatch is forbidden when continue is provided"));
            }
        }
        causes
    }
}

fn too_old(expired: Expired) -> Failure {
    Failure::expired(format!("too old resource version: {} ({})", expired.requested, expired.oldest))
}

fn next_bookmark(now: Instant, deadline: Instant) -> Instant {
    let regular = now + BOOKMARK_EVERY;
    let last = deadline.checked_sub(BOOKMARK_BEFORE_END).unwrap_or(deadline);
    // The last one comes near the end, unless that is now.
    if now < last { regular.min(last) } else { deadline + BOOKMARK_EVERY }
}

impl Stream {
    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let bytes = match &mut self.phase {
                Phase::Over => return None,
                Phase::Refused(failure) => {
                    let failure = failure.clone();
                    self.end(&failure)
                }
                Phase::Initial { revision, after } => {
                    let (revision, after) = (*revision, after.take());
                    self.initial(revision, after.as_ref())
                }
                Phase::Live(watch) => {
                    let shutdown = &self.api.inner.options.shutdown;
                    tokio::select! {
                        biased;
                        () = sleep_until(self.deadline) => return None,
                        () = shutdown.cancelled() => return None,
                        events = watch.next() => match events {
                            Ok(events) => self.events(&events),
                            Err(expired) => self.end(&too_old(expired)),
                        },
                        () = sleep_until(self.next_bookmark), if self.bookmarks => {
                            let revision = watch.revision();
                            self.next_bookmark = next_bookmark(Instant::now(), self.deadline);
                            self.bookmark(revision, false)
                        }
                    }
                }
            };
            if !bytes.is_empty() {
                return Some(bytes.into());
            }
        }
    }

    fn presenter(&self) -> Presenter<'_> {
        Presenter { served: &self.served, accept: self.accept, include: self.include }
    }

    /// A piece of the state at a revision. The view is not kept: a slow reader holds nothing.
    fn initial(&mut self, revision: u64, after: Option<&(Arc<str>, Arc<str>)>) -> Vec<u8> {
        let view = match self.api.inner.store.view_at(&self.served.collection, revision) {
            Ok(view) => view,
            Err(expired) => return self.end(&too_old(expired)),
        };
        let mut bytes = Vec::new();
        let after = after.map(|(namespace, name)| (&**namespace, &**name));
        for object in view.range(self.namespace.as_deref(), after) {
            if self.filter.matches(&self.served, object) {
                self.line(&mut bytes, "ADDED", object);
            }
            if bytes.len() >= PIECE {
                let after = Some((object.key.namespace.clone(), object.key.name.clone()));
                self.phase = Phase::Initial { revision, after };
                return bytes;
            }
        }
        match self.api.inner.store.watch(&self.served.collection, revision) {
            Ok(watch) => self.phase = Phase::Live(watch),
            Err(expired) => {
                bytes.extend(self.end(&too_old(expired)));
                return bytes;
            }
        }
        if self.mark_initial {
            bytes.extend(self.bookmark(revision, true));
        }
        bytes
    }

    fn events(&mut self, events: &[Arc<Event>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for event in events {
            let in_namespace =
                self.namespace.as_deref().is_none_or(|namespace| namespace == &*event.object.key.namespace);
            if in_namespace {
                self.event(&mut bytes, event);
            }
        }
        bytes
    }

    /// One event; an object that begins or ceases to be wanted is added or deleted for this reader.
    fn event(&mut self, bytes: &mut Vec<u8>, event: &Event) {
        let wanted = |object: &Object| self.filter.matches(&self.served, object);
        let before = event.previous.as_deref().is_some_and(wanted);
        let after = event.kind != EventKind::Deleted && wanted(&event.object);
        let type_ = match (before, after) {
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
            (false, false) => return,
        };
        match &event.previous {
            // For this reader the object goes as it knew it, but at the version of the change.
            Some(previous) if type_ == "DELETED" && event.kind != EventKind::Deleted => {
                let mut value: Value = serde_json::from_slice(&previous.bytes).unwrap_or_default();
                value["metadata"]["resourceVersion"] = event.revision.to_string().into();
                let object = Object {
                    key: previous.key.clone(),
                    revision: event.revision,
                    bytes: value.to_string().into(),
                };
                self.line(bytes, type_, &object);
            }
            _ => self.line(bytes, type_, &event.object),
        }
    }

    fn line(&mut self, bytes: &mut Vec<u8>, type_: &str, object: &Object) {
        self.watching.events.inc();
        if self.accept.format == Format::Protobuf {
            let mut value: Value = serde_json::from_slice(&object.bytes).unwrap_or_default();
            from_store(&self.served, &mut value);
            return frame(bytes, type_, &protobuf::encode(&self.served.schema, &value).unwrap_or_default());
        }
        bytes.extend_from_slice(b"{\"type\":\"");
        bytes.extend_from_slice(type_.as_bytes());
        bytes.extend_from_slice(b"\",\"object\":");
        if self.presenter().is_plain() {
            bytes.extend_from_slice(&object.bytes);
        } else {
            let value: Value = serde_json::from_slice(&object.bytes).unwrap_or_default();
            let shown = self.presenter().event(value, !self.columns_sent);
            self.columns_sent = true;
            // Writing JSON values to memory does not fail.
            let _ = serde_json::to_writer(&mut *bytes, &shown);
        }
        bytes.extend_from_slice(b"}\n");
    }

    fn bookmark(&self, revision: u64, initial_end: bool) -> Vec<u8> {
        let mut metadata = json!({ "resourceVersion": revision.to_string() });
        if initial_end {
            metadata["annotations"] = json!({ INITIAL_EVENTS_END: "true" });
        }
        let (kind, api_version) = match self.accept.shape {
            Shape::Table => ("Table", META_V1),
            Shape::PartialMetadata | Shape::PartialMetadataList => ("PartialObjectMetadata", META_V1),
            Shape::Object | Shape::Discovery => {
                (&*self.served.resource.kind, self.served.api_version.as_str())
            }
        };
        let mut object = json!({ "kind": kind, "apiVersion": api_version, "metadata": metadata });
        if self.accept.shape == Shape::Table {
            let inner =
                json!({ "kind": "PartialObjectMetadata", "apiVersion": api_version, "metadata": metadata });
            object["metadata"] = json!({ "resourceVersion": revision.to_string() });
            object["columnDefinitions"] = Value::Null;
            object["rows"] = json!([{ "cells": [], "object": inner }]);
        }
        self.special("BOOKMARK", &self.served.schema, &object)
    }

    /// Says why the watch ends.
    fn end(&mut self, failure: &Failure) -> Vec<u8> {
        self.phase = Phase::Over;
        let type_ = schema::built_in_type("meta.Status").unwrap_or_default();
        self.special("ERROR", &type_, &failure.status())
    }

    /// An event whose object is not from the store.
    fn special(&self, type_: &str, schema: &Type, object: &Value) -> Vec<u8> {
        if self.accept.format != Format::Protobuf {
            return format!("{{\"type\":\"{type_}\",\"object\":{object}}}\n").into_bytes();
        }
        let mut bytes = Vec::new();
        frame(&mut bytes, type_, &protobuf::encode(schema, object).unwrap_or_default());
        bytes
    }
}

/// An event as protobuf: its length in four bytes, then `WatchEvent { type = 1, object = 2 { raw = 1 } }`.
fn frame(bytes: &mut Vec<u8>, type_: &str, object: &[u8]) {
    let mut raw = Vec::with_capacity(object.len() + 8);
    delimited(&mut raw, 1, object);
    let mut event = Vec::with_capacity(raw.len() + 24);
    delimited(&mut event, 1, type_.as_bytes());
    delimited(&mut event, 2, &raw);
    bytes.extend_from_slice(&u32::try_from(event.len()).unwrap_or(u32::MAX).to_be_bytes());
    bytes.extend_from_slice(&event);
}

fn delimited(bytes: &mut Vec<u8>, field: u8, content: &[u8]) {
    bytes.push(field << 3 | 2);
    let mut length = content.len();
    while length >= 0x80 {
        bytes.push(u8::try_from(length & 0x7f).unwrap_or(0) | 0x80);
        length >>= 7;
    }
    bytes.push(u8::try_from(length).unwrap_or(0));
    bytes.extend_from_slice(content);
}

type Step = Pin<Box<dyn Future<Output = (Box<Stream>, Option<Bytes>)> + Send>>;

/// A body that makes its next piece only when it is asked for one.
struct Unfold {
    step: Option<Step>,
    stream: Option<Box<Stream>>,
}

impl HttpBody for Unfold {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(mut stream) = self.stream.take() {
            self.step = Some(Box::pin(async move {
                let bytes = stream.next().await;
                (stream, bytes)
            }));
        }
        let Some(step) = self.step.as_mut() else { return Poll::Ready(None) };
        let Poll::Ready((stream, bytes)) = step.as_mut().poll(context) else { return Poll::Pending };
        self.step = None;
        let Some(bytes) = bytes else { return Poll::Ready(None) };
        self.stream = Some(stream);
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }
}
