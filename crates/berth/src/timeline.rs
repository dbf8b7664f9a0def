//! The volumes' timelines: kept in a file by `berth up`, read by `berth explain` and `berth demo`.
//!
//! Loops emit steps as log events (`berth_kube::timeline`); a [`TimelineRecorder`] turns each into one line of JSON. A lost or torn
//! line costs one line of an explanation, so nothing is synced.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use berth_ui::records::{CALLS, STEPS, old, read_lines};
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::broadcast;
use tracing::field::{Field, Visit};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use crate::calls::CallRecorder;
use crate::metrics::Operations;

pub(crate) use berth_ui::records::Step;

/// A file of this size becomes the old one.
const LONGEST: u64 = 16 << 20;

/// Takes in steps; cheap to clone. Before it has a file, and to those who listen, it only passes them on.
#[derive(Clone)]
pub(crate) struct TimelineRecorder {
    operations: Operations,
    calls: CallRecorder,
    files: Arc<Mutex<Vec<LineFile>>>,
    listeners: broadcast::Sender<Step>,
}

/// A file of lines of JSON. When it is long it becomes the old one, in the place of the one before.
pub(crate) struct LineFile {
    path: PathBuf,
    file: File,
    size: u64,
    longest: u64,
}

impl TimelineRecorder {
    /// A keeper without a file.
    pub(crate) fn new() -> Self {
        Self {
            operations: Operations::default(),
            calls: CallRecorder::default(),
            files: Arc::default(),
            listeners: broadcast::channel(4096).0,
        }
    }

    /// Writes what comes from now on to the file in this data directory.
    pub(crate) fn keep_in(&self, data_dir: &Path) -> std::io::Result<()> {
        self.files.lock().push(LineFile::open(data_dir.join(STEPS))?);
        self.calls.keep(LineFile::open(data_dir.join(CALLS))?);
        Ok(())
    }

    /// Writes what comes from now on to files in this directory too, however much it is.
    pub(crate) fn record_in(&self, directory: &Path) -> std::io::Result<()> {
        self.files.lock().push(LineFile::endless(directory.join(STEPS))?);
        self.calls.keep(LineFile::endless(directory.join(CALLS))?);
        Ok(())
    }

    /// Steps as they happen.
    pub(crate) fn listen(&self) -> broadcast::Receiver<Step> {
        self.listeners.subscribe()
    }

    /// How long operations took.
    pub(crate) fn operations(&self) -> &Operations {
        &self.operations
    }

    fn take(&self, step: Step) {
        self.operations.observe(&step);
        for file in self.files.lock().iter_mut() {
            if let Err(error) = file.write(&step) {
                tracing::debug!(%error, "a step is missing in the timeline");
            }
        }
        // Nobody listens most of the time.
        let _ = self.listeners.send(step);
    }
}

impl LineFile {
    pub(crate) fn open(path: PathBuf) -> std::io::Result<Self> {
        let file = open(&path)?;
        let size = file.metadata()?.len();
        Ok(Self { path, file, size, longest: LONGEST })
    }

    /// A file that no other takes the place of.
    pub(crate) fn endless(path: PathBuf) -> std::io::Result<Self> {
        Ok(Self { longest: u64::MAX, ..Self::open(path)? })
    }

    pub(crate) fn write(&mut self, line: &impl Serialize) -> std::io::Result<()> {
        let mut line = serde_json::to_vec(line)?;
        line.push(b'\n');
        if self.size > self.longest {
            std::fs::rename(&self.path, old(&self.path))?;
            self.file = open(&self.path)?;
            self.size = 0;
        }
        self.size += line.len() as u64;
        self.file.write_all(&line)
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// The steps in a data directory that `chosen` selects, oldest first; none if there is no file.
pub(crate) fn read(data_dir: &Path, chosen: impl Fn(&Step) -> bool) -> Vec<Step> {
    read_lines(data_dir.join(STEPS)).filter(|step| chosen(step)).collect()
}

impl<S: tracing::Subscriber> Layer<S> for TimelineRecorder {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == berth_csi::full::TARGET {
            self.calls.take(event);
            return;
        }
        if event.metadata().target() != berth_kube::timeline::TARGET {
            return;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut text = |name: &str| fields.texts.remove(name).unwrap_or_default();
        self.take(Step {
            time: Timestamp::now(),
            component: text("component"),
            call: text("call"),
            state: text("state"),
            volume: text("volume"),
            claim: text("claim"),
            pod: text("pod"),
            node: text("node"),
            error: text("error"),
            duration_us: fields.duration_us,
        });
    }
}

/// The fields of a log event.
#[derive(Default)]
pub(crate) struct Fields {
    pub(crate) texts: HashMap<&'static str, String>,
    pub(crate) duration_us: u64,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.texts.insert(field.name(), value.to_owned());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "duration_us" {
            self.duration_us = value;
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt as _;

    use std::time::Duration;

    use super::*;

    #[test]
    fn steps_that_a_loop_emits_can_be_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let keeper = TimelineRecorder::new();
        keeper.keep_in(dir.path()).unwrap();
        let subscriber = tracing_subscriber::registry().with(keeper.clone());
        tracing::subscriber::with_default(subscriber, || {
            let step = berth_kube::timeline::Step {
                component: "provisioner",
                call: "CreateVolume",
                state: "CREATED",
                volume: "pv-1",
                claim: "default/a",
                duration: Duration::from_millis(7),
                ..berth_kube::timeline::Step::default()
            };
            step.emit();
            berth_kube::timeline::Step { volume: "pv-2", ..step }.emit();
            tracing::info!(volume = "pv-1", "not a step");
        });
        let steps = read(dir.path(), |step| step.volume == "pv-1");
        assert_eq!(steps.len(), 1);
        assert_eq!((steps[0].call.as_str(), steps[0].duration()), ("CreateVolume", Duration::from_millis(7)));
    }

    #[test]
    fn a_torn_line_costs_only_itself() {
        let dir = tempfile::tempdir().unwrap();
        let line = serde_json::to_string(&Step { volume: "a".into(), ..Step::default() }).unwrap();
        std::fs::write(dir.path().join(STEPS), format!("{line}\n{{\"volume\": \"a\", \n{line}\n")).unwrap();
        assert_eq!(read(dir.path(), |_| true).len(), 2);
    }
}
