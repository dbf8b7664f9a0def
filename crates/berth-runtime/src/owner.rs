//! The user namespace that owns what a container has, as the processes see it that put the container together.

use std::{io, os::fd::BorrowedFd};

use rustix::{
    process::{Gid, Uid},
    thread::{ThreadNameSpaceType, move_into_thread_name_spaces},
};

use crate::{IdRange, sys};
use berth_host::{Error, Result};

/// The user namespace of a container, for a process that enters it or makes files for it.
#[derive(Clone, Copy)]
pub(crate) struct Owner<'a> {
    /// The namespace, or a process in it.
    pub(crate) namespace: BorrowedFd<'a>,
    /// The ids of the machine that exist there.
    pub(crate) range: IdRange,
    /// Whether the process is the first of the container in it, and not one that joins it.
    pub(crate) is_first: bool,
}

impl Owner<'_> {
    /// The user and the group of the machine that are root there.
    pub(crate) fn root(&self) -> (Uid, Gid) {
        (Uid::from_raw(self.range.first), Gid::from_raw(self.range.first))
    }

    /// The machine's id of a user there.
    pub(crate) fn outside(&self, user: Uid) -> Result<Uid> {
        self.range.outside(user.as_raw()).map(Uid::from_raw).ok_or_else(|| {
            let (user, last) = (user.as_raw(), self.range.count.saturating_sub(1));
            let why = format!("the pod's user namespace has the users 0 to {last} only");
            Error::new(format!("become user {user}"), io::Error::other(why))
        })
    }

    /// Becomes root of the namespace, with everything that is allowed there and nothing elsewhere.
    pub(crate) fn enter(&self) -> Result<()> {
        let enter = || -> rustix::io::Result<()> {
            move_into_thread_name_spaces(self.namespace, ThreadNameSpaceType::USER)?;
            if self.is_first {
                // The same again, but such as belong to the user namespace, so that its root may change them.
                sys::own_namespaces()?;
            }
            rustix::thread::set_thread_groups(&[])?;
            rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
            rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)
        };
        enter().map_err(|errno| Error::new("enter the user namespace of the pod", errno))
    }
}
