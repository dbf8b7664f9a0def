//! The two ways to a driver, by a socket or within the process, as one type.

use std::pin::Pin;
use std::task::{Context, Poll};

use berth_csi::Calls;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::Channel;

/// A way to a driver.
#[derive(Clone)]
pub(super) enum Wire {
    /// Connects when first used, and again whenever the connection broke.
    Socket(Channel),
    /// A driver in this process.
    InProcess(Calls),
}

impl Service<http::Request<Body>> for Wire {
    type Response = http::Response<Body>;
    type Error = tonic::transport::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        match self {
            Self::Socket(channel) => channel.poll_ready(context),
            Self::InProcess(calls) => calls.poll_ready(context).map_err(|never| match never {}),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            Self::Socket(channel) => Box::pin(channel.call(request)),
            Self::InProcess(calls) => {
                let answer = calls.call(request);
                Box::pin(async move { answer.await.map_err(|never| match never {}) })
            }
        }
    }
}
