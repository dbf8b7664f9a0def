//! What a call changes: mounts, loop devices and files, observed before it is sent and before its answer goes back.
//!
//! The mount table and the loop devices are read again only when the kernel says that something changed, and files are watched, so that
//! a call which changes nothing costs a few system calls. Of calls that run at the same time nobody can say which of them changed what: each is shown what
//! changed meanwhile.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use berth_certify::process::DriverProcess;
use berth_host::mount::MountInfo;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::messages::concerns_volumes;
use crate::watch::{How, Watch};

/// The most files that are named for one call.
const FILES_SHOWN: usize = 6;

/// Observes what the driver changes.
pub(crate) struct Observer {
    /// Paths below it are shown without it.
    directory: PathBuf,
    mounts: Mutex<MountTable>,
    loops: Mutex<LoopTable>,
    files: Mutex<Option<Watch>>,
}

/// The state before a call.
pub(crate) struct Before {
    mounts: Option<Arc<Vec<MountInfo>>>,
    loops: Arc<LoopDevices>,
    /// How long the driver's log was.
    log: u64,
}

/// What there was before and after a call.
pub(crate) struct Observed {
    pub(crate) before: Option<Arc<Vec<MountInfo>>>,
    pub(crate) after: Option<Arc<Vec<MountInfo>>>,
    /// Loop devices and files that changed, for people.
    effects: Vec<String>,
    /// The part of the driver's log that was written meanwhile.
    pub(crate) log: (u64, u64),
}

impl Observer {
    /// Watches the files below `files`; paths below `directory` are shown without it.
    pub(crate) fn new(directory: PathBuf, files: &Path) -> Self {
        let watch = Watch::new(vec![files.to_owned()]);
        if let Err(error) = &watch {
            tracing::warn!(%error, "files that calls change are not shown");
        }
        Self { directory, mounts: Mutex::default(), loops: Mutex::default(), files: Mutex::new(watch.ok()) }
    }

    /// To be called before a call is sent.
    pub(crate) fn before(&self, driver: &DriverProcess, method: &str) -> Before {
        if let Some(files) = self.files.lock().as_mut() {
            files.drain();
        }
        Before {
            mounts: self.mounts.lock().current(driver),
            loops: self.loops_for(method),
            log: log_length(driver),
        }
    }

    /// To be called before the answer goes back.
    pub(crate) fn after(&self, driver: &DriverProcess, method: &str, before: Before) -> Observed {
        let mut effects = Vec::new();
        let loops = self.loops_for(method);
        for (device, backing) in loops.iter().filter(|(device, _)| !before.loops.contains_key(*device)) {
            effects.push(format!("+ /dev/{device} on {}", self.shown(Path::new(backing))));
        }
        for device in before.loops.keys().filter(|device| !loops.contains_key(*device)) {
            effects.push(format!("- /dev/{device}"));
        }
        let mut changes = self.files.lock().as_mut().map(Watch::drain).unwrap_or_default();
        // These are the workbench's, and not the storage's.
        changes.retain(|change| Some(change.path.as_path()) != driver.log() && !is_socket(&change.path));
        for change in changes.iter().take(FILES_SHOWN) {
            let sign = match change.how {
                How::Created => '+',
                How::Written => '~',
                How::Removed => '-',
            };
            let kind = if change.path.is_dir() { "/" } else { "" };
            effects.push(format!("{sign} {}{kind}", self.shown(&change.path)));
        }
        if changes.len() > FILES_SHOWN {
            effects.push(format!("… and {} more files", changes.len() - FILES_SHOWN));
        }
        Observed {
            before: before.mounts,
            after: self.mounts.lock().current(driver),
            effects,
            log: (before.log, log_length(driver)),
        }
    }

