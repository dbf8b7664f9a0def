//! When a CronJob starts a Job, which one, and which of those that ended go. Pure.

use std::sync::Arc;
use std::time::Duration;

use berth_core::Schedule;
use berth_core::names::{CRON_JOB_SCHEDULED, events};
use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::{CronJob, CronJobSpec, CronJobStatus, Job};
use kube::ResourceExt as _;
use kube::api::ObjectMeta;

use crate::workloads::jobs::finished;
use crate::workloads::ownership::reference;

/// The next look comes so long after the time that is due, because clocks differ by a little.
const SKEW: Duration = Duration::from_millis(100);
/// A CronJob that missed more starts than these is told that something is wrong.
const MANY_MISSED: i64 = 100;

/// The schedule of a CronJob in its time zone.
pub(super) struct Timetable {
    schedule: Schedule,
    zone: TimeZone,
}

/// What a CronJob has to do now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) plan: Plan,
    pub(super) many_missed: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Nothing,
    /// The schedule makes no sense.
    Invalid(String),
    /// The deadline for starting the Job of this time is over.
    TooLate(Timestamp),
    /// The last Job still runs, and there may be only one.
    Busy,
    /// A Job is started for this time.
    Start(Timestamp),
    /// The same, and those that still run are deleted before.
    Replace(Timestamp),
}

/// The last time at which a Job should have been started.
struct Last {
    earliest: Timestamp,
    time: Option<Timestamp>,
    missed: i64,
}

impl Timetable {
    /// Reads schedule and time zone; reason and message of an event if that fails.
    pub(super) fn of(spec: &CronJobSpec) -> Result<Self, (&'static str, String)> {
        let zone = match &spec.time_zone {
            None => TimeZone::system(),
            Some(name) => TimeZone::get(name).map_err(|_| {
                let message = format!("invalid timeZone: {name:?}: unknown time zone {name}");
                (events::UNKNOWN_TIME_ZONE, message)
            })?,
        };
        let schedule = Schedule::parse(&spec.schedule).map_err(|error| {
            let message = format!("unparseable schedule: {:?} : {error}", spec.schedule);
            (events::UNPARSEABLE_SCHEDULE, message)
        })?;
        Ok(Self { schedule, zone })
    }

    fn next(&self, after: Timestamp) -> Option<Timestamp> {
        self.schedule.next(after, &self.zone)
    }

    /// The last time before now at which a Job should have been started, with the deadline for starting it or without.
    fn last(
        &self,
        cron_job: &CronJob,
        status: &CronJobStatus,
        now: Timestamp,
        with_deadline: bool,
    ) -> Result<Last, String> {
        let created = cron_job.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let mut earliest = status.last_schedule_time.as_ref().map(|time| time.0).or(created).unwrap_or(now);
        let deadline = cron_job.spec.starting_deadline_seconds.filter(|_| with_deadline);
        if let Some(deadline) = deadline {
            let from = now.checked_sub(SignedDuration::from_secs(deadline)).unwrap_or(Timestamp::MIN);
            earliest = earliest.max(from);
        }
        let impossible = || "time difference between two schedules is less than 1 second".to_owned();
        let first = self.next(earliest).ok_or_else(impossible)?;
        if now < first {
            return Ok(Last { earliest, time: None, missed: 0 });
        }
        let Some(second) = self.next(first) else {
            return Ok(Last { earliest, time: Some(first), missed: 0 });
        };
        if now < second {
            return Ok(Last { earliest, time: Some(first), missed: 0 });
        }
        let between = second.duration_since(first).as_secs();
        if between < 1 {
            return Err(impossible());
        }
        // About how many were missed, to begin near the last one.
        let missed = now.duration_since(first).as_secs() / between + 1;
        let near = first
            .checked_add(SignedDuration::from_secs(between.saturating_mul(missed - 2)))
            .map_err(|_| impossible())?;
        let mut time = None;
        let mut next = self.next(near);
        while let Some(due) = next.filter(|due| *due <= now) {
            time = Some(due);
            next = self.next(due);
        }
        Ok(Last { earliest, time, missed })
    }

