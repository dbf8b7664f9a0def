//! Real containers on this machine; they need root.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::similar_names,
    reason = "what a test needs and does not get is its failure; it starts and kills the parents of containers"
)]

mod exec;
mod generated;
mod life;
mod limits;
mod logs;
mod rootless;
mod scratch;
mod security;
mod user_namespaces;
mod world;
