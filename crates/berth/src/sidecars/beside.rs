//! `berth controller BACKEND` and `berth node BACKEND`: what runs in a driver's own process.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_csi::Endpoint;
use berth_sidecars::driver::Driver;
use berth_sidecars::registrar;
use clap::Args;
use tokio_util::sync::CancellationToken;

use super::flags::{Election, Kube};
use super::replica::{Health, Replica};
use super::together::Together;

/// How long to wait before the driver is introduced again.
const PAUSE: Duration = Duration::from_secs(1);

/// The sidecars beside a driver.
#[derive(Debug, Args)]
pub(crate) struct Sidecars {
    #[command(flatten)]
    kube: Kube,
    #[command(flatten)]
    election: Election,
    #[command(flatten)]
    together: Together,
}

/// How the node learns of a driver.
#[derive(Debug, Args)]
#[command(next_help_heading = "Registration")]
pub(crate) struct Registration {
    /// The driver's socket, as the kubelet sees it [node: the endpoint; controller: not registered]
    #[arg(long, value_name = "PATH")]
    kubelet_registration_path: Option<PathBuf>,

    /// The kubelet's registration directory, as seen here
    #[arg(long, default_value = "/var/lib/kubelet/plugins_registry", value_name = "DIR")]
    plugin_registration_path: PathBuf,
}

/// What runs beside a driver, in its process.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    sidecars: Option<Sidecars>,
    registration: Option<Registration>,
    always_registered: bool,
}

impl Beside {
    /// The sidecars; the node learns of the driver if its path is told.
    pub(crate) fn controller(sidecars: Sidecars, registration: Registration) -> Self {
        Self { sidecars: Some(sidecars), registration: Some(registration), always_registered: false }
    }

    /// The node learns of the driver; and, if so asked, the sidecars that can run on every node.
    pub(crate) fn node(sidecars: Sidecars, registration: Registration) -> anyhow::Result<Self> {
        let per_node = sidecars.together.is_per_node();
        if !per_node && sidecars.together.tells_capacity() {
            bail!("--enable-capacity has no effect on a node without --node-deployment; give both, or none");
        }
        let sidecars = per_node.then_some(sidecars);
        Ok(Self { sidecars, registration: Some(registration), always_registered: true })
    }

    /// Whether there is nothing at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.sidecars.is_none() && self.registration.is_none()
    }

    /// Runs over the driver in this process, if there is anything to run, until `stop`; then finishes what is under way.
    pub(crate) async fn run(
        self,
        driver: Option<Driver>,
        endpoint: Endpoint,
        health: Health,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let Some(driver) = driver else {
            stop.cancelled().await;
            return Ok(());
        };
        let register = match self.registration {
            Some(registration) => registration.options(&endpoint, self.always_registered)?,
            None => None,
        };
        let sidecars = async {
            if let Some(sidecars) = self.sidecars {
                return sidecars.run(driver.clone(), health, &stop).await;
            }
            stop.cancelled().await;
            Ok(())
        };
        let registered = async {
            if let Some(directory) = register {
                introduce(&driver, directory, &stop).await;
            }
            Ok(())
        };
        tokio::try_join!(sidecars, registered).map(|_| ())
    }
}

impl Sidecars {
    async fn run(self, driver: Driver, health: Health, stop: &CancellationToken) -> anyhow::Result<()> {
        // A mistake in the flags is told before anything is waited for.
        self.together.components(&self.kube, &self.election)?;
        let replica = Replica::new(&self.kube, &self.election, health).await?;
        let identity = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            identity = driver.ready() => identity,
        };
        let groups = self.together.groups(&identity, &self.kube, &self.election)?;
        replica.run(groups, Some(driver), stop).await
    }
}

impl Registration {
    /// Where to introduce the driver, and as what; nothing if not asked to.
    fn options(self, endpoint: &Endpoint, always: bool) -> anyhow::Result<Option<(PathBuf, PathBuf)>> {
        let socket = match (self.kubelet_registration_path, endpoint) {
            (Some(path), _) => path,
            (None, _) if !always => return Ok(None),
            (None, Endpoint::Unix(path)) => path.clone(),
            (None, Endpoint::Tcp { .. }) => {
                bail!("the kubelet takes only sockets; give --endpoint=unix:///…")
            }
        };
        Ok(Some((self.plugin_registration_path, socket)))
    }
}

/// Lets the node know of the driver until `stop`, whatever happens to the socket.
async fn introduce(driver: &Driver, (directory, endpoint): (PathBuf, PathBuf), stop: &CancellationToken) {
    let identity = tokio::select! {
        () = stop.cancelled() => return,
        identity = driver.ready() => identity,
    };
    let options = registrar::Options { directory, driver: identity.name.clone(), endpoint };
    while !stop.is_cancelled() {
        let outcome = registrar::serve(options.clone(), stop.clone()).await.context("register the driver");
        if let Err(error) = outcome {
            tracing::warn!("{error:#}; trying again");
            tokio::select! {
                () = stop.cancelled() => {}
                () = tokio::time::sleep(PAUSE) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        sidecars: Sidecars,
        #[command(flatten)]
        registration: Registration,
    }

    fn node(words: &[&str]) -> anyhow::Result<Beside> {
        let line = Line::try_parse_from(["program"].iter().chain(words)).unwrap();
        Beside::node(line.sidecars, line.registration)
    }

    #[test]
    fn a_node_has_sidecars_only_if_every_node_has_and_says_so_where_a_flag_would_do_nothing() {
        assert!(node(&[]).unwrap().sidecars.is_none());
        assert!(node(&["--node-deployment", "--enable-capacity"]).unwrap().sidecars.is_some());
        let refused = node(&["--enable-capacity"]).unwrap_err().to_string();
        assert!(refused.contains("--node-deployment"), "{refused}");
    }
}
