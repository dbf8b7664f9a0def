//! What to do next about one device and all that pods have of it, or about one volume without a device.
//!
//! Pure: what is wanted and what is there go in, the next operations come out, in the order in which they must run.
//! Planning again after they ran gives what follows; an empty plan means that wanted and there are the same.

use crate::plugin::{Certainty, Placed};

/// How far a volume is on a pod, or a device on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mount {
    /// Nothing is mounted, nor left of an attempt to.
    NotMounted,
    /// It may be there, wholly or in part.
    Uncertain,
    /// The mount, or the preparation of the device, is complete.
    Mounted,
}

impl Mount {
    /// What is known after a mount, or staging, has failed. What was mounted stays so: a failure to do it again unmounts
    /// nothing. What an earlier process left is gone only once it was undone.
    pub(crate) fn after_failure(self, certainty: Certainty, reconstructed: bool) -> Self {
        match (self, certainty) {
            (Self::Uncertain, Certainty::Final) if !reconstructed => Self::NotMounted,
            (Self::NotMounted, Certainty::Uncertain) => Self::Uncertain,
            (known, _) => known,
        }
    }
}

/// Whether a pod is to have a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Want {
    /// A container of the pod uses the volume.
    Yes,
    /// It is not, or the pod is gone.
    No,
    /// The pod is there, but what its volumes are is not known yet: nothing is taken away from it.
    Unknown,
}

/// A device and the volumes on it, or one volume without a device.
#[derive(Debug, Clone)]
pub(crate) struct View {
    /// The device, for kinds that have one.
    pub(crate) device: Option<DeviceView>,
    /// What pods have of it, or should.
    pub(crate) volumes: Vec<VolumeView>,
}

/// A device as planning observes it.
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a fact of its own, and the plan's tables name them"
)]
pub(crate) struct DeviceView {
    /// It must be attached to the node.
    pub(crate) attach: bool,
    /// It is prepared on the node before pods get it.
    pub(crate) stage: bool,
    /// Whether it is prepared.
    pub(crate) state: Mount,
    /// The node has reported that it uses it.
    pub(crate) in_use: bool,
    /// It is among the volumes that the Node object lists as attached.
    pub(crate) attached: bool,
    /// Only one pod may have it at a time (ReadWriteOncePod).
    pub(crate) one_pod: bool,
}

/// A volume on a pod.
#[derive(Debug, Clone)]
pub(crate) struct VolumeView {
    /// The volume and the pod that has it.
    pub(crate) placed: Placed,
    /// Whether the pod is to have it.
    pub(crate) want: Want,
    /// Whether the pod has it.
    pub(crate) state: Mount,
    /// It is to be brought again: what it is made of changed.
    pub(crate) stale: bool,
    /// What is on it is smaller than the volume.
    pub(crate) grow: bool,
}

/// One operation of the volume manager on a device or on a volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Take a volume away from a pod.
    TearDown(Placed),
    /// Report on the node that the device is in use, before it is.
    ReportInUse,
    /// Wait until the device is attached.
    AwaitAttachment,
    /// Prepare the device on the node, for this volume first.
    Stage(Placed),
    /// Bring a volume to a pod.
    SetUp(Placed),
    /// Another pod has the volume, which may only be on one.
    Refuse(Placed),
    /// Grow what is on the volume.
    Expand(Placed),
    /// Undo the preparation of the device.
    Unstage,
    /// Report that the device is no longer used.
    ReportNotInUse,
}

/// Returns the operations that can be done now, in the order in which they must run.
pub(crate) fn plan(view: &View) -> Vec<Action> {
    let mut actions: Vec<Action> = view
        .volumes
        .iter()
        .filter(|volume| volume.want == Want::No && volume.state != Mount::NotMounted)
        .map(|volume| Action::TearDown(volume.placed.clone()))
        .collect();
    if view.volumes.iter().any(|volume| volume.want == Want::Yes) {
        actions.extend(bring(view));
    } else if actions.is_empty() && view.volumes.iter().all(|volume| volume.want == Want::No) {
        actions.extend(view.device.as_ref().and_then(release));
    }
    actions
}

fn release(device: &DeviceView) -> Option<Action> {
    if device.state != Mount::NotMounted {
        Some(Action::Unstage)
    } else if device.in_use {
        Some(Action::ReportNotInUse)
    } else {
        None
    }
}

