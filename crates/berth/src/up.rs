//! `berth up`: claim to mounted pod on one machine, with nothing installed.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use berth_apiserver::rest::TolerationSeconds;
use berth_core::names;
use berth_csi::Endpoint;
use berth_kube::Cluster;
use berth_node::node::ContainerRuntime;
use clap::builder::PossibleValuesParser;
use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches as _, ValueEnum};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::ResourceExt as _;
use tokio::signal::unix::{SignalKind, signal};

use crate::apiserver::EmptyStore;
use crate::cloud::{CLOUDS, Cloud};
use crate::driver::{BACKENDS, Backend};
use crate::machine::{self, Running};
use crate::sidecars::{Sidecar, go};
use crate::stack::{self, Stack};
use crate::{launch, logging, nfs, rootless, stand_ins, ui};

/// Where detached output goes, in the data directory.
pub(crate) const LOG: &str = "up.log";
/// In `--driver`: only drivers that pods bring.
const NO_DRIVER: &str = "none";
/// How long a detached start may take until its API answers.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Kubernetes storage on this machine: API server, control loops, driver, and a node that runs pods.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    directory: machine::DataDirArg,

    /// Where the API listens; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:6443", value_name = "ADDRESS")]
    listen: SocketAddr,

    /// Also write the kubeconfig here
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// The name of the node, or of the first of several [default: the host's name]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,

    /// How many nodes to run, each with a directory, drivers and a lease of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100), value_name = "COUNT")]
    nodes: u8,

    /// A driver to run, or none; may be given several times
    #[arg(long = "driver", default_values_t = ["local".to_owned()], value_name = "BACKEND")]
    drivers: Vec<String>,

    /// Also run a twin of this cloud's block storage, and the driver for its disks unless --driver is none; may be given several
    /// times
    #[arg(long = "cloud", value_parser = PossibleValuesParser::new(CLOUDS.iter().map(|cloud| cloud.name)), value_name = "PROVIDER")]
    clouds: Vec<String>,

    /// The socket of a CSI driver that you run yourself: it gets sidecars and is registered; may be given several times
    #[arg(long, value_parser = foreign_socket, value_name = "URL")]
    driver_endpoint: Vec<PathBuf>,

    /// Where FlexVolume drivers are installed, as VENDOR~DRIVER/DRIVER [default: node/volumeplugins in the data directory]
    #[arg(long, value_name = "DIR")]
    volume_plugin_dir: Option<PathBuf>,

    /// How long a FlexVolume driver may take for a call before it is killed
    #[arg(long, default_value = "10m", value_parser = go::positive_duration, value_name = "DURATION")]
    volume_plugin_timeout: Duration,

    /// How many processes and threads each pod may have [default: any number]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "NUMBER")]
    pod_pids_limit: Option<u64>,

    /// Mount options of `nfs` volumes that have none, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "OPTIONS")]
    nfs_mount_options: Vec<String>,

    /// Keep CSI calls, steps and every revision of objects in this directory, without secrets, for a bug report
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,

    /// What runs containers: process runs commands from this machine's files, cri has a container runtime run images
    #[arg(long, value_enum, default_value_t = RuntimeArg::Process, value_name = "RUNTIME")]
    runtime: RuntimeArg,

    /// Where the container runtime listens, with --runtime cri
    #[arg(long, default_value = "unix:///run/containerd/containerd.sock", value_parser = runtime_socket, value_name = "URL")]
    cri_endpoint: String,

    /// Do not run programs of Berth's own in the place of images of CSI sidecars and drivers
    #[arg(long)]
    no_stand_ins: bool,

    /// Return when everything is ready, and go on in the background
    #[arg(long, short = 'd')]
    detach: bool,

    #[command(flatten)]
    empty_store: EmptyStore,

    // What has a heading comes last: clap puts all flags that follow a heading below it.
    #[command(flatten)]
    failures: NodeFailures,

    #[command(flatten)]
    ui: ui::UpArgs,

    #[command(flatten)]
    nfs: nfs::ServerArgs,

    #[command(flatten)]
    logging: logging::Logging,
}

/// What runs the containers of pods, as the flag names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RuntimeArg {
    Process,
    Cri,
}

