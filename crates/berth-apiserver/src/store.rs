//! The durable, versioned, watchable store below the API; it knows keys and bytes, nothing of Kubernetes.
//!
//! Everything is in memory, in maps that are shared between versions; the disk holds a journal that is read at start
//! only. A write gets its revision under one lock, waits in a queue until a thread has made the whole queue durable
//! with one sync, and is then published: to readers, to the history and to watchers, in the order of revisions.
//!
//! Guarantees:
//! - What [`Store::write`] returned is on the disk, and what readers and watchers see is on the disk too.
//! - Revisions only grow, also over restarts, and every change has its own.
//! - Readers and watchers never wait for the disk. A watcher is a cursor into the shared history: however slow, it
//!   holds nothing, and when the history has moved on it gets [`Expired`].
//!
//! Assumes that keys contain no `/` in their collection and namespace.

mod commit;
mod view;
mod watch;

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};

use self::{
    commit::{Commits, Published},
    view::RecentViews,
};
pub use self::{view::View, watch::Watch};
use crate::metrics::JournalMetrics;

/// The most bytes that an object may have as JSON: what etcd takes by default.
pub const MAX_OBJECT: usize = 1536 * 1024;

/// The journal's file in the directory of a store.
pub const JOURNAL: &str = "objects";

/// Makes the store in `dir`, whose files were replaced by older ones, go on at a revision that was never given out: clients that
/// saw later ones have to list again.
pub fn skip_revisions(dir: &Path) -> Result<(), OpenError> {
    commit::skip_revisions(dir)
}

/// A set of objects that are listed and watched together: `pods`, `storageclasses.storage.k8s.io`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Collection(Arc<str>);

impl Collection {
    /// The collection of that name.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// The name as text, for instance `storageclasses.storage.k8s.io`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Collection {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl fmt::Display for Collection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identifies an object in the store. An object that is deleted and created again has the same key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Where it is listed.
    pub collection: Collection,
    /// Its namespace; empty in the scope of the cluster.
    pub namespace: Arc<str>,
    /// The object's name, which is unique in its collection and namespace.
    pub name: Arc<str>,
}

impl Key {
    /// The key of `name` in `namespace`, which is empty in the scope of the cluster.
    pub fn new(collection: Collection, namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { collection, namespace: namespace.into(), name: name.into() }
    }
}

/// One state of an object.
#[derive(Debug, PartialEq, Eq)]
pub struct Object {
    /// The key under which this state is stored.
    pub key: Key,
    /// The revision of the change that made this state.
    pub revision: u64,
    /// The object as JSON.
    pub bytes: Bytes,
}

/// What a writer believes about the object it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// No object may have the key: a write that finds one fails with [`WriteError::Exists`].
    Absent,
    /// It is at exactly this revision.
    Revision(u64),
    /// There is one, whatever its state.
    Present,
}

/// Makes an object's bytes when the revision of the change is known; short, since others wait to write.
pub type Contents = Box<dyn FnOnce(u64) -> Bytes + Send>;

/// What to do with an object.
pub enum Change {
    /// Gives it a new state.
    Put(Contents),
    /// Removes it; the bytes are its last state, for those who watch.
    Delete(Contents),
}

impl Change {
    /// Gives the object a new state.
    pub fn put(contents: impl FnOnce(u64) -> Bytes + Send + 'static) -> Self {
        Self::Put(Box::new(contents))
    }

    /// Removes the object; those who watch get its last state.
    pub fn delete(contents: impl FnOnce(u64) -> Bytes + Send + 'static) -> Self {
        Self::Delete(Box::new(contents))
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Put(_) => "Put",
            Self::Delete(_) => "Delete",
        })
    }
}

