//! Which events are written, and when: counted up, combined, suppressed or kept for later. No I/O, and no clock of its own.
//!
//! What is remembered is known by hashes: thousands of events are, and their texts would take megabytes.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;

use super::{Severity, shortened};

/// Events that may wait to be created; more are lost.
pub(super) const WAITING: usize = 65_536;
/// How many written events are remembered to be counted up rather than created anew.
const REMEMBERED: usize = 4096;
/// How many objects, and how many of their severities and reasons, are remembered.
const KINDS: usize = 16_384;
/// How long an event is counted up rather than created anew, and similar ones are combined.
const SAME: Duration = Duration::from_mins(10);
/// How often an event is counted up at most.
const PACE: Duration = Duration::from_secs(1);
/// How many different messages of one object, severity and reason have an event each; client-go combines the tenth.
const SIMILAR: usize = 9;
/// How many requests one object may cost in a row, and after which time it may cost another one.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_mins(5);
/// How often a request without an answer is repeated, and after which pause at first and at most.
const TRIES: u32 = 12;
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(10);

/// Something that happened to an object.
#[derive(Debug, Clone)]
pub(super) struct Occurrence {
    pub(super) about: ObjectReference,
    pub(super) severity: Severity,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) at: Timestamp,
}

/// A request that is to be made now.
#[derive(Debug)]
pub(super) enum Request {
    Create(Box<Creation>),
    CountUp(CountUp),
}

/// An Event that does not exist yet.
#[derive(Debug)]
pub(super) struct Creation {
    pub(super) name: String,
    pub(super) namespace: String,
    /// How often it happened before it could be written.
    pub(super) count: i32,
    pub(super) last: Timestamp,
    pub(super) of: Occurrence,
}

/// A new count of an Event that exists.
#[derive(Debug)]
pub(super) struct CountUp {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) count: i32,
    pub(super) last: Timestamp,
    /// The newest message, if it differs from the Event's.
    pub(super) message: Option<String>,
}

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Written,
    /// The API server will not have it.
    Refused,
    /// Nobody knows; it is to be repeated.
    Unanswered,
}

/// How many occurrences are in no Event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Losses {
    /// Too many events waited, or the API server was away for too long.
    pub(super) lost: u64,
    /// One object had too many.
    pub(super) suppressed: u64,
}

impl Losses {
    pub(super) fn any(self) -> bool {
        self != Self::default()
    }
}

/// An Event: one that exists, or one that is to be created.
struct Entry {
    name: String,
    namespace: String,
    /// What is to be created; gone once that is done.
    creation: Option<Box<Occurrence>>,
    /// The newest message of combined events, until it is written.
    message: Option<String>,
    count: i32,
    /// The count that the Event has, or that the request under way gives it.
    sent: i32,
    last: Timestamp,
    first: Instant,
    written: Instant,
    object: u64,
    tries: u32,
    step: Step,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Idle,
    /// A request is due, by its place in [`Correlator::due`].
    Due(Instant, u64),
    UnderWay,
}

/// The messages of one object, severity and reason.
struct Similar {
    messages: Vec<u64>,
    last: Instant,
}

/// How many requests an object may still cost.
struct Bucket {
    tokens: u32,
    since: Instant,
}

impl Bucket {
    fn refill(&mut self, now: Instant) {
        while self.tokens < BURST && now >= self.since + REFILL {
            self.tokens += 1;
            self.since += REFILL;
        }
        if self.tokens >= BURST {
            self.since = now;
        }
    }
}

/// Decides what becomes of occurrences.
pub(super) struct Correlator {
    entries: HashMap<u64, Entry>,
    due: BTreeSet<(Instant, u64, u64)>,
    /// Events that exist, in the order in which they are forgotten.
    written: VecDeque<u64>,
    similar: HashMap<u64, Similar>,
    objects: HashMap<u64, Bucket>,
    /// How many events wait to be created.
    waiting: usize,
    losses: Losses,
    closed: bool,
    /// Before this, nothing is too old.
    forget_at: Option<Instant>,
    order: u64,
    last_name: i128,
    hasher: RandomState,
}

