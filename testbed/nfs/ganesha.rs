//! `ganesha.sh` as the NFS server of one test: gone when the test is, however it ends.
//!
//! Every suite that needs a server takes this file in as a module of its own.

use std::{
    fs, io,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use tempfile::TempDir;

/// Below the ports that the kernel gives out by itself.
const PORTS: std::ops::Range<u16> = 10_000..32_000;

/// A server that serves one directory.
#[derive(Debug)]
pub(crate) struct Ganesha {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    dir: TempDir,
    pub(crate) port: u16,
    pub(crate) mount_port: u16,
}

impl Ganesha {
    /// Starts one on free ports, with settings as the script takes them.
    pub(crate) fn start(settings: &[&str]) -> io::Result<Self> {
        Self::start_on(settings, |_| Ok(()))
    }

    /// As [`Ganesha::start`], after something was done to the directory that it is to serve.
    #[expect(clippy::disallowed_methods, reason = "a test runs its server")]
    pub(crate) fn start_on(
        settings: &[&str],
        prepare: impl FnOnce(&Path) -> io::Result<()>,
    ) -> io::Result<Self> {
        let dir = tempfile::tempdir()?;
        // Users other than root are to reach what is served.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        fs::create_dir(dir.path().join("export"))?;
        prepare(&dir.path().join("export"))?;
        let (port, mount_port) = (free_port()?, free_port()?);
        let mut process = Command::new(script()?)
            .args([dir.path().join("state"), dir.path().join("export")])
            .args([port.to_string(), mount_port.to_string()])
            .args(settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take();
        let output = process.stdout.take().map(BufReader::new).ok_or(io::ErrorKind::BrokenPipe)?;
        let mut server = Self { process, input, output, dir, port, mount_port };
        server.expect("ready")?;
        Ok(server)
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn send(&mut self, command: &str) -> io::Result<()> {
        writeln!(self.input.as_mut().ok_or(io::ErrorKind::BrokenPipe)?, "{command}")?;
        self.expect("ok")
    }

    fn expect(&mut self, answer: &str) -> io::Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.trim() == answer {
            return Ok(());
        }
        Err(io::Error::other(format!("the server's script says {line:?}; its log:\n{}", self.log())))
    }

    /// What it serves, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        self.dir.path().join("export")
    }

    /// The test's own directory, in which all this lies.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The mount options by which it is reached.
    pub(crate) fn options(&self) -> String {
        format!("port={},mountport={}", self.port, self.mount_port)
    }

    /// What the share is called in a version.
    pub(crate) fn share(&self, version: &str) -> String {
        if version == "3" { self.export().display().to_string() } else { "/export".to_owned() }
    }

    /// The end of what the server has written, without its usual noise.
    pub(crate) fn log(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("state/ganesha.log")).unwrap_or_default();
        let telling = |line: &&str| !line.contains("DBUS") && !line.contains(" :EVENT :");
        let lines: Vec<_> = log.lines().filter(telling).collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Ganesha {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the server's log:\n{}", self.log());
        }
        // The script ends with its input, and takes the server along.
        self.input = None;
        let _ = self.process.wait();
    }
}

/// The script, from whichever crate of the workspace it is looked for.
fn script() -> io::Result<PathBuf> {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let found = above.map(|dir| dir.join("testbed/nfs/ganesha.sh")).find(|script| script.is_file());
    found.ok_or_else(|| io::Error::other("there is no testbed above this crate"))
}

/// A port that nobody listens on, and that the kernel gives to nobody by itself.
pub(crate) fn free_port() -> io::Result<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (first, count) = (u32::from(PORTS.start), u32::from(PORTS.end - PORTS.start));
    // Not all processes look at the same place first.
    let begin = std::process::id().wrapping_mul(97);
    (0..count)
        .map(|_| first + begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % count)
        .filter_map(|port| u16::try_from(port).ok())
        .find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok())
        .ok_or_else(|| io::ErrorKind::AddrInUse.into())
}
