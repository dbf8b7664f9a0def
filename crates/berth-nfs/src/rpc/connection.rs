//! One TCP connection: many calls in flight, distinguished by xid.
//!
//! Two tasks own the socket, so a call that is dropped leaves neither half a request nor an answer in the way: its xid
//! is forgotten, and the answer is dropped when it comes.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::{
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
    sync::{mpsc, oneshot},
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::{
    Credential, Endpoint, Idle, Procedure,
    dial::random,
    message::{request, results},
    record,
};
use crate::{
    metrics::Meter,
    status::Fault,
    xdr::{Decoder, Encoder},
};

/// Requests that wait to be sent, beyond which callers wait.
const QUEUE: usize = 64;
/// A server that sends something, though not our answer, gets so many timeouts.
const MOST_TIMEOUTS: u32 = 6;
/// How long what has arrived may take to be read.
const READ_TIMEOUT: Duration = Duration::from_millis(50);

/// A connection to one service of a server.
#[derive(Debug)]
pub(crate) struct Connection {
    shared: Arc<Shared>,
    queue: mpsc::Sender<Vec<Bytes>>,
    tasks: [JoinHandle<()>; 2],
    timeout: Duration,
    reserved_port: bool,
}

#[derive(Debug)]
struct Shared {
    calls: Mutex<Calls>,
    meter: Meter,
    /// How often something came, and how often it completed an answer.
    received: AtomicU64,
    answers: AtomicU64,
}

#[derive(Debug)]
struct Calls {
    waiting: HashMap<u32, oneshot::Sender<Bytes>>,
    next_xid: u32,
    broken: Option<Fault>,
    used: Instant,
}

impl Shared {
    fn calls(&self) -> parking_lot::MutexGuard<'_, Calls> {
        self.calls.lock()
    }

    /// Ends every call with this fault; the first reason counts.
    fn give_up(&self, fault: Fault) {
        let mut calls = self.calls();
        calls.broken.get_or_insert(fault);
        calls.waiting.clear();
    }
}

impl Connection {
    pub(crate) async fn open(endpoint: &Endpoint, meter: &Meter) -> Result<Self, Fault> {
        let (stream, reserved_port) = endpoint.dial().await.inspect_err(|_| meter.unanswered())?;
        meter.connected();
        let (read, write) = stream.into_split();
        let calls = Calls {
            waiting: HashMap::new(),
            next_xid: u32::try_from(random() >> 32).expect("half of 64 bits are 32"),
            broken: None,
            used: Instant::now(),
        };
        let shared = Arc::new(Shared {
            calls: Mutex::new(calls),
            meter: meter.clone(),
            received: AtomicU64::new(0),
            answers: AtomicU64::new(0),
        });
        let (queue, requests) = mpsc::channel(QUEUE);
        let tasks = [
            tokio::spawn(receive(read, shared.clone())),
            tokio::spawn(send(write, requests, shared.clone())),
        ];
        Ok(Self { shared, queue, tasks, timeout: endpoint.timeout, reserved_port })
    }

    /// Whether the server sees us on a port below 1024.
    pub(crate) fn on_reserved_port(&self) -> bool {
        self.reserved_port
    }

    /// How long the server may be silent.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Calls a procedure and waits for its results.
    pub(crate) async fn call(
        &self,
        procedure: Procedure,
        credential: Credential,
        arguments: Encoder,
    ) -> Result<Decoder, Fault> {
        self.start(procedure, credential, arguments).await?.results().await
    }

    /// Sends a call; its results can be waited for later.
    pub(crate) async fn start(
        &self,
        procedure: Procedure,
        credential: Credential,
        arguments: Encoder,
    ) -> Result<Pending, Fault> {
        let room = match timeout(self.timeout, self.queue.reserve()).await {
            Ok(Ok(room)) => room,
            Ok(Err(_)) => return Err(Fault::Closed),
            Err(_) => {
                self.shared.give_up(Fault::Silent(self.timeout));
                return Err(Fault::Silent(self.timeout));
            }
        };
        let (sender, answer) = oneshot::channel();
        let xid = {
            let mut calls = self.shared.calls();
            if calls.broken.is_some() {
                return Err(Fault::Closed);
            }
            let xid = calls.next_xid;
            calls.next_xid = xid.wrapping_add(1);
            calls.waiting.insert(xid, sender);
            calls.used = Instant::now();
            xid
        };
        let message = request(xid, procedure, credential, arguments);
        room.send(record::framed(message));
        let (shared, begun) = (self.shared.clone(), Instant::now());
        Ok(Pending { shared, xid, answer, timeout: self.timeout, begun })
    }
}

