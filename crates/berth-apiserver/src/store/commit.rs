//! The way of a write: its revision under a lock, its turn in a queue, one sync for all in the queue, and then what readers
//! see of it: the current objects, and the history that watchers and past views are served from.
//!
//! An object's key is `<collection>/<namespace>/<name>`, its record `[<revision>,<object>]`. A collection's own name is
//! the key of a number: the revision of the last removal from it, which no object remembers. The key `*` is that of the
//! revision at which the store went on after damage.

use std::{
    collections::{HashMap, HashSet, VecDeque, vec_deque},
    path::Path,
    sync::Arc,
    thread::JoinHandle,
};

use berth_host::path::Dir;
use berth_journal::{Entry, Journal};
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, oneshot};

use super::{
    Change, Collection, Damage, Event, EventKind, Expect, Expired, JOURNAL, Key, Object, OpenError, Opened,
    Options, Shared, Store, WriteError,
    view::{At, Objects, View, apply},
};
use crate::metrics::JournalMetrics;

type Answer = Result<Arc<Object>, WriteError>;

/// Writes on their way to the disk.
#[derive(Debug)]
pub(super) struct Commits {
    pending: Mutex<Pending>,
    arrived: Condvar,
}

#[derive(Debug)]
struct Pending {
    /// The newest revision that was given out.
    revision: u64,
    queue: Vec<Step>,
    /// The newest event of every object that has one which is not published yet.
    assigned: HashMap<Key, Arc<Event>>,
    names: Names,
    is_closing: bool,
}

/// A place in the queue.
#[derive(Debug)]
struct Step {
    what: What,
    answer: oneshot::Sender<Answer>,
}

#[derive(Debug)]
enum What {
    Change(Arc<Event>),
    /// A refusal because of a change that is still in the queue.
    Refusal(WriteError),
}

impl Step {
    fn event(&self) -> Option<&Arc<Event>> {
        match &self.what {
            What::Change(event) => Some(event),
            What::Refusal(_) => None,
        }
    }

    fn settle(self, failure: Option<&WriteError>) {
        let answer = match (failure, self.what) {
            (Some(failure), _) => Err(failure.clone()),
            (None, What::Change(event)) => Ok(event.object.clone()),
            (None, What::Refusal(refusal)) => Err(refusal),
        };
        // A caller that is gone gets no answer; its change is made all the same.
        let _ = self.answer.send(answer);
    }
}

impl Commits {
    pub(super) fn after(revision: u64) -> Self {
        let pending = Pending {
            revision,
            queue: Vec::new(),
            assigned: HashMap::new(),
            names: Names::default(),
            is_closing: false,
        };
        Self { pending: Mutex::new(pending), arrived: Condvar::new() }
    }

    /// Waits for steps; none come any more when there are none.
    fn next_batch(&self) -> Vec<Step> {
        let mut pending = self.pending.lock();
        self.arrived.wait_while(&mut pending, |pending| pending.queue.is_empty() && !pending.is_closing);
        std::mem::take(&mut pending.queue)
    }

    /// Forgets what is published now, so that expectations are checked against what readers see.
    fn forget_published<'a>(&self, events: impl Iterator<Item = &'a Arc<Event>>) {
        let mut pending = self.pending.lock();
        for event in events {
            let key = &event.object.key;
            if pending.assigned.get(key).is_some_and(|newest| newest.revision == event.revision) {
                pending.assigned.remove(key);
            }
        }
    }

    /// Takes everything out of the queue, since nothing assigned so far counts any more.
    fn take_back(&self) -> Vec<Step> {
        let mut pending = self.pending.lock();
        pending.assigned.clear();
        std::mem::take(&mut pending.queue)
    }

    /// Takes the queue and splits it, after `batch`, into removals that a full disk may still bear and the rest.
    fn split_removals(&self, mut batch: Vec<Step>) -> (Vec<Step>, Vec<Step>) {
        let mut pending = self.pending.lock();
        batch.append(&mut pending.queue);
        let mut lost: HashSet<Key> = HashSet::new();
        let (removals, rest): (Vec<_>, Vec<_>) = batch.into_iter().partition(|step| match step.event() {
            Some(event) if event.kind == EventKind::Deleted => !lost.contains(&event.object.key),
            Some(event) => {
                lost.insert(event.object.key.clone());
                false
            }
            None => false,
        });
        pending.assigned = removals
            .iter()
            .filter_map(Step::event)
            .map(|event| (event.object.key.clone(), event.clone()))
            .collect();
        (removals, rest)
    }
}

