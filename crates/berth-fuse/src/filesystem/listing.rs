//! Directories, listed page by page.

use std::sync::Arc;

use berth_nfs::{Attributes, Cookie, Entry, FileKind, Handle, Name, access};
use rustix::io::Errno;

use super::{Filesystem, Outcome, Result, validity};
use crate::{
    nodes::Node,
    users::User,
    wire::{Arguments, Header, listed_size},
};

/// The size of `fuse_entry_out`, which precedes a name if more than the name is wanted.
const ENTRY: usize = 128;

/// A directory that somebody lists: all that was read so far, so that a place in it is a number.
#[derive(Debug)]
pub(crate) struct Listing {
    node: Arc<Node>,
    user: Arc<User>,
    read: Vec<Listed>,
    /// Where the next page begins; `None` at the end.
    next: Option<Cookie>,
}

#[derive(Debug)]
struct Listed {
    name: Name,
    ino: u64,
    kind: FileKind,
    /// Told to the kernel once, and then not kept any longer.
    more: Option<Box<(Handle, Attributes)>>,
}

impl Filesystem {
    pub(super) async fn open_dir(&self, header: &Header) -> Result<Outcome> {
        let (node, user) = self.about(header)?;
        let granted = self.patience.ask(|| user.share.access(&node.handle, access::READ)).await?;
        if granted == 0 {
            return Err(Errno::ACCESS);
        }
        let listing = Listing { node, user, read: Vec::new(), next: Some(Cookie::default()) };
        let number = self.number();
        self.listings.lock().insert(number, Arc::new(tokio::sync::Mutex::new(listing)));
        let mut outcome = Outcome::default();
        outcome.body.opened(number);
        Ok(outcome)
    }

    pub(super) fn release_dir(&self, from: &mut Arguments) -> Result<Outcome> {
        self.listings.lock().remove(&from.u64()?);
        Ok(Outcome::default())
    }

    pub(super) async fn read_dir(
        &self,
        header: &Header,
        from: &mut Arguments,
        more: bool,
    ) -> Result<Outcome> {
        let number = from.u64()?;
        let (place, room) = (from.u64()?, from.u32()? as usize);
        let listing = self.listings.lock().get(&number).cloned().ok_or(Errno::BADF)?;
        let mut listing = listing.lock().await;
        if place == 0 && !listing.read.is_empty() {
            // Whoever begins again wants to see what is new.
            listing.read.clear();
            listing.next = Some(Cookie::default());
        }
        let first = usize::try_from(place).map_err(|_| Errno::INVAL)?;
        while first.saturating_sub(2) >= listing.read.len() && listing.next.is_some() {
            self.read_page(&mut listing).await?;
        }
        Ok(self.fill(header.node, &mut listing, first, room, more))
    }

    async fn read_page(&self, listing: &mut Listing) -> Result<()> {
        let Some(cookie) = listing.next else { return Ok(()) };
        let (share, dir) = (&listing.user.share, &listing.node.handle);
        let page = self.patience.ask(|| share.read_dir(dir, cookie)).await?;
        listing.next = page.next;
        listing.read.extend(page.entries.into_iter().map(|entry| Listed {
            name: entry.name,
            ino: entry.attributes.fileid,
            kind: entry.attributes.kind,
            more: Some(Box::new((entry.handle, entry.attributes))),
        }));
        Ok(())
    }

    fn fill(&self, own: u64, listing: &mut Listing, first: usize, room: usize, more: bool) -> Outcome {
        let mut outcome = Outcome::default();
        let extra = if more { ENTRY } else { 0 };
        let node = listing.node.clone();
        for place in first.. {
            let next = place as u64 + 1;
            let (name, ino, kind, known) = match place {
                0 => (&b"."[..], own, FileKind::Directory, None),
                1 => (&b".."[..], own, FileKind::Directory, None),
                _ => match listing.read.get_mut(place - 2) {
                    Some(listed) => (listed.name.as_bytes(), listed.ino, listed.kind, Some(&mut listed.more)),
                    None => break,
                },
            };
            if outcome.body.len() + extra + listed_size(name.len()) > room {
                break;
            }
            if more {
                match known.and_then(Option::take) {
                    Some(found) => {
                        let (handle, attributes) = *found;
                        let entry = Entry { handle, attributes };
                        let counted = self.nodes.count(&entry);
                        outcome.body.entry(counted.id, &entry.attributes, validity(&node));
                        outcome.counted.push(counted.id);
                    }
                    None => drop(outcome.body.no_entry()),
                }
            } else if let Some(known) = known {
                *known = None;
            }
            outcome.body.listed(ino, next, kind, name);
        }
        outcome
    }
}
