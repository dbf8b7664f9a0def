//! A real NFS server, in user space, with a directory of its own.

#[path = "../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;

use std::path::PathBuf;

use anyhow::{Context, Result};

use self::ganesha::Ganesha;
use crate::machine;

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

    /// As [`Server::start`], serving a filesystem of its own, of so many MiB.
    pub fn start_on_disk(settings: &[&str], mib: u64) -> Result<Self> {
        let ganesha = Ganesha::start_on(settings, |export| {
            let image = export.with_file_name("disk.img");
            std::fs::File::create(&image)?.set_len(mib << 20)?;
            let (image, export) = (image.display().to_string(), export.display().to_string());
            let made = machine::run("mkfs.ext4", &["-q", "-F", "-m", "0", &image]);
            let made = made.and_then(|_| machine::run("mount", &["-o", "loop", &image, &export]));
            made.map(drop).map_err(std::io::Error::other)
        });
        let ganesha = ganesha.context("start the NFS server")?;
        let options = ganesha.options();
        Ok(Self { ganesha, options })
    }

    /// The port on which the server listens.
    pub fn port(&self) -> u16 {
        self.ganesha.port
    }

    /// Tells it to stop, cont, kill or start.
    pub fn control(&mut self, command: &str) -> Result<()> {
        self.ganesha.send(command).with_context(|| format!("command the NFS server: {command}"))
    }

    /// The directory that the server exports.
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
