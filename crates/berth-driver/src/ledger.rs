//! What is staged and published on this node.
//!
//! Written before and after each effect, without fsync: mounts do not survive a reboot either, and the boot id in
//! the boot id in the journal shows when there was one. A killed process finds its entries again, and by their [`Phase`] what it
//! was in the middle of.

pub(crate) mod record;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

use berth_core::VolumeId;
use berth_host::path::Dir;
use berth_journal::{Entry, Journal};
use parking_lot::{Mutex, MutexGuard};

pub(crate) use self::record::{Phase, Published, Staged};
use crate::{Error, Result};

const JOURNAL: &str = "node.journal";
const BOOT: &str = "boot";

/// The entries, in memory and on disk.
pub(crate) struct Ledger {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// None where nothing can be mounted, so nothing is lost with the process.
    journal: Option<Journal>,
    volumes: HashMap<VolumeId, OnNode>,
    targets: HashMap<PathBuf, VolumeId>,
    /// What Kubernetes calls an inline volume, to what the backend calls it.
    handles: HashMap<VolumeId, VolumeId>,
}

#[derive(Default)]
struct OnNode {
    staged: Option<Staged>,
    published: BTreeMap<PathBuf, Published>,
}

impl Ledger {
    /// A ledger that is forgotten with the process, for a driver that mounts nothing.
    pub(crate) fn in_memory() -> Self {
        Self { state: Mutex::default() }
    }

