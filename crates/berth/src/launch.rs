//! The one way to start a role: sidecars over a driver, each while its Lease is held, and whatever else runs for long.
//!
//! [`run`] is `berth sidecars` and each sidecar alone; `berth controller` and `berth node` ([`crate::driver`]) run
//! [`Sidecars`] over the driver in their own process, and so does `berth up` ([`crate::stack`]), in a cluster of its own.
//! Sidecars and control loops are [`supervise`]d; what listens for calls is not started again: the process ends with it
//! ([`Servers`]).

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use berth_core::{Backoff, names};
use berth_kube::leader::{self, Elector, Leadership};
use berth_kube::storage::lease_name;
use berth_kube::{Cluster, Metrics};
use berth_sidecars::driver::{Driver, Identity};
use clap::{ArgMatches, FromArgMatches as _};
use futures_util::FutureExt as _;
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use prometheus_client::registry::Registry;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::http::{Ready, Site, Unwell};
use crate::machine;
use crate::sidecars::flags::{Connection, Election, Http, Klog, Kube};
use crate::sidecars::{self, Run, Scope, Sidecar, is_set, liveness};

/// How long a probe of the driver may take before it counts as dead.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the last events may take to be written.
pub(crate) const EVENTS: Duration = Duration::from_secs(2);
/// How long a role that failed rests before it is started again.
pub(crate) const RESTART: Backoff =
    Backoff { first: Duration::from_secs(1), longest: Duration::from_mins(1) };

/// What the environment of a process says about it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surroundings {
    /// The host's name, which in a pod is the pod's.
    pub(crate) host: String,
    /// The node, from the environment variable NODE_NAME.
    pub(crate) node: Option<String>,
    /// The namespace, from NAMESPACE or else POD_NAMESPACE.
    pub(crate) namespace: Option<String>,
    /// The pod, from the environment variable POD_NAME.
    pub(crate) pod: Option<String>,
}

impl Surroundings {
    /// Reads the host name and the environment of this process.
    pub(crate) fn read() -> anyhow::Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Ok(Self {
            host: host_name()?,
            node: variable("NODE_NAME"),
            namespace: variable("NAMESPACE").or_else(|| variable("POD_NAMESPACE")),
            pod: variable("POD_NAME"),
        })
    }
}

/// What the sidecars of a process have in common.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) kube: Kube,
    pub(crate) election: Election,
    pub(crate) surroundings: Surroundings,
    /// This node, if every node has these sidecars of its own (`--node-deployment`).
    pub(crate) node: Option<String>,
}

impl Setting {
    pub(crate) fn read(matches: &ArgMatches, surroundings: Surroundings) -> anyhow::Result<Self> {
        let (kube, election) = (Kube::from_arg_matches(matches)?, Election::from_arg_matches(matches)?);
        let mut node = None;
        if is_set(matches, "node_deployment") {
            if election.leader_election {
                bail!(
                    "--leader-election and --node-deployment exclude each other: every node has its own work"
                );
            }
            let name = surroundings.node.clone().filter(|name| !name.is_empty());
            node =
                Some(name.context(
                    "--node-deployment needs the node's name in the environment variable NODE_NAME",
                )?);
        }
        Ok(Self { kube, election, surroundings, node })
    }
}

