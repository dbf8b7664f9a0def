//! Requests that are begun before their answers are wanted.

use std::future::Future;

use futures_util::future::BoxFuture;
use tokio_util::task::AbortOnDropHandle;

use crate::{Error, Result};

/// Begins something whose result is wanted later, and ends it if it is not wanted any more.
///
/// It is a task of its own and not a future that is polled now and then: a request on its way has one of the few places
/// that a server gives us, and must be able to leave it while whoever began it waits for such a place itself.
pub(super) fn begin<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> BoxFuture<'static, Result<T>> {
    let task = AbortOnDropHandle::new(tokio::spawn(work));
    Box::pin(async move {
        task.await.unwrap_or_else(|error| Err(Error::State(format!("copy a volume's data: {error}"))))
    })
}
