//! The `berth` binary: reads the command line, and starts the role that it names.
//!
//! ```text
//! main -> Tables::parse -> Tables::run -+- up, demo           -> stack: all roles in one process
//!                                       +- down               -> stops a stack and cleans up after a kill
//!                                       +- status, explain, logs -> read the API, the timeline and the log
//!                                       +- nodes, resize, adopt  -> change nodes, claims and volumes of a cluster
//!                                       +- backup, restore    -> the records of a machine, as one file
//!                                       +- doctor, ui, top, replay -> examine or show any cluster (berth-ui)
//!                                       +- driver, controller, node -> driver: serves one backend
//!                                       +- dev                -> a machine around a driver that is being written (berth-dev)
//!                                       +- certify            -> tests any driver (berth-certify)
//!                                       +- flex               -> installs FlexVolume drivers
//!                                       +- new                -> writes the sources of a driver
//!                                       +- cloud              -> serves a cloud's API on this machine (berth-cloud)
//!                                       +- nfs                -> serves a directory by NFS (berth-nfsd)
//!                                       +- apiserver          -> serves the Kubernetes API alone
//!                                       +- sidecars, csi-...  -> launch: sidecars over a driver's socket
//! ```
//!
//! - [`sidecars::SIDECARS`] and [`driver::BACKENDS`] are the tables of roles: a sidecar or a backend is one row, with its
//!   flags and how it is started. The other commands are in [`Command`].
//! - [`launch`] starts sidecars, each while its Lease is held, and restarts a role that panics or ends.
//! - [`stack::Stack`] is one machine: API server, controllers, sidecars, drivers and a node.
//! - [`HELPERS`] are the programs inside this program, which run as processes of their own.
//!
//! Rules: only this crate knows the command line; libraries get options. Flags that other projects' manifests use are taken in
//! Go's style too: one dash or two, `--flag=true` for switches. The exit status is 0, 1 for an error, 2 for a wrong command
//! line or a driver that `berth certify` or `berth dev` could not run, and 3 for an object that `berth explain` finds stuck.
//!
//! Start reading with [`Tables::run`], then with the module of a command.

mod adopt;
mod apiserver;
mod backup;
mod calls;
mod certify;
mod cloud;
mod demo;
mod dev;
mod doctor;
mod down;
mod driver;
mod explain;
mod flex;
mod http;
mod launch;
mod logging;
mod machine;
mod metrics;
mod new;
mod nfs;
mod nodes;
mod record;
mod resize;
mod rootless;
mod sidecars;
mod stack;
mod stand_ins;
mod status;
mod timeline;
mod top;
mod ui;
mod up;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use berth_host::allocator::Allocator;
use berth_host::helper::{self, Helper};
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::driver::{BACKENDS, Backend, Role};
use crate::launch::Choice;
use crate::sidecars::{SIDECARS, Sidecar, liveness, registrar};

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Kubernetes storage in one binary.
#[derive(Debug, Parser)]
#[command(
    name = "berth",
    version,
    max_term_width = 110,
    subcommand_required = true,
    arg_required_else_help = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The commands that are not rows of a table.
#[derive(Debug, Subcommand)]
enum Command {
    /// Stop what `berth up` started; objects and data stay.
    #[command(display_order = 2)]
    Down(down::Args),

    /// Show what runs in a data directory, and which claims are not bound.
    #[command(display_order = 3)]
    Status(status::Args),

    /// Show one volume's life: provision, attach, mount, write, expand, delete.
    #[command(display_order = 4)]
    Demo(demo::Args),

    /// Show what happened to a claim, volume, pod or snapshot, and why it is stuck.
    #[command(display_order = 5)]
    Explain(explain::Args),

    /// Find what is wrong with the storage of any cluster, and what to do about it.
    #[command(display_order = 5)]
    Doctor(doctor::Args),

    /// Show the storage of any cluster in the browser: what is full, what is stuck and why.
    #[command(display_order = 5)]
    Ui(ui::Args),

    /// Show the storage of any cluster in the terminal: usage, stuck volumes, calls.
    #[command(display_order = 5)]
    Top(top::Args),

    /// Show a recording of `berth up --record` in the browser.
    #[command(display_order = 5)]
    Replay(ui::ReplayArgs),

    /// Show the log of a machine, or its CSI calls in full.
    #[command(display_order = 5)]
    Logs(calls::Args),

    /// Test any CSI driver, and print a report.
    #[command(display_order = 19)]
    Certify(Box<certify::Args>),

    /// Run a driver that you write, and show its calls: rebuilds, restarts, faults, steps.
    #[command(display_order = 19)]
    Dev(Box<dev::Args>),

    /// Copy objects, certificates and drivers' records into one file.
    #[command(display_order = 6)]
    Backup(backup::BackupArgs),

