//! Volumes on this node: staged, handed out, measured, grown.
//!
//! A directory or subvolume is simply there; staging it only checks that. An image is attached to a loop device,
//! formatted when it is provably blank, grown when its filesystem is smaller than it, and mounted.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use berth_core::{Access, AccessKind, Capacity, CapacityRange, VolumeCapability, VolumeId};
use berth_host::{
    btrfs,
    format::{self, Content, Filesystem},
    io_limit,
    loopdev::{self, LoopDevice},
    mount,
    usage::{self, TreeUsage},
};
use parking_lot::MutexGuard;

use super::{
    Inner, Local, Walk,
    content::{DATA, image_path},
    kind::{Kind, Tunable, Tuning},
    record::{Key, VOLUME, VolumeRecord},
};
use crate::{
    Amounts, Context, Error, NodeExpanded, NodeExpansion, NodeVolume, Result, Source, Sources, StagedVolume,
    Staging, Stats, Usage,
    image::{self, IMAGE, TOOL_DEADLINE},
};

const EBUSY: i32 = rustix::io::Errno::BUSY.raw_os_error();
/// A walk through a volume is repeated when it is this many times older than it took.
const WALK_AGE: u32 = 20;

impl Sources for Local {
    async fn check(&self, _: &Context, volume: &NodeVolume) -> Result<()> {
        volume.check_access(self.0.existing_volume(&volume.id)?.1.access)
    }

    async fn source(&self, _: &Context, volume: &NodeVolume) -> Result<Source> {
        let (key, record) = self.0.existing_volume(&volume.id)?;
        match (record.kind, volume.capability.access.kind()) {
            (Kind::Image, AccessKind::Mount) => {
                let staging =
                    volume.staging.as_ref().ok_or_else(|| Error::precondition("the volume is not staged"))?;
                if !mount::is_mount_point(staging)? {
                    return Err(Error::Precondition(format!(
                        "the volume is no longer mounted at {}; stage it again",
                        staging.display()
                    )));
                }
                Ok(Source::directory(staging))
            }
            (Kind::Image, AccessKind::Block) => {
                let image = self.0.image(key)?;
                let device = if volume.read_only {
                    self.0.devices.attach_read_only(key, &image)?
                } else {
                    self.0.devices.attach(key, &image, false)?
                };
                Ok(Source::device(device.path()))
            }
            (_, AccessKind::Mount) => Ok(Source::directory(self.0.data_path(key)?)),
            (kind, AccessKind::Block) => {
                Err(Error::Invalid(format!("a volume of kind {kind} cannot be used as a raw block device")))
            }
        }
    }
}

impl Staging for Local {
    async fn stage(&self, _: &Context, volume: &NodeVolume, staging: &Path) -> Result<()> {
        let (id, capability) = (volume.id.clone(), volume.capability.clone());
        let staging = staging.to_owned();
        self.blocking(move |inner| inner.stage(&id, &staging, &capability)).await
    }

    async fn unstage(&self, _: &Context, id: &VolumeId, staging: &Path) -> Result<()> {
        let (id, staging) = (id.clone(), staging.to_owned());
        self.blocking(move |inner| inner.unstage(&id, &staging)).await
    }

    async fn recover(&self, staged: Vec<StagedVolume>) -> Result<()> {
        self.blocking(move |inner| inner.recover_node(&staged)).await
    }
}

impl Stats for Local {
    async fn usage(&self, _: &Context, id: &VolumeId, path: &Path) -> Result<Usage> {
        let (id, path) = (id.clone(), path.to_owned());
        self.blocking(move |inner| inner.usage(&id, &path)).await
    }
}

impl NodeExpansion for Local {
    async fn expand_on_node(
        &self,
        _: &Context,
        id: &VolumeId,
        path: &Path,
        range: CapacityRange,
    ) -> Result<NodeExpanded> {
        let (id, path) = (id.clone(), path.to_owned());
        self.blocking(move |inner| inner.expand_on_node(&id, &path, range)).await
    }
}

impl Inner {
    fn stage(&self, id: &VolumeId, staging: &Path, capability: &VolumeCapability) -> Result<()> {
        let (key, record) = self.existing_volume(id)?;
        match (record.kind, &capability.access) {
            (Kind::Image, Access::Mount { fs_type, flags, .. }) => {
                self.stage_filesystem(key, &record, staging, fs_type, flags, capability.mode.is_read_only())
            }
            (Kind::Image, Access::Block) => self.stage_device(key, &record),
            (kind, Access::Mount { flags, .. }) => {
                if let Some(option) = mount::parse_options(flags).filesystem.first() {
                    return Err(Error::Invalid(format!(
                        "mount option {option:?} cannot be applied to a volume of kind {kind}, which has no \
                         filesystem of its own"
                    )));
                }
                self.data_path(key).map(|_| ())
            }
            (kind, Access::Block) => {
                Err(Error::Invalid(format!("a volume of kind {kind} cannot be used as a raw block device")))
            }
        }
    }

