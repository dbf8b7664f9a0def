//! When a Job is finished, which of its pods come and go, and how they are counted, each of them once. Pure.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use berth_core::names::{JOB_COMPLETION_INDEX, JOB_INDEX_FAILURES, JOB_INDEX_IGNORED_FAILURES};
use berth_kube::storage;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;

use super::failures::{Failures, Verdict, finished_at};
use super::indexes::Indexes;
use crate::workloads::pods::{BURST, is_ready, nonzero};
use crate::workloads::replica_sets::rank_in_job;

/// At most so many pods are being counted at a time.
const MOST_UNCOUNTED: usize = 500;

/// A pod of a Job.
#[derive(Debug, Clone)]
pub(super) struct JobPod {
    pub(super) pod: Arc<Pod>,
    /// It is being deleted, whether or not its object shows it yet.
    pub(super) is_going: bool,
    /// It has the finalizer, so it is not counted yet.
    pub(super) is_tracked: bool,
}

impl JobPod {
    fn uid(&self) -> String {
        self.pod.uid().unwrap_or_default()
    }

    fn is_active(&self) -> bool {
        !storage::is_over(&self.pod) && !self.is_going
    }

    fn has_succeeded(&self) -> bool {
        storage::phase_of_pod(&self.pod) == "Succeeded"
    }
}

/// A Job and its pods.
pub(super) struct ObservedJob<'a> {
    pub(super) job: &'a Job,
    pub(super) spec: &'a JobSpec,
    pub(super) pods: Vec<JobPod>,
    /// The pods that failed before, as far as this process knows.
    pub(super) failures: Failures,
    pub(super) now: Timestamp,
}

/// What the pods amount to.
#[derive(Debug)]
pub(super) struct Assessment {
    pub(super) succeeded: i32,
    /// The indexes that succeeded according to the status, and with those of the pods.
    counted: Indexes,
    pub(super) completed: Indexes,
    pub(super) failed_indexes: Option<Indexes>,
    /// The last failed pod of each index that is to be tried again: it stays until its replacement has its count.
    to_replace: HashMap<usize, Arc<Pod>>,
    pub(super) failures: Failures,
    /// The condition with which the Job ends.
    pub(super) end: Option<JobCondition>,
    /// When to look again for the deadline.
    pub(super) again: Option<Duration>,
}

/// A pod to make.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct NewPod {
    pub(super) index: Option<usize>,
    /// How many pods of the index failed before, and how many of them in a way that is ignored.
    pub(super) failures: Option<(u32, u32)>,
}

/// What to do about a Job's pods.
#[derive(Debug)]
pub(super) enum Step {
    Nothing,
    Create(Vec<NewPod>),
    /// The Job ends: these pods are deleted, and counted as failed if it failed.
    End(Vec<Arc<Pod>>),
    /// There are too many: these are deleted and not counted.
    Remove(Vec<Arc<Pod>>),
}

/// What a status says before pods are let go, and which ones are.
#[derive(Debug)]
pub(super) struct Tracking {
    pub(super) status: JobStatus,
    pub(super) release: Vec<Arc<Pod>>,
    /// The last condition of the Job, once all pods are counted and gone.
    pub(super) end: Option<JobCondition>,
}

/// A condition that holds since now.
pub(super) fn condition(kind: &str, reason: &str, message: &str, now: Timestamp) -> JobCondition {
    JobCondition {
        type_: kind.to_owned(),
        status: "True".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

/// The condition of a type, if it holds.
pub(super) fn holds<'a>(job: &'a Job, kind: &str) -> Option<&'a JobCondition> {
    let conditions = job.status.as_ref()?.conditions.as_deref()?;
    conditions.iter().find(|condition| condition.type_ == kind && condition.status == "True")
}

/// The condition with which a Job has ended.
pub(in crate::workloads) fn finished(job: &Job) -> Option<&JobCondition> {
    holds(job, "Complete").or_else(|| holds(job, "Failed"))
}

/// Whether a Job's pods wait until it is resumed.
pub(super) fn is_suspended(job: &Job) -> bool {
    job.spec.as_ref().and_then(|spec| spec.suspend).unwrap_or(false)
}

/// The index of an indexed Job's pod.
pub(super) fn index_of(pod: &Pod) -> Option<usize> {
    pod.annotations().get(JOB_COMPLETION_INDEX)?.parse().ok()
}

