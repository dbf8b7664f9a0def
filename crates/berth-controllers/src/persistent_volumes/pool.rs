//! The volumes that are free, and the claims that wait for one.
//!
//! Guarantees: a free volume is promised to at most one claim at a time; a volume that is free and promised to nobody
//! fits no waiting claim. So two claims never take the same volume, however many are reconciled at the same time, and a claim
//! that found nothing hears of the first volume that fits it without anybody going through all claims.
//!
//! A promise ends when the volume changes hands or the claim's [`Turn`] ends; then the volume is offered to others.
//! Looking for a volume and waiting for one happen under one lock; nothing is written to Kubernetes under it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};

use berth_kube::Key;

use super::plan::{self, AccessModes};
use berth_kube::{selectors, storage};

/// Free volumes and waiting claims; cheap to clone.
#[derive(Clone)]
pub(super) struct Pool {
    state: Arc<Mutex<State>>,
    wake: Arc<dyn Fn(Key) + Send + Sync>,
}

#[derive(Default)]
struct State {
    /// Free and promised to nobody, by what must be equal, then by access modes, then by size and name.
    free: HashMap<Shelf, BTreeMap<AccessModes, BySize>>,
    /// Free and promised to a claim.
    promised: HashMap<Key, BTreeMap<Rank, Arc<PersistentVolume>>>,
    /// Where each free volume is.
    pooled: HashMap<String, PooledVolume>,
    /// The claims that found nothing.
    waiting: HashMap<Shelf, BTreeMap<AccessModes, BTreeSet<(i128, Key)>>>,
    wants: HashMap<Key, Want>,
}

/// Volumes by size and name.
type BySize = BTreeMap<(i128, String), Arc<PersistentVolume>>;

/// What a volume and a claim must have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Shelf {
    class: String,
    attributes_class: String,
    block: bool,
}

/// Which of several volumes a claim prefers: few access modes before little space.
type Rank = (AccessModes, i128, String);

struct PooledVolume {
    shelf: Shelf,
    rank: Rank,
    promised_to: Option<Key>,
}

impl PooledVolume {
    fn of(volume: &PersistentVolume, promised_to: Option<Key>) -> Self {
        Self { shelf: shelf_of(volume), rank: rank_of(volume), promised_to }
    }
}

/// What a claim asks for.
#[derive(Clone)]
struct Want {
    shelf: Shelf,
    modes: AccessModes,
    size: i128,
    selector: Option<LabelSelector>,
}

impl Want {
    fn of(claim: &PersistentVolumeClaim) -> Self {
        Self {
            shelf: Shelf {
                class: storage::class_of_claim(claim).to_owned(),
                attributes_class: plan::claim_attributes_class(claim).to_owned(),
                block: plan::is_block(plan::claim_mode(claim)),
            },
            modes: AccessModes::of_claim(claim),
            size: storage::requested(claim),
            selector: claim.spec.as_ref().and_then(|spec| spec.selector.clone()),
        }
    }

    /// Whether a volume on the claim's shelf fits.
    fn takes(&self, (modes, size, _): &Rank, volume: &PersistentVolume) -> bool {
        modes.contains(self.modes) && *size >= self.size && self.selects(volume)
    }

    fn selects(&self, volume: &PersistentVolume) -> bool {
        let labels = selectors::labels(volume.metadata.labels.as_ref());
        self.selector.as_ref().is_none_or(|selector| selectors::label_selector(selector, labels))
    }
}

fn shelf_of(volume: &PersistentVolume) -> Shelf {
    Shelf {
        class: storage::class_of_volume(volume).to_owned(),
        attributes_class: plan::volume_attributes_class(volume).to_owned(),
        block: plan::is_block(plan::volume_mode(volume)),
    }
}

fn is_free(volume: &PersistentVolume) -> bool {
    plan::phase(volume) == "Available"
        && plan::claim_ref(volume).is_none()
        && volume.metadata.deletion_timestamp.is_none()
}