    /// What to do now.
    pub(super) fn due(&self, cron_job: &CronJob, status: &CronJobStatus, now: Timestamp) -> Due {
        let last = match self.last(cron_job, status, now, true) {
            Ok(last) => last,
            Err(why) => {
                let schedule = &cron_job.spec.schedule;
                let plan = Plan::Invalid(format!("invalid schedule: {schedule} : {why}"));
                return Due { plan, many_missed: false };
            }
        };
        let Some(time) = last.time else { return Due { plan: Plan::Nothing, many_missed: false } };
        let many_missed = last.missed > MANY_MISSED;
        Due { plan: plan(cron_job, status, time, now), many_missed }
    }

    /// How long until something is due again.
    pub(super) fn pause(&self, cron_job: &CronJob, status: &CronJobStatus, now: Timestamp) -> Duration {
        let from = match self.last(cron_job, status, now, false) {
            Ok(Last { time: Some(time), .. }) => time,
            Ok(Last { earliest, missed: 0, .. }) => earliest,
            Ok(_) | Err(_) => now,
        };
        let next = self.next(from).map(|next| next.duration_since(now));
        next.and_then(|left| Duration::try_from(left).ok()).unwrap_or_default() + SKEW
    }
}

/// What to do about a time that has come.
fn plan(cron_job: &CronJob, status: &CronJobStatus, time: Timestamp, now: Timestamp) -> Plan {
    let spec = &cron_job.spec;
    let deadline = spec.starting_deadline_seconds.map(SignedDuration::from_secs);
    if deadline.is_some_and(|deadline| now.duration_since(time) > deadline) {
        return Plan::TooLate(time);
    }
    let name = job_name(cron_job, time);
    let active = status.active.as_deref().unwrap_or_default();
    let is_started = active.iter().any(|job| job.name.as_ref() == Some(&name))
        || status.last_schedule_time.as_ref().is_some_and(|last| last.0 == time);
    match spec.concurrency_policy.as_deref() {
        _ if is_started => Plan::Nothing,
        Some("Forbid") if !active.is_empty() => Plan::Busy,
        Some("Replace") => Plan::Replace(time),
        _ => Plan::Start(time),
    }
}

/// The name of the Job for a time: the same for the same time.
fn job_name(cron_job: &CronJob, time: Timestamp) -> String {
    format!("{}-{}", cron_job.name_any(), time.as_second() / 60)
}

/// The Job for a time.
pub(super) fn job_for(cron_job: &CronJob, time: Timestamp) -> Job {
    let spec = cron_job.spec.clone();
    let meta = spec.job_template.metadata.unwrap_or_default();
    let zone = spec.time_zone.and_then(|name| TimeZone::get(&name).ok()).unwrap_or(TimeZone::UTC);
    let local = time.to_zoned(zone);
    let format = if local.offset() == Offset::UTC { "%Y-%m-%dT%H:%M:%SZ" } else { "%Y-%m-%dT%H:%M:%S%:z" };
    let mut annotations = meta.annotations.unwrap_or_default();
    annotations.insert(CRON_JOB_SCHEDULED.to_owned(), local.strftime(format).to_string());
    Job {
        metadata: ObjectMeta {
            name: Some(job_name(cron_job, time)),
            namespace: cron_job.namespace(),
            labels: meta.labels,
            annotations: Some(annotations),
            owner_references: Some(vec![reference(cron_job)]),
            ..ObjectMeta::default()
        },
        spec: spec.job_template.spec,
        status: None,
    }
}

/// The Jobs that ended and are more than the CronJob keeps, the oldest ones.
pub(super) fn history(cron_job: &CronJob, jobs: &[Arc<Job>]) -> Vec<Arc<Job>> {
    let spec = &cron_job.spec;
    let limits =
        [("Complete", spec.successful_jobs_history_limit), ("Failed", spec.failed_jobs_history_limit)];
    let mut old = Vec::new();
    for (kind, limit) in limits {
        let Some(limit) = limit.and_then(|limit| usize::try_from(limit).ok()) else { continue };
        let ended = jobs.iter().filter(|job| finished(job).is_some_and(|end| end.type_ == kind));
        let mut ended: Vec<Arc<Job>> =
            ended.filter(|job| job.metadata.deletion_timestamp.is_none()).cloned().collect();
        ended.sort_by_key(|job| {
            let start = job.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
            (start.is_none(), start, job.name_any())
        });
        ended.truncate(ended.len().saturating_sub(limit));
        old.extend(ended);
    }
    old
}
