//! A FlexVolume driver that records how it is called, and what Kubernetes calls it with.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// The driver, for a shell.
pub const RECORDING: &str = include_str!("flex/driver.sh");

/// A driver in a plugin directory.
#[derive(Debug, Clone)]
pub struct Driver {
    directory: PathBuf,
    /// Its name as objects have it.
    pub name: String,
}

impl Driver {
    /// Installs a script as `vendor~name/name`, under a hidden name first.
    pub fn install(plugins: &Path, vendor: &str, name: &str, script: &str) -> Result<Self> {
        let directory = plugins.join(format!("{vendor}~{name}"));
        fs::create_dir_all(&directory).context("make the driver's directory")?;
        let hidden = directory.join(".new");
        fs::write(&hidden, script)?;
        fs::set_permissions(&hidden, fs::Permissions::from_mode(0o755))?;
        fs::rename(hidden, directory.join(name))?;
        Ok(Self { directory, name: format!("{vendor}/{name}") })
    }

    /// Has the driver stop after the work of a call; none lets it go on.
    pub fn stop_after(&self, call: Option<&str>) -> Result<()> {
        let _ = fs::remove_file(self.directory.join(".stopped"));
        fs::write(self.directory.join(".stop"), call.unwrap_or_default()).context("write .stop")
    }

    /// Whether the driver has done the work after which it stops.
    pub fn has_stopped(&self) -> bool {
        self.directory.join(".stopped").exists()
    }

    /// What is attached: the volume's and the node's name of each.
    pub fn attached(&self) -> Result<Vec<String>> {
        let names = fs::read_dir(&self.directory)?.map(|entry| Ok(entry?.file_name().into_string()));
        let names: Vec<_> = names.collect::<Result<_>>()?;
        Ok(names.into_iter().flatten().filter(|name| name.starts_with(".attached-")).collect())
    }

    /// All calls, one a line, with texts that differ from run to run replaced.
    pub fn calls(&self, replacements: &[(&str, &str)]) -> Result<Vec<String>> {
        let mut text = fs::read_to_string(self.directory.join(".calls")).unwrap_or_default();
        for (from, to) in replacements {
            text = text.replace(from, to);
        }
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// The calls that do something, in their order. How often a driver is asked `init`, `getvolumename` and `isattached`
    /// depends on time and on how many ask.
    pub fn work(&self, replacements: &[(&str, &str)]) -> Result<Vec<String>> {
        let calls = self.calls(replacements)?;
        let asks = |call: &String| {
            ["init", "getvolumename", "isattached"].contains(&call.split('\t').next().unwrap_or_default())
        };
        Ok(calls.into_iter().filter(|call| !asks(call)).collect())
    }

    /// Removes the driver with all that it recorded.
    pub fn remove(&self) -> Result<()> {
        fs::remove_dir_all(&self.directory).context("remove the driver")
    }
}

/// A pod with the volume of a driver, described in the pod, with a Secret and a group.
pub fn pod_with_volume(driver: &str, image: &str) -> Vec<Value> {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "flex" }, "type": driver,
        "stringData": { "password": "open sesame" },
    });
    let source = json!({
        "driver": driver, "fsType": "xfs", "options": { "share": "a&b", "Server": "s" },
        "secretRef": { "name": "flex" },
    });
    let mut pod = pod("inline", json!({ "name": "vol", "flexVolume": source }), image);
    pod["spec"]["securityContext"] = json!({ "fsGroup": 4321 });
    vec![secret, pod]
}

/// The calls that a driver without attachment gets for [`pod_with_volume`], in upstream's order; the pod's directory of
/// volumes is `PODS`, its uid `UID`, its namespace `NAMESPACE` and the driver `VENDOR~NAME`.
pub fn calls_without_attachment() -> Vec<String> {
    let directory = "PODS/UID/volumes/VENDOR~NAME/vol";
    let json = r#"{"Server":"s","kubernetes.io/fsType":"xfs","kubernetes.io/mounterArgs.FsGroup":"4321","kubernetes.io/pod.name":"inline","kubernetes.io/pod.namespace":"NAMESPACE","kubernetes.io/pod.uid":"UID","kubernetes.io/pvOrVolumeName":"vol","kubernetes.io/readwrite":"rw","kubernetes.io/secret/password":"b3BlbiBzZXNhbWU=","kubernetes.io/serviceAccount.name":"default","share":"a\u0026b"}"#;
    vec![format!("mount\t{directory}\t{json}"), format!("unmount\t{directory}")]
}

/// A volume object of a driver, its class, its claim and a pod that uses it.
pub fn pod_with_claim(driver: &str, name: &str, image: &str) -> Vec<Value> {
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": name },
        "provisioner": "kubernetes.io/no-provisioner", "allowVolumeExpansion": true,
    });
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "capacity": { "storage": "1Mi" }, "accessModes": ["ReadWriteOnce"], "storageClassName": name,
            "persistentVolumeReclaimPolicy": "Retain",
            "flexVolume": { "driver": driver, "options": { "disk": "one" } },
        },
    });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "flex" },
        "spec": {
            "storageClassName": name, "volumeName": name, "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Mi" } },
        },
    });
    let source = json!({ "name": "vol", "persistentVolumeClaim": { "claimName": "flex" } });
    vec![class, volume, claim, pod("claimed", source, image)]
}

/// The calls that a driver with attachment gets for [`pod_with_claim`], whose volume grows to 2 MiB while the pod runs, in
/// upstream's order. The volume is `VOLUME`, the node `NODE`, the node's directory `ROOT`; the others are as above.
pub fn calls_with_attachment() -> Vec<String> {
    let options = |more: &str| {
        format!(
            r#"{{"disk":"one","kubernetes.io/fsType":""{more},"kubernetes.io/pvOrVolumeName":"VOLUME","kubernetes.io/readwrite":"rw""#
        )
    };
    let plain = options("") + "}";
    let pod = options(
        r#","kubernetes.io/pod.name":"claimed","kubernetes.io/pod.namespace":"NAMESPACE","kubernetes.io/pod.uid":"UID""#,
    ) + r#","kubernetes.io/serviceAccount.name":"default"}"#;
    let device = "/dev/flex-VOLUME";
    let global = "ROOT/plugins/kubernetes.io/flexvolume/VENDOR/NAME/mounts/VOLUME";
    let directory = "PODS/UID/volumes/VENDOR~NAME/VOLUME";
    vec![
        format!("attach\t{plain}\tNODE"),
        format!("waitforattach\t{device}\t{plain}"),
        format!("mountdevice\t{global}\t{device}\t{plain}"),
        format!("mount\t{directory}\t{pod}"),
        format!("expandfs\t{plain}\t{device}\t{directory}\t2097152\t1048576"),
        format!("unmount\t{directory}"),
        format!("unmountdevice\t{global}"),
        "detach\tVOLUME\tNODE".to_owned(),
    ]
}

/// Checks that a driver was called as it should be.
pub fn compare(calls: &[String], expected: &[String]) -> Result<()> {
    ensure!(
        calls == expected,
        "the driver was called\n{}\nand not\n{}",
        calls.join("\n"),
        expected.join("\n")
    );
    Ok(())
}

/// A pod that sleeps, with a volume at /data.
#[expect(clippy::needless_pass_by_value, reason = "callers write the value in place")]
pub fn pod(name: &str, volume: Value, image: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": image, "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", "exec sleep 1000000"],
                "volumeMounts": [{ "name": volume["name"], "mountPath": "/data" }],
            }],
            "volumes": [volume],
        },
    })
}

/// Objects as one manifest.
pub fn manifest(objects: &[Value]) -> String {
    json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string()
}
