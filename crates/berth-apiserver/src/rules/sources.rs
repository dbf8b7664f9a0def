//! Volume sources: the backends a volume can name, in persistent volumes and in pods.

use serde_json::Value;

use super::field::Path;
use super::names;
use super::read::{default, default_pointer, entries, flag, has, is_empty, items, map_at, number, text};
use crate::resource::Cause;

/// The sources of persistent volumes, in the order in which they are checked.
pub(super) const PERSISTENT: [&str; 22] = [
    "hostPath",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "glusterfs",
    "flocker",
    "nfs",
    "rbd",
    "quobyte",
    "cephfs",
    "iscsi",
    "cinder",
    "fc",
    "flexVolume",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "scaleIO",
    "local",
    "storageos",
    "csi",
];

const FILE_MODE: &str = "must be a number between 0 and 0777 (octal), both inclusive";
const ISCSI_LENGTH: &str = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters if iscsi.initiatorName is specified.";

/// The fields that a source cannot do without.
fn required_fields(source: &str) -> &'static [&'static str] {
    match source {
        "gcePersistentDisk" => &["pdName"],
        "awsElasticBlockStore" | "cinder" | "portworxVolume" => &["volumeID"],
        "glusterfs" => &["endpoints", "path"],
        "rbd" => &["monitors", "image"],
        "cephfs" => &["monitors"],
        "azureFile" => &["secretName", "shareName"],
        "azureDisk" => &["diskName", "diskURI"],
        "vsphereVolume" => &["volumePath"],
        "photonPersistentDisk" => &["pdID"],
        "scaleIO" => &["gateway", "system", "volumeName"],
        "flexVolume" => &["driver"],
        "persistentVolumeClaim" => &["claimName"],
        _ => &[],
    }
}

/// Checks a source that both persistent volumes and pods can have.
pub(super) fn causes(name: &str, source: &Value, path: &Path, persistent: bool) -> Vec<Cause> {
    let mut causes: Vec<Cause> = required_fields(name)
        .iter()
        .filter(|field| is_empty(super::read::at(source, &[field])))
        .map(|field| path.child(field).required(""))
        .collect();
    match name {
        "hostPath" => causes.extend(host_path(source, path)),
        "local" => causes.extend(local(source, path)),
        "nfs" => causes.extend(nfs(source, path)),
        "gcePersistentDisk" | "awsElasticBlockStore" => {
            let partition = number(source, &["partition"]).unwrap_or_default();
            if !(0..=255).contains(&partition) {
                causes.push(path.child("partition").invalid(partition, names::in_range(1, 255)));
            }
        }
        "iscsi" => causes.extend(iscsi(source, path, persistent)),
        "fc" => causes.extend(fibre_channel(source, path)),
        "flexVolume" => causes.extend(flex(source, path)),
        "flocker" => causes.extend(flocker(source, path)),
        "quobyte" => causes.extend(quobyte(source, path)),
        "azureFile"
            if persistent
                && has(source, &["secretNamespace"])
                && text(source, &["secretNamespace"]).is_empty() =>
        {
            causes.push(path.child("secretNamespace").required(""));
        }
        "azureDisk" => causes.extend(azure_disk(source, path)),
        "cinder" => causes.extend(secret_ref(source, path, persistent)),
        "storageos" => {
            let volume = text(source, &["volumeName"]);
            if volume.is_empty() {
                causes.push(path.child("volumeName").required(""));
            } else {
                causes.extend(path.child("volumeName").each_invalid(volume, names::label(volume)));
            }
            let namespace = text(source, &["volumeNamespace"]);
            if !namespace.is_empty() {
                causes.extend(path.child("volumeNamespace").each_invalid(namespace, names::label(namespace)));
            }
            causes.extend(secret_ref(source, path, persistent));
        }
        _ => {}
    }
    causes
}

/// Checks the name of a CSI driver.
pub(super) fn driver_causes(driver: &str, path: &Path) -> Vec<Cause> {
    if driver.is_empty() {
        return vec![path.required("")];
    }
    let mut causes = Vec::new();
    if driver.len() > 63 {
        causes.push(path.too_long(63));
    }
    causes.extend(path.each_invalid(driver, names::subdomain(&driver.to_lowercase())));
    causes
}

