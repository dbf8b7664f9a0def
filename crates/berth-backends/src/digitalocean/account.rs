//! One account in one region: lookups that are put together, what is waited for, and what is removed afterwards.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use berth_core::Topology;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::{
    Config, PROVIDER, REGION,
    api::{Action, Api, DoSnapshot, DoVolume, Droplet, is_missing},
    names::CLONE_PREFIX,
};
use crate::{
    Error, Result,
    cloud::{
        ClonesBySnapshot, Deadline, Durations, FEW_ENOUGH, Found, Lookups, Outcome, Pace, Queues, Sizes,
        Waiting, check_start, keep_removing, look_up,
    },
};

/// What the API takes; upstream's driver makes volumes of 16 GiB where no size is asked for.
pub(super) const SIZES: Sizes = Sizes { least: 1, most: 16384, default: 16 };
/// How many entries a page of a listing has, to see whether listing all is cheaper than asking for each.
const PAGE: u64 = 200;
/// A lookup ends within this time, whoever waits for it; it may have to wait for a minute that has requests left.
const LOOKUP: Duration = Duration::from_secs(180);
/// From so many operations under way on, the volumes are listed instead of asking for each action.
const MANY: usize = 3;
/// How often a crowd looks: with 250 requests a minute, fifty attachments take long to be asked for, and looks are requests as well.
const CROWD: Duration = Duration::from_secs(20);
/// Every so many looks the action itself is asked for, which says whether it failed.
const ASK_ACTION: u32 = 4;

/// By what a volume or snapshot is looked up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum By {
    Id(String),
    Name(String),
}

/// What an action is to bring about.
#[derive(Debug, Clone, Copy)]
pub(super) enum Goal {
    /// The volume is on that droplet.
    Attached(u64),
    /// It is not on that droplet any more.
    Detached(u64),
    /// It has so many GiB.
    Size(u64),
}

impl Goal {
    /// What the action does.
    fn verb(self) -> &'static str {
        match self {
            Self::Attached(_) => "attach",
            Self::Detached(_) => "detach",
            Self::Size(_) => "resize",
        }
    }

    /// Whether the volume shows that it is reached.
    pub(super) fn shows_in(self, volume: &DoVolume) -> bool {
        match self {
            Self::Attached(droplet) => volume.droplet_ids.contains(&droplet),
            Self::Detached(droplet) => !volume.droplet_ids.contains(&droplet),
            Self::Size(size) => volume.size_gigabytes >= size,
        }
    }
}

/// How many there are of something, as the last listing said.
#[derive(Debug, Clone, Default)]
struct Count(Arc<AtomicU64>);

impl Count {
    fn set(&self, count: usize) {
        self.0.store(count as u64, Ordering::Relaxed);
    }

    /// How many requests a listing of them costs.
    fn pages(&self) -> u64 {
        self.0.load(Ordering::Relaxed) / PAGE + 1
    }
}

/// What a volume was when it was last seen.
#[derive(Debug, Clone)]
pub(super) struct ObservedVolume {
    pub(super) name: String,
    pub(super) tags: Vec<String>,
    /// The snapshot that it was cloned by, which may be left over.
    pub(super) cloned_by: Option<String>,
}

/// The volumes of an account in a region.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) api: Arc<Api>,
    pub(super) region: String,
    pub(super) topology: Arc<Topology>,
    pub(super) driver: String,
    /// The tag for everything, or none.
    pub(super) tags: Vec<String>,
    pub(super) volume_limit: u32,
    /// Attachments and detachments, one at a time for each droplet.
    pub(super) queues: Queues,
    volumes: Found<By, Arc<DoVolume>>,
    snapshots: Found<By, Arc<DoSnapshot>>,
    droplets: Found<u64, Arc<Droplet>>,
    volume_count: Count,
    droplet_count: Count,
    /// How many actions are waited for.
    waiting: AtomicUsize,
    /// How long actions take.
    pub(super) durations: Durations,
    /// What does not change of the volumes that were seen, by their ids, for calls that come right after.
    pub(super) seen: Mutex<HashMap<String, ObservedVolume>>,
    cleaning: OnceLock<AbortOnDropHandle<()>>,
}

