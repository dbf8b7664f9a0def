//! `berth controller flex` and `berth node flex` serve FlexVolume drivers to pods of a real kubelet by CSI; they are killed after
//! each call, and nothing is mounted twice or left.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::flex::{self, Driver, RECORDING};
use berth_e2e::machine;
use berth_e2e::nfs::Server;
use berth_e2e::program::Program;
use serde_json::{Value, json};

use super::{DETACH, IMAGE, apply};
use crate::cluster::Cluster;
use crate::kinds::{ATTACHMENT, CLAIM, CLASS, POD, VOLUME, text};
use crate::node::deployment::{HERE, kubelet_root, option, registry, until_known};
use crate::node::{exec, ready};

/// How long a driver may take to be called.
const CALLED: Duration = Duration::from_secs(150);

/// A FlexVolume driver, and the programs that serve it by CSI.
struct Adapter<'a> {
    cluster: &'a Cluster,
    driver: Driver,
    attaches: bool,
    programs: Vec<Program>,
}

impl<'a> Adapter<'a> {
    async fn start(cluster: &'a Cluster, driver: Driver, attaches: bool) -> Result<Self> {
        let mut adapter = Self { cluster, driver, attaches, programs: Vec::new() };
        adapter.begin().await?;
        until_known(cluster).await?;
        Ok(adapter)
    }

    async fn begin(&mut self) -> Result<()> {
        let kubeconfig = self.cluster.kubeconfig();
        let registry = option("plugin-registration-path", &registry());
        self.program("node", &[&registry]).await?;
        if self.attaches {
            self.program("controller", &[&kubeconfig, "--controllers=attacher"]).await?;
            // A FlexVolume grows on its node alone, so the resizer asks the driver there.
            let node = option("csi-address", &self.cluster.path("node.sock"));
            let resizer = self.cluster.berth("csi-resizer", &["csi-resizer", &node, &kubeconfig], &[])?;
            self.programs.push(resizer);
        }
        Ok(())
    }

    async fn program(&mut self, role: &str, more: &[&str]) -> Result<()> {
        let own = [
            option("plugin", &self.driver.executable()?),
            option("endpoint", self.cluster.endpoint(role).as_ref()),
            option("state-dir", &self.cluster.path(role)),
            format!("--node-id={HERE}"),
            format!("--driver-name={}", self.cluster.driver),
        ];
        let words: Vec<&str> = [role, "flex"]
            .into_iter()
            .chain(own.iter().map(String::as_str))
            .chain(more.iter().copied())
            .collect();
        let mut program = self.cluster.berth(role, &words, &[("NODE_NAME", HERE)])?;
        program.says(" ready ").await?;
        self.programs.push(program);
        Ok(())
    }

