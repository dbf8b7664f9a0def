//! A CSI driver in memory that answers, fails, hangs, crashes and lies as a test asks it to.
//!
//! Every call takes one way, whichever service it belongs to: it is recorded, a fault may strike it, and then either the
//! test's own answer or the work on the [`Storage`] answers it. Requests and answers are bytes up to there, so that a test
//! can also speak messages of which no code is generated.

mod snapshots;
mod sockets;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_csi::{
    AsBytes, Call, CallLayer, Calls, ControllerCapability, GroupCapability, Metrics, NodeCapability,
    PluginService, v1,
};
use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::Notify;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};

pub use self::sockets::{CrashingSocket, RegisteredDriver};
use crate::PATIENCE;

/// The message of a call that [`FaultKind::Code`] refuses.
pub const REFUSED: &str = "the test refuses this call";
/// The message of a call that [`FaultKind::DoneBut`] refuses after its work.
pub const DONE_BUT_REFUSED: &str = "the test refuses this call after its work";

/// What the storage behind a driver keeps, whatever happens to its callers, and how it is to behave.
#[derive(Debug, Default)]
pub struct Storage {
    /// The sizes of the volumes, by name. The id of a volume is `id-` and its name.
    pub volumes: Mutex<BTreeMap<String, i64>>,
    /// The attachments: id of the volume and id of the node.
    pub attached: Mutex<BTreeSet<(String, String)>>,
    /// The ids of the volumes of snapshots, by the snapshot's name. Members of a group have the group's name and a number.
    pub snapshots: Mutex<BTreeMap<String, String>>,
    /// The mutable parameters of volumes, by name.
    pub attributes: Mutex<BTreeMap<String, BTreeMap<String, String>>>,
    /// How many of the next answers about snapshots say that they are not ready.
    pub unready: Mutex<u32>,
    /// Warnings in the metadata of the answers to DeleteVolume.
    pub deletion_warnings: Mutex<Vec<String>>,
    /// Warnings in the metadata of the answers to CreateSnapshot.
    pub snapshot_warnings: Mutex<Vec<String>>,
    /// Parts of the names of volumes that ListVolumes leaves out.
    pub unlisted: Mutex<Vec<String>>,
    /// Part of the name of the volume that [`Lie::Another`] answers with.
    pub other_volume: Mutex<String>,
}

/// What the driver announces.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// The services of GetPluginCapabilities.
    pub plugin: Vec<PluginService>,
    /// The numbers of ControllerGetCapabilities: some that drivers announce are in no message any more.
    pub controller: Vec<i32>,
    /// The answer to GroupControllerGetCapabilities.
    pub group: Vec<GroupCapability>,
    /// The answer to NodeGetCapabilities.
    pub node: Vec<NodeCapability>,
}

impl Default for Capabilities {
    /// Everything that the controller service of the storage can do, and nothing on nodes that is optional.
    fn default() -> Self {
        let controller = [
            ControllerCapability::CreateDeleteVolume,
            ControllerCapability::PublishUnpublishVolume,
            ControllerCapability::ExpandVolume,
            ControllerCapability::ModifyVolume,
            ControllerCapability::CloneVolume,
            ControllerCapability::CreateDeleteSnapshot,
            ControllerCapability::ListSnapshots,
            ControllerCapability::ListVolumes,
            ControllerCapability::ListVolumesPublishedNodes,
        ];
        Self {
            plugin: vec![PluginService::ControllerService, PluginService::GroupControllerService],
            controller: controller.map(i32::from).to_vec(),
            group: vec![GroupCapability::CreateDeleteGetVolumeGroupSnapshot],
            node: Vec::new(),
        }
    }
}

/// A call that the driver got, with its request as it came.
#[derive(Debug, Clone)]
pub struct RecordedCall {
    /// The name of the method, such as `CreateVolume`.
    pub method: String,
    /// The name or id of the volume, snapshot or group that the call is about.
    pub volume: String,
    /// The time at which the call came.
    pub at: Instant,
    request: Bytes,
}

impl RecordedCall {
    /// The request, if the call is of this type.
    pub fn request<C: Call + Default>(&self) -> Option<C> {
        (name_of(C::METHOD) == self.method).then(|| C::decode(self.request.clone()).unwrap())
    }
}

struct Fault {
    method: &'static str,
    /// Part of the volume's name or id; empty for any.
    volume: String,
    kind: FaultKind,
    /// How many calls it still applies to.
    times: u32,
}

