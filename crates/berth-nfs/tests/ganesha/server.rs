//! A server for one test: gone when the test is, however it ends.

use std::{env, fs, path::PathBuf, time::Duration};

use berth_nfs::{Nfs, Share, Target, Version};
use tempfile::TempDir;

use super::ganesha::Ganesha;

/// Ganesha, or the directory that is the test's below what the kernel exports.
pub(crate) enum Server {
    Ganesha(Ganesha),
    Kernel(TempDir),
}

/// Set to the folder that the machine's kernel exports, as root of version 4, to try its server instead of Ganesha.
const KERNEL: &str = "BERTH_NFS_KERNEL";

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    pub(crate) fn is_kernel() -> bool {
        env::var_os(KERNEL).is_some()
    }

    pub(crate) fn with(options: &[&str]) -> Self {
        if let Some(export) = env::var_os(KERNEL) {
            assert!(options.is_empty(), "the kernel's server is as it is");
            let dir = tempfile::tempdir_in(export).unwrap();
            fs::create_dir(dir.path().join("export")).unwrap();
            return Self::Kernel(dir);
        }
        Self::Ganesha(Ganesha::start(options).unwrap())
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn send(&mut self, command: &str) {
        match self {
            Self::Ganesha(ganesha) => ganesha.send(command).unwrap(),
            Self::Kernel(_) => panic!("only Ganesha can be told what to do"),
        }
    }

    /// What the server serves, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        match self {
            Self::Ganesha(ganesha) => ganesha.export(),
            Self::Kernel(dir) => dir.path().join("export"),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        match self {
            Self::Ganesha(ganesha) => ganesha.port,
            Self::Kernel(_) => 2049,
        }
    }

    pub(crate) fn target(&self, version: Version) -> Target {
        let mut target = Target::new("127.0.0.1", "/export");
        match self {
            Self::Ganesha(ganesha) => {
                target.options.port = Some(ganesha.port);
                target.options.mount_port = Some(ganesha.mount_port);
            }
            Self::Kernel(_) => {
                let root = env::var_os(KERNEL).unwrap();
                target.path = format!("/{}", self.export().strip_prefix(root).unwrap().display());
            }
        }
        if version == Version::V3 {
            self.export().to_str().unwrap().clone_into(&mut target.path);
        }
        target.options.versions = vec![version];
        target.options.timeout = Duration::from_secs(20);
        target
    }

    pub(crate) async fn share(&self, version: Version) -> Share {
        Nfs::new().share(&self.target(version)).await.unwrap_or_else(|error| panic!("{}", chain(&error)))
    }
}

/// An error with its reason.
pub(crate) fn chain(error: &berth_nfs::Error) -> String {
    format!("{error}: {}", std::error::Error::source(error).unwrap())
}
