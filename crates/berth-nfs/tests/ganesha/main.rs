//! The client against a real server, Ganesha, in every version that both speak.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

#[path = "../../../../testbed/nfs/between.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod between;
mod failures;
mod files;
#[path = "../../../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;
mod lies;
mod portmapper;
mod server;
mod trees;
