//! Breaks a cluster on purpose, one trouble at a time, and asks the doctor: the right cause each time, nothing on a healthy one, and
//! repairs that change only what they may.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::collections::BTreeSet;
use std::time::Duration;

use berth_kube::Cluster;
use berth_testkit::TestCluster;
use berth_ui::{ClusterState, Finding, Severity, Trouble, Usage, diagnose, fix};
use jiff::SignedDuration;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// A cluster that is broken step by step, over HTTP as kubectl would.
struct Patient {
    cluster: TestCluster,
}

fn path(kind: &str) -> (&'static str, &'static str, bool) {
    let storage = "/apis/storage.k8s.io/v1";
    let snapshots = "/apis/snapshot.storage.k8s.io/v1";
    match kind {
        "Pod" => ("/api/v1", "pods", true),
        "PersistentVolumeClaim" => ("/api/v1", "persistentvolumeclaims", true),
        "ServiceAccount" => ("/api/v1", "serviceaccounts", true),
        "Event" => ("/api/v1", "events", true),
        "PersistentVolume" => ("/api/v1", "persistentvolumes", false),
        "Node" => ("/api/v1", "nodes", false),
        "StorageClass" => (storage, "storageclasses", false),
        "VolumeAttributesClass" => (storage, "volumeattributesclasses", false),
        "CSIDriver" => (storage, "csidrivers", false),
        "CSINode" => (storage, "csinodes", false),
        "CSIStorageCapacity" => (storage, "csistoragecapacities", true),
        "VolumeAttachment" => (storage, "volumeattachments", false),
        "VolumeSnapshot" => (snapshots, "volumesnapshots", true),
        "VolumeSnapshotContent" => (snapshots, "volumesnapshotcontents", false),
        "VolumeSnapshotClass" => (snapshots, "volumesnapshotclasses", false),
        "CustomResourceDefinition" => ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions", false),
        other => panic!("where is a {other}?"),
    }
}

impl Patient {
    async fn healthy() -> Self {
        let patient = Self { cluster: TestCluster::embedded().await };
        for definition in berth_sidecars::snapshots::definitions() {
            patient.create(definition).await;
        }
        patient.create_if_absent(json!({"kind": "ServiceAccount", "metadata": {"name": "default"}})).await;
        for object in healthy() {
            patient.plant(object).await;
        }
        patient
    }

    fn url(kind: &str, name: &str, subresource: &str) -> String {
        let (group, plural, namespaced) = path(kind);
        let namespace = if namespaced { "/namespaces/default" } else { "" };
        let name = if name.is_empty() { String::new() } else { format!("/{name}") };
        format!("{group}{namespace}/{plural}{name}{subresource}")
    }

    async fn request(&self, method: &str, url: &str, kind: &str, body: &Value) -> Result<Value, kube::Error> {
        let request = http::Request::builder().method(method).uri(url).header("content-type", kind);
        let request = request.body(serde_json::to_vec(body).unwrap()).unwrap();
        self.cluster.client.request(request).await
    }

    async fn create(&self, mut object: Value) -> Value {
        let kind = object["kind"].as_str().unwrap().to_owned();
        let (group, _, namespaced) = path(&kind);
        let version = group.trim_start_matches("/apis/").trim_start_matches("/api/");
        object["apiVersion"] = version.into();
        if namespaced {
            object["metadata"]["namespace"] = "default".into();
        }
        let url = Self::url(&kind, "", "");
        let created = self.request("POST", &url, "application/json", &object).await;
        created.unwrap_or_else(|error| panic!("create {object:#}: {error}"))
    }

