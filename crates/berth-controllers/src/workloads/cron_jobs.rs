//! CronJobs: a Job at each time that a schedule names.
//!
//! The name of a Job has the time that it is for, so that none is made twice, also after a crash between its creation and
//! the status.

mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::events;
use berth_kube::{Backoff, Cluster, Key, Loop, Next, Result, reference};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use kube::api::PropagationPolicy;
use parking_lot::Mutex;

use super::jobs::{deletion, finished};
use super::ownership::{Dependents, controller};
use super::workload::Workloads;
use plan::{Due, Plan, Timetable, history, job_for};

/// Runs until the cluster's shutdown.
pub(super) async fn run(cluster: Cluster) {
    let cron_jobs = Workloads::new(&cluster, "cronjob-controller", |_, _| false);
    let jobs = Dependents::new(&cron_jobs.cluster);
    let controller = Arc::new(Controller { jobs, deleted: Mutex::default(), cron_jobs });
    let of_job = controller.clone();
    let queue = controller.cron_jobs.cluster.queue("cron-jobs", Backoff::default());
    Loop::new(&controller.cron_jobs.cluster, &queue)
        .keyed(&controller.cron_jobs.cache)
        .subscribe(&controller.jobs.cache, move |before, after| of_job.job_changed(before, after))
        .run(5, move |cron_job| controller.clone().reconcile(cron_job))
        .await;
}

struct Controller {
    cron_jobs: Workloads<CronJob>,
    jobs: Dependents<Job>,
    /// The uids of Jobs that were deleted here and that the cache does not show as being deleted yet.
    deleted: Mutex<HashSet<String>>,
}

impl Controller {
    fn job_changed(&self, before: Option<&Arc<Job>>, after: Option<&Arc<Job>>) -> Vec<Key> {
        if let Some(uid) = before.and_then(|job| job.uid())
            && after.is_none_or(|job| job.metadata.deletion_timestamp.is_some())
        {
            self.deleted.lock().remove(&uid);
        }
        self.cron_jobs.concerned(before, after)
    }

    /// The Jobs of a CronJob, without those that were deleted here.
    fn jobs_of(&self, uid: &str) -> Vec<Arc<Job>> {
        let mut jobs = self.jobs.of(uid);
        let deleted = self.deleted.lock();
        jobs.retain(|job| !job.uid().is_some_and(|uid| deleted.contains(&uid)));
        jobs
    }

    async fn reconcile(self: Arc<Self>, key: Key) -> Result<Next> {
        let Some(cron_job) = self.cron_jobs.cache.get(&key) else { return Ok(Next::Done) };
        let Some(uid) = cron_job.uid() else { return Ok(Next::Done) };
        let mut status = cron_job.status.clone().unwrap_or_default();
        let jobs = self.jobs_of(&uid);
        for old in history(&cron_job, &jobs) {
            self.delete(&cron_job, &old, &mut status).await?;
        }
        let jobs = self.jobs_of(&uid);
        self.follow(&cron_job, &jobs, &mut status).await?;
        let started = self.start(&cron_job, &mut status).await;
        status.active = status.active.filter(|active| !active.is_empty());
        self.cron_jobs.write_status(&cron_job, status).await?;
        Ok(started?.map_or(Next::Done, Next::After))
    }

    /// Brings the status up to date with the Jobs that are there.
    async fn follow(&self, cron_job: &CronJob, jobs: &[Arc<Job>], status: &mut CronJobStatus) -> Result<()> {
        let recorder = &self.cron_jobs.recorder;
        for job in jobs {
            let is_listed = is_active(status, &job.uid().unwrap_or_default());
            match finished(job) {
                None if !is_listed => {
                    let message =
                        format!("Saw a job that the controller did not create or forgot: {}", job.name_any());
                    recorder.warning(cron_job, events::UNEXPECTED_JOB, message);
                }
                None => {}
                Some(end) => {
                    if is_listed {
                        let name = job.name_any();
                        let message = format!("Saw completed job: {name}, condition: {}", end.type_);
                        recorder.normal(cron_job, events::SAW_COMPLETED_JOB, message);
                        forget(status, &job.uid().unwrap_or_default());
                    }
                    let ended = job.status.as_ref().and_then(|status| status.completion_time.clone());
                    let last = status.last_successful_time.as_ref().map(|time| time.0);
                    if end.type_ == "Complete" && ended.as_ref().map(|time| time.0) > last {
                        status.last_successful_time = ended;
                    }
                }
            }
        }
        for active in status.active.clone().unwrap_or_default() {
            let uid = active.uid.unwrap_or_default();
            if jobs.iter().any(|job| job.uid().as_ref() == Some(&uid)) {
                continue;
            }
            let name = active.name.unwrap_or_default();
            let key = Key::new(cron_job.namespace().unwrap_or_default(), name.clone());
            // The cache may not know it yet.
            let there = self.cron_jobs.cluster.fetch::<Job>(&key).await?;
            if there.is_none_or(|job| job.uid().as_ref() != Some(&uid)) {
                let message = format!("Active job went missing: {name}");
                recorder.normal(cron_job, events::MISSING_JOB, message);
                forget(status, &uid);
            }
        }
        Ok(())
    }

