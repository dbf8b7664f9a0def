//! A collection at one moment, and the recent moments somebody pages through.

use std::{
    cmp::Ordering,
    collections::VecDeque,
    ops::Bound::{Excluded, Included, Unbounded},
    sync::Arc,
};

use equivalent::{Comparable, Equivalent};
use imbl::OrdMap;

use super::{Collection, Event, EventKind, Key, Object};

/// How many past moments are kept at hand for clients that page.
const RECENT: usize = 32;

pub(super) type Objects = OrdMap<CollectionKey, Arc<Object>>;

/// Where an object stands in its collection.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CollectionKey {
    namespace: Arc<str>,
    name: Arc<str>,
}

impl From<&Key> for CollectionKey {
    fn from(key: &Key) -> Self {
        Self { namespace: key.namespace.clone(), name: key.name.clone() }
    }
}

/// A [`CollectionKey`] to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At<'a>(pub(super) &'a str, pub(super) &'a str);

impl<'a> From<&'a Key> for At<'a> {
    fn from(key: &'a Key) -> Self {
        Self(&key.namespace, &key.name)
    }
}

impl Equivalent<CollectionKey> for At<'_> {
    fn equivalent(&self, place: &CollectionKey) -> bool {
        self.compare(place) == Ordering::Equal
    }
}

impl Comparable<CollectionKey> for At<'_> {
    fn compare(&self, place: &CollectionKey) -> Ordering {
        (self.0, self.1).cmp(&(&place.namespace, &place.name))
    }
}

/// A collection as it was at one revision, ordered by namespace and name; nothing changes in it any more.
#[derive(Debug, Clone)]
pub struct View {
    revision: u64,
    objects: Objects,
}

impl View {
    pub(super) fn new(revision: u64, objects: Objects) -> Self {
        Self { revision, objects }
    }

    /// The revision of the store it shows.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// How many objects there are, in all namespaces.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// One of the objects.
    pub fn get(&self, namespace: &str, name: &str) -> Option<&Arc<Object>> {
        self.objects.get(&At(namespace, name))
    }

    /// The objects, of one namespace or of all, after a given namespace and name.
    pub fn range<'a>(
        &'a self,
        namespace: Option<&str>,
        after: Option<(&str, &str)>,
    ) -> impl Iterator<Item = &'a Arc<Object>> + use<'a> {
        // No other namespace sorts between this one and itself with a NUL behind it.
        let beyond = namespace.map(|namespace| format!("{namespace}\0"));
        let start = namespace.map(|namespace| At(namespace, ""));
        let end = beyond.as_deref().map(|beyond| At(beyond, ""));
        let after = after.map(|(namespace, name)| At(namespace, name));
        let lower = match (start, after) {
            (Some(start), Some(after)) if after < start => Included(start),
            (_, Some(after)) => Excluded(after),
            (Some(start), None) => Included(start),
            (None, None) => Unbounded,
        };
        let is_empty = matches!((after, end), (Some(after), Some(end)) if after >= end);
        let found = (!is_empty).then(|| self.objects.range((lower, end.map_or(Unbounded, Excluded))));
        found.into_iter().flatten().map(|(_, object)| object)
    }

    pub(super) fn at(&mut self, revision: u64) {
        self.revision = revision;
    }

    /// Takes back the events, which are in the order they happened, and arrives at `revision`.
    pub(super) fn undo(&mut self, events: &[Arc<Event>], revision: u64) {
        for event in events.iter().rev() {
            match &event.previous {
                Some(previous) => {
                    self.objects.insert(CollectionKey::from(&previous.key), previous.clone());
                }
                None => {
                    self.objects.remove(&At::from(&event.object.key));
                }
            }
        }
        self.revision = revision;
    }
}

/// Makes an event's change.
pub(super) fn apply(objects: &mut Objects, event: &Event) {
    match event.kind {
        EventKind::Added | EventKind::Modified => {
            objects.insert(CollectionKey::from(&event.object.key), event.object.clone());
        }
        EventKind::Deleted => {
            objects.remove(&At::from(&event.object.key));
        }
    }
}

/// Past views, the latest made last, so that the next page of a list costs nothing.
#[derive(Debug, Default)]
pub(super) struct RecentViews(VecDeque<(Collection, View)>);

impl RecentViews {
    pub(super) fn find(&self, collection: &Collection, revision: u64) -> Option<View> {
        let found = self.0.iter().find(|(of, view)| of == collection && view.revision == revision);
        found.map(|(_, view)| view.clone())
    }

    pub(super) fn keep(&mut self, collection: Collection, view: View) {
        if self.0.len() == RECENT {
            self.0.pop_front();
        }
        self.0.push_back((collection, view));
    }

    /// Drops what the history no longer reaches back to, and with it the states that only these views hold.
    pub(super) fn forget(&mut self, is_expired: impl Fn(&Collection, u64) -> bool) {
        self.0.retain(|(collection, view)| !is_expired(collection, view.revision));
    }
}
