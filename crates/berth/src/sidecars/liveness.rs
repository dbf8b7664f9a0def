//! `berth livenessprobe`: answers over HTTP whether a CSI driver is healthy, as upstream's livenessprobe does.

use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_csi::Endpoint;
use berth_sidecars::liveness;
use prometheus_client::registry::Registry;

use super::{flags, go};
use crate::http::{Ready, Site, Unwell};

/// The address that upstream serves on by default.
const PORT: u16 = 9808;

/// Answers over HTTP whether a CSI driver is healthy.
#[derive(Debug, clap::Args)]
#[command(version, args_override_self = true)]
pub(crate) struct Args {
    #[command(flatten)]
    connection: flags::Connection,

    /// How long a probe may take
    #[arg(long, default_value = "3s", value_parser = go::positive_duration, value_name = "DURATION")]
    probe_timeout: Duration,

    /// Deprecated: use --http-endpoint instead
    #[arg(long, hide = true, value_name = "PORT")]
    health_port: Option<u16>,

    #[command(flatten)]
    http: flags::Http,
    #[command(flatten)]
    klog: flags::Klog,
}

impl Args {
    /// Where health is served, and where metrics are if elsewhere.
    fn addresses(&self) -> anyhow::Result<(String, Option<&str>)> {
        let given = self.http.address()?;
        if !self.http.http_endpoint.is_empty() {
            if self.health_port.is_some() {
                bail!("--http-endpoint and the deprecated --health-port exclude each other; drop the latter");
            }
            return Ok((self.http.http_endpoint.clone(), None));
        }
        if self.health_port.is_some() {
            tracing::warn!("--health-port is deprecated; use --http-endpoint");
        }
        Ok((format!("0.0.0.0:{}", self.health_port.unwrap_or(PORT)), given))
    }
}

/// Answers probes until SIGTERM or SIGINT.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    args.klog.start();
    let stop = crate::launch::stop_on_signal()?;
    let (address, metrics) = args.addresses()?;
    let check = healthy(args.connection.endpoint()?, args.probe_timeout);
    Site::new(Registry::default())
        .metrics_at(&args.http.metrics_path)
        .check("/healthz", check)
        .serve(&address)
        .await
        .with_context(|| format!("serve HTTP on {address}"))?;
    if let Some(address) = metrics {
        let site = Site::new(Registry::default()).metrics_at(&args.http.metrics_path);
        site.serve(address).await.with_context(|| format!("serve HTTP on --metrics-address={address}"))?;
    }
    stop.cancelled().await;
    Ok(())
}

/// The check that probes a driver over a new connection each time.
pub(crate) fn healthy(endpoint: Endpoint, timeout: Duration) -> impl Fn() -> Ready + Send + Sync + 'static {
    move || {
        let endpoint = endpoint.clone();
        Box::pin(async move {
            liveness::probe(&endpoint, timeout).await.map_err(|unwell| {
                tracing::warn!("{unwell}");
                Unwell::new(unwell.to_string())
            })
        })
    }
}
