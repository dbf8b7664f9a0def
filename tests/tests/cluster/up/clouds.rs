//! `berth up --cloud`: the walk of csi-digitalocean with no account, upstream deployments as written, nodes that lose their power, and
//! drivers that are killed while objects come and go.
//!
//! `BERTH_CLOUD_KILLS` sets how often the driver is killed; `BERTH_CRASH_SEED` repeats the choices of a run.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::cloud::{ALIYUN, Account, CloudBench, DIGITALOCEAN, Provider};
use berth_e2e::content::Random;
use berth_e2e::up::{Leftovers, Machine, PATIENCE};
use serde_json::Value;

use super::manifests::{Shared, all_ready};
use super::{pod, says, text, together, until_empty};

const SEED: &str = include_str!("../../../manifests/seed-002-digitalocean.yaml");
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The twin of DigitalOcean on a machine.
fn account(machine: &Machine) -> Result<Account> {
    account_at(machine, "digitalocean")
}

/// The twin of a provider on a machine.
fn account_at(machine: &Machine, provider: &str) -> Result<Account> {
    let running: Value = serde_json::from_slice(&fs::read(machine.data().join("running.json"))?)?;
    Account::at(text(&running, &format!("/clouds/{provider}")))
}

/// The disk of a claim.
fn disk_of(machine: &Machine, claim: &str) -> Result<String> {
    let claim = machine.get(&format!("pvc/{claim}"))?;
    let volume = machine.get(&format!("pv/{}", text(&claim, "/spec/volumeName")))?;
    Ok(text(&volume, "/spec/csi/volumeHandle").to_owned())
}

/// Waits until the pod of the walk is ready. Its disk of 5 GiB is looked through before it is formatted, which takes a machine a
/// while that has other things to do.
fn pod_is_ready(machine: &Machine) -> Result<()> {
    machine.ready("my-csi-app").or_else(|_| machine.ready("my-csi-app"))
}

/// The timeline of the claim shows these states, in this order.
fn went_through(machine: &Machine, states: &[&str]) -> Result<()> {
    let explained = machine.explain("pvc/csi-pvc")?;
    let mut rest = explained.as_str();
    for state in states {
        let (_, after) =
            rest.split_once(state).with_context(|| format!("{state} is not in:\n{explained}"))?;
        rest = after;
    }
    Ok(())
}

#[test]
fn the_walk_of_lesson_002_runs_as_written_with_no_account() -> Result<()> {
    let mut machine = Machine::start_with(&["--cloud", "digitalocean"])?;
    let twin = account(&machine)?;
    says(&machine.log(), "cloud digitalocean on http://127.0.0.1:")?;
    says(&machine.log(), "(token berth)")?;
    says(&machine.log(), "driver dobs.csi.digitalocean.com: volumes in region nyc3")?;
    machine.apply(SEED)?;
    pod_is_ready(&machine)?;
    went_through(&machine, &["CREATED", "NODE_READY", "VOL_READY", "PUBLISHED"])?;
    let disk = disk_of(&machine, "csi-pvc")?;
    let found = twin.disks()?;
    ensure!(found.keys().eq([&disk]) && found[&disk]["size_gib"] == 5, "{found:?}");
    ensure!(twin.servers_of(&disk)? == ["1"]);
    machine.exec("my-csi-app", "echo kept > /data/file; sync /data/file")?;

    // Killed and started again, everything is where it was, the cloud too.
    machine.kill()?;
    machine.restart()?;
    ensure!(twin.disks()?.len() == 1, "the cloud answers at another address");
    machine.exec_until("my-csi-app", "cat /data/file", |found| found == "kept\n")?;
    // Stopped, the pod ends; started, it runs again and finds its data.
    machine.signal(rustix::process::Signal::TERM)?;
    ensure!(Leftovers::of(machine.data())?.loops.is_empty(), "a device is left");
    machine.restart()?;
    pod_is_ready(&machine)?;
    machine.exec_until("my-csi-app", "cat /data/file", |found| found == "kept\n")?;

    machine.kubectl(&[
        "patch",
        "pvc/csi-pvc",
        "-p",
        r#"{"spec":{"resources":{"requests":{"storage":"6Gi"}}}}"#,
    ])?;
    machine.until("the disk has grown", || Ok((twin.disks()?[&disk]["size_gib"] == 6).then_some(())))?;
    machine.delete("pod/my-csi-app")?;
    machine.delete("pvc/csi-pvc")?;
    until_empty(&machine)?;
    ensure!(twin.ids()? == <(BTreeSet<String>, BTreeSet<String>)>::default(), "a disk is left");

    // After a kill nobody takes the devices away but `berth down`, which purges the disks as well.
    machine.apply(SEED)?;
    pod_is_ready(&machine)?;
    machine.kill()?;
    ensure!(!Leftovers::of(machine.data())?.loops.is_empty(), "devices outlive a kill");
    machine.says(&["down", "--purge"])?;
    machine.nothing_left()?;
    ensure!(!machine.data().exists(), "the data directory is left");
    Ok(())
}

