//! The volume manager on an API server in process, with a kind of volume that fails on demand.

use std::collections::VecDeque;
use std::path::PathBuf;

use berth_apiserver::rest;
use berth_testkit::EmbeddedServer;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaimStatus};
use kube::api::{Api, ListParams};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::plugin::{Certainty, Device, Placed, PodVolume, Source};

const LONG: Duration = Duration::from_secs(30);

/// A kind of volume with a device; notes every call and answers as it is told.
#[derive(Default)]
struct Fake {
    calls: watch::Sender<Vec<String>>,
    answers: Mutex<HashMap<&'static str, VecDeque<Certainty>>>,
    staged: Vec<Device>,
    placed: Vec<Placed>,
}

impl Fake {
    fn call(&self, name: &'static str, about: &str) -> Result<(), Failed> {
        self.calls.send_modify(|calls| calls.push(format!("{name} {about}")));
        let answer = self.answers.lock().get_mut(name).and_then(VecDeque::pop_front);
        answer.map_or(Ok(()), |certainty| Err(Failed { certainty, message: format!("{name} does not work") }))
    }

    fn fail(&self, name: &'static str, answers: &[Certainty]) {
        self.answers.lock().insert(name, answers.iter().copied().collect());
    }
}

fn device() -> Device {
    Device { unique_name: "fake/dev".to_owned(), attach: true, stage: true }
}

#[async_trait]
impl Plugin for Fake {
    fn name(&self) -> &'static str {
        "test/fake"
    }

    fn serves(&self, source: &Source) -> bool {
        match source {
            Source::Inline(volume) => volume.empty_dir.is_some(),
            Source::Persistent { .. } => true,
        }
    }

    fn device(&self, _: &PodVolume) -> Result<Option<Device>, Failed> {
        self.call("device", "").map(|()| Some(device()))
    }

    async fn attach_limit(&self, _: &PodVolume) -> Option<String> {
        self.answers.lock().get("attach_limit").map(|_| "no slot is free".to_owned())
    }

    async fn stage(&self, _: &PodVolume) -> Result<(), Failed> {
        self.call("stage", "fake/dev")
    }

    async fn unstage(&self, device: &str) -> Result<(), Failed> {
        self.call("unstage", device)
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        self.call("set_up", volume.pod_uid()).map(|()| Ready { path: PathBuf::from("/there") })
    }

    async fn expand(&self, _: &PodVolume) -> Result<Option<u64>, Failed> {
        self.call("expand", "").map(|()| None)
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        self.call("tear_down", &placed.pod_uid)
    }

    fn staged(&self) -> Vec<Device> {
        self.staged.clone()
    }

    fn placed(&self) -> Vec<Placed> {
        self.placed.clone()
    }

    fn device_of(&self, _: &Placed) -> Option<Device> {
        Some(device())
    }
}

/// A node on which a device is attached as soon as it is in use, unless it is told otherwise.
struct Node {
    plugin: Arc<Fake>,
    attached: watch::Sender<bool>,
}

#[async_trait]
impl Attachments for Node {
    async fn in_use(&self, unique_name: &str) -> Result<(), Failed> {
        self.plugin.call("in_use", unique_name)
    }

    fn not_in_use(&self, unique_name: &str) {
        self.plugin.call("not_in_use", unique_name).unwrap();
    }

    fn is_attached(&self, _: &str) -> bool {
        *self.attached.borrow()
    }
}

struct World {
    plugin: Arc<Fake>,
    node: Arc<Node>,
    volumes: Arc<Volumes>,
    cluster: Cluster,
    server: EmbeddedServer,
    shutdown: CancellationToken,
    changed: watch::Receiver<usize>,
}

impl Drop for World {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl World {
    async fn new(plugin: Fake) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self::on(plugin, directory).await
    }

    async fn on(plugin: Fake, directory: tempfile::TempDir) -> Self {
        let server = EmbeddedServer::open(directory, rest::Options::default()).await;
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(server.client(), shutdown.clone());
        let plugin = Arc::new(plugin);
        let node = Arc::new(Node { plugin: plugin.clone(), attached: watch::channel(true).0 });
        let (sender, changed) = watch::channel(0);
        let volumes = Volumes::new(Options {
            cluster: cluster.clone(),
            layout: Layout::new(server.directory()),
            plugins: vec![plugin.clone()],
            node: node.clone(),
            recorder: Recorder::new(&cluster, "kubelet", "n"),
            attach_timeout: Duration::from_millis(100),
            changed: Box::new(move |_| sender.send_modify(|count| *count += 1)),
        });
        Self { plugin, node, volumes, cluster, server, shutdown, changed }
    }

