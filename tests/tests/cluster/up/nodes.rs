//! `berth up --nodes`: nodes of one machine that fail, come back, or are lost, and what becomes of their pods and volumes.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::nfs::Server;
use berth_e2e::up::{Leftovers, Machine};
use serde_json::Value;

use super::{says, text};

/// Nodes count as failed soon, and pods leave them soon.
const SOON: [&str; 6] = [
    "--node-monitor-grace-period=10s",
    "--default-unreachable-toleration-seconds=1",
    "--default-not-ready-toleration-seconds=1",
    "--force-detach-after=1h",
    "--nodes",
    "3",
];
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// Three pods, each on a node of its own, that leave their name in their volume.
const SET: &str = "
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: web}
spec:
  serviceName: web
  replicas: 3
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      affinity:
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: web}}}
      containers:
      - name: main
        image: busybox
        command: [sh, -c, 'test -e /data/first || hostname > /data/first; exec sleep 100000']
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}
";

fn ready(node: &Value) -> &str {
    let conditions = node["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    conditions
        .iter()
        .find(|condition| condition["type"] == "Ready")
        .map_or("", |ready| text(ready, "/status"))
}

fn has_taint(node: &Value, key: &str, effect: &str) -> bool {
    let taints = node["spec"]["taints"].as_array().map(Vec::as_slice).unwrap_or_default();
    taints.iter().any(|taint| taint["key"] == key && taint["effect"] == effect)
}

/// Where a further node lies.
fn root(machine: &Machine, node: &str) -> PathBuf {
    machine.data().join("nodes").join(node)
}

fn node_of(machine: &Machine, pod: &str) -> Result<String> {
    Ok(text(&machine.get(&format!("pod/{pod}"))?, "/spec/nodeName").to_owned())
}

fn rolled_out(machine: &Machine) -> Result<()> {
    machine.kubectl(&["rollout", "status", "statefulset/web", "--timeout=120s"]).map(|_| ())
}

/// Every pod finds the file that the first pod of its name wrote.
fn finds_its_data(machine: &Machine) -> Result<()> {
    for pod in ["web-0", "web-1", "web-2"] {
        machine.exec_until(pod, "cat /data/first", |found| found.trim() == pod)?;
    }
    Ok(())
}

/// Lost for good: what only node-1-3 had goes on request, and not before.
fn is_forgotten(machine: &Machine, pod: &str, volume: &str) -> Result<()> {
    machine.says(&["nodes", "stop", "node-1-3"])?;
    machine.kubectl(&["taint", "node", "node-1-3", &format!("{OUT_OF_SERVICE}=nodeshutdown:NoExecute")])?;
    machine.until("node-1-3 is known to be down", || {
        Ok((ready(&machine.get("node/node-1-3")?) == "Unknown").then_some(()))
    })?;
    machine.until("a new pod waits", || {
        let found = machine.get(&format!("pod/{pod}"));
        Ok(found.ok().filter(|found| found["spec"]["nodeName"].is_null()).map(drop))
    })?;
    machine.get(&format!("pv/{volume}"))?;
    let would = machine.says(&["nodes", "forget", "node-1-3", "--dry-run"])?;
    says(&would, &format!("PersistentVolume {volume}"))?;
    machine.get(&format!("pv/{volume}"))?;
    says(&machine.says(&["nodes", "forget", "node-1-3", "--delete-claims"])?, "Forgot node-1-3.")?;
    for gone in [format!("pv/{volume}"), "node/node-1-3".to_owned(), "csinode/node-1-3".to_owned()] {
        machine.until(&format!("{gone} is gone"), || Ok(machine.get(&gone).is_err().then_some(())))?;
    }
    ensure!(machine.all("volumeattachments")?.iter().all(|of| of["spec"]["nodeName"] != "node-1-3"));
    machine.until("there is a new claim", || {
        let claim = machine.get(&format!("pvc/data-{pod}"));
        Ok(claim.ok().filter(|claim| claim["spec"]["volumeName"].is_null()).map(drop))
    })
}

#[test]
fn a_node_fails_comes_back_and_is_forgotten() -> Result<()> {
    let mut machine = Machine::start_with(&SOON)?;
    let nodes = machine.all("nodes")?;
    let names: Vec<&str> = nodes.iter().map(|node| text(node, "/metadata/name")).collect();
    ensure!(names == ["node-1", "node-1-2", "node-1-3"], "{names:?}");
    ensure!(nodes.iter().all(|node| ready(node) == "True"), "{nodes:?}");
    for node in &nodes {
        let labels = &node["metadata"]["labels"];
        ensure!(labels["topology.berth.dev/node"] == node["metadata"]["name"], "{labels}");
    }
    machine.apply(SET)?;
    rolled_out(&machine)?;
    finds_its_data(&machine)?;
    let pod = ["web-0", "web-1", "web-2"];
    let pod = pod.iter().find(|pod| node_of(&machine, pod).is_ok_and(|node| node == "node-1-3"));
    let pod = *pod.context("a pod is on node-1-3")?;
    let volume = text(&machine.get(&format!("pvc/data-{pod}"))?, "/spec/volumeName").to_owned();
    let terms = "/spec/nodeAffinity/required/nodeSelectorTerms/0/matchExpressions/0/values/0";
    ensure!(text(&machine.get(&format!("pv/{volume}"))?, terms) == "node-1-3");
    ensure!(!Leftovers::of(&root(&machine, "node-1-3"))?.mounts.is_empty(), "its volume is mounted there");
    says(&machine.refuses(&["nodes", "forget", "node-1-2"])?, "node node-1-2 is ready")?;
    says(&machine.refuses(&["nodes", "stop", "other"])?, "there is no node other")?;

    // A power cut: nothing of it is left but its disk, and nobody was told.
    says(&machine.says(&["nodes", "stop", "node-1-3"])?, "node-1-3 is off")?;
    let left = Leftovers::of(&root(&machine, "node-1-3"))?;
    ensure!(left.mounts.is_empty() && left.processes.is_empty() && left.loops.is_empty(), "{left:?}");
    says(
        &machine.kubectl(&["exec", pod, "--", "true"]).unwrap_err().to_string(),
        "node-1-3 is not ready yet",
    )?;
    machine.until("node-1-3 is unreachable", || {
        let node = machine.get("node/node-1-3")?;
        let taint = "node.kubernetes.io/unreachable";
        let tainted = has_taint(&node, taint, "NoSchedule") && has_taint(&node, taint, "NoExecute");
        Ok((ready(&node) == "Unknown" && tainted).then_some(()))
    })?;
    says(&machine.event("Node", "node-1-3", "NodeNotReady")?, "Node node-1-3 status is now: NodeNotReady")?;
    says(&machine.event("Pod", pod, "TaintManagerEviction")?, "Marking for deletion Pod default/")?;
    machine.until("its pod is to go", || {
        let found = machine.get(&format!("pod/{pod}"))?;
        Ok(found["metadata"]["deletionTimestamp"].is_string().then_some(()))
    })?;
    says(&machine.says(&["nodes"])?, "node-1-3  off    no")?;

    // It stays off, also when everything else is killed and starts again.
    machine.kill()?;
    machine.restart()?;
    says(&machine.log(), "node node-1-3 is off")?;
    says(&machine.says(&["nodes"])?, "node-1-3  off    no")?;
    let others: Vec<&str> = ["web-0", "web-1", "web-2"].into_iter().filter(|other| *other != pod).collect();
    for other in &others {
        machine.exec_until(other, "cat /data/first", |found| found.trim() == *other)?;
    }

    // Back again, it removes the pod, and the next one of that name finds its data there.
    says(&machine.says(&["nodes", "start", "node-1-3"])?, "node-1-3 is on")?;
    rolled_out(&machine)?;
    finds_its_data(&machine)?;
    ensure!(node_of(&machine, pod)? == "node-1-3");
    let node = machine.get("node/node-1-3")?;
    ensure!(ready(&node) == "True" && node["spec"]["taints"].is_null(), "{node}");

    is_forgotten(&machine, pod, &volume)?;
    // Whoever is left is not touched.
    for other in others {
        machine.exec_until(other, "cat /data/first", |found| found.trim() == other)?;
    }
    machine.delete("statefulset/web")?;
    machine.finish()
}

/// A pod on a node that leaves a file in its claim, which is snapshotted and cloned.
const SOURCE: &str = "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 16Mi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: source}
spec:
  terminationGracePeriodSeconds: 0
  nodeSelector: {kubernetes.io/hostname: node-1-3}
  containers:
  - {name: main, image: busybox, command: [sh, -c, 'echo here > /data/file; sync; exec sleep 100000'], volumeMounts: [{name: data, mountPath: /data}]}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
";

/// A claim made from another object, and a pod that says nothing of nodes.
fn copy(name: &str, source: &str) -> String {
    format!(
        "
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec: {{accessModes: [ReadWriteOnce], dataSource: {source}, resources: {{requests: {{storage: 16Mi}}}}}}
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: main, image: busybox, command: [sleep, '100000'], volumeMounts: [{{name: data, mountPath: /data}}]}}
  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {name}}}}}]
