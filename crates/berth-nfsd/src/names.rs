//! What directories hold: LOOKUP, CREATE, MKDIR, SYMLINK, MKNOD, REMOVE, RMDIR, RENAME, LINK.

use std::os::fd::AsFd as _;

use berth_nfs::{
    Attributes, Change, FileKind, Handle, Time, TimeChange,
    v3::wire,
    xdr::{Decoder, Encoder, Malformed},
};
use bytes::Bytes;
use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags, makedev},
    io::Errno,
};

use crate::{
    export::Object,
    service::{Changed, Outcome, Request, answer, end},
    status::{Result, Status},
};

const LONGEST_NAME: usize = 255;
const LONGEST_LINK: usize = 4095;
/// No string in a call is longer than the call.
const LONGEST_STRING: usize = 1 << 20;
/// How a file is created: `createmode3`.
const UNCHECKED: u32 = 0;
const GUARDED: u32 = 1;
const EXCLUSIVE: u32 = 2;
/// The kernel has twelve and twenty bits for the numbers of a device.
const HIGHEST_MAJOR: u32 = 0xfff;
const HIGHEST_MINOR: u32 = 0xf_ffff;

/// A directory and a name in it, as a client sent them.
struct Entry {
    directory: Handle,
    name: Bytes,
}

impl Entry {
    fn read(from: &mut Decoder) -> std::result::Result<Self, Malformed> {
        Ok(Self { directory: wire::handle(from)?, name: from.opaque(LONGEST_STRING)? })
    }

    /// The name, if a file can have it.
    fn name(&self) -> Result<&[u8]> {
        match &self.name[..] {
            b"" => Err(Status::Invalid),
            name if name.contains(&b'/') || name.contains(&0) => Err(Status::Invalid),
            name if name.len() > LONGEST_NAME => Err(Status::NameTooLong),
            name => Ok(name),
        }
    }

    /// The name, if it means an entry; else this failure.
    fn proper_name(&self, otherwise: Status) -> Result<&[u8]> {
        match self.name()? {
            b"." | b".." => Err(otherwise),
            name => Ok(name),
        }
    }
}

/// How a file is to be made.
enum Create {
    /// One that exists is used, and cut if a size is given.
    Unchecked(Change),
    /// One that exists is a failure.
    Guarded(Change),
    /// One that exists is a failure, unless it was made by the same call before.
    Exclusive([u8; 8]),
}

/// What is made, and how.
enum Made<'a> {
    Directory,
    Symlink(&'a [u8]),
    Node(FileType, u64),
}

