//! etcd, Debian's package, as a StatefulSet of three on three nodes with disks of a cloud's twin: its members find each other by
//! the names of their headless Service, nodes lose their power under load, and no acknowledged write is lost.
//!
//! Writers put numbered keys through the Service, one after the other, each until it is acknowledged. Meanwhile the kernel's table
//! of mounts is read all the time: no volume is mounted by two nodes. `BERTH_ETCD_ROUNDS` sets how many nodes fail one after the
//! other (`make test-etcd`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use berth_e2e::up::Machine;
use serde_json::{Value, json};

use super::{text, until_empty};

const ROUNDS: &str = "BERTH_ETCD_ROUNDS";
const WRITERS: u64 = 3;
const MEMBERS: [&str; 3] = ["etcd-0", "etcd-1", "etcd-2"];
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// How long an answer may take before it is asked for again.
const ANSWER: Duration = Duration::from_secs(5);

const SET: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: etcd}
spec:
  clusterIP: None
  # Members find each other before they are ready.
  publishNotReadyAddresses: true
  selector: {app: etcd}
  ports: [{name: client, port: 2379}, {name: peer, port: 2380}]
---
apiVersion: v1
kind: Service
metadata: {name: database}
spec:
  selector: {app: etcd}
  ports: [{name: client, port: 2379}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: etcd}
spec:
  serviceName: etcd
  replicas: 3
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: etcd}}
  template:
    metadata: {labels: {app: etcd}}
    spec:
      terminationGracePeriodSeconds: 5
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {app: etcd}}}
      containers:
      - name: etcd
        image: etcd
        command:
        - sh
        - -c
        - |
          of() { echo "http://$1.etcd.default.svc.cluster.local:$2"; }
          exec etcd --name "$HOSTNAME" --data-dir /data/etcd \
            --listen-peer-urls "http://$POD_IP:2380" --initial-advertise-peer-urls "$(of "$HOSTNAME" 2380)" \
            --listen-client-urls "http://$POD_IP:2379" --advertise-client-urls "$(of "$HOSTNAME" 2379)" \
            --initial-cluster "etcd-0=$(of etcd-0 2380),etcd-1=$(of etcd-1 2380),etcd-2=$(of etcd-2 2380)" \
            --initial-cluster-state new --heartbeat-interval 200 --election-timeout 2000
        env: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
        ports: [{name: client, containerPort: 2379}, {name: peer, containerPort: 2380}]
        readinessProbe: {httpGet: {path: /health, port: client}, periodSeconds: 1, timeoutSeconds: 5, failureThreshold: 5}
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], storageClassName: do-block-storage, resources: {requests: {storage: 1Gi}}}
"#;

/// Sends a request to etcd's gateway of JSON over HTTP, and returns the answer to one that was carried out.
fn ask(at: SocketAddr, call: &str, body: &Value) -> Result<Value> {
    let mut stream = TcpStream::connect_timeout(&at, ANSWER)?;
    stream.set_read_timeout(Some(ANSWER))?;
    let body = body.to_string();
    let length = body.len();
    let head = format!("POST /v3/kv/{call} HTTP/1.0\r\nHost: etcd\r\nContent-Length: {length}\r\n\r\n");
    stream.write_all((head + &body).as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("the answer is cut off")?;
    ensure!(head.starts_with("HTTP/1.") && head.contains(" 200 "), "{answer}");
    Ok(serde_json::from_str(body)?)
}

/// Bytes as JSON has them for etcd.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let all = chunk.iter().fold(0u32, |all, byte| all << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let index = (all >> (18 - 6 * place)) & 63;
            text.push(if place <= chunk.len() { char::from(LETTERS[index as usize]) } else { '=' });
        }
    }
    text
}

