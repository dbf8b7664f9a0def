//! How objects lie in the journal.
//!
//! An object's key is `<collection>/<namespace>/<name>`, its record `[<revision>,<object>]`. A collection's own name is
//! the key of a number: the revision of the last removal from it, which no object remembers. The key `*` is that of the
//! revision at which the store went on after damage.

use std::{collections::HashSet, path::Path, sync::Arc};

use berth_host::path::Dir;
use berth_journal::{Entry, Journal};
use bytes::Bytes;

use super::{Collection, Event, EventKind, Key, Object, OpenError, Opened, Options, published::Published};

const JOURNAL: &str = "objects";
const LOCK: &str = "lock";
const ANY: &str = "*";
/// More changes than a damaged piece of the journal can have held.
const LEAP: u64 = 1_000_000;

/// The journal, and the lock that says it is ours.
#[derive(Debug)]
pub(super) struct Records {
    journal: Journal,
    lock: std::fs::File,
    /// Whether nothing of it was ever damaged, as far as can still be seen.
    pub(super) whole: bool,
}

impl Drop for Records {
    fn drop(&mut self) {
        // Closing is not enough: a child process that is just being started may hold the same lock for a moment.
        let _ = self.lock.unlock();
    }
}

/// Reads what an earlier life left behind.
pub(super) fn load(dir: &Path, options: Options) -> Result<(Published, Records, Opened), OpenError> {
    let dir = Dir::ensure(dir, 0o700).map_err(OpenError::Directory)?;
    let lock = dir.lock_exclusively(LOCK).map_err(|error| match error.kind() {
        std::io::ErrorKind::WouldBlock => OpenError::InUse(dir.path().display().to_string()),
        _ => OpenError::Directory(error),
    })?;
    let mut published = Published::new(options);
    let mut names = Names::default();
    let mut strange = 0;
    let (journal, damage) = Journal::open(&dir, JOURNAL, &mut |key, record| {
        if restore(key, record, &mut published, &mut names).is_none() {
            strange += 1;
            tracing::error!(key, "a record of the store makes no sense; it is left where it is");
        }
    })
    .map_err(OpenError::Journal)?;
    let whole = damage.lines == 0 && !damage.earlier && strange == 0;
    let mut records = Records { journal, lock, whole };
    if damage.lines > 0 {
        // The newest changes may be among what was lost, and what clients remember of them must not come again.
        published.leap_to(published.revision() + LEAP);
        records.note_revision(published.revision()).map_err(OpenError::Journal)?;
    }
    let opened =
        Opened { objects: published.len(), revision: published.revision(), damaged: damage.lines + strange };
    Ok((published, records, opened))
}

impl Records {
    fn note_revision(&mut self, revision: u64) -> Result<(), berth_journal::Error> {
        self.journal.write(&[Entry::Put { key: ANY, json: revision.to_string().as_bytes() }])?;
        self.journal.sync()
    }

    /// Makes the events durable, with one sync.
    pub(super) fn append<'a>(
        &mut self,
        events: impl Iterator<Item = &'a Event> + Clone,
    ) -> Result<(), berth_journal::Error> {
        let mut marks: Vec<(&str, Vec<u8>)> = Vec::new();
        let mut lines: Vec<(String, Option<Vec<u8>>)> = Vec::new();
        for event in events {
            let Key { collection, namespace, name } = &event.object.key;
            let key = format!("{collection}/{namespace}/{name}");
            if event.kind == EventKind::Deleted {
                let mark = event.revision.to_string().into_bytes();
                match marks.iter_mut().find(|(of, _)| *of == collection.as_str()) {
                    Some((_, old)) => *old = mark,
                    None => marks.push((collection.as_str(), mark)),
                }
                lines.push((key, None));
            } else {
                lines.push((key, Some(encode(&event.object))));
            }
        }
        // First the marks: a removal that is on the disk without its revision would let that be given out again.
        let mut entries: Vec<Entry<'_>> = Vec::with_capacity(marks.len() + lines.len());
        entries.extend(marks.iter().map(|(key, json)| Entry::Put { key, json }));
        entries.extend(lines.iter().map(|(key, json)| match json {
            Some(json) => Entry::Put { key, json },
            None => Entry::Remove { key },
        }));
        if lines.iter().all(|(_, json)| json.is_none()) {
            self.journal.write_from_reserve(&entries)?;
        } else {
            self.journal.write(&entries)?;
        }
        self.journal.sync()
    }
}

fn encode(object: &Object) -> Vec<u8> {
    let mut record = Vec::with_capacity(object.bytes.len() + 24);
    record.push(b'[');
    record.extend_from_slice(object.revision.to_string().as_bytes());
    record.push(b',');
    record.extend_from_slice(&object.bytes);
    record.push(b']');
    record
}

fn restore(key: &str, record: &[u8], published: &mut Published, names: &mut Names) -> Option<()> {
    let mut parts = key.splitn(3, '/');
    let collection = parts.next()?;
    let (Some(namespace), Some(name)) = (parts.next(), parts.next()) else {
        let revision = std::str::from_utf8(record).ok()?.parse().ok()?;
        match collection {
            ANY => published.leap_to(revision),
            _ => published.restore_removal(Collection(names.shared(collection)), revision),
        }
        return Some(());
    };
    let collection = Collection(names.shared(collection));
    let rest = record.strip_prefix(b"[")?.strip_suffix(b"]")?;
    let comma = rest.iter().position(|byte| *byte == b',')?;
    let revision = std::str::from_utf8(&rest[..comma]).ok()?.parse().ok()?;
    let key = Key { collection, namespace: names.shared(namespace), name: name.into() };
    published.restore(Object { key, revision, bytes: Bytes::copy_from_slice(&rest[comma + 1..]) });
    Some(())
}

/// Names that many objects have in common, each kept once.
#[derive(Debug, Default)]
pub(super) struct Names {
    known: HashSet<Arc<str>>,
    /// How many were left when those that nobody uses were last dropped.
    in_use: usize,
}

impl Names {
    pub(super) fn shared(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        if self.known.len() > 2 * self.in_use + 100 {
            self.known.retain(|known| Arc::strong_count(known) > 1);
            self.in_use = self.known.len();
        }
        let name: Arc<str> = name.into();
        self.known.insert(name.clone());
        name
    }
}
