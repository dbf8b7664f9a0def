//! The kernel's NFS client with `berth nfs serve` and `berth up --nfs-export`.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::machine::run;
use berth_e2e::nfs::Server;
use berth_e2e::up::Machine;

use super::nfs_mounts;

const MYCSI: &str = include_str!("../../manifests/seed-001-mycsi.yaml");

/// A mount of the kernel's; unmounted when this is dropped.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(server: &Server) -> Result<Self> {
        let at = tempfile::tempdir()?;
        let options = format!("vers=3,proto=tcp,mountproto=tcp,nolock,hard,timeo=50,{}", server.options);
        let path = at.path().display().to_string();
        run("mount", &["-t", "nfs", "-o", &options, "127.0.0.1:/export", &path])?;
        Ok(Self(at))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = run("umount", &["-f", "-l", &self.0.path().display().to_string()]);
    }
}

#[test]
fn the_kernels_client_has_files_as_on_a_disk() -> Result<()> {
    let server = Server::start_own()?;
    let mounted = Mounted::new(&server)?;
    fs::set_permissions(mounted.path(""), fs::Permissions::from_mode(0o777))?;
    let content: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    fs::write(mounted.path("file"), &content)?;
    run("sync", &["-f", &mounted.path("file").display().to_string()])?;
    run("sh", &["-c", "echo 3 > /proc/sys/vm/drop_caches"])?;
    ensure!(fs::read(mounted.path("file"))? == content && fs::read(server.export().join("file"))? == content);
    fs::hard_link(mounted.path("file"), mounted.path("linked"))?;
    ensure!(fs::metadata(mounted.path("linked"))?.nlink() == 2);
    std::os::unix::fs::symlink("file", mounted.path("symlink"))?;
    ensure!(fs::read_link(mounted.path("symlink"))? == Path::new("file"));
    fs::create_dir(mounted.path("dir"))?;
    fs::rename(mounted.path("linked"), mounted.path("dir/moved"))?;
    run("mknod", &[&mounted.path("null").display().to_string(), "c", "1", "3"])?;
    ensure!(fs::metadata(server.export().join("null"))?.file_type().is_char_device());
    for number in 0..500 {
        fs::write(mounted.path(&format!("dir/{number}")), "")?;
    }
    ensure!(fs::read_dir(mounted.path("dir"))?.count() == 501);
    // Each process has its own rights.
    let own = mounted.path("own").display().to_string();
    let as_user = |user: &str, script: &str| {
        run("setpriv", &["--reuid", user, "--regid", user, "--clear-groups", "sh", "-c", script])
    };
    as_user("2001", &format!("umask 077 && echo secret > {own}"))?;
    ensure!(fs::metadata(server.export().join("own"))?.uid() == 2001);
    ensure!(as_user("2002", &format!("cat {own}")).is_err(), "another user reads what is private");
    fs::remove_dir_all(mounted.path("dir"))?;
    for name in ["file", "symlink", "null", "own"] {
        fs::remove_file(mounted.path(name))?;
    }
    ensure!(fs::read_dir(server.export())?.count() == 0, "something is left");
    Ok(())
}

#[test]
fn the_kernels_client_goes_on_when_the_server_was_killed() -> Result<()> {
    let mut server = Server::start_own()?;
    let mounted = Mounted::new(&server)?;
    let (path, count) = (mounted.path("log").display().to_string(), 60);
    // The writer is another process: one that has the file open while it starts the server would have to flush the file first.
    let script = format!(
        "set -e; i=0; while [ $i -lt {count} ]; do echo line $i >> {path}; sync {path}; i=$((i + 1)); done"
    );
    let writing = std::thread::spawn(move || run("sh", &["-c", &script]));
    let log = server.export().join("log");
    let begun = std::time::Instant::now();
    for least in [5, 25] {
        while fs::read_to_string(&log).unwrap_or_default().lines().count() < least {
            ensure!(begun.elapsed().as_secs() < 120, "nothing is written");
            std::thread::yield_now();
        }
        server.control("kill")?;
        server.control("start")?;
    }
    writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))?.context("write")?;
    let written = fs::read_to_string(&log)?;
    let expected: Vec<String> = (0..count).map(|number| format!("line {number}\n")).collect();
    let expected = expected.concat();
    ensure!(written == expected, "{written}");
    Ok(())
}

#[test]
fn the_lesson_runs_on_the_server_of_up_by_the_kernel() -> Result<()> {
    let export = tempfile::tempdir()?;
    let dir = export.path().display().to_string();
    let machine = Machine::start_with(&[
        "--driver=nfs",
        "--driver-name=mycsi.jtthink.com",
        "--nfs-export",
        &dir,
        "--nfs-export-as=/home/nfsdata",
        "--nfs-listen=127.0.0.1:12049",
    ])?;
    machine.apply(MYCSI)?;
    machine.wait("deployment/mycsi-nginx", "condition=Available")?;
    machine.exec_until("deployment/mycsi-nginx", "ls /tmp/data", |seen| seen == "podfile\n")?;
    let mounts = nfs_mounts(machine.dir())?;
    ensure!(!mounts.is_empty(), "the kernel has mounted nothing");
    machine.delete("deployment/mycsi-nginx pvc/mycsi-pvc")?;
    machine.until("nothing is mounted", || Ok(nfs_mounts(machine.dir())?.is_empty().then_some(())))?;
    machine.finish()
}