/// One change, as watchers see it.
#[derive(Debug, PartialEq, Eq)]
pub struct Event {
    /// The revision of the change.
    pub revision: u64,
    /// Whether the object was created, changed or deleted.
    pub kind: EventKind,
    /// The new state, or the last one of an object that is gone.
    pub object: Arc<Object>,
    /// The object's state just before the change; `None` if the object was created by it.
    pub previous: Option<Arc<Object>>,
}

/// What happened to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The object was created: no object had this key before.
    Added,
    /// The object existed and has a new state.
    Modified,
    /// The object was deleted, and its key is free again.
    Deleted,
}

/// How much a store remembers.
#[derive(Debug, Clone)]
pub struct Options {
    /// How many past changes can be watched.
    pub history_events: usize,
    /// How many bytes the states in these changes may have; together with the states before, they hold at most twice
    /// as much.
    pub history_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        // Some ten thousand states of claims: minutes of a busy machine, and small beside the objects themselves.
        Self { history_events: 100_000, history_bytes: 16 << 20 }
    }
}

/// What was found when a store was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// How many objects there are.
    pub objects: usize,
    /// The revision at which the store goes on. It is higher than that of the newest record if records were lost.
    pub revision: u64,
    /// How many records were found to be damaged, and set aside in the directory `corrupt`, or to be missing.
    pub damaged: usize,
}

/// What is known to be wrong with a store, since this or an earlier start, until somebody removes what was set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Objects whose newest record cannot be read. They are neither served as they were before nor taken for deleted.
    pub quarantined: BTreeSet<Key>,
    /// Where damaged records are kept.
    pub kept_in: PathBuf,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "records of the store are damaged or missing; what was found of them is in {}. ",
            self.kept_in.display()
        )?;
        if !self.quarantined.is_empty() {
            write!(f, "Not served, because their state is not known: ")?;
            for (index, Key { collection, namespace, name }) in
                self.quarantined.iter().take(SHOWN).enumerate()
            {
                let separators =
                    (if index == 0 { "" } else { ", " }, if namespace.is_empty() { "" } else { "/" });
                write!(f, "{}{collection} {namespace}{}{name}", separators.0, separators.1)?;
            }
            let more = self.quarantined.len().saturating_sub(SHOWN);
            if more > 0 {
                write!(f, " and {more} more")?;
            }
            write!(f, ". ")?;
        }
        write!(
            f,
            "Stop the server and restore a backup (berth restore), or remove that directory and start again to go on without \
             what is lost"
        )
    }
}

/// How many quarantined objects are named.
const SHOWN: usize = 10;

/// Why a store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process uses the directory.
    #[error("the data directory {0} is in use by another process")]
    InUse(String),
    /// The directory could not be made or locked.
    #[error("prepare the data directory")]
    Directory(#[source] berth_host::Error),
    /// The journal could not be read.
    #[error("read the store's journal")]
    Journal(#[source] berth_journal::Error),
    /// There is no thread for the committer.
    #[error("start the thread that writes the journal")]
    Thread(#[source] std::io::Error),
}

/// Why a write was refused.
#[derive(Debug, Clone, thiserror::Error)]
pub enum WriteError {
    /// There is an object, and none was expected.
    #[error("the object exists already")]
    Exists(Arc<Object>),
    /// There is no object, and one was expected.
    #[error("there is no such object")]
    Missing,
    /// The object has another revision than expected.
    #[error("the object has changed")]
    Conflict(Arc<Object>),
    /// The disk is full; removing objects may still be possible.
    #[error("the disk is full: {0}")]
    Full(String),
    /// The newest record of the object is damaged, so it is neither known to exist nor to be absent.
    #[error("the record of the object is damaged, so that its state is not known; /readyz says what to do")]
    Quarantined,
    /// The change could not be made durable and was not made.
    #[error("the change could not be stored: {0}")]
    Storage(String),
}

/// A revision is not, or no longer, in the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("revision {requested} is not in the history, which begins after {oldest}")]
pub struct Expired {
    /// What was asked for.
    pub requested: u64,
    /// The oldest revision after which nothing is missing.
    pub oldest: u64,
}

/// A handle on the store; the store is closed when the last one, and the last [`Watch`], is gone.
#[derive(Debug, Clone)]
pub struct Store {
    shared: Arc<Shared>,
    _committer: Arc<commit::Committer>,
}

#[derive(Debug)]
struct Shared {
    published: RwLock<Published>,
    commits: Commits,
    newest: tokio::sync::watch::Sender<u64>,
    recent_views: Mutex<RecentViews>,
    damage: Option<Damage>,
    meters: JournalMetrics,
}

impl Shared {
    fn is_quarantined(&self, key: &Key) -> bool {
        self.damage.as_ref().is_some_and(|damage| damage.quarantined.contains(key))
    }

    fn read(&self) -> RwLockReadGuard<'_, Published> {
        self.published.read()
    }

    fn change(&self) -> RwLockWriteGuard<'_, Published> {
        self.published.write()
    }
}