    fn run(&self) {
        tokio::spawn(self.volumes.clone().run());
    }

    /// Waits until the calls since `from` are these.
    async fn calls(&self, from: usize, expected: &[&str]) -> usize {
        let mut calls = self.plugin.calls.subscribe();
        let done = calls.wait_for(|calls| calls.len() >= from + expected.len());
        let calls = match tokio::time::timeout(LONG, done).await {
            Ok(calls) => calls.unwrap().clone(),
            Err(_) => self.plugin.calls.borrow().clone(),
        };
        assert_eq!(calls.get(from..).unwrap_or_default(), expected, "all: {calls:?}");
        calls.len()
    }

    /// Waits until nothing is left of the device. The calls since `from` are one that fails, however often it was tried
    /// again meanwhile, and then these.
    async fn undone(&self, from: usize, failing: &str, expected: &[&str]) {
        let mut calls = self.plugin.calls.subscribe();
        let done = calls.wait_for(|calls| calls.last().is_some_and(|last| last == "not_in_use fake/dev"));
        let calls = match tokio::time::timeout(LONG, done).await {
            Ok(calls) => calls.unwrap().clone(),
            Err(_) => self.plugin.calls.borrow().clone(),
        };
        let undoing: Vec<_> = calls[from..].iter().skip_while(|call| *call == failing).collect();
        assert_eq!(undoing, expected, "all: {calls:?}");
    }

    async fn until(&self, wanted: impl Fn(&Volumes) -> bool) {
        let mut changed = self.changed.clone();
        let done = changed.wait_for(|_| wanted(&self.volumes));
        tokio::time::timeout(LONG, done).await.unwrap().unwrap();
    }

