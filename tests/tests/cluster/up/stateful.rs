//! StatefulSets on `berth up`: their data through scaling, rollouts, re-creation and growth.

use anyhow::{Result, ensure};
use berth_e2e::up::Machine;

use super::{says, text, until_empty};

fn stateful_set(replicas: u32, version: &str) -> String {
    format!(
        "apiVersion: apps/v1\nkind: StatefulSet\nmetadata: {{name: web}}\nspec:\n  serviceName: web\n  replicas: {replicas}\n  \
         selector: {{matchLabels: {{app: web}}}}\n  template:\n    metadata: {{labels: {{app: web}}, annotations: {{version: {version}}}}}\n    \
         spec:\n      terminationGracePeriodSeconds: 1\n      containers:\n      - name: main\n        image: busybox\n        \
         command: [sh, -c, 'test -e /data/first || hostname > /data/first; exec sleep 100000']\n        \
         volumeMounts: [{{name: data, mountPath: /data}}]\n  volumeClaimTemplates:\n  - metadata: {{name: data}}\n    spec:\n      \
         accessModes: [ReadWriteOnce]\n      resources: {{requests: {{storage: 16Mi}}}}\n"
    )
}

fn rolled_out(machine: &Machine) -> Result<()> {
    machine.kubectl(&["rollout", "status", "statefulset/web", "--timeout=120s"]).map(|_| ())
}

/// Every pod finds the file that the first pod of its name wrote.
fn finds_its_data(machine: &Machine, replicas: u32) -> Result<()> {
    for ordinal in 0..replicas {
        let pod = format!("web-{ordinal}");
        machine.exec_until(&pod, "cat /data/first", |found| found.trim() == pod)?;
    }
    Ok(())
}

fn uids(machine: &Machine) -> Result<Vec<String>> {
    Ok(machine.all("pods")?.iter().map(|pod| text(pod, "/metadata/uid").to_owned()).collect())
}

#[test]
fn a_stateful_set_finds_its_data_whatever_is_done_to_it() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.apply(&stateful_set(3, "one"))?;
    rolled_out(&machine)?;
    finds_its_data(&machine, 3)?;
    machine.kubectl(&["scale", "statefulset/web", "--replicas=1"])?;
    machine.kubectl(&["wait", "pod/web-1", "--for=delete", "--timeout=60s"])?;
    machine.apply(&stateful_set(3, "two"))?;
    rolled_out(&machine)?;
    finds_its_data(&machine, 3)?;
    says(&machine.kubectl(&["rollout", "history", "statefulset/web"])?, "2")?;
    machine.kubectl(&["rollout", "undo", "statefulset/web"])?;
    rolled_out(&machine)?;
    let set = machine.get("statefulset/web")?;
    ensure!(text(&set, "/spec/template/metadata/annotations/version") == "one", "undone: {set}");
    says(&machine.kubectl(&["get", "statefulset", "web"])?, "3/3")?;

    // Deleted and made again, and killed in between.
    machine.delete("statefulset/web")?;
    machine.kill()?;
    machine.restart()?;
    machine.apply(&stateful_set(3, "one"))?;
    rolled_out(&machine)?;
    finds_its_data(&machine, 3)?;

    // Claims and template grow; the pods stay.
    let before = uids(&machine)?;
    let said = machine.says(&["resize", "statefulset/web", "32Mi"])?;
    says(&said, "statefulset/web: its template asks for 32Mi now; its pods were not stopped")?;
    for ordinal in 0..3 {
        // The volume; a machine that cannot grow a mounted filesystem does that when the pod starts again.
        let claim = machine.get(&format!("pvc/data-web-{ordinal}"))?;
        let volume = machine.get(&format!("pv/{}", text(&claim, "/spec/volumeName")))?;
        ensure!(text(&volume, "/spec/capacity/storage") == "32Mi", "{volume}");
    }
    let set = machine.get("statefulset/web")?;
    let asked = text(&set, "/spec/volumeClaimTemplates/0/spec/resources/requests/storage");
    ensure!(asked == "32Mi", "the template asks for {asked}");
    rolled_out(&machine)?;
    ensure!(uids(&machine)? == before, "pods were replaced");
    ensure!(machine.kubectl(&["get", "configmap", "berth-resize-web"]).is_err(), "the record is left over");
    says(&machine.refuses(&["resize", "statefulset/web", "8Mi"])?, "a volume never shrinks")?;
    says(&machine.refuses(&["resize", "statefulset/none", "8Mi"])?, "there is no StatefulSet none")?;

    // With the policy, the claims go with the set.
    let delete = r#"{"spec": {"persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"}}}"#;
    machine.kubectl(&["patch", "statefulset/web", "--type=merge", "-p", delete])?;
    machine.until("claims are owned by the set", || {
        let claims = machine.all("pvc")?;
        let owned =
            claims.iter().all(|claim| text(claim, "/metadata/ownerReferences/0/kind") == "StatefulSet");
        Ok(owned.then_some(()))
    })?;
    machine.delete("statefulset/web")?;
    until_empty(&machine)?;
    machine.finish()
}