    fn stage_device(&self, key: Key, record: &VolumeRecord) -> Result<()> {
        let image = self.image(key)?;
        let device = self.devices.attach(key, &image, false)?;
        if loopdev::size(device.path())? < record.length() {
            loopdev::refresh_capacity(device.number())?;
        }
        self.tune_device(key, &self.tuning(record)?)
    }

    fn stage_filesystem(
        &self,
        key: Key,
        record: &VolumeRecord,
        staging: &Path,
        fs_type: &str,
        flags: &[String],
        read_only: bool,
    ) -> Result<()> {
        let image = self.image(key)?;
        if mount::is_mount_point(staging)? {
            let filesystem = record.filesystem.unwrap_or(Filesystem::Ext4);
            let options = image::mount_options(filesystem, flags, read_only);
            return self.confirm_staged(key, &image, staging, options.attributes.read_only);
        }
        let wanted = image::parse_filesystem(fs_type)?;
        let default = wanted.or(record.filesystem).unwrap_or(Filesystem::Ext4);
        let (found, _) = image::prepare(&image, default, wanted)?;
        let options = image::mount_options(found, flags, read_only);
        std::fs::create_dir_all(staging)
            .map_err(|error| berth_host::Error::new(format!("make {}", staging.display()), error))?;
        self.mount_image(key, &image, staging, found, &options)?;
        let finished = self
            .grow_staged(key, &image, staging, found, &options)
            .and_then(|()| self.tune_device(key, &self.tuning(record)?));
        if finished.is_err() {
            mount::unmount(staging)?;
            self.devices.release(key, &image)?;
        }
        finished
    }

    fn mount_image(
        &self,
        key: Key,
        image: &Path,
        staging: &Path,
        filesystem: Filesystem,
        options: &mount::Options,
    ) -> Result<()> {
        let device = self.devices.attach(key, image, true)?;
        mount::filesystem(
            device.path(),
            staging,
            filesystem.as_str(),
            options.attributes,
            &options.filesystem,
        )
        .map_err(|error| image::refused_options(error, &options.filesystem))?;
        self.devices.update(key, |known| {
            known.mounted_at = Some(staging.to_owned());
            known.staged_read_only = options.attributes.read_only;
        });
        Ok(())
    }

    /// Grows what was just mounted to the size of its image; unmounted for a moment where it must be.
    fn grow_staged(
        &self,
        key: Key,
        image: &Path,
        staging: &Path,
        filesystem: Filesystem,
        options: &mount::Options,
    ) -> Result<()> {
        if options.attributes.read_only {
            return Ok(());
        }
        match format::grow_mounted(filesystem, staging) {
            Err(error) if image::grows_only_unmounted(filesystem, &error) => {}
            grown => return Ok(grown.map(|_| ())?),
        }
        mount::unmount(staging)?;
        match self.devices.release(key, image) {
            Ok(()) => {
                format::grow_unmounted(filesystem, image, TOOL_DEADLINE)?;
            }
            // A pod's own mount, in a namespace of its own, still holds the filesystem; it is grown another time.
            Err(error) if error.errno() == Some(EBUSY) => {
                tracing::warn!(volume.id = %key, "the filesystem is in use elsewhere and cannot be grown now");
            }
            Err(error) => return Err(error.into()),
        }
        self.mount_image(key, image, staging, filesystem, options)
    }

    /// Whether what is mounted at the staging path is this image.
    fn confirm_staged(&self, key: Key, image: &Path, staging: &Path, read_only: bool) -> Result<()> {
        let mounted = mount::mount_of(staging)?.and_then(|mounted| loopdev::number_of(&mounted.source));
        let ours = mounted.map_or(Ok(None), |number| LoopDevice::open_if_attached(number, image))?;
        let Some(device) = ours else {
            return Err(Error::Precondition(format!("something else is mounted at {}", staging.display())));
        };
        self.devices.update(key, |known| {
            known.writable = Some(device.number());
            known.mounted_at = Some(staging.to_owned());
            known.staged_read_only = read_only;
        });
        Ok(())
    }

