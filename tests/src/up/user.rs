//! An ordinary user of this machine: what a test runs without root, and without `sudo`.

use std::{
    fmt::Write as _,
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::machine;

/// A user that owns nothing on this machine.
pub const USER: u32 = 4711;

/// A user with a home directory, and with what an administrator gave it.
#[derive(Debug)]
pub struct User {
    home: PathBuf,
    /// What root does before, in a mount namespace of the user.
    prelude: String,
}

impl User {
    /// A user with a directory as its home, which becomes its own.
    pub fn new(home: &Path) -> Result<Self> {
        chown(home, Some(USER), Some(USER)).with_context(|| format!("give {} away", home.display()))?;
        Ok(Self { home: home.to_owned(), prelude: String::new() })
    }

    /// With a range of users and groups of its own, beside the one id that everybody has.
    pub fn with_ids(mut self) -> Result<Self> {
        let directory = self.home.join("etc");
        fs::create_dir_all(&directory)?;
        let passwd = format!("{}student:x:{USER}:{USER}::/:/bin/sh\n", fs::read_to_string("/etc/passwd")?);
        let range = format!("student:{}:65536\n", 0x7000_0000);
        for (name, text) in [("passwd", &passwd), ("subuid", &range), ("subgid", &range)] {
            fs::write(directory.join(name), text)?;
            let file = directory.join(name);
            let _ =
                write!(self.prelude, "touch /etc/{name}; mount --bind '{}' /etc/{name}; ", file.display());
        }
        Ok(self)
    }

    /// With a `/dev/fuse` that everybody may open, as most distributions have it.
    pub fn with_fuse(mut self) -> Result<Self> {
        let device = self.home.join("fuse");
        machine::run("mknod", &[&device.display().to_string(), "c", "10", "229"])?;
        fs::set_permissions(&device, fs::Permissions::from_mode(0o666))?;
        let _ = write!(self.prelude, "mount --bind '{}' /dev/fuse; ", device.display());
        Ok(self)
    }

    /// A program that this user runs; its process id is that of the child.
    pub fn command(&self, program: &Path) -> Command {
        let script = format!(
            "set -e; {}exec setpriv --reuid={USER} --regid={USER} --clear-groups --inh-caps=-all \"$@\"",
            self.prelude
        );
        let mut command = machine::command("unshare");
        command.args(["--mount", "--propagation=private", "sh", "-c", &script, "sh"]).arg(program);
        command.env("HOME", &self.home).env("TMPDIR", &self.home).env_remove("XDG_DATA_HOME");
        command
    }
}