/// How many pods of a pod's index failed before it: those that count, and those that are ignored.
fn failures_before(pod: &Pod) -> (u32, u32) {
    let count = |name| pod.annotations().get(name).and_then(|count| count.parse().ok()).unwrap_or(0);
    (count(JOB_INDEX_FAILURES), count(JOB_INDEX_IGNORED_FAILURES))
}

impl ObservedJob<'_> {
    fn status(&self) -> JobStatus {
        self.job.status.clone().unwrap_or_default()
    }

    fn is_indexed(&self) -> bool {
        self.spec.completion_mode.as_deref() == Some("Indexed")
    }

    fn completions(&self) -> usize {
        usize::try_from(self.spec.completions.unwrap_or(0)).unwrap_or(0)
    }

    /// Whether a pod is replaced only when it has ended, and not while it is being deleted.
    fn replaces_ended_only(&self) -> bool {
        self.spec.pod_replacement_policy.as_deref() == Some("Failed")
            || self.spec.pod_failure_policy.is_some()
    }

    fn has_failed(&self, pod: &JobPod) -> bool {
        match storage::phase_of_pod(&pod.pod) {
            "Failed" => true,
            "Succeeded" => false,
            _ => pod.is_going && !self.replaces_ended_only(),
        }
    }

    fn verdict(&self, pod: &JobPod) -> Verdict {
        Verdict::of(self.spec.pod_failure_policy.as_ref(), &pod.pod)
    }

    /// The index of a pod, if it is one that the Job has.
    fn valid_index(&self, pod: &Pod) -> Option<usize> {
        index_of(pod).filter(|index| *index < self.completions())
    }

    fn active(&self) -> impl Iterator<Item = &JobPod> {
        self.pods.iter().filter(|pod| pod.is_active())
    }

    /// Pods that are being deleted and have not ended.
    fn terminating(&self) -> impl Iterator<Item = &JobPod> {
        self.pods.iter().filter(|pod| pod.is_going && !storage::is_over(&pod.pod))
    }

    /// Since when the Job runs.
    fn started(&self) -> Option<Timestamp> {
        let known = self.job.status.as_ref().and_then(|status| status.start_time.as_ref());
        known.map(|time| time.0).or((!is_suspended(self.job)).then_some(self.now))
    }

    /// The uids of pods that are in the status and not in its counts yet: those that succeeded, and those that failed.
    fn uncounted(&self) -> (Vec<String>, Vec<String>) {
        let uncounted = self.status().uncounted_terminated_pods.unwrap_or_default();
        (uncounted.succeeded.unwrap_or_default(), uncounted.failed.unwrap_or_default())
    }

    /// The pods that ended and are neither counted nor in the status.
    fn newly_ended(&self) -> (Vec<&JobPod>, Vec<&JobPod>) {
        let (succeeded, failed) = self.uncounted();
        let is_new = |pod: &&JobPod, known: &[String]| {
            pod.is_tracked
                && !known.contains(&pod.uid())
                && (!self.is_indexed() || self.valid_index(&pod.pod).is_some())
        };
        (
            self.pods.iter().filter(|pod| is_new(pod, &succeeded) && pod.has_succeeded()).collect(),
            self.pods.iter().filter(|pod| is_new(pod, &failed) && self.has_failed(pod)).collect(),
        )
    }

    /// Counts the pods, and decides whether the Job ends.
    pub(super) fn assess(&self) -> Assessment {
        let status = self.status();
        let (new_succeeded, new_failed) = self.newly_ended();
        let (succeeded, failed) = self.uncounted();
        let counted_failures = new_failed.iter().filter(|pod| self.verdict(pod).counts()).count();
        let failed = status.failed.unwrap_or(0) + count(counted_failures + failed.len());
        let pods = |pods: &[&JobPod]| pods.iter().map(|pod| pod.pod.clone()).collect::<Vec<_>>();
        let mut assessment = Assessment {
            succeeded: status.succeeded.unwrap_or(0) + count(new_succeeded.len() + succeeded.len()),
            counted: Indexes::default(),
            completed: Indexes::default(),
            failed_indexes: None,
            to_replace: HashMap::new(),
            failures: self.failures.and(&pods(&new_succeeded), &pods(&new_failed)),
            end: self.known_end(),
            again: None,
        };
        if assessment.end.is_none() {
            self.judge_limits(failed, &mut assessment);
        }
        if self.is_indexed() {
            self.assess_indexes(&mut assessment);
        }
        assessment
    }

    /// The end that was decided before, or that the failure policy decides now.
    fn known_end(&self) -> Option<JobCondition> {
        if let Some(met) = holds(self.job, "SuccessCriteriaMet") {
            return Some(met.clone());
        }
        if let Some(target) = holds(self.job, "FailureTarget") {
            return Some(self.last_condition(target));
        }
        self.pods.iter().filter(|pod| self.has_failed(pod)).find_map(|pod| match self.verdict(pod) {
            Verdict::FailJob(message) => {
                Some(condition("FailureTarget", "PodFailurePolicy", &message, self.now))
            }
            _ => None,
        })
    }

    /// The condition that ends a Job for which an interim one was recorded.
    fn last_condition(&self, interim: &JobCondition) -> JobCondition {
        let kind = if interim.type_ == "SuccessCriteriaMet" { "Complete" } else { "Failed" };
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        condition(kind, &text(&interim.reason), &text(&interim.message), self.now)
    }

    fn judge_limits(&self, failed: i32, assessment: &mut Assessment) {
        let fail = |reason, message| Some(condition("FailureTarget", reason, message, self.now));
        if failed > self.spec.backoff_limit.unwrap_or(6) || self.restarted_too_often() {
            let message = "Job has reached the specified backoff limit";
            assessment.end = fail("BackoffLimitExceeded", message);
            return;
        }
        let deadline = self.spec.active_deadline_seconds.filter(|_| !is_suspended(self.job));
        let (Some(deadline), Some(started)) = (deadline, self.started()) else { return };
        let deadline = Duration::from_secs(deadline.unsigned_abs());
        let elapsed = Duration::try_from(self.now.duration_since(started)).unwrap_or(Duration::ZERO);
        assessment.again = deadline.checked_sub(elapsed).filter(|left| !left.is_zero());
        if assessment.again.is_none() {
            let message = "Job was active longer than specified deadline";
            assessment.end = fail("DeadlineExceeded", message);
        }
    }

    /// Whether the containers of pods that restart them failed as often as pods may.
    fn restarted_too_often(&self) -> bool {
        let policy = self.spec.template.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref());
        if policy != Some("OnFailure") {
            return false;
        }
        let running = self.pods.iter().filter(|pod| !storage::is_over(&pod.pod));
        let restarts: i32 = running
            .filter_map(|pod| pod.pod.status.as_ref())
            .flat_map(|status| [&status.init_container_statuses, &status.container_statuses])
            .flatten()
            .flatten()
            .map(|container| container.restart_count)
            .sum();
        restarts > 0 && restarts >= self.spec.backoff_limit.unwrap_or(6)
    }

    fn assess_indexes(&self, assessment: &mut Assessment) {
        let (status, completions) = (self.status(), self.completions());
        let tracked = || {
            let pods = self.pods.iter().filter(|pod| pod.is_tracked);
            pods.filter_map(|pod| Some((self.valid_index(&pod.pod)?, pod)))
        };
        assessment.counted =
            Indexes::parse(status.completed_indexes.as_deref().unwrap_or_default(), completions);
        let new = tracked().filter(|(_, pod)| pod.has_succeeded()).map(|(index, _)| index).collect();
        assessment.completed = assessment.counted.union(&new);
        assessment.succeeded = count(assessment.completed.total());
        if let Some(limit) = self.spec.backoff_limit_per_index {
            let limit = u32::try_from(limit).unwrap_or(0);
            let known = Indexes::parse(status.failed_indexes.as_deref().unwrap_or_default(), completions);
            let new = tracked().filter(|(_, pod)| self.fails_index(pod, limit)).map(|(index, _)| index);
            let failed = known.union(&new.collect());
            self.judge_failed_indexes(&failed, assessment);
            assessment.to_replace = self.to_replace(&failed, &assessment.completed);
            assessment.failed_indexes = Some(failed);
        }
        if assessment.end.is_none()
            && let Some(rule) = self.success_rule(&assessment.completed)
        {
            let message = format!("Matched rules at index {rule}");
            assessment.end = Some(condition("SuccessCriteriaMet", "SuccessPolicy", &message, self.now));
        }
    }

    fn fails_index(&self, pod: &JobPod, limit: u32) -> bool {
        self.has_failed(pod)
            && match self.verdict(pod) {
                Verdict::FailIndex => true,
                verdict => verdict.counts() && failures_before(&pod.pod).0 >= limit,
            }
    }

    fn judge_failed_indexes(&self, failed: &Indexes, assessment: &mut Assessment) {
        if assessment.end.is_some() {
            return;
        }
        let fail = |reason, message| Some(condition("FailureTarget", reason, message, self.now));
        let most = self.spec.max_failed_indexes.and_then(|most| usize::try_from(most).ok());
        if most.is_some_and(|most| failed.total() > most) {
            let message = "Job has exceeded the specified maximal number of failed indexes";
            assessment.end = fail("MaxFailedIndexesExceeded", message);
        } else if failed.total() > 0 && failed.total() + assessment.completed.total() >= self.completions() {
            assessment.end = fail("FailedIndexes", "Job has failed indexes");
        }
    }

    fn to_replace(&self, failed: &Indexes, completed: &Indexes) -> HashMap<usize, Arc<Pod>> {
        let active: HashSet<usize> = self.active().filter_map(|pod| index_of(&pod.pod)).collect();
        let mut last: HashMap<usize, Arc<Pod>> = HashMap::new();
        for pod in self.pods.iter().filter(|pod| pod.is_tracked && self.has_failed(pod)) {
            let Some(index) = self.valid_index(&pod.pod) else { continue };
            if completed.contains(index) || failed.contains(index) || active.contains(&index) {
                continue;
            }
            let order = |pod: &Pod| {
                let (counted, ignored) = failures_before(pod);
                (counted + ignored, finished_at(pod))
            };
            if last.get(&index).is_none_or(|known| order(known) <= order(&pod.pod)) {
                last.insert(index, pod.pod.clone());
            }
        }
        last
    }

    /// The first rule of the success policy that the completed indexes fulfil.
    fn success_rule(&self, completed: &Indexes) -> Option<usize> {
        let rules = &self.spec.success_policy.as_ref()?.rules;
        rules.iter().position(|rule| {
            let enough = rule.succeeded_count.and_then(|count| usize::try_from(count).ok());
            match &rule.succeeded_indexes {
                Some(wanted) => {
                    let wanted = Indexes::parse(wanted, self.completions());
                    let common = wanted.common(completed);
                    wanted.total() > 0
                        && (common == wanted.total() || enough.is_some_and(|enough| common >= enough))
                }
                None => completed.total() > 0 && enough.is_some_and(|enough| completed.total() >= enough),
            }
        })
    }

    /// What to do about the pods now, and in how long without a change.
    pub(super) fn plan(&self, assessment: &Assessment) -> (Step, Option<Duration>) {
        let active: Vec<Arc<Pod>> = self.active().map(|pod| pod.pod.clone()).collect();
        if assessment.end.is_some() {
            return (Step::End(active), None);
        }
        if self.job.metadata.deletion_timestamp.is_some() {
            return (Step::Nothing, None);
        }
        if is_suspended(self.job) {
            return (if active.is_empty() { Step::Nothing } else { Step::Remove(active) }, None);
        }
        let parallelism = usize::try_from(self.spec.parallelism.unwrap_or(1)).unwrap_or(0);
        let succeeded = usize::try_from(assessment.succeeded).unwrap_or(0);
        let wanted = match self.spec.completions {
            // One success is enough, and what runs then goes on.
            None if succeeded > 0 => active.len(),
            None => parallelism,
            Some(_) => self.completions().saturating_sub(succeeded).min(parallelism),
        };
        let surplus = self.surplus(&active, active.len().saturating_sub(wanted));
        if !surplus.is_empty() {
            return (Step::Remove(surplus), None);
        }
        let terminating = if self.replaces_ended_only() { self.terminating().count() } else { 0 };
        let missing = wanted.saturating_sub(terminating + active.len()).min(BURST);
        if missing == 0 {
            return (Step::Nothing, None);
        }
        if self.spec.backoff_limit_per_index.is_none()
            && let Some(pause) = assessment.failures.pause(self.now)
        {
            return (Step::Nothing, Some(pause));
        }
        if !self.is_indexed() {
            return (Step::Create(vec![NewPod::default(); missing]), None);
        }
        self.plan_indexes(assessment, missing)
    }

    fn plan_indexes(&self, assessment: &Assessment, missing: usize) -> (Step, Option<Duration>) {
        let mut taken: Indexes = self.active().filter_map(|pod| index_of(&pod.pod)).collect();
        taken = taken.union(&assessment.completed);
        if self.replaces_ended_only() {
            taken = taken.union(&self.terminating().filter_map(|pod| index_of(&pod.pod)).collect());
        }
        if let Some(failed) = &assessment.failed_indexes {
            taken = taken.union(failed);
        }
        let (mut pods, mut pauses) = (Vec::new(), Vec::new());
        for index in taken.missing(missing, self.completions()) {
            let failures = self.spec.backoff_limit_per_index.map(|_| {
                let before = assessment.to_replace.get(&index);
                before.map_or((0, 0), |pod| self.failures_with(pod))
            });
            let pause = assessment.to_replace.get(&index).and_then(|pod| {
                let (counted, ignored) = failures_before(pod);
                Failures::new(counted + ignored + 1, finished_at(pod)).pause(self.now)
            });
            match pause {
                Some(pause) => pauses.push(pause),
                None => pods.push(NewPod { index: Some(index), failures }),
            }
        }
        let again = pauses.into_iter().min();
        (if pods.is_empty() { Step::Nothing } else { Step::Create(pods) }, again)
    }

    /// How many pods of an index have failed, with this one.
    fn failures_with(&self, pod: &Pod) -> (u32, u32) {
        let (counted, ignored) = failures_before(pod);
        let counts = Verdict::of(self.spec.pod_failure_policy.as_ref(), pod).counts();
        if counts { (counted + 1, ignored) } else { (counted, ignored + 1) }
    }

    /// At least `least` active pods that go: those of an index that another has, or of none that the Job has, then those
    /// with which the least is lost.
    fn surplus(&self, active: &[Arc<Pod>], least: usize) -> Vec<Arc<Pod>> {
        let mut pods = active.to_vec();
        pods.sort_by_cached_key(|pod| rank_in_job(pod));
        let (mut surplus, mut rest) = (Vec::new(), Vec::new());
        if self.is_indexed() {
            let mut kept = HashSet::new();
            // The pod of an index that goes last is the one that stays.
            for pod in pods.into_iter().rev() {
                let stays = self.valid_index(&pod).is_some_and(|index| kept.insert(index));
                let list = if stays { &mut rest } else { &mut surplus };
                list.push(pod);
            }
            rest.reverse();
        } else {
            rest = pods;
        }
        let more = least.saturating_sub(surplus.len());
        surplus.extend(rest.into_iter().take(more));
        surplus.truncate(BURST);
        surplus
    }

    /// The condition of a Job whose pods have all done what was asked for, when none of them runs any more.
    pub(super) fn success(&self, assessment: &Assessment, active: usize) -> Option<JobCondition> {
        let enough = match self.spec.completions {
            None => assessment.succeeded > 0,
            Some(completions) => assessment.succeeded >= completions,
        };
        let message = "Reached expected number of succeeded pods";
        (enough && active == 0)
            .then(|| condition("SuccessCriteriaMet", "CompletionsReached", message, self.now))
    }

    /// What the pods of the Job are now, after the plan was carried out: how many are active, ready and terminating.
    pub(super) fn counts(&self) -> (i32, i32, i32) {
        let ready = self.active().filter(|pod| is_ready(&pod.pod)).count();
        (count(self.active().count()), count(ready), count(self.terminating().count()))
    }

    /// Enters pods that ended into the status, and says which may be let go after it is written. `end` is the condition that
    /// the Job ends with.
    pub(super) fn track(&self, assessment: &Assessment, end: Option<&JobCondition>) -> Tracking {
        let mut status = self.status();
        let start = self.started().map(Time);
        status.start_time = status.start_time.or(start);
        let (known_succeeded, known_failed) = self.uncounted();
        count_released(&mut status, &self.tracked());
        let mut uncounted = status.uncounted_terminated_pods.take().unwrap_or_default();
        let (mut succeeded, mut failed) =
            (uncounted.succeeded.take().unwrap_or_default(), uncounted.failed.take().unwrap_or_default());
        let fails = end.is_some_and(|end| end.type_ != "SuccessCriteriaMet");
        let (mut indexes, mut release, mut left_out) = (Vec::new(), Vec::new(), false);
        for pod in self.pods.iter().filter(|pod| pod.is_tracked) {
            let has_failed = self.has_failed(pod);
            if !self.may_release(pod, has_failed, assessment, end) {
                continue;
            }
            release.push(pod.pod.clone());
            let (uid, index) = (pod.uid(), self.valid_index(&pod.pod));
            if pod.has_succeeded() && !known_failed.contains(&uid) {
                match index {
                    Some(index) if !assessment.counted.contains(index) => indexes.push(index),
                    None if !self.is_indexed() && !known_succeeded.contains(&uid) => succeeded.push(uid),
                    _ => {}
                }
            } else if (has_failed || fails)
                && !known_failed.contains(&uid)
                && (!self.is_indexed() || index.is_some())
                && self.verdict(pod).counts()
            {
                failed.push(uid);
            }
            if indexes.len() + succeeded.len() + failed.len() >= MOST_UNCOUNTED {
                left_out = true;
                break;
            }
        }
        uncounted.succeeded = Some(succeeded).filter(|pods| !pods.is_empty());
        uncounted.failed = Some(failed).filter(|pods| !pods.is_empty());
        status.uncounted_terminated_pods = Some(uncounted);
        if self.is_indexed() {
            let completed = assessment.counted.union(&indexes.into_iter().collect());
            status.succeeded = nonzero(count(completed.total()));
            status.completed_indexes = Some(completed.to_string()).filter(|indexes| !indexes.is_empty());
            status.failed_indexes = assessment.failed_indexes.as_ref().map(ToString::to_string);
        }
        let end = end.map(|end| self.record_interim(end, &mut status)).filter(|_| !left_out);
        Tracking { status, release, end }
    }

    /// Puts the interim condition into the status, and returns the last one.
    fn record_interim(&self, end: &JobCondition, status: &mut JobStatus) -> JobCondition {
        if matches!(end.type_.as_str(), "Complete" | "Failed") {
            return end.clone();
        }
        if holds(self.job, &end.type_).is_none() {
            status.conditions.get_or_insert_default().push(end.clone());
        }
        self.last_condition(end)
    }

    fn may_release(
        &self,
        pod: &JobPod,
        has_failed: bool,
        assessment: &Assessment,
        end: Option<&JobCondition>,
    ) -> bool {
        if self.job.metadata.deletion_timestamp.is_some() || end.is_some() || pod.has_succeeded() {
            return true;
        }
        let is_replaced = index_of(&pod.pod)
            .and_then(|index| assessment.to_replace.get(&index))
            .is_some_and(|replaced| replaced.uid() == pod.pod.uid());
        has_failed && !is_replaced
    }

    /// The uids of pods that have the finalizer.
    pub(super) fn tracked(&self) -> HashSet<String> {
        self.pods.iter().filter(|pod| pod.is_tracked).map(JobPod::uid).collect()
    }
}

