//! What a pod's spec gets where it says nothing; the same for pods and for the templates of workloads.

use serde_json::{Map, Value, json};

use super::super::quantity::canonicalise_list;
use super::super::read::{default, default_pointer, flag, has, items_mut, map, map_at, text};
use super::super::{claim, sources};

/// Modes of files from config maps, secrets and projections, 0644.
const FILE_MODE: u32 = 0o644;
/// Everything that can be the source of a pod's volume.
pub(super) const SOURCES: [&str; 30] = [
    "emptyDir",
    "hostPath",
    "gitRepo",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "secret",
    "nfs",
    "iscsi",
    "glusterfs",
    "flocker",
    "persistentVolumeClaim",
    "rbd",
    "cinder",
    "cephfs",
    "quobyte",
    "downwardAPI",
    "fc",
    "flexVolume",
    "configMap",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "storageos",
    "projected",
    "scaleIO",
    "csi",
    "ephemeral",
    "image",
];

/// Fills in a pod's spec.
pub(in super::super) fn default_spec(spec: &mut Value) {
    let host_network = flag(spec, &["hostNetwork"]);
    let map = map(spec, &[]);
    default(map, "dnsPolicy", "ClusterFirst");
    default(map, "restartPolicy", "Always");
    default_pointer(map, "securityContext", json!({}));
    default_pointer(map, "terminationGracePeriodSeconds", 30);
    default(map, "schedulerName", "default-scheduler");
    mirror_account(map);
    items_mut(spec, &["volumes"]).for_each(default_volume);
    for field in ["initContainers", "containers", "ephemeralContainers"] {
        for container in items_mut(spec, &[field]) {
            default_container(container, host_network);
        }
    }
}

/// Fills in what only pods get, not templates.
pub(super) fn default_own(spec: &mut Value) {
    default_pointer(map(spec, &[]), "enableServiceLinks", true);
    for field in ["containers", "initContainers"] {
        for container in items_mut(spec, &[field]) {
            let Some(limits) = container.pointer("/resources/limits").and_then(Value::as_object).cloned()
            else {
                continue;
            };
            let requests = map(container, &["resources", "requests"]);
            for (resource, limit) in limits {
                requests.entry(resource).or_insert(limit);
            }
        }
    }
}

/// `serviceAccount` is the old name of `serviceAccountName`; both are served.
fn mirror_account(spec: &mut Map<String, Value>) {
    let name =
        |field: &str| spec.get(field).and_then(Value::as_str).filter(|n| !n.is_empty()).map(str::to_owned);
    if let Some(account) = name("serviceAccountName").or_else(|| name("serviceAccount")) {
        spec.insert("serviceAccountName".to_owned(), json!(account));
        spec.insert("serviceAccount".to_owned(), json!(account));
    }
}

fn default_volume(volume: &mut Value) {
    if !SOURCES.iter().any(|source| has(volume, &[source])) {
        map(volume, &[]).insert("emptyDir".to_owned(), json!({}));
    }
    sources::fill(volume);
    for source in ["secret", "configMap", "downwardAPI", "projected"] {
        if let Some(source) = map_at(volume, &[source]) {
            default_pointer(source, "defaultMode", FILE_MODE);
        }
    }
    if let Some(limit) = volume.pointer_mut("/emptyDir/sizeLimit") {
        super::super::quantity::canonicalise(limit);
    }
    default_field_refs(items_mut(volume, &["downwardAPI", "items"]));
    for source in items_mut(volume, &["projected", "sources"]) {
        if let Some(token) = map_at(source, &["serviceAccountToken"]) {
            default_pointer(token, "expirationSeconds", 3600);
        }
        default_field_refs(items_mut(source, &["downwardAPI", "items"]));
    }
    if let Some(spec) = volume.pointer_mut("/ephemeral/volumeClaimTemplate/spec") {
        claim::default_spec(spec);
    }
    if let Some(image) = map_at(volume, &["image"]) {
        let policy = pull_policy(image.get("reference").and_then(Value::as_str).unwrap_or_default());
        default(image, "pullPolicy", policy);
    }
}

fn default_field_refs<'a>(holders: impl Iterator<Item = &'a mut Value>) {
    for holder in holders {
        if let Some(reference) = map_at(holder, &["fieldRef"]) {
            default(reference, "apiVersion", "v1");
        }
        if let Some(reference) = map_at(holder, &["resourceFieldRef"]) {
            default_pointer(reference, "divisor", "0");
        }
    }
}

fn default_container(container: &mut Value, host_network: bool) {
    let policy = pull_policy(text(container, &["image"]));
    let fields = map(container, &[]);
    default(fields, "imagePullPolicy", policy);
    default(fields, "terminationMessagePath", "/dev/termination-log");
    default(fields, "terminationMessagePolicy", "File");
    default_pointer(fields, "resources", json!({}));
    if let Some(resources) = map_at(container, &["resources"]) {
        canonicalise_list(resources, "limits");
        canonicalise_list(resources, "requests");
    }
    for port in items_mut(container, &["ports"]) {
        let port = map(port, &[]);
        default(port, "protocol", "TCP");
        let number = port.get("containerPort").cloned().unwrap_or_default();
        if host_network
            && number.is_number()
            && port.get("hostPort").is_none_or(|p| p.is_null() || *p == json!(0))
        {
            port.insert("hostPort".to_owned(), number);
        }
    }
    for variable in items_mut(container, &["env"]) {
        if let Some(source) = variable.get_mut("valueFrom") {
            default_field_refs(std::iter::once(source));
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = container.get_mut(probe).filter(|probe| probe.is_object()) {
            default_probe(probe);
        }
    }
    for hook in ["postStart", "preStop"] {
        if let Some(hook) = container.pointer_mut(&format!("/lifecycle/{hook}")) {
            default_http(hook);
        }
    }
}

fn default_probe(probe: &mut Value) {
    default_http(probe);
    if let Some(grpc) = map_at(probe, &["grpc"]) {
        default_pointer(grpc, "service", "");
    }
    let probe = map(probe, &[]);
    for (field, value) in
        [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
    {
        if probe.get(field).is_none_or(|given| given.is_null() || *given == json!(0)) {
            probe.insert(field.to_owned(), json!(value));
        }
    }
}

fn default_http(handler: &mut Value) {
    if let Some(get) = map_at(handler, &["httpGet"]) {
        default(get, "path", "/");
        default(get, "scheme", "HTTP");
    }
}

/// Images without a tag, or with `latest`, are always pulled.
fn pull_policy(image: &str) -> &'static str {
    // What is no image name has no tag either.
    let last = image.rsplit('/').next().unwrap_or_default();
    let shouts = last.split(':').next().unwrap_or_default().chars().any(char::is_uppercase);
    if shouts || image.contains(char::is_whitespace) || image.starts_with(['/', '.']) {
        return "IfNotPresent";
    }
    let (name, digest) = image.split_once('@').map_or((image, None), |(name, digest)| (name, Some(digest)));
    let tag = name.rsplit('/').next().and_then(|last| last.split_once(':')).map(|(_, tag)| tag);
    match (tag, digest) {
        (Some("latest"), _) | (None, None) if !image.is_empty() => "Always",
        _ => "IfNotPresent",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latest_images_are_always_pulled() {
        for image in ["busybox", "busybox:latest", "host:5000/a/b"] {
            assert_eq!(pull_policy(image), "Always", "{image}");
        }
        for image in ["busybox:1", "host:5000/a:v1", "a@sha256:00", "a:v1@sha256:00"] {
            assert_eq!(pull_policy(image), "IfNotPresent", "{image}");
        }
    }
}
