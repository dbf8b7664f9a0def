//! One operation on a device or on a pod's volume, what it does to what is known, and the event when it fails.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::plan::{Action, Mount};
use super::state::{DeviceEntry, Group, Growth, Place};
use super::{Volumes, resolve};
use crate::plugin::{Certainty, Failed, Placed, Plugin, PodVolume};

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It did what it should.
    Done,
    /// It goes on when something else has changed; if nothing does, it is looked at again after this time.
    Wait(Duration),
    /// It failed, and was told of.
    Failed,
}

/// As long as a kubelet lets a pod wait for its volumes before it complains.
const PATIENCE: Duration = Duration::from_secs(123);

const IN_USE: &str = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";

impl Volumes {
    pub(super) async fn operate(&self, group: &Group, action: Action) -> Outcome {
        match action {
            Action::TearDown(placed) => self.tear_down(&placed).await,
            Action::ReportInUse => self.report_in_use(group).await,
            Action::AwaitAttachment => self.await_attachment(group),
            Action::Stage(placed) => self.stage(group, &placed).await,
            Action::SetUp(placed) => self.set_up(&placed).await,
            Action::Refuse(placed) => {
                self.problem(&placed, "SetUp", "SetUpDevice", IN_USE);
                Outcome::Wait(PATIENCE)
            }
            Action::Expand(placed) => self.expand(&placed).await,
            Action::Unstage => self.unstage(group).await,
            Action::ReportNotInUse => self.report_not_in_use(group),
        }
    }

    async fn set_up(&self, placed: &Placed) -> Outcome {
        let Some((plugin, volume, before)) = self.begin(placed) else { return Outcome::Done };
        let result = plugin.set_up(&volume).await;
        let failed = {
            let mut state = self.state();
            let Some(place) = state.place_mut(placed) else { return Outcome::Done };
            match result {
                Ok(ready) => {
                    place.state = Mount::Mounted;
                    place.reconstructed = false;
                    place.ready = Some(ready);
                    place.problem = None;
                    place.size = place.size.or_else(|| resolve::size(&volume));
                    place.refresh_at = plugin.refresh_after(&volume).map(|after| Instant::now() + after);
                    None
                }
                Err(failed) => {
                    place.state = before.after_failure(failed.certainty, place.reconstructed);
                    place.stale = before == Mount::Mounted;
                    Some(failed)
                }
            }
        };
        match failed {
            None => {
                if before != Mount::Mounted {
                    tracing::info!(pod = %placed.pod_uid, volume = %placed.spec_name, "mounted");
                    (self.options.changed)(&placed.pod_uid);
                }
                Outcome::Done
            }
            Some(failed) => {
                self.problem(placed, "SetUp", "MapPodDevice", &failed.message);
                Outcome::Failed
            }
        }
    }

    /// From here on the volume may be there, whatever becomes of the call.
    fn begin(&self, placed: &Placed) -> Option<(Arc<dyn Plugin>, PodVolume, Mount)> {
        let mut state = self.state();
        let place = state.place_mut(placed)?;
        let volume = place.volume.clone()?;
        let before = place.state;
        if before == Mount::NotMounted {
            place.state = Mount::Uncertain;
        }
        place.stale = false;
        Some((place.plugin.clone(), volume, before))
    }

    async fn tear_down(&self, placed: &Placed) -> Outcome {
        let plugin = {
            let mut state = self.state();
            let Some(place) = state.place_mut(placed) else { return Outcome::Done };
            place.ready = None;
            place.refresh_at = None;
            place.plugin.clone()
        };
        let result = plugin.tear_down(placed).await;
        let (failed, pod) = {
            let mut state = self.state();
            let Some(place) = state.place_mut(placed) else { return Outcome::Done };
            let pod = place.pod.clone();
            match result {
                Ok(()) => {
                    place.state = Mount::NotMounted;
                    place.reconstructed = false;
                    place.growth = Growth::None;
                    place.problem = None;
                    (None, pod)
                }
                Err(failed) => {
                    if failed.certainty != Certainty::Unchanged {
                        place.state = Mount::Uncertain;
                    }
                    place.problem = Some(failed.message.clone());
                    (Some(failed), pod)
                }
            }
        };
        let Some(failed) = failed else {
            tracing::info!(pod = %placed.pod_uid, volume = %placed.spec_name, "unmounted");
            return Outcome::Done;
        };
        let operation = if placed.block { "UnmapVolume" } else { "UnmountVolume" };
        let message =
            format!("{operation}.TearDown failed for volume {:?} : {}", placed.spec_name, failed.message);
        self.complain(pod.as_deref(), placed, "FailedUnmount", message);
        Outcome::Failed
    }

