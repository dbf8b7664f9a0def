//! Berth's FlexVolume driver in the kubelet's plugin directory: a pod has a share by it, changes over to CSI while it runs, and
//! goes back.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::nfs::Server;
use berth_e2e::program::Program;
use berth_e2e::{driver::binary, machine};
use serde_json::{Value, json};

use super::{IMAGE, apply, plugins};
use crate::cluster::Cluster;
use crate::kinds::{CLAIM, POD, VOLUME, text};
use crate::node::deployment::{HERE, kubelet_root, option, registry, until_known};
use crate::node::{exec, ready};

/// One test's FlexVolume driver, CSI driver and volume.
struct Scene<'a> {
    cluster: &'a Cluster,
    server: &'a Server,
    plugins: PathBuf,
    volume: String,
}

#[tokio::test]
async fn a_pod_on_berths_driver_changes_over_to_csi_while_it_runs_and_back() -> Result<()> {
    let cluster = Cluster::start_per_node("flexnfs", json!({})).await?;
    let server = Server::start(&[])?;
    let volume = format!("{}-pv", cluster.name);
    let scene = Scene { cluster: &cluster, server: &server, plugins: plugins()?, volume };
    scene.install()?;
    let csi = scene.start_csi().await?;
    let done = scene.play().await;
    // The pod's volumes are unmounted by the drivers, whatever happened.
    cluster.delete(POD, "user").await?;
    cluster.gone(POD, "user").await?;
    for (kind, name) in [(CLAIM, "old"), (VOLUME, scene.volume.as_str())] {
        cluster.delete(kind, name).await?;
        cluster.gone(kind, name).await?;
    }
    csi.stop().await?;
    let removed = scene.berth(&["flex", "uninstall"], &[]);
    done?;
    removed?;
    let records = machine::listing(&cluster.path("flex/nfs"))?;
    ensure!(records.iter().all(|record| record == "mounts/"), "{records:?}");
    cluster.finish(Vec::new()).await
}

