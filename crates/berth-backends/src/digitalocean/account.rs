//! One account in one region: lookups that are put together, what is waited for, and what is removed afterwards.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use berth_core::Topology;
use futures_util::future::join_all;
use parking_lot::Mutex;

use tokio_util::task::AbortOnDropHandle;

use super::{
    Config, PROVIDER, REGION,
    api::{Action, Api, DoSnapshot, DoVolume, Droplet, is_missing},
    names::CLONE_PREFIX,
};
use crate::{
    Error, Result,
    cloud::{Deadline, Found, Lookups, Outcome, Pace, Queues, Sizes, Waiting, look_up, repeat_while_used},
};

/// What the API takes; upstream's driver makes volumes of 16 GiB where no size is asked for.
pub(super) const SIZES: Sizes = Sizes { least: 1, most: 16384, default: 16 };
/// How many entries a page of a listing has, to see whether listing all is cheaper than asking for each.
const PAGE: u64 = 200;
/// A lookup ends within this time, whoever waits for it; it may have to wait for a minute that has requests left.
const LOOKUP: Duration = Duration::from_secs(180);
/// From so many operations under way on, the volumes are listed instead of asking for each action.
const MANY: usize = 3;
/// Every so many looks the action itself is asked for, which says whether it failed.
const ASK_ACTION: u32 = 4;
/// How often is looked for snapshots that were left over.
const CLEANING: Duration = Duration::from_secs(600);

/// By what a volume or snapshot is looked up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum By {
    Id(String),
    Name(String),
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
    /// How many actions are waited for.
    waiting: AtomicUsize,
    /// What does not change of the volumes that were seen, by their ids, for calls that come right after.
    pub(super) seen: Mutex<HashMap<String, ObservedVolume>>,
    cleaning: OnceLock<AbortOnDropHandle<()>>,
}

impl Account {
    /// Checks the token; that the API cannot be reached now is no reason not to start.
    pub(super) async fn open(api: Api, region: &str, config: &Config) -> Result<Arc<Self>> {
        let api = Arc::new(api);
        let account = Arc::new(Self {
            volumes: volume_lookups(api.clone(), region.to_owned()),
            snapshots: snapshot_lookups(api.clone()),
            droplets: droplet_lookups(api.clone()),
            api,
            region: region.to_owned(),
            topology: Arc::new(Topology::single(REGION, region)),
            driver: config.driver_name.clone(),
            tags: config.tag.iter().cloned().collect(),
            volume_limit: config.volume_limit,
            queues: Queues::default(),
            waiting: AtomicUsize::new(0),
            seen: Mutex::default(),
            cleaning: OnceLock::new(),
        });
        match account.check(Deadline::after(Duration::from_secs(10))).await {
            Err(Error::Denied(why)) => {
                return Err(Error::Denied(format!("the token is not accepted: {why}")));
            }
            Err(error) => {
                tracing::warn!(%error, "DigitalOcean does not answer; the driver starts all the same");
            }
            Ok(()) => {}
        }
        let age = config.leftover_age;
        let pause = CLEANING.min(age.max(Duration::from_secs(1)));
        let cleaning = repeat_while_used(&account, pause, move |account: Arc<Self>| async move {
            if let Err(error) = account.clean(age).await {
                tracing::warn!(%error, "snapshots that clones were made of could not be looked for");
            }
        });
        account.cleaning.get_or_init(|| cleaning);
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

    /// Waits until an action is completed, or the volume shows that it is; an action that fails is an error at once.
    pub(super) async fn settle(
        &self,
        volume: &str,
        action: Option<Action>,
        what: &str,
        until: Deadline,
        is_done: impl Fn(&DoVolume) -> bool + Send,
    ) -> Result<()> {
        let Some(action) = action else { return Ok(()) };
        let failed = || {
            let id = action.id;
            Error::State(format!("DigitalOcean could not {what} volume {volume:?}: action {id} errored"))
        };
        match action.status.as_str() {
            "completed" => return Ok(()),
            "errored" => return Err(failed()),
            _ => {}
        }
        let waiting = Waiting::new(&self.waiting);
        let mut pace = Pace::new();
        while pace.next(waiting.others(), until).await {
            if waiting.others() >= MANY && !pace.looks().is_multiple_of(ASK_ACTION) {
                match self.volume(By::Id(volume.to_owned()), until).await {
                    Ok(Some(found)) if is_done(&found) => return Ok(()),
                    Ok(_) => {}
                    Err(error) => tracing::debug!(%error, "looking for the outcome of an action"),
                }
                continue;
            }
            match self.api.action(volume, action.id, until).await {
                Ok(now) if now.status == "completed" => return Ok(()),
                Ok(now) if now.status == "errored" => return Err(failed()),
                Ok(_) => {}
                // It is no longer known: the volume itself says what became of it.
                Err(error) if is_missing(&error) => {
                    return match self.volume(By::Id(volume.to_owned()), until).await? {
                        Some(found) if is_done(&found) => Ok(()),
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

    /// Removes snapshots that a clone was made of and that were left over, because this program was killed at the wrong time.
    pub(super) async fn clean(&self, age: Duration) -> Result<()> {
        let until = Deadline::after(LOOKUP);
        for snapshot in self.api.snapshots(until).await? {
            let is_old =
                created(&snapshot).is_ok_and(|created| created.elapsed().is_ok_and(|elapsed| elapsed >= age));
            if snapshot.name.starts_with(CLONE_PREFIX) && is_old {
                tracing::info!(snapshot.id, "removing a snapshot that a clone was made of");
                self.api.delete_snapshot(&snapshot.id, until).await?;
            }
        }
        Ok(())
    }
}

/// When a snapshot was taken.
pub(super) fn created(snapshot: &DoSnapshot) -> Result<std::time::SystemTime> {
    let at: jiff::Timestamp = snapshot.created_at.parse().map_err(|error| {
        Error::Unavailable(format!("snapshot {}: created_at {:?}: {error}", snapshot.id, snapshot.created_at))
    })?;
    Ok(at.into())
}

fn volume_lookups(api: Arc<Api>, region: String) -> Found<By, Arc<DoVolume>> {
    let count = Arc::new(AtomicU64::new(0));
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
            let pages = count.load(Ordering::Relaxed) / PAGE + 1;
            if keys.len() as u64 <= pages {
                return Ok(singly(join_all(keys.into_iter().map(one)).await));
            }
            let all = api.volumes(&region, until).await?;
            count.store(all.len() as u64, Ordering::Relaxed);
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

fn droplet_lookups(api: Arc<Api>) -> Found<u64, Arc<Droplet>> {
    let count = Arc::new(AtomicU64::new(0));
    Lookups::new(move |keys: Vec<u64>| {
        let (api, count) = (api.clone(), count.clone());
        Box::pin(async move {
            let until = Deadline::after(LOOKUP);
            let one = async |key: u64| (key, api.droplet(key, until).await);
            if keys.len() as u64 <= count.load(Ordering::Relaxed) / PAGE + 1 {
                return Ok(singly(join_all(keys.into_iter().map(one)).await));
            }
            let all = api.droplets(until).await?;
            count.store(all.len() as u64, Ordering::Relaxed);
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
