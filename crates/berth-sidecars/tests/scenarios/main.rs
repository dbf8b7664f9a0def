//! The components beside a driver on a real API server and a real driver: objects in, objects, volumes and events out.

mod bench;
mod fake;
mod faults;
mod local;
mod snapshot_bench;
mod snapshot_faults;
mod snapshots;
mod sources;
