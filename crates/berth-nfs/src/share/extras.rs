//! What servers of version 4.2 may offer.

use std::sync::atomic::Ordering;

use bytes::Bytes;

use super::{NextData, Share, attempt::ask_v4, if_supported, not_these};
use crate::{Handle, Name, Result, Version, status::Fault};

impl Share {
    /// Copies on the server, sharing blocks where it can, and returns how much; `None` where the server cannot.
    pub async fn copy_range(
        &self,
        from: &Handle,
        from_offset: u64,
        to: &Handle,
        to_offset: u64,
        length: u64,
    ) -> Result<Option<u64>> {
        let copied = self.try_copy_range(from, from_offset, to, to_offset, length).await;
        self.with_context(copied, || "copy a file on the server".to_owned())
    }

    async fn try_copy_range(
        &self,
        from: &Handle,
        from_offset: u64,
        to: &Handle,
        to_offset: u64,
        length: u64,
    ) -> std::result::Result<Option<u64>, Fault> {
        if self.version() < Version::V4_2 {
            return Ok(None);
        }
        if length == 0 {
            return Ok(Some(0));
        }
        if !self.inner.no_clone.load(Ordering::Relaxed) {
            match ask_v4!(self, Yes, clone_range(from, from_offset, to, to_offset, length)) {
                Ok(()) => return Ok(Some(length)),
                Err(fault) if fault.unsupported() => self.inner.no_clone.store(true, Ordering::Relaxed),
                Err(fault) if not_these(&fault) => {}
                Err(fault) => return Err(fault),
            }
        }
        if self.inner.no_copy.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match ask_v4!(self, Yes, copy_range(from, from_offset, to, to_offset, length)) {
            Ok(copied) => Ok(Some(copied)),
            Err(fault) if fault.unsupported() => {
                self.inner.no_copy.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(fault) if not_these(&fault) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Finds the next data at or after `offset`.
    pub async fn next_data(&self, of: &Handle, offset: u64) -> Result<NextData> {
        let found = self.try_next_data(of, offset).await;
        self.with_context(found, || "find the holes of a file".to_owned())
    }

    async fn try_next_data(&self, of: &Handle, offset: u64) -> std::result::Result<NextData, Fault> {
        let start = match if_supported(ask_v4!(self, Yes, seek_data(of, offset)))? {
            None => return Ok(NextData::Unknown),
            Some(None) => return Ok(NextData::None),
            Some(Some(start)) => start,
        };
        match if_supported(ask_v4!(self, Yes, seek_hole(of, start)))? {
            Some(Some(end)) if end > start => Ok(NextData::At(start..end)),
            // It contradicts itself, so it is not to be believed.
            None | Some(_) => Ok(NextData::Unknown),
        }
    }

    /// Makes sure that there is room for this range; `None` where the server cannot.
    pub async fn allocate(&self, of: &Handle, offset: u64, length: u64) -> Result<Option<()>> {
        let done = if_supported(ask_v4!(self, Yes, allocate(of, offset, length)));
        self.with_context(done, || "allocate room for a file".to_owned())
    }

    /// Names of extended attributes, without `user.`; `None` where the server has none.
    pub async fn xattrs(&self, of: &Handle) -> Result<Option<Vec<Name>>> {
        let names = if_supported(ask_v4!(self, Yes, xattrs(of)));
        self.with_context(names, || "list extended attributes".to_owned())
    }

    /// An extended attribute; `None` where the server has none.
    pub async fn xattr(&self, of: &Handle, name: &Name) -> Result<Option<Bytes>> {
        let value = if_supported(ask_v4!(self, Yes, xattr(of, name)));
        self.with_context(value, || format!("read the extended attribute {name:?}"))
    }

    /// Sets an extended attribute; `None` where the server has none.
    pub async fn set_xattr(&self, of: &Handle, name: &Name, value: Bytes) -> Result<Option<()>> {
        let done = if_supported(ask_v4!(self, Yes, set_xattr(of, name, value.clone())));
        self.with_context(done, || format!("set the extended attribute {name:?}"))
    }

    /// Removes an extended attribute; `None` where the server has none.
    pub async fn remove_xattr(&self, of: &Handle, name: &Name) -> Result<Option<()>> {
        let done = if_supported(ask_v4!(self, No, remove_xattr(of, name)));
        self.with_context(done, || format!("remove the extended attribute {name:?}"))
    }
}
