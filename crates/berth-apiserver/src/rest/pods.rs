//! A pod's log, commands in a pod and its ports, over HTTP: what is asked for is read and checked here, the node does the rest.

mod channels;
mod spdy;

use std::future::ready;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_core::names::DEFAULT_CONTAINER;
use bytes::Bytes;
use futures_util::StreamExt as _;
use http::header::{
    CONNECTION, CONTENT_TYPE, HeaderMap, HeaderName, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_PROTOCOL, UPGRADE,
};
use http::{HeaderValue, Method, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use self::channels::Protocol;
use super::error::{Answer, Failure};
use super::request::{Query, forbidden, not_supported};
use super::{Body, Call};
use crate::pods::{AttachOptions, ExecOptions, LogOptions, LogSource, LogStream, Pods, PodsError};
use crate::resource::{Cause, CauseReason, Subresource};
use crate::rules::read;
use crate::schema::time;

/// What Kubernetes names where no single field is to blame.
const NO_FIELD: &str = "[]";
const SPDY: &str = "SPDY/3.1";
/// What is spoken over SPDY.
const PORT_FORWARD: &str = "portforward.k8s.io";
/// SPDY within a WebSocket.
const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
/// Where a client of SPDY says what it wants to speak over it.
const STREAM_PROTOCOL: HeaderName = HeaderName::from_static("x-stream-protocol-version");
/// How much may wait between the WebSocket and what is within it.
const TUNNEL_BUFFER: usize = 64 << 10;
/// What the client's key is joined with to prove that WebSocket was understood (RFC 6455).
const WEBSOCKET_GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

impl Call {
    /// Serves what only the node of a pod can.
    pub(crate) async fn pod_access(self, subresource: Subresource) -> Answer<Response<Body>> {
        match (subresource, &self.parts.method) {
            (Subresource::Log, &Method::GET) => self.log().await,
            (Subresource::Exec | Subresource::Attach, _) => self.streams(subresource),
            (Subresource::PortForward, _) => self.forward_ports(),
            _ => Err(Failure::method_not_allowed()),
        }
    }

    fn pods(&self, subresource: Subresource) -> Answer<Arc<dyn Pods>> {
        self.api.inner.options.pods.clone().ok_or_else(|| {
            let message =
                format!("this server runs without a node, so it cannot serve a pod's {}", subresource.name());
            Failure::not_implemented(message)
        })
    }

    fn pod(&self) -> Answer<Value> {
        serde_json::from_slice(&self.current()?.bytes).map_err(Failure::internal)
    }

    async fn log(self) -> Answer<Response<Body>> {
        let mut options = log_options(&self.query, &self.name, Timestamp::now())?;
        let pod = self.pod()?;
        options.container = container(self.query.get("container"), &pod)?;
        if read::text(&pod, &["spec", "nodeName"]).is_empty() {
            let mut nothing = Response::new(Empty::new().boxed_unsync());
            *nothing.status_mut() = StatusCode::NO_CONTENT;
            return Ok(nothing);
        }
        let log = self.pods(Subresource::Log)?.logs(&pod, options).await?;
        let end = self.api.inner.options.shutdown.clone().cancelled_owned();
        let mut response = Response::new(log_body(log.take_until(end).boxed()));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        Ok(response)
    }

    /// Runs a command in a container, or joins the one that it runs.
    fn streams(mut self, subresource: Subresource) -> Answer<Response<Body>> {
        let pod = self.pod()?;
        let options = exec_options(&self.query, &pod)?;
        if read::text(&pod, &["spec", "nodeName"]).is_empty() {
            return Err(Failure::bad_request(format!("pod {} does not have a host assigned", self.name)));
        }
        check_runnable(&options, subresource)?;
        let pods = self.pods(subresource)?;
        let key = websocket_key(&self.parts.headers).ok_or_else(not_websocket)?;
        let upgrade = self.parts.extensions.remove::<OnUpgrade>().ok_or_else(not_websocket)?;
        let protocol = protocol(&self.parts.headers)?;
        let shutdown = self.api.inner.options.shutdown.clone();
        tokio::spawn(async move {
            match upgrade.await {
                Ok(upgraded) => {
                    // Only now, so that nothing runs for a client that is gone; a failure is sent on a channel.
                    let session = if subresource == Subresource::Exec {
                        pods.exec(&pod, options).await
                    } else {
                        let ExecOptions { container, stdin, stdout, stderr, .. } = options;
                        pods.attach(&pod, AttachOptions { container, stdin, stdout, stderr }).await
                    };
                    let session = session.map_err(Failure::from);
                    channels::serve(TokioIo::new(upgraded), protocol, session, &shutdown).await;
                }
                Err(error) => tracing::debug!(%error, "a client asked for WebSocket and went away"),
            }
        });
        Ok(switching(&key, protocol.name()))
    }

    /// Connects a client with ports of a pod, over SPDY or over SPDY within a WebSocket.
    fn forward_ports(mut self) -> Answer<Response<Body>> {
        let pod = self.pod()?;
        let phase = read::text(&pod, &["status", "phase"]);
        if phase != "Running" {
            let message =
                format!("unable to forward port because pod is not running. Current status={phase}");
            return Err(Failure::bad_request(message));
        }
        let pods = self.pods(Subresource::PortForward)?;
        let headers = &self.parts.headers;
        let key = websocket_key(headers);
        let offers = |name: HeaderName, wanted: &str| values(headers, name).any(|value| value == wanted);
        let response = match &key {
            Some(key) if offers(SEC_WEBSOCKET_PROTOCOL, TUNNEL) => switching(key, TUNNEL),
            None if wants_upgrade(headers, SPDY) && offers(STREAM_PROTOCOL, PORT_FORWARD) => spdy_switching(),
            _ => return Err(no_port_forward()),
        };
        let upgrade = self.parts.extensions.remove::<OnUpgrade>().ok_or_else(no_port_forward)?;
        let shutdown = self.api.inner.options.shutdown.clone();
        tokio::spawn(async move {
            match upgrade.await {
                Ok(upgraded) if key.is_some() => {
                    let (near, far) = tokio::io::duplex(TUNNEL_BUFFER);
                    tokio::select! {
                        () = channels::tunnel(TokioIo::new(upgraded), far) => {}
                        () = spdy::serve(near, pods, pod, &shutdown) => {}
                    }
                }
                Ok(upgraded) => spdy::serve(TokioIo::new(upgraded), pods, pod, &shutdown).await,
                Err(error) => tracing::debug!(%error, "a client asked for ports and went away"),
            }
        });
        Ok(response)
    }
}

/// The body that a log is sent in; it ends where the log cannot be read on.
fn log_body(log: LogStream) -> Body {
    let frames = log.scan((), |(), piece| {
        ready(match piece {
            Ok(bytes) => Some(Ok(Frame::data(bytes))),
            Err(error) => {
                tracing::warn!(%error, "the log of a pod ended early");
                None
            }
        })
    });
    StreamBody::new(frames).boxed_unsync()
}

fn log_options(query: &Query, name: &str, now: Timestamp) -> Answer<LogOptions> {
    let mut causes = Vec::new();
    let mut at_least = |field: &str, least: i64, why: &str| -> Answer<Option<i64>> {
        let number = query.number(field)?;
        causes.extend(number.filter(|number| *number < least).map(|number| Cause {
            reason: CauseReason::Invalid,
            message: format!("Invalid value: {number}: {why}"),
            field: field.to_owned(),
        }));
        Ok(number)
    };
    let tail_lines = at_least("tailLines", 0, "must be greater than or equal to 0")?;
    let limit_bytes = at_least("limitBytes", 1, "must be greater than 0")?;
    let since = match query.get("sinceTime") {
        None => at_least("sinceSeconds", 1, "must be greater than 0")?
            .and_then(|seconds| now.checked_sub(SignedDuration::from_secs(seconds)).ok()),
        Some(_) if query.number("sinceSeconds")?.is_some() => {
            causes.push(forbidden(NO_FIELD, "at most one of `sinceTime` or `sinceSeconds` may be specified"));
            None
        }
        Some(text) => {
            time::canonical(text).map_err(|error| Failure::bad_request(error.to_string()))?;
            time::parse(text)
        }
    };
    let stream = match query.get("stream") {
        None | Some("All") => LogSource::All,
        Some("Stdout") => LogSource::Stdout,
        Some("Stderr") => LogSource::Stderr,
        Some(other) => {
            causes.push(not_supported("stream", &format!("{other:?}"), &["All", "Stderr", "Stdout"]));
            LogSource::All
        }
    };
    if stream != LogSource::All && tail_lines.is_some() {
        causes.push(forbidden(NO_FIELD, "`tailLines` and specific `stream` are mutually exclusive for now"));
    }
    if !causes.is_empty() {
        return Err(Failure::invalid_kind("", "PodLogOptions", name, &causes));
    }
    let amount = |number: Option<i64>| number.and_then(|number| u64::try_from(number).ok());
    Ok(LogOptions {
        container: String::new(),
        follow: query.flag("follow"),
        previous: query.flag("previous"),
        since,
        tail_lines: amount(tail_lines),
        limit_bytes: amount(limit_bytes),
        timestamps: query.flag("timestamps"),
        stream,
    })
}

fn exec_options(query: &Query, pod: &Value) -> Answer<ExecOptions> {
    let tty = query.flag("tty");
    Ok(ExecOptions {
        container: container(query.get("container"), pod)?,
        command: query.all("command").map(str::to_owned).collect(),
        stdin: query.flag("stdin"),
        stdout: query.flag("stdout"),
        stderr: query.flag("stderr") && !tty,
        tty,
    })
}

fn check_runnable(options: &ExecOptions, subresource: Subresource) -> Answer<()> {
    if options.command.is_empty() && subresource == Subresource::Exec {
        return Err(Failure::bad_request("you must specify at least one command for the container"));
    }
    if !(options.stdin || options.stdout || options.stderr) {
        return Err(Failure::bad_request("you must specify at least 1 of stdin, stdout, stderr"));
    }
    Ok(())
}

/// The container that is meant: the one that is named, the only one, or the pod's default.
fn container(given: Option<&str>, pod: &Value) -> Answer<String> {
    let of = |field| read::items(pod, &["spec", field]).iter().map(|one| read::text(one, &["name"]));
    let all: Vec<&str> =
        of("initContainers").chain(of("containers")).chain(of("ephemeralContainers")).collect();
    let pod_name = read::name(pod);
    if let Some(given) = given {
        return if all.contains(&given) {
            Ok(given.to_owned())
        } else {
            Err(Failure::bad_request(format!("container {given} is not valid for pod {pod_name}")))
        };
    }
    let containers: Vec<&str> = of("containers").collect();
    let default = read::text(pod, &["metadata", "annotations", DEFAULT_CONTAINER]);
    match containers.as_slice() {
        [only] => Ok((*only).to_owned()),
        _ if all.contains(&default) => Ok(default.to_owned()),
        [] => Err(Failure::bad_request(format!("a container name must be specified for pod {pod_name}"))),
        _ => Err(Failure::bad_request(format!(
            "a container name must be specified for pod {pod_name}, choose one of: [{}]",
            all.join(" ")
        ))),
    }
}

fn not_websocket() -> Failure {
    Failure::bad_request(
        "commands in pods are run over WebSocket (v5.channel.k8s.io or v4.channel.k8s.io) on HTTP/1.1 only: use kubectl \
         1.31 or later, or set KUBECTL_REMOTE_COMMAND_WEBSOCKETS=true",
    )
}

/// The values of a header that may hold several.
fn values(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let lines = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim)
}

