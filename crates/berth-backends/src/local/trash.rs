//! Removes what is no longer wanted, in the background.
//!
//! Deleting a volume is renaming it into `trash/`, which takes no time; a thread empties that directory. What it did
//! not get to is found there at the next start.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

use berth_host::{btrfs, path::Dir};
use parking_lot::{Condvar, Mutex};

use super::content::DATA;

/// The trash directory and the thread that empties it.
#[derive(Debug)]
pub(super) struct Trash {
    dir: Dir,
    queue: mpsc::Sender<String>,
    sequence: AtomicU64,
    pending: Arc<(Mutex<usize>, Condvar)>,
}

impl Trash {
    /// Starts emptying `dir`, beginning with what is already in it.
    pub(super) fn start(dir: Dir, is_btrfs: bool) -> berth_host::Result<Self> {
        let found = dir.entries()?;
        let (queue, names) = mpsc::channel::<String>();
        let pending = Arc::new((Mutex::new(0), Condvar::new()));
        let (own, counted) = (Dir::open(dir.path())?, pending.clone());
        std::thread::Builder::new()
            .name("trash".to_owned())
            .spawn(move || {
                for name in names {
                    if let Err(error) = remove(&own, &name, is_btrfs) {
                        tracing::warn!(
                            entry = name,
                            error = error.sentence(),
                            "could not be removed; tried again at the next start"
                        );
                    }
                    *counted.0.lock() -= 1;
                    counted.1.notify_all();
                }
            })
            .map_err(|error| berth_host::Error::new("start the trash thread", error))?;
        let trash = Self { dir, queue, sequence: AtomicU64::new(0), pending };
        for entry in found {
            if let Some(name) = entry.name.to_str() {
                trash.enqueue(name.to_owned());
            }
        }
        Ok(trash)
    }

    /// Takes `name` out of `from`; it is gone from there when this returns. Missing is fine.
    pub(super) fn discard(&self, from: &Dir, name: &str) -> berth_host::Result<()> {
        if !from.exists(name)? {
            return Ok(());
        }
        loop {
            let unique = format!("{}-{name}", self.sequence.fetch_add(1, Ordering::Relaxed));
            match from.rename(name, &self.dir, &unique) {
                // Left there by an earlier run, still waiting to be removed.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    self.enqueue(unique);
                    return Ok(());
                }
            }
        }
    }

    /// Waits until everything is removed, at most this long.
    pub(super) fn drain(&self, at_most: Duration) {
        let (pending, emptied) = &*self.pending;
        emptied.wait_while_for(&mut pending.lock(), |pending| *pending > 0, at_most);
    }

    fn enqueue(&self, name: String) {
        *self.pending.0.lock() += 1;
        // The thread ends only with this sender.
        let _ = self.queue.send(name);
    }
}

fn remove(trash: &Dir, name: &str, is_btrfs: bool) -> berth_host::Result<()> {
    if is_btrfs
        && let Ok(entry) = trash.dir(name)
        && let Ok(data) = entry.dir(DATA)
        && btrfs::is_subvolume(&data)?
    {
        btrfs::delete_subvolume(&entry, DATA)?;
    }
    trash.remove_tree(name).map(|_| ())
}
