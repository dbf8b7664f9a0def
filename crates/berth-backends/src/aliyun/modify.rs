//! What a VolumeAttributesClass changes of a disk: its category, level, IOPS, whether it bursts, and its tags.

use super::{
    PROVIDER,
    account::{Account, By},
    api::{Disk, NewSpec, Task},
    parameters::Changes,
    protocol::{is_code, is_gone},
};
use crate::{
    Context, Error, Modification, Parameters, Result, Volume,
    cloud::{Deadline, Failure, Pace},
};

impl Modification for Account {
    async fn modify(&self, ctx: &Context, volume: &Volume, mutable: Parameters) -> Result<()> {
        let changes = Changes::parse(&mutable)?;
        let until = Deadline::of(ctx);
        let id = volume.id.as_str();
        let disk = self.observed(id, until).await?;
        let spec = needed(&changes.spec, &disk);
        // All or none: the one change that may be impossible is tried before anything is done.
        let is_possible = match &spec {
            Some(spec) => self.would_change(id, spec, until).await?,
            None => false,
        };
        let removed: Vec<&str> = changes.removed_tags.iter().map(String::as_str).collect();
        let removed: Vec<&str> = removed.into_iter().filter(|key| disk.tag(key).is_some()).collect();
        if !removed.is_empty() {
            self.api.untag_disk(id, &removed, until).await?;
        }
        if changes.tags.iter().any(|(key, value)| disk.tag(key) != Some(value)) {
            self.api.tag("disk", &[id], &changes.tags, until).await?;
        }
        if let Some(spec) = spec.filter(|_| is_possible) {
            self.change(id, &spec, until).await?;
        }
        // Last, because only the category that the disk has now may be able to.
        if let Some(bursting) = changes.bursting
            && (disk.bursting_enabled != bursting || is_possible)
        {
            self.set_bursting(id, bursting, until).await?;
        }
        Ok(())
    }
}

/// What of the changes the disk does not have yet.
fn needed(wanted: &NewSpec, disk: &Disk) -> Option<NewSpec> {
    let has = |wanted: &Option<String>, own: &str| wanted.as_deref().is_none_or(|wanted| wanted == own);
    let is_so = has(&wanted.category, &disk.category)
        && has(&wanted.performance_level, &disk.performance_level)
        && wanted.provisioned_iops.is_none_or(|iops| iops == disk.provisioned_iops);
    (!is_so).then(|| wanted.clone())
}

impl Account {
    /// Whether the disk could and would change like this. A change that is under way is waited for first.
    async fn would_change(&self, id: &str, spec: &NewSpec, until: Deadline) -> Result<bool> {
        loop {
            let failure = match self.api.would_modify(id, spec, until).await {
                Ok(would) => return Ok(would),
                Err(failure) => failure,
            };
            let task = if is_changing(&failure) { self.api.last_task_of(id, until).await? } else { None };
            // Whoever began it, this program before it was killed perhaps.
            match task.filter(|task| !is_over(task)) {
                Some(task) => self.finish(id, &task.task_id, until).await?,
                None => return Err(explain(id, failure)),
            }
        }
    }

    /// Changes a disk and waits until that is done.
    async fn change(&self, id: &str, spec: &NewSpec, until: Deadline) -> Result<()> {
        match self.api.modify_spec(id, spec, until).await {
            Ok(None) => Ok(()),
            Ok(Some(task)) => self.finish(id, &task, until).await,
            // It may have begun although it was not said; then its task is the last one.
            Err(failure @ Failure::Unclear(_)) => match self.api.last_task_of(id, until).await? {
                Some(task) => {
                    self.finish(id, &task.task_id, until).await?;
                    let now = self.disk(By::Id(id.to_owned()), until).await?;
                    match now {
                        Some(now) if needed(spec, &now).is_none() => Ok(()),
                        _ => Err(failure.into()),
                    }
                }
                None => Err(failure.into()),
            },
            Err(failure) => Err(explain(id, failure)),
        }
    }

    /// Waits until a task has ended; one that failed is an error at once.
    async fn finish(&self, id: &str, task: &str, until: Deadline) -> Result<()> {
        let mut pace = Pace::new();
        while pace.next(0, until).await {
            match self.api.task(task, until).await {
                Ok(Some(found)) if found.task_status == "Finished" => return Ok(()),
                Ok(Some(found)) if is_over(&found) => {
                    return Err(Error::State(format!(
                        "{PROVIDER} could not modify volume {id:?}: task {task} is {:?}",
                        found.task_status
                    )));
                }
                // One that is no longer known is over; what became of it shows in the disk.
                Ok(None) => return Ok(()),
                Ok(Some(_)) => {}
                Err(error) => tracing::debug!(%error, "looking for the outcome of a task"),
            }
        }
        Err(Error::Busy(format!("{PROVIDER} is still about to modify volume {id:?} (task {task})")))
    }

    async fn set_bursting(&self, id: &str, bursting: bool, until: Deadline) -> Result<()> {
        let mut pace = Pace::new();
        loop {
            match self.api.set_bursting(id, bursting, until).await {
                // The change of the category is over, and the service that is asked now does not know it yet.
                Err(failure) if is_code(&failure, &["BurstingEnabledForModifyingDiskUnsupported"]) => {
                    if !pace.next(0, until).await {
                        return Err(failure.into());
                    }
                }
                set => return Ok(set?),
            }
        }
    }
}

fn is_over(task: &Task) -> bool {
    !matches!(task.task_status.as_str(), "Processing" | "Pending" | "Waiting" | "Paused")
}

/// Whether a disk refuses a change because of one that is under way.
fn is_changing(failure: &Failure) -> bool {
    is_code(failure, &["IncorrectDiskStatus", "InvalidStatus.DiskNotReady"])
}

/// Why a disk cannot be changed.
fn explain(id: &str, failure: Failure) -> Error {
    if is_gone(&failure) {
        return Error::not_found("volume", id);
    }
    let impossible = ["InvalidParameter", "InvalidDiskCategory", "InvalidProvisionedIops", "InvalidDiskSize"];
    if is_code(&failure, &impossible) {
        return Error::Invalid(failure.to_string());
    }
    failure.into()
}
