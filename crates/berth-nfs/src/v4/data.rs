//! Reads and writes the data of files by NFS 4.

use bytes::Bytes;

use super::{
    compound::{ANONYMOUS, Compound, op},
    session::Session,
};
use crate::{Handle, share::Written, status::Fault};

impl Session {
    pub(crate) async fn read(&self, file: &Handle, offset: u64, length: u32) -> Result<(Bytes, bool), Fault> {
        let mut compound = Compound::on(file);
        compound.op(op::READ).fixed(&ANONYMOUS).u64(offset).u32(length);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        let results = answer.take(op::READ)?;
        let end = results.bool()?;
        Ok((results.opaque(length as usize)?, end))
    }

    pub(crate) async fn write(
        &self,
        file: &Handle,
        offset: u64,
        data: Bytes,
        durable: bool,
    ) -> Result<Written, Fault> {
        let mut compound = Compound::on(file);
        let length = data.len();
        let arguments = compound.op(op::WRITE);
        arguments.fixed(&ANONYMOUS).u64(offset).u32(if durable { 2 } else { 0 }).data(data);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        Written::read(answer.take(op::WRITE)?, length)
    }

    pub(crate) async fn commit(&self, file: &Handle) -> Result<[u8; 8], Fault> {
        let mut compound = Compound::on(file);
        compound.op(op::COMMIT).u64(0).u32(0);
        let mut answer = self.call(compound).await?;
        answer.take(op::PUTFH)?;
        Ok(answer.take(op::COMMIT)?.fixed()?)
    }
}