/// How a call fails.
#[derive(Debug, Clone, Copy)]
pub enum FaultKind {
    /// The call is refused with a code, and nothing is done.
    Code(Code),
    /// The work is done, but the call is answered with a code.
    DoneBut(Code),
    /// There is no answer until the faults are lifted.
    Hang,
    /// The work is done after this time.
    Slow(Duration),
    /// The driver dies, before or after the work.
    Crash {
        /// Whether the work is done before.
        done: bool,
    },
    /// The call is answered with OK, but not with what it should be.
    Lie(Lie),
}

/// An answer that a correct driver does not give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// The volume is smaller than requested.
    Small,
    /// The answer is an empty message.
    Empty,
    /// The answer has the id of another volume or snapshot.
    Another,
    /// The answer is right, but nothing was done.
    Idle,
    /// The list has a next page, whichever page is requested.
    Endless,
}

type Handler = Arc<dyn Fn(&[u8]) -> Result<Bytes, Status> + Send + Sync>;

/// A driver whose state and script outlive the connections to it.
pub struct FakeDriver {
    /// The driver's name, as GetPluginInfo and the registration answer it.
    pub name: String,
    /// What the driver keeps; a test reads and changes it at will.
    pub storage: Storage,
    /// What the driver announces.
    pub capabilities: Mutex<Capabilities>,
    /// The answer to NodeGetInfo.
    pub node_info: Mutex<v1::NodeGetInfoResponse>,
    handlers: Mutex<HashMap<&'static str, Handler>>,
    faults: Mutex<Vec<Fault>>,
    calls: Mutex<Vec<RecordedCall>>,
    called: Notify,
    crashed: Notify,
    lifted: Notify,
}

impl FakeDriver {
    /// A driver without volumes that announces the default [`Capabilities`].
    pub fn new(name: &str) -> Arc<Self> {
        let node_id = format!("{name}-node");
        Arc::new(Self {
            name: name.to_owned(),
            storage: Storage::default(),
            capabilities: Mutex::default(),
            node_info: Mutex::new(v1::NodeGetInfoResponse { node_id, ..Default::default() }),
            handlers: Mutex::default(),
            faults: Mutex::default(),
            calls: Mutex::default(),
            called: Notify::new(),
            crashed: Notify::new(),
            lifted: Notify::new(),
        })
    }

    /// Answers calls of this type by a function from now on.
    pub fn on<C: Call + Default>(
        &self,
        answer: impl Fn(C) -> Result<C::Answer, Status> + Send + Sync + 'static,
    ) {
        self.on_bytes(name_of(C::METHOD), move |request| {
            Ok(answer(decode(request)?)?.encode_to_vec().into())
        });
    }

    /// Answers calls of a method by a function on encoded messages, for those that have no generated type.
    pub fn on_bytes(
        &self,
        method: &'static str,
        answer: impl Fn(&[u8]) -> Result<Bytes, Status> + Send + Sync + 'static,
    ) {
        self.handlers.lock().insert(method, Arc::new(answer));
    }

    /// Lets so many calls of a method fail whose volume has this in its name or id. The oldest fault that fits strikes.
    pub fn fail(&self, method: &'static str, volume: &str, kind: FaultKind, times: u32) {
        self.faults.lock().push(Fault { method, volume: volume.to_owned(), kind, times });
    }

    /// Takes back what [`FakeDriver::fail`] was asked for with this method and volume. What hangs goes on hanging.
    pub fn repair(&self, method: &str, volume: &str) {
        self.faults.lock().retain(|fault| fault.method != method || fault.volume != volume);
    }

    /// Lets everything work again, and answers what hangs.
    pub fn lift_faults(&self) {
        self.faults.lock().clear();
        self.lifted.notify_waiters();
    }

    /// The calls since the start or since they were taken, in order.
    pub fn calls(&self) -> Vec<RecordedCall> {
        self.calls.lock().clone()
    }

    /// The calls since the start or the last time, which are then forgotten.
    pub fn take_calls(&self) -> Vec<RecordedCall> {
        std::mem::take(&mut *self.calls.lock())
    }

    /// The requests of one type, in order.
    pub fn requests<C: Call + Default>(&self) -> Vec<C> {
        self.calls.lock().iter().filter_map(RecordedCall::request).collect()
    }

    /// How often a method was called.
    pub fn count(&self, method: &str) -> usize {
        self.calls.lock().iter().filter(|call| call.method == method).count()
    }

    /// When calls of a method came for volumes that have this in their name or id.
    pub fn times(&self, method: &str, volume: &str) -> Vec<Instant> {
        let calls = self.calls.lock();
        let of = |call: &&RecordedCall| call.method == method && call.volume.contains(volume);
        calls.iter().filter(of).map(|call| call.at).collect()
    }

