//! The real cluster as one test uses it: a namespace, a driver's name and a directory of its own, and Berth's programs.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{Csi, driver, machine, program::Program};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kinds::{
    CLAIM, CLASS, CSI_DRIVER, GROUP_SNAPSHOT_CLASS, NAMESPACE, POD, SERVICE_ACCOUNT, SNAPSHOT_CLASS, VOLUME,
    text,
};
use crate::objects::{Objects, merged};

/// The part of the cluster that belongs to one test, whose objects it derefs to.
pub(crate) struct Cluster {
    objects: Objects,
    kubeconfig: PathBuf,
    dir: TempDir,
    /// Of the test's namespace, classes and nodes.
    pub(crate) name: String,
    /// The CSI driver's name.
    pub(crate) driver: String,
    begun: Instant,
}

impl Cluster {
    /// A namespace, and objects that make a driver known whose volumes are attached, with a class named like the
    /// namespace.
    pub(crate) async fn start(test: &str, class: Value) -> Result<Self> {
        Self::with_driver(test, json!({"attachRequired": true}), class).await
    }

    /// The same for a driver that makes its volumes on their nodes, and tells how much room is there.
    pub(crate) async fn start_per_node(test: &str, class: Value) -> Result<Self> {
        Self::with_driver(test, json!({"attachRequired": false, "storageCapacity": true}), class).await
    }

    async fn with_driver(test: &str, driver_spec: Value, class: Value) -> Result<Self> {
        let (kubeconfig, config) = real().await?;
        // The path stays short: a socket's may have 107 bytes.
        let dir =
            tempfile::Builder::new().prefix("kube-").rand_bytes(5).tempdir().context("make a directory")?;
        let name = format!("{test}-{}", std::process::id());
        let driver = format!("{name}.berth.test");
        let objects = Objects::new(Client::try_from(config)?, name.clone());
        let cluster = Self { objects, kubeconfig, dir, name, driver, begun: Instant::now() };
        cluster.create(NAMESPACE, json!({"metadata": {"name": cluster.name}})).await?;
        let spec = json!({
            "podInfoOnMount": true, "fsGroupPolicy": "File", "volumeLifecycleModes": ["Persistent", "Ephemeral"],
        });
        let spec = merged(spec, driver_spec);
        cluster.create(CSI_DRIVER, json!({"metadata": {"name": cluster.driver}, "spec": spec})).await?;
        cluster.class(&cluster.name, class).await?;
        // Without it no pod is admitted.
        cluster.until(SERVICE_ACCOUNT, "default", "is there", |_| true).await?;
        Ok(cluster)
    }

    /// A class of the test's driver that lets volumes grow, with more fields.
    pub(crate) async fn class(&self, name: &str, more: Value) -> Result<()> {
        let class = json!({
            "metadata": {"name": name}, "provisioner": self.driver, "allowVolumeExpansion": true,
        });
        self.create(CLASS, merged(class, more)).await.map(drop)
    }

    /// Makes the snapshot kinds known, and classes of the test's driver named like the namespace.
    pub(crate) async fn with_snapshots(&self) -> Result<()> {
        let definitions = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/berth-sidecars/src/snapshots");
        self.kubectl(&["apply", "--server-side", "-f", definitions])?;
        self.kubectl(&["wait", "--for=condition=Established", "--timeout=60s", "-f", definitions])?;
        for kind in [SNAPSHOT_CLASS, GROUP_SNAPSHOT_CLASS] {
            let class = json!({
                "metadata": {"name": self.name}, "driver": self.driver, "deletionPolicy": "Delete",
            });
            self.create(kind, class).await?;
        }
        Ok(())
    }

    /// A place in the test's directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The directory that holds everything.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The words that tell any component where the cluster is.
    pub(crate) fn kubeconfig(&self) -> String {
        format!("--kubeconfig={}", self.kubeconfig.display())
    }

    /// Notes how long the test has taken to come here.
    pub(crate) fn step(&self, what: &str) {
        println!("{:7.1} s  {what}", self.begun.elapsed().as_secs_f64());
    }

    /// Runs kubectl; gives what it printed, or its complaint as the error.
    pub(crate) fn kubectl(&self, args: &[&str]) -> Result<String> {
        let kubeconfig = self.kubeconfig();
        let args: Vec<&str> = [kubeconfig.as_str(), "-n", &self.name].iter().chain(args).copied().collect();
        machine::run("kubectl", &args)
    }

    /// Starts `berth` with a log of this name.
    pub(crate) fn berth(&self, log: &str, args: &[&str], environment: &[(&str, &str)]) -> Result<Program> {
        Program::start(&driver::binary()?, args, environment, self.path(&format!("{log}.log")))
    }

    /// Starts a command of the local driver that is about this node, and waits until it serves.
    pub(crate) async fn local(&self, command: &str, node: &str, more: &[&str]) -> Result<Program> {
        let own = [
            format!("--endpoint={}", self.endpoint(node)),
            format!("--data-dir={}", self.path(&format!("{node}.data")).display()),
            format!("--node-id={node}"),
            format!("--driver-name={}", self.driver),
        ];
        let args: Vec<&str> = [command, "local"]
            .into_iter()
            .chain(own.iter().map(String::as_str))
            .chain(more.iter().copied())
            .collect();
        let mut program = self.berth(node, &args, &[("NODE_NAME", node), ("NAMESPACE", &self.name)])?;
        program.says(" ready ").await?;
        Ok(program)
    }

