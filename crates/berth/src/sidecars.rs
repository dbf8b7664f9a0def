//! The sidecars of a CSI driver, one row each, and the command lines that choose and configure them.
//!
//! - [`SIDECARS`]: the table. A new sidecar is a module here with its flags and its row, and a line in the table.
//! - [`command`]: `berth sidecars`, all that a driver needs over one connection, under one Lease.
//! - [`Sidecar::command`]: each under its upstream name, as a subcommand and by the program's name.
//! - [`flags()`]: the flags of the rows, for `berth controller` and `berth node`.
//! - [`registrar`], [`liveness`]: the two that need no cluster, and so are not in the table.
//!
//! [`crate::launch`] runs what they come to.

mod attacher;
pub(crate) mod flags;
pub(crate) mod go;
mod health_monitor;
pub(crate) mod liveness;
mod provisioner;
pub(crate) mod registrar;
mod resizer;
mod snapshot_controller;
mod snapshotter;

use std::sync::Arc;

use anyhow::bail;
use berth_kube::Cluster;
use berth_kube::storage::lease_name;
use berth_sidecars::driver::{Driver, Identity};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use clap::{Arg, ArgMatches, Args as _, Command};
use futures_util::future::BoxFuture;
use prometheus_client::registry::Registry;

use self::flags::{Connection, Election, Http, Klog, Kube};
use crate::launch::Setting;

/// Every sidecar that there is.
pub(crate) const SIDECARS: &[Sidecar] = &[
    provisioner::SIDECAR,
    attacher::SIDECAR,
    resizer::SIDECAR,
    snapshotter::SIDECAR,
    health_monitor::SIDECAR,
    snapshot_controller::SIDECAR,
];

/// One sidecar: what it is called, which driver needs it, its flags, and how it is run.
#[derive(Clone, Copy)]
pub(crate) struct Sidecar {
    /// The upstream program that it replaces, which is its subcommand.
    pub(crate) name: &'static str,
    /// The project of the program that it replaces.
    pub(crate) replaces: &'static str,
    /// Its name in `--controllers`.
    pub(crate) short_name: &'static str,
    /// What it does, in one sentence without a full stop.
    pub(crate) about: &'static str,
    pub(crate) scope: Scope,
    /// What its Lease is called when it runs alone, as upstream has it; the driver's name follows.
    pub(crate) lease: &'static str,
    /// Adds its own flags to a command. Rows may have flags in common; a command then has each once.
    pub(crate) flags: fn(Command) -> Command,
    /// What a driver lacks for this sidecar to have anything to do.
    pub(crate) missing: fn(&Identity) -> Option<&'static str>,
    /// Reads its flags; its metrics, if it has any, go to the registry.
    pub(crate) configure: fn(&ArgMatches, &Setting, &mut Registry) -> anyhow::Result<Run>,
}

/// For what there is one of a sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The cluster: it calls no driver, and runs with one only if it is named.
    Cluster,
    /// Each driver has one.
    Driver,
    /// Each driver, or each of its nodes (`--node-deployment`).
    Node,
}

/// Starts a sidecar that has its options. It ends at the cluster's shutdown, and can be started again.
pub(crate) type Run = Arc<dyn Fn(Cluster, Option<Driver>) -> BoxFuture<'static, ()> + Send + Sync>;

/// A sidecar that calls a driver, with its options.
fn over_driver<O, F>(options: O, run: impl Fn(Cluster, Driver, O) -> F + Send + Sync + 'static) -> Run
where
    O: Clone + Send + Sync + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    Arc::new(move |cluster, driver| {
        let driver = driver.expect("a sidecar that calls a driver is started with one");
        Box::pin(run(cluster, driver, options.clone()))
    })
}

impl Sidecar {
    /// The command line of this sidecar alone.
    pub(crate) fn command(&self) -> Command {
        let command =
            clap::Command::new(self.name).version(env!("CARGO_PKG_VERSION")).args_override_self(true);
        let command = match self.scope {
            Scope::Cluster => command,
            Scope::Driver | Scope::Node => Connection::augment_args(command),
        };
        let command = Http::augment_args(Election::augment_args(Kube::augment_args(command)));
        let command = add_flags(Klog::augment_args(command), &[*self]);
        // Last: every group of flags brings a description of its own.
        command.about(format!("{} (replaces {})", self.about, self.replaces)).long_about(None)
    }