/// When a node counts as failed, and what follows; the names and defaults are those of Kubernetes where it has them.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Nodes that fail")]
struct NodeFailures {
    /// How long a node may be silent before it is marked unhealthy
    #[arg(long, default_value = "50s", value_parser = go::positive_duration, value_name = "DURATION")]
    node_monitor_grace_period: Duration,

    /// How long pods stay on a node that is not ready, if they do not say
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    default_not_ready_toleration_seconds: u32,

    /// How long pods stay on a node that is unreachable, if they do not say
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    default_unreachable_toleration_seconds: u32,

    /// How long a volume that nobody wants stays attached to a node that is not ready and does not unmount it
    #[arg(long, default_value = "6m", value_parser = go::positive_duration, value_name = "DURATION")]
    force_detach_after: Duration,
}

impl NodeFailures {
    fn controllers(&self) -> berth_controllers::Options {
        berth_controllers::Options {
            node_monitor_grace_period: self.node_monitor_grace_period,
            force_detach_after: self.force_detach_after,
        }
    }
}

/// The command line, with what each backend takes. Its help shows the flags of the `named` backends only.
pub(crate) fn command(backends: &[Backend], named: &[String]) -> Command {
    let command = backends.iter().fold(Args::augment_args(clap::Command::new("up")), |command, backend| {
        let shown = named.iter().any(|name| name == backend.name);
        let flags = (backend.embedded_flags)(clap::Command::new("flags"));
        let flags: Vec<_> = flags.get_arguments().cloned().map(|flag| flag.hide(!shown)).collect();
        command.args(flags)
    });
    let choices: Vec<_> = backends.iter().map(|backend| backend.name).chain([NO_DRIVER]).collect();
    let has_flags = |backend: &&Backend| {
        (backend.embedded_flags)(clap::Command::new("flags")).get_arguments().next().is_some()
    };
    let more: Vec<_> = backends
        .iter()
        .filter(has_flags)
        .map(|backend| format!("berth up --driver {} --help", backend.name))
        .collect();
    let mut hints = vec![stand_ins::help()];
    if named.is_empty() && !more.is_empty() {
        hints.push(format!("With the flags of a driver: {}", more.join(", ")));
    }
    let command = command.after_help(hints.join("\n\n"));
    command
        .mut_arg("drivers", |arg| arg.value_parser(PossibleValuesParser::new(choices)))
        .about("Run an API server, controllers, drivers and a node on this machine")
        .long_about(None)
}

/// The command line without any flags.
pub(crate) fn default_flags() -> anyhow::Result<ArgMatches> {
    Ok(command(BACKENDS, &[]).try_get_matches_from(["up"])?)
}

/// The backends that a command line of `berth up` names by `--driver`, before it is parsed: help is shown while parsing.
pub(crate) fn named(args: &[OsString]) -> Vec<String> {
    let mut words = args.iter().filter_map(|word| word.to_str());
    let mut named = Vec::new();
    while let Some(word) = words.next() {
        match word.strip_prefix("--driver") {
            Some("") => named.extend(words.next().map(str::to_owned)),
            Some(value) => named.extend(value.strip_prefix('=').map(str::to_owned)),
            None => {}
        }
    }
    named
}

/// Reads the endpoint of a driver that the node is to know: the kubelet's registration takes only sockets.
fn foreign_socket(text: &str) -> Result<PathBuf, String> {
    match text.parse::<Endpoint>().map_err(|error| error.to_string())? {
        Endpoint::Unix(path) => Ok(path),
        Endpoint::Tcp { .. } => {
            Err("a node knows drivers only by sockets; give unix:///path/to.sock".to_owned())
        }
    }
}

/// Reads where a container runtime listens.
fn runtime_socket(text: &str) -> Result<String, String> {
    match text.strip_prefix("unix://") {
        Some(path) if path.starts_with('/') => Ok(text.to_owned()),
        _ => Err("a container runtime listens on a socket; give unix:///path/to.sock".to_owned()),
    }
}

