//! What a machine holds, seen without its help: mounts, loop devices, processes, control groups.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use rustix::process::{Pid, Signal};

use super::PATIENCE;
use crate::machine::{self, Loop, loops_below, mounts_below};

/// What is mounted, attached or running on behalf of a directory.
#[derive(Debug)]
pub struct Leftovers {
    /// Mount points below it.
    pub mounts: Vec<PathBuf>,
    /// Loop devices with a file below it.
    pub loops: Vec<Loop>,
    /// Processes of a program below it, or in a container that was made there.
    pub processes: Vec<(i32, String)>,
    /// Control groups of containers that were made there.
    pub groups: Vec<PathBuf>,
}

impl Leftovers {
    /// What there is now.
    pub fn of(dir: &Path) -> Result<Self> {
        Ok(Self {
            mounts: mounts_below(dir)?,
            loops: loops_below(dir)?,
            processes: processes(dir)?,
            groups: runtimes(dir).iter().flat_map(|runtime| berth_runtime::groups_of(runtime)).collect(),
        })
    }
}

/// Where the nodes of a machine keep their containers.
fn runtimes(dir: &Path) -> Vec<PathBuf> {
    let data = dir.join("data");
    let others = fs::read_dir(data.join("nodes")).into_iter().flatten().flatten().map(|entry| entry.path());
    let nodes = std::iter::once(data).chain(others);
    nodes.flat_map(|root| ["node/containers", "node/cri"].map(|place| root.join(place))).collect()
}

/// Ends every process of a directory, and undoes its mounts and loop devices.
pub(super) fn clear(dir: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = processes(dir)?;
        if found.is_empty() {
            for runtime in runtimes(dir) {
                berth_runtime::remove_groups(&runtime);
            }
            return machine::clear_below(dir);
        }
        ensure!(Instant::now() < deadline, "processes do not end: {found:?}");
        for (pid, _) in found {
            // One that ended meanwhile needs no signal.
            let _ = Pid::from_raw(pid).map(|pid| rustix::process::kill_process(pid, Signal::KILL));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Processes of a program below a directory, or in a container that was made there.
fn processes(dir: &Path) -> Result<Vec<(i32, String)>> {
    let ours = fs::read_link("/proc/self/ns/mnt")?;
    let mut found = Vec::new();
    let named = format!(" {}", dir.display());
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let path = entry.path();
        let of_program = fs::read_link(path.join("exe")).is_ok_and(|exe| exe.starts_with(dir));
        // A container has mounts of its own: an overlay over the host's root, and there its machine's directory.
        // The host's root may be an overlay, too, but not over itself. Those that run without root end with their first
        // process, which is of the program.
        let in_container = || {
            fs::read_link(path.join("ns/mnt")).is_ok_and(|theirs| theirs != ours)
                && fs::read_to_string(path.join("mountinfo"))
                    .is_ok_and(|mounts| mounts.contains(",lowerdir=/,") && mounts.contains(&named))
        };
        if of_program || in_container() {
            let words = fs::read(path.join("cmdline")).unwrap_or_default();
            found.push((pid, String::from_utf8_lossy(&words).replace('\0', " ")));
        }
    }
    Ok(found)
}
