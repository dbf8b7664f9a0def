//! Jobs: pods that run to their end, as often as asked for.
//!
//! Each pod of a Job has a finalizer until it is counted, so that no end of a pod is missed whatever happens: its uid is
//! written into the Job's status (`uncountedTerminatedPods`), then the finalizer goes, then the uid becomes a number. A
//! process that dies in between goes on where the status says.

mod failures;
mod indexes;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::{
    JOB_COMPLETION_INDEX, JOB_CONTROLLER, JOB_INDEX_FAILURES, JOB_INDEX_IGNORED_FAILURES, JOB_TRACKING,
    events,
};
use berth_kube::{Backoff, Cluster, Key, Loop, Next, Result};
use futures_util::future::join_all;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Preconditions, PropagationPolicy};
use parking_lot::Mutex;

use super::ownership::{controller, has_finalizer};
use super::pods::{Pods, from_template, in_growing_batches, nonzero};
use super::workload::{Workloads, is_selected};
use failures::Failures;
pub(super) use plan::finished;
use plan::{
    Assessment, JobPod, NewPod, ObservedJob, Step, Tracking, condition, count_released, finish, is_suspended,
    set_condition,
};

/// The variable in which a pod of an indexed Job finds its index.
const INDEX_VARIABLE: &str = "JOB_COMPLETION_INDEX";
/// How long the beginning of a generated name may be.
const LONGEST_PREFIX: usize = 58;

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let jobs = Workloads::new(&cluster, "job-controller", is_selected);
    let controller = Arc::new(Controller {
        pods: Pods::new(&jobs),
        released: Mutex::default(),
        failures: Mutex::default(),
        jobs,
    });
    let of_pod = controller.clone();
    let queue = controller.jobs.cluster.queue("jobs", Backoff::default());
    let orphans = controller.jobs.cluster.queue("orphaned-job-pods", Backoff::default());
    let (of_job, orphan) = (controller.clone(), controller.clone());
    let release = controller.clone();
    tokio::join!(
        Loop::new(&controller.jobs.cluster, &queue)
            .keyed(&controller.jobs.cache)
            .subscribe(&controller.pods.dependents.cache, move |before, after| {
                of_pod.pod_changed(before, after)
            })
            .run(32, |job| controller.clone().reconcile(job)),
        Loop::new(&controller.jobs.cluster, &orphans)
            .subscribe(&controller.pods.dependents.cache, move |_, after| {
                let lost = after.filter(|pod| orphan.is_orphan(pod));
                lost.map(|pod| Key::of(pod.as_ref())).into_iter().collect()
            })
            .subscribe(&controller.jobs.cache, move |before, after| {
                let gone = before.filter(|_| after.is_none()).and_then(|job| job.uid());
                let pods = gone.map(|uid| of_job.pods.of(&uid)).unwrap_or_default();
                pods.iter().map(|pod| Key::of(pod.as_ref())).collect()
            })
            .run(8, |pod| release.clone().release_orphan(pod)),
    );
}

struct Controller {
    jobs: Workloads<Job>,
    pods: Pods,
    /// The uids of pods whose finalizer was taken off here and that the cache still shows with it.
    released: Mutex<HashSet<String>>,
    /// How the pods of a Job failed, by its uid.
    failures: Mutex<HashMap<String, Failures>>,
}

impl Controller {
    fn pod_changed(&self, before: Option<&Arc<Pod>>, after: Option<&Arc<Pod>>) -> Vec<Key> {
        if let Some(uid) = before.or(after).and_then(|pod| pod.uid())
            && after.is_none_or(|pod| !has_finalizer(&pod.metadata, JOB_TRACKING))
        {
            self.released.lock().remove(&uid);
        }
        self.pods.changed(&self.jobs, before, after)
    }

    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(job) = self.jobs.cache.get(&key) else { return Ok(Next::Done) };
        let (Some(spec), Some(uid)) = (&job.spec, job.uid()) else { return Ok(Next::Done) };
        if spec.managed_by.as_deref().is_some_and(|manager| manager != JOB_CONTROLLER) {
            return Ok(Next::Done);
        }
        if let Some(end) = finished(&job) {
            self.failures.lock().remove(&uid);
            return self.expire(&job, end).await;
        }
        self.jobs.claim(&job, &self.pods.dependents).await?;

