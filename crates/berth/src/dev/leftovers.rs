//! What `berth dev` leaves when it is killed, and how it is cleaned up: by `berth down`, and by the next `berth dev`.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use berth_host::path::Dir;
use rustix::process::{Pid, Signal};

use crate::{down, machine};

/// In the data directory: what belongs to the driver.
pub(super) const DRIVER: &str = "dev";
/// In the data directory: locked as long as `berth dev` runs there.
const LOCK: &str = "dev.lock";
/// What the names of temporary data directories begin with.
const PREFIX: &str = "berth-dev-";

/// A data directory of this process.
pub(super) struct Workspace {
    pub(super) path: PathBuf,
    _lock: File,
}

impl Workspace {
    /// Makes a data directory: the given one, which must not exist, or a temporary one.
    pub(super) fn create(given: Option<&Path>) -> anyhow::Result<Self> {
        let path = if let Some(path) = given {
            std::path::absolute(path)?
        } else {
            // Processes of other namespaces have the same numbers, and may share the directory.
            let number = jiff::Timestamp::now().as_nanosecond() % 1_000_000_000;
            std::env::temp_dir().join(format!("{PREFIX}{}-{number}", std::process::id()))
        };
        anyhow::ensure!(
            !path.exists(),
            "{} exists; `berth dev` wants a directory of its own",
            path.display()
        );
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            anyhow::bail!("{} cannot be a data directory", path.display());
        };
        // Under another name until it is locked: what is not locked is left of a run that was killed.
        let incoming = parent.join(format!(".{}.new", name.to_string_lossy()));
        let directory = Dir::ensure(&incoming, 0o700)?;
        let lock = directory.lock_exclusively(LOCK)?;
        // Makes it a directory that `berth down` knows.
        directory.create_file(machine::LOCK, 0o600)?;
        directory.ensure_dir(DRIVER, 0o755)?;
        fs::rename(&incoming, &path).with_context(|| format!("make {}", path.display()))?;
        Ok(Self { path, _lock: lock })
    }

    /// The driver's own directory.
    pub(super) fn driver(&self) -> PathBuf {
        self.path.join(DRIVER)
    }
}

/// Removes the temporary data directories of earlier runs that were killed; says which they were.
pub(super) async fn remove_killed() -> Vec<String> {
    let mut lines = Vec::new();
    for path in killed_below(&std::env::temp_dir()) {
        lines.push(match down::remove(&path).await {
            Ok(()) => format!("Removed {}, which a run that was killed had left", path.display()),
            Err(error) => format!("{} is left of a run that was killed: {error:#}", path.display()),
        });
    }
    lines
}

/// The data directories of runs that are over. Only our own are believed: anybody may make a directory there.
fn killed_below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| {
        let named = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let private = |found: &fs::Metadata| {
            let others = found.mode() & 0o077;
            found.is_dir() && found.uid() == rustix::process::geteuid().as_raw() && others == 0
        };
        named && fs::symlink_metadata(entry.path()).is_ok_and(|found| private(&found))
    });
    ours.map(|entry| entry.path()).filter(|path| is_over(path)).collect()
}

fn is_over(path: &Path) -> bool {
    path.join(LOCK).exists() && Dir::open(path).and_then(|directory| directory.lock_exclusively(LOCK)).is_ok()
}

/// Ends drivers that a killed `berth dev` left, and takes away what they mounted and attached in their own directory; gives how many
/// things there were.
pub(crate) fn clean_up(data_dir: &Path) -> anyhow::Result<usize> {
    let driver = data_dir.join(DRIVER);
    if !data_dir.join(LOCK).exists() || !driver.exists() {
        return Ok(0);
    }
    let mut left = 0;
    for pid in processes_of(&driver) {
        // One that ended meanwhile is as good as killed.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
        left += 1;
    }
    left += berth_host::mount::unmount_below(&driver).context("unmount what the driver left")?;
    for device in
        berth_host::loopdev::attached_below(data_dir).context("find the loop devices of the driver")?
    {
        berth_host::loopdev::detach(device.number).context("detach a loop device of the driver")?;
        left += 1;
    }
    Ok(left)
}

/// The processes that were started as the driver of this directory, by their environment: also what the driver started itself.
fn processes_of(driver: &Path) -> Vec<Pid> {
    let wanted = format!("CSI_ENDPOINT=unix://{}", driver.join("csi.sock").display());
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let started_here = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    numbers.filter(started_here).filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_directories_of_runs_that_are_over_are_removed() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("berth-dev-1");
        let running = Workspace::create(Some(&path)).unwrap();
        assert!(running.driver().is_dir());
        assert!(Workspace::create(Some(&path)).is_err(), "it is taken");
        assert!(killed_below(top.path()).is_empty(), "somebody works there");
        drop(running);
        fs::create_dir(top.path().join("berth-dev-2")).unwrap();
        fs::create_dir(top.path().join("other")).unwrap();
        std::os::unix::fs::symlink(&path, top.path().join("berth-dev-3")).unwrap();
        assert_eq!(killed_below(top.path()), [path]);
    }
}