    async fn create_if_absent(&self, object: Value) {
        let (kind, name) = (object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        if self.request("GET", &Self::url(kind, name, ""), "application/json", &json!({})).await.is_err() {
            self.create(object).await;
        }
    }

    async fn get(&self, kind: &str, name: &str) -> Option<Value> {
        self.request("GET", &Self::url(kind, name, ""), "application/json", &json!({})).await.ok()
    }

    async fn merge(&self, kind: &str, name: &str, subresource: &str, change: &Value) {
        let url = Self::url(kind, name, subresource);
        let patched = self.request("PATCH", &url, "application/merge-patch+json", change).await;
        patched.unwrap_or_else(|error| panic!("change {kind} {name} by {change:#}: {error}"));
    }

    /// Creates an object with its status; or does what one of the special kinds says.
    async fn plant(&self, mut object: Value) {
        let of = |object: &Value| {
            let of = &object["of"];
            (of[0].as_str().unwrap().to_owned(), of[1].as_str().unwrap().to_owned())
        };
        match object["kind"].as_str().unwrap() {
            "Change" => {
                let (kind, name) = of(&object);
                self.merge(&kind, &name, object["at"].as_str().unwrap_or_default(), &object["by"]).await;
            }
            "Delete" => {
                let (kind, name) = of(&object);
                let url = Self::url(&kind, &name, "");
                self.request("DELETE", &url, "application/json", &json!({})).await.unwrap();
            }
            "Said" => self.say(&object).await,
            kind => {
                let (kind, status) = (kind.to_owned(), object.as_object_mut().unwrap().remove("status"));
                let name = object["metadata"]["name"].as_str().unwrap().to_owned();
                self.create(object).await;
                if let Some(status) = status {
                    self.merge(&kind, &name, "/status", &json!({"status": status})).await;
                }
            }
        }
    }

    /// Records an event about an object.
    async fn say(&self, event: &Value) {
        let (kind, name) = (event["of"][0].as_str().unwrap(), event["of"][1].as_str().unwrap());
        let about = self.get(kind, name).await.unwrap();
        let uid = about["metadata"]["uid"].clone();
        let reason = event["reason"].as_str().unwrap();
        self.create(json!({
            "kind": "Event",
            "metadata": {"name": format!("{name}.{}", reason.to_lowercase())},
            "involvedObject": {"kind": kind, "name": name, "namespace": about["metadata"]["namespace"].as_str().unwrap_or("default"), "uid": uid},
            "reason": reason, "message": event["message"], "type": "Warning",
            "source": {"component": "test"}, "count": 3,
            "firstTimestamp": jiff::Timestamp::now().to_string(), "lastTimestamp": jiff::Timestamp::now().to_string(),
        }))
        .await;
    }

    fn client(&self) -> Cluster {
        Cluster::new(self.cluster.client.clone(), CancellationToken::new())
    }

    /// What the doctor says after a while.
    async fn findings(&self, after: SignedDuration) -> Vec<Finding> {
        let state = ClusterState::read(&self.client(), None).await.unwrap();
        diagnose(&ClusterState { now: state.now + after, ..state })
    }
}

fn node(name: &str) -> [Value; 2] {
    [
        json!({"kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
               "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "well", "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}}),
        json!({"kind": "CSINode", "metadata": {"name": name},
               "spec": {"drivers": [{"name": "a.csi", "nodeID": name, "topologyKeys": [], "allocatable": {"count": 4}}]}}),
    ]
}

