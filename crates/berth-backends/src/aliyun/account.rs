//! One account in one region: lookups that are put together, what is waited for, and what is removed afterwards.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::{
    Config, PROVIDER, TopologyKeys,
    api::{Api, BATCH, Disk, EcsSnapshot},
    names::{CLONE_TAG, CREATED_BY, VOLUME_NAME},
};
use crate::{
    Error, Result,
    cloud::{
        ClonesBySnapshot, Deadline, Found, Lookups, Outcome, Pace, Queues, Waiting, check_start,
        keep_removing, look_up,
    },
};

/// A lookup ends within this time, whoever waits for it.
const LOOKUP: Duration = Duration::from_secs(60);
/// How long what was just made may be missing from descriptions, which lag behind.
const LAG: Duration = Duration::from_secs(60);
/// What is done to a disk shows within so many looks. One that looks as before after that was not done.
const BEGIN_LOOKS: u32 = 4;

/// By what a disk is looked up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum By {
    Id(String),
    /// The name that the caller gave it, which is in a tag.
    Name(String),
}

/// How far something is that is done to a disk.
pub(super) enum Progress {
    /// The disk shows what was asked for.
    Done,
    /// It is under way.
    UnderWay,
    /// The disk is as it was before, or as it will be after a failure.
    NotBegun,
    /// It cannot be done any more.
    Impossible(Error),
}

/// The disks of an account in a region.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) api: Arc<Api>,
    pub(super) region: String,
    /// Where disks are made if nobody says where.
    pub(super) zone: Option<String>,
    pub(super) keys: TopologyKeys,
    pub(super) cluster: Option<String>,
    /// Attachments and detachments, one at a time for each instance.
    pub(super) queues: Queues,
    disks: Found<By, Arc<Disk>>,
    snapshots: Found<By, Arc<EcsSnapshot>>,
    /// How many operations are waited for.
    waiting: AtomicUsize,
    /// The disks as they were last seen, for calls that come right after.
    observed: Mutex<HashMap<String, Arc<Disk>>>,
    /// What was made a short while ago and may not be described yet.
    recent: Mutex<HashMap<String, Instant>>,
    /// When the snapshots that clones are made of were last needed here.
    pub(super) cloning: Mutex<HashMap<String, Instant>>,
    started: Instant,
    cleaning: OnceLock<AbortOnDropHandle<()>>,
}

impl Account {
    /// Checks the key; that the API cannot be reached now is no reason not to start.
    pub(super) async fn open(
        api: Api,
        region: &str,
        zone: Option<String>,
        config: &Config,
    ) -> Result<Arc<Self>> {
        let api = Arc::new(api);
        let checked = api.check(Deadline::after(Duration::from_secs(10))).await;
        check_start(PROVIDER, "access key", checked.map_err(Error::from))?;
        let account = Arc::new(Self {
            disks: lookups(api.clone()),
            snapshots: lookups(api.clone()),
            api,
            region: region.to_owned(),
            zone,
            keys: config.topology_keys(),
            cluster: config.cluster_id.clone(),
            queues: Queues::default(),
            waiting: AtomicUsize::new(0),
            observed: Mutex::default(),
            recent: Mutex::default(),
            cloning: Mutex::default(),
            started: Instant::now(),
            cleaning: OnceLock::new(),
        });
        account.cleaning.get_or_init(|| keep_removing(&account, config.leftover_age));
        Ok(account)
    }

    /// The disk, as it is now. One that was made a short while ago is waited for.
    pub(super) async fn disk(&self, by: By, until: Deadline) -> Outcome<Option<Arc<Disk>>> {
        let mut pace = Pace::new();
        loop {
            let found = look_up(&self.disks, PROVIDER, by.clone(), until).await?;
            if let Some(disk) = &found {
                self.observed.lock().insert(disk.id.clone(), disk.clone());
                self.recent.lock().remove(&disk.id);
                return Ok(found);
            }
            let By::Id(id) = &by else { return Ok(None) };
            if !self.is_recent(id) || !pace.next(0, until).await {
                self.observed.lock().remove(id);
                return Ok(None);
            }
        }
    }

    /// The disk as the lookup saw it that every call begins with.
    pub(super) async fn observed(&self, id: &str, until: Deadline) -> Result<Arc<Disk>> {
        if let Some(disk) = self.last_seen(id) {
            return Ok(disk);
        }
        self.disk(By::Id(id.to_owned()), until).await?.ok_or_else(|| Error::not_found("volume", id))
    }

