//! An API server, bound claims, and a driver that tells of their health in the way that it is asked to.

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::fmt::Debug;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use berth_csi::v1::identity_server::{Identity, IdentityServer};
use berth_csi::v1::{self, controller_service_capability, plugin_capability};
use berth_csi::{CallLayer, Metrics};
use berth_kube::Cluster;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower::{ServiceExt as _, service_fn};

use super::super::{Options, run};
use crate::driver::{Driver, Service as Offer};

const DRIVER: &str = "test.berth.dev";
const PATIENCE: Duration = Duration::from_secs(60);

/// What the driver announces, by number: one of them is in no message any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Capability {
    ListVolumes = 3,
    VolumeCondition = 11,
    GetVolume = 12,
    GetVolumeHealth = 16,
    ListVolumeHealth = 17,
}

/// What the driver knows.
struct State {
    capabilities: HashSet<Capability>,
    ill: Mutex<BTreeMap<String, String>>,
    handles: Mutex<Vec<String>>,
    refuses: AtomicBool,
    calls: watch::Sender<u64>,
}

pub(super) struct Stage {
    client: Client,
    requests: Arc<AtomicUsize>,
    state: Arc<State>,
    _place: tempfile::TempDir,
}

impl Stage {
    pub(super) async fn set(capabilities: &[Capability]) -> Self {
        let place = tempfile::tempdir().unwrap();
        let (store, _) =
            berth_apiserver::store::Store::open(place.path(), berth_apiserver::store::Options::default())
                .unwrap();
        let api = berth_apiserver::rest::ApiServer::new(store, berth_apiserver::rest::Options::default());
        assert!(api.bootstrap().await.is_ok());
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = requests.clone();
        let service = service_fn(move |request: http::Request<kube::client::Body>| {
            counted.fetch_add(1, Ordering::SeqCst);
            let api = api.clone();
            async move { api.oneshot(request).await.map_err(tower::BoxError::from) }
        });
        let state = Arc::new(State {
            capabilities: capabilities.iter().copied().collect(),
            ill: Mutex::default(),
            handles: Mutex::default(),
            refuses: AtomicBool::new(false),
            calls: watch::Sender::new(0),
        });
        Self { client: Client::new(service, "default"), requests, state, _place: place }
    }

    /// A claim bound to a volume of the driver, whose id is the claim's name.
    pub(super) async fn bound_claim(&self, name: &str) -> PersistentVolumeClaim {
        self.state.handles.lock().push(name.to_owned());
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
    pub(super) async fn create<K>(&self, object: Value) -> K
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned + serde::Serialize,
    {
        let object: K = serde_json::from_value(object).unwrap();
        let path = K::url_path(&(), object.meta().namespace.as_deref());
        let body = serde_json::to_vec(&object).unwrap();
        let request = kube::core::Request::new(path).create(&PostParams::default(), body).unwrap();
        self.client.request(request).await.unwrap()
    }

    pub(super) fn api<K: kube::Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    pub(super) async fn patch_status<K>(&self, name: &str, change: Value)
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + serde::de::DeserializeOwned,
    {
        let patched =
            self.api::<K>().patch_status(name, &PatchParams::default(), &Patch::Merge(change)).await;
        patched.unwrap();
    }

    /// Lets a volume be ill, or well.
    pub(super) fn ail(&self, handle: &str, wrong: Option<&str>) {
        let mut ill = self.state.ill.lock();
        match wrong {
            Some(wrong) => ill.insert(handle.to_owned(), wrong.to_owned()),
            None => ill.remove(handle),
        };
    }

    /// Lets the driver refuse every call, or none.
    pub(super) fn refuse(&self, refuse: bool) {
        self.state.refuses.store(refuse, Ordering::SeqCst);
    }

    /// Waits until the driver was asked so often from now on.
    pub(super) async fn rounds(&self, more: u64) {
        let mut calls = self.state.calls.subscribe();
        let until = *calls.borrow_and_update() + more;
        tokio::time::timeout(PATIENCE, calls.wait_for(|calls| *calls >= until)).await.unwrap().unwrap();
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
        let found = async {
            let mut changes = std::pin::pin!(watcher(self.api::<Event>(), watcher::Config::default()));
            let mut told = HashSet::new();
            while let Some(change) = changes.next().await {
                if let Ok(watcher::Event::Apply(event) | watcher::Event::InitApply(event)) = change
                    && event.reason.as_deref() == Some(reason)
                {
                    told.insert(event.name_any());
                    if told.len() >= number {
                        return event;
                    }
                }
            }
            unreachable!("a watch does not end")
        };
        let Ok(event) = tokio::time::timeout(PATIENCE, Box::pin(found)).await else {
            panic!("there is no event {reason}: {:#?}", self.events().await)
        };
        event
    }

    /// Starts a monitor that asks again at once.
    pub(super) fn start(&self, change: impl FnOnce(&mut Options)) -> Running {
        let soon = Duration::from_millis(2);
        let mut options = Options { interval: soon, list_interval: soon, ..Options::default() };
        change(&mut options);
        let shutdown = CancellationToken::new();
        let cluster = Cluster::new(self.client.clone(), shutdown.clone());
        let work = tokio::spawn(run(cluster, self.driver(), options));
        Running { shutdown, work }
    }

    fn driver(&self) -> Driver {
        let fake = Fake(self.state.clone());
        let routes = Routes::new(IdentityServer::new(fake.clone())).add_service(fake);
        let layer = CallLayer::new(Metrics::unregistered(DRIVER), None);
        Driver::in_process(berth_csi::in_process(routes, &layer))
    }
}

/// A monitor at work.
pub(super) struct Running {
    shutdown: CancellationToken,
    work: JoinHandle<()>,
}

impl Running {
    pub(super) async fn stop(self) {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.work).await.unwrap().unwrap();
    }
}

