//! What is mounted here, for the calls that do not say it again.

use std::{collections::BTreeMap, io, path::Path, sync::Arc};

use berth_core::hex;
use berth_host::path::Dir;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{Error, Result, blocking};

/// A volume that is staged, or what is at a target. It holds no secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    pub(super) id: String,
    /// What a person wrote about the volume.
    pub(super) context: BTreeMap<String, String>,
    pub(super) fs_type: String,
    pub(super) read_only: bool,
    /// The device of a volume that is attached.
    pub(super) device: String,
    /// The size that the volume was grown to, where it was.
    pub(super) size: Option<u64>,
}

/// The records, a file each.
#[derive(Debug)]
pub(super) struct Records(Arc<Dir>);

impl Records {
    pub(super) fn open(directory: &Path) -> Result<Self> {
        Ok(Self(Arc::new(Dir::ensure(directory, 0o700)?)))
    }

    pub(super) async fn read(&self, key: &str) -> Result<Option<Record>> {
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || match dir.open_file(&key, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            file => serde_json::from_reader(io::BufReader::new(file?))
                .map(Some)
                .map_err(|error| Error::State(format!("the record {key} cannot be understood: {error}"))),
        })
        .await
    }

    pub(super) async fn write(&self, key: &str, record: &Record) -> Result<()> {
        let text = serde_json::to_vec(record).expect("a record always becomes JSON");
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || Ok(dir.write_atomically(&key, &text)?)).await
    }

    pub(super) async fn remove(&self, key: &str) -> Result<()> {
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || Ok(dir.remove_written(&key).map(drop)?)).await
    }
}

/// The name of a record.
pub(super) fn key(kind: &str, of: &[u8]) -> String {
    format!("{kind}-{}", hex(&Sha256::digest(of)[..16]))
}
