//! The real cluster as one test uses it: a namespace, a driver's name and a directory of its own, and Berth's programs.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use berth_e2e::{Csi, driver, machine, program::Program};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kinds::{
    CLAIM, CLASS, CSI_DRIVER, EVENT, GROUP_SNAPSHOT_CLASS, Kind, NAMESPACE, POD, SERVICE_ACCOUNT,
    SNAPSHOT_CLASS, VOLUME, text,
};

/// How long anything may take before a test gives up; controllers of Kubernetes back off to half a minute.
const PATIENCE: Duration = Duration::from_secs(120);

/// The part of the cluster that belongs to one test.
pub(crate) struct Cluster {
    client: Client,
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
        let kubeconfig = std::env::var_os("KUBECONFIG_REAL")
            .map(PathBuf::from)
            .context("KUBECONFIG_REAL names no cluster; `make test-kube` starts one and runs this")?;
        let read = Kubeconfig::read_from(&kubeconfig).context("read KUBECONFIG_REAL")?;
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
        // The path stays short: a socket's may have 107 bytes.
        let dir =
            tempfile::Builder::new().prefix("kube-").rand_bytes(5).tempdir().context("make a directory")?;
        let name = format!("{test}-{}", std::process::id());
        let driver = format!("{name}.berth.test");
        let (client, begun) = (Client::try_from(config)?, Instant::now());
        let cluster = Self { client, kubeconfig, dir, name, driver, begun };
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

    /// For what needs the client itself.
    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    fn api(&self, kind: Kind) -> Api<DynamicObject> {
        let resource = kind.resource();
        if kind.namespaced {
            Api::namespaced_with(self.client.clone(), &self.name, &resource)
        } else {
            Api::all_with(self.client.clone(), &resource)
        }
    }

    /// Creates an object, given without its type.
    pub(crate) async fn create(&self, kind: Kind, object: Value) -> Result<Value> {
        let typed = json!({"apiVersion": kind.api_version(), "kind": kind.name});
        let object: DynamicObject = serde_json::from_value(merged(typed, object))?;
        let made = self.api(kind).create(&PostParams::default(), &object).await;
        plain(made.with_context(|| format!("create a {}", kind.name))?)
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

    /// An object, if it is there.
    pub(crate) async fn find(&self, kind: Kind, name: &str) -> Result<Option<Value>> {
        let found =
            self.api(kind).get_opt(name).await.with_context(|| format!("get {} {name}", kind.name))?;
        found.map(plain).transpose()
    }

    /// An object that is there.
    pub(crate) async fn get(&self, kind: Kind, name: &str) -> Result<Value> {
        self.find(kind, name).await?.with_context(|| format!("there is no {} {name}", kind.name))
    }

    /// All objects of a kind, in the test's namespace if it has namespaces.
    pub(crate) async fn list(&self, kind: Kind) -> Result<Vec<Value>> {
        let found = self.api(kind).list(&ListParams::default()).await?;
        found.items.into_iter().map(plain).collect()
    }

    /// Changes an object by a merge patch.
    pub(crate) async fn patch(&self, kind: Kind, name: &str, change: Value) -> Result<Value> {
        let patched = self.api(kind).patch(name, &PatchParams::default(), &Patch::Merge(change)).await;
        plain(patched.with_context(|| format!("change {} {name}", kind.name))?)
    }

    /// Changes an object's status by a merge patch.
    pub(crate) async fn patch_status(&self, kind: Kind, name: &str, status: Value) -> Result<()> {
        let change = Patch::Merge(json!({"status": status}));
        let patched = self.api(kind).patch_status(name, &PatchParams::default(), &change).await;
        patched.with_context(|| format!("change the status of {} {name}", kind.name)).map(drop)
    }

    /// Asks for an object's deletion; one that is gone needs none.
    pub(crate) async fn delete(&self, kind: Kind, name: &str) -> Result<()> {
        self.delete_by(kind, name, &DeleteParams::default()).await
    }

    /// Removes a pod as its kubelet does, when nothing of it runs any more.
    pub(crate) async fn remove_pod(&self, name: &str) -> Result<()> {
        self.delete_by(POD, name, &DeleteParams::default().grace_period(0)).await
    }

    async fn delete_by(&self, kind: Kind, name: &str, how: &DeleteParams) -> Result<()> {
        match self.api(kind).delete(name, how).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(error).with_context(|| format!("delete {} {name}", kind.name)),
        }
    }

    /// Waits until an object is so.
    pub(crate) async fn until(
        &self,
        kind: Kind,
        name: &str,
        what: &str,
        so: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.find(kind, name).await?;
            if let Some(object) = found.clone().filter(&so) {
                return Ok(object);
            }
            if Instant::now() > deadline {
                let seen = found.unwrap_or_default();
                let events = self.events(name).await?;
                bail!("{} {name} never {what}; it is {seen:#}\nwith events {events:#?}", kind.name);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until an object is gone.
    pub(crate) async fn gone(&self, kind: Kind, name: &str) -> Result<()> {
        self.until_all(&format!("{} {name} is gone", kind.name), kind, |all| {
            !all.iter().any(|object| text(object, "/metadata/name") == name)
        })
        .await
        .map(drop)
    }

    /// Waits until the objects of a kind are so.
    pub(crate) async fn until_all(
        &self,
        what: &str,
        kind: Kind,
        so: impl Fn(&[Value]) -> bool,
    ) -> Result<Vec<Value>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let all = self.list(kind).await?;
            if so(&all) {
                return Ok(all);
            }
            ensure!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}; there are {all:#?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
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

    /// What the events of an object say: reason and message.
    pub(crate) async fn events(&self, name: &str) -> Result<Vec<String>> {
        let events = self.list(EVENT).await?;
        let of_it = events.iter().filter(|event| text(event, "/involvedObject/name") == name);
        Ok(of_it.map(|event| format!("{}: {}", text(event, "/reason"), text(event, "/message"))).collect())
    }

    /// Waits until an object has an event with this reason, and gives its message.
    pub(crate) async fn event(&self, name: &str, reason: &str) -> Result<String> {
        let wanted =
            |event: &Value| text(event, "/involvedObject/name") == name && text(event, "/reason") == reason;
        let what = format!("{name} has an event {reason}");
        let events = self.until_all(&what, EVENT, |events| events.iter().any(wanted)).await?;
        Ok(events.iter().find(|event| wanted(event)).map_or("", |event| text(event, "/message")).to_owned())
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

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = machine::clear_below(self.dir.path()) {
            eprintln!("could not clean up after a test: {error:#}");
            // Removing the tree now would reach into whatever is still mounted.
            self.dir.disable_cleanup(true);
        }
    }
}

/// An object with the fields of both.
pub(crate) fn merged(mut object: Value, more: Value) -> Value {
    if let (Some(fields), Value::Object(more)) = (object.as_object_mut(), more) {
        fields.extend(more);
    }
    object
}

/// An object without what nobody wants to read in a complaint.
fn plain(mut object: DynamicObject) -> Result<Value> {
    object.metadata.managed_fields = None;
    Ok(serde_json::to_value(object)?)
}
