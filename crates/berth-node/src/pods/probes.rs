//! Probes of running containers (startup, liveness and readiness) and their postStart hook, with the kubelet's rules.
//!
//! Each run of a container that has any of them gets one task. The hook comes first: until it is done the container is
//! not started, and if it fails, the container is stopped. A hook that was under way when this process ended is run
//! again by the next. Until the startup probe has succeeded, neither of the other probes runs and the container counts as not started. A container with a readiness probe is not ready before that succeeds;
//! one whose startup or liveness probe fails is stopped, and its restart policy decides what follows. A result counts
//! once it came as often in a row as its threshold says. What a probe finds goes to the pod's worker, which decides.
//!
//! Events: `Unhealthy`, `FailedPostStartHook`.

use std::sync::Arc;
use std::time::Duration;

use berth_kube::Severity;
use berth_runtime::{ContainerId, State};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod, Probe};
use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::{Interval, MissedTickBehavior, interval_at, timeout};

use super::Pods;
use super::actions::Target;
use super::decide::Health;

/// A kind of probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Startup,
    Liveness,
    Readiness,
}

impl Kind {
    pub(super) fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Self::Startup => container.startup_probe.as_ref(),
            Self::Liveness => container.liveness_probe.as_ref(),
            Self::Readiness => container.readiness_probe.as_ref(),
        }
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// What the probes of one run have found so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Findings {
    pub(super) health: Health,
    /// Why the container must be stopped.
    pub(super) failed: Option<Failed>,
}

/// What failed so that a container must be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Failed {
    Probe(Kind),
    PostStart,
}

/// The probes of one run of a container, which end when this is dropped.
#[derive(Debug)]
pub(super) struct Probes {
    findings: Arc<Mutex<Findings>>,
    task: AbortHandle,
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Probes {
    /// Begins to probe a run that was started at this time and is as healthy as `health` says.
    pub(super) fn start(
        pods: &Arc<Pods>,
        pod: &Arc<Pod>,
        container: &Container,
        id: &ContainerId,
        started: Timestamp,
        health: Health,
    ) -> Self {
        let findings = Arc::new(Mutex::new(Findings { health, failed: None }));
        let target = Target { pods: pods.clone(), container: container.clone(), id: id.clone() };
        let prober = Prober { target, pod: pod.clone(), started, findings: findings.clone() };
        let shutdown = pods.options.cluster.shutdown().clone();
        let task = tokio::spawn(async move {
            shutdown.run_until_cancelled(prober.run()).await;
        });
        Self { findings, task: task.abort_handle() }
    }

    /// Returns what was found so far.
    pub(super) fn findings(&self) -> Findings {
        *self.findings.lock()
    }
}

/// Returns whether a container has a probe, or a hook that is run after its start.
pub(super) fn has_probes(container: &Container) -> bool {
    post_start(container).is_some()
        || [Kind::Startup, Kind::Liveness, Kind::Readiness]
            .into_iter()
            .any(|kind| kind.of(container).is_some())
}

fn post_start(container: &Container) -> Option<&LifecycleHandler> {
    container.lifecycle.as_ref()?.post_start.as_ref()
}

/// Returns the health of a container that was just started.
pub(super) fn initial_health(container: &Container) -> Health {
    let started = container.startup_probe.is_none() && post_start(container).is_none();
    Health { started, ready: started && container.readiness_probe.is_none() }
}

/// Returns the health of a run that an earlier life of this process started, as the pod's status has it.
pub(super) fn known_health(pod: &Pod, container: &Container, attempt: u32) -> Health {
    let status = pod.status.as_ref();
    let init = status.and_then(|status| status.init_container_statuses.as_ref()).into_iter().flatten();
    let main = status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten();
    let known = init.chain(main).find(|status| status.name == container.name).filter(|status| {
        let running = status.state.as_ref().is_some_and(|state| state.running.is_some());
        running && u32::try_from(status.restart_count) == Ok(attempt)
    });
    known.map_or_else(
        || initial_health(container),
        |status| Health { started: status.started == Some(true), ready: status.ready },
    )
}

/// Counts equal results in a row.
#[derive(Debug, Default)]
struct Streak {
    is_success: bool,
    length: u32,
}

impl Streak {
    /// Adds a result; whether it came so often in a row that it counts.
    fn reaches_threshold(&mut self, is_success: bool, probe: &Probe) -> bool {
        self.length = if self.length > 0 && self.is_success == is_success { self.length + 1 } else { 1 };
        self.is_success = is_success;
        let threshold = if is_success {
            probe.success_threshold.unwrap_or(1)
        } else {
            probe.failure_threshold.unwrap_or(3)
        };
        self.length >= u32::try_from(threshold).unwrap_or(1)
    }
}

struct Prober {
    target: Target,
    pod: Arc<Pod>,
    started: Timestamp,
    findings: Arc<Mutex<Findings>>,
}

impl Prober {
    async fn run(&self) {
        if let Some(hook) = post_start(&self.target.container)
            && !self.findings.lock().health.started
        {
            if let Err(problem) = self.target.hook(&self.pod, hook).await {
                if !self.is_running() {
                    return;
                }
                let message = format!("PostStartHook failed: {problem}");
                let name = &self.target.container.name;
                self.target.pods.emit(&self.pod, name, Severity::Warning, "FailedPostStartHook", message);
                self.change(|findings| findings.failed = Some(Failed::PostStart));
                return;
            }
            if self.target.container.startup_probe.is_none() {
                let ready = self.target.container.readiness_probe.is_none();
                self.change(|findings| findings.health = Health { started: true, ready });
            }
        }
        if let Some(probe) = &self.target.container.startup_probe
            && !self.findings.lock().health.started
        {
            if !self.result(Kind::Startup, probe, &mut self.ticks(probe)).await {
                self.change(|findings| findings.failed = Some(Failed::Probe(Kind::Startup)));
                return;
            }
            let ready = self.target.container.readiness_probe.is_none();
            self.change(|findings| findings.health = Health { started: true, ready });
        }
        let liveness = async {
            let Some(probe) = &self.target.container.liveness_probe else { return };
            let mut ticks = self.ticks(probe);
            while self.result(Kind::Liveness, probe, &mut ticks).await {}
            self.change(|findings| findings.failed = Some(Failed::Probe(Kind::Liveness)));
        };
        let readiness = async {
            let Some(probe) = &self.target.container.readiness_probe else { return };
            let mut ticks = self.ticks(probe);
            loop {
                let ready = self.result(Kind::Readiness, probe, &mut ticks).await;
                self.change(|findings| findings.health.ready = ready);
            }
        };
        tokio::join!(liveness, readiness);
    }

