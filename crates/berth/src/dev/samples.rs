//! The sample class, claim and pod that `berth dev` uses a driver with: those of the directory `examples`, or made up.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_kube::{Cluster, Key, storage};
use berth_ui::ClusterState;
use berth_ui::explain::{Kind, Subject};
use k8s_openapi::Resource as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::machine::until;
use crate::stack::objects::csi_driver;

/// The files whose presence makes a directory one with samples.
const NEEDED: [&str; 2] = ["class.yaml", "claim.yaml"];
/// Kinds that have no namespace.
const WITHOUT_NAMESPACE: [&str; 10] = [
    "Namespace",
    "CSIDriver",
    "StorageClass",
    "VolumeSnapshotClass",
    "VolumeGroupSnapshotClass",
    "VolumeAttributesClass",
    "PersistentVolume",
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
];
/// Kinds that are applied before others, and stay until the machine goes: volumes are deleted with their secrets and classes.
const FIRST: [&str; 8] = [
    "Namespace",
    "Secret",
    "ConfigMap",
    "ServiceAccount",
    "CSIDriver",
    "StorageClass",
    "VolumeSnapshotClass",
    "VolumeAttributesClass",
];

/// Objects to try a driver with, in the order in which they are applied.
pub(super) struct Samples {
    objects: Vec<DynamicObject>,
    /// Where they come from, for people.
    pub(super) origin: String,
}

impl Samples {
    /// The samples of a driver's directory, or made up ones with these class parameters.
    pub(super) fn find(
        directory: &Path,
        driver: &str,
        attaches: bool,
        parameters: &std::collections::BTreeMap<String, String>,
    ) -> anyhow::Result<Self> {
        let examples = directory.join("examples");
        let (mut values, origin) = if NEEDED.iter().all(|name| examples.join(name).is_file()) {
            let mut values = Vec::new();
            for path in manifests(&examples)? {
                values.extend(read(&path)?);
            }
            let object = directory.join("deploy/csidriver.yaml");
            if object.is_file() {
                values.extend(read(&object)?);
            }
            (values, "examples/".to_owned())
        } else {
            (made_up(driver, parameters), "made up: class, claim and pod \"sample\"".to_owned())
        };
        let provisioners =
            values.iter().filter(|value| value["kind"] == "StorageClass").map(|class| &class["provisioner"]);
        if let Some(other) = provisioners.filter_map(Value::as_str).find(|name| *name != driver) {
            bail!(
                "the class in examples/ names the provisioner {other}, and the driver calls itself {driver} (GetPluginInfo)"
            );
        }
        if !values.iter().any(|value| value["kind"] == "CSIDriver") {
            let mut object = csi_driver(driver, attaches);
            object["spec"]["podInfoOnMount"] = json!(false);
            object["spec"]["volumeLifecycleModes"] = json!(["Persistent"]);
            values.push(object);
        }
        values.sort_by_key(|value| rank(value["kind"].as_str().unwrap_or_default()));
        let objects = values
            .into_iter()
            .map(|value| serde_json::from_value(value).context("a sample is no object of Kubernetes"));
        Ok(Self { objects: objects.collect::<anyhow::Result<_>>()?, origin })
    }

    /// The values of their Secrets.
    pub(super) fn secrets(&self) -> Vec<String> {
        let secrets = self.objects.iter().filter(|object| kind(object) == "Secret");
        let values = secrets.flat_map(|secret| {
            let decoded = |text: &str| base64_text(text).unwrap_or_else(|| text.to_owned());
            let texts = |field: &str, read: &dyn Fn(&str) -> String| -> Vec<String> {
                let values = secret.data[field].as_object().into_iter().flat_map(|values| values.values());
                values.filter_map(Value::as_str).map(read).collect()
            };
            [texts("data", &decoded), texts("stringData", &str::to_owned)].concat()
        });
        values.collect()
    }

    /// Applies all objects, in their order.
    pub(super) async fn apply(&self, client: &Client) -> anyhow::Result<()> {
        for object in &self.objects {
            let parameters = PatchParams::apply("berth-dev").force();
            let applied =
                api(client, object).patch(&object.name_any(), &parameters, &Patch::Apply(object)).await;
            applied.with_context(|| format!("apply {} {}", kind(object), object.name_any()))?;
        }
        Ok(())
    }

