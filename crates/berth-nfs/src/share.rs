//! A share: the calls on its files, whatever version is spoken.

pub(crate) mod attempt;
mod data;
mod extras;

use std::{
    collections::HashMap,
    fmt,
    ops::Range,
    sync::{Arc, atomic::AtomicBool},
};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use parking_lot::Mutex;

use self::{
    attempt::{Wire, ask},
    data::Unstable,
};
use crate::{
    Attributes, Change, Create, Error, Handle, Kind, Name, Node, Reason, Result, Space, Target, Version,
    metrics::Meter,
    server::Server,
    status::{Fault, Status},
    xdr::Decoder,
};

/// Entries that a server listed without their attributes are looked up, so many at a time.
const LOOKUPS: usize = 16;
const LARGEST_TRANSFER: u64 = 1 << 20;
const SMALLEST_TRANSFER: u64 = 1024;
const LARGEST_PAGE: u32 = 256 << 10;

/// A file that was found: its handle, and what is known about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The handle by which the server knows it.
    pub handle: Handle,
    /// What is known about it.
    pub attributes: Attributes,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// The name in the directory.
    pub name: Name,
    /// The handle by which the server knows it.
    pub handle: Handle,
    /// What is known about it.
    pub attributes: Attributes,
}

/// Where to go on reading a directory; the default is its beginning.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Cookie {
    pub(crate) position: u64,
    pub(crate) verifier: [u8; 8],
}

/// A part of a directory, without `.` and `..`.
#[derive(Debug, Clone)]
pub struct Page {
    /// The entries of this part, with their attributes.
    pub entries: Vec<DirEntry>,
    /// Where the next page begins, unless this was the last.
    pub next: Option<Cookie>,
}

/// Where a file's next data is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextData {
    /// The server does not know.
    Unknown,
    /// Only a hole follows, or the end.
    None,
    /// The next data is in this range.
    At(Range<u64>),
}

/// A page as the server sent it.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) entries: Vec<Listed>,
    pub(crate) next: Option<Cookie>,
}

/// An entry, with all about it or only its name.
#[derive(Debug)]
pub(crate) enum Listed {
    Whole(DirEntry),
    Named(Name),
}

/// What a server moves at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    read: u32,
    write: u32,
}

impl Limits {
    pub(crate) fn new(read: u64, write: u64) -> Self {
        let limit = |most: u64| {
            u32::try_from(most.clamp(SMALLEST_TRANSFER, LARGEST_TRANSFER))
                .expect("a megabyte fits in 32 bits")
        };
        Self { read: limit(read), write: limit(write) }
    }
}

/// What a server says of a write.
#[derive(Debug)]
pub(crate) struct Written {
    count: u32,
    durable: bool,
    verifier: [u8; 8],
}

impl Written {
    pub(crate) fn read(from: &mut Decoder, length: usize) -> std::result::Result<Self, Fault> {
        let written = Self { count: from.u32()?, durable: from.u32()? == 2, verifier: from.fixed()? };
        if written.count as usize > length || (written.count == 0 && length > 0) {
            return Err(Fault::Malformed("it wrote more than was asked, or nothing"));
        }
        Ok(written)
    }
}

/// An exported directory; cheap to clone.
#[derive(Clone)]
pub struct Share {
    inner: Arc<Inner>,
}

struct Inner {
    server: Arc<Server>,
    target: Target,
    version: Version,
    root: Entry,
    limits: Limits,
    unstable: Mutex<HashMap<Handle, Unstable>>,
    no_clone: AtomicBool,
    no_copy: AtomicBool,
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Share({} by NFS {})", self.inner.target, self.inner.version)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.target.fmt(f)
    }
}

/// Names in messages: a caller's, which may be anything.
fn shown(name: &[u8]) -> String {
    format!("{:?}", String::from_utf8_lossy(name))
}

fn checked(name: &[u8]) -> std::result::Result<(), Fault> {
    match Name::new(name) {
        Ok(_) => Ok(()),
        Err(invalid) => Err(Fault::Other(Reason::new(Kind::Invalid, invalid.to_string()))),
    }
}

/// Asks about a name, if it can be one.
macro_rules! ask_named {
    ($share:expr, $again:ident, $name:expr, $method:ident($($argument:expr),*)) => {
        match checked($name) {
            Ok(()) => ask!($share, $again, $method($($argument),*)),
            Err(fault) => Err(fault),
        }
    };
}

