//! What happens around every call, whether it comes over a socket or from within the process.
//!
//! Guarantees:
//! - A handler that was started runs to its end, in a task of its own: neither a client that goes away nor a
//!   deadline drops it halfway, so what it locked stays locked until the work is really done.
//! - A caller waits no longer than its `grpc-timeout` or the configured maximum, whichever is shorter.
//! - One log line and one observation in the metrics per call, when it is finished: a unary call when its
//!   handler is, a stream when its last frame is sent or the client went away.
//! - A panic is answered with INTERNAL (where panics unwind; a binary built to abort on panic ends).

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use tokio::task::JoinError;
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;
use tonic::Status;
use tonic::body::Body;
use tonic::service::Routes;
use tower::{Layer, Service};
use tracing::{Instrument, Span};

use self::finish::Call;
use self::stream::Watched;
use crate::Metrics;
use crate::full::{self, Side};
use crate::v1::METHODS;

mod finish;
mod stream;

/// The layer around every call; clones share the numbering, the metrics and the list of calls under way.
#[derive(Clone, Debug)]
pub struct CallLayer {
    shared: Arc<Shared>,
}

/// `Routes` with the layer around them: a channel for the generated clients that needs no socket.
#[derive(Clone, Debug)]
pub struct Calls {
    routes: Routes,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    metrics: Metrics,
    max_duration: Option<Duration>,
    last_id: AtomicU64,
    under_way: TaskTracker,
}

/// When the caller of a request stops waiting; among the request's extensions where it does.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(pub Instant);

impl CallLayer {
    /// A layer that lets no caller wait longer than `max_duration`, if there is one.
    pub fn new(metrics: Metrics, max_duration: Option<Duration>) -> Self {
        let under_way = TaskTracker::new();
        // Closed only lets `idle` return; calls may still begin afterwards.
        under_way.close();
        Self { shared: Arc::new(Shared { metrics, max_duration, last_id: AtomicU64::new(0), under_way }) }
    }

    /// Waits until no call is under way, counting those whose callers no longer wait.
    pub async fn idle(&self) {
        self.shared.under_way.wait().await;
    }
}

impl Layer<Routes> for CallLayer {
    type Service = Calls;

    fn layer(&self, routes: Routes) -> Calls {
        Calls { routes, shared: self.shared.clone() }
    }
}

impl Service<Request<Body>> for Calls {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<Body>>::poll_ready(&mut self.routes, context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let id = self.shared.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let rpc = rpc_of(path);
        // At the level of errors, so that whatever is logged within says which call it belongs to.
        let span = tracing::error_span!("call", rpc, id);
        let call = Call::begin(self.shared.clone(), path, span.clone());
        // Now and not in the future below: tonic's server starts a timer for the same header after this returns, and
        // would answer CANCELLED if that were the first to fire.
        let deadline = deadline_of(request.headers(), self.shared.max_duration);
        let streams = METHODS.iter().find(|(known, _)| *known == path).is_none_or(|(_, streams)| *streams);
        let in_full = (!streams && full::is_wanted()).then(|| path.to_owned());
        if let Some(deadline) = deadline {
            request.extensions_mut().insert(Deadline(deadline));
        }
        if let Some(path) = in_full {
            let routes = self.routes.clone();
            let driver = self.shared.metrics.driver_name().to_owned();
            let handler = handle_in_full(routes, request, path, driver);
            let task = tokio::spawn(run(call, handler, streams, deadline).instrument(span.clone()));
            return Box::pin(answer(task, deadline, span));
        }
        let handler = self.routes.call(request);
        let task = tokio::spawn(run(call, handler, streams, deadline).instrument(span.clone()));
        Box::pin(answer(task, deadline, span))
    }
}

/// Awaits the handler and settles what the call came to.
async fn run(
    call: Call,
    handler: impl Future<Output = Result<Response<Body>, Infallible>>,
    streams: bool,
    deadline: Option<Instant>,
) -> Response<Body> {
    let Ok(response) = handler.await;
    // An error without a message has its status in the headers: there will be no trailers.
    if let Some(status) = Status::from_header_map(response.headers()) {
        call.finish(&status);
        return response;
    }
    let (parts, body) = response.into_parts();
    if streams {
        return Response::from_parts(parts, Body::new(Watched::new(call, body, deadline)));
    }
    // One message and its trailers, all there already. Read here, they count even if nobody waits any more.
    match body.collect().await {
        Ok(collected) => {
            let status = collected.trailers().and_then(Status::from_header_map);
            call.finish(&status.unwrap_or_else(|| Status::ok("")));
            Response::from_parts(parts, Body::new(collected))
        }
        Err(status) => {
            call.finish(&status);
            status.into_http()
        }
    }
}

