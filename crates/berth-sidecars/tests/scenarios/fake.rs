//! A driver in memory that fails as told, and a power switch that cuts API server and driver off at any step.

mod snapshots;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use berth_apiserver::rest::ApiServer;
use berth_csi::v1::controller_server::{Controller, ControllerServer};
use berth_csi::v1::group_controller_server::GroupControllerServer;
use berth_csi::v1::identity_server::{Identity, IdentityServer};
use berth_csi::v1::{self, controller_service_capability, plugin_capability};
use berth_csi::{CallLayer, Metrics};
use berth_sidecars::driver::{ControllerCapability, Driver, Service};
use kube::Client;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Code, Request, Response, Status};
use tower::{ServiceExt as _, service_fn};

use crate::bench::DRIVER;

/// Cuts one life of the components off at its n-th step: a write to the API server or a call of the driver.
#[derive(Clone)]
pub(crate) struct Power {
    shared: Arc<Switch>,
}

struct Switch {
    steps: AtomicU64,
    last: u64,
    /// The last step is done, but nobody hears of it.
    done: bool,
    off: CancellationToken,
}

impl Power {
    /// Goes off at a step, before it is done or right after.
    pub(crate) fn until(last: u64, done: bool) -> Self {
        let off = CancellationToken::new();
        Self { shared: Arc::new(Switch { steps: AtomicU64::new(0), last, done, off }) }
    }

    /// Stays on.
    pub(crate) fn on() -> Self {
        Self::until(u64::MAX, false)
    }

    /// Returns when it goes off.
    pub(crate) async fn off(&self) {
        self.shared.off.cancelled().await;
    }

    /// Whether it went off.
    pub(crate) fn is_off(&self) -> bool {
        self.shared.off.is_cancelled()
    }

    /// Counts a step; `Err` if it must not be done, `Ok(true)` if it must be done and not be heard of.
    fn step(&self) -> Result<bool, ()> {
        let step = self.shared.steps.fetch_add(1, Ordering::SeqCst) + 1;
        if self.is_off() || step > self.shared.last {
            return Err(());
        }
        if step < self.shared.last {
            return Ok(false);
        }
        if self.shared.done {
            return Ok(true);
        }
        self.shared.off.cancel();
        Err(())
    }

    /// A client whose writes count as steps; events do not.
    pub(crate) fn client(&self, api: ApiServer) -> Client {
        let power = self.clone();
        let service = service_fn(move |request: http::Request<kube::client::Body>| {
            let (power, api) = (power.clone(), api.clone());
            async move {
                let cut = || Err::<_, tower::BoxError>("the power is off".into());
                let write =
                    request.method() != http::Method::GET && !request.uri().path().contains("/events");
                let step = if write { power.step() } else { Ok(false) };
                let Ok(unheard) = step else { return cut() };
                if power.is_off() {
                    return cut();
                }
                // Off also when the caller does not wait for the answer, because a write beside this one failed.
                let _off = unheard.then(|| power.shared.off.clone().drop_guard());
                let answer = api.oneshot(request).await.map_err(tower::BoxError::from)?;
                if unheard {
                    return cut();
                }
                Ok(answer)
            }
        });
        Client::new(service, "default")
    }
}

/// What a driver remembers, whatever happens to its callers.
#[derive(Default)]
pub(crate) struct Storage {
    /// Volumes by name: id and size.
    pub(crate) volumes: Mutex<BTreeMap<String, i64>>,
    /// Attachments: volume id and node id.
    pub(crate) attached: Mutex<BTreeSet<(String, String)>>,
    /// Answers that calls of a method get for a volume, first come first served.
    pub(crate) faults: Mutex<Vec<Fault>>,
    /// Every call: method and volume.
    pub(crate) calls: Mutex<Vec<(String, String)>>,
    /// Snapshots by name: the volume. Members of a group have the group's name and their number.
    pub(crate) snapshots: Mutex<BTreeMap<String, String>>,
    /// How many of the next answers about snapshots say that they are not ready.
    pub(crate) unready: Mutex<u32>,
    /// What was given as a secret to calls about snapshots.
    pub(crate) secrets: Mutex<Vec<BTreeMap<String, String>>>,
}

