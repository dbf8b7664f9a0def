//! An NFS server for one test, and a backend that speaks to it; both are gone when the test is, however it ends.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
};

use berth_core::{Access, AccessMode, CapacityRange, VolumeCapability};
use berth_driver::{
    backend::{NewVolume, Parameters},
    nfs::{Config, Nfs},
};
use tempfile::TempDir;

/// The versions that everything has to work with.
pub(crate) const VERSIONS: [&str; 2] = ["3", "4.2"];
/// Below the ports that the kernel gives out by itself, and not where the client's own tests look for theirs.
const PORTS: std::ops::Range<u16> = 10_000..20_000;

pub(crate) struct Server {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    dir: TempDir,
    options: String,
    version: &'static str,
}

fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 5_000).unwrap();
    (0..5_000)
        .map(|_| PORTS.start + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % (PORTS.end - PORTS.start))
        .find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok())
        .expect("a port is free")
}

impl Server {
    #[expect(clippy::disallowed_methods, reason = "a test runs its server")]
    pub(crate) fn start(version: &'static str, settings: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (port, mount_port) = (free_port(), free_port());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testbed/nfs/ganesha.sh");
        let mut process = Command::new(script)
            .args([dir.path().join("state"), dir.path().join("export")])
            .args([port.to_string(), mount_port.to_string()])
            .args(settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server can be started");
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        let options = format!("vers={version},port={port},mountport={mount_port}");
        let mut server = Self { process, input, output, dir, options, version };
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

    fn log(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("state/ganesha.log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// What the share is called in this version.
    pub(crate) fn share(&self) -> String {
        match self.version {
            "3" => self.export().to_str().unwrap().to_owned(),
            _ => "/export".to_owned(),
        }
    }

    /// A class of volumes on this server, with more parameters.
    pub(crate) fn class(&self, more: &[(&str, &str)]) -> Parameters {
        let share = self.share();
        let own = [("server", "127.0.0.1"), ("share", share.as_str())];
        own.iter().chain(more).map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    /// How a driver that runs against this server is set up.
    pub(crate) fn config(&self) -> Config {
        let mut config = Config::new(self.dir.path().join("shares"), "node-1".parse().unwrap());
        config.mount_options = vec![self.options.clone()];
        config
    }

    /// A backend that has spoken to nobody yet, as after a start.
    pub(crate) fn backend(&self) -> Nfs {
        Nfs::new(self.config()).unwrap()
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn new_volume(&self, name: &str, more: &[(&str, &str)]) -> NewVolume {
        NewVolume {
            name: name.parse().unwrap(),
            range: CapacityRange::new(1 << 30, 0).unwrap(),
            capabilities: vec![mounted()],
            parameters: self.class(more),
            mutable: Parameters::new(),
            source: None,
            ephemeral: false,
        }
    }
}

pub(crate) fn mounted() -> VolumeCapability {
    VolumeCapability {
        access: Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None },
        mode: AccessMode::MultiNodeMultiWriter,
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the server's log:\n{}", self.log());
        }
        // The script ends with its input, and takes the server along.
        self.input = None;
        let _ = self.process.wait();
    }
}