fn claim(name: &str, class: &str) -> Value {
    json!({"kind": "PersistentVolumeClaim", "metadata": {"name": name},
           "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}})
}

fn bound(name: &str, volume: &str, class: &str) -> Value {
    let mut claim = claim(name, class);
    claim["spec"]["volumeName"] = volume.into();
    claim["metadata"]["annotations"] = json!({"pv.kubernetes.io/bind-completed": "yes"});
    claim["status"] =
        json!({"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}});
    claim
}

fn volume(name: &str, of: &str, phase: &str) -> Value {
    let mut volume = json!({"kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": {"pv.kubernetes.io/provisioned-by": "a.csi"}},
        "spec": {"storageClassName": "fast", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"},
                 "persistentVolumeReclaimPolicy": "Delete", "csi": {"driver": "a.csi", "volumeHandle": format!("handle-{name}")}},
        "status": {"phase": phase}});
    if !of.is_empty() {
        volume["spec"]["claimRef"] =
            json!({"kind": "PersistentVolumeClaim", "namespace": "default", "name": of});
    }
    volume
}

fn pod(name: &str, claim: &str, node: &str, phase: &str) -> Value {
    let mut pod = json!({"kind": "Pod", "metadata": {"name": name},
        "spec": {"containers": [{"name": "c", "image": "i"}], "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]},
        "status": {"phase": phase}});
    if !node.is_empty() {
        pod["spec"]["nodeName"] = node.into();
    }
    pod
}

fn attachment(name: &str, volume: &str, node: &str, attached: bool) -> Value {
    json!({"kind": "VolumeAttachment", "metadata": {"name": name, "finalizers": ["external-attacher/a-csi"]},
           "spec": {"attacher": "a.csi", "nodeName": node, "source": {"persistentVolumeName": volume}},
           "status": {"attached": attached}})
}

fn snapshot(name: &str, claim: &str, class: Option<&str>) -> Value {
    json!({"kind": "VolumeSnapshot", "metadata": {"name": name},
           "spec": {"source": {"persistentVolumeClaimName": claim}, "volumeSnapshotClassName": class}})
}

fn content(name: &str, snapshot: &str, uid: &str, policy: &str) -> Value {
    json!({"kind": "VolumeSnapshotContent", "metadata": {"name": name},
           "spec": {"deletionPolicy": policy, "driver": "a.csi", "source": {"volumeHandle": "handle-pv"}, "volumeSnapshotClassName": "snap",
                    "volumeSnapshotRef": {"kind": "VolumeSnapshot", "namespace": "default", "name": snapshot, "uid": uid}}})
}

fn said(kind: &str, name: &str, reason: &str, message: &str) -> Value {
    json!({"kind": "Said", "of": [kind, name], "reason": reason, "message": message})
}

fn change(kind: &str, name: &str, by: &Value) -> Value {
    json!({"kind": "Change", "of": [kind, name], "by": by})
}

fn change_status(kind: &str, name: &str, status: &Value) -> Value {
    json!({"kind": "Change", "of": [kind, name], "at": "/status", "by": {"status": status}})
}

fn delete(kind: &str, name: &str) -> Value {
    json!({"kind": "Delete", "of": [kind, name]})
}

fn healthy() -> Vec<Value> {
    let mut objects: Vec<Value> = ["n1", "n2", "n3"].into_iter().flat_map(node).collect();
    objects.extend([
        json!({"kind": "CSIDriver", "metadata": {"name": "a.csi"}, "spec": {"attachRequired": true}}),
        json!({"kind": "StorageClass", "metadata": {"name": "fast", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
               "provisioner": "a.csi", "allowVolumeExpansion": true, "volumeBindingMode": "Immediate"}),
        json!({"kind": "StorageClass", "metadata": {"name": "late"}, "provisioner": "a.csi", "volumeBindingMode": "WaitForFirstConsumer"}),
        json!({"kind": "VolumeSnapshotClass", "metadata": {"name": "snap"}, "driver": "a.csi", "deletionPolicy": "Delete"}),
        volume("pv", "data", "Bound"),
        bound("data", "pv", "fast"),
        pod("web", "data", "n1", "Running"),
        attachment("va", "pv", "n1", true),
        // A claim whose class waits for a pod is as it should be.
        claim("waits", "late"),
        json!({"kind": "Pod", "metadata": {"name": "driver-n1", "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "driver", "uid": "d"}]},
               "spec": {"nodeName": "n1", "containers": [{"name": "r", "image": "registry.k8s.io/sig-storage/csi-node-driver-registrar:v2.13.0"}]}, "status": {"phase": "Running"}}),
    ]);
    let mut ready = snapshot("s", "data", Some("snap"));
    ready["status"] = json!({"readyToUse": true, "boundVolumeSnapshotContentName": "c"});
    objects.push(ready);
    objects
}

/// What is planted, and what must be found: the trouble, the object, and what its cause must say.
type Row = (&'static str, Vec<Value>, Trouble, &'static str, &'static str);

#[expect(clippy::too_many_lines, reason = "a table: one row per trouble")]
fn claims() -> Vec<Row> {
    let restored = |source: Value| {
        let mut claim = claim("c", "fast");
        claim["spec"]["dataSource"] = source;
        claim
    };
    let mut held = bound("held", "pv-held", "fast");
    held["metadata"]["finalizers"] = json!(["kubernetes.io/pvc-protection"]);
    let mut protected = bound("p", "pv-p", "fast");
    protected["metadata"]["finalizers"] = json!(["example.com/mine"]);
    let mut taken_up = claim("c", "fast");
    taken_up["metadata"]["finalizers"] = json!(["creating.berth.dev/a.csi"]);
    let mut named = claim("c", "fast");
    named["spec"]["volumeName"] = "nowhere".into();
    let mut lost = bound("c", "nowhere", "fast");
    lost["status"] = json!({"phase": "Lost"});
    vec![
        (
            "a class that does not exist",
            vec![claim("c", "gone")],
            Trouble::ClassMissing,
            "PersistentVolumeClaim default/c",
            "names the class gone",
        ),
        (
            "no class and no volume",
            vec![claim("c", "")],
            Trouble::NoVolumeFits,
            "PersistentVolumeClaim default/c",
            "no available volume fits",
        ),
        (
            "nobody provisions",
            vec![claim("c", "fast")],
            Trouble::NoProvisioner,
            "PersistentVolumeClaim default/c",
            "no provisioner is running for the driver a.csi",
        ),
        (
            "the provisioner is silent",
            vec![claim("c", "fast"), said("PersistentVolumeClaim", "c", "Provisioning", "began")],
            Trouble::ProvisioningSilent,
            "PersistentVolumeClaim default/c",
            "neither a volume nor a failure",
        ),
        (
            "the provisioner is silent, and its event is gone",
            vec![taken_up],
            Trouble::ProvisioningSilent,
            "PersistentVolumeClaim default/c",
            "neither a volume nor a failure",
        ),
        (
            "the driver refuses",
            vec![
                claim("c", "fast"),
                said("PersistentVolumeClaim", "c", "ProvisioningFailed", "the disk is full"),
            ],
            Trouble::ProvisioningFailed,
            "PersistentVolumeClaim default/c",
            "the disk is full",
        ),
        (
            "a volume that is named and not there",
            vec![named],
            Trouble::NamedVolumeUnusable,
            "PersistentVolumeClaim default/c",
            "there is none of that name",
        ),
        (
            "a snapshot that is not there",
            vec![restored(
                json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "gone"}),
            )],
            Trouble::DataSourceUnusable,
            "PersistentVolumeClaim default/c",
            "the snapshot default/gone, and there is none",
        ),
        (
            "a clone of a claim that is not bound",
            vec![restored(json!({"kind": "PersistentVolumeClaim", "name": "waits"}))],
            Trouble::DataSourceUnusable,
            "PersistentVolumeClaim default/c",
            "which is Pending",
        ),
        ("a lost volume", vec![lost], Trouble::ClaimLost, "PersistentVolumeClaim default/c", "is gone"),
        (
            "a claim in deletion that a pod uses",
            vec![
                volume("pv-held", "held", "Bound"),
                held,
                pod("user", "held", "n1", "Running"),
                delete("PersistentVolumeClaim", "held"),
            ],
            Trouble::ClaimInUse,
            "PersistentVolumeClaim default/held",
            "still used by user",
        ),
        (
            "a finalizer that nobody removes",
            vec![volume("pv-p", "p", "Bound"), protected, delete("PersistentVolumeClaim", "p")],
            Trouble::ClaimFinalizer,
            "PersistentVolumeClaim default/p",
            "example.com/mine",
        ),
        (
            "an expansion that fails",
            vec![
                change(
                    "PersistentVolumeClaim",
                    "data",
                    &json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}),
                ),
                said("PersistentVolumeClaim", "data", "VolumeResizeFailed", "no room"),
            ],
            Trouble::ResizeFailed,
            "PersistentVolumeClaim default/data",
            "no room",
        ),
        (
            "nobody expands",
            vec![change(
                "PersistentVolumeClaim",
                "data",
                &json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}),
            )],
            Trouble::NoResizer,
            "PersistentVolumeClaim default/data",
            "no resizer is running",
        ),
        (
            "a size that waits for a node",
            vec![
                change(
                    "PersistentVolumeClaim",
                    "data",
                    &json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}),
                ),
                change_status(
                    "PersistentVolumeClaim",
                    "data",
                    &json!({"conditions": [{"type": "FileSystemResizePending", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}),
                ),
            ],
            Trouble::ResizeWaitsForNode,
            "PersistentVolumeClaim default/data",
            "the node n1",
        ),
        (
            "a modification that the driver refuses",
            vec![
                json!({"kind": "VolumeAttributesClass", "metadata": {"name": "gold"}, "driverName": "a.csi", "parameters": {"tier": "gold"}}),
                change(
                    "PersistentVolumeClaim",
                    "data",
                    &json!({"spec": {"volumeAttributesClassName": "gold"}}),
                ),
                change_status(
                    "PersistentVolumeClaim",
                    "data",
                    &json!({"modifyVolumeStatus": {"targetVolumeAttributesClassName": "gold", "status": "Infeasible"}}),
                ),
                said("PersistentVolumeClaim", "data", "VolumeModifyFailed", "there is no tier gold"),
            ],
            Trouble::ModifyFailed,
            "PersistentVolumeClaim default/data",
            "there is no tier gold",
        ),
        (
            "no class, and none is the default",
            vec![
                change(
                    "StorageClass",
                    "fast",
                    &json!({"metadata": {"annotations": {"storageclass.kubernetes.io/is-default-class": "false"}}}),
                ),
                json!({"kind": "PersistentVolumeClaim", "metadata": {"name": "c"},
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}),
            ],
            Trouble::NoClass,
            "PersistentVolumeClaim default/c",
            "default",
        ),
    ]
}

fn pods() -> Vec<Row> {
    let unschedulable = |message: &str| {
        let mut pod = pod("p", "data", "", "Pending");
        pod["status"]["conditions"] = json!([{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]);
        pod
    };
    let mut ephemeral = pod("p", "", "n1", "Pending");
    let template =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    ephemeral["spec"]["volumes"] = json!([{"name": "v", "ephemeral": {"volumeClaimTemplate": template}}]);
    vec![
        (
            "a claim that is not there",
            vec![pod("p", "nowhere", "n1", "Pending")],
            Trouble::PodClaimMissing,
            "Pod default/p",
            "names the claim nowhere",
        ),
        (
            "no node because of the volume",
            vec![unschedulable("0/3 nodes are available: 3 node(s) had volume node affinity conflict.")],
            Trouble::PodUnschedulable,
            "Pod default/p",
            "volume node affinity conflict",
        ),
        (
            "a mount that fails",
            vec![pod("p", "data", "n1", "Pending"), said("Pod", "p", "FailedMount", "no such device")],
            Trouble::MountFailed,
            "Pod default/p",
            "no such device",
        ),
        (
            "an attach that fails",
            vec![pod("p", "data", "n1", "Pending"), said("Pod", "p", "FailedAttachVolume", "quota exceeded")],
            Trouble::AttachFailed,
            "Pod default/p",
            "quota exceeded",
        ),
        (
            "a volume that another node has",
            vec![
                pod("p", "data", "n2", "Pending"),
                said("Pod", "p", "FailedAttachVolume", "Multi-Attach error for volume"),
            ],
            Trouble::MultiAttach,
            "Pod default/p",
            "the pod web uses it on the node n1",
        ),
        (
            "a driver that is not on the node",
            vec![
                json!({"kind": "Node", "metadata": {"name": "n4"}, "spec": {"unschedulable": true}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
                pod("p", "data", "n4", "Pending"),
            ],
            Trouble::DriverNotOnNode,
            "Pod default/p",
            "a.csi is not registered on the node n4",
        ),
        (
            "a pod on a node that is gone",
            vec![pod("p", "data", "gone", "Running"), delete("Pod", "p")],
            Trouble::PodStuckOnNode,
            "Pod default/p",
            "which does not exist",
        ),
        (
            "a claim that somebody else made",
            vec![volume("pv-v", "p-v", "Bound"), bound("p-v", "pv-v", "fast"), ephemeral],
            Trouble::PodClaimForeign,
            "Pod default/p",
            "the claim p-v was not made for this pod",
        ),
    ]
}

fn volumes() -> Vec<Row> {
    let mut kept = volume("v", "left", "Released");
    kept["spec"]["persistentVolumeReclaimPolicy"] = "Retain".into();
    let mut local = volume("v", "", "Available");
    local["spec"]["nodeAffinity"] = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n9"]}]}]}});
    let mut finalized = volume("v", "", "Available");
    finalized["metadata"]["finalizers"] = json!(["external-provisioner.volume.kubernetes.io/finalizer"]);
    let mut twin = volume("twin", "", "Available");
    twin["spec"]["csi"]["volumeHandle"] = "handle-pv".into();
    vec![
        ("released and kept", vec![kept], Trouble::VolumeReleased, "PersistentVolume v", "policy is Retain"),
        (
            "cannot be deleted",
            vec![
                volume("v", "left", "Failed"),
                said("PersistentVolume", "v", "VolumeFailedDelete", "volume is busy"),
            ],
            Trouble::VolumeDeleteFailed,
            "PersistentVolume v",
            "volume is busy",
        ),
        (
            "nobody deletes",
            vec![volume("v", "left", "Released")],
            Trouble::VolumeNotDeleted,
            "PersistentVolume v",
            "the provisioner of a.csi does not do it",
        ),
        (
            "in deletion while bound",
            vec![
                change(
                    "PersistentVolume",
                    "pv",
                    &json!({"metadata": {"finalizers": ["kubernetes.io/pv-protection"]}}),
                ),
                delete("PersistentVolume", "pv"),
            ],
            Trouble::VolumeInUse,
            "PersistentVolume pv",
            "still bound to the claim default/data",
        ),
        (
            "a finalizer of the provisioner",
            vec![finalized, delete("PersistentVolume", "v")],
            Trouble::VolumeFinalizer,
            "PersistentVolume v",
            "external-provisioner",
        ),
        (
            "only on a node that is gone",
            vec![local],
            Trouble::VolumeNodeGone,
            "PersistentVolume v",
            "nodes that do not exist",
        ),
        (
            "twice the same storage",
            vec![twin],
            Trouble::VolumeTwice,
            "PersistentVolume pv",
            "pv and twin are the same storage",
        ),
    ]
}

fn attachments() -> Vec<Row> {
    let mut refused = attachment("a", "pv-a", "n2", false);
    refused["status"]["attachError"] =
        json!({"message": "the disk is elsewhere", "time": "2026-01-01T00:00:00Z"});
    let mut stays = attachment("a", "pv-a", "n2", true);
    stays["status"]["detachError"] = json!({"message": "the disk is in use", "time": "2026-01-01T00:00:00Z"});
    let pv = || volume("pv-a", "", "Available");
    vec![
        (
            "of a node that is gone",
            vec![pv(), attachment("a", "pv-a", "gone", true)],
            Trouble::AttachmentNodeGone,
            "VolumeAttachment a",
            "the node gone does not exist",
        ),
        (
            "of a volume that is gone",
            vec![attachment("a", "nowhere", "n2", true)],
            Trouble::AttachmentVolumeGone,
            "VolumeAttachment a",
            "the volume nowhere does not exist",
        ),
        (
            "that the driver refuses",
            vec![pv(), refused],
            Trouble::AttachmentFailed,
            "VolumeAttachment a",
            "the disk is elsewhere",
        ),
        (
            "that the driver does not undo",
            vec![pv(), stays, delete("VolumeAttachment", "a")],
            Trouble::DetachmentFailed,
            "VolumeAttachment a",
            "the disk is in use",
        ),
        (
            "that nobody makes",
            vec![pv(), attachment("a", "pv-a", "n2", false)],
            Trouble::NoAttacher,
            "VolumeAttachment a",
            "no attacher is running",
        ),
    ]
}

fn snapshots() -> Vec<Row> {
    let mut failed = snapshot("x", "data", Some("snap"));
    failed["status"] = json!({"readyToUse": false, "error": {"message": "the storage is full"}});
    let mut finalized = snapshot("x", "data", Some("snap"));
    finalized["metadata"]["finalizers"] =
        json!(["snapshot.storage.kubernetes.io/volumesnapshot-bound-protection"]);
    finalized["status"] = json!({"readyToUse": true});
    let mut waiting = snapshot("x", "data", Some("snap"));
    waiting["status"] = json!({"boundVolumeSnapshotContentName": "content-x"});
    vec![
        (
            "of a claim that is not there",
            vec![snapshot("x", "nowhere", Some("snap"))],
            Trouble::SnapshotSourceMissing,
            "VolumeSnapshot default/x",
            "the claim nowhere",
        ),
        (
            "of a class that is not there",
            vec![snapshot("x", "data", Some("gone"))],
            Trouble::SnapshotClassMissing,
            "VolumeSnapshot default/x",
            "names the class gone",
        ),
        (
            "without a class, and no default",
            vec![snapshot("x", "data", None)],
            Trouble::SnapshotClassMissing,
            "VolumeSnapshot default/x",
            "no default VolumeSnapshotClass",
        ),
        (
            "that the driver refuses",
            vec![failed],
            Trouble::SnapshotFailed,
            "VolumeSnapshot default/x",
            "the storage is full",
        ),
        (
            "without a controller",
            vec![snapshot("x", "data", Some("snap"))],
            Trouble::NoSnapshotter,
            "VolumeSnapshot default/x",
            "no snapshot controller is running",
        ),
        (
            "without a snapshotter",
            vec![waiting, content("content-x", "x", "", "Delete")],
            Trouble::NoSnapshotter,
            "VolumeSnapshot default/x",
            "no snapshotter is running for the driver a.csi",
        ),
        (
            "that does not go",
            vec![finalized, delete("VolumeSnapshot", "x")],
            Trouble::SnapshotFinalizer,
            "VolumeSnapshot default/x",
            "volumesnapshot-bound-protection",
        ),
        (
            "on the storage alone",
            vec![content("left", "gone", "1-2-3", "Retain")],
            Trouble::SnapshotLeaked,
            "VolumeSnapshotContent left",
            "policy is Retain",
        ),
    ]
}

#[expect(clippy::too_many_lines, reason = "a table: one row per trouble")]
fn drivers() -> Vec<Row> {
    let copy = |name: &str, image: &str| {
        json!({"kind": "Pod", "metadata": {"name": name, "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "driver", "uid": "d"}]},
        "spec": {"nodeName": "n2", "containers": [{"name": "r", "image": image}]}, "status": {"phase": "Running"}})
    };
    let mut failing = copy("f", "registry.k8s.io/sig-storage/csi-node-driver-registrar:v2.13.0");
    failing["status"]["containerStatuses"] = json!([{"name": "r", "image": "i", "imageID": "", "ready": false, "restartCount": 7, "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m"}}}]);
    let not_ready = json!({"conditions": [{"type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting node status.", "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
    let full: Vec<Value> = (0..3)
        .flat_map(|number| {
            let name = format!("pv-{number}");
            [volume(&name, "", "Available"), attachment(&format!("va-{number}"), &name, "n1", true)]
        })
        .collect();
    let none = change("CSINode", "n1", &json!({"spec": {"drivers": []}}));
    let away = vec![
        none,
        change("CSINode", "n2", &json!({"spec": {"drivers": []}})),
        change("CSINode", "n3", &json!({"spec": {"drivers": []}})),
    ];
    vec![
        ("registered nowhere", away, Trouble::DriverAway, "CSIDriver a.csi", "registered on no node"),
        (
            "not on one node",
            vec![change("CSINode", "n3", &json!({"spec": {"drivers": []}}))],
            Trouble::DriverOnTooFewNodes,
            "CSIDriver a.csi",
            "2 of 3 nodes",
        ),
        (
            "copies of two versions",
            vec![copy("driver-n2", "registry.k8s.io/sig-storage/csi-node-driver-registrar:v2.9.0")],
            Trouble::SidecarSkew,
            "Pod default/driver-n1",
            "v2.13.0, v2.9.0",
        ),
        (
            "snapshot sidecars of two versions",
            vec![
                copy("s1", "registry.k8s.io/sig-storage/csi-snapshotter:v6.3.0"),
                copy("s2", "registry.k8s.io/sig-storage/snapshot-controller:v8.2.0"),
            ],
            Trouble::SidecarSkew,
            "Pod default/s1",
            "csi-snapshotter 6.3 works beside snapshot-controller 8.2",
        ),
        (
            "a driver's pod that fails",
            vec![failing],
            Trouble::DriverPodFailing,
            "Pod default/f",
            "CrashLoopBackOff",
        ),
        (
            "two default classes",
            vec![change(
                "StorageClass",
                "late",
                &json!({"metadata": {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}),
            )],
            Trouble::SeveralDefaultClasses,
            "StorageClass fast",
            "are all the default",
        ),
        (
            "a node that is not ready",
            vec![change_status("Node", "n1", &not_ready)],
            Trouble::NodeNotReady,
            "Node n1",
            "has 1 volumes attached",
        ),
        ("a node that is full", full, Trouble::NodeVolumeLimit, "Node n1", "the driver allows 4"),
        (
            "capacity of no class",
            vec![
                json!({"kind": "CSIStorageCapacity", "metadata": {"name": "left"}, "storageClassName": "gone", "capacity": "1Gi"}),
            ],
            Trouble::CapacityStale,
            "CSIStorageCapacity default/left",
            "the class gone",
        ),
        (
            "capacity that nobody publishes",
            vec![change("CSIDriver", "a.csi", &json!({"spec": {"storageCapacity": true}}))],
            Trouble::CapacityMissing,
            "StorageClass late",
            "none is published for the class late",
        ),
    ]
}

/// Long enough for everything that should have happened, and too short for a claim to count as unused.
const AFTER: SignedDuration = SignedDuration::from_mins(10);

#[tokio::test]
async fn a_healthy_cluster_has_no_findings_now_and_after_a_while() {
    let patient = Patient::healthy().await;
    for after in [SignedDuration::ZERO, AFTER] {
        assert_eq!(patient.findings(after).await, []);
    }
}

async fn every_row_is_found(rows: Vec<Row>) {
    for (name, objects, trouble, object, cause) in rows {
        let patient = Patient::healthy().await;
        for object in objects {
            patient.plant(object).await;
        }
        let findings = patient.findings(AFTER).await;
        let found = findings
            .iter()
            .find(|finding| finding.trouble == trouble && finding.object.to_string() == object);
        let found =
            found.unwrap_or_else(|| panic!("{name}: {trouble} of {object} is not among {findings:#?}"));
        assert!(found.cause.contains(cause), "{name}: {found:#?}");
        assert!(!found.what_to_do.is_empty(), "{name}: {found:#?}");
        // One trouble, one cause: others may follow from it, but none may be named for the same object.
        let others: Vec<_> =
            findings.iter().filter(|other| other.object == found.object && other != &found).collect();
        assert!(others.is_empty(), "{name}: also {others:#?}");
    }
}

#[tokio::test]
async fn troubles_of_claims_are_found_with_their_cause() {
    every_row_is_found(claims()).await;
}

#[tokio::test]
async fn troubles_of_pods_are_found_with_their_cause() {
    every_row_is_found(pods()).await;
}

#[tokio::test]
async fn troubles_of_volumes_are_found_with_their_cause() {
    every_row_is_found(volumes()).await;
}

#[tokio::test]
async fn troubles_of_attachments_are_found_with_their_cause() {
    every_row_is_found(attachments()).await;
}

#[tokio::test]
async fn troubles_of_snapshots_are_found_with_their_cause() {
    every_row_is_found(snapshots()).await;
}

#[tokio::test]
async fn troubles_of_drivers_and_nodes_are_found_with_their_cause() {
    every_row_is_found(drivers()).await;
}

#[tokio::test]
async fn a_missing_provisioner_is_not_concluded_from_an_event_that_may_have_expired() {
    let patient = Patient::healthy().await;
    patient.plant(claim("c", "fast")).await;
    let of_claim = async |after| {
        let findings = patient.findings(after).await;
        findings
            .into_iter()
            .find(|finding| finding.object.to_string() == "PersistentVolumeClaim default/c")
            .unwrap()
    };
    assert_eq!(of_claim(AFTER).await.trouble, Trouble::NoProvisioner);
    let later = of_claim(SignedDuration::from_hours(2)).await;
    assert_eq!(later.trouble, Trouble::ProvisioningSilent);
    assert!(later.cause.contains("not kept"), "{later:#?}");
}

#[tokio::test]
async fn claims_that_no_pod_uses_are_noted_after_a_day() {
    let patient = Patient::healthy().await;
    patient.plant(delete("Pod", "web")).await;
    patient.plant(change("Pod", "web", &json!({"metadata": {"finalizers": null}}))).await;
    let findings = patient.findings(SignedDuration::from_hours(49)).await;
    let unused = findings.iter().find(|finding| finding.trouble == Trouble::ClaimUnused);
    // The pod is in deletion until its node says that it is gone, and uses the claim until then.
    assert_eq!(unused, None, "{findings:#?}");
    let url = Patient::url("Pod", "web", "");
    let now = json!({"gracePeriodSeconds": 0});
    patient.request("DELETE", &url, "application/json", &now).await.unwrap();
    let findings = patient.findings(SignedDuration::from_hours(49)).await;
    let unused = findings.iter().find(|finding| finding.trouble == Trouble::ClaimUnused).unwrap();
    assert_eq!((unused.severity, unused.object.name.as_str()), (Severity::Note, "data"));
    assert!(patient.findings(AFTER).await.is_empty());
}

#[tokio::test]
async fn volumes_that_are_full_of_bytes_or_inodes_are_found() {
    let patient = Patient::healthy().await;
    for (usage, severity, cause) in [
        ([99, 100, 1, 100], Some(Severity::Error), "99 % full (bytes)"),
        ([91, 100, 1, 100], Some(Severity::Warning), "91 % full (bytes)"),
        ([50, 100, 99, 100], Some(Severity::Error), "99 % full (inodes)"),
        ([50, 100, 0, 0], None, ""),
    ] {
        let [used, capacity, inodes_used, inodes] = usage;
        let mut state = ClusterState::read(&patient.client(), None).await.unwrap();
        let usage = Usage { used, capacity, inodes_used, inodes };
        state.usage.insert(berth_kube::Key::new("default", "data"), usage);
        let findings = diagnose(&state);
        let found = findings.iter().find(|finding| finding.trouble == Trouble::VolumeFull);
        assert_eq!(found.map(|finding| finding.severity), severity, "{findings:#?}");
        assert!(found.is_none_or(|finding| finding.cause.contains(cause)), "{found:#?}");
    }
}

#[test]
fn every_trouble_but_those_named_here_is_planted() {
    let rows = [claims(), pods(), volumes(), attachments(), snapshots(), drivers()].concat();
    let planted: BTreeSet<Trouble> = rows.iter().map(|row| row.2).collect();
    // By what nodes report, and by time: each has a test of its own.
    let elsewhere = [Trouble::VolumeFull, Trouble::ClaimUnused];
    let left: Vec<_> = Trouble::ALL
        .iter()
        .filter(|trouble| !planted.contains(trouble) && !elsewhere.contains(trouble))
        .collect();
    assert!(left.is_empty(), "nobody plants {left:?}");
    assert!(planted.len() >= 40 && rows.len() >= 50, "{} rows of {} troubles", rows.len(), planted.len());
}

#[tokio::test]
async fn only_what_is_provably_safe_is_repaired() {
    let patient = Patient::healthy().await;
    let mut untouched = attachment("never", "nowhere", "n2", false);
    untouched["metadata"]["finalizers"] = json!([]);
    let mut unused = claim("done", "late");
    unused["metadata"]["finalizers"] = json!(["kubernetes.io/pvc-protection"]);
    let mut free = volume("free", "", "Available");
    free["metadata"]["finalizers"] = json!(["kubernetes.io/pv-protection"]);
    for object in [
        untouched,
        attachment("real", "nowhere", "n2", true),
        unused,
        delete("PersistentVolumeClaim", "done"),
        free,
        delete("PersistentVolume", "free"),
        json!({"kind": "CSIStorageCapacity", "metadata": {"name": "left"}, "storageClassName": "gone", "capacity": "1Gi"}),
        // Bound: its claim is there, so this one must stay.
        change(
            "PersistentVolume",
            "pv",
            &json!({"metadata": {"finalizers": ["kubernetes.io/pv-protection"]}}),
        ),
        delete("PersistentVolume", "pv"),
    ] {
        patient.plant(object).await;
    }
    let findings = patient.findings(AFTER).await;
    let mut repaired = BTreeSet::new();
    for finding in &findings {
        // Without patience: objects of this test are seconds old.
        let outcome = fix::apply(&patient.client(), finding, Duration::ZERO).await.unwrap();
        assert_eq!(outcome.is_some(), finding.fix.is_some(), "{finding:#?}");
        if let Some(fix::Outcome::Done(what)) = outcome {
            repaired.insert((finding.object.name.clone(), what));
        }
    }
    let names: Vec<&str> = repaired.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["done", "free", "left", "never"], "{findings:#?}");
    for (kind, name) in [
        ("PersistentVolumeClaim", "done"),
        ("PersistentVolume", "free"),
        ("VolumeAttachment", "never"),
        ("CSIStorageCapacity", "left"),
    ] {
        assert_eq!(patient.get(kind, name).await, None, "{kind} {name} is still there");
    }
    for (kind, name) in [
        ("VolumeAttachment", "real"),
        ("PersistentVolume", "pv"),
        ("PersistentVolumeClaim", "data"),
        ("VolumeAttachment", "va"),
    ] {
        assert!(patient.get(kind, name).await.is_some(), "{kind} {name} is gone");
    }
    // What has changed since it was judged is left alone.
    let stale = findings.iter().find(|finding| finding.object.name == "never").unwrap();
    let again = fix::apply(&patient.client(), stale, Duration::ZERO).await.unwrap();
    assert_eq!(again, Some(fix::Outcome::NotNeeded));
}
