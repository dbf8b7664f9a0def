//! Shows a published volume to the group that a call names (`volume_mount_group`).
//!
//! On disk all files of a volume belong to one group, whichever that is; where the volume is published a mount shows that group
//! as the one of the call, and the other way round. So the pod that uses the volume next, or at the same time, may have
//! another group, and no file is touched. That all belong to one group is what the top of the volume says: it belongs to the
//! group, which may write it, and has set-group-ID, so that new files follow. A volume whose top does not say so yet is
//! walked once. Where the kernel or the filesystem cannot show other ids, the files are given to the group of the call, once
//! for each change of the group. Files of a filesystem that is mounted read-only stay as they are, and are shown alike.

use std::{os::fd::AsFd as _, path::Path};

use berth_host::{Change, mount, ownership, path::Dir, user_namespace::UserNamespace};

use rustix::io::Errno;

use crate::{Result, Source};

/// Shows what was bound at `target` from `source` to the group `gid`.
pub(super) fn show(source: &Source, target: &Path, gid: u32) -> Result<()> {
    let top = source.open()?;
    let Some((own, namespace)) = exchanged(&top, target, gid)? else {
        give(&top, gid)?;
        return Ok(());
    };
    let change = give(&top, own)?;
    mount::map_ids_at(target, namespace.as_fd())?;
    tracing::info!(target.path = %target.display(), own, gid, ?change, "a mount shows the volume's group as the pod's");
    Ok(())
}

/// Gives all files to a group, unless nobody can change them.
fn give(top: &Dir, gid: u32) -> Result<Change> {
    match ownership::give_to_group(top, gid) {
        Err(error) if error.errno() == Some(Errno::ROFS.raw_os_error()) => {
            tracing::info!(gid, "the filesystem is mounted read-only: its files keep their groups and modes");
            Ok(Change::AlreadyTrue)
        }
        given => Ok(given?),
    }
}

/// The group that the files have on disk, and how it is shown as `gid`, unless it is that or cannot be.
fn exchanged(top: &Dir, target: &Path, gid: u32) -> Result<Option<(u32, UserNamespace)>> {
    let own = top.group()?;
    if own == gid {
        return Ok(None);
    }
    let mappable = UserNamespace::exchanging_groups(own, gid).and_then(|namespace| {
        mount::check_mappable(target, namespace.as_fd())?;
        Ok((own, namespace))
    });
    Ok(mappable
        .inspect_err(|error| {
            let (target, error) = (target.display(), error.sentence());
            tracing::warn!(target.path = %target, gid, error, "all files of the volume are given to the pod's group");
        })
        .ok())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _, path::PathBuf};

    use berth_host::mount::Attributes;

    use super::*;

    /// Unmounts when the test ends.
    struct Mounted(PathBuf);

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = mount::unmount(&self.0);
        }
    }

    fn seen(path: &Path) -> (u32, u32) {
        let found = fs::metadata(path).unwrap();
        (found.gid(), found.mode() & 0o7777)
    }

    #[test]
    fn pods_of_different_groups_use_a_volume_at_the_same_time_and_its_files_stay_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let volume = directory.path().join("volume");
        fs::create_dir_all(volume.join("below")).unwrap();
        fs::write(volume.join("file"), "").unwrap();
        std::os::unix::fs::chown(volume.join("file"), None, Some(77)).unwrap();
        let source = Source::directory(volume.clone());
        let published = [4242, 5353].map(|gid| {
            let target = directory.path().join(gid.to_string());
            fs::create_dir(&target).unwrap();
            mount::bind(&volume, &target, Attributes::default()).unwrap();
            show(&source, &target, gid).unwrap();
            (gid, Mounted(target))
        });
        for (gid, Mounted(target)) in &published {
            assert_eq!(seen(target), (*gid, 0o2775));
            assert_eq!(seen(&target.join("below")), (*gid, 0o2775));
            assert_eq!(seen(&target.join("file")), (*gid, 0o664));
            fs::create_dir(target.join(format!("by-{gid}"))).unwrap();
        }
        for (_, Mounted(target)) in &published {
            for (gid, _) in &published {
                assert_eq!(seen(&target.join(format!("by-{gid}"))).0, seen(target).0, "new files follow");
            }
        }
        for path in ["", "below", "file", "by-4242", "by-5353"] {
            assert_eq!(seen(&volume.join(path)).0, 0, "{path}");
        }
        // The top says that all is given, so nothing below is looked at again.
        fs::set_permissions(volume.join("file"), std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        let target = directory.path().join("again");
        fs::create_dir(&target).unwrap();
        mount::bind(&volume, &target, Attributes::default()).unwrap();
        let again = Mounted(target);
        show(&source, &again.0, 6464).unwrap();
        assert_eq!(seen(&again.0.join("file")), (6464, 0o600));
    }

    #[test]
    fn files_that_nobody_can_change_are_shown_to_the_group_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let [volume, staged, target] = ["volume", "staged", "target"].map(|name| {
            let path = directory.path().join(name);
            fs::create_dir(&path).unwrap();
            path
        });
        fs::write(volume.join("file"), "").unwrap();
        let before = [seen(&volume), seen(&volume.join("file"))];
        let read_only = Attributes { read_only: true, ..Attributes::default() };
        mount::bind(&volume, &staged, read_only).unwrap();
        let _staged = Mounted(staged.clone());
        mount::bind(&staged, &target, read_only).unwrap();
        let _target = Mounted(target.clone());
        show(&Source::directory(staged), &target, 4242).unwrap();
        assert_eq!([seen(&target).0, seen(&target.join("file")).0], [4242; 2]);
        assert_eq!([seen(&volume), seen(&volume.join("file"))], before);
        // Where they have the group already nothing is to be shown.
        show(&Source::directory(target.clone()), &target, 4242).unwrap();
    }

    #[test]
    fn where_a_mount_cannot_show_another_group_the_files_are_given_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let [lower, upper, work, volume, target] =
            ["lower", "upper", "work", "volume", "target"].map(|name| {
                let path = directory.path().join(name);
                fs::create_dir(&path).unwrap();
                path
            });
        fs::write(lower.join("file"), "").unwrap();
        let options = [("lowerdir", &lower), ("upperdir", &upper), ("workdir", &work)]
            .map(|(key, path)| format!("{key}={}", path.display()));
        mount::filesystem("overlay".as_ref(), &volume, "overlay", Attributes::default(), &options).unwrap();
        let _volume = Mounted(volume.clone());
        mount::bind(&volume, &target, Attributes::default()).unwrap();
        let _target = Mounted(target.clone());
        show(&Source::directory(volume.clone()), &target, 4242).unwrap();
        assert_eq!(seen(&target.join("file")), (4242, 0o664));
        assert_eq!(seen(&volume.join("file")), (4242, 0o664));
    }
}
