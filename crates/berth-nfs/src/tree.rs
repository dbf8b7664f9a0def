//! Whole trees: paths that never leave their share and never follow a symlink, removing, copying and measuring.

mod copy;
mod copy_file;
mod remove;
mod tree_entry;
mod usage;
mod walk;

use futures_util::{StreamExt, TryStreamExt, stream};

pub use self::{copy::Copied, tree_entry::TreeEntry, usage::Usage};
use crate::{
    Change, Cookie, DirEntry, Entry, FileKind, Handle, Kind, Name, Reason, Result, Share, status::Fault,
};

/// Entries of one directory that are treated at the same time.
const ENTRIES: usize = 16;
/// So often something is done whose answer was lost.
const TRIES: u32 = 3;
/// So often something is done again because its file was replaced meanwhile.
const REPLACED: u32 = 16;

impl Share {
    /// Finds a directory below the share; every component must be a directory, and no symlink is followed.
    pub async fn open_dir(&self, path: &str) -> Result<Entry> {
        let mut at = self.root_entry();
        for name in self.components(path)? {
            at = self.directory(path, self.lookup(&at.handle, &name).await?)?;
        }
        Ok(at)
    }

    /// Makes a directory with those above it, and returns whether it made the last one; only that one gets `change`,
    /// those above are made with mode 0755.
    pub async fn make_dirs(&self, path: &str, change: &Change) -> Result<(Entry, bool)> {
        let names = self.components(path)?;
        let mut at = self.root_entry();
        let mut made = false;
        let above = Change::mode(0o755);
        for (depth, name) in names.iter().enumerate() {
            let last = depth + 1 == names.len();
            // What is above is usually there, and the last one usually not.
            let found = if last { None } else { self.find(&at.handle, name).await? };
            let (entry, new) = match found {
                Some(entry) => (entry, false),
                None => self.ensure_dir(&at.handle, name, if last { change } else { &above }).await?,
            };
            made = new;
            at = self.directory(path, entry)?;
        }
        Ok((at, made))
    }

    /// Makes a directory, or finds what has its name, and returns whether it is new.
    async fn ensure_dir(&self, dir: &Handle, name: &Name, change: &Change) -> Result<(Entry, bool)> {
        let mut tries = 1;
        loop {
            match self.make_dir(dir, name, change).await {
                Ok(made) => return Ok((made, true)),
                Err(error) if error.kind() == Kind::Exists => {
                    return Ok((self.lookup(dir, name).await?, false));
                }
                Err(error) if error.kind() == Kind::Interrupted && tries < TRIES => tries += 1,
                Err(error) => return Err(error),
            }
        }
    }

    async fn find(&self, dir: &Handle, name: &Name) -> Result<Option<Entry>> {
        match self.lookup(dir, name).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == Kind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn components(&self, path: &str) -> Result<Vec<Name>> {
        path.split('/')
            .filter(|part| !part.is_empty() && *part != ".")
            .map(|part| {
                let name = Name::new(part)
                    .map_err(|invalid| Fault::Other(Reason::new(Kind::Invalid, invalid.to_string())));
                self.with_context(name, || format!("follow the path {path:?}"))
            })
            .collect()
    }

    fn directory(&self, path: &str, entry: Entry) -> Result<Entry> {
        let is = match entry.attributes.kind {
            FileKind::Directory => return Ok(entry),
            FileKind::Symlink => "a symlink, which is not followed",
            _ => "no directory",
        };
        let reason = Reason::new(Kind::NotDirectory, format!("something on its way is {is}"));
        self.with_context(Err(Fault::Other(reason)), || format!("follow the path {path:?}"))
    }

    /// Calls `each` on every entry of a directory, several at a time, and collects what it returns.
    async fn for_each_entry<T, F: Future<Output = Result<Option<T>>>>(
        &self,
        dir: &Handle,
        each: impl Fn(DirEntry) -> F,
    ) -> Result<Vec<T>> {
        let mut all = Vec::new();
        let mut cookie = Some(Cookie::default());
        while let Some(at) = cookie {
            let page = self.read_dir(dir, at).await?;
            let results = stream::iter(page.entries).map(&each).buffer_unordered(ENTRIES);
            all.extend(results.try_filter_map(async |result| Ok(result)).try_collect::<Vec<_>>().await?);
            cookie = page.next;
        }
        Ok(all)
    }
}
