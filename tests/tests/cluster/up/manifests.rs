//! Published deployments of CSI drivers, as manifests: their images are not pulled, and Berth's programs run in their place.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use berth_e2e::{driver, machine, nfs, up::Machine};

use super::{pod, says, text, together, until_empty};

const MYCSI: &str = include_str!("../../../manifests/mycsi.yaml");
const HOSTPATH: &str = include_str!("../../../manifests/csi-hostpath.yaml");
const NFS: &str = include_str!("../../../manifests/csi-driver-nfs.yaml");

/// A directory on a shared mount, as a machine's root is wherever a kubelet runs.
pub(super) struct Shared(tempfile::TempDir);

impl Shared {
    pub(super) fn new() -> Result<Self> {
        let shared = Self(tempfile::tempdir()?);
        let path = shared.path().display().to_string();
        machine::run("mount", &["--bind", &path, &path])?;
        machine::run("mount", &["--make-shared", &path])?;
        Ok(shared)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn data(&self) -> PathBuf {
        self.path().join("data")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = machine::run("umount", &["-R", "-l", &self.path().display().to_string()]);
    }
}

/// Waits until every container of a pod is ready.
pub(super) fn all_ready(machine: &Machine, name: &str, containers: usize) -> Result<()> {
    machine.until(&format!("{containers} containers of {name} are ready"), || {
        let Ok(found) = machine.get(&format!("pod/{name}")) else { return Ok(None) };
        let statuses = found["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
        let ready = statuses.iter().filter(|status| status["ready"] == true).count();
        Ok((ready == containers).then_some(()))
    })
}

fn claim(class: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: data}}\nspec:\n  storageClassName: {class}\n  \
         accessModes: [ReadWriteOnce]\n  resources: {{requests: {{storage: 16Mi}}}}\n"
    )
}