impl Account {
    /// Checks the token; that the API cannot be reached now is no reason not to start.
    pub(super) async fn open(api: Api, region: &str, config: &Config) -> Result<Arc<Self>> {
        let api = Arc::new(api);
        let (volume_count, droplet_count) = (Count::default(), Count::default());
        let account = Arc::new(Self {
            volumes: volume_lookups(api.clone(), region.to_owned(), volume_count.clone()),
            snapshots: snapshot_lookups(api.clone()),
            droplets: droplet_lookups(api.clone(), droplet_count.clone()),
            volume_count,
            droplet_count,
            api,
            region: region.to_owned(),
            topology: Arc::new(Topology::single(REGION, region)),
            driver: config.driver_name.clone(),
            tags: config.tag.iter().cloned().collect(),
            volume_limit: config.volume_limit,
            queues: Queues::default(),
            waiting: AtomicUsize::new(0),
            durations: Durations::default(),
            seen: Mutex::default(),
            cleaning: OnceLock::new(),
        });
        let checked = account.check(Deadline::after(Duration::from_secs(10))).await;
        check_start(PROVIDER, "token", checked)?;
        account.cleaning.get_or_init(|| keep_removing(&account, config.leftover_age));
        Ok(account)
    }

    /// Whether the API answers and takes the token.
    pub(super) async fn check(&self, until: Deadline) -> Result<()> {
        Ok(self.api.account(until).await.map(drop)?)
    }

    /// The volume, as it is now.
    pub(super) async fn volume(&self, by: By, until: Deadline) -> Outcome<Option<Arc<DoVolume>>> {
        look_up(&self.volumes, PROVIDER, by, until).await
    }

    /// The snapshot, as it is now.
    pub(super) async fn do_snapshot(&self, by: By, until: Deadline) -> Outcome<Option<Arc<DoSnapshot>>> {
        look_up(&self.snapshots, PROVIDER, by, until).await
    }

    /// The droplet, as it is now.
    pub(super) async fn droplet(&self, id: u64, until: Deadline) -> Outcome<Option<Arc<Droplet>>> {
        look_up(&self.droplets, PROVIDER, id, until).await
    }

    /// Waits until an action is completed, or it shows that its goal is reached; an action that fails is an error at once.
    pub(super) async fn settle(
        &self,
        volume: &str,
        action: Option<Action>,
        goal: Goal,
        until: Deadline,
    ) -> Result<()> {
        let Some(action) = action else { return Ok(()) };
        let (what, begun) = (goal.verb(), Instant::now());
        let failed = || {
            let id = action.id;
            Error::State(format!("DigitalOcean could not {what} volume {volume:?}: action {id} errored"))
        };
        let done = |others: usize| {
            // A crowd looks seldom, which says little of how long it took.
            if others <= FEW_ENOUGH {
                self.durations.observe(what, begun.elapsed());
            }
            Ok(())
        };
        match action.status.as_str() {
            "completed" => return Ok(()),
            "errored" => return Err(failed()),
            _ => {}
        }
        let waiting = Waiting::new(&self.waiting);
        let mut pace = Pace::of(self.durations.usual(what), CROWD);
        while pace.next(waiting.others(), until).await {
            if waiting.others() >= MANY && !pace.looks().is_multiple_of(ASK_ACTION) {
                match self.is_reached(volume, goal, until).await {
                    Ok(true) => return done(waiting.others()),
                    Ok(false) => {}
                    Err(error) => tracing::debug!(%error, "looking for the outcome of an action"),
                }
                continue;
            }
            match self.api.action(volume, action.id, until).await {
                Ok(now) if now.status == "completed" => return done(waiting.others()),
                Ok(now) if now.status == "errored" => return Err(failed()),
                Ok(_) => {}
                // It is no longer known: the volume itself says what became of it.
                Err(error) if is_missing(&error) => {
                    return match self.volume(By::Id(volume.to_owned()), until).await? {
                        Some(found) if goal.shows_in(&found) => Ok(()),
                        _ => Err(failed()),
                    };
                }
                Err(error) => tracing::debug!(%error, "looking for the outcome of an action"),
            }
        }
        Err(Error::Busy(format!(
            "DigitalOcean is still about to {what} volume {volume:?} (action {})",
            action.id
        )))
    }

    /// Whether it shows that the goal is reached. Attachments are in the listing of droplets as well, which is mostly the shorter one.
    async fn is_reached(&self, volume: &str, goal: Goal, until: Deadline) -> Outcome<bool> {
        if let Goal::Attached(droplet) | Goal::Detached(droplet) = goal
            && self.droplet_count.pages() <= self.volume_count.pages()
            && let Some(found) = self.droplet(droplet, until).await?
        {
            let is_there = found.volume_ids.iter().any(|id| id == volume);
            return Ok(is_there == matches!(goal, Goal::Attached(_)));
        }
        let found = self.volume(By::Id(volume.to_owned()), until).await?;
        Ok(found.is_some_and(|found| goal.shows_in(&found)))
    }
}

impl ClonesBySnapshot for Account {
    async fn clone_snapshots(&self, until: Deadline) -> Result<Vec<(String, SystemTime)>> {
        let all = self.api.snapshots(until).await?;
        let of_clones = all.into_iter().filter(|snapshot| snapshot.name.starts_with(CLONE_PREFIX));
        Ok(of_clones
            .filter_map(|snapshot| created(&snapshot).ok().map(|taken| (snapshot.id, taken)))
            .collect())
    }

