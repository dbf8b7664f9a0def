//! `berth driver`: a backend behind a CSI socket.

pub(crate) mod local;
pub(crate) mod nfs;

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use berth_backends::{Services, services};
use berth_core::NodeId;
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use clap::Args;
use prometheus_client::registry::Registry;

use crate::http::{Ready, Site, Unwell};
use crate::logging;
use crate::sidecars::beside::Beside;
use crate::sidecars::replica::Health;
use crate::sidecars::{PROBING, liveness, stop_on_signal};

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

/// Serves a backend, and runs what belongs beside it, until SIGTERM or SIGINT; then finishes the calls under way.
async fn serve(common: Common, driver: Arc<Services>, beside: Beside) -> anyhow::Result<()> {
    let name = driver.name().to_owned();
    driver.recover().await?;

    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry, &name);
    let layer = CallLayer::new(metrics, common.max_call_seconds.map(Duration::from_secs));
    let health = Health::register(&mut registry);
    let within = (!beside.is_empty()).then(|| {
        let calls = berth_csi::in_process(driver.routes(), &layer);
        let within = berth_sidecars::driver::Driver::in_process(calls);
        within.measure(&mut registry);
        within
    });
    let stop = stop_on_signal()?;
    let listener = Listener::bind(&common.endpoint).await?;
    let endpoint = listener.endpoint().clone();
    if let Some(address) = &common.http_endpoint {
        let told = health.clone();
        // Alive is who can be reached as others reach it: a driver whose socket was removed needs a restart.
        let alive = || liveness::healthy(endpoint.clone(), PROBING);
        Site::new(registry)
            .check("/healthz", alive())
            .check("/livez", alive())
            .check("/readyz", ready(driver.clone()))
            .check("/healthz/leader-election", move || told.leader_election())
            .serve(address)
            .await
            .with_context(|| format!("serve HTTP on {address}"))?;
    }
    tracing::info!(driver = name, %endpoint, version = env!("CARGO_PKG_VERSION"), "ready");
    // What is beside calls the driver until it is done, so the driver ends after it.
    let mut beside = tokio::spawn(beside.run(within, endpoint, health, stop));
    let mut ended = Ok(());
    let until =
        async { ended = (&mut beside).await.context("what runs beside the driver panicked").flatten() };
    berth_csi::serve(listener, driver.routes(), layer, until).await.context("serve CSI")?;
    ended
}

/// The node's id where none is given.
fn host_name() -> anyhow::Result<NodeId> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").context("read the host's name")?;
    name.trim().parse().context("the host's name cannot be the node id; give one with --node-id")
}

fn ready(driver: Arc<Services>) -> impl Fn() -> Ready + Send + Sync + 'static {
    move || {
        let driver = driver.clone();
        Box::pin(async move { driver.ready().await.map_err(|error| Unwell::new(error.to_string())) })
    }
}
