//! `berth down`: stops what `berth up` started, also after it was killed.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use berth_host::path::{Dir, remove_tree};
use berth_node::layout::Layout;
use clap::Args as ClapArgs;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::machine::{self, DataDirArg, Running};
use crate::{dev, rootless, stack};

/// How long a stop may take.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// Stop pods, take their volumes away, and stop everything; objects and data stay.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    directory: DataDirArg,

    /// Also remove the data directory, with all objects and all volumes' data
    #[arg(long)]
    purge: bool,
}

/// Stops, and cleans up what a kill left.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let data_dir = std::path::absolute(&args.directory.data_dir)?;
    if !data_dir.exists() {
        println!("Nothing is in {}.", data_dir.display());
        return Ok(());
    }
    if !data_dir.join(machine::LOCK).exists() {
        bail!("{} is no data directory of Berth; nothing was touched", data_dir.display());
    }
    let running = Running::find(&data_dir).with_context(|| format!("read {}", data_dir.display()))?;
    if let Some(running) = running {
        stop(&running, &data_dir).await?;
        println!("Stopped (process {}).", running.pid);
    }
    let (data, lock) = machine::take(&data_dir)?;
    let left = clean_up(&data_dir, args.purge).await?;
    if left > 0 {
        println!("Cleaned up after a kill: {left} containers and mounts.");
    }
    rootless::end(&data_dir);
    if args.purge {
        purge(&data)?;
        drop(lock);
        println!("Removed {}.", data_dir.display());
    } else {
        println!(
            "Objects and data stay in {}; `berth up` goes on with them, --purge removes them.",
            data_dir.display()
        );
    }
    Ok(())
}

/// Stops what runs in a data directory and removes it.
pub(crate) async fn remove(data_dir: &Path) -> anyhow::Result<()> {
    if !data_dir.exists() {
        return Ok(());
    }
    let (data, _lock) = machine::take(data_dir)?;
    clean_up(data.path(), true).await?;
    purge(&data)
}

async fn stop(running: &Running, data_dir: &Path) -> anyhow::Result<()> {
    let pid = i32::try_from(running.pid).ok().and_then(rustix::process::Pid::from_raw);
    let pid = pid.context("the process id in running.json is none")?;
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
    // The lock said that it runs; a process that just ended is as good as stopped.
    let Ok(process) = process else { return Ok(()) };
    rustix::process::pidfd_send_signal(&process, rustix::process::Signal::TERM).context("send it SIGTERM")?;
    let begun = Instant::now();
    // It lets go of the directory a little before it ends.
    while Running::is_locked(data_dir)? || !has_ended(&process)? {
        if begun.elapsed() > STOP_TIMEOUT {
            bail!(
                "process {} does not stop; kill it (kill -9 {}) and run `berth down` again",
                running.pid,
                running.pid
            );
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

fn has_ended(process: &OwnedFd) -> anyhow::Result<bool> {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    Ok(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&at_once))? > 0)
}

/// Stops containers and unmounts what no process serves; returns how many there were.
async fn clean_up(data_dir: &Path, purge: bool) -> anyhow::Result<usize> {
    let mut left = 0;
    for root in stack::nodes::roots(data_dir) {
        let layout = Layout::new(root.join(stack::NODE));
        left += machine::stop_left_containers(&layout, Duration::from_secs(2), purge).await?;
    }
    left += machine::take_volumes_away(data_dir).await?;
    stack::clouds::release(data_dir)?;
    left += dev::clean_up(data_dir)?;
    Ok(left)
}

/// Removes the data directory, its lock last: what is left after a failure is still known as Berth's, so that the command
/// can be repeated.
fn purge(data: &Dir) -> anyhow::Result<()> {
    let path = data.path();
    for entry in data.entries()? {
        if entry.name != machine::LOCK {
            data.remove_tree(&entry.name).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    remove_tree(path).with_context(|| format!("remove {}", path.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purge_can_be_repeated_after_something_stood_in_its_way() {
        struct Unmount<'a>(&'a Path);
        impl Drop for Unmount<'_> {
            fn drop(&mut self) {
                let _ = berth_host::mount::unmount_lazily(self.0);
            }
        }
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("data");
        for name in ["a", "mounted", "z"] {
            std::fs::create_dir_all(path.join(name)).unwrap();
        }
        std::fs::write(path.join(machine::LOCK), "").unwrap();
        let mounted = path.join("mounted");
        berth_host::mount::bind(parent.path(), &mounted, berth_host::mount::Attributes::default()).unwrap();
        let bound = Unmount(&mounted);
        let data = Dir::open(&path).unwrap();
        let error = purge(&data).unwrap_err();
        assert!(format!("{error:#}").contains("remove the mount point"), "{error:#}");
        assert!(path.join(machine::LOCK).exists(), "the directory is still known as Berth's");
        drop(bound);
        purge(&data).unwrap();
        assert!(!path.exists());
    }
}
