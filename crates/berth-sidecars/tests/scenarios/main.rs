//! The components beside a driver on a real API server and a real driver: objects in, objects, volumes and events out.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod acts;
mod bench;
mod capacity;
mod claims;
mod crash;
mod faults;
mod local;
mod misbehaviour;
mod nodes;
mod power;
mod registration;
mod snapshot_bench;
mod snapshot_faults;
mod snapshots;
mod sources;
mod world;
