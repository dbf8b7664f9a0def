//! A share: the calls on its files, whatever version is spoken.

use std::ops::Range;

use bytes::Bytes;

use crate::{
    Attributes, Change, Create, Error, Handle, Kind, Name, Node, Reason, Result, Space, Target, Version,
};

/// Connections to servers, one each, made when needed and closed when idle.
#[derive(Debug, Clone, Default)]
pub struct Nfs {}

impl Nfs {
    /// No connection yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Finds a share: connects if necessary, and makes sure that the share's root is there.
    ///
    /// Cheap enough to be called for every operation (one request when the server is known), and that is the way to
    /// survive a server that comes back with other handles.
    #[expect(clippy::unused_async, reason = "the wire is still to come")]
    pub async fn share(&self, target: &Target) -> Result<Share> {
        Err(Error::new("reach it", target.to_string(), Reason::new(Kind::Unsupported, "not yet")))
    }
}

/// A file that was found: its handle, and what is known about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its handle.
    pub handle: Handle,
    /// What is known about it.
    pub attributes: Attributes,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Its name.
    pub name: Name,
    /// Its handle.
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
    /// The entries.
    pub entries: Vec<DirEntry>,
    /// Where the next page begins, unless this was the last.
    pub next: Option<Cookie>,
}

/// Where a file's next data is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextData {
    /// The server cannot tell.
    Unknown,
    /// Only a hole follows, or the end.
    None,
    /// Here.
    At(Range<u64>),
}

/// An exported directory; cheap to clone.
#[derive(Debug, Clone)]
pub struct Share {}

#[expect(clippy::unused_async, reason = "the wire is still to come")]
impl Share {
    /// The exported directory itself.
    pub fn root(&self) -> Handle {
        unimplemented!("the wire is still to come")
    }

    /// The version that is spoken.
    pub fn version(&self) -> Version {
        unimplemented!("the wire is still to come")
    }

