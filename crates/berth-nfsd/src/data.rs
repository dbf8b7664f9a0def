//! What files hold: READ, WRITE, COMMIT, READLINK.

use std::os::fd::{AsFd as _, OwnedFd};

use berth_nfs::{
    Attributes,
    v3::wire,
    xdr::{Decoder, Encoder, Malformed},
};
use bytes::Bytes;
use rustix::{
    fs::{Access, AtFlags, CWD, Mode, OFlags},
    io::Errno,
};

use crate::{
    attributes::{LARGEST, no_attributes},
    export::Object,
    service::{Changed, Outcome, Request, answer, end},
    status::{Result, Status},
};

/// `stable_how`: what is on the disk when a write is answered.
const DATA_SYNC: u32 = 1;
const FILE_SYNC: u32 = 2;

impl Request<'_> {
    /// Opens a regular file as the caller.
    ///
    /// Its owner may read and write it whatever its mode is, because rights are checked when a program opens a file, which the client
    /// has done; and whoever may execute a file may have it read.
    pub(crate) fn open(&self, object: &Object, access: OFlags) -> Result<OwnedFd> {
        object.require_file()?;
        let path = object.path();
        let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let open = || Ok(rustix::fs::openat(CWD, &path, flags, Mode::empty())?);
        let may_execute =
            || self.act(|| Ok(rustix::fs::accessat(CWD, &path, Access::EXEC_OK, AtFlags::EACCESS)?)).is_ok();
        match self.act(open) {
            Err(Status::Access) if self.owns(object) || (access == OFlags::RDONLY && may_execute()) => open(),
            opened => opened,
        }
    }

    pub(crate) fn read_link(&self, from: &mut Decoder) -> Outcome {
        let handle = wire::handle(from)?;
        end(from)?;
        let read = self.find(&handle).and_then(|object| {
            let target = match self.act(|| Ok(rustix::fs::readlinkat(object.as_fd(), "", Vec::new())?)) {
                // It is not a link.
                Err(Status::NoEntry) => Err(Status::Invalid),
                read => read,
            };
            Ok((target?, object))
        });
        let success = |to: &mut Encoder, (target, object): (std::ffi::CString, Object)| {
            wire::write_maybe_attributes(to, Some(&object.attributes));
            to.opaque(target.as_bytes());
        };
        Ok(answer(read, success, no_attributes))
    }

    pub(crate) fn read(&self, from: &mut Decoder) -> Outcome {
        let (handle, offset, count) = (wire::handle(from)?, from.u64()?, from.u32()?);
        end(from)?;
        let read = self.find(&handle).and_then(|object| {
            let file = self.open(&object, OFlags::RDONLY)?;
            let data = self.act(|| read_at(&file, offset, count.min(LARGEST)))?;
            let now = self.export.attributes(&object).ok_or(Status::Io)?;
            Ok((data, now))
        });
        let success = |to: &mut Encoder, (data, now): (Vec<u8>, Attributes)| {
            let end = offset.saturating_add(data.len() as u64);
            wire::write_maybe_attributes(to, Some(&now));
            to.length(data.len()).bool(end >= now.size).data(Bytes::from(data));
        };
        Ok(answer(read, success, no_attributes))
    }

    pub(crate) fn write(&self, from: &mut Decoder) -> Outcome {
        let (handle, offset, count, stable) = (wire::handle(from)?, from.u64()?, from.u32()?, from.u32()?);
        let data = from.opaque(LARGEST as usize)?;
        end(from)?;
        if data.len() != count as usize || stable > FILE_SYNC {
            return Err(Malformed("a write names another length or another stability than there is"));
        }
        let mut changed = Changed::default();
        let written = self.find(&handle).and_then(|object| {
            let file = self.open(&object, OFlags::WRONLY)?;
            let verifier = self.export.verifier();
            let write = || self.act(|| write_at(&file, offset, &data));
            let (written, mut of) = self.change(&[&object], write);
            changed = of.pop().unwrap_or_default();
            let written = written?;
            match stable {
                DATA_SYNC => self.export.sync(file.as_fd(), true)?,
                FILE_SYNC => self.export.sync(file.as_fd(), false)?,
                _ => {}
            }
            Ok((written, verifier))
        });
        let mut to = Encoder::default();
        to.u32(written.as_ref().err().map_or(0, |status| status.number()));
        changed.write(&mut to);
        if let Ok((written, verifier)) = written {
            to.length(written).u32(stable).u64(verifier);
        }
        Ok(to)
    }

    pub(crate) fn commit(&self, from: &mut Decoder) -> Outcome {
        let handle = wire::handle(from)?;
        // Which part of the file is meant; all of it is put on the disk.
        from.u64()?;
        from.u32()?;
        end(from)?;
        let mut now = None;
        let committed = self.find(&handle).and_then(|object| {
            let verifier = self.export.verifier();
            let synced =
                self.open(&object, OFlags::WRONLY).and_then(|file| self.export.sync(file.as_fd(), false));
            now = self.export.attributes(&object);
            synced.map(|()| verifier)
        });
        let mut to = Encoder::default();
        to.u32(committed.as_ref().err().map_or(0, |status| status.number()));
        // It changes nothing that is told, so one look says what was before and what is after; two would let a write between them
        // pass for this client's own.
        Changed { before: now.clone(), after: now }.write(&mut to);
        if let Ok(verifier) = committed {
            to.u64(verifier);
        }
        Ok(to)
    }
}

/// Reads up to so many bytes; fewer only at the end of the file.
fn read_at(file: &OwnedFd, offset: u64, count: u32) -> Result<Vec<u8>> {
    let size = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
    let count = u64::from(count).min(size.saturating_sub(offset));
    let mut data = vec![0; usize::try_from(count).unwrap_or(0)];
    let mut length = 0;
    while length < data.len() {
        match rustix::io::pread(file, &mut data[length..], offset + length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    data.truncate(length);
    Ok(data)
}

/// Writes as much as there is room for; an error only if that is nothing.
fn write_at(file: &OwnedFd, offset: u64, data: &[u8]) -> Result<usize> {
    let end = offset.checked_add(data.len() as u64).and_then(|end| i64::try_from(end).ok());
    end.ok_or(Status::FileTooBig)?;
    let mut length = 0;
    while length < data.len() {
        match rustix::io::pwrite(file, &data[length..], offset + length as u64) {
            Ok(0) => return Err(Status::Io),
            Ok(written) => length += written,
            Err(Errno::INTR) => {}
            Err(_) if length > 0 => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(length)
}
