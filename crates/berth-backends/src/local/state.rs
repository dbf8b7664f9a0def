//! What the driver knows, in memory: every record, in the order of ids, and the sums that requests need.
//!
//! Changed only after the journal has the change, and rebuilt from it at start. Every question is answered by a
//! look-up or a range, never by going through all volumes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    ops::Bound,
    sync::Arc,
};

use super::record::{GroupRecord, Key, SnapshotRecord, VolumeRecord};
use crate::Parameters;

/// Every record, with the sums that are made of them.
#[derive(Debug, Default)]
pub(super) struct State {
    volumes: BTreeMap<Key, Arc<VolumeRecord>>,
    snapshots: BTreeMap<Key, Arc<SnapshotRecord>>,
    groups: BTreeMap<Key, Arc<GroupRecord>>,
    snapshots_by_source: BTreeSet<(Key, Key)>,
    attached: HashMap<Box<str>, usize>,
    /// Equal parameter sets are kept once: a hundred thousand volumes of one class share one map.
    parameters: HashSet<Arc<Parameters>>,
    /// Sizes promised, in all and per pool.
    promised: u64,
    promised_in_pool: HashMap<String, u64>,
    /// What volumes are known to occupy of what was promised to them.
    used: HashMap<Key, u64>,
    used_in_all: u64,
}

impl State {
    /// The volume of that key.
    pub(super) fn volume(&self, key: Key) -> Option<Arc<VolumeRecord>> {
        self.volumes.get(&key).cloned()
    }

    /// The snapshot of that key.
    pub(super) fn snapshot(&self, key: Key) -> Option<Arc<SnapshotRecord>> {
        self.snapshots.get(&key).cloned()
    }

    /// The group of that key.
    pub(super) fn group(&self, key: Key) -> Option<Arc<GroupRecord>> {
        self.groups.get(&key).cloned()
    }

    /// Volumes after `after`, in order.
    pub(super) fn volumes_after(
        &self,
        after: Option<Key>,
    ) -> impl Iterator<Item = (Key, &Arc<VolumeRecord>)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.volumes.range((start, Bound::Unbounded)).map(|(key, record)| (*key, record))
    }

    /// Snapshots after `after`, in order.
    pub(super) fn snapshots_after(
        &self,
        after: Option<Key>,
    ) -> impl Iterator<Item = (Key, &Arc<SnapshotRecord>)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.snapshots.range((start, Bound::Unbounded)).map(|(key, record)| (*key, record))
    }

    /// A volume's snapshots after `after`, in order.
    pub(super) fn snapshots_of(
        &self,
        source: Key,
        after: Option<Key>,
    ) -> impl Iterator<Item = (Key, &Arc<SnapshotRecord>)> {
        let start =
            after.map_or(Bound::Included((source, Key::MIN)), |after| Bound::Excluded((source, after)));
        self.snapshots_by_source
            .range((start, Bound::Included((source, Key::MAX))))
            .filter_map(|(_, key)| self.snapshots.get_key_value(key).map(|(key, record)| (*key, record)))
    }

    /// How many volumes there are.
    pub(super) fn volume_count(&self) -> usize {
        self.volumes.len()
    }

    /// How many volumes are attached to a node.
    pub(super) fn attached_to(&self, node: &str) -> usize {
        self.attached.get(node).copied().unwrap_or_default()
    }

    /// Bytes promised to volumes, in all.
    pub(super) fn promised(&self) -> u64 {
        self.promised
    }

    /// Bytes promised to volumes of a pool.
    pub(super) fn promised_in(&self, pool: &str) -> u64 {
        self.promised_in_pool.get(pool).copied().unwrap_or_default()
    }

    /// Bytes that volumes are known to occupy, none counted above its size.
    pub(super) fn used(&self) -> u64 {
        self.used_in_all
    }

    /// What a volume is known to occupy.
    pub(super) fn used_by(&self, key: Key) -> u64 {
        self.used.get(&key).copied().unwrap_or_default()
    }

    /// Notes what a volume occupies.
    pub(super) fn set_used(&mut self, key: Key, bytes: u64) {
        let Some(volume) = self.volumes.get(&key) else { return };
        let bytes = bytes.min(volume.length());
        self.used_in_all -= self.used.insert(key, bytes).unwrap_or_default();
        self.used_in_all += bytes;
    }

    /// Promises a size ahead of the volume's record, or takes that back.
    pub(super) fn reserve(&mut self, pool: Option<&str>, bytes: u64) {
        self.promised += bytes;
        if let Some(pool) = pool {
            *self.promised_in_pool.entry(pool.to_owned()).or_default() += bytes;
        }
    }

    /// Takes a promise back.
    pub(super) fn release(&mut self, pool: Option<&str>, bytes: u64) {
        self.promised = self.promised.saturating_sub(bytes);
        if let Some(sum) = pool.and_then(|pool| self.promised_in_pool.get_mut(pool)) {
            *sum = sum.saturating_sub(bytes);
        }
    }

    /// Adds or replaces a volume. Its size counts as promised.
    pub(super) fn put_volume(&mut self, key: Key, mut record: VolumeRecord) -> Arc<VolumeRecord> {
        self.remove_volume(key);
        record.parameters = self.share(record.parameters);
        record.mutable = self.share(record.mutable);
        self.reserve(pool(&record.parameters).as_deref(), record.length());
        for attachment in &record.attachments {
            *self.attached.entry(attachment.node.clone()).or_default() += 1;
        }
        let record = Arc::new(record);
        self.volumes.insert(key, record.clone());
        record
    }

    /// Forgets a volume and takes its size from what is promised.
    pub(super) fn remove_volume(&mut self, key: Key) -> Option<Arc<VolumeRecord>> {
        let old = self.volumes.remove(&key)?;
        self.release(pool(&old.parameters).as_deref(), old.length());
        self.used_in_all -= self.used.remove(&key).unwrap_or_default();
        for attachment in &old.attachments {
            if let Some(count) = self.attached.get_mut(&attachment.node) {
                *count -= 1;
            }
        }
        Some(old)
    }

    /// Adds a snapshot, or replaces the one with this key.
    pub(super) fn put_snapshot(&mut self, key: Key, record: SnapshotRecord) -> Arc<SnapshotRecord> {
        self.snapshots_by_source.insert((record.source, key));
        let record = Arc::new(record);
        self.snapshots.insert(key, record.clone());
        record
    }

    /// Forgets a snapshot, if there is one with this key.
    pub(super) fn remove_snapshot(&mut self, key: Key) {
        if let Some(old) = self.snapshots.remove(&key) {
            self.snapshots_by_source.remove(&(old.source, key));
        }
    }

    /// Adds a group with its snapshots.
    pub(super) fn put_group(&mut self, key: Key, record: GroupRecord) -> Arc<GroupRecord> {
        for (member, snapshot) in &record.members {
            self.put_snapshot(*member, SnapshotRecord { group: Some(key), ..snapshot.clone() });
        }
        let record = Arc::new(record);
        self.groups.insert(key, record.clone());
        record
    }

    /// Forgets a group and its snapshots.
    pub(super) fn remove_group(&mut self, key: Key) {
        if let Some(old) = self.groups.remove(&key) {
            for member in old.members.keys() {
                self.remove_snapshot(*member);
            }
        }
    }

    fn share(&mut self, parameters: Arc<Parameters>) -> Arc<Parameters> {
        if let Some(shared) = self.parameters.get(&parameters) {
            return shared.clone();
        }
        self.parameters.insert(parameters.clone());
        parameters
    }
}