impl Default for Correlator {
    fn default() -> Self {
        Self {
            entries: HashMap::new(),
            due: BTreeSet::new(),
            written: VecDeque::new(),
            similar: HashMap::new(),
            objects: HashMap::new(),
            waiting: 0,
            losses: Losses::default(),
            closed: false,
            forget_at: None,
            order: 0,
            last_name: 0,
            hasher: RandomState::new(),
        }
    }
}

impl Correlator {
    /// Takes note of what happened.
    pub(super) fn record(&mut self, now: Instant, mut of: Occurrence) {
        let about = &of.about;
        let object = self.hash((&about.uid, &about.kind, &about.name, &about.namespace, &about.field_path));
        let kind = self.hash((object, of.severity, &of.reason));
        let message = self.hash(&of.message);
        if self.similar.len() >= KINDS {
            self.similar.retain(|_, similar| now - similar.last < SAME);
            if self.similar.len() >= KINDS {
                self.similar.clear();
            }
        }
        let known = self.similar.get(&kind).is_some_and(|similar| now - similar.last < SAME);
        let similar = self.similar.entry(kind).or_insert_with(|| Similar { messages: Vec::new(), last: now });
        if !known {
            similar.messages.clear();
        }
        similar.last = now;
        let combined = !similar.messages.contains(&message) && similar.messages.len() >= SIMILAR;
        let key = if combined {
            of.message = format!("(combined from similar events): {}", of.message);
            self.hash((kind, "combined"))
        } else {
            if !similar.messages.contains(&message) {
                similar.messages.push(message);
            }
            self.hash((kind, message))
        };
        of.message = shortened(of.message);
        if let Some(entry) = self.entries.get_mut(&key)
            && (entry.step != Step::Idle || now - entry.first < SAME)
        {
            entry.count = entry.count.saturating_add(1);
            entry.last = of.at;
            if combined {
                match &mut entry.creation {
                    Some(creation) => creation.message = of.message,
                    None => entry.message = Some(of.message),
                }
            }
            let due = entry.written + PACE;
            if entry.step == Step::Idle {
                self.schedule(key, due.max(now));
            }
            return;
        }
        // The first of its kind is never suppressed.
        if !self.take_token(object, now) && known {
            self.losses.suppressed += 1;
            return;
        }
        if self.waiting >= WAITING {
            self.losses.lost += 1;
            return;
        }
        self.waiting += 1;
        self.last_name = of.at.as_nanosecond().max(self.last_name + 1);
        let entry = Entry {
            name: format!("{}.{:x}", of.about.name.as_deref().unwrap_or_default(), self.last_name),
            namespace: of.about.namespace.clone().unwrap_or_else(|| "default".to_owned()),
            message: None,
            count: 1,
            sent: 0,
            last: of.at,
            first: now,
            written: now,
            object,
            tries: 0,
            step: Step::Idle,
            creation: Some(Box::new(of)),
        };
        self.entries.insert(key, entry);
        self.schedule(key, now);
    }

    /// The next request that is due, and the key by which its outcome is recorded; else when there will be one.
    pub(super) fn next(&mut self, now: Instant) -> Result<(u64, Request), Option<Instant>> {
        loop {
            let Some(&(due, order, key)) = self.due.first() else { return Err(self.forget_old(now)) };
            if due > now && !self.closed {
                return Err(Some(due));
            }
            self.due.remove(&(due, order, key));
            let Some(object) = self.entries.get(&key).map(|entry| entry.object) else { continue };
            let counts_up = self.entries.get(&key).is_some_and(|entry| entry.creation.is_none());
            if counts_up && !self.closed && !self.take_token(object, now) {
                let refill = self.objects.get(&object).map_or(now, |bucket| bucket.since) + REFILL;
                self.schedule(key, refill);
                continue;
            }
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            (entry.step, entry.sent) = (Step::UnderWay, entry.count);
            let (name, namespace) = (entry.name.clone(), entry.namespace.clone());
            let (count, last) = (entry.count, entry.last);
            let request = if let Some(of) = &entry.creation {
                let of = Occurrence::clone(of);
                Request::Create(Box::new(Creation { name, namespace, count, last, of }))
            } else {
                let message = entry.message.take();
                Request::CountUp(CountUp { name, namespace, count, last, message })
            };
            return Ok((key, request));
        }
    }

