//! Small records on a node, a file each, for the calls that do not say again what a call before them said.

use std::{io, marker::PhantomData, path::Path, sync::Arc};

use berth_core::hex;
use berth_host::path::Dir;
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};

use crate::{Error, Result, blocking};

/// Records of one type. Each is written as a whole, and survives a power cut.
#[derive(Debug)]
pub(crate) struct Records<T>(Arc<Dir>, PhantomData<fn() -> T>);

impl<T: Serialize + DeserializeOwned + Send + 'static> Records<T> {
    /// Opens the directory of the records, and makes it if it is not there.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        Ok(Self(Arc::new(Dir::ensure(directory, 0o700)?), PhantomData))
    }

    /// The record of that name.
    pub(crate) async fn read(&self, key: &str) -> Result<Option<T>> {
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || match dir.open_file(&key, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            file => serde_json::from_reader(io::BufReader::new(file?))
                .map(Some)
                .map_err(|error| Error::State(format!("the record {key} cannot be understood: {error}"))),
        })
        .await
    }

    /// Writes a record in the place of what was there.
    pub(crate) async fn write(&self, key: &str, record: &T) -> Result<()> {
        let text = serde_json::to_vec(record).expect("a record always becomes JSON");
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || Ok(dir.write_atomically(&key, &text)?)).await
    }

    /// Removes a record, if it is there.
    pub(crate) async fn remove(&self, key: &str) -> Result<()> {
        let (dir, key) = (self.0.clone(), key.to_owned());
        blocking(move || Ok(dir.remove_written(&key).map(drop)?)).await
    }
}

/// The name of a record.
pub(crate) fn key(kind: &str, of: &[u8]) -> String {
    format!("{kind}-{}", hex(&Sha256::digest(of)[..16]))
}
