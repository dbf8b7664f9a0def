//! Calls a CSI driver, over a socket or within the process.
//!
//! Every call has a deadline. A call that broke on the way is answered UNAVAILABLE, whatever the transport made of it,
//! because the driver may have done the work: only a code that the driver itself sent may count as final.
//!
//! What is compiled for each method is its encoding; everything else works on bytes and is compiled once.

mod identity;

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::{Buf as _, BufMut as _, Bytes};
use parking_lot::RwLock;
use prometheus_client::registry::Registry;
use prost::Message;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};
use tower::{BoxError, Service};

pub use self::identity::{ControllerCapability, GroupCapability, Identity, NodeCapability, PluginService};
use crate::full::{self, Side};
use crate::metrics::ClientMetrics;
use crate::{Calls, Endpoint};

/// A page of ListVolumes may be long.
const LARGEST_ANSWER: usize = 64 << 20;

/// A request that is answered once, with the method that takes it; generated for each such request of CSI.
pub trait Call: Message + fmt::Debug {
    /// The path of the method on the wire, as in `/csi.v1.Controller/CreateVolume`.
    const METHOD: &'static str;
    /// What the method answers.
    type Answer: Message + fmt::Debug + Default;
}

/// A client of one driver; clones share the connection, the driver's name and the metrics.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    wire: Wire,
    /// What [`Client::identify`] found; a label of the metrics.
    driver_name: RwLock<Option<String>>,
    metrics: OnceLock<ClientMetrics>,
}

/// The two ways to a driver.
#[derive(Clone)]
enum Wire {
    /// Connects when first used, and again whenever the connection broke.
    Socket(Channel),
    /// A driver in this process.
    InProcess(Calls),
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("driver_name", &self.shared.driver_name).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the driver behind an endpoint, which need not be there yet.
    pub fn connect(endpoint: &Endpoint) -> Self {
        Self::over(Wire::Socket(crate::connect(endpoint)))
    }

    /// A client of a driver in this process.
    pub fn in_process(calls: Calls) -> Self {
        Self::over(Wire::InProcess(calls))
    }

    fn over(wire: Wire) -> Self {
        let shared = Shared { wire, driver_name: RwLock::default(), metrics: OnceLock::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Adds `csi_sidecar_operations_seconds` to the registry, with every call from now on; only the first registry.
    pub fn measure(&self, registry: &mut Registry) {
        self.shared.metrics.get_or_init(|| {
            let metrics = ClientMetrics::default();
            metrics.register(registry, "csi_sidecar_operations_seconds");
            metrics
        });
    }

    /// Counts every call from now on among these, unless it is counted elsewhere.
    pub fn measure_with(&self, metrics: &ClientMetrics) {
        self.shared.metrics.get_or_init(|| metrics.clone());
    }

    /// Calls a method and waits for its answer no longer than `timeout`.
    pub async fn call<C: Call>(&self, timeout: Duration, request: C) -> Result<C::Answer, Status> {
        self.respond(timeout, request).await.map(Response::into_inner)
    }

    /// As [`Client::call`], with the metadata beside the answer.
    pub async fn respond<C: Call>(
        &self,
        timeout: Duration,
        request: C,
    ) -> Result<Response<C::Answer>, Status> {
        let begun = Instant::now();
        let emitted = full::is_wanted().then(|| full::shown(&request));
        let answer = self.send(C::METHOD, timeout, request.encode_to_vec().into()).await;
        let answer = answer.and_then(|answer| {
            let (metadata, bytes, extensions) = answer.into_parts();
            let message = C::Answer::decode(bytes).map_err(|error| Status::internal(error.to_string()))?;
            Ok(Response::from_parts(metadata, message, extensions))
        });
        if let Some(request) = emitted {
            let response = answer.as_ref().map(|answer| full::shown(answer.get_ref()));
            let driver = self.shared.driver_name.read().clone().unwrap_or_default();
            let outcome = response.as_deref().map_err(|status| *status);
            full::emit(Side::Caller, &driver, C::METHOD, &request, outcome, begun.elapsed());
        }
        if let Some(metrics) = self.shared.metrics.get() {
            let code = answer.as_ref().err().map_or(Code::Ok, Status::code);
            metrics.observe(self.shared.driver_name.read().as_deref(), C::METHOD, code, begun.elapsed());
        }
        answer
    }

    fn send(
        &self,
        method: &'static str,
        timeout: Duration,
        message: Bytes,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, Status>> + Send>> {
        let wire = self.shared.wire.clone();
        let mut request = Request::new(message);
        request.set_timeout(timeout);
        Box::pin(async move {
            let send = async {
                let mut client = Grpc::new(wire).max_decoding_message_size(LARGEST_ANSWER);
                client.ready().await.map_err(|error| {
                    let mut status = Status::unavailable("the connection is not ready");
                    status.set_source(Arc::from(error));
                    status
                })?;
                client.unary(request, PathAndQuery::from_static(method), AsBytes).await
            };
            match tokio::time::timeout(timeout, send).await {
                Ok(Err(status)) if from_transport(&status) => Err(broken(status, timeout)),
                Ok(answer) => answer,
                Err(_elapsed) => Err(late(timeout)),
            }
        })
    }
}

/// Whether a status was made here, by the transport, rather than sent by the driver.
pub fn from_transport(status: &Status) -> bool {
    status.source().is_some()
}

fn late(timeout: Duration) -> Status {
    Status::deadline_exceeded(format!("no answer within {timeout:?}"))
}

/// What a status of the transport means to the caller.
fn broken(status: Status, timeout: Duration) -> Status {
    let mut deepest: &dyn Error = &status;
    while let Some(source) = deepest.source() {
        // The transport has a clock of its own, which may be the first.
        if source.is::<tonic::TimeoutExpired>() {
            return late(timeout);
        }
        deepest = source;
    }
    if status.code() == Code::DeadlineExceeded {
        return status;
    }
    let mut unavailable = Status::unavailable(format!("the call did not get through: {deepest}"));
    unavailable.set_source(Arc::new(status));
    unavailable
}

impl Service<http::Request<tonic::body::Body>> for Wire {
    type Response = http::Response<tonic::body::Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        match self {
            Self::Socket(channel) => channel.poll_ready(context).map_err(BoxError::from),
            Self::InProcess(calls) => calls.poll_ready(context).map_err(|never| match never {}),
        }
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        match self {
            Self::Socket(channel) => {
                let answer = channel.call(request);
                Box::pin(async move { answer.await.map_err(BoxError::from) })
            }
            Self::InProcess(calls) => {
                let answer = calls.call(request);
                Box::pin(async move { answer.await.map_err(|never| match never {}) })
            }
        }
    }
}

/// The codec of messages that are encoded and decoded elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct AsBytes;

impl Codec for AsBytes {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for AsBytes {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for AsBytes {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