    /// The disk as it was last seen, if it was.
    pub(super) fn last_seen(&self, id: &str) -> Option<Arc<Disk>> {
        self.observed.lock().get(id).cloned()
    }

    /// Notes a disk that was just made.
    pub(super) fn made(&self, disk: &Arc<Disk>) {
        let mut recent = self.recent.lock();
        recent.retain(|_, since| since.elapsed() < LAG);
        recent.insert(disk.id.clone(), Instant::now());
        self.observed.lock().insert(disk.id.clone(), disk.clone());
    }

    /// Forgets a disk that was removed.
    pub(super) fn removed(&self, id: &str) {
        self.recent.lock().remove(id);
        self.observed.lock().remove(id);
    }

    fn is_recent(&self, id: &str) -> bool {
        self.recent.lock().get(id).is_some_and(|since| since.elapsed() < LAG)
    }

    /// The snapshot, as it is now.
    pub(super) async fn ecs_snapshot(&self, by: By, until: Deadline) -> Outcome<Option<Arc<EcsSnapshot>>> {
        look_up(&self.snapshots, PROVIDER, by, until).await
    }

    /// Waits until something that was begun shows in the disk. What failed leaves the disk as it was, and is an error as soon
    /// as it does.
    pub(super) async fn settle(
        &self,
        id: &str,
        what: &str,
        until: Deadline,
        progress: impl Fn(&Disk) -> Progress + Send,
    ) -> Result<()> {
        let waiting = Waiting::new(&self.waiting);
        let mut pace = Pace::new();
        let mut was_under_way = false;
        while pace.next(waiting.others(), until).await {
            let found = match self.disk(By::Id(id.to_owned()), until).await {
                Ok(found) => found,
                Err(error) => {
                    tracing::debug!(%error, "looking for the outcome of an operation");
                    continue;
                }
            };
            let Some(disk) = found else { return Err(Error::not_found("volume", id)) };
            match progress(&disk) {
                Progress::Done => return Ok(()),
                Progress::Impossible(why) => return Err(why),
                Progress::UnderWay => was_under_way = true,
                // What was just begun may not show yet.
                Progress::NotBegun if !was_under_way && pace.looks() < BEGIN_LOOKS => {}
                Progress::NotBegun => {
                    return Err(Error::State(format!(
                        "{PROVIDER} could not {what} volume {id:?}: it is {:?} again",
                        disk.status
                    )));
                }
            }
        }
        Err(Error::Busy(format!("{PROVIDER} is still about to {what} volume {id:?}")))
    }
}

impl ClonesBySnapshot for Account {
    async fn clone_snapshots(&self, until: Deadline) -> Result<Vec<(String, SystemTime)>> {
        let all = self.api.snapshots_with(("Tag.1.Key", CLONE_TAG), until).await?;
        let of_clones = all.into_iter().filter(|snapshot| snapshot.tag(CLONE_TAG).is_some());
        Ok(of_clones
            .filter_map(|snapshot| created(&snapshot).ok().map(|taken| (snapshot.snapshot_id, taken)))
            .collect())
    }

    fn needs(&self, snapshot: &str, within: Duration) -> bool {
        // A clone of a large disk waits long for its snapshot, and asks for it again and again.
        self.cloning.lock().get(snapshot).copied().unwrap_or(self.started).elapsed() < within
    }

    async fn remove_snapshot(&self, snapshot: &str, until: Deadline) -> Result<()> {
        self.api.delete_snapshot(snapshot, until).await?;
        self.cloning.lock().remove(snapshot);
        Ok(())
    }
}

/// When a snapshot was taken.
pub(super) fn created(snapshot: &EcsSnapshot) -> Result<SystemTime> {
    timestamp("snapshot", &snapshot.snapshot_id, &snapshot.creation_time)
}

/// The time at which something was made, as the provider writes it.
pub(super) fn timestamp(what: &str, id: &str, text: &str) -> Result<SystemTime> {
    let at: jiff::Timestamp = text
        .parse()
        .map_err(|error| Error::Unavailable(format!("{what} {id}: CreationTime {text:?}: {error}")))?;
    Ok(at.into())
}

/// Whether text can be an id of the provider's; any other would make a whole batch fail.
fn is_id(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=64).contains(&text.len()) && text.bytes().all(is_plain)
}

