//! The controller's side: makes, copies, grows, lists and removes volumes and snapshots as a user-space client of the
//! servers. It mounts nothing, and keeps nothing but what is on the shares themselves (`record.rs`).

mod ahead;
mod content;
mod directories;
mod health;
mod pack;
mod progress;
mod quota;
mod restore;
mod snapshots;
mod upkeep;
mod volumes;

use std::{sync::Arc, time::Duration};

use berth_core::Capacity;
use berth_nfs::Metrics;
use tokio_util::task::TaskTracker;

pub(super) use self::content::COPIED;
use self::{quota::Exports, snapshots::Building};
use super::{Config, blocking, claims, id, parameters, parse_share, record, shares, shares::Shares};
use crate::Result;

/// The controller's side of the NFS backend; cheap to clone.
#[derive(Debug, Clone)]
pub struct NfsController(Arc<State>);

#[derive(Debug)]
struct State {
    config: Config,
    shares: Shares,
    exports: Exports,
    /// Snapshots whose archives are being written by this process.
    building: Building,
    /// Everything that goes on behind an answer.
    tasks: TaskTracker,
}

impl NfsController {
    /// One that has spoken to nobody yet.
    pub(super) fn new(config: Config) -> Result<Self> {
        let shares = config.shares.iter().map(|text| parse_share(text)).collect::<Result<Vec<_>>>()?;
        Ok(Self(Arc::new(State {
            shares: Shares::new(&shares, config.mount_options.clone(), config.allowed_servers.clone()),
            exports: Exports::new(&config.export_roots)?,
            building: Building::default(),
            tasks: TaskTracker::new(),
            config,
        })))
    }

    /// How the servers answer.
    pub(super) fn metrics(&self) -> &Metrics {
        self.0.shares.metrics()
    }

    /// Waits until deleted data is really gone and snapshots are whole, at most this long; the rest is left to whoever
    /// comes next.
    pub async fn drain(&self, at_most: Duration) {
        self.0.tasks.close();
        let _ = tokio::time::timeout(at_most, self.0.tasks.wait()).await;
        self.0.tasks.reopen();
    }
}

/// A size that a record may hold.
fn capacity(bytes: u64) -> Capacity {
    Capacity::new(bytes)
}