/// Of volumes that are reserved for a claim the one it gets: the smallest that fits.
pub(super) fn reserved(
    volumes: Vec<Arc<PersistentVolume>>,
    claim: &PersistentVolumeClaim,
) -> Option<Arc<PersistentVolume>> {
    let fitting = volumes.into_iter().filter(|volume| is_fit_reserved(volume, claim));
    fitting.min_by_key(|volume| (storage::capacity(volume), volume.name_any()))
}

/// Whether a volume that is reserved for a claim can be bound to it; class and labels do not matter then.
fn is_fit_reserved(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    storage::refers_to(volume, claim)
        && storage::capacity(volume) >= storage::requested(claim)
        && plan::is_block(plan::volume_mode(volume)) == plan::is_block(plan::claim_mode(claim))
        && plan::volume_attributes_class(volume) == plan::claim_attributes_class(claim)
        && volume.metadata.deletion_timestamp.is_none()
        && AccessModes::of_volume(volume).contains(AccessModes::of_claim(claim))
}

impl Pool {
    /// An empty pool; `wake` is called for a waiting claim that was promised a volume, and must lead to its turn.
    pub(super) fn new(wake: impl Fn(Key) + Send + Sync + 'static) -> Self {
        Self { state: Arc::default(), wake: Arc::new(wake) }
    }

    /// A volume is as in `after` now, or gone.
    pub(super) fn volume_changed(&self, name: &str, after: Option<&Arc<PersistentVolume>>) {
        let mut state = self.state();
        let promised_to = state.remove(name);
        if let Some(volume) = after.filter(|volume| is_free(volume)) {
            match promised_to {
                // Its turn is under way or about to come; it reads the volume as it is now.
                Some(claim) => state.promise(volume.clone(), claim),
                None => self.offer(&mut state, volume.clone(), None),
            }
        }
    }

    /// The turn of a claim begins: it waits no more, and what it is promised stays its own until the turn ends.
    pub(super) fn turn(&self, claim: Key) -> Turn<'_> {
        self.state().wait_no_more(&claim);
        Turn { pool: self, claim }
    }

    fn offer(&self, state: &mut State, volume: Arc<PersistentVolume>, except: Option<&Key>) {
        match state.taker(&volume, except) {
            Some(claim) => {
                // The next volume is for the next claim, not for this one too: its turn would pass it on.
                state.wait_no_more(&claim);
                state.promise(volume, claim.clone());
                (self.wake)(claim);
            }
            None => state.shelve(volume),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// A claim that is being reconciled.
pub(super) struct Turn<'a> {
    pool: &'a Pool,
    claim: Key,
}

impl Turn<'_> {
    /// The best free volume for the claim, promised to it until the turn ends; if there is none, the claim waits for
    /// one.
    pub(super) fn find(&self, claim: &PersistentVolumeClaim) -> Option<Arc<PersistentVolume>> {
        let want = Want::of(claim);
        let mut state = self.pool.state();
        let Some(volume) = state.best(&self.claim, &want) else {
            state.wait(self.claim.clone(), want);
            return None;
        };
        state.remove(&volume.name_any());
        state.promise(volume.clone(), self.claim.clone());
        Some(volume)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        for volume in state.promised.remove(&self.claim).unwrap_or_default().into_values() {
            state.pooled.remove(&volume.name_any());
            // Not to the same claim again: it did not want it, or failed and comes by again anyway.
            self.pool.offer(&mut state, volume, Some(&self.claim));
        }
    }
}

