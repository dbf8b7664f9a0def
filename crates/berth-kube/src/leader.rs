//! Leadership among replicas, by a Lease: whoever holds it works, the others stand by.
//!
//! The rules are those of client-go, so that its components and ours can hold the same Lease one after the other:
//!
//! - Nobody trusts a clock but its own, and of that only how much time passes. A holder is gone when the Lease has not
//!   changed for its duration *since it was last seen to change here*; the times written in it are for people.
//! - Every write names the version that was read, so of several that try, one succeeds.
//! - A holder that could not renew for the renew deadline stops working. Its work is told to end, and dropped before the
//!   Lease can be anybody else's, both counted from before its last successful renewal was sent.
//!
//! Unlike there, a holder that lost the Lease does not end the process but stands by again, and one that is told to
//! stop finishes its work, renewing meanwhile, and then gives the Lease back.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::PostParams;
use kube::{Api, Client};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use berth_core::{error_chain, random_fraction};

/// A candidate waits up to this many retry periods more, so that candidates do not look all at once.
const JITTER: f64 = 1.2;
/// A silent holder of an expired Lease is tolerated this long before it is called unhealthy.
const TOLERATED: Duration = Duration::from_secs(20);
/// How long giving the Lease back may take when stopping.
const RELEASING: Duration = Duration::from_secs(5);

/// Which Lease, and how it is kept.
#[derive(Debug, Clone)]
pub struct Options {
    /// The Lease's namespace.
    pub namespace: String,
    /// The Lease's name.
    pub name: String,
    /// This candidate; no two may have the same.
    pub identity: String,
    /// How long others wait for a holder that is silent.
    pub lease: Duration,
    /// How long a holder works without having renewed.
    pub renew: Duration,
    /// How often a holder renews, and others look.
    pub retry: Duration,
    /// Labels of the Lease.
    pub labels: BTreeMap<String, String>,
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
    /// Nobody.
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
        /// The renew deadline.
        renew: Duration,
    },
    /// A holder would lose the Lease before it renews.
    #[error("the renew deadline ({renew:?}) must be longer than {JITTER} times the retry period ({retry:?})")]
    Retry {
        /// The renew deadline.
        renew: Duration,
        /// The retry period.
        retry: Duration,
    },
}

/// Where a candidate stands.
#[derive(Debug, Clone, Copy)]
pub struct Standing {
    /// Whether it holds the Lease.
    pub leading: bool,
    /// Until when the Lease is its own without another renewal.
    expires: Instant,
}

impl Standing {
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
    options: Options,
    standing: watch::Sender<Standing>,
    leading: Gauge,
    slow_paths: Counter,
}

/// The Lease as it was last read, and since when it says so.
struct Seen {
    lease: Lease,
    since: Instant,
}

