//! FlexVolume drivers in shell: one that records how it is called, with what Kubernetes calls it with, and the tutorial's for
//! NFS shares.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{driver::binary, machine, nfs::Server};

/// The driver that records its calls, for a shell.
pub const RECORDING: &str = include_str!("flex/driver.sh");
/// The tutorial's driver for NFS shares, for a shell.
const SCRIPT: &str = include_str!("../../testbed/flex/nfs.sh");
/// Runs the script beside it, and stops after the work of the call that `.stop` names.
const STOPS: &str = include_str!("flex/stops.sh");
/// `mount -t nfs` for a kernel that has no NFS client: `berth flex` mounts the share through FUSE.
const MOUNT: &str = include_str!("flex/mount.sh");

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

    /// Installs the tutorial's script, whose `mount -t nfs` is the kernel's. For a server of this test, which the kernel may have
    /// no client for, it is done through FUSE.
    pub fn install_script(plugins: &Path, vendor: &str, server: Option<&Server>) -> Result<Self> {
        let driver = Self::install(plugins, vendor, "nfs", STOPS)?;
        let script = driver.directory.join(".script");
        fs::write(&script, SCRIPT)?;
        if let Some(server) = server {
            let (fuse, tools) = (driver.directory.join(".fuse"), driver.directory.join(".bin"));
            let (plugins, state) = (fuse.display().to_string(), fuse.join("state").display().to_string());
            let words =
                ["flex", "install", "--plugin-dir", &plugins, "--state-dir", &state, "--mount-mode=fuse"];
            let program = binary()?.display().to_string();
            machine::run(&program, &[&words[..], &["--default-mount-options", &server.options]].concat())?;
            fs::create_dir_all(&tools)?;
            fs::write(tools.join("mount"), MOUNT)?;
            fs::set_permissions(tools.join("mount"), fs::Permissions::from_mode(0o755))?;
        }
        Ok(driver)
    }

    /// The path of the executable.
    pub fn executable(&self) -> Result<PathBuf> {
        let name = self.name.rsplit('/').next().context("a driver has a name")?;
        Ok(self.directory.join(name))
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

/// A volume object of a CSI driver with these attributes, its class, its claim and a pod that uses it.
pub fn pod_with_csi_claim(driver: &str, name: &str, attributes: &Value, image: &str) -> Vec<Value> {
    let mut objects = pod_with_claim("", name, image);
    let source = json!({ "driver": driver, "volumeHandle": name, "volumeAttributes": attributes });
    if let Some(spec) = objects[1]["spec"].as_object_mut() {
        spec.remove("flexVolume");
        spec.insert("csi".to_owned(), source);
    }
    objects
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
