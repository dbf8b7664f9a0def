//! CSI drivers, one row for each backend, and the one way to serve one.
//!
//! [`BACKENDS`] is the table. A new backend is a module here with its flags and its row, and a line in the table.
//! [`run`] is `berth driver`, `berth controller` and `berth node`: a driver on a socket, the latter two with sidecars and
//! registration in the same process. `berth up` ([`crate::stack`]) serves the same rows, each started by the command
//! line that [`Backend::embedded`] makes.

pub(crate) mod aliyun;
pub(crate) mod digitalocean;
pub(crate) mod exec;
pub(crate) mod flex;
pub(crate) mod local;
pub(crate) mod nfs;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_backends::Services;
use berth_backends::services::Mode;
use berth_core::NodeId;
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use berth_sidecars::registrar;
use clap::{ArgMatches, Args, Command, FromArgMatches as _};
use futures_util::future::BoxFuture;
use prometheus_client::registry::Registry;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::http::{Ready, Site, Unwell};
use crate::launch::{self, Choice, Health, PROBE_TIMEOUT, Servers, Sidecars, Surroundings, stop_on_signal};
use crate::logging;
use crate::sidecars::{self, Sidecar, flags::CsiTls, is_set, liveness};
use crate::stack::objects::Objects;

/// How long a stopping driver goes on removing deleted data and writing snapshots; the next start goes on with it.
const DRAIN: Duration = Duration::from_secs(5);

/// Every backend that there is.
pub(crate) const BACKENDS: &[Backend] =
    &[local::BACKEND, nfs::BACKEND, flex::BACKEND, exec::BACKEND, digitalocean::BACKEND, aliyun::BACKEND];

/// One kind of storage: its name, its flags, and how it is opened.
#[derive(Clone, Copy)]
pub(crate) struct Backend {
    /// Its subcommand of `driver`, `controller` and `node`, its name in `berth up --driver`, and its directory there.
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Whether a controller works without what its nodes have, so that `controller` and `node` each run only their part.
    pub(crate) separable: bool,
    /// Adds its own flags to a command.
    pub(crate) flags: fn(Command) -> Command,
    /// The driver's name, by these flags.
    pub(crate) driver_name: fn(&ArgMatches) -> String,
    /// Opens it as these flags say, to offer these services.
    pub(crate) open: fn(ArgMatches, Mode) -> BoxFuture<'static, anyhow::Result<Opened>>,
    /// Adds what `berth up` takes for it.
    pub(crate) embedded_flags: fn(Command) -> Command,
    /// Its command line in `berth up`, by the flags of that, in this directory, on this node.
    pub(crate) embedded: fn(&ArgMatches, &Path, &str) -> Vec<OsString>,
    /// The objects that `berth up` makes for a driver of this name.
    pub(crate) objects: fn(&str) -> Objects,
    /// What `berth driver` takes besides, to run under the command line of the driver in whose place it is.
    pub(crate) replaced: Replaced,
}

/// What only the command line of a replaced driver says.
#[derive(Clone, Copy)]
pub(crate) struct Replaced {
    /// Adds its flags to a command.
    flags: fn(Command) -> Command,
    /// Turns what they say into the flags that every driver has.
    apply: fn(&ArgMatches, &mut Common) -> anyhow::Result<()>,
}

impl Replaced {
    /// A driver whose flags are all among the backend's own.
    pub(crate) const NOTHING: Self = Self { flags: |command| command, apply: |_, _| Ok(()) };
}

impl Backend {
    /// The backend's own command line, without the sidecars that run with it.
    pub(crate) fn command(&self) -> Command {
        self.finished(Common::augment_args((self.flags)(clap::Command::new(self.name))))
    }

    /// A command of this backend with all its flags.
    fn finished(&self, command: Command) -> Command {
        // The last of a flag that is given twice counts, as for the drivers in whose place these run.
        let command = command.mut_args(|arg| match arg.get_action() {
            clap::ArgAction::Set => {
                let own = arg.get_id().clone();
                arg.overrides_with(own)
            }
            _ => arg,
        });
        // Last: every group of flags brings a description of its own.
        command.about(self.about).long_about(None)
    }

