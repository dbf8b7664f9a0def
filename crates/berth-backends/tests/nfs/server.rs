//! An NFS server for one test, and a backend that speaks to it; both are gone when the test is, however it ends.

use std::path::{Path, PathBuf};

use berth_backends::{
    Parameters,
    nfs::{Config, Nfs},
};
use berth_core::{Access, AccessMode, CapacityRange, VolumeCapability};

use super::{
    between::{Fate, Request, between},
    calls::NewVolume,
    ganesha::Ganesha,
};

/// The versions that everything has to work with.
pub(crate) const VERSIONS: [&str; 2] = ["3", "4.2"];
pub(crate) struct Server {
    ganesha: Ganesha,
    version: &'static str,
}

impl Server {
    pub(crate) fn start(version: &'static str, settings: &[&str]) -> Self {
        Self { ganesha: Ganesha::start(settings).unwrap(), version }
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn send(&mut self, command: &str) {
        self.ganesha.send(command).unwrap();
    }

    /// What the server serves, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        self.ganesha.export()
    }

    /// What the share is called in this version.
    pub(crate) fn share(&self) -> String {
        self.ganesha.share(self.version)
    }

    /// A class of volumes on this server, with more parameters.
    pub(crate) fn class(&self, more: &[(&str, &str)]) -> Parameters {
        let share = self.share();
        let own = [("server", "127.0.0.1"), ("share", share.as_str())];
        own.iter().chain(more).map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    /// How a driver that runs against this server is set up.
    pub(crate) fn config(&self) -> Config {
        let mut config = Config::new(self.dir().join("shares"), "node-1".parse().unwrap());
        config.mount_options = vec![format!("vers={},{}", self.version, self.ganesha.options())];
        config
    }

    /// A backend that has spoken to nobody yet, as after a start.
    pub(crate) async fn backend(&self) -> Nfs {
        Nfs::start(self.config()).await.unwrap()
    }

    /// As [`Server::backend`], by way of somebody who decides about requests.
    pub(crate) async fn meddled(&self, fate: impl Fn(&Request<'_>) -> Fate + Send + Sync + 'static) -> Nfs {
        let mut config = self.config();
        config.mount_options.push(format!("port={}", between(self.ganesha.port, fate).unwrap()));
        Nfs::start(config).await.unwrap()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.ganesha.dir()
    }

    pub(crate) fn new_volume(&self, name: &str, more: &[(&str, &str)]) -> NewVolume {
        NewVolume {
            name: name.parse().unwrap(),
            range: CapacityRange::new(1 << 30, 0).unwrap(),
            capabilities: vec![mounted()],
            parameters: self.class(more),
            source: None,
        }
    }
}

pub(crate) fn mounted() -> VolumeCapability {
    VolumeCapability {
        access: Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None },
        mode: AccessMode::MultiNodeMultiWriter,
    }
}
