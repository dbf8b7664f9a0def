//! The bytes of disks and snapshots, and the block devices that attached disks appear as.
//!
//! A disk is a sparse file `disks/<id>`, a snapshot a copy of it in `snapshots/<id>`, which shares its blocks where the filesystem
//! can. The device of an attached disk is a loop device, and what an instance sees of it is a link
//! `devices/<instance>/<name the cloud would use>`. Loop devices outlive the twin: a driver's mounts do not break because an API
//! server was killed. [`Media::restore`] compares what is there with what should be, at the start.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use berth_host::Doing as _;
use berth_host::loopdev::{self, LoopDevice};
use berth_host::path::Dir;
use berth_host::{Error, copy};
use parking_lot::Mutex;

const GIB: u64 = 1 << 30;
/// What a file that is being made is called until it is complete.
const UNFINISHED: &str = ".new";

/// What became of a detach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detached {
    Done,
    /// A filesystem or a process has the device open.
    InUse,
}

/// Where everything lies, and which loop devices belong to which disks.
pub(crate) struct Media {
    disks: PathBuf,
    snapshots: PathBuf,
    devices: PathBuf,
    loops: Mutex<BTreeMap<String, u32>>,
}

impl Media {
    /// Opens, or makes, the directories; devices are left as they are until [`Media::restore`].
    pub(crate) fn open(data: &Dir, devices: &Path) -> Result<Self, Error> {
        let disks = data.ensure_dir("disks", 0o700)?.path().to_owned();
        let snapshots = data.ensure_dir("snapshots", 0o700)?.path().to_owned();
        Dir::ensure(devices, 0o755)?;
        let devices = devices.to_owned();
        Ok(Self { disks, snapshots, devices, loops: Mutex::default() })
    }

    /// The directory of links of one instance.
    pub(crate) fn links_of(&self, instance: &str) -> PathBuf {
        self.devices.join(instance)
    }

    fn disk(&self, id: &str) -> PathBuf {
        self.disks.join(id)
    }

    /// Makes a disk's file, empty or with the content of a snapshot. One that is there already is complete.
    pub(crate) fn create(&self, id: &str, size_gib: u64, snapshot: Option<&str>) -> Result<(), Error> {
        let path = self.disk(id);
        if path.exists() {
            return Ok(());
        }
        let new = self.disks.join(format!("{id}{UNFINISHED}"));
        remove(&new)?;
        match snapshot {
            Some(snapshot) => copy::file(&self.snapshots.join(snapshot), &new).map(drop)?,
            None => fs::File::create_new(&new).map(drop).doing("create", &new)?,
        }
        grow(&new, size_gib)?;
        fs::rename(&new, &path).doing("create", &path)
    }

    /// Removes a disk's file.
    pub(crate) fn remove_disk(&self, id: &str) -> Result<(), Error> {
        remove(&self.disk(id))
    }

    /// Copies a disk's bytes as they are now.
    pub(crate) fn snapshot(&self, disk: &str, snapshot: &str) -> Result<(), Error> {
        let path = self.snapshots.join(snapshot);
        if path.exists() {
            return Ok(());
        }
        let new = self.snapshots.join(format!("{snapshot}{UNFINISHED}"));
        remove(&new)?;
        copy::file(&self.disk(disk), &new)?;
        fs::rename(&new, &path).doing("create", &path)
    }

    /// Removes a snapshot's file.
    pub(crate) fn remove_snapshot(&self, id: &str) -> Result<(), Error> {
        remove(&self.snapshots.join(id))
    }

    /// Makes a disk's file, and its device if it has one, larger.
    pub(crate) fn resize(&self, id: &str, size_gib: u64) -> Result<(), Error> {
        grow(&self.disk(id), size_gib)?;
        match self.device(&mut self.loops.lock(), id)? {
            Some(device) => loopdev::refresh_capacity(device.number()),
            None => Ok(()),
        }
    }

    /// The device of a disk, held open so that its number stays its own. A device that went away by itself is forgotten.
    fn device(&self, loops: &mut BTreeMap<String, u32>, id: &str) -> Result<Option<LoopDevice>, Error> {
        let Some(number) = loops.get(id).copied() else { return Ok(None) };
        let device = LoopDevice::open_if_attached(number, &self.disk(id))?;
        if device.is_none() {
            loops.remove(id);
        }
        Ok(device)
    }

    /// Gives a disk its device; one that has it keeps it.
    pub(crate) fn attach(&self, id: &str) -> Result<(), Error> {
        let mut loops = self.loops.lock();
        if self.device(&mut loops, id)?.is_none() {
            let options = loopdev::Options { direct_io: true, ..loopdev::Options::default() };
            let device = LoopDevice::attach(&self.disk(id), options)?;
            loops.insert(id.to_owned(), device.number());
        }
        Ok(())
    }