    async fn stage(&self, group: &Group, placed: &Placed) -> Outcome {
        let begun = {
            let mut state = self.state();
            let volume = state.place(placed).and_then(|place: &Place| place.volume.clone());
            state.device_mut(group).zip(volume).map(|(entry, volume)| {
                let before = entry.state;
                if before == Mount::NotMounted {
                    entry.state = Mount::Uncertain;
                }
                entry.waiting = None;
                (entry.plugin.clone(), volume, before)
            })
        };
        let Some((plugin, volume, before)) = begun else { return Outcome::Done };
        let result = plugin.stage(&volume).await;
        let failed = self.with_device(group, |entry| match result {
            Ok(()) => {
                entry.state = Mount::Mounted;
                entry.reconstructed = false;
                None
            }
            Err(failed) => {
                entry.state = before.after_failure(failed.certainty, entry.reconstructed);
                Some(failed)
            }
        });
        match failed.flatten() {
            None => Outcome::Done,
            Some(failed) => {
                self.problem(placed, "MountDevice", "SetUpDevice", &failed.message);
                Outcome::Failed
            }
        }
    }

    async fn unstage(&self, group: &Group) -> Outcome {
        let device =
            self.with_device(group, |entry| (entry.plugin.clone(), entry.device.unique_name.clone()));
        let Some((plugin, name)) = device else { return Outcome::Done };
        let result = plugin.unstage(&name).await;
        let outcome = self.with_device(group, |entry| match result {
            Ok(()) => {
                entry.state = Mount::NotMounted;
                entry.reconstructed = false;
                Outcome::Done
            }
            Err(failed) => {
                if failed.certainty != Certainty::Unchanged {
                    entry.state = Mount::Uncertain;
                }
                tracing::warn!(device = name, error = %failed, "UnmountDevice failed; trying again");
                Outcome::Failed
            }
        });
        outcome.unwrap_or(Outcome::Done)
    }

    async fn report_in_use(&self, group: &Group) -> Outcome {
        let Some(name) = self.with_device(group, |entry| entry.device.unique_name.clone()) else {
            return Outcome::Done;
        };
        match self.options.node.in_use(&name).await {
            Ok(()) => {
                self.with_device(group, |entry| entry.in_use = true);
                Outcome::Done
            }
            Err(Failed { message, .. }) => {
                tracing::warn!(device = name, error = message, "not reported as in use; trying again");
                Outcome::Failed
            }
        }
    }

    fn report_not_in_use(&self, group: &Group) -> Outcome {
        let name = self.with_device(group, |entry| {
            entry.in_use = false;
            entry.device.unique_name.clone()
        });
        if let Some(name) = name {
            self.options.node.not_in_use(&name);
        }
        Outcome::Done
    }

    /// Attaching is others' work, who tell of their failures; only a long wait is worth a word.
    fn await_attachment(&self, group: &Group) -> Outcome {
        let now = Instant::now();
        let since = self.with_device(group, |entry| *entry.waiting.get_or_insert(now));
        if since.is_some_and(|since| now - since >= PATIENCE) {
            let waiting: Vec<Placed> = {
                let state = self.state();
                let places = state.groups.get(group).into_iter().flat_map(|members| &members.places);
                places.filter(|(_, place)| place.volume.is_some()).map(|(placed, _)| placed.clone()).collect()
            };
            for placed in waiting {
                self.problem(&placed, "WaitForAttach", "WaitForAttach", "timed out waiting for the condition: the volume is not attached to this node; its VolumeAttachment says why");
            }
        }
        Outcome::Wait(PATIENCE)
    }

    /// Notes and tells why a pod does not get its volume: `mount` and `map` name the step for filesystems and devices.
    fn problem(&self, placed: &Placed, mount: &str, map: &str, cause: &str) {
        let pod = {
            let mut state = self.state();
            let Some(place) = state.place_mut(placed) else { return };
            place.problem = Some(cause.to_owned());
            place.pod.clone()
        };
        let (reason, step) = if placed.block {
            ("FailedMapVolume", format!("MapVolume.{map}"))
        } else {
            ("FailedMount", format!("MountVolume.{mount}"))
        };
        let message = format!("{step} failed for volume {:?} : {cause}", placed.spec_name);
        self.complain(pod.as_deref(), placed, reason, message);
    }

    fn complain(&self, pod: Option<&Pod>, placed: &Placed, reason: &str, message: String) {
        tracing::warn!(pod = %placed.pod_uid, volume = %placed.spec_name, reason, error = message, "trying again");
        if let Some(pod) = pod {
            self.options.recorder.warning(pod, reason, message);
        }
    }

    fn with_device<T>(&self, group: &Group, change: impl FnOnce(&mut DeviceEntry) -> T) -> Option<T> {
        self.state().device_mut(group).map(change)
    }
}