    /// Waits for the next call; one that comes before this is polled counts too.
    pub fn next_call(&self) -> impl Future<Output = ()> {
        self.called.notified()
    }

    /// Waits until the calls so far are as a test needs them.
    pub async fn until_calls(&self, reached: impl Fn(&[RecordedCall]) -> bool) {
        let waiting = async {
            loop {
                let called = self.called.notified();
                if reached(&self.calls.lock()) {
                    return;
                }
                called.await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, waiting).await;
        let methods = || self.calls.lock().iter().map(|call| call.method.clone()).collect::<Vec<_>>();
        assert!(in_time.is_ok(), "the driver was not called as it should be: {:?}", methods());
    }

    /// Waits until a method was called so often for volumes that have this in their name or id.
    pub async fn until_called(&self, method: &str, volume: &str, times: usize) {
        let of = |call: &&RecordedCall| call.method == method && call.volume.contains(volume);
        self.until_calls(|calls| calls.iter().filter(of).count() >= times).await;
    }

    /// All services of the driver.
    pub fn routes(self: &Arc<Self>) -> Routes {
        let fake = self.clone();
        let answer = move |request: axum::extract::Request| {
            let fake = fake.clone();
            async move {
                let method = name_of(request.uri().path()).to_owned();
                let service = tower::service_fn(move |request: Request<Bytes>| {
                    let (fake, method) = (fake.clone(), method.clone());
                    async move { fake.call(&method, request.into_inner()).await }
                });
                tonic::server::Grpc::new(AsBytes).unary(service, request).await
            }
        };
        Routes::from(axum::Router::new().fallback(answer))
    }

    /// The driver within this process.
    pub fn in_process(self: &Arc<Self>) -> Calls {
        berth_csi::in_process(self.routes(), &self.call_layer())
    }

    fn call_layer(&self) -> CallLayer {
        CallLayer::new(Metrics::unregistered(&self.name), None)
    }

    async fn call(&self, method: &str, request: Bytes) -> Result<Response<Bytes>, Status> {
        let volume = volume_of(method, &request);
        let fault = self.fault(method, &volume);
        let call =
            RecordedCall { method: method.to_owned(), volume, at: Instant::now(), request: request.clone() };
        self.calls.lock().push(call);
        self.called.notify_waiters();
        let Some(fault) = fault else { return self.perform(method, &request, None) };
        match fault {
            FaultKind::Code(code) => Err(Status::new(code, REFUSED)),
            FaultKind::DoneBut(code) => {
                self.perform(method, &request, None)?;
                Err(Status::new(code, DONE_BUT_REFUSED))
            }
            FaultKind::Hang => {
                self.lifted.notified().await;
                Err(Status::deadline_exceeded("the test let this call hang"))
            }
            FaultKind::Slow(pause) => {
                tokio::time::sleep(pause).await;
                self.perform(method, &request, None)
            }
            FaultKind::Crash { done } => {
                if done {
                    self.perform(method, &request, None)?;
                }
                self.crashed.notify_waiters();
                std::future::pending().await
            }
            FaultKind::Lie(lie) => self.perform(method, &request, Some(lie)),
        }
    }

    fn fault(&self, method: &str, volume: &str) -> Option<FaultKind> {
        let mut faults = self.faults.lock();
        let fault = faults
            .iter_mut()
            .find(|fault| fault.times > 0 && fault.method == method && volume.contains(&fault.volume))?;
        fault.times -= 1;
        Some(fault.kind)
    }

    /// Does the work of a call, or what a lie calls its work.
    fn perform(&self, method: &str, request: &[u8], lie: Option<Lie>) -> Result<Response<Bytes>, Status> {
        let handler = self.handlers.lock().get(method).cloned();
        if let Some(answer) = handler {
            return answer(request).map(Response::new);
        }
        match method {
            "Probe" => answer(&v1::ProbeResponse { ready: None }),
            "GetPluginInfo" => {
                answer(&v1::GetPluginInfoResponse { name: self.name.clone(), ..Default::default() })
            }
            "GetPluginCapabilities" => answer(&self.plugin_capabilities()),
            "ControllerGetCapabilities" => answer(&self.controller_capabilities()),
            "CreateVolume" => answer(&self.create_volume(decode(request)?, lie)),
            "DeleteVolume" => self.delete_volume(&decode(request)?, lie),
            "ControllerPublishVolume" => {
                let request: v1::ControllerPublishVolumeRequest = decode(request)?;
                if lie != Some(Lie::Idle) {
                    self.storage.attached.lock().insert((request.volume_id, request.node_id));
                }
                answer(&v1::ControllerPublishVolumeResponse::default())
            }
            "ControllerUnpublishVolume" => {
                let request: v1::ControllerUnpublishVolumeRequest = decode(request)?;
                self.storage.attached.lock().remove(&(request.volume_id, request.node_id));
                answer(&v1::ControllerUnpublishVolumeResponse {})
            }
            "ControllerExpandVolume" => answer(&self.expand_volume(&decode(request)?, lie)),
            "ControllerModifyVolume" => {
                let request: v1::ControllerModifyVolumeRequest = decode(request)?;
                let name = name_of_id(&request.volume_id).to_owned();
                self.storage.attributes.lock().insert(name, request.mutable_parameters);
                answer(&v1::ControllerModifyVolumeResponse {})
            }
            "ListVolumes" => answer(&self.list_volumes(lie)),
            "CreateSnapshot" => self.create_snapshot(&decode(request)?, lie),
            "DeleteSnapshot" => answer(&self.delete_snapshot(&decode(request)?)),
            "ListSnapshots" => answer(&self.list_snapshots(&decode(request)?, lie)),
            "GroupControllerGetCapabilities" => answer(&self.group_capabilities()),
            "CreateVolumeGroupSnapshot" => answer(&self.create_group(&decode(request)?, lie)),
            "DeleteVolumeGroupSnapshot" => answer(&self.delete_group(&decode(request)?)),
            "GetVolumeGroupSnapshot" => answer(&self.get_group(&decode(request)?)),
            "NodeGetInfo" => answer(&self.node_info.lock().clone()),
            "NodeGetCapabilities" => answer(&self.node_capabilities()),
            "NodeStageVolume" => answer(&v1::NodeStageVolumeResponse {}),
            "NodeUnstageVolume" => answer(&v1::NodeUnstageVolumeResponse {}),
            "NodePublishVolume" => {
                let request: v1::NodePublishVolumeRequest = decode(request)?;
                std::fs::create_dir_all(request.target_path)?;
                answer(&v1::NodePublishVolumeResponse {})
            }
            "NodeUnpublishVolume" => {
                let request: v1::NodeUnpublishVolumeRequest = decode(request)?;
                match std::fs::remove_dir_all(request.target_path) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
                    _ => answer(&v1::NodeUnpublishVolumeResponse {}),
                }
            }
            "NodeExpandVolume" => answer(&v1::NodeExpandVolumeResponse { capacity_bytes: 0 }),
            "NodeGetVolumeStats" => answer(&volume_stats()),
            _ => Err(Status::unimplemented(method)),
        }
    }