/// The same walk with a class of Alibaba Cloud, whose disks begin at 20 GiB.
fn walk_on_aliyun() -> String {
    SEED.replace("do-block-storage", "alicloud-disk-essd").replace("5Gi", "20Gi")
}

#[test]
fn a_claim_and_its_pod_run_on_a_disk_of_alibaba_cloud_with_no_account() -> Result<()> {
    let machine = Machine::start_with(&["--cloud", "aliyun"])?;
    let twin = account_at(&machine, "aliyun")?;
    says(&machine.log(), "driver diskplugin.csi.alibabacloud.com: disks in region cn-hangzhou")?;
    machine.apply(&walk_on_aliyun())?;
    pod_is_ready(&machine)?;
    went_through(&machine, &["CREATED", "NODE_READY", "VOL_READY", "PUBLISHED"])?;
    let disk = disk_of(&machine, "csi-pvc")?;
    let found = twin.disks()?;
    ensure!(found.keys().eq([&disk]) && found[&disk]["size_gib"] == 20, "{found:?}");
    ensure!(twin.servers_of(&disk)? == ["i-berth1"]);
    machine
        .exec("my-csi-app", "echo kept > /data/file; sync /data/file; test $(stat -c %m /data) = /data")?;
    machine.delete("pod/my-csi-app")?;
    machine.delete("pvc/csi-pvc")?;
    until_empty(&machine)?;
    ensure!(twin.ids()? == <(BTreeSet<String>, BTreeSet<String>)>::default(), "a disk is left");
    machine.finish()
}

