//! The loop driver's ioctls, as in the kernel's `uapi/linux/loop.h`.

use std::{fs::File, mem, os::fd::AsRawFd as _};

use rustix::{
    io::{Errno, Result},
    ioctl::{Getter, Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl},
};

use super::Options;

const LOOP_CLR_FD: Opcode = 0x4C01;
const LOOP_GET_STATUS64: Opcode = 0x4C05;
const LOOP_SET_CAPACITY: Opcode = 0x4C07;
const LOOP_CONFIGURE: Opcode = 0x4C0A;
const LOOP_CTL_GET_FREE: Opcode = 0x4C82;

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// The layout of the kernel's `loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Status {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// The layout of the kernel's `loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Status,
    reserved: [u64; 8],
}

impl Status {
    /// The `st_dev` of the backing file: the kernel's encoding here is that of stat(2).
    pub(super) fn device(&self) -> u64 {
        self.device
    }

    pub(super) fn inode(&self) -> u64 {
        self.inode
    }

    pub(super) fn read_only(&self) -> bool {
        self.flags & LO_FLAGS_READ_ONLY != 0
    }

    pub(super) fn autoclear(&self) -> bool {
        self.flags & LO_FLAGS_AUTOCLEAR != 0
    }

    #[cfg(test)]
    pub(super) fn direct_io(&self) -> bool {
        self.flags & LO_FLAGS_DIRECT_IO != 0
    }
}

pub(super) fn configure(device: &File, backing: &File, options: Options) -> Result<()> {
    // SAFETY: both structs are plain integers, for which zero is a value.
    let mut config: Config = unsafe { mem::zeroed() };
    config.fd = u32::try_from(backing.as_raw_fd()).map_err(|_| Errno::BADF)?;
    // Never the larger blocks that direct I/O may suggest: a filesystem made with sectors of 512 could not be
    // mounted on them.
    config.block_size = 512;
    for (wanted, flag) in [
        (options.read_only, LO_FLAGS_READ_ONLY),
        (options.autoclear, LO_FLAGS_AUTOCLEAR),
        (options.direct_io, LO_FLAGS_DIRECT_IO),
    ] {
        if wanted {
            config.info.flags |= flag;
        }
    }
    // SAFETY: LOOP_CONFIGURE reads one `loop_config`.
    unsafe { ioctl(device, Setter::<LOOP_CONFIGURE, Config>::new(config)) }
}

pub(super) fn status(device: &File) -> Result<Status> {
    // SAFETY: LOOP_GET_STATUS64 fills one `loop_info64` when it succeeds.
    unsafe { ioctl(device, Getter::<LOOP_GET_STATUS64, Status>::new()) }
}

pub(super) fn clear(device: &File) -> Result<()> {
    // SAFETY: LOOP_CLR_FD takes no argument.
    unsafe { ioctl(device, NoArg::<LOOP_CLR_FD>::new()) }
}

pub(super) fn refresh_capacity(device: &File) -> Result<()> {
    // SAFETY: LOOP_SET_CAPACITY takes no argument.
    unsafe { ioctl(device, NoArg::<LOOP_SET_CAPACITY>::new()) }
}

pub(super) fn free_number(control: &File) -> Result<u32> {
    // SAFETY: LOOP_CTL_GET_FREE takes no argument and returns a number.
    unsafe { ioctl(control, FreeNumber) }
}

struct FreeNumber;

// SAFETY: the opcode takes no argument, so there is no pointer to get wrong.
unsafe impl Ioctl for FreeNumber {
    type Output = u32;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE
    }

    fn as_ptr(&mut self) -> *mut libc::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut libc::c_void) -> Result<u32> {
        u32::try_from(output).map_err(|_| Errno::RANGE)
    }
}
