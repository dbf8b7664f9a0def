//! Filesystems on sparse image files, for tests.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::path::Dir;

/// A filesystem of 1 GiB, mounted until dropped.
#[derive(Debug)]
pub(crate) struct LoopFs {
    holder: tempfile::TempDir,
}

impl LoopFs {
    /// Makes and mounts an `ext4`, `xfs` or `btrfs`.
    pub(crate) fn new(kind: &str) -> Self {
        let holder = tempfile::tempdir().unwrap();
        let image = holder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(1 << 30).unwrap();
        run(&format!("mkfs.{kind}"), &["-q", image.to_str().unwrap()]);
        let filesystem = Self { holder };
        std::fs::create_dir(filesystem.path()).unwrap();
        run("mount", &["-o", "loop", image.to_str().unwrap(), filesystem.path().to_str().unwrap()]);
        filesystem
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> PathBuf {
        self.holder.path().join("mounted")
    }

    /// The root directory of the mounted filesystem.
    pub(crate) fn dir(&self) -> Dir {
        Dir::open(&self.path()).unwrap()
    }
}

impl Drop for LoopFs {
    fn drop(&mut self) {
        unmount(&self.path());
    }
}

/// A bind mount, there until dropped.
#[derive(Debug)]
pub(crate) struct Bind(PathBuf);

impl Bind {
    /// Mounts `source` on `target`.
    pub(crate) fn new(source: &Path, target: &Path) -> Self {
        run("mount", &["--bind", source.to_str().unwrap(), target.to_str().unwrap()]);
        Self(target.to_owned())
    }
}

impl Drop for Bind {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

/// Runs a tool that must succeed and returns what it printed.
#[expect(clippy::disallowed_methods, reason = "the tools of a test need no deadline")]
pub(crate) fn run(tool: &str, arguments: &[&str]) -> String {
    let output = Command::new(tool).args(arguments).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {arguments:?}: {complaint}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Lazily, since a failing test may still hold files open there.
fn unmount(target: &Path) {
    run("umount", &["--lazy", target.to_str().unwrap()]);
}
