//! Listings of directories: READDIR and READDIRPLUS.
//!
//! A listing is in the order of its cookies, and a cookie is a hash of the entry's name. So the next page begins behind the same
//! name whatever came, went or was renamed meanwhile, on any filesystem, also after a restart: what was there all the time is listed exactly
//! once. Directories that take several pages are read once and kept for the pages that follow.

use std::{
    collections::VecDeque,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use berth_nfs::{
    Attributes,
    v3::wire,
    xdr::{Decoder, Encoder},
};
use parking_lot::Mutex;
use rustix::fs::{CWD, Dir, Mode, OFlags};

use crate::{
    attributes::{LARGEST, no_attributes},
    export::{Export, Object},
    handle::Identity,
    service::{Outcome, Request, answer, end},
    status::{Result, Status},
};

/// Cookies of the two entries that every directory has; 0 begins a listing.
const OWN: u64 = 1;
const PARENT: u64 = 2;
/// The status, the directory's attributes, the verifier, the end of the list and whether it is the end of the directory.
const FRAME: usize = 4 + 4 + ATTRIBUTES + 8 + 4 + 4;
const ATTRIBUTES: usize = 84;
/// How many listings are kept, and how many entries they may have together.
const MOST_LISTINGS: usize = 64;
const MOST_ENTRIES: usize = 1_000_000;

/// A directory's entries but for `.` and `..`, by their cookies.
type Entries = Arc<Vec<Listed>>;

struct Listed {
    cookie: u64,
    inode: u64,
    name: Box<[u8]>,
}

/// The listings that are under way, the latest last.
#[derive(Default)]
pub(crate) struct Listings(Mutex<VecDeque<(Identity, Entries)>>);

impl Listings {
    fn keep(&self, of: Identity, entries: &Entries) {
        let mut kept = self.0.lock();
        kept.retain(|(directory, _)| *directory != of);
        kept.push_back((of, entries.clone()));
        let count = |kept: &VecDeque<(Identity, Entries)>| kept.iter().map(|(_, of)| of.len()).sum::<usize>();
        while kept.len() > MOST_LISTINGS || (kept.len() > 1 && count(&kept) > MOST_ENTRIES) {
            kept.pop_front();
        }
    }

    fn kept(&self, of: Identity) -> Option<Entries> {
        let kept = self.0.lock();
        kept.iter().find(|(directory, _)| *directory == of).map(|(_, entries)| entries.clone())
    }
}

/// A page that is being written.
struct Page {
    to: Encoder,
    /// Whether entries have attributes and handles.
    plus: bool,
    /// How many bytes it may have, with all that READDIRPLUS adds; and of these for names and cookies alone.
    room: usize,
    room_for_names: usize,
    count: usize,
}

impl Request<'_> {
    pub(crate) fn list(&self, from: &mut Decoder, plus: bool) -> Outcome {
        let (handle, cookie) = (wire::handle(from)?, from.u64()?);
        // Cookies are good for ever, so that there is nothing to verify.
        from.fixed::<8>()?;
        let first = from.u32()?;
        let most = if plus { from.u32()? } else { first };
        end(from)?;
        let most = most.min(LARGEST) as usize;
        let listed = self.find_directory(&handle).and_then(|directory| {
            let room = most.saturating_sub(FRAME);
            let room_for_names = if plus { first as usize } else { room };
            let mut page = Page { to: Encoder::default(), plus, room, room_for_names, count: 0 };
            let is_end = self.write_page(&directory, cookie, &mut page)?;
            if page.count == 0 && !is_end {
                return Err(Status::TooSmall);
            }
            Ok((page.to, is_end, self.export.attributes(&directory)))
        });
        let success = |to: &mut Encoder, (page, is_end, of): (Encoder, bool, Option<Attributes>)| {
            wire::write_maybe_attributes(to, of.as_ref());
            to.u64(0).append(page).bool(false).bool(is_end);
        };
        Ok(answer(listed, success, no_attributes))
    }

    /// Writes the entries behind a cookie, as many as there is room for, and says whether these were the last.
    fn write_page(&self, directory: &Object, cookie: u64, page: &mut Page) -> Result<bool> {
        let plus = page.plus;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = directory.path();
        let open = self.act(|| Ok(rustix::fs::openat(CWD, &path, flags, Mode::empty())?))?;
        for (own, name) in [(OWN, &b"."[..]), (PARENT, b"..")] {
            if cookie >= own {
                continue;
            }
            let object = match own {
                OWN => self.export.object(open.try_clone().map_err(Status::from)?)?,
                _ => self.export.parent(directory)?,
            };
            if !self.write_entry(page, own, object.identity.inode, name, Some(&object)) {
                return Ok(false);
            }
        }
        // A listing that begins sees the directory as it is now.
        let kept = if cookie > PARENT { self.export.listings.kept(directory.identity) } else { None };
        let entries = match kept {
            Some(entries) => entries,
            None => Arc::new(read(self.export, &open)?),
        };
        let begin = entries.partition_point(|entry| entry.cookie <= cookie);
        let is_end = self.act(|| {
            for entry in &entries[begin..] {
                let child = || self.export.child(open.as_fd(), &entry.name).ok();
                let object = if plus { child() } else { None };
                if let Some(object) = &object {
                    self.export.note(directory, &entry.name, object);
                }
                let inode = object.as_ref().map_or(entry.inode, |object| object.identity.inode);
                if !self.write_entry(page, entry.cookie, inode, &entry.name, object.as_ref()) {
                    return Ok(false);
                }
            }
            Ok(true)
        })?;
        if !is_end {
            self.export.listings.keep(directory.identity, &entries);
        }
        Ok(is_end)
    }

    /// Writes one entry if there is room for it.
    fn write_entry(
        &self,
        page: &mut Page,
        cookie: u64,
        inode: u64,
        name: &[u8],
        object: Option<&Object>,
    ) -> bool {
        let mut entry = Encoder::default();
        entry.bool(true).u64(inode).opaque(name).u64(cookie);
        let names = entry.len();
        if page.plus {
            let handle = object.and_then(|object| self.export.handle(object).ok());
            wire::write_maybe_attributes(&mut entry, object.map(|object| &object.attributes));
            entry.bool(handle.is_some());
            if let Some(handle) = handle {
                entry.opaque(&handle);
            }
        }
        if entry.len() > page.room || (names > page.room_for_names && page.count > 0) {
            return false;
        }
        page.room -= entry.len();
        page.room_for_names = page.room_for_names.saturating_sub(names);
        page.count += 1;
        page.to.append(entry);
        true
    }
}

/// Reads a whole directory.
fn read(export: &Export, open: &OwnedFd) -> Result<Vec<Listed>> {
    let mut entries = Vec::new();
    for entry in Dir::read_from(open)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            entries.push(Listed { cookie: export.cookie(name), inode: entry.ino(), name: name.into() });
        }
    }
    entries.sort_unstable_by(|a, b| (a.cookie, &a.name).cmp(&(b.cookie, &b.name)));
    Ok(entries)
}
