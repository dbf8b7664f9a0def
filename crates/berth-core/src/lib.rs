//! The vocabulary of every other crate: ids, sizes, access modes, topology, backoff, and the names of Kubernetes.
//!
//! The parsers and constructors of these types refuse what is not valid, so the crates above need not check a value again.
//!
//! ```
//! use berth_core::{Capacity, CapacityRange, Quantity, VolumeId};
//!
//! # fn read() -> Result<(), Box<dyn std::error::Error>> {
//! let id: VolumeId = "vol-1".parse()?;            // not empty, not too long, no control characters
//! let claim: Quantity = "1.5Gi".parse()?;         // as Kubernetes reads it
//! let size: Capacity = "1.5Gi".parse()?;          // bytes, rounded up
//! let range = CapacityRange::new(size.as_i64(), 0)?;
//! assert!(range.contains(Capacity::gibibytes(2)));
//! assert_eq!((id.as_str(), size.bytes()), ("vol-1", 3 << 29));
//! # let _ = claim; Ok(())
//! # }
//! # read().unwrap();
//! ```
//!
//! | type or module | what it is |
//! |---|---|
//! | [`VolumeId`], [`SnapshotId`], [`GroupSnapshotId`], [`NodeId`], [`Name`] | what CSI calls things |
//! | [`Quantity`] | an amount as Kubernetes writes it: parsed, compared, added, rounded and printed as kube-apiserver does |
//! | [`Capacity`], [`CapacityRange`] | bytes, and the range that a caller accepts |
//! | [`Access`], [`AccessMode`], [`VolumeCapability`] | how a volume is used |
//! | [`Topology`] | from where a volume can be reached |
//! | [`Backoff`] | growing pauses between attempts |
//! | [`Schedule`] | when a CronJob is due |
//! | [`Network`] | addresses that begin with the same bits |
//! | [`names`] | annotations, labels, finalizers, event reasons: the only crate with a literal `kubernetes.io/` |
//!
//! Invariants: no I/O, no async, no dependency on another crate of Berth. Start reading at `id.rs`, the pattern that the
//! other types follow; `quantity.rs` is tested against recorded answers of kube-apiserver (`quantity.recorded`).

mod access;
mod backoff;
mod capacity;
mod claim_field;
mod error_chain;
mod go_duration;
mod hex;
mod id;
pub mod names;
mod network;
mod quantity;
mod schedule;
mod topology;

pub use access::{Access, AccessKind, AccessMode, VolumeCapability};
pub use backoff::{Backoff, random_fraction};
pub use capacity::{Capacity, CapacityRange, InvalidCapacity};
pub use claim_field::ClaimField;
pub use error_chain::error_chain;
pub use go_duration::go_duration;
pub use hex::hex;
pub use id::{GroupSnapshotId, InvalidId, Name, NodeId, SnapshotId, VolumeId};
pub use network::{InvalidNetwork, Network};
pub use quantity::{InvalidQuantity, Quantity};
pub use schedule::{BadSchedule, Schedule};
pub use topology::Topology;
