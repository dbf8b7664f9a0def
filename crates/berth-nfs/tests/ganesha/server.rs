//! A server for one test: gone when the test is, however it ends.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::Duration,
};

use berth_nfs::{Nfs, Share, Target, Version};
use tempfile::TempDir;

/// Below the ports that the kernel gives out by itself.
const PORTS: std::ops::Range<u16> = 20000..32000;

pub(crate) struct Server {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    dir: TempDir,
    pub(crate) port: u16,
    pub(crate) mount_port: u16,
}

fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 10_000).unwrap();
    (0..10_000)
        .map(|_| PORTS.start + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % (PORTS.end - PORTS.start))
        .find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok())
        .expect("a port is free")
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    #[expect(clippy::disallowed_methods, reason = "a test runs its server")]
    pub(crate) fn with(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (port, mount_port) = (free_port(), free_port());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testbed/nfs/ganesha.sh");
        let mut process = Command::new(script)
            .args([dir.path().join("state"), dir.path().join("export")])
            .args([port.to_string(), mount_port.to_string()])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server can be started");
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut server = Self { process, input, output, dir, port, mount_port };
        server.expect("ready");
        server
    }

    fn expect(&mut self, answer: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), answer, "the server's script failed; its log:\n{}", self.log());
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.input.as_mut().unwrap(), "{command}").unwrap();
        self.expect("ok");
    }

    /// What the server serves, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        self.dir.path().join("export")
    }

    pub(crate) fn log(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("state/ganesha.log")).unwrap_or_default();
        let lines: Vec<_> =
            log.lines().filter(|line| !line.contains("DBUS") && !line.contains(" :EVENT :")).collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    pub(crate) fn target(&self, version: Version) -> Target {
        let mut target = Target::new("127.0.0.1", "/export");
        if version == Version::V3 {
            self.export().to_str().unwrap().clone_into(&mut target.path);
        }
        target.options.versions = vec![version];
        target.options.port = Some(self.port);
        target.options.mount_port = Some(self.mount_port);
        target.options.timeout = Duration::from_secs(20);
        target
    }

    pub(crate) async fn share(&self, version: Version) -> Share {
        Nfs::new().share(&self.target(version)).await.unwrap_or_else(|error| panic!("{}", chain(&error)))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the server's log:\n{}", self.log());
        }
        // The script ends with its input, and takes the server along.
        self.input = None;
        let _ = self.process.wait();
    }
}

/// An error with its reason.
pub(crate) fn chain(error: &berth_nfs::Error) -> String {
    format!("{error}: {}", std::error::Error::source(error).unwrap())
}
