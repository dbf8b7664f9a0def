//! A driver that is slow, hangs, crashes, refuses or lies for some volumes: the others are served meanwhile, people are
//! told what is wrong with the bad ones, retries back off, and once the driver behaves nothing is left or missing.
//!
//! One table: [`faults`] of every call × calls. Each row is a subject of its own, and all rows of a call go wrong at
//! the same time.

use std::time::{Duration, Instant};

use berth_kube::Backoff;
use berth_sidecars::driver::Driver;
use berth_testkit::{CrashingSocket, DONE_BUT_REFUSED, FaultKind, Lie, Loops, REFUSED};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use tonic::Code;

use crate::acts::{Act, goals};
use crate::bench::connect;
use crate::power::Power;
use crate::snapshot_faults::CODES;
use crate::world::{Goals, Settings, World, start_all};

/// Quick, but long enough to be told from no pause.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(40), longest: Duration::from_millis(320) };
/// How many calls are waited for to see that retries back off.
const TRIES: usize = 6;

/// A call of the driver, the act that leads to it, and where failures are told.
#[derive(Debug, Clone, Copy)]
struct Call {
    method: &'static str,
    act: Act,
    report: FailureReport,
    /// The lies that can be seen through, and what is said then.
    lies: &'static [(Lie, &'static str)],
}