/// The driver; its Controller service is served by hand, as it speaks versions of which only one has generated code.
#[derive(Clone)]
struct Fake(Arc<State>);

#[tonic::async_trait]
impl Identity for Fake {
    async fn probe(&self, _: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        Ok(Response::new(v1::ProbeResponse { ready: None }))
    }

    async fn get_plugin_info(
        &self,
        _: Request<v1::GetPluginInfoRequest>,
    ) -> Result<Response<v1::GetPluginInfoResponse>, Status> {
        Ok(Response::new(v1::GetPluginInfoResponse { name: DRIVER.to_owned(), ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<v1::GetPluginCapabilitiesResponse>, Status> {
        let service = plugin_capability::Service { r#type: Offer::ControllerService.into() };
        let controller = v1::PluginCapability { r#type: Some(plugin_capability::Type::Service(service)) };
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities: vec![controller] }))
    }
}

impl tonic::server::NamedService for Fake {
    const NAME: &'static str = "csi.v1.Controller";
}

impl Service<http::Request<Body>> for Fake {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let state = self.0.clone();
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            Ok(match method.as_str() {
                "ControllerGetCapabilities" => answer(request, move |(): ()| Ok(state.announced())).await,
                "ControllerListVolumeHealth" => {
                    answer(request, move |_: v1::ControllerListVolumeHealthRequest| state.list()).await
                }
                "ControllerGetVolumeHealth" => {
                    answer(request, move |asked: v1::ControllerGetVolumeHealthRequest| {
                        state.get(&asked.volume_id)
                    })
                    .await
                }
                "ListVolumes" => {
                    answer(request, move |asked: v1::ListVolumesRequest| {
                        state.list_conditions(&asked.starting_token)
                    })
                    .await
                }
                "ControllerGetVolume" => {
                    answer(request, move |asked: v1::ControllerGetVolumeRequest| {
                        state.asked()?;
                        Ok(state.condition(&asked.volume_id))
                    })
                    .await
                }
                _ => Status::unimplemented(method).into_http(),
            })
        })
    }
}

/// Records a call and answers it.
async fn answer<Q, A>(
    request: http::Request<Body>,
    say: impl FnOnce(Q) -> Result<A, Status> + Clone + Send + Sync + 'static,
) -> http::Response<Body>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + Default + 'static,
{
    let service = service_fn(move |request: Request<Q>| {
        let said = (say.clone())(request.into_inner()).map(Response::new);
        async move { said }
    });
    let codec: ProstCodec<A, Q> = ProstCodec::default();
    tonic::server::Grpc::new(codec).unary(service, request).await
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

impl State {
    fn asked(&self) -> Result<(), Status> {
        self.calls.send_modify(|calls| *calls += 1);
        if self.refuses.load(Ordering::SeqCst) { Err(Status::internal("told to")) } else { Ok(()) }
    }

    fn announced(&self) -> v1::ControllerGetCapabilitiesResponse {
        let capabilities = self.capabilities.iter().map(|capability| {
            let rpc = controller_service_capability::Rpc { r#type: *capability as i32 };
            v1::ControllerServiceCapability { r#type: Some(controller_service_capability::Type::Rpc(rpc)) }
        });
        v1::ControllerGetCapabilitiesResponse { capabilities: capabilities.collect() }
    }

    fn health(&self, handle: &str) -> v1::VolumeHealth {
        let entry = |wrong: &String| v1::volume_health::VolumeHealthEntry {
            status: v1::VolumeHealthErrorType::Degraded.into(),
            reason: "Test".to_owned(),
            message: wrong.clone(),
        };
        let health_statuses = self.ill.lock().get(handle).map(entry).into_iter().collect();
        v1::VolumeHealth { volume_id: handle.to_owned(), health_statuses }
    }

    fn list(&self) -> Result<v1::ControllerListVolumeHealthResponse, Status> {
        self.asked()?;
        let ill: Vec<String> = self.ill.lock().keys().cloned().collect();
        let entries = ill.iter().map(|handle| self.health(handle)).collect();
        Ok(v1::ControllerListVolumeHealthResponse { entries, next_token: String::new() })
    }

    fn get(&self, handle: &str) -> Result<v1::ControllerGetVolumeHealthResponse, Status> {
        self.asked()?;
        Ok(v1::ControllerGetVolumeHealthResponse { volume_health: Some(self.health(handle)) })
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
    fn list_conditions(&self, token: &str) -> Result<Page, Status> {
        self.asked()?;
        let handles = self.handles.lock().clone();
        let number: usize = token.parse().unwrap_or(0);
        let next = number + 1;
        let next_token = if next < handles.len() { next.to_string() } else { String::new() };
        let entries = handles.get(number).map(|handle| self.condition(handle)).into_iter().collect();
        Ok(Page { entries, next_token })
    }
}
