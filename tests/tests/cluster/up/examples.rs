//! The examples as they are written, and the objects that come of them.

use anyhow::{Result, ensure};
use berth_e2e::up::{Machine, NODE};
use serde_json::{Value, json};

use crate::up::{says, text, until_empty};

const DRIVER: &str = "local.berth.dev";

/// Where the static example keeps its files on the host.
const HOST_PATH: &str = "/tmp/foo-pv";

/// Removes the static example's directory again, unless it was there before.
struct HostPath {
    was_there: bool,
}

impl Drop for HostPath {
    fn drop(&mut self) {
        if !self.was_there {
            let _ = std::fs::remove_dir_all(HOST_PATH);
        }
    }
}

#[test]
fn a_volume_and_a_claim_that_name_each_other_are_bound() -> Result<()> {
    let _host_path = HostPath { was_there: std::path::Path::new(HOST_PATH).exists() };
    let machine = Machine::start()?;
    machine.apply_example("static-binding.yaml")?;
    machine.wait("-n foo pod/volume-test", "condition=Ready")?;
    machine.exec("-n foo volume-test", "echo from the pod > /mnt/foo/file")?;
    ensure!(std::fs::read_to_string(format!("{HOST_PATH}/file"))? == "from the pod\n");

    let (claim, volume) = (machine.get("-n foo pvc/foo-pvc")?, machine.get("pv/foo-pv")?);
    let annotations = &claim["metadata"]["annotations"];
    ensure!(annotations["pv.kubernetes.io/bind-completed"] == "yes", "{annotations}");
    // The claim named the volume itself.
    ensure!(annotations.get("pv.kubernetes.io/bound-by-controller").is_none(), "{annotations}");
    ensure!(claim["metadata"]["finalizers"] == json!(["kubernetes.io/pvc-protection"]));
    ensure!(claim["status"]["phase"] == "Bound" && claim["status"]["capacity"]["storage"] == "1Gi");
    ensure!(volume["metadata"]["finalizers"] == json!(["kubernetes.io/pv-protection"]));
    ensure!(volume["spec"]["claimRef"]["uid"] == claim["metadata"]["uid"], "{volume}");
    ensure!(volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain");
    for object in [&claim, &volume] {
        let annotations = &object["metadata"]["annotations"];
        let applied = text(annotations, "/kubectl.kubernetes.io~1last-applied-configuration");
        ensure!(!applied.is_empty(), "kubectl's own annotation was lost: {annotations}");
    }

    // What is applied again changes nothing.
    machine.apply_example("static-binding.yaml")?;
    for (object, what) in [(&claim, "-n foo pvc/foo-pvc"), (&volume, "pv/foo-pv")] {
        let now = machine.get(what)?;
        ensure!(now["metadata"]["resourceVersion"] == object["metadata"]["resourceVersion"], "{now}");
    }

    // The volume stays for as long as its claim does, and the claim for as long as its pod does.
    machine.kubectl(&["delete", "pv", "foo-pv", "--wait=false"])?;
    machine.kubectl(&["-n", "foo", "delete", "pvc", "foo-pvc", "--wait=false"])?;
    ensure!(text(&machine.get("-n foo pvc/foo-pvc")?, "/metadata/deletionTimestamp").len() > 10);
    machine.exec("-n foo volume-test", "cat /mnt/foo/file")?;
    machine.delete("-n foo pod/volume-test")?;
    machine.wait("-n foo pvc/foo-pvc", "delete")?;
    machine.wait("pv/foo-pv", "delete")?;
    machine.delete("namespace/foo")?;
    // Retain: nobody deletes the data.
    ensure!(std::fs::read_to_string(format!("{HOST_PATH}/file"))? == "from the pod\n");
    machine.finish()
}

#[test]
fn projected_files_follow_their_objects() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply_example("projected.yaml")?;
    machine.ready("volume-test")?;
    let read = |path: &str| machine.exec("volume-test", &format!("cat /projected-volume/{path}"));
    ensure!(read("my-group/my-username")? == "admin");
    ensure!(read("my-group/my-config")? == "level=debug");
    ensure!(read("labels")? == "app=\"volume-test\"");
    ensure!(read("cpu_limit")? == "1");
    let refused = machine.exec("volume-test", "echo x > /projected-volume/labels").unwrap_err();
    says(&format!("{refused:#}"), "Read-only")?;

    machine.kubectl(&["label", "pod", "volume-test", "tier=front"])?;
    machine.kubectl(&["patch", "configmap", "myconfigmap", "-p", r#"{"data":{"config":"level=info"}}"#])?;
    machine.kubectl(&["patch", "secret", "mysecret", "-p", r#"{"stringData":{"username":"root"}}"#])?;
    let begun = std::time::Instant::now();
    for (path, new) in [
        ("labels", "app=\"volume-test\"\ntier=\"front\""),
        ("my-group/my-config", "level=info"),
        ("my-group/my-username", "root"),
    ] {
        machine.until(&format!("{path} is {new}"), || Ok((read(path)? == new).then_some(())))?;
    }
    // Within a second when the machine is idle; tests share it. Who looks only now and then looks once a minute.
    ensure!(begun.elapsed().as_secs() < 45, "the files changed after {:?}", begun.elapsed());
    machine.finish()
}

#[test]
fn a_claim_of_a_class_is_provisioned_attached_and_mounted() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply(&format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: do-block-storage}}\n\
         provisioner: {DRIVER}\n"
    ))?;
    machine.apply_example("block-claim.yaml")?;
    machine.ready("my-csi-app")?;
    machine.exec("my-csi-app", "echo kept > /data/file")?;

    let claim = machine.get("pvc/csi-pvc")?;
    check_provisioned(&machine, &claim, "5Gi")?;
    // This class does not wait for a pod, so none chose the node.
    let annotations = &claim["metadata"]["annotations"];
    ensure!(annotations.get("volume.kubernetes.io/selected-node").is_none(), "{annotations}");
    check_node(&machine)?;

    // The data outlives the pod.
    machine.delete("pod/my-csi-app")?;
    machine
        .until("the volume is detached", || Ok(machine.all("volumeattachments")?.is_empty().then_some(())))?;
    machine.apply_example("block-claim.yaml")?;
    machine.ready("my-csi-app")?;
    ensure!(machine.exec("my-csi-app", "cat /data/file")? == "kept\n");
    machine.kubectl(&["delete", "-f", &example("block-claim.yaml")])?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn a_class_that_waits_gives_the_volume_to_the_pods_node() -> Result<()> {
    let machine = Machine::start()?;
    machine.apply_example("local.yaml")?;
    machine.ready("writer")?;
    machine.exec_until("writer", "cat /data/log", |log| log.lines().count() == 1)?;
    let claim = machine.get("pvc/data")?;
    check_provisioned(&machine, &claim, "1Gi")?;
    let annotations = &claim["metadata"]["annotations"];
    ensure!(annotations["volume.kubernetes.io/selected-node"] == NODE, "{annotations}");

    let reported = machine.describe("pod/writer")?;
    for reason in ["Scheduled", "SuccessfulAttachVolume", "not pulled", "Created", "Started"] {
        says(&reported, reason)?;
    }
    let reported = machine.describe("pvc/data")?;
    for reason in ["WaitForFirstConsumer", "Provisioning", "ProvisioningSucceeded"] {
        says(&reported, reason)?;
    }
    let explained = machine.explain("pvc/data")?;
    for step in ["CREATED", "NODE_READY", "VOL_READY", "PUBLISHED", "No problems found"] {
        says(&explained, step)?;
    }
    machine.kubectl(&["delete", "-f", &example("local.yaml")])?;
    until_empty(&machine)?;
    machine.finish()
}

fn example(name: &str) -> String {
    format!("{}/../examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Checks a dynamically provisioned claim, its volume and its attachment, field by field.
fn check_provisioned(machine: &Machine, claim: &Value, size: &str) -> Result<()> {
    let annotations = &claim["metadata"]["annotations"];
    for (name, value) in [
        ("pv.kubernetes.io/bind-completed", "yes"),
        ("pv.kubernetes.io/bound-by-controller", "yes"),
        ("volume.beta.kubernetes.io/storage-provisioner", DRIVER),
        ("volume.kubernetes.io/storage-provisioner", DRIVER),
    ] {
        ensure!(annotations[name] == value, "{name}: {annotations}");
    }
    ensure!(claim["metadata"]["finalizers"] == json!(["kubernetes.io/pvc-protection"]));
    ensure!(claim["status"]["capacity"]["storage"] == size);

    let name = text(claim, "/spec/volumeName");
    ensure!(name == format!("pvc-{}", text(claim, "/metadata/uid")));
    let volume = machine.get(&format!("pv/{name}"))?;
    let (metadata, spec) = (&volume["metadata"], &volume["spec"]);
    ensure!(metadata["annotations"]["pv.kubernetes.io/provisioned-by"] == DRIVER, "{metadata}");
    for finalizer in [
        "kubernetes.io/pv-protection",
        "external-provisioner.volume.kubernetes.io/finalizer",
        "external-attacher/local-berth-dev",
    ] {
        let all = metadata["finalizers"].as_array().cloned().unwrap_or_default();
        ensure!(all.contains(&finalizer.into()), "{finalizer} is missing: {metadata}");
    }
    ensure!(spec["claimRef"]["uid"] == claim["metadata"]["uid"], "{spec}");
    ensure!(spec["persistentVolumeReclaimPolicy"] == "Delete" && spec["capacity"]["storage"] == size);
    ensure!(spec["csi"]["driver"] == DRIVER, "{spec}");
    let attributes = &spec["csi"]["volumeAttributes"];
    let identity = text(attributes, "/storage.kubernetes.io~1csiProvisionerIdentity");
    ensure!(identity.ends_with(DRIVER), "{attributes}");
    let handle = text(&volume, "/spec/csi/volumeHandle");
    ensure!(handle.starts_with("vol-"), "{spec}");

    let attachments = machine.all("volumeattachments")?;
    let attachment = attachments.iter().find(|one| text(one, "/spec/source/persistentVolumeName") == name);
    let attachment = attachment.ok_or_else(|| anyhow::anyhow!("{name} is not attached: {attachments:?}"))?;
    let expected = format!("csi-{}", sha256(&format!("{handle}{DRIVER}{NODE}"))?);
    ensure!(text(attachment, "/metadata/name") == expected, "{attachment}");
    ensure!(attachment["status"]["attached"] == true && attachment["spec"]["nodeName"] == NODE);
    let of_attacher = attachment["metadata"]["finalizers"] == json!(["external-attacher/local-berth-dev"]);
    ensure!(of_attacher, "{attachment}");
    let in_use = format!("kubernetes.io/csi/{DRIVER}^{handle}");
    let node = machine.get(&format!("node/{NODE}"))?;
    ensure!(
        node["status"]["volumesInUse"].as_array().is_some_and(|all| all.contains(&in_use.clone().into()))
    );
    let attached = node["status"]["volumesAttached"].as_array().cloned().unwrap_or_default();
    ensure!(attached.iter().any(|one| one["name"] == in_use), "{attached:?}");
    Ok(())
}

fn check_node(machine: &Machine) -> Result<()> {
    let node = machine.get(&format!("node/{NODE}"))?;
    let annotations = &node["metadata"]["annotations"];
    let ids = text(annotations, "/csi.volume.kubernetes.io~1nodeid");
    ensure!(serde_json::from_str::<Value>(ids)? == json!({ DRIVER: NODE }), "{annotations}");
    let managed = &annotations["volumes.kubernetes.io/controller-managed-attach-detach"];
    ensure!(managed == "true", "{annotations}");
    ensure!(node["metadata"]["labels"]["topology.berth.dev/node"] == NODE);
    let drivers = machine.get(&format!("csinode/{NODE}"))?["spec"]["drivers"].take();
    let expected = json!([{"name": DRIVER, "nodeID": NODE, "topologyKeys": ["topology.berth.dev/node"]}]);
    ensure!(drivers == expected, "{drivers}");
    Ok(())
}

/// By the machine's own tool, so that the name is not computed by the code under test.
fn sha256(text: &str) -> Result<String> {
    let sum = berth_e2e::machine::run("sh", &["-c", &format!("printf %s '{text}' | sha256sum")])?;
    Ok(sum.split(' ').next().unwrap_or_default().to_owned())
}