fn bring(view: &View) -> Vec<Action> {
    let (mut allowed, mut actions) = (Vec::new(), Vec::new());
    let mut holder = view.device.as_ref().filter(|device| device.one_pod).and_then(|_| {
        view.volumes
            .iter()
            .find(|volume| volume.state != Mount::NotMounted)
            .map(|volume| &volume.placed.pod_uid)
    });
    for volume in view.volumes.iter().filter(|volume| volume.want == Want::Yes) {
        if holder.is_some_and(|holder| *holder != volume.placed.pod_uid) {
            actions.push(Action::Refuse(volume.placed.clone()));
        } else {
            if view.device.as_ref().is_some_and(|device| device.one_pod) {
                holder = Some(&volume.placed.pod_uid);
            }
            allowed.push(volume);
        }
    }
    let missing = allowed.iter().find(|volume| volume.state != Mount::Mounted);
    if let (Some(device), Some(first)) = (&view.device, missing) {
        let first_step = if device.attach && !device.in_use {
            Some(Action::ReportInUse)
        } else if device.attach && !device.attached {
            Some(Action::AwaitAttachment)
        } else if device.stage && device.state != Mount::Mounted {
            Some(Action::Stage(first.placed.clone()))
        } else {
            None
        };
        if let Some(step) = first_step {
            actions.push(step);
            return actions;
        }
    }
    for volume in allowed {
        if volume.state != Mount::Mounted || volume.stale {
            actions.push(Action::SetUp(volume.placed.clone()));
        } else if volume.grow {
            actions.push(Action::Expand(volume.placed.clone()));
        }
    }
    actions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(pod: &str) -> Placed {
        Placed {
            plugin: "kubernetes.io/csi".to_owned(),
            pod_uid: pod.to_owned(),
            spec_name: "pv".to_owned(),
            block: false,
        }
    }

    fn volume(pod: &str, want: Want, state: Mount) -> VolumeView {
        VolumeView { placed: placed(pod), want, state, stale: false, grow: false }
    }

    fn device() -> DeviceView {
        DeviceView {
            attach: true,
            stage: true,
            state: Mount::Mounted,
            in_use: true,
            attached: true,
            one_pod: false,
        }
    }

    fn next(device: Option<DeviceView>, volumes: Vec<VolumeView>) -> Vec<Action> {
        plan(&View { device, volumes })
    }

    #[test]
    fn a_wanted_volume_goes_through_every_step_in_order() {
        use Mount::{Mounted, NotMounted};
        let wanted = || vec![volume("a", Want::Yes, NotMounted)];
        let rows = [
            (
                DeviceView { in_use: false, attached: false, state: NotMounted, ..device() },
                Action::ReportInUse,
            ),
            (DeviceView { attached: false, state: NotMounted, ..device() }, Action::AwaitAttachment),
            (DeviceView { state: NotMounted, ..device() }, Action::Stage(placed("a"))),
            (DeviceView { state: Mount::Uncertain, ..device() }, Action::Stage(placed("a"))),
            (DeviceView { state: Mounted, ..device() }, Action::SetUp(placed("a"))),
            (
                DeviceView { attach: false, in_use: false, attached: false, state: NotMounted, ..device() },
                Action::Stage(placed("a")),
            ),
            (DeviceView { stage: false, state: NotMounted, ..device() }, Action::SetUp(placed("a"))),
        ];
        for (device, expected) in rows {
            assert_eq!(next(Some(device.clone()), wanted()), [expected], "{device:?}");
        }
        assert_eq!(next(None, wanted()), [Action::SetUp(placed("a"))]);
    }

    #[test]
    fn what_is_there_and_wanted_is_left_alone() {
        let mounted = || vec![volume("a", Want::Yes, Mount::Mounted)];
        assert_eq!(next(Some(device()), mounted()), []);
        assert_eq!(next(None, mounted()), []);
        // A detachment behind the node's back, or a lost report, does not touch what runs.
        assert_eq!(next(Some(DeviceView { attached: false, in_use: false, ..device() }), mounted()), []);
    }

    #[test]
    fn what_is_uncertain_and_wanted_is_brought_again() {
        let uncertain = vec![volume("a", Want::Yes, Mount::Uncertain)];
        assert_eq!(next(Some(device()), uncertain), [Action::SetUp(placed("a"))]);
    }

    #[test]
    fn what_nobody_wants_goes_in_reverse_order() {
        for state in [Mount::Mounted, Mount::Uncertain] {
            assert_eq!(
                next(Some(device()), vec![volume("a", Want::No, state)]),
                [Action::TearDown(placed("a"))],
                "{state:?}"
            );
        }
        let gone = || vec![volume("a", Want::No, Mount::NotMounted)];
        for state in [Mount::Mounted, Mount::Uncertain] {
            assert_eq!(next(Some(DeviceView { state, ..device() }), gone()), [Action::Unstage], "{state:?}");
            assert_eq!(next(Some(DeviceView { state, ..device() }), vec![]), [Action::Unstage], "{state:?}");
        }
        let unstaged = DeviceView { state: Mount::NotMounted, ..device() };
        assert_eq!(next(Some(unstaged.clone()), gone()), [Action::ReportNotInUse]);
        assert_eq!(next(Some(DeviceView { in_use: false, ..unstaged }), gone()), []);
        assert_eq!(next(None, gone()), []);
    }

    #[test]
    fn a_device_stays_while_any_pod_has_or_may_want_it() {
        let other = |want, state| vec![volume("a", Want::No, Mount::NotMounted), volume("b", want, state)];
        assert_eq!(next(Some(device()), other(Want::Yes, Mount::Mounted)), []);
        assert_eq!(next(Some(device()), other(Want::Unknown, Mount::Uncertain)), []);
        assert_eq!(next(Some(device()), other(Want::No, Mount::Uncertain)), [Action::TearDown(placed("b"))]);
    }

    #[test]
    fn nothing_is_taken_from_a_pod_whose_volumes_are_not_known_yet() {
        for state in [Mount::Uncertain, Mount::Mounted, Mount::NotMounted] {
            assert_eq!(next(Some(device()), vec![volume("a", Want::Unknown, state)]), []);
            assert_eq!(next(None, vec![volume("a", Want::Unknown, state)]), []);
        }
    }

    #[test]
    fn one_pod_leaves_while_another_comes() {
        let volumes = vec![volume("a", Want::No, Mount::Mounted), volume("b", Want::Yes, Mount::NotMounted)];
        assert_eq!(
            next(Some(device()), volumes),
            [Action::TearDown(placed("a")), Action::SetUp(placed("b"))]
        );
    }

    #[test]
    fn a_volume_for_one_pod_is_refused_to_a_second_until_the_first_has_left() {
        let single = || Some(DeviceView { one_pod: true, ..device() });
        let pair = |first, second| vec![volume("a", Want::Yes, first), volume("b", Want::Yes, second)];
        assert_eq!(
            next(single(), pair(Mount::NotMounted, Mount::NotMounted)),
            [Action::Refuse(placed("b")), Action::SetUp(placed("a"))]
        );
        assert_eq!(
            next(single(), pair(Mount::NotMounted, Mount::Uncertain)),
            [Action::Refuse(placed("a")), Action::SetUp(placed("b"))]
        );
        let leaving = vec![volume("a", Want::No, Mount::Mounted), volume("b", Want::Yes, Mount::NotMounted)];
        assert_eq!(next(single(), leaving), [Action::TearDown(placed("a")), Action::Refuse(placed("b"))]);
        let left = vec![volume("a", Want::No, Mount::NotMounted), volume("b", Want::Yes, Mount::NotMounted)];
        assert_eq!(next(single(), left), [Action::SetUp(placed("b"))]);
    }

    #[test]
    fn changed_content_and_growth_are_brought_to_running_pods() {
        let stale = VolumeView { stale: true, grow: true, ..volume("a", Want::Yes, Mount::Mounted) };
        assert_eq!(next(None, vec![stale]), [Action::SetUp(placed("a"))]);
        let grow = VolumeView { grow: true, ..volume("a", Want::Yes, Mount::Mounted) };
        assert_eq!(next(Some(device()), vec![grow]), [Action::Expand(placed("a"))]);
        let new = VolumeView { grow: true, ..volume("a", Want::Yes, Mount::NotMounted) };
        assert_eq!(next(Some(device()), vec![new]), [Action::SetUp(placed("a"))]);
    }

    #[test]
    fn a_failure_takes_nothing_away_that_may_be_there() {
        use Certainty::{Final, Uncertain as Unsure, Unchanged};
        use Mount::{Mounted, NotMounted, Uncertain};
        let rows = [
            (NotMounted, Final, false, NotMounted),
            (NotMounted, Unsure, false, Uncertain),
            (NotMounted, Unchanged, false, NotMounted),
            (Uncertain, Final, false, NotMounted),
            (Uncertain, Final, true, Uncertain),
            (Uncertain, Unsure, false, Uncertain),
            (Uncertain, Unchanged, false, Uncertain),
            (Mounted, Final, false, Mounted),
            (Mounted, Unsure, false, Mounted),
            (Mounted, Unchanged, true, Mounted),
        ];
        for (before, certainty, reconstructed, after) in rows {
            assert_eq!(before.after_failure(certainty, reconstructed), after, "{before:?} {certainty:?}");
        }
    }
}