/// How a call fails.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) method: &'static str,
    /// Part of the volume's name or id; empty for any.
    pub(crate) volume: String,
    pub(crate) kind: FaultKind,
    /// How often.
    pub(crate) times: u32,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum FaultKind {
    /// Refused with a code, nothing done.
    Code(Code),
    /// Done, but answered with a code.
    DoneBut(Code),
    /// No answer.
    Hang,
    /// A volume smaller than asked for.
    Small,
}

impl Storage {
    pub(crate) fn fail(&self, method: &'static str, volume: &str, kind: FaultKind, times: u32) {
        self.faults.lock().unwrap().push(Fault { method, volume: volume.to_owned(), kind, times });
    }

    pub(crate) fn count(&self, method: &str) -> usize {
        self.calls.lock().unwrap().iter().filter(|(called, _)| called == method).count()
    }

    fn fault(&self, method: &str, volume: &str) -> Option<FaultKind> {
        let mut faults = self.faults.lock().unwrap();
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
    power: Power,
}

impl Fake {
    /// A connection to a driver over `storage`.
    pub(crate) fn driver(storage: &Arc<Storage>, power: &Power) -> Driver {
        let fake = Self { storage: storage.clone(), power: power.clone() };
        let routes = Routes::new(IdentityServer::new(fake.clone()))
            .add_service(ControllerServer::new(fake.clone()))
            .add_service(GroupControllerServer::new(fake));
        Driver::in_process(berth_csi::in_process(
            routes,
            &CallLayer::new(Metrics::unregistered(DRIVER), None),
        ))
    }

    /// One call: counts, fails as told, does its work.
    async fn call<T>(
        &self,
        method: &str,
        volume: &str,
        work: impl FnOnce(bool) -> T,
    ) -> Result<Response<T>, Status> {
        let off = || Status::unavailable("the power is off");
        let unheard = self.power.step().map_err(|()| off())?;
        self.storage.calls.lock().unwrap().push((method.to_owned(), volume.to_owned()));
        let fault = self.storage.fault(method, volume);
        match fault {
            Some(FaultKind::Code(code)) => return Err(Status::new(code, "told to")),
            Some(FaultKind::Hang) => std::future::pending().await,
            Some(FaultKind::DoneBut(_) | FaultKind::Small) | None => {}
        }
        let answer = work(matches!(fault, Some(FaultKind::Small)));
        if unheard {
            self.power.shared.off.cancel();
            return Err(off());
        }
        match fault {
            Some(FaultKind::DoneBut(code)) => Err(Status::new(code, "told to, after the work")),
            _ => Ok(Response::new(answer)),
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
        let capabilities =
            [Service::ControllerService, Service::GroupControllerService].map(capability).to_vec();
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
        self.call("CreateVolume", &request.name, |small| {
            let mut volumes = self.storage.volumes.lock().unwrap();
            let bytes =
                *volumes.entry(request.name.clone()).or_insert(if small { wanted / 2 } else { wanted });
            let volume = v1::Volume {
                capacity_bytes: bytes,
                volume_id: format!("id-{}", request.name),
                content_source: request.volume_content_source.clone(),
                ..v1::Volume::default()
            };
            v1::CreateVolumeResponse { volume: Some(volume) }
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<v1::DeleteVolumeRequest>,
    ) -> Result<Response<v1::DeleteVolumeResponse>, Status> {
        let id = request.into_inner().volume_id;
        if self.storage.attached.lock().unwrap().iter().any(|(volume, _)| *volume == id) {
            return Err(Status::failed_precondition("attached"));
        }
        self.call("DeleteVolume", &id, |_| {
            self.storage.volumes.lock().unwrap().remove(id.trim_start_matches("id-"));
            v1::DeleteVolumeResponse {}
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<v1::ControllerPublishVolumeRequest>,
    ) -> Result<Response<v1::ControllerPublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.call("ControllerPublishVolume", &request.volume_id, |_| {
            self.storage
                .attached
                .lock()
                .unwrap()
                .insert((request.volume_id.clone(), request.node_id.clone()));
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
            self.storage
                .attached
                .lock()
                .unwrap()
                .remove(&(request.volume_id.clone(), request.node_id.clone()));
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
        self.call("ControllerExpandVolume", &request.volume_id, |_| {
            self.storage
                .volumes
                .lock()
                .unwrap()
                .insert(request.volume_id.trim_start_matches("id-").to_owned(), bytes);
            v1::ControllerExpandVolumeResponse { capacity_bytes: bytes, node_expansion_required: false }
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
