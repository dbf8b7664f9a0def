//! A real NFS server, in user space, with a directory of its own: Ganesha, or `berth nfs serve`.

#[path = "../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;

use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use self::ganesha::Ganesha;
use crate::program::Program;
use crate::{driver, machine};

/// How long a server may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);

/// An NFS server; it ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    kind: Kind,
    /// The mount options by which it is reached.
    pub options: String,
}

#[derive(Debug)]
enum Kind {
    Ganesha(Ganesha),
    Own(Own),
}

/// A process of `berth nfs serve`, with its directory.
#[derive(Debug)]
struct Own {
    program: Option<Program>,
    dir: TempDir,
    port: u16,
}

impl Own {
    fn start(&mut self) -> Result<()> {
        let shown = |name: &str| self.dir.path().join(name).display().to_string();
        let (export, state, listen) = (shown("export"), shown("state"), format!("127.0.0.1:{}", self.port));
        let words = ["nfs", "serve", "--export", &export, "--state-dir", &state, "--listen", &listen];
        // The driver's controller is nobody, and has no port of root's.
        let words = [&words[..], &["--unprivileged-ports"]].concat();
        let program = Program::start(&driver::binary()?, &words, &[], self.dir.path().join("server.log"))?;
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            ensure!(begun.elapsed() < PATIENCE, "the server does not listen: {}", program.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        self.program = Some(program);
        Ok(())
    }
}

/// A port that nobody listens on, and that the kernel gives to nobody by itself.
pub fn free_port() -> Result<u16> {
    ganesha::free_port().context("find a port")
}

impl Server {
    /// Starts one on free ports, with settings as `testbed/nfs/ganesha.sh` takes them.
    pub fn start(settings: &[&str]) -> Result<Self> {
        let ganesha = Ganesha::start(settings).context("start the NFS server")?;
        Ok(Self::of(ganesha))
    }

    fn of(ganesha: Ganesha) -> Self {
        let options = ganesha.options();
        Self { kind: Kind::Ganesha(ganesha), options }
    }

    /// Starts `berth nfs serve` on a free port.
    pub fn start_own() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        // Users other than root are to reach what lies here.
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        std::fs::create_dir(dir.path().join("export"))?;
        let mut own = Own { program: None, dir, port: free_port()? };
        own.start()?;
        let options = format!("port={0},mountport={0}", own.port);
        Ok(Self { kind: Kind::Own(own), options })
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
        Ok(Self::of(ganesha.context("start the NFS server")?))
    }

    /// The port on which the server listens.
    pub fn port(&self) -> u16 {
        match &self.kind {
            Kind::Ganesha(ganesha) => ganesha.port,
            Kind::Own(own) => own.port,
        }
    }

    /// Tells it to stop, cont, kill or start; Berth's own knows the last two.
    pub fn control(&mut self, command: &str) -> Result<()> {
        match (&mut self.kind, command) {
            (Kind::Ganesha(ganesha), _) => {
                ganesha.send(command).with_context(|| format!("command the NFS server: {command}"))
            }
            (Kind::Own(own), "kill") => own.program.take().context("it does not run")?.kill(),
            (Kind::Own(own), "start") => own.start(),
            (Kind::Own(_), _) => bail!("Berth's own server cannot be told to {command}"),
        }
    }

    /// The directory that the server exports.
    pub fn export(&self) -> PathBuf {
        self.path("export")
    }

    /// What the share is called in a version.
    pub fn share(&self, version: &str) -> String {
        match &self.kind {
            Kind::Ganesha(ganesha) => ganesha.share(version),
            Kind::Own(_) => "/export".to_owned(),
        }
    }

    /// A place beside what it serves.
    pub fn path(&self, name: &str) -> PathBuf {
        match &self.kind {
            Kind::Ganesha(ganesha) => ganesha.dir().join(name),
            Kind::Own(own) => own.dir.path().join(name),
        }
    }
}