    fn is_running(&self) -> bool {
        matches!(self.target.pods.options.runtime.state(&self.target.id), Some(State::Running { .. }))
    }

    /// The times at which a probe runs.
    fn ticks(&self, probe: &Probe) -> Interval {
        let due = self.started + seconds(probe.initial_delay_seconds, 0, 0);
        let delay = Duration::try_from(due.duration_since(Timestamp::now())).unwrap_or_default();
        let first = tokio::time::Instant::now() + delay;
        let mut ticks = interval_at(first, seconds(probe.period_seconds, 10, 1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }

    /// Probes until a result counts.
    async fn result(&self, kind: Kind, probe: &Probe, ticks: &mut Interval) -> bool {
        let mut streak = Streak::default();
        loop {
            ticks.tick().await;
            let checked = self.check(probe).await;
            if let Err(problem) = &checked {
                if !self.is_running() {
                    // It has ended by itself: nothing that a probe could say counts any more.
                    return std::future::pending().await;
                }
                let message = format!("{} probe failed: {problem}", kind.as_str());
                self.target.pods.emit(
                    &self.pod,
                    &self.target.container.name,
                    Severity::Warning,
                    "Unhealthy",
                    message,
                );
            }
            if streak.reaches_threshold(checked.is_ok(), probe) {
                return checked.is_ok();
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Findings)) {
        let changed = {
            let mut findings = self.findings.lock();
            let before = *findings;
            change(&mut findings);
            *findings != before
        };
        if changed {
            self.target.pods.options.queue.add(self.target.id.pod_uid.clone());
        }
    }

    async fn check(&self, probe: &Probe) -> Result<(), String> {
        let at_most = seconds(probe.timeout_seconds, 1, 1);
        let check = async {
            if let Some(exec) = &probe.exec {
                self.target.exec(exec.command.as_deref().unwrap_or_default()).await
            } else if let Some(get) = &probe.http_get {
                self.target.http_get(get).await
            } else if let Some(socket) = &probe.tcp_socket {
                self.target.connect(socket).await
            } else if let Some(action) = &probe.grpc {
                self.target.grpc(action).await
            } else {
                Err("the probe names no action".to_owned())
            }
        };
        let late = |_| Err(format!("timed out after {}s", at_most.as_secs()));
        timeout(at_most, check).await.unwrap_or_else(late)
    }
}

fn seconds(given: Option<i32>, usual: u64, least: u64) -> Duration {
    let given = given.and_then(|seconds| u64::try_from(seconds).ok());
    Duration::from_secs(given.unwrap_or(usual).max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_counts_when_it_came_as_often_in_a_row_as_its_threshold() {
        let probe = |success, failure| Probe {
            success_threshold: Some(success),
            failure_threshold: Some(failure),
            ..Probe::default()
        };
        for (probe, results, expected) in [
            (probe(1, 3), "FFF", "--F"),
            (probe(1, 3), "FFSFF", "--S--"),
            (probe(2, 1), "SFSS", "-F-S"),
            (Probe::default(), "SFFF", "S--F"),
        ] {
            let mut streak = Streak::default();
            let counted: String = results
                .chars()
                .map(|result| if streak.reaches_threshold(result == 'S', &probe) { result } else { '-' })
                .collect();
            assert_eq!(counted, expected, "{results}");
        }
    }

    #[test]
    fn what_no_probe_has_confirmed_yet_is_neither_started_nor_ready() {
        let (some, none) = (Some(Probe::default()), None);
        for (startup, readiness, started, ready) in [
            (none.clone(), none.clone(), true, true),
            (none.clone(), some.clone(), true, false),
            (some.clone(), none.clone(), false, false),
            (some.clone(), some.clone(), false, false),
        ] {
            let container = Container {
                startup_probe: startup,
                readiness_probe: readiness,
                liveness_probe: some.clone(),
                ..Container::default()
            };
            assert_eq!(initial_health(&container), Health { started, ready });
        }
    }
}