    async fn has_event(&self, reason: &str, part: &str) {
        let api: Api<Event> = Api::namespaced(self.cluster.client().clone(), "default");
        let found = async {
            loop {
                let events = api.list(&ListParams::default()).await.unwrap();
                let is_expected = |event: &Event| {
                    event.reason.as_deref() == Some(reason) && event.message.as_ref().unwrap().contains(part)
                };
                if events.items.iter().any(is_expected) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, found).await.unwrap();
    }
}

fn pod(name: &str) -> Arc<Pod> {
    let container =
        json!({ "name": "main", "image": "i", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] });
    let pod = json!({
        "metadata": { "name": name, "namespace": "default", "uid": name },
        "spec": { "containers": [container], "volumes": [{ "name": "v", "emptyDir": {} }, { "name": "unused" }] },
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

const FIRST: [&str; 4] = ["device ", "in_use fake/dev", "stage fake/dev", "set_up a"];
const LAST: [&str; 3] = ["tear_down a", "unstage fake/dev", "not_in_use fake/dev"];
/// So often that no try of a test succeeds.
const ALWAYS: usize = 1000;

#[tokio::test]
async fn a_volume_comes_step_by_step_and_goes_in_reverse() {
    let world = World::new(Fake::default()).await;
    world.run();
    world.volumes.want(&pod("a"));
    world.until(|volumes| volumes.ready("a").is_some()).await;
    let ready = world.volumes.ready("a").unwrap();
    assert_eq!(ready.keys().collect::<Vec<_>>(), ["v"]);
    let after = world.calls(0, &FIRST).await;
    // A second pod shares the device, which stays until both have left.
    world.volumes.want(&pod("b"));
    let after = world.calls(after, &["device ", "set_up b"]).await;
    world.volumes.unwant("b");
    let after = world.calls(after, &["tear_down b"]).await;
    world.volumes.unwant("a");
    world.calls(after, &LAST).await;
    world.until(|volumes| volumes.is_gone("a") && volumes.is_gone("b")).await;
    assert!(world.volumes.state().groups.is_empty(), "nothing is kept of pods that are gone");
}

#[tokio::test]
async fn a_device_that_is_not_attached_is_waited_for_and_given_up_with_its_pod() {
    let world = World::new(Fake::default()).await;
    world.node.attached.send_replace(false);
    world.run();
    world.volumes.want(&pod("a"));
    let after = world.calls(0, &["device ", "in_use fake/dev"]).await;
    world.volumes.unwant("a");
    let after = world.calls(after, &["not_in_use fake/dev"]).await;
    world.volumes.want(&pod("a"));
    let after = world.calls(after, &["device ", "in_use fake/dev"]).await;
    world.node.attached.send_replace(true);
    world.volumes.attachment_changed("fake/dev");
    world.calls(after, &["stage fake/dev", "set_up a"]).await;
}

#[tokio::test]
async fn a_pod_waits_long_for_a_device_and_not_at_all_for_one_that_a_full_node_never_gets() {
    let world = World::new(Fake::default()).await;
    world.node.attached.send_replace(false);
    world.run();
    world.volumes.want(&pod("a"));
    world
        .has_event("FailedMount", "MountVolume.WaitForAttach failed for volume \"v\" : timed out waiting")
        .await;
    assert_eq!(world.volumes.refused("a"), None);
    world.plugin.fail("attach_limit", &[]);
    world.volumes.want(&pod("b"));
    world.until(|volumes| volumes.refused("b").is_some()).await;
    let expected = "Node has reached its volume attachment limit, rejecting pod. unmounted volumes=[v], \
                    unattached volumes=[v], failed to process volumes=[]: no slot is free";
    assert_eq!(world.volumes.refused("b").unwrap(), expected);
    // Nothing of it stays with the pod's wishes.
    world.volumes.unwant("b");
    assert_eq!(world.volumes.refused("b"), None);
}

/// Waits until pods that come now were refused the device, the second of them after everybody who waited when it came.
async fn refuse_to_others(world: &World) {
    for name in ["b", "c"] {
        world.volumes.want(&pod(name));
        world.until(|volumes| volumes.refused(name).is_some()).await;
    }
}

#[tokio::test]
async fn a_pod_that_has_its_volumes_is_not_ended_when_another_gets_none() {
    let world = World::new(Fake::default()).await;
    world.run();
    world.volumes.want(&pod("a"));
    world.until(|volumes| volumes.ready("a").is_some()).await;
    // As if the device had been detached by force.
    world.node.attached.send_replace(false);
    world.plugin.fail("attach_limit", &[]);
    refuse_to_others(&world).await;
    assert_eq!(world.volumes.refused("a"), None);
    assert!(world.volumes.ready("a").is_some());

    // Nor when a debug container wants one more volume of the pod, which then has an event.
    let mut debugged = (*pod("a")).clone();
    let spec = debugged.spec.as_mut().unwrap();
    spec.volumes.as_mut().unwrap()[1] =
        serde_json::from_value(json!({ "name": "unused", "emptyDir": {} })).unwrap();
    let debug =
        json!([{ "name": "d", "image": "i", "volumeMounts": [{ "name": "unused", "mountPath": "/u" }] }]);
    spec.ephemeral_containers = serde_json::from_value(debug).unwrap();
    world.volumes.unwant("b");
    world.volumes.unwant("c");
    world.volumes.want(&Arc::new(debugged));
    world.has_event("FailedMount", "MountVolume.WaitForAttach failed for volume \"unused\"").await;
    refuse_to_others(&world).await;
    assert_eq!(world.volumes.refused("a"), None);
}

#[tokio::test]
async fn a_pod_that_runs_since_before_a_restart_is_not_ended_when_its_device_is_not_attached() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(directory.path().join("pods/a/volumes/test~fake/v")).unwrap();
    let world = World::on(Fake { staged: vec![device()], ..Fake::default() }, directory).await;
    world.node.attached.send_replace(false);
    world.plugin.fail("attach_limit", &[]);
    world.volumes.hold("a");
    world.volumes.want(&pod("a"));
    world.run();
    world.has_event("FailedMount", "MountVolume.WaitForAttach failed for volume \"v\"").await;
    refuse_to_others(&world).await;
    assert_eq!(world.volumes.refused("a"), None);
}

#[tokio::test]
async fn each_failure_has_an_event_is_tried_again_and_undone_if_it_may_have_happened() {
    use Certainty::{Final, Uncertain, Unchanged};
    for (certainty, undone) in [(Final, false), (Unchanged, false), (Uncertain, true)] {
        let world = World::new(Fake::default()).await;
        world.plugin.fail("set_up", &[certainty; ALWAYS]);
        world.run();
        world.volumes.want(&pod("a"));
        let after = world.calls(0, &FIRST).await;
        world
            .has_event("FailedMount", "MountVolume.SetUp failed for volume \"v\" : set_up does not work")
            .await;
        assert!(world.volumes.ready("a").is_none());
        assert_eq!(world.volumes.state().failed().1.len(), 1);
        world.volumes.unwant("a");
        world.undone(after, "set_up a", if undone { &LAST } else { &LAST[1..] }).await;
        world.until(|volumes| volumes.is_gone("a")).await;
    }
}

#[tokio::test]
async fn a_stage_that_may_have_happened_is_undone_and_others_are_not() {
    use Certainty::{Final, Uncertain, Unchanged};
    for (certainty, undone) in [(Final, false), (Unchanged, false), (Uncertain, true)] {
        let world = World::new(Fake::default()).await;
        world.plugin.fail("stage", &[certainty; ALWAYS]);
        world.run();
        world.volumes.want(&pod("a"));
        let after = world.calls(0, &FIRST[..3]).await;
        world.has_event("FailedMount", "MountVolume.MountDevice failed for volume \"v\"").await;
        world.volumes.unwant("a");
        world.undone(after, "stage fake/dev", if undone { &LAST[1..] } else { &LAST[2..] }).await;
    }
}

#[tokio::test]
async fn an_event_names_the_kind_of_a_volume_that_is_not_supported() {
    let world = World::new(Fake::default()).await;
    world.run();
    let mut pod = pod("a").as_ref().clone();
    let source = json!({ "name": "v", "iscsi": { "targetPortal": "p", "iqn": "i", "lun": 0 } });
    pod.spec.as_mut().unwrap().volumes = Some(vec![serde_json::from_value(source).unwrap()]);
    world.volumes.want(&Arc::new(pod));
    world.has_event("FailedMount", "volume v: iscsi is not supported").await;
}

#[tokio::test]
async fn what_failed_is_tried_again_and_at_once_when_a_driver_comes() {
    let world = World::new(Fake::default()).await;
    world.plugin.fail("device", &[Certainty::Unchanged; 2]);
    world.plugin.fail("set_up", &[Certainty::Uncertain]);
    world.plugin.fail("tear_down", &[Certainty::Uncertain]);
    world.run();
    world.volumes.want(&pod("a"));
    world.has_event("FailedMount", "device does not work").await;
    world.volumes.retry();
    world.until(|volumes| volumes.ready("a").is_some()).await;
    let expected =
        ["device ", "device ", "device ", "in_use fake/dev", "stage fake/dev", "set_up a", "set_up a"];
    let after = world.calls(0, &expected).await;
    world.volumes.unwant("a");
    world.calls(after, &["tear_down a", "tear_down a", "unstage fake/dev", "not_in_use fake/dev"]).await;
}

#[tokio::test]
async fn a_refresh_that_fails_takes_nothing_away() {
    let world = World::new(Fake::default()).await;
    world.run();
    world.volumes.want(&pod("a"));
    world.until(|volumes| volumes.ready("a").is_some()).await;
    let after = world.calls(0, &FIRST).await;
    world.plugin.fail("set_up", &[Certainty::Final]);
    world.volumes.refresh("a");
    world.has_event("FailedMount", "set_up does not work").await;
    assert!(world.volumes.ready("a").is_some());
    world.calls(after, &["set_up a", "set_up a"]).await;
}

/// A pod whose claim is smaller than its volume: there is something to grow.
async fn pod_that_grows(world: &World, name: &str) -> Arc<Pod> {
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": { "name": "c", "namespace": "default" },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeName": "pv", "resources": { "requests": { "storage": "2Gi" } },
        },
    }))
    .unwrap();
    let claim = world.cluster.create(&claim).await.unwrap();
    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": { "name": "pv" },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "2Gi" },
            "csi": { "driver": "d", "volumeHandle": "h" },
            "claimRef": { "namespace": "default", "name": "c", "uid": claim.uid() },
        },
    }))
    .unwrap();
    world.cluster.create(&volume).await.unwrap();
    let status = json!({ "phase": "Bound", "capacity": { "storage": "1Gi" } });
    let bind = |claim: &mut PersistentVolumeClaim| {
        claim.status = Some(serde_json::from_value(status.clone()).unwrap());
    };
    world.cluster.update_status(claim.as_ref(), bind).await.unwrap();
    pod_of_claim(name)
}

