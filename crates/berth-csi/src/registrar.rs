//! Introduces a driver to the node it runs on: the node-driver-registrar's protocol.
//!
//! A socket `<driver>-reg.sock` in the node's registration directory says that a driver is there; the node asks on it
//! for the driver's name and endpoint, registers the driver, and notifies this side of the result. While the socket is there the
//! driver is registered; when it goes, so does the driver. Needs nothing of Kubernetes' API.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::registration::registration_server::{Registration, RegistrationServer};
use crate::registration::{
    CSI_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use crate::v1::GetPluginInfoRequest;
use crate::{CallLayer, Client, Endpoint, Listener, Metrics};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// The versions of CSI that are announced; nodes look only at the first number.
const VERSIONS: [&str; 1] = ["1.0.0"];

/// How long a registration that failed is not tried again.
const REGISTER_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Which driver is introduced, and where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's registration directory, such as `/var/lib/kubelet/plugins_registry`.
    pub directory: PathBuf,
    /// The driver's name, as GetPluginInfo answers it.
    pub driver: String,
    /// The driver's socket, as the node sees it.
    pub endpoint: PathBuf,
}

/// Why a driver is not introduced (any more).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver does not say who it is.
    #[error("asking the driver for its name")]
    Name(#[source] Box<Status>),
    /// The driver has no name.
    #[error("the driver says that its name is empty; GetPluginInfo must give one")]
    NoName,
    /// The name of the socket is none.
    #[error("naming the registration socket")]
    Endpoint(#[from] crate::EndpointError),
    /// The socket cannot be made.
    #[error("making the registration socket")]
    Bind(#[from] crate::BindError),
    /// The server on the registration socket ended with an error.
    #[error("serving the registration socket")]
    Serve(#[from] tonic::transport::Error),
    /// The node does not want the driver.
    #[error("the node refused the driver: {0}")]
    Refused(String),
}

/// The name of a driver.
pub async fn name_of(driver: &Client, timeout: Duration) -> Result<String, Error> {
    let answer = driver.call(timeout, GetPluginInfoRequest {}).await;
    let name = answer.map_err(|status| Error::Name(Box::new(status)))?.name;
    Some(name).filter(|name| !name.is_empty()).ok_or(Error::NoName)
}

/// Where a driver's registration socket lies.
pub fn socket(directory: &Path, driver: &str) -> PathBuf {
    directory.join(format!("{driver}-reg.sock"))
}

/// Introduces a driver until `shutdown`, or until the node refuses it.
///
/// A socket left behind by a predecessor is replaced; anything else of that name is refused.
pub async fn serve(options: Options, shutdown: CancellationToken) -> Result<(), Error> {
    let path = socket(&options.directory, &options.driver);
    let endpoint: Endpoint = format!("unix://{}", path.display()).parse()?;
    let listener = Listener::bind(&endpoint).await?;
    let (refused, mut refusal) = mpsc::channel(1);
    let layer = CallLayer::new(Metrics::unregistered(&options.driver), None);
    tracing::info!(driver = options.driver, socket = %path.display(), "waiting for the node to register the driver");
    let routes = Routes::new(RegistrationServer::new(Introduction { options, refused }));
    let mut reason = None;
    let stop = async {
        tokio::select! {
            () = shutdown.cancelled() => {}
            refused = refusal.recv() => reason = refused,
        }
    };
    crate::serve(listener, routes, layer, stop).await?;
    reason.map_or(Ok(()), |reason| Err(Error::Refused(reason)))
}

/// Introduces a driver until `shutdown`. Whatever ends a registration, a refusal by the node or trouble with the socket, is
/// logged, and the driver is introduced again after a pause.
pub async fn keep_registered(options: Options, shutdown: CancellationToken) {
    while !shutdown.is_cancelled() {
        if let Err(error) = serve(options.clone(), shutdown.clone()).await {
            let error = berth_core::error_chain(&error);
            tracing::warn!(driver = options.driver, error, "the driver is not registered; trying again");
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = tokio::time::sleep(REGISTER_AGAIN_AFTER) => {}
            }
        }
    }
}

struct Introduction {
    options: Options,
    refused: mpsc::Sender<String>,
}

#[tonic::async_trait]
impl Registration for Introduction {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: CSI_PLUGIN.to_owned(),
            name: self.options.driver.clone(),
            endpoint: self.options.endpoint.display().to_string(),
            supported_versions: VERSIONS.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        if status.plugin_registered {
            tracing::info!(driver = self.options.driver, "the node registered the driver");
        } else {
            // Full means that a refusal is already on its way.
            let _ = self.refused.try_send(status.error);
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

#[cfg(test)]
mod tests;
