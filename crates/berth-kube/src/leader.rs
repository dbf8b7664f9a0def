//! Leadership among replicas, by a Lease: whoever holds it works, the others stand by.
//!
//! The rules are those of client-go, so that its components and ours can hold the same Lease one after the other:
//!
//! - Nobody trusts a clock but its own, and of that only how much time passes. A holder is gone when the Lease has not
//!   changed for its duration *since it was last seen to change here*; the times written in it are for people.
//! - Every write names the version that was read, so of several that try, one succeeds.
//! - A holder that could not renew for the renew deadline stops working. Its work is cancelled, and dropped before the
//!   Lease can be anybody else's, both counted from before its last successful renewal was sent.
//!
//! A candidate may have rivals: Leases of other names, or of the same name in other namespaces, whose holders do the
//! same work and do not read this Lease. It leads only while none of them has a live holder: it reads them before it takes
//! its Lease, again after it has written itself into it, and at every renewal, and gives way to a rival that it finds.
//! So of two that both read them, at most one goes on; one that does not (client-go's) always wins.
//!
//! Unlike there, a holder that lost the Lease does not end the process but stands by again, and one that is asked to
//! stop finishes its work, renewing meanwhile, and then gives the Lease back.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use berth_core::{error_chain, random_fraction};

/// A candidate waits up to this many retry periods more, so that candidates do not read it all at once.
const JITTER: f64 = 1.2;
/// A silent holder of an expired Lease is tolerated this long before it is called unhealthy.
const TOLERATED: Duration = Duration::from_secs(20);
/// How long giving the Lease back may take when stopping.
const RELEASING: Duration = Duration::from_secs(5);

/// Which Lease, and how it is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// The namespace in which the Lease is kept.
    pub namespace: String,
    /// The name of the Lease, the same for all candidates.
    pub name: String,
    /// This candidate; no two may have the same.
    pub identity: String,
    /// How long others wait for a holder that is silent.
    pub lease: Duration,
    /// How long a holder works without having renewed.
    pub renew: Duration,
    /// How often a holder renews the Lease, and others read it.
    pub retry: Duration,
    /// Labels of the Lease.
    pub labels: BTreeMap<String, String>,
    /// Names of Leases, in any namespace, whose holders do the same work: the candidate stands by while one of them is
    /// held. The candidate's own Lease is none of them, though its name may be here.
    pub rivals: Vec<String>,
}

impl Options {
    /// A candidate for a Lease, with client-go's periods.
    pub fn new(namespace: &str, name: &str, identity: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            identity: identity.to_owned(),
            lease: Duration::from_secs(15),
            renew: Duration::from_secs(10),
            retry: Duration::from_secs(5),
            labels: BTreeMap::new(),
            rivals: Vec::new(),
        }
    }

    fn check(&self) -> Result<(), Invalid> {
        if self.identity.is_empty() {
            return Err(Invalid::Identity);
        }
        if self.lease < Duration::from_secs(1) || self.lease.as_secs() > i32::MAX as u64 {
            return Err(Invalid::Lease(self.lease));
        }
        if self.whole_lease() <= self.renew {
            return Err(Invalid::Renew { lease: self.whole_lease(), renew: self.renew });
        }
        if self.retry.is_zero() || self.renew <= self.retry.mul_f64(JITTER) {
            return Err(Invalid::Retry { renew: self.renew, retry: self.retry });
        }
        Ok(())
    }

    /// A Lease is counted in whole seconds.
    fn whole_lease(&self) -> Duration {
        Duration::from_secs(self.lease.as_secs())
    }
}