/// Checks the CSI source of a persistent volume.
pub(super) fn csi_causes(source: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = driver_causes(text(source, &["driver"]), &path.child("driver"));
    if text(source, &["volumeHandle"]).is_empty() {
        causes.push(path.child("volumeHandle").required(""));
    }
    for reference in [
        "controllerPublishSecretRef",
        "controllerExpandSecretRef",
        "nodePublishSecretRef",
        "nodeExpandSecretRef",
    ] {
        if !has(source, &[reference]) {
            continue;
        }
        let path = path.child(reference);
        match text(source, &[reference, "name"]) {
            "" => causes.push(path.child("name").required("")),
            name => causes.extend(path.child("name").each_invalid(name, names::subdomain(name))),
        }
        match text(source, &[reference, "namespace"]) {
            "" => causes.push(path.child("namespace").required("")),
            name => causes.extend(path.child("namespace").each_invalid(name, names::label(name))),
        }
    }
    causes
}

/// Checks the mode bits of a file at a field.
pub(super) fn mode_causes(source: &Value, field: &str, path: &Path) -> Option<Cause> {
    let mode = number(source, &[field])?;
    (!(0..=0o777).contains(&mode)).then(|| path.child(field).invalid(mode, FILE_MODE))
}

/// Refuses paths that climb.
pub(super) fn no_backsteps(target: &str, path: &Path) -> Option<Cause> {
    target.split('/').any(|part| part == "..").then(|| path.invalid(target, "must not contain '..'"))
}

/// Refuses paths that are absolute or climb.
pub(super) fn descending(target: &str, path: &Path) -> Vec<Cause> {
    let absolute = target.starts_with('/').then(|| path.invalid(target, "must be a relative path"));
    absolute.into_iter().chain(no_backsteps(target, path)).collect()
}

/// Refuses paths that are absolute, climb, or start with two dots.
pub(super) fn unreserved(target: &str, path: &Path) -> Vec<Cause> {
    let mut causes = descending(target, path);
    if target.starts_with("..") && !target.starts_with("../") {
        causes.push(path.invalid(target, "must not start with '..'"));
    }
    causes
}

/// Fills in what a source leaves out.
pub(super) fn fill(owner: &mut Value) {
    if let Some(source) = map_at(owner, &["hostPath"]) {
        default_pointer(source, "type", "");
    }
    if let Some(source) = map_at(owner, &["iscsi"]) {
        default(source, "iscsiInterface", "default");
    }
    if let Some(source) = map_at(owner, &["rbd"]) {
        default(source, "pool", "rbd");
        default(source, "user", "admin");
        default(source, "keyring", "/etc/ceph/keyring");
    }
    if let Some(source) = map_at(owner, &["scaleIO"]) {
        default(source, "storageMode", "ThinProvisioned");
        default(source, "fsType", "xfs");
    }
    if let Some(source) = map_at(owner, &["azureDisk"]) {
        default_pointer(source, "cachingMode", "ReadWrite");
        default_pointer(source, "kind", "Shared");
        default_pointer(source, "fsType", "ext4");
        default_pointer(source, "readOnly", false);
    }
}

