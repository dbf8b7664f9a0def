//! How version 3 writes what both sides talk about, in both directions.

use bytes::Bytes;

use crate::{
    Attributes, Change, FileKind, Handle, Time, TimeChange,
    status::{Fault, Status},
    xdr::{Decoder, Encoder, Malformed},
};

/// No handle is longer.
pub const LONGEST_HANDLE: usize = 64;

/// Fails unless the answer begins with success.
pub(super) fn status(answer: &mut Decoder) -> Result<(), Fault> {
    match Status(answer.u32()?) {
        Status::OK => Ok(()),
        other => Err(Fault::Status(other)),
    }
}

/// Reads a handle of a file.
pub fn handle(from: &mut Decoder) -> Result<Handle, Malformed> {
    let bytes = from.opaque(LONGEST_HANDLE)?;
    Ok(Handle::new(Bytes::copy_from_slice(&bytes)))
}

/// Reads what may be there or not.
pub fn optional<T>(
    from: &mut Decoder,
    read: impl FnOnce(&mut Decoder) -> Result<T, Malformed>,
) -> Result<Option<T>, Malformed> {
    if from.bool()? { read(from).map(Some) } else { Ok(None) }
}

/// Reads a file's attributes, `fattr3`.
pub fn attributes(from: &mut Decoder) -> Result<Attributes, Malformed> {
    let kind = FileKind::from_number(from.u32()?)?;
    Ok(Attributes {
        kind,
        // Some servers leave the bits of the kind in.
        mode: from.u32()? & 0o7777,
        links: from.u32()?,
        uid: from.u32()?,
        gid: from.u32()?,
        size: from.u64()?,
        used: from.u64()?,
        device: (from.u32()?, from.u32()?),
        fsid: (from.u64()?, 0),
        fileid: from.u64()?,
        accessed: time(from)?,
        modified: time(from)?,
        changed: time(from)?,
    })
}

/// Reads a `post_op_attr`, which servers may leave empty.
pub fn maybe_attributes(from: &mut Decoder) -> Result<Option<Attributes>, Malformed> {
    optional(from, attributes)
}

/// `wcc_data`: what was before is of no use to us.
pub(super) fn after_change(from: &mut Decoder) -> Result<Option<Attributes>, Malformed> {
    optional(from, |from| {
        from.u64()?;
        from.u64()?;
        from.u64()
    })?;
    maybe_attributes(from)
}

/// Reads `nfstime3`. Seconds are unsigned here, so that times before 1970 cannot be told from those after 2038; as kernels do, we take
/// them as signed.
pub fn time(from: &mut Decoder) -> Result<Time, Malformed> {
    let seconds = i64::from(from.u32()?.cast_signed());
    let nanoseconds = from.u32()?;
    Ok(Time { seconds, nanoseconds: nanoseconds.min(999_999_999) })
}

/// Writes what to change, `sattr3`.
pub fn change(to: &mut Encoder, change: &Change) {
    for number in [change.mode.map(|mode| mode & 0o7777), change.uid, change.gid] {
        to.bool(number.is_some());
        number.map(|number| to.u32(number));
    }
    to.bool(change.size.is_some());
    change.size.map(|size| to.u64(size));
    for moment in [change.accessed, change.modified] {
        match moment {
            None => {
                to.u32(0);
            }
            Some(TimeChange::Now) => {
                to.u32(1);
            }
            Some(TimeChange::At(time)) => write_time(to.u32(2), time),
        }
    }
}

/// The nearest that 32 bits can say.
fn seconds(time: Time) -> u32 {
    i32::try_from(time.seconds).unwrap_or(if time.seconds < 0 { i32::MIN } else { i32::MAX }).cast_unsigned()
}

/// Reads what to change, `sattr3`.
pub fn read_change(from: &mut Decoder) -> Result<Change, Malformed> {
    Ok(Change {
        mode: optional(from, Decoder::u32)?.map(|mode| mode & 0o7777),
        uid: optional(from, Decoder::u32)?,
        gid: optional(from, Decoder::u32)?,
        size: optional(from, Decoder::u64)?,
        accessed: time_change(from)?,
        modified: time_change(from)?,
    })
}

fn time_change(from: &mut Decoder) -> Result<Option<TimeChange>, Malformed> {
    match from.u32()? {
        0 => Ok(None),
        1 => Ok(Some(TimeChange::Now)),
        2 => Ok(Some(TimeChange::At(time(from)?))),
        _ => Err(Malformed("there is no such way to set a time")),
    }
}

/// Writes a moment, `nfstime3`.
pub fn write_time(to: &mut Encoder, time: Time) {
    to.u32(seconds(time)).u32(time.nanoseconds);
}

/// Writes a file's attributes, `fattr3`.
pub fn write_attributes(to: &mut Encoder, of: &Attributes) {
    to.u32(of.kind.number()).u32(of.mode).u32(of.links).u32(of.uid).u32(of.gid);
    to.u64(of.size).u64(of.used).u32(of.device.0).u32(of.device.1).u64(of.fsid.0).u64(of.fileid);
    for moment in [of.accessed, of.modified, of.changed] {
        write_time(to, moment);
    }
}

/// Writes attributes that may be missing, `post_op_attr`.
pub fn write_maybe_attributes(to: &mut Encoder, of: Option<&Attributes>) {
    to.bool(of.is_some());
    if let Some(of) = of {
        write_attributes(to, of);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_side_writes_the_other_reads() {
        let written = |write: &dyn Fn(&mut Encoder)| {
            let mut to = Encoder::default();
            write(&mut to);
            Decoder::new(to.finish().concat().into())
        };
        let at = |seconds| Time { seconds, nanoseconds: 5 };
        for kind in [
            FileKind::File,
            FileKind::Directory,
            FileKind::Symlink,
            FileKind::Fifo,
            FileKind::Socket,
            FileKind::Block,
            FileKind::Character,
        ] {
            let of = Attributes {
                kind,
                mode: 0o4755,
                uid: 1,
                gid: 2,
                size: 3 << 40,
                used: 4,
                fileid: 5,
                fsid: (6, 0),
                links: 7,
                device: (8, 9),
                accessed: at(-1),
                modified: at(10),
                changed: at(i64::from(i32::MAX)),
            };
            let mut from = written(&|to| write_maybe_attributes(to, Some(&of)));
            assert_eq!(maybe_attributes(&mut from), Ok(Some(of)));
            assert!(from.is_empty());
        }
        for wanted in [
            Change::default(),
            Change::mode(0o644),
            Change { uid: Some(1), size: Some(2), modified: Some(TimeChange::Now), ..Change::default() },
            Change { gid: Some(3), accessed: Some(TimeChange::At(at(4))), ..Change::default() },
        ] {
            let mut from = written(&|to| change(to, &wanted));
            assert_eq!(read_change(&mut from), Ok(wanted));
            assert!(from.is_empty());
        }
    }
}