/// Calls the handler of a unary call, and emits request and answer in full.
async fn handle_in_full(
    mut routes: Routes,
    request: Request<Body>,
    path: String,
    driver: String,
) -> Result<Response<Body>, Infallible> {
    let began = Instant::now();
    let (parts, body) = request.into_parts();
    let frame = match body.collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(status) => return Ok(status.into_http()),
    };
    let body = Body::new(Full::new(frame.clone()));
    let response = Service::<Request<Body>>::call(&mut routes, Request::from_parts(parts, body)).await?;
    let (parts, body) = response.into_parts();
    let collected = match body.collect().await {
        Ok(collected) => collected,
        Err(status) => return Ok(status.into_http()),
    };
    let trailers = collected.trailers().cloned();
    let status =
        Status::from_header_map(&parts.headers).or_else(|| Status::from_header_map(trailers.as_ref()?));
    let answer = collected.to_bytes();
    let failed = status.filter(|status| status.code() != tonic::Code::Ok);
    let described = full::described(&path, &frame, failed.is_none().then_some(&answer));
    if let Some((request, response)) = described {
        let outcome = failed.as_ref().map_or(Ok(response.as_str()), Err);
        full::emit(Side::Driver, &driver, &path, &request, outcome, began.elapsed());
    }
    // An answer whose status is in its headers has no trailers, and must end with its headers: Go's client refuses it otherwise.
    let body = match trailers {
        None => Body::new(Full::new(answer)),
        Some(trailers) => Body::new(Full::new(answer).with_trailers(async move { Some(Ok(trailers)) })),
    };
    Ok(Response::from_parts(parts, body))
}

/// What the caller gets: the handler's answer, unless the deadline comes first.
async fn answer(
    task: tokio::task::JoinHandle<Response<Body>>,
    deadline: Option<Instant>,
    span: Span,
) -> Result<Response<Body>, Infallible> {
    let joined = match deadline {
        None => task.await,
        Some(deadline) => match timeout_at(deadline, task).await {
            Ok(joined) => joined,
            Err(_elapsed) => {
                tracing::warn!(parent: &span, "the deadline passed; the operation goes on in the background");
                return Ok(deadline_exceeded().into_http());
            }
        },
    };
    Ok(joined.unwrap_or_else(|error: JoinError| {
        let status = if error.is_panic() {
            Status::internal("the handler of this call panicked; the log of the driver says where")
        } else {
            Status::unavailable("the driver is stopping")
        };
        status.into_http()
    }))
}

fn deadline_exceeded() -> Status {
    Status::deadline_exceeded(
        "the operation did not finish in time; it goes on in the background, and the same call can be retried",
    )
}

/// The service and method of a path, as in `Controller/CreateVolume`.
fn rpc_of(path: &str) -> &str {
    path.strip_prefix("/csi.v1.").or_else(|| path.strip_prefix('/')).unwrap_or(path)
}

/// When the caller stops waiting: after its `grpc-timeout` or `max_duration`, whichever is shorter.
fn deadline_of(headers: &HeaderMap, max_duration: Option<Duration>) -> Option<Instant> {
    let asked = headers.get("grpc-timeout").and_then(|value| parse_grpc_timeout(value.as_bytes()));
    let wait = [asked, max_duration].into_iter().flatten().min()?;
    // A time beyond what the clock can express is no deadline.
    Instant::now().checked_add(wait)
}

/// At most eight digits and a unit; anything else counts as no timeout, which is what tonic does too.
fn parse_grpc_timeout(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Some(Duration::from_secs(number * 3600)),
        b'M' => Some(Duration::from_secs(number * 60)),
        b'S' => Some(Duration::from_secs(number)),
        b'm' => Some(Duration::from_millis(number)),
        b'u' => Some(Duration::from_micros(number)),
        b'n' => Some(Duration::from_nanos(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grpc_timeout_is_read_in_all_its_units() {
        for (text, expected) in [
            ("2H", Some(Duration::from_secs(7200))),
            ("3M", Some(Duration::from_secs(180))),
            ("10S", Some(Duration::from_secs(10))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("0n", Some(Duration::ZERO)),
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("100000000n", None),
            ("S", None),
            ("", None),
            ("5", None),
            ("+5S", None),
            ("5s", None),
        ] {
            assert_eq!(parse_grpc_timeout(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_shorter_of_timeout_and_maximum_is_the_deadline() {
        let now = Instant::now();
        let mut headers = HeaderMap::new();
        assert_eq!(deadline_of(&headers, None), None);
        assert_eq!(deadline_of(&headers, Some(Duration::from_secs(9))), Some(now + Duration::from_secs(9)));
        headers.insert("grpc-timeout", "5S".parse().unwrap());
        assert_eq!(deadline_of(&headers, None), Some(now + Duration::from_secs(5)));
        assert_eq!(deadline_of(&headers, Some(Duration::from_secs(9))), Some(now + Duration::from_secs(5)));
        assert_eq!(deadline_of(&headers, Some(Duration::from_secs(2))), Some(now + Duration::from_secs(2)));
    }

    #[test]
    fn the_name_of_a_call_is_its_service_and_method() {
        assert_eq!(rpc_of("/csi.v1.Controller/CreateVolume"), "Controller/CreateVolume");
        assert_eq!(
            rpc_of("/pluginregistration.Registration/GetInfo"),
            "pluginregistration.Registration/GetInfo"
        );
        let streams: Vec<&str> =
            METHODS.iter().filter(|(_, streams)| *streams).map(|(path, _)| *path).collect();
        assert_eq!(
            streams,
            ["/csi.v1.SnapshotMetadata/GetMetadataAllocated", "/csi.v1.SnapshotMetadata/GetMetadataDelta"]
        );
    }
}
