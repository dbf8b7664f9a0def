//! Real containers on this machine; they need root.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::similar_names,
    reason = "what a test needs and does not get is its failure; it starts and kills the parents of containers"
)]

#[path = "runtime/exec.rs"]
mod exec;
#[path = "runtime/life.rs"]
mod life;
#[path = "runtime/logs.rs"]
mod logs;
#[path = "runtime/place.rs"]
mod place;
#[path = "runtime/world.rs"]
mod world;