/// Writers that go on until they are told to stop.
struct Load {
    at: SocketAddr,
    stop: Arc<AtomicBool>,
    acknowledged: Vec<Arc<AtomicU64>>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(at: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged: Vec<Arc<AtomicU64>> = (0..WRITERS).map(|_| Arc::default()).collect();
        let threads = acknowledged.iter().enumerate().map(|(writer, acknowledged)| {
            let (stop, acknowledged) = (stop.clone(), acknowledged.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let number = acknowledged.load(Ordering::Relaxed);
                    let put = json!({ "key": base64(format!("{writer}/{number:08}").as_bytes()), "value": base64(b"x") });
                    match ask(at, "put", &put) {
                        Ok(_) => acknowledged.store(number + 1, Ordering::Relaxed),
                        // Between two members that answer; the next try asks another.
                        Err(_) => std::thread::yield_now(),
                    }
                }
            })
        });
        let threads = threads.collect();
        Self { at, stop, acknowledged, threads }
    }

    fn total(&self) -> u64 {
        self.acknowledged.iter().map(|number| number.load(Ordering::Relaxed)).sum()
    }

    /// Ends the load, and checks that every acknowledged key is there.
    fn check(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().ok().context("a writer panicked")?;
        }
        let mut total = 0;
        for (writer, acknowledged) in self.acknowledged.iter().enumerate() {
            let acknowledged = acknowledged.load(Ordering::Relaxed);
            total += acknowledged;
            let range = json!({
                "key": base64(format!("{writer}/").as_bytes()), "range_end": base64(format!("{writer}0").as_bytes()),
                "keys_only": true,
            });
            let found = ask(self.at, "range", &range)?;
            let keys: BTreeSet<&str> =
                found["kvs"].as_array().into_iter().flatten().map(|pair| text(pair, "/key")).collect();
            let lost: Vec<u64> = (0..acknowledged)
                .filter(|number| !keys.contains(base64(format!("{writer}/{number:08}").as_bytes()).as_str()))
                .collect();
            ensure!(
                lost.is_empty(),
                "writer {writer}: of {acknowledged} acknowledged keys these are lost: {lost:?}"
            );
        }
        Ok(total)
    }
}

/// Where each volume of a cloud is staged: by the name of its directory, which is that of its handle, the nodes' directories.
fn staged(data: &Path) -> Result<BTreeMap<String, BTreeSet<PathBuf>>> {
    let mut found: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
        let Some(path) = line.split(' ').nth(4).map(Path::new).filter(|path| path.starts_with(data)) else {
            continue;
        };
        let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
        let [.., volume, "globalmount"] = parts.as_slice() else { continue };
        let Some(node) = path.ancestors().find(|above| above.ends_with("node")) else { continue };
        found.entry((*volume).to_owned()).or_default().insert(node.to_owned());
    }
    Ok(found)
}

/// Reads the table of mounts all the time, until it is told to stop.
struct Watcher {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64>>,
}

impl Watcher {
    fn start(data: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut looks = 0;
            while !until.load(Ordering::Relaxed) {
                for (volume, nodes) in staged(&data)? {
                    ensure!(nodes.len() <= 1, "volume {volume} is mounted by {nodes:?}");
                }
                looks += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(looks)
        });
        Self { stop, thread }
    }

    fn check(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let looks = self.thread.join().ok().context("the watcher panicked")??;
        ensure!(looks > 10, "the table of mounts was read {looks} times");
        Ok(())
    }
}

fn all_ready(machine: &Machine) -> Result<()> {
    machine.until("all members are ready", || {
        let set = machine.get("statefulset/etcd")?;
        Ok((set["status"]["readyReplicas"] == 3).then_some(()))
    })
}

/// Waits until so many more keys are acknowledged.
fn goes_on(machine: &Machine, load: &Load, more: u64) -> Result<()> {
    let wanted = load.total() + more;
    machine.until("writes are acknowledged", || Ok((load.total() >= wanted).then_some(())))
}

/// A file on the volume of a member, opened on its node beside the member.
fn opened_on_its_node(machine: &Machine, member: &str) -> Result<File> {
    let name = text(&machine.get(&format!("pod/{member}"))?, "/metadata/uid").to_owned();
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let mounts = table.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let mut own = mounts
        .filter(|path| path.starts_with(machine.data()) && path.iter().any(|part| part == name.as_str()));
    let is_csi =
        |path: &&Path| path.ends_with("mount") && path.to_string_lossy().contains("kubernetes.io~csi");
    let mount = own.find(is_csi).with_context(|| format!("{member} has no volume of a driver"))?;
    Ok(OpenOptions::new().create(true).append(true).open(mount.join("fence"))?)
}