#[test]
fn the_deployment_of_csi_driver_host_path_runs_as_written() -> Result<()> {
    let shared = Shared::new()?;
    let machine = Machine::start_in(shared.data())?;
    let kept = shared.path().join("csi-hostpath-data");
    let manifest = HOSTPATH.replace("/var/lib/csi-hostpath-data/", &kept.display().to_string());
    machine.apply(&manifest)?;
    all_ready(&machine, "csi-hostpathplugin-0", 8)?;
    let said = machine.event("Pod", "csi-hostpathplugin-0", "ImageStandIn")?;
    says(&said, "runs in its place")?;
    machine.until("the driver is registered", || {
        let node = machine.get("csinodes")?;
        Ok(node.to_string().contains("hostpath.csi.k8s.io").then_some(()))
    })?;
    machine.apply(&together(&[
        claim("csi-hostpath-sc"),
        pod("user", "data", "echo kept > /data/file; exec sleep 100000"),
    ]))?;
    machine.ready("user")?;
    machine.exec_until("user", "cat /data/file", |found| found.trim() == "kept")?;
    let volume = machine.get("pvc/data")?;
    let volume = machine.get(&format!("pv/{}", text(&volume, "/spec/volumeName")))?;
    ensure!(text(&volume, "/spec/csi/driver") == "hostpath.csi.k8s.io", "{volume}");
    machine.delete("pod/user")?;
    machine.delete("pvc/data")?;
    machine.until("the volume is gone", || Ok(machine.all("pv")?.is_empty().then_some(())))?;
    machine.delete("statefulset/csi-hostpathplugin")?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_tutorials_driver_runs_in_one_pod_of_five_containers() -> Result<()> {
    let shared = Shared::new()?;
    let machine = Machine::start_in(shared.data())?;
    let (app, share) = (shared.path().join("csi"), shared.path().join("nfsdata"));
    std::fs::create_dir(&app)?;
    std::fs::copy(driver::built("mycsi")?, app.join("mycsi"))?;
    let manifest = MYCSI.replace("path: /home/csi", &format!("path: {}", app.display()));
    let manifest =
        manifest.replace("hostPath: {path: /home/nfsdata", &format!("hostPath: {{path: {}", share.display()));
    machine.apply(&manifest)?;
    machine.kubectl(&["rollout", "status", "deployment/mycsi", "-n", "mycsi", "--timeout=120s"])?;
    says(&machine.kubectl(&["get", "pods", "-n", "mycsi"])?, "5/5")?;
    machine.kubectl(&["rollout", "status", "deployment/mycsi-nginx", "--timeout=120s"])?;
    let claim = machine.get("pvc/mycsi-pvc")?;
    let volume = machine.get(&format!("pv/{}", text(&claim, "/spec/volumeName")))?;
    let volume = share.join("home/nfsdata").join(text(&volume, "/spec/csi/volumeHandle")).join("podfile");
    machine.until(&format!("{} is written", volume.display()), || Ok(volume.exists().then_some(())))?;
    machine.delete("deployment/mycsi-nginx")?;
    machine.delete("pvc/mycsi-pvc")?;
    machine.until("the volume is gone", || Ok(machine.all("pv")?.is_empty().then_some(())))?;
    machine.delete("namespace/mycsi")?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_deployment_of_csi_driver_nfs_runs_as_written() -> Result<()> {
    let shared = Shared::new()?;
    let export = tempfile::tempdir()?;
    let (port, directory) = (nfs::free_port()?, export.path().display().to_string());
    let listen = format!("127.0.0.1:{port}");
    let words = ["--driver=none", "--nfs-export", &directory, "--nfs-listen", &listen];
    let machine = Machine::start_in_with(shared.data(), &words)?;
    // The manifest has the host's network and fixed ports, which another test may have.
    let (controller, node) = (nfs::free_port()?.to_string(), nfs::free_port()?.to_string());
    let options = format!("vers=3, nolock, port={port}, mountport={port}");
    let reader = [("SERVER", "127.0.0.1"), ("SHARE", "/export"), ("MOUNT_OPTIONS", &options)];
    let ports = [("29652", controller.as_str()), ("29653", node.as_str())];
    let manifest =
        reader.iter().chain(&ports).fold(NFS.to_owned(), |text, (from, to)| text.replace(from, to));
    machine.apply(&manifest)?;
    for workload in ["deployment/csi-nfs-controller", "daemonset/csi-nfs-node"] {
        machine.kubectl(&["rollout", "status", workload, "-n", "kube-system", "--timeout=120s"])?;
    }
    says(&machine.kubectl(&["get", "pods", "-n", "kube-system"])?, "5/5")?;
    machine.until("the driver is registered", || {
        let node = machine.get("csinodes")?;
        Ok(node.to_string().contains("nfs.csi.k8s.io").then_some(()))
    })?;
    machine.apply(&together(&[
        claim("nfs-csi").replace("ReadWriteOnce", "ReadWriteMany"),
        pod("user", "data", "echo kept > /data/file; exec sleep 100000"),
    ]))?;
    machine.ready("user")?;
    machine.exec_until("user", "cat /data/file", |found| found.trim() == "kept")?;
    let volume = text(&machine.get("pvc/data")?, "/spec/volumeName").to_owned();
    ensure!(std::fs::read_to_string(export.path().join(&volume).join("file"))? == "kept\n");
    let grown = r#"{"spec": {"resources": {"requests": {"storage": "32Mi"}}}}"#;
    machine.kubectl(&["patch", "pvc/data", "--type=merge", "-p", grown])?;
    machine.until("the claim has grown", || {
        Ok((text(&machine.get("pvc/data")?, "/status/capacity/storage") == "32Mi").then_some(()))
    })?;
    machine.delete("pod/user")?;
    machine.delete("pvc/data")?;
    machine.until("the volume is gone", || Ok(machine.all("pv")?.is_empty().then_some(())))?;
    ensure!(!export.path().join(&volume).exists(), "the volume's directory is still there");
    machine.kubectl(&[
        "delete",
        "-n",
        "kube-system",
        "deployment/csi-nfs-controller",
        "daemonset/csi-nfs-node",
    ])?;
    until_empty(&machine)?;
    machine.finish()
}