fn pod_of_claim(name: &str) -> Arc<Pod> {
    let mut pod = (*pod(name)).clone();
    pod.spec.as_mut().unwrap().volumes =
        serde_json::from_value(json!([{ "name": "v", "persistentVolumeClaim": { "claimName": "c" } }]))
            .unwrap();
    Arc::new(pod)
}

#[tokio::test]
async fn nothing_grows_while_containers_are_started_with_it() {
    let world = World::new(Fake::default()).await;
    let pod = pod_that_grows(&world, "a").await;
    world.volumes.want(&pod);
    assert_eq!(world.volumes.find("a", "v").await, Next::Done);
    let starting = world.volumes.steady("a").await;
    assert_eq!(starting.len(), 1);
    let grown = |calls: &Vec<String>| calls.iter().any(|call| call == "expand ");
    let group = Group::Device("fake/dev".to_owned());
    let mut settled = std::pin::pin!(world.volumes.settle(&group));
    let early = tokio::time::timeout(Duration::from_millis(300), &mut settled).await;
    assert!(early.is_err() && !grown(&world.plugin.calls.borrow()));
    drop(starting);
    settled.await;
    assert!(grown(&world.plugin.calls.borrow()), "{:?}", world.plugin.calls.borrow());
}

/// Waits until the claim's status is as `wanted` says.
async fn claim_until(world: &World, wanted: impl Fn(&PersistentVolumeClaimStatus) -> bool) {
    let key = Key::new("default", "c");
    let found = async {
        loop {
            let claim = world.cluster.fetch::<PersistentVolumeClaim>(&key).await.unwrap().unwrap();
            if claim.status.as_ref().is_some_and(&wanted) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, found).await.expect("the claim's status stays another");
}

/// Size, resize status and the message of the failure, as the claim's status has them.
fn resize(status: &PersistentVolumeClaimStatus) -> (&str, &str, &str) {
    let capacity = status.capacity.as_ref().map_or("", |all| all["storage"].0.as_str());
    let resize = status.allocated_resource_statuses.as_ref().and_then(|all| all.get("storage"));
    let conditions = status.conditions.iter().flatten();
    let failure = conditions.into_iter().find(|condition| condition.type_ == "NodeResizeError");
    let message = failure.and_then(|condition| condition.message.as_deref()).unwrap_or_default();
    (capacity, resize.map_or("", String::as_str), message)
}

#[tokio::test]
async fn growth_that_is_refused_while_in_use_is_pending_until_the_next_stage() {
    let world = World::new(Fake::default()).await;
    let first = pod_that_grows(&world, "a").await;
    world.plugin.fail("expand", &[Certainty::Unchanged]);
    world.run();
    world.volumes.want(&first);
    world
        .has_event("VolumeResizeFailed", "expand does not work; the volume is in use, and is grown when")
        .await;
    claim_until(&world, |status| {
        let (size, resize, message) = resize(status);
        size == "1Gi" && resize == "NodeResizePending" && message.contains("is grown when it is staged")
    })
    .await;
    let expands = || world.plugin.calls.borrow().iter().filter(|call| *call == "expand ").count();
    // Looked at again, as after every change of the claim.
    for _ in 0..2 {
        assert_eq!(world.volumes.find("a", "v").await, Next::Done);
        world.volumes.settle(&Group::Device("fake/dev".to_owned())).await;
    }
    // A pod that comes while the first still has it changes nothing.
    let second = pod_of_claim("b");
    world.volumes.want(&second);
    world.until(|volumes| volumes.ready("b").is_some()).await;
    world.volumes.unwant("a");
    world.until(|volumes| volumes.is_gone("a")).await;
    world.volumes.settle(&Group::Device("fake/dev".to_owned())).await;
    assert_eq!(expands(), 1);
    world.volumes.unwant("b");
    world.until(|volumes| volumes.is_gone("b")).await;
    world.volumes.want(&second);
    claim_until(&world, |status| resize(status) == ("2Gi", "", "")).await;
    assert_eq!(expands(), 2);
}

#[tokio::test]
async fn growth_that_is_refused_for_good_is_infeasible_and_tried_no_more() {
    let world = World::new(Fake::default()).await;
    let pod = pod_that_grows(&world, "a").await;
    world.plugin.fail("expand", &[Certainty::Final]);
    world.run();
    world.volumes.want(&pod);
    claim_until(&world, |status| {
        let (size, resize, message) = resize(status);
        size == "1Gi" && resize == "NodeResizeInfeasible" && message.contains("expand does not work")
    })
    .await;
    assert_eq!(world.volumes.find("a", "v").await, Next::Done);
    world.volumes.settle(&Group::Device("fake/dev".to_owned())).await;
    let calls = world.plugin.calls.borrow().clone();
    assert_eq!(calls.iter().filter(|call| *call == "expand ").count(), 1, "{calls:?}");
}

#[tokio::test]
async fn growth_that_failed_is_tried_again_and_the_claim_grows_with_it() {
    let world = World::new(Fake::default()).await;
    let pod = pod_that_grows(&world, "a").await;
    world.plugin.fail("expand", &[Certainty::Uncertain]);
    world.run();
    world.volumes.want(&pod);
    world.has_event("VolumeResizeFailed", "expand does not work").await;
    claim_until(&world, |status| resize(status) == ("2Gi", "", "")).await;
}

#[tokio::test]
async fn after_a_restart_what_pods_want_is_kept_and_the_rest_undone() {
    let directory = tempfile::tempdir().unwrap();
    for uid in ["a", "gone", "held"] {
        std::fs::create_dir_all(directory.path().join("pods").join(uid).join("volumes/test~fake/v")).unwrap();
    }
    let world = World::on(Fake { staged: vec![device()], ..Fake::default() }, directory).await;
    assert_eq!(world.volumes.devices(), ["fake/dev"]);
    world.volumes.want(&pod("a"));
    for uid in ["a", "held"] {
        world.volumes.hold(uid);
    }
    assert!(world.plugin.calls.borrow().is_empty(), "nothing is done before all pods were heard");
    world.run();
    world.until(|volumes| volumes.ready("a").is_some() && volumes.is_gone("gone")).await;
    let mut calls = world.plugin.calls.borrow().clone();
    calls.sort();
    assert_eq!(calls, ["device ", "set_up a", "stage fake/dev", "tear_down gone"]);
    remove_pod(&Layout::new(world.server.directory()), "gone").unwrap();
    assert!(!world.server.directory().join("pods/gone").exists());
    assert!(!world.volumes.is_gone("held"), "its containers still run");
    world.volumes.unwant("held");
    let after = world.calls(calls.len(), &["tear_down held"]).await;
    world.until(|volumes| volumes.is_gone("held")).await;
    world.volumes.unwant("a");
    world.calls(after, &LAST).await;
}

#[tokio::test]
async fn a_volume_that_is_held_keeps_its_device() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(directory.path().join("pods/held/volumes/test~fake/v")).unwrap();
    let world = World::on(Fake { staged: vec![device()], ..Fake::default() }, directory).await;
    world.volumes.hold("held");
    let group = Group::Device("fake/dev".to_owned());
    assert_eq!(world.volumes.settle(&group).await, Next::Done);
    assert!(world.plugin.calls.borrow().is_empty(), "nothing is taken from under what runs");
    world.volumes.unwant("held");
    world.run();
    world.calls(0, &["tear_down held", "unstage fake/dev", "not_in_use fake/dev"]).await;
}