impl Request<'_> {
    pub(crate) fn lookup(&self, from: &mut Decoder) -> Outcome {
        let entry = Entry::read(from)?;
        end(from)?;
        let mut above = None;
        let found = self.find_directory(&entry.directory).and_then(|directory| {
            above = Some(directory.attributes.clone());
            let name = entry.name()?;
            let found = match name {
                b"." => self.find(&entry.directory)?,
                b".." => self.act(|| self.export.parent(&directory))?,
                _ => self.act(|| self.export.child(directory.as_fd(), name))?,
            };
            if !matches!(name, b"." | b"..") {
                self.export.note(&directory, name, &found);
            }
            Ok((self.export.handle(&found)?, found.attributes))
        });
        let success = |to: &mut Encoder, (handle, of): (Vec<u8>, Attributes)| {
            to.opaque(&handle);
            wire::write_maybe_attributes(to, Some(&of));
            wire::write_maybe_attributes(to, above.as_ref());
        };
        let failure = |to: &mut Encoder| wire::write_maybe_attributes(to, above.as_ref());
        Ok(answer(found, success, failure))
    }

    pub(crate) fn create(&self, from: &mut Decoder) -> Outcome {
        let entry = Entry::read(from)?;
        let how = match from.u32()? {
            UNCHECKED => Create::Unchecked(wire::read_change(from)?),
            GUARDED => Create::Guarded(wire::read_change(from)?),
            EXCLUSIVE => Create::Exclusive(from.fixed()?),
            _ => return Err(Malformed("there is no such way to create a file")),
        };
        end(from)?;
        Ok(self.make(&entry, |directory, name| self.create_file(directory, name, &how)))
    }

    pub(crate) fn make_directory(&self, from: &mut Decoder) -> Outcome {
        let (entry, change) = (Entry::read(from)?, wire::read_change(from)?);
        end(from)?;
        Ok(self.make(&entry, |directory, name| self.make_entry(directory, name, &Made::Directory, &change)))
    }

    pub(crate) fn make_symlink(&self, from: &mut Decoder) -> Outcome {
        let (entry, change) = (Entry::read(from)?, wire::read_change(from)?);
        let target = from.opaque(LONGEST_STRING)?;
        end(from)?;
        Ok(self.make(&entry, |directory, name| {
            if target.len() > LONGEST_LINK {
                return Err(Status::NameTooLong);
            }
            if target.contains(&0) {
                return Err(Status::Invalid);
            }
            self.make_entry(directory, name, &Made::Symlink(&target), &change)
        }))
    }

    pub(crate) fn make_node(&self, from: &mut Decoder) -> Outcome {
        let (entry, number) = (Entry::read(from)?, from.u32()?);
        let kind = FileKind::from_number(number)?;
        let special = match kind {
            FileKind::Character => Some(FileType::CharacterDevice),
            FileKind::Block => Some(FileType::BlockDevice),
            FileKind::Socket => Some(FileType::Socket),
            FileKind::Fifo => Some(FileType::Fifo),
            FileKind::File | FileKind::Directory | FileKind::Symlink => None,
        };
        let change = if special.is_some() { wire::read_change(from)? } else { Change::default() };
        let is_device = matches!(kind, FileKind::Character | FileKind::Block);
        let (major, minor) = if is_device { (from.u32()?, from.u32()?) } else { (0, 0) };
        end(from)?;
        Ok(self.make(&entry, |directory, name| {
            if major > HIGHEST_MAJOR || minor > HIGHEST_MINOR {
                return Err(Status::Invalid);
            }
            let made = Made::Node(special.ok_or(Status::BadType)?, makedev(major, minor));
            self.make_entry(directory, name, &made, &change)
        }))
    }

    /// Makes an entry, and answers with what it is.
    fn make(&self, entry: &Entry, make: impl FnOnce(&Object, &[u8]) -> Result<Object>) -> Encoder {
        let mut changed = Changed::default();
        let new = self.find_directory(&entry.directory).and_then(|directory| {
            let name = entry.proper_name(Status::Exists)?;
            let (new, mut of) = self.change(&[&directory], || make(&directory, name));
            changed = of.pop().unwrap_or_default();
            let new = new?;
            self.export.sync_metadata(&new)?;
            self.export.sync_metadata(&directory)?;
            let now = self.export.attributes(&new);
            self.export.note(&directory, name, &new);
            Ok((self.export.handle(&new)?, now))
        });
        let success = |to: &mut Encoder, (handle, now): (Vec<u8>, Option<Attributes>)| {
            to.bool(true).opaque(&handle);
            wire::write_maybe_attributes(to, now.as_ref());
        };
        let mut to = answer(new, success, |_| {});
        changed.write(&mut to);
        to
    }

    fn create_file(&self, directory: &Object, name: &[u8], how: &Create) -> Result<Object> {
        let nothing = Change::default();
        let wanted = match how {
            Create::Unchecked(change) | Create::Guarded(change) => change,
            Create::Exclusive(_) => &nothing,
        };
        let mode = Mode::from_raw_mode(wanted.mode.unwrap_or(0));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let created = self.act(|| Ok(rustix::fs::openat(directory.as_fd(), name, flags, mode)?));
        match (created, how) {
            (Ok(file), Create::Exclusive(verifier)) => {
                let new = self.export.object(file)?;
                self.apply(&new, &times_of(*verifier))?;
                Ok(new)
            }
            (Ok(file), _) => {
                let new = self.export.object(file)?;
                // The mode is what it is by the directory's rules for new files.
                self.apply(
                    &new,
                    &Change { mode: None, size: wanted.size.filter(|size| *size > 0), ..wanted.clone() },
                )?;
                Ok(new)
            }
            (Err(Status::Exists), Create::Unchecked(change)) => {
                let there = self.act(|| self.export.child(directory.as_fd(), name))?;
                if there.attributes.kind != FileKind::File {
                    return Err(Status::Exists);
                }
                self.apply(&there, &Change { size: change.size, ..Change::default() })?;
                Ok(there)
            }
            (Err(Status::Exists), Create::Exclusive(verifier)) => {
                let there = self.act(|| self.export.child(directory.as_fd(), name))?;
                let of = &there.attributes;
                let by = times_of(*verifier);
                let times = [Some(TimeChange::At(of.accessed)), Some(TimeChange::At(of.modified))];
                let is_same =
                    of.kind == FileKind::File && of.size == 0 && times == [by.accessed, by.modified];
                if is_same { Ok(there) } else { Err(Status::Exists) }
            }
            (Err(status), _) => Err(status),
        }
    }

    fn make_entry(
        &self,
        directory: &Object,
        name: &[u8],
        what: &Made<'_>,
        change: &Change,
    ) -> Result<Object> {
        let mode = Mode::from_raw_mode(change.mode.unwrap_or(0));
        let new = self.act(|| {
            match what {
                Made::Directory => rustix::fs::mkdirat(directory.as_fd(), name, mode)?,
                Made::Symlink(target) => rustix::fs::symlinkat(*target, directory.as_fd(), name)?,
                Made::Node(kind, device) => {
                    rustix::fs::mknodat(directory.as_fd(), name, *kind, mode, *device)?;
                }
            }
            self.export.child(directory.as_fd(), name)
        })?;
        self.apply(&new, &Change { mode: None, size: None, ..change.clone() })?;
        Ok(new)
    }

    pub(crate) fn remove(&self, from: &mut Decoder, is_directory: bool) -> Outcome {
        let entry = Entry::read(from)?;
        end(from)?;
        let mut changed = Changed::default();
        let done = self.find_directory(&entry.directory).and_then(|directory| {
            let name = match entry.name()? {
                b".." if is_directory => return Err(Status::Exists),
                b"." | b".." => return Err(Status::Invalid),
                name => name,
            };
            let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            let gone = self.export.child(directory.as_fd(), name);
            let remove = || self.act(|| Ok(rustix::fs::unlinkat(directory.as_fd(), name, flags)?));
            let (done, mut of) = self.change(&[&directory], remove);
            changed = of.pop().unwrap_or_default();
            done?;
            if let Ok(gone) = gone {
                self.export.forget(&directory, name, &gone);
            }
            self.export.sync_metadata(&directory)
        });
        let mut to = answer(done, |_, ()| {}, |_| {});
        changed.write(&mut to);
        Ok(to)
    }

    pub(crate) fn rename(&self, from: &mut Decoder) -> Outcome {
        let (source, target) = (Entry::read(from)?, Entry::read(from)?);
        end(from)?;
        let mut changed = Vec::new();
        let done = self.find_directory(&source.directory).and_then(|above| {
            let below = self.find_directory(&target.directory)?;
            let (name, new_name) =
                (source.proper_name(Status::Invalid)?, target.proper_name(Status::Invalid)?);
            let moved = self.export.child(above.as_fd(), name);
            let rename =
                || self.act(|| Ok(rustix::fs::renameat(above.as_fd(), name, below.as_fd(), new_name)?));
            let (done, of) = self.change(&[&above, &below], rename);
            changed = of;
            done?;
            if let Ok(moved) = moved {
                self.export.forget(&above, name, &moved);
                self.export.note(&below, new_name, &moved);
            }
            self.export.sync_metadata(&below)?;
            self.export.sync_metadata(&above)
        });
        let mut to = answer(done, |_, ()| {}, |_| {});
        changed.resize(2, Changed::default());
        for changed in &changed {
            changed.write(&mut to);
        }
        Ok(to)
    }

    pub(crate) fn link(&self, from: &mut Decoder) -> Outcome {
        let (handle, entry) = (wire::handle(from)?, Entry::read(from)?);
        end(from)?;
        let (mut now, mut changed) = (None, Changed::default());
        let done = self.find(&handle).and_then(|file| {
            let directory = self.find_directory(&entry.directory)?;
            let name = entry.proper_name(Status::Exists)?;
            let link = || {
                let path = file.path();
                self.act(|| {
                    let flags = AtFlags::SYMLINK_FOLLOW;
                    match rustix::fs::linkat(CWD, &path, directory.as_fd(), name, flags) {
                        // The file has lost its last name.
                        Err(Errno::NOENT) => Err(Status::Stale),
                        linked => Ok(linked?),
                    }
                })
            };
            let (done, mut of) = self.change(&[&directory], link);
            changed = of.pop().unwrap_or_default();
            now = self.export.attributes(&file);
            done?;
            self.export.note(&directory, name, &file);
            self.export.sync_metadata(&file)?;
            self.export.sync_metadata(&directory)
        });
        let mut to = answer(done, |_, ()| {}, |_| {});
        wire::write_maybe_attributes(&mut to, now.as_ref());
        changed.write(&mut to);
        Ok(to)
    }
}