    /// Its command line in `berth up`, read: the flags of that, if any, its directory, the node's name, and `more` flags of
    /// its own.
    pub(crate) fn embed(
        &self,
        up: &ArgMatches,
        directory: &Path,
        node: &str,
        more: Vec<OsString>,
    ) -> anyhow::Result<ArgMatches> {
        let words = [OsString::from(self.name)].into_iter().chain((self.embedded)(up, directory, node));
        Ok(self.command().try_get_matches_from(words.chain(more))?)
    }
}

/// A backend that can be served.
pub(crate) struct Opened {
    pub(crate) driver: Arc<Services>,
    /// What a person may want to know of it.
    pub(crate) remark: String,
    /// Waits at most so long for what goes on behind finished calls.
    drain: Box<dyn FnOnce(Duration) -> BoxFuture<'static, ()> + Send>,
}

/// A driver that serves its socket.
pub(crate) struct Served {
    pub(crate) name: String,
    pub(crate) endpoint: Endpoint,
    opened: Opened,
    layer: CallLayer,
    server: JoinHandle<anyhow::Result<()>>,
}

impl Served {
    /// Undoes what a crash left half done, and serves the driver until `stop`; `servers` hears if it ends before.
    pub(crate) async fn start(
        opened: Opened,
        endpoint: &Endpoint,
        max_call: Option<Duration>,
        registry: &mut Registry,
        servers: &Servers,
        stop: CancellationToken,
    ) -> anyhow::Result<Self> {
        let name = opened.driver.name().to_owned();
        opened.driver.recover().await.context("undo what a crash left half done")?;
        let layer = CallLayer::new(Metrics::register(registry, &name), max_call);
        opened.driver.register_metrics(registry);
        let listener = Listener::bind(endpoint).await.context("listen for CSI calls")?;
        let endpoint = listener.endpoint().clone();
        let (routes, measured) = (opened.driver.routes(), layer.clone());
        let serving = stop.clone().cancelled_owned();
        let server = servers.spawn(format!("the driver {name} on {endpoint}"), stop, async move {
            berth_csi::serve(listener, routes, measured, serving).await.context("serve CSI")
        });
        Ok(Self { name, endpoint, opened, layer, server })
    }

    /// What a person may want to know of it.
    pub(crate) fn remark(&self) -> &str {
        &self.opened.remark
    }

    /// Calls the driver without its socket.
    pub(crate) fn client(&self) -> berth_sidecars::driver::Driver {
        berth_sidecars::driver::Driver::in_process(berth_csi::in_process(
            self.opened.driver.routes(),
            &self.layer,
        ))
    }

    /// Waits for the calls under way, after `stop`, and for a while for what goes on behind them.
    pub(crate) async fn ended(self) -> anyhow::Result<()> {
        let served = self.server.await.context("the driver panicked")?;
        (self.opened.drain)(DRAIN).await;
        served
    }
}

/// What of a driver a process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// `berth driver`: nothing but the driver.
    Driver,
    /// `berth controller`: the driver and its sidecars.
    Controller,
    /// `berth node`: the driver, registered with the node; with sidecars only if every node has its own.
    Node,
}

impl Role {
    pub(crate) const ALL: [Self; 3] = [Self::Driver, Self::Controller, Self::Node];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Controller => "controller",
            Self::Node => "node",
        }
    }

    /// The command line: one subcommand for each backend.
    pub(crate) fn command(self, backends: &[Backend], table: &[Sidecar]) -> Command {
        let about = match self {
            Self::Driver => "Run a CSI driver on a socket",
            Self::Controller => "Run a CSI driver and its sidecars in one process",
            Self::Node => "Run a CSI driver on a node and register it with the kubelet",
        };
        let backends = backends.iter().map(|backend| match self {
            Self::Driver => backend.finished((backend.replaced.flags)(backend.command())),
            Self::Controller | Self::Node => {
                let command = sidecars::flags(Registration::augment_args(backend.command()), table);
                command.about(backend.about).long_about(None)
            }
        });
        let command = clap::Command::new(self.name()).about(about);
        command.subcommand_required(true).arg_required_else_help(true).subcommands(backends)
    }
}

