//! The command line: one subcommand per role.
//!
//! Flags that other projects' manifests use are taken in Go's style too: one dash or two, `--flag=true` for
//! switches.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use berth_backends::services;
use clap::{CommandFactory as _, Parser, Subcommand};

use crate::sidecars::alone;
use crate::sidecars::beside::{Beside, Registration, Sidecars};
use crate::{apiserver, demo, down, driver, explain, sidecars, status, up};

/// Kubernetes storage in one binary.
#[derive(Debug, Parser)]
#[command(
    name = "berth",
    version,
    max_term_width = 110,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run Kubernetes storage on this machine: API server, control loops, driver, and a node that runs pods.
    Up(up::Args),

    /// Stop it; objects and data stay.
    Down(down::Args),

    /// Tell what runs, and what needs attention.
    Status(status::Args),

    /// Walk one volume through its life, from claim to pod and away again.
    Demo(demo::Args),

    /// Tell what happened to a volume, and what it waits for.
    Explain(explain::Args),

    /// Run a CSI driver on a socket.
    #[command(subcommand, arg_required_else_help = true)]
    Driver(Backend),

    /// Run a CSI driver and its sidecars in one process.
    #[command(subcommand, arg_required_else_help = true)]
    Controller(ControllerOf),

    /// Run a CSI driver and tell the node of it; where no controller runs, with a provisioner (--node-deployment).
    #[command(subcommand, arg_required_else_help = true)]
    Node(NodeOf),

    /// Serve the Kubernetes API for the kinds that storage needs, with no cluster.
    Apiserver(apiserver::Args),

    /// Run what a CSI driver needs beside it: makes, attaches, grows, changes, snapshots and watches over its volumes.
    Sidecars(Box<sidecars::Args>),

    /// Make volumes for claims, in the place of external-provisioner.
    CsiProvisioner(Box<alone::Provisioner>),

    /// Attach volumes to nodes, in the place of external-attacher.
    CsiAttacher(Box<alone::Attacher>),

    /// Grow volumes and change their attributes, in the place of external-resizer.
    CsiResizer(Box<alone::Resizer>),

    /// Take and delete snapshots, in the place of csi-snapshotter.
    CsiSnapshotter(Box<alone::Snapshotter>),

    /// Bind snapshots and their contents, in the place of snapshot-controller.
    SnapshotController(Box<alone::SnapshotController>),

    /// Tell over HTTP whether a CSI driver lives, in the place of livenessprobe.
    Livenessprobe(Box<sidecars::liveness::Args>),

    /// Tell on claims what is wrong with their volumes, in the place of external-health-monitor-controller.
    CsiExternalHealthMonitorController(Box<alone::HealthMonitor>),

    /// Tell the node of a CSI driver, in the place of node-driver-registrar.
    CsiNodeDriverRegistrar(Box<sidecars::registrar::Args>),
}

/// The external components that run by the name of the program too, as links to it.
const BY_NAME: &[&str] = &[
    "csi-provisioner",
    "csi-attacher",
    "csi-resizer",
    "csi-snapshotter",
    "snapshot-controller",
    "csi-node-driver-registrar",
    "livenessprobe",
    "csi-external-health-monitor-controller",
];

#[derive(Debug, Subcommand)]
enum ControllerOf {
    /// Volumes on this machine's disk.
    Local(Box<LocalController>),
    /// Volumes on NFS servers; nothing is mounted, and no privilege needed.
    Nfs(Box<NfsController>),
}

#[derive(Debug, clap::Args)]
struct LocalController {
    #[command(flatten)]
    driver: driver::local::Args,
    #[command(flatten)]
    registration: Registration,
    #[command(flatten)]
    sidecars: Sidecars,
}

#[derive(Debug, clap::Args)]
struct NfsController {
    #[command(flatten)]
    driver: driver::nfs::Args,
    #[command(flatten)]
    registration: Registration,
    #[command(flatten)]
    sidecars: Sidecars,
}

#[derive(Debug, Subcommand)]
enum NodeOf {
    /// Volumes on this machine's disk.
    Local(Box<LocalNode>),
    /// Volumes on NFS servers.
    Nfs(Box<NfsNode>),
}

#[derive(Debug, clap::Args)]
struct NfsNode {
    #[command(flatten)]
    driver: driver::nfs::Args,
    #[command(flatten)]
    registration: Registration,
    #[command(flatten)]
    sidecars: Sidecars,
}

