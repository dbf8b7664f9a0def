//! Durable writes, many callers to one fsync.
//!
//! One thread owns the journal. It takes whatever callers have queued, writes it in one go, syncs once, and wakes
//! them all; callers that arrive meanwhile form the next batch, so throughput grows with load while each caller
//! waits for at most two syncs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use berth_host::path::Dir;
use tokio::sync::oneshot;

use super::{Entry, Error, Journal};

/// What must reach the disk before a record that speaks of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Barrier {
    /// The record stands alone.
    None,
    /// The entries of this one of the directories given to [`GroupCommit::start`].
    Directory(usize),
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
    /// Always there, until it is dropped.
    requests: Option<mpsc::Sender<Request>>,
    commits: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// Whoever opens the journal next finds nobody who still closes it.
impl Drop for GroupCommit {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl GroupCommit {
    /// Takes the journal over. In `directories` lie the data that records speak of.
    pub fn start(journal: Journal, directories: Vec<Dir>) -> std::io::Result<Self> {
        let (requests, queue) = mpsc::channel();
        let commits = Arc::new(AtomicU64::new(0));
        let counted = commits.clone();
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || run(journal, &queue, &directories, &counted))?;
        Ok(Self { requests: Some(requests), commits, thread: Some(thread) })
    }

    /// How often the journal was synced so far, whatever the number of callers.
    pub fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Records `json` under `key`, durably.
    pub async fn put(&self, key: String, json: Vec<u8>, barrier: Barrier) -> Result<(), Error> {
        self.request(key, Some(json), barrier).await
    }

    /// Removes `key`; a power cut after the return does not bring it back.
    pub async fn remove(&self, key: String) -> Result<(), Error> {
        self.request(key, None, Barrier::None).await
    }

    async fn request(&self, key: String, json: Option<Vec<u8>>, barrier: Barrier) -> Result<(), Error> {
        let (done, answer) = oneshot::channel();
        let gone = || Error::Broken("the journal's thread is gone".to_owned());
        let requests = self.requests.as_ref().ok_or_else(gone)?;
        requests.send(Request { key, json, barrier, done }).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

fn run(mut journal: Journal, queue: &mpsc::Receiver<Request>, directories: &[Dir], commits: &AtomicU64) {
    let mut batch = Vec::new();
    let mut released = 0;
    let mut took = Duration::ZERO;
    while let Ok(first) = queue.recv() {
        batch.push(first);
        batch.extend(queue.try_iter());
        // Those just released mostly come right back. Half a sync of patience for them saves them a whole one; a
        // caller who is alone is never kept waiting.
        if batch.len() + released > 2 {
            gather(queue, &mut batch, released, took / 2);
        }
        let start = Instant::now();
        let mut outcome = commit(&mut journal, &batch, directories);
        released = batch.len();
        if matches!(outcome, Err(Error::Full(_))) {
            // What empties the disk must not fail with what fills it.
            let (puts, removals) = batch.drain(..).partition(|request: &Request| request.json.is_some());
            let puts: Vec<Request> = puts;
            answer(puts, &outcome);
            batch = removals;
            outcome = commit(&mut journal, &batch, directories);
        }
        took = start.elapsed();
        commits.fetch_add(1, Ordering::Relaxed);
        answer(batch.drain(..), &outcome);
    }
}

fn answer(requests: impl IntoIterator<Item = Request>, outcome: &Result<(), Error>) {
    for request in requests {
        // A caller that is gone gets no answer; its change is made all the same.
        let _ = request.done.send(outcome.clone());
    }
}

/// Takes up to `more` further requests that arrive within `patience`.
fn gather(queue: &mpsc::Receiver<Request>, batch: &mut Vec<Request>, more: usize, patience: Duration) {
    let end = Instant::now() + patience;
    for _ in 0..more {
        match queue.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(request) => batch.push(request),
            Err(_) => break,
        }
    }
    batch.extend(queue.try_iter());
}

fn commit(journal: &mut Journal, batch: &[Request], directories: &[Dir]) -> Result<(), Error> {
    for (index, directory) in directories.iter().enumerate() {
        if batch.iter().any(|request| request.barrier == Barrier::Directory(index)) {
            directory.sync()?;
        }
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