/// The flags that every driver has.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
struct Common {
    /// Where to serve CSI: unix:///path/to.sock, or tcp://host:port, which has no encryption and no authentication without --csi-tls-cert-file
    #[arg(long, env = "CSI_ENDPOINT", default_value = "unix:///run/berth/csi.sock", value_name = "URL")]
    endpoint: Endpoint,

    #[command(flatten)]
    tls: CsiTls,

    /// Which services to offer
    #[arg(long, value_enum, default_value_t = ModeArg::All)]
    mode: ModeArg,

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
enum ModeArg {
    /// Controller and node services
    All,
    /// Only what needs no particular node
    Controller,
    /// Only what works where volumes are used
    Node,
}

/// How the node learns of a driver.
#[derive(Debug, Args)]
#[command(next_help_heading = "Registration")]
struct Registration {
    /// The driver's socket, as the kubelet sees it [node: the endpoint; controller: not registered]
    #[arg(long, value_name = "PATH")]
    kubelet_registration_path: Option<PathBuf>,

    /// The kubelet's plugin registration directory, as mounted in this container
    #[arg(long, default_value = "/var/lib/kubelet/plugins_registry", value_name = "DIR")]
    plugin_registration_path: PathBuf,
}

/// Serves a backend, and runs the sidecars that belong to it, until SIGTERM or SIGINT; then finishes the calls under way.
pub(crate) async fn run(
    role: Role,
    backend: &Backend,
    table: &[Sidecar],
    matches: &ArgMatches,
) -> anyhow::Result<()> {
    let mut common = Common::from_arg_matches(matches)?;
    if role == Role::Driver {
        (backend.replaced.apply)(matches, &mut common)?;
    }
    logging::start(&common.logging);
    let endpoint = common.tls.apply(common.endpoint.clone())?;
    let mut registry = Registry::default();
    let sidecars = sidecars_of(role, table, matches, Surroundings::read()?, &mut registry)?;
    let mode = match (common.mode, role) {
        (ModeArg::All, Role::Controller) if backend.separable => Mode::Controller,
        (ModeArg::All, Role::Node) if backend.separable => Mode::Node,
        (ModeArg::All, _) => Mode::All,
        (ModeArg::Controller, _) => Mode::Controller,
        (ModeArg::Node, _) => Mode::Node,
    };
    let opened = (backend.open)(matches.clone(), mode).await?;
    let (stop, serving, servers) = (stop_on_signal()?, CancellationToken::new(), Servers::new());
    let driver = opened.driver.clone();
    let max_call = common.max_call_seconds.map(Duration::from_secs);
    let served = Served::start(opened, &endpoint, max_call, &mut registry, &servers, serving.clone()).await?;
    let health = Health::register(&mut registry);
    let client = sidecars.is_some().then(|| served.client());
    if let Some(client) = &client {
        client.measure(&mut registry);
    }
    let registration = registration_of(role, &served, matches)?;
    if let Some(address) = &common.http_endpoint {
        let lease_health = health.clone();
        // Alive is who can be reached as others reach it: a driver whose socket was removed needs a restart.
        let alive = || -> Box<dyn Fn() -> Ready + Send + Sync> {
            match &served.endpoint {
                // The certificate need not name the address that is listened on.
                Endpoint::Tcp { tls: Some(_), .. } => Box::new(ready(driver.clone())),
                endpoint => Box::new(liveness::healthy(endpoint.clone(), PROBE_TIMEOUT)),
            }
        };
        Site::new(registry)
            .check("/healthz", alive())
            .check("/livez", alive())
            .check("/readyz", ready(driver.clone()))
            .check("/healthz/leader-election", move || lease_health.leader_election())
            .serve(address)
            .await
            .with_context(|| format!("serve HTTP on {address}"))?;
    }
    tracing::info!(driver = served.name, endpoint = %served.endpoint, version = env!("CARGO_PKG_VERSION"), "ready");
    let registered = async {
        if let Some(options) = registration {
            registrar::keep_registered(options, stop.clone()).await;
        }
        Ok(())
    };
    let others = async {
        if let Some(sidecars) = &sidecars {
            return sidecars.run(client, &health, &stop).await;
        }
        stop.cancelled().await;
        Ok(())
    };
    let others = async { tokio::try_join!(others, registered).map(|_| ()) };
    // Sidecars and registration call the driver until they are done, so the driver ends after them.
    let outcome = tokio::select! {
        outcome = others => outcome,
        failure = servers.failed() => bail!(failure),
    };
    serving.cancel();
    served.ended().await?;
    outcome
}

/// The sidecars that run in the driver's process, if any do.
fn sidecars_of(
    role: Role,
    table: &[Sidecar],
    matches: &ArgMatches,
    surroundings: Surroundings,
    registry: &mut Registry,
) -> anyhow::Result<Option<Sidecars>> {
    match role {
        Role::Driver => return Ok(None),
        Role::Node if !is_set(matches, "node_deployment") => {
            if is_set(matches, "enable_capacity") {
                bail!(
                    "--enable-capacity has no effect on a node without --node-deployment; give both, or none"
                );
            }
            return Ok(None);
        }
        Role::Node | Role::Controller => {}
    }
    Sidecars::configure(Choice::Of(table), matches, surroundings, registry).map(Some)
}

/// Where and as what the node learns of the driver; nothing if it is not to.
fn registration_of(
    role: Role,
    served: &Served,
    matches: &ArgMatches,
) -> anyhow::Result<Option<registrar::Options>> {
    if role == Role::Driver {
        return Ok(None);
    }
    let flags = Registration::from_arg_matches(matches)?;
    let endpoint = match (flags.kubelet_registration_path, &served.endpoint) {
        (Some(path), _) => path,
        (None, _) if role == Role::Controller => return Ok(None),
        (None, Endpoint::Unix(path)) => path.clone(),
        (None, Endpoint::Tcp { .. }) => {
            bail!("the kubelet takes only sockets; give --endpoint=unix:///…")
        }
    };
    let directory = flags.plugin_registration_path;
    Ok(Some(registrar::Options { directory, driver: served.name.clone(), endpoint }))
}

/// The node's id where none is given.
fn node_id() -> anyhow::Result<NodeId> {
    launch::host_name()?.parse().context("the host's name cannot be the node id; give one with --node-id")
}

fn ready(driver: Arc<Services>) -> impl Fn() -> Ready + Send + Sync + 'static {
    move || {
        let driver = driver.clone();
        Box::pin(async move { driver.ready().await.map_err(|error| Unwell::new(error.to_string())) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sidecars::SIDECARS;

    fn has_sidecars(role: Role, words: &[&str]) -> anyhow::Result<bool> {
        let line = [role.name(), "local"].into_iter().chain(words.iter().copied());
        let matches = role.command(BACKENDS, SIDECARS).try_get_matches_from(line).unwrap();
        let (_, matches) = matches.subcommand().unwrap();
        let some = |text: &str| Some(text.to_owned());
        let pod =
            Surroundings { host: "h".to_owned(), node: some("n"), namespace: some("s"), pod: some("p") };
        sidecars_of(role, SIDECARS, matches, pod, &mut Registry::default()).map(|sidecars| sidecars.is_some())
    }

    #[test]
    fn the_last_of_a_flag_that_is_given_twice_counts_and_lists_keep_all() {
        let words =
            ["driver", "local", "--drivername=a", "--drivername=b", "--capacity=x=1Gi", "--capacity=y=2Gi"];
        let matches = Role::Driver.command(BACKENDS, SIDECARS).try_get_matches_from(words).unwrap();
        let (_, matches) = matches.subcommand().unwrap();
        assert_eq!(matches.get_one::<String>("driver_name").map(String::as_str), Some("b"));
        assert_eq!(matches.get_raw("capacity").unwrap().count(), 2);
    }

    #[test]
    fn a_node_has_sidecars_only_if_every_node_has_and_says_so_where_a_flag_would_do_nothing() {
        assert!(!has_sidecars(Role::Driver, &[]).unwrap());
        assert!(has_sidecars(Role::Controller, &[]).unwrap());
        assert!(!has_sidecars(Role::Node, &[]).unwrap());
        assert!(has_sidecars(Role::Node, &["--node-deployment", "--enable-capacity"]).unwrap());
        let refused = has_sidecars(Role::Node, &["--enable-capacity"]).unwrap_err().to_string();
        assert!(refused.contains("--node-deployment"), "{refused}");
    }
}