/// Which sidecars a command line is for.
#[derive(Clone, Copy)]
pub(crate) enum Choice<'a> {
    /// One alone, with upstream's command line.
    Single(&'a Sidecar),
    /// Those of a table that the flags or the driver ask for.
    Of(&'a [Sidecar]),
}

/// `berth sidecars`, and each sidecar alone: runs over a driver's socket until SIGTERM or SIGINT.
pub(crate) async fn run(choice: Choice<'_>, matches: &ArgMatches) -> anyhow::Result<()> {
    Klog::from_arg_matches(matches)?.start();
    let mut registry = Registry::default();
    let sidecars = Sidecars::configure(choice, matches, Surroundings::read()?, &mut registry)?;
    let http = Http::from_arg_matches(matches)?;
    let address = http.address()?;
    let stop = stop_on_signal()?;
    let health = Health::register(&mut registry);
    let endpoint = match choice {
        Choice::Single(Sidecar { scope: Scope::Cluster, .. }) => None,
        _ => Some(Connection::from_arg_matches(matches)?.endpoint()?),
    };
    let driver = endpoint.as_ref().map(Driver::connect);
    if let Some(driver) = &driver {
        driver.measure(&mut registry);
    }
    if let Some(address) = address {
        let lease_health = health.clone();
        let mut site = Site::new(registry)
            .metrics_at(&http.metrics_path)
            .check("/healthz/leader-election", move || lease_health.leader_election());
        if let (Choice::Of(_), Some(endpoint)) = (choice, endpoint) {
            site = site.check("/healthz", liveness::healthy(endpoint, PROBE_TIMEOUT));
        }
        site.serve(address).await.with_context(|| format!("serve HTTP on --http-endpoint={address}"))?;
    }
    sidecars.run(driver, &health, &stop).await
}

/// Sidecars that have read their flags.
pub(crate) struct Sidecars {
    chosen: Vec<(Sidecar, Run)>,
    setting: Setting,
    /// Asked for by name, so that a driver that does not need one is a mistake.
    by_name: bool,
    /// Whether the sidecars of one driver share a Lease.
    together: bool,
}

impl Sidecars {
    /// Reads the flags, and says what is wrong with them; metrics go to the registry.
    pub(crate) fn configure(
        choice: Choice<'_>,
        matches: &ArgMatches,
        surroundings: Surroundings,
        registry: &mut Registry,
    ) -> anyhow::Result<Self> {
        let setting = Setting::read(matches, surroundings)?;
        let (rows, together) = match choice {
            Choice::Single(row) => (vec![*row], false),
            Choice::Of(table) => (sidecars::chosen(table, matches)?, true),
        };
        let by_name = !together || matches.contains_id("controllers");
        let chosen = rows
            .into_iter()
            .map(|row| Ok((row, (row.configure)(matches, &setting, registry)?)))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self { chosen, setting, by_name, together })
    }

    /// Runs those that the driver needs in the cluster that the flags or the environment name, each while its Lease is
    /// held, until `stop`; then finishes what is under way.
    pub(crate) async fn run(
        &self,
        driver: Option<Driver>,
        health: &Health,
        stop: &CancellationToken,
    ) -> anyhow::Result<()> {
        let client = client(&self.setting.kube).await?;
        let cluster = |stop| Cluster::new(client.clone(), stop).compressed().measured(&health.loops);
        let Some((name, needed)) = self.needed(driver.as_ref(), stop).await? else { return Ok(()) };
        if !self.setting.election.leader_election {
            let cluster = cluster(stop.clone());
            run_all(&needed, cluster.clone(), driver).await;
            cluster.finish_events(EVENTS).await;
            return Ok(());
        }
        let mut groups: Vec<(String, Vec<(Sidecar, Run)>)> = Vec::new();
        for (row, run) in needed {
            let shared = self.together && row.scope != Scope::Cluster;
            let lease = if shared { lease_name(&format!("berth-sidecars-{name}")) } else { row.lease(&name) };
            match groups.iter_mut().find(|(known, _)| *known == lease) {
                Some((_, group)) => group.push((row, run)),
                None => groups.push((lease, vec![(row, run)])),
            }
        }
        let electors = groups
            .into_iter()
            .map(|(lease, group)| {
                let rivals = rivals(&lease, group.iter().map(|(row, _)| row), &name);
                Ok((self.elector(&client, &lease, rivals, health)?, group))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        // A process runs its sidecars once.
        let _ = health.leaderships.set(electors.iter().map(|(elector, _)| elector.leadership()).collect());
        let runs = electors.iter().map(|(elector, group)| {
            let (cluster, driver) = (&cluster, &driver);
            elector.run(stop.clone(), move |term| async move {
                // Watches end with the term, also when its work is dropped.
                let _watching = term.clone().drop_guard();
                let cluster = cluster(term);
                run_all(group, cluster.clone(), driver.clone()).await;
                cluster.finish_events(EVENTS).await;
            })
        });
        futures_util::future::join_all(runs).await;
        Ok(())
    }

    /// Runs those that the driver needs until the cluster's shutdown; then finishes what is under way.
    pub(crate) async fn run_in(&self, cluster: Cluster, driver: Option<Driver>) -> anyhow::Result<()> {
        if let Some((_, needed)) = self.needed(driver.as_ref(), cluster.shutdown()).await? {
            run_all(&needed, cluster, driver).await;
        }
        Ok(())
    }

    /// Waits for the driver, and returns its name and the sidecars that it needs; `None` if the process is stopped before.
    async fn needed(
        &self,
        driver: Option<&Driver>,
        stop: &CancellationToken,
    ) -> anyhow::Result<Option<(String, Vec<(Sidecar, Run)>)>> {
        let identity = match driver {
            None => Arc::new(Identity::default()),
            Some(driver) => tokio::select! {
                () = stop.cancelled() => return Ok(None),
                identity = driver.ready() => identity,
            },
        };
        let mut needed = Vec::new();
        for (row, run) in &self.chosen {
            match (row.missing)(&identity) {
                None => needed.push((*row, run.clone())),
                Some(missing) if self.by_name => bail!(
                    "{} has nothing to do: the driver {} does not announce {missing}{}",
                    row.name,
                    identity.name,
                    if self.together { "; change --controllers, or the driver" } else { "" },
                ),
                Some(missing) => {
                    tracing::info!(sidecar = row.name, "not needed: the driver does not announce {missing}");
                }
            }
        }
        Ok(Some((identity.name.clone(), needed)))
    }

    fn elector(
        &self,
        client: &Client,
        lease: &str,
        rivals: Vec<String>,
        health: &Health,
    ) -> anyhow::Result<Elector> {
        let flags = &self.setting.election;
        let options = leader::Options {
            lease: flags.leader_election_lease_duration,
            renew: flags.leader_election_renew_deadline,
            retry: flags.leader_election_retry_period,
            labels: flags.leader_election_labels.0.clone(),
            rivals,
            ..leader::Options::new(&namespace(&flags.leader_election_namespace), lease, &identity()?)
        };
        let elector = Elector::new(client.clone(), options).context(
            "the flags --leader-election-lease-duration, -renew-deadline and -retry-period do not fit together",
        )?;
        Ok(elector.measured(&health.loops))
    }
}

/// The Leases whose holders do the same work as sidecars that run under `lease`, in whatever namespace: upstream's of each
/// sidecar where ours share one, and the snapshot controller's, of which a cluster has one. A sidecar of a driver that
/// runs alone competes for upstream's Lease in its own namespace, as upstream's replicas do, and has no other rival.
fn rivals<'a>(lease: &str, rows: impl Iterator<Item = &'a Sidecar>, driver: &str) -> Vec<String> {
    let names: Vec<String> = rows
        .filter(|row| row.scope == Scope::Cluster || row.lease(driver) != lease)
        .map(|row| row.lease(driver))
        .collect();
    let shared = names.iter().any(|name| name != lease).then(|| lease.to_owned());
    shared.into_iter().chain(names).collect()
}

/// Runs sidecars over one cache per kind until the cluster's shutdown.
async fn run_all(sidecars: &[(Sidecar, Run)], cluster: Cluster, driver: Option<Driver>) {
    let mut running = JoinSet::new();
    for (row, run) in sidecars {
        tracing::info!(sidecar = row.name, "starting");
        let (name, run, cluster, driver) = (row.name, run.clone(), cluster.clone(), driver.clone());
        let shutdown = cluster.shutdown().clone();
        running.spawn(supervise(RESTART, name, shutdown, move || run(cluster.clone(), driver.clone())));
    }
    cluster.shutdown().cancelled().await;
    while running.join_next().await.is_some() {}
}

/// Runs a role until `shutdown`. One that panics, or ends unasked, is started again after a pause that grows with every
/// failure in a row; the other roles of the process go on.
pub(crate) async fn supervise<R>(
    restart: Backoff,
    name: &'static str,
    shutdown: CancellationToken,
    role: impl Fn() -> R,
) where
    R: Future<Output = ()>,
{
    let mut failures = 0;
    loop {
        let begun = Instant::now();
        let ended = AssertUnwindSafe(async { role().await }).catch_unwind().await;
        if shutdown.is_cancelled() {
            return;
        }
        // What ran for long has nothing to do with the failure before.
        failures = if begun.elapsed() > restart.longest { 1 } else { failures + 1 };
        let pause = restart.pause(failures);
        match ended {
            Ok(()) => tracing::error!(role = name, "ended unasked; starting it again in {pause:?}"),
            Err(panic) => {
                let text = panic_text(panic.as_ref());
                tracing::error!(role = name, "panicked: {text}; starting it again in {pause:?}");
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// What a panic says.
fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("for a reason that is no text")
}

/// The tasks of a process that it cannot do without and that are not started again: the API server, drivers' servers, and
/// nodes. Whoever runs them ends when one of them does.
#[derive(Clone)]
pub(crate) struct Servers {
    failure: watch::Sender<Option<String>>,
}

impl Servers {
    pub(crate) fn new() -> Self {
        Self { failure: watch::Sender::new(None) }
    }

    /// Runs a server in a task of its own. If it ends or panics before `shutdown`, that is logged, and [`Servers::failed`]
    /// returns it.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        name: String,
        shutdown: CancellationToken,
        server: impl Future<Output = anyhow::Result<T>> + Send + 'static,
    ) -> JoinHandle<anyhow::Result<T>> {
        let failure = self.failure.clone();
        tokio::spawn(async move {
            let outcome = AssertUnwindSafe(server).catch_unwind().await;
            let outcome = outcome
                .unwrap_or_else(|panic| Err(anyhow::anyhow!("it panicked: {}", panic_text(panic.as_ref()))));
            if !shutdown.is_cancelled() {
                let why = outcome.as_ref().err().map_or_else(String::new, |error| format!(": {error:#}"));
                let text = format!("{name} ended unasked{why}");
                tracing::error!("{text}");
                failure.send_if_modified(|known| {
                    let first = known.is_none();
                    known.get_or_insert(text);
                    first
                });
            }
            outcome
        })
    }

    /// Returns, when a server has ended without being asked to, which one and why.
    pub(crate) async fn failed(&self) -> String {
        let mut failure = self.failure.subscribe();
        let failed = failure.wait_for(Option::is_some).await;
        failed.expect("the sender is borrowed").clone().unwrap_or_default()
    }
}

/// A token that SIGTERM and SIGINT cancel.
pub(crate) fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping: finishing what is under way");
        stopping.cancel();
    });
    Ok(stop)
}

