//! A server and mounts of its share, for one test: gone when the test is, however it ends.

use std::{
    path::PathBuf,
    process::Command,
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use berth_nfsd::Options;
use rustix::mount::UnmountFlags;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use super::ganesha::Ganesha;

/// Nothing here takes longer, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server that ends with the test: Ganesha, or Berth's own.
pub(crate) enum Server {
    Ganesha(Ganesha),
    Own(Own),
}

/// Berth's own server, in this process.
pub(crate) struct Own {
    dir: TempDir,
    port: u16,
    // It ends with this.
    _runtime: Runtime,
}

impl Own {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("export")).unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = runtime.block_on(berth_nfsd::Server::start(Options {
            directory: dir.path().join("export"),
            names: vec!["/export".into()],
            listen: "127.0.0.1:0".parse().unwrap(),
            allow: Vec::new(),
            state_directory: dir.path().join("state"),
            squash_root: false,
            allow_unprivileged_ports: false,
            handles: None,
            // The disk is not what is tried here.
            is_asynchronous: true,
        }));
        let server = server.unwrap();
        let port = server.address().port();
        runtime.spawn(server.run(CancellationToken::new()));
        Self { dir, port, _runtime: runtime }
    }
}

/// A mounted share, unmounted when this is dropped.
pub(crate) struct Mounted {
    at: TempDir,
    serving: Option<JoinHandle<()>>,
}

#[expect(clippy::disallowed_methods, reason = "a test runs programs that use its mounts")]
pub(crate) fn command(program: impl AsRef<std::ffi::OsStr>) -> Command {
    Command::new(program)
}

impl Server {
    pub(crate) fn start(settings: &[&str]) -> Self {
        Self::Ganesha(Ganesha::start(settings).unwrap())
    }

    /// Berth's own server, which speaks version 3.
    pub(crate) fn own() -> Self {
        Self::Own(Own::start())
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn send(&mut self, command: &str) {
        match self {
            Self::Ganesha(ganesha) => ganesha.send(command).unwrap(),
            Self::Own(_) => panic!("only Ganesha can be commanded"),
        }
    }

    /// What the server serves, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        match self {
            Self::Ganesha(ganesha) => ganesha.export(),
            Self::Own(own) => own.dir.path().join("export"),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        match self {
            Self::Ganesha(ganesha) => ganesha.port,
            Self::Own(own) => own.port,
        }
    }

    /// Mounts the share by one version, with more options.
    pub(crate) fn mount(&self, version: &str, options: &str) -> Mounted {
        let at = tempfile::tempdir().unwrap();
        let (path, reached) = match self {
            Self::Ganesha(ganesha) => (ganesha.share(version), ganesha.options()),
            Self::Own(own) => ("/export".to_owned(), format!("port={0},mountport={0}", own.port)),
        };
        let options = vec![format!("vers={version},{reached}"), options.to_owned()];
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

impl Mounted {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.at.path().join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let ended = rustix::mount::unmount(self.at.path(), UnmountFlags::FORCE)
            .or_else(|_| rustix::mount::unmount(self.at.path(), UnmountFlags::DETACH));
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
