//! A server in a process of its own, which can be killed: this very test binary, started once more.

use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;

use berth_apiserver::auth::Credentials;
use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::server::Server;
use berth_apiserver::store::{self, Store};
use tokio_util::sync::CancellationToken;

use super::http::Endpoint;

const DIRECTORY: &str = "BERTH_SERVED_DIRECTORY";
const PORT: &str = "BERTH_SERVED_PORT";
const HISTORY: &str = "BERTH_SERVED_HISTORY";

#[test]
fn the_process_that_serves() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let number = |name| std::env::var(name).unwrap().parse().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(serve(Path::new(&directory), number(PORT), number(HISTORY)));
}

async fn serve(directory: &Path, port: usize, history_events: usize) {
    let options = store::Options { history_events, ..store::Options::default() };
    let (store, opened) = Store::open(&directory.join("store"), options).unwrap();
    assert_eq!(opened.damaged, 0);
    let credentials = Arc::new(Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now()).unwrap());
    let shutdown = CancellationToken::new();
    let options =
        Options { credentials: Some(credentials.clone()), shutdown: shutdown.clone(), ..Options::default() };
    let api = ApiServer::new(store, options);
    api.bootstrap().await.unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, u16::try_from(port).unwrap()));
    let server = Server::bind(address, api, credentials, Some(directory.join("kubeconfig"))).await.unwrap();
    println!("\nserving {}", server.address());
    server.run(shutdown).await;
}

/// A data directory and the process that serves it.
pub(crate) struct Served {
    directory: PathBuf,
    history: usize,
    child: Child,
    /// Open as long as the process: whoever writes to a closed pipe dies of it.
    output: ChildStdout,
    /// Where it is reached, before and after restarts.
    pub(crate) endpoint: Endpoint,
}

impl Served {
    /// Starts a server that remembers so many events.
    pub(crate) fn start(directory: &Path, history: usize) -> Self {
        let (child, output, address) = start(directory, 0, history);
        let credentials = Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now()).unwrap();
        let endpoint = Endpoint::new(address, &credentials).unwrap();
        Self { directory: directory.to_owned(), history, child, output, endpoint }
    }

    /// Kills the process, as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, at the same address.
    pub(crate) fn start_again(&mut self) {
        (self.child, self.output, _) = start(&self.directory, self.endpoint.address.port(), self.history);
    }

    /// How many bytes the process holds in memory.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// Whether it still runs.
    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[expect(clippy::disallowed_methods, reason = "the process is there to be killed")]
fn start(directory: &Path, port: u16, history: usize) -> (Child, ChildStdout, SocketAddr) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "served::the_process_that_serves", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(PORT, port.to_string())
        .env(HISTORY, history.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let address =
        output.by_ref().lines().find_map(|line| line.unwrap().strip_prefix("serving ")?.parse().ok());
    let address = address.expect("the server says where it listens");
    (child, output.into_inner(), address)
}
