//! An NFS server and drivers that use it, for one test: gone when the test is, however it ends.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use berth_e2e::{Csi, driver::binary, machine, nfs, program::Program};

/// How long anything may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(60);
const NOBODY: u32 = 65_534;

/// A server that exports one directory, and a place for drivers.
pub(crate) struct Server {
    nfs: nfs::Server,
    version: &'static str,
}

/// Which part of a driver runs as whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The controller, as an ordinary user without any capability.
    Controller,
    /// Everything, as root, with shares mounted through FUSE.
    Node,
    /// The same once more, as on another machine.
    Other,
}

impl Server {
    /// Starts a server that is to be spoken to by this version.
    pub(crate) fn start(version: &'static str) -> Result<Self> {
        Ok(Self { nfs: nfs::Server::start(&[])?, version })
    }

    /// Starts `berth nfs serve`, which speaks version 3.
    pub(crate) fn start_own() -> Result<Self> {
        Ok(Self { nfs: nfs::Server::start_own()?, version: "3" })
    }

    /// As [`Server::start`], serving a filesystem of its own, of so many MiB.
    pub(crate) fn start_on_disk(version: &'static str, mib: u64) -> Result<Self> {
        Ok(Self { nfs: nfs::Server::start_on_disk(&[], mib)?, version })
    }

    /// Where the server listens.
    pub(crate) fn port(&self) -> u16 {
        self.nfs.port()
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn control(&mut self, command: &str) -> Result<()> {
        self.nfs.control(command)
    }

    /// What the server serves, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        self.nfs.export()
    }

    /// The test's own directory.
    pub(crate) fn dir(&self) -> PathBuf {
        self.nfs.path("")
    }

    /// The parameters of a class of volumes on this server.
    pub(crate) fn parameters(&self) -> Vec<(&'static str, String)> {
        let share = self.nfs.share(self.version);
        let options = format!("vers={},{}", self.version, self.nfs.options);
        vec![("server", "127.0.0.1".to_owned()), ("share", share), ("mountOptions", options)]
    }

    /// Where a part of the driver listens.
    pub(crate) fn endpoint(&self, part: Part) -> String {
        format!("unix://{}", self.home(part).join("csi.sock").display())
    }

    /// Where a part of the driver keeps everything.
    pub(crate) fn home(&self, part: Part) -> PathBuf {
        self.dir().join(match part {
            Part::Controller => "controller",
            Part::Node => "node",
            Part::Other => "other",
        })
    }

    /// Starts a part of the driver, and waits until it answers.
    pub(crate) async fn drive(&self, part: Part) -> Result<Program> {
        self.drive_with(part, &[]).await
    }

    /// The same with further arguments.
    pub(crate) async fn drive_with(&self, part: Part, more: &[&str]) -> Result<Program> {
        let home = self.home(part);
        fs::create_dir_all(&home)?;
        let (endpoint, state) = (self.endpoint(part), home.join("state").display().to_string());
        let share = self.parameters();
        let (options, share) = (share[2].1.clone(), format!("{}:{}", share[0].1, share[1].1));
        let id = if part == Part::Other { "node-2" } else { "node-1" };
        let mut args = vec!["driver", "nfs", "--node-id", id, "--endpoint", &endpoint, "--state-dir", &state];
        args.extend(["--share", &share, "--default-mount-options", &options]);
        args.extend(more);
        let binary = binary()?;
        let log = self.dir().join(format!("{}.log", home.file_name().unwrap_or_default().display()));
        let program = match part {
            Part::Node | Part::Other => {
                args.extend(["--mount-mode", "fuse"]);
                Program::start(&binary, &args, &[], log)?
            }
            Part::Controller => {
                std::os::unix::fs::chown(&home, Some(NOBODY), Some(NOBODY))?;
                let (user, path) = (NOBODY.to_string(), binary.display().to_string());
                let mut all =
                    vec!["--reuid", &user, "--regid", &user, "--clear-groups", "--bounding-set=-all"];
                all.extend(["--inh-caps=-all", "--no-new-privs", &path]);
                all.extend(args);
                all.extend(["--mode", "controller"]);
                Program::start(Path::new("setpriv"), &all, &[], log)?
            }
        };
        let deadline = Instant::now() + PATIENCE;
        while !matches!(Csi::connect(&endpoint)?.probe().await, Ok(true)) {
            ensure!(Instant::now() < deadline, "the driver does not become ready:\n{}", program.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(program)
    }

    /// Processes that serve a share at or below this test's directory.
    pub(crate) fn serving(&self) -> Result<Vec<u32>> {
        let (dir, mut found) = (self.dir(), Vec::new());
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<_> = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
            let below = |word: &str| Path::new(word).starts_with(&dir);
            if words.get(1).is_some_and(|word| word == "__nfs-fuse")
                && words.get(3).is_some_and(|word| below(word))
            {
                found.push(pid);
            }
        }
        Ok(found)
    }

    /// Waits until nothing is mounted, no loop device is left and no process serves a share.
    pub(crate) async fn nothing_left(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (mut mounts, serving) = (machine::mounts_below(&self.dir())?, self.serving()?);
            let mut loops = machine::loops_below(&self.dir())?;
            // The server's own disk.
            mounts.retain(|target| *target != self.export());
            loops.retain(|found| found.backing != self.export().with_file_name("disk.img"));
            if mounts.is_empty() && serving.is_empty() && loops.is_empty() {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "still mounted: {mounts:?}; still serving: {serving:?}; loop devices: {loops:?}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for target in machine::mounts_below(&self.dir()).unwrap_or_default().iter().rev() {
            let flags = rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH;
            let _ = rustix::mount::unmount(target.as_path(), flags);
        }
    }
}
