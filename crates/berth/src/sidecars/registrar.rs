//! `berth csi-node-driver-registrar`: registers a CSI driver with the kubelet, as node-driver-registrar does.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_csi::Endpoint;
use berth_sidecars::{liveness, registrar};
use hyper::StatusCode;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use super::{flags, go};
use crate::http::{Ready, Site, Unwell};

/// How long to wait before a driver that does not answer is asked again.
const PAUSE: Duration = Duration::from_secs(1);
/// How long our own registration socket may take to answer.
const ANSWERING: Duration = Duration::from_secs(3);

/// Registers a CSI driver with the kubelet.
#[derive(Debug, clap::Args)]
#[command(version, args_override_self = true)]
pub(crate) struct Args {
    #[command(flatten)]
    connection: flags::Connection,

    /// The driver's socket, as the kubelet sees it
    #[arg(long, value_name = "PATH")]
    kubelet_registration_path: Option<PathBuf>,

    /// The kubelet's plugin registration directory, as mounted in this container
    #[arg(long, default_value = "/registration", value_name = "DIR")]
    plugin_registration_path: PathBuf,

    /// How long the driver may take to answer GetPluginInfo
    #[arg(long, default_value = "1s", value_parser = go::positive_duration, value_name = "DURATION")]
    timeout: Duration,

    /// Deprecated: registration, which driver-registrar called node-register, or kubelet-registration-probe, which has
    /// nothing left to do
    #[arg(long, default_value = "registration", hide = true, value_parser = ["registration", "node-register", PROBE])]
    mode: String,

    /// Serve /healthz here, such as :9809
    #[arg(long, default_value = "", hide_default_value = true, value_name = "ADDRESS")]
    http_endpoint: String,

    /// Deprecated: use --http-endpoint instead
    #[arg(long, hide = true, default_value = "0")]
    health_port: u16,

    #[command(flatten)]
    klog: flags::Klog,
}

impl Args {
    /// Where health is served, if anywhere.
    fn address(&self) -> anyhow::Result<Option<String>> {
        match (self.http_endpoint.as_str(), self.health_port) {
            ("", 0) => Ok(None),
            (address, 0) => Ok(Some(address.to_owned())),
            ("", port) => {
                tracing::warn!("--health-port is deprecated; use --http-endpoint");
                Ok(Some(format!("0.0.0.0:{port}")))
            }
            _ => {
                bail!("--http-endpoint and the deprecated --health-port exclude each other; drop the latter")
            }
        }
    }
}

const PROBE: &str = "kubelet-registration-probe";

/// Runs until SIGTERM, or until the node refuses the driver.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    args.klog.start();
    if args.mode == PROBE {
        tracing::warn!("--mode={PROBE} is deprecated and does nothing; drop the exec probe");
        return Ok(());
    }
    let Some(endpoint) = args.kubelet_registration_path.clone() else {
        bail!(
            "--kubelet-registration-path is missing: the path of the driver's socket, as the kubelet sees it"
        );
    };
    let address = args.address()?;
    let stop = crate::launch::stop_on_signal()?;
    let csi = args.connection.endpoint()?;
    let Some(driver) = name_of_driver(&args, &csi, &stop).await else { return Ok(()) };
    if let Some(address) = address {
        let (directory, name) = (args.plugin_registration_path.clone(), driver.clone());
        Site::new(Registry::default())
            .check("/healthz", move || healthy(directory.clone(), name.clone()))
            .serve(&address)
            .await
            .with_context(|| format!("serve HTTP on {address}"))?;
    }
    let options = registrar::Options { directory: args.plugin_registration_path, driver, endpoint };
    registrar::serve(options, stop).await.context("register the driver")
}

/// The answer of `/healthz`: 404 if the socket is gone, which is the kubelet's to notice.
fn healthy(directory: PathBuf, driver: String) -> Ready {
    Box::pin(async move {
        liveness::registration(&directory, &driver, ANSWERING).await.map_err(|unwell| {
            let status = match unwell {
                liveness::Unwell::Gone(_) => StatusCode::NOT_FOUND,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            };
            Unwell { status, why: format!("{:#}", anyhow::Error::from(unwell)) }
        })
    })
}

/// Asks the driver for its name until it answers; `None` if the process is stopped before.
async fn name_of_driver(args: &Args, endpoint: &Endpoint, stop: &CancellationToken) -> Option<String> {
    let driver = berth_csi::Client::connect(endpoint);
    let mut logged = false;
    loop {
        let error = match registrar::name_of(&driver, args.timeout).await {
            Ok(name) => return Some(name),
            Err(error) => anyhow::Error::from(error),
        };
        if !logged {
            tracing::warn!(driver = %endpoint, "{error:#}; asking every second");
            logged = true;
        }
        tokio::select! {
            () = stop.cancelled() => return None,
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}
