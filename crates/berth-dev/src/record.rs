//! What happens at the workbench, as events: for the terminal, for other programs as JSON, and for a file.
//!
//! Nothing in an event holds a secret: messages are shown without the fields that the protocol marks, and every other text has the values
//! that passed in such fields removed (`secrets.rs`).

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use berth_certify::rules::{Level, Rule};
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::mpsc;

/// Something that happened at the workbench.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A call, with its answer.
    Call(CallRecord),
    /// A call that waits for a decision before it is sent.
    Held(HeldCall),
    /// What the workbench did or found beside calls.
    Note(Note),
}

/// A call and what is known of it.
#[derive(Debug, Clone, Serialize)]
pub struct CallRecord {
    /// Calls are numbered from 1.
    pub number: u64,
    /// When it was sent.
    pub time: Timestamp,
    /// The path of the method, as in `/csi.v1.Node/NodePublishVolume`.
    pub method: String,
    /// The name of the gRPC code, or LOST if there was no answer.
    pub code: String,
    /// The message of an error.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// How long it took.
    pub duration_us: u64,
    /// The request as JSON; null if the method is not of CSI.
    pub request: Value,
    /// The answer as JSON; null if there is none.
    pub response: Value,
    /// What it changed: mounts, loop devices, files.
    pub effects: Vec<String>,
    /// The rules that it broke.
    pub broken: Vec<BrokenRule>,
    /// What the workbench did to it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<String>,
    /// What the driver printed meanwhile.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
}

impl CallRecord {
    /// The method without its service.
    pub fn name(&self) -> &str {
        short(&self.method)
    }
}

/// A method's path without its service.
pub fn short(method: &str) -> &str {
    method.rsplit('/').next().unwrap_or(method)
}

/// A rule that a call broke.
#[derive(Debug, Clone, Serialize)]
pub struct BrokenRule {
    /// Its name, which `berth certify --explain` takes.
    pub id: &'static str,
    /// How binding it is.
    pub level: Level,
    /// What the specification says, in our words.
    pub rule: String,
    /// What was found instead.
    pub found: String,
}

impl BrokenRule {
    pub(crate) fn new(rule: &Rule, found: String) -> Self {
        Self { id: rule.id, level: rule.level, rule: rule.rule.to_string(), found }
    }

    /// Whether the driver is wrong, rather than merely remarkable.
    pub fn is_fault(&self) -> bool {
        self.level != Level::Info
    }
}

/// A call that waits for a decision.
#[derive(Debug, Clone, Serialize)]
pub struct HeldCall {
    /// The number that it will have.
    pub number: u64,
    /// The path of the method.
    pub method: String,
    /// The request as JSON.
    pub request: Value,
    /// A command to look around with where the driver is.
    pub inspect: String,
}

/// What the workbench did or found.
#[derive(Debug, Clone, Serialize)]
pub struct Note {
    /// When it was done or found.
    pub time: Timestamp,
    /// What, in a sentence.
    pub text: String,
    /// Whether it is a fault of the driver.
    pub fault: bool,
}

/// Where events go: one listener, and a file if there is one; counts what was broken.
pub struct Events {
    listener: mpsc::UnboundedSender<Event>,
    file: Mutex<Option<File>>,
    faults: AtomicUsize,
}

impl Events {
    /// Events, and their listener. What is recorded in a file is one line of JSON for each.
    pub fn new(record: Option<&Path>) -> std::io::Result<(Self, mpsc::UnboundedReceiver<Event>)> {
        let (listener, receiver) = mpsc::unbounded_channel();
        let file = record.map(File::create).transpose()?;
        Ok((Self { listener, file: Mutex::new(file), faults: AtomicUsize::new(0) }, receiver))
    }

    /// Passes an event on.
    pub fn publish(&self, event: Event) {
        let faults = match &event {
            Event::Call(call) => call.broken.iter().filter(|broken| broken.is_fault()).count(),
            Event::Note(note) => usize::from(note.fault),
            Event::Held(_) => 0,
        };
        self.faults.fetch_add(faults, Ordering::Relaxed);
        let mut file = self.file.lock();
        if let Some(open) = file.as_mut()
            && let Err(error) = line(&event).and_then(|line| open.write_all(line.as_bytes()))
        {
            tracing::error!(%error, "the recording ends here");
            *file = None;
        }
        drop(file);
        // Without a listener nobody wants to know.
        let _ = self.listener.send(event);
    }

    /// Passes a sentence on.
    pub fn note(&self, text: impl Into<String>) {
        self.publish(Event::Note(Note { time: Timestamp::now(), text: text.into(), fault: false }));
    }

    /// Passes a sentence on about something that is wrong with the driver.
    pub fn fault(&self, text: impl Into<String>) {
        self.publish(Event::Note(Note { time: Timestamp::now(), text: text.into(), fault: true }));
    }

    /// How many rules were broken, and what else was wrong.
    pub fn faults(&self) -> usize {
        self.faults.load(Ordering::Relaxed)
    }
}

/// An event as one line of JSON.
pub fn line(event: &Event) -> std::io::Result<String> {
    Ok(serde_json::to_string(event)? + "\n")
}
