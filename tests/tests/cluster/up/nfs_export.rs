//! `berth up --nfs-export`: the course's lessons and NFS volumes on Berth's own NFS server, with nothing else installed.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{nfs, up::Machine};

use super::{text, until_empty};

const FLEX: &str = include_str!("../../../manifests/seed-000-flexvolume.yaml");
const MYCSI: &str = include_str!("../../../manifests/seed-001-mycsi.yaml");

/// A claim of the class that comes with the server, a volume of the kubelet's own kind, and a pod that writes numbered lines to both:
/// a number is acknowledged when its line is on the server's disk.
const WRITER: &str = r#"
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: berth-nfs
  resources: {requests: {storage: 1Gi}}
---
apiVersion: v1
kind: Pod
metadata: {name: writer}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: busybox
    command:
    - sh
    - -c
    - |
      number=0
      while number=$((number + 1)); do
        for log in /data/log /intree/log; do
          echo "line $number" >> $log && sync $log || exit 1
        done
        echo $number > /acknowledged/new && mv /acknowledged/new /acknowledged/last
      done
    volumeMounts:
    - {name: data, mountPath: /data}
    - {name: intree, mountPath: /intree}
    - {name: acknowledged, mountPath: /acknowledged}
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: data}}
  - {name: intree, nfs: {server: 127.0.0.1, path: /export/intree}}
  - {name: acknowledged, hostPath: {path: ACKNOWLEDGED}}
"#;

/// A directory to serve, and the flags that serve it at a port of its own.
struct Export {
    dir: tempfile::TempDir,
    port: u16,
}

impl Export {
    fn new() -> Result<Self> {
        Ok(Self { dir: tempfile::tempdir()?, port: nfs::free_port()? })
    }

    fn machine(&self, more: &[&str]) -> Result<Machine> {
        let (dir, listen) = (self.dir.path().display().to_string(), format!("127.0.0.1:{}", self.port));
        Machine::start_with(&[&["--nfs-export", &dir, "--nfs-listen", &listen][..], more].concat())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn the_flexvolume_of_lesson_000_is_on_the_server() -> Result<()> {
    let export = Export::new()?;
    let machine = export.machine(&[])?;
    let plugins = machine.data().join("node/volumeplugins").display().to_string();
    let state = machine.dir().join("flex").display().to_string();
    // The manifest knows no port, and the usual one may be another test's.
    let options = format!("vers=3,nolock,port={0},mountport={0}", export.port);
    let words = ["flex", "install", "--plugin-dir", &plugins, "--state-dir", &state];
    machine.says(&[&words[..], &["--default-mount-options", &options]].concat())?;
    machine.apply(FLEX)?;
    machine.ready("test")?;
    machine.exec_until("test", "cat /data/from-pod", |seen| seen == "hello\n")?;
    ensure!(fs::read_to_string(export.path("from-pod"))? == "hello\n");
    machine.kubectl(&["delete", "pod/test", "pvc/test", "pv/test"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_deployment_of_lesson_001_is_on_the_server() -> Result<()> {
    let export = Export::new()?;
    let name = ["--driver=nfs", "--driver-name=mycsi.jtthink.com", "--nfs-export-as=/home/nfsdata"];
    let machine = export.machine(&name)?;
    machine.apply(MYCSI)?;
    machine.wait("deployment/mycsi-nginx", "condition=Available")?;
    machine.exec_until("deployment/mycsi-nginx", "ls /tmp/data", |seen| seen == "podfile\n")?;
    let volume = text(&machine.get("pvc/mycsi-pvc")?, "/spec/volumeName").to_owned();
    ensure!(export.path(&volume).join("podfile").exists());
    machine.kubectl(&["delete", "deployment/mycsi-nginx", "pvc/mycsi-pvc"])?;
    until_empty(&machine)?;
    ensure!(!export.path(&volume).exists(), "the volume's directory is still there");
    machine.finish()
}

#[test]
fn kills_of_the_server_lose_nothing_that_a_pod_was_told_is_stable() -> Result<()> {
    let export = Export::new()?;
    fs::create_dir(export.path("intree"))?;
    let acknowledged = tempfile::tempdir()?;
    let mut machine = export.machine(&[])?;
    machine.apply(&WRITER.replace("ACKNOWLEDGED", &acknowledged.path().display().to_string()))?;
    machine.ready("writer")?;
    let volume = text(&machine.get("pvc/data")?, "/spec/volumeName").to_owned();
    let logs = [export.path(&volume).join("log"), export.path("intree/log")];
    let last = || -> Result<Option<usize>> {
        let number = fs::read_to_string(acknowledged.path().join("last")).ok();
        number.map(|number| number.trim().parse().context("a number")).transpose()
    };
    let until = |machine: &Machine, least: usize| {
        machine.until("the pod writes", || Ok(last()?.filter(|number| *number >= least)))
    };
    let mut reached = until(&machine, 3)?;
    for kill in 0..3 {
        // It is the process of the server, the driver and the node; the pod and its mounts go on, and wait for it.
        machine.kill()?;
        let told = last()?.unwrap_or(0);
        for log in &logs {
            let written = fs::read_to_string(log)?;
            let lines: Vec<&str> = written.lines().collect();
            ensure!(lines.len() >= told, "kill {kill}: {} lines of {told} in {}", lines.len(), log.display());
            let is_right = |(at, line): (usize, &&str)| **line == format!("line {}", at + 1);
            ensure!(lines.iter().take(told).enumerate().all(is_right), "kill {kill}: {}", log.display());
        }
        machine.restart()?;
        reached = until(&machine, reached.max(told) + 3)?;
    }
    let pod = machine.get("pod/writer")?;
    ensure!(pod["status"]["containerStatuses"][0]["restartCount"] == 0, "the pod has noticed: {pod:#}");
    machine.kubectl(&["delete", "pod/writer", "--timeout=45s"])?;
    let written = fs::read_to_string(&logs[0])?;
    let is_right = |(at, line): (usize, &str)| line == format!("line {}", at + 1);
    ensure!(written.lines().enumerate().all(is_right), "lines are lost or twice: {written}");
    machine.kubectl(&["delete", "pvc/data"])?;
    until_empty(&machine)?;
    machine.finish()
}
