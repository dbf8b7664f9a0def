//! Which volumes, snapshots and names are being worked on.
//!
//! A key is held by one writer or by many readers, never waited for: whoever finds it taken answers ABORTED, and the
//! caller comes back. Several keys are taken together or not at all.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    fmt,
    num::NonZeroUsize,
    sync::Arc,
};

use berth_core::{GroupSnapshotId, Name, SnapshotId, VolumeId};
use parking_lot::Mutex;

use crate::{Error, Result};

/// What can be held.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Key {
    /// A volume's name, while it is not known whether there is a volume.
    VolumeName(Name),
    /// A volume, by its id.
    Volume(VolumeId),
    /// The name that a snapshot is to have.
    SnapshotName(Name),
    /// A snapshot, by its id.
    Snapshot(SnapshotId),
    /// The name that a group is to have.
    GroupName(Name),
    /// A group of snapshots, by its id.
    Group(GroupSnapshotId),
}

/// How a key is held; the stronger is the greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Hold {
    /// Together with others who only need the thing to stay.
    Shared,
    /// Nobody else holds it.
    Exclusive,
}

/// Everything held at the moment.
#[derive(Default)]
pub(crate) struct Locks {
    held: Mutex<HashMap<Key, Holders>>,
}

enum Holders {
    Readers(NonZeroUsize),
    Writer,
}

/// Keys held until it is dropped.
pub(crate) struct Guard {
    locks: Arc<Locks>,
    held: Vec<Key>,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VolumeName(name) => write!(f, "the volume named {name:?}"),
            Self::Volume(id) => write!(f, "volume {id:?}"),
            Self::SnapshotName(name) => write!(f, "the snapshot named {name:?}"),
            Self::Snapshot(id) => write!(f, "snapshot {id:?}"),
            Self::GroupName(name) => write!(f, "the group snapshot named {name:?}"),
            Self::Group(id) => write!(f, "group snapshot {id:?}"),
        }
    }
}

