//! Brings a pod forward: volumes, then init containers, then containers, and again what ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_kube::timeline::Step;
use berth_kube::{Key, Next, Severity, reference};
use futures_util::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use super::Pods;
use super::decide::{Decision, Problem, deadline, decide, pause};
use super::entry::{Entry, Work};
use super::launch::{Site, container_spec};
use super::status;
use crate::plugin::Ready;
use berth_runtime::{ContainerId, Reason, State};

/// What became of an attempt to start a container.
type Started = Result<(ContainerId, State), (&'static str, String)>;

impl Pods {
    pub(super) async fn run_pod(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        work: &mut Work,
        pod: &Arc<Pod>,
    ) -> Next {
        let Some(spec) = &pod.spec else { return Next::Done };
        self.options.volumes.want(pod);
        let volumes = self.options.volumes.ready(&entry.uid);
        let name = whole_name(pod);
        if entry.take_came() {
            let problems = work.containers.values_mut().filter_map(|known| known.problem.as_mut());
            for problem in problems.filter(|problem| problem.reason == CONFIG_ERROR) {
                problem.again = Timestamp::now();
            }
        }
        let deadline = deadline(spec, work.first_seen(pod));
        let decision = loop {
            let (ready, now) = (volumes.is_some(), Timestamp::now());
            let decision = decide(spec, &work.containers, ready, deadline, now, &name);
            let Some(volumes) = volumes.as_ref().filter(|_| !decision.start.is_empty()) else {
                break decision;
            };
            self.start_all(entry, work, pod, spec, &decision, volumes).await;
        };
        if decision.is_expired && !work.is_expired {
            work.is_expired = true;
            self.options.recorder.normal(pod.as_ref(), status::EXPIRED, status::EXPIRED_MESSAGE);
        }
        for name in &decision.stop {
            self.stop(entry, work, pod, name, grace(pod));
        }
        for (name, waiting) in
            decision.waiting.iter().filter(|(_, waiting)| waiting.reason == "CrashLoopBackOff")
        {
            let message = format!("Back-off restarting failed container {name} in pod {}", whole_name(pod));
            tracing::debug!(pod = %entry.uid, container = %name, "{}", waiting.message);
            self.tell_container(pod, name, Severity::Warning, "BackOff", message);
        }
        if decision.phase.is_final() {
            work.is_over = true;
            self.options.volumes.unwant(&entry.uid);
        }
        let misses = work.containers.values().filter_map(|known| known.problem.as_ref());
        let came = entry.set_misses(misses.into_iter().any(|problem| problem.reason == CONFIG_ERROR));
        self.report_later(entry, work, pod, &decision, volumes.is_some());
        if came {
            return Next::After(Duration::ZERO);
        }
        match decision.wake {
            Some(wake) => {
                Next::After(Duration::try_from(wake.duration_since(Timestamp::now())).unwrap_or_default())
            }
            None => Next::Done,
        }
    }

    /// Leaves the pod's status to its worker.
    pub(super) fn report_later(
        &self,
        entry: &Entry,
        work: &mut Work,
        pod: &Arc<Pod>,
        decision: &Decision,
        volumes_ready: bool,
    ) {
        let view = status::View {
            pod,
            first_seen: work.first_seen(pod),
            known: &work.containers,
            decision,
            volumes_ready,
            address: self.options.address,
            is_expired: work.is_expired,
        };
        entry.told().status = Some(status::build(&view));
        self.statuses.add(entry.uid.clone());
    }

    async fn start_all(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        work: &mut Work,
        pod: &Arc<Pod>,
        spec: &PodSpec,
        decision: &Decision,
        volumes: &HashMap<String, Ready>,
    ) {
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let (namespace, name) = (part(&pod.metadata.namespace), part(&pod.metadata.name));
        work.logs = Some(self.options.layout.logs(&namespace, &name, &entry.uid));
        let all = spec.init_containers.iter().flatten().chain(&spec.containers);
        let due = all.filter(|container| decision.start.contains(&container.name));
        let _steady = self.options.volumes.steady(&entry.uid).await;
        let starts = due.map(|container| {
            let known = work.containers.get(&container.name);
            let attempt = known.filter(|known| known.run.is_some()).map_or(0, |known| known.attempt + 1);
            async move { (container, self.start_container(pod, container, attempt, volumes).await) }
        });
        let begun = Instant::now();
        for (container, started) in join_all(starts).await {
            let step = Step {
                component: "node",
                call: &format!("container {} started", container.name),
                pod: &Key::of(pod.as_ref()).to_string(),
                node: &self.options.node,
                ..Step::default()
            };
            step.ended(begun, started.as_ref().err().map(|(_, why)| why.as_str()));
            self.note_start(work, pod, container, started);
        }
        self.watch(work);
    }

    async fn start_container(
        &self,
        pod: &Arc<Pod>,
        container: &Container,
        attempt: u32,
        volumes: &HashMap<String, Ready>,
    ) -> Started {
        let site = Site {
            cluster: &self.options.cluster,
            layout: &self.options.layout,
            address: self.options.address,
            environment: &self.options.environment,
            hidden: &self.options.hidden,
        };
        let spec = container_spec(&site, pod, container, attempt, volumes)
            .await
            .map_err(|problem| (CONFIG_ERROR, problem))?;
        if attempt == 0 {
            let image = container.image.as_deref().unwrap_or_default();
            let message =
                format!("Image {image:?} is not pulled: the command runs as a process of this machine");
            self.tell_container(pod, &container.name, Severity::Normal, "Pulled", message);
        }
        if let Some(directory) = spec.log.parent() {
            let made = std::fs::create_dir_all(directory);
            made.map_err(|error| ("CreateContainerError", format!("make {}: {error}", directory.display())))?;
        }
        let runtime = &self.options.runtime;
        let id = runtime.start(spec).await.map_err(|error| ("CreateContainerError", error.sentence()))?;
        // One that was too quick to be seen running has all but ended.
        let state = match runtime.state(&id) {
            Some(state) => state,
            None => State::Exited(runtime.exited(&id).await),
        };
        Ok((id, state))
    }

    fn note_start(
        self: &Arc<Self>,
        work: &mut Work,
        pod: &Arc<Pod>,
        container: &Container,
        started: Started,
    ) {
        let known = work.containers.entry(container.name.clone()).or_default();
        match started {
            Ok((id, state)) => {
                let before = known.run.take();
                if let Some(State::Exited(ended)) = before {
                    let long = ended.started.is_some_and(|started| {
                        ended.finished.duration_since(started) >= jiff::SignedDuration::from_mins(10)
                    });
                    known.crashes = if long { 1 } else { known.crashes.saturating_add(1) };
                    known.last = Some(ended);
                }
                known.attempt = id.attempt;
                known.problem = None;
                known.run = Some(state);
                match &known.run {
                    Some(State::Exited(ended)) if ended.reason == Reason::StartError => {
                        let message = format!("Error: {}", ended.message);
                        self.tell_container(pod, &container.name, Severity::Warning, "Failed", message);
                    }
                    _ => {
                        self.tell_container(
                            pod,
                            &container.name,
                            Severity::Normal,
                            "Created",
                            "Container created",
                        );
                        self.tell_container(
                            pod,
                            &container.name,
                            Severity::Normal,
                            "Started",
                            "Container started",
                        );
                    }
                }
                self.forget_before_last(work, &id);
                work.runs.insert(id);
            }
            Err((reason, message)) => {
                let tries = known.problem.as_ref().map_or(1, |problem| problem.tries + 1);
                let again = Timestamp::now() + pause(tries);
                self.tell_container(
                    pod,
                    &container.name,
                    Severity::Warning,
                    "Failed",
                    format!("Error: {message}"),
                );
                known.problem = Some(Problem { reason, message, tries, again });
            }
        }
    }

    /// Only the run before the latest is kept: for its exit code and its log.
    fn forget_before_last(self: &Arc<Self>, work: &mut Work, latest: &ContainerId) {
        let old = |id: &ContainerId| id.name == latest.name && id.attempt + 1 < latest.attempt;
        let old: Vec<ContainerId> = work.runs.extract_if(|id| old(id)).collect();
        for id in old {
            let logs = work.logs.clone();
            let runtime = self.options.runtime.clone();
            tokio::spawn(async move {
                if let Err(error) = runtime.remove(&id).await {
                    tracing::warn!(container = %id, error = error.sentence(), "an old run is left");
                }
                let Some(logs) = logs else { return };
                for name in [format!("{}.log", id.attempt), format!("{}.log.1", id.attempt)] {
                    // What cannot be removed now is removed with the pod.
                    let _ = std::fs::remove_file(logs.join(&id.name).join(name));
                }
            });
        }
    }

    /// Waits for the end of every run that goes on.
    pub(super) fn watch(&self, work: &mut Work) {
        work.watched.retain(|id| work.runs.contains(id));
        for id in &work.runs {
            let known = work.containers.get(&id.name);
            let runs = known.is_some_and(|known| known.attempt == id.attempt && known.is_running());
            if runs && work.watched.insert(id.clone()) {
                let (runtime, queue, id) =
                    (self.options.runtime.clone(), self.options.queue.clone(), id.clone());
                let shutdown = self.options.cluster.shutdown().clone();
                tokio::spawn(async move {
                    let ended = shutdown.run_until_cancelled(runtime.exited(&id)).await;
                    if ended.is_some() {
                        queue.add(id.pod_uid);
                    }
                });
            }
        }
    }

    /// Tells the pod what happened to one of its containers.
    pub(super) fn tell_container(
        &self,
        pod: &Pod,
        container: &str,
        severity: Severity,
        reason: &str,
        message: impl Into<String>,
    ) {
        let init = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
        let init = init.is_some_and(|all| all.iter().any(|other| other.name == container));
        let field = if init { "initContainers" } else { "containers" };
        let mut about = reference(pod);
        about.field_path = Some(format!("spec.{field}{{{container}}}"));
        self.options.recorder.tell(about, severity, reason, message);
    }
}

const CONFIG_ERROR: &str = "CreateContainerConfigError";

/// How long the containers of a pod may take to end.
pub(super) fn grace(pod: &Pod) -> Duration {
    let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let seconds = pod.metadata.deletion_grace_period_seconds.or(own).unwrap_or(30);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// A pod as upstream names it in messages: `name_namespace(uid)`.
fn whole_name(pod: &Pod) -> String {
    let meta = &pod.metadata;
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}_{}({})", part(&meta.name), part(&meta.namespace), part(&meta.uid))
}
