//! What only version 4.2 has: copies on the server, holes (RFC 7862) and extended attributes (RFC 8276).

use bytes::Bytes;

use super::{
    compound::{ANONYMOUS, Answer, Compound, op},
    session::Session,
};
use crate::{
    Handle, Name,
    status::{Fault, Status},
};

/// As large as Linux lets a value be.
const LARGEST_VALUE: usize = 64 << 10;
const LONGEST_NAME: usize = 1024;
const DATA: u32 = 0;
const HOLE: u32 = 1;

impl Session {
    fn since_4_2(&self) -> Result<(), Fault> {
        if self.minor() < 2 { Err(Fault::Status(Status::NOT_SUPPORTED)) } else { Ok(()) }
    }

    /// One operation on one file.
    async fn single(&self, compound: Compound, number: u32) -> Result<Answer, Fault> {
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        answer.take(number)?;
        Ok(answer)
    }

    /// Makes both files share blocks; all or nothing.
    pub(crate) async fn clone_range(
        &self,
        from: &Handle,
        from_offset: u64,
        to: &Handle,
        to_offset: u64,
        length: u64,
    ) -> Result<(), Fault> {
        self.since_4_2()?;
        let mut compound = between(from, to);
        let arguments = compound.op(op::CLONE);
        arguments.fixed(&ANONYMOUS).fixed(&ANONYMOUS).u64(from_offset).u64(to_offset).u64(length);
        let mut answer = self.call(compound).await?;
        skip_between(&mut answer)?;
        answer.take(op::CLONE).map(drop)
    }

    /// Lets the server copy, and returns how much it did.
    pub(crate) async fn copy_range(
        &self,
        from: &Handle,
        from_offset: u64,
        to: &Handle,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Fault> {
        self.since_4_2()?;
        let mut compound = between(from, to);
        let arguments = compound.op(op::COPY);
        arguments.fixed(&ANONYMOUS).fixed(&ANONYMOUS).u64(from_offset).u64(to_offset).u64(length);
        // In order, and done when it is answered; from the same server.
        arguments.bool(true).bool(true).u32(0);
        let mut answer = self.call(compound).await?;
        skip_between(&mut answer)?;
        match answer.status_of(op::COPY)? {
            Status::OK => {}
            // It would only do so later, and call us back.
            Status::NO_ASYNC => return Err(Fault::Status(Status::NOT_SUPPORTED)),
            other => return Err(Fault::Status(other)),
        }
        let results = answer.rest();
        if results.count(16)? > 0 {
            return Err(Fault::Status(Status::NOT_SUPPORTED));
        }
        match results.u64()? {
            copied if copied > length => Err(Fault::Malformed("it copied more than was asked")),
            copied => Ok(copied),
        }
    }

    /// The next offset where data begins, or where it ends; `None` if there is none.
    async fn seek(&self, file: &Handle, offset: u64, what: u32) -> Result<Option<u64>, Fault> {
        self.since_4_2()?;
        let mut compound = Compound::on(file);
        compound.op(op::SEEK).fixed(&ANONYMOUS).u64(offset).u32(what);
        let mut answer = match self.single(compound, op::SEEK).await {
            Err(fault) if fault.is(Status::NXIO) => return Ok(None),
            other => other?,
        };
        let end = answer.rest().bool()?;
        let found = answer.rest().u64()?;
        if what == DATA && end {
            return Ok(None);
        }
        // Ganesha 4 answers 0 whatever it is asked.
        if found < offset {
            return Err(Fault::Status(Status::NOT_SUPPORTED));
        }
        Ok(Some(found))
    }

    pub(crate) async fn seek_data(&self, file: &Handle, offset: u64) -> Result<Option<u64>, Fault> {
        self.seek(file, offset, DATA).await
    }

    pub(crate) async fn seek_hole(&self, file: &Handle, offset: u64) -> Result<Option<u64>, Fault> {
        self.seek(file, offset, HOLE).await
    }

    pub(crate) async fn allocate(&self, file: &Handle, offset: u64, length: u64) -> Result<(), Fault> {
        self.since_4_2()?;
        let mut compound = Compound::on(file);
        compound.op(op::ALLOCATE).fixed(&ANONYMOUS).u64(offset).u64(length);
        self.single(compound, op::ALLOCATE).await.map(drop)
    }

    pub(crate) async fn xattrs(&self, file: &Handle) -> Result<Vec<Name>, Fault> {
        self.since_4_2()?;
        let mut names = Vec::new();
        let mut cookie = 0;
        loop {
            let mut compound = Compound::on(file);
            compound.op(op::LISTXATTRS).u64(cookie).u32(u32::try_from(LARGEST_VALUE).unwrap_or(u32::MAX));
            let mut answer = match self.single(compound, op::LISTXATTRS).await {
                // Some servers say so instead of listing nothing.
                Err(fault) if fault.is(Status::NO_XATTR) => return Ok(names),
                other => other?,
            };
            let results = answer.rest();
            let next = results.u64()?;
            for _ in 0..results.count(4)? {
                let name = results.opaque(LONGEST_NAME)?;
                names.push(
                    Name::from_bytes(Bytes::copy_from_slice(&name))
                        .map_err(|_| Fault::Malformed("an extended attribute has an impossible name"))?,
                );
            }
            if results.bool()? {
                return Ok(names);
            }
            if next == cookie || names.len() > LARGEST_VALUE {
                return Err(Fault::Malformed("the list of extended attributes has no end"));
            }
            cookie = next;
        }
    }

    pub(crate) async fn xattr(&self, file: &Handle, name: &Name) -> Result<Bytes, Fault> {
        self.since_4_2()?;
        let mut compound = Compound::on(file);
        compound.op(op::GETXATTR).opaque(name.as_bytes());
        let mut answer = self.single(compound, op::GETXATTR).await?;
        Ok(answer.rest().opaque(LARGEST_VALUE)?)
    }

    pub(crate) async fn set_xattr(&self, file: &Handle, name: &Name, value: Bytes) -> Result<(), Fault> {
        self.since_4_2()?;
        let mut compound = Compound::on(file);
        compound.op(op::SETXATTR).u32(0).opaque(name.as_bytes()).data(value);
        self.single(compound, op::SETXATTR).await.map(drop)
    }

    pub(crate) async fn remove_xattr(&self, file: &Handle, name: &Name) -> Result<(), Fault> {
        self.since_4_2()?;
        let mut compound = Compound::on(file);
        compound.op(op::REMOVEXATTR).opaque(name.as_bytes());
        self.single(compound, op::REMOVEXATTR).await.map(drop)
    }
}

/// Begins a request with a source and a destination.
fn between(from: &Handle, to: &Handle) -> Compound {
    let mut compound = Compound::on(from);
    compound.op(op::SAVEFH);
    compound.put(to);
    compound
}

fn skip_between(answer: &mut Answer) -> Result<(), Fault> {
    answer.take(op::PUTFH)?;
    answer.take(op::SAVEFH)?;
    answer.take(op::PUTFH).map(drop)
}