fn no_port_forward() -> Failure {
    Failure::bad_request(
        "ports are forwarded over SPDY/3.1 (portforward.k8s.io), directly or within a WebSocket, on HTTP/1.1 only",
    )
}

fn wants_upgrade(headers: &HeaderMap, protocol: &str) -> bool {
    let has = |name, wanted: &str| values(headers, name).any(|value| value.eq_ignore_ascii_case(wanted));
    has(CONNECTION, "upgrade") && has(UPGRADE, protocol)
}

/// The key of a client that asks for WebSocket.
fn websocket_key(headers: &HeaderMap) -> Option<String> {
    if !wants_upgrade(headers, "websocket") {
        return None;
    }
    values(headers, SEC_WEBSOCKET_KEY).next().map(str::to_owned)
}

fn protocol(headers: &HeaderMap) -> Answer<Protocol> {
    let offered: Vec<&str> = values(headers, SEC_WEBSOCKET_PROTOCOL).collect();
    offered.iter().find_map(|name| Protocol::named(name)).ok_or_else(|| {
        Failure::bad_request(format!(
            "the client offers the sub-protocols [{}], and this server speaks v5.channel.k8s.io and v4.channel.k8s.io",
            offered.join(", ")
        ))
    })
}

fn switching(key: &str, protocol: &'static str) -> Response<Body> {
    let joined = format!("{key}{WEBSOCKET_GUID}");
    let digest = ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, joined.as_bytes());
    let accept = HeaderValue::from_str(&BASE64.encode(digest)).expect("base64 is fit for a header");
    let mut response = Response::new(Empty::<Bytes>::new().boxed_unsync());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
    headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
    response
}

fn spdy_switching() -> Response<Body> {
    let mut response = Response::new(Empty::<Bytes>::new().boxed_unsync());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(SPDY));
    headers.insert(STREAM_PROTOCOL, HeaderValue::from_static(PORT_FORWARD));
    response
}

impl From<PodsError> for Failure {
    fn from(error: PodsError) -> Self {
        match error {
            PodsError::BadRequest(why) => Self::bad_request(why),
            PodsError::NotFound(why) => Self::absent(why),
            PodsError::Internal(why) => Self::internal(why),
        }
    }
}

#[cfg(test)]
mod tests;
