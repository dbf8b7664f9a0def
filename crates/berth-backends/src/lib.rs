//! Berth's own storage: volumes on this machine's disk ([`local`]), on NFS servers ([`nfs`]), of DigitalOcean
//! ([`digitalocean`]) and of Alibaba Cloud ([`aliyun`]), any FlexVolume driver ([`flex`]), and any program that speaks a simple
//! interface ([`exec`]).
//!
//! Each backend implements the traits of [`berth_driver`], which is re-exported here, and composes itself into a
//! [`Driver`]; it sees neither CSI nor Kubernetes. This is a whole driver for local volumes:
//! ```no_run
//! use berth_backends::{Options, Result, local::{Config, Local}, services::Mode};
//!
//! # async fn run() -> Result<()> {
//! let options = Options::from_env()?;
//! let local = Local::open(Config::new("/var/lib/volumes".into(), options.node_id.clone())).await?;
//! local.driver("local.example.com", "1.0.0", Mode::All).serve(options).await
//! # }
//! ```
//!
//! ```text
//!  services of berth-driver: parse, lock, the spec's rules
//!       │ Volumes, Snapshots, Expansion, …          │ Sources, Staging, Stats, …
//!  local/volumes.rs, snapshots.rs              local/node.rs           both in one process, on the node that has the disk
//!  nfs/controller/                             nfs/node/               in separate processes
//!  digitalocean/, aliyun/, cloud/              cloud/node.rs           separate; only the controller needs credentials
//!       │                                           │
//!  berth-journal, berth-host                   berth-host, berth-fuse
//! ```
//!
//! Invariants:
//! - Data is complete and synced before its record; a record is removed before its data. A crash leaves at most data
//!   without a record, which the next start removes, or keeps in `lost/` where records were damaged.
//! - An image is formatted only if it is provably blank, and is never on two writable loop devices (`image.rs`,
//!   `local/devices.rs`).
//! - A volume's capacity is the size that was asked for; its image file may be larger (`image::length`).
//! - What a call needs to reach an NFS server (mount options, secrets) comes with the call and is not kept for other calls
//!   (`nfs/shares.rs`).
//!
//! Start reading at `local.rs` for the composition and the layout on disk, then at `local/volumes.rs`: `plan`, `find`,
//! `place` and `make` are CreateVolume.

pub mod aliyun;
mod cloud;
pub mod digitalocean;
pub mod exec;
pub mod flex;
mod image;
pub mod local;
pub mod nfs;
mod records;

pub use berth_driver::*;

pub use self::cloud::Secret;