    /// The ledger in `dir`, empty if it was written before the boot named `boot_id`.
    pub(crate) fn open(dir: &Dir, boot_id: &str) -> Result<Self> {
        let mut records = BTreeMap::new();
        let (mut journal, damage) = Journal::open(dir, JOURNAL, &mut |key, json| {
            records.insert(key.to_owned(), json.to_vec());
        })?;
        if damage.lines > 0 {
            tracing::warn!(damage.lines, "the record of what is mounted here was damaged");
        }
        let boot = serde_json::to_vec(boot_id).expect("a string always becomes JSON");
        if records.remove(BOOT).as_deref() != Some(boot.as_slice()) {
            let mut changes: Vec<Entry<'_>> = records.keys().map(|key| Entry::Remove { key }).collect();
            changes.push(Entry::Put { key: BOOT, json: &boot });
            // A machine whose disk is full has to start all the same, if only to delete something.
            journal.write_from_reserve(&changes)?;
            records.clear();
        }
        let mut state = State { journal: Some(journal), ..State::default() };
        for (key, json) in &records {
            if let Err(error) = state.restore(key, json) {
                tracing::warn!(key, %error, "a record of what is mounted here makes no sense and is ignored");
            }
        }
        Ok(Self { state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Where and how a volume is staged.
    pub(crate) fn staged(&self, id: &VolumeId) -> Option<Staged> {
        self.state().volumes.get(id)?.staged.clone()
    }

    /// What is published at a target.
    pub(crate) fn published_at(&self, target: &Path) -> Option<Published> {
        let state = self.state();
        state.volumes.get(state.targets.get(target)?)?.published.get(target).cloned()
    }

    /// Everywhere a volume is published, in the order of the paths.
    pub(crate) fn published(&self, id: &VolumeId) -> Vec<Published> {
        self.state()
            .volumes
            .get(id)
            .map(|here| here.published.values().cloned().collect())
            .unwrap_or_default()
    }

    /// A path at which the volume is in use here, if there is one.
    pub(crate) fn path_of(&self, id: &VolumeId) -> Option<PathBuf> {
        let state = self.state();
        let here = state.volumes.get(id)?;
        here.published.keys().next().or(here.staged.as_ref().map(|staged| &staged.path)).cloned()
    }

    /// The backend's id of a volume, which for an inline one is not the one Kubernetes has.
    pub(crate) fn backend_id(&self, id: &VolumeId) -> VolumeId {
        self.state().handles.get(id).unwrap_or(id).clone()
    }

    /// Everything, for the recovery after a restart.
    pub(crate) fn everything(&self) -> (Vec<Staged>, Vec<Published>) {
        let state = self.state();
        let staged = state.volumes.values().filter_map(|here| here.staged.clone()).collect();
        let published = state.volumes.values().flat_map(|here| here.published.values().cloned()).collect();
        (staged, published)
    }

    /// Notes that a volume is being staged, is staged, or is being unstaged.
    pub(crate) fn note_staged(&self, staged: Staged) -> Result<()> {
        let json = serde_json::to_vec(&staged).map_err(|error| unwritable(&error))?;
        let mut state = self.state();
        state.write(Entry::Put { key: &staged_key(&staged.volume), json: &json })?;
        state.add_staged(staged);
        Ok(())
    }

    /// Notes that a volume is no longer staged.
    pub(crate) fn forget_staged(&self, id: &VolumeId) -> Result<()> {
        let mut state = self.state();
        if state.volumes.get(id).is_some_and(|here| here.staged.is_some()) {
            state.write(Entry::Remove { key: &staged_key(id) })?;
            state.change(id, |here| here.staged = None);
        }
        Ok(())
    }

    /// Notes that a volume is being published, is published, or is being unpublished.
    pub(crate) fn note_published(&self, published: Published) -> Result<()> {
        let json = serde_json::to_vec(&published).map_err(|error| unwritable(&error))?;
        let mut state = self.state();
        state.write(Entry::Put { key: &target_key(&published.target), json: &json })?;
        state.add_published(published);
        Ok(())
    }

    /// Notes that nothing is published at a target any more.
    pub(crate) fn forget_published(&self, target: &Path) -> Result<()> {
        let mut state = self.state();
        let Some(id) = state.targets.get(target).cloned() else { return Ok(()) };
        state.write(Entry::Remove { key: &target_key(target) })?;
        state.drop_published(&id, target);
        Ok(())
    }
}

impl State {
    fn write(&mut self, entry: Entry<'_>) -> Result<()> {
        match &mut self.journal {
            Some(journal) => Ok(journal.write(&[entry])?),
            None => Ok(()),
        }
    }

    fn restore(&mut self, key: &str, json: &[u8]) -> serde_json::Result<()> {
        if key.starts_with(STAGED) {
            self.add_staged(serde_json::from_slice(json)?);
        } else {
            self.add_published(serde_json::from_slice(json)?);
        }
        Ok(())
    }

    fn add_staged(&mut self, staged: Staged) {
        let id = staged.volume.clone();
        self.volumes.entry(id).or_default().staged = Some(staged);
    }

    fn add_published(&mut self, published: Published) {
        let (id, target) = (published.volume.clone(), published.target.clone());
        if let Some(before) = self.targets.get(&target).cloned() {
            self.drop_published(&before, &target);
        }
        if let Some(handle) = &published.handle {
            self.handles.insert(handle.clone(), id.clone());
        }
        self.targets.insert(target.clone(), id.clone());
        self.volumes.entry(id).or_default().published.insert(target, published);
    }

    fn drop_published(&mut self, id: &VolumeId, target: &Path) {
        self.targets.remove(target);
        let gone = self.change(id, |here| here.published.remove(target)).flatten();
        if let Some(handle) = gone.and_then(|published| published.handle) {
            self.handles.remove(&handle);
        }
    }

    /// Changes a volume's entry, and forgets it when nothing is left of it.
    fn change<T>(&mut self, id: &VolumeId, change: impl FnOnce(&mut OnNode) -> T) -> Option<T> {
        let here = self.volumes.get_mut(id)?;
        let result = change(here);
        if here.staged.is_none() && here.published.is_empty() {
            self.volumes.remove(id);
        }
        Some(result)
    }
}

const STAGED: &str = "staged ";
const TARGET: &str = "target ";

fn staged_key(id: &VolumeId) -> String {
    format!("{STAGED}{id}")
}

fn target_key(target: &Path) -> String {
    format!("{TARGET}{}", target.display())
}

fn unwritable(error: &serde_json::Error) -> Error {
    Error::State(format!("record what is mounted: {error}"))
}