"
    )
}

#[test]
fn restores_and_clones_find_the_node_of_their_source() -> Result<()> {
    let machine = Machine::start_with(&["--nodes", "3"])?;
    machine.apply(SOURCE)?;
    machine.exec_until("source", "cat /data/file", |found| found.trim() == "here")?;
    let snapshot = "
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: then}
spec: {volumeSnapshotClassName: berth-local, source: {persistentVolumeClaimName: data}}
";
    machine.apply(snapshot)?;
    machine.wait("volumesnapshot/then", "jsonpath={.status.readyToUse}=true")?;
    // The node of the source is cordoned meanwhile, so that another is selected first.
    machine.kubectl(&["cordon", "node-1-3"])?;
    let sources = [
        ("restored", "{apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: then}"),
        ("cloned", "{kind: PersistentVolumeClaim, name: data}"),
    ];
    for (name, source) in sources {
        machine.apply(&copy(name, source))?;
        let why = "Selected node \"node-1-3\" for the volume, because the claim's source is there";
        machine.until("the claim is handed over", || {
            let of_it = |event: &Value| event["involvedObject"]["name"] == name && event["message"] == why;
            Ok(machine.all("events")?.iter().any(of_it).then_some(()))
        })?;
    }
    machine.kubectl(&["uncordon", "node-1-3"])?;
    for (name, _) in sources {
        machine.exec_until(name, "cat /data/file", |found| found.trim() == "here")?;
        ensure!(node_of(&machine, name)? == "node-1-3", "{name}");
        machine.delete(&format!("pod/{name}"))?;
        machine.delete(&format!("pvc/{name}"))?;
    }
    machine.delete("pod/source")?;
    machine.delete("volumesnapshot/then")?;
    machine.delete("pvc/data")?;
    machine.finish()
}