    /// Starts `berth controller local` for a node, with all components.
    pub(crate) async fn controller(&self, node: &str, more: &[&str]) -> Result<Program> {
        let kubeconfig = self.kubeconfig();
        let all = "--controllers=provisioner,attacher,resizer,snapshotter,snapshot-controller";
        self.local("controller", node, &[&[kubeconfig.as_str(), "--attach", all], more].concat()).await
    }

    /// Starts `berth node local` with the components that can run on every node.
    pub(crate) async fn node(&self, node: &str, registry: &Path, more: &[&str]) -> Result<Program> {
        let (kubeconfig, registry) =
            (self.kubeconfig(), format!("--plugin-registration-path={}", registry.display()));
        let own = [
            kubeconfig.as_str(),
            &registry,
            "--node-deployment",
            "--node-deployment-base-delay=1s",
            "--enable-capacity",
            // There is no DaemonSet that the objects could go with.
            "--capacity-ownerref-level=-1",
        ];
        self.local("node", node, &[&own, more].concat()).await
    }

    /// Starts `berth snapshot-controller` for a driver that is on every node.
    pub(crate) fn snapshot_controller(&self) -> Result<Program> {
        let args = ["snapshot-controller", &self.kubeconfig(), "--enable-distributed-snapshotting"];
        self.berth("snapshot-controller", &args, &[])
    }

    /// Where the driver of a node listens.
    pub(crate) fn endpoint(&self, node: &str) -> String {
        format!("unix://{}", self.path(&format!("{node}.sock")).display())
    }

    /// A client of the driver of a node.
    pub(crate) fn csi(&self, node: &str) -> Result<Csi> {
        Csi::connect(&self.endpoint(node))
    }

    /// A claim of a size, by default of the test's class, with more fields in its spec.
    pub(crate) async fn claim(&self, name: &str, size: &str, more: Value) -> Result<Value> {
        let spec = json!({
            "storageClassName": self.name, "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
        });
        let metadata = json!({"name": name, "labels": {"test": self.name}});
        self.create(CLAIM, json!({"metadata": metadata, "spec": merged(spec, more)})).await
    }

    /// A pod that uses a claim at /data, by default on a node of this test, with more fields in its spec.
    pub(crate) async fn pod(&self, name: &str, claim: &str, more: Value) -> Result<Value> {
        let container = json!({
            "name": "main", "image": "docker.io/library/busybox:latest", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", "exec sleep 1000000"],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        });
        let spec = json!({
            "nodeSelector": {"test": self.name}, "containers": [container], "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
        });
        self.create(POD, json!({"metadata": {"name": name}, "spec": merged(spec, more)})).await
    }

    /// Waits until a claim is bound, and gives its volume.
    pub(crate) async fn volume_of(&self, claim: &str) -> Result<Value> {
        let bound = |claim: &Value| text(claim, "/status/phase") == "Bound";
        let claim = self.until(CLAIM, claim, "gets bound", bound).await?;
        self.get(VOLUME, text(&claim, "/spec/volumeName")).await
    }

    /// Deletes a claim and waits until it and its volume are gone.
    pub(crate) async fn delete_claim(&self, name: &str) -> Result<()> {
        let claim = self.get(CLAIM, name).await?;
        self.delete(CLAIM, name).await?;
        self.gone(CLAIM, name).await?;
        self.gone(VOLUME, text(&claim, "/spec/volumeName")).await
    }

    /// Checks that the driver of a node has nothing left, and stops it.
    pub(crate) async fn finish(&self, programs: Vec<(&str, Program)>) -> Result<()> {
        for (node, _) in &programs {
            let csi = self.csi(node)?;
            let (volumes, snapshots) = (csi.volumes().await?, csi.snapshots().await?);
            ensure!(
                volumes.is_empty() && snapshots.is_empty(),
                "{node} still has {volumes:?}, {snapshots:?}"
            );
        }
        for (_, program) in programs {
            self.step(&format!("{} holds {} MiB", program.name(), program.resident()? >> 20));
            program.stop().await?;
        }
        let mounts = machine::mounts_below(self.dir())?;
        ensure!(mounts.is_empty(), "still mounted: {mounts:?}");
        machine::until_detached(|| machine::loops_below(self.dir()))?;
        self.delete(CLASS, &self.name).await?;
        self.delete(CSI_DRIVER, &self.driver).await?;
        self.delete(NAMESPACE, &self.name).await
    }
}

impl Deref for Cluster {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.objects
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = machine::clear_below(self.dir.path()) {
            eprintln!("could not clean up after a test: {error:#}");
            // Removing the tree now would reach into whatever is still mounted.
            self.dir.disable_cleanup(true);
        }
    }
}

/// The kubeconfig of the real cluster, and what it says.
pub(crate) async fn real() -> Result<(PathBuf, Config)> {
    let kubeconfig = std::env::var_os("KUBECONFIG_REAL")
        .map(PathBuf::from)
        .context("KUBECONFIG_REAL names no cluster; `make test-kube` starts one and runs this")?;
    let read = Kubeconfig::read_from(&kubeconfig).context("read KUBECONFIG_REAL")?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    Ok((kubeconfig, config))
}
