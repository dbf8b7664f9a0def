//! Following the changes of a collection.

use std::sync::Arc;

use tokio::sync::Notify;

use super::{Collection, Event, Expired, Store};

/// How many events one batch has at most: what a slow reader holds on to.
const BATCH: usize = 256;

/// A cursor into the history of a collection.
#[derive(Debug)]
pub struct Watch {
    store: Store,
    collection: Collection,
    changed: Arc<Notify>,
    delivered: u64,
}

impl Watch {
    pub(super) fn new(store: Store, collection: Collection, after: u64) -> Result<Self, Expired> {
        let changed = {
            let mut published = store.shared.change();
            published.events_since(&collection, after, 0)?;
            published.changes_of(&collection)
        };
        Ok(Self { store, collection, changed, delivered: after })
    }

    /// The next events, at least one. Whoever stops waiting for them misses none.
    pub async fn next(&mut self) -> Result<Vec<Arc<Event>>, Expired> {
        loop {
            // Before the check: a change after it must not go unnoticed.
            let changed = self.changed.notified();
            let (events, up_to) =
                self.store.shared.read().events_since(&self.collection, self.delivered, BATCH)?;
            self.delivered = up_to;
            if !events.is_empty() {
                return Ok(events);
            }
            changed.await;
        }
    }

    /// Everything up to here was delivered, also when it concerned other collections only.
    pub fn revision(&self) -> u64 {
        match self.store.shared.read().events_since(&self.collection, self.delivered, 1) {
            Ok((events, up_to)) if events.is_empty() => up_to,
            _ => self.delivered,
        }
    }
}
