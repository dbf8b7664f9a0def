//! Disks on instances. What is done to one instance is done one after the other.

use std::{collections::BTreeMap, time::Duration};

use berth_core::{Backoff, NodeId, VolumeCapability, VolumeId};

use super::{
    PROVIDER, SERIAL,
    account::{Account, By, Progress},
    api::Disk,
    parameters,
    protocol::is_code,
};
use crate::{
    Attachment, Context, Error, Result, Volume,
    cloud::{Deadline, Failure, Refusal},
};

/// How often is asked again while something else is done to the disk or the instance.
const BUSY: Backoff = Backoff { first: Duration::from_millis(250), longest: Duration::from_secs(5) };

impl Attachment for Account {
    fn knows_attachments(&self) -> bool {
        // An attachment that is under way is not listed yet: whoever began it may have been killed.
        false
    }

    async fn attach(
        &self,
        ctx: &Context,
        volume: &Volume,
        node: &NodeId,
        capability: &VolumeCapability,
    ) -> Result<BTreeMap<String, String>> {
        let until = Deadline::of(ctx);
        let id = volume.id.as_str();
        let disk = self.observed(id, until).await?;
        parameters::check_access(std::slice::from_ref(capability), disk.is_shared())?;
        if disk.serial_number.is_empty() {
            return Err(Error::Precondition(format!(
                "disk {id:?} has no serial number, as those made before 2020, so no node could tell which device it is; \
                 make a disk of a snapshot of it"
            )));
        }
        let told = BTreeMap::from([(SERIAL.to_owned(), disk.serial_number.clone())]);
        if disk.is_on(node.as_str()) && disk.status == "In_use" {
            return Ok(told);
        }
        let _turn = self.queues.enter(node.as_str()).await;
        self.attach_to(id, node.as_str(), until).await?;
        Ok(told)
    }

    async fn detach(&self, ctx: &Context, id: &VolumeId, node: Option<&NodeId>) -> Result<()> {
        let until = Deadline::of(ctx);
        // One that is gone is attached to nothing.
        let Some(disk) = self.disk(By::Id(id.to_string()), until).await? else { return Ok(()) };
        let nodes = match node {
            Some(node) => vec![node.to_string()],
            None => disk.instances().into_iter().map(ToOwned::to_owned).collect(),
        };
        for instance in nodes {
            if disk.is_on(&instance) || disk.status == "Attaching" {
                let _turn = self.queues.enter(&instance).await;
                self.detach_from(id.as_str(), &instance, until).await?;
            }
        }
        Ok(())
    }
}

impl Account {
    /// Attaches a disk, and waits while something else is done to it or to the instance.
    async fn attach_to(&self, id: &str, instance: &str, until: Deadline) -> Result<()> {
        let progress = |disk: &Disk| match disk.status.as_str() {
            "In_use" if disk.is_on(instance) => Progress::Done,
            "In_use" if !disk.is_shared() => Progress::Impossible(elsewhere(disk)),
            // One that several instances have is never anything else.
            "Attaching" | "In_use" => Progress::UnderWay,
            _ => Progress::NotBegun,
        };
        for attempt in 0.. {
            let failure = match self.api.attach_disk(id, instance, until).await {
                Ok(()) => return self.settle(id, "attach", until, progress).await,
                Err(failure) => failure,
            };
            if is_code(&failure, &["InvalidInstanceId"]) {
                return Err(Error::not_found("node", instance));
            }
            if is_code(&failure, &["InvalidDiskId.NotFound"]) {
                return Err(Error::not_found("volume", id));
            }
            if is_code(&failure, &["InstanceDiskLimitExceeded"]) {
                return Err(Error::Exhausted(format!(
                    "node {instance:?} has as many disks as its instance type takes: {failure}"
                )));
            }
            if !is_unclear(&failure) {
                return Err(failure.into());
            }
            let disk = self.disk(By::Id(id.to_owned()), until).await?;
            let disk = disk.ok_or_else(|| Error::not_found("volume", id))?;
            match progress(&disk) {
                Progress::Done => return Ok(()),
                Progress::Impossible(why) => return Err(why),
                Progress::UnderWay if disk.status == "Attaching" => {
                    return self.settle(id, "attach", until, progress).await;
                }
                Progress::UnderWay | Progress::NotBegun => wait(attempt, failure, until).await?,
            }
        }
        unreachable!("the loop ends by a return")
    }

    /// Detaches a disk, and waits while something else is done to it.
    async fn detach_from(&self, id: &str, instance: &str, until: Deadline) -> Result<()> {
        let progress = |disk: &Disk| match disk.status.as_str() {
            _ if !disk.is_on(instance) && disk.status != "Attaching" => Progress::Done,
            "Detaching" | "Attaching" => Progress::UnderWay,
            _ => Progress::NotBegun,
        };
        for attempt in 0.. {
            let failure = match self.api.detach_disk(id, instance, until).await {
                Ok(()) => {
                    return match self.settle(id, "detach", until, progress).await {
                        Err(Error::NotFound { what: "volume", .. }) => Ok(()),
                        settled => settled,
                    };
                }
                Err(failure) => failure,
            };
            // Whatever it says: a disk that is not there, or not on the instance, is detached.
            match self.disk(By::Id(id.to_owned()), until).await? {
                None => return Ok(()),
                Some(disk) if matches!(progress(&disk), Progress::Done) => return Ok(()),
                Some(_) if is_unclear(&failure) => wait(attempt, failure, until).await?,
                Some(_) => return Err(failure.into()),
            }
        }
        unreachable!("the loop ends by a return")
    }
}

/// Whether the disk has to be looked at to know what a failure means.
fn is_unclear(failure: &Failure) -> bool {
    failure.means(Refusal::Busy) || matches!(failure, Failure::Unclear(_))
}

fn elsewhere(disk: &Disk) -> Error {
    let (id, other) = (&disk.id, disk.instances().first().copied().unwrap_or("unknown"));
    Error::Precondition(format!("volume {id:?} is attached to node {other:?}; detach it there first"))
}

async fn wait(attempt: u32, failure: Failure, until: Deadline) -> Result<()> {
    let pause = BUSY.pause(attempt);
    if until.left(pause) < pause {
        return Err(failure.into());
    }
    tracing::debug!(%failure, "asking {PROVIDER} again");
    tokio::time::sleep(pause).await;
    Ok(())
}
