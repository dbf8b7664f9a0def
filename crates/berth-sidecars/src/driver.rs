//! The connection to a CSI driver: who it is, what it can do, and every call that the components make.
//!
//! A driver that goes away is waited for rather than given up: it is probed every second, asked again who it is and
//! what it can do (it may be another version), and all loops are notified that it is back. A call that broke on the way is
//! answered UNAVAILABLE, whatever the transport made of it, because the driver may have done the work: only a code that
//! the driver itself sent may count as final.

mod health;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use berth_csi::{Call, Calls, Client, Endpoint, from_transport};
use berth_kube::{Key, Loop, Next};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Response, Status};

use crate::failure::{Failure, settled};

pub use self::health::{Health, HealthCalls};
pub use berth_csi::{
    ControllerCapability, GroupCapability, Identity, NodeCapability, PluginService as Service,
};

/// How long one question about the driver itself may take.
const ASKING: Duration = Duration::from_secs(10);
/// How long to wait before a driver that is not there, or not ready, is probed again.
const PROBING: Duration = Duration::from_secs(1);
/// What is said while the driver is away.
pub(crate) const ABSENT: &str = "the CSI driver does not answer; waiting for it to come back";

type Waiter = Box<dyn FnOnce() + Send>;

/// A CSI driver; clones share the connection and what is being worked on.
#[derive(Clone)]
pub struct Driver {
    shared: Arc<Shared>,
}

struct Shared {
    client: Client,
    /// The volumes that are held, each with those who want to be called when it is free.
    held: Mutex<HashMap<String, Vec<Waiter>>>,
    /// `None` while the driver is not there; a new value each time it comes back.
    identity: watch::Sender<Option<Arc<Identity>>>,
}

impl Driver {
    /// A driver behind a socket.
    pub fn connect(endpoint: &Endpoint) -> Self {
        Self::over(Client::connect(endpoint))
    }

    /// A driver in this process.
    pub fn in_process(calls: Calls) -> Self {
        Self::over(Client::in_process(calls))
    }

    fn over(client: Client) -> Self {
        let (identity, lost) = watch::channel(None);
        let shared = Arc::new(Shared { client, held: Mutex::default(), identity });
        tokio::spawn(supervise(Arc::downgrade(&shared), lost));
        Self { shared }
    }

    /// Lets a registry see how long calls take; only the first one.
    pub fn measure(&self, registry: &mut Registry) {
        self.shared.client.measure(registry);
    }

    /// Waits until the driver is there and ready.
    pub async fn ready(&self) -> Arc<Identity> {
        let mut identity = self.shared.identity.subscribe();
        let known = identity.wait_for(Option::is_some).await.map(|known| known.clone());
        known.ok().flatten().expect("the sender lives as long as this driver, and the value was there")
    }

    /// Who the driver is, if it is there; UNAVAILABLE if not.
    pub fn identity(&self) -> Result<Arc<Identity>, Status> {
        let known = self.shared.identity.borrow().clone();
        known.ok_or_else(|| Status::unavailable(ABSENT))
    }

    /// As [`Driver::identity`]; refused if the one that is there now is not the one called `name`.
    pub(crate) fn identity_of(&self, name: &str) -> Result<Arc<Identity>, Failure> {
        let identity = self.identity()?;
        if identity.name == name {
            Ok(identity)
        } else {
            Err(Failure::refused(format!("the driver here is now {:?}, not {name:?}", identity.name)))
        }
    }

    /// Asks the driver again who it is and what it can do: something showed that it was restarted.
    pub fn ask_again(&self) {
        self.shared.identity.send_if_modified(|identity| identity.take().is_some());
    }

    /// Changes whenever the driver goes away or comes back.
    pub fn watch(&self) -> watch::Receiver<Option<Arc<Identity>>> {
        self.shared.identity.subscribe()
    }