    /// Waits until every pod of the samples runs with its volumes; says why not if they do not.
    pub(super) async fn until_ready(&self, cluster: &Cluster, patience: Duration) -> anyhow::Result<()> {
        for key in self.keys("Pod") {
            let over = |pod: Option<&Pod>| {
                pod.is_some_and(|pod| is_ready(pod) || storage::phase_of_pod(pod) == "Failed")
            };
            let waited = until(cluster, patience, key.clone(), over).await;
            match waited {
                Ok(Some(pod)) if is_ready(&pod) => {}
                Ok(_) => bail!("the pod {key} failed"),
                Err(_) => {
                    bail!("the pod {key} does not run after {patience:?}{}", why_stuck(cluster, &key).await)
                }
            }
        }
        Ok(())
    }

    /// Deletes what was made of the classes, and waits until it is gone with its volumes.
    pub(super) async fn delete(&self, cluster: &Cluster, patience: Duration) -> anyhow::Result<()> {
        let claims = self.keys("PersistentVolumeClaim");
        let mut volumes = Vec::new();
        for key in &claims {
            if let Some(claim) = cluster.fetch::<PersistentVolumeClaim>(key).await? {
                volumes.push(storage::volume_name(&claim).to_owned());
            }
        }
        let client = cluster.client();
        for object in self.objects.iter().rev().filter(|object| !FIRST.contains(&kind(object).as_str())) {
            match api(client, object).delete(&object.name_any(), &DeleteParams::default()).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(error) => {
                    return Err(error)
                        .with_context(|| format!("delete {} {}", kind(object), object.name_any()));
                }
            }
        }
        for key in self.keys("Pod") {
            until(cluster, patience, key, |pod: Option<&Pod>| pod.is_none()).await?;
        }
        for key in claims {
            until(cluster, patience, key, |claim: Option<&PersistentVolumeClaim>| claim.is_none()).await?;
        }
        for volume in volumes.into_iter().filter(|volume| !volume.is_empty()) {
            let gone = |volume: Option<&PersistentVolume>| {
                volume.is_none_or(|volume| {
                    let policy = volume
                        .spec
                        .as_ref()
                        .and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
                    policy == Some("Retain")
                })
            };
            let waited = until(cluster, patience, Key::cluster(&volume), gone).await;
            if waited.is_err() {
                let subject = Subject::new(Kind::Volume, "", &volume);
                bail!(
                    "the volume {volume} is not deleted after {patience:?}{}",
                    explained(cluster, &subject).await
                );
            }
        }
        Ok(())
    }

    fn keys(&self, wanted: &str) -> Vec<Key> {
        let named = self.objects.iter().filter(|object| kind(object) == wanted);
        named.map(|object| Key::new(namespace(object), object.name_any())).collect()
    }
}

/// The text that is written in base64, if it is text.
fn base64_text(text: &str) -> Option<String> {
    let value = serde_json::from_value::<k8s_openapi::ByteString>(Value::String(text.to_owned())).ok()?;
    String::from_utf8(value.0).ok()
}

fn kind(object: &DynamicObject) -> String {
    object.types.as_ref().map(|types| types.kind.clone()).unwrap_or_default()
}

fn namespace(object: &DynamicObject) -> String {
    object.namespace().unwrap_or_else(|| "default".to_owned())
}

fn rank(kind: &str) -> usize {
    let late = match kind {
        "PersistentVolume" | "PersistentVolumeClaim" => 0,
        _ => 1,
    };
    FIRST.iter().position(|first| *first == kind).unwrap_or(FIRST.len() + late)
}

fn api(client: &Client, object: &DynamicObject) -> Api<DynamicObject> {
    let types = object.types.clone().unwrap_or_default();
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
    if WITHOUT_NAMESPACE.contains(&types.kind.as_str()) {
        return Api::all_with(client.clone(), &resource);
    }
    Api::namespaced_with(client.clone(), &namespace(object), &resource)
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready =
        conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    ready || storage::phase_of_pod(pod) == "Succeeded"
}

async fn why_stuck(cluster: &Cluster, pod: &Key) -> String {
    explained(cluster, &Subject::new(Kind::Pod, &pod.namespace, &pod.name)).await
}