/// Moves the pods that were let go from the list of the uncounted to the counts; `tracked` still have the finalizer.
pub(super) fn count_released(status: &mut JobStatus, tracked: &HashSet<String>) {
    let uncounted = status.uncounted_terminated_pods.get_or_insert_default();
    let take = |pods: &mut Option<Vec<String>>| {
        let list = pods.take().unwrap_or_default();
        let (kept, gone): (Vec<String>, Vec<String>) =
            list.into_iter().partition(|uid| tracked.contains(uid));
        *pods = Some(kept).filter(|kept| !kept.is_empty());
        count(gone.len())
    };
    let (succeeded, failed) = (take(&mut uncounted.succeeded), take(&mut uncounted.failed));
    status.succeeded = nonzero(status.succeeded.unwrap_or(0) + succeeded);
    status.failed = nonzero(status.failed.unwrap_or(0) + failed);
}

/// Sets the condition of a type, if it is another one than before. One that never held is not set to false.
pub(super) fn set_condition(status: &mut JobStatus, new: JobCondition) -> bool {
    let conditions = status.conditions.get_or_insert_default();
    let same = |old: &JobCondition| {
        old.status == new.status && old.reason == new.reason && old.message == new.message
    };
    match conditions.iter_mut().find(|old| old.type_ == new.type_) {
        Some(old) if same(old) => return false,
        Some(old) => *old = new,
        None if new.status == "False" => {
            if conditions.is_empty() {
                status.conditions = None;
            }
            return false;
        }
        None => conditions.push(new),
    }
    true
}

/// Ends a Job, if all its pods are counted and gone.
pub(super) fn finish(status: &mut JobStatus, end: JobCondition) -> bool {
    let uncounted = status.uncounted_terminated_pods.clone().unwrap_or_default();
    let is_counted = uncounted.succeeded.is_none() && uncounted.failed.is_none();
    if !is_counted || status.terminating.unwrap_or(0) > 0 {
        return false;
    }
    if end.type_ == "Complete" {
        status.completion_time.clone_from(&end.last_transition_time);
    }
    set_condition(status, end);
    true
}

fn count(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