impl Idle for Connection {
    fn is_alive(&self) -> bool {
        self.shared.calls().broken.is_none()
    }

    fn idle_for(&self) -> Duration {
        let calls = self.shared.calls();
        if calls.waiting.is_empty() { calls.used.elapsed() } else { Duration::ZERO }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.meter.disconnected();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// A call that was sent; dropping it forgets its answer.
#[derive(Debug)]
pub(crate) struct Pending {
    shared: Arc<Shared>,
    xid: u32,
    answer: oneshot::Receiver<Bytes>,
    timeout: Duration,
    begun: Instant,
}

impl Pending {
    /// Waits for the results. May be called again when a previous wait was dropped.
    pub(crate) async fn results(&mut self) -> Result<Decoder, Fault> {
        let answers = self.shared.answers.load(Ordering::Relaxed);
        for round in 1..=MOST_TIMEOUTS {
            let before = self.shared.received.load(Ordering::Relaxed);
            let mut answer = timeout(self.timeout, &mut self.answer).await;
            if answer.is_err() && self.shared.received.load(Ordering::Relaxed) == before {
                // This process itself may have stood still, with the answer here: whoever reads it has a turn first.
                answer = timeout(READ_TIMEOUT, &mut self.answer).await;
            }
            match answer {
                Ok(Ok(answer)) => {
                    self.shared.meter.answered(self.begun.elapsed());
                    return results(Decoder::new(answer));
                }
                Ok(Err(_)) => {
                    let broken = self.shared.calls().broken.clone();
                    return Err(broken.unwrap_or_else(|| Fault::Broken("it was closed".to_owned())));
                }
                Err(_) if self.shared.received.load(Ordering::Relaxed) == before => {
                    self.shared.meter.unanswered();
                    let silent = Fault::Silent(self.timeout * round);
                    self.shared.give_up(silent.clone());
                    return Err(silent);
                }
                Err(_) => {}
            }
        }
        self.shared.meter.unanswered();
        let silent = Fault::Silent(self.timeout * MOST_TIMEOUTS);
        // All this time one answer was on its way, and more would wait behind it.
        if self.shared.answers.load(Ordering::Relaxed) == answers {
            self.shared.give_up(silent.clone());
        }
        Err(silent)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.shared.calls().waiting.remove(&self.xid);
    }
}

async fn send(mut socket: OwnedWriteHalf, mut requests: mpsc::Receiver<Vec<Bytes>>, shared: Arc<Shared>) {
    let mut batch = Vec::new();
    while requests.recv_many(&mut batch, QUEUE).await > 0 {
        if let Err(error) = record::send(&mut socket, batch.drain(..).flatten()).await {
            return shared.give_up(Fault::Broken(error.to_string()));
        }
    }
}

async fn receive(mut socket: OwnedReadHalf, shared: Arc<Shared>) {
    let mut buffer = BytesMut::new();
    loop {
        let arrived = || {
            shared.received.fetch_add(1, Ordering::Relaxed);
        };
        let mut record = match record::receive(&mut socket, &mut buffer, arrived).await {
            Ok(record) => record,
            Err(failure) => return shared.give_up(failure.into()),
        };
        shared.answers.fetch_add(1, Ordering::Relaxed);
        let Ok(xid) = record.try_get_u32() else {
            return shared.give_up(Fault::Malformed("a record is too short for an answer"));
        };
        // Nobody waits for the answers of dropped calls, nor for calls in our direction.
        let waiting = shared.calls().waiting.remove(&xid);
        if let Some(waiting) = waiting {
            let _ = waiting.send(record);
        }
    }
}