/// Periods that cannot keep two from working at the same time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// A candidate without an identity could not be distinguished from the others.
    #[error("the candidate has no identity")]
    Identity,
    /// Too short, or longer than the field can say.
    #[error("the lease duration must be at least 1s and fit into a Lease, not be {0:?}")]
    Lease(Duration),
    /// A holder would still work when the Lease is somebody else's.
    #[error("the lease duration ({lease:?}) must be longer than the renew deadline ({renew:?})")]
    Renew {
        /// The lease duration, in whole seconds.
        lease: Duration,
        /// The renew deadline, which is as long or longer.
        renew: Duration,
    },
    /// A holder would lose the Lease before it renews.
    #[error("the renew deadline ({renew:?}) must be longer than {JITTER} times the retry period ({retry:?})")]
    Retry {
        /// The renew deadline, which is too short.
        renew: Duration,
        /// The retry period that it must exceed.
        retry: Duration,
    },
}

/// How a term of leadership ended.
enum Term {
    /// The work ended in order, with the Lease still held.
    Finished,
    /// The Lease could not be renewed, or was taken.
    Lost,
    /// The Lease is still held, but a rival works.
    GaveWay,
}

/// What came of an attempt to take the Lease.
enum Outcome {
    /// It is held; the renewal counts from this instant.
    Held(Instant),
    /// Somebody else holds it, or a rival's.
    HeldBy(String),
}

/// Whether a candidate leads, and until when.
#[derive(Debug, Clone, Copy)]
pub struct Leadership {
    /// Whether it holds the Lease.
    pub leading: bool,
    /// Until when the Lease is its own without another renewal.
    expires: Instant,
}

impl Leadership {
    /// What is wrong: a holder that has long lost its Lease and does not notice.
    pub fn complaint(&self) -> Option<String> {
        let over = Instant::now().saturating_duration_since(self.expires);
        (self.leading && over > TOLERATED)
            .then(|| format!("the lease expired {over:?} ago and was not renewed"))
    }
}

/// A candidate for a Lease.
pub struct Elector {
    leases: Api<Lease>,
    all_leases: Api<Lease>,
    options: Options,
    /// The Leases of rivals as they were last read, by namespace and name.
    rivals: Mutex<HashMap<(String, String), ObservedLease>>,
    /// Whether it was logged that rivals cannot be listed.
    warned: AtomicBool,
    leadership: watch::Sender<Leadership>,
    leading: Gauge,
    slow_paths: Counter,
}

/// A Lease as it was last read, and since when it says so.
struct ObservedLease {
    lease: Lease,
    since: Instant,
}

impl ObservedLease {
    fn spec(&self) -> LeaseSpec {
        self.lease.spec.clone().unwrap_or_default()
    }

    fn holder(&self) -> String {
        self.spec().holder_identity.unwrap_or_default()
    }

    fn is_valid(&self) -> bool {
        let seconds = self.spec().lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        self.since + Duration::from_secs(seconds.unwrap_or_default()) > Instant::now()
    }
}

impl Elector {
    /// A candidate that does nothing yet.
    pub fn new(client: Client, options: Options) -> Result<Self, Invalid> {
        options.check()?;
        let leadership = watch::Sender::new(Leadership { leading: false, expires: Instant::now() });
        let (leading, slow_paths) = (Gauge::default(), Counter::default());
        let all_leases = Api::all(client.clone());
        let leases = Api::namespaced(client, &options.namespace);
        let (rivals, warned) = (Mutex::default(), AtomicBool::default());
        Ok(Self { leases, all_leases, options, rivals, warned, leadership, leading, slow_paths })
    }

    /// The same candidate, whose leadership is measured.
    #[must_use]
    pub fn measured(self, metrics: &Metrics) -> Self {
        let (leading, slow_paths) = metrics.lease(&self.options.name);
        Self { leading, slow_paths, ..self }
    }