/// Where people are told.
#[derive(Debug, Clone, Copy)]
enum FailureReport {
    /// By an event with this reason.
    Event(&'static str),
    /// In the status of the VolumeAttachment.
    Attachment,
}

const CREATE_VOLUME: Call = Call {
    method: "CreateVolume",
    act: Act::Provision,
    report: FailureReport::Event("ProvisioningFailed"),
    lies: &[
        (Lie::Small, "less than requested capacity"),
        (Lie::Empty, "answer to CreateVolume has no volume id"),
        (Lie::Another, "which belongs to PersistentVolume"),
    ],
};
const DELETE_VOLUME: Call = Call {
    method: "DeleteVolume",
    act: Act::DeleteVolume,
    report: FailureReport::Event("VolumeFailedDelete"),
    lies: &[],
};
const PUBLISH: Call = Call {
    method: "ControllerPublishVolume",
    act: Act::Attach,
    report: FailureReport::Attachment,
    lies: &[],
};
const UNPUBLISH: Call = Call {
    method: "ControllerUnpublishVolume",
    act: Act::Detach,
    report: FailureReport::Attachment,
    lies: &[],
};
const EXPAND: Call = Call {
    method: "ControllerExpandVolume",
    act: Act::Grow,
    report: FailureReport::Event("VolumeResizeFailed"),
    lies: &[(Lie::Small, "grew the volume to")],
};
const MODIFY: Call = Call {
    method: "ControllerModifyVolume",
    act: Act::Modify,
    report: FailureReport::Event("VolumeModifyFailed"),
    lies: &[],
};
const CREATE_SNAPSHOT: Call = Call {
    method: "CreateSnapshot",
    act: Act::Snapshot,
    report: FailureReport::Event("SnapshotCreationFailed"),
    lies: &[
        (Lie::Empty, "answer to CreateSnapshot has no snapshot id"),
        (Lie::Another, "which belongs to VolumeSnapshotContent"),
    ],
};
const DELETE_SNAPSHOT: Call = Call {
    method: "DeleteSnapshot",
    act: Act::DeleteSnapshot,
    report: FailureReport::Event("SnapshotDeleteError"),
    lies: &[],
};
const CREATE_GROUP: Call = Call {
    method: "CreateVolumeGroupSnapshot",
    act: Act::Group,
    report: FailureReport::Event("GroupSnapshotCreationFailed"),
    lies: &[(Lie::Empty, "answer to CreateVolumeGroupSnapshot has no group snapshot id")],
};
const DELETE_GROUP: Call = Call {
    method: "DeleteVolumeGroupSnapshot",
    act: Act::DeleteGroup,
    report: FailureReport::Event("GroupSnapshotDeleteError"),
    lies: &[],
};

/// One way to misbehave, and what is said of it; nothing of what is merely slow.
#[derive(Debug, Clone)]
struct Row {
    subject: String,
    kind: FaultKind,
    said: Option<String>,
    /// The volume, snapshot or group that it happens to.
    key: String,
}

/// What every driver may do to a call, one row each.
fn faults(call: &Call) -> Vec<Row> {
    let said = |code: Code, why: &str| {
        Some(format!("rpc error: code = {} desc = {why}", berth_csi::code::go_name(code)))
    };
    let mut kinds: Vec<(FaultKind, Option<String>)> =
        CODES.into_iter().map(|code| (FaultKind::Code(code), said(code, REFUSED))).collect();
    for code in [Code::DeadlineExceeded, Code::Unavailable, Code::Internal] {
        kinds.push((FaultKind::DoneBut(code), said(code, DONE_BUT_REFUSED)));
    }
    kinds.push((FaultKind::Slow(Duration::from_millis(500)), None));
    kinds.push((FaultKind::Hang, None));
    let lies = call.lies.iter().map(|(lie, said)| (FaultKind::Lie(*lie), Some((*said).to_owned())));
    kinds.extend(lies);
    rows(kinds)
}

fn rows(kinds: Vec<(FaultKind, Option<String>)>) -> Vec<Row> {
    let row =
        |(number, (kind, said))| Row { subject: format!("bad{number}"), kind, said, key: String::new() };
    kinds.into_iter().enumerate().map(row).collect()
}

/// All rows of a call at once, beside three subjects that the driver serves well.
struct Trial {
    world: World,
    call: Call,
    rows: Vec<Row>,
    good: Vec<String>,
}

impl Trial {
    /// Makes what there is before, asks, and makes the driver misbehave; nobody works yet.
    async fn prepare(call: Call, mut rows: Vec<Row>) -> Self {
        let world = World::start().await;
        let life = world.life(&Power::on());
        // Somebody whose volume and snapshot can be taken for others'.
        let elder = ["elder".to_owned()];
        Act::DeleteSnapshot.prepare(&world, &elder).await;
        *world.fake.storage.other_volume.lock() = world.uid("elder").await;
        let good: Vec<String> = (0..3).map(|number| format!("good{number}")).collect();
        let all: Vec<String> =
            good.iter().cloned().chain(rows.iter().map(|row| row.subject.clone())).collect();
        call.act.prepare(&world, &all).await;
        life.stop().await;
        for row in &mut rows {
            row.key = call.act.asked(&world, &row.subject).await;
            world.fake.fail(call.method, &row.key, row.kind, u32::MAX);
        }
        for subject in &good {
            call.act.ask(&world, subject).await;
        }
        Self { world, call, rows, good }
    }

    fn goals(&self, subjects: &[String]) -> Goals {
        let mut all = goals(subjects, self.call.act.after());
        all.extend(goals(&["elder".to_owned()], Act::Snapshot.after()));
        all
    }

    /// The good ones are served while the bad ones are bad.
    async fn serves_the_others(&self) {
        let ours = |whose: &str| whose == "elder" || self.good.iter().any(|subject| subject == whose);
        let at = format!("{} of the others", self.call.method);
        self.world.settles(&self.goals(&self.good), ours, &at).await;
        for row in &self.rows {
            if matches!(row.kind, FaultKind::Hang) {
                let calls = self.world.fake.times(self.call.method, &row.key).len();
                assert!(calls <= 1, "the others waited for what hangs: {calls} calls");
            }
        }
    }

