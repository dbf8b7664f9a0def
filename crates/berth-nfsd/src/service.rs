//! Reads a call, has it done as the caller, and writes its answer.

use std::panic::{AssertUnwindSafe, catch_unwind};

use berth_host::acting::User;
use berth_nfs::{
    Attributes,
    rpc::{self, Call, Credential, Refusal, Unreadable},
    v3::{
        MOUNT_PROGRAM, PROGRAM,
        procedure::{
            ACCESS, COMMIT, CREATE, FSINFO, FSSTAT, GETATTR, LINK, LOOKUP, MKDIR, MKNOD, NULL, PATHCONF,
            READ, READDIR, READDIRPLUS, READLINK, REMOVE, RENAME, RMDIR, SETATTR, SYMLINK, WRITE,
        },
        wire,
    },
    xdr::{Decoder, Encoder, Malformed},
};
use bytes::Bytes;

use crate::{
    export::{self, Export, Object},
    mount,
    status::{Result, Status},
};

const VERSION: u32 = 3;
/// Who a caller is that does not say, or that is root and is not to be.
const NOBODY: u32 = 65_534;

/// What a procedure answers, if its arguments can be read.
pub(crate) type Outcome = std::result::Result<Encoder, Malformed>;

/// Who calls, from where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    /// The connection comes from a port that only root can use, or that does not matter.
    pub(crate) is_trusted: bool,
    /// Root is to be nobody.
    pub(crate) squash_root: bool,
}

/// One call: what is served, and who calls.
pub(crate) struct Request<'a> {
    pub(crate) export: &'a Export,
    user: User,
    is_trusted: bool,
}

impl Request<'_> {
    /// The file that a handle names.
    pub(crate) fn find(&self, handle: &berth_nfs::Handle) -> Result<Object> {
        if !self.is_trusted {
            return Err(Status::NotPermitted);
        }
        self.export.find(handle.as_bytes())
    }

    /// The directory that a handle names.
    pub(crate) fn find_directory(&self, handle: &berth_nfs::Handle) -> Result<Object> {
        let found = self.find(handle)?;
        found.require_directory()?;
        Ok(found)
    }

    /// Does something as the caller.
    pub(crate) fn act<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        export::act_as(&self.user, work)
    }

    /// Whether the caller owns a file.
    pub(crate) fn owns(&self, object: &Object) -> bool {
        self.user.uid == object.attributes.uid
    }

    /// Changes files, and says what each was before and is after that: nobody else changes them meanwhile through this server.
    pub(crate) fn change<T>(
        &self,
        files: &[&Object],
        work: impl FnOnce() -> Result<T>,
    ) -> (Result<T>, Vec<Changed>) {
        let locks = self.export.lock(files);
        let before: Vec<_> = files.iter().map(|file| self.export.attributes(file)).collect();
        let done = work();
        let after = files.iter().map(|file| self.export.attributes(file));
        let changed =
            before.into_iter().zip(after).map(|(before, after)| Changed { before, after }).collect();
        drop(locks);
        (done, changed)
    }
}

/// `wcc_data`: what a file was before a change, and is after it.
#[derive(Debug, Default, Clone)]
pub(crate) struct Changed {
    pub(crate) before: Option<Attributes>,
    pub(crate) after: Option<Attributes>,
}

impl Changed {
    pub(crate) fn write(&self, to: &mut Encoder) {
        to.bool(self.before.is_some());
        if let Some(before) = &self.before {
            to.u64(before.size);
            wire::write_time(to, before.modified);
            wire::write_time(to, before.changed);
        }
        wire::write_maybe_attributes(to, self.after.as_ref());
    }
}

/// An answer: success and what `success` writes, or the failure and what `failure` writes.
pub(crate) fn answer<T>(
    result: Result<T>,
    success: impl FnOnce(&mut Encoder, T),
    failure: impl FnOnce(&mut Encoder),
) -> Encoder {
    let mut to = Encoder::default();
    match result {
        Ok(value) => {
            to.u32(0);
            success(&mut to, value);
        }
        Err(status) => {
            to.u32(status.number());
            failure(&mut to);
        }
    }
    to
}

