//! The executable, asked anew what it can do whenever its file changes.

use std::{os::unix::fs::MetadataExt as _, path::PathBuf, sync::Arc, time::SystemTime};

use berth_flex::{Call, Capabilities, Driver, DriverName, Reply, Timeouts};
use parking_lot::Mutex;

use crate::{Error, Result, blocking};

/// A FlexVolume driver's executable, and how it is called.
#[derive(Debug)]
pub(super) struct Plugin {
    name: DriverName,
    path: PathBuf,
    timeouts: Timeouts,
    /// What it could do when this process was started, by which the services were composed.
    capabilities: Capabilities,
    current: Mutex<(FileVersion, Arc<Driver>)>,
}

/// By what a file is seen to be another.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    size: u64,
    changed: Option<SystemTime>,
}

impl Plugin {
    pub(super) async fn start(name: DriverName, path: PathBuf, timeouts: Timeouts) -> Result<Self> {
        let version = version_of(&path).await?;
        let driver =
            Driver::init(name.clone(), path.clone(), timeouts).await.map_err(|error| failed(&error))?;
        let (capabilities, driver) = (driver.capabilities(), Arc::new(driver));
        Ok(Self { name, path, timeouts, capabilities, current: Mutex::new((version, driver)) })
    }

    pub(super) fn name(&self) -> &DriverName {
        &self.name
    }

    pub(super) fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Makes a call-out; `None` if the driver does not support it.
    pub(super) async fn call(&self, call: Call) -> Result<Option<Reply>> {
        let driver = self.driver().await?;
        driver.call(call).await.map_err(|error| failed(&error))
    }

    /// The driver as its file is now.
    async fn driver(&self) -> Result<Arc<Driver>> {
        let version = version_of(&self.path).await?;
        let (last, driver) = self.current.lock().clone();
        if version == last {
            return Ok(driver);
        }
        let driver = Driver::init(self.name.clone(), self.path.clone(), self.timeouts)
            .await
            .map_err(|error| failed(&error))?;
        if driver.capabilities().attach != self.capabilities.attach {
            return Err(Error::Precondition(format!(
                "{} was replaced, and its capability \"attach\" is another now; restart this CSI driver",
                self.path.display()
            )));
        }
        tracing::info!(path = %self.path.display(), "the FlexVolume driver was replaced");
        let driver = Arc::new(driver);
        *self.current.lock() = (version, driver.clone());
        Ok(driver)
    }
}

async fn version_of(path: &std::path::Path) -> Result<FileVersion> {
    let path = path.to_owned();
    blocking(move || {
        let found = std::fs::metadata(&path).map_err(|error| {
            Error::Unavailable(format!("the FlexVolume driver {}: {error}", path.display()))
        })?;
        Ok(FileVersion { inode: found.ino(), size: found.size(), changed: found.modified().ok() })
    })
    .await
}

/// What a failed call-out means for whoever made the CSI call.
fn failed(error: &berth_flex::Error) -> Error {
    if error.is_unstarted() || error.is_interrupted() {
        return Error::Unavailable(error.to_string());
    }
    Error::State(error.to_string())
}
