//! Which loop devices and mounts belong to which image.
//!
//! An image is never on two writable loop devices: two kernels' worth of caches over one filesystem would destroy
//! it. So the device of an image is remembered, checked before it is used again, and used again even when only a
//! pod's own mount still holds it.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use berth_host::{
    io_limit,
    loopdev::{self, LoopDevice},
};
use parking_lot::{Mutex, MutexGuard};

use super::record::Key;

/// The devices of one image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Device {
    /// The loop device that may be written.
    pub(super) writable: Option<u32>,
    /// A second one that refuses writes, for read-only raw volumes.
    pub(super) read_only: Option<u32>,
    /// Where its filesystem is staged.
    pub(super) mounted_at: Option<PathBuf>,
    /// It was asked to be staged for reading only.
    pub(super) staged_read_only: bool,
    /// I/O limits may be set on the writable device.
    pub(super) limited: bool,
}

/// The devices of all images.
#[derive(Debug, Default)]
pub(super) struct Devices {
    known: Mutex<HashMap<Key, Device>>,
    copying: Mutex<HashMap<Key, Weak<Mutex<()>>>>,
}

impl Devices {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Device>> {
        self.known.lock()
    }

    /// To be held while an image is frozen: a filesystem is frozen by one at a time, and clones of one volume may
    /// be asked for together.
    pub(super) fn copying(&self, key: Key) -> Arc<Mutex<()>> {
        let mut copying = self.copying.lock();
        copying.retain(|_, lock| lock.strong_count() > 0);
        let lock = copying.get(&key).and_then(Weak::upgrade).unwrap_or_default();
        copying.insert(key, Arc::downgrade(&lock));
        lock
    }

    /// What is known of an image's devices.
    pub(super) fn of(&self, key: Key) -> Device {
        self.lock().get(&key).cloned().unwrap_or_default()
    }

    /// The image's writable device, if it still is on it: a device that went with its last user may be another's now.
    pub(super) fn writable(&self, key: Key, image: &Path) -> berth_host::Result<Option<LoopDevice>> {
        self.of(key).writable.map_or(Ok(None), |number| LoopDevice::open_if_attached(number, image))
    }

    /// The image's read-only device, if it still is on it.
    pub(super) fn read_only(&self, key: Key, image: &Path) -> berth_host::Result<Option<LoopDevice>> {
        self.of(key).read_only.map_or(Ok(None), |number| LoopDevice::open_if_attached(number, image))
    }

    /// Changes what is known of an image's devices.
    pub(super) fn update(&self, key: Key, change: impl FnOnce(&mut Device)) {
        let mut devices = self.lock();
        let device = devices.entry(key).or_default();
        change(device);
        if *device == Device::default() {
            devices.remove(&key);
        }
    }

    /// Attaches the image, or finds the device it is on. With `autoclear` the device goes with its last user.
    pub(super) fn attach(&self, key: Key, image: &Path, autoclear: bool) -> berth_host::Result<LoopDevice> {
        if let Some(device) = self.writable(key, image)? {
            return Ok(device);
        }
        let device =
            LoopDevice::attach(image, loopdev::Options { read_only: false, direct_io: true, autoclear })?;
        self.update(key, |known| known.writable = Some(device.number()));
        Ok(device)
    }

    /// A device on the image that refuses writes.
    pub(super) fn attach_read_only(&self, key: Key, image: &Path) -> berth_host::Result<LoopDevice> {
        if let Some(device) = self.read_only(key, image)? {
            return Ok(device);
        }
        let device = LoopDevice::attach(
            image,
            loopdev::Options { read_only: true, direct_io: true, autoclear: false },
        )?;
        self.update(key, |known| known.read_only = Some(device.number()));
        Ok(device)
    }

    /// Detaches every device of the image and forgets them. One that is still in use stays known and is an error,
    /// EBUSY; the kernel takes it off the image with its last user.
    pub(super) fn release(&self, key: Key, image: &Path) -> berth_host::Result<()> {
        let (writable, limited) = (self.writable(key, image)?, self.of(key).limited);
        if let Some(device) = writable.as_ref().filter(|_| limited) {
            // Limits stay with the number, and the next image on it is somebody else's.
            io_limit::apply((loopdev::MAJOR, device.number()), &io_limit::Limits::default())?;
        }
        for device in [self.read_only(key, image)?, writable].into_iter().flatten() {
            let number = device.number();
            // Open here, it would be in use.
            drop(device);
            loopdev::detach(number)?;
        }
        self.update(key, |device| *device = Device::default());
        Ok(())
    }
}
