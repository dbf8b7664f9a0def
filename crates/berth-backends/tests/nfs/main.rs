//! The NFS backend against a real server, in user space, by every version it speaks.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../../../testbed/nfs/between.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod between;
#[allow(dead_code, reason = "each suite uses a part of it")]
mod calls;
mod directories;
#[path = "../../../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;
mod images;
mod sanity;
mod secrets;
mod served;
mod server;
mod snapshots;
mod suite;
mod volumes;
