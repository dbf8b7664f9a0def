//! A share of a real server, in user space, served through FUSE: what programs see of it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../../../testbed/nfs/between.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod between;
mod failures;
mod files;
#[path = "../../../../testbed/nfs/ganesha.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod ganesha;
mod posix;
mod rights;
mod world;
