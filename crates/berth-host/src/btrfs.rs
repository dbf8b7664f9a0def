//! Btrfs subvolumes, snapshots and quotas, by ioctl.

#[cfg(test)]
pub(crate) mod loopfs;
