//! What is mounted here, for the calls that do not say it again: a small file each.

use std::{io, path::Path, sync::Arc};

use berth_core::hex;
use berth_host::path::Dir;
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};

use crate::{Error, Result, blocking};

/// The records, a file each.
#[derive(Debug)]
pub(crate) struct Records(Arc<Dir>);

impl Records {
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        Ok(Self(Arc::new(Dir::ensure(directory, 0o700)?)))
    }

    pub(crate) async fn read<R: DeserializeOwned + Send + 'static>(&self, key: &str) -> Result<Option<R>> {
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || match dir.open_file(&key, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            file => serde_json::from_reader(io::BufReader::new(file?))
                .map(Some)
                .map_err(|error| Error::State(format!("the record {key} cannot be understood: {error}"))),
        })
        .await
    }

    pub(crate) async fn write(&self, key: &str, record: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec(record).expect("a record always becomes JSON");
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || Ok(dir.write_atomically(&key, &text)?)).await
    }

    pub(crate) async fn remove(&self, key: &str) -> Result<()> {
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || Ok(dir.remove_written(&key).map(drop)?)).await
    }
}

/// The name of a record.
pub(crate) fn key(kind: &str, of: &[u8]) -> String {
    format!("{kind}-{}", hex(&Sha256::digest(of)[..16]))
}
