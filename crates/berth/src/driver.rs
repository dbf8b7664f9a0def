//! `berth driver`: a backend behind a CSI socket.

pub(crate) mod local;

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use berth_driver::{Backend, Driver, services};
use clap::Args;
use prometheus_client::registry::Registry;
use tokio::signal::unix::{SignalKind, signal};

use crate::{http, logging};

/// What every driver can be told.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
pub(crate) struct Common {
    /// Where to serve CSI: unix:///path/to.sock or tcp://host:port
    #[arg(long, env = "CSI_ENDPOINT", default_value = "unix:///run/berth/csi.sock", value_name = "URL")]
    endpoint: Endpoint,

    /// Which services to offer
    #[arg(long, value_enum, default_value_t = Mode::All)]
    mode: Mode,

    /// Serve /metrics and /healthz over HTTP here, such as :8080 or 127.0.0.1:0
    #[arg(long, env = "BERTH_HTTP_ENDPOINT", value_name = "ADDRESS")]
    http_endpoint: Option<String>,

    /// Answer a call that takes longer with DEADLINE_EXCEEDED; its work goes on in the background
    #[arg(long, value_name = "SECONDS")]
    max_call_seconds: Option<u64>,

    #[command(flatten)]
    logging: logging::Logging,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Mode {
    /// Controller and node services
    All,
    /// Only what needs no particular node
    Controller,
    /// Only what works where volumes are used
    Node,
}

impl From<Mode> for services::Mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::All => Self::All,
            Mode::Controller => Self::Controller,
            Mode::Node => Self::Node,
        }
    }
}

/// Serves a backend until SIGTERM or SIGINT, then finishes the calls under way.
async fn serve(common: Common, config: services::Config, backend: Arc<dyn Backend>) -> anyhow::Result<()> {
    let name = config.name.clone();
    let driver = Driver::new(config, backend.clone())?;
    driver.recover().await?;

    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry, &name);
    let layer = CallLayer::new(metrics, common.max_call_seconds.map(Duration::from_secs));
    if let Some(address) = &common.http_endpoint {
        let ready = move || {
            let backend = backend.clone();
            Box::pin(async move { backend.ready().await.map_err(|error| error.to_string()) }) as http::Ready
        };
        http::serve(address, registry, ready).await.with_context(|| format!("serve HTTP on {address}"))?;
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping: finishing the calls under way");
    };
    let listener = Listener::bind(&common.endpoint).await?;
    tracing::info!(driver = name, endpoint = %common.endpoint, version = env!("CARGO_PKG_VERSION"), "ready");
    berth_csi::serve(listener, driver.routes(), layer, stop).await.context("serve CSI")
}