/// What runs containers, which must be there.
async fn runtime(args: &Args) -> anyhow::Result<ContainerRuntime> {
    if args.runtime == RuntimeArg::Process {
        return Ok(ContainerRuntime::Process);
    }
    rootless::refuse_cri()?;
    let endpoint = args.cri_endpoint.clone();
    if let Err(error) = berth_runtime::Cri::check(&endpoint).await {
        bail!("--runtime cri: {}; start it, or name its socket by --cri-endpoint", error.sentence());
    }
    Ok(ContainerRuntime::Cri { endpoint })
}

/// The backends that are asked for, each once, with those of the clouds and of the NFS server.
fn chosen(
    backends: &[Backend],
    names: &[String],
    clouds: &[String],
    has_nfs_server: bool,
) -> anyhow::Result<Vec<Backend>> {
    let is_wanted = !names.iter().any(|name| name == NO_DRIVER);
    let missing = |cloud: &&String| !backends.iter().any(|backend| backend.name == **cloud);
    if let Some(cloud) = clouds.iter().filter(|_| is_wanted).find(missing) {
        bail!("there is no driver for the cloud {cloud} here; give --driver none to run its twin alone");
    }
    let asked = |backend: &&Backend| {
        let of_cloud = is_wanted && clouds.iter().any(|name| name == backend.name);
        let of_server = is_wanted && has_nfs_server && backend.name == "nfs";
        of_cloud || of_server || names.iter().any(|name| name == backend.name)
    };
    Ok(backends.iter().filter(asked).copied().collect())
}

/// Runs until SIGTERM or SIGINT; detached, returns when everything is ready.
pub(crate) async fn run(
    matches: &ArgMatches,
    backends: &[Backend],
    sidecars: &[Sidecar],
) -> anyhow::Result<()> {
    let args = Args::from_arg_matches(matches)?;
    if args.detach {
        return detach(&args).await;
    }
    rootless::refuse_clouds(&args.clouds)?;
    let runtime = runtime(&args).await?;
    let logging = args.logging.quieter("warn,berth_csi=error");
    let timeline = logging::start_with_calls(&logging);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let options = stack::Options {
        data_dir: args.directory.data_dir.clone(),
        listen: args.listen,
        kubeconfig: args.kubeconfig.clone(),
        node_name: node_name(args.node_name.as_deref())?,
        nodes: args.nodes.into(),
        controllers: args.failures.controllers(),
        toleration_seconds: TolerationSeconds {
            not_ready: args.failures.default_not_ready_toleration_seconds,
            unreachable: args.failures.default_unreachable_toleration_seconds,
        },
        empty_store: args.empty_store,
        ui: args.ui.clone(),
        record: args.record.as_deref().map(std::path::absolute).transpose()?,
        drivers: chosen(backends, &args.drivers, &args.clouds, args.nfs.is_on())?,
        clouds: CLOUDS.iter().filter(|cloud| args.clouds.iter().any(|name| name == cloud.name)).collect(),
        foreign_drivers: args.driver_endpoint.clone(),
        sidecars: sidecars.to_vec(),
        flags: matches.clone(),
        runtime,
        stand_ins: if args.no_stand_ins { Vec::new() } else { stand_ins::table() },
        volume_plugins: args.volume_plugin_dir.clone(),
        call_timeout: None,
        volume_plugin_timeouts: berth_flex::Timeouts {
            call: args.volume_plugin_timeout,
            init: args.volume_plugin_timeout.min(berth_flex::Timeouts::default().init),
        },
        pod_pids_limit: args.pod_pids_limit,
        nfs_mounts: match args.nfs.mount_options() {
            Some(options) if args.nfs_mount_options.is_empty() => vec![options],
            _ => args.nfs_mount_options.clone(),
        },
        nfs_server: args.nfs.clone(),
    };
    println!("Berth {} in {}\n", env!("CARGO_PKG_VERSION"), args.directory.data_dir.display());
    if let Some(limits) = rootless::limits() {
        println!("  {}\n", faint(&limits));
    }
    let starting = Stack::start(options, &timeline, |what, after| {
        println!("  {} {what} {}", tick(), faint(&format!("{} ms", after.as_millis())));
    });
    let stack = tokio::select! {
        started = starting => started.inspect_err(|_| rootless::end_if_idle(&args.directory.data_dir))?,
        _ = terminate.recv() => bail!("stopped while starting; `berth down` cleans up what is left"),
        _ = interrupt.recv() => bail!("stopped while starting; `berth down` cleans up what is left"),
    };
    print!("{}", screen(&stack.running, &args.directory.data_dir, &storage(&stack.cluster).await?));
    std::io::stdout().flush()?;
    let failure = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        failure = stack.failed() => Some(failure),
    };
    if let Some(failure) = &failure {
        println!("\n{failure}");
    }
    println!("\nStopping pods and unmounting their volumes …");
    tokio::select! {
        stopped = stack.stop() => stopped.map(|()| rootless::end(&args.directory.data_dir))?,
        _ = interrupt.recv() => bail!("stopped at once; `berth down` cleans up what is left"),
    }
    if let Some(failure) = failure {
        bail!("{failure}; everything else was stopped, and `berth up` goes on where this ended");
    }
    println!("Stopped. `berth up` goes on where this ended.");
    Ok(())
}

