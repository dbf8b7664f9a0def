//! What is known about files, and changing it: GETATTR, SETATTR, ACCESS, FSSTAT, FSINFO, PATHCONF.

use std::os::fd::AsFd as _;

use berth_nfs::{
    Change, FileKind, Time, TimeChange, access,
    v3::wire,
    xdr::{Decoder, Encoder},
};
use rustix::{
    fs::{Access, AtFlags, CWD, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid},
    io::Errno,
};

use crate::{
    export::Object,
    service::{Outcome, Request, answer, end},
    status::{Result, Status},
};

/// The most that is read or written at once.
pub(crate) const LARGEST: u32 = 1 << 20;
/// What a listing has per page, if the client has no preference.
const PAGE: u32 = 64 << 10;
/// FSINFO: hard links and symbolic links there are, all files have the same limits, and times can be set.
const PROPERTIES: u32 = 0x1 | 0x2 | 0x8 | 0x10;
const LONGEST_NAME: u32 = 255;
const MOST_LINKS: u32 = 65_000;

impl Request<'_> {
    pub(crate) fn get_attributes(&self, from: &mut Decoder) -> Outcome {
        let handle = wire::handle(from)?;
        end(from)?;
        let found = self.find(&handle);
        Ok(answer(found, |to, object| wire::write_attributes(to, &object.attributes), |_| {}))
    }

    pub(crate) fn set_attributes(&self, from: &mut Decoder) -> Outcome {
        let (handle, change) = (wire::handle(from)?, wire::read_change(from)?);
        let guard: Option<Time> = wire::optional(from, wire::time)?;
        end(from)?;
        let mut changed = Vec::new();
        let done = self.find(&handle).and_then(|object| {
            let (done, of) = self.change(&[&object], || {
                let is_so = |now: Time| self.export.attributes(&object).is_some_and(|of| of.changed == now);
                match guard {
                    Some(expected) if !is_so(expected) => Err(Status::NotSynchronized),
                    _ => self.apply(&object, &change),
                }
            });
            changed = of;
            done?;
            self.export.sync_metadata(&object)
        });
        let mut to = answer(done, |_, ()| {}, |_| {});
        changed.pop().unwrap_or_default().write(&mut to);
        Ok(to)
    }

    /// Makes a file as a client wants it, as the caller.
    pub(crate) fn apply(&self, object: &Object, change: &Change) -> Result<()> {
        if let Some(size) = change.size {
            self.set_size(object, size)?;
        }
        let path = object.path();
        self.act(|| {
            if change.uid.is_some() || change.gid.is_some() {
                // -1 would leave the owner as it is.
                if change.uid == Some(u32::MAX) || change.gid == Some(u32::MAX) {
                    return Err(Status::Invalid);
                }
                let (uid, gid) = (change.uid.map(Uid::from_raw), change.gid.map(Gid::from_raw));
                rustix::fs::chownat(object.as_fd(), "", uid, gid, AtFlags::EMPTY_PATH)?;
            }
            // Symbolic links have no mode of their own.
            if let Some(mode) = change.mode
                && object.attributes.kind != FileKind::Symlink
            {
                rustix::fs::chmodat(CWD, &path, Mode::from_raw_mode(mode), AtFlags::empty())?;
            }
            if change.accessed.is_some() || change.modified.is_some() {
                let times = Timestamps {
                    last_access: timespec(change.accessed),
                    last_modification: timespec(change.modified),
                };
                rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty())?;
            }
            Ok(())
        })
    }

    fn set_size(&self, object: &Object, size: u64) -> Result<()> {
        if i64::try_from(size).is_err() {
            return Err(Status::FileTooBig);
        }
        let file = self.open(object, OFlags::WRONLY)?;
        self.act(|| Ok(rustix::fs::ftruncate(&file, size)?))
    }

    pub(crate) fn access(&self, from: &mut Decoder) -> Outcome {
        let (handle, wanted) = (wire::handle(from)?, from.u32()?);
        end(from)?;
        let found = self.find(&handle);
        let granted = found.and_then(|object| Ok((self.granted(&object, wanted)?, object)));
        let success = |to: &mut Encoder, (granted, object): (u32, Object)| {
            wire::write_maybe_attributes(to, Some(&object.attributes));
            to.u32(granted);
        };
        Ok(answer(granted, success, no_attributes))
    }

    /// Which of these rights the caller has, by the kernel's own answer.
    fn granted(&self, object: &Object, wanted: u32) -> Result<u32> {
        let rights: &[(u32, Access)] = if object.is_directory() {
            let change = Access::WRITE_OK.union(Access::EXEC_OK);
            &[
                (access::READ, Access::READ_OK),
                (access::LOOKUP, Access::EXEC_OK),
                (access::MODIFY, change),
                (access::EXTEND, change),
                (access::DELETE, change),
            ]
        } else {
            &[
                (access::READ, Access::READ_OK),
                (access::MODIFY, Access::WRITE_OK),
                (access::EXTEND, Access::WRITE_OK),
                (access::EXECUTE, Access::EXEC_OK),
            ]
        };
        self.act(|| {
            let mut granted = 0;
            for (right, asked) in rights.iter().filter(|(right, _)| wanted & right != 0) {
                match rustix::fs::accessat(CWD, object.path(), *asked, AtFlags::EACCESS) {
                    Ok(()) => granted |= right,
                    Err(Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::TXTBSY) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(granted)
        })
    }

    pub(crate) fn space(&self, from: &mut Decoder) -> Outcome {
        let handle = wire::handle(from)?;
        end(from)?;
        let found = self.find(&handle);
        let space = found.and_then(|object| Ok((rustix::fs::fstatvfs(object.as_fd())?, object)));
        let success = |to: &mut Encoder, (space, object): (rustix::fs::StatVfs, Object)| {
            wire::write_maybe_attributes(to, Some(&object.attributes));
            for blocks in [space.f_blocks, space.f_bfree, space.f_bavail] {
                to.u64(blocks.saturating_mul(space.f_frsize));
            }
            to.u64(space.f_files).u64(space.f_ffree).u64(space.f_favail);
            // It may change at any time.
            to.u32(0);
        };
        Ok(answer(space, success, no_attributes))
    }

    pub(crate) fn limits(&self, from: &mut Decoder) -> Outcome {
        let handle = wire::handle(from)?;
        end(from)?;
        let success = |to: &mut Encoder, object: Object| {
            wire::write_maybe_attributes(to, Some(&object.attributes));
            // Read and write: at most, at best, and in multiples of; then the size of a page of a listing.
            to.u32(LARGEST).u32(LARGEST).u32(4096).u32(LARGEST).u32(LARGEST).u32(4096).u32(PAGE);
            to.u64(i64::MAX.unsigned_abs());
            wire::write_time(to, Time { seconds: 0, nanoseconds: 1 });
            to.u32(PROPERTIES);
        };
        Ok(answer(self.find(&handle), success, no_attributes))
    }

    pub(crate) fn path_limits(&self, from: &mut Decoder) -> Outcome {
        let handle = wire::handle(from)?;
        end(from)?;
        let success = |to: &mut Encoder, object: Object| {
            wire::write_maybe_attributes(to, Some(&object.attributes));
            // A longer name is refused, only root gives files away, and names keep and mean their case.
            to.u32(MOST_LINKS).u32(LONGEST_NAME).bool(true).bool(true).bool(false).bool(true);
        };
        Ok(answer(self.find(&handle), success, no_attributes))
    }
}

/// A `post_op_attr` of nothing.
pub(crate) fn no_attributes(to: &mut Encoder) {
    wire::write_maybe_attributes(to, None);
}

fn timespec(time: Option<TimeChange>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeChange::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeChange::At(time)) => Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() },
    }
}