    /// Put back what a backup holds.
    #[command(display_order = 7)]
    Restore(backup::RestoreArgs),

    /// Create PersistentVolumes for a driver's volumes that no object knows.
    #[command(display_order = 8)]
    Adopt(adopt::Args),

    /// Grow the claims of a StatefulSet and their template, without stopping its pods.
    #[command(display_order = 8)]
    Resize(resize::Args),

    /// List nodes, stop and start those of `berth up --nodes`, forget a lost one.
    #[command(display_order = 3)]
    Nodes(nodes::Args),

    /// Make the sources of a driver of your own: in Rust, Go, Python or shell.
    #[command(display_order = 19)]
    New(new::Args),

    /// Run FlexVolume drivers, and change their volumes over to CSI.
    #[command(display_order = 20)]
    Flex(Box<flex::Args>),

    /// Serve a cloud provider's block storage API on this machine, with real devices.
    #[command(display_order = 9)]
    Cloud(Box<cloud::Args>),

    /// Serve a directory by NFS, for trying and testing.
    #[command(display_order = 9)]
    Nfs(Box<nfs::Args>),

    /// Serve the Kubernetes API for the resources that storage needs, alone.
    #[command(display_order = 9)]
    Apiserver(apiserver::Args),

    /// Answer the kubelet's liveness probe for a CSI driver (replaces livenessprobe).
    #[command(display_order = 100)]
    Livenessprobe(Box<liveness::Args>),

    /// Register a CSI driver with the kubelet (replaces node-driver-registrar).
    #[command(display_order = 101)]
    CsiNodeDriverRegistrar(Box<registrar::Args>),
}

/// What can be started: the rows that this program has.
#[derive(Clone, Copy)]
struct Tables<'a> {
    backends: &'a [Backend],
    sidecars: &'a [Sidecar],
}

const TABLES: Tables<'static> = Tables { backends: BACKENDS, sidecars: SIDECARS };

/// The programs inside this program: what starts containers, what mounts filesystems that may not answer, what serves an
/// NFS share through FUSE, and what works on image volumes there.
const HELPERS: &[Helper] = &[
    berth_runtime::LAUNCHER,
    berth_host::remote::MOUNT_WORKER,
    berth_fuse::SERVER,
    berth_backends::nfs::IMAGE_WORKER,
];

fn main() -> ExitCode {
    // A helper stays small because nothing else has started yet.
    helper::intercept(HELPERS);
    if let Some(status) = flex::intercept(std::env::args_os()) {
        return status;
    }
    let matches = TABLES.parse(std::env::args_os()).unwrap_or_else(|mistake| mistake.exit());
    if let Err(status) = rootless::enter(&matches) {
        return status;
    }
    // Every container and every connection is a few files, and the usual soft limit is small for a node.
    if let Err(error) = berth_host::limits::raise_open_files() {
        eprintln!("berth: {}", error.sentence());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_keep_alive(Duration::from_secs(2))
        .build()
        .expect("the runtime starts on every Linux");
    match runtime.block_on(TABLES.run(&matches)) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("berth: {error:#}");
            ExitCode::FAILURE
        }
    }
}

