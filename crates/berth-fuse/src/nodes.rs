//! The files that the kernel knows: its number for each, and the server's handle.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use berth_nfs::{Attributes, Entry, FileKind, Handle, Name, Time};
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use tokio::sync::RwLock;

use crate::users::User;

/// What the kernel calls the root.
pub(crate) const ROOT: u64 = 1;

/// A file that the kernel knows.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) handle: Handle,
    pub(crate) kind: FileKind,
    state: Mutex<State>,
    /// Held by everybody who writes, and alone by whoever commits.
    pub(crate) gate: RwLock<()>,
    unsaved: Mutex<Vec<Part>>,
    suspect: AtomicBool,
}

/// Something that was written and is perhaps only in the server's memory.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub(crate) user: Arc<User>,
    pub(crate) offset: u64,
    pub(crate) data: Bytes,
}

#[derive(Debug, Default)]
struct State {
    open: u32,
    hidden: Option<Hidden>,
    /// The attributes last sent to the kernel: size, and when content and attributes changed.
    reported: Option<(u64, Time, Time)>,
    /// The permission bits last sent to the kernel.
    mode: u32,
}

/// A file that was removed while it was open: it has this name until it is closed.
#[derive(Debug, Clone)]
pub(crate) struct Hidden {
    pub(crate) user: Arc<User>,
    pub(crate) dir: Handle,
    pub(crate) name: Name,
}

impl Node {
    fn new(id: u64, handle: Handle, kind: FileKind) -> Self {
        Self {
            id,
            handle,
            kind,
            state: Mutex::default(),
            gate: RwLock::default(),
            unsaved: Mutex::default(),
            suspect: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Whether a commit was begun that nobody saw the end of.
    pub(crate) fn is_suspect(&self) -> bool {
        self.suspect.load(Ordering::Acquire)
    }

    pub(crate) fn suspect(&self, suspect: bool) {
        self.suspect.store(suspect, Ordering::Release);
    }

    pub(crate) fn unsaved(&self) -> MutexGuard<'_, Vec<Part>> {
        self.unsaved.lock()
    }

    pub(crate) fn opened(&self) {
        self.state().open += 1;
    }

    /// One user less; the last one gets what is to be removed now.
    pub(crate) fn closed(&self) -> Option<Hidden> {
        let mut state = self.state();
        state.open = state.open.saturating_sub(1);
        if state.open == 0 { state.hidden.take() } else { None }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state().open > 0
    }

    /// Whether the server knows it by a name that only keeps it until the last close.
    pub(crate) fn is_hidden(&self) -> bool {
        self.state().hidden.is_some()
    }

    /// Has the hidden name removed at the last close; gives it back if that was already.
    pub(crate) fn hide(&self, hidden: Hidden) -> Option<Hidden> {
        let mut state = self.state();
        if state.open == 0 {
            return Some(hidden);
        }
        state.hidden = Some(hidden);
        None
    }

    /// Records the attributes that are sent to the kernel, and returns whether they differ from those sent before.
    pub(crate) fn note_attributes(&self, attributes: &Attributes) -> bool {
        let now = (attributes.size, attributes.modified, attributes.changed);
        let mut state = self.state();
        state.mode = attributes.mode;
        state.reported.replace(now).is_some_and(|before| before != now)
    }

    /// Whether everybody may look for names in this directory, as far as its mode says.
    pub(crate) fn is_open_to_all(&self) -> bool {
        self.state().mode & 0o111 == 0o111
    }
}

/// All files that the kernel knows.
#[derive(Debug)]
pub(crate) struct Nodes(Mutex<Table>);

#[derive(Debug)]
struct Table {
    by_id: HashMap<u64, CountedNode>,
    by_handle: HashMap<Handle, u64>,
    next: u64,
}

#[derive(Debug)]
struct CountedNode {
    node: Arc<Node>,
    /// How many times the node was looked up by the kernel.
    count: u64,
}

impl Nodes {
    pub(crate) fn new(root: Handle) -> Self {
        let node = Arc::new(Node::new(ROOT, root.clone(), FileKind::Directory));
        Self(Mutex::new(Table {
            by_id: HashMap::from([(ROOT, CountedNode { node, count: 1 })]),
            by_handle: HashMap::from([(root, ROOT)]),
            next: ROOT + 1,
        }))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock()
    }

    pub(crate) fn get(&self, id: u64) -> Result<Arc<Node>, Errno> {
        self.table().by_id.get(&id).map(|known| known.node.clone()).ok_or(Errno::STALE)
    }

    pub(crate) fn find(&self, handle: &Handle) -> Option<Arc<Node>> {
        let table = self.table();
        let id = table.by_handle.get(handle)?;
        table.by_id.get(id).map(|known| known.node.clone())
    }

    /// Returns the number of a file, for one more lookup by the kernel.
    pub(crate) fn count(&self, entry: &Entry) -> Arc<Node> {
        let mut table = self.table();
        let table = &mut *table;
        if let Some(known) = table.by_handle.get(&entry.handle).and_then(|id| table.by_id.get_mut(id)) {
            known.count += 1;
            known.node.note_attributes(&entry.attributes);
            return known.node.clone();
        }
        let id = table.next;
        table.next += 1;
        let node = Arc::new(Node::new(id, entry.handle.clone(), entry.attributes.kind));
        node.note_attributes(&entry.attributes);
        table.by_handle.insert(entry.handle.clone(), id);
        table.by_id.insert(id, CountedNode { node: node.clone(), count: 1 });
        node
    }

    /// Takes so many lookups back (FUSE_FORGET).
    pub(crate) fn forget(&self, id: u64, count: u64) {
        if id == ROOT {
            return;
        }
        let mut table = self.table();
        let Some(known) = table.by_id.get_mut(&id) else { return };
        known.count = known.count.saturating_sub(count);
        if known.count == 0
            && let Some(known) = table.by_id.remove(&id)
        {
            table.by_handle.remove(&known.node.handle);
        }
    }
}