/// The deployment of an upstream driver.
struct Deployment {
    provider: &'static Provider,
    manifest: &'static str,
    /// The image of the driver, with its version.
    image: &'static str,
    /// The pod of the controller, by how its name begins, and how many containers it has.
    controller: (&'static str, usize),
    /// And that of the node.
    node: (&'static str, usize),
    /// What is deleted in the end.
    workloads: &'static str,
    /// The claim and the pod of the walk.
    walk: fn() -> String,
}

/// It runs on the twin, and so does the walk on its volumes.
fn runs_on_the_twin(one: &Deployment) -> Result<()> {
    let shared = Shared::new()?;
    let cloud = one.provider.name;
    let machine = Machine::start_in_with(shared.data(), &["--cloud", cloud, "--driver", "none"])?;
    let twin = account_at(&machine, cloud)?;
    machine.apply(one.manifest)?;
    let pod = |begin: &str| {
        machine.until("the driver's pod is there", || {
            let pods = machine.all("pods")?;
            let names = pods.iter().map(|pod| text(pod, "/metadata/name").to_owned());
            Ok(names.into_iter().find(|name| name.starts_with(begin)))
        })
    };
    for (begin, containers) in [one.controller, one.node] {
        all_ready(&machine, &format!("{} -n kube-system", pod(begin)?), containers)?;
    }
    let node = pod(one.node.0)?;
    let said =
        machine.kubectl(&["get", "events", "-n", "kube-system", "-o", "jsonpath={.items[*].message}"])?;
    says(&said, &format!("The image {} is not pulled: `berth driver {cloud}", one.image))?;
    machine.until("the driver is registered", || {
        Ok(machine.get("csinodes")?.to_string().contains(one.provider.driver).then_some(()))
    })?;
    machine.apply(&(one.walk)())?;
    pod_is_ready(&machine)?;
    // Its sidecars are other processes, which keep no timeline here.
    went_through(&machine, &["VOL_READY", "PUBLISHED"])?;
    let disk = disk_of(&machine, "csi-pvc")?;
    ensure!(twin.servers_of(&disk)? == [one.provider.instance]);
    machine
        .exec("my-csi-app", "echo kept > /data/file; sync /data/file; test $(stat -c %m /data) = /data")?;
    // Another pod of the driver goes on with what the first one has staged.
    machine.delete(&format!("pod/{node} -n kube-system"))?;
    machine.delete("pod/my-csi-app")?;
    machine.until("it is detached", || Ok(twin.servers_of(&disk)?.is_empty().then_some(())))?;
    machine.delete("pvc/csi-pvc")?;
    machine.until("the disk is gone", || Ok(twin.disks()?.is_empty().then_some(())))?;
    machine.delete(&format!("-n kube-system {}", one.workloads))?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_deployment_of_csi_digitalocean_runs_as_written_on_the_twin() -> Result<()> {
    runs_on_the_twin(&Deployment {
        provider: &DIGITALOCEAN,
        manifest: include_str!("../../../manifests/csi-digitalocean.yaml"),
        image: "digitalocean/do-csi-plugin:v0.3.1",
        controller: ("csi-do-controller-", 3),
        node: ("csi-do-node-", 2),
        workloads: "statefulset/csi-do-controller daemonset/csi-do-node",
        walk: || SEED.to_owned(),
    })
}

#[test]
fn the_deployment_of_alibaba_cloud_csi_driver_runs_as_written_on_the_twin() -> Result<()> {
    runs_on_the_twin(&Deployment {
        provider: &ALIYUN,
        manifest: include_str!("../../../manifests/csi-aliyun.yaml"),
        image: "registry-cn-hangzhou.ack.aliyuncs.com/acs/csi-plugin:v1.36.2",
        controller: ("csi-provisioner-", 5),
        node: ("csi-plugin-", 2),
        workloads: "deployment/csi-provisioner daemonset/csi-plugin",
        walk: walk_on_aliyun,
    })
}

/// A pod that appends numbers to a file, each synced before it is printed.
const WRITER: &str = "
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
    spec: {accessModes: [ReadWriteOnce], storageClassName: cloud, resources: {requests: {storage: 1Gi}}}
";

/// The server of the twin that a node is: the nodes of a machine are node-1, node-1-2 and so on.
fn server(provider: &Provider, node: &str) -> String {
    let number = node.strip_prefix("node-1-").unwrap_or("1");
    format!("{}{number}", provider.instance.trim_end_matches('1'))
}

#[test]
fn the_disk_of_a_node_that_lost_its_power_moves_by_the_out_of_service_rules_at_digitalocean() -> Result<()> {
    moves_by_the_out_of_service_rules(&DIGITALOCEAN)
}

#[test]
fn the_disk_of_a_node_that_lost_its_power_moves_by_the_out_of_service_rules_at_alibaba_cloud() -> Result<()> {
    moves_by_the_out_of_service_rules(&ALIYUN)
}

fn moves_by_the_out_of_service_rules(provider: &Provider) -> Result<()> {
    let machine = Machine::start_with(&[
        &format!("--cloud={}", provider.name),
        &format!("--driver={}", provider.name),
        "--nodes=3",
        "--node-monitor-grace-period=5s",
        "--default-unreachable-toleration-seconds=1",
        "--default-not-ready-toleration-seconds=1",
        "--force-detach-after=1h",
    ])?;
    let twin = account_at(&machine, provider.name)?;
    machine.apply(&together(&[classes(provider), WRITER.to_owned()]))?;
    machine.wait("statefulset/writer", "jsonpath={.status.readyReplicas}=1")?;
    let node_of_pod =
        || -> Result<String> { Ok(text(&machine.get("pod/writer-0")?, "/spec/nodeName").to_owned()) };
    let (first, disk) = (node_of_pod()?, disk_of(&machine, "data-writer-0")?);
    ensure!(twin.servers_of(&disk)? == [server(provider, &first)]);
    let written = |log: &str| log.lines().filter_map(|line| line.trim().parse::<u64>().ok()).max();
    let acknowledged = machine.until("some numbers are acknowledged", || {
        Ok(written(&machine.kubectl(&["logs", "writer-0"])?).filter(|last| *last >= 20))
    })?;

    // A power cut: the device is gone with what was not written, and the cloud still has the disk attached.
    machine.says(&["nodes", "stop", &first])?;
    ensure!(twin.servers_of(&disk)? == [server(provider, &first)]);
    machine.until("the pod is to go", || {
        Ok(machine.get("pod/writer-0")?["metadata"]["deletionTimestamp"].is_string().then_some(()))
    })?;
    ensure!(
        twin.servers_of(&disk)? == [server(provider, &first)],
        "detached although the node may only be cut off"
    );

    // Somebody who knows says that it is off.
    machine.kubectl(&["taint", "node", &first, &format!("{OUT_OF_SERVICE}=nodeshutdown:NoExecute")])?;
    let second = machine.until("the pod is elsewhere", || {
        let Ok(found) = machine.get("pod/writer-0") else { return Ok(None) };
        let node = text(&found, "/spec/nodeName").to_owned();
        Ok(Some(node).filter(|node| !node.is_empty() && *node != first))
    })?;
    machine.ready("writer-0")?;
    ensure!(twin.servers_of(&disk)? == [server(provider, &second)]);
    let found = machine.exec_until("writer-0", "cat /data/numbers", |found| !found.trim().is_empty())?;
    let found: BTreeSet<u64> = found.lines().filter_map(|line| line.trim().parse().ok()).collect();
    ensure!(
        (1..=acknowledged).all(|number| found.contains(&number)),
        "of {acknowledged} some are lost: {found:?}"
    );

    // Back, it has nothing of the disk.
    machine.says(&["nodes", "start", &first])?;
    machine.kubectl(&["taint", "node", &first, &format!("{OUT_OF_SERVICE}-")])?;
    ensure!(twin.servers_of(&disk)? == [server(provider, &second)]);
    machine.delete("statefulset/writer")?;
    machine.delete("pvc/data-writer-0")?;
    until_empty(&machine)?;
    ensure!(twin.disks()?.is_empty(), "a disk is left");
    machine.finish()
}

/// The classes of a provider's volumes and snapshots.
fn classes(provider: &Provider) -> String {
    let parameters: Vec<String> =
        provider.parameters.iter().map(|(key, value)| format!("{key}: {value}")).collect();
    let (driver, parameters) = (provider.driver, parameters.join(", "));
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: cloud}}\nprovisioner: {driver}\n\
         parameters: {{{parameters}}}\n---\n\
         apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotClass\nmetadata: {{name: cloud}}\ndriver: {driver}\n\
         deletionPolicy: Delete\n"
    )
}