/// Disks and snapshots, which are described in the same ways.
trait Described: Send + Sync + Sized + 'static {
    fn id(&self) -> &str;
    /// The name that the caller gave it.
    fn name(&self) -> Option<&str>;
    /// Those of these ids, at most [`BATCH`].
    fn of_ids(api: &Api, ids: &[&str], until: Deadline) -> impl Future<Output = Outcome<Vec<Self>>> + Send;
    fn of_name(api: &Api, name: &str, until: Deadline) -> impl Future<Output = Outcome<Vec<Self>>> + Send;
    /// All that this driver, or upstream's, made.
    fn all(api: &Api, until: Deadline) -> impl Future<Output = Outcome<Vec<Self>>> + Send;
}

impl Described for Disk {
    fn id(&self) -> &str {
        &self.id
    }

    fn name(&self) -> Option<&str> {
        self.tag(VOLUME_NAME)
    }

    async fn of_ids(api: &Api, ids: &[&str], until: Deadline) -> Outcome<Vec<Self>> {
        api.disks(ids, until).await
    }

    async fn of_name(api: &Api, name: &str, until: Deadline) -> Outcome<Vec<Self>> {
        api.disks_tagged(VOLUME_NAME, Some(name), until).await
    }

    async fn all(api: &Api, until: Deadline) -> Outcome<Vec<Self>> {
        api.disks_tagged(VOLUME_NAME, None, until).await
    }
}

impl Described for EcsSnapshot {
    fn id(&self) -> &str {
        &self.snapshot_id
    }

    fn name(&self) -> Option<&str> {
        Some(&self.snapshot_name)
    }

    async fn of_ids(api: &Api, ids: &[&str], until: Deadline) -> Outcome<Vec<Self>> {
        api.snapshots(ids, until).await
    }

    async fn of_name(api: &Api, name: &str, until: Deadline) -> Outcome<Vec<Self>> {
        api.snapshots_with(("SnapshotName", name), until).await
    }

    async fn all(api: &Api, until: Deadline) -> Outcome<Vec<Self>> {
        api.snapshots_with(("Tag.1.Key", CREATED_BY.0), until).await
    }
}

/// Lookups of many as one: ids by the hundred, and names by one listing once that is cheaper than asking for each.
fn lookups<T: Described>(api: Arc<Api>) -> Found<By, Arc<T>> {
    let count = Arc::new(AtomicU64::new(0));
    Lookups::new(move |keys: Vec<By>| {
        let (api, count) = (api.clone(), count.clone());
        Box::pin(async move {
            let until = Deadline::after(LOOKUP);
            let (mut ids, mut names) = (Vec::new(), Vec::new());
            for key in &keys {
                match key {
                    By::Id(id) if is_id(id) => ids.push(id.as_str()),
                    By::Id(_) => {}
                    By::Name(name) => names.push(name.as_str()),
                }
            }
            let mut found: HashMap<By, Outcome<Arc<T>>> = HashMap::new();
            let mut note = |key: By, outcome: Outcome<T>| drop(found.insert(key, outcome.map(Arc::new)));
            let batches = ids.chunks(BATCH).map(|batch| T::of_ids(&api, batch, until));
            for (batch, answer) in ids.chunks(BATCH).zip(join_all(batches).await) {
                match answer {
                    Ok(all) => all.into_iter().for_each(|one| note(By::Id(one.id().to_owned()), Ok(one))),
                    // A batch that failed is the failure of each of its ids.
                    Err(failure) => {
                        for id in batch {
                            note(By::Id((*id).to_owned()), Err(failure.clone()));
                        }
                    }
                }
            }
            let pages = count.load(Ordering::Relaxed) / BATCH as u64 + 1;
            if names.len() as u64 <= pages {
                let answers = join_all(names.iter().map(|name| T::of_name(&api, name, until))).await;
                for (name, answer) in names.iter().zip(answers) {
                    if let Some(one) = answer.map(|mut all| all.pop()).transpose() {
                        note(By::Name((*name).to_owned()), one);
                    }
                }
                return Ok(found);
            }
            let all = T::all(&api, until).await?;
            count.store(all.len() as u64, Ordering::Relaxed);
            for one in all {
                if let Some(name) = one.name().map(ToOwned::to_owned) {
                    note(By::Name(name), Ok(one));
                }
            }
            Ok(found)
        })
    })
}
