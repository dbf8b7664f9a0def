//! Where something is in a tree, so that it can be found again when its handle means nothing any more.

use std::sync::Arc;

use super::{REPLACED, TRIES};
use crate::{Attributes, DirEntry, Entry, Error, Handle, Kind, Name, Result, Share};

/// Something in a tree that is in use by others, with the way that led to it; cheap to clone.
#[derive(Debug, Clone)]
pub struct TreeEntry {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    entry: Entry,
    /// The directory it is in, and its name there; the top of a tree has none.
    above: Option<(TreeEntry, Name)>,
}

impl Drop for Inner {
    /// One by one: a way can be longer than a stack is deep.
    fn drop(&mut self) {
        let mut above = self.above.take();
        while let Some((place, _)) = above {
            above = Arc::into_inner(place.inner).and_then(|mut inner| inner.above.take());
        }
    }
}

impl TreeEntry {
    /// The top of a tree.
    pub fn top(entry: Entry) -> Self {
        Self::new(entry, None)
    }

    /// An entry of this directory.
    #[must_use]
    pub fn below(&self, entry: DirEntry) -> Self {
        let DirEntry { name, handle, attributes } = entry;
        Self::new(Entry { handle, attributes }, Some((self.clone(), name)))
    }

    fn new(entry: Entry, above: Option<(Self, Name)>) -> Self {
        Self { inner: Arc::new(Inner { entry, above }) }
    }

    /// The handle by which the server knew it when it was found.
    pub fn handle(&self) -> &Handle {
        &self.inner.entry.handle
    }

    /// What is known about it.
    pub fn attributes(&self) -> &Attributes {
        &self.inner.entry.attributes
    }
}

impl Share {
    /// Does something with what is at a place. If it went away meanwhile, that is done with what is there now, and
    /// `None` means that nothing is. The top of a tree cannot go away: that it is lost is an error, as is a server that
    /// does not know its own handles any more.
    pub async fn at<T, F: Future<Output = Result<T>>>(
        &self,
        place: &TreeEntry,
        work: impl Fn(TreeEntry) -> F,
    ) -> Result<Option<(TreeEntry, T)>> {
        let mut place = place.clone();
        for _ in 0..REPLACED {
            let error = match work(place.clone()).await {
                Ok(done) => return Ok(Some((place, done))),
                Err(error) => error,
            };
            match self.find_again(&place, error).await? {
                Some(now) => place = now,
                None => return Ok(None),
            }
        }
        let done = work(place.clone()).await?;
        Ok(Some((place, done)))
    }

    /// What is at a place now, after a call on what was there failed; any failure but that it went away is passed on.
    pub async fn find_again(&self, place: &TreeEntry, error: Error) -> Result<Option<TreeEntry>> {
        let is_loss = |error: &Error| matches!(error.kind(), Kind::Stale | Kind::NotFound);
        let mut tries = 1;
        while is_loss(&error) && tries <= TRIES {
            match self.follow(place, &error).await {
                // A server may remember a name that was removed behind its back, until it is asked for the file.
                Err(again) if is_loss(&again) => tries += 1,
                followed => return followed,
            }
        }
        Err(error)
    }

    /// Follows the names that lead to a place, from the nearest directory that answers.
    async fn follow(&self, place: &TreeEntry, error: &Error) -> Result<Option<TreeEntry>> {
        let mut names = Vec::new();
        let mut lost = place;
        let mut found = loop {
            // Nothing is known above the top: what is lost with it did not go away by itself.
            let Some((above, name)) = &lost.inner.above else { return Err(error.clone()) };
            match self.find(above.handle(), name).await {
                Ok(Some(entry)) => break TreeEntry::new(entry, Some((above.clone(), name.clone()))),
                Ok(None) => return Ok(None),
                Err(error) if error.kind() == Kind::Stale => {
                    names.push(name);
                    lost = above;
                }
                Err(error) => return Err(error),
            }
        };
        while let Some(name) = names.pop() {
            match self.find(found.handle(), name).await {
                Ok(Some(entry)) => found = TreeEntry::new(entry, Some((found, name.clone()))),
                Ok(None) => return Ok(None),
                Err(error) if error.kind() == Kind::NotDirectory => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(found))
    }
}