    /// Calls `again` each time the driver was away and is back, until `shutdown`: that has cost everything its backoff.
    pub(crate) async fn when_back(&self, shutdown: &CancellationToken, again: impl Fn()) {
        let mut identity = self.watch();
        identity.mark_unchanged();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = identity.changed() => if changed.is_err() { return },
            }
            if identity.borrow_and_update().is_some() {
                again();
            }
        }
    }

    /// Runs a loop whose work calls the driver, until the cluster's shutdown. When the driver was away and is back, all of
    /// `keys` are reconciled at once: while it was absent, they only failed and waited.
    ///
    /// Except a key whose own call was in flight when the connection broke: the driver may have died of it, and would
    /// again. That one waits for its backoff, so that it does not keep the driver from serving the others.
    pub(crate) async fn run_loop<F>(
        &self,
        control: Loop<Key>,
        workers: usize,
        keys: impl Fn() -> Vec<Key>,
        work: impl Fn(Key) -> F + Send + Sync,
    ) where
        F: Future<Output = Result<Next, Failure>> + Send + 'static,
    {
        let in_flight: Arc<Mutex<HashSet<Key>>> = Arc::default();
        let (queue, shutdown) = (control.queue().clone(), control.shutdown().clone());
        let calls = control.run(workers, |key| {
            let (driver, queue, in_flight) = (self.clone(), queue.clone(), in_flight.clone());
            let work = work(key.clone());
            async move {
                // From the beginning: the driver can be back before the failure is written down everywhere.
                in_flight.lock().insert(key.clone());
                let result = work.await;
                if !result.as_ref().is_err_and(Failure::is_broken_call) {
                    in_flight.lock().remove(&key);
                }
                // It came back meanwhile, and left out what was in flight.
                if result.as_ref().is_err_and(Failure::is_absence) && driver.identity().is_ok() {
                    queue.add(key);
                }
                settled(result)
            }
        });
        let again = self.when_back(&shutdown, || {
            for key in keys() {
                if !in_flight.lock().contains(&key) {
                    queue.add(key);
                }
            }
        });
        tokio::join!(calls, again);
    }

    /// Holds a volume, by the name of its PersistentVolume, until the guard is dropped: one operation at a time per volume,
    /// across all components beside a driver.
    ///
    /// Nobody waits for a volume that is busy: `when_free` is called once it is free again, and the worker can be given to
    /// another volume. So a call that hangs costs exactly one worker, however much is asked of its volume.
    pub(crate) fn try_hold(&self, volume: &str, when_free: impl FnOnce() + Send + 'static) -> Option<Held> {
        let mut held = self.shared.held.lock();
        if let Some(waiters) = held.get_mut(volume) {
            waiters.push(Box::new(when_free));
            return None;
        }
        held.insert(volume.to_owned(), Vec::new());
        Some(Held { driver: self.clone(), volume: volume.to_owned() })
    }

    /// Calls a method; a call that does not get through sets the driver down as away.
    pub async fn call<C: Call>(&self, timeout: Duration, request: C) -> Result<C::Answer, Status> {
        self.respond(timeout, request).await.map(Response::into_inner)
    }

    /// As [`Driver::call`], with the metadata beside the answer.
    pub(crate) async fn respond<C: Call>(
        &self,
        timeout: Duration,
        request: C,
    ) -> Result<Response<C::Answer>, Status> {
        let answer = self.shared.client.respond(timeout, request).await;
        if answer.as_ref().is_err_and(|status| status.code() == Code::Unavailable && from_transport(status)) {
            self.ask_again();
        }
        answer
    }
}

/// A volume held until this is dropped.
pub(crate) struct Held {
    driver: Driver,
    volume: String,
}

impl Drop for Held {
    fn drop(&mut self) {
        let waiters = self.driver.shared.held.lock().remove(&self.volume).unwrap_or_default();
        for waiter in waiters {
            waiter();
        }
    }
}

/// Keeps the identity current for as long as anybody uses the driver.
async fn supervise(shared: Weak<Shared>, mut lost: watch::Receiver<Option<Arc<Identity>>>) {
    let mut silent = false;
    loop {
        if lost.wait_for(Option::is_none).await.is_err() {
            return;
        }
        let Some(shared) = shared.upgrade() else { return };
        match shared.client.identify(ASKING).await {
            Ok(identity) => {
                tracing::info!(driver = identity.name, "the CSI driver is ready");
                silent = false;
                shared.identity.send_replace(Some(Arc::new(identity)));
            }
            Err(status) => {
                if !silent {
                    tracing::warn!(
                        error = status.message(),
                        "the CSI driver is not ready; probing it every second"
                    );
                    silent = true;
                }
                drop(shared);
                tokio::time::sleep(PROBING).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test]
    async fn a_busy_volume_is_refused_and_everybody_who_asked_is_called_when_it_is_free() {
        let driver = Driver::connect(&Endpoint::Unix("/nobody.sock".into()));
        let called = Arc::new(AtomicUsize::new(0));
        let count = || {
            let called = called.clone();
            move || {
                called.fetch_add(1, Ordering::Relaxed);
            }
        };
        let held = driver.try_hold("a", count()).unwrap();
        assert!(driver.try_hold("a", count()).is_none());
        assert!(driver.try_hold("a", count()).is_none());
        assert!(driver.try_hold("b", count()).is_some(), "another volume is free");
        assert_eq!(called.load(Ordering::Relaxed), 0);
        drop(held);
        assert_eq!(called.load(Ordering::Relaxed), 2);
        assert!(driver.try_hold("a", count()).is_some());
    }
}
