//! Creating files, which version 4 does by opening them; they are closed at once.

use super::{
    attributes::{Bitmap, write_change},
    compound::{Answer, Compound, op},
    session::Session,
};
use crate::{Change, Create, Entry, Handle, rpc::random, status::Fault, xdr::Decoder};

const WRITE: u32 = 2;
const WANT_NO_DELEGATION: u32 = 0x400;
const MUST_CONFIRM: u32 = 2;
const NO_DELEGATION: u32 = 0;
const NO_DELEGATION_BECAUSE: u32 = 3;
/// Owners that are kept for their next file.
const MOST_OWNERS: usize = 64;

/// What an earlier operation of the same request opened.
const CURRENT: [u8; 16] = [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Version 4.0 numbers the requests of everybody who opens, so each is used by one at a time; one whose request
/// failed or was dropped is forgotten.
#[derive(Debug)]
pub(super) struct Owner {
    name: u64,
    sequence: u32,
}

impl Owner {
    fn next(&mut self) -> u32 {
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        sequence
    }
}

impl Session {
    pub(crate) async fn create(
        &self,
        dir: &Handle,
        name: &[u8],
        how: Create,
        change: &Change,
    ) -> Result<Entry, Fault> {
        let change = Change { size: Some(change.size.unwrap_or(0)), ..change.clone() };
        if self.minor() == 0 {
            return self.create_as_owner(dir, name, how, &change).await;
        }
        let mut compound = Compound::on(dir);
        self.write_open(&mut compound, &mut Owner { name: 0, sequence: 0 }, name, how, &change);
        compound.op(op::CLOSE).u32(0).fixed(&CURRENT);
        compound.get_entry();
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        read_open(&mut answer)?;
        answer.take(op::CLOSE)?.fixed::<16>()?;
        answer.entry()
    }

    fn write_open(&self, to: &mut Compound, owner: &mut Owner, name: &[u8], how: Create, change: &Change) {
        let wish = if self.minor() == 0 { 0 } else { WANT_NO_DELEGATION };
        let arguments = to.op(op::OPEN);
        arguments.u32(owner.next()).u32(WRITE | wish).u32(0);
        arguments.u64(self.client).opaque(&owner.name.to_be_bytes());
        arguments.u32(1).u32(match how {
            Create::Truncate => 0,
            Create::New => 1,
        });
        write_change(arguments, change);
        arguments.u32(0).opaque(name);
    }

    async fn create_as_owner(
        &self,
        dir: &Handle,
        name: &[u8],
        how: Create,
        change: &Change,
    ) -> Result<Entry, Fault> {
        let kept = self.owners.lock().pop();
        let mut owner = kept.unwrap_or_else(|| Owner { name: random(), sequence: 1 });
        let mut compound = Compound::on(dir);
        self.write_open(&mut compound, &mut owner, name, how, change);
        compound.get_entry();
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        let mut opened = read_open(&mut answer)?;
        let entry = answer.entry()?;
        if opened.must_confirm {
            let mut compound = Compound::on(&entry.handle);
            compound.op(op::OPEN_CONFIRM).fixed(&opened.state).u32(owner.next());
            let mut answer = self.call(compound).await?;
            answer.take(op::PUTFH)?;
            opened.state = answer.take(op::OPEN_CONFIRM)?.fixed()?;
        }
        let mut compound = Compound::on(&entry.handle);
        compound.op(op::CLOSE).u32(owner.next()).fixed(&opened.state);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        answer.take(op::CLOSE)?;
        let mut owners = self.owners.lock();
        if owners.len() < MOST_OWNERS {
            owners.push(owner);
        }
        Ok(entry)
    }
}

struct Opened {
    state: [u8; 16],
    must_confirm: bool,
}

fn read_open(answer: &mut Answer) -> Result<Opened, Fault> {
    let results = answer.take(op::OPEN)?;
    let state = results.fixed()?;
    skip_change(results)?;
    let flags = results.u32()?;
    Bitmap::read(results)?;
    match results.u32()? {
        NO_DELEGATION => {}
        NO_DELEGATION_BECAUSE => {
            // Whether contention or a shortage of resources will end is in the answer.
            if matches!(results.u32()?, 1 | 2) {
                results.bool()?;
            }
        }
        _ => return Err(Fault::Malformed("it delegates a file though nobody asked for it")),
    }
    Ok(Opened { state, must_confirm: flags & MUST_CONFIRM != 0 })
}

/// Passes over a `change_info4` of an answer.
pub(super) fn skip_change(from: &mut Decoder) -> Result<(), Fault> {
    from.bool()?;
    from.u64()?;
    from.u64()?;
    Ok(())
}
