//! What tests of several crates share: a CSI driver that behaves as a test asks it to, and clusters to run control loops on.
//!
//! No part of this crate is shipped: other crates depend on it in `[dev-dependencies]` alone, which `deny.toml` and
//! `tests/tests/tidy.rs` check. It depends on the crates that every test needs (the API server, the CSI messages, the caches
//! and queues of berth-kube), and on none of those whose unit tests use it: their types would then exist twice.
//!
//! ```text
//!   a test ──► TestCluster ──► EmbeddedServer, or the real cluster that KUBECONFIG_REAL names
//!     │            ▲
//!     │          Loops: the control loops under test
//!     │            │ CSI calls, over a socket or within the process
//!     └──────► FakeDriver ──► Storage: volumes, attachments and snapshots in memory
//! ```
//!
//! - [`FakeDriver`] answers every call of CSI from its [`Storage`], records it, and lets a test replace the answer
//!   ([`FakeDriver::on`]) or break the call ([`FakeDriver::fail`]). [`RegisteredDriver`] is one that a kubelet can find.
//! - [`TestCluster`] creates, changes and awaits objects. Nothing in it sleeps: what a test waits for is watched.
//! - [`Loops`] runs control loops on a cluster, and stops them.
//! - [`oci::OciLayout`] is a layout of container images that a test makes itself.
//!
//! Start reading in `driver.rs`, at `FakeDriver::perform`, and in `cluster.rs`.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod cluster;
mod driver;
pub mod oci;
mod server;

use std::time::Duration;

pub use self::cluster::{
    Kind, Loops, TestCluster, delete, merge, patch, patch_status, until, until_all, until_any, until_gone,
};
pub use self::driver::{
    Capabilities, CrashingSocket, DONE_BUT_REFUSED, FakeDriver, FaultKind, Lie, REFUSED, RecordedCall,
    RegisteredDriver, Storage,
};
pub use self::server::EmbeddedServer;

/// More than anything in a test takes, even on a busy machine: whoever waits this long has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);
