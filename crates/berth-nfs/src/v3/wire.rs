//! How version 3 writes what both sides talk about.

use bytes::Bytes;

use crate::{
    Attributes, Change, FileKind, Handle, Time, TimeChange,
    status::{Fault, Status},
    xdr::{Decoder, Encoder, Malformed},
};

const LONGEST_HANDLE: usize = 64;

/// Fails unless the answer begins with success.
pub(super) fn status(answer: &mut Decoder) -> Result<(), Fault> {
    match Status(answer.u32()?) {
        Status::OK => Ok(()),
        other => Err(Fault::Status(other)),
    }
}

pub(super) fn handle(from: &mut Decoder) -> Result<Handle, Malformed> {
    let bytes = from.opaque(LONGEST_HANDLE)?;
    Ok(Handle::new(Bytes::copy_from_slice(&bytes)))
}

pub(super) fn optional<T>(
    from: &mut Decoder,
    read: impl FnOnce(&mut Decoder) -> Result<T, Malformed>,
) -> Result<Option<T>, Malformed> {
    if from.bool()? { read(from).map(Some) } else { Ok(None) }
}

pub(super) fn attributes(from: &mut Decoder) -> Result<Attributes, Malformed> {
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
pub(super) fn maybe_attributes(from: &mut Decoder) -> Result<Option<Attributes>, Malformed> {
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

/// Seconds are unsigned here, so that times before 1970 cannot be told from those after 2038; as kernels do, we take
/// them as signed.
fn time(from: &mut Decoder) -> Result<Time, Malformed> {
    let seconds = i64::from(from.u32()?.cast_signed());
    let nanoseconds = from.u32()?;
    Ok(Time { seconds, nanoseconds: nanoseconds.min(999_999_999) })
}

pub(super) fn change(to: &mut Encoder, change: &Change) {
    for number in [change.mode.map(|mode| mode & 0o7777), change.uid, change.gid] {
        to.bool(number.is_some());
        number.map(|number| to.u32(number));
    }
    to.bool(change.size.is_some());
    change.size.map(|size| to.u64(size));
    for moment in [change.accessed, change.modified] {
        match moment {
            None => to.u32(0),
            Some(TimeChange::Now) => to.u32(1),
            Some(TimeChange::At(time)) => to.u32(2).u32(seconds(time)).u32(time.nanoseconds),
        };
    }
}

/// The nearest that 32 bits can say.
fn seconds(time: Time) -> u32 {
    i32::try_from(time.seconds).unwrap_or(if time.seconds < 0 { i32::MIN } else { i32::MAX }).cast_unsigned()
}
