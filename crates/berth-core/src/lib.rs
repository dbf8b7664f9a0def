//! Berth's vocabulary: ids, quantities, capacity, access modes, topology and well-known names.
//!
//! No I/O and no async. Every type here is parsed, not validated: a value that exists is a value that is right, so
//! the crates above never check one twice.

mod access;
mod backoff;
mod capacity;
mod claim_field;
mod error_chain;
mod hex;
mod id;
pub mod names;
mod quantity;
mod topology;

pub use access::{Access, AccessKind, AccessMode, VolumeCapability};
pub use backoff::{Backoff, random_fraction};
pub use capacity::{Capacity, CapacityRange, InvalidCapacity};
pub use claim_field::ClaimField;
pub use error_chain::error_chain;
pub use hex::hex;
pub use id::{GroupSnapshotId, InvalidId, Name, NodeId, SnapshotId, VolumeId};
pub use quantity::{InvalidQuantity, Quantity};
pub use topology::Topology;
