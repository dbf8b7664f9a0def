//! `hostPath`: a path of the node, as it is. Nothing is mounted here and nothing is ever removed. The kubelet's directory,
//! which manifests of CSI drivers call `/var/lib/kubelet`, is this node's.

use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use berth_core::names::HOST_PATH_PLUGIN;
use berth_host::Error;
use berth_host::path::Dir;
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::HostPathVolumeSource;

use crate::layout::Layout;
use crate::plugin::{Failed, Placed, Plugin, PodVolume, Ready, Source};

/// The plugin for `hostPath`, of pods and of PersistentVolumes.
pub(super) struct HostPath {
    pub(super) layout: Layout,
}

#[async_trait]
impl Plugin for HostPath {
    fn name(&self) -> &'static str {
        HOST_PATH_PLUGIN
    }

    fn serves(&self, source: &Source) -> bool {
        spec(source).is_some()
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let spec =
            spec(&volume.source).ok_or_else(|| Failed::unchanged("the volume is no hostPath"))?.clone();
        let kind = spec.type_.unwrap_or_default();
        if spec.path.split('/').any(|part| part == "..") {
            return Err(Failed::unchanged(format!(
                "invalid HostPath `{}`: must not contain '..'",
                spec.path
            )));
        }
        let path = self.layout.locate(Path::new(&spec.path));
        let resolved = blocking(move || {
            check(&path, &kind)?;
            resolve(&path)
        });
        resolved.await.map(|path| Ready { path }).map_err(Failed::unchanged)
    }

    async fn tear_down(&self, _placed: &Placed) -> Result<(), Failed> {
        Ok(())
    }
}

fn spec(source: &Source) -> Option<&HostPathVolumeSource> {
    match source {
        Source::Inline(volume) => volume.host_path.as_ref(),
        Source::Persistent { volume, .. } => volume.spec.as_ref()?.host_path.as_ref(),
    }
}

/// Compares what is at `path` with the type that the volume names, making it where the type says so.
fn check(path: &Path, kind: &str) -> Result<(), String> {
    let found = match fs::metadata(path) {
        Ok(found) => Some(found.file_type()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            return Err(format!(
                "hostPath type check failed: read the attributes of {}: {error}",
                path.display()
            ));
        }
    };
    let (fits, noun) = match (kind, found) {
        ("", _) => return Ok(()),
        ("DirectoryOrCreate", None) => {
            return Dir::ensure(path, 0o755).map(drop).map_err(|error| error.sentence());
        }
        ("FileOrCreate", None) => return make_file(path).map_err(|error| error.sentence()),
        ("Directory" | "DirectoryOrCreate", found) => (found.is_some_and(|f| f.is_dir()), "a directory"),
        ("File" | "FileOrCreate", found) => (found.is_some_and(|f| f.is_file()), "a file"),
        ("Socket", found) => (found.is_some_and(|f| f.is_socket()), "a socket file"),
        ("CharDevice", found) => (found.is_some_and(|f| f.is_char_device()), "a character device"),
        ("BlockDevice", found) => (found.is_some_and(|f| f.is_block_device()), "a block device"),
        (other, _) => return Err(format!("{other} is an invalid volume type")),
    };
    if fits { Ok(()) } else { Err(format!("hostPath type check failed: {} is not {noun}", path.display())) }
}

/// Where a path leads: containers get no links. What is not there is left to them to complain about.
fn resolve(path: &Path) -> Result<PathBuf, String> {
    match fs::canonicalize(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(path.to_owned()),
        Err(error) => Err(format!("follow the links of {}: {error}", path.display())),
        Ok(path) => Ok(path),
    }
}

fn make_file(path: &Path) -> berth_host::Result<()> {
    let made = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path);
    match made.and_then(|file| file.set_permissions(Permissions::from_mode(0o644))) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::new(format!("make the file {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