/// What others can see of the leadership and the work.
#[derive(Clone)]
pub(crate) struct Health {
    leaderships: Arc<OnceLock<Vec<watch::Receiver<Leadership>>>>,
    loops: Metrics,
}

impl Health {
    /// With the metrics of queues and leases in the registry.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        Self { leaderships: Arc::default(), loops: Metrics::register(registry) }
    }

    /// The answer of `/healthz/leader-election`.
    pub(crate) fn leader_election(&self) -> Ready {
        let leaderships = self.leaderships.get();
        let complaint =
            leaderships.into_iter().flatten().find_map(|leadership| leadership.borrow().complaint());
        Box::pin(async move { complaint.map_or(Ok(()), |complaint| Err(Unwell::new(complaint))) })
    }
}

/// A client of the cluster that the flags or the environment name.
async fn client(kube: &Kube) -> anyhow::Result<Client> {
    for sentence in kube.feature_gates.without_effect() {
        tracing::warn!("{sentence}");
    }
    let mut config = match machine::kubeconfig_named(kube.kubeconfig.as_deref())? {
        Some(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .context("use the kubeconfig")?,
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
    Client::try_from(config).context("prepare to talk to the cluster")
}

/// The namespace of the Lease: the given one, else this pod's, else `default`.
fn namespace(given: &str) -> String {
    let from_environment = || std::env::var("POD_NAMESPACE").ok();
    let from_account = || std::fs::read_to_string(names::SERVICE_ACCOUNT_NAMESPACE_FILE).ok();
    Some(given.to_owned())
        .filter(|name| !name.is_empty())
        .or_else(|| from_environment().filter(|name| !name.is_empty()))
        .or_else(|| from_account().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()))
        .unwrap_or_else(|| "default".to_owned())
}

/// This process among its replicas: the pod's name if POD_NAME has it, which a restarted container keeps; else the host's
/// and a number, because on a host's network several share a name, and two with one name would both lead.
fn identity() -> anyhow::Result<String> {
    if let Some(pod) = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty()) {
        return Ok(lease_name(&pod));
    }
    let number = jiff::Timestamp::now().as_nanosecond() ^ i128::from(std::process::id());
    Ok(lease_name(&format!("{}-{:08x}", host_name()?, number & 0xffff_ffff)))
}

/// The host's name, which in a pod is the pod's.
pub(crate) fn host_name() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").context("read the host's name")?;
    Ok(name.trim().to_owned())
}

#[cfg(test)]
mod tests;
