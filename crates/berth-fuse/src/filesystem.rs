//! A share as a filesystem: what each request of the kernel means to the server.

mod attributes;
mod data;
mod listing;
mod names;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use berth_nfs::{Entry, Nfs, Share};
use parking_lot::Mutex;
use rustix::io::Errno;
use tokio_util::task::TaskTracker;

use self::listing::Listing;
use crate::{
    nodes::{Node, Nodes},
    patience::Patience,
    users::{User, Users},
    wire::{Answer, Arguments, Header, Validity, op},
};

/// How long the kernel may believe names and attributes, in seconds: as short as makes repeated questions cheap.
const BELIEVED: u64 = 1;

/// A share as a filesystem.
#[derive(Debug)]
pub(crate) struct Filesystem {
    users: Users,
    nodes: Nodes,
    patience: Patience,
    files: Mutex<HashMap<u64, Arc<Open>>>,
    listings: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Listing>>>>,
    next: AtomicU64,
    /// Bytes of all files that are kept until they are on the server's disk.
    kept: AtomicUsize,
    /// What goes on behind answers.
    tasks: TaskTracker,
}

/// A file that somebody has open; the server is asked as whoever opened it.
#[derive(Debug)]
pub(crate) struct Open {
    node: Arc<Node>,
    user: Arc<User>,
    /// Every write goes to disk.
    durable: bool,
}

/// What is answered, and what becomes of it.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) body: Answer,
    /// Files that the answer counts as looked up, to be uncounted if the kernel does not get the answer.
    pub(crate) counted: Vec<u64>,
    /// The kernel has old attributes of this file.
    pub(crate) outdated: Option<u64>,
}

impl From<Answer> for Outcome {
    fn from(body: Answer) -> Self {
        Self { body, ..Self::default() }
    }
}

type Result<T> = std::result::Result<T, Errno>;

impl Filesystem {
    pub(crate) fn new(nfs: Nfs, share: Share, patience: Patience) -> Self {
        Self {
            nodes: Nodes::new(share.root()),
            users: Users::new(nfs, share),
            patience,
            files: Mutex::default(),
            listings: Mutex::default(),
            next: AtomicU64::new(1),
            kept: AtomicUsize::new(0),
            tasks: TaskTracker::new(),
        }
    }

    /// What waits for the server though nobody waits for it.
    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// The kernel has forgotten a file so many times.
    pub(crate) fn forget(&self, node: u64, count: u64) {
        self.nodes.forget(node, count);
    }

    /// Does what is asked.
    pub(crate) async fn answer(self: &Arc<Self>, header: Header, mut from: Arguments) -> Result<Outcome> {
        let from = &mut from;
        match header.opcode {
            op::LOOKUP => self.lookup(&header, from).await,
            op::GETATTR => self.get_attributes(&header).await,
            op::SETATTR => self.set_attributes(&header, from).await,
            op::READLINK => self.read_link(&header).await,
            op::SYMLINK => self.symlink(&header, from).await,
            op::MKNOD => self.make_node(&header, from).await,
            op::MKDIR => self.make_dir(&header, from).await,
            op::UNLINK => self.unlink(&header, from).await,
            op::RMDIR => self.remove_dir(&header, from).await,
            op::RENAME => self.rename(&header, from, false).await,
            op::RENAME2 => self.rename(&header, from, true).await,
            op::LINK => self.link(&header, from).await,
            op::OPEN => self.open(&header, from).await,
            op::CREATE => self.create(&header, from).await,
            op::READ => self.read(from).await,
            op::WRITE => self.write(from).await,
            op::FLUSH => self.flush(&header, from).await,
            op::FSYNC => self.sync(from).await,
            op::RELEASE => self.release(from),
            op::FALLOCATE => self.allocate(from).await,
            op::OPENDIR => self.open_dir(&header).await,
            op::READDIR => self.read_dir(&header, from, false).await,
            op::READDIRPLUS => self.read_dir(&header, from, true).await,
            op::RELEASEDIR => self.release_dir(from),
            // A server has done what it says it did to a directory.
            op::FSYNCDIR | op::DESTROY => Ok(Outcome::default()),
            op::STATFS => self.space(&header).await,
            op::ACCESS => self.access(&header, from).await,
            op::GETXATTR => self.xattr(&header, from).await,
            op::LISTXATTR => self.xattrs(&header, from).await,
            op::SETXATTR => self.set_xattr(&header, from).await,
            op::REMOVEXATTR => self.remove_xattr(&header, from).await,
            _ => Err(Errno::NOSYS),
        }
    }

    /// The file that a request is about, and who asks.
    fn about(&self, header: &Header) -> Result<(Arc<Node>, Arc<User>)> {
        Ok((self.nodes.get(header.node)?, self.users.who(header)))
    }

    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn open_file(&self, number: u64) -> Result<Arc<Open>> {
        self.files.lock().get(&number).cloned().ok_or(Errno::BADF)
    }

    /// The answer for a file that was found or made in `dir`.
    fn entry_outcome(&self, dir: &Node, entry: &Entry) -> Outcome {
        let node = self.nodes.count(entry);
        let mut body = Answer::default();
        body.entry(node.id, &entry.attributes, validity(dir));
        Outcome { body, counted: vec![node.id], outdated: None }
    }
}

/// The kernel checks no rights by itself, the server does: so a name is asked for each time it is used, unless all may.
fn validity(dir: &Node) -> Validity {
    Validity { entry: if dir.is_open_to_all() { BELIEVED } else { 0 }, attributes: BELIEVED }
}
