//! An API server, and the programs that use it, as child processes of a test.

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use berth_e2e::driver;
use berth_e2e::program::Program;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::json;
use tempfile::TempDir;

/// How long anything may take before a test gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const DRIVER: &str = "local.berth.dev";

/// An API server with a class of the local driver's volumes, and a directory for everything.
pub(crate) struct Cluster {
    // Dropped in this order: programs first.
    server: Program,
    pub(crate) client: Client,
    dir: TempDir,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        // The path stays short: a socket's may have 107 bytes.
        let dir = tempfile::Builder::new().prefix("sc-").rand_bytes(5).tempdir().unwrap();
        let data = dir.path().join("api").display().to_string();
        let args = ["apiserver", "--listen", "127.0.0.1:0", "--data-dir", &data];
        let mut server =
            Program::start(&driver::binary().unwrap(), &args, &[], dir.path().join("api.log")).unwrap();
        server.says("ready: kubectl").await.unwrap();
        let read = Kubeconfig::read_from(dir.path().join("api/kubeconfig")).unwrap();
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.unwrap();
        let cluster = Self { server, client: Client::try_from(config).unwrap(), dir };
        let class: StorageClass = serde_json::from_value(json!({
            "metadata": {"name": "local"}, "provisioner": DRIVER, "volumeBindingMode": "Immediate",
        }))
        .unwrap();
        Api::all(cluster.client.clone()).create(&kube::api::PostParams::default(), &class).await.unwrap();
        cluster
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn kubeconfig(&self) -> String {
        format!("--kubeconfig={}", self.path("api/kubeconfig").display())
    }

    pub(crate) fn csi_address(&self) -> String {
        format!("--csi-address={}", self.path("csi.sock").display())
    }

    /// The words that every local driver of these tests has.
    pub(crate) fn driver_args(&self) -> [String; 5] {
        [
            format!("--endpoint=unix://{}", self.path("csi.sock").display()),
            format!("--data-dir={}", self.path("volumes").display()),
            "--node-id=node-1".to_owned(),
            "--kind=dir".to_owned(),
            "--enable-topology=false".to_owned(),
        ]
    }

    pub(crate) async fn driver(&self) -> Program {
        let own = self.driver_args();
        let args: Vec<&str> = ["driver", "local"].into_iter().chain(own.iter().map(String::as_str)).collect();
        let mut driver = self.berth("driver", &args, &[]);
        driver.says("ready").await.unwrap();
        driver
    }

    /// Starts `berth` with a log of this name.
    pub(crate) fn berth(&self, log: &str, args: &[&str], environment: &[(&str, &str)]) -> Program {
        let binary = driver::binary().unwrap();
        Program::start(&binary, args, environment, self.path(&format!("{log}.log"))).unwrap()
    }

    /// Starts `berth` by another name, through a link.
    pub(crate) fn by_name(&self, name: &str, args: &[&str]) -> Program {
        let link = self.path(name);
        if !link.exists() {
            std::os::unix::fs::symlink(driver::binary().unwrap(), &link).unwrap();
        }
        Program::start(&link, args, &[], self.path(&format!("{name}.log"))).unwrap()
    }

    /// A claim that the provisioner is asked to make a volume for, as Kubernetes' binder asks.
    pub(crate) async fn claim(&self, name: &str) -> PersistentVolumeClaim {
        let claim: PersistentVolumeClaim = serde_json::from_value(json!({
            "metadata": {"name": name, "annotations": {"volume.kubernetes.io/storage-provisioner": DRIVER}},
            "spec": {
                "storageClassName": "local", "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Mi"}},
            },
        }))
        .unwrap();
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), "default");
        claims.create(&kube::api::PostParams::default(), &claim).await.unwrap()
    }

    /// Waits for the volume of a claim.
    pub(crate) async fn volume_of(&self, claim: &PersistentVolumeClaim) -> PersistentVolume {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let name = format!("pvc-{}", claim.uid().unwrap());
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(volume) = volumes.get_opt(&name).await.unwrap() {
                return volume;
            }
            assert!(Instant::now() < deadline, "there is no volume {name}");
            pause().await;
        }
    }

    /// The volumes that lie on the driver's disk.
    pub(crate) fn on_disk(&self) -> usize {
        fs::read_dir(self.path("volumes/volumes")).map_or(0, Iterator::count)
    }

    /// Waits until a Lease is held by somebody who is wanted.
    pub(crate) async fn held(&self, lease: &str, wanted: impl Fn(&str) -> bool) -> LeaseSpec {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "default");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = leases.get_opt(lease).await.unwrap().and_then(|lease| lease.spec);
            if let Some(spec) =
                found.clone().filter(|spec| wanted(spec.holder_identity.as_deref().unwrap_or("")))
            {
                return spec;
            }
            assert!(Instant::now() < deadline, "{lease} is {found:?}");
            pause().await;
        }
    }

    pub(crate) fn server_log(&self) -> String {
        self.server.log()
    }
}

/// Pauses until the next observation.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// The status and text of a page.
pub(crate) fn get(address: &str, path: &str) -> (u16, String) {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap();
    (status, text.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}
