//! A real NFS server, in user space, with a directory of its own.

#[path = "../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;

use std::path::PathBuf;

use anyhow::{Context, Result};

use self::ganesha::Ganesha;

/// An NFS server; it ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    ganesha: Ganesha,
    /// The mount options by which it is reached.
    pub options: String,
}

impl Server {
    /// Starts one on free ports, with settings as `testbed/nfs/ganesha.sh` takes them.
    pub fn start(settings: &[&str]) -> Result<Self> {
        let ganesha = Ganesha::start(settings).context("start the NFS server")?;
        let options = ganesha.options();
        Ok(Self { ganesha, options })
    }

    /// Tells it to stop, cont, kill or start.
    pub fn tell(&mut self, command: &str) -> Result<()> {
        self.ganesha.tell(command).with_context(|| format!("tell the NFS server: {command}"))
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.ganesha.port
    }

    /// What it serves.
    pub fn export(&self) -> PathBuf {
        self.ganesha.export()
    }

    /// What the share is called in a version.
    pub fn share(&self, version: &str) -> String {
        self.ganesha.share(version)
    }

    /// A place beside what it serves.
    pub fn path(&self, name: &str) -> PathBuf {
        self.ganesha.dir().join(name)
    }
}
