//! NFS version 4 (RFC 7530, RFC 8881, RFC 7862): requests of several operations each.
//!
//! Reading and writing use the anonymous stateid, so nothing is ever open longer than it takes to create it, no lease
//! has to be kept for a file's sake, and a server that restarts has nothing of ours to reclaim.

mod attributes;
mod compound;
mod data;
mod establish;
mod extras;
mod files;
mod open;
mod session;

pub(crate) use self::session::Session;
