//! Speaks NFS: a client in user space for versions 3, 4.0, 4.1 and 4.2, without a mount and without privilege.
//!
//! [`Nfs`] keeps one connection per server, made when needed, made again when broken, closed when idle. A [`Share`] is
//! an exported directory: calls on it name files by [`Handle`], as NFS does, and never follow a symlink. [`tree`] adds
//! paths and whole trees. The forms of messages ([`xdr`], [`rpc`], [`v3`]) are public, for berth-nfsd, which is a server.
//!
//! ```text
//!  Nfs::share ─► Share ──► v3: one procedure per call       ──┐
//!                 │    └─► v4: COMPOUND, sessions (4.1, 4.2) ──┴─► rpc: one TCP connection, calls distinguished by xid
//!                 └─ tree: paths, listing, copying, measuring and removing whole trees
//! ```
//!
//! This lists the names in an exported directory:
//! ```no_run
//! use berth_nfs::{Cookie, Nfs, Target};
//!
//! # async fn list() -> Result<(), berth_nfs::Error> {
//! let nfs = Nfs::new();
//! let share = nfs.share(&Target::new("192.0.2.7", "/export")).await?;
//! let mut next = Some(Cookie::default());
//! while let Some(cookie) = next {
//!     let page = share.read_dir(&share.root(), cookie).await?;
//!     page.entries.iter().for_each(|entry| println!("{}", entry.name));
//!     next = page.next;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Guarantees:
//! - every call is bounded by the attempt's timeout, and its future may be dropped at any time: the answer is then ignored,
//!   and other calls are not affected;
//! - a call that only reads, or is idempotent, is tried again when the connection breaks; any other
//!   fails with [`Kind::Interrupted`];
//! - whatever a server answers, nothing panics, and no length it names is believed before the bytes are there.
//!
//! Start reading at `share.rs`, then `share/attempt.rs` (what is tried again) and `rpc/connection.rs`.

mod attributes;
mod error;
mod metrics;
mod name;
mod options;
pub mod rpc;
mod server;
mod share;
mod status;
pub mod tree;
pub mod v3;
mod v4;
pub mod xdr;

pub use self::{
    attributes::{Attributes, Change, Create, FileKind, Node, Space, Time, TimeChange, access},
    error::{Error, Kind, Reason, Result},
    metrics::Metrics,
    name::{Handle, InvalidName, Name},
    options::{InvalidOption, InvalidTarget, Options, Target, Version},
    server::Nfs,
    share::{Cookie, DirEntry, Entry, NextData, Page, Share},
};