    fn unstage(&self, id: &VolumeId, staging: &Path) -> Result<()> {
        let Some(key) = Key::parse(VOLUME, id.as_str()) else { return Ok(()) };
        let record = self.state().volume(key);
        if record.as_ref().is_some_and(|record| record.kind != Kind::Image) {
            return Ok(());
        }
        let image = image_path(&self.volumes, key);
        if mount::is_mount_point(staging)? {
            mount::unmount(staging).map_err(|error| image::busy(error, staging))?;
        }
        match self.devices.release(key, &image) {
            // A pod's own mount, in a namespace of its own, still holds it; the device goes with that mount.
            Err(error) if error.errno() == Some(EBUSY) => {
                self.devices.update(key, |known| known.mounted_at = None);
            }
            released => released?,
        }
        if let Ok(bytes) = usage::file_allocated(&image) {
            self.state().set_used(key, bytes);
        }
        Ok(())
    }

    fn usage(&self, id: &VolumeId, path: &Path) -> Result<Usage> {
        let (key, record) = self.existing_volume(id)?;
        let size = if record.kind == Kind::Image { record.length() } else { record.size };
        let (usage, occupied) = match (record.kind, record.access) {
            (Kind::Image, AccessKind::Mount) => {
                (image::usage_of_mount(path)?, usage::file_allocated(&self.image(key)?)?)
            }
            (Kind::Image, AccessKind::Block) => {
                let used = usage::file_allocated(&self.image(key)?)?;
                let bytes = Amounts { total: size, used, available: size.saturating_sub(used) };
                (Usage { bytes, inodes: None }, used)
            }
            (Kind::Btrfs, _) => {
                let data = self.volume_dir(key)?.dir(DATA)?;
                let quota = btrfs::quota_usage(&data)?;
                let inodes = self
                    .walk(key, || Ok(TreeUsage { bytes: quota.referenced, inodes: btrfs::inodes(&data)? }))?;
                let total = quota.limit.unwrap_or(size);
                (self.in_shared_disk(total, quota.referenced, inodes.inodes)?, quota.referenced)
            }
            (Kind::Dir, _) => {
                let data = self.volume_dir(key)?.dir(DATA)?;
                let found = self.walk(key, || Ok(usage::tree(&data)?))?;
                (self.in_shared_disk(size, found.bytes, found.inodes)?, found.bytes)
            }
        };
        self.state().set_used(key, occupied);
        Ok(usage)
    }

    /// What is left to a volume that shares its filesystem: of its size and of the disk, whichever is less.
    fn in_shared_disk(&self, total: u64, used: u64, inodes: u64) -> Result<Usage> {
        let disk = self.root.free_space()?;
        let bytes = Amounts { total, used, available: total.saturating_sub(used).min(disk.available) };
        // A filesystem without a fixed number of inodes reports none; then only the use is known.
        let free = disk.inodes_free;
        let total = if disk.inodes_total == 0 { 0 } else { inodes + free };
        Ok(Usage { bytes, inodes: Some(Amounts { total, used: inodes, available: free }) })
    }

    /// Counting files takes as long as there are files, so a count is used again while it is young for its price.
    fn walk(&self, key: Key, count: impl FnOnce() -> Result<TreeUsage>) -> Result<TreeUsage> {
        if let Some(walk) = self.walks().get(&key)
            && walk.at.elapsed() < walk.took * WALK_AGE
        {
            return Ok(walk.usage);
        }
        let start = Instant::now();
        let usage = count()?;
        self.walks().insert(key, Walk { usage, at: Instant::now(), took: start.elapsed() });
        Ok(usage)
    }

