//! Targets: made, bound and taken away again.

use std::os::unix::fs::symlink;

use berth_core::VolumeCapability;

use super::*;
use crate::{MachineMounts, TargetMounts};

/// A directory whose mounts go away with it.
struct MountedDir(tempfile::TempDir);

impl MountedDir {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn volume(&self) -> PathBuf {
        let path = self.path("volume");
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("data"), "kept").unwrap();
        path
    }
}

impl Drop for MountedDir {
    fn drop(&mut self) {
        let mut targets: Vec<_> = mount::mounts().unwrap().into_iter().map(|mount| mount.target).collect();
        targets.retain(|target| target.starts_with(self.0.path()));
        for target in targets.iter().rev() {
            let _ = mount::unmount_lazily(target);
        }
    }
}

fn mounted(flags: &[&str], group: Option<u32>) -> VolumeCapability {
    let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
    let access = Access::Mount { fs_type: String::new(), flags, group };
    VolumeCapability { access, mode: AccessMode::SingleNodeWriter }
}

const BLOCK: VolumeCapability =
    VolumeCapability { access: Access::Block, mode: AccessMode::SingleNodeWriter };

/// Makes a source appear at a target.
async fn bind(source: Source, target: &Path, capability: &VolumeCapability, read_only: bool) -> Result<()> {
    check_target(target, capability.access.kind())?;
    let wanted = Published {
        volume: "volume".parse().unwrap(),
        handle: None,
        target: target.to_owned(),
        capability: capability.clone(),
        read_only,
        phase: Phase::Mounted,
    };
    bind_target(&MachineMounts, &Arc::new(source), &wanted).await
}

async fn remove(target: &Path) -> Result<()> {
    unbind_target(&MachineMounts, target).await
}

async fn is_mounted(target: &Path) -> bool {
    TargetMounts::is_mounted(&MachineMounts, target).await.unwrap()
}

#[tokio::test]
async fn a_volume_appears_at_a_target_whose_parents_are_missing_and_leaves_nothing_behind() {
    let dir = MountedDir::new();
    let (volume, target) = (dir.volume(), dir.path("pods/1/volumes/target"));
    bind(Source::directory(&volume), &target, &mounted(&[], None), false).await.unwrap();
    assert!(is_mounted(&target).await);
    assert_eq!(fs::read_to_string(target.join("data")).unwrap(), "kept");

    remove(&target).await.unwrap();
    assert!(!target.exists());
    assert_eq!(fs::read_to_string(volume.join("data")).unwrap(), "kept");
    remove(&target).await.unwrap();
}

#[tokio::test]
async fn a_device_appears_at_an_empty_file() {
    let dir = MountedDir::new();
    let target = dir.path("device");
    bind(Source::device("/dev/null"), &target, &BLOCK, false).await.unwrap();
    assert!(fs::metadata(&target).unwrap().file_type().is_char_device());
    remove(&target).await.unwrap();
    assert!(!target.exists());
}

#[tokio::test]
async fn mount_options_and_read_only_reach_the_target_and_those_of_a_filesystem_do_not() {
    let dir = MountedDir::new();
    let (volume, target) = (dir.volume(), dir.path("target"));
    let capability = mounted(&["noexec", "data=ordered,nodev"], None);
    bind(Source::directory(&volume), &target, &capability, true).await.unwrap();
    let options = mount::mount_of(&target).unwrap().unwrap().options;
    for option in ["ro", "noexec", "nodev"] {
        assert!(options.split(',').any(|found| found == option), "{option} in {options}");
    }
    assert!(fs::write(target.join("new"), "").is_err());
}

#[tokio::test]
async fn a_target_with_something_in_it_is_refused_and_stays_as_it_is() {
    let dir = MountedDir::new();
    let full = dir.path("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("mine"), "precious").unwrap();
    let (text, link, empty) = (dir.path("text"), dir.path("link"), dir.path("empty"));
    fs::write(&text, "precious").unwrap();
    fs::create_dir(&empty).unwrap();
    symlink(&empty, &link).unwrap();
    for (target, kind, why) in [
        (&full, AccessKind::Mount, "not empty"),
        (&text, AccessKind::Block, "not empty"),
        (&text, AccessKind::Mount, "not a directory"),
        (&empty, AccessKind::Block, "not a regular file"),
        (&link, AccessKind::Mount, "symbolic link"),
    ] {
        let Err(Error::Precondition(sentence)) = check_target(target, kind) else {
            panic!("{target:?} as {kind}")
        };
        assert!(sentence.contains(why), "{sentence}");
    }
    for target in [&full, &text, &link] {
        assert!(matches!(remove(target).await, Err(Error::Precondition(_))), "{target:?}");
    }
    assert_eq!(fs::read_to_string(full.join("mine")).unwrap(), "precious");
    assert_eq!(fs::read_to_string(&text).unwrap(), "precious");
    assert!(link.is_symlink());
}

#[tokio::test]
async fn what_was_written_below_the_mount_is_never_removed() {
    let dir = MountedDir::new();
    let (volume, target) = (dir.volume(), dir.path("target"));
    fs::create_dir(&target).unwrap();
    fs::write(target.join("below"), "precious").unwrap();
    mount::bind(&volume, &target, Attributes::default()).unwrap();
    assert!(matches!(remove(&target).await, Err(Error::Precondition(_))));
    assert!(!is_mounted(&target).await);
    assert_eq!(fs::read_to_string(target.join("below")).unwrap(), "precious");
}

#[tokio::test]
async fn a_group_gets_the_files_also_for_reading() {
    let dir = MountedDir::new();
    let volume = dir.volume();
    let capability = mounted(&[], Some(7777));
    bind(Source::directory(&volume), &dir.path("reader"), &capability, true).await.unwrap();
    bind(Source::directory(&volume), &dir.path("writer"), &capability, false).await.unwrap();
    for target in ["reader", "writer"] {
        let seen = fs::metadata(dir.path(target).join("data")).unwrap();
        assert_eq!((seen.gid(), seen.mode() & 0o060), (7777, 0o060), "{target}");
    }
    assert_eq!(fs::metadata(volume.join("data")).unwrap().gid(), 0);
}

#[tokio::test]
async fn a_busy_target_is_an_error_and_stays_bound() {
    let dir = MountedDir::new();
    let (volume, target) = (dir.volume(), dir.path("target"));
    bind(Source::directory(&volume), &target, &mounted(&[], None), false).await.unwrap();
    let held = fs::File::open(target.join("data")).unwrap();
    let Err(Error::Host(error)) = remove(&target).await else { panic!("a file is open there") };
    assert_eq!(error.errno(), Some(rustix::io::Errno::BUSY.raw_os_error()));
    assert!(is_mounted(&target).await);
    drop(held);
    remove(&target).await.unwrap();
}
