//! What people do with kubectl: the manifests of `examples/`, logs and commands in pods, with a node that is played.
//!
//! Every kubectl that is found is tried: the machine's own, and the one that the testbed builds (`KUBE_BIN`).

mod examples;
mod node;
mod pods;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use berth_apiserver::auth::Credentials;
use berth_apiserver::collect;
use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::server::Server;
use berth_apiserver::store::{self, Store};
use tokio_util::sync::CancellationToken;

use self::node::Node;

/// The directories that have a kubectl.
fn kubectls() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap();
    let built = std::env::var_os("KUBE_BIN").map(PathBuf::from);
    let built = built.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache/kube-testbed/bin")));
    let own = std::env::split_paths(&path).find(|directory| directory.join("kubectl").exists());
    let built = built.filter(|directory| directory.join("kubectl").exists());
    let found: BTreeSet<PathBuf> = own.into_iter().chain(built).collect();
    assert!(!found.is_empty(), "there is no kubectl: make deps");
    found.into_iter().collect()
}

/// A server with a node behind it, and a kubectl that uses it.
struct Cluster {
    node: Arc<Node>,
    directory: tempfile::TempDir,
    kubectl: PathBuf,
    shutdown: CancellationToken,
}

/// What a command printed, and how it ended.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Cluster {
    async fn start(kubectl: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(&directory.path().join("store"), store::Options::default()).unwrap();
        let credentials = Credentials::ensure(&directory.path().join("pki"), jiff::Timestamp::now());
        let credentials = Arc::new(credentials.unwrap());
        let shutdown = CancellationToken::new();
        let node = Arc::new(Node::default());
        let options = Options {
            credentials: Some(credentials.clone()),
            pods: Some(node.clone()),
            shutdown: shutdown.clone(),
            ..Options::default()
        };
        let api = ApiServer::new(store, options);
        api.bootstrap().await.unwrap();
        let kubeconfig = directory.path().join("kubeconfig");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = Server::bind(address, api.clone(), credentials, Some(kubeconfig)).await.unwrap();
        tokio::spawn(server.run(shutdown.clone()));
        tokio::spawn(collect::run(api, collect::Options::default(), shutdown.clone()));
        Self { node, directory, kubectl: kubectl.to_owned(), shutdown }
    }

    /// A shell that finds the kubectl, and which server to ask; it is ended if it takes too long.
    #[expect(clippy::disallowed_methods, reason = "a test runs kubectl")]
    fn shell(&self, script: &str) -> Command {
        let directory = self.directory.path();
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new("timeout");
        command
            .args(["60", "bash", "-c", script])
            .current_dir(directory)
            .env("PATH", format!("{}:{path}", self.kubectl.display()))
            .env("KUBECONFIG", directory.join("kubeconfig"))
            .env("KUBECACHEDIR", directory.join("cache"))
            .stdin(Stdio::null());
        command
    }

    async fn run(&self, script: &str) -> Ran {
        let mut command = self.shell(script);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// What a command prints that succeeds.
    async fn print(&self, script: &str) -> String {
        let ran = self.run(script).await;
        assert_eq!(ran.code, Some(0), "{script}: {ran:?}");
        ran.stdout
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}
