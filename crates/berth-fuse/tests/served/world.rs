//! A server and mounts of its share, for one test: gone when the test is, however it ends.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        atomic::{AtomicU16, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use berth_host::remote;
use tempfile::TempDir;

/// Nothing here takes longer, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Below the ports that the kernel gives out by itself, and where no other test looks.
const PORTS: std::ops::Range<u16> = 3_000..9_000;

/// A server.
pub(crate) struct Server {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    dir: TempDir,
    ports: [u16; 2],
}

/// A mounted share.
pub(crate) struct Mounted {
    at: TempDir,
    serving: Option<JoinHandle<()>>,
}

fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 5_000).unwrap();
    (0..5_000)
        .map(|_| PORTS.start + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % (PORTS.end - PORTS.start))
        .find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok())
        .expect("a port is free")
}

#[expect(clippy::disallowed_methods, reason = "a test runs its server, and programs that use its mounts")]
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    Command::new(program)
}

impl Server {
    pub(crate) fn start(settings: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Users other than root are to reach what is mounted and what is served.
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let ports = [free_port(), free_port()];
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testbed/nfs/ganesha.sh");
        let mut process = command(script)
            .args([dir.path().join("state"), dir.path().join("export")])
            .args(ports.map(|port| port.to_string()))
            .args(settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server can be started");
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut server = Self { process, input, output, dir, ports };
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

    pub(crate) fn port(&self) -> u16 {
        self.ports[0]
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("state/ganesha.log")).unwrap_or_default();
        let telling = |line: &&str| !line.contains("DBUS") && !line.contains(" :EVENT :");
        let lines: Vec<_> = log.lines().filter(telling).collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Mounts the share by one version, with more options.
    pub(crate) fn mount(&self, version: &str, options: &str) -> Mounted {
        let at = tempfile::tempdir().unwrap();
        let path =
            if version == "3" { self.export().to_str().unwrap().to_owned() } else { "/export".to_owned() };
        let [port, mount_port] = self.ports;
        let options = vec![format!("vers={version},port={port},mountport={mount_port}"), options.to_owned()];
        let mount =
            berth_fuse::Mount { server: "127.0.0.1".to_owned(), path, options, at: at.path().to_owned() };
        let (ready, is_ready) = mpsc::channel();
        let serving = std::thread::spawn(move || {
            berth_fuse::serve(&mount, || ready.send(()).unwrap()).unwrap();
        });
        is_ready.recv_timeout(PATIENCE).expect("it is served");
        Mounted { at, serving: Some(serving) }
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

impl Mounted {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.at.path().join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let ended = remote::end(self.at.path(), PATIENCE);
        if let Some(serving) = self.serving.take() {
            let served = serving.join();
            if !std::thread::panicking() {
                ended.expect("it can be unmounted");
                served.expect("it is served to its end");
            }
        }
    }
}

/// Waits for what is done behind an answer.
pub(crate) fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
