//! Runs a twin in this process, and speaks HTTP to it byte by byte.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_cloud::{Delays, InstanceOptions, Options, Provider, Quotas, Twin};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A twin that serves in the background.
pub(crate) struct Running {
    pub(crate) twin: Arc<Twin>,
    runtime: Option<Runtime>,
    stop: CancellationToken,
    server: Option<JoinHandle<()>>,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: String,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }
}

pub(crate) fn options(provider: Provider, region: &str, instances: &[&str], data_dir: &Path) -> Options {
    let instances = instances.iter();
    Options {
        provider,
        region: region.to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        data_dir: data_dir.to_owned(),
        devices: None,
        instances: instances
            .map(|id| InstanceOptions { id: (*id).to_owned(), zone: None, kind: None, devices: true })
            .collect(),
        quotas: Quotas { disks: 100, capacity_gib: 10_000, disks_per_instance: 15, snapshots_per_disk: 256 },
        delays: Delays { busy: Duration::from_millis(300), ..Delays::default() },
        rate_limit: "none".parse().unwrap(),
        faults: Vec::new(),
    }
}

impl Running {
    pub(crate) fn start(options: Options) -> Self {
        let runtime = Runtime::new().unwrap();
        let twin = runtime.block_on(Twin::open(options)).unwrap();
        let stop = CancellationToken::new();
        let (serving, until) = (twin.clone(), stop.clone());
        let server = runtime.spawn(async move { serving.serve(until).await.unwrap() });
        Self { twin, runtime: Some(runtime), stop, server: Some(server) }
    }

    /// Ends the twin as a kill would: nothing is finished, released or removed.
    pub(crate) fn kill(mut self) {
        self.server = None;
        self.runtime.take().unwrap().shutdown_timeout(Duration::from_secs(5));
    }

    /// A request without a body that no fault interrupts; `None` if the connection was closed without an answer.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Option<Answer> {
        let address = self.twin.url().strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
        )
        .unwrap();
        let mut text = String::new();
        // A connection that a fault closes may be reset.
        let _ = stream.read_to_string(&mut text);
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.split_whitespace().nth(1).unwrap().parse().unwrap();
        Some(Answer { status, headers: head.to_lowercase(), text: body.to_owned() })
    }

    pub(crate) fn admin(&self, method: &str, path: &str, body: &str) -> Value {
        let answer = self.send(method, &format!("/_twin/{path}"), "", body).unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text);
        answer.json()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.cancel();
        if let (Some(server), Some(runtime)) = (self.server.take(), &self.runtime) {
            let _ = runtime.block_on(server);
        }
    }
}

/// A directory for a twin, of which nothing is left at the end.
pub(crate) struct Directory(tempfile::TempDir);

impl Directory {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.0.path().join("twin")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = berth_cloud::purge(&self.path()) {
            eprintln!("purge: {error}");
        }
    }
}

/// Waits until something holds.
pub(crate) fn eventually<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