impl Tables<'_> {
    /// The whole command line; the help of `berth up` shows the flags of the `named` backends.
    fn command(self, named: &[String]) -> clap::Command {
        let rows = Role::ALL
            .iter()
            .map(|role| role.command(self.backends, self.sidecars))
            .chain([sidecars::command(self.sidecars)])
            .chain(self.sidecars.iter().map(Sidecar::command))
            .enumerate()
            .map(|(number, row)| row.display_order(10 + number));
        let command = Cli::command();
        let command =
            command.subcommand(up::command(self.backends, named).display_order(1)).subcommands(rows);
        let groups = self.groups(&command);
        command.help_template(format!(
            "{{about}}\n\n{{usage-heading}} {{usage}}\n{groups}\nOptions:\n{{options}}\n\n\
             `berth COMMAND --help` shows what a command takes."
        ))
    }

    /// The commands by what they are for, one line each; the sidecars are known by the names of the upstream programs.
    fn groups(self, command: &clap::Command) -> String {
        let mut groups = [
            ("Machine commands:", Vec::new()),
            ("Driver commands:", Vec::new()),
            ("Commands for authors of drivers:", Vec::new()),
            ("Inspection commands:", Vec::new()),
        ];
        let sidecars = self.by_name();
        let mut commands: Vec<_> = command.get_subcommands().collect();
        commands.sort_by_key(|command| command.get_display_order());
        for command in commands {
            let name = command.get_name();
            let group = match name {
                _ if sidecars.contains(&name) => continue,
                "status" | "explain" | "doctor" | "logs" | "ui" | "top" | "replay" => 3,
                "new" | "dev" | "certify" | "cloud" | "nfs" => 2,
                "flex" | "sidecars" => 1,
                _ if Role::ALL.iter().any(|role| role.name() == name) => 1,
                _ => 0,
            };
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            groups[group].1.push(format!("  {name:<10}  {about}"));
        }
        let groups = groups
            .into_iter()
            .filter(|(_, lines)| !lines.is_empty())
            .map(|(heading, lines)| format!("\n{heading}\n{}\n", lines.join("\n")));
        let alone: Vec<_> = sidecars.chunks(3).map(|names| format!("  {}", names.join(", "))).collect();
        let alone = format!(
            "\nSidecars, each with the flags of the upstream program of its name:\n{}\n",
            alone.join(",\n")
        );
        groups.chain([alone]).collect()
    }

    /// The names by which a link to this program runs one of its roles.
    fn by_name(self) -> Vec<&'static str> {
        let rows = self.sidecars.iter().map(|row| row.name);
        rows.chain(["csi-node-driver-registrar", "livenessprobe"]).collect()
    }

    /// Parses a command line; help, and what is wrong with it, come as an error.
    fn parse(self, args: impl Iterator<Item = OsString>) -> Result<ArgMatches, clap::Error> {
        let args = with_own_name(args.collect(), &self.by_name());
        let command = self.command(&up::named(&args));
        let args = with_two_dashes(args, &command);
        command.try_get_matches_from(args)
    }

    /// Runs the command, until it ends or the process is signalled.
    async fn run(self, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
        let (name, own) = matches.subcommand().expect("the command line has a subcommand");
        if let Some(sidecar) = self.sidecars.iter().find(|row| row.name == name) {
            return launch::run(Choice::Single(sidecar), own).await.map(|()| ExitCode::SUCCESS);
        }
        if let Some(role) = Role::ALL.into_iter().find(|role| role.name() == name) {
            let (name, own) = own.subcommand().expect("the command line names a backend");
            let backend = self.backends.iter().find(|row| row.name == name).expect("the backend is a row");
            let run = Box::pin(driver::run(role, backend, self.sidecars, own));
            return run.await.map(|()| ExitCode::SUCCESS);
        }
        match name {
            "sidecars" => launch::run(Choice::Of(self.sidecars), own).await?,
            "up" => up::run(own, self.backends, self.sidecars).await?,
            _ => match Cli::from_arg_matches(matches)?.command {
                Command::Down(args) => down::run(args).await?,
                Command::Status(args) => status::run(args).await?,
                Command::Demo(args) => demo::run(args).await?,
                Command::Explain(args) => return explain::run(args).await,
                Command::Doctor(args) => return doctor::run(args).await,
                Command::Dev(args) => return dev::run(*args).await,
                Command::Certify(args) => return certify::run(*args).await,
                Command::Ui(args) => ui::run(args).await?,
                Command::Top(args) => top::run(args).await?,
                Command::Replay(args) => ui::replay(args).await?,
                Command::Logs(args) => calls::run(args).await?,
                Command::Backup(args) => backup::backup(&args)?,
                Command::Restore(args) => backup::restore(&args)?,
                Command::Adopt(args) => adopt::run(args).await?,
                Command::Resize(args) => resize::run(args).await?,
                Command::Nodes(args) => nodes::run(args).await?,
                Command::New(args) => return new::run(&args),
                Command::Flex(args) => flex::run(*args).await?,
                Command::Cloud(args) => cloud::run(*args).await?,
                Command::Nfs(args) => nfs::run(*args).await?,
                Command::Apiserver(args) => apiserver::run(args).await?,
                Command::Livenessprobe(args) => liveness::run(*args).await?,
                Command::CsiNodeDriverRegistrar(args) => registrar::run(*args).await?,
            },
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Takes the name of the program for a subcommand where it is one's: `csi-provisioner …` is `berth csi-provisioner …`.
fn with_own_name(mut args: Vec<OsString>, by_name: &[&str]) -> Vec<OsString> {
    let name = args.first().and_then(|program| Path::new(program).file_name()).and_then(OsStr::to_str);
    if let Some(role) = by_name.iter().find(|known| name == Some(known)) {
        args.splice(0..1, [OsString::from("berth"), OsString::from(role)]);
    }
    args
}

/// Turns Go's `-flag` and `-flag=value` into `--flag` for every long flag that some subcommand has.
fn with_two_dashes(mut args: Vec<OsString>, command: &clap::Command) -> Vec<OsString> {
    let mut long_flags = vec!["help".to_owned(), "version".to_owned()];
    collect_long_flags(command, &mut long_flags);
    // What follows `--` is the command line of another program.
    for arg in args.iter_mut().take_while(|arg| *arg != "--") {
        if single_dash_name(arg).is_some_and(|name| long_flags.iter().any(|flag| flag == name)) {
            let mut doubled = OsString::from("-");
            doubled.push(&*arg);
            *arg = doubled;
        }
    }
    args
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