impl Share {
    pub(crate) fn new(
        server: Arc<Server>,
        target: Target,
        version: Version,
        (root, limits): (Entry, Limits),
    ) -> Self {
        let inner = Inner {
            server,
            target,
            version,
            root,
            limits,
            unstable: Mutex::default(),
            no_clone: AtomicBool::new(false),
            no_copy: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The same share by another connection.
    pub(crate) fn on(&self, server: impl FnOnce(&mut Target) -> Arc<Server>) -> Self {
        let mut target = self.inner.target.clone();
        let server = server(&mut target);
        Self::new(server, target, self.inner.version, (self.root_entry(), self.inner.limits))
    }

    fn meter(&self) -> &Meter {
        &self.inner.server.meter
    }

    async fn wire(&self) -> std::result::Result<Wire, Fault> {
        self.inner.server.wire(&self.inner.target, self.inner.version).await
    }

    /// Turns a fault into an error that names this share and what was being done.
    pub(crate) fn with_context<T>(
        &self,
        result: std::result::Result<T, Fault>,
        doing: impl FnOnce() -> String,
    ) -> Result<T> {
        result.map_err(|fault| Error::new(doing(), self.to_string(), fault.into()))
    }

    pub(crate) fn root_entry(&self) -> Entry {
        self.inner.root.clone()
    }

    /// Whether handles of both mean files of one server, which could copy between them.
    pub(crate) fn same_server(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner.server, &other.inner.server) && self.version() == other.version()
    }

    /// The exported directory itself.
    pub fn root(&self) -> Handle {
        self.inner.root.handle.clone()
    }

    /// The version that is spoken.
    pub fn version(&self) -> Version {
        self.inner.version
    }

    /// Finds a name in a directory; a symlink is found, not followed.
    pub async fn lookup(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<Entry> {
        let name = name.as_ref();
        let found = ask_named!(self, Yes, name, lookup(dir, name));
        self.with_context(found, || format!("find {}", shown(name)))
    }

    /// What is known about a file.
    pub async fn attributes(&self, of: &Handle) -> Result<Attributes> {
        let known = ask!(self, Yes, attributes(of));
        self.with_context(known, || "read the attributes of a file".to_owned())
    }

    /// Which of these rights ([`access`](crate::access)) we have; the server alone knows.
    pub async fn access(&self, of: &Handle, wanted: u32) -> Result<u32> {
        let granted = ask!(self, Yes, access(of, wanted));
        self.with_context(granted, || "ask for the rights to a file".to_owned())
    }

    /// Changes what is to change, and returns what is known then.
    pub async fn set_attributes(&self, of: &Handle, change: &Change) -> Result<Attributes> {
        if change.is_empty() {
            return self.attributes(of).await;
        }
        let changed = ask!(self, Yes, set_attributes(of, change));
        self.with_context(changed, || format!("change the {} of a file", change.what()))
    }

    /// Makes a directory; [`Kind::Exists`] if the name is taken.
    pub async fn make_dir(&self, dir: &Handle, name: impl AsRef<[u8]>, change: &Change) -> Result<Entry> {
        let name = name.as_ref();
        let made = ask_named!(self, No, name, make_dir(dir, name, change));
        self.complete(self.with_context(made, || format!("make the directory {}", shown(name)))?, change)
            .await
    }

    /// Creates a regular file; `how` says what happens to one that has the name.
    pub async fn create(
        &self,
        dir: &Handle,
        name: impl AsRef<[u8]>,
        how: Create,
        change: &Change,
    ) -> Result<Entry> {
        let name = name.as_ref();
        let made = match how {
            Create::New => ask_named!(self, No, name, create(dir, name, how, change)),
            Create::Truncate => ask_named!(self, Yes, name, create(dir, name, how, change)),
        };
        self.complete(self.with_context(made, || format!("create the file {}", shown(name)))?, change).await
    }

    /// Makes a symlink to `to`, which is taken as it is.
    pub async fn symlink(
        &self,
        dir: &Handle,
        name: impl AsRef<[u8]>,
        to: &[u8],
        change: &Change,
    ) -> Result<Entry> {
        let name = name.as_ref();
        let made = ask_named!(self, No, name, symlink(dir, name, to, change));
        self.with_context(made, || format!("make the symlink {}", shown(name)))
    }

    /// Gives a file another name.
    pub async fn link(&self, file: &Handle, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let name = name.as_ref();
        let made = ask_named!(self, No, name, link(file, dir, name));
        self.with_context(made, || format!("link a file to the name {}", shown(name)))
    }

    /// Makes a special file.
    pub async fn make_node(
        &self,
        dir: &Handle,
        name: impl AsRef<[u8]>,
        node: Node,
        change: &Change,
    ) -> Result<Entry> {
        let name = name.as_ref();
        let made = ask_named!(self, No, name, make_node(dir, name, node, change));
        self.complete(self.with_context(made, || format!("make the special file {}", shown(name)))?, change)
            .await
    }

    /// Sets what a server did not: it may take what is to be set at creation as advice.
    async fn complete(&self, mut entry: Entry, change: &Change) -> Result<Entry> {
        if let Some(remaining) = change.remaining(&entry.attributes) {
            entry.attributes = self.set_attributes(&entry.handle, &remaining).await?;
        }
        Ok(entry)
    }

    /// What a symlink says.
    pub async fn read_link(&self, of: &Handle) -> Result<Bytes> {
        let text = ask!(self, Yes, read_link(of));
        self.with_context(text, || "read a symlink".to_owned())
    }

    /// Removes a name that is not a directory's.
    pub async fn remove(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let name = name.as_ref();
        let removed = ask_named!(self, No, name, remove(dir, name));
        self.with_context(removed, || format!("remove {}", shown(name)))
    }

    /// Removes an empty directory.
    pub async fn remove_dir(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let name = name.as_ref();
        let removed = ask_named!(self, No, name, remove_dir(dir, name));
        self.with_context(removed, || format!("remove the directory {}", shown(name)))
    }

    /// Renames; what has the new name is replaced, as by rename(2).
    pub async fn rename(
        &self,
        from: &Handle,
        name: impl AsRef<[u8]>,
        to: &Handle,
        new_name: impl AsRef<[u8]>,
    ) -> Result<()> {
        let (name, new_name) = (name.as_ref(), new_name.as_ref());
        let renamed = match checked(new_name) {
            Ok(()) => ask_named!(self, No, name, rename(from, name, to, new_name)),
            Err(fault) => Err(fault),
        };
        self.with_context(renamed, || format!("rename {} to {}", shown(name), shown(new_name)))
    }

    /// Reads a part of a directory.
    pub async fn read_dir(&self, dir: &Handle, cookie: Cookie) -> Result<Page> {
        let size = self.inner.limits.read.min(LARGEST_PAGE);
        let listing = ask!(self, Yes, read_dir(dir, cookie, size)).and_then(|listing| match listing.next {
            Some(next) if next.position == cookie.position => {
                Err(Fault::Malformed("the directory's next page is the same again"))
            }
            _ => Ok(listing),
        });
        let listing = self.with_context(listing, || "list a directory".to_owned())?;
        let entries = stream::iter(listing.entries)
            .map(|listed| self.whole(dir, listed))
            .buffered(LOOKUPS)
            .try_filter_map(async |entry| Ok(entry))
            .try_collect()
            .await?;
        Ok(Page { entries, next: listing.next })
    }

    /// Completes an entry, unless it is gone meanwhile.
    async fn whole(&self, dir: &Handle, listed: Listed) -> Result<Option<DirEntry>> {
        let name = match listed {
            Listed::Whole(entry) => return Ok(Some(entry)),
            Listed::Named(name) => name,
        };
        match self.lookup(dir, &name).await {
            Ok(Entry { handle, attributes }) => Ok(Some(DirEntry { name, handle, attributes })),
            Err(error) if error.kind() == Kind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Room on the filesystem of a file.
    pub async fn space(&self, of: &Handle) -> Result<Space> {
        let space = ask!(self, Yes, space(of));
        self.with_context(space, || "measure the free space".to_owned())
    }
}

/// Turns "cannot" into `None`.
fn if_supported<T>(result: std::result::Result<T, Fault>) -> std::result::Result<Option<T>, Fault> {
    match result {
        Ok(done) => Ok(Some(done)),
        Err(fault) if fault.unsupported() => Ok(None),
        Err(fault) => Err(fault),
    }
}

/// Statuses by which servers say that these two files, of all files, cannot share or be copied.
fn not_these(fault: &Fault) -> bool {
    fault.unsupported()
        || fault.is(Status::INVALID)
        || fault.is(Status::CROSS_DEVICE)
        || fault.is(Status(10092))
}
