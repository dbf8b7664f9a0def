//! Running without root: which commands make a user namespace of their own, and what is not possible in it.
//!
//! `berth up`, `berth down` and whoever else mounts or runs pods for an ordinary user do so as root of a user namespace
//! ([`berth_host::namespace`]). That of a data directory is kept by a process beside `berth up`, so that pods and mounts
//! survive a kill as they do with root, until `berth up` stops or `berth down` cleans up.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use berth_host::namespace::{self, Ids};
use berth_node::layout::Layout;
use clap::ArgMatches;

use crate::{certify, dev, machine, stack};

/// Which namespaces a command needs if root does not run it.
enum Need<'a> {
    None,
    /// Those that are kept for a data directory.
    Kept(&'a Path),
    /// New ones, which end with the command and its pods.
    Own,
}

impl<'a> Need<'a> {
    fn of(matches: &'a ArgMatches) -> Self {
        let Some((name, own)) = matches.subcommand() else { return Self::None };
        match (name, own.try_get_one::<PathBuf>("data_dir").ok().flatten()) {
            // The process in the background enters by itself.
            ("up", Some(data_dir)) if !own.get_flag("detach") => Self::Kept(data_dir),
            ("down", Some(data_dir)) if data_dir.join(machine::LOCK).exists() => Self::Kept(data_dir),
            ("demo" | "dev", _) => Self::Own,
            ("certify", _) if own.contains_id("program") => Self::Own,
            _ => Self::None,
        }
    }
}

/// Makes or enters the namespaces that the command needs, if an ordinary user runs it. To be called before there is a second
/// thread, which the kernel does not allow. The error is the exit status of the command, and was printed.
pub(crate) fn enter(matches: &ArgMatches) -> Result<(), ExitCode> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let entered = match Need::of(matches) {
        Need::None => return Ok(()),
        Need::Kept(data_dir) => std::path::absolute(data_dir)
            .map_err(|error| berth_host::Error::new("find the data directory", error))
            .and_then(|data_dir| namespace::enter(Some(&data_dir))),
        Need::Own => namespace::enter(None),
    };
    entered.map(drop).map_err(|error| {
        eprintln!("berth: {}", error.sentence());
        match matches.subcommand_name() {
            Some("certify") => ExitCode::from(certify::UNTESTED),
            Some("dev") => ExitCode::from(dev::NOT_RUN),
            _ => ExitCode::FAILURE,
        }
    })
}

/// What is not possible on a machine that runs without root, in one line; `None` with root.
pub(crate) fn limits() -> Option<String> {
    if !namespace::is_restricted() {
        return None;
    }
    let ids = Ids::read();
    let users = if ids.is_single() {
        "pods run as user 0 only (no newuidmap, or no range in /etc/subuid)".to_owned()
    } else {
        format!("pods run as users {}", ids.describe_users())
    };
    let fuse = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    let nfs =
        if fuse.is_ok() { "NFS is mounted through FUSE" } else { "no NFS, as /dev/fuse cannot be opened" };
    Some(format!("without root: local volumes are directories, no block devices; {users}; {nfs}"))
}

/// Refuses clouds, whose disks are loop devices.
pub(crate) fn refuse_clouds(clouds: &[String]) -> anyhow::Result<()> {
    if let Some(cloud) = clouds.first().filter(|_| namespace::is_restricted()) {
        bail!(
            "--cloud {cloud}: the disks of its twin are loop devices, which only root may use: run it with sudo"
        );
    }
    Ok(())
}

/// Refuses a container runtime of the machine where only root may use it.
pub(crate) fn refuse_cri() -> anyhow::Result<()> {
    if namespace::is_restricted() {
        bail!("--runtime cri: what runs containers sees the mounts of root alone: run it with sudo");
    }
    Ok(())
}

/// Ends the namespaces of a data directory where nothing runs and nothing is mounted any more.
pub(crate) fn end_if_idle(data_dir: &Path) {
    if !namespace::is_own() {
        return;
    }
    // Whoever runs there needs them.
    let Ok((data, _lock)) = machine::take(data_dir) else { return };
    let mounts = berth_host::mount::mounts().unwrap_or_default();
    let is_mounted = mounts.iter().any(|mount| mount.target.starts_with(data.path()));
    if !is_mounted && !stack::nodes::roots(data.path()).iter().any(|root| has_containers(root)) {
        end(data.path());
    }
}

/// Ends the namespaces of a data directory that is stopped.
pub(crate) fn end(data_dir: &Path) {
    if let Err(error) = namespace::end(data_dir) {
        tracing::warn!(error = error.sentence(), "the namespaces of the data directory stay");
    }
}

fn has_containers(root: &Path) -> bool {
    let containers = std::fs::read_dir(Layout::new(root.join(stack::NODE)).containers());
    containers.into_iter().flatten().flatten().any(|entry| {
        !matches!(
            berth_runtime::find(&entry.path()),
            Ok(berth_runtime::Found::Ended | berth_runtime::Found::NeverStarted)
        )
    })
}
