//! One replica of some components: its cluster, its driver, its Lease and its health.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_kube::leader::{self, Elector, Standing};
use berth_kube::{Cluster, Metrics};
use berth_sidecars::driver::{Driver, Identity};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::component::{Component, Measures, sanitized};
use super::flags::{Election, Kube};
use crate::http::{Ready, Unwell};

/// Where a pod finds the namespace that it runs in.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// The Lease of components that run together, but for the snapshot controller, which is one for all drivers.
pub(crate) fn shared_lease(driver: &str) -> String {
    sanitized(&format!("berth-sidecars-{driver}"))
}

/// Whom the components work for, and whether they may work now.
pub(crate) struct Replica {
    client: Client,
    election: Election,
    health: Health,
}

/// What others can see of the leadership and the work.
#[derive(Clone)]
pub(crate) struct Health {
    standings: Arc<OnceLock<Vec<watch::Receiver<Standing>>>>,
    loops: Metrics,
    components: Measures,
}

impl Health {
    /// With the metrics of queues, leases and components in the registry.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        Self {
            standings: Arc::default(),
            loops: Metrics::register(registry),
            components: Measures::register(registry),
        }
    }

    /// The answer of `/healthz/leader-election`.
    pub(crate) fn leader_election(&self) -> Ready {
        let standings = self.standings.get();
        let complaint = standings.into_iter().flatten().find_map(|standing| standing.borrow().complaint());
        Box::pin(async move { complaint.map_or(Ok(()), |complaint| Err(Unwell::new(complaint))) })
    }
}

/// Components that share a Lease.
pub(crate) struct Group {
    pub(crate) lease: String,
    pub(crate) components: Vec<Component>,
}

impl Replica {
    /// A replica in the cluster that the flags or the environment name.
    pub(crate) async fn new(kube: &Kube, election: &Election, health: Health) -> anyhow::Result<Self> {
        for sentence in kube.feature_gates.without_effect() {
            tracing::warn!("{sentence}");
        }
        let client = Client::try_from(config(kube).await?).context("prepare to talk to the cluster")?;
        Ok(Self { client, election: election.clone(), health })
    }

    /// Runs the groups, each while its Lease is held, until `stop`; then finishes what is under way.
    pub(crate) async fn run(
        &self,
        groups: Vec<Group>,
        driver: Option<Driver>,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        if !self.election.leader_election {
            let components = groups.into_iter().flat_map(|group| group.components).collect();
            self.run_all(components, driver, stop.clone()).await;
            return Ok(());
        }
        let electors = groups
            .into_iter()
            .map(|group| Ok((self.elector(&group.lease)?, group)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let standings = electors.iter().map(|(elector, _)| elector.standing()).collect();
        // One replica runs once.
        let _ = self.health.standings.set(standings);
        let runs = electors.iter().map(|(elector, group)| {
            let driver = driver.clone();
            elector
                .run(stop.clone(), move |term| self.run_all(group.components.clone(), driver.clone(), term))
        });
        futures_util::future::join_all(runs).await;
        Ok(())
    }

    fn elector(&self, lease: &str) -> anyhow::Result<Elector> {
        let flags = &self.election;
        let options = leader::Options {
            lease: flags.leader_election_lease_duration,
            renew: flags.leader_election_renew_deadline,
            retry: flags.leader_election_retry_period,
            labels: flags.leader_election_labels.0.clone(),
            ..leader::Options::new(&namespace(&flags.leader_election_namespace), lease, &identity()?)
        };
        let elector = Elector::new(self.client.clone(), options).context(
            "the flags --leader-election-lease-duration, -renew-deadline and -retry-period do not fit together",
        )?;
        Ok(elector.measured(&self.health.loops))
    }

    /// Runs components over one cache per kind until `stop`.
    async fn run_all(&self, components: Vec<Component>, driver: Option<Driver>, stop: CancellationToken) {
        let cluster = Cluster::new(self.client.clone(), stop.clone()).frugal().measured(&self.health.loops);
        // Watches end with the work, also when that is dropped.
        let _watching = stop.drop_guard();
        let mut running = JoinSet::new();
        for component in components {
            tracing::info!(component = component.name(), "starting");
            let component = component.measured(&self.health.components);
            running.spawn(component.run(cluster.clone(), driver.clone()));
        }
        while running.join_next().await.is_some() {}
    }
}

/// The components that a driver needs, of those that were asked for; if it needs none, a sentence says why.
pub(crate) fn needed(
    components: Vec<Component>,
    identity: &Identity,
    all_must: bool,
) -> anyhow::Result<Vec<Component>> {
    let mut kept = Vec::new();
    for component in components {
        match component.missing(identity) {
            None => kept.push(component),
            Some(missing) if all_must => bail!(
                "{} has nothing to do: the driver {} does not announce {missing}",
                component.name(),
                identity.name
            ),
            Some(missing) => tracing::info!(
                component = component.name(),
                "not needed: the driver does not announce {missing}"
            ),
        }
    }
    Ok(kept)
}

async fn config(kube: &Kube) -> anyhow::Result<Config> {
    let from_environment = || std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty()).map(Into::into);
    let mut config = match kube.kubeconfig.clone().or_else(from_environment) {
        Some(path) => {
            let read = Kubeconfig::read_from(&path)
                .with_context(|| format!("read the kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("use the kubeconfig {}", path.display()))?
        }
        None => Config::incluster().map_err(|error| {
            anyhow::anyhow!(
                "no cluster is named, by --kubeconfig or KUBECONFIG, and this is no pod with a service account: {error}"
            )
        })?,
    };
    if let Some(master) = kube.master.as_ref().filter(|master| !master.is_empty()) {
        config.cluster_url = master.parse().with_context(|| format!("--master={master} is no URL"))?;
    }
    // A connection whose other end is gone without a word says nothing by itself. Longer than a watch lasts.
    config.read_timeout = Some(Duration::from_secs(295));
    config.reset_reader_on_write = true;
    Ok(config)
}

/// The namespace of the Lease: as told, else this pod's, else `default`.
fn namespace(told: &str) -> String {
    let from_environment = || std::env::var("POD_NAMESPACE").ok();
    let from_account = || std::fs::read_to_string(NAMESPACE_FILE).ok();
    Some(told.to_owned())
        .filter(|name| !name.is_empty())
        .or_else(|| from_environment().filter(|name| !name.is_empty()))
        .or_else(|| from_account().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()))
        .unwrap_or_else(|| "default".to_owned())
}

/// This process among its replicas: the pod's name if it is told, which a restarted container keeps; else the host's
/// and a number, because on a host's network several share a name, and two with one name would both lead.
fn identity() -> anyhow::Result<String> {
    if let Some(pod) = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty()) {
        return Ok(sanitized(&pod));
    }
    let number = jiff::Timestamp::now().as_nanosecond() ^ i128::from(std::process::id());
    Ok(sanitized(&format!("{}-{:08x}", host_name()?, number & 0xffff_ffff)))
}

/// The host's name, which in a pod is the pod's.
pub(crate) fn host_name() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").context("read the host's name")?;
    Ok(name.trim().to_owned())
}
