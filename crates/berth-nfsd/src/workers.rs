//! Threads that may wait for a disk, and that act as the users who call.
//!
//! They are the server's own: in `berth up` other threads wait for mounts of this very server.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

type Job = Box<dyn FnOnce() + Send>;

/// A fixed number of threads; they end when this is dropped, after what was given to them.
#[derive(Debug)]
pub(crate) struct Workers(Arc<Queue>);

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: std::collections::VecDeque<Job>,
    is_closed: bool,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} jobs", self.state.lock().jobs.len())
    }
}

impl Workers {
    /// Starts the threads. Each masks no mode, because clients have done that before.
    pub(crate) fn start(count: usize) -> berth_host::Result<Self> {
        let queue = Arc::new(Queue::default());
        let workers = Self(queue.clone());
        for number in 0..count {
            let queue = queue.clone();
            let (ready, is_ready) = std::sync::mpsc::channel();
            let run = move || {
                let prepared = berth_host::acting::unmask_thread();
                let works = prepared.is_ok();
                let _ = ready.send(prepared);
                while works && let Some(job) = queue.next() {
                    // What it was for is answered by whoever gave it: see `service::answer`.
                    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                }
            };
            let named = std::thread::Builder::new().name(format!("nfsd-{number}"));
            named.spawn(run).map_err(|error| berth_host::Error::new("start a thread", error))?;
            is_ready.recv().expect("a thread that started says how it went")?;
        }
        Ok(workers)
    }

    /// Has a thread do this, when one is free.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.0.state.lock().jobs.push_back(Box::new(job));
        self.0.changed.notify_one();
    }
}

impl Queue {
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.is_closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.state.lock().is_closed = true;
        self.0.changed.notify_all();
    }
}