async fn detach(args: &Args) -> anyhow::Result<()> {
    let data_dir = std::path::absolute(&args.directory.data_dir)?;
    let find = || Running::find(&data_dir).with_context(|| format!("read {}", data_dir.display()));
    if let Some(running) = find()? {
        println!("Berth already runs in {} (process {}).", data_dir.display(), running.pid);
        print!("{}", screen(&running, &data_dir, &storage(&machine::connect(&running).await?).await?));
        return Ok(());
    }
    berth_host::path::Dir::ensure(&data_dir, 0o700)?;
    let log = data_dir.join(LOG);
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--detach" && argument != "-d");
    let mut child = berth_host::exec::detach(&std::env::current_exe()?, arguments, &log)
        .context("start in the background")?;
    let begun = Instant::now();
    loop {
        if let Some(running) = find()?
            && running.ready
        {
            print!("{}", screen(&running, &data_dir, &storage(&machine::connect(&running).await?).await?));
            return Ok(());
        }
        if let Some(status) = child.try_wait()? {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            bail!("it ended at once ({status}):\n{}", said.trim_end());
        }
        if begun.elapsed() > START_TIMEOUT {
            bail!("it is not ready after {START_TIMEOUT:?}; see {}", log.display());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn node_name(given: Option<&str>) -> anyhow::Result<String> {
    given.map_or_else(|| Ok(launch::host_name()?.to_lowercase()), |name| Ok(name.to_owned()))
}

/// What claims can be made of.
#[derive(Debug, Default)]
struct Storage {
    /// The names of the StorageClasses that exist, with the default marked.
    classes: Vec<String>,
    /// The NFS driver is there, for which nobody but the user knows a server.
    has_nfs: bool,
}

async fn storage(cluster: &Cluster) -> anyhow::Result<Storage> {
    let classes: Vec<StorageClass> = cluster.fetch_all("").await.context("list the StorageClasses")?;
    let drivers: Vec<CSIDriver> = cluster.fetch_all("").await.context("list the CSIDrivers")?;
    let is_default = |class: &StorageClass| {
        class.annotations().get(names::DEFAULT_CLASS).is_some_and(|value| value == "true")
    };
    let name = |class: &StorageClass| {
        format!("{}{}", class.name_any(), if is_default(class) { " (default)" } else { "" })
    };
    Ok(Storage {
        classes: classes.iter().map(name).collect(),
        has_nfs: drivers.iter().any(|driver| driver.name_any() == names::NFS_DRIVER),
    })
}

/// Where things are, and what to try.
fn screen(running: &Running, data_dir: &Path, storage: &Storage) -> String {
    let kubeconfig = running.kubeconfig.display();
    let Storage { classes, has_nfs } = storage;
    let has_default = classes.iter().any(|class| class.ends_with(" (default)"));
    let class = match (classes.is_empty(), has_nfs) {
        (false, _) => classes.join(", "),
        (true, true) => {
            "none yet: create one that names your server, as in examples/nfs/class.yaml".to_owned()
        }
        (true, false) => "none yet: create one whose provisioner is your driver".to_owned(),
    };
    let of_cloud = running.clouds.keys().find_map(|name| Cloud::find(name)?.example);
    let example = if let Some((file, claim)) = of_cloud.filter(|_| !classes.is_empty()) {
        format!("\n  kubectl apply -f {file}\n  berth explain{} {claim}", of_directory(data_dir))
    } else if has_default {
        format!(
            "\n  kubectl apply -f examples/local.yaml\n  berth explain{} pvc/data",
            of_directory(data_dir)
        )
    } else if *has_nfs {
        "\n  kubectl apply -f examples/nfs/class.yaml".to_owned()
    } else {
        String::new()
    };
    format!(
        "\n  API         https://{address}\n{page}{clouds}  kubeconfig  {kubeconfig}\n  class       {class}\n\nTry:\n  \
         export KUBECONFIG={kubeconfig}\n  kubectl get nodes,sc{example}\n  berth down{of_directory}\n",
        address = running.address,
        page = page(running, data_dir),
        clouds = clouds(running),
        of_directory = of_directory(data_dir),
    )
}

/// Where the APIs of clouds are, and how their twins are used.
fn clouds(running: &Running) -> String {
    let line = |(name, address): (&String, &String)| {
        let credentials = Cloud::find(name).map(|cloud| cloud.credentials).unwrap_or_default();
        format!("  cloud       {name} at {address}/  ({credentials})\n")
    };
    running.clouds.iter().map(line).collect()
}

/// Where the page is. The link with the token is for a terminal, and not for a log.
fn page(running: &Running, data_dir: &Path) -> String {
    let Some(address) = running.ui else { return String::new() };
    let link = ui::link(data_dir, address).filter(|_| std::io::stdout().is_terminal());
    let hint = || format!("http://{address}/  (its token: berth status{})", of_directory(data_dir));
    format!("  page        {}\n", link.unwrap_or_else(hint))
}

/// The flag that names a data directory other than the default one.
fn of_directory(data_dir: &Path) -> String {
    if data_dir == machine::default_data_dir() {
        return String::new();
    }
    format!(" --data-dir {}", data_dir.display())
}

fn tick() -> &'static str {
    if std::io::stdout().is_terminal() { "\x1b[32m✓\x1b[0m" } else { "✓" }
}

fn faint(text: &str) -> String {
    if std::io::stdout().is_terminal() { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cloud_brings_its_driver_unless_none_is_asked_for() {
        let chosen = |drivers: &[&str], clouds: &[&str]| {
            let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
            let found = chosen(BACKENDS, &owned(drivers), &owned(clouds), false);
            found.map(|found| found.iter().map(|backend| backend.name).collect::<Vec<_>>())
        };
        assert_eq!(chosen(&["local"], &[]).unwrap(), ["local"]);
        assert_eq!(chosen(&["local"], &["digitalocean"]).unwrap(), ["local", "digitalocean"]);
        assert_eq!(chosen(&["digitalocean"], &["digitalocean"]).unwrap(), ["digitalocean"]);
        assert!(chosen(&[NO_DRIVER], &["digitalocean"]).unwrap().is_empty());
        let refused = chosen(&["local"], &["another"]).unwrap_err().to_string();
        assert!(refused.contains("--driver none"), "{refused}");
    }

    #[test]
    fn only_what_is_there_is_suggested() {
        let running = Running::new(([127, 0, 0, 1], 6443).into(), "/k".into(), "n");
        let of = |classes: &[&str], has_nfs| {
            let classes = classes.iter().map(ToString::to_string).collect();
            screen(&running, Path::new("/var/lib/berth"), &Storage { classes, has_nfs })
        };
        let without_driver = of(&[], false);
        assert!(
            without_driver.contains("none yet: create one whose provisioner is your driver"),
            "{without_driver}"
        );
        assert!(!without_driver.contains("nfs") && !without_driver.contains("apply"), "{without_driver}");
        assert!(of(&[], true).contains("kubectl apply -f examples/nfs/class.yaml"));
        assert!(of(&["berth (default)"], true).contains("kubectl apply -f examples/local.yaml"));
        let with_class = of(&["own"], false);
        assert!(with_class.contains("class       own\n") && !with_class.contains("apply"), "{with_class}");
    }
}
