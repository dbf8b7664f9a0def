//! An API server, bound claims, and a driver that tells of their health in the way that it is asked to.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use berth_csi::{PluginService, v1};
use berth_testkit::{
    Capabilities, EmbeddedServer, FakeDriver, FaultKind, Kind, Loops, RecordedCall, until_any,
};
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, ListParams, PostParams};
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use prost::Message as _;
use serde_json::{Value, json};
use tonic::{Code, Status};

use super::super::{Options, run};
use crate::driver::Driver;

const DRIVER: &str = "test.berth.dev";
/// The methods by which a monitor asks for the health of volumes.
const METHODS: [&str; 4] =
    ["ControllerListVolumeHealth", "ControllerGetVolumeHealth", "ListVolumes", "ControllerGetVolume"];

/// What the driver announces, by number: one of them is in no message any more.
#[derive(Debug, Clone, Copy)]
pub(super) enum Capability {
    ListVolumes = 3,
    VolumeCondition = 11,
    GetVolume = 12,
    GetVolumeHealth = 16,
    ListVolumeHealth = 17,
}

/// The health of the driver's volumes.
#[derive(Default)]
struct Health {
    ill: Mutex<BTreeMap<String, String>>,
    handles: Mutex<Vec<String>>,
}

pub(super) struct Stage {
    client: Client,
    requests: Arc<AtomicUsize>,
    driver: Arc<FakeDriver>,
    health: Arc<Health>,
    _server: EmbeddedServer,
}

impl Stage {
    pub(super) async fn set(capabilities: &[Capability]) -> Self {
        let server = EmbeddedServer::start().await;
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = requests.clone();
        let client = server.observed_client(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let driver = FakeDriver::new(DRIVER);
        *driver.capabilities.lock() = Capabilities {
            plugin: vec![PluginService::ControllerService],
            controller: capabilities.iter().map(|capability| *capability as i32).collect(),
            ..Capabilities::default()
        };
        let health = Arc::new(Health::default());
        health.answer_on(&driver);
        Self { client, requests, driver, health, _server: server }
    }

    /// A claim bound to a volume of the driver, whose id is the claim's name.
    pub(super) async fn bound_claim(&self, name: &str) -> PersistentVolumeClaim {
        self.health.handles.lock().push(name.to_owned());
        let volume = format!("pv-{name}");
        let common = json!({ "accessModes": ["ReadWriteOnce"], "storageClassName": "" });
        let mut spec = common.clone();
        spec["volumeName"] = json!(volume);
        spec["resources"] = json!({ "requests": { "storage": "1Gi" } });
        let claim: PersistentVolumeClaim =
            self.create(json!({ "metadata": { "name": name, "namespace": "default" }, "spec": spec })).await;
        let mut spec = common;
        spec["capacity"] = json!({ "storage": "1Gi" });
        spec["csi"] = json!({ "driver": DRIVER, "volumeHandle": name });
        spec["claimRef"] = json!({ "namespace": "default", "name": name, "uid": claim.uid() });
        self.create::<PersistentVolume>(json!({ "metadata": { "name": volume }, "spec": spec })).await;
        self.patch_status::<PersistentVolume>(&volume, json!({ "status": { "phase": "Bound" } })).await;
        claim
    }

    /// Creates an object, in the namespace `default` if it has one.
    pub(super) async fn create<K: Kind>(&self, object: Value) -> K {
        let object: K = serde_json::from_value(object).unwrap();
        let path = K::url_path(&(), object.meta().namespace.as_deref());
        let body = serde_json::to_vec(&object).unwrap();
        let request = kube::core::Request::new(path).create(&PostParams::default(), body).unwrap();
        self.client.request(request).await.unwrap()
    }

    pub(super) fn api<K: Kind>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    pub(super) async fn patch_status<K: Kind>(&self, name: &str, change: Value) {
        berth_testkit::patch_status(&self.api::<K>(), name, change).await;
    }

    /// Lets a volume be ill, or well.
    pub(super) fn ail(&self, handle: &str, wrong: Option<&str>) {
        let mut ill = self.health.ill.lock();
        match wrong {
            Some(wrong) => ill.insert(handle.to_owned(), wrong.to_owned()),
            None => ill.remove(handle),
        };
    }

    /// Lets the driver refuse every call, or none.
    pub(super) fn refuse(&self, refuse: bool) {
        self.driver.lift_faults();
        for method in METHODS.into_iter().filter(|_| refuse) {
            self.driver.fail(method, "", FaultKind::Code(Code::Internal), u32::MAX);
        }
    }

    /// Waits until the driver was asked so often from now on.
    pub(super) async fn rounds(&self, more: usize) {
        let asked = |calls: &[RecordedCall]| {
            calls.iter().filter(|call| METHODS.contains(&call.method.as_str())).count()
        };
        let until = asked(&self.driver.calls()) + more;
        self.driver.until_calls(|calls| asked(calls) >= until).await;
    }

    pub(super) fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }

