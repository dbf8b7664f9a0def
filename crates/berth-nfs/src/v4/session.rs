//! What a server keeps for this client: a client id, and from version 4.1 on a session, on one connection.
//!
//! A session lives as long as its connection. When either is gone both are made anew, under a new name: the old one is
//! destroyed by its farewell or forgotten when its lease is over, and neither can get into the way of the new one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    runtime,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{
    compound::{Answer, Compound, op},
    open::Owner,
};
use crate::{
    rpc::{Connection, Credential, Idle, Pending, Procedure},
    status::Fault,
    xdr::Encoder,
};

const COMPOUND: Procedure = Procedure { program: 100_003, version: 4, number: 1 };

/// Calls a compound on a connection, with or without a session.
pub(super) async fn call(
    connection: &Connection,
    credential: Credential,
    minor: u32,
    compound: Compound,
) -> Result<Answer, Fault> {
    Answer::new(connection.call(COMPOUND, credential, compound.encode(minor, None)).await?)
}

/// What a server keeps for this client.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) connection: Arc<Connection>,
    pub(super) credential: Credential,
    pub(super) minor: u32,
    pub(super) client: u64,
    /// Version 4.0 has none.
    pub(super) slots: Option<Arc<Slots>>,
    /// Version 4.0: who opens files, between two uses.
    pub(super) owners: Mutex<Vec<Owner>>,
    pub(super) lost: Arc<AtomicBool>,
}

/// The places for requests in flight of a session.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) session: [u8; 16],
    pub(super) free: Mutex<Vec<Slot>>,
    pub(super) permits: Arc<Semaphore>,
    pub(super) highest: u32,
    pub(super) max_request: u32,
    pub(super) max_response: u32,
}

/// One place, and the number of the request that comes next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub(super) number: u32,
    pub(super) sequence: u32,
}

impl Session {
    pub(crate) fn minor(&self) -> u32 {
        self.minor
    }

    pub(crate) fn on_reserved_port(&self) -> bool {
        self.connection.on_reserved_port()
    }

    /// What fits into a request and into an answer beside their headers.
    pub(super) fn room(&self) -> (u64, u64) {
        const HEADERS: u32 = 2048;
        match &self.slots {
            None => (u64::MAX, u64::MAX),
            Some(slots) => (
                slots.max_request.saturating_sub(HEADERS).into(),
                slots.max_response.saturating_sub(HEADERS).into(),
            ),
        }
    }

    /// The server forgot this client or session: the next who needs one makes another.
    pub(crate) fn lose(&self) {
        lose(&self.lost, self.slots.as_deref());
    }

    /// Sends a request and waits for its answer.
    pub(super) async fn call(&self, compound: Compound) -> Result<Answer, Fault> {
        match &self.slots {
            None => call(&self.connection, self.credential, self.minor, compound).await,
            Some(slots) => self.call_in(slots, compound).await,
        }
    }

    async fn call_in(&self, slots: &Arc<Slots>, compound: Compound) -> Result<Answer, Fault> {
        let waited = self.connection.timeout();
        // Closed when the session is lost, before anything was sent.
        let permit = timeout(waited, slots.permits.clone().acquire_owned())
            .await
            .map_err(|_| Fault::Silent(waited))?
            .map_err(|_| Fault::Closed)?;
        let slot = slots.free().pop().ok_or(Fault::Closed)?;
        let mut flight = Flight {
            slots: slots.clone(),
            slot: Some((slot, permit)),
            lost: self.lost.clone(),
            pending: None,
            connection: self.connection.clone(),
            is_abandoned: false,
        };
        let mut sequence = Encoder::default();
        sequence.u32(op::SEQUENCE).fixed(&slots.session).u32(slot.sequence).u32(slot.number);
        sequence.u32(slots.highest).bool(false);
        let message = compound.encode(self.minor, Some(sequence));
        flight.pending = match self.connection.start(COMPOUND, self.credential, message).await {
            Ok(pending) => Some(pending),
            Err(fault) => {
                flight.land(false);
                return Err(fault);
            }
        };
        flight.answer().await
    }
}

/// Nobody shall use this session any more, nor wait for a slot of it.
fn lose(lost: &AtomicBool, slots: Option<&Slots>) {
    lost.store(true, Ordering::Relaxed);
    if let Some(slots) = slots {
        slots.permits.close();
    }
}

impl Slots {
    fn free(&self) -> parking_lot::MutexGuard<'_, Vec<Slot>> {
        self.free.lock()
    }
}

/// A request in its slot. The slot is free again when the answer is there, whether or not anybody still wants it.
#[derive(Debug)]
struct Flight {
    slots: Arc<Slots>,
    slot: Option<(Slot, OwnedSemaphorePermit)>,
    lost: Arc<AtomicBool>,
    pending: Option<Pending>,
    /// Kept, so that the answer can still come when the session itself is dropped.
    connection: Arc<Connection>,
    /// Nobody wants the answer any more: it is waited for in the background.
    is_abandoned: bool,
}