impl Seen {
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
        let standing = watch::Sender::new(Standing { leading: false, expires: Instant::now() });
        let (leading, slow_paths) = (Gauge::default(), Counter::default());
        let leases = Api::namespaced(client, &options.namespace);
        Ok(Self { leases, options, standing, leading, slow_paths })
    }

    /// The same candidate, whose leadership is measured.
    #[must_use]
    pub fn measured(self, metrics: &Metrics) -> Self {
        let (leading, slow_paths) = metrics.lease(&self.options.name);
        Self { leading, slow_paths, ..self }
    }

    /// Where the candidate stands, now and whenever that changes.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Runs `lead` whenever the Lease is held, until `shutdown` or until the work ends by itself.
    ///
    /// The work's token is cancelled when it has to end. At `shutdown` the work is waited for and the Lease given back;
    /// after a loss the work is dropped if it has not ended by the time the Lease expires.
    pub async fn run<R>(&self, shutdown: CancellationToken, lead: impl Fn(CancellationToken) -> R)
    where
        R: Future<Output = ()>,
    {
        let mut seen = None;
        while let Some(renewed) = self.acquire(&mut seen, &shutdown).await {
            tracing::info!(lease = self.options.name, identity = self.options.identity, "leading");
            self.leading.set(1);
            let ended = self.lead(&mut seen, renewed, &shutdown, &lead).await;
            self.leading.set(0);
            self.standing.send_modify(|standing| standing.leading = false);
            if ended {
                self.release().await;
                return;
            }
            tracing::error!(lease = self.options.name, "lost the lease; standing by");
        }
    }

    /// Waits until the Lease is held; nothing if told to stop before.
    async fn acquire(&self, seen: &mut Option<Seen>, shutdown: &CancellationToken) -> Option<Instant> {
        let mut told = false;
        loop {
            let outcome = self.attempt_until(seen, shutdown).await?;
            match outcome {
                Ok(Ok(Some(asked))) => return Some(asked),
                Ok(Ok(None)) if !told => {
                    let holder = seen.as_ref().map(Seen::holder);
                    tracing::info!(lease = self.options.name, holder, "standing by");
                    told = true;
                }
                Ok(Ok(None)) => {}
                outcome => self.tell(&outcome),
            }
            let pause = self.options.retry.mul_f64(1.0 + JITTER * random_fraction());
            tokio::select! {
                () = shutdown.cancelled() => return None,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// One attempt; nothing if told to stop meanwhile, and then what a write under way took is given back.
    async fn attempt_until(
        &self,
        seen: &mut Option<Seen>,
        shutdown: &CancellationToken,
    ) -> Option<Result<kube::Result<Option<Instant>>, tokio::time::error::Elapsed>> {
        let mut attempt = std::pin::pin!(timeout(self.options.renew, self.attempt(seen)));
        tokio::select! {
            outcome = &mut attempt => return Some(outcome),
            () = shutdown.cancelled() => {}
        }
        if let Ok(Ok(Ok(Some(_)))) = timeout(RELEASING, attempt).await {
            self.release().await;
        }
        None
    }

    /// Works and renews; whether the work ended in order, with the Lease still held.
    async fn lead<R>(
        &self,
        seen: &mut Option<Seen>,
        renewed: Instant,
        shutdown: &CancellationToken,
        lead: &impl Fn(CancellationToken) -> R,
    ) -> bool
    where
        R: Future<Output = ()>,
    {
        let term = CancellationToken::new();
        let mut work = std::pin::pin!(lead(term.clone()));
        let mut renewal = std::pin::pin!(self.renew(seen, renewed));
        let expires = loop {
            tokio::select! {
                biased;
                expires = &mut renewal => break expires,
                () = shutdown.cancelled(), if !term.is_cancelled() => term.cancel(),
                () = &mut work => return true,
            }
        };
        term.cancel();
        if timeout_at(expires, work).await.is_err() {
            tracing::warn!(lease = self.options.name, "work under way was cut short");
        }
        false
    }

    /// Renews until that fails for too long; returns by when the work must have ended.
    async fn renew(&self, seen: &mut Option<Seen>, mut renewed: Instant) -> Instant {
        loop {
            let deadline = renewed + self.options.renew;
            let expires = renewed + self.options.whole_lease();
            self.standing.send_replace(Standing { leading: true, expires });
            sleep_until(deadline.min(Instant::now() + self.options.retry)).await;
            // Half of it, so that a request that hangs is followed by another.
            let patience = deadline.min(Instant::now() + self.options.renew / 2);
            let outcome = timeout_at(patience, self.attempt(seen)).await;
            match outcome {
                Ok(Ok(Some(asked))) => renewed = asked,
                Ok(Ok(None)) => {
                    let holder = seen.as_ref().map(Seen::holder);
                    tracing::error!(lease = self.options.name, holder, "somebody else took the lease");
                    return Instant::now();
                }
                outcome => self.tell(&outcome),
            }
            if Instant::now() >= renewed + self.options.renew {
                // Well before it may be somebody else's: timers are late now and then.
                let left = self.options.whole_lease().saturating_sub(self.options.renew);
                return renewed + self.options.renew + left.mul_f64(0.75);
            }
        }
    }

    /// Takes the Lease or renews it; when that was asked for, or nothing if somebody else holds it.
    async fn attempt(&self, seen: &mut Option<Seen>) -> kube::Result<Option<Instant>> {
        let asked = Instant::now();
        // What is ours is renewed without a look, unless somebody else wrote it meanwhile.
        if let Some(own) =
            seen.as_ref().filter(|seen| seen.holder() == self.options.identity && seen.is_valid())
        {
            if let Ok(lease) = self.write(Some(own)).await {
                *seen = Some(Seen { lease, since: asked });
                return Ok(Some(asked));
            }
            self.slow_paths.inc();
        }
        if let Some(lease) = self.leases.get_opt(&self.options.name).await? {
            let since = match seen.as_ref().filter(|seen| seen.lease.spec == lease.spec) {
                Some(seen) => seen.since,
                None => Instant::now(),
            };
            let now = seen.insert(Seen { lease, since });
            let holder = now.holder();
            if !holder.is_empty() && holder != self.options.identity && now.is_valid() {
                return Ok(None);
            }
        } else {
            *seen = None;
        }
        let asked = Instant::now();
        let lease = self.write(seen.as_ref()).await?;
        *seen = Some(Seen { lease, since: asked });
        Ok(Some(asked))
    }

    /// Writes ourselves into the Lease.
    async fn write(&self, seen: Option<&Seen>) -> kube::Result<Lease> {
        let now = MicroTime(Timestamp::now());
        let before = seen.map(Seen::spec).unwrap_or_default();
        let ours = before.holder_identity.as_ref() == Some(&self.options.identity);
        let transitions = match (seen, ours) {
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
        self.store(seen, spec).await
    }

    async fn store(&self, seen: Option<&Seen>, spec: LeaseSpec) -> kube::Result<Lease> {
        let mut lease = seen.map(|seen| seen.lease.clone()).unwrap_or_default();
        lease.spec = Some(spec);
        lease.metadata.labels.get_or_insert_default().extend(self.options.labels.clone());
        if seen.is_some() {
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
                let seen = Seen { lease, since: Instant::now() };
                if seen.holder() != self.options.identity {
                    return Ok(());
                }
                let now = MicroTime(Timestamp::now());
                let spec = LeaseSpec {
                    holder_identity: Some(String::new()),
                    lease_duration_seconds: Some(1),
                    acquire_time: Some(now.clone()),
                    renew_time: Some(now),
                    ..seen.spec()
                };
                match self.store(Some(&seen), spec).await {
                    // A renewal of ours that was under way.
                    Err(kube::Error::Api(status)) if status.code == 409 => {}
                    outcome => return outcome.map(|_| ()),
                }
            }
        });
        match released.await {
            Ok(Ok(())) => tracing::info!(lease = self.options.name, "released the lease"),
            outcome => self.tell(&outcome),
        }
    }

    fn tell<T>(&self, outcome: &Result<kube::Result<T>, tokio::time::error::Elapsed>) {
        let lease = &self.options.name;
        match outcome {
            // Somebody was quicker.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {}
            Ok(Err(error)) => {
                tracing::warn!(lease, error = error_chain(error), "the lease cannot be written");
            }
            Err(_elapsed) => tracing::warn!(lease, "the API server does not answer about the lease"),
            Ok(Ok(_)) => {}
        }
    }
}
