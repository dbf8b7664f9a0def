//! A server for one test: gone when the test is, however it ends.

use std::{
    env, fs,
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
    script: Option<Script>,
    dir: TempDir,
    pub(crate) port: u16,
    pub(crate) mount_port: u16,
}

struct Script {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// Set to the folder that the machine's kernel exports, as root of version 4, to try its server instead of Ganesha.
const KERNEL: &str = "BERTH_NFS_KERNEL";

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

    pub(crate) fn is_kernel() -> bool {
        env::var_os(KERNEL).is_some()
    }

    pub(crate) fn with(options: &[&str]) -> Self {
        if let Some(export) = env::var_os(KERNEL) {
            assert!(options.is_empty(), "the kernel's server is as it is");
            let dir = tempfile::tempdir_in(export).unwrap();
            fs::create_dir(dir.path().join("export")).unwrap();
            return Self { script: None, dir, port: 0, mount_port: 0 };
        }
        let dir = tempfile::tempdir().unwrap();
        let (port, mount_port) = (free_port(), free_port());
        let script = Some(Script::start(dir.path(), port, mount_port, options));
        let mut server = Self { script, dir, port, mount_port };
        server.expect("ready");
        server
    }

    fn script(&mut self) -> &mut Script {
        self.script.as_mut().expect("only Ganesha can be told what to do")
    }

    fn expect(&mut self, answer: &str) {
        let mut line = String::new();
        self.script().output.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), answer, "the server's script failed; its log:\n{}", self.log());
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.script().input.as_mut().unwrap(), "{command}").unwrap();
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
        if let Some(kernel) = env::var_os(KERNEL) {
            let below = self.export().strip_prefix(kernel).unwrap().to_owned();
            target.path = format!("/{}", below.display());
        } else {
            target.options.port = Some(self.port);
            target.options.mount_port = Some(self.mount_port);
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

impl Script {
    #[expect(clippy::disallowed_methods, reason = "a test runs its server")]
    fn start(dir: &Path, port: u16, mount_port: u16, options: &[&str]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testbed/nfs/ganesha.sh");
        let mut process = Command::new(script)
            .args([dir.join("state"), dir.join("export")])
            .args([port.to_string(), mount_port.to_string()])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server can be started");
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, input, output }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the server's log:\n{}", self.log());
        }
        // The script ends with its input, and takes the server along.
        if let Some(script) = &mut self.script {
            script.input = None;
            let _ = script.process.wait();
        }
    }
}

/// An error with its reason.
pub(crate) fn chain(error: &berth_nfs::Error) -> String {
    format!("{error}: {}", std::error::Error::source(error).unwrap())
}
