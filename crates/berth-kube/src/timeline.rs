//! What was done for a volume, when, by whom, and how long it took: one log event per step.
//!
//! Whoever runs the loops decides what becomes of the lines (`berth up` keeps them for `berth explain`); a loop only
//! emits them.

use std::time::{Duration, Instant};

/// The target of a timeline's log events.
pub const TARGET: &str = "timeline";

/// One step on a volume's way.
#[derive(Debug, Clone, Default)]
pub struct Step<'a> {
    /// Who did it, such as `provisioner`.
    pub component: &'a str,
    /// What was called, such as `CreateVolume`.
    pub call: &'a str,
    /// What is reached with it, such as `CREATED`; empty if nothing in particular.
    pub state: &'a str,
    /// The PersistentVolume's name, if there is one.
    pub volume: &'a str,
    /// The claim, as `namespace/name`, if it is known.
    pub claim: &'a str,
    /// The pod, as `namespace/name`, if it was done for one.
    pub pod: &'a str,
    /// The node, if it was done on or for one.
    pub node: &'a str,
    /// How long it took.
    pub duration: Duration,
    /// Why it failed; empty if it did not. Must not hold secrets.
    pub error: &'a str,
}

impl Step<'_> {
    /// Emits a step that began then and ended just now; the state is reached only without an error.
    pub fn ended(&self, begun: Instant, error: Option<&str>) {
        let error = error.unwrap_or_default();
        let state = if error.is_empty() { self.state } else { "" };
        Step { state, error, duration: begun.elapsed(), ..self.clone() }.emit();
    }

    /// Emits the step as a log event.
    pub fn emit(&self) {
        let duration_us = u64::try_from(self.duration.as_micros()).unwrap_or(u64::MAX);
        tracing::info!(
            target: TARGET,
            component = self.component,
            call = self.call,
            state = self.state,
            volume = self.volume,
            claim = self.claim,
            pod = self.pod,
            node = self.node,
            duration_us,
            error = self.error,
        );
    }
}