impl Locks {
    /// A table in which nothing is held.
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Takes all of the keys, or none and [`Error::Busy`] naming the one that is taken.
    pub(crate) fn try_lock(self: &Arc<Self>, keys: impl IntoIterator<Item = (Key, Hold)>) -> Result<Guard> {
        // A key asked for twice is taken once, in the stronger way.
        let mut wanted = BTreeMap::<Key, Hold>::new();
        for (key, hold) in keys {
            wanted.entry(key).and_modify(|held| *held = hold.max(*held)).or_insert(hold);
        }
        let mut held = self.held.lock();
        let is_free = |(key, hold): (&Key, &Hold)| match held.get(key) {
            None => true,
            Some(Holders::Readers(_)) => *hold == Hold::Shared,
            Some(Holders::Writer) => false,
        };
        if let Some((key, _)) = wanted.iter().find(|wanted| !is_free(*wanted)) {
            return Err(Error::Busy(format!("another operation on {key} is under way")));
        }
        for (key, hold) in &wanted {
            match (held.entry(key.clone()), hold) {
                (Entry::Occupied(mut taken), _) => {
                    if let Holders::Readers(count) = taken.get_mut() {
                        *count = count.saturating_add(1);
                    }
                }
                (Entry::Vacant(free), Hold::Exclusive) => {
                    free.insert(Holders::Writer);
                }
                (Entry::Vacant(free), Hold::Shared) => {
                    free.insert(Holders::Readers(NonZeroUsize::MIN));
                }
            }
        }
        Ok(Guard { locks: Arc::clone(self), held: wanted.into_keys().collect() })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut held = self.locks.held.lock();
        for key in self.held.drain(..) {
            let Entry::Occupied(mut taken) = held.entry(key) else { continue };
            match taken.get_mut() {
                Holders::Readers(count) if count.get() > 1 => {
                    *count = NonZeroUsize::new(count.get() - 1).unwrap_or(NonZeroUsize::MIN);
                }
                Holders::Readers(_) | Holders::Writer => {
                    taken.remove();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(id: &str) -> Key {
        Key::Volume(id.parse().unwrap())
    }

    fn is_free(locks: &Arc<Locks>, key: Key) -> bool {
        locks.try_lock([(key, Hold::Exclusive)]).is_ok()
    }

    #[test]
    fn one_writer_or_many_readers_hold_a_key() {
        use Hold::{Exclusive, Shared};
        let locks = Locks::new();
        let lock = |hold| locks.try_lock([(volume("v"), hold)]);
        let writer = lock(Exclusive).unwrap();
        assert!(lock(Exclusive).is_err() && lock(Shared).is_err());
        drop(writer);
        let (first, second) = (lock(Shared).unwrap(), lock(Shared).unwrap());
        assert!(lock(Exclusive).is_err());
        drop(first);
        assert!(lock(Exclusive).is_err(), "one reader is left");
        drop(second);
        assert!(lock(Exclusive).is_ok());
    }

    #[test]
    fn a_taken_key_is_named() {
        let locks = Locks::new();
        let _guard = locks.try_lock([(Key::SnapshotName("s".parse().unwrap()), Hold::Exclusive)]).unwrap();
        let Err(Error::Busy(sentence)) =
            locks.try_lock([(Key::SnapshotName("s".parse().unwrap()), Hold::Shared)])
        else {
            panic!("the key is taken")
        };
        assert_eq!(sentence, "another operation on the snapshot named \"s\" is under way");
    }

    #[test]
    fn the_same_text_as_a_name_and_as_an_id_are_two_keys() {
        let locks = Locks::new();
        let _id = locks.try_lock([(volume("x"), Hold::Exclusive)]).unwrap();
        assert!(is_free(&locks, Key::VolumeName("x".parse().unwrap())));
        assert!(is_free(&locks, Key::Snapshot("x".parse().unwrap())));
    }

    #[test]
    fn several_keys_are_taken_together_or_not_at_all() {
        let locks = Locks::new();
        let middle = locks.try_lock([(volume("b"), Hold::Exclusive)]).unwrap();
        let all = || ["c", "b", "a"].map(|id| (volume(id), Hold::Exclusive));
        assert!(locks.try_lock(all()).is_err());
        assert!(is_free(&locks, volume("a")) && is_free(&locks, volume("c")));
        drop(middle);
        let _all = locks.try_lock(all()).unwrap();
        assert!(!is_free(&locks, volume("a")) && !is_free(&locks, volume("c")));
    }

    #[test]
    fn a_key_asked_for_twice_is_held_once_in_the_stronger_way() {
        let locks = Locks::new();
        let guard = locks.try_lock([(volume("v"), Hold::Exclusive), (volume("v"), Hold::Shared)]).unwrap();
        assert!(locks.try_lock([(volume("v"), Hold::Shared)]).is_err());
        drop(guard);
        assert!(is_free(&locks, volume("v")));
    }

    #[test]
    fn what_is_released_leaves_nothing_behind() {
        let locks = Locks::new();
        for number in 0..1000 {
            drop(locks.try_lock([(volume(&number.to_string()), Hold::Shared)]).unwrap());
        }
        assert!(locks.held.lock().is_empty());
    }

    #[test]
    fn of_many_threads_exactly_one_writes_at_a_time() {
        let (locks, mut total) = (Locks::new(), 0);
        let inside = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let runs: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        let mut entered = 0;
                        while entered < 500 {
                            let Ok(_guard) = locks.try_lock([(volume("v"), Hold::Exclusive)]) else {
                                std::thread::yield_now();
                                continue;
                            };
                            assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                            inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                            entered += 1;
                        }
                        entered
                    })
                })
                .collect();
            total = runs.into_iter().map(|run| run.join().unwrap()).sum::<usize>();
        });
        assert_eq!(total, 2000);
    }
}
