//! A server and mounts of its share, for one test: gone when the test is, however it ends.

use std::{
    path::PathBuf,
    process::Command,
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::mount::UnmountFlags;
use tempfile::TempDir;

use super::ganesha::Ganesha;

/// Nothing here takes longer, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A server that ends with the test.
pub(crate) struct Server(Ganesha);

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
        Self(Ganesha::start(settings).unwrap())
    }

    /// `stop`, `cont`, `kill`, `start`, `set key=value`.
    pub(crate) fn send(&mut self, command: &str) {
        self.0.send(command).unwrap();
    }

    /// What the server serves, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        self.0.export()
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.port
    }

    /// Mounts the share by one version, with more options.
    pub(crate) fn mount(&self, version: &str, options: &str) -> Mounted {
        let at = tempfile::tempdir().unwrap();
        let path = self.0.share(version);
        let options = vec![format!("vers={version},{}", self.0.options()), options.to_owned()];
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
