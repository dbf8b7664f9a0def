//! What readers see: the current objects, and the history that watchers and past views are served from.

use std::{
    collections::{HashMap, VecDeque, vec_deque},
    sync::Arc,
};

use tokio::sync::Notify;

use super::{
    Collection, Event, Expired, Key, Object, Options,
    view::{At, Objects, View, apply},
};

/// What an event costs besides the bytes of its object.
const OVERHEAD: usize = 200;
/// Events are handed out in batches of about this size: what a slow reader holds on to.
const LIMIT_BYTES: usize = 256 << 10;

/// The published state of the store.
#[derive(Debug)]
pub(super) struct Published {
    revision: u64,
    /// Before this nothing is known of any collection.
    base: u64,
    collections: HashMap<Collection, Contents>,
    /// The collection of every event in the history, oldest first, with the event's size.
    order: VecDeque<(Collection, usize)>,
    bytes: usize,
    options: Options,
}

#[derive(Debug, Default)]
struct Contents {
    objects: Objects,
    events: VecDeque<Arc<Event>>,
    /// Of what happened up to here, nothing need be in `events`.
    floor: u64,
    changed: Arc<Notify>,
}

impl Contents {
    fn since(&self, after: u64) -> vec_deque::Iter<'_, Arc<Event>> {
        let first = self.events.partition_point(|event| event.revision <= after);
        self.events.range(first..)
    }
}

/// What [`Published::publish`] leaves to be done when readers are no longer held up.
#[derive(Debug, Default)]
pub(super) struct Aftermath {
    /// Those to be told that their collection changed.
    pub(super) changed: Vec<Arc<Notify>>,
    /// Events that fell out of the history, to be freed.
    pub(super) forgotten: Vec<Arc<Event>>,
}

impl Published {
    pub(super) fn new(options: Options) -> Self {
        Self { revision: 0, base: 0, collections: HashMap::new(), order: VecDeque::new(), bytes: 0, options }
    }

    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn get(&self, key: &Key) -> Option<Arc<Object>> {
        self.collections.get(&key.collection)?.objects.get(&At::from(key)).cloned()
    }

    pub(super) fn view(&self, collection: &Collection) -> View {
        let objects = self.collections.get(collection).map(|contents| contents.objects.clone());
        View::new(self.revision, objects.unwrap_or_default())
    }

    /// A view of now, and what must be undone to see the collection as it was.
    pub(super) fn view_and_events_since(
        &self,
        collection: &Collection,
        revision: u64,
    ) -> Result<(View, Vec<Arc<Event>>), Expired> {
        if revision > self.revision {
            return Err(Expired { requested: revision, oldest: self.revision });
        }
        self.check(collection, revision)?;
        let undone =
            self.collections.get(collection).map(|contents| contents.since(revision).cloned().collect());
        Ok((self.view(collection), undone.unwrap_or_default()))
    }

    /// At most `limit` events after a revision, and no more once they are large; and, when these are all, the revision up to which they are.
    pub(super) fn events_since(
        &self,
        collection: &Collection,
        after: u64,
        limit: usize,
    ) -> Result<(Vec<Arc<Event>>, u64), Expired> {
        self.check(collection, after)?;
        let Some(contents) = self.collections.get(collection) else {
            return Ok((Vec::new(), self.revision.max(after)));
        };
        let since = contents.since(after);
        let all = since.len();
        let mut bytes = 0;
        let fits = |event: &&Arc<Event>| {
            let is_first_or_fits = bytes < LIMIT_BYTES;
            bytes += event.object.bytes.len();
            is_first_or_fits
        };
        let events: Vec<_> = since.take(limit).take_while(fits).cloned().collect();
        let up_to = match events.last() {
            Some(last) if events.len() < all => last.revision,
            _ => self.revision.max(after),
        };
        Ok((events, up_to))
    }

    /// Whether everything that happened to a collection after the revision is in the history.
    pub(super) fn check(&self, collection: &Collection, revision: u64) -> Result<(), Expired> {
        let floor = self.collections.get(collection).map_or(0, |contents| contents.floor);
        let oldest = floor.max(self.base);
        if revision < oldest { Err(Expired { requested: revision, oldest }) } else { Ok(()) }
    }

    /// Who tells that a collection has changed.
    pub(super) fn changes_of(&mut self, collection: &Collection) -> Arc<Notify> {
        self.collections.entry(collection.clone()).or_default().changed.clone()
    }

    /// Makes events visible, in their order.
    pub(super) fn publish(&mut self, events: impl Iterator<Item = Arc<Event>>) -> Aftermath {
        let mut aftermath = Aftermath::default();
        for event in events {
            let collection = event.object.key.collection.clone();
            let size = event.object.bytes.len() + OVERHEAD;
            self.revision = event.revision;
            self.bytes += size;
            let contents = self.collections.entry(collection.clone()).or_default();
            apply(&mut contents.objects, &event);
            contents.events.push_back(event);
            if !aftermath.changed.iter().any(|known| Arc::ptr_eq(known, &contents.changed)) {
                aftermath.changed.push(contents.changed.clone());
            }
            self.order.push_back((collection, size));
        }
        self.trim(&mut aftermath.forgotten);
        aftermath
    }

    fn trim(&mut self, forgotten: &mut Vec<Arc<Event>>) {
        while self.order.len() > self.options.history_events || self.bytes > self.options.history_bytes {
            let Some((collection, size)) = self.order.pop_front() else { return };
            self.bytes -= size;
            let Some(contents) = self.collections.get_mut(&collection) else { continue };
            if let Some(event) = contents.events.pop_front() {
                contents.floor = event.revision;
                forgotten.push(event);
            }
        }
    }

    /// Puts back an object that was recorded in an earlier life.
    pub(super) fn restore(&mut self, object: Object) {
        let contents = self.collections.entry(object.key.collection.clone()).or_default();
        contents.floor = contents.floor.max(object.revision);
        self.revision = self.revision.max(object.revision);
        contents.objects.insert((&object.key).into(), Arc::new(object));
    }

    /// Puts back that something was removed from a collection at that revision.
    pub(super) fn restore_removal(&mut self, collection: Collection, revision: u64) {
        let contents = self.collections.entry(collection).or_default();
        contents.floor = contents.floor.max(revision);
        self.revision = self.revision.max(revision);
    }

    /// Goes on at a later revision, before which nothing is known of any collection.
    pub(super) fn leap_to(&mut self, revision: u64) {
        self.revision = self.revision.max(revision);
        self.base = self.base.max(revision);
    }

    /// How many objects there are in all collections.
    pub(super) fn len(&self) -> usize {
        self.collections.values().map(|contents| contents.objects.len()).sum()
    }
}