    /// Everything that changed, one line each.
    pub(crate) fn effects(&self, observed: Observed) -> Vec<String> {
        let mut lines = Vec::new();
        if let (Some(before), Some(after)) = (&observed.before, &observed.after)
            && !Arc::ptr_eq(before, after)
        {
            let key = |mount: &MountInfo| (mount.id, mount.target.clone());
            let had: BTreeMap<_, _> = before.iter().map(|mount| (key(mount), mount)).collect();
            let has: BTreeMap<_, _> = after.iter().map(|mount| (key(mount), mount)).collect();
            for mount in after.iter().filter(|mount| !had.contains_key(&key(mount))) {
                let read_only =
                    if mount.options.split(',').any(|option| option == "ro") { ", read-only" } else { "" };
                lines.push(format!("+ mount {} ({}{read_only})", self.shown(&mount.target), mount.fs_type));
            }
            for mount in before.iter().filter(|mount| !has.contains_key(&key(mount))) {
                lines.push(format!("- mount {}", self.shown(&mount.target)));
            }
        }
        lines.extend(observed.effects);
        lines
    }

    /// The loop devices; none for calls that cannot attach one.
    fn loops_for(&self, method: &str) -> Arc<LoopDevices> {
        if concerns_volumes(method) { self.loops.lock().current() } else { Arc::default() }
    }

    fn shown(&self, path: &Path) -> String {
        path.strip_prefix(&self.directory).unwrap_or(path).display().to_string()
    }
}

fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

fn log_length(driver: &DriverProcess) -> u64 {
    driver.log().and_then(|log| fs::metadata(log).ok()).map_or(0, |log| log.len())
}

/// The mount table of the driver, read again when it changed.
#[derive(Default)]
struct MountTable {
    /// The process whose table it is, and its file, which the kernel signals changes on.
    source: Option<(u32, File)>,
    mounts: Option<Arc<Vec<MountInfo>>>,
}

impl MountTable {
    fn current(&mut self, driver: &DriverProcess) -> Option<Arc<Vec<MountInfo>>> {
        let pid = driver.pid()?;
        let stale = match &self.source {
            Some((known, file)) if *known == pid => has_changed(file),
            _ => {
                self.source = File::open(format!("/proc/{pid}/mountinfo")).ok().map(|file| (pid, file));
                true
            }
        };
        if stale {
            self.mounts = driver.mounts().map(Arc::new);
        }
        self.mounts.clone()
    }
}

fn has_changed(table: &File) -> bool {
    let mut files = [PollFd::new(table, PollFlags::PRI)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Who cannot be asked is read.
    poll(&mut files, Some(&at_once)).is_err()
        || files[0].revents().intersects(PollFlags::PRI | PollFlags::ERR)
}

/// The loop devices that are attached, each with its file.
type LoopDevices = BTreeMap<String, String>;

/// The loop devices of this machine, listed again when the kernel has announced a change of any device.
#[derive(Default)]
struct LoopTable {
    /// How many changes the kernel had announced when the devices were listed.
    announced: Option<String>,
    devices: Arc<LoopDevices>,
}

impl LoopTable {
    fn current(&mut self) -> Arc<LoopDevices> {
        let announced = fs::read_to_string("/sys/kernel/uevent_seqnum").ok();
        if announced.is_none() || announced != self.announced {
            self.devices = Arc::new(loop_devices());
            self.announced = announced;
        }
        self.devices.clone()
    }
}

/// Lists the loop devices that are attached, each with its file.
pub fn loop_devices() -> LoopDevices {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let attached = entries.filter_map(|entry| {
        let name = entry.file_name().to_str().filter(|name| name.starts_with("loop"))?.to_owned();
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        Some((name, backing.trim_end().to_owned()))
    });
    attached.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_host::loopdev::{LoopDevice, Options, detach};

    #[test]
    fn loop_devices_that_come_and_go_between_two_looks_are_noticed() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let image = directory.path().join("image");
        File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image can be made");
        let mut table = LoopTable::default();
        let has_image =
            |table: &mut LoopTable| table.current().values().any(|backing| Path::new(backing) == image);
        for _ in 0..3 {
            assert!(!has_image(&mut table));
            let device = LoopDevice::attach(&image, Options::default()).expect("a loop device is free");
            let number = device.number();
            assert!(has_image(&mut table), "the device that was attached");
            drop(device);
            detach(number).expect("the device can be detached");
        }
    }
}
