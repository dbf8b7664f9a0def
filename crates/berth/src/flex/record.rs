//! What one call-out leaves for the next: a file for each target, with the lock that keeps a second call away from it.
//!
//! The record says `mounting` before anything is mounted and `mounted` after; it is removed when the target is unmounted. It
//! is replaced as a whole, so a killed call leaves the one before. The lock is on a file of its own, which is removed with the
//! record.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use berth_core::hex;
use berth_host::path::Dir;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::Driver;
use super::callout::Failure;

/// How often a lock file that was removed meanwhile is opened again.
const ATTEMPTS: usize = 16;

/// How far the mount of a target got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Phase {
    Mounting,
    Mounted,
}

/// What is at a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    pub(super) target: PathBuf,
    pub(super) phase: Phase,
    /// The options that say what is mounted and how, without secrets.
    pub(super) options: BTreeMap<String, String>,
    pub(super) read_only: bool,
}

/// The record of one target, locked.
pub(super) struct Locked {
    dir: Dir,
    name: String,
    _lock: fs::File,
}

impl Locked {
    /// Locks the record of a target; a call that is under way for the same target is a failure.
    pub(super) fn open(state_dir: &Path, driver: Driver, target: &Path) -> Result<Self, Failure> {
        let dir = Dir::ensure(&directory(state_dir, driver), 0o700)?;
        let name = hex(&Sha256::digest(target.as_os_str().as_encoded_bytes())[..16]);
        let lock_name = format!("{name}.lock");
        for _ in 0..ATTEMPTS {
            let lock = match dir.lock_exclusively(&lock_name) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(Failure(format!(
                        "another call for {} is under way; it is tried again",
                        target.display()
                    )));
                }
                lock => lock?,
            };
            // Whoever had it before may have removed it.
            let is_there = fs::symlink_metadata(dir.child_path(&lock_name)).is_ok_and(|found| {
                lock.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
            });
            if is_there {
                return Ok(Self { dir, name, _lock: lock });
            }
        }
        Err(Failure(format!("the record of {} changes all the time", target.display())))
    }

    /// The record, if there is one; one that cannot be understood is none.
    pub(super) fn read(&self) -> Option<Record> {
        let text = fs::read(self.dir.child_path(&self.file_name())).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Replaces the record as a whole. Nothing waits for the disk: a record has to survive this process, and not the machine, whose
    /// mounts that it names.
    pub(super) fn write(&self, record: &Record) -> Result<(), Failure> {
        let text = serde_json::to_vec(record).expect("a record always becomes JSON");
        let (name, file) = (self.file_name(), self.dir.child_path(&self.file_name()));
        // As `Dir::remove_written` knows what a killed writer leaves.
        let unfinished = self.dir.child_path(&format!(".{name}.{}.new", std::process::id()));
        fs::write(&unfinished, text)
            .and_then(|()| fs::rename(&unfinished, &file))
            .map_err(|error| Failure(format!("write {}: {error}", file.display())))
    }

    /// Removes the record and the lock.
    pub(super) fn remove(self) -> Result<(), Failure> {
        self.dir.remove_written(&self.file_name())?;
        self.dir.remove_file(&format!("{}.lock", self.name))?;
        Ok(())
    }

    fn file_name(&self) -> String {
        format!("{}.json", self.name)
    }
}

/// The targets that a driver has records of.
pub(super) fn targets(state_dir: &Path, driver: Driver) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory(state_dir, driver)) else { return Vec::new() };
    let records = entries.flatten().filter_map(|entry| {
        let is_record = entry.path().extension().is_some_and(|extension| extension == "json");
        let text = if is_record { fs::read(entry.path()).ok() } else { None };
        serde_json::from_slice::<Record>(&text?).ok()
    });
    records.map(|record| record.target).collect()
}

/// The directory of a driver's records.
fn directory(state_dir: &Path, driver: Driver) -> PathBuf {
    state_dir.join(driver.name())
}