impl Store {
    /// Changes one object, if it is as expected. Durable and visible when it returns.
    ///
    /// A change that was queued is made even if the caller no longer waits for it. A refusal speaks of what is durable,
    /// too: it is not given before the change that led to it is published.
    pub async fn write(&self, key: Key, expect: Expect, change: Change) -> Result<Arc<Object>, WriteError> {
        let (answer, receiver) = oneshot::channel();
        {
            let mut pending = self.shared.commits.pending.lock();
            if pending.is_closing {
                return Err(WriteError::Storage("the thread that writes the journal is gone".to_owned()));
            }
            let (current, is_published) = match pending.assigned.get(&key) {
                Some(event) if event.kind == EventKind::Deleted => (None, false),
                Some(event) => (Some(event.object.clone()), false),
                None => (self.shared.read().get(&key), true),
            };
            if current.is_none() && self.shared.is_quarantined(&key) {
                return Err(WriteError::Quarantined);
            }
            let what = match check(expect, &change, current.as_ref()) {
                Ok(()) => What::Change(pending.give_out(key, change, current)),
                Err(refusal) if is_published => return Err(refusal),
                Err(refusal) => What::Refusal(refusal),
            };
            pending.queue.push(Step { what, answer });
        }
        self.shared.commits.arrived.notify_one();
        receiver.await.unwrap_or_else(|_| Err(WriteError::Storage("the store was closed".to_owned())))
    }
}

impl Shared {
    fn publish(&self, events: impl Iterator<Item = Arc<Event>>) {
        let mut published = self.change();
        let aftermath = published.publish(events);
        let revision = published.revision();
        drop(published);
        if !aftermath.forgotten.is_empty() {
            let published = self.read();
            self.recent_views
                .lock()
                .forget(|collection, revision| published.check(collection, revision).is_err());
        }
        for changed in aftermath.changed {
            changed.notify_waiters();
        }
        self.newest.send_replace(revision);
    }

    /// Makes a batch durable, publishes it and answers those who wait.
    fn commit(&self, records: &mut Records, batch: Vec<Step>) {
        match records.append(&batch) {
            Ok(()) => self.settle(batch),
            Err(failure @ WriteError::Full(_)) => {
                let (removals, rest) = self.commits.split_removals(batch);
                for step in rest {
                    step.settle(Some(&failure));
                }
                match records.append(&removals) {
                    Ok(()) => self.settle(removals),
                    Err(failure) => self.fail(removals, &failure),
                }
            }
            Err(failure) => self.fail(batch, &failure),
        }
    }

    fn settle(&self, batch: Vec<Step>) {
        if batch.iter().any(|step| step.event().is_some()) {
            self.publish(batch.iter().filter_map(Step::event).cloned());
            self.commits.forget_published(batch.iter().filter_map(Step::event));
        }
        for step in batch {
            step.settle(None);
        }
    }

    /// Fails a batch and all that was assigned on top of it.
    fn fail(&self, batch: Vec<Step>, failure: &WriteError) {
        let built_on_it = self.commits.take_back();
        for step in batch.into_iter().chain(built_on_it) {
            step.settle(Some(failure));
        }
    }
}

impl Pending {
    fn give_out(&mut self, key: Key, change: Change, current: Option<Arc<Object>>) -> Arc<Event> {
        let revision = self.revision + 1;
        let (kind, contents) = match change {
            Change::Put(contents) if current.is_some() => (EventKind::Modified, contents),
            Change::Put(contents) => (EventKind::Added, contents),
            Change::Delete(contents) => (EventKind::Deleted, contents),
        };
        // A copy of the right size: what serializers hand over has up to as much room again behind it.
        let bytes = Bytes::copy_from_slice(&contents(revision));
        let key = match &current {
            Some(current) => current.key.clone(),
            None => Key {
                collection: Collection(self.names.shared(key.collection.as_str())),
                namespace: self.names.shared(&key.namespace),
                name: key.name,
            },
        };
        let object = Arc::new(Object { key: key.clone(), revision, bytes });
        let event = Arc::new(Event { revision, kind, object, previous: current });
        self.revision = revision;
        self.assigned.insert(key, event.clone());
        event
    }
}

