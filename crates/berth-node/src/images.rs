//! Container images of this machine, unpacked for volumes of the kind `image`.
//!
//! Berth asks no registry. An image comes from an OCI layout or an archive of one (`layout.rs`): at the path that its
//! reference names, or under its name in the directory of images. What is unpacked is kept once per digest, and goes with the
//! last pod that uses it:
//!
//! ```text
//! <digest>/root             what pods see
//! <digest>/reference-<…>    a reference that led here; its name is the digest of the text
//! <digest>/users/<user>     a volume of a pod that uses it
//! incoming/                 being unpacked or removed; emptied at start
//! ```
//!
//! A directory `<digest>` is complete: it is renamed into place when every digest was compared.

mod layout;

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use berth_host::path::Dir;
use berth_host::{Doing as _, Error, Result};
use berth_runtime::blocking;
use parking_lot::Mutex;

use self::layout::{Image, Reference};
use crate::layout::sha256;

const ROOT: &str = "root";
const USERS: &str = "users";
const INCOMING: &str = "incoming";

/// When an image is looked for anew, as `pullPolicy` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PullPolicy {
    /// The image is looked for again for every pod.
    Always,
    /// Unless what the reference led to is still unpacked.
    IfNotPresent,
    /// As before, but the image must be on this machine, which it must be for Berth anyway.
    Never,
}

/// An image that is unpacked and in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnpackedImage {
    /// The digest of its manifest, such as `sha256-…`, as the name of a directory.
    pub(crate) digest: String,
    /// The directory of its files.
    pub(crate) root: PathBuf,
}

/// The images of a node.
#[derive(Clone)]
pub(crate) struct Images(Arc<Inner>);

struct Inner {
    /// Where they are unpacked.
    directory: PathBuf,
    /// Where layouts and archives are found by name.
    sources: PathBuf,
    /// One at a time unpacks or removes the image of a digest.
    locks: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    numbers: AtomicU64,
}

impl Images {
    /// The images of two directories, which need not be there.
    pub(crate) fn new(directory: PathBuf, sources: PathBuf) -> Self {
        let (locks, numbers) = (Mutex::default(), AtomicU64::new(0));
        Self(Arc::new(Inner { directory, sources, locks, numbers }))
    }

    /// Finds the image of a reference, and unpacks it unless it is. It stays until [`Images::release`] for the same user.
    pub(crate) async fn acquire(
        &self,
        reference: &str,
        policy: PullPolicy,
        user: &str,
    ) -> Result<UnpackedImage> {
        let (inner, reference, user) = (self.0.clone(), reference.to_owned(), user.to_owned());
        blocking(move || inner.acquire(&reference, policy, &user)).await
    }

    /// An image that the user had before, if it is still unpacked.
    pub(crate) async fn acquire_again(&self, digest: &str, user: &str) -> Result<Option<UnpackedImage>> {
        let (inner, digest, user) = (self.0.clone(), digest.to_owned(), user.to_owned());
        blocking(move || Ok(inner.add_user(&digest, &user)?.then(|| inner.unpacked(digest)))).await
    }

    /// Says that a user does not use an image any more; one without users is removed.
    pub(crate) async fn release(&self, digest: &str, user: &str) -> Result<()> {
        let (inner, digest, user) = (self.0.clone(), digest.to_owned(), user.to_owned());
        blocking(move || inner.release(&digest, &user)).await
    }

    /// Removes what a crash left: images that were not complete, and those whose users are gone.
    pub(crate) fn recover(&self, is_there: impl Fn(&str) -> bool) -> Result<()> {
        if !self.0.directory.exists() {
            return Ok(());
        }
        let directory = Dir::open(&self.0.directory)?;
        directory.remove_tree(INCOMING)?;
        for entry in directory.entries()? {
            let Some(digest) = entry.name.to_str() else { continue };
            for user in self.0.users(digest)?.iter().filter(|user| !is_there(user)) {
                self.0.release(digest, user)?;
            }
            self.0.remove_if_unused(digest)?;
        }
        Ok(())
    }
}

impl Inner {
    fn acquire(&self, reference: &str, policy: PullPolicy, user: &str) -> Result<UnpackedImage> {
        if policy != PullPolicy::Always
            && let Some(digest) = self.present(reference)?
            && self.add_user(&digest, user)?
        {
            return Ok(self.unpacked(digest));
        }
        let incoming = self.incoming()?;
        let found = Reference::parse(reference)
            .and_then(|parsed| Image::find(&parsed, &self.sources, &incoming))
            .map_err(|why| Error::new(format!("find the image {reference}"), io::Error::other(why)))?;
        let digest = found.digest().replace(':', "-");
        let lock = self.lock(&digest);
        let _guard = lock.lock();
        if !self.directory.join(&digest).exists() {
            self.unpack(&found, &digest, &incoming).map_err(|error| {
                Error::new(format!("unpack the image {reference}"), io::Error::other(error))
            })?;
        }
        let directory = Dir::open(&self.directory.join(&digest))?;
        directory.write_atomically(&format!("reference-{}", sha256(reference)), reference.as_bytes())?;
        directory.ensure_dir(USERS, 0o700)?.write_atomically(user, b"")?;
        drop(incoming);
        Ok(self.unpacked(digest))
    }