    /// Every failure is told, and tried again after growing pauses.
    async fn records_an_event_and_backs_off(&self) {
        for row in self.rows.iter().filter(|row| row.said.is_some()) {
            let said = row.said.as_deref().unwrap();
            match self.call.report {
                FailureReport::Event(reason) => {
                    self.world.server.event(reason, said).await;
                }
                FailureReport::Attachment => {
                    let reported = |attachment: Option<&VolumeAttachment>| {
                        let status = attachment.and_then(|attachment| attachment.status.clone());
                        let status = status.unwrap_or_default();
                        [status.attach_error, status.detach_error]
                            .into_iter()
                            .flatten()
                            .any(|error| error.message.is_some_and(|message| message.contains(said)))
                    };
                    self.world.server.wait(self.world.server.all(), &row.subject, said, reported).await;
                }
            }
            let times = self.calls(row).await;
            // One try may come at once, if something changed during the one before.
            let pauses = (0..TRIES - 2).map(|number| BACKOFF.first * (1 << number)).sum::<Duration>();
            let took = times[TRIES - 1] - times[0];
            assert!(took >= pauses, "{row:?}: {TRIES} tries within {took:?}, not {pauses:?}");
        }
    }

    /// The first calls for a row.
    async fn calls(&self, row: &Row) -> Vec<Instant> {
        let waiting = async {
            loop {
                let called = self.world.fake.next_call();
                let times = self.world.fake.times(self.call.method, &row.key);
                if times.len() >= TRIES {
                    return times[..TRIES].to_vec();
                }
                called.await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(60), waiting).await;
        in_time.unwrap_or_else(|_| {
            let times = self.world.fake.times(self.call.method, &row.key);
            panic!("{row:?} was tried only {} times", times.len())
        })
    }

    /// Once the driver behaves, all are served; and then all goes.
    async fn recovers(&self, life: Loops) {
        self.world.fake.lift_faults();
        let mut all = self.good.clone();
        all.extend(self.rows.iter().map(|row| row.subject.clone()));
        let method = self.call.method;
        self.world.settles(&self.goals(&all), |_| true, &format!("{method} after all")).await;
        self.world.clear().await;
        self.world.settles(&Goals::new(), |_| true, &format!("{method}, all deleted")).await;
        life.stop().await;
        self.world.settles(&Goals::new(), |_| true, &format!("{method}, all stopped")).await;
    }
}

fn settings() -> Settings {
    Settings { workers: 4, retry: BACKOFF, ..Settings::default() }
}

async fn misbehaves(call: Call) {
    let trial = Trial::prepare(call, faults(&call)).await;
    let driver = connect(&trial.world.fake, &Power::on());
    let life = start_all(&trial.world.server.client, &driver, &settings());
    trial.serves_the_others().await;
    trial.records_an_event_and_backs_off().await;
    trial.recovers(life).await;
}

/// The driver dies of a call, each time, before or after the work; it is back at once.
async fn crashes(call: Call) {
    let reported = Some("rpc error: code = Unavailable desc = ".to_owned());
    let kinds = [false, true].map(|done| (FaultKind::Crash { done }, reported.clone()));
    let trial = Trial::prepare(call, rows(kinds.to_vec())).await;
    let socket = CrashingSocket::serve(&trial.world.fake).await;
    let driver = Driver::connect(&socket.endpoint);
    let life = start_all(&trial.world.server.client, &driver, &settings());
    trial.serves_the_others().await;
    trial.records_an_event_and_backs_off().await;
    trial.recovers(life).await;
}

macro_rules! calls {
    ($($call:ident: $misbehaves:ident, $crashes:ident,)*) => { $(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $misbehaves() {
            misbehaves($call).await;
        }

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $crashes() {
            crashes($call).await;
        }
    )* };
}

calls! {
    CREATE_VOLUME: bad_answers_to_create_volume_harm_no_other, a_crash_in_create_volume_harms_no_other,
    DELETE_VOLUME: bad_answers_to_delete_volume_harm_no_other, a_crash_in_delete_volume_harms_no_other,
    PUBLISH: bad_answers_to_publish_harm_no_other, a_crash_in_publish_harms_no_other,
    UNPUBLISH: bad_answers_to_unpublish_harm_no_other, a_crash_in_unpublish_harms_no_other,
    EXPAND: bad_answers_to_expand_harm_no_other, a_crash_in_expand_harms_no_other,
    MODIFY: bad_answers_to_modify_harm_no_other, a_crash_in_modify_harms_no_other,
    CREATE_SNAPSHOT: bad_answers_to_create_snapshot_harm_no_other, a_crash_in_create_snapshot_harms_no_other,
    DELETE_SNAPSHOT: bad_answers_to_delete_snapshot_harm_no_other, a_crash_in_delete_snapshot_harms_no_other,
    CREATE_GROUP: bad_answers_to_create_group_harm_no_other, a_crash_in_create_group_harms_no_other,
    DELETE_GROUP: bad_answers_to_delete_group_harm_no_other, a_crash_in_delete_group_harms_no_other,
}

/// Waits until ListVolumes was called so often more, and gives the time that took.
async fn listed(world: &World, more: usize) -> Duration {
    let (begun, wanted) = (Instant::now(), world.fake.count("ListVolumes") + more);
    let waiting = async {
        loop {
            let called = world.fake.next_call();
            if world.fake.count("ListVolumes") >= wanted {
                return begun.elapsed();
            }
            called.await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting).await.unwrap()
}

fn attentive() -> Settings {
    Settings { reconcile: Duration::from_millis(50), ..settings() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_list_volumes_omits_is_attached_again_and_never_detached() {
    let world = World::start().await;
    let subjects = ["bad".to_owned(), "good".to_owned()];
    let driver = connect(&world.fake, &Power::on());
    let life = start_all(&world.server.client, &driver, &attentive());
    // What is attached already when it is left out.
    Act::Detach.prepare(&world, &subjects).await;
    let calls = |volume: &str| world.fake.times("ControllerPublishVolume", volume).len();
    let (bad, good) = (world.uid("bad").await, world.uid("good").await);
    world.fake.storage.unlisted.lock().push(bad.clone());
    let before = (calls(&bad), calls(&good));
    listed(&world, 4).await;
    world.settles(&goals(&subjects, Act::Attach.after()), |_| true, "omitted").await;
    assert!(calls(&bad) > before.0, "what the driver contradicts is attached again");
    assert_eq!(calls(&good), before.1);
    assert_eq!(world.fake.count("ControllerUnpublishVolume"), 0);
    life.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_only_said_to_be_attached_is_attached_when_the_driver_is_asked() {
    let world = World::start().await;
    let subjects = ["bad".to_owned(), "good".to_owned()];
    let driver = connect(&world.fake, &Power::on());
    let life = start_all(&world.server.client, &driver, &attentive());
    Act::Attach.prepare(&world, &subjects).await;
    let bad = world.uid("bad").await;
    world.fake.fail("ControllerPublishVolume", &bad, FaultKind::Lie(Lie::Idle), 1);
    for subject in &subjects {
        Act::Attach.ask(&world, subject).await;
    }
    let reported = |attachment: Option<&VolumeAttachment>| {
        attachment.and_then(|attachment| attachment.status.as_ref()).is_some_and(|status| status.attached)
    };
    world.server.wait(world.server.all(), "bad", "attached", reported).await;
    // The driver's own change is nothing that Kubernetes hears of.
    listed(&world, 4).await;
    world.settles(&goals(&subjects, Act::Attach.after()), |_| true, "asked").await;
    // A list that is older than the second call may ask for a third.
    assert!(world.fake.times("ControllerPublishVolume", &bad).len() >= 2);
    life.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_volumes_that_never_ends_is_given_up() {
    let world = World::start().await;
    world.fake.fail("ListVolumes", "", FaultKind::Lie(Lie::Endless), u32::MAX);
    let driver = connect(&world.fake, &Power::on());
    let life = start_all(&world.server.client, &driver, &attentive());
    listed(&world, 1).await;
    // Two pages each time, the second of which gives the token again.
    let took = listed(&world, 5).await;
    assert!(took >= 2 * attentive().reconcile, "it was asked for pages without a pause: {took:?}");
    life.stop().await;
}
