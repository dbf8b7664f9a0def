//! A driver in memory that fails, hangs, crashes and lies as told.

mod snapshots;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_csi::v1::controller_server::{Controller, ControllerServer};
use berth_csi::v1::group_controller_server::GroupControllerServer;
use berth_csi::v1::identity_server::{Identity, IdentityServer};
use berth_csi::v1::{self, controller_service_capability, plugin_capability};
use berth_csi::{CallLayer, Metrics};
use berth_sidecars::driver::{ControllerCapability, Driver, Service};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};

use crate::bench::{DRIVER, PATIENCE};
use crate::power::Power;

/// What a driver remembers, whatever happens to its callers.
#[derive(Default)]
pub(crate) struct Storage {
    /// Volumes by name: id and size.
    pub(crate) volumes: Mutex<BTreeMap<String, i64>>,
    /// Attachments: volume id and node id.
    pub(crate) attached: Mutex<BTreeSet<(String, String)>>,
    /// Answers that calls of a method get for a volume, first come first served.
    pub(crate) faults: Mutex<Vec<Fault>>,
    /// Every call since the start, in order.
    pub(crate) calls: Mutex<Vec<Call>>,
    /// Snapshots by name: the volume. Members of a group have the group's name and their number.
    pub(crate) snapshots: Mutex<BTreeMap<String, String>>,
    /// How many of the next answers about snapshots say that they are not ready.
    pub(crate) unready: Mutex<u32>,
    /// What was given as a secret to calls about snapshots.
    pub(crate) secrets: Mutex<Vec<BTreeMap<String, String>>>,
    /// The mutable parameters of volumes, by name.
    pub(crate) attributes: Mutex<BTreeMap<String, BTreeMap<String, String>>>,
    /// What DeleteVolume warns of beside its answers.
    pub(crate) deletion_warnings: Mutex<Vec<String>>,
    /// Parts of the names of volumes that ListVolumes leaves out.
    pub(crate) unlisted: Mutex<Vec<String>>,
    /// Part of the name of the volume that is taken for another one, and its snapshots for others.
    pub(crate) taken_for_others: Mutex<String>,
    /// What the driver warns of beside its answers about snapshots.
    pub(crate) warnings: Mutex<Vec<String>>,
    /// Where volumes were asked for, call by call; `None` if the driver knows no places.
    pub(crate) places: Mutex<Option<Vec<v1::TopologyRequirement>>>,
    /// Told of every call.
    pub(crate) called: Notify,
    /// Told when the driver crashes.
    pub(crate) crashed: Notify,
    lifted: Notify,
}

/// A call that came.
pub(crate) struct Call {
    method: String,
    volume: String,
    at: Instant,
}

/// How a call fails.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) method: &'static str,
    /// Part of the volume's name or id; empty for any.
    pub(crate) volume: String,
    pub(crate) kind: FaultKind,
    /// How many calls it still applies to.
    pub(crate) times: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum FaultKind {
    /// Refused with a code, nothing done.
    Code(Code),
    /// Done, but answered with a code.
    DoneBut(Code),
    /// There is no answer until the faults are lifted.
    Hang,
    /// Done after this time.
    Slow(Duration),
    /// The driver dies, before or after the work.
    Crash { done: bool },
    /// Answered with OK, but not what it should be.
    Lie(Lie),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    /// A volume smaller than asked for.
    Small,
    /// An answer with nothing in it.
    Empty,
    /// The id of somebody else's volume or snapshot.
    Another,
    /// The answer is right, but nothing was done.
    Idle,
    /// A list that never ends.
    Endless,
}

impl Storage {
    pub(crate) fn fail(&self, method: &'static str, volume: &str, kind: FaultKind, times: u32) {
        self.faults.lock().push(Fault { method, volume: volume.to_owned(), kind, times });
    }

    /// Everything works again, and what hangs is answered.
    pub(crate) fn lift_faults(&self) {
        self.faults.lock().clear();
        self.lifted.notify_waiters();
    }

    pub(crate) fn count(&self, method: &str) -> usize {
        self.calls.lock().iter().filter(|call| call.method == method).count()
    }

    /// When calls of a method came for a volume.
    pub(crate) fn times(&self, method: &str, volume: &str) -> Vec<Instant> {
        let calls = self.calls.lock();
        calls
            .iter()
            .filter(|call| call.method == method && call.volume.contains(volume))
            .map(|call| call.at)
            .collect()
    }

    /// Waits until a method was called so often for a volume.
    pub(crate) async fn until_called(&self, method: &str, volume: &str, times: usize) {
        let waiting = async {
            loop {
                let called = self.called.notified();
                if self.times(method, volume).len() >= times {
                    return;
                }
                called.await;
            }
        };
        let in_time = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(in_time.is_ok(), "{method} was called only {} times", self.times(method, volume).len());
    }

