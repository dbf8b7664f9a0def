//! Mistakes of people, disks and files: each is told in a sentence, and what is corrected goes on by itself.

use std::fs;

use anyhow::{Context, Result, ensure};
use berth_e2e::{Disk, DiskType, up::Machine};

use crate::up::{claim, pod, says, text, together, until_empty};

fn claim_of(name: &str, class: &str, size: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  \
         storageClassName: '{class}'\n  accessModes: [ReadWriteOnce]\n  \
         resources: {{requests: {{storage: {size}}}}}\n"
    )
}

#[test]
fn what_is_missing_is_named_and_awaited() -> Result<()> {
    let machine = Machine::start()?;
    // A claim that is not there.
    machine.apply(&pod("early", "missing", "exec sleep 1000000"))?;
    let why = machine.event("Pod", "early", "FailedScheduling")?;
    says(&why, "persistentvolumeclaim \"missing\" not found")?;
    says(&machine.describe("pod/early")?, "persistentvolumeclaim \"missing\" not found")?;
    says(&machine.explain("pod/early")?, "Stuck: the pod names the claim missing")?;
    machine.apply(&claim("missing"))?;
    machine.ready("early")?;

    // A class that is not there.
    machine.apply(&together(&[
        claim_of("classless", "none", "16Mi"),
        pod("waits", "classless", "exec sleep 1000000"),
    ]))?;
    let why = machine.event("PersistentVolumeClaim", "classless", "ProvisioningFailed")?;
    says(&why, "storageclass.storage.k8s.io \"none\" not found")?;
    says(&machine.explain("pvc/classless")?, "Stuck: ")?;
    says(&machine.explain("pod/waits")?, "\"none\" not found")?;
    machine.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: none}\nprovisioner: local.berth.dev\n",
    )?;
    machine.ready("waits")?;

    // A class whose driver is not there.
    machine.apply(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: far}\nprovisioner: far.example\n",
    )?;
    machine.apply(&claim_of("far", "far", "16Mi"))?;
    let why = machine.event("PersistentVolumeClaim", "far", "ExternalProvisioning")?;
    says(&why, "far.example")?;
    let explained = machine.explain("pvc/far")?;
    says(&explained, "no provisioner is running for the driver far.example")?;
    says(&explained, "registered on no node")?;
    machine.finish()
}

