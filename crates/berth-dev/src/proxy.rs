//! The proxy between callers and a driver: gRPC goes through byte by byte, methods that CSI does not know included.
//!
//! Each connection of a caller has one to the driver, and ends with it, so that callers notice a driver's death as they would without
//! the proxy. A unary call of CSI is taken in whole, observed, judged and perhaps broken; everything else streams through.
//!
//! The callers on this machine wait very long, and the proxy gives up when upstream's components would, so that a call which a person
//! holds back does not run out of time.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use berth_certify::rules::{ObservedCall, judge};
use berth_csi::{Endpoint, Lenient, code};
use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use jiff::Timestamp;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};

use crate::faults::{Moment, Plan};
use crate::messages::{HandAnswer, framed, is_unary, payload, to_json};
use crate::observe::Observed;
use crate::record::{BrokenRule, Event, HeldCall, short};
use crate::step::Decision;
use crate::workbench::{Observation, Workbench, unanswered};

/// How long the callers on this machine wait; the proxy gives up long before.
pub const CALLERS_WAIT: Duration = Duration::from_secs(24 * 60 * 60);
/// How long answers that are on their way may take when the driver's connection has ended.
const DRAIN: Duration = Duration::from_secs(1);
/// How long a call waits for another one that overtakes it.
const REORDER_WINDOW: Duration = Duration::from_millis(150);
/// The head start of a call that overtakes another.
const HEAD_START: Duration = Duration::from_millis(20);
const TIMEOUT: &str = "grpc-timeout";

type AnyBody = UnsyncBoxBody<Bytes, Broken>;
type Sender = SendRequest<AnyBody>;