    fn needs(&self, _: &str, _: Duration) -> bool {
        // A snapshot is ready as soon as it is there, so a clone is made of it at once.
        false
    }

    async fn remove_snapshot(&self, snapshot: &str, until: Deadline) -> Result<()> {
        Ok(self.api.delete_snapshot(snapshot, until).await?)
    }
}

/// When a snapshot was taken.
pub(super) fn created(snapshot: &DoSnapshot) -> Result<SystemTime> {
    let at: jiff::Timestamp = snapshot.created_at.parse().map_err(|error| {
        Error::Unavailable(format!("snapshot {}: created_at {:?}: {error}", snapshot.id, snapshot.created_at))
    })?;
    Ok(at.into())
}

fn volume_lookups(api: Arc<Api>, region: String, count: Count) -> Found<By, Arc<DoVolume>> {
    Lookups::new(move |keys: Vec<By>| {
        let (api, region, count) = (api.clone(), region.clone(), count.clone());
        Box::pin(async move {
            let until = Deadline::after(LOOKUP);
            let one = async |key: By| {
                let found = match &key {
                    By::Id(id) => api.volume(id, until).await,
                    By::Name(name) => {
                        api.volumes_named(name, &region, until).await.map(|mut found| found.pop())
                    }
                };
                (key, found)
            };
            if keys.len() as u64 <= count.pages() {
                return Ok(singly(join_all(keys.into_iter().map(one)).await));
            }
            let all = api.volumes(&region, until).await?;
            count.set(all.len());
            let mut found = HashMap::new();
            for volume in all {
                let volume = Arc::new(volume);
                found.insert(By::Name(volume.name.clone()), Ok(volume.clone()));
                found.insert(By::Id(volume.id.clone()), Ok(volume));
            }
            // Before something is taken to be gone it is asked for by itself: a listing may lag behind.
            let missing = keys.into_iter().filter(|key| matches!(key, By::Id(_)) && !found.contains_key(key));
            let missing: Vec<By> = missing.collect();
            found.extend(singly(join_all(missing.into_iter().map(one)).await));
            Ok(found)
        })
    })
}

fn snapshot_lookups(api: Arc<Api>) -> Found<By, Arc<DoSnapshot>> {
    Lookups::new(move |keys: Vec<By>| {
        let api = api.clone();
        Box::pin(async move {
            let until = Deadline::after(LOOKUP);
            let mut found = HashMap::new();
            // There is no way to ask for a name.
            if keys.len() > 2 || keys.iter().any(|key| matches!(key, By::Name(_))) {
                for snapshot in api.snapshots(until).await? {
                    let snapshot = Arc::new(snapshot);
                    found.insert(By::Name(snapshot.name.clone()), Ok(snapshot.clone()));
                    found.insert(By::Id(snapshot.id.clone()), Ok(snapshot));
                }
            }
            let missing =
                keys.into_iter().filter(|key| !found.contains_key(key)).filter_map(|key| match &key {
                    By::Id(id) => Some((id.clone(), key)),
                    By::Name(_) => None,
                });
            let missing: Vec<(String, By)> = missing.collect();
            let one = async |(id, key): (String, By)| (key, api.snapshot(&id, until).await);
            found.extend(singly(join_all(missing.into_iter().map(one)).await));
            Ok(found)
        })
    })
}

fn droplet_lookups(api: Arc<Api>, count: Count) -> Found<u64, Arc<Droplet>> {
    Lookups::new(move |keys: Vec<u64>| {
        let (api, count) = (api.clone(), count.clone());
        Box::pin(async move {
            let until = Deadline::after(LOOKUP);
            let one = async |key: u64| (key, api.droplet(key, until).await);
            if keys.len() as u64 <= count.pages() {
                return Ok(singly(join_all(keys.into_iter().map(one)).await));
            }
            let all = api.droplets(until).await?;
            count.set(all.len());
            let mut found: HashMap<_, _> =
                all.into_iter().map(|droplet| (droplet.id, Ok(Arc::new(droplet)))).collect();
            let missing: Vec<u64> = keys.into_iter().filter(|key| !found.contains_key(key)).collect();
            found.extend(singly(join_all(missing.into_iter().map(one)).await));
            Ok(found)
        })
    })
}

/// Answers that came one by one; one that failed is that key's failure alone.
fn singly<K: Eq + std::hash::Hash, V>(answers: Vec<(K, Outcome<Option<V>>)>) -> HashMap<K, Outcome<Arc<V>>> {
    let found =
        answers.into_iter().filter_map(|(key, answer)| Some((key, answer.transpose()?.map(Arc::new))));
    found.collect()
}