impl Store {
    /// Opens the store in `dir`, which is made when it is missing, and locks it for this process.
    pub fn open(dir: &Path, options: Options) -> Result<(Self, Opened), OpenError> {
        let (published, journal, opened, damage) = commit::load(dir, options)?;
        let shared = Arc::new(Shared {
            commits: Commits::after(published.revision()),
            newest: tokio::sync::watch::Sender::new(published.revision()),
            published: RwLock::new(published),
            recent_views: Mutex::default(),
            damage,
            meters: journal.meters(),
        });
        let committer = commit::Committer::start(shared.clone(), journal).map_err(OpenError::Thread)?;
        Ok((Self { shared, _committer: Arc::new(committer) }, opened))
    }

    /// What is measured of the journal.
    pub(crate) fn meters(&self) -> &JournalMetrics {
        &self.shared.meters
    }

    /// Whether what is not here was removed: not, if records were damaged, until somebody removes what was set aside of them.
    pub(crate) fn is_whole(&self) -> bool {
        self.shared.damage.is_none()
    }

    /// What is wrong with the store, if something is.
    pub fn damage(&self) -> Option<&Damage> {
        self.shared.damage.as_ref()
    }

    /// Whether it is not known if the object exists, because its newest record is damaged.
    pub fn is_quarantined(&self, key: &Key) -> bool {
        self.shared.is_quarantined(key)
    }

    /// The newest revision that readers see.
    pub fn revision(&self) -> u64 {
        self.shared.read().revision()
    }

    /// An object's current state.
    pub fn get(&self, key: &Key) -> Option<Arc<Object>> {
        self.shared.read().get(key)
    }

    /// A collection as it is now, at no cost: what happens later does not show in it.
    pub fn view(&self, collection: &Collection) -> View {
        self.shared.read().view(collection)
    }

    /// A collection as it was at a recent revision.
    pub fn view_at(&self, collection: &Collection, revision: u64) -> Result<View, Expired> {
        if let Some(view) = self.shared.recent_views.lock().find(collection, revision) {
            return Ok(view);
        }
        let (mut view, undone) = self.shared.read().view_and_events_since(collection, revision)?;
        if undone.is_empty() {
            view.at(revision);
            return Ok(view);
        }
        view.undo(&undone, revision);
        self.shared.recent_views.lock().keep(collection.clone(), view.clone());
        Ok(view)
    }

    /// Every change of a collection after a revision, from the history and then as it happens.
    pub fn watch(&self, collection: &Collection, after: u64) -> Result<Watch, Expired> {
        Watch::new(self.clone(), collection.clone(), after)
    }

    /// Waits until readers see `revision`; says whether they do.
    pub async fn wait_for(&self, revision: u64, timeout: Duration) -> bool {
        let mut newest = self.shared.newest.subscribe();
        let reached = newest.wait_for(|newest| *newest >= revision);
        matches!(tokio::time::timeout(timeout, reached).await, Ok(Ok(_)))
    }
}