    /// Shows an attached disk to an instance under this name.
    pub(crate) fn link(&self, id: &str, instance: &str, name: &str) -> Result<(), Error> {
        let Some(number) = self.loops.lock().get(id).copied() else { return Ok(()) };
        let directory = self.links_of(instance);
        Dir::ensure(&directory, 0o755)?;
        let (path, new) = (directory.join(name), directory.join(format!(".{name}{UNFINISHED}")));
        remove(&new)?;
        symlink(loopdev::path_of(number), &new).doing("link", &new)?;
        fs::rename(&new, &path).doing("link", &path)
    }

    /// Takes the link of a disk away from an instance.
    pub(crate) fn unlink(&self, instance: &str, name: &str) -> Result<(), Error> {
        remove(&self.links_of(instance).join(name))
    }

    /// Takes a disk's device away, unless somebody uses it.
    pub(crate) fn detach(&self, id: &str) -> Result<Detached, Error> {
        let mut loops = self.loops.lock();
        let Some(device) = self.device(&mut loops, id)? else { return Ok(Detached::Done) };
        let number = device.number();
        if loopdev::is_in_use(device.path())? {
            return Ok(Detached::InUse);
        }
        // Held open, it would not go away.
        drop(device);
        match loopdev::detach(number) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(Detached::InUse),
            outcome => {
                outcome?;
                loops.remove(id);
                Ok(Detached::Done)
            }
        }
    }

    /// Takes a disk's device away although it is used: whoever uses it keeps the old file, which is no longer the disk's.
    ///
    /// So it is when a server loses its power: what it had not written does not reach the disk any more.
    pub(crate) fn tear_off(&self, id: &str) -> Result<(), Error> {
        if self.detach(id)? == Detached::Done {
            return Ok(());
        }
        let new = self.disks.join(format!("{id}{UNFINISHED}"));
        remove(&new)?;
        copy::file(&self.disk(id), &new)?;
        let path = self.disk(id);
        fs::rename(&new, &path).doing("replace", &path)?;
        if let Some(number) = self.loops.lock().remove(id) {
            detach_eventually(number)?;
        }
        Ok(())
    }

    /// Makes files, devices and links what the records say: `disks` and `snapshots` exist, and `links` are attached.
    pub(crate) fn restore(
        &self,
        disks: &BTreeSet<String>,
        snapshots: &BTreeSet<String>,
        links: &[(String, String, Option<String>)],
    ) -> Result<(), Error> {
        let attached: BTreeSet<_> = links.iter().map(|(disk, _, _)| disk.as_str()).collect();
        for device in loopdev::attached_below(&self.disks)? {
            let name = device.backing.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            // By device and inode: a file of this name may have replaced the one that the device is attached to.
            let same = LoopDevice::open_if_attached(device.number, &self.disk(name))?.is_some();
            if same && attached.contains(name) {
                self.loops.lock().insert(name.to_owned(), device.number);
            } else {
                detach_eventually(device.number)?;
            }
        }
        remove_others(&self.disks, disks)?;
        remove_others(&self.snapshots, snapshots)?;
        let shown: BTreeSet<_> = links
            .iter()
            .filter_map(|(_, instance, name)| Some(self.links_of(instance).join(name.as_ref()?)))
            .collect();
        for directory in entries(&self.devices)? {
            for link in entries(&directory)? {
                if !shown.contains(&link) {
                    remove(&link)?;
                }
            }
        }
        for (disk, instance, name) in links {
            self.attach(disk)?;
            if let Some(name) = name {
                self.link(disk, instance, name)?;
            }
        }
        Ok(())
    }

    /// Takes away the devices that nobody uses; the next start makes them again.
    pub(crate) fn release(&self) -> Result<(), Error> {
        let disks: Vec<String> = self.loops.lock().keys().cloned().collect();
        for disk in disks {
            self.detach(&disk)?;
        }
        Ok(())
    }
}

/// Takes away every device whose file lies below the data directory, for a twin that does not run.
pub(crate) fn detach_all(data: &Path) -> Result<(), Error> {
    let disks = data.join("disks");
    if !disks.exists() {
        return Ok(());
    }
    loopdev::attached_below(&disks)?.iter().try_for_each(|device| detach_eventually(device.number))
}

/// Detaches now, or when the last user is gone.
fn detach_eventually(number: u32) -> Result<(), Error> {
    match loopdev::detach(number) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(()),
        outcome => outcome.map(drop),
    }
}

fn grow(path: &Path, size_gib: u64) -> Result<(), Error> {
    let file = fs::OpenOptions::new().write(true).open(path).doing("open", path)?;
    let size = size_gib.saturating_mul(GIB).max(file.metadata().doing("stat", path)?.len());
    file.set_len(size).doing("set the size of", path)
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.doing("remove", path),
    }
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let list =
        || -> io::Result<Vec<PathBuf>> { fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect() };
    list().doing("list", directory)
}

fn remove_others(directory: &Path, keep: &BTreeSet<String>) -> Result<(), Error> {
    for path in entries(directory)? {
        if !path.file_name().and_then(|name| name.to_str()).is_some_and(|name| keep.contains(name)) {
            remove(&path)?;
        }
    }
    Ok(())
}
