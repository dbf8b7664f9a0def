//! The whole binary under test: started for real, on real filesystems, over its real socket.
//!
//! [`Testbed`] is one temporary directory with a disk of a chosen filesystem and a running driver on it; whatever a
//! test leaves mounted, attached or running is undone when it is dropped, also by a panic. Looking at the machine is
//! done here independently of the driver's own code, so that a mistake there cannot hide itself.

pub mod browser;
pub mod cloud;
pub mod containerd;
pub mod content;
pub mod crash;
pub mod csi;
pub mod disk;
pub mod driver;
pub mod flex;
pub mod machine;
pub mod nfs;
pub mod observe;
pub mod program;
pub mod sanity;
pub mod slow;
pub mod table;
pub mod terminal;
mod testbed;
pub mod times;
pub mod up;

pub use crate::{
    csi::{Access, Csi, Kind, Mounted, Shape, Volume},
    disk::{Disk, DiskType},
    driver::{Driver, Settings},
    testbed::{Expected, Testbed, name_on_disk},
};

/// One mebibyte in bytes.
pub const MIB: i64 = 1 << 20;
