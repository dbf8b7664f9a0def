//! Durable writes, many callers to one fsync.
//!
//! One thread owns the journal. It takes whatever callers have queued, writes it in one go, syncs once, and wakes
//! them all; callers that arrive meanwhile form the next batch, so throughput grows with load while each caller
//! waits for at most two syncs.

use std::sync::mpsc;

use tokio::sync::oneshot;

use super::{Entry, Error, Journal};

/// Whether other files must reach the disk before a record that speaks of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barrier {
    /// The record stands alone.
    None,
    /// The data directories are synced first.
    Data,
}

struct Request {
    key: String,
    /// `None` removes the key.
    json: Option<Vec<u8>>,
    barrier: Barrier,
    done: oneshot::Sender<Result<(), Error>>,
}

/// A journal whose writes are durable when they return.
#[derive(Debug)]
pub struct GroupCommit {
    requests: mpsc::Sender<Request>,
}

impl GroupCommit {
    /// Takes the journal over. `sync_data` makes the data that records speak of durable.
    pub fn start(
        journal: Journal,
        sync_data: impl Fn() -> berth_host::Result<()> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (requests, queue) = mpsc::channel();
        std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || run(journal, &queue, &sync_data))?;
        Ok(Self { requests })
    }

    /// Records `json` under `key`, durably.
    pub async fn put(&self, key: String, json: Vec<u8>, barrier: Barrier) -> Result<(), Error> {
        self.request(key, Some(json), barrier).await
    }

    /// Forgets `key`, durably.
    pub async fn remove(&self, key: String) -> Result<(), Error> {
        self.request(key, None, Barrier::None).await
    }

    async fn request(&self, key: String, json: Option<Vec<u8>>, barrier: Barrier) -> Result<(), Error> {
        let (done, answer) = oneshot::channel();
        let gone = || Error::Broken("the journal's thread is gone".to_owned());
        self.requests.send(Request { key, json, barrier, done }).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

fn run(
    mut journal: Journal,
    queue: &mpsc::Receiver<Request>,
    sync_data: &dyn Fn() -> berth_host::Result<()>,
) {
    let mut batch = Vec::new();
    while let Ok(first) = queue.recv() {
        batch.push(first);
        batch.extend(queue.try_iter());
        let outcome = commit(&mut journal, &batch, sync_data);
        for request in batch.drain(..) {
            // A caller that is gone has nothing to be told; its change is done all the same.
            let _ = request.done.send(outcome.clone());
        }
    }
}

fn commit(
    journal: &mut Journal,
    batch: &[Request],
    sync_data: &dyn Fn() -> berth_host::Result<()>,
) -> Result<(), Error> {
    if batch.iter().any(|request| request.barrier == Barrier::Data) {
        sync_data().map_err(|error| Error::Broken(error.sentence()))?;
    }
    let entries: Vec<Entry<'_>> = batch
        .iter()
        .map(|request| match &request.json {
            Some(json) => Entry::Put { key: &request.key, json },
            None => Entry::Remove { key: &request.key },
        })
        .collect();
    journal.write(&entries)?;
    journal.sync()
}