impl Key {
    const MIN: Self = Self::filled(0);
    const MAX: Self = Self::filled(0xff);
}

/// The simulated pool a volume counts against: with `--capacity`, the parameter `kind` names one.
fn pool(parameters: &Parameters) -> Option<String> {
    parameters.get("kind").cloned()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::local::{
        kind::Kind,
        record::{Source, VOLUME},
    };

    fn volume(name: &str, size: u64) -> (Key, VolumeRecord) {
        let record = VolumeRecord {
            name: name.into(),
            size,
            kind: Kind::Dir,
            access: berth_core::AccessKind::Mount,
            filesystem: None,
            parameters: Arc::new(Parameters::from([("kind".into(), "fast".into())])),
            mutable: Arc::default(),
            source: Some(Source::Volume(Key::MIN)),
            attachments: Vec::new(),
            ephemeral: false,
        };
        (Key::of(VOLUME, name), record)
    }

    #[test]
    fn sums_follow_the_records() {
        let mut state = State::default();
        let (a, record) = volume("a", 100);
        state.put_volume(a, record.clone());
        state.put_volume(a, VolumeRecord { size: 150, ..record });
        state.set_used(a, 1000);
        assert_eq!((state.promised(), state.promised_in("fast"), state.used()), (150, 150, 150));
        let (b, record) = volume("b", 50);
        state.put_volume(b, record);
        assert_eq!(state.parameters.len(), 2, "one shared set of parameters, and the empty one");
        state.remove_volume(a);
        assert_eq!((state.promised(), state.promised_in("fast"), state.used()), (50, 50, 0));
    }

    #[test]
    fn snapshots_are_found_by_their_source_in_pages() {
        let mut state = State::default();
        let (source, other) = (Key::of(VOLUME, "a"), Key::of(VOLUME, "b"));
        for index in 0..10u64 {
            let record = SnapshotRecord {
                name: index.to_string().into(),
                source: if index < 6 { source } else { other },
                size: 1,
                kind: Kind::Dir,
                access: berth_core::AccessKind::Mount,
                filesystem: None,
                created: SystemTime::UNIX_EPOCH,
                torn: false,
                group: None,
            };
            state.put_snapshot(Key::of("snap", &index.to_string()), record);
        }
        let first: Vec<Key> = state.snapshots_of(source, None).take(4).map(|(key, _)| key).collect();
        let rest: Vec<Key> = state.snapshots_of(source, first.last().copied()).map(|(key, _)| key).collect();
        assert_eq!((first.len(), rest.len()), (4, 2));
        assert!(first.iter().chain(&rest).is_sorted());
    }
}