    /// Kills the programs after each of these calls, when the driver has done the work and nobody knows it.
    async fn kill_after_each(&mut self, calls: &[&str]) -> Result<()> {
        for (number, call) in calls.iter().enumerate() {
            let begun = Instant::now();
            while !self.driver.has_stopped() {
                if begun.elapsed() > CALLED {
                    let (calls, events) = (self.driver.calls(&[])?, self.cluster.events("claimed").await?);
                    anyhow::bail!("the driver was not called {call}: {calls:#?}\n{events:#?}");
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            for mut program in self.programs.drain(..) {
                program.kill()?;
            }
            let mounts = self.mounts()?;
            let mut once = mounts.clone();
            once.dedup();
            ensure!(mounts == once, "mounted twice after {call}: {mounts:?}");
            self.driver.stop_after(calls.get(number + 1).copied())?;
            self.begin().await?;
            self.cluster.step(&format!("killed after {call}"));
        }
        Ok(())
    }

    /// What is mounted of the test's volume.
    fn mounts(&self) -> Result<Vec<String>> {
        let all = machine::mounts_below(&kubelet_root())?;
        let mut mounts: Vec<String> = all.iter().map(|mount| mount.display().to_string()).collect();
        let staged = format!("plugins/kubernetes.io/csi/{}", self.cluster.driver);
        mounts.retain(|mount| mount.contains(&self.volume()) || mount.contains(&staged));
        mounts.sort();
        Ok(mounts)
    }

    fn volume(&self) -> String {
        format!("{}-pv", self.cluster.name)
    }

    async fn begin_pod(&mut self, attributes: &Value, calls: &[&str]) -> Result<()> {
        self.driver.stop_after(calls.first().copied())?;
        let objects = flex::pod_with_csi_claim(&self.cluster.driver, &self.volume(), attributes, IMAGE);
        apply(self.cluster, &objects)?;
        self.kill_after_each(calls).await?;
        ready(self.cluster, "claimed").await
    }

    async fn end_pod(&mut self, calls: &[&str]) -> Result<()> {
        let cluster = self.cluster;
        self.driver.stop_after(calls.first().copied())?;
        cluster.delete(POD, "claimed").await?;
        self.kill_after_each(calls).await?;
        cluster.gone(POD, "claimed").await?;
        cluster.step("the pod is gone");
        let begun = Instant::now();
        while !self.driver.attached()?.is_empty() || !self.mounts()?.is_empty() {
            let mounts = self.mounts()?;
            ensure!(begun.elapsed() < DETACH, "{mounts:?} are mounted; {:#?}", self.driver.calls(&[])?);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let ours = |attachment: &Value| text(attachment, "/spec/attacher") == cluster.driver;
        cluster.until_all("everything is detached", ATTACHMENT, |all| !all.iter().any(ours)).await?;
        let volume = self.volume();
        for (kind, name) in [(CLAIM, "flex"), (VOLUME, &volume), (CLASS, &volume)] {
            cluster.delete(kind, name).await?;
            cluster.gone(kind, name).await?;
        }
        Ok(())
    }

    /// Stops the programs, and checks that nothing is left of what they did.
    async fn finish(mut self) -> Result<()> {
        for program in self.programs.drain(..) {
            program.stop().await?;
        }
        let calls = self.driver.calls(&[])?;
        ensure!(!calls.iter().any(|call| call.starts_with("TWICE")), "{calls:#?}");
        let left = machine::listing(&self.cluster.path("node/mounted"))?;
        ensure!(left.is_empty(), "records are left: {left:?}");
        self.driver.remove()
    }
}

impl Drop for Adapter<'_> {
    fn drop(&mut self) {
        if self.programs.is_empty() {
            return;
        }
        // While somebody can still unmount for it.
        let _ = self.driver.stop_after(None);
        if let Err(error) = self.cluster.kubectl(&["delete", "pods", "--all", "--timeout=60s"]) {
            eprintln!("could not clean up after a test: {error:#}");
        }
    }
}

#[tokio::test]
async fn a_recording_driver_without_attachment_serves_a_pod() -> Result<()> {
    let cluster = Cluster::start_per_node("flexcsi", json!({})).await?;
    let driver = Driver::install(&cluster.path("plugins"), "berth.test", "plain", RECORDING)?;
    let mut adapter = Adapter::start(&cluster, driver, false).await?;
    adapter.begin_pod(&json!({ "disk": "one" }), &["mount"]).await?;
    exec(&cluster, "claimed", "echo kept > /data/file && cat /data/file")?;
    adapter.end_pod(&["unmount"]).await?;
    adapter.finish().await?;
    cluster.finish(Vec::new()).await
}

#[tokio::test]
async fn a_recording_driver_with_attachment_serves_a_pod() -> Result<()> {
    let cluster = Cluster::start("flexdisk", json!({})).await?;
    let driver = Driver::install(&cluster.path("plugins"), "berth.test", "disk", RECORDING)?;
    let mut adapter = Adapter::start(&cluster, driver, true).await?;
    let calls = ["attach", "waitforattach", "mountdevice", "mount"];
    adapter.begin_pod(&json!({ "disk": "one" }), &calls).await?;
    exec(&cluster, "claimed", "echo kept > /data/file")?;

    adapter.driver.stop_after(Some("expandfs"))?;
    cluster.patch(CLAIM, "flex", json!({"spec": {"resources": {"requests": {"storage": "2Mi"}}}})).await?;
    let pending =
        |claim: &Value| claim["status"]["allocatedResourceStatuses"]["storage"] == "NodeResizePending";
    cluster.until(CLAIM, "flex", "waits for the kubelet to grow it", pending).await?;
    cluster.patch(POD, "claimed", json!({"metadata": {"annotations": {"look": "again"}}})).await?;
    adapter.kill_after_each(&["expandfs"]).await?;
    cluster.patch(POD, "claimed", json!({"metadata": {"annotations": {"look": "once more"}}})).await?;
    let grown = |claim: &Value| text(claim, "/status/capacity/storage") == "2Mi";
    cluster.until(CLAIM, "flex", "has its new size", grown).await?;
    ensure!(exec(&cluster, "claimed", "cat /data/file")? == "kept\n");
    adapter.end_pod(&["unmount", "unmountdevice", "detach"]).await?;
    adapter.finish().await?;
    cluster.finish(Vec::new()).await
}

#[tokio::test]
async fn the_tutorials_script_serves_a_pod() -> Result<()> {
    let cluster = Cluster::start_per_node("flexscript", json!({})).await?;
    let server = Server::start(&[])?;
    let driver = Driver::install_script(&cluster.path("plugins"), "k8s", Some(&server))?;
    let mut adapter = Adapter::start(&cluster, driver, false).await?;
    adapter.begin_pod(&json!({ "server": "127.0.0.1", "share": "export" }), &["mount"]).await?;
    exec(&cluster, "claimed", "echo from the pod > /data/file")?;
    let written = fs::read_to_string(server.export().join("file")).context("it is on the share")?;
    ensure!(written == "from the pod\n", "{written:?}");
    adapter.end_pod(&["unmount"]).await?;
    adapter.finish().await?;
    cluster.finish(Vec::new()).await
}