fn check(expect: Expect, change: &Change, current: Option<&Arc<Object>>) -> Result<(), WriteError> {
    match (expect, current) {
        (Expect::Absent, Some(current)) => Err(WriteError::Exists(current.clone())),
        (Expect::Absent, None) if matches!(change, Change::Delete(_)) => Err(WriteError::Missing),
        (Expect::Revision(_) | Expect::Present, None) => Err(WriteError::Missing),
        (Expect::Revision(expected), Some(current)) if current.revision != expected => {
            Err(WriteError::Conflict(current.clone()))
        }
        _ => Ok(()),
    }
}

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
struct Aftermath {
    /// Those to be notified that their collection changed.
    changed: Vec<Arc<Notify>>,
    /// Events that fell out of the history, to be freed.
    forgotten: Vec<Arc<Event>>,
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

    /// Notifies watchers that a collection has changed.
    pub(super) fn changes_of(&mut self, collection: &Collection) -> Arc<Notify> {
        self.collections.entry(collection.clone()).or_default().changed.clone()
    }

    /// Makes events visible, in their order.
    fn publish(&mut self, events: impl Iterator<Item = Arc<Event>>) -> Aftermath {
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

/// The thread that owns the journal; it ends, with everything queued done, when this is dropped.
#[derive(Debug)]
pub(super) struct Committer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Committer {
    pub(super) fn start(shared: Arc<Shared>, mut records: Records) -> std::io::Result<Self> {
        let thread = std::thread::Builder::new().name("store-commit".to_owned()).spawn({
            let shared = shared.clone();
            move || {
                let open = Open(shared);
                loop {
                    let batch = open.0.commits.next_batch();
                    if batch.is_empty() {
                        return;
                    }
                    open.0.commit(&mut records, batch);
                }
            }
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

/// Lets nobody wait for a thread that has ended, be it by a panic.
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        let mut pending = self.0.commits.pending.lock();
        pending.is_closing = true;
        pending.queue.clear();
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        self.shared.commits.pending.lock().is_closing = true;
        self.shared.commits.arrived.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic there was reported by itself, and the callers it left waiting got an error.
            let _ = thread.join();
        }
    }
}

const LOCK: &str = "lock";
const ANY: &str = "*";
/// More changes than a damaged piece of the journal can have held.
const LEAP: u64 = 1_000_000;

/// The journal, and the lock that says it is ours.
#[derive(Debug)]
pub(super) struct Records {
    journal: Journal,
    lock: std::fs::File,
    meters: JournalMetrics,
}

impl Drop for Records {
    fn drop(&mut self) {
        // Closing is not enough: a child process that is just being started may hold the same lock for a moment.
        let _ = self.lock.unlock();
    }
}

/// Reads what an earlier life left behind.
pub(super) fn load(
    dir: &Path,
    options: Options,
) -> Result<(Published, Records, Opened, Option<Damage>), OpenError> {
    let dir = Dir::ensure(dir, 0o700).map_err(OpenError::Directory)?;
    let lock = dir.lock_exclusively(LOCK).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => OpenError::InUse(dir.path().display().to_string()),
        _ => OpenError::Directory(error),
    })?;
    let mut published = Published::new(options);
    let mut names = Names::default();
    let mut strange = 0;
    let (journal, found) = Journal::open(&dir, JOURNAL, &mut |key, record| {
        if restore(key, record, &mut published, &mut names).is_none() {
            strange += 1;
            tracing::error!(key, "a record of the store makes no sense; it is left where it is");
        }
    })
    .map_err(OpenError::Journal)?;
    let mut records = Records { journal, lock, meters: JournalMetrics::default() };
    if found.lines > 0 || found.missing > 0 {
        // The newest changes may be among what was lost, and what clients remember of them must not come again.
        published.leap_to(published.revision() + LEAP);
        records.note_revision(published.revision()).map_err(OpenError::Journal)?;
    }
    let missing = usize::try_from(found.missing).unwrap_or(usize::MAX);
    let damaged = found.lines.saturating_add(strange).saturating_add(missing);
    let opened = Opened { objects: published.len(), revision: published.revision(), damaged };
    let quarantined = found.quarantined.iter().filter_map(|key| parse_key(key, &mut names)).collect();
    let damage = (found.is_damaged() || strange > 0)
        .then(|| Damage { quarantined, kept_in: dir.child_path(berth_journal::CORRUPT) });
    Ok((published, records, opened, damage))
}

pub(super) fn skip_revisions(dir: &Path) -> Result<(), OpenError> {
    let (published, mut records, ..) = load(dir, Options::default())?;
    records.note_revision(published.revision() + LEAP).map_err(OpenError::Journal)
}

/// An object's key as it stands in the journal; `None` for the keys of revisions.
fn parse_key(key: &str, names: &mut Names) -> Option<Key> {
    let mut parts = key.splitn(3, '/');
    let (collection, namespace, name) = (parts.next()?, parts.next()?, parts.next()?);
    let collection = Collection(names.shared(collection));
    Some(Key { collection, namespace: names.shared(namespace), name: name.into() })
}

impl Records {
    pub(super) fn meters(&self) -> JournalMetrics {
        self.meters.clone()
    }

