//! A whole node on an API server in process: real containers, real mounts; needs root.

#![allow(
    clippy::unwrap_used,
    clippy::default_trait_access,
    clippy::manual_assert,
    clippy::match_wild_err_arm,
    clippy::similar_names,
    reason = "what a test needs and does not get is its failure"
)]

mod life;
mod limits;
mod probes;
mod restart;
mod security;
mod user_namespaces;
mod volumes;
mod world;