/// A pod of a priority that takes a port of its node.
fn holder(name: &str, class: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  terminationGracePeriodSeconds: 1
  priorityClassName: {class}
  containers:
  - {{name: main, image: busybox, command: [sleep, '100000'], ports: [{{containerPort: 41234, hostPort: 41234}}]}}
"
    )
}

#[test]
fn a_more_important_pod_takes_the_place_of_another() -> Result<()> {
    let machine = Machine::start_with(&["--nodes", "2"])?;
    let classes = "
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: high}
value: 1000
---
apiVersion: scheduling.k8s.io/v1
kind: PriorityClass
metadata: {name: low}
value: 10
globalDefault: true
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: kept}
spec: {minAvailable: 1, selector: {matchLabels: {app: kept}}}
";
    machine.apply(classes)?;
    says(&machine.kubectl(&["get", "priorityclasses"])?, "system-node-critical      2000001000   false")?;
    for name in ["kept", "newer"] {
        machine.apply(&holder(name, "low"))?;
        machine.ready(name)?;
    }
    machine.wait("pdb/kept", "jsonpath={.status.currentHealthy}=1")?;
    ensure!(node_of(&machine, "kept")? != node_of(&machine, "newer")?, "a port is taken once per node");
    let place = node_of(&machine, "newer")?;
    let refused = machine.kubectl(&["drain", &node_of(&machine, "kept")?, "--force", "--timeout=1s"]);
    says(&refused.unwrap_err().to_string(), "it would violate the pod's disruption budget")?;
    machine.kubectl(&["uncordon", &node_of(&machine, "kept")?])?;

    machine.apply(&holder("important", "high"))?;
    let uid = text(&machine.get("pod/important")?, "/metadata/uid").to_owned();
    says(&machine.event("Pod", "newer", "Preempted")?, &format!("Preempted by pod {uid} on node {place}"))?;
    says(
        &machine.event("Pod", "important", "FailedScheduling")?,
        "0/2 nodes are available: 2 node(s) didn't have free ports for the requested pod ports.",
    )?;
    machine.ready("important")?;
    ensure!(node_of(&machine, "important")? == place);
    ensure!(machine.get("pod/newer").is_err(), "it has left");
    machine.get("pod/kept")?;
    machine.apply(&holder("latecomer", "low"))?;
    says(
        &machine.event("Pod", "latecomer", "FailedScheduling")?,
        "preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.",
    )?;
    for pod in ["latecomer", "important", "kept"] {
        machine.delete(&format!("pod/{pod}"))?;
    }
    machine.finish()
}

