//! Records events on claims when the driver finds something wrong with their volumes, and when that is over.
//!
//! Reads: PersistentVolume, PersistentVolumeClaim; once, at the start, its own events; with the node watcher Node, and the
//! pods of a node that failed. Writes nothing but events on claims: Warning `VolumeConditionAbnormal`, Normal
//! `VolumeConditionNormal`, Warning `NodeFailed` and `NodeRecovered`.
//!
//! The driver is asked at intervals: for all volumes at once if it can, else for one after the other. Asking
//! costs Kubernetes nothing, and only changes have events; a successor knows from the events what its predecessor recorded.

mod conditions;
mod nodes;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use berth_kube::{Backoff, Cache, Cluster, Index, Key, Loop, Next, Queue, Recorder};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim};
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};

use self::conditions::{ABNORMAL, ConditionEvent, Memory, NORMAL};
use crate::driver::{Driver, Health, HealthCalls};
use crate::failure::Failure;

/// How a health monitor works; the defaults are upstream's.
#[derive(Debug, Clone)]
pub struct Options {
    /// How long one call may take.
    pub timeout: Duration,
    /// How many volumes are asked about at a time, and at most in a second, if the driver cannot list them.
    pub workers: usize,
    /// How often a volume is asked about, if the driver cannot list them.
    pub interval: Duration,
    /// How often all volumes are asked about, if the driver can list them.
    pub list_interval: Duration,
    /// Nodes that fail have events on the claims that their pods use.
    pub node_watcher: bool,
    /// How long a node may not be ready before it has failed.
    pub node_patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(15),
            workers: 10,
            interval: Duration::from_mins(1),
            list_interval: Duration::from_mins(5),
            node_watcher: false,
            node_patience: Duration::from_mins(5),
        }
    }
}

/// Watches over volumes until the cluster's shutdown. Returns at once if the driver does not report their health.
pub async fn run(cluster: Cluster, driver: Driver, options: Options) {
    let shutdown = cluster.shutdown().clone();
    let identity = tokio::select! {
        () = shutdown.cancelled() => return,
        identity = driver.ready() => identity,
    };
    let Some(calls) = HealthCalls::of(&identity) else {
        tracing::info!(driver = identity.name, "the driver does not report its volumes' health");
        return;
    };
    let monitor = Arc::new(Monitor::new(&cluster, driver, options, &identity.name));
    tokio::select! {
        () = shutdown.cancelled() => return,
        () = monitor.start() => {}
    }
    let volumes = async {
        match calls {
            HealthCalls::List | HealthCalls::ListConditions => tokio::select! {
                () = shutdown.cancelled() => {}
                () = monitor.ask_for_all(calls) => {}
            },
            HealthCalls::Get | HealthCalls::GetCondition => monitor.clone().ask_for_each(calls).await,
        }
    };
    let nodes = async {
        if monitor.options.node_watcher {
            nodes::run(monitor.clone()).await;
        }
    };
    tokio::join!(volumes, nodes);
}

struct Monitor {
    cluster: Cluster,
    driver: Driver,
    /// The driver that this monitor was started for.
    name: String,
    options: Options,
    recorder: Recorder,
    /// What events name as their source.
    source: String,
    claims: Cache<PersistentVolumeClaim>,
    volumes: Cache<PersistentVolume>,
    /// The bound volumes of this driver, by its ids of them.
    by_handle: Index<PersistentVolume, String>,
    memory: Mutex<Memory>,
}

impl Monitor {
    fn new(cluster: &Cluster, driver: Driver, options: Options, name: &str) -> Self {
        let volumes = cluster.cache::<PersistentVolume>();
        let (source, of) = (format!("csi-pv-monitor-controller-{name}"), name.to_owned());
        Self {
            recorder: Recorder::new(cluster, &source, ""),
            source,
            claims: cluster.cache(),
            by_handle: volumes.index(move |volume: &PersistentVolume| {
                watched(volume, &of).map(|(handle, ..)| handle.to_owned()).into_iter().collect()
            }),
            volumes,
            memory: Mutex::default(),
            cluster: cluster.named("external-health-monitor-controller"),
            driver,
            name: name.to_owned(),
            options,
        }
    }

    async fn start(self: &Arc<Self>) {
        self.claims.synced().await;
        self.volumes.synced().await;
        match self.events().await {
            Ok(events) => *self.memory() = Memory::from_events(events),
            Err(error) => {
                tracing::warn!(%error, "events cannot be listed: those of earlier runs are recorded again");
            }
        }
        let this = Arc::downgrade(self);
        self.claims.subscribe(move |before, after| {
            if let (Some(gone), None, Some(this)) = (before, after, this.upgrade()) {
                this.memory().forget(&gone.uid().unwrap_or_default());
            }
        });
    }

    /// The events of this component that are still there.
    async fn events(&self) -> berth_kube::Result<Vec<Event>> {
        self.cluster.fetch_where("", &format!("source={}", self.source)).await
    }

    /// Asks for all volumes, again and again.
    async fn ask_for_all(&self, calls: HealthCalls) {
        loop {
            if let Err(failure) = self.round(calls).await {
                tracing::warn!(error = failure.sentence(), "asking for the health of all volumes failed");
            }
            tokio::time::sleep(self.options.list_interval).await;
        }
    }

