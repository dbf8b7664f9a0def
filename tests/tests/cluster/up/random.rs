//! Random operations on StatefulSets, their pods and claims, and nodes, with kill -9 of `berth up` in between, against a model of
//! what must be there in the end. `BERTH_RANDOM_OPERATIONS` has more of them, `BERTH_CRASH_SEED` repeats a run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use berth_e2e::content::Random;
use berth_e2e::up::Machine;
use serde_json::Value;

use super::crash::number;
use super::{text, until_empty};

const SETS: [&str; 2] = ["a", "b"];
const NODES: [&str; 3] = ["node-1", "node-1-2", "node-1-3"];
/// After so many operations everything is switched on and compared.
const ROUND: u64 = 25;

/// What must be there once everything has settled.
#[derive(Debug, Default)]
struct Model {
    /// The replicas of the sets that exist.
    sets: BTreeMap<&'static str, u64>,
    claims: BTreeSet<String>,
    off: BTreeSet<&'static str>,
    /// What was written into the volume of a claim, by the claim's uid.
    written: BTreeMap<String, String>,
}

fn manifest(name: &str, replicas: u64) -> String {
    format!(
        "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {{name: {name}}}\nspec:\n  serviceName: {name}\n  replicas: {replicas}\n  \
         podManagementPolicy: Parallel\n  selector: {{matchLabels: {{app: {name}}}}}\n  template:\n    metadata: {{labels: {{app: {name}}}}}\n    \
         spec:\n      terminationGracePeriodSeconds: 1\n      containers:\n      - name: main\n        image: busybox\n        \
         command: [sleep, '100000']\n        volumeMounts: [{{name: data, mountPath: /data}}]\n  volumeClaimTemplates:\n  \
         - metadata: {{name: data}}\n    spec:\n      accessModes: [ReadWriteOnce]\n      resources: {{requests: {{storage: 16Mi}}}}\n"
    )
}

#[test]
#[ignore = "minutes long: `make test-crash` runs it"]
fn random_operations_with_kills_converge_to_what_the_model_says() -> Result<()> {
    let operations = number("BERTH_RANDOM_OPERATIONS")?.unwrap_or(100);
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    let seed = number("BERTH_CRASH_SEED")?.unwrap_or_else(|| now.into());
    eprintln!("random operations: seed {seed}, {operations} operations");
    let mut done = Vec::new();
    let outcome = run(seed, operations, &mut done);
    outcome.with_context(|| format!("with seed {seed}, after {}", done.join(", ")))
}

fn run(seed: u64, operations: u64, done: &mut Vec<String>) -> Result<()> {
    let mut random = Random::new(seed);
    let words =
        ["--nodes=3", "--node-monitor-grace-period=10s", "--default-unreachable-toleration-seconds=1"];
    let mut machine = Machine::start_with(&words)?;
    let mut model = Model::default();
    for operation in 1..=operations {
        done.push(step(&mut machine, &mut model, &mut random)?);
        if operation % ROUND == 0 || operation == operations {
            compare(&machine, &mut model, seed ^ operation)?;
            done.push("compared".to_owned());
        }
    }
    for set in SETS {
        machine.delete(&format!("statefulset/{set}"))?;
    }
    machine.delete("pvc --all")?;
    until_empty(&machine)?;
    machine.finish()
}

/// Does one thing; gives what it was.
fn step(machine: &mut Machine, model: &mut Model, random: &mut Random) -> Result<String> {
    let set = *random.pick(&SETS);
    Ok(match random.below(12) {
        0..=3 => {
            let replicas = random.below(4);
            machine.apply(&manifest(set, replicas))?;
            model.sets.insert(set, replicas);
            let claims: Vec<String> = (0..replicas).map(|ordinal| format!("data-{set}-{ordinal}")).collect();
            model.claims.extend(claims.iter().cloned());
            wake_holders(machine, model, set, &claims)?;
            // What its pods use may not have been made yet when they are to go again.
            for claim in claims {
                machine
                    .until(&format!("{claim} is there"), || Ok(is_there(machine, &claim)?.then_some(())))?;
            }
            format!("{set} has {replicas}")
        }
        4 => {
            machine.kubectl(&["delete", "statefulset", set, "--ignore-not-found", "--wait=false"])?;
            model.sets.remove(set);
            format!("{set} deleted")
        }
        5 | 6 => {
            let pod = format!("{set}-{}", random.below(3));
            machine.kubectl(&["delete", "pod", &pod, "--ignore-not-found", "--wait=false"])?;
            format!("pod {pod} deleted")
        }
        7 | 8 => {
            let node = *random.pick(&NODES[1..]);
            let stop = !model.off.contains(node);
            machine.says(&["nodes", if stop { "stop" } else { "start" }, node])?;
            if stop {
                model.off.insert(node);
            } else {
                model.off.remove(node);
            }
            format!("{node} {}", if stop { "stopped" } else { "started" })
        }
        9 | 10 => {
            machine.kill()?;
            machine.restart()?;
            "killed".to_owned()
        }
        _ => {
            // A claim that no pod is to use.
            let used = |claim: &&String| {
                let of = |(set, count): (&&str, &u64)| {
                    (0..*count).any(|ordinal| **claim == format!("data-{set}-{ordinal}"))
                };
                !model.sets.iter().any(of)
            };
            let unused: Vec<String> = model.claims.iter().filter(used).cloned().collect();
            if unused.is_empty() {
                return Ok("nothing".to_owned());
            }
            let claim = random.pick(&unused).clone();
            // Whoever deletes a claim under a pod that stays keeps both for ever: the set may want the pod again before the
            // controller has deleted it.
            machine.until(&format!("no pod that stays uses {claim}"), || {
                let pods = machine.all("pods")?;
                let stays = |pod: &Value| is_user(pod, &claim) && !is_going(pod);
                Ok((!pods.iter().any(stays)).then_some(()))
            })?;
            machine.kubectl(&["delete", "pvc", &claim, "--wait=false"])?;
            model.claims.remove(&claim);
            format!("{claim} deleted")
        }
    })
}

