//! The kernel's NFS server, for all tests of this process.

use std::{path::Path, time::Duration};

use berth_driver::{
    backend::Parameters,
    nfs::{Config, Nfs},
};

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

pub(crate) fn backend(dir: &Path) -> Nfs {
    let mut config = Config::new(dir.join("shares"), "node-1".parse().unwrap());
    config.mount_timeout = Duration::from_secs(30);
    Nfs::new(config).unwrap()
}