/// Whether a call does harm when it is done a second time, so that it is to be answered as before.
pub(crate) fn is_done_once(procedure: rpc::Procedure) -> bool {
    procedure.program == PROGRAM
        && matches!(
            procedure.number,
            SETATTR | CREATE | MKDIR | SYMLINK | MKNOD | REMOVE | RMDIR | RENAME | LINK
        )
}

/// Reads a call; `Err` has the answer, if one can be given, to what is none.
pub(crate) fn read(record: Bytes) -> std::result::Result<Call, Option<Encoder>> {
    Call::read(record).map_err(|unreadable| match unreadable {
        Unreadable::Nonsense => None,
        Unreadable::Refused(answer) => Some(answer),
    })
}

/// Does what a call asks for, and gives the answer.
pub(crate) fn perform(export: &Export, mount: &mount::Names, origin: Origin, call: Call) -> Encoder {
    let xid = call.xid;
    let done = catch_unwind(AssertUnwindSafe(|| dispatch(export, mount, origin, call)));
    let refusal = match done {
        Ok(Ok(results)) => {
            let mut message = rpc::accepted(xid);
            message.append(results);
            return message;
        }
        Ok(Err(refusal)) => refusal,
        Err(_) => {
            tracing::error!("a procedure panicked; the call was answered with an error");
            Refusal::System
        }
    };
    rpc::refused(xid, refusal)
}

fn dispatch(
    export: &Export,
    mount: &mount::Names,
    origin: Origin,
    call: Call,
) -> std::result::Result<Encoder, Refusal> {
    let (program, version, number) = (call.procedure.program, call.procedure.version, call.procedure.number);
    if !matches!(program, PROGRAM | MOUNT_PROGRAM) {
        return Err(Refusal::Program);
    }
    if version != VERSION {
        return Err(Refusal::Version);
    }
    let mut from = call.arguments;
    let results = if program == MOUNT_PROGRAM {
        mount::dispatch(export, mount, origin.is_trusted, number, &mut from)
    } else {
        let user = user(call.credential, origin.squash_root);
        let request = Request { export, user, is_trusted: origin.is_trusted };
        request.dispatch(number, &mut from)
    };
    results.ok_or(Refusal::Procedure)?.map_err(|_| Refusal::Arguments)
}

impl Request<'_> {
    fn dispatch(&self, number: u32, from: &mut Decoder) -> Option<Outcome> {
        Some(match number {
            NULL => Ok(Encoder::default()),
            GETATTR => self.get_attributes(from),
            SETATTR => self.set_attributes(from),
            LOOKUP => self.lookup(from),
            ACCESS => self.access(from),
            READLINK => self.read_link(from),
            READ => self.read(from),
            WRITE => self.write(from),
            CREATE => self.create(from),
            MKDIR => self.make_directory(from),
            SYMLINK => self.make_symlink(from),
            MKNOD => self.make_node(from),
            REMOVE => self.remove(from, false),
            RMDIR => self.remove(from, true),
            RENAME => self.rename(from),
            LINK => self.link(from),
            READDIR => self.list(from, false),
            READDIRPLUS => self.list(from, true),
            FSSTAT => self.space(from),
            FSINFO => self.limits(from),
            PATHCONF => self.path_limits(from),
            COMMIT => self.commit(from),
            _ => return None,
        })
    }
}

/// The last argument was read: a call with more than its procedure takes is none.
pub(crate) fn end(from: &Decoder) -> std::result::Result<(), Malformed> {
    if from.is_empty() { Ok(()) } else { Err(Malformed("more follows than the procedure takes")) }
}

/// Whom a call is done as.
fn user(credential: Option<Credential>, squash_root: bool) -> User {
    let Some(credential) = credential else {
        return User { uid: NOBODY, gid: NOBODY, groups: Vec::new() };
    };
    let squashed = |id: u32| if id == 0 && squash_root { NOBODY } else { id };
    User {
        uid: squashed(credential.uid),
        gid: squashed(credential.gid),
        groups: credential.groups.as_slice().iter().copied().map(squashed).collect(),
    }
}
