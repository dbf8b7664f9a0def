//! Twins of clouds: servers on loopback that imitate a provider's API for block storage and its metadata service, with real
//! block devices.
//!
//! A driver for DigitalOcean's volumes or Alibaba Cloud's disks that is pointed at a twin works as it does in the cloud: disks are
//! created, attached, resized, snapshotted and deleted by the provider's own HTTP calls, and an attached disk is a block device of
//! this machine. Nothing here knows of CSI or of Kubernetes; drivers and twins meet over HTTP alone.
//!
//! ```text
//!  driver ──HTTP──► server ──► faults, rate limit, counts
//!                     ├──► digitalocean │ aliyun    the API of one provider: paths, parameters, JSON, codes, signatures
//!                     │         └──► account        the rules that both share; operations that take time
//!                     │                 ├──► records   what exists, in a journal
//!                     │                 └──► media     sparse files, loop devices, links by id
//!                     └──► admin                    `/_twin`: counts, faults, servers, delays
//! ```
//!
//! What holds:
//! - What was answered is there after `kill -9` and a restart, and work that was accepted is carried out.
//! - A file, a device or a link without a record is removed at the next start; [`purge`] removes everything.
//! - An attached disk has one loop device, however many instances see it.
//!
//! Start reading at `server.rs`, then at `account.rs`.

mod account;
mod admin;
mod aliyun;
mod digitalocean;
mod faults;
mod limits;
mod media;
mod records;
mod server;

pub use self::account::{Delays, Quotas};
pub use self::limits::RateLimit;
pub use self::server::{Error, InstanceOptions, Options, Provider, Twin, purge, release};
