//! Disks that are attached to this node: found, formatted if blank, checked, mounted, measured, grown.
//!
//! What a formatting that was cut off left on a disk is not blank, and would never be formatted again. So a note is written
//! before a disk is formatted, and removed after; a disk with such a note is ours to format once more.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_core::{Access, AccessKind, Capacity, CapacityRange, VolumeId};
use berth_host::{
    format::{self, Content, Filesystem},
    loopdev::{self, LoopDevice},
    mount,
};
use serde::{Deserialize, Serialize};

use super::{Deadline, DiskNames, Finder};
use crate::{
    Amounts, Context, Error, NodeExpanded, NodeExpansion, NodeVolume, Result, Source, Sources, Staging,
    Stats, Usage, blocking,
    image::{self, TOOL_DEADLINE},
    records::{self, Records},
};

/// How long a disk that was made larger may take to show it on its node.
const GROWTH: Duration = Duration::from_secs(20);

/// What a provider knows of its disks on a node.
pub(crate) trait Disks: Send + Sync + 'static {
    /// What the disk of a volume is known by; an error if the call does not say enough.
    fn wanted(&self, volume: &NodeVolume) -> Result<DiskNames>;

    /// Whether a blank disk may be formatted.
    fn may_format(&self, volume: &NodeVolume) -> bool;
}

/// A disk that is staged here, for the calls that do not say again what it is.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    volume: String,
    wanted: DiskNames,
    /// The filesystem that is being made on it, while that goes on.
    formatting: Option<String>,
}

/// The node's side of a driver whose volumes are disks.
#[derive(Debug)]
pub(crate) struct DiskNode<D> {
    disks: D,
    finder: Finder,
    records: Records<Record>,
}

impl<D: Disks> DiskNode<D> {
    /// Disks that the finder finds; the directory keeps the records of those that are staged.
    pub(crate) fn open(disks: D, finder: Finder, directory: &Path) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { disks, finder, records: Records::open(directory)? }))
    }

    /// What the volume's disk is known by: as this call says, or as it was staged.
    async fn wanted(&self, volume: &NodeVolume) -> Result<DiskNames> {
        match self.disks.wanted(volume) {
            Err(error) => match self.records.read(&key(&volume.id)).await? {
                Some(record) => Ok(record.wanted),
                None => Err(error),
            },
            wanted => wanted,
        }
    }

    async fn device_of(&self, id: &VolumeId) -> Result<PathBuf> {
        let record = self.records.read(&key(id)).await?;
        let record =
            record.ok_or_else(|| Error::Precondition(format!("volume {id:?} is not staged here")))?;
        self.finder.wait(&record.wanted, Deadline::after(Duration::from_secs(5))).await
    }

    /// Makes sure that there is a filesystem on the device; formats it only if it is provably blank.
    async fn prepare(
        &self,
        volume: &NodeVolume,
        wanted: DiskNames,
        device: &Path,
        asked: Option<Filesystem>,
        read_only: bool,
    ) -> Result<Filesystem> {
        let id = key(&volume.id);
        let cut_off = self.records.read(&id).await?.and_then(|record| record.formatting);
        let cut_off: Option<Filesystem> = cut_off.and_then(|fs| fs.parse().ok());
        let record = |formatting: Option<Filesystem>| Record {
            volume: volume.id.to_string(),
            wanted: wanted.clone(),
            formatting: formatting.map(|fs| fs.as_str().to_owned()),
        };
        let at = device.to_owned();
        let found = match cut_off {
            Some(_) => Content::Blank,
            None => blocking(move || Ok(format::probe(&at)?)).await?,
        };
        let make = match found {
            Content::Blank if !read_only && self.disks.may_format(volume) => {
                asked.unwrap_or(Filesystem::Ext4)
            }
            found => {
                let filesystem = image::recognise(found, asked)?;
                self.records.write(&id, &record(None)).await?;
                return Ok(filesystem);
            }
        };
        // Once this is written, whatever is on the disk is what we put there.
        self.records.write(&id, &record(Some(make))).await?;
        let at = device.to_owned();
        let again = cut_off.is_some();
        tracing::info!(volume.id = %volume.id, device = %device.display(), filesystem = %make, again, "formatting a blank disk");
        blocking(move || {
            let format_disk = if again { format::remake_on_device } else { format::make_on_device };
            Ok(format_disk(&at, make, TOOL_DEADLINE)?)
        })
        .await?;
        self.records.write(&id, &record(None)).await?;
        Ok(make)
    }
}

