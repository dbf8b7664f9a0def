//! Ends a pod: containers are stopped, volumes are unmounted, and at last the pod is removed from Kubernetes.

use std::sync::Arc;
use std::time::Duration;

use berth_host::path::remove_tree;
use berth_kube::storage::is_over;
use berth_kube::{Next, Severity};
use berth_runtime::{ContainerId, blocking};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::Instant;

use super::actions::Target;
use super::decide::{Phase, decide, is_sidecar};
use super::{Entry, Error, Pods, Work, user_namespaces};
use crate::volumes::remove_pod;

/// How long the containers of a pod may take to end.
pub(super) fn grace(pod: &Pod) -> Duration {
    let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let seconds = pod.metadata.deletion_grace_period_seconds.or(own).unwrap_or(30);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

impl Pods {
    /// The pod is being deleted.
    pub(super) fn finish(self: &Arc<Self>, entry: &Arc<Entry>, work: &mut Work, pod: &Arc<Pod>) -> Next {
        if self.stop_all(entry, work, Some(pod)) {
            self.report_end(entry, work, pod, false);
            return Next::Done;
        }
        self.options.volumes.unwant(&entry.uid);
        let left = !self.options.volumes.is_gone(&entry.uid);
        if !left {
            entry.pending_report().finished = true;
        }
        self.report_end(entry, work, pod, true);
        Next::Done
    }

    /// The pod has ended by itself, and stays for its status and its logs.
    pub(super) fn rest(self: &Arc<Self>, entry: &Arc<Entry>, work: &mut Work, pod: &Arc<Pod>) -> Next {
        work.is_over = true;
        if !self.stop_all(entry, work, Some(pod)) {
            self.options.volumes.unwant(&entry.uid);
            if !std::mem::replace(&mut work.is_stopped, true) {
                let (runtime, uid) = (self.options.runtime.clone(), entry.uid.clone());
                tokio::spawn(async move {
                    if let Err(error) = runtime.stop_pod(&uid).await {
                        tracing::warn!(
                            pod = uid,
                            error = error.sentence(),
                            "a pod that has ended is not stopped"
                        );
                    }
                });
            }
        }
        Next::Done
    }

    /// Kubernetes does not know the pod any more: removes all that is left of it.
    pub(super) async fn clear(self: &Arc<Self>, entry: &Arc<Entry>, work: &mut Work) -> Result<Next, Error> {
        let pod = entry.last_observed();
        if self.stop_all(entry, work, pod.as_ref()) {
            return Ok(Next::Done);
        }
        self.options.volumes.unwant(&entry.uid);
        if !self.options.volumes.is_gone(&entry.uid) {
            return Ok(Next::Done);
        }
        let runs: Vec<ContainerId> = work.runs.iter().cloned().collect();
        for id in runs {
            self.options.runtime.remove(&id).await.map_err(Error::Container)?;
            work.runs.remove(&id);
        }
        self.options.runtime.remove_pod(&entry.uid).await.map_err(Error::Container)?;
        let (layout, uid, logs) = (self.options.layout.clone(), entry.uid.clone(), work.logs.clone());
        let remove = move || {
            user_namespaces::release(&layout, &uid)?;
            remove_pod(&layout, &uid)?;
            logs.map_or(Ok(()), |logs| remove_tree(&logs).map(drop))
        };
        blocking(remove).await.map_err(Error::Remove)?;
        self.options.network.release(&entry.uid);
        self.entries().remove(&entry.uid);
        Ok(Next::Done)
    }

    /// Stops what runs, sidecars after the others; whether anything still runs.
    fn stop_all(self: &Arc<Self>, entry: &Arc<Entry>, work: &mut Work, pod: Option<&Arc<Pod>>) -> bool {
        work.probes.clear();
        if !work.any_running() {
            return false;
        }
        let spec = pod.and_then(|pod| pod.spec.as_ref());
        let init = spec.and_then(|spec| spec.init_containers.as_ref());
        let sidecar = |name: &str| {
            init.is_some_and(|all| {
                all.iter().any(|container| container.name == name && is_sidecar(container))
            })
        };
        let running = work.containers.iter().filter(|(_, known)| known.is_running());
        let running: Vec<String> = running.map(|(name, _)| name.clone()).collect();
        let (sidecars, others): (Vec<String>, Vec<String>) =
            running.into_iter().partition(|name| sidecar(name));
        let nobody = Arc::new(Pod::default());
        let pod = pod.unwrap_or(&nobody);
        for name in if others.is_empty() { sidecars } else { others } {
            self.stop(entry, work, pod, &name, grace(pod), &format!("Stopping container {name}"));
        }
        true
    }

    /// Stops a container in the background; the pod is reconciled again when it has ended.
    pub(super) fn stop(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        work: &mut Work,
        pod: &Arc<Pod>,
        name: &str,
        grace: Duration,
        why: &str,
    ) {
        let Some(id) = work.running(&entry.uid, name) else { return };
        let known = work.stopping.get(&id).copied();
        if known.is_some_and(|known| known <= grace) {
            return;
        }
        work.stopping.insert(id.clone(), grace);
        if known.is_none() && pod.metadata.name.is_some() {
            self.emit(pod, name, Severity::Normal, "Killing", why);
        }
        let container = pod.spec.as_ref().and_then(|spec| {
            let all = spec.init_containers.iter().flatten().chain(&spec.containers);
            all.into_iter().find(|container| container.name == name).cloned()
        });
        let (pods, pod) = (self.clone(), pod.clone());
        tokio::spawn(async move {
            let begun = Instant::now();
            let hook = container.as_ref().filter(|_| known.is_none() && !grace.is_zero());
            if let Some(hook) = hook {
                pods.before_stop(&pod, hook, &id, grace).await;
            }
            // Upstream leaves at least two seconds after a hook that used up the grace.
            let left = grace.saturating_sub(begun.elapsed());
            let left = if grace.is_zero() { left } else { left.max(Duration::from_secs(2).min(grace)) };
            pods.options.runtime.stop(&id, left).await;
            pods.options.queue.add(id.pod_uid);
        });
    }

    /// Runs the hook that a container wants to be run before it is stopped, for at most its grace.
    async fn before_stop(
        self: &Arc<Self>,
        pod: &Pod,
        container: &Container,
        id: &ContainerId,
        grace: Duration,
    ) {
        let Some(hook) = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.as_ref())
        else {
            return;
        };
        let target = Target { pods: self.clone(), container: container.clone(), id: id.clone() };
        let problem = match tokio::time::timeout(grace, target.hook(pod, hook)).await {
            Ok(Ok(())) => return,
            Ok(Err(problem)) => problem,
            Err(_) => format!("not done within the grace period of {}s", grace.as_secs()),
        };
        let message = format!("PreStopHook failed: {problem}");
        self.emit(pod, &container.name, Severity::Warning, "FailedPreStopHook", message);
    }

    fn report_end(&self, entry: &Entry, work: &mut Work, pod: &Arc<Pod>, stopped: bool) {
        // How a pod ended by itself is not reported again.
        if is_over(pod) {
            self.statuses.add(entry.uid.clone());
            return;
        }
        let Some(spec) = &pod.spec else { return };
        let mut decision = decide(spec, &work.containers, false, None, Timestamp::now(), "");
        // A container that ended while its pod is being deleted does not wait to run again.
        decision.waiting.retain(|name, _| work.containers.get(name).is_none_or(|known| known.run.is_none()));
        if stopped {
            let good = spec.containers.iter().all(|container| {
                let ended = work.containers.get(&container.name).and_then(|known| known.ended());
                ended.is_some_and(|ended| ended.code == 0)
            });
            decision.phase = if good && work.end.is_none() { Phase::Succeeded } else { Phase::Failed };
        } else if decision.phase.is_final() {
            decision.phase = Phase::Running;
        }
        self.report_later(entry, work, pod, &decision, !stopped);
    }
}