    /// Finds a name in a directory; a symlink is found, not followed.
    pub async fn lookup(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<Entry> {
        let _ = (dir, name);
        unimplemented!("the wire is still to come")
    }

    /// What is known about a file.
    pub async fn attributes(&self, of: &Handle) -> Result<Attributes> {
        let _ = (of,);
        unimplemented!("the wire is still to come")
    }

    /// Changes what is to change, and tells what is known then.
    pub async fn set_attributes(&self, of: &Handle, change: &Change) -> Result<Attributes> {
        let _ = (of, change);
        unimplemented!("the wire is still to come")
    }

    /// Makes a directory.
    pub async fn make_dir(&self, dir: &Handle, name: impl AsRef<[u8]>, change: &Change) -> Result<Entry> {
        let _ = (dir, name, change);
        unimplemented!("the wire is still to come")
    }

    /// Creates a file.
    pub async fn create(
        &self,
        dir: &Handle,
        name: impl AsRef<[u8]>,
        how: Create,
        change: &Change,
    ) -> Result<Entry> {
        let _ = (dir, name, how, change);
        unimplemented!("the wire is still to come")
    }

    /// Makes a symlink to `to`, which is taken as it is.
    pub async fn symlink(
        &self,
        dir: &Handle,
        name: impl AsRef<[u8]>,
        to: &[u8],
        change: &Change,
    ) -> Result<Entry> {
        let _ = (dir, name, to, change);
        unimplemented!("the wire is still to come")
    }

    /// Gives a file another name.
    pub async fn link(&self, file: &Handle, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let _ = (file, dir, name);
        unimplemented!("the wire is still to come")
    }

    /// Makes a special file.
    pub async fn make_node(
        &self,
        dir: &Handle,
        name: impl AsRef<[u8]>,
        node: Node,
        change: &Change,
    ) -> Result<Entry> {
        let _ = (dir, name, node, change);
        unimplemented!("the wire is still to come")
    }

    /// What a symlink says.
    pub async fn read_link(&self, of: &Handle) -> Result<Bytes> {
        let _ = (of,);
        unimplemented!("the wire is still to come")
    }

    /// Removes a name that is not a directory's.
    pub async fn remove(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let _ = (dir, name);
        unimplemented!("the wire is still to come")
    }

    /// Removes an empty directory.
    pub async fn remove_dir(&self, dir: &Handle, name: impl AsRef<[u8]>) -> Result<()> {
        let _ = (dir, name);
        unimplemented!("the wire is still to come")
    }

    /// Renames; what has the new name is replaced, as by rename(2).
    pub async fn rename(
        &self,
        from: &Handle,
        name: impl AsRef<[u8]>,
        to: &Handle,
        new_name: impl AsRef<[u8]>,
    ) -> Result<()> {
        let _ = (from, name, to, new_name);
        unimplemented!("the wire is still to come")
    }

    /// Reads at most `length` bytes, perhaps less, and tells whether the file ends there.
    pub async fn read(&self, of: &Handle, offset: u64, length: u32) -> Result<(Bytes, bool)> {
        let _ = (of, offset, length);
        unimplemented!("the wire is still to come")
    }

    /// Writes the beginning of `data`, and tells how much; not on disk before [`commit`](Self::commit) unless `durable`.
    pub async fn write(&self, of: &Handle, offset: u64, data: Bytes, durable: bool) -> Result<u32> {
        let _ = (of, offset, data, durable);
        unimplemented!("the wire is still to come")
    }

    /// Brings what was written to disk; [`Kind::Interrupted`] means that the server lost some of it, and to write it again.
    pub async fn commit(&self, of: &Handle) -> Result<()> {
        let _ = (of,);
        unimplemented!("the wire is still to come")
    }

    /// Reads a part of a directory.
    pub async fn read_dir(&self, dir: &Handle, cookie: Cookie) -> Result<Page> {
        let _ = (dir, cookie);
        unimplemented!("the wire is still to come")
    }

    /// Room on the filesystem of a file.
    pub async fn space(&self, of: &Handle) -> Result<Space> {
        let _ = (of,);
        unimplemented!("the wire is still to come")
    }

    /// Copies on the server, sharing blocks where it can, and tells how much; `None` where the server cannot.
    pub async fn copy_range(
        &self,
        from: &Handle,
        from_offset: u64,
        to: &Handle,
        to_offset: u64,
        length: u64,
    ) -> Result<Option<u64>> {
        let _ = (from, from_offset, to, to_offset, length);
        unimplemented!("the wire is still to come")
    }

    /// Finds the next data at or after `offset`.
    pub async fn next_data(&self, of: &Handle, offset: u64) -> Result<NextData> {
        let _ = (of, offset);
        unimplemented!("the wire is still to come")
    }

    /// Makes sure that there is room for this range; `None` where the server cannot.
    pub async fn allocate(&self, of: &Handle, offset: u64, length: u64) -> Result<Option<()>> {
        let _ = (of, offset, length);
        unimplemented!("the wire is still to come")
    }

    /// Names of extended attributes, without `user.`; `None` where the server has none.
    pub async fn xattrs(&self, of: &Handle) -> Result<Option<Vec<Name>>> {
        let _ = (of,);
        unimplemented!("the wire is still to come")
    }

    /// An extended attribute; `None` where the server has none.
    pub async fn xattr(&self, of: &Handle, name: &Name) -> Result<Option<Bytes>> {
        let _ = (of, name);
        unimplemented!("the wire is still to come")
    }

    /// Sets an extended attribute; `None` where the server has none.
    pub async fn set_xattr(&self, of: &Handle, name: &Name, value: Bytes) -> Result<Option<()>> {
        let _ = (of, name, value);
        unimplemented!("the wire is still to come")
    }

    /// Removes an extended attribute; `None` where the server has none.
    pub async fn remove_xattr(&self, of: &Handle, name: &Name) -> Result<Option<()>> {
        let _ = (of, name);
        unimplemented!("the wire is still to come")
    }
}