    fn fault(&self, method: &str, volume: &str) -> Option<FaultKind> {
        let mut faults = self.faults.lock();
        let fault = faults
            .iter_mut()
            .find(|fault| fault.times > 0 && fault.method == method && volume.contains(&fault.volume))?;
        fault.times -= 1;
        Some(fault.kind)
    }
}

/// A driver over a storage that lives longer than it.
#[derive(Clone)]
pub(crate) struct Fake {
    storage: Arc<Storage>,
}

impl Fake {
    /// A connection to a driver over `storage`.
    pub(crate) fn driver(storage: &Arc<Storage>, power: &Power) -> Driver {
        Driver::in_process(berth_csi::in_process(
            power.calls(Self::routes(storage)),
            &CallLayer::new(Metrics::unregistered(DRIVER), None),
        ))
    }

    /// The services of a driver over `storage`.
    pub(crate) fn routes(storage: &Arc<Storage>) -> Routes {
        let fake = Self { storage: storage.clone() };
        Routes::new(IdentityServer::new(fake.clone()))
            .add_service(ControllerServer::new(fake.clone()))
            .add_service(GroupControllerServer::new(fake))
    }

    /// One call: counts, fails as told, does its work, or what a lie calls its work.
    async fn call<T>(
        &self,
        method: &str,
        volume: &str,
        work: impl FnOnce(Option<Lie>) -> T,
    ) -> Result<Response<T>, Status> {
        let call = Call { method: method.to_owned(), volume: volume.to_owned(), at: Instant::now() };
        self.storage.calls.lock().push(call);
        self.storage.called.notify_waiters();
        let Some(fault) = self.storage.fault(method, volume) else { return Ok(Response::new(work(None))) };
        match fault {
            FaultKind::Code(code) => Err(Status::new(code, "told to")),
            FaultKind::DoneBut(code) => {
                work(None);
                Err(Status::new(code, "told to, after the work"))
            }
            FaultKind::Hang => {
                self.storage.lifted.notified().await;
                Err(Status::deadline_exceeded("it hung"))
            }
            FaultKind::Slow(pause) => {
                tokio::time::sleep(pause).await;
                Ok(Response::new(work(None)))
            }
            FaultKind::Crash { done } => {
                if done {
                    work(None);
                }
                self.storage.crashed.notify_waiters();
                std::future::pending().await
            }
            FaultKind::Lie(lie) => Ok(Response::new(work(Some(lie)))),
        }
    }
}

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
        let capability = |service: Service| {
            let service = plugin_capability::Service { r#type: service.into() };
            v1::PluginCapability { r#type: Some(plugin_capability::Type::Service(service)) }
        };
        let mut capabilities =
            [Service::ControllerService, Service::GroupControllerService].map(capability).to_vec();
        if self.storage.places.lock().is_some() {
            capabilities.push(capability(Service::VolumeAccessibilityConstraints));
        }
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities }))
    }
}

