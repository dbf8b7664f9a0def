//! Reading and writing the content of files.

use bytes::Bytes;

use super::{Share, attempt::ask};
use crate::{Handle, Kind, Reason, Result, status::Fault};

/// What was written to a file and not yet committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unstable {
    /// The server is the same for all of it, as far as its verifier shows.
    On([u8; 8]),
    /// The server restarted between two writes.
    Lost,
}

/// What is being committed; unless that succeeds, it is still to be.
struct Committing<'a> {
    share: &'a Share,
    file: &'a Handle,
    seen: Option<Unstable>,
}

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        if let Some(seen) = self.seen {
            self.share.remember(self.file, seen);
        }
    }
}

impl Share {
    /// Reads at most `length` bytes, perhaps less, and returns whether the file ends there.
    pub async fn read(&self, of: &Handle, offset: u64, length: u32) -> Result<(Bytes, bool)> {
        let length = length.min(self.inner.limits.read);
        let data = ask!(self, Yes, read(of, offset, length));
        self.with_context(data, || "read a file".to_owned())
    }

    /// Writes the beginning of `data`, and returns how much; not on disk before [`commit`](Self::commit) unless
    /// `durable`.
    pub async fn write(&self, of: &Handle, offset: u64, mut data: Bytes, durable: bool) -> Result<u32> {
        data.truncate(self.inner.limits.write as usize);
        let mut written = ask!(self, Yes, write(of, offset, data.clone(), durable));
        if let Ok(written) = &written
            && !written.durable
        {
            self.remember(of, Unstable::On(written.verifier));
        }
        if durable && written.as_ref().is_ok_and(|written| !written.durable) {
            written = Err(Fault::Malformed("it wrote to memory what it was asked to write to disk"));
        }
        self.with_context(written, || "write to a file".to_owned()).map(|written| written.count)
    }

    fn remember(&self, file: &Handle, now: Unstable) {
        let mut files = self.inner.unstable.lock();
        let seen = files.entry(file.clone()).or_insert(now);
        if *seen != now {
            *seen = Unstable::Lost;
        }
    }

    /// Brings what was written to disk, by whomever; [`Kind::Interrupted`] means that the server lost some of what
    /// was written through this share, and to write it again.
    pub async fn commit(&self, of: &Handle) -> Result<()> {
        let seen = self.inner.unstable.lock().remove(of);
        let mut committing = Committing { share: self, file: of, seen };
        let done = ask!(self, Yes, commit(of)).and_then(|verifier| match committing.seen.take() {
            None => Ok(()),
            Some(Unstable::On(before)) if before == verifier => Ok(()),
            Some(_) => {
                let text = "the server restarted before it wrote the file to disk: write it again";
                Err(Fault::Other(Reason::new(Kind::Interrupted, text)))
            }
        });
        self.with_context(done, || "write a file to disk".to_owned())
    }
}