    /// Takes note of what became of a request of [`Self::next`].
    pub(super) fn finish(&mut self, now: Instant, key: u64, outcome: Outcome) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.step = Step::Idle;
        match outcome {
            Outcome::Written => {
                (entry.written, entry.tries) = (now, 0);
                let changed = entry.count > entry.sent || entry.message.is_some();
                if entry.creation.take().is_some() {
                    self.waiting -= 1;
                    self.written.push_back(key);
                }
                if changed {
                    self.schedule(key, now + PACE);
                }
                self.forget_oldest();
            }
            Outcome::Refused => self.remove(key),
            Outcome::Unanswered => {
                entry.tries += 1;
                // What was not created holds as many occurrences as it counts.
                if entry.tries >= TRIES || (self.closed && entry.tries > 1) {
                    self.losses.lost += u64::try_from(entry.count).unwrap_or_default();
                    self.remove(key);
                    return;
                }
                let pause = FIRST_RETRY.saturating_mul(1 << (entry.tries - 1).min(8)).min(LONGEST_RETRY);
                self.schedule(key, now + pause);
            }
        }
    }

    /// Nothing more will be recorded: what waits is written at once.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn losses(&self) -> Losses {
        self.losses
    }

    /// The losses since the last time.
    pub(super) fn take_losses(&mut self) -> Losses {
        std::mem::take(&mut self.losses)
    }

    fn hash(&self, of: impl Hash) -> u64 {
        self.hasher.hash_one(of)
    }

    fn schedule(&mut self, key: u64, at: Instant) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        self.order += 1;
        entry.step = Step::Due(at, self.order);
        self.due.insert((at, self.order, key));
    }

    fn remove(&mut self, key: u64) {
        let Some(entry) = self.entries.remove(&key) else { return };
        if let Step::Due(at, order) = entry.step {
            self.due.remove(&(at, order, key));
        }
        if entry.creation.is_some() {
            self.waiting -= 1;
        }
    }

    /// Whether the object may cost another request, which is then counted.
    fn take_token(&mut self, object: u64, now: Instant) -> bool {
        if self.objects.len() >= KINDS && !self.objects.contains_key(&object) {
            self.objects.retain(|_, bucket| {
                bucket.refill(now);
                bucket.tokens < BURST
            });
            if self.objects.len() >= KINDS {
                self.objects.clear();
            }
        }
        let bucket = self.objects.entry(object).or_insert(Bucket { tokens: BURST, since: now });
        bucket.refill(now);
        match bucket.tokens.checked_sub(1) {
            Some(left) => {
                bucket.tokens = left;
                true
            }
            None => false,
        }
    }

    /// Forgets Events of which there are too many to remember, but none that is still to be counted up.
    fn forget_oldest(&mut self) {
        for _ in 0..self.written.len().saturating_sub(REMEMBERED) {
            let Some(key) = self.written.pop_front() else { return };
            match self.entries.get(&key) {
                Some(entry) if entry.step == Step::Idle => self.remove(key),
                Some(_) => self.written.push_back(key),
                None => {}
            }
        }
    }

    /// Forgets what is too old to matter; when there will be more of that.
    fn forget_old(&mut self, now: Instant) -> Option<Instant> {
        if self.closed {
            return None;
        }
        if self.forget_at.is_some_and(|at| now < at) {
            return self.forget_at;
        }
        self.entries.retain(|_, entry| entry.step != Step::Idle || now - entry.first < SAME);
        let entries = &self.entries;
        self.written.retain(|key| entries.contains_key(key));
        self.similar.retain(|_, similar| now - similar.last < SAME);
        self.objects.retain(|_, bucket| {
            bucket.refill(now);
            bucket.tokens < BURST
        });
        self.entries.shrink_to_fit();
        self.written.shrink_to_fit();
        self.similar.shrink_to_fit();
        self.objects.shrink_to_fit();
        let remembered = !(self.entries.is_empty() && self.similar.is_empty() && self.objects.is_empty());
        self.forget_at = remembered.then(|| now + SAME);
        self.forget_at
    }
}

#[cfg(test)]
mod tests;
