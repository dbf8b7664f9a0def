//! The command line: one subcommand per role.
//!
//! Flags that other projects' manifests use are taken in Go's style too: one dash or two, `--flag=true` for
//! switches.

use std::ffi::{OsStr, OsString};

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{apiserver, demo, down, driver, explain, status, up};

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

    /// Serve the Kubernetes API for the kinds that storage needs, with no cluster.
    Apiserver(apiserver::Args),
}

#[derive(Debug, Subcommand)]
enum Backend {
    /// Volumes on this machine's disk: btrfs subvolumes, loop images or plain directories.
    Local(Box<driver::local::Args>),
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
            Command::Driver(Backend::Local(args)) => driver::local::run(*args).await,
            Command::Apiserver(args) => apiserver::run(args).await,
        }
    }
}

/// Parses the command line; prints help or a mistake and exits where there is nothing to run.
pub(crate) fn parse(args: impl Iterator<Item = OsString>) -> Cli {
    Cli::parse_from(with_two_dashes(args))
}

/// Turns Go's `-flag` and `-flag=value` into `--flag` for every long flag that some subcommand has.
fn with_two_dashes(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut long_flags = Vec::new();
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
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_are_taken_with_one_dash_as_go_programs_do() {
        let given = ["berth", "driver", "local", "-nodeid=n", "-v=5", "--endpoint", "-x", "-unknown"];
        let taken: Vec<_> = with_two_dashes(given.iter().map(OsString::from)).collect();
        assert_eq!(taken, ["berth", "driver", "local", "--nodeid=n", "-v=5", "--endpoint", "-x", "-unknown"]);
    }
}