impl Flight {
    async fn answer(&mut self) -> Result<Answer, Fault> {
        let Some(pending) = &mut self.pending else { return Err(Fault::Malformed("nothing was asked")) };
        let results = pending.results().await;
        self.pending = None;
        let opened = results.and_then(Answer::new).and_then(|mut answer| {
            let sequence = answer.take(op::SEQUENCE)?;
            // Session, sequence and slot were ours to choose, and the rest is advice.
            sequence.fixed::<16>()?;
            for _ in 0..5 {
                sequence.u32()?;
            }
            Ok(answer)
        });
        match &opened {
            Ok(_) => self.land(true),
            Err(Fault::Status(status)) if status.later() => self.land(false),
            // What the server knows of this slot is unknown, or that it knows nothing of us.
            Err(_) => {
                lose(&self.lost, Some(&self.slots));
                self.slot = None;
            }
        }
        opened
    }

    /// Frees the slot for the next request.
    fn land(&mut self, used: bool) {
        if let Some((mut slot, permit)) = self.slot.take() {
            slot.sequence = slot.sequence.wrapping_add(used.into());
            self.slots.free().push(slot);
            drop(permit);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let Some(pending) = self.pending.take() else {
            // Nothing was sent, unless the slot is free already or lost: its number is still to be used.
            return self.land(false);
        };
        let mut rest = Self {
            slots: self.slots.clone(),
            slot: self.slot.take(),
            lost: self.lost.clone(),
            pending: Some(pending),
            connection: self.connection.clone(),
            is_abandoned: true,
        };
        // Once only: a runtime that is ending drops at once what it is given, and that would come here again.
        if let Ok(runtime) = runtime::Handle::try_current()
            && !self.is_abandoned
        {
            runtime.spawn(async move { rest.answer().await.map(drop) });
        } else {
            lose(&self.lost, Some(&self.slots));
            (rest.pending, rest.slot) = (None, None);
        }
    }
}

impl Idle for Session {
    fn is_alive(&self) -> bool {
        self.connection.is_alive() && !self.lost.load(Ordering::Relaxed)
    }

    fn idle_for(&self) -> Duration {
        self.connection.idle_for()
    }
}

impl Drop for Session {
    /// Says good-bye, if there is still somebody to hear it.
    fn drop(&mut self) {
        let (Some(slots), Ok(runtime)) = (&self.slots, runtime::Handle::try_current()) else { return };
        if !self.is_alive() {
            return;
        }
        let (connection, credential, minor) = (self.connection.clone(), self.credential, self.minor);
        let (session, client) = (slots.session, self.client);
        runtime.spawn(async move {
            let mut farewell = Compound::default();
            farewell.op(op::DESTROY_SESSION).fixed(&session);
            call(&connection, credential, minor, farewell).await?.take(op::DESTROY_SESSION)?;
            let mut farewell = Compound::default();
            farewell.op(op::DESTROY_CLIENTID).u64(client);
            call(&connection, credential, minor, farewell).await?.take(op::DESTROY_CLIENTID)?;
            Ok::<(), Fault>(())
        });
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::net::TcpListener;

    use super::*;
    use crate::rpc::{Endpoint, Groups};

    #[tokio::test]
    async fn a_request_that_is_dropped_before_it_is_sent_gives_its_slot_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint {
            host: "127.0.0.1".to_owned(),
            port: listener.local_addr().unwrap().port(),
            reserved: Some(false),
            timeout: Duration::from_secs(20),
        };
        let connection =
            Arc::new(Connection::open(&endpoint, &crate::metrics::Meter::default()).await.unwrap());
        let credential = Credential { uid: 0, gid: 0, groups: Groups::new(&[]) };
        let slots = Arc::new(Slots {
            session: [0; 16],
            free: Mutex::new(vec![Slot { number: 0, sequence: 7 }]),
            permits: Arc::new(Semaphore::new(1)),
            highest: 0,
            max_request: 4096,
            max_response: 4096,
        });
        let session = Session {
            connection: connection.clone(),
            credential,
            minor: 1,
            client: 0,
            slots: Some(slots.clone()),
            owners: Mutex::default(),
            lost: Arc::default(),
        };
        // Whoever sends has no turn before something is awaited, so that the queue becomes full.
        let mut waiting = Vec::new();
        while let Some(sent) =
            connection.start(COMPOUND, credential, Compound::default().encode(1, None)).now_or_never()
        {
            waiting.push(sent.unwrap());
        }
        assert!(session.call(Compound::default()).now_or_never().is_none());
        assert_eq!(slots.permits.available_permits(), 1);
        let free: Vec<_> = slots.free().iter().map(|slot| (slot.number, slot.sequence)).collect();
        assert_eq!(free, [(0, 7)]);
        assert!(session.is_alive());
    }
}
