//! The example driver of `examples/mycsi`, beside a machine: the class, claim and Deployment of its tutorial.

use std::{fs, process::Stdio};

use anyhow::{Context, Result, ensure};
use berth_e2e::{
    driver,
    program::Program,
    up::{Machine, NODE},
};

use crate::up::text;

const DRIVER: &str = "mycsi.jtthink.com";

/// The objects of the tutorial, as they are written there, but for an image, which nobody here can pull.
const OBJECTS: &str = r#"
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: mycsi.jtthink.com}
spec: {attachRequired: false}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata:
  name: mycsi-sc
provisioner: mycsi.jtthink.com
parameters:
  server: 127.0.0.1
  share: /home/nfsdata
reclaimPolicy: Delete
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: mycsi-pvc
  namespace: default
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 2Gi}}
  storageClassName: mycsi-sc
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: mycsi-nginx
spec:
  replicas: 1
  selector: {matchLabels: {app: mycsi-nginx}}
  template:
    metadata: {labels: {app: mycsi-nginx}}
    spec:
      containers:
      - name: nginx
        image: nginx
        command: ["sh", "-c", "touch /tmp/data/podfile && sleep 1000000"]
        volumeMounts: [{name: data, mountPath: /tmp/data}]
      volumes: [{name: data, persistentVolumeClaim: {claimName: mycsi-pvc}}]
"#;

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorials_driver_registers_and_runs_the_tutorials_pod() -> Result<()> {
    let machine = tokio::task::block_in_place(Machine::start)?;
    let socket = machine.data().join("node/plugins").join(DRIVER).join("csi.sock");
    let (root, state) = (machine.dir().join("mycsi"), machine.dir().join("mycsi-state"));
    let text_of = |path: &std::path::Path| path.display().to_string();
    let environment = [
        ("MYCSI_ROOT", text_of(&root)),
        ("CSI_ENDPOINT", format!("unix://{}", socket.display())),
        ("NODE_ID", NODE.to_owned()),
        ("STATE_DIR", text_of(&state)),
        ("REGISTRATION_DIR", text_of(&machine.data().join("node/plugins_registry"))),
    ];
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, &**value)).collect();
    let mycsi = Program::start(&driver::built("mycsi")?, &[], &environment, machine.dir().join("mycsi.log"))?;
    let kubeconfig = text_of(&machine.data().join("apiserver/kubeconfig"));
    let log = fs::File::create(machine.dir().join("provisioner.log"))?;
    let mut provisioner = machine
        .command(&["csi-provisioner", "--csi-address", &text_of(&socket), "--kubeconfig", &kubeconfig])
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("start the provisioner")?;

    let done = tokio::task::block_in_place(|| run_pod(&machine, &root));
    let _ = provisioner.kill();
    let _ = provisioner.wait();
    done.with_context(|| fs::read_to_string(machine.dir().join("provisioner.log")).unwrap_or_default())
        .with_context(|| mycsi.log())?;
    mycsi.stop().await?;
    tokio::task::block_in_place(|| machine.finish())
}

fn run_pod(machine: &Machine, root: &std::path::Path) -> Result<()> {
    machine.apply(OBJECTS)?;
    machine.wait("deployment/mycsi-nginx", "condition=Available")?;
    let claim = machine.get("pvc/mycsi-pvc")?;
    let volume = machine.get(&format!("pv/{}", text(&claim, "/spec/volumeName")))?;
    let directory = root.join(text(&volume, "/spec/csi/volumeAttributes/path"));
    machine.until("the pod has written", || Ok(directory.join("podfile").exists().then_some(())))?;

    machine.kubectl(&["delete", "deployment", "mycsi-nginx"])?;
    machine.kubectl(&["delete", "pvc", "mycsi-pvc"])?;
    machine.until("the volume's directory is gone", || Ok((!directory.exists()).then_some(())))?;
    // The record goes after the directory, and the share's directory with its last volume.
    let records = root.join(".mycsi");
    machine.until("the record is gone", || Ok((fs::read_dir(&records)?.count() == 0).then_some(())))?;
    let left: Vec<_> = fs::read_dir(root)?.collect::<Result<_, _>>()?;
    ensure!(left.len() == 1, "the share's directory is left: {left:?}");
    Ok(())
}