/// Why a call or a connection broke.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Connection(#[from] std::io::Error),
    #[error("HTTP/2: {}", berth_core::error_chain(.0))]
    Transport(#[from] hyper::Error),
    #[error(transparent)]
    Request(#[from] http::Error),
    #[error("{0}")]
    OnPurpose(&'static str),
}

/// Accepts connections until the workbench closes.
pub(crate) async fn serve(bench: Arc<Workbench>, listener: UnixListener) {
    loop {
        let accepted = tokio::select! {
            () = bench.closing.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let bench = bench.clone();
                tokio::spawn(async move {
                    if let Err(error) = connection(&bench, stream).await {
                        tracing::debug!(%error, "a connection to the proxy ended");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accepting a connection failed");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Joins a caller's connection with one to the driver.
async fn connection(bench: &Arc<Workbench>, caller: UnixStream) -> Result<(), Broken> {
    match bench.process.endpoint() {
        Endpoint::Unix(path) => joined(bench, caller, UnixStream::connect(path).await?).await,
        Endpoint::Tcp { host, port, .. } => {
            let driver = TcpStream::connect((host.as_str(), *port)).await?;
            driver.set_nodelay(true)?;
            joined(bench, caller, driver).await
        }
    }
}

async fn joined<D>(bench: &Arc<Workbench>, caller: UnixStream, driver: D) -> Result<(), Broken>
where
    D: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, driver) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(driver)).await?;
    let mut driver = tokio::spawn(driver);
    let service = service_fn(|request| {
        let (bench, sender) = (bench.clone(), sender.clone());
        async move { forward(&bench, sender, request).await }
    });
    let caller = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(Lenient::new(caller)), service);
    let mut caller = pin!(caller);
    let ended = tokio::select! {
        ended = caller.as_mut() => ended,
        _ = &mut driver => {
            caller.as_mut().graceful_shutdown();
            timeout(DRAIN, caller).await.unwrap_or(Ok(()))
        }
        () = bench.closing.cancelled() => Ok(()),
    };
    driver.abort();
    Ok(ended?)
}

/// A unary call that is sent as often as it takes.
#[derive(Clone)]
struct UnaryCall {
    method: String,
    uri: http::Uri,
    headers: HeaderMap,
    /// The body as it came: the frame of one message.
    frame: Bytes,
    /// The message in it.
    message: Bytes,
    deadline: Duration,
}

/// What came back of a call.
enum Outcome {
    Answered {
        head: Box<http::response::Parts>,
        frame: Bytes,
        trailers: Option<HeaderMap>,
    },
    /// No answer within the deadline.
    Late,
    /// The connection broke before there was an answer.
    Lost(Broken),
}

async fn forward(
    bench: &Arc<Workbench>,
    sender: Sender,
    request: Request<Incoming>,
) -> Result<Response<AnyBody>, Broken> {
    let method = request.uri().path().to_owned();
    if !is_unary(&method) {
        return pass_through(bench, sender, request).await;
    }
    let (mut head, body) = request.into_parts();
    let frame = body.collect().await?.to_bytes();
    let message = payload(&frame).unwrap_or_default();
    bench.secrets.learn(short(&method), &message);
    let usual = usual_deadline(&method);
    let asked = head.headers.get(TIMEOUT).and_then(|value| parse_timeout(value.to_str().ok()?));
    let deadline = asked.map_or(usual, |asked| asked.min(usual));
    if asked.is_none_or(|asked| asked > usual) {
        head.headers.insert(
            TIMEOUT,
            HeaderValue::from_str(&format!("{}m", deadline.as_millis())).map_err(http::Error::from)?,
        );
    }
    let call = UnaryCall { method, uri: head.uri, headers: head.headers, frame, message, deadline };
    bench.exchange(sender, call).await
}

impl Workbench {
    /// Takes a call through whatever was asked for: a step, faults, and the driver.
    async fn exchange(
        self: &Arc<Self>,
        sender: Sender,
        mut call: UnaryCall,
    ) -> Result<Response<AnyBody>, Broken> {
        let number = self.next_number();
        let plan = self.faults.lock().plan(&call.method);
        let announce = || {
            let request = self.secrets.hide_in(to_json(&call.method, &call.frame, None).0);
            let inspect = self.inspection(&call.method, &call.message);
            self.events.publish(Event::Held(HeldCall {
                number,
                method: call.method.clone(),
                request,
                inspect,
            }));
        };
        if let Decision::Answer(answer) = self.steps.pass(&call.method, &call.message, announce).await {
            return Ok(self.answered_by_hand(number, &call, answer));
        }
        if let Some(delay) = plan.delay {
            sleep(delay).await;
        }
        if plan.reorder {
            self.reorder.pass().await;
        }
        if let Some(code) = plan.code {
            let status = Status::new(code, "a fault of berth dev");
            return Ok(self.answered_here(number, &call, &status, plan.names));
        }
        if let Some((Moment::Before, _)) = plan.kill {
            self.kill_driver("before", &call.method);
        }
        if let Some(time) = plan.timeout {
            call.deadline = call.deadline.min(time);
        }
        let outcome = self.send_as_planned(&sender, &call, number, &plan).await;
        if let Some((Moment::After, _)) = plan.kill {
            self.kill_driver("after", &call.method);
        }
        match outcome {
            Outcome::Answered { .. } if plan.drop_answer => Err(Broken::OnPurpose("the answer was dropped")),
            Outcome::Answered { head, frame, trailers } => {
                Ok(Response::from_parts(*head, Whole { data: frame, trailers }.boxed_unsync()))
            }
            Outcome::Late => {
                Ok(refusal(&Status::deadline_exceeded(format!("no answer within {:?}", call.deadline))))
            }
            Outcome::Lost(error) => Err(error),
        }
    }

    /// Sends a call once, several times at once, or several times in a row; the first answer is its caller's.
    async fn send_as_planned(&self, sender: &Sender, call: &UnaryCall, number: u64, plan: &Plan) -> Outcome {
        let copies = (1..plan.concurrent).map(|_| async {
            let names = vec![format!("sent at the same time as call {number}")];
            self.attempt(sender.clone(), call, self.next_number(), names, None).await;
        });
        let during = plan.kill.and_then(|(moment, after)| (moment == Moment::During).then_some(after));
        let (first, _) = tokio::join!(
            self.attempt(sender.clone(), call, number, plan.names.clone(), during),
            join_all(copies)
        );
        let (outcome, first_code) = first;
        // A call whose answer is lost is repeated by its caller.
        let repetitions = if matches!(outcome, Outcome::Lost(_)) { 1 } else { plan.repeat };
        for _ in 1..repetitions {
            let names = vec![format!("call {number} again")];
            let again = self.attempt(sender.clone(), call, self.next_number(), names, None).await;
            self.judge_repetition(call, number, first_code, &outcome, &again);
        }
        outcome
    }

    /// A call that succeeded has to succeed again, with the same volume or snapshot.
    fn judge_repetition(
        &self,
        call: &UnaryCall,
        number: u64,
        first: Option<Code>,
        outcome: &Outcome,
        (again, code): &(Outcome, Option<Code>),
    ) {
        let name = short(&call.method);
        if first != Some(Code::Ok) || matches!(again, Outcome::Lost(_)) || *code == Some(Code::Aborted) {
            return;
        }
        let said = code.map_or("no answer", code::grpc_name);
        if *code != Some(Code::Ok) {
            self.events.fault(format!(
                "✗ repeat: {name} was answered OK, and its repetition (call {number} again) {said}"
            ));
        } else if let (Outcome::Answered { frame: one, .. }, Outcome::Answered { frame: other, .. }) =
            (outcome, again)
            && created_id(name, one) != created_id(name, other)
        {
            self.events.fault(format!("✗ repeat: {name} again answered with another id than call {number}"));
        }
    }

    /// Sends a call to the driver once, observes and judges it, and records it.
    async fn attempt(
        &self,
        mut sender: Sender,
        call: &UnaryCall,
        number: u64,
        faults: Vec<String>,
        kill_after: Option<Duration>,
    ) -> (Outcome, Option<Code>) {
        let interruptions = self.interruptions();
        let time = Timestamp::now();
        let before = self.observer.before(&self.process, &call.method);
        let begun = Instant::now();
        let exchange = async {
            let mut request = Request::post(call.uri.clone())
                .version(http::Version::HTTP_2)
                .body(Whole { data: call.frame.clone(), trailers: None }.boxed_unsync())?;
            *request.headers_mut() = call.headers.clone();
            sender.ready().await?;
            let (head, body) = sender.send_request(request).await?.into_parts();
            let body = body.collect().await?;
            let trailers = body.trailers().cloned();
            Ok::<_, Broken>((head, body.to_bytes(), trailers))
        };
        let exchange = timeout(call.deadline, exchange);
        let answered = match kill_after {
            None => exchange.await,
            Some(after) => {
                let mut exchange = pin!(exchange);
                let early = timeout(after, &mut exchange).await;
                self.kill_driver("during", &call.method);
                match early {
                    // It was quicker; its answer is lost all the same.
                    Ok(_) => Ok(Err(Broken::OnPurpose("the driver was killed during the call"))),
                    Err(_) => exchange.await,
                }
            }
        };
        let duration = begun.elapsed();
        let outcome = match answered {
            Ok(Ok((head, frame, trailers))) => Outcome::Answered { head: Box::new(head), frame, trailers },
            Ok(Err(error)) => Outcome::Lost(error),
            Err(_late) => Outcome::Late,
        };
        let observed = self.observer.after(&self.process, &call.method, before);
        let status = status_of(&outcome, call.deadline);
        let interrupted = interruptions != self.interruptions() || !self.is_available() || sender.is_closed();
        let broken = match &outcome {
            Outcome::Answered { frame, .. } => self.judge(call, frame, &status, &observed),
            // Whom the workbench interrupts may leave calls without an answer, and whom it gives less time may be late.
            Outcome::Lost(_) if interrupted => Vec::new(),
            Outcome::Late if call.deadline < usual_deadline(&call.method) => Vec::new(),
            _ => unanswered(&call.method, status.message()).into_iter().collect(),
        };
        let response = match &outcome {
            Outcome::Answered { frame, .. } if status.code() == Code::Ok => Some(frame.clone()),
            _ => None,
        };
        let code = match &outcome {
            Outcome::Lost(_) => "LOST",
            _ => code::grpc_name(status.code()),
        };
        self.observed(Observation {
            number,
            time,
            method: call.method.clone(),
            request: call.frame.clone(),
            response,
            code,
            message: status.message().to_owned(),
            duration,
            observed: Some(observed),
            broken,
            faults,
        });
        let code = matches!(outcome, Outcome::Answered { .. }).then(|| status.code());
        (outcome, code)
    }

    /// The rules that an answer breaks.
    fn judge(
        &self,
        call: &UnaryCall,
        frame: &Bytes,
        status: &Status,
        observed: &Observed,
    ) -> Vec<BrokenRule> {
        let message = payload(frame).unwrap_or_default();
        let mounts = observed.before.as_ref().zip(observed.after.as_ref());
        let root = self.process.root();
        let judged = judge(&ObservedCall {
            method: &call.method,
            request: &call.message,
            answer: if status.code() == Code::Ok { Ok(&message) } else { Err(status) },
            mounts: mounts.map(|(before, after)| (before.as_slice(), after.as_slice())),
            root: root.as_deref(),
        });
        let broken = judged.into_iter().filter_map(|judgement| Some((judgement.rule, judgement.broken?)));
        broken.map(|(rule, found)| BrokenRule::new(rule, found)).collect()
    }

    fn answered_by_hand(&self, number: u64, call: &UnaryCall, answer: HandAnswer) -> Response<AnyBody> {
        let names = vec!["answered by hand".to_owned()];
        match answer {
            HandAnswer::Refusal(code, message) => {
                self.answered_here(number, call, &Status::new(code, message), names)
            }
            HandAnswer::Message(message) => {
                let frame = framed(&message);
                self.observed(Observation {
                    response: Some(frame.clone()),
                    faults: names,
                    ..Observation::without_driver(number, call.method.clone(), call.frame.clone())
                });
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                let body = Whole { data: frame, trailers: Some(trailers) }.boxed_unsync();
                let mut response = Response::new(body);
                response
                    .headers_mut()
                    .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
                response
            }
        }
    }

    /// Answers a call without the driver.
    fn answered_here(
        &self,
        number: u64,
        call: &UnaryCall,
        status: &Status,
        faults: Vec<String>,
    ) -> Response<AnyBody> {
        self.observed(Observation {
            code: code::grpc_name(status.code()),
            message: status.message().to_owned(),
            faults,
            ..Observation::without_driver(number, call.method.clone(), call.frame.clone())
        });
        refusal(status)
    }
}

/// Lets calls overtake each other.
#[derive(Debug, Default)]
pub(crate) struct Reorder {
    waiting: Mutex<Option<oneshot::Sender<()>>>,
}

impl Reorder {
    /// Has a call wait for a while until another one overtakes it; one that finds another waiting overtakes it.
    async fn pass(&self) {
        let overtaken = self.waiting.lock().take().filter(|waiting| !waiting.is_closed());
        if let Some(overtaken) = overtaken {
            tokio::spawn(async move {
                sleep(HEAD_START).await;
                let _ = overtaken.send(());
            });
            return;
        }
        let (waiting, overtaken) = oneshot::channel();
        *self.waiting.lock() = Some(waiting);
        let _ = timeout(REORDER_WINDOW, overtaken).await;
    }
}

/// Forwards what is not a unary call of CSI, as it comes.
async fn pass_through(
    bench: &Arc<Workbench>,
    mut sender: Sender,
    request: Request<Incoming>,
) -> Result<Response<AnyBody>, Broken> {
    let mut watched = Watched {
        bench: bench.clone(),
        observation: Some(Observation::without_driver(
            bench.next_number(),
            request.uri().path().to_owned(),
            Bytes::new(),
        )),
        begun: Instant::now(),
        status: None,
        body: None,
    };
    let request = request.map(|body| body.map_err(Broken::from).boxed_unsync());
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    watched.status = Status::from_header_map(response.headers());
    Ok(response.map(|body| {
        watched.body = Some(body);
        watched.boxed_unsync()
    }))
}

/// The body of an answer that streams through; recorded when it ends.
struct Watched {
    bench: Arc<Workbench>,
    observation: Option<Observation>,
    begun: Instant,
    status: Option<Status>,
    body: Option<Incoming>,
}

impl Body for Watched {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Some(body) = self.body.as_mut() else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(trailers) = frame.trailers_ref()
        {
            self.status = Status::from_header_map(trailers);
        }
        polled.map(|frame| frame.map(|frame| frame.map_err(Broken::from)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let Some(mut observation) = self.observation.take() else { return };
        observation.duration = self.begun.elapsed();
        match &self.status {
            Some(status) => {
                observation.code = code::grpc_name(status.code());
                status.message().clone_into(&mut observation.message);
            }
            None => observation.code = "LOST",
        }
        self.bench.observed(observation);
    }
}

/// A body that is there whole.
struct Whole {
    data: Bytes,
    trailers: Option<HeaderMap>,
}

impl Body for Whole {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if !self.data.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.data)))));
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }
}