/// Where the verifier of an exclusive creation is kept until the client sets the attributes: in the times of the new file, in
/// seconds that every filesystem can keep.
fn times_of(verifier: [u8; 8]) -> Change {
    let at = |bytes: &[u8]| {
        let seconds = bytes.iter().fold(0_u32, |number, byte| number << 8 | u32::from(*byte)) & 0x7fff_ffff;
        Some(TimeChange::At(Time { seconds: seconds.into(), nanoseconds: 0 }))
    };
    Change { accessed: at(&verifier[..4]), modified: at(&verifier[4..]), ..Change::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let entry = |name: &[u8]| {
            let mut to = Encoder::default();
            to.opaque(b"handle").opaque(name);
            Entry::read(&mut Decoder::new(to.finish().concat().into())).unwrap()
        };
        for (name, status) in [
            (&b""[..], Status::Invalid),
            (b"a/b", Status::Invalid),
            (b"/", Status::Invalid),
            (b"a\0", Status::Invalid),
            (&[b'x'; 256], Status::NameTooLong),
            (b".", Status::Exists),
            (b"..", Status::Exists),
        ] {
            assert_eq!(entry(name).proper_name(Status::Exists).map(<[u8]>::to_vec), Err(status), "{name:?}");
        }
        for name in [&b"a"[..], b"...", b"\xff", &[b'x'; 255]] {
            assert_eq!(entry(name).proper_name(Status::Exists).map(<[u8]>::to_vec), Ok(name.to_vec()));
        }
    }
}
