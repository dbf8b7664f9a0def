//! Whether a driver lives, and whether the node can find it: what kubelet's probes ask.
//!
//! Each question is asked over a new connection. One that is kept would go on working after the socket's file was
//! removed, while nobody else could reach the driver any more.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use berth_csi::registration::InfoRequest;
use berth_csi::v1::ProbeRequest;
use berth_csi::{Client, Endpoint, code};
use tonic::Status;

use crate::registrar;

/// Why something is not well.
#[derive(Debug, thiserror::Error)]
pub enum Unwell {
    /// The driver did not answer, or answered with an error.
    #[error("the driver does not answer as it should: {}", code::status_text(.0))]
    Driver(Box<Status>),
    /// The driver says so itself.
    #[error("the driver says that it is not ready")]
    NotReady,
    /// Nobody can find the driver any more.
    #[error("the registration socket {0} is gone")]
    Gone(PathBuf),
    /// Something else is in its place.
    #[error("the registration socket {0} is no socket")]
    NotASocket(PathBuf),
    /// Its attributes cannot be read.
    #[error("reading the attributes of the registration socket")]
    Look(#[source] io::Error),
    /// Its path cannot be used.
    #[error("naming the registration socket")]
    Endpoint(#[from] berth_csi::EndpointError),
    /// Nobody answers on it.
    #[error("the registration socket does not answer as it should: {}", code::status_text(.0))]
    Registration(Box<Status>),
    /// It answers with another driver's name.
    #[error("the registration socket is that of another driver: {0}")]
    Stranger(String),
}

/// Probes the driver behind a socket, no longer than `timeout`.
pub async fn probe(endpoint: &Endpoint, timeout: Duration) -> Result<(), Unwell> {
    let answer = Client::connect(endpoint).call(timeout, ProbeRequest {}).await;
    match answer.map_err(|status| Unwell::Driver(Box::new(status)))?.ready {
        Some(false) => Err(Unwell::NotReady),
        // A driver need not say.
        Some(true) | None => Ok(()),
    }
}

/// Looks whether the node can find a driver by its registration socket.
pub async fn registration(directory: &Path, driver: &str, timeout: Duration) -> Result<(), Unwell> {
    let path = registrar::socket(directory, driver);
    match std::fs::symlink_metadata(&path) {
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => return Err(Unwell::NotASocket(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Unwell::Gone(path)),
        Err(error) => return Err(Unwell::Look(error)),
    }
    let endpoint: Endpoint = format!("unix://{}", path.display()).parse()?;
    let answer = Client::connect(&endpoint).call(timeout, InfoRequest {}).await;
    let name = answer.map_err(|status| Unwell::Registration(Box::new(status)))?.name;
    if name == driver { Ok(()) } else { Err(Unwell::Stranger(name)) }
}

#[cfg(test)]
mod tests;