fn host_path(source: &Value, path: &Path) -> Vec<Cause> {
    const TYPES: [&str; 8] =
        ["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];
    let target = text(source, &["path"]);
    if target.is_empty() {
        return vec![path.child("path").required("")];
    }
    let mut causes: Vec<Cause> = no_backsteps(target, &path.child("path")).into_iter().collect();
    let kind = text(source, &["type"]);
    if !TYPES.contains(&kind) {
        causes.push(path.child("type").not_supported(kind, &TYPES));
    }
    causes
}

fn local(source: &Value, path: &Path) -> Option<Cause> {
    match text(source, &["path"]) {
        "" => Some(path.child("path").required("")),
        target => no_backsteps(target, &path.child("path")),
    }
}

fn nfs(source: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let target = text(source, &["path"]);
    if text(source, &["server"]).is_empty() {
        causes.push(path.child("server").required(""));
    }
    if target.is_empty() {
        causes.push(path.child("path").required(""));
    }
    if !target.starts_with('/') {
        causes.push(path.child("path").invalid(target, "must be an absolute path"));
    }
    causes
}

fn iscsi(source: &Value, path: &Path, persistent: bool) -> Vec<Cause> {
    let mut causes = Vec::new();
    if text(source, &["targetPortal"]).is_empty() {
        causes.push(path.child("targetPortal").required(""));
    }
    let prefix_message = if persistent {
        "must be valid format"
    } else {
        "must be valid format starting with iqn, eui, or naa"
    };
    let iqn = text(source, &["iqn"]);
    if iqn.is_empty() {
        causes.push(path.child("iqn").required(""));
    } else if !is_initiator(iqn) {
        let known = ["iqn", "eui", "naa"].iter().any(|prefix| iqn.starts_with(prefix));
        let message = if known { "must be valid format" } else { prefix_message };
        causes.push(path.child("iqn").invalid(iqn, message));
    }
    let lun = number(source, &["lun"]).unwrap_or_default();
    if !(0..=255).contains(&lun) {
        causes.push(path.child("lun").invalid(lun, names::in_range(0, 255)));
    }
    let authenticates = flag(source, &["chapAuthDiscovery"]) || flag(source, &["chapAuthSession"]);
    if authenticates && !has(source, &["secretRef"]) {
        causes.push(path.child("secretRef").required(""));
    }
    if persistent && has(source, &["secretRef"]) && text(source, &["secretRef", "name"]).is_empty() {
        causes.push(path.child("secretRef").child("name").required(""));
    }
    if has(source, &["initiatorName"]) {
        let initiator = text(source, &["initiatorName"]);
        if !is_initiator(initiator) {
            let known = ["iqn", "eui", "naa"].iter().any(|prefix| initiator.starts_with(prefix));
            let message = if known { "must be valid format" } else { prefix_message };
            causes.push(path.child("initiatorname").invalid(initiator, message));
        }
    }
    causes
}

/// Refuses an iSCSI source whose session name would be too long for the kernel.
pub(super) fn iscsi_name_cause(source: &Value, volume: &str, path: &Path, value: &str) -> Option<Cause> {
    let length = volume.len() + 1 + text(source, &["targetPortal"]).len();
    (has(source, &["initiatorName"]) && length > 64).then(|| path.invalid(value, ISCSI_LENGTH))
}

/// `iqn.YYYY-MM.reverse.domain[:name]`, `eui.` with 16 hex digits, `naa.` with 32.
fn is_initiator(name: &str) -> bool {
    let hex = |digits: &str, count| digits.len() == count && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if let Some(rest) = name.strip_prefix("iqn.") {
        let bytes = rest.as_bytes();
        return bytes.len() > 8
            && bytes[..4].iter().all(u8::is_ascii_digit)
            && bytes[4] == b'-'
            && bytes[5..7].iter().all(u8::is_ascii_digit)
            && bytes[7] == b'.'
            && bytes[8].is_ascii_alphanumeric()
            && !rest.contains(char::is_whitespace);
    }
    if let Some(rest) = name.strip_prefix("eui.") {
        return hex(rest, 16);
    }
    name.strip_prefix("naa.").is_some_and(|rest| hex(rest, 32))
}

fn fibre_channel(source: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let names_given = !items(source, &["targetWWNs"]).is_empty();
    let ids_given = !items(source, &["wwids"]).is_empty();
    if !names_given && !ids_given {
        let detail = "must specify either targetWWNs or wwids, but not both";
        causes.push(path.child("targetWWNs").required(detail));
    }
    if names_given && ids_given {
        let detail = "targetWWNs and wwids can not be specified simultaneously";
        causes.push(path.child("targetWWNs").invalid(source["targetWWNs"].clone(), detail));
    }
    if names_given {
        match number(source, &["lun"]) {
            None => causes.push(path.child("lun").required("lun is required if targetWWNs is specified")),
            Some(lun) if !(0..=255).contains(&lun) => {
                causes.push(path.child("lun").invalid(lun, names::in_range(0, 255)));
            }
            Some(_) => {}
        }
    }
    causes
}

fn flex(source: &Value, path: &Path) -> Vec<Cause> {
    let reserved = |key: &str| {
        let namespace = format!(".{}", key.split_once('/').map_or(key, |(before, _)| before).to_lowercase());
        namespace.ends_with(".kubernetes.io") || namespace.ends_with(".k8s.io")
    };
    entries(source, &["options"])
        .filter(|(key, _)| reserved(key))
        .map(|(key, _)| {
            let detail = "kubernetes.io and k8s.io namespaces are reserved";
            path.child("options").key(key).invalid(key, detail)
        })
        .collect()
}

fn flocker(source: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let (dataset, uuid) = (text(source, &["datasetName"]), text(source, &["datasetUUID"]));
    if dataset.is_empty() && uuid.is_empty() {
        causes.push(path.required("one of datasetName and datasetUUID is required"));
    }
    if !dataset.is_empty() && !uuid.is_empty() {
        let detail = "datasetName and datasetUUID can not be specified simultaneously";
        causes.push(path.invalid("resource", detail));
    }
    if dataset.contains('/') {
        causes.push(path.child("datasetName").invalid(dataset, "must not contain '/'"));
    }
    causes
}

fn quobyte(source: &Value, path: &Path) -> Vec<Cause> {
    const PAIRS: &str = "must be a host:port pair or multiple pairs separated by commas";
    let mut causes = Vec::new();
    let registry = text(source, &["registry"]);
    if registry.is_empty() {
        causes.push(path.child("registry").required(PAIRS));
    } else if text(source, &["tenant"]).len() >= 65 {
        let detail = "must be a UUID and may not exceed a length of 64 characters";
        causes.push(path.child("tenant").required(detail));
    } else {
        let bad = registry.split(',').filter(|pair| !pair.contains(':'));
        causes.extend(bad.map(|_| path.child("registry").invalid(registry, PAIRS)));
    }
    if text(source, &["volume"]).is_empty() {
        causes.push(path.child("volume").required(""));
    }
    causes
}

fn azure_disk(source: &Value, path: &Path) -> Vec<Cause> {
    const CACHING: [&str; 3] = ["None", "ReadOnly", "ReadWrite"];
    const KINDS: [&str; 3] = ["Dedicated", "Managed", "Shared"];
    let mut causes = Vec::new();
    let uri = text(source, &["diskURI"]);
    let kind = text(source, &["kind"]);
    let caching = text(source, &["cachingMode"]);
    if !caching.is_empty() && !CACHING.contains(&caching) {
        causes.push(path.child("cachingMode").not_supported(caching, &CACHING));
    }
    if !kind.is_empty() && !KINDS.contains(&kind) {
        causes.push(path.child("kind").not_supported(kind, &KINDS));
    }
    if kind == "Managed" && !uri.starts_with("/subscriptions/") {
        let form =
            "/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}";
        causes.push(path.child("diskURI").not_supported(uri, &[form]));
    }
    if !kind.is_empty() && kind != "Managed" && !uri.starts_with("https://") {
        let form = "https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd";
        causes.push(path.child("diskURI").not_supported(uri, &[form]));
    }
    causes
}

fn secret_ref(source: &Value, path: &Path, persistent: bool) -> Vec<Cause> {
    if !has(source, &["secretRef"]) {
        return Vec::new();
    }
    let fields: &[&str] = if persistent { &["name", "namespace"] } else { &["name"] };
    let missing = fields.iter().filter(|field| text(source, &["secretRef", field]).is_empty());
    missing.map(|field| path.child("secretRef").child(field).required("")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(name: &str, source: &Value) -> Vec<String> {
        causes(name, source, &Path::new(name), true).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn complete_sources_are_fine() {
        for (name, source) in [
            ("hostPath", json!({"path": "/data", "type": "Directory"})),
            ("nfs", json!({"server": "s", "path": "/"})),
            ("local", json!({"path": "/mnt"})),
            ("iscsi", json!({"targetPortal": "1.2.3.4", "iqn": "iqn.2001-04.com.example:x", "lun": 0})),
            ("fc", json!({"targetWWNs": ["5"], "lun": 2})),
            ("flexVolume", json!({"driver": "a/b", "options": {"size": "1"}})),
            ("rbd", json!({"monitors": ["m"], "image": "i"})),
            (
                "azureDisk",
                json!({"diskName": "d", "diskURI": "https://x", "kind": "Shared", "cachingMode": "None"}),
            ),
        ] {
            assert_eq!(check(name, &source), Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn incomplete_sources_say_what_is_missing() {
        for (name, source, expected) in [
            ("hostPath", json!({}), "hostPath.path: Required value"),
            (
                "hostPath",
                json!({"path": "/a/../b"}),
                "hostPath.path: Invalid value: \"/a/../b\": must not contain '..'",
            ),
            (
                "hostPath",
                json!({"path": "/", "type": "Dir"}),
                "hostPath.type: Unsupported value: \"Dir\": supported values: \"\", \"BlockDevice\", \"CharDevice\", \"Directory\", \"DirectoryOrCreate\", \"File\", \"FileOrCreate\", \"Socket\"",
            ),
            ("nfs", json!({"path": "/"}), "nfs.server: Required value"),
            (
                "nfs",
                json!({"server": "s", "path": "x"}),
                "nfs.path: Invalid value: \"x\": must be an absolute path",
            ),
            ("local", json!({}), "local.path: Required value"),
            ("rbd", json!({"monitors": ["m"]}), "rbd.image: Required value"),
            (
                "gcePersistentDisk",
                json!({"pdName": "p", "partition": 300}),
                "gcePersistentDisk.partition: Invalid value: 300: must be between 1 and 255, inclusive",
            ),
            (
                "iscsi",
                json!({"targetPortal": "t", "iqn": "x"}),
                "iscsi.iqn: Invalid value: \"x\": must be valid format",
            ),
            (
                "fc",
                json!({"wwids": [], "lun": 1}),
                "fc.targetWWNs: Required value: must specify either targetWWNs or wwids, but not both",
            ),
            (
                "flexVolume",
                json!({"driver": "d", "options": {"kubernetes.io/x": ""}}),
                "flexVolume.options[kubernetes.io/x]: Invalid value: \"kubernetes.io/x\": kubernetes.io and k8s.io namespaces are reserved",
            ),
            (
                "cinder",
                json!({"volumeID": "v", "secretRef": {"name": "n"}}),
                "cinder.secretRef.namespace: Required value",
            ),
        ] {
            assert_eq!(check(name, &source), [expected], "{name}");
        }
    }

    #[test]
    fn csi_sources_need_a_driver_and_a_handle() {
        let check = |source: Value| -> Vec<String> {
            csi_causes(&source, &Path::new("csi")).iter().map(ToString::to_string).collect()
        };
        assert!(
            check(json!({"driver": "CSI.example.com", "volumeHandle": "v", "nodeStageSecretRef": {}}))
                .is_empty()
        );
        assert_eq!(check(json!({})), ["csi.driver: Required value", "csi.volumeHandle: Required value"]);
        assert_eq!(
            check(json!({"driver": "d", "volumeHandle": "v", "nodePublishSecretRef": {"name": "n"}})),
            ["csi.nodePublishSecretRef.namespace: Required value"]
        );
        assert_eq!(
            check(json!({"driver": "d".repeat(64), "volumeHandle": "v"})),
            ["csi.driver: Too long: may not be more than 63 bytes"]
        );
    }

    #[test]
    fn sources_get_their_defaults() {
        let mut owner = json!({"hostPath": {"path": "/x"}, "rbd": {"user": "me"}});
        fill(&mut owner);
        assert_eq!(owner["hostPath"]["type"], "");
        assert_eq!(owner["rbd"], json!({"user": "me", "pool": "rbd", "keyring": "/etc/ceph/keyring"}));
    }
}