impl<D: Disks> Sources for DiskNode<D> {
    async fn source(&self, ctx: &Context, volume: &NodeVolume) -> Result<Source> {
        let staging =
            volume.staging.clone().ok_or_else(|| Error::precondition("the volume is not staged"))?;
        if volume.capability.access.kind() == AccessKind::Mount {
            let at = staging.clone();
            if !blocking(move || Ok(mount::is_mount_point(&at)?)).await? {
                return Err(Error::Precondition(format!(
                    "the volume is no longer mounted at {}; stage it again",
                    staging.display()
                )));
            }
            return Ok(Source::directory(staging));
        }
        let wanted = self.wanted(volume).await?;
        let device = self.finder.wait(&wanted, Deadline::of(ctx)).await?;
        if !volume.read_only {
            return Ok(Source::device(device));
        }
        blocking(move || {
            // A bind cannot keep anybody from writing to a device; a loop device over it can.
            let known = read_only_over(&device)?.first().copied();
            let number = if let Some(number) = known {
                number
            } else {
                let options = loopdev::Options { read_only: true, direct_io: true, autoclear: false };
                LoopDevice::attach(&device, options)?.number()
            };
            Ok(Source::device(loopdev::path_of(number)))
        })
        .await
    }
}

impl<D: Disks> Staging for DiskNode<D> {
    async fn stage(&self, ctx: &Context, volume: &NodeVolume, staging: &Path) -> Result<()> {
        let wanted = self.wanted(volume).await?;
        let device = self.finder.wait(&wanted, Deadline::of(ctx)).await?;
        let Access::Mount { fs_type, flags, .. } = &volume.capability.access else {
            let record = Record { volume: volume.id.to_string(), wanted, formatting: None };
            return self.records.write(&key(&volume.id), &record).await;
        };
        let asked = image::parse_filesystem(fs_type)?;
        let read_only = volume.read_only || volume.capability.mode.is_read_only();
        let (at, staged) = (device.clone(), staging.to_owned());
        if blocking(move || is_staged(&at, &staged)).await? {
            return Ok(());
        }
        let filesystem = self.prepare(volume, wanted, &device, asked, read_only).await?;
        let options = image::disk_options(filesystem, flags, read_only);
        let staging = staging.to_owned();
        blocking(move || mount_disk(&device, &staging, filesystem, &options)).await
    }

    async fn unstage(&self, _: &Context, id: &VolumeId, staging: &Path) -> Result<()> {
        let record = self.records.read(&key(id)).await?;
        let wanted = record.as_ref().map(|record| record.wanted.clone());
        let (finder, staging) = (self.finder.clone(), staging.to_owned());
        blocking(move || {
            // A disk that is gone, or not to be told from another, has nothing to take down.
            let device = wanted.and_then(|wanted| finder.find(&wanted).ok().flatten());
            if mount::is_mount_point(&staging)? {
                mount::unmount(&staging).map_err(|error| image::busy(error, &staging))?;
            }
            for number in device.as_deref().map(read_only_over).transpose()?.unwrap_or_default() {
                loopdev::detach(number)?;
            }
            Ok(())
        })
        .await?;
        // A formatting that was cut off is still to be done again when the volume comes back.
        match record {
            Some(record) if record.formatting.is_none() => self.records.remove(&key(id)).await,
            _ => Ok(()),
        }
    }
}

impl<D: Disks> Stats for DiskNode<D> {
    async fn usage(&self, _: &Context, id: &VolumeId, path: &Path) -> Result<Usage> {
        let at = path.to_owned();
        if blocking(move || Ok(at.is_dir() && mount::is_mount_point(&at)?)).await? {
            let at = path.to_owned();
            return blocking(move || image::usage_of_mount(&at)).await;
        }
        let device = self.device_of(id).await?;
        let total = blocking(move || Ok(loopdev::size(&device)?)).await?;
        // How much of a raw disk is in use only its user knows.
        Ok(Usage { bytes: Amounts { total, used: 0, available: 0 }, inodes: None })
    }
}

