//! What csi-driver-nfs does for a call: it has programs mount the share, works on it, and has them unmount it.

use std::{fs, path::Path};

use super::kernel::run;

/// Runs what blocks, on a thread that may.
pub(crate) async fn blocking(work: impl FnOnce() + Send + 'static) {
    tokio::task::spawn_blocking(work).await.unwrap();
}

/// Mounts a directory of the share.
pub(crate) fn mount(dir: &str, version: &str, at: &Path) {
    fs::create_dir(at).unwrap();
    let (source, options) = (format!("127.0.0.1:/{dir}"), format!("vers={version}"));
    run("mount", &["-t", "nfs", "-o", &options, &source, at.to_str().unwrap()]);
}

pub(crate) fn unmount(at: &Path) {
    run("umount", &[at.to_str().unwrap()]);
    fs::remove_dir(at).unwrap();
}

/// Does something on the share while it is mounted.
pub(crate) fn on_a_mount(at: &Path, version: &str, work: impl FnOnce()) {
    mount("", version, at);
    work();
    unmount(at);
}
