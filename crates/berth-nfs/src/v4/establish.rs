//! Introducing ourselves to a server.

use std::sync::{Arc, atomic::AtomicBool};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::{
    compound::{Compound, op},
    session::{Session, Slot, Slots, call},
};
use crate::{
    metrics::Meter,
    rpc::{Connection, Credential, Endpoint, random},
    status::{Fault, Status},
    xdr::{Decoder, Encoder},
};

/// Requests in flight that we ask for.
const MOST_SLOTS: u32 = 64;
const MOST_OPERATIONS: u32 = 16;
/// A megabyte of data, and what is around it.
const LARGEST: u32 = (1 << 20) + (8 << 10);
const LARGEST_CACHED: u32 = 4096;
const LONGEST_OPAQUE: usize = 1024;
/// No callbacks reach us, so servers lend us nothing that they would have to call back.
const CALLBACK_PROGRAM: u32 = 0x4000_0000;
const COMPLETE_ALREADY: Status = Status(10054);

impl Session {
    /// Connects and introduces us; `name` is ours alone.
    pub(crate) async fn open(
        endpoint: &Endpoint,
        credential: Credential,
        minor: u32,
        name: &str,
        meter: &Meter,
    ) -> Result<Self, Fault> {
        let connection = Arc::new(Connection::open(endpoint, meter).await?);
        let mut session = Self {
            connection,
            credential,
            minor,
            client: 0,
            slots: None,
            owners: Mutex::default(),
            lost: Arc::new(AtomicBool::new(false)),
        };
        if minor == 0 {
            session.set_client_id(name).await?;
        } else {
            let sequence = session.exchange_id(name).await?;
            session.create_session(sequence).await?;
            session.reclaim_nothing().await?;
        }
        Ok(session)
    }

    async fn set_client_id(&mut self, name: &str) -> Result<(), Fault> {
        let mut introduction = Compound::default();
        let arguments = introduction.op(op::SETCLIENTID);
        arguments.u64(random()).opaque(name.as_bytes());
        arguments.u32(CALLBACK_PROGRAM).opaque(b"tcp").opaque(b"0.0.0.0.0.0").u32(0);
        let mut answer = self.call(introduction).await?;
        let results = answer.take(op::SETCLIENTID)?;
        self.client = results.u64()?;
        let verifier: [u8; 8] = results.fixed()?;
        let mut confirmation = Compound::default();
        confirmation.op(op::SETCLIENTID_CONFIRM).u64(self.client).fixed(&verifier);
        self.call(confirmation).await?.take(op::SETCLIENTID_CONFIRM)?;
        Ok(())
    }

    /// Returns the number that the first session begins with.
    async fn exchange_id(&mut self, name: &str) -> Result<u32, Fault> {
        let mut introduction = Compound::default();
        introduction.op(op::EXCHANGE_ID).u64(random()).opaque(name.as_bytes()).u32(0).u32(0).u32(0);
        let mut answer = call(&self.connection, self.credential, self.minor, introduction).await?;
        let results = answer.take(op::EXCHANGE_ID)?;
        self.client = results.u64()?;
        let sequence = results.u32()?;
        results.u32()?;
        if results.u32()? != 0 {
            return Err(Fault::Malformed("it protects state though nobody asked for it"));
        }
        results.u64()?;
        results.opaque(LONGEST_OPAQUE)?;
        results.opaque(LONGEST_OPAQUE)?;
        Ok(sequence)
    }

    async fn create_session(&mut self, sequence: u32) -> Result<(), Fault> {
        let mut request = Compound::default();
        let arguments = request.op(op::CREATE_SESSION);
        arguments.u64(self.client).u32(sequence).u32(0);
        write_channel(arguments, LARGEST, MOST_SLOTS);
        write_channel(arguments, 4096, 1);
        arguments.u32(CALLBACK_PROGRAM).u32(1).u32(0);
        let mut answer = call(&self.connection, self.credential, self.minor, request).await?;
        let results = answer.take(op::CREATE_SESSION)?;
        let session = results.fixed()?;
        results.u32()?;
        results.u32()?;
        let (max_request, max_response, slots) = read_channel(results)?;
        let count = slots.clamp(1, MOST_SLOTS);
        self.slots = Some(Arc::new(Slots {
            session,
            free: Mutex::new((0..count).rev().map(|number| Slot { number, sequence: 1 }).collect()),
            permits: Arc::new(Semaphore::new(count as usize)),
            highest: count - 1,
            max_request,
            max_response,
        }));
        Ok(())
    }

    /// Tells the server that we have nothing from before its restart, so that it lets us create files.
    async fn reclaim_nothing(&self) -> Result<(), Fault> {
        let mut request = Compound::default();
        request.op(op::RECLAIM_COMPLETE).bool(false);
        match self.call(request).await?.take(op::RECLAIM_COMPLETE).map(drop) {
            Err(fault) if fault.is(COMPLETE_ALREADY) => Ok(()),
            other => other,
        }
    }
}

/// Writes what a channel shall carry, a `channel_attrs4`.
fn write_channel(to: &mut Encoder, largest: u32, slots: u32) {
    to.u32(0).u32(largest).u32(largest).u32(LARGEST_CACHED).u32(MOST_OPERATIONS).u32(slots).u32(0);
}

/// Largest request, largest answer, number of slots.
fn read_channel(from: &mut Decoder) -> Result<(u32, u32, u32), Fault> {
    from.u32()?;
    let (request, response) = (from.u32()?, from.u32()?);
    from.u32()?;
    from.u32()?;
    let slots = from.u32()?;
    for _ in 0..from.count(4)? {
        from.u32()?;
    }
    Ok((request.min(LARGEST), response.min(LARGEST), slots))
}