/// A pod that appends numbers to a file, each synced before it is printed.
const WRITER: &str = "
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: shared}
provisioner: mover.berth.dev
parameters: {server: 127.0.0.1, share: /home/nfsdata}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: writer}
spec:
  serviceName: writer
  replicas: 1
  selector: {matchLabels: {app: writer}}
  template:
    metadata: {labels: {app: writer}}
    spec:
      terminationGracePeriodSeconds: 1
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
            - matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [node-1-2, node-1-3]}]
      containers:
      - name: main
        image: busybox
        command:
        - sh
        - -c
        - |
          n=$(wc -l < /data/numbers 2>/dev/null || echo 0)
          while true; do n=$((n + 1)); echo $n >> /data/numbers && sync /data/numbers && echo $n; sleep 0.05; done
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], storageClassName: shared, resources: {requests: {storage: 1Gi}}}
";

#[test]
fn a_volume_that_every_node_reaches_moves_by_the_out_of_service_rules() -> Result<()> {
    let server = Server::start(&["pseudo=/home/nfsdata"])?;
    let options =
        ["--driver=nfs", "--driver-name=mover.berth.dev", "--mount-mode=fuse", "--default-mount-options"];
    let words: Vec<&str> = SOON.into_iter().chain(options).chain([server.options.as_str()]).collect();
    let machine = Machine::start_with(&words)?;
    machine.apply(WRITER)?;
    machine.wait("statefulset/writer", "jsonpath={.status.readyReplicas}=1")?;
    let first = node_of(&machine, "writer-0")?;
    let written = |log: &str| log.lines().filter_map(|line| line.trim().parse::<u64>().ok()).max();
    machine.until("some numbers are acknowledged", || {
        Ok(written(&machine.kubectl(&["logs", "writer-0"])?).filter(|last| *last >= 20).map(drop))
    })?;
    let acknowledged =
        written(&machine.kubectl(&["logs", "writer-0"])?).context("numbers are acknowledged")?;
    machine.says(&["nodes", "stop", &first])?;
    machine.until("the node is known to be down", || {
        Ok((ready(&machine.get(&format!("node/{first}"))?) == "Unknown").then_some(()))
    })?;

    // It may only be cut off: the pod is told to go, stays where it was, and so does its volume.
    machine.until("the pod is to go", || {
        let found = machine.get("pod/writer-0")?;
        Ok(found["metadata"]["deletionTimestamp"].is_string().then_some(()))
    })?;
    let attachments = machine.all("volumeattachments")?;
    ensure!(
        attachments.len() == 1 && attachments[0]["spec"]["nodeName"] == first.as_str(),
        "{attachments:?}"
    );
    ensure!(node_of(&machine, "writer-0")? == first);

    // Somebody who knows says that it is off.
    machine.kubectl(&["taint", "node", &first, &format!("{OUT_OF_SERVICE}=nodeshutdown:NoExecute")])?;
    machine.until("the pod is elsewhere", || {
        let found = machine.get("pod/writer-0");
        let elsewhere = |pod: &Value| !["", first.as_str()].contains(&text(pod, "/spec/nodeName"));
        Ok(found.ok().filter(elsewhere).map(drop))
    })?;
    machine.ready("writer-0")?;
    let second = node_of(&machine, "writer-0")?;
    ensure!(Leftovers::of(&root(&machine, &first))?.mounts.is_empty(), "mounted on two nodes");
    ensure!(!Leftovers::of(&root(&machine, &second))?.mounts.is_empty(), "mounted on {second}");
    let attachments = machine.all("volumeattachments")?;
    ensure!(
        attachments.len() == 1 && attachments[0]["spec"]["nodeName"] == second.as_str(),
        "{attachments:?}"
    );
    let found = machine.exec_until("writer-0", "cat /data/numbers", |found| !found.trim().is_empty())?;
    let found: Vec<u64> = found.lines().filter_map(|line| line.trim().parse().ok()).collect();
    ensure!(
        (1..=acknowledged).all(|number| found.contains(&number)),
        "of {acknowledged} acknowledged numbers some are lost: {found:?}"
    );

    // Back, it has nothing of the pod, and takes new ones when the taint is removed.
    says(&machine.says(&["nodes", "start", &first])?, "It takes no pods yet")?;
    machine.kubectl(&["taint", "node", &first, &format!("{OUT_OF_SERVICE}-")])?;
    machine.until("the node is ready", || {
        let node = machine.get(&format!("node/{first}"))?;
        Ok((ready(&node) == "True" && node["spec"]["taints"].is_null()).then_some(()))
    })?;
    machine.delete("statefulset/writer")?;
    machine.delete("pvc/data-writer-0")?;
    machine
        .until("no attachment is left", || Ok(machine.all("volumeattachments")?.is_empty().then_some(())))?;
    machine.finish()
}
