//! The NFS backend against a real server, in user space, by every version it speaks.

mod sanity;
mod server;
mod snapshots;
mod volumes;
