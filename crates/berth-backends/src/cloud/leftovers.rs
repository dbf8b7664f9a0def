//! Snapshots that exist only while a volume is cloned. A driver that is killed at the wrong time leaves one over; whoever has the
//! account next removes it.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio_util::task::AbortOnDropHandle;

use super::Deadline;
use crate::Result;

/// How often is looked for them.
const PAUSE: Duration = Duration::from_secs(600);
/// How long one look may take; it may have to wait for a minute that has requests left.
const LONGEST: Duration = Duration::from_secs(180);

/// An account that clones volumes by snapshots.
pub(crate) trait ClonesBySnapshot: Send + Sync + 'static {
    /// The ids of all snapshots that clones are or were made of, and when each was taken.
    fn clone_snapshots(
        &self,
        until: Deadline,
    ) -> impl Future<Output = Result<Vec<(String, SystemTime)>>> + Send;

    /// Whether this process needed the snapshot within that time.
    fn needs(&self, snapshot: &str, within: Duration) -> bool;

    /// Removes a snapshot; `Ok` if it is not there.
    fn remove_snapshot(&self, snapshot: &str, until: Deadline) -> impl Future<Output = Result<()>> + Send;
}

/// Removes the snapshots of clones that are at least so old and that nobody needs.
pub(crate) async fn remove_leftovers(account: &impl ClonesBySnapshot, age: Duration) -> Result<()> {
    let until = Deadline::after(LONGEST);
    for (snapshot, taken) in account.clone_snapshots(until).await? {
        let is_old = taken.elapsed().is_ok_and(|elapsed| elapsed >= age);
        if is_old && !account.needs(&snapshot, age) {
            tracing::info!(snapshot.id = snapshot, "removing a snapshot that a clone was made of");
            account.remove_snapshot(&snapshot, until).await?;
        }
    }
    Ok(())
}

/// Removes what is left over now and again, for as long as the account is in use and the handle is kept.
pub(crate) fn keep_removing<A: ClonesBySnapshot>(account: &Arc<A>, age: Duration) -> AbortOnDropHandle<()> {
    let pause = PAUSE.min(age.max(Duration::from_secs(1)));
    let weak = Arc::downgrade(account);
    AbortOnDropHandle::new(tokio::spawn(async move {
        while let Some(account) = weak.upgrade() {
            if let Err(error) = remove_leftovers(account.as_ref(), age).await {
                tracing::warn!(%error, "snapshots that clones were made of could not be looked for");
            }
            drop(account);
            tokio::time::sleep(pause).await;
        }
    }))
}
