//! Deletes released hostPath volumes, as Kubernetes does for single machines: only what lies below /tmp.

use std::io;
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;

use berth_core::names::IN_TREE_VOLUME_FINALIZER;
use berth_core::names::events;
use berth_kube::Key;
use berth_kube::storage;

use super::apply::{self, Pair};
use super::{Controller, Error, plan};

/// Only below this may a directory be removed with its volume.
const ROOT: &str = "/tmp";

impl Controller {
    /// Removes the directory of a volume that is still released, then the volume.
    pub(super) async fn delete_host_path(&self, pair: &mut Pair) -> Result<(), Error> {
        let Some(volume) = self.still_released(pair).await? else { return Ok(()) };
        let path =
            volume.spec.as_ref().and_then(|spec| spec.host_path.as_ref()).map(|path| path.path.clone());
        let removed = tokio::task::spawn_blocking(move || remove(Path::new(ROOT), &path.unwrap_or_default()));
        if let Err(why) = removed.await.unwrap_or_else(|panic| Err(panic.to_string())) {
            for step in plan::fail(&volume, events::VOLUME_FAILED_DELETE, why.clone()) {
                apply::apply(&self.cluster, &self.recorder, &step, pair).await?;
            }
            return Err(Error::Reclaim(volume.name_any(), why));
        }
        let without = |volume: &mut PersistentVolume| {
            if let Some(finalizers) = &mut volume.metadata.finalizers {
                finalizers.retain(|finalizer| finalizer != IN_TREE_VOLUME_FINALIZER);
            }
        };
        let volume = Box::pin(self.cluster.update(volume.as_ref(), without)).await;
        match volume {
            Ok(volume) => Ok(self.cluster.delete(volume.as_ref()).await?),
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The volume as it is now, if it still is to be reclaimed: data is about to be lost, so both objects are asked for.
    pub(super) async fn still_released(
        &self,
        pair: &mut Pair,
    ) -> Result<Option<std::sync::Arc<PersistentVolume>>, Error> {
        let Some(known) = &pair.volume else { return Ok(None) };
        let Some(volume) = self.cluster.fetch::<PersistentVolume>(&Key::of(known.as_ref())).await? else {
            return Ok(None);
        };
        if volume.metadata.uid != known.metadata.uid {
            return Ok(None);
        }
        let Some(key) = storage::claim_of_volume(&volume) else { return Ok(None) };
        let claim = self.cluster.fetch::<PersistentVolumeClaim>(&key).await?;
        pair.volume = Some(volume.clone());
        Ok(plan::is_released(&volume, claim.as_deref()).then_some(volume))
    }
}

/// Removes a directory with all that is in it, also what is immutable (`chattr +i`); one that is gone is fine.
fn remove(root: &Path, path: &str) -> Result<(), String> {
    let refused = || format!("host_path deleter only supports /tmp/.+ but received provided {path}");
    let Some(target) = below(root, Path::new(path)) else { return Err(refused()) };
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    // A link on the way could lead out of /tmp.
    let parent = match target.parent().map(Path::canonicalize) {
        Some(Ok(parent)) => parent,
        Some(Err(error)) if gone(&error) => return Ok(()),
        Some(Err(error)) => return Err(format!("read the attributes of {path}: {error}")),
        None => return Err(refused()),
    };
    let root = root.canonicalize().map_err(|error| format!("resolve {}: {error}", root.display()))?;
    let Some(name) = target.file_name().filter(|_| parent.starts_with(&root)) else { return Err(refused()) };
    match berth_host::path::remove_tree(&parent.join(name)) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("remove {path}: {}", error.sentence())),
    }
}

/// The path without what says nothing, if it is strictly below `root` by its text.
fn below(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::RootDir | Component::Normal(_) => clean.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    (clean.starts_with(root) && clean != root).then_some(clean)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_below_the_root_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir_all(at("volume/deep")).unwrap();
        std::fs::write(at("volume/deep/file"), "x").unwrap();
        std::fs::create_dir(outside.path().join("kept")).unwrap();
        std::os::unix::fs::symlink(outside.path(), at("link")).unwrap();

        remove(root.path(), at("volume").to_str().unwrap()).unwrap();
        assert!(!at("volume").exists());
        remove(root.path(), at("volume").to_str().unwrap()).unwrap();
        remove(root.path(), at("never/there").to_str().unwrap()).unwrap();

        let kept = outside.path().join("kept");
        for path in [
            kept.to_str().unwrap(),
            at("link/kept").to_str().unwrap(),
            &format!("{}/../{}/kept", root.path().display(), outside.path().display()),
            root.path().to_str().unwrap(),
            "volume",
            "",
            "/",
        ] {
            let why = remove(root.path(), path).unwrap_err();
            assert!(why.contains("only supports /tmp/.+"), "{path}: {why}");
        }
        assert!(kept.exists());
        remove(root.path(), at("link").to_str().unwrap()).unwrap();
        assert!(kept.exists() && !at("link").exists());
    }

    #[test]
    fn what_is_immutable_is_removed_as_well() {
        let root = tempfile::tempdir().unwrap();
        let volume = root.path().join("volume");
        std::fs::create_dir_all(volume.join("deep")).unwrap();
        std::fs::write(volume.join("deep/file"), "x").unwrap();
        for name in ["deep/file", "deep"] {
            let arguments =
                [std::ffi::OsStr::new("+i"), volume.join(name).as_os_str()].map(ToOwned::to_owned);
            berth_host::exec::run("chattr", arguments, std::time::Duration::from_secs(10)).unwrap();
        }
        remove(root.path(), volume.to_str().unwrap()).unwrap();
        assert!(!volume.exists());
    }
}