impl<D: Disks> NodeExpansion for DiskNode<D> {
    async fn expand_on_node(
        &self,
        ctx: &Context,
        id: &VolumeId,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded> {
        let at = path.to_owned();
        let mounted = blocking(move || Ok(if at.is_dir() { mount::mount_of(&at)? } else { None })).await?;
        let device = match &mounted {
            Some(mounted) => PathBuf::from(&mounted.source),
            None => self.device_of(id).await?,
        };
        let needed = range.required().map_or(0, Capacity::bytes);
        let end = Deadline::after(Deadline::of(ctx).left(GROWTH));
        let size = loop {
            let at = device.clone();
            let size = blocking(move || Ok(loopdev::size(&at)?)).await?;
            if size >= needed {
                break size;
            }
            if end.is_over() {
                return Err(Error::Unavailable(format!(
                    "{} still has {size} bytes, and {needed} are asked for; the controller expands the disk first, and \
                     this node has to notice it",
                    device.display()
                )));
            }
            let at = device.clone();
            blocking(move || {
                rescan(&at);
                Ok(())
            })
            .await?;
            tokio::time::sleep(Duration::from_millis(250)).await;
        };
        let Some(mounted) = mounted else { return Ok(NodeExpanded::Done(Capacity::new(size))) };
        let filesystem: Filesystem = mounted
            .fs_type
            .parse()
            .map_err(|_| Error::Precondition(format!("{} cannot be grown here", mounted.fs_type)))?;
        let at = path.to_owned();
        blocking(move || match format::grow_mounted(filesystem, &at) {
            Err(error) if image::grows_only_unmounted(filesystem, &error) => {
                Err(Error::Precondition(format!(
                    "growing a mounted ext4 needs CAP_SYS_RESOURCE, which this driver does not have: {}",
                    error.sentence()
                )))
            }
            grown => Ok(grown.map(drop)?),
        })
        .await?;
        Ok(NodeExpanded::Done(Capacity::new(size)))
    }
}

/// Whether this device is mounted at the staging path; an error if something else is.
fn is_staged(device: &Path, staging: &Path) -> Result<bool> {
    if !staging.is_dir() || !mount::is_mount_point(staging)? {
        return Ok(false);
    }
    let source = mount::mount_of(staging)?.map(|mounted| PathBuf::from(mounted.source));
    if source.and_then(|source| std::fs::canonicalize(source).ok()).as_deref() == Some(device) {
        return Ok(true);
    }
    Err(Error::Precondition(format!(
        "something else than {} is mounted at {}",
        device.display(),
        staging.display()
    )))
}

/// Checks the filesystem, mounts it and grows it to the size of its disk.
fn mount_disk(device: &Path, staging: &Path, filesystem: Filesystem, options: &mount::Options) -> Result<()> {
    if !options.attributes.read_only {
        if filesystem == Filesystem::Btrfs && format::is_identity_taken(device)? {
            // A restored or cloned disk beside its source: the kernel would take both for one filesystem.
            format::renew_identity(filesystem, device, TOOL_DEADLINE)?;
        }
        format::check(filesystem, device, TOOL_DEADLINE)?;
    }
    std::fs::create_dir_all(staging)
        .map_err(|error| berth_host::Error::new(format!("make {}", staging.display()), error))?;
    mount::filesystem(device, staging, filesystem.as_str(), options.attributes, &options.filesystem)
        .map_err(|error| image::refused_options(error, &options.filesystem))?;
    if options.attributes.read_only {
        return Ok(());
    }
    match format::grow_mounted(filesystem, staging) {
        Ok(_) => Ok(()),
        Err(error) if image::grows_only_unmounted(filesystem, &error) => {
            tracing::warn!(device = %device.display(), error = error.sentence(), "the filesystem cannot be grown here");
            Ok(())
        }
        Err(error) => {
            mount::unmount(staging)?;
            Err(error.into())
        }
    }
}

/// The loop devices that give a disk to those who may only read it.
fn read_only_over(device: &Path) -> Result<Vec<u32>> {
    let attached = loopdev::attached_below(device)?;
    Ok(attached.into_iter().filter(|attached| attached.read_only).map(|attached| attached.number).collect())
}

/// Asks the kernel to read a disk's size again, where it has to be asked.
fn rescan(device: &Path) {
    let Some(name) = device.file_name() else { return };
    let block = Path::new("/sys/class/block").join(name);
    for file in ["device/rescan", "device/rescan_controller"] {
        // Only SCSI and NVMe devices have one.
        let _ = std::fs::write(block.join(file), "1");
    }
}

fn key(id: &VolumeId) -> String {
    records::key("disk", id.as_str().as_bytes())
}

#[cfg(test)]
mod tests;