impl State {
    /// Forgets a volume; returns whom it was promised to.
    fn remove(&mut self, name: &str) -> Option<Key> {
        let PooledVolume { shelf, rank, promised_to } = self.pooled.remove(name)?;
        if let Some(claim) = &promised_to {
            if let Some(volumes) = self.promised.get_mut(claim) {
                volumes.remove(&rank);
                if volumes.is_empty() {
                    self.promised.remove(claim);
                }
            }
        } else if let Some(modes) = self.free.get_mut(&shelf) {
            let (access, size, name) = rank;
            if let Some(volumes) = modes.get_mut(&access) {
                volumes.remove(&(size, name));
                if volumes.is_empty() {
                    modes.remove(&access);
                }
            }
            if modes.is_empty() {
                self.free.remove(&shelf);
            }
        }
        promised_to
    }

    fn promise(&mut self, volume: Arc<PersistentVolume>, claim: Key) {
        let pooled_volume = PooledVolume::of(&volume, Some(claim.clone()));
        self.promised.entry(claim).or_default().insert(pooled_volume.rank.clone(), volume);
        self.pooled.insert(pooled_volume.rank.2.clone(), pooled_volume);
    }

    fn shelve(&mut self, volume: Arc<PersistentVolume>) {
        let pooled_volume = PooledVolume::of(&volume, None);
        let (modes, size, name) = pooled_volume.rank.clone();
        let volumes = self.free.entry(pooled_volume.shelf.clone()).or_default().entry(modes).or_default();
        volumes.insert((size, name.clone()), volume);
        self.pooled.insert(name, pooled_volume);
    }

    /// The best volume for a claim among those promised to it and those promised to nobody.
    fn best(&self, claim: &Key, want: &Want) -> Option<Arc<PersistentVolume>> {
        let promised = self.promised.get(claim).into_iter().flatten();
        let promised = promised
            .filter(|(rank, volume)| shelf_of(volume) == want.shelf && want.takes(rank, volume))
            .map(|(rank, volume)| (rank.clone(), volume));
        let free = self.free.get(&want.shelf).into_iter().flatten();
        let free = free.filter(|(modes, _)| modes.contains(want.modes)).find_map(|(modes, volumes)| {
            let large = volumes.range((want.size, String::new())..);
            large
                .filter(|(_, volume)| want.selects(volume))
                .map(|((size, name), volume)| ((*modes, *size, name.clone()), volume))
                .next()
        });
        promised.chain(free).min_by(|(one, _), (other, _)| one.cmp(other)).map(|(_, volume)| volume.clone())
    }

    /// The waiting claim that wants a volume; the one that leaves the least of it unused.
    fn taker(&self, volume: &PersistentVolume, except: Option<&Key>) -> Option<Key> {
        let (modes, size, _) = rank_of(volume);
        let waiting = self.waiting.get(&shelf_of(volume)).into_iter().flatten();
        waiting.filter(|(asked, _)| modes.contains(**asked)).find_map(|(_, claims)| {
            let fitting = claims.range(..(size + 1, Key::cluster(""))).rev();
            fitting
                .map(|(_, claim)| claim)
                .find(|claim| {
                    Some(*claim) != except && self.wants.get(*claim).is_some_and(|want| want.selects(volume))
                })
                .cloned()
        })
    }

    fn wait(&mut self, claim: Key, want: Want) {
        self.wait_no_more(&claim);
        let modes = self.waiting.entry(want.shelf.clone()).or_default();
        modes.entry(want.modes).or_default().insert((want.size, claim.clone()));
        self.wants.insert(claim, want);
    }

    fn wait_no_more(&mut self, claim: &Key) {
        let Some(Want { shelf, modes: asked, size, .. }) = self.wants.remove(claim) else { return };
        let Some(modes) = self.waiting.get_mut(&shelf) else { return };
        if let Some(claims) = modes.get_mut(&asked) {
            claims.remove(&(size, claim.clone()));
            if claims.is_empty() {
                modes.remove(&asked);
            }
        }
        if modes.is_empty() {
            self.waiting.remove(&shelf);
        }
    }
}

fn rank_of(volume: &PersistentVolume) -> Rank {
    (AccessModes::of_volume(volume), storage::capacity(volume), volume.name_any())
}
