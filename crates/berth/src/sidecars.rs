//! The external components of a CSI driver, together or each alone, with upstream's command lines.
//!
//! - [`Args`]: `berth sidecars`, all that a driver needs over one connection, under one Lease.
//! - [`alone`], [`registrar`], [`liveness`]: each under its upstream name, as a subcommand and by the program's name.
//! - [`beside`]: in the process of Berth's own drivers.

pub(crate) mod alone;
pub(crate) mod beside;
mod component;
mod flags;
pub(crate) mod go;
pub(crate) mod liveness;
mod monitoring;
mod options;
mod provisioning;
pub(crate) mod registrar;
pub(crate) mod replica;
mod together;

use std::time::Duration;

use anyhow::Context as _;
use berth_sidecars::driver::Driver;
use prometheus_client::registry::Registry;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use self::replica::{Health, Replica};
use crate::http::Site;

/// How long a probe of the driver may take before it counts as dead.
pub(crate) const PROBING: Duration = Duration::from_secs(3);

/// Everything that a CSI driver needs beside it: makes, attaches, grows, changes, snapshots and watches over its volumes.
#[derive(Debug, clap::Args)]
#[command(version, args_override_self = true)]
pub(crate) struct Args {
    #[command(flatten)]
    connection: flags::Connection,
    #[command(flatten)]
    kube: flags::Kube,
    #[command(flatten)]
    election: flags::Election,
    #[command(flatten)]
    http: flags::Http,
    #[command(flatten)]
    klog: flags::Klog,
    #[command(flatten)]
    together: together::Together,
}

/// Runs until SIGTERM.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    args.klog.start();
    args.together.components(&args.kube, &args.election)?;
    let address = args.http.address()?;
    let stop = stop_on_signal()?;
    let mut registry = Registry::default();
    let health = Health::register(&mut registry);
    let driver = Driver::connect(&args.connection.csi_address);
    driver.measure(&mut registry);
    if let Some(address) = address {
        let told = health.clone();
        Site::new(registry)
            .metrics_at(&args.http.metrics_path)
            .check("/healthz/leader-election", move || told.leader_election())
            .check("/healthz", liveness::healthy(args.connection.csi_address.clone(), PROBING))
            .serve(address)
            .await
            .with_context(|| format!("serve HTTP on --http-endpoint={address}"))?;
    }
    let replica = Replica::new(&args.kube, &args.election, health).await?;
    let identity = tokio::select! {
        () = stop.cancelled() => return Ok(()),
        identity = driver.ready() => identity,
    };
    let groups = args.together.groups(&identity, &args.kube, &args.election)?;
    replica.run(groups, Some(driver), &stop).await
}

/// A token that SIGTERM and SIGINT cancel.
pub(crate) fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let told = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping: finishing what is under way");
        told.cancel();
    });
    Ok(stop)
}
