//! What `berth up` keeps of volumes: the steps of their lives and the calls of their drivers, one line of JSON each.
//!
//! The files lie in its data directory, or in the directory of a recording. They are read anew for each question about one volume, and
//! followed (`Tail`) for what is counted: a line that does not name what is asked for is never parsed.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The file of steps.
pub const STEPS: &str = "timeline.jsonl";
/// The file of calls.
pub const CALLS: &str = "calls.jsonl";
/// The file of objects' revisions in a recording.
pub const OBJECTS: &str = "objects.jsonl";

/// One step on a volume's way.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Step {
    /// When the step ended.
    pub time: Timestamp,
    /// Who did it, such as `provisioner`.
    pub component: String,
    /// What was called or done, such as `CreateVolume`.
    pub call: String,
    /// What is reached with it, such as `CREATED`; empty if nothing in particular.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub state: String,
    /// The PersistentVolume's name, if there is one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub volume: String,
    /// The claim, as `namespace/name`, if it is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub claim: String,
    /// The pod, as `namespace/name`, if it was done for one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// The node, if it was done on or for one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node: String,
    /// How long it took, in microseconds.
    pub duration_us: u64,
    /// Why it failed; empty if it did not.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

impl Step {
    /// How long it took.
    pub fn duration(&self) -> Duration {
        Duration::from_micros(self.duration_us)
    }
}

/// One call of a driver, without secrets.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CallRecord {
    /// When the call had ended.
    pub time: Timestamp,
    /// The name of the driver that was called.
    pub driver: String,
    /// The whole name of the method, such as `/csi.v1.Controller/CreateVolume`.
    pub method: String,
    /// What was asked, as text.
    pub request: String,
    /// What was answered, as text.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub response: String,
    /// The code of gRPC.
    pub code: String,
    /// The message of the error, if it is one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// How long it took, in microseconds.
    pub duration_us: u64,
}

impl CallRecord {
    /// Whether the call is about one of these, each in quotes: names of volumes, their handles, or claims as a provisioner passes them on.
    pub fn concerns(&self, quoted: &BTreeSet<String>) -> bool {
        quoted.iter().any(|name| self.request.contains(name) || self.response.contains(name))
    }

    /// The method without the name of its service.
    pub fn name(&self) -> &str {
        self.method.rsplit('/').next().unwrap_or_default()
    }
}

/// The lines of a file and of the one before it, oldest first; none if there is no file. A torn line costs only itself.
pub fn read_lines<T: DeserializeOwned>(path: PathBuf) -> impl Iterator<Item = T> {
    read_lines_with(path, |_| true)
}

/// The same, of those lines alone that may be wanted by their text.
pub fn read_lines_with<T: DeserializeOwned>(
    path: PathBuf,
    wanted: impl Fn(&str) -> bool,
) -> impl Iterator<Item = T> {
    let files = [old(&path), path].into_iter().filter_map(|path| File::open(path).ok());
    files
        .flat_map(|file| BufReader::new(file).lines().map_while(Result::ok))
        .filter(move |line| wanted(line))
        .filter_map(|line| serde_json::from_str(&line).ok())
}

/// What a file is called when another has taken its place.
pub fn old(path: &Path) -> PathBuf {
    path.with_extension("jsonl.old")
}

/// Follows a file of lines: gives what was written since it was last asked.
#[derive(Debug)]
pub(crate) struct Tail {
    path: PathBuf,
    inode: u64,
    read: u64,
}

impl Tail {
    /// Follows a file that need not exist yet; the end of what it has is read first, at most so many bytes.
    pub(crate) fn new(path: PathBuf, at_most: u64) -> Self {
        let metadata = std::fs::metadata(&path).ok();
        let (inode, length) = metadata.map_or((0, 0), |metadata| (metadata.ino(), metadata.len()));
        Self { path, inode, read: length.saturating_sub(at_most) }
    }

    /// The whole lines that are new. After the file was replaced, those of its successor.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> Vec<T> {
        let Ok(mut file) = File::open(&self.path) else { return Vec::new() };
        let Ok(metadata) = file.metadata() else { return Vec::new() };
        if metadata.ino() != self.inode || metadata.len() < self.read {
            (self.inode, self.read) = (metadata.ino(), 0);
        }
        if metadata.len() == self.read || file.seek(SeekFrom::Start(self.read)).is_err() {
            return Vec::new();
        }
        let mut text = Vec::new();
        if file.take(metadata.len() - self.read).read_to_end(&mut text).is_err() {
            return Vec::new();
        }
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.read += whole as u64;
        text[..whole]
            .split(|byte| *byte == b'\n')
            .filter_map(|line| serde_json::from_slice(line).ok())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_tail_gives_each_whole_line_once_and_follows_a_successor() {
        let dir = std::env::temp_dir().join(format!("berth-tail-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join(STEPS);
        let line = |call: &str| {
            serde_json::to_string(&Step { call: call.to_owned(), ..Step::default() }).unwrap() + "\n"
        };
        let calls = |steps: Vec<Step>| steps.into_iter().map(|step| step.call).collect::<Vec<_>>();
        let mut tail = Tail::new(path.clone(), 1 << 20);
        assert!(tail.next::<Step>().is_empty());
        std::fs::write(&path, line("a") + &line("b")[..10]).unwrap();
        assert_eq!(calls(tail.next()), ["a"]);
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(&line("b").as_bytes()[10..]).unwrap();
        assert_eq!(calls(tail.next()), ["b"]);
        assert!(tail.next::<Step>().is_empty());
        std::fs::rename(&path, old(&path)).unwrap();
        std::fs::write(&path, line("c")).unwrap();
        assert_eq!(calls(tail.next()), ["c"]);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