fn refusal(status: &Status) -> Response<AnyBody> {
    let mut response = Response::new(Whole { data: Bytes::new(), trailers: None }.boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    // The message is plain text of this program.
    let _ = status.add_header(headers);
    response
}

fn status_of(outcome: &Outcome, deadline: Duration) -> Status {
    match outcome {
        Outcome::Answered { head, trailers, .. } => trailers
            .as_ref()
            .and_then(Status::from_header_map)
            .or_else(|| Status::from_header_map(&head.headers))
            .unwrap_or_else(|| {
                Status::unknown(format!("an answer without grpc-status, HTTP status {}", head.status))
            }),
        Outcome::Late => Status::deadline_exceeded(format!("no answer within {deadline:?}")),
        Outcome::Lost(error) => Status::unavailable(format!("the connection broke: {error}")),
    }
}

/// The id of what a call made.
fn created_id(name: &str, frame: &Bytes) -> Option<String> {
    use berth_csi::v1;
    use prost::Message as _;
    let message = payload(frame)?;
    match name {
        "CreateVolume" => Some(v1::CreateVolumeResponse::decode(message).ok()?.volume?.volume_id),
        "CreateSnapshot" => Some(v1::CreateSnapshotResponse::decode(message).ok()?.snapshot?.snapshot_id),
        _ => None,
    }
}

/// How long the kubelet and the upstream sidecars wait for a call.
fn usual_deadline(method: &str) -> Duration {
    Duration::from_secs(match short(method) {
        name if name.starts_with("Node") => 120,
        name if name.contains("Snapshot") => 60,
        "ControllerPublishVolume" | "ControllerUnpublishVolume" | "ListVolumes" => 15,
        _ => 10,
    })
}

/// Reads the header `grpc-timeout`.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number.saturating_mul(3600)),
        "M" => Duration::from_secs(number.saturating_mul(60)),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_callers_are_read() {
        assert_eq!(parse_timeout("10S"), Some(Duration::from_secs(10)));
        assert_eq!(parse_timeout("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!((parse_timeout(""), parse_timeout("10"), parse_timeout("x1S")), (None, None, None));
    }

    #[tokio::test]
    async fn the_second_of_two_calls_overtakes_the_first() {
        let reorder = Arc::new(Reorder::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let call = |name: &'static str| {
            let (reorder, order) = (reorder.clone(), order.clone());
            async move {
                reorder.pass().await;
                order.lock().push(name);
            }
        };
        tokio::join!(call("first"), call("second"));
        assert_eq!(*order.lock(), ["second", "first"]);
        call("alone").await;
        assert_eq!(order.lock().len(), 3, "a call that nobody overtakes goes on");
    }
}