    pub(super) fn walks(&self) -> MutexGuard<'_, std::collections::HashMap<Key, Walk>> {
        self.walks.lock()
    }

    fn expand_on_node(&self, id: &VolumeId, staging: &Path, range: CapacityRange) -> Result<NodeExpanded> {
        let (key, record) = self.existing_volume(id)?;
        let size = Capacity::new(record.size);
        if range.required().is_some_and(|required| required > self.config.max_volume_size_on_node) {
            return Err(Error::OutOfRange(format!(
                "volumes are grown on the node only up to {}",
                self.config.max_volume_size_on_node
            )));
        }
        if range.required().is_some_and(|required| required > size) {
            return Err(Error::OutOfRange(format!(
                "the volume has {size}; it must be expanded by the controller before the node can follow"
            )));
        }
        if record.kind != Kind::Image {
            return Ok(NodeExpanded::Done(size));
        }
        let image = self.image(key)?;
        if let Some(device) = self.devices.writable(key, &image)? {
            loopdev::refresh_capacity(device.number())?;
        }
        if record.access == AccessKind::Block {
            return Ok(NodeExpanded::Done(size));
        }
        let Content::Filesystem(filesystem) = format::probe(&image)? else {
            return Err(Error::Precondition("the volume holds no filesystem that could grow".to_owned()));
        };
        match format::grow_mounted(filesystem, staging) {
            Ok(_) => Ok(NodeExpanded::Done(size)),
            Err(error) if image::grows_only_unmounted(filesystem, &error) => {
                tracing::info!(
                    volume.id = %id,
                    "the kernel does not let this process grow a mounted ext4; it is grown unmounted"
                );
                Ok(NodeExpanded::NeedsRemount)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Applies what mutable parameters say about an image's device, if it has one now.
    pub(super) fn tune_device(&self, key: Key, tuning: &Tuning) -> Result<()> {
        let image = image_path(&self.volumes, key);
        let Some(device) = self.devices.writable(key, &image)? else { return Ok(()) };
        let number = device.number();
        if let Some(kb) = tuning.read_ahead_kb {
            loopdev::set_read_ahead_kb(number, kb).map_err(|error| {
                Error::Invalid(format!("readAheadKb {kb} was refused: {}", error.sentence()))
            })?;
        }
        let before = self.devices.of(key).limited;
        if before || tuning.limits != io_limit::Limits::default() {
            io_limit::apply((loopdev::MAJOR, number), &tuning.limits)?;
            let limited = tuning.limits != io_limit::Limits::default();
            self.devices.update(key, |device| device.limited = limited);
        }
        Ok(())
    }

    fn tuning(&self, record: &VolumeRecord) -> Result<Tuning> {
        Tuning::parse(record.kind, &record.mutable, &self.tunable())
    }

    /// What mutable parameters can do here.
    pub(super) fn tunable(&self) -> Tunable<'_> {
        Tunable { without_effect: &self.config.mutable_without_effect, noatime: !self.is_btrfs }
    }

    /// Makes sure that what was staged before a restart still is, and takes down loop devices of nothing.
    fn recover_node(&self, staged: &[StagedVolume]) -> Result<()> {
        let keys: Vec<Key> =
            staged.iter().filter_map(|volume| Key::parse(VOLUME, volume.id.as_str())).collect();
        for device in loopdev::attached_below(self.root.path())? {
            if key_of_image(&device.backing).is_some_and(|key| keys.contains(&key)) {
                continue;
            }
            let path = loopdev::path_of(device.number);
            tracing::info!(device = %path.display(), backing = %device.backing.display(), "detaching a loop device of no staged volume");
            if let Err(error) = loopdev::detach(device.number) {
                tracing::warn!(error = error.sentence(), "the loop device is still in use");
            }
        }
        for volume in staged {
            if let Err(error) = self.stage(&volume.id, &volume.staging, &volume.capability) {
                tracing::warn!(volume.id = %volume.id, %error, "a volume that was staged cannot be staged again");
            }
        }
        Ok(())
    }

    /// Finds the loop devices that a former run left attached, before anything could attach an image twice.
    pub(super) fn find_devices(&self) -> Result<()> {
        for device in loopdev::attached_below(self.root.path())? {
            let Some(key) = key_of_image(&device.backing) else { continue };
            if LoopDevice::open_if_attached(device.number, &image_path(&self.volumes, key))?.is_some() {
                self.devices.update(key, |known| {
                    let slot = if device.read_only { &mut known.read_only } else { &mut known.writable };
                    *slot = Some(device.number);
                    known.limited = true;
                });
            }
        }
        Ok(())
    }

    fn image(&self, key: Key) -> Result<PathBuf> {
        self.present(key, IMAGE)
    }

    fn data_path(&self, key: Key) -> Result<PathBuf> {
        self.present(key, DATA)
    }

    fn present(&self, key: Key, part: &str) -> Result<PathBuf> {
        if !self.volumes.exists(&format!("{key}/{part}"))? {
            return Err(Error::Precondition(format!(
                "the data of volume {VOLUME}-{key} is gone from {}",
                self.volumes.path().display()
            )));
        }
        Ok(self.volumes.path().join(key.to_string()).join(part))
    }
}

/// Whose image a path is.
fn key_of_image(image: &Path) -> Option<Key> {
    Key::from_hex(image.parent()?.file_name()?.to_str()?)
}
