//! A driver as a program: one call that recovers, serves, registers and stops.

use std::{env, path::PathBuf};

use berth_core::NodeId;
use berth_csi::{CallLayer, Endpoint, Listener, Metrics, registrar};
use berth_host::path::Dir;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::{Driver, Error, Result, services::Config};

/// How a driver is served.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the driver listens.
    pub endpoint: Endpoint,
    /// What the driver calls this node.
    pub node_id: NodeId,
    /// Where the record of what is mounted on this node is kept.
    pub state_dir: PathBuf,
    /// The kubelet's directory of registration sockets, such as `/var/lib/kubelet/plugins_registry`, where the driver
    /// has a node part and registers itself; without it a node-driver-registrar is needed beside it.
    pub registration_dir: Option<PathBuf>,
}

impl Options {
    /// From the environment: `CSI_ENDPOINT` (`unix:///run/csi.sock`), `NODE_ID` (the host's name), `STATE_DIR`
    /// (`/var/lib/csi`), `REGISTRATION_DIR` (none).
    pub fn from_env() -> Result<Self> {
        let read = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let endpoint = read("CSI_ENDPOINT").unwrap_or_else(|| "unix:///run/csi.sock".to_owned());
        let node = match read("NODE_ID") {
            Some(node) => node,
            None => std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().to_owned(),
        };
        Ok(Self {
            endpoint: endpoint.parse().map_err(|error| Error::invalid(format!("CSI_ENDPOINT: {error}")))?,
            node_id: node.parse().map_err(|error| Error::invalid(format!("NODE_ID: {error}")))?,
            state_dir: read("STATE_DIR").unwrap_or_else(|| "/var/lib/csi".to_owned()).into(),
            registration_dir: read("REGISTRATION_DIR").map(PathBuf::from),
        })
    }
}

impl Driver {
    /// Undoes what a killed predecessor left half done, serves until SIGTERM or SIGINT, registers with the node
    /// meanwhile, and finishes the calls under way.
    pub async fn serve(self, options: Options) -> Result<()> {
        let has_node = self.node.is_some();
        let services = self.open(Config::new(&options.state_dir))?;
        services.recover().await?;
        if let Endpoint::Unix(socket) = &options.endpoint
            && let Some(directory) = socket.parent()
        {
            Dir::ensure(directory, 0o700)?;
        }
        let listener = Listener::bind(&options.endpoint).await.map_err(|error| failed("listen", &error))?;
        let stop = CancellationToken::new();
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let signalled = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            signalled.cancel();
        });
        if let (true, Some(directory), Endpoint::Unix(socket)) =
            (has_node, options.registration_dir, &options.endpoint)
        {
            let driver = services.name().to_owned();
            let options = registrar::Options { directory, driver, endpoint: socket.clone() };
            tokio::spawn(registrar::keep_registered(options, stop.clone()));
        }
        let layer = CallLayer::new(Metrics::unregistered(services.name()), None);
        tracing::info!(driver = services.name(), endpoint = %options.endpoint, "ready");
        let served = berth_csi::serve(listener, services.routes(), layer, stop.cancelled_owned()).await;
        served.map_err(|error| failed("serve CSI", &error))
    }
}

fn failed(doing: &str, error: &(dyn std::error::Error + 'static)) -> Error {
    Error::internal(format!("{doing}: {}", berth_core::error_chain(error)))
}