    pub(super) async fn events(&self) -> Vec<Event> {
        let mut events = self.api::<Event>().list(&ListParams::default()).await.unwrap().items;
        events.sort_by_key(|event| event.first_timestamp.as_ref().map(|time| time.0));
        events
    }

    /// Waits for an event of this reason.
    pub(super) async fn event(&self, reason: &str) -> Event {
        self.event_number(reason, 1).await
    }

    /// Waits for so many different events of this reason, and gives the last.
    pub(super) async fn event_number(&self, reason: &str, number: usize) -> Event {
        let names = Mutex::new(HashSet::new());
        until_any(&self.api::<Event>(), |event| {
            let mut names = names.lock();
            event.reason.as_deref() == Some(reason) && {
                names.insert(event.name_any());
                names.len() >= number
            }
        })
        .await
    }

    /// Starts a monitor that asks again at once.
    pub(super) fn start(&self, change: impl FnOnce(&mut Options)) -> Loops {
        let soon = Duration::from_millis(2);
        let mut options = Options { interval: soon, list_interval: soon, ..Options::default() };
        change(&mut options);
        let driver = Driver::in_process(self.driver.in_process());
        Loops::new(&self.client).with(|cluster| run(cluster, driver, options))
    }
}

/// The driver's messages before CSI 1.13, as far as they matter here.
#[derive(Clone, PartialEq, prost::Message)]
struct Page {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Volume>,
    #[prost(string, tag = "2")]
    next_token: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Volume {
    #[prost(message, optional, tag = "1")]
    volume: Option<v1::Volume>,
    #[prost(message, optional, tag = "2")]
    status: Option<VolumeStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct VolumeStatus {
    #[prost(string, repeated, tag = "1")]
    published_node_ids: Vec<String>,
    #[prost(message, optional, tag = "2")]
    condition: Option<Condition>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Condition {
    #[prost(bool, tag = "1")]
    abnormal: bool,
    #[prost(string, tag = "2")]
    message: String,
}

impl Health {
    /// Answers all four methods, of which two speak messages that have no generated type.
    fn answer_on(self: &Arc<Self>, driver: &FakeDriver) {
        let health = self.clone();
        driver.on(move |_: v1::ControllerListVolumeHealthRequest| {
            let ill: Vec<String> = health.ill.lock().keys().cloned().collect();
            let entries = ill.iter().map(|handle| health.of(handle)).collect();
            Ok(v1::ControllerListVolumeHealthResponse { entries, next_token: String::new() })
        });
        let health = self.clone();
        driver.on(move |request: v1::ControllerGetVolumeHealthRequest| {
            let volume_health = Some(health.of(&request.volume_id));
            Ok(v1::ControllerGetVolumeHealthResponse { volume_health })
        });
        let health = self.clone();
        driver.on_bytes("ListVolumes", move |request| {
            let request =
                v1::ListVolumesRequest::decode(request).map_err(|e| Status::internal(e.to_string()))?;
            Ok(health.list_conditions(&request.starting_token).encode_to_vec().into())
        });
        let health = self.clone();
        driver.on_bytes("ControllerGetVolume", move |request| {
            let request = v1::ControllerGetVolumeRequest::decode(request)
                .map_err(|e| Status::internal(e.to_string()))?;
            Ok(health.condition(&request.volume_id).encode_to_vec().into())
        });
    }

    fn of(&self, handle: &str) -> v1::VolumeHealth {
        let entry = |wrong: &String| v1::volume_health::VolumeHealthEntry {
            status: v1::VolumeHealthErrorType::Degraded.into(),
            reason: "Test".to_owned(),
            message: wrong.clone(),
        };
        let health_statuses = self.ill.lock().get(handle).map(entry).into_iter().collect();
        v1::VolumeHealth { volume_id: handle.to_owned(), health_statuses }
    }

    fn condition(&self, handle: &str) -> Volume {
        let wrong = self.ill.lock().get(handle).cloned();
        let condition = Condition { abnormal: wrong.is_some(), message: wrong.unwrap_or_default() };
        let published_node_ids = vec!["n".to_owned()];
        Volume {
            volume: Some(v1::Volume { volume_id: handle.to_owned(), ..v1::Volume::default() }),
            status: Some(VolumeStatus { published_node_ids, condition: Some(condition) }),
        }
    }

    /// One volume on each page.
    fn list_conditions(&self, token: &str) -> Page {
        let handles = self.handles.lock().clone();
        let number: usize = token.parse().unwrap_or(0);
        let next = number + 1;
        let next_token = if next < handles.len() { next.to_string() } else { String::new() };
        let entries = handles.get(number).map(|handle| self.condition(handle)).into_iter().collect();
        Page { entries, next_token }
    }
}