    /// Asks for all volumes, and handles only those that have trouble, or had: the others are not even read.
    async fn round(&self, calls: HealthCalls) -> Result<(), Failure> {
        self.driver.identity_of(&self.name)?;
        let conditions = calls == HealthCalls::ListConditions;
        let listed = self.driver.list_health(self.options.timeout, conditions).await?;
        for (handle, health) in listed.iter().filter(|(_, health)| **health != Health::Well) {
            for volume in self.by_handle.get(handle) {
                if let Some((_, claim)) = self.claim_of(&volume) {
                    self.record(&claim, health);
                }
            }
        }
        let ill = self.memory().ill();
        for key in ill {
            let claim = self.claims.get(&key);
            let name = claim.as_ref().and_then(|claim| claim.spec.as_ref()?.volume_name.clone());
            let Some(volume) = name.and_then(|name| self.volumes.named(&name)) else { continue };
            let Some((handle, claim)) = self.claim_of(&volume) else { continue };
            match listed.get(handle) {
                Some(Health::Ill(_)) => {}
                Some(Health::Well) => self.record(&claim, &Health::Well),
                // What older drivers do not list they do not know.
                None if conditions => {}
                // It may only have slipped through between two pages.
                None => match self.driver.get_health(self.options.timeout, handle, false).await {
                    Ok(health) => self.record(&claim, &health),
                    Err(status) => {
                        let volume = volume.name_any();
                        tracing::warn!(volume, error = status.message(), "asking for its health failed");
                    }
                },
            }
        }
        Ok(())
    }

    /// Asks for one volume after the other, again and again.
    async fn ask_for_each(self: Arc<Self>, calls: HealthCalls) {
        let interval = self.options.interval;
        let retry = Backoff { first: interval, longest: interval.max(Duration::from_mins(5)) };
        let queue: Queue<Key> = self.cluster.queue("csi-monitor-pv-queue", retry);
        let count = Arc::new(AtomicUsize::new(0));
        let (name, counted) = (self.name.clone(), count.clone());
        let volumes = Loop::new(&self.cluster, &queue).subscribe(&self.volumes, move |before, after| {
            let is = |volume: Option<&Arc<PersistentVolume>>| {
                volume.is_some_and(|volume| watched(volume, &name).is_some())
            };
            match (is(before), after.filter(|_| is(after))) {
                (false, Some(volume)) => {
                    counted.fetch_add(1, Ordering::Relaxed);
                    return vec![Key::of(volume.as_ref())];
                }
                (true, None) => {
                    counted.fetch_sub(1, Ordering::Relaxed);
                }
                (true, Some(_)) | (false, None) => {}
            }
            Vec::new()
        });
        let work = |key: Key| {
            let (this, count) = (self.clone(), count.clone());
            async move {
                let Some(volume) = this.volumes.get(&key) else { return Ok(Next::Done) };
                if watched(&volume, &this.name).is_none() {
                    return Ok(Next::Done);
                }
                this.driver.identity_of(&this.name)?;
                if let Some((handle, claim)) = this.claim_of(&volume) {
                    let condition = calls == HealthCalls::GetCondition;
                    let health = this.driver.get_health(this.options.timeout, handle, condition).await?;
                    this.record(&claim, &health);
                }
                let count = count.load(Ordering::Relaxed);
                Ok::<_, Failure>(Next::After(pause(interval, count, this.options.workers)))
            }
        };
        volumes.run(self.options.workers, work).await;
    }

    /// The driver's id of a volume, and the claim that it is bound to.
    fn claim_of<'a>(&self, volume: &'a PersistentVolume) -> Option<(&'a str, Arc<PersistentVolumeClaim>)> {
        let (handle, key, uid) = watched(volume, &self.name)?;
        let claim = self.claims.get(&key).filter(|claim| uid.is_none() || claim.uid().as_deref() == uid)?;
        Some((handle, claim))
    }

    fn record(&self, claim: &PersistentVolumeClaim, health: &Health) {
        let (uid, key) = (claim.uid().unwrap_or_default(), Key::of(claim));
        let event = self.memory().observe(&uid, &key, health, Timestamp::now());
        match event {
            Some(ConditionEvent::Abnormal(wrong)) => self.recorder.warning(claim, ABNORMAL, wrong),
            Some(ConditionEvent::Normal) => {
                self.recorder.normal(claim, NORMAL, "The Volume returns to the healthy state");
            }
            None => {}
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock()
    }
}

/// The driver's id of a volume that is watched over, and the claim's key and UID: bound, of this driver, and staying.
fn watched<'a>(volume: &'a PersistentVolume, driver: &str) -> Option<(&'a str, Key, Option<&'a str>)> {
    let bound = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
    if !bound || volume.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let spec = volume.spec.as_ref()?;
    let csi = spec.csi.as_ref().filter(|csi| csi.driver == driver && !csi.volume_handle.is_empty())?;
    let claim = spec.claim_ref.as_ref()?;
    let key = Key::new(claim.namespace.clone().unwrap_or_default(), claim.name.clone().unwrap_or_default());
    Some((&csi.volume_handle, key, claim.uid.as_deref()))
}

/// When a volume is asked about again: never more volumes in a second than there are workers.
fn pause(interval: Duration, volumes: usize, workers: usize) -> Duration {
    let seconds = volumes / workers.max(1);
    interval.max(Duration::from_secs(u64::try_from(seconds).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests;