/// The node of a member loses its power under load: the member moves with its disk, by the rules for nodes that are out of service.
fn a_node_fails(machine: &Machine, load: &Load, member: &str) -> Result<()> {
    let node = text(&machine.get(&format!("pod/{member}"))?, "/spec/nodeName").to_owned();
    let mut old = opened_on_its_node(machine, member)?;
    old.write_all(b"before\n")?;
    old.sync_all()?;
    machine.says(&["nodes", "stop", &node])?;
    goes_on(machine, load, 20)?;
    machine.kubectl(&["taint", "node", &node, &format!("{OUT_OF_SERVICE}=nodeshutdown:NoExecute")])?;
    machine.until("the members are elsewhere", || {
        let pods = machine.all("pods")?;
        let elsewhere = pods.iter().all(|pod| {
            let at = text(pod, "/spec/nodeName");
            !at.is_empty() && at != node
        });
        Ok((pods.len() == 3 && elsewhere).then_some(()))
    })?;
    all_ready(machine)?;
    // Both write: what the node without power still holds is not the disk any more.
    machine.exec(member, "echo after >> /data/fence && sync /data/fence")?;
    let _ = old.write_all(b"from the node that is off\n").and_then(|()| old.sync_all());
    drop(old);
    let found = machine.exec(member, "cat /data/fence")?;
    if found.lines().filter(|line| *line == "after").count() == 0 || found.contains("off") {
        bail!("the node that is off wrote to the disk of {member}: {found}");
    }
    machine.says(&["nodes", "start", &node])?;
    machine.kubectl(&["taint", "node", &node, &format!("{OUT_OF_SERVICE}-")])?;
    goes_on(machine, load, 20)?;
    machine.until("the node takes pods again", || {
        let found = machine.get(&format!("node/{node}"))?;
        let ready = found["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
        Ok((ready && found["spec"].get("taints").is_none()).then_some(()))
    })?;
    spread(machine)
}

/// Has each member on a node of its own again: the next node that fails takes one along, and not the majority.
fn spread(machine: &Machine) -> Result<()> {
    let nodes = || -> Result<Vec<String>> {
        let pods = machine.all("pods")?;
        Ok(pods.iter().map(|pod| text(pod, "/spec/nodeName").to_owned()).collect())
    };
    let mut taken = BTreeSet::new();
    for member in MEMBERS {
        let node = text(&machine.get(&format!("pod/{member}"))?, "/spec/nodeName").to_owned();
        if !taken.insert(node) {
            machine.kubectl(&["delete", "pod", member])?;
            machine.until(&format!("{member} is on a node of its own"), || {
                let all: BTreeSet<String> = nodes()?.into_iter().filter(|node| !node.is_empty()).collect();
                Ok((all.len() == MEMBERS.len()).then_some(()))
            })?;
        }
    }
    all_ready(machine)
}

#[test]
fn no_acknowledged_write_is_lost_when_nodes_fail_under_load() -> Result<()> {
    let rounds: usize = std::env::var(ROUNDS).map_or(Ok(1), |rounds| rounds.parse())?;
    let machine = Machine::start_with(&[
        "--cloud=digitalocean",
        "--driver=digitalocean",
        "--nodes=3",
        "--node-monitor-grace-period=5s",
        "--default-unreachable-toleration-seconds=1",
        "--default-not-ready-toleration-seconds=1",
        "--force-detach-after=1h",
    ])?;
    machine.apply(SET)?;
    all_ready(&machine)?;
    let nodes: BTreeSet<String> = MEMBERS
        .iter()
        .map(|member| Ok(text(&machine.get(&format!("pod/{member}"))?, "/spec/nodeName").to_owned()))
        .collect::<Result<_>>()?;
    ensure!(nodes.len() == 3, "the members are on {nodes:?}");
    let address = text(&machine.get("service/database")?, "/spec/clusterIP").to_owned();
    let at = SocketAddr::new(address.parse()?, 2379);
    let watcher = Watcher::start(machine.data().to_owned());
    let load = Load::start(at);
    goes_on(&machine, &load, 50)?;
    for round in 0..rounds {
        a_node_fails(&machine, &load, MEMBERS[(round + 1) % MEMBERS.len()])?;
    }
    let acknowledged = load.check()?;
    watcher.check()?;
    println!("{acknowledged} writes were acknowledged while {rounds} nodes failed");
    machine.delete("statefulset/etcd")?;
    machine.kubectl(&["delete", "service", "etcd", "database"])?;
    machine.kubectl(&["delete", "pvc", "--all"])?;
    until_empty(&machine)?;
    machine.finish()
}