    fn note_revision(&mut self, revision: u64) -> Result<(), berth_journal::Error> {
        self.journal.write(&[Entry::Put { key: ANY, json: revision.to_string().as_bytes() }])?;
        self.journal.sync()
    }

    /// Makes the changes of a batch durable, with one sync.
    fn append(&mut self, batch: &[Step]) -> Result<(), WriteError> {
        let mut marks: Vec<(&str, Vec<u8>)> = Vec::new();
        let mut lines: Vec<(String, Option<Vec<u8>>)> = Vec::new();
        for event in batch.iter().filter_map(Step::event) {
            let Key { collection, namespace, name } = &event.object.key;
            let key = format!("{collection}/{namespace}/{name}");
            if event.kind == EventKind::Deleted {
                let mark = event.revision.to_string().into_bytes();
                match marks.iter_mut().find(|(of, _)| *of == collection.as_str()) {
                    Some((_, old)) => *old = mark,
                    None => marks.push((collection.as_str(), mark)),
                }
                lines.push((key, None));
            } else {
                lines.push((key, Some(encode(&event.object))));
            }
        }
        if lines.is_empty() {
            return Ok(());
        }
        // First the marks: a removal that is on the disk without its revision would let that be given out again.
        let mut entries: Vec<Entry<'_>> = Vec::with_capacity(marks.len() + lines.len());
        entries.extend(marks.iter().map(|(key, json)| Entry::Put { key, json }));
        entries.extend(lines.iter().map(|(key, json)| match json {
            Some(json) => Entry::Put { key, json },
            None => Entry::Remove { key },
        }));
        let written = if lines.iter().all(|(_, json)| json.is_none()) {
            self.journal.write_from_reserve(&entries)
        } else {
            self.journal.write(&entries)
        };
        let begun = std::time::Instant::now();
        let synced = written.and_then(|()| self.journal.sync());
        self.meters.syncs.observe(begun.elapsed().as_secs_f64());
        #[expect(clippy::cast_precision_loss, reason = "a batch is small")]
        self.meters.batches.observe(lines.len() as f64);
        synced.map_err(|error| match error {
            berth_journal::Error::Full(why) => WriteError::Full(why),
            berth_journal::Error::Broken(why) => WriteError::Storage(why),
        })
    }
}

fn encode(object: &Object) -> Vec<u8> {
    let mut record = Vec::with_capacity(object.bytes.len() + 24);
    record.push(b'[');
    record.extend_from_slice(object.revision.to_string().as_bytes());
    record.push(b',');
    record.extend_from_slice(&object.bytes);
    record.push(b']');
    record
}

fn restore(key: &str, record: &[u8], published: &mut Published, names: &mut Names) -> Option<()> {
    let Some(key) = parse_key(key, names) else {
        let revision = std::str::from_utf8(record).ok()?.parse().ok()?;
        match key {
            ANY => published.leap_to(revision),
            collection => published.restore_removal(Collection(names.shared(collection)), revision),
        }
        return Some(());
    };
    let rest = record.strip_prefix(b"[")?.strip_suffix(b"]")?;
    let comma = rest.iter().position(|byte| *byte == b',')?;
    let revision = std::str::from_utf8(&rest[..comma]).ok()?.parse().ok()?;
    published.restore(Object { key, revision, bytes: Bytes::copy_from_slice(&rest[comma + 1..]) });
    Some(())
}

/// Names that many objects have in common, each kept once.
#[derive(Debug, Default)]
struct Names {
    known: HashSet<Arc<str>>,
    /// How many were left when those that nobody uses were last dropped.
    in_use: usize,
}

impl Names {
    fn shared(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        if self.known.len() > 2 * self.in_use + 100 {
            self.known.retain(|known| Arc::strong_count(known) > 1);
            self.in_use = self.known.len();
        }
        let name: Arc<str> = name.into();
        self.known.insert(name.clone());
        name
    }
}