        let observed = self.observe(&job, spec, &uid);
        let assessment = observed.assess();
        let (step, pause) = observed.plan(&assessment);
        let applied = self.apply(&job, spec, step).await;
        // What was just written is in the cache.
        let (active, ready, terminating) = self.observe(&job, spec, &uid).counts();
        let end = assessment
            .end
            .clone()
            .or_else(|| observed.success(&assessment, usize::try_from(active).unwrap_or(0)));
        let end = end.filter(|_| applied.is_ok());
        let mut tracking = observed.track(&assessment, end.as_ref());
        let status = &mut tracking.status;
        (status.active, status.ready, status.terminating) = (nonzero(active), Some(ready), Some(terminating));
        if end.is_none() && applied.is_ok() && job.metadata.deletion_timestamp.is_none() {
            self.record_suspension(&job, status);
        }
        self.jobs.write_status(&job, tracking.status.clone()).await?;
        let again = assessment.again;
        self.settle(&observed, assessment, tracking).await?;
        applied?;
        Ok(again.into_iter().chain(pause).min().map_or(Next::Done, Next::After))
    }

    fn observe<'a>(&self, job: &'a Job, spec: &'a JobSpec, uid: &str) -> ObservedJob<'a> {
        let released = self.released.lock();
        let pods = self.pods.of(uid).into_iter().filter(|pod| is_selected(job, &pod.metadata));
        let pods = pods.map(|pod| JobPod {
            is_going: self.pods.is_going(&pod),
            is_tracked: has_finalizer(&pod.metadata, JOB_TRACKING)
                && pod.uid().is_some_and(|uid| !released.contains(&uid)),
            pod,
        });
        let mut pods: Vec<JobPod> = pods.collect();
        pods.sort_by_key(|pod| (plan::index_of(&pod.pod), pod.pod.name_any()));
        let failures = self.failures.lock().get(uid).cloned().unwrap_or_default();
        ObservedJob { job, spec, pods, failures, now: whole_now() }
    }

    async fn apply(&self, job: &Job, spec: &JobSpec, step: Step) -> Result<()> {
        let all = |done: Vec<Result<()>>| done.into_iter().rfold(Ok(()), Result::and);
        match step {
            Step::Nothing => Ok(()),
            Step::Create(pods) => {
                in_growing_batches(pods, |new| {
                    let pod = new_pod(job, spec, &new);
                    async move { self.pods.create(job, &pod).await }
                })
                .await
            }
            Step::End(pods) => all(join_all(pods.iter().map(|pod| self.pods.delete(job, pod))).await),
            Step::Remove(pods) => {
                let remove = |pod: Arc<Pod>| async move {
                    self.release(&pod).await?;
                    self.pods.delete(job, &pod).await
                };
                all(join_all(pods.into_iter().map(remove)).await)
            }
        }
    }

    /// Says in the status, and by an event, that a Job stops or goes on.
    fn record_suspension(&self, job: &Job, status: &mut JobStatus) {
        let now = whole_now();
        if is_suspended(job) {
            if set_condition(status, condition("Suspended", "JobSuspended", "Job suspended", now)) {
                status.start_time = None;
                self.jobs.recorder.normal(job, events::SUSPENDED, "Job suspended");
            }
            return;
        }
        let resumed = JobCondition {
            status: "False".to_owned(),
            ..condition("Suspended", "JobResumed", "Job resumed", now)
        };
        if set_condition(status, resumed) {
            // The deadline counts from here.
            status.start_time = Some(Time(now));
            self.jobs.recorder.normal(job, events::RESUMED, "Job resumed");
        }
    }

    /// Lets pods go whose end the status has, counts them, and ends the Job if it is over.
    async fn settle(
        &self,
        observed: &ObservedJob<'_>,
        assessment: Assessment,
        tracking: Tracking,
    ) -> Result<()> {
        let job = observed.job;
        self.failures.lock().insert(job.uid().unwrap_or_default(), assessment.failures);
        let Tracking { mut status, release, end } = tracking;
        let released = join_all(release.iter().map(|pod| self.release(pod))).await;
        let mut tracked = observed.tracked();
        for (pod, _) in release.iter().zip(&released).filter(|(_, released)| released.is_ok()) {
            tracked.remove(&pod.uid().unwrap_or_default());
        }
        count_released(&mut status, &tracked);
        let end = end.filter(|end| finish(&mut status, end.clone()));
        // The status as it was written before is in the cache.
        let Some(job) = self.jobs.cache.get(&Key::of(job)).filter(|known| known.uid() == job.uid()) else {
            return Ok(());
        };
        let succeeded = status.succeeded.unwrap_or(0);
        self.jobs.write_status(&job, status).await?;
        if let Some(end) = end {
            self.record_end(&job, &end, succeeded);
        }
        released.into_iter().rfold(Ok(()), Result::and)
    }

    fn record_end(&self, job: &Job, end: &JobCondition, succeeded: i32) {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        if end.type_ != "Complete" {
            self.jobs.recorder.warning(job, &text(&end.reason), text(&end.message));
            return;
        }
        let wanted = job.spec.as_ref().and_then(|spec| spec.completions);
        if wanted.is_some_and(|wanted| succeeded > wanted) {
            let message = "Too many succeeded pods running after completion count reached";
            self.jobs.recorder.warning(job, events::TOO_MANY_SUCCEEDED_PODS, message);
        }
        self.jobs.recorder.normal(job, events::COMPLETED, "Job completed");
    }

    /// Takes the finalizer off a pod.
    async fn release(&self, pod: &Pod) -> Result<()> {
        let uid = pod.uid().unwrap_or_default();
        self.released.lock().insert(uid.clone());
        let released = self.jobs.cluster.remove_finalizer(pod, JOB_TRACKING).await;
        let known = self.pods.dependents.cache.get(&Key::of(pod)).filter(|known| known.uid() == pod.uid());
        if released.is_err() || known.is_none_or(|pod| !has_finalizer(&pod.metadata, JOB_TRACKING)) {
            self.released.lock().remove(&uid);
        }
        released
    }

    /// Whether a pod waits to be counted by a Job that there is not.
    fn is_orphan(&self, pod: &Pod) -> bool {
        let job = controller(&pod.metadata).filter(|owner| owner.kind == "Job");
        let is_others = job.is_none() && controller(&pod.metadata).is_some();
        let is_known = job.is_some_and(|owner| {
            let key = Key::new(pod.namespace().unwrap_or_default(), owner.name.clone());
            self.jobs.cache.get(&key).is_some_and(|job| job.uid().as_deref() == Some(&*owner.uid))
        });
        has_finalizer(&pod.metadata, JOB_TRACKING) && !is_others && !is_known
    }

    /// Takes the finalizer off a pod whose Job is gone.
    async fn release_orphan(self: Arc<Self>, key: Key) -> Result<Next> {
        let pod = self.pods.dependents.cache.get(&key).filter(|pod| self.is_orphan(pod));
        let Some(pod) = pod else { return Ok(Next::Done) };
        // The cache of Jobs may not know a new one yet.
        if let Some(owner) = controller(&pod.metadata) {
            let job = self.jobs.cluster.fetch::<Job>(&Key::new(&*key.namespace, &*owner.name)).await?;
            if job.is_some_and(|job| job.uid().as_deref() == Some(&*owner.uid)) {
                return Ok(Next::Done);
            }
        }
        self.jobs.cluster.remove_finalizer(pod.as_ref(), JOB_TRACKING).await?;
        Ok(Next::Done)
    }

    /// Deletes a Job that has been finished for as long as it says.
    async fn expire(&self, job: &Job, end: &JobCondition) -> Result<Next> {
        let ttl = job.spec.as_ref().and_then(|spec| spec.ttl_seconds_after_finished);
        let (Some(ttl), None) = (ttl, &job.metadata.deletion_timestamp) else { return Ok(Next::Done) };
        let Some(ended) = end.last_transition_time.as_ref() else { return Ok(Next::Done) };
        let age = Timestamp::now().duration_since(ended.0);
        let left = SignedDuration::from_secs(i64::from(ttl)) - age;
        if let Some(left) = Duration::try_from(left).ok().filter(|left| !left.is_zero()) {
            return Ok(Next::After(left));
        }
        // Somebody may just have asked to keep it longer.
        let fresh = self.jobs.cluster.fetch::<Job>(&Key::of(job)).await?;
        let same_ttl = |fresh: &Job| fresh.spec.as_ref().and_then(|spec| spec.ttl_seconds_after_finished);
        if fresh.is_none_or(|fresh| fresh.uid() != job.uid() || same_ttl(&fresh) != Some(ttl)) {
            return Ok(Next::Done);
        }
        self.jobs.cluster.delete_with(job, &deletion(job, PropagationPolicy::Foreground)).await?;
        Ok(Next::Done)
    }
}

