//! The objects of a cache. One that compresses keeps only those that changed last ready to read.
//!
//! A typed volume takes five kilobytes, mostly room for the thirty kinds of storage that it is not; its JSON takes
//! more than one, and most of that stands in every other volume's, too. Of ten thousand volumes few change at a time, so
//! those that have not changed lately are kept as JSON, compressed with one of them as the dictionary.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use lz4_flex::block::{compress_prepend_size_with_dict, decompress_size_prepended_with_dict};

use crate::{Key, kind::Kind};

/// Objects by their keys.
pub(crate) struct Objects<K> {
    all: HashMap<Key, Held<K>>,
    /// The keys of those that are decoded, the oldest first; and of some that are gone.
    decoded: VecDeque<Key>,
    /// How many may be decoded.
    limit: usize,
    /// The JSON of the first that was compressed: the dictionary of the others.
    typical: Box<[u8]>,
}

struct Held<K> {
    revision: u64,
    state: State<K>,
}

enum State<K> {
    Decoded(Arc<K>),
    Compressed(Box<[u8]>),
}

/// What became of an object that was handed in.
#[derive(Debug, PartialEq)]
pub(crate) enum Taken<K> {
    /// Nothing: there is one at least as new.
    Not,
    /// It is the first of its key.
    First,
    /// It took the place of this one.
    InsteadOf(Arc<K>),
}

impl<K: Kind> Held<K> {
    fn object(&self, typical: &[u8]) -> Arc<K> {
        match &self.state {
            State::Decoded(object) => object.clone(),
            State::Compressed(compressed) => {
                let json = decompress_size_prepended_with_dict(compressed, typical)
                    .expect("what was compressed can be read");
                Arc::new(K::decode(&json).expect("what was written as JSON can be read"))
            }
        }
    }
}

impl<K: Kind> Objects<K> {
    /// None yet; of those to come so many are kept ready.
    pub(crate) fn new(limit: usize) -> Self {
        Self { all: HashMap::new(), decoded: VecDeque::new(), limit, typical: Box::default() }
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.all.get(key).map(|held| held.object(&self.typical))
    }

    /// An object that is ready to read, in this version and no other.
    pub(crate) fn decoded(&self, key: &Key, revision: u64) -> Option<Arc<K>> {
        match self.all.get(key) {
            Some(Held { revision: held, state: State::Decoded(object) }) if *held == revision => {
                Some(object.clone())
            }
            _ => None,
        }
    }

    pub(crate) fn contains(&self, key: &Key) -> bool {
        self.all.contains_key(key)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.all.keys()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Arc<K>> {
        self.all.values().map(|held| held.object(&self.typical))
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Takes an object in, unless there is one at least as new.
    pub(crate) fn put(&mut self, key: Key, revision: u64, object: Arc<K>) -> Taken<K> {
        let (taken, was_decoded) = match self.all.get(&key) {
            Some(held) if held.revision >= revision => return Taken::Not,
            Some(held) => {
                (Taken::InsteadOf(held.object(&self.typical)), matches!(held.state, State::Decoded(_)))
            }
            None => (Taken::First, false),
        };
        if self.limit < usize::MAX && !was_decoded {
            self.decoded.push_back(key.clone());
        }
        self.all.insert(key, Held { revision, state: State::Decoded(object) });
        while self.decoded.len() > self.limit {
            self.compress_oldest();
        }
        taken
    }

    pub(crate) fn remove(&mut self, key: &Key) -> Option<Arc<K>> {
        self.all.remove(key).map(|held| held.object(&self.typical))
    }

    fn compress_oldest(&mut self) {
        let held = self.decoded.pop_front().and_then(|key| self.all.get_mut(&key));
        if let Some(Held { state, .. }) = held
            && let State::Decoded(object) = state
            && let Ok(json) = object.encode()
        {
            if self.typical.is_empty() {
                self.typical = json.clone().into();
            }
            *state = State::Compressed(compress_prepend_size_with_dict(&json, &self.typical).into());
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    fn object(name: &str, revision: u64) -> Arc<ConfigMap> {
        let mut object = ConfigMap::default();
        object.metadata.name = Some(name.to_owned());
        object.metadata.resource_version = Some(revision.to_string());
        object.data = Some([("text".to_owned(), format!("{name} at {revision}"))].into());
        Arc::new(object)
    }

    fn compressed_count(objects: &Objects<ConfigMap>) -> usize {
        objects.all.values().filter(|held| matches!(held.state, State::Compressed(_))).count()
    }

    #[test]
    fn compressed_objects_are_read_and_replaced_like_decoded_ones() {
        let mut objects = Objects::new(2);
        for number in 0..10 {
            let name = format!("n{number}");
            assert_eq!(objects.put(Key::cluster(name.as_str()), 1, object(&name, 1)), Taken::First);
        }
        assert_eq!((objects.len(), compressed_count(&objects)), (10, 8));
        for number in 0..10 {
            let name = format!("n{number}");
            assert_eq!(objects.get(&Key::cluster(name.as_str())), Some(object(&name, 1)));
        }
        assert_eq!(
            objects.put(Key::cluster("n0"), 1, object("n0", 1)),
            Taken::Not,
            "no older than what is known"
        );
        assert_eq!(objects.put(Key::cluster("n0"), 2, object("n0", 2)), Taken::InsteadOf(object("n0", 1)));
        assert_eq!(objects.remove(&Key::cluster("n0")), Some(object("n0", 2)));
        assert_eq!(objects.remove(&Key::cluster("n1")), Some(object("n1", 1)));
        assert_eq!(objects.len(), 8);
    }

    #[test]
    fn names_that_come_and_go_leave_nothing_behind() {
        let mut objects = Objects::new(4);
        for revision in 1..1000 {
            objects.put(Key::cluster("same"), revision, object("same", revision));
            objects.put(Key::cluster("kept"), revision, object("kept", revision));
            objects.remove(&Key::cluster("same"));
        }
        assert!(objects.decoded.len() <= 4);
        assert_eq!(objects.get(&Key::cluster("kept")), Some(object("kept", 999)));
    }

    #[test]
    fn without_a_limit_none_is_compressed() {
        let mut objects = Objects::new(usize::MAX);
        for number in 0..1000 {
            let name = format!("n{number}");
            objects.put(Key::cluster(name.as_str()), 1, object(&name, 1));
        }
        assert_eq!((compressed_count(&objects), objects.decoded.len()), (0, 0));
    }
}