    fn plugin_capabilities(&self) -> v1::GetPluginCapabilitiesResponse {
        use v1::plugin_capability::{Service, Type};
        let capability = |service: &PluginService| v1::PluginCapability {
            r#type: Some(Type::Service(Service { r#type: (*service).into() })),
        };
        let capabilities = self.capabilities.lock().plugin.iter().map(capability).collect();
        v1::GetPluginCapabilitiesResponse { capabilities }
    }

    fn controller_capabilities(&self) -> v1::ControllerGetCapabilitiesResponse {
        use v1::controller_service_capability::{Rpc, Type};
        let capability = |number: &i32| v1::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: *number })),
        };
        let capabilities = self.capabilities.lock().controller.iter().map(capability).collect();
        v1::ControllerGetCapabilitiesResponse { capabilities }
    }

    fn node_capabilities(&self) -> v1::NodeGetCapabilitiesResponse {
        use v1::node_service_capability::{Rpc, Type};
        let capability = |capability: &NodeCapability| v1::NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: (*capability).into() })),
        };
        let capabilities = self.capabilities.lock().node.iter().map(capability).collect();
        v1::NodeGetCapabilitiesResponse { capabilities }
    }

    fn create_volume(&self, request: v1::CreateVolumeRequest, lie: Option<Lie>) -> v1::CreateVolumeResponse {
        let requested = request.capacity_range.unwrap_or_default().required_bytes;
        let mut volumes = self.storage.volumes.lock();
        if lie == Some(Lie::Another) {
            let part = self.storage.other_volume.lock();
            let (name, bytes) = volumes.iter().find(|(name, _)| name.contains(part.as_str())).unwrap();
            return created(name, *bytes, None);
        }
        if lie == Some(Lie::Idle) {
            return created(&request.name, requested, None);
        }
        let bytes = if lie == Some(Lie::Small) { requested / 2 } else { requested };
        let bytes = *volumes.entry(request.name.clone()).or_insert(bytes);
        let mut attributes = self.storage.attributes.lock();
        attributes.entry(request.name.clone()).or_insert(request.mutable_parameters);
        if lie == Some(Lie::Empty) {
            return v1::CreateVolumeResponse::default();
        }
        created(&request.name, bytes, request.volume_content_source)
    }

    fn delete_volume(
        &self,
        request: &v1::DeleteVolumeRequest,
        lie: Option<Lie>,
    ) -> Result<Response<Bytes>, Status> {
        let id = request.volume_id.as_str();
        if self.storage.attached.lock().iter().any(|(volume, _)| volume == id) {
            return Err(Status::failed_precondition("the volume is attached"));
        }
        if lie != Some(Lie::Idle) {
            self.storage.volumes.lock().remove(name_of_id(id));
            self.storage.attributes.lock().remove(name_of_id(id));
        }
        let mut answer = answer(&v1::DeleteVolumeResponse {})?;
        berth_csi::remarks::add_warnings(answer.metadata_mut(), &self.storage.deletion_warnings.lock());
        Ok(answer)
    }

    fn expand_volume(
        &self,
        request: &v1::ControllerExpandVolumeRequest,
        lie: Option<Lie>,
    ) -> v1::ControllerExpandVolumeResponse {
        let bytes = request.capacity_range.unwrap_or_default().required_bytes;
        let bytes = if lie == Some(Lie::Small) { bytes / 2 } else { bytes };
        if lie.is_none() {
            self.storage.volumes.lock().insert(name_of_id(&request.volume_id).to_owned(), bytes);
        }
        v1::ControllerExpandVolumeResponse { capacity_bytes: bytes, node_expansion_required: false }
    }

    fn list_volumes(&self, lie: Option<Lie>) -> v1::ListVolumesResponse {
        let unlisted = self.storage.unlisted.lock();
        let volumes = self.storage.volumes.lock();
        let attached = self.storage.attached.lock();
        let listed = volumes.iter().filter(|(name, _)| !unlisted.iter().any(|part| name.contains(part)));
        let entry = |(name, bytes): (&String, &i64)| {
            let id = format!("id-{name}");
            let nodes = attached.iter().filter(|(volume, _)| *volume == id).map(|(_, node)| node.clone());
            let status = v1::list_volumes_response::VolumeStatus { published_node_ids: nodes.collect() };
            let volume = created(name, *bytes, None).volume;
            v1::list_volumes_response::Entry { volume, status: Some(status) }
        };
        let next_token = if lie == Some(Lie::Endless) { "more".to_owned() } else { String::new() };
        v1::ListVolumesResponse { entries: listed.map(entry).collect(), next_token }
    }
}

