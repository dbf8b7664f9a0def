//! One disk, one driver on it, and the check that nothing is left behind.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    csi::{Csi, Mounted, Volume},
    disk::{Disk, DiskType},
    driver::{Driver, PATIENCE, Settings},
    machine,
};

/// A driver with its data directory on a disk of its own.
#[derive(Debug)]
pub struct Testbed {
    // Dropped in this order: the driver lets go of the disk before the disk is taken away.
    driver: Driver,
    disk: Disk,
    /// Clients of the running driver.
    pub csi: Csi,
}

/// What a test has not deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expected {
    /// The ids of all volumes.
    pub volumes: BTreeSet<String>,
    /// The ids of all snapshots.
    pub snapshots: BTreeSet<String>,
}

impl Testbed {
    /// A driver with the given further arguments on a disk with room for everything a test does.
    pub async fn start(kind: DiskType, args: &[&str]) -> Result<Self> {
        Self::start_on(Disk::new(kind, 24 << 10)?, args).await
    }

    /// A driver on a disk of the test's own.
    pub async fn start_on(disk: Disk, args: &[&str]) -> Result<Self> {
        let data = disk.mount_point().join("data");
        let driver = Driver::start(disk.path(), &data, Settings::with(args)).await?;
        let csi = driver.connect()?;
        Ok(Self { driver, disk, csi })
    }

    /// The temporary directory beside the disk.
    pub fn dir(&self) -> &Path {
        self.disk.path()
    }

    /// The driver's data directory.
    pub fn data(&self) -> &Path {
        self.driver.data()
    }

    /// The disk that the driver uses.
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// The process of the driver.
    pub fn driver(&mut self) -> &mut Driver {
        &mut self.driver
    }

    /// Kills the driver and starts it again.
    pub async fn kill_and_restart(&mut self) -> Result<()> {
        self.driver.kill()?;
        self.restart().await
    }

    /// Starts the driver again after it was stopped.
    pub async fn restart(&mut self) -> Result<()> {
        self.driver.restart().await?;
        self.csi = self.driver.connect()?;
        Ok(())
    }

    /// What a reboot leaves: the driver and every mount and loop device gone, the disk mounted again.
    pub async fn reboot(&mut self) -> Result<()> {
        self.driver.kill()?;
        machine::clear_below(self.dir())?;
        let image = self.dir().join("disk.img").display().to_string();
        machine::run("mount", &["-o", "loop", &image, &self.disk.mount_point().display().to_string()])?;
        self.restart().await
    }

    /// Stages and publishes a volume.
    pub async fn mount(&self, volume: &Volume) -> Result<Mounted> {
        self.csi.mount(volume, self.dir()).await.with_context(|| format!("mount {}", volume.id))
    }

    /// What the data directory holds below `name`, one entry per volume or snapshot.
    pub fn entries(&self, name: &str) -> Result<BTreeSet<String>> {
        let dir = self.data().join(name);
        match fs::read_dir(&dir) {
            Ok(entries) => {
                entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
            Err(error) => Err(error).with_context(|| format!("list {}", dir.display())),
        }
    }

    /// Waits until the driver's background work has emptied the trash.
    pub async fn wait_for_empty_trash(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = self.entries("trash")?;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the trash is not emptied: {left:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Checks that nothing is on disk but what is expected, and nothing mounted or attached at all.
    pub async fn check_leftovers(&self, expected: &Expected) -> Result<()> {
        self.wait_for_empty_trash().await?;
        self.check_entries(expected)?;
        for name in ["incoming", "lost"] {
            let left = self.entries(name)?;
            ensure!(left.is_empty(), "in {name} is {left:?}");
        }
        let mounts = self.foreign_mounts()?;
        ensure!(mounts.is_empty(), "still mounted: {mounts:?}");
        self.until_detached()
    }

    /// Waits until no loop device is left but the disk's own.
    pub fn until_detached(&self) -> Result<()> {
        machine::until_detached(|| self.foreign_loops())
    }

    /// Checks that the data directory holds exactly these volumes and snapshots.
    pub fn check_entries(&self, expected: &Expected) -> Result<()> {
        for (dir, ids) in [("volumes", &expected.volumes), ("snapshots", &expected.snapshots)] {
            let names: BTreeSet<String> = ids.iter().map(|id| name_on_disk(id).to_owned()).collect();
            let found = self.entries(dir)?;
            ensure!(found == names, "in {dir} on disk is {found:?}, expected was {ids:?}");
        }
        Ok(())
    }

    /// Stops the driver and checks that it ends well and that nothing at all is left.
    pub async fn finish(mut self) -> Result<()> {
        self.check_leftovers(&Expected::default()).await?;
        let status = self.driver.terminate()?;
        if !status.success() {
            bail!("the driver ended with {status}");
        }
        ensure!(!self.dir().join("csi.sock").exists(), "the socket is still there after a graceful stop");
        Ok(())
    }

    fn foreign_mounts(&self) -> Result<Vec<PathBuf>> {
        let mut mounts = machine::mounts_below(self.dir())?;
        mounts.retain(|target| *target != self.disk.mount_point());
        Ok(mounts)
    }

    fn foreign_loops(&self) -> Result<Vec<machine::Loop>> {
        let mut loops = machine::loops_below(self.dir())?;
        loops.retain(|device| device.backing != self.dir().join("disk.img"));
        Ok(loops)
    }
}

/// The directory of a volume or snapshot: its id without the word in front that tells what it is.
pub fn name_on_disk(id: &str) -> &str {
    id.split_once('-').map_or(id, |(_, name)| name)
}
