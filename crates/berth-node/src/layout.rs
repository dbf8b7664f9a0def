//! Where things lie on disk: the kubelet's layout, below the node's directory.

use std::path::{Path, PathBuf};

use berth_core::hex;
use berth_core::names::{CSI_PLUGIN, FLEX_PLUGIN, IMAGE_PLUGIN, LOCAL_PLUGIN, NFS_PLUGIN};
use sha2::{Digest, Sha256};

/// Where kubelets keep everything by default, which is what manifests of CSI drivers say.
const KUBELET_DIRECTORY: &str = "/var/lib/kubelet";

/// The kubelet's layout below one directory.
#[derive(Debug, Clone)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// The layout below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the directory that everything lies below.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path that a manifest means: what it calls by the kubelet's usual directory lies below this node's.
    pub fn locate(&self, path: &Path) -> PathBuf {
        path.strip_prefix(KUBELET_DIRECTORY).map_or_else(
            |_| path.to_owned(),
            |rest| {
                if rest.as_os_str().is_empty() { self.root.clone() } else { self.root.join(rest) }
            },
        )
    }

    /// Where drivers announce themselves by a socket.
    pub fn registry(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    /// Where drivers and plugins keep what belongs to the node.
    pub fn plugins(&self) -> PathBuf {
        self.root.join("plugins")
    }

    /// Where all pods lie, by uid.
    pub fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    /// What belongs to one pod.
    pub fn pod(&self, uid: &str) -> PathBuf {
        self.pods().join(uid)
    }

    /// A pod's volumes of one plugin; `plugin` as in `kubernetes.io/csi`.
    pub fn pod_volumes(&self, uid: &str, plugin: &str) -> PathBuf {
        self.pod(uid).join("volumes").join(escaped(plugin))
    }

    /// One volume of a pod; `name` is the volume's name in the pod, or the PersistentVolume's.
    pub fn pod_volume(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        self.pod_volumes(uid, plugin).join(name)
    }

    /// The link to a block device of a pod.
    pub fn pod_device(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        self.pod(uid).join("volumeDevices").join(escaped(plugin)).join(name)
    }

    /// What a plugin keeps about a pod's volume.
    pub fn pod_plugin(&self, uid: &str, plugin: &str, name: &str) -> PathBuf {
        self.pod(uid).join("plugins").join(escaped(plugin)).join(name)
    }

    /// Where a CSI driver's volume is staged: `globalmount` lies in it, beside `vol_data.json`.
    pub fn csi_staging(&self, driver: &str, handle: &str) -> PathBuf {
        self.plugins().join(CSI_PLUGIN).join(driver).join(sha256(handle))
    }

    /// What belongs to a CSI block volume: `dev`, `data`; `name` is the PersistentVolume's.
    pub fn csi_device(&self, name: &str) -> PathBuf {
        self.plugins().join(CSI_PLUGIN).join("volumeDevices").join(name)
    }

    /// Where a CSI block volume is staged.
    pub fn csi_device_staging(&self, name: &str) -> PathBuf {
        self.csi_device("staging").join(name)
    }

    /// Where a CSI block volume is published for a pod.
    pub fn csi_device_publish(&self, name: &str, uid: &str) -> PathBuf {
        self.csi_device("publish").join(name).join(uid)
    }

    /// Where all FlexVolume drivers mount their devices, by driver.
    pub fn flex_devices(&self) -> PathBuf {
        self.plugins().join(FLEX_PLUGIN)
    }

    /// Where a FlexVolume driver mounts its devices; `driver` as in `vendor/driver`.
    pub fn flex_mounts(&self, driver: &str) -> PathBuf {
        self.flex_devices().join(driver).join("mounts")
    }

    /// Where block devices of `local` volumes are mounted, by the names of their PersistentVolumes.
    pub fn local_mounts(&self) -> PathBuf {
        self.plugins().join(LOCAL_PLUGIN).join("mounts")
    }

    /// Where shares of `nfs` volumes are mounted for a moment, before they appear in a pod's directory.
    pub fn nfs_mounts(&self) -> PathBuf {
        self.plugins().join(NFS_PLUGIN).join("mounts")
    }

    /// Where OCI layouts and archives are found by the names of their images.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// Where images are unpacked for volumes.
    pub fn unpacked_images(&self) -> PathBuf {
        self.plugins().join(IMAGE_PLUGIN)
    }

    /// Where FlexVolume drivers are installed, unless somewhere else.
    pub fn volume_plugins(&self) -> PathBuf {
        self.root.join("volumeplugins")
    }

    /// The log of one run of a container.
    pub fn log(&self, namespace: &str, pod: &str, uid: &str, container: &str, attempt: u32) -> PathBuf {
        self.logs(namespace, pod, uid).join(container).join(format!("{attempt}.log"))
    }

    /// All logs of a pod.
    pub fn logs(&self, namespace: &str, pod: &str, uid: &str) -> PathBuf {
        self.root.join("logs").join(format!("{namespace}_{pod}_{uid}"))
    }

    /// Where a container runtime's part of what belongs to a container is kept.
    pub fn cri(&self) -> PathBuf {
        self.root.join("cri")
    }

    /// Where the runtime keeps containers that are processes.
    pub fn containers(&self) -> PathBuf {
        self.root.join("containers")
    }
}

/// A plugin's name as a directory's: `/` is not allowed there.
pub fn escaped(plugin: &str) -> String {
    plugin.replace('/', "~")
}

/// The SHA-256 of a text, in hexadecimal.
pub fn sha256(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}