#[derive(Debug, clap::Args)]
struct LocalNode {
    #[command(flatten)]
    driver: driver::local::Args,
    #[command(flatten)]
    registration: Registration,
    #[command(flatten)]
    sidecars: Sidecars,
}

#[derive(Debug, Subcommand)]
enum Backend {
    /// Volumes on this machine's disk: btrfs subvolumes, loop images or plain directories.
    Local(Box<driver::local::Args>),
    /// Volumes on NFS servers: each a directory of a share.
    Nfs(Box<driver::nfs::Args>),
}

impl Cli {
    /// Runs the role that was asked for, until it is told to stop.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Up(args) => up::run(args).await,
            Command::Down(args) => down::run(args).await,
            Command::Status(args) => status::run(args).await,
            Command::Demo(args) => demo::run(args).await,
            Command::Explain(args) => explain::run(args).await,
            Command::Driver(Backend::Local(args)) => driver::local::run(*args, Beside::default()).await,
            Command::Controller(ControllerOf::Local(args)) => {
                driver::local::run(args.driver, Beside::controller(args.sidecars, args.registration)).await
            }
            Command::Node(NodeOf::Local(args)) => {
                driver::local::run(args.driver, Beside::node(args.sidecars, args.registration)?).await
            }
            Command::Driver(Backend::Nfs(args)) => {
                driver::nfs::run(*args, services::Mode::All, Beside::default()).await
            }
            Command::Controller(ControllerOf::Nfs(args)) => {
                let beside = Beside::controller(args.sidecars, args.registration);
                driver::nfs::run(args.driver, services::Mode::Controller, beside).await
            }
            Command::Node(NodeOf::Nfs(args)) => {
                let beside = Beside::node(args.sidecars, args.registration)?;
                driver::nfs::run(args.driver, services::Mode::Node, beside).await
            }
            Command::Apiserver(args) => apiserver::run(args).await,
            Command::Sidecars(args) => sidecars::run(*args).await,
            Command::CsiProvisioner(args) => args.run().await,
            Command::CsiAttacher(args) => args.run().await,
            Command::CsiResizer(args) => args.run().await,
            Command::CsiSnapshotter(args) => args.run().await,
            Command::SnapshotController(args) => args.run().await,
            Command::Livenessprobe(args) => sidecars::liveness::run(*args).await,
            Command::CsiExternalHealthMonitorController(args) => args.run().await,
            Command::CsiNodeDriverRegistrar(args) => sidecars::registrar::run(*args).await,
        }
    }
}

/// Parses the command line; prints help or a mistake and exits where there is nothing to run.
pub(crate) fn parse(args: impl Iterator<Item = OsString>) -> Cli {
    try_parse(args).unwrap_or_else(|mistake| mistake.exit())
}

fn try_parse(args: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(with_two_dashes(with_own_name(args)))
}

/// Takes the name of the program for a subcommand where it is one's: `csi-provisioner …` is `berth csi-provisioner …`.
fn with_own_name(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut args = args.peekable();
    let name = args.peek().and_then(|program| Path::new(program).file_name()).and_then(OsStr::to_str);
    let role = BY_NAME.iter().find(|known| name == Some(known));
    let program = role.map(|_| OsString::from("berth"));
    program.into_iter().chain(role.map(OsString::from)).chain(args.skip(usize::from(role.is_some())))
}

/// Turns Go's `-flag` and `-flag=value` into `--flag` for every long flag that some subcommand has.
fn with_two_dashes(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut long_flags = vec!["help".to_owned(), "version".to_owned()];
    collect_long_flags(&Cli::command(), &mut long_flags);
    args.map(move |arg| match single_dash_name(&arg) {
        Some(name) if long_flags.iter().any(|flag| flag == name) => {
            let mut doubled = OsString::from("-");
            doubled.push(&arg);
            doubled
        }
        _ => arg,
    })
}

fn single_dash_name(arg: &OsStr) -> Option<&str> {
    let rest = arg.to_str()?.strip_prefix('-')?;
    let name = rest.split_once('=').map_or(rest, |(name, _)| name);
    (name.len() > 1 && !name.starts_with('-')).then_some(name)
}

fn collect_long_flags(command: &clap::Command, found: &mut Vec<String>) {
    for argument in command.get_arguments() {
        found.extend(argument.get_long_and_visible_aliases().into_iter().flatten().map(str::to_owned));
        found.extend(argument.get_all_aliases().into_iter().flatten().map(str::to_owned));
    }
    for subcommand in command.get_subcommands() {
        collect_long_flags(subcommand, found);
    }
}

#[cfg(test)]
mod tests;