/// A claim of one GiB, of a source if there is one.
fn claim(name: &str, source: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  storageClassName: cloud\n  \
         accessModes: [ReadWriteOnce]\n  resources: {{requests: {{storage: 1Gi}}}}\n{source}"
    )
}

/// What the objects say that they own: disks, and snapshots.
fn owned(machine: &Machine) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
    let handles = |kind: &str, path: &str| -> Result<BTreeSet<String>> {
        Ok(machine.all(kind)?.iter().map(|object| text(object, path).to_owned()).collect())
    };
    Ok((
        handles("pv", "/spec/csi/volumeHandle")?,
        handles("volumesnapshotcontents", "/status/snapshotHandle")?,
    ))
}

/// Kills the driver at calls of the API that chance chooses.
struct Killer {
    random: Random,
    kills: u64,
}

impl Killer {
    fn arm(&mut self, account: &Account) -> Result<()> {
        let effect = *self.random.pick(&["hang-before", "hang-after"]);
        account.fault(&format!("*={effect},after={}", self.random.below(10)))
    }

    /// Kills the driver at most so often until the objects are as they should be.
    async fn until(
        &mut self,
        bench: &mut CloudBench,
        most: u64,
        what: &str,
        so: impl Fn() -> Result<bool>,
    ) -> Result<()> {
        let (deadline, last) = (Instant::now() + 3 * PATIENCE, self.kills + most);
        self.arm(&bench.account)?;
        loop {
            if bench.account.faults_are_over()? {
                bench.kill_driver()?;
                self.kills += 1;
                bench.account.clear_faults()?;
                bench.start_driver().await?;
                if self.kills < last {
                    self.arm(&bench.account)?;
                }
            }
            if tokio::task::block_in_place(&so)? {
                return bench.account.clear_faults();
            }
            ensure!(Instant::now() < deadline, "{what}: not within {:?}\n{}", 3 * PATIENCE, bench.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

const SNAPSHOT: &str = "
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: then}
spec: {source: {persistentVolumeClaimName: one}, volumeSnapshotClassName: cloud}
";

/// Pods, a snapshot, a restored and a cloned claim, from nothing to nothing, while the driver is killed.
async fn live(machine: &Machine, bench: &mut CloudBench, killer: &mut Killer) -> Result<()> {
    let script = "echo kept > /data/file; sync /data/file; exec sleep 100000";
    let pods = ["one", "two"];
    machine.apply(&together(&pods.map(|name| together(&[claim(name, ""), pod(name, name, script)]))))?;
    let is_ready = |name: &&str| {
        let wait = ["wait", "--for=condition=Ready", "--timeout=0", &format!("pod/{name}")];
        machine.kubectl(&wait).is_ok()
    };
    killer.until(bench, 2, "the pods are ready", || Ok(pods.iter().all(is_ready))).await?;

    machine.apply(SNAPSHOT)?;
    let source = |group: &str, kind: &str, name: &str| {
        format!("  dataSource: {{{group}kind: {kind}, name: {name}}}\n")
    };
    machine.apply(&together(&[
        claim("restored", &source("apiGroup: snapshot.storage.k8s.io, ", "VolumeSnapshot", "then")),
        claim("cloned", &source("", "PersistentVolumeClaim", "two")),
    ]))?;
    let bound = || Ok(machine.all("pvc")?.iter().all(|claim| text(claim, "/status/phase") == "Bound"));
    killer.until(bench, 2, "all claims are bound", bound).await?;
    machine.until("the account has what objects own", || {
        Ok((bench.account.ids()? == owned(machine)?).then_some(()))
    })?;
    let (disks, snapshots) = bench.account.ids()?;
    ensure!(disks.len() == 4 && snapshots.len() == 1, "{disks:?} {snapshots:?}");

    machine.kubectl(&["delete", "pod,pvc,volumesnapshot", "--all", "--wait=false"])?;
    let gone = || {
        let kinds = ["pods", "pvc", "pv", "volumeattachments", "volumesnapshotcontents"];
        let empty = kinds.iter().map(|kind| Ok(machine.all(kind)?.is_empty()));
        Ok(empty.collect::<Result<Vec<bool>>>()?.iter().all(|empty| *empty))
    };
    killer.until(bench, 2, "all is gone", gone).await?;
    bench.owns(&[], &[]).await
}

async fn is_killed_again_and_again(provider: &'static Provider) -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let kills = number("BERTH_CLOUD_KILLS").unwrap_or(4);
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    let seed = number("BERTH_CRASH_SEED").unwrap_or_else(|| now.into());
    eprintln!("BERTH_CRASH_SEED={seed}");
    let mut killer = Killer { random: Random::new(seed), kills: 0 };
    let mut bench = CloudBench::start(provider, &[], &[]).await?;
    let endpoint = bench.endpoint();
    let machine = Machine::start_with(&["--driver=none", "--driver-endpoint", &endpoint])?;
    machine.apply(&classes(provider))?;
    let mut rounds = 0;
    while killer.kills < kills {
        live(&machine, &mut bench, &mut killer).await.with_context(|| format!("round {rounds}"))?;
        rounds += 1;
        ensure!(rounds < 2 + kills, "hardly a kill hit a call");
    }
    eprintln!("{}: killed {} times in {rounds} rounds", provider.name, killer.kills);
    machine.finish()?;
    bench.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_again_and_again_leaves_exactly_what_objects_own_at_digitalocean() -> Result<()> {
    is_killed_again_and_again(&DIGITALOCEAN).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_again_and_again_leaves_exactly_what_objects_own_at_alibaba_cloud() -> Result<()> {
    is_killed_again_and_again(&ALIYUN).await
}