/// What `berth explain` finds, behind a colon.
async fn explained(cluster: &Cluster, subject: &Subject) -> String {
    let Ok(state) = subject.read(cluster).await else { return String::new() };
    let state = ClusterState { patience: Duration::ZERO, ..state };
    let Some(explanation) = subject.explain(&state) else { return String::new() };
    let causes: Vec<_> = explanation
        .findings
        .iter()
        .map(|finding| format!("{} What to do: {}", finding.cause, finding.what_to_do))
        .collect();
    let text = if causes.is_empty() { explanation.waits_for.unwrap_or_default() } else { causes.join(" ") };
    if text.is_empty() { text } else { format!(": {text}") }
}

fn manifests(directory: &Path) -> anyhow::Result<Vec<std::path::PathBuf>> {
    let entries = fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    let mut paths: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml"))
        .collect();
    paths.sort();
    Ok(paths)
}

fn read(path: &Path) -> anyhow::Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    documents(&text).with_context(|| format!("{} is not a manifest", path.display()))
}

/// The documents of a text in YAML.
fn documents(text: &str) -> anyhow::Result<Vec<Value>> {
    let mut parts = vec![String::new()];
    for line in text.lines() {
        if line.trim_end() == "---" {
            parts.push(String::new());
        } else if let Some(part) = parts.last_mut() {
            part.push_str(line);
            part.push('\n');
        }
    }
    let mut values = Vec::new();
    for part in parts {
        let value: Option<Value> = serde_saphyr::from_str(&part)?;
        if let Some(value) = value.filter(|value| !value.is_null()) {
            anyhow::ensure!(
                value["kind"].is_string() && value["metadata"]["name"].is_string(),
                "an object has no kind or no name"
            );
            values.push(value);
        }
    }
    Ok(values)
}

fn made_up(driver: &str, parameters: &std::collections::BTreeMap<String, String>) -> Vec<Value> {
    vec![
        json!({
            "apiVersion": StorageClass::API_VERSION, "kind": StorageClass::KIND, "metadata": {"name": "sample"},
            "provisioner": driver, "parameters": parameters, "reclaimPolicy": "Delete",
        }),
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "sample"},
            "spec": {
                "storageClassName": "sample", "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "64Mi"}},
            },
        }),
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "sample"},
            "spec": {
                "terminationGracePeriodSeconds": 2,
                "containers": [{
                    "name": "main", "image": "busybox",
                    "command": ["sh", "-c", "date > /data/started; exec sleep 1000000"],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "sample"}}],
            },
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_or_made_up_and_put_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let kinds = |samples: &Samples| samples.objects.iter().map(kind).collect::<Vec<_>>();
        let none = std::collections::BTreeMap::new();
        let made_up = Samples::find(directory.path(), "a.example.com", false, &none).unwrap();
        assert_eq!(kinds(&made_up), ["CSIDriver", "StorageClass", "PersistentVolumeClaim", "Pod"]);
        let examples = directory.path().join("examples");
        fs::create_dir(&examples).unwrap();
        fs::write(examples.join("pod.yaml"), "kind: Pod\napiVersion: v1\nmetadata: {name: p}\n").unwrap();
        fs::write(
            examples.join("claim.yaml"),
            "# nothing\n---\nkind: PersistentVolumeClaim\napiVersion: v1\nmetadata: {name: c}\n",
        )
        .unwrap();
        let class = |provisioner: &str| {
            format!(
                "kind: StorageClass\napiVersion: storage.k8s.io/v1\nmetadata: {{name: s}}\nprovisioner: {provisioner}\n---\nkind: Secret\napiVersion: v1\nmetadata: {{name: x}}\ndata: {{a: Y2FuYXJ5}}\nstringData: {{b: second}}\n"
            )
        };
        fs::write(examples.join("class.yaml"), class("a.example.com")).unwrap();
        let samples = Samples::find(directory.path(), "a.example.com", true, &none).unwrap();
        assert_eq!(kinds(&samples), ["Secret", "CSIDriver", "StorageClass", "PersistentVolumeClaim", "Pod"]);
        assert_eq!(samples.keys("Pod"), [Key::new("default", "p")]);
        assert_eq!(samples.secrets(), ["canary", "second"]);
        fs::write(examples.join("class.yaml"), class("b.example.com")).unwrap();
        let error = Samples::find(directory.path(), "a.example.com", true, &none).err().unwrap().to_string();
        assert!(error.contains("b.example.com") && error.contains("a.example.com"), "{error}");
        fs::write(examples.join("claim.yaml"), "kind: 3\n").unwrap();
        assert!(Samples::find(directory.path(), "a.example.com", true, &none).is_err());
    }
}
