//! The body of a streaming answer: ends the account of its call when the stream ends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;

use super::deadline_exceeded;
use super::finish::Call;

/// A body that is cut off at the deadline; dropped before its end, the call counts as cancelled.
pub(super) struct Watched {
    /// None once the stream has ended.
    live: Option<(Call, Body)>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    pub(super) fn new(call: Call, body: Body, deadline: Option<Instant>) -> Self {
        Self { live: Some((call, body)), deadline: deadline.map(|at| Box::pin(sleep_until(at))) }
    }

    fn end(&mut self, status: &Status) {
        if let Some((call, _)) = self.live.take() {
            call.finish(status);
        }
    }
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        let Some((call, body)) = &mut this.live else { return Poll::Ready(None) };
        // The handler's stream is polled here, so what it logs belongs to the call.
        let polled = call.span.in_scope(|| Pin::new(body).poll_frame(context));
        if let Poll::Ready(frame) = polled {
            match &frame {
                Some(Ok(frame)) => {
                    if let Some(status) = frame.trailers_ref().and_then(Status::from_header_map) {
                        this.end(&status);
                    }
                }
                Some(Err(status)) => this.end(status),
                None => this.end(&Status::ok("")),
            }
            return Poll::Ready(frame);
        }
        let Some(deadline) = &mut this.deadline else { return Poll::Pending };
        ready!(deadline.as_mut().poll(context));
        let status = deadline_exceeded();
        this.end(&status);
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(status.add_header(&mut trailers).map(|()| Frame::trailers(trailers))))
    }
}