    /// Starts the Job that is due, if one is; returns when to look again.
    async fn start(&self, cron_job: &CronJob, status: &mut CronJobStatus) -> Result<Option<Duration>> {
        let recorder = &self.cron_jobs.recorder;
        let spec = &cron_job.spec;
        if cron_job.metadata.deletion_timestamp.is_some() || spec.suspend == Some(true) {
            return Ok(None);
        }
        let timetable = match Timetable::of(spec) {
            Ok(timetable) => timetable,
            Err((reason, message)) => {
                recorder.warning(cron_job, reason, message);
                return Ok(None);
            }
        };
        let now = Timestamp::now();
        let again = |status: &CronJobStatus| Some(timetable.pause(cron_job, status, now));
        let Due { plan, many_missed } = timetable.due(cron_job, status, now);
        if many_missed {
            let message = "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
            recorder.warning(cron_job, events::TOO_MANY_MISSED_TIMES, message);
        }
        let time = match plan {
            Plan::Nothing => return Ok(again(status)),
            Plan::Invalid(message) => {
                recorder.warning(cron_job, events::INVALID_SCHEDULE, message);
                return Ok(None);
            }
            Plan::TooLate(time) => {
                let time = time.strftime("%a, %d %b %Y %H:%M:%S +0000");
                let message = format!("Missed scheduled time to start a job: {time}");
                recorder.warning(cron_job, events::MISS_SCHEDULE, message);
                return Ok(again(status));
            }
            Plan::Busy => {
                let message =
                    "Not starting job because prior execution is running and concurrency policy is Forbid";
                recorder.normal(cron_job, events::JOB_ALREADY_ACTIVE, message);
                return Ok(again(status));
            }
            Plan::Replace(time) => {
                self.delete_active(cron_job, status).await?;
                time
            }
            Plan::Start(time) => time,
        };
        let Some(job) = self.create(cron_job, time).await? else { return Ok(again(status)) };
        if !is_active(status, &job.uid().unwrap_or_default()) && finished(&job).is_none() {
            status.active.get_or_insert_default().push(reference(job.as_ref()));
        }
        status.last_schedule_time = Some(Time(time));
        Ok(again(status))
    }

    /// Creates the Job for a time, or finds it; `None` if somebody else has a Job of that name.
    async fn create(&self, cron_job: &CronJob, time: Timestamp) -> Result<Option<Arc<Job>>> {
        let recorder = &self.cron_jobs.recorder;
        let job = job_for(cron_job, time);
        match self.cron_jobs.cluster.create(&job).await {
            Ok(job) => {
                let message = format!("Created job {}", job.name_any());
                recorder.normal(cron_job, events::SUCCESSFUL_CREATE, message);
                Ok(Some(job))
            }
            Err(error) if error.is_already_exists() => {
                let there = self.cron_jobs.cluster.fetch::<Job>(&Key::of(&job)).await?;
                Ok(there.filter(|job| {
                    let owner = controller(&job.metadata).map(|owner| owner.uid.as_str());
                    owner.is_some() && owner == cron_job.metadata.uid.as_deref()
                }))
            }
            Err(error) => {
                let message = format!("Error creating job: {}", error.chain());
                recorder.warning(cron_job, events::FAILED_CREATE, message);
                Err(error)
            }
        }
    }

    /// Deletes the Jobs that still run.
    async fn delete_active(&self, cron_job: &CronJob, status: &mut CronJobStatus) -> Result<()> {
        for active in status.active.clone().unwrap_or_default() {
            let key = Key::new(cron_job.namespace().unwrap_or_default(), active.name.unwrap_or_default());
            let job = self.cron_jobs.cluster.fetch::<Job>(&key).await.inspect_err(|error| {
                let message = format!("Get job: {}", error.chain());
                self.cron_jobs.recorder.warning(cron_job, events::FAILED_GET, message);
            })?;
            match job.filter(|job| job.uid() == active.uid) {
                Some(job) => self.delete(cron_job, &job, status).await?,
                None => forget(status, &active.uid.unwrap_or_default()),
            }
        }
        Ok(())
    }

    /// Deletes a Job with its pods.
    async fn delete(&self, cron_job: &CronJob, job: &Job, status: &mut CronJobStatus) -> Result<()> {
        let recorder = &self.cron_jobs.recorder;
        let parameters = deletion(job, PropagationPolicy::Background);
        let uid = job.uid().unwrap_or_default();
        self.deleted.lock().insert(uid.clone());
        if let Err(error) = self.cron_jobs.cluster.delete_with(job, &parameters).await {
            self.deleted.lock().remove(&uid);
            let message = format!("Deleted job: {}", error.chain());
            recorder.warning(cron_job, events::FAILED_DELETE, message);
            return Err(error);
        }
        forget(status, &uid);
        let message = format!("Deleted job {}", job.name_any());
        recorder.normal(cron_job, events::SUCCESSFUL_DELETE, message);
        Ok(())
    }
}

fn is_active(status: &CronJobStatus, uid: &str) -> bool {
    status.active.iter().flatten().any(|job| job.uid.as_deref() == Some(uid))
}

/// Takes a Job off the list of those that run.
fn forget(status: &mut CronJobStatus, uid: &str) {
    if let Some(active) = &mut status.active {
        active.retain(|job| job.uid.as_deref() != Some(uid));
    }
}
