//! Job and CronJob, as objects.

mod policies;
mod status;
#[cfg(test)]
mod tests;

use berth_core::Schedule;
use berth_core::names::{JOB_CONTROLLER_UID, JOB_NAME, LEGACY_JOB_CONTROLLER_UID, LEGACY_JOB_NAME};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::read::{
    at, default, default_pointer, flag, has, is_empty, items, items_mut, keep, map, name, number, same, text,
};
use super::selector::{LabelSelector, label_selector_causes};
use super::table::{AGE, Column, NAME, boolean, integer, string, wide};
use super::{Rules, age, names, pod, table};
use crate::resource::Cause;

const CONTAINERS: Column = wide("Containers", "Names of each container in the template.");
const IMAGES: Column = wide("Images", "Images referenced by each container in the template.");
const SELECTOR: Column = wide("Selector", "Which pods are its own.");
const JOB_COLUMNS: &[Column] = &[
    NAME,
    string("Status", "Status of the job."),
    string("Completions", "How many pods have succeeded, of how many."),
    string("Duration", "Time required to complete the job."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];
const CRON_JOB_COLUMNS: &[Column] = &[
    NAME,
    string("Schedule", "When jobs are started, as crontab writes it."),
    string("Timezone", "The time zone of the schedule."),
    boolean("Suspend", "Whether no further jobs are started."),
    integer("Active", "How many of its jobs run."),
    string("Last Schedule", "When a job was last started."),
    AGE,
    CONTAINERS,
    IMAGES,
    SELECTOR,
];
const NOT_NEGATIVE: &str = "must be greater than or equal to 0";
/// How many indexes may run or fail, and from how many completions on fewer of them.
const MAX_INDEXES: i64 = 100_000;
const MAX_INDEXES_OF_MANY: i64 = 10_000;
const INDEXED: &str = "Indexed";

/// The rules of jobs.
pub(super) struct Job;

impl Rules for Job {
    fn default(&self, object: &mut Value) {
        // A new job gets them when its selector is generated.
        if has(object, &["spec", "template", "metadata", "labels", JOB_CONTROLLER_UID]) {
            default_labels(object);
        }
        map(object, &["spec"]);
        if let Some(spec) = object.get_mut("spec") {
            default_spec(spec);
        }
        map(object, &["status"]);
    }

    fn prepare_create(&self, object: &mut Value) {
        reset_status(object);
        if !flag(object, &["spec", "manualSelector"]) {
            generate_selector(object);
        }
        default_labels(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec");
        let spec = at(object, &["spec"]);
        let mut causes = generated_selector_causes(object);
        causes.extend(spec_causes(spec, &path));
        causes.extend(selector_causes(spec, &path));
        if is_indexed(spec)
            && let Some(completions) = number(spec, &["completions"]).filter(|count| *count > 0)
        {
            let host = format!("{}-{}", name(object), completions - 1);
            if !names::label(&host).is_empty() {
                let detail = format!("will not able to create pod with invalid DNS label: {host}");
                causes.push(Path::new("metadata").child("name").invalid(name(object), detail));
            }
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = self.validate(new);
        let path = Path::new("spec");
        let (spec, old_spec) = (at(new, &["spec"]), at(old, &["spec"]));
        let (completions, before) = (at(spec, &["completions"]), at(old_spec, &["completions"]));
        if !is_indexed(spec) {
            causes.extend(immutable(completions, before, &path.child("completions")));
        } else if !completions.is_null() && completions != before && completions != at(spec, &["parallelism"])
        {
            let detail = "can only be modified in tandem with spec.parallelism";
            causes.push(path.child("completions").invalid(completions.clone(), detail));
        }
        causes.extend(immutable(
            at(spec, &["selector"]),
            at(old_spec, &["selector"]),
            &path.child("selector"),
        ));
        causes.extend(template_change(spec, old, &path.child("template")));
        for field in
            ["completionMode", "podFailurePolicy", "backoffLimitPerIndex", "managedBy", "successPolicy"]
        {
            causes.extend(immutable(at(spec, &[field]), at(old_spec, &[field]), &path.child(field)));
        }
        causes
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        status::causes(new, old)
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        !same(at(new, &["spec"]), at(old, &["spec"]))
    }

    fn orphans_dependents(&self) -> bool {
        true
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&str, String)> {
        let mut fields = super::metadata_fields(object);
        let succeeded = number(object, &["status", "succeeded"]).unwrap_or_default();
        fields.push(("status.successful", succeeded.to_string()));
        fields
    }

    fn columns(&self) -> &'static [Column] {
        JOB_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = at(object, &["spec"]);
        let succeeded = number(object, &["status", "succeeded"]).unwrap_or_default();
        let parallelism = number(spec, &["parallelism"]).unwrap_or_default();
        let completions = match number(spec, &["completions"]) {
            Some(completions) => format!("{succeeded}/{completions}"),
            None if parallelism > 1 => format!("{succeeded}/1 of {parallelism}"),
            None => format!("{succeeded}/1"),
        };
        let mut cells = vec![
            json!(name(object)),
            json!(status::shown(object)),
            json!(completions),
            json!(duration(at(object, &["status"]), now)),
            json!(age::of(object, now)),
        ];
        cells.extend(table::containers(at(spec, &["template"])));
        cells.push(json!(table::selector(at(spec, &["selector"]))));
        cells
    }

    fn warns(&self) -> bool {
        true
    }

    fn warnings(&self, object: &Value, created: bool) -> Vec<String> {
        if created { name_warnings(object) } else { Vec::new() }
    }
}

/// The rules of cron jobs.
pub(super) struct CronJob;

impl Rules for CronJob {
    fn default(&self, object: &mut Value) {
        let spec = map(object, &["spec"]);
        default(spec, "concurrencyPolicy", "Allow");
        default_pointer(spec, "suspend", false);
        default_pointer(spec, "successfulJobsHistoryLimit", 3);
        default_pointer(spec, "failedJobsHistoryLimit", 1);
        map(object, &["spec", "jobTemplate", "spec", "template", "spec"]);
        // Only the pod's defaults: those of the job follow when one is made.
        if let Some(spec) = object.pointer_mut("/spec/jobTemplate/spec/template/spec") {
            pod::default_spec(spec);
        }
        map(object, &["status"]);
    }

    fn prepare_create(&self, object: &mut Value) {
        reset_status(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = cron_spec_causes(at(object, &["spec"]));
        if name(object).len() > 52 {
            let detail = "must be no more than 52 characters";
            causes.push(Path::new("metadata").child("name").invalid(name(object), detail));
        }
        causes
    }

    fn validate_update(&self, new: &Value, _old: &Value) -> Vec<Cause> {
        cron_spec_causes(at(new, &["spec"]))
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        !same(at(new, &["spec"]), at(old, &["spec"]))
    }

    fn columns(&self) -> &'static [Column] {
        CRON_JOB_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = at(object, &["spec"]);
        let last = at(object, &["status", "lastScheduleTime"]);
        let last = if last.is_null() { "<none>".to_owned() } else { age::since(last, now) };
        let mut cells = vec![
            json!(name(object)),
            json!(text(spec, &["schedule"])),
            json!(at(spec, &["timeZone"]).as_str().unwrap_or("<none>")),
            json!(match at(spec, &["suspend"]).as_bool() {
                Some(true) => "True",
                Some(false) => "False",
                None => "<unset>",
            }),
            json!(items(object, &["status", "active"]).len()),
            json!(last),
            json!(age::of(object, now)),
        ];
        let template = at(spec, &["jobTemplate", "spec"]);
        cells.extend(table::containers(at(template, &["template"])));
        cells.push(json!(table::selector(at(template, &["selector"]))));
        cells
    }

    fn warns(&self) -> bool {
        true
    }

    fn warnings(&self, object: &Value, created: bool) -> Vec<String> {
        if created { name_warnings(object) } else { Vec::new() }
    }
}

fn reset_status(object: &mut Value) {
    super::read::drop(object, "status");
    map(object, &["status"]);
}

/// A job without labels has those of its template.
fn default_labels(object: &mut Value) {
    let labels = at(object, &["spec", "template", "metadata", "labels"]).clone();
    if !is_empty(&labels) && is_empty(at(object, &["metadata", "labels"])) {
        map(object, &["metadata"]).insert("labels".to_owned(), labels);
    }
}

fn is_indexed(spec: &Value) -> bool {
    text(spec, &["completionMode"]) == INDEXED
}

fn name_warnings(object: &Value) -> Vec<String> {
    let complaints = names::label(name(object));
    if complaints.is_empty() {
        return Vec::new();
    }
    let why = "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label \
               is recommended";
    vec![format!("{why}: [{}]", complaints.join(" "))]
}

/// How long a job has run, or ran.
fn duration(status: &Value, now: Timestamp) -> String {
    let time = |field| text(status, &[field]).parse::<Timestamp>().ok();
    time("startTime").map_or_else(String::new, |start| {
        age::human(time("completionTime").unwrap_or(now).duration_since(start).as_secs())
    })
}

fn default_spec(spec: &mut Value) {
    map(spec, &["template", "spec"]);
    if let Some(pod) = spec.pointer_mut("/template/spec") {
        pod::default_spec(pod);
    }
    let has_policy = has(spec, &["podFailurePolicy"]);
    let limits_indexes = has(spec, &["backoffLimitPerIndex"]);
    let fields = map(spec, &[]);
    if !fields.contains_key("completions") && !fields.contains_key("parallelism") {
        fields.insert("completions".to_owned(), json!(1));
    }
    default_pointer(fields, "parallelism", 1);
    default_pointer(fields, "backoffLimit", if limits_indexes { i32::MAX } else { 6 });
    default_pointer(fields, "completionMode", "NonIndexed");
    default_pointer(fields, "suspend", false);
    let replaced = if has_policy { "Failed" } else { "TerminatingOrFailed" };
    default_pointer(fields, "podReplacementPolicy", replaced);
    default_pointer(fields, "manualSelector", false);
    for rule in items_mut(spec, &["podFailurePolicy", "rules"]) {
        for pattern in items_mut(rule, &["onPodConditions"]) {
            default(map(pattern, &[]), "status", "True");
        }
    }
}

/// The labels by which a job finds its pods, and the labels that people find them by.
fn job_labels(object: &Value) -> [(&'static str, &str); 4] {
    let (name, uid) = (name(object), text(object, &["metadata", "uid"]));
    [(LEGACY_JOB_CONTROLLER_UID, uid), (LEGACY_JOB_NAME, name), (JOB_CONTROLLER_UID, uid), (JOB_NAME, name)]
}

fn generate_selector(object: &mut Value) {
    let labels = job_labels(object).map(|(label, value)| (label, value.to_owned()));
    let uid = text(object, &["metadata", "uid"]).to_owned();
    let given = map(object, &["spec", "template", "metadata", "labels"]);
    for (label, value) in labels {
        given.entry(label).or_insert_with(|| json!(value));
    }
    let selector = map(object, &["spec", "selector", "matchLabels"]);
    selector.entry(JOB_CONTROLLER_UID).or_insert_with(|| json!(uid));
}

/// Labels and selector that were generated must be what was generated.
fn generated_selector_causes(object: &Value) -> Vec<Cause> {
    let selector = at(object, &["spec", "selector"]);
    if flag(object, &["spec", "manualSelector"]) || selector.is_null() {
        return Vec::new();
    }
    let path = Path::new("spec").child("template").child("metadata").child("labels");
    let given = at(object, &["spec", "template", "metadata", "labels"]);
    let mut causes = Vec::new();
    let expected = job_labels(object);
    for (label, value) in expected {
        let detail = format!("must be '{value}'");
        match given.get(label).and_then(Value::as_str) {
            None => causes.push(path.key(label).required(detail)),
            Some(actual) if actual != value => causes.push(path.key(label).invalid(given.clone(), detail)),
            Some(_) => {}
        }
    }
    let expected: serde_json::Map<String, Value> =
        expected.iter().map(|(label, value)| ((*label).to_owned(), json!(value))).collect();
    if LabelSelector::from_value(selector).is_ok_and(|selector| !selector.matches(&Value::Object(expected))) {
        let path = Path::new("spec").child("selector");
        causes.push(path.invalid(selector.clone(), "`selector` not auto-generated"));
    }
    causes
}

fn selector_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let selector = at(spec, &["selector"]);
    let mut causes = if selector.is_null() {
        vec![path.child("selector").required("")]
    } else {
        label_selector_causes(selector, &path.child("selector"))
    };
    let labels = at(spec, &["template", "metadata", "labels"]);
    // No selector at all matches nothing.
    let matches = LabelSelector::from_value(selector).map(|s| !selector.is_null() && s.matches(labels));
    if matches == Ok(false) {
        let path = path.child("template").child("metadata").child("labels");
        causes.push(path.invalid(labels.clone(), "`selector` does not match template `labels`"));
    }
    causes
}

/// Checks what a job and the template of a cron job have in common.
fn spec_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for field in [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ] {
        causes.extend(negative(spec, path, field));
    }
    if has(spec, &["maxFailedIndexes"]) && !has(spec, &["backoffLimitPerIndex"]) {
        causes.push(path.child("backoffLimitPerIndex").required("when maxFailedIndexes is specified"));
    }
    if let Some(manager) = at(spec, &["managedBy"]).as_str() {
        causes.extend(managed_by_causes(manager, &path.child("managedBy")));
    }
    causes.extend(mode_causes(spec, path));
    causes.extend(policies::failure_causes(spec, &path.child("podFailurePolicy")));
    causes.extend(policies::success_causes(spec, &path.child("successPolicy")));
    causes.extend(policies::replacement_causes(spec, &path.child("podReplacementPolicy")));
    causes.extend(pod::template_causes(at(spec, &["template"]), &path.child("template")));
    let policy = text(spec, &["template", "spec", "restartPolicy"]);
    let path = path.child("template").child("spec").child("restartPolicy");
    match policy {
        "" | "Always" => causes.push(path.required("valid values: \"OnFailure\", \"Never\"")),
        "OnFailure" if has(spec, &["podFailurePolicy"]) => {
            let detail = "only \"Never\" is supported when podFailurePolicy is specified";
            causes.push(path.invalid(policy, detail));
        }
        "OnFailure" | "Never" => {}
        _ => causes.push(path.not_supported(policy, &["OnFailure", "Never"])),
    }
    causes
}

fn managed_by_causes(manager: &str, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    match manager.split_once('/') {
        _ if manager.is_empty() => causes.push(path.required("")),
        Some((host, rest)) if !host.is_empty() && !rest.is_empty() => {
            causes.extend(path.each_invalid(host, names::subdomain(host)));
        }
        _ => {
            let detail = "must be a domain-prefixed path (such as \"acme.io/foo\")";
            causes.push(path.invalid(manager, detail));
        }
    }
    if manager.len() > 63 {
        causes.push(path.too_long(63));
    }
    causes
}

/// Checks the completion mode and the fields that only one of both has.
fn mode_causes(spec: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mode = text(spec, &["completionMode"]);
    if !matches!(mode, "" | INDEXED | "NonIndexed") {
        causes.push(path.child("completionMode").not_supported(mode, &["NonIndexed", INDEXED]));
    }
    let count = |field: &str| number(spec, &[field]);
    if mode != INDEXED {
        if matches!(mode, "" | "NonIndexed") {
            for field in ["backoffLimitPerIndex", "maxFailedIndexes"] {
                if let Some(value) = count(field) {
                    causes.push(path.child(field).invalid(value, "requires indexed completion mode"));
                }
            }
        }
        return causes;
    }
    let (completions, failed) = (count("completions"), count("maxFailedIndexes"));
    let mut limit = |field: &str, most: i64, why: &str| {
        if let Some(value) = count(field).filter(|value| *value > most) {
            causes.push(path.child(field).invalid(value, format!("must be less than or equal to {why}")));
        }
    };
    limit("parallelism", MAX_INDEXES, "100000 when completion mode is Indexed");
    if let Some(completions) = completions {
        limit("maxFailedIndexes", completions, "completions");
    }
    limit("maxFailedIndexes", MAX_INDEXES, "100000");
    let of_many = "10000 when completions are above 100000 and used with backoff limit per index";
    let has_many =
        completions.is_some_and(|count| count > MAX_INDEXES) && has(spec, &["backoffLimitPerIndex"]);
    if has_many {
        limit("parallelism", MAX_INDEXES_OF_MANY, of_many);
        limit("maxFailedIndexes", MAX_INDEXES_OF_MANY, of_many);
        if failed.is_none() {
            let detail = "must be specified when completions is above 100000";
            causes.push(path.child("maxFailedIndexes").required(detail));
        }
    }
    if completions.is_none() {
        causes.push(path.child("completions").required("when completion mode is Indexed"));
    }
    causes
}

/// A template never changes, but for where its pods may run and what they ask for while the job is suspended and has no pods.
fn template_change(spec: &Value, old: &Value, path: &Path) -> Option<Cause> {
    let new = at(spec, &["template"]);
    let mut before = at(old, &["spec", "template"]).clone();
    let started = has(old, &["status", "startTime"]);
    let may_change = flag(old, &["spec", "suspend"])
        && (!started || status::has_condition(at(old, &["status"]), "Suspended"))
        && number(old, &["status", "active"]).unwrap_or_default() == 0;
    if may_change {
        for field in ["annotations", "labels"] {
            copy(&mut before, new, &["metadata"], field);
        }
        for field in ["nodeSelector", "tolerations", "schedulingGates"] {
            copy(&mut before, new, &["spec"], field);
        }
        copy(&mut before, new, &["spec", "affinity"], "nodeAffinity");
        for kind in ["containers", "initContainers"] {
            let given = items(new, &["spec", kind]).to_vec();
            for (container, given) in items_mut(&mut before, &["spec", kind]).zip(given) {
                if text(container, &["name"]) == text(&given, &["name"]) {
                    keep(container, &given, "resources");
                }
            }
        }
    }
    immutable(new, &before, path)
}

/// Makes a field of the object at a path what it is in another object.
fn copy(to: &mut Value, from: &Value, path: &[&str], field: &str) {
    let value = at(at(from, path), &[field]).clone();
    if value.is_null() {
        if let Some(object) = super::read::map_at(to, path) {
            object.remove(field);
        }
    } else {
        map(to, path).insert(field.to_owned(), value);
    }
}

fn cron_spec_causes(spec: &Value) -> Vec<Cause> {
    let path = Path::new("spec");
    let mut causes = Vec::new();
    let schedule = text(spec, &["schedule"]);
    if schedule.is_empty() {
        causes.push(path.child("schedule").required(""));
    } else {
        causes.extend(schedule_causes(schedule, &path.child("schedule")));
    }
    causes.extend(negative(spec, &path, "startingDeadlineSeconds"));
    if let Some(zone) = at(spec, &["timeZone"]).as_str() {
        causes.extend(zone_cause(zone, &path.child("timeZone")));
    }
    let policy = text(spec, &["concurrencyPolicy"]);
    let within = path.child("concurrencyPolicy");
    match policy {
        "Allow" | "Forbid" | "Replace" => {}
        "" => causes.push(within.required("")),
        _ => causes.push(within.not_supported(policy, &["Allow", "Forbid", "Replace"])),
    }
    let of_job = path.child("jobTemplate").child("spec");
    let template = at(spec, &["jobTemplate", "spec"]);
    causes.extend(spec_causes(template, &of_job));
    let selector = at(template, &["selector"]);
    if !selector.is_null() {
        let detail = "`selector` will be auto-generated";
        causes.push(of_job.child("selector").invalid(selector.clone(), detail));
    }
    if flag(template, &["manualSelector"]) {
        causes.push(of_job.child("manualSelector").not_supported(true, &["nil", "false"]));
    }
    causes.extend(negative(spec, &path, "successfulJobsHistoryLimit"));
    causes.extend(negative(spec, &path, "failedJobsHistoryLimit"));
    causes
}

/// Refuses a number below 0.
fn negative(spec: &Value, path: &Path, field: &str) -> Option<Cause> {
    let value = number(spec, &[field]).filter(|value| *value < 0)?;
    Some(path.child(field).invalid(value, NOT_NEGATIVE))
}

fn schedule_causes(schedule: &str, path: &Path) -> Vec<Cause> {
    let is_zoned = ["TZ=", "CRON_TZ="].iter().any(|prefix| schedule.starts_with(prefix));
    let line = if is_zoned { schedule.split_once(' ').map_or("", |(_, line)| line) } else { schedule };
    let mut causes = Vec::new();
    if let Err(error) = Schedule::parse(line.trim()) {
        causes.push(path.invalid(schedule, error.to_string()));
    }
    if schedule.contains("TZ") {
        let detail = "cannot use TZ or CRON_TZ in schedule, use timeZone field instead";
        causes.push(path.invalid(schedule, detail));
    }
    causes
}

fn zone_cause(zone: &str, path: &Path) -> Option<Cause> {
    let is_name = |part: &str| {
        !matches!(part, "" | "." | "..")
            && part.len() <= 14
            && !part.starts_with('-')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || ".-_+".contains(c))
    };
    if zone.is_empty() {
        return Some(path.invalid(zone, "timeZone must be nil or non-empty string"));
    }
    if zone.eq_ignore_ascii_case("Local") {
        let detail = "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones";
        return Some(path.invalid(zone, detail));
    }
    let is_known = zone.split('/').all(is_name) && TimeZone::get(zone).is_ok();
    (!is_known).then(|| path.invalid(zone, format!("unknown time zone {zone}")))
}