/// This moment in whole seconds, as a status writes it.
fn whole_now() -> Timestamp {
    Timestamp::from_second(Timestamp::now().as_second()).unwrap_or(Timestamp::UNIX_EPOCH)
}

/// How a Job is deleted with its pods: without saying so, they would stay.
pub(super) fn deletion(job: &Job, policy: PropagationPolicy) -> DeleteParams {
    let preconditions = Preconditions { uid: job.uid(), resource_version: None };
    DeleteParams {
        preconditions: Some(preconditions),
        propagation_policy: Some(policy),
        ..DeleteParams::default()
    }
}

/// A pod of a Job.
fn new_pod(job: &Job, spec: &JobSpec, new: &NewPod) -> Pod {
    let mut pod = from_template(job, spec.template.clone());
    if !has_finalizer(&pod.metadata, JOB_TRACKING) {
        pod.finalizers_mut().push(JOB_TRACKING.to_owned());
    }
    let Some(index) = new.index else { return pod };
    pod.labels_mut().insert(JOB_COMPLETION_INDEX.to_owned(), index.to_string());
    let annotations = pod.annotations_mut();
    annotations.insert(JOB_COMPLETION_INDEX.to_owned(), index.to_string());
    if let Some((counted, ignored)) = new.failures {
        annotations.insert(JOB_INDEX_FAILURES.to_owned(), counted.to_string());
        if ignored > 0 {
            annotations.insert(JOB_INDEX_IGNORED_FAILURES.to_owned(), ignored.to_string());
        }
    }
    let suffix = format!("-{index}-");
    let mut prefix = job.name_any();
    prefix.truncate(LONGEST_PREFIX - suffix.len());
    pod.metadata.generate_name = Some(prefix + &suffix);
    let spec = pod.spec.get_or_insert_default();
    spec.hostname = Some(format!("{}-{index}", job.name_any()));
    let containers = spec.init_containers.iter_mut().flatten().chain(&mut spec.containers);
    containers.for_each(add_index_variable);
    pod
}

fn add_index_variable(container: &mut Container) {
    let variables = container.env.get_or_insert_default();
    if variables.iter().all(|variable| variable.name != INDEX_VARIABLE) {
        let field_path = format!("metadata.labels['{JOB_COMPLETION_INDEX}']");
        variables.push(EnvVar {
            name: INDEX_VARIABLE.to_owned(),
            value: None,
            value_from: Some(EnvVarSource {
                field_ref: Some(ObjectFieldSelector { api_version: None, field_path }),
                ..EnvVarSource::default()
            }),
        });
    }
}
