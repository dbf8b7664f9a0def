//! The kernel's NFS server, for all tests of this process.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use berth_backends::{
    Context, NodeVolume, Parameters, Result, Sources as _, TargetMounts as _, Volume,
    nfs::{Config, Nfs},
};
use berth_core::{AccessMode, CapacityRange};
use berth_host::mount::{self, Attributes};

use super::calls::NewVolume;

/// Served as `/` by version 4, by its own path by version 3.
pub(crate) const EXPORT: &str = "/srv/berth-nfs";
pub(crate) const VERSIONS: [&str; 4] = ["3", "4.0", "4.1", "4.2"];
const SOON: Duration = Duration::from_secs(60);
/// What a test can fill.
const SIZE: &str = "size=256m";

pub(crate) fn run(program: &str, args: &[&str]) {
    berth_host::exec::run(program, args, SOON).unwrap_or_else(|error| panic!("{}", error.sentence()));
}

/// Starts the server, once; the script is given by who starts the machine.
pub(crate) fn serve() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        std::fs::create_dir_all(EXPORT).unwrap();
        run("mount", &["-t", "tmpfs", "-o", SIZE, "none", EXPORT]);
        let script =
            std::env::var("NFS_UP").expect("NFS_UP names the script that starts the kernel's NFS server");
        run(&script, &[EXPORT]);
    });
}

/// Starts the server's threads again, after `rpc.nfsd 0`.
pub(crate) fn start_again() {
    run("rpc.nfsd", &["-V", "3", "-V", "4", "-V", "4.1", "-V", "4.2", "-L", "10", "-G", "10", "8"]);
    std::fs::write("/proc/fs/nfsd/v4_end_grace", "Y").unwrap();
}

/// Exports the same again, `rw` or `ro`.
pub(crate) fn export(access: &str) {
    let options = format!("{access},sync,no_root_squash,insecure,no_subtree_check,fsid=0");
    run("exportfs", &["-o", &options, &format!("*:{EXPORT}")]);
    // What the server remembers of the old options.
    run("exportfs", &["-f"]);
}

/// What the share is called in a version.
pub(crate) fn share(version: &str) -> &'static str {
    if version == "3" { EXPORT } else { "/" }
}

pub(crate) fn class(version: &str, more: &[(&str, &str)]) -> Parameters {
    let options = format!("vers={version}");
    let own = [("server", "127.0.0.1"), ("share", share(version)), ("mountOptions", options.as_str())];
    own.iter().chain(more).map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}

pub(crate) fn config(dir: &Path) -> Config {
    let mut config = Config::new(dir.join("shares"), "node-1".parse().unwrap());
    config.mount_timeout = Duration::from_secs(60);
    config.program = program();
    config
}

pub(crate) async fn backend(dir: &Path) -> Nfs {
    Nfs::start(config(dir)).await.unwrap()
}

/// A directory whose mounts go away with it.
pub(crate) struct Scratch(tempfile::TempDir);

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// What is mounted here, and as what type.
    pub(crate) fn mounts(&self) -> Vec<mount::MountInfo> {
        mount::mounts().unwrap().into_iter().filter(|found| found.target.starts_with(self.path())).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = mount::unmount_below(self.path());
    }
}

pub(crate) fn capability(mode: AccessMode) -> berth_core::VolumeCapability {
    let access = berth_core::Access::Mount { fs_type: String::new(), flags: Vec::new(), group: None };
    berth_core::VolumeCapability { access, mode }
}

/// A volume to be made, of so many mebibytes.
pub(crate) fn new_volume(name: &str, mebibytes: i64, mode: AccessMode, parameters: Parameters) -> NewVolume {
    NewVolume {
        name: name.parse().unwrap(),
        range: CapacityRange::new(mebibytes << 20, 0).unwrap(),
        capabilities: vec![capability(mode)],
        parameters,
        source: None,
    }
}

/// Publishes as the services do.
pub(crate) async fn publish_as(
    backend: &Nfs,
    volume: &Volume,
    target: &Path,
    mode: AccessMode,
) -> Result<()> {
    let volume = NodeVolume {
        id: volume.id.clone(),
        capability: capability(mode),
        read_only: false,
        context: volume.context.clone(),
        publish_context: Parameters::new(),
        staging: None,
    };
    let source = backend.node.source(&Context::default(), &volume).await?;
    std::fs::create_dir_all(target).unwrap();
    backend.node.bind(&source, target, Attributes::default()).await
}

pub(crate) async fn unpublish(backend: &Nfs, target: &Path) {
    backend.node.unmount(target).await.unwrap();
}

/// The `berth` that mounts shares and works on images, given by who starts the machine; else this program.
pub(crate) fn program() -> PathBuf {
    std::env::var_os("BERTH_BIN").map_or_else(|| "/proc/self/exe".into(), Into::into)
}
