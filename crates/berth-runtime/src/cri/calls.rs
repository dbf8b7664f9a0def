//! Calls of the runtime: how it is reached, how long it may take, and what its refusals mean.

use std::time::Duration;

use tokio::time::timeout;
use tonic::{Code, Response, Status, transport::Channel};

use super::v1::{self, runtime_service_client::RuntimeServiceClient};
use crate::{Error, Result};

/// How long the runtime may take to be reached.
const CONNECT: Duration = Duration::from_secs(5);

/// The error of a call that the runtime refused.
pub(super) fn refused(doing: &str, why: String) -> Error {
    Error::Refused { doing: doing.to_owned(), why }
}

/// What a call answers within a time.
pub(super) async fn answer<T>(
    doing: &str,
    limit: Duration,
    call: impl Future<Output = std::result::Result<Response<T>, Status>>,
) -> Result<T> {
    match timeout(limit, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) if status.code() == Code::NotFound => Err(Error::Missing(doing.to_owned())),
        Ok(Err(status)) => Err(refused(doing, status.message().to_owned())),
        Err(_) => Err(refused(doing, format!("the container runtime does not answer within {limit:?}"))),
    }
}

/// The answer, or nothing of what is not there.
pub(super) fn found<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(Error::Missing(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Connects to the runtime at an endpoint, and asks for its version.
pub(super) async fn reach(endpoint: &str) -> Result<(Channel, v1::VersionResponse)> {
    let failed = |why: String| Error::Unreachable { endpoint: endpoint.to_owned(), why };
    let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
    if !path.starts_with('/') {
        return Err(failed("the endpoint must be unix:// and the path of a socket".to_owned()));
    }
    // What tonic says of a socket that is not there is only that it cannot connect.
    tokio::net::UnixStream::connect(path).await.map_err(|error| failed(error.to_string()))?;
    let channel = tonic::transport::Endpoint::from_shared(format!("unix://{path}"))
        .map_err(|error| failed(error.to_string()))?
        .connect_timeout(CONNECT)
        .connect_lazy();
    let mut client = RuntimeServiceClient::new(channel.clone());
    let asked = timeout(CONNECT, client.version(v1::VersionRequest { version: String::new() })).await;
    match asked {
        Ok(Ok(version)) => Ok((channel, version.into_inner())),
        Ok(Err(status)) if status.code() == Code::Unimplemented => {
            Err(failed("it does not speak version 1 of the Container Runtime Interface".to_owned()))
        }
        Ok(Err(status)) => Err(failed(status.message().to_owned())),
        Err(_) => Err(failed(format!("it does not answer within {CONNECT:?}"))),
    }
}