/// Whether a claim exists and is to stay.
fn is_there(machine: &Machine, claim: &str) -> Result<bool> {
    let claims = machine.all("pvc")?;
    Ok(claims.iter().any(|found| text(found, "/metadata/name") == claim && !is_going(found)))
}

fn is_going(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
}

/// Whether a pod is the one that uses a claim.
fn is_user(pod: &Value, claim: &str) -> bool {
    claim.strip_prefix("data-") == Some(text(pod, "/metadata/name"))
}

/// Starts the nodes that a set's claims wait for. A pod of a node that is off stays until the node says that it has ended, as
/// in Kubernetes, even if its set is gone: until then its claim cannot go, and no other pod can have its name. A set whose
/// pod of that name is refused makes no further claims, either.
fn wake_holders(machine: &Machine, model: &mut Model, set: &str, claims: &[String]) -> Result<()> {
    let there = claims.iter().map(|claim| is_there(machine, claim)).collect::<Result<Vec<_>>>()?;
    if there.iter().all(|there| *there) {
        return Ok(());
    }
    let pods = machine.all("pods")?;
    let holds = |pod: &&Value| text(pod, "/metadata/labels/app") == set;
    let holders: BTreeSet<&str> = pods.iter().filter(holds).map(|pod| text(pod, "/spec/nodeName")).collect();
    for node in NODES.iter().filter(|node| holders.contains(*node)) {
        if model.off.remove(node) {
            machine.says(&["nodes", "start", node])?;
        }
    }
    Ok(())
}

/// Switches everything on, waits until all is as the model says, and looks into every volume.
fn compare(machine: &Machine, model: &mut Model, round: u64) -> Result<()> {
    for node in std::mem::take(&mut model.off) {
        machine.says(&["nodes", "start", node])?;
    }
    let wanted: BTreeSet<String> = (model.sets.iter())
        .flat_map(|(set, count)| (0..*count).map(move |ordinal| format!("{set}-{ordinal}")))
        .collect();
    let mut seen = String::new();
    let settled = machine.until("pods and claims are those of the model", || {
        let pods = machine.all("pods")?;
        let is_ready = |pod: &&Value| {
            let conditions = pod["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
            conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
                && !is_going(pod)
        };
        let name = |object: &Value| text(object, "/metadata/name").to_owned();
        let ready: BTreeSet<String> = pods.iter().filter(is_ready).map(name).collect();
        let claims: BTreeSet<String> = machine.all("pvc")?.iter().map(name).collect();
        let all: BTreeSet<String> = pods.iter().map(name).collect();
        seen = format!("pods {all:?}, of these ready {ready:?}, claims {claims:?}");
        Ok((ready == wanted && all == wanted && claims == model.claims).then_some(()))
    });
    settled.with_context(|| format!("there are {seen}; the model says {model:?}"))?;
    for pod in &wanted {
        let uid = text(&machine.get(&format!("pvc/data-{pod}"))?, "/metadata/uid").to_owned();
        if let Some(written) = model.written.get(&uid) {
            machine.exec_until(pod, "cat /data/token", |found| found.trim() == written)?;
        }
        let token = format!("{pod}-{round:x}");
        machine.exec(pod, &format!("echo {token} > /data/token && sync /data/token"))?;
        model.written.insert(uid, token);
    }
    Ok(())
}
