//! Touches the machine: mounts, loop devices, btrfs, formatting, quotas, safe paths, child processes.
//!
//! With berth-runtime the only crate of Berth with unsafe code or child processes. Everything here is synchronous and
//! talks to the kernel directly; a tool is run only where the kernel has no call for the job (mkfs, fsck, resize2fs),
//! always with a deadline. Nothing here knows what a CSI volume is.

pub mod allocator;
pub mod btrfs;
pub mod copy;
mod error;
pub mod exec;
pub mod extents;
pub mod files;
pub mod format;
pub mod freeze;
pub mod helper;
pub mod io_limit;
pub mod limits;
pub mod loopdev;
pub mod mount;
pub mod ownership;
pub mod path;
pub mod quota;
pub mod remote;
pub mod serving;
pub mod usage;
pub mod worker;

pub use error::{Change, Doing, Error, Result};