    /// The Lease under which it runs alone.
    pub(crate) fn lease(&self, driver: &str) -> String {
        lease_name(&match self.scope {
            Scope::Cluster => self.lease.to_owned(),
            Scope::Driver | Scope::Node => format!("{}{driver}", self.lease),
        })
    }
}

/// The command line of `berth sidecars`.
pub(crate) fn command(table: &[Sidecar]) -> Command {
    let command = clap::Command::new("sidecars").version(env!("CARGO_PKG_VERSION")).args_override_self(true);
    let command = flags(Klog::augment_args(Http::augment_args(Connection::augment_args(command))), table);
    let names: Vec<_> =
        table.iter().filter(|row| row.scope != Scope::Cluster).map(|row| row.short_name).collect();
    command
        .about("Run the sidecars that a CSI driver needs in one process")
        .after_help(format!("Sidecars: {}", names.join(", ")))
        .long_about(None)
}

/// Adds what sidecars that run together take: which cluster, which of them, and the flags of each.
pub(crate) fn flags(command: Command, table: &[Sidecar]) -> Command {
    let names =
        PossibleValuesParser::new(table.iter().map(|row| PossibleValue::new(row.short_name).alias(row.name)));
    let rows = table.to_vec();
    let chosen = Arg::new("controllers")
        .long("controllers")
        .value_name("NAMES")
        .help(
            "Which sidecars to run, whether or not they are needed [default: those that the driver needs, without the \
             snapshot controller, of which a cluster has one]",
        )
        .value_delimiter(',')
        .action(clap::ArgAction::Append)
        .value_parser(names.map(move |name| {
            *rows
                .iter()
                .find(|row| row.short_name == name || row.name == name)
                .expect("the parser takes only names of rows")
        }));
    add_flags(Election::augment_args(Kube::augment_args(command)).arg(chosen), table)
}

/// Adds the flags of some sidecars, each once.
fn add_flags(command: Command, rows: &[Sidecar]) -> Command {
    let own = rows.iter().fold(clap::Command::new("flags"), |known, row| {
        let flags = (row.flags)(clap::Command::new("flags"));
        let new = flags
            .get_arguments()
            .filter(|arg| !known.get_arguments().any(|other| other.get_id() == arg.get_id()));
        new.cloned().collect::<Vec<_>>().into_iter().fold(known, Command::arg)
    });
    let first = command.get_arguments().count();
    let args =
        own.get_arguments().cloned().enumerate().map(|(number, arg)| arg.display_order(first + number));
    args.fold(command, Command::arg)
}

/// The sidecars that a command line with [`flags()`] asks for: those named, else all that a driver needs.
pub(crate) fn chosen(table: &[Sidecar], matches: &ArgMatches) -> anyhow::Result<Vec<Sidecar>> {
    let per_node = is_set(matches, "node_deployment");
    let mut chosen: Vec<Sidecar> = Vec::new();
    for row in matches.get_many::<Sidecar>("controllers").into_iter().flatten() {
        if per_node && row.scope != Scope::Node {
            let able: Vec<_> =
                table.iter().filter(|row| row.scope == Scope::Node).map(|row| row.short_name).collect();
            bail!(
                "of --controllers only {} can run on every node (--node-deployment); run the others once for the cluster",
                able.join(", ")
            );
        }
        if !chosen.iter().any(|other| other.name == row.name) {
            chosen.push(*row);
        }
    }
    if chosen.is_empty() {
        let belongs = |row: &&Sidecar| row.scope == Scope::Node || (row.scope == Scope::Driver && !per_node);
        chosen = table.iter().filter(belongs).copied().collect();
    }
    Ok(chosen)
}

/// Whether a switch is on, if there is one.
pub(crate) fn is_set(matches: &ArgMatches, switch: &str) -> bool {
    matches.try_get_one::<bool>(switch).ok().flatten().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests;