    fn unpacked(&self, digest: String) -> UnpackedImage {
        UnpackedImage { root: self.directory.join(&digest).join(ROOT), digest }
    }

    /// The digest of an image that is unpacked and to which the reference led last.
    fn present(&self, reference: &str) -> Result<Option<String>> {
        let (name, mut latest) = (format!("reference-{}", sha256(reference)), None);
        for digest in self.digests()? {
            if let Ok(noted) = std::fs::metadata(self.directory.join(&digest).join(&name)) {
                let time = noted.modified().doing("read the time of", &name)?;
                latest = latest.max(Some((time, digest)));
            }
        }
        Ok(latest.map(|(_, digest)| digest))
    }

    fn digests(&self) -> Result<Vec<String>> {
        if !self.directory.exists() {
            return Ok(Vec::new());
        }
        let entries = Dir::open(&self.directory)?.entries()?;
        let names = entries.into_iter().filter_map(|entry| entry.name.into_string().ok());
        Ok(names.filter(|name| name != INCOMING).collect())
    }

    /// Adds a user to an image; false if it was removed meanwhile.
    fn add_user(&self, digest: &str, user: &str) -> Result<bool> {
        let lock = self.lock(digest);
        let _guard = lock.lock();
        if !self.directory.join(digest).exists() {
            return Ok(false);
        }
        Dir::open(&self.directory.join(digest))?.ensure_dir(USERS, 0o700)?.write_atomically(user, b"")?;
        Ok(true)
    }

    fn users(&self, digest: &str) -> Result<Vec<String>> {
        let directory = self.directory.join(digest).join(USERS);
        if !directory.exists() {
            return Ok(Vec::new());
        }
        let entries = Dir::open(&directory)?.entries()?;
        Ok(entries.into_iter().filter_map(|entry| entry.name.into_string().ok()).collect())
    }

    fn release(&self, digest: &str, user: &str) -> Result<()> {
        let directory = self.directory.join(digest).join(USERS);
        if directory.exists() {
            let lock = self.lock(digest);
            let _guard = lock.lock();
            Dir::open(&directory)?.remove_written(user)?;
        }
        self.remove_if_unused(digest)
    }

    fn remove_if_unused(&self, digest: &str) -> Result<()> {
        let lock = self.lock(digest);
        let _guard = lock.lock();
        if digest == INCOMING || !self.directory.join(digest).exists() || !self.users(digest)?.is_empty() {
            return Ok(());
        }
        // Renamed first: what is half removed is no image.
        let incoming = self.incoming()?;
        let trash = Dir::open(&incoming.0)?;
        Dir::open(&self.directory)?.rename(digest, &trash, digest)?;
        trash.remove_tree(digest)?;
        Ok(())
    }

    fn unpack(&self, image: &Image, digest: &str, incoming: &Incoming) -> std::result::Result<(), String> {
        let work = Dir::open(&incoming.0).map_err(|error| error.sentence())?;
        let new = work.ensure_dir(digest, 0o700).map_err(|error| error.sentence())?;
        let root = new.ensure_dir(ROOT, 0o755).map_err(|error| error.sentence())?;
        image.unpack(&root)?;
        let directory = Dir::open(&self.directory).map_err(|error| error.sentence())?;
        work.rename(digest, &directory, digest).map_err(|error| error.sentence())?;
        directory.sync().map_err(|error| error.sentence())
    }

    /// A new directory for what is not complete; it goes when it is dropped.
    fn incoming(&self) -> Result<Incoming> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let path = self.directory.join(INCOMING).join(number.to_string());
        Dir::ensure(&path, 0o700)?;
        Ok(Incoming(path))
    }

    fn lock(&self, digest: &str) -> Arc<Mutex<()>> {
        let mut locks = self.locks.lock();
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        locks.entry(digest.to_owned()).or_default().clone()
    }
}

/// A directory for what is being unpacked, which goes with this.
struct Incoming(PathBuf);

impl Incoming {
    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if let Err(error) = berth_host::path::remove_tree(&self.0) {
            tracing::warn!(error = error.sentence(), "what was unpacked in vain stays until the next start");
        }
    }
}

#[cfg(test)]
mod tests;
