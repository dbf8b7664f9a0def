//! Operations on the machine: mounts, loop devices, btrfs, formatting, quotas, safe paths, child processes.
//!
//! Together with berth-runtime this is the only crate of Berth with unsafe code or child processes. Everything here is
//! synchronous and talks to the kernel directly; a tool is run only where the kernel has no call for the job (mkfs,
//! fsck, resize2fs), always with a deadline. Nothing here knows what a CSI volume is.
//!
//! ```text
//!  driver, backends, node ──► mount, loopdev, btrfs, quota, … ──► system calls, ioctls
//!                        ├──► format ──► exec ──► mkfs, fsck, resize2fs     killed at the deadline
//!                        └──► remote ──► worker (this program again) ──► calls that may wait for another machine
//! ```
//!
//! | module | what it is for |
//! |---|---|
//! | [`mod@path`] | [`path::Dir`]: a directory held open, below which names are resolved without leaving it |
//! | [`mount`], [`remote`] | mounts of local files and devices; mounts of other machines, which may not answer |
//! | [`loopdev`], [`mod@format`], [`freeze`], [`extents`] | image files as devices, their filesystems and extents |
//! | [`btrfs`], [`quota`], [`usage`], [`io_limit`] | subvolumes and snapshots, limits to space and I/O, and usage |
//! | [`copy`], [`ownership`], [`files`], [`archive`] | copies of trees and images, fsGroup, small private files, tar |
//! | [`acting`], [`file_handle`] | acting on files as another user, and names of files that outlive a process |
//! | [`exec`], [`service`], [`worker`], [`serving`], [`helper`] | child processes, some of which outlive their parent |
//! | [`allocator`], [`limits`], [`namespace`] | this process itself: its memory, its open files, its user namespace |
//! | [`mod@user_namespace`] | user namespaces for containers, and the ids of the machine that they have |
//!
//! What holds:
//! - An [`Error`] says what was being done and keeps the kernel's errno; an operation that may find its work done
//!   already returns a [`Change`].
//! - No path below a [`path::Dir`] leads out of it, whatever symbolic links somebody planted there.
//! - A filesystem is made only where a probe proves that there is nothing.
//! - No thread of this process waits in the kernel for another machine: [`remote`] leaves that to a worker, which is
//!   killed at its deadline.
//!
//! Start reading at `path.rs`, which most of the other modules use, then at `mount.rs`.
//!
//! ```
//! use berth_host::{Change, path::Dir};
//!
//! # fn main() -> berth_host::Result<()> {
//! # let scratch = tempfile::tempdir().expect("there is a temporary directory");
//! let directory = Dir::open(scratch.path())?;
//! assert_eq!(directory.make_dir("volumes", 0o700)?, Change::Made);
//! directory.dir("volumes")?.write_atomically("state", b"1")?;
//! assert!(directory.open_file("../etc/passwd", false).is_err(), "no path leads out of the directory");
//! # Ok(())
//! # }
//! ```

pub mod acting;
pub mod allocator;
pub mod archive;
pub mod btrfs;
pub mod copy;
mod error;
pub mod exec;
pub mod extents;
pub mod file_handle;
pub mod files;
pub mod format;
pub mod freeze;
pub mod helper;
pub mod io_limit;
pub mod limits;
pub mod loopdev;
pub mod mount;
pub mod namespace;
pub mod ownership;
pub mod path;
pub mod quota;
pub mod remote;
pub mod service;
pub mod serving;
pub mod usage;
pub mod user_namespace;
pub mod worker;

pub use error::{Change, Doing, Error, Result};
