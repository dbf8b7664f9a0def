//! `vol_data.json`: what stands on disk of a volume that was, or may have been, staged or published.
//!
//! Written before the driver is called, so that whatever a crash leaves can be undone. The names are the kubelet's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use berth_host::path::Dir;
use serde::{Deserialize, Serialize};

/// The file's name.
pub(super) const NAME: &str = "vol_data.json";

/// What is known of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct VolData {
    /// The name that the volume's directory has.
    #[serde(rename = "specVolID", skip_serializing_if = "String::is_empty")]
    pub(super) spec_name: String,
    /// The driver's name for the volume.
    #[serde(rename = "volumeHandle")]
    pub(super) handle: String,
    /// The driver.
    #[serde(rename = "driverName")]
    pub(super) driver: String,
    /// This node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) node_name: String,
    /// The name of its VolumeAttachment, if there is one.
    #[serde(rename = "attachmentID", skip_serializing_if = "String::is_empty")]
    pub(super) attachment: String,
    /// `Persistent` or `Ephemeral`.
    #[serde(rename = "volumeLifecycleMode", skip_serializing_if = "String::is_empty")]
    pub(super) mode: String,
}

/// Why the file does not say what it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum Damaged {
    /// It cannot be read.
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// It is not what was written.
    #[error(
        "{} is damaged ({why}); write volumeHandle and driverName into it as JSON, or unmount what is below its \
         directory and remove that",
        path.display()
    )]
    Content { path: PathBuf, why: String },
}

impl VolData {
    /// The unique name of the volume's device.
    pub(super) fn unique_name(&self) -> String {
        unique_name(&self.driver, &self.handle)
    }

    /// Reads the file in a directory; `None` if there is none.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, Damaged> {
        let path = directory.join(NAME);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(source) => return Err(Damaged::Unreadable { path, source }),
        };
        let content = |why: String| Damaged::Content { path: path.clone(), why };
        let data: Self = serde_json::from_slice(&text).map_err(|error| content(error.to_string()))?;
        if data.handle.is_empty() || data.driver.is_empty() {
            return Err(content("the volume's handle or its driver is missing".to_owned()));
        }
        Ok(Some(data))
    }

    /// Writes the file, unless it already says so; the directory is made if need be.
    pub(super) fn write(&self, directory: &Path) -> berth_host::Result<()> {
        if Self::read(directory).is_ok_and(|known| known.as_ref() == Some(self)) {
            return Ok(());
        }
        let text = serde_json::to_vec(self).expect("a struct of strings is JSON");
        Dir::ensure(directory, 0o750)?.write_atomically(NAME, &text)
    }

    /// Removes the file, also one that was only half written.
    pub(super) fn remove(directory: &Path) -> Result<(), String> {
        match Dir::open(directory).and_then(|directory| directory.remove_written(NAME)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.sentence()),
            _ => Ok(()),
        }
    }
}

/// The unique name of a device: what Node objects call it.
pub(super) fn unique_name(driver: &str, handle: &str) -> String {
    format!("{}/{driver}^{handle}", super::NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kubelet_writes_is_read_and_written_back_under_its_names() {
        let directory = tempfile::tempdir().unwrap();
        let text = r#"{"attachmentID":"csi-1","driverName":"d","nodeName":"n","seLinuxMountContext":"x","specVolID":"pv","volumeHandle":"h","volumeLifecycleMode":"Persistent"}"#;
        fs::write(directory.path().join(NAME), text).unwrap();
        let data = VolData::read(directory.path()).unwrap().unwrap();
        assert_eq!(
            (data.spec_name.as_str(), data.attachment.as_str(), data.mode.as_str()),
            ("pv", "csi-1", "Persistent")
        );
        assert_eq!(data.unique_name(), "kubernetes.io/csi/d^h");
        let other = directory.path().join("a/b");
        data.write(&other).unwrap();
        data.write(&other).unwrap();
        assert_eq!(VolData::read(&other).unwrap(), Some(data));
        fs::write(other.join(format!(".{NAME}.7-0.new")), "{").unwrap();
        VolData::remove(&other).unwrap();
        VolData::remove(&other).unwrap();
        fs::remove_dir(&other).expect("nothing of the file is left");
        VolData::remove(&other).unwrap();
    }

    #[test]
    fn a_damaged_file_is_named_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(VolData::read(directory.path()).unwrap(), None);
        for text in ["", "{", "[]", r#"{"volumeHandle":"h"}"#, r#"{"volumeHandle":1,"driverName":"d"}"#] {
            fs::write(directory.path().join(NAME), text).unwrap();
            let error = VolData::read(directory.path()).unwrap_err().to_string();
            assert!(error.contains(&directory.path().join(NAME).display().to_string()), "{error}");
            assert_eq!(fs::read_to_string(directory.path().join(NAME)).unwrap(), text);
        }
    }
}