impl Scene<'_> {
    /// Runs `berth flex install` or `uninstall` for the test's vendor.
    fn berth(&self, command: &[&str], more: &[&str]) -> Result<String> {
        let plugins = option("plugin-dir", &self.plugins);
        let which = ["--vendor", &self.cluster.name, &plugins];
        machine::run(&binary()?.display().to_string(), &[command, &which, more].concat())
    }

    fn install(&self) -> Result<()> {
        let state = option("state-dir", &self.cluster.path("flex"));
        let options = ["--mount-mode=fuse", "--default-mount-options", &self.server.options, &state];
        self.berth(&["flex", "install"], &options).map(drop)
    }

    /// Starts `berth node nfs`, and waits until the kubelet knows it.
    async fn start_csi(&self) -> Result<Program> {
        let args = [
            option("endpoint", self.cluster.endpoint("nfs").as_ref()),
            option("state-dir", &self.cluster.path("nfs")),
            option("plugin-registration-path", &registry()),
            format!("--driver-name={}", self.cluster.driver),
            format!("--node-id={HERE}"),
        ];
        let words: Vec<&str> =
            ["node", "nfs", "--mount-mode=fuse"].into_iter().chain(args.iter().map(String::as_str)).collect();
        let mut program = self.cluster.berth("nfs", &words, &[("NODE_NAME", HERE)])?;
        program.says(" ready ").await?;
        until_known(self.cluster).await?;
        Ok(program)
    }

    async fn play(&self) -> Result<()> {
        fs::write(self.server.export().join("data"), "as before")?;
        let flex = format!("{}/nfs", self.cluster.name);
        let volume = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": self.volume },
            "spec": {
                "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "flexVolume": { "driver": flex, "fsType": "nfs", "options": {
                    "server": "127.0.0.1", "share": "export", "mountOptions": self.server.options,
                } },
            },
        });
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "old" },
            "spec": {
                "storageClassName": "", "volumeName": self.volume, "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        apply(self.cluster, &[volume, claim])?;
        let flex_kind = format!("{}~nfs", self.cluster.name);
        self.start_pod(&flex_kind).await?;
        self.cluster.step("the pod has the share by FlexVolume");
        let before = self.bound("flexVolume").await?;

        for (undo, kind, source) in
            [(None, "kubernetes.io~csi", "csi"), (Some("--undo"), flex_kind.as_str(), "flexVolume")]
        {
            let said = self.migrate(undo)?;
            let expected = format!("pod {}/user changes over at its next start", self.cluster.name);
            ensure!(said.contains(&expected), "{said}");
            self.bound(source).await?;
            self.still_writes(&format!("during-{source}")).await?;
            // The kubelet looks at the pod again, and finds another volume behind its claim.
            let look = json!({"metadata": {"annotations": {"look": source}}});
            self.cluster.patch(POD, "user", look).await?;
            self.mounted(kind).await?;
            self.still_writes(&format!("later-{source}")).await?;
            self.cluster.step(&format!("the volume is {source}, and the pod still runs"));
            self.start_pod(kind).await?;
            self.still_writes(&format!("after-{source}")).await?;
            self.cluster.step(&format!("the pod was started anew, with {source}"));
        }
        let after = self.bound("flexVolume").await?;
        ensure!(after["spec"]["flexVolume"] == before["spec"]["flexVolume"], "{after:#}");
        let mut files = machine::listing(&self.server.export())?;
        files.retain(|file| !file.starts_with(".berth"));
        ensure!(files.len() == 7 && files.contains(&"data 9".to_owned()), "{files:?}");
        Ok(())
    }

    fn migrate(&self, undo: Option<&str>) -> Result<String> {
        let (kubeconfig, driver) =
            (self.cluster.kubeconfig(), format!("--nfs-driver={}", self.cluster.driver));
        let words: Vec<&str> =
            ["flex", "migrate", &kubeconfig, &driver, &self.volume].into_iter().chain(undo).collect();
        machine::run(&binary()?.display().to_string(), &words)
    }

    /// Waits until the claim is bound to the volume, which has this source.
    async fn bound(&self, source: &str) -> Result<Value> {
        let bound = |object: &Value| text(object, "/status/phase") == "Bound";
        let claim = self.cluster.until(CLAIM, "old", "is bound", bound).await?;
        let volume = self.cluster.until(VOLUME, &self.volume, "is bound", bound).await?;
        ensure!(volume["spec"][source].is_object(), "{volume:#}");
        ensure!(volume["spec"]["claimRef"]["uid"] == claim["metadata"]["uid"], "{volume:#}");
        Ok(volume)
    }

    /// Starts the pod, anew where it runs, and checks by which kind of volume it has the data.
    async fn start_pod(&self, kind: &str) -> Result<()> {
        let cluster = self.cluster;
        cluster.delete(POD, "user").await?;
        cluster.gone(POD, "user").await?;
        let source = json!({ "name": "vol", "persistentVolumeClaim": { "claimName": "old" } });
        apply(cluster, &[berth_e2e::flex::pod("user", source, IMAGE)])?;
        ready(cluster, "user").await?;
        let mounts = self.mounted(kind).await?;
        ensure!(mounts.len() == 1, "{mounts:?}");
        ensure!(exec(cluster, "user", "cat /data/data")? == "as before");
        Ok(())
    }

    /// Waits until a volume of this kind is mounted for the pod; gives all that is.
    async fn mounted(&self, kind: &str) -> Result<Vec<String>> {
        let pod = self.cluster.get(POD, "user").await?;
        let volumes = kubelet_root().join("pods").join(text(&pod, "/metadata/uid")).join("volumes");
        let is_it = |mount: &&String| mount.contains(kind);
        let mut mounts = Vec::new();
        for _ in 0..600 {
            let all = machine::mounts_below(&volumes)?;
            mounts = all.iter().map(|mount| mount.display().to_string()).collect();
            mounts.retain(|mount| mount.contains(&self.volume));
            if mounts.iter().any(|mount| is_it(&mount)) {
                return Ok(mounts);
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        anyhow::bail!("no {kind} is mounted: {mounts:?}, {:?}", self.cluster.events("user").await?)
    }

    /// The pod that runs is served as it was, and its container was not started again.
    async fn still_writes(&self, file: &str) -> Result<()> {
        exec(self.cluster, "user", &format!("echo {file} > /data/{file}"))?;
        let written = fs::read_to_string(self.server.export().join(file)).context("it is on the share")?;
        ensure!(written == format!("{file}\n"), "{written:?}");
        let pod = self.cluster.get(POD, "user").await?;
        ensure!(pod["status"]["containerStatuses"][0]["restartCount"] == 0, "{pod:#}");
        Ok(())
    }
}