#[tonic::async_trait]
impl Controller for Fake {
    async fn controller_get_capabilities(
        &self,
        _: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<v1::ControllerGetCapabilitiesResponse>, Status> {
        let all = [
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
        let capability = |kind: ControllerCapability| {
            let rpc = controller_service_capability::Rpc { r#type: kind.into() };
            v1::ControllerServiceCapability { r#type: Some(controller_service_capability::Type::Rpc(rpc)) }
        };
        let capabilities = all.into_iter().map(capability).collect();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume(
        &self,
        request: Request<v1::CreateVolumeRequest>,
    ) -> Result<Response<v1::CreateVolumeResponse>, Status> {
        let request = request.into_inner();
        let wanted = request.capacity_range.unwrap_or_default().required_bytes;
        if let Some(places) = self.storage.places.lock().as_mut() {
            places.extend(request.accessibility_requirements.clone());
        }
        self.call("CreateVolume", &request.name, |lie| {
            let mut volumes = self.storage.volumes.lock();
            if lie == Some(Lie::Another) {
                let part = self.storage.taken_for_others.lock();
                let (name, bytes) = volumes.iter().find(|(name, _)| name.contains(part.as_str())).unwrap();
                return created(name, *bytes, None);
            }
            if lie == Some(Lie::Idle) {
                return created(&request.name, wanted, None);
            }
            let bytes = if lie == Some(Lie::Small) { wanted / 2 } else { wanted };
            let bytes = *volumes.entry(request.name.clone()).or_insert(bytes);
            let mut attributes = self.storage.attributes.lock();
            attributes.entry(request.name.clone()).or_insert(request.mutable_parameters);
            if lie == Some(Lie::Empty) {
                return v1::CreateVolumeResponse::default();
            }
            created(&request.name, bytes, request.volume_content_source)
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let id = request.into_inner().volume_id;
        if self.storage.attached.lock().iter().any(|(volume, _)| *volume == id) {
            return Err(Status::failed_precondition("attached"));
        }
        let answer = self.call("DeleteVolume", &id, |lie| {
            if lie != Some(Lie::Idle) {
                self.storage.volumes.lock().remove(id.trim_start_matches("id-"));
                self.storage.attributes.lock().remove(id.trim_start_matches("id-"));
            }
            v1::DeleteVolumeResponse {}
        });
        let mut answer = answer.await?;
        berth_csi::remarks::add_warnings(answer.metadata_mut(), &self.storage.deletion_warnings.lock());
        Ok(answer)
    }

    async fn controller_publish_volume(
        &self,
        request: Request<v1::ControllerPublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerPublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.call("ControllerPublishVolume", &request.volume_id, |lie| {
            if lie != Some(Lie::Idle) {
                let place = (request.volume_id.clone(), request.node_id.clone());
                self.storage.attached.lock().insert(place);
            }
            v1::ControllerPublishVolumeResponse::default()
        })
        .await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<v1::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.call("ControllerUnpublishVolume", &request.volume_id, |_| {
            self.storage.attached.lock().remove(&(request.volume_id.clone(), request.node_id.clone()));
            v1::ControllerUnpublishVolumeResponse {}
        })
        .await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<v1::ControllerExpandVolumeRequest>,
    ) -> Result<Response<v1::ControllerExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        let bytes = request.capacity_range.unwrap_or_default().required_bytes;
        self.call("ControllerExpandVolume", &request.volume_id, |lie| {
            let name = request.volume_id.trim_start_matches("id-").to_owned();
            let bytes = if lie == Some(Lie::Small) { bytes / 2 } else { bytes };
            if lie.is_none() {
                self.storage.volumes.lock().insert(name, bytes);
            }
            v1::ControllerExpandVolumeResponse { capacity_bytes: bytes, node_expansion_required: false }
        })
        .await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<v1::ControllerModifyVolumeRequest>,
    ) -> Result<Response<v1::ControllerModifyVolumeResponse>, Status> {
        let request = request.into_inner();
        self.call("ControllerModifyVolume", &request.volume_id, |_| {
            let name = request.volume_id.trim_start_matches("id-").to_owned();
            self.storage.attributes.lock().insert(name, request.mutable_parameters.clone());
            v1::ControllerModifyVolumeResponse {}
        })
        .await
    }

    async fn list_volumes(
        &self,
        _: Request<v1::ListVolumesRequest>,
    ) -> Result<Response<v1::ListVolumesResponse>, Status> {
        self.call("ListVolumes", "", |lie| {
            let unlisted = self.storage.unlisted.lock();
            let volumes = self.storage.volumes.lock();
            let listed = volumes.iter().filter(|(name, _)| !unlisted.iter().any(|part| name.contains(part)));
            let entries = listed.map(|(name, bytes)| self.listed(name, *bytes)).collect();
            let next_token = if lie == Some(Lie::Endless) { "more".to_owned() } else { String::new() };
            v1::ListVolumesResponse { entries, next_token }
        })
        .await
    }

    async fn create_snapshot(
        &self,
        request: Request<v1::CreateSnapshotRequest>,
    ) -> Result<Response<v1::CreateSnapshotResponse>, Status> {
        self.take_snapshot(request.into_inner()).await
    }

    async fn delete_snapshot(
        &self,
        request: Request<v1::DeleteSnapshotRequest>,
    ) -> Result<Response<v1::DeleteSnapshotResponse>, Status> {
        self.drop_snapshot(request.into_inner()).await
    }

    async fn list_snapshots(
        &self,
        request: Request<v1::ListSnapshotsRequest>,
    ) -> Result<Response<v1::ListSnapshotsResponse>, Status> {
        self.show_snapshot(request.into_inner()).await
    }
}

impl Fake {
    fn listed(&self, name: &str, bytes: i64) -> v1::list_volumes_response::Entry {
        let attached = self.storage.attached.lock();
        let id = format!("id-{name}");
        let nodes = attached.iter().filter(|(volume, _)| *volume == id).map(|(_, node)| node.clone());
        let status = v1::list_volumes_response::VolumeStatus { published_node_ids: nodes.collect() };
        v1::list_volumes_response::Entry { volume: created(name, bytes, None).volume, status: Some(status) }
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
