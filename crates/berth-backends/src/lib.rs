//! Berth's own backends: volumes on this machine's disk ([`local`]) and on NFS servers ([`nfs`]).
//!
//! Each is composed of the traits of `berth-driver`, which is re-exported here.

mod image;
pub mod local;
pub mod nfs;

pub use berth_driver::*;
