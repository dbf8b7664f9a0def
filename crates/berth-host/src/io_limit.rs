//! I/O limits on a block device, for every process of the machine, by control groups.
//!
//! With cgroup v2 the groups below the root get the limit, and with them all that is below (the root itself cannot
//! be limited). With cgroup v1, where throttling knows no hierarchy, each group gets it, so that one made later has
//! none until the limits are applied again.
//!
//! The kernel keeps limits by the number of a device. A loop device that is detached passes them on to the next
//! file attached to that number, unless they are cleared or set anew then.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    error::{Doing as _, Error, Result},
    mount,
};

/// What a device may be asked for in a second; `None` is without limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// The bytes that may be read per second.
    pub read_bps: Option<u64>,
    /// The bytes that may be written per second.
    pub write_bps: Option<u64>,
    /// The reads that may be made per second.
    pub read_iops: Option<u64>,
    /// The writes that may be made per second.
    pub write_iops: Option<u64>,
}

/// Where limits were set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Applied {
    /// The number of control groups.
    pub groups: usize,
}

/// The root of the control groups that limit I/O.
#[derive(Debug)]
enum Hierarchy {
    V1(PathBuf),
    V2(PathBuf),
}

/// Whether this machine can limit I/O, and lets us.
pub fn available() -> bool {
    Hierarchy::find().is_ok_and(|hierarchy| hierarchy.is_some())
}

/// Gives the device, by its major and minor number, exactly these limits.
///
/// Where I/O cannot be limited, limits are an error of kind `Unsupported` and their absence is already so.
pub fn apply(device: (u32, u32), limits: &Limits) -> Result<Applied> {
    let name = format!("{}:{}", device.0, device.1);
    let refuse = |kind, why| Error::new(format!("limit the I/O of device {name}"), io::Error::new(kind, why));
    if [limits.read_bps, limits.write_bps, limits.read_iops, limits.write_iops].contains(&Some(0)) {
        return Err(refuse(io::ErrorKind::InvalidInput, "a limit of 0 would stop all I/O"));
    }
    match Hierarchy::find()? {
        Some(hierarchy) => hierarchy.apply(&name, limits),
        None if *limits == Limits::default() => Ok(Applied { groups: 0 }),
        None => Err(refuse(
            io::ErrorKind::Unsupported,
            "no control group hierarchy with an I/O controller is mounted here from its root",
        )),
    }
}

impl Hierarchy {
    fn find() -> Result<Option<Self>> {
        let mounts = mount::mounts()?;
        // A container may see only its own part of a hierarchy: below, some files are missing and others appear.
        let v2 = mounts
            .iter()
            .filter(|mount| mount.fs_type == "cgroup2" && !mount.target.join("cgroup.type").exists())
            .map(|mount| Self::V2(mount.target.clone()));
        let v1 = mounts
            .iter()
            .filter(|mount| mount.fs_type == "cgroup" && mount.super_options.split(',').any(|o| o == "blkio"))
            .filter(|mount| mount.target.join("release_agent").exists())
            .map(|mount| Self::V1(mount.target.clone()));
        for hierarchy in v2.chain(v1) {
            if !hierarchy.groups()?.is_empty() {
                return Ok(Some(hierarchy));
            }
        }
        Ok(None)
    }

    /// The groups to be limited.
    fn groups(&self) -> Result<Vec<PathBuf>> {
        let (root, file) = match self {
            Self::V1(root) => (root, "blkio.throttle.read_bps_device"),
            Self::V2(root) => (root, "io.max"),
        };
        let mut groups = match self {
            Self::V1(root) => vec![root.clone()],
            Self::V2(_) => Vec::new(),
        };
        let mut unseen = children(root)?;
        while let Some(group) = unseen.pop() {
            if matches!(self, Self::V1(_)) {
                unseen.extend(children(&group)?);
            }
            groups.push(group);
        }
        groups.retain(|group| group.join(file).exists());
        Ok(groups)
    }

    fn apply(&self, device: &str, limits: &Limits) -> Result<Applied> {
        let mut applied = Applied { groups: 0 };
        for group in self.groups()? {
            match self.limit(&group, device, limits) {
                Ok(()) => applied.groups += 1,
                // Groups come and go.
                Err(_) if !group.exists() => {}
                Err(error) => {
                    return Err(error).doing(&format!("limit the I/O of device {device} for"), group);
                }
            }
        }
        Ok(applied)
    }

    fn limit(&self, group: &Path, device: &str, limits: &Limits) -> io::Result<()> {
        match self {
            Self::V1(_) => {
                for (file, limit) in [
                    ("blkio.throttle.read_bps_device", limits.read_bps),
                    ("blkio.throttle.write_bps_device", limits.write_bps),
                    ("blkio.throttle.read_iops_device", limits.read_iops),
                    ("blkio.throttle.write_iops_device", limits.write_iops),
                ] {
                    // Here 0 is the word for no limit, and of a large number of operations the kernel would keep
                    // only the lower half.
                    let most = if file.contains("iops") { u64::from(u32::MAX) } else { u64::MAX };
                    let limit = limit.map_or(0, |limit| limit.min(most));
                    fs::write(group.join(file), format!("{device} {limit}"))?;
                }
                Ok(())
            }
            Self::V2(_) => {
                let text = |limit: Option<u64>| limit.map_or("max".to_owned(), |limit| limit.to_string());
                let line = format!(
                    "{device} rbps={} wbps={} riops={} wiops={}",
                    text(limits.read_bps),
                    text(limits.write_bps),
                    text(limits.read_iops),
                    text(limits.write_iops)
                );
                fs::write(group.join("io.max"), line)
            }
        }
    }
}

/// The groups right below one, which may be gone by now.
fn children(group: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(group) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.doing("list", group)?,
    };
    let mut groups = Vec::new();
    for entry in entries {
        let Ok(entry) = entry else { break };
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            groups.push(entry.path());
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests;