#[tokio::test]
async fn what_stands_outside_the_pods_directories_is_undone_too() {
    let placed = |uid: &str| Placed {
        plugin: "test/fake".to_owned(),
        pod_uid: uid.to_owned(),
        spec_name: "v".to_owned(),
        block: true,
    };
    let fake = Fake { staged: vec![device()], placed: vec![placed("gone")], ..Fake::default() };
    let world = World::new(fake).await;
    assert!(!world.volumes.is_gone("gone"));
    world.run();
    world.calls(0, &["tear_down gone", "unstage fake/dev", "not_in_use fake/dev"]).await;
}

#[test]
fn nothing_is_removed_from_what_is_mounted_in_a_pods_directory() {
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = berth_host::mount::unmount_lazily(&self.0);
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::new(directory.path());
    let (volume, users) = (layout.pod_volume("a", "test/fake", "v"), directory.path().join("users"));
    for path in [&volume, &users.join("empty")] {
        std::fs::create_dir_all(path).unwrap();
    }
    berth_host::mount::bind(&users, &volume, berth_host::mount::Attributes::default()).unwrap();
    let mounted = Unmount(volume.clone());
    let error = remove_pod(&layout, "a").unwrap_err().to_string();
    assert_eq!(error, format!("remove the mount point {}", volume.display()));
    assert!(users.join("empty").exists());
    drop(mounted);
    remove_pod(&layout, "a").unwrap();
}

#[test]
fn a_pod_directory_with_data_in_a_volume_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let layout = Layout::new(directory.path());
    let volume = layout.pod_volume("a", "test/fake", "v");
    std::fs::create_dir_all(&volume).unwrap();
    std::fs::write(volume.join("data"), "").unwrap();
    assert!(remove_pod(&layout, "a").is_err());
    assert!(volume.join("data").exists());
    std::fs::remove_file(volume.join("data")).unwrap();
    remove_pod(&layout, "a").unwrap();
    remove_pod(&layout, "a").unwrap();
    assert!(!layout.pod("a").exists());
}