#[test]
fn a_claim_that_nothing_can_satisfy_says_why() -> Result<()> {
    let machine = Machine::start()?;
    // Larger than any disk.
    machine.apply(&together(&[
        claim_of("huge", "berth-local", "1Pi"),
        pod("huge", "huge", "exec sleep 1000000"),
    ]))?;
    machine.until("it is told why", || {
        let reported = machine.describe("pvc/huge")? + &machine.describe("pod/huge")?;
        Ok((reported.contains("ProvisioningFailed") || reported.contains("FailedScheduling")).then_some(()))
    })?;
    let explained = machine.explain("pvc/huge")?;
    says(&explained, "Stuck: ")?;
    ensure!(text(&machine.get("pvc/huge")?, "/status/phase") == "Pending");

    // No class, and no volume of that kind.
    machine.apply(&claim_of("lonely", "", "1Gi"))?;
    let why = machine.event("PersistentVolumeClaim", "lonely", "FailedBinding")?;
    says(&why, "no persistent volumes available for this claim and no storage class is set")?;
    says(&machine.explain("pvc/lonely")?, "Stuck: ")?;

    // A volume that is another's.
    machine.apply(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: taken}\nspec:\n  storageClassName: ''\n  \
         capacity: {storage: 1Gi}\n  accessModes: [ReadWriteOnce]\n  hostPath: {path: /nowhere}\n  \
         claimRef: {name: somebody, namespace: default}\n---\n\
         apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: thief}\nspec:\n  storageClassName: ''\n  \
         volumeName: taken\n  accessModes: [ReadWriteOnce]\n  resources: {requests: {storage: 1Gi}}\n",
    )?;
    let why = machine.event("PersistentVolumeClaim", "thief", "FailedBinding")?;
    says(&why, "already bound to a different claim")?;

    // All of it goes when it is deleted.
    machine.kubectl(&["delete", "pod/huge", "pvc/huge", "pvc/lonely", "pvc/thief", "pv/taken"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_volume_deleted_behind_its_back_is_told_and_can_be_deleted() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&together(&[claim("data"), pod("one", "data", "exec sleep 1000000")]))?;
    machine.ready("one")?;
    machine.delete("pod/one")?;
    machine.until("it is taken away", || {
        Ok(berth_e2e::machine::loops_below(machine.data())?.is_empty().then_some(()))
    })?;
    for entry in fs::read_dir(machine.data().join("local/volumes"))? {
        fs::remove_dir_all(entry?.path())?;
    }
    machine.apply(&pod("two", "data", "exec sleep 1000000"))?;
    machine.until("it is told why", || {
        let reported = machine.describe("pod/two")?;
        Ok((reported.contains("FailedMount") || reported.contains("FailedAttachVolume")).then_some(()))
    })?;
    let explained = machine.explain("pod/two")?;
    says(&explained, "Stuck: ")?;
    machine.kubectl(&["delete", "pod/two", "pvc/data", "--timeout=45s"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_full_disk_is_told_and_everything_goes_on_when_there_is_room() -> Result<()> {
    let disk = Disk::new(DiskType::Ext4, 256)?;
    let machine = Machine::start_in(disk.mount_point().join("data"))?;
    machine.apply(&together(&[claim("before"), pod("before", "before", "exec sleep 1000000")]))?;
    machine.ready("before")?;
    let ballast = disk.mount_point().join("ballast");
    fs::create_dir(&ballast)?;
    let (_, error) = berth_e2e::content::fill(&ballast, 1024);
    ensure!(error.is_some(), "the disk does not get full");
    let rest = fs::File::create(ballast.join("rest"))?;
    while std::io::Write::write_all(&mut &rest, &[1; 4096]).is_ok() {}

    // What was there goes on; what is new is refused or told to wait, with a reason.
    machine.exec("before", "test -d /data")?;
    machine.kubectl(&["get", "pods"])?;
    let applied = machine.apply(&together(&[claim("during"), pod("during", "during", "exec sleep 1000000")]));
    match applied {
        Err(refused) => {
            let refused = format!("{refused:#}").to_lowercase();
            ensure!(refused.contains("no space") || refused.contains("full"), "{refused}");
        }
        Ok(()) => {
            machine.until("it is told why", || {
                let reported = machine.describe("pvc/during")? + &machine.describe("pod/during")?;
                Ok(["ProvisioningFailed", "FailedScheduling", "FailedMount"]
                    .iter()
                    .any(|reason| reported.contains(reason))
                    .then_some(()))
            })?;
        }
    }
    drop(rest);
    fs::remove_dir_all(&ballast)?;
    machine.apply(&together(&[claim("during"), pod("during", "during", "exec sleep 1000000")]))?;
    machine.ready("during")?;
    machine.kubectl(&["delete", "pod", "--all"])?;
    machine.kubectl(&["delete", "pvc", "--all"])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn the_second_in_a_data_directory_refuses() -> Result<()> {
    let machine = Machine::start()?;
    let refused = machine.refuses(&["up", "--listen", "127.0.0.1:0"])?;
    says(&refused, "already runs in")?;
    says(&refused, &format!("process {}", machine.pid()?))?;
    says(&refused, "berth down")?;
    // The first did not notice.
    machine.kubectl(&["get", "nodes"])?;

    // Its port is taken too, for one elsewhere.
    let running: serde_json::Value = serde_json::from_slice(&fs::read(machine.data().join("running.json"))?)?;
    let elsewhere = machine.dir().join("elsewhere").display().to_string();
    let address = text(&running, "/address").to_owned();
    let refused = machine.refuses(&["up", "--data-dir", &elsewhere, "--listen", &address])?;
    says(&refused, &address)?;
    says(&refused, "--listen 127.0.0.1:0")?;
    machine.finish()
}

#[test]
fn who_is_not_root_is_told_to_be() -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let machine = Machine::new()?;
    fs::set_permissions(machine.dir(), fs::Permissions::from_mode(0o755))?;
    let program = machine.dir().join("berth").display().to_string();
    for command in [&["cloud", "digitalocean"][..], &["nfs", "serve", "--export=/tmp"]] {
        let mut nobody = berth_e2e::machine::command("setpriv");
        nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups", &program]).args(command);
        let output = nobody.output().context("run as nobody")?;
        let (_, complaint) = berth_e2e::up::texts(&output);
        ensure!(!output.status.success());
        says(&complaint, "only root may")?;
    }
    Ok(())
}

#[test]
fn wrong_values_are_refused_with_a_sentence() -> Result<()> {
    let machine = Machine::new()?;
    let refused = machine.refuses(&["up", "--listen", "127.0.0.1:0", "--node-name", "Not A Name"])?;
    says(&refused, "Not A Name")?;
    says(&machine.refuses(&["up", "--listen", "nonsense"])?, "nonsense")?;
    let file = machine.dir().join("file").display().to_string();
    fs::write(&file, "not a directory")?;
    says(&machine.refuses(&["up", "--listen", "127.0.0.1:0", "--data-dir", &file])?, &file)?;
    Ok(())
}

#[test]
fn damaged_files_cost_only_what_they_held() -> Result<()> {
    let mut machine = Machine::start()?;
    machine.apply(&together(&[
        claim("data"),
        pod("one", "data", "echo life >> /data/lives; exec sleep 1000000"),
    ]))?;
    machine.ready("one")?;
    machine.kubectl(&["create", "configmap", "lost", "--from-literal=key=a-value-that-will-be-damaged"])?;
    machine.kubectl(&["create", "configmap", "kept", "--from-literal=key=value"])?;
    machine.kill()?;
    // A record of the store, who runs, the steps, and a container's description.
    let store = machine.data().join("apiserver/store");
    let mut damaged = 0;
    for entry in fs::read_dir(&store)? {
        let path = entry?.path();
        if !path.is_file() {
            continue;
        }
        let mut bytes = fs::read(&path)?;
        let needle = b"a-value-that-will-be-damaged";
        let places: Vec<usize> = (0..bytes.len().saturating_sub(needle.len()))
            .filter(|at| bytes[*at..].starts_with(needle))
            .collect();
        for place in &places {
            bytes[*place] = b'X';
        }
        damaged += places.len();
        if !places.is_empty() {
            fs::write(&path, &bytes)?;
        }
    }
    ensure!(damaged > 0, "the record was not found in {}", store.display());
    fs::write(machine.data().join("running.json"), "{")?;
    fs::write(machine.data().join("timeline.jsonl"), "\0\0 nonsense\n")?;
    machine.restart()?;
    machine.kubectl(&["get", "configmap", "kept"])?;
    machine.kubectl(&["get", "configmap", "lost"]).unwrap_err();
    machine.ready("one")?;
    ensure!(machine.exec("one", "cat /data/lives")? == "life\n", "the pod was started anew");
    machine.explain("pvc/data")?;
    machine.kubectl(&["delete", "pod/one", "pvc/data"])?;
    until_empty(&machine)?;
    machine.finish()
}
