//! An NFS server for trying and testing: it serves one directory by NFS version 3, with MOUNT on the same port.
//!
//! ```text
//!  TCP ─► server.rs: who may connect, how much at once ─► workers.rs: threads that may wait for a disk
//!                                                            │ replies.rs: what was done already is not done again
//!                                                            ▼
//!  service.rs: reads a call, writes its answer ◄─► attributes.rs, data.rs, names.rs, listing.rs: the procedures
//!  mount.rs: MOUNT                                           │ act_as(caller) (berth-host)
//!                                                            ▼
//!  export.rs: the directory, its files by handle (handle.rs, search.rs) ─► system calls
//! ```
//!
//! Guarantees:
//! - Every operation is done as the caller: its user, its group and its supplementary groups, by the kernel's own checks. Root may be made
//!   nobody ([`Options::squash_root`]).
//! - Nothing outside the directory is reached: handles carry a signature, a name is one path component, symbolic links are never followed, and
//!   other filesystems that are mounted in the directory are not entered.
//! - A handle means the same file over restarts of the server, by the kernel's file handles or by a search ([`Handles`]).
//! - What is answered as done is on the disk, except unstable writes, which COMMIT puts there; the write verifier changes at every
//!   start and whenever the disk fails to write, so that clients send again what may be lost.
//! - Listings continue where they were, whatever changes in the directory, and over restarts: a cookie is a hash of a name.
//! - What cannot be read as a call gets an error and changes nothing.
//!
//! Start reading at `service.rs`.

mod attributes;
mod data;
mod export;
mod handle;
mod listing;
mod mount;
mod names;
mod replies;
mod search;
mod server;
mod service;
mod status;
mod workers;

pub use self::{
    export::Handles,
    server::{Error, Options, Server},
};