    /// Whether the candidate leads, now and whenever that changes.
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    /// Runs `lead` whenever the Lease is held, until `shutdown` or until the work ends by itself.
    ///
    /// The work's token is cancelled when it has to end. At `shutdown` the work is waited for and the Lease given back;
    /// after a loss the work is dropped if it has not ended by the time the Lease expires.
    pub async fn run<R>(&self, shutdown: CancellationToken, lead: impl Fn(CancellationToken) -> R)
    where
        R: Future<Output = ()>,
    {
        let mut observed = None;
        while let Some(renewed) = self.acquire(&mut observed, &shutdown).await {
            tracing::info!(lease = self.options.name, identity = self.options.identity, "leading");
            self.leading.set(1);
            let end = self.lead(&mut observed, renewed, &shutdown, &lead).await;
            self.leading.set(0);
            self.leadership.send_modify(|now| now.leading = false);
            match end {
                Term::Finished => {
                    self.release().await;
                    return;
                }
                Term::GaveWay => {
                    self.release().await;
                    observed = None;
                }
                Term::Lost => tracing::error!(lease = self.options.name, "lost the lease; standing by"),
            }
        }
    }

    /// Waits until the Lease is held; `None` if the shutdown comes before.
    async fn acquire(
        &self,
        observed: &mut Option<ObservedLease>,
        shutdown: &CancellationToken,
    ) -> Option<Instant> {
        let mut logged = None;
        loop {
            let outcome = self.compete_until(observed, shutdown).await?;
            match outcome {
                Ok(Ok(Outcome::Held(asked))) => return Some(asked),
                Ok(Ok(Outcome::HeldBy(holder))) => {
                    if logged.as_ref() != Some(&holder) {
                        tracing::info!(lease = self.options.name, holder, "standing by");
                        logged = Some(holder);
                    }
                }
                outcome => self.log_failure(&outcome),
            }
            let pause = self.options.retry.mul_f64(1.0 + JITTER * random_fraction());
            tokio::select! {
                () = shutdown.cancelled() => return None,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// One attempt; `None` if the shutdown comes meanwhile, and then what a write under way took is given back.
    async fn compete_until(
        &self,
        observed: &mut Option<ObservedLease>,
        shutdown: &CancellationToken,
    ) -> Option<Result<kube::Result<Outcome>, tokio::time::error::Elapsed>> {
        let mut attempt = std::pin::pin!(timeout(self.options.renew, self.compete(observed)));
        tokio::select! {
            outcome = &mut attempt => return Some(outcome),
            () = shutdown.cancelled() => {}
        }
        if let Ok(Ok(Ok(Outcome::Held(_)))) = timeout(RELEASING, attempt).await {
            self.release().await;
        }
        None
    }

    /// Takes the Lease unless a rival works. Of two that take theirs at the same time each finds the other afterwards,
    /// and both give theirs back.
    async fn compete(&self, observed: &mut Option<ObservedLease>) -> kube::Result<Outcome> {
        if let Some(rival) = self.live_rival().await? {
            return Ok(Outcome::HeldBy(rival));
        }
        let Some(asked) = self.attempt(observed).await? else {
            return Ok(Outcome::HeldBy(observed.as_ref().map(ObservedLease::holder).unwrap_or_default()));
        };
        if let Some(rival) = self.live_rival().await? {
            self.release().await;
            *observed = None;
            return Ok(Outcome::HeldBy(rival));
        }
        Ok(Outcome::Held(asked))
    }

    /// The holder of a rival's Lease, if one has a live holder.
    async fn live_rival(&self) -> kube::Result<Option<String>> {
        let mut live = None;
        for name in &self.options.rivals {
            let named = ListParams::default().fields(&format!("metadata.name={name}"));
            let found = match self.all_leases.list(&named).await {
                Ok(found) => found.items,
                Err(kube::Error::Api(status)) if status.code == 403 => {
                    if !self.warned.swap(true, Ordering::Relaxed) {
                        tracing::warn!(
                            lease = name,
                            "may not list Leases of this name in all namespaces: a controller elsewhere in the \
                             cluster that does the same work would not be noticed (allow `list` on `leases`)"
                        );
                    }
                    continue;
                }
                Err(error) => return Err(error),
            };
            let mut rivals = self.rivals.lock();
            let mut listed = Vec::new();
            for lease in found {
                let key = (lease.metadata.namespace.clone().unwrap_or_default(), name.clone());
                if key.0 == self.options.namespace && *name == self.options.name {
                    continue;
                }
                let since = match rivals.get(&key).filter(|known| known.lease.spec == lease.spec) {
                    Some(known) => known.since,
                    None => Instant::now(),
                };
                let rival = ObservedLease { lease, since };
                if !rival.holder().is_empty() && rival.is_valid() {
                    live = Some(format!("{} (Lease {}/{name})", rival.holder(), key.0));
                }
                listed.push(key.clone());
                rivals.insert(key, rival);
            }
            rivals.retain(|key, _| key.1 != *name || listed.contains(key));
        }
        Ok(live)
    }

    /// Works and renews, until the work has ended.
    async fn lead<R>(
        &self,
        observed: &mut Option<ObservedLease>,
        renewed: Instant,
        shutdown: &CancellationToken,
        lead: &impl Fn(CancellationToken) -> R,
    ) -> Term
    where
        R: Future<Output = ()>,
    {
        let term = CancellationToken::new();
        let mut work = std::pin::pin!(lead(term.clone()));
        let mut renewal = std::pin::pin!(self.renew(observed, renewed));
        let (expires, end) = loop {
            tokio::select! {
                biased;
                ended = &mut renewal => break ended,
                () = shutdown.cancelled(), if !term.is_cancelled() => term.cancel(),
                () = &mut work => return Term::Finished,
            }
        };
        term.cancel();
        if timeout_at(expires, work).await.is_err() {
            tracing::warn!(lease = self.options.name, "work under way was cut short");
        }
        end
    }

    /// Renews until that fails for too long or a rival works; returns by when the work must have ended, and why.
    async fn renew(&self, observed: &mut Option<ObservedLease>, mut renewed: Instant) -> (Instant, Term) {
        loop {
            let deadline = renewed + self.options.renew;
            let expires = renewed + self.options.whole_lease();
            self.leadership.send_replace(Leadership { leading: true, expires });
            sleep_until(deadline.min(Instant::now() + self.options.retry)).await;
            // Half of it, so that a request that hangs is followed by another.
            let patience = deadline.min(Instant::now() + self.options.renew / 2);
            let outcome = timeout_at(patience, self.attempt(observed)).await;
            match outcome {
                Ok(Ok(Some(asked))) => {
                    renewed = asked;
                    match timeout_at(patience, self.live_rival()).await {
                        Ok(Ok(Some(rival))) => {
                            let lease = &self.options.name;
                            tracing::error!(
                                lease,
                                rival,
                                "another controller does the same work; giving way"
                            );
                            return (self.end_of_work(renewed), Term::GaveWay);
                        }
                        Ok(Ok(None)) => {}
                        outcome => self.log_failure(&outcome),
                    }
                }
                Ok(Ok(None)) => {
                    let holder = observed.as_ref().map(ObservedLease::holder);
                    tracing::error!(lease = self.options.name, holder, "somebody else took the lease");
                    return (Instant::now(), Term::Lost);
                }
                outcome => self.log_failure(&outcome),
            }
            if Instant::now() >= renewed + self.options.renew {
                return (self.end_of_work(renewed), Term::Lost);
            }
        }
    }

    /// By when the work must have ended: well before the Lease may be somebody else's, because timers are late at times.
    fn end_of_work(&self, renewed: Instant) -> Instant {
        let left = self.options.whole_lease().saturating_sub(self.options.renew);
        renewed + self.options.renew + left.mul_f64(0.75)
    }

    /// Takes the Lease or renews it; when that was asked for, or nothing if somebody else holds it.
    async fn attempt(&self, observed: &mut Option<ObservedLease>) -> kube::Result<Option<Instant>> {
        let asked = Instant::now();
        // A Lease that is ours is renewed without reading it first, unless somebody else wrote it meanwhile.
        if let Some(own) = observed
            .as_ref()
            .filter(|observed| observed.holder() == self.options.identity && observed.is_valid())
        {
            if let Ok(lease) = self.write(Some(own)).await {
                *observed = Some(ObservedLease { lease, since: asked });
                return Ok(Some(asked));
            }
            self.slow_paths.inc();
        }
        if let Some(lease) = self.leases.get_opt(&self.options.name).await? {
            let since = match observed.as_ref().filter(|observed| observed.lease.spec == lease.spec) {
                Some(observed) => observed.since,
                None => Instant::now(),
            };
            let now = observed.insert(ObservedLease { lease, since });
            let holder = now.holder();
            if !holder.is_empty() && holder != self.options.identity && now.is_valid() {
                return Ok(None);
            }
        } else {
            *observed = None;
        }
        let asked = Instant::now();
        let lease = self.write(observed.as_ref()).await?;
        *observed = Some(ObservedLease { lease, since: asked });
        Ok(Some(asked))
    }

    /// Writes ourselves into the Lease.
    async fn write(&self, observed: Option<&ObservedLease>) -> kube::Result<Lease> {
        let now = MicroTime(Timestamp::now());
        let before = observed.map(ObservedLease::spec).unwrap_or_default();
        let ours = before.holder_identity.as_ref() == Some(&self.options.identity);
        let transitions = match (observed, ours) {
            (None, _) => 0,
            (Some(_), true) => before.lease_transitions.unwrap_or_default(),
            (Some(_), false) => before.lease_transitions.unwrap_or_default().saturating_add(1),
        };
        let spec = LeaseSpec {
            holder_identity: Some(self.options.identity.clone()),
            lease_duration_seconds: i32::try_from(self.options.lease.as_secs()).ok(),
            acquire_time: before.acquire_time.clone().filter(|_| ours).or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..before
        };
        self.store(observed, spec).await
    }

    async fn store(&self, observed: Option<&ObservedLease>, spec: LeaseSpec) -> kube::Result<Lease> {
        let mut lease = observed.map(|observed| observed.lease.clone()).unwrap_or_default();
        lease.spec = Some(spec);
        lease.metadata.labels.get_or_insert_default().extend(self.options.labels.clone());
        if observed.is_some() {
            return self.leases.replace(&self.options.name, &PostParams::default(), &lease).await;
        }
        lease.metadata.name = Some(self.options.name.clone());
        lease.metadata.namespace = Some(self.options.namespace.clone());
        self.leases.create(&PostParams::default(), &lease).await
    }

    /// Gives the Lease back, so that a successor need not wait for it to expire.
    async fn release(&self) {
        let released = timeout(RELEASING, async {
            loop {
                let Some(lease) = self.leases.get_opt(&self.options.name).await? else { return Ok(()) };
                let observed = ObservedLease { lease, since: Instant::now() };
                if observed.holder() != self.options.identity {
                    return Ok(());
                }
                let now = MicroTime(Timestamp::now());
                let spec = LeaseSpec {
                    holder_identity: Some(String::new()),
                    lease_duration_seconds: Some(1),
                    acquire_time: Some(now.clone()),
                    renew_time: Some(now),
                    ..observed.spec()
                };
                match self.store(Some(&observed), spec).await {
                    // A renewal of ours that was under way.
                    Err(kube::Error::Api(status)) if status.code == 409 => {}
                    outcome => return outcome.map(|_| ()),
                }
            }
        });
        match released.await {
            Ok(Ok(())) => tracing::info!(lease = self.options.name, "released the lease"),
            outcome => self.log_failure(&outcome),
        }
    }

    /// Logs why a request about the Lease failed, unless somebody was quicker.
    fn log_failure<T>(&self, outcome: &Result<kube::Result<T>, tokio::time::error::Elapsed>) {
        let lease = &self.options.name;
        match outcome {
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
            Ok(Err(error)) => {
                tracing::warn!(lease, error = error_chain(error), "the lease cannot be written");
            }
            Err(_elapsed) => tracing::warn!(lease, "the API server does not answer about the lease"),
            Ok(Ok(_)) => {}
        }
    }
}
