//! Growing a mounted filesystem by ioctl.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Seek as _, SeekFrom},
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{major, minor},
    ioctl::{Getter, Opcode, Setter, Updater, ioctl, opcode},
};

use super::{Filesystem, Growth, filesystem_size};
use crate::error::{Doing as _, Result};

const EXT4_IOC_RESIZE_FS: Opcode = opcode::write::<u64>(b'f', 16);
const XFS_IOC_FSGEOMETRY_V4: Opcode = opcode::read::<XfsGeometry>(b'X', 124);
const XFS_IOC_FSGROWFSDATA: Opcode = opcode::write::<XfsGrowth>(b'X', 110);
const BTRFS_IOC_RESIZE: Opcode = opcode::write::<BtrfsArgs>(0x94, 3);
const BTRFS_IOC_DEV_INFO: Opcode = opcode::read_write::<BtrfsDevice>(0x94, 30);

/// The kernel refuses a resize to less, even where it is growth.
const BTRFS_LEAST_RESIZE: u64 = 256 << 20;
const BTRFS_SECTOR: u64 = 4096;

/// The kernel's `xfs_fsop_geom_v4`, of which every version since has the same beginning.
#[repr(C)]
struct XfsGeometry {
    block_size: u32,
    unused: [u32; 6],
    inode_percent: u32,
    data_blocks: u64,
    rest: [u64; 9],
}

/// The layout of the kernel's `xfs_growfs_data`.
#[repr(C)]
struct XfsGrowth {
    data_blocks: u64,
    inode_percent: u32,
}

/// The layout of the kernel's `btrfs_ioctl_vol_args`.
#[repr(C)]
struct BtrfsArgs {
    fd: i64,
    name: [u8; 4088],
}

/// The layout of the kernel's `btrfs_ioctl_dev_info_args`.
#[repr(C)]
struct BtrfsDevice {
    id: u64,
    uuid: [u8; 16],
    used: u64,
    total_bytes: u64,
    unused: [u64; 379],
    path: [u8; 1024],
}

/// Grows the filesystem mounted at `mount_point` to the size of its device.
///
/// ext4 needs `CAP_SYS_RESOURCE` for it, and is an error with errno `EPERM` without.
pub fn grow_mounted(fs: Filesystem, mount_point: &Path) -> Result<Growth> {
    let root = File::open(mount_point).doing("open", mount_point)?;
    match fs {
        Filesystem::Ext4 => grow_ext4(&root),
        Filesystem::Xfs => grow_xfs(&root),
        Filesystem::Btrfs => grow_btrfs(&root),
    }
    .doing("grow the filesystem at", mount_point)
}

fn grow_ext4(root: &File) -> io::Result<Growth> {
    let (node, device_size) = device_of(root)?;
    let stated = || filesystem_size(&node, Filesystem::Ext4).map_err(io::Error::other);
    let block_size = rustix::fs::fstatvfs(root)?.f_bsize;
    let before = stated()?;
    if before / block_size >= device_size / block_size {
        return Ok(Growth::AlreadyFull);
    }
    // SAFETY: EXT4_IOC_RESIZE_FS reads one u64, the new size in blocks.
    unsafe { ioctl(root, Setter::<EXT4_IOC_RESIZE_FS, u64>::new(device_size / block_size)) }?;
    Ok(growth(before, stated()?))
}

fn grow_xfs(root: &File) -> io::Result<Growth> {
    let before = xfs_geometry(root)?;
    let data_blocks = device_of(root)?.1 / u64::from(before.block_size);
    if data_blocks <= before.data_blocks {
        return Ok(Growth::AlreadyFull);
    }
    let wanted = XfsGrowth { data_blocks, inode_percent: before.inode_percent };
    // SAFETY: XFS_IOC_FSGROWFSDATA reads one `xfs_growfs_data`.
    unsafe { ioctl(root, Setter::<XFS_IOC_FSGROWFSDATA, XfsGrowth>::new(wanted)) }?;
    Ok(growth(before.data_blocks, xfs_geometry(root)?.data_blocks))
}

fn xfs_geometry(root: &File) -> io::Result<XfsGeometry> {
    // SAFETY: XFS_IOC_FSGEOMETRY_V4 fills one `xfs_fsop_geom_v4` when it succeeds.
    Ok(unsafe { ioctl(root, Getter::<XFS_IOC_FSGEOMETRY_V4, XfsGeometry>::new()) }?)
}

fn grow_btrfs(root: &File) -> io::Result<Growth> {
    let before = btrfs_device(root)?;
    let end = before.path.iter().position(|&byte| byte == 0).unwrap_or(before.path.len());
    let device_size = File::open(OsStr::from_bytes(&before.path[..end]))?.seek(SeekFrom::End(0))?;
    if before.total_bytes / BTRFS_SECTOR >= device_size / BTRFS_SECTOR {
        return Ok(Growth::AlreadyFull);
    }
    if device_size < BTRFS_LEAST_RESIZE {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "btrfs cannot be resized to less than 256 MiB",
        ));
    }
    let mut args = BtrfsArgs { fd: 0, name: [0; 4088] };
    args.name[..3].copy_from_slice(b"max");
    // SAFETY: BTRFS_IOC_RESIZE reads one `btrfs_ioctl_vol_args` with a terminated name.
    unsafe { ioctl(root, Setter::<BTRFS_IOC_RESIZE, BtrfsArgs>::new(args)) }?;
    Ok(growth(before.total_bytes, btrfs_device(root)?.total_bytes))
}

/// The only device of a filesystem that was never given a second one.
fn btrfs_device(root: &File) -> io::Result<BtrfsDevice> {
    let mut device =
        BtrfsDevice { id: 1, uuid: [0; 16], used: 0, total_bytes: 0, unused: [0; 379], path: [0; 1024] };
    // SAFETY: BTRFS_IOC_DEV_INFO reads and writes one `btrfs_ioctl_dev_info_args`.
    unsafe { ioctl(root, Updater::<BTRFS_IOC_DEV_INFO, BtrfsDevice>::new(&mut device)) }?;
    Ok(device)
}

fn growth(before: u64, after: u64) -> Growth {
    if after > before { Growth::Grown } else { Growth::AlreadyFull }
}

/// The node and the size in bytes of the block device under a filesystem.
fn device_of(root: &File) -> io::Result<(PathBuf, u64)> {
    let number = root.metadata()?.dev();
    let sysfs = PathBuf::from(format!("/sys/dev/block/{}:{}", major(number), minor(number)));
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let sectors: u64 = fs::read_to_string(sysfs.join("size"))?.trim().parse().map_err(|_| invalid())?;
    let uevent = fs::read_to_string(sysfs.join("uevent"))?;
    let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME=")).ok_or_else(invalid)?;
    // Sysfs counts sectors of 512 bytes, whatever those of the device are.
    Ok((Path::new("/dev").join(name), sectors * 512))
}