fn created(name: &str, bytes: i64, source: Option<v1::VolumeContentSource>) -> v1::CreateVolumeResponse {
    let volume = v1::Volume {
        capacity_bytes: bytes,
        volume_id: format!("id-{name}"),
        content_source: source,
        ..v1::Volume::default()
    };
    v1::CreateVolumeResponse { volume: Some(volume) }
}

fn volume_stats() -> v1::NodeGetVolumeStatsResponse {
    use v1::volume_usage::Unit;
    let usage = [(Unit::Bytes, 10), (Unit::Inodes, 20)];
    let usage = usage.map(|(unit, total)| v1::VolumeUsage {
        total,
        used: 3,
        available: total - 3,
        unit: unit.into(),
    });
    v1::NodeGetVolumeStatsResponse { usage: usage.into() }
}

/// The last part of a method's path, as in `/csi.v1.Controller/CreateVolume`.
fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn name_of_id(id: &str) -> &str {
    id.trim_start_matches("id-")
}

fn decode<M: Message + Default>(request: &[u8]) -> Result<M, Status> {
    M::decode(request).map_err(|error| Status::internal(error.to_string()))
}

#[expect(clippy::unnecessary_wraps, reason = "it is the last step of calls that may fail")]
fn answer(message: &impl Message) -> Result<Response<Bytes>, Status> {
    Ok(Response::new(message.encode_to_vec().into()))
}

/// The first field of a request, which is the volume's name or id in most.
#[derive(Clone, PartialEq, prost::Message)]
struct FirstField {
    #[prost(string, tag = "1")]
    value: String,
}

fn volume_of(method: &str, request: &[u8]) -> String {
    let volume = match method {
        "CreateSnapshot" => v1::CreateSnapshotRequest::decode(request).map(|request| request.name),
        "ListSnapshots" => v1::ListSnapshotsRequest::decode(request).map(|request| request.snapshot_id),
        // A first field of another type makes this fail: such a call is about no volume.
        _ => FirstField::decode(request).map(|first| first.value),
    };
    volume.unwrap_or_default()
}
