//! What stands on disk: volumes that an earlier life of this process may have brought, and directories of pods.

use std::path::Path;
use std::sync::Arc;

use berth_host::Doing as _;
use berth_host::path::{Dir, remove_tree};

use super::state::State;
use crate::layout::Layout;
use crate::plugin::{Placed, Plugin};

/// Takes in all that may be there, so that it is kept or undone.
pub(super) fn reconstruct(layout: &Layout, plugins: &[Arc<dyn Plugin>], state: &mut State) {
    for uid in names(&layout.pods()) {
        for (directory, block) in [("volumes", false), ("volumeDevices", true)] {
            let top = layout.pod(&uid).join(directory);
            for escaped in names(&top) {
                let name = escaped.replace('~', "/");
                let Some(plugin) = plugins.iter().find(|plugin| plugin.owns(&name)) else {
                    tracing::warn!(path = %top.join(&escaped).display(), "left alone: no kind of volume of this name");
                    continue;
                };
                for spec_name in names(&top.join(&escaped)) {
                    let placed = Placed { plugin: name.clone(), pod_uid: uid.clone(), spec_name, block };
                    let device = plugin.device_of(&placed);
                    state.reconstruct(placed, plugin, device);
                }
            }
        }
    }
    for plugin in plugins {
        for placed in plugin.placed() {
            let device = plugin.device_of(&placed);
            state.reconstruct(placed, plugin, device);
        }
        for device in plugin.staged() {
            state.reconstruct_device(device, plugin);
        }
    }
}

/// Removes the directory of a pod that has no volumes any more; "not there" is success.
///
/// What is left of its volumes is removed only where it is empty directories, and nothing below a mount point is.
pub(crate) fn remove_pod(layout: &Layout, uid: &str) -> berth_host::Result<()> {
    let directory = layout.pod(uid);
    if !directory.try_exists().doing("search", &directory)? {
        return Ok(());
    }
    let pod = Dir::open(&directory)?;
    for kind in ["volumes", "volumeDevices"] {
        pod.remove_empty_tree(kind)?;
    }
    remove_tree(&directory).map(drop)
}

/// The names in a directory; none if it is not there.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
