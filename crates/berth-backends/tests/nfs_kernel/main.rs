//! The NFS driver with the kernel's own client and server; needs a kernel that has them, as the virtual machine of
//! `testbed/vm` does, and is run there.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod caller;
#[path = "../nfs/calls.rs"]
#[allow(dead_code, reason = "each suite uses a part of it")]
mod calls;
mod flex;
mod hostile;
mod images;
mod kernel;
mod node;
mod quota;
#[path = "../nfs/served.rs"]
mod served;
#[path = "../nfs/suite.rs"]
mod suite;
