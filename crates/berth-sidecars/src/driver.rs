//! The connection to a CSI driver: who it is, what it can do, and every call that the components make.
//!
//! A driver that goes away is waited for rather than given up: it is probed every second, asked again who it is and
//! what it can do (it may be another version), and everybody is told that it is back. A call that broke on the way is
//! answered UNAVAILABLE, whatever the transport made of it, because the driver may have done the work: only a code that
//! the driver itself sent may count as final.

mod health;
mod metrics;
mod places;
mod snapshots;
mod wire;

use std::collections::HashSet;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use berth_csi::v1::controller_client::ControllerClient;
use berth_csi::v1::identity_client::IdentityClient;
use berth_csi::v1::node_client::NodeClient;
use berth_csi::v1::{self, controller_service_capability, node_service_capability, plugin_capability};
use berth_csi::{Calls, Endpoint};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

use self::metrics::Metrics;
use self::wire::Wire;
use crate::failure::Failure;
use crate::locks::{Held, Locks};

pub use self::health::{Health, HealthCalls};
pub use berth_csi::v1::controller_service_capability::rpc::Type as ControllerCapability;
pub use berth_csi::v1::group_controller_service_capability::rpc::Type as GroupCapability;
pub use berth_csi::v1::node_service_capability::rpc::Type as NodeCapability;
pub use berth_csi::v1::plugin_capability::service::Type as Service;

/// How long one question about the driver itself may take.
const ASKING: Duration = Duration::from_secs(10);
/// How long to wait before a driver that is not there, or not ready, is probed again.
const PROBING: Duration = Duration::from_secs(1);
/// What is said while the driver is away.
pub(crate) const ABSENT: &str = "the CSI driver does not answer; waiting for it to come back";
/// A page of ListVolumes may be long.
const LARGEST_ANSWER: usize = 64 << 20;

/// Who a driver is and what it can do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its name, as it stands in StorageClass.provisioner and CSIDriver.
    pub name: String,
    /// What the plugin as a whole offers.
    pub services: HashSet<Service>,
    /// What its Controller service can do.
    pub controller: HashSet<ControllerCapability>,
    /// Whether it tells of its volumes' condition as drivers did before CSI 1.13 (VOLUME_CONDITION).
    pub tells_condition: bool,
    /// What its Node service can do, if it has one here.
    pub node: HashSet<NodeCapability>,
    /// What its GroupController service can do, if it has one.
    pub group: HashSet<GroupCapability>,
}

impl Identity {
    /// Whether the Controller service can do this.
    pub fn can(&self, capability: ControllerCapability) -> bool {
        self.controller.contains(&capability)
    }

    /// Whether volumes are bound to places.
    pub fn has_topology(&self) -> bool {
        self.services.contains(&Service::VolumeAccessibilityConstraints)
    }

    /// Whether volumes are attached to nodes by calls.
    pub fn attaches(&self) -> bool {
        self.services.contains(&Service::ControllerService)
            && self.can(ControllerCapability::PublishUnpublishVolume)
    }
}

/// A CSI driver; clones share the connection and what is being worked on.
#[derive(Clone)]
pub struct Driver {
    shared: Arc<Shared>,
}

struct Shared {
    wire: Wire,
    locks: Locks,
    /// `None` while the driver is not there; a new value each time it comes back.
    identity: watch::Sender<Option<Arc<Identity>>>,
    metrics: OnceLock<Metrics>,
}

impl Driver {
    /// A driver behind a socket.
    pub fn connect(endpoint: &Endpoint) -> Self {
        Self::over(Wire::Socket(berth_csi::connect(endpoint)))
    }

    /// A driver in this process.
    pub fn in_process(calls: Calls) -> Self {
        Self::over(Wire::InProcess(calls))
    }

    fn over(wire: Wire) -> Self {
        let (identity, lost) = watch::channel(None);
        let shared = Arc::new(Shared { wire, locks: Locks::default(), identity, metrics: OnceLock::new() });
        tokio::spawn(supervise(Arc::downgrade(&shared), lost));
        Self { shared }
    }

    /// Lets a registry see how long calls take; only the first one.
    pub fn measure(&self, registry: &mut Registry) {
        self.shared.metrics.get_or_init(|| Metrics::register(registry));
    }

    /// Waits until the driver is there and ready.
    pub async fn ready(&self) -> Arc<Identity> {
        let mut identity = self.shared.identity.subscribe();
        let known = identity.wait_for(Option::is_some).await.map(|known| known.clone());
        known.ok().flatten().expect("the sender lives as long as this driver, and the value was there")
    }

    /// Who the driver is, if it is there; UNAVAILABLE if not.
    pub fn identity(&self) -> Result<Arc<Identity>, Status> {
        let known = self.shared.identity.borrow().clone();
        known.ok_or_else(|| Status::unavailable(ABSENT))
    }

    /// As [`Driver::identity`]; refused if the one that is there now is not the one called `name`.
    pub(crate) fn identity_of(&self, name: &str) -> Result<Arc<Identity>, Failure> {
        let identity = self.identity()?;
        if identity.name == name {
            Ok(identity)
        } else {
            Err(Failure::refused(format!("the driver here is now {:?}, not {name:?}", identity.name)))
        }
    }

    /// Changes whenever the driver goes away or comes back.
    pub fn watch(&self) -> watch::Receiver<Option<Arc<Identity>>> {
        self.shared.identity.subscribe()
    }

    /// Calls `again` each time the driver was away and is back, until `shutdown`: that has cost everything its backoff.
    pub(crate) async fn when_back(&self, shutdown: &CancellationToken, again: impl Fn()) {
        let mut identity = self.watch();
        identity.mark_unchanged();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = identity.changed() => if changed.is_err() { return },
            }
            if identity.borrow_and_update().is_some() {
                again();
            }
        }
    }

    /// Holds a volume, by the name of its PersistentVolume, or calls `when_free` once nobody does.
    pub(crate) fn try_hold(&self, volume: &str, when_free: impl FnOnce() + Send + 'static) -> Option<Held> {
        self.shared.locks.try_hold(volume, when_free)
    }

    /// CreateVolume.
    pub async fn create_volume(
        &self,
        timeout: Duration,
        request: v1::CreateVolumeRequest,
    ) -> Result<v1::Volume, Status> {
        let mut client = self.controller();
        let answer =
            self.call(timeout, request, |request| async move { client.create_volume(request).await }).await?;
        let volume = answer.volume.filter(|volume| !volume.volume_id.is_empty());
        // Not final: a driver that answers like this has made something.
        volume.ok_or_else(|| Status::aborted("the CSI driver's answer to CreateVolume has no volume id"))
    }

    /// DeleteVolume.
    pub async fn delete_volume(
        &self,
        timeout: Duration,
        request: v1::DeleteVolumeRequest,
    ) -> Result<(), Status> {
        let mut client = self.controller();
        self.call(timeout, request, |request| async move { client.delete_volume(request).await }).await?;
        Ok(())
    }

    /// ControllerPublishVolume.
    pub async fn publish(
        &self,
        timeout: Duration,
        request: v1::ControllerPublishVolumeRequest,
    ) -> Result<v1::ControllerPublishVolumeResponse, Status> {
        let mut client = self.controller();
        self.call(timeout, request, |request| async move { client.controller_publish_volume(request).await })
            .await
    }

    /// ControllerUnpublishVolume.
    pub async fn unpublish(
        &self,
        timeout: Duration,
        request: v1::ControllerUnpublishVolumeRequest,
    ) -> Result<(), Status> {
        let mut client = self.controller();
        self.call(
            timeout,
            request,
            |request| async move { client.controller_unpublish_volume(request).await },
        )
        .await?;
        Ok(())
    }

    /// One page of ListVolumes.
    pub async fn list_volumes(
        &self,
        timeout: Duration,
        request: v1::ListVolumesRequest,
    ) -> Result<v1::ListVolumesResponse, Status> {
        let mut client = self.controller();
        self.call(timeout, request, |request| async move { client.list_volumes(request).await }).await
    }

    /// ControllerExpandVolume.
    pub async fn expand(
        &self,
        timeout: Duration,
        request: v1::ControllerExpandVolumeRequest,
    ) -> Result<v1::ControllerExpandVolumeResponse, Status> {
        let mut client = self.controller();
        self.call(timeout, request, |request| async move { client.controller_expand_volume(request).await })
            .await
    }

    /// ControllerModifyVolume.
    pub async fn modify(
        &self,
        timeout: Duration,
        request: v1::ControllerModifyVolumeRequest,
    ) -> Result<(), Status> {
        let mut client = self.controller();
        self.call(timeout, request, |request| async move { client.controller_modify_volume(request).await })
            .await?;
        Ok(())
    }

    fn controller(&self) -> ControllerClient<Wire> {
        ControllerClient::new(self.shared.wire.clone()).max_decoding_message_size(LARGEST_ANSWER)
    }

    async fn call<Q, A, F>(
        &self,
        timeout: Duration,
        request: Q,
        send: impl FnOnce(Request<Q>) -> F,
    ) -> Result<A, Status>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let driver = self.shared.identity.borrow().as_ref().map(|identity| identity.name.clone());
        let answer = self.shared.ask(driver.as_deref(), timeout, request, send).await;
        if answer.as_ref().is_err_and(|status| status.code() == Code::Unavailable && broke(status)) {
            self.shared.identity.send_if_modified(|identity| identity.take().is_some());
        }
        answer
    }
}

impl Shared {
    /// Asks, and counts it.
    async fn ask<Q, A, F>(
        &self,
        driver: Option<&str>,
        timeout: Duration,
        request: Q,
        send: impl FnOnce(Request<Q>) -> F,
    ) -> Result<A, Status>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let begun = Instant::now();
        let answer = ask(timeout, request, send).await;
        if let Some(metrics) = self.metrics.get() {
            let code = answer.as_ref().err().map_or(Code::Ok, Status::code);
            metrics.observe::<Q>(driver, code, begun.elapsed());
        }
        answer
    }
}

/// Sends a request and waits for the answer, no longer than `timeout`.
async fn ask<Q, A, F>(timeout: Duration, request: Q, send: impl FnOnce(Request<Q>) -> F) -> Result<A, Status>
where
    F: Future<Output = Result<Response<A>, Status>>,
{
    let mut request = Request::new(request);
    request.set_timeout(timeout);
    match tokio::time::timeout(timeout, send(request)).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        // The transport has a clock of its own, which may be the first.
        Ok(Err(status)) if is_late(&status) => Err(late(timeout)),
        Ok(Err(status)) if broke(&status) && status.code() != Code::DeadlineExceeded => {
            let mut unavailable =
                Status::unavailable(format!("the call did not get through: {}", reason(&status)));
            unavailable.set_source(Arc::new(status));
            Err(unavailable)
        }
        Ok(Err(status)) => Err(status),
        Err(_elapsed) => Err(late(timeout)),
    }
}

fn late(timeout: Duration) -> Status {
    Status::deadline_exceeded(format!("no answer within {timeout:?}"))
}

fn is_late(status: &Status) -> bool {
    let causes = std::iter::successors(std::error::Error::source(status), |error| error.source());
    causes.into_iter().any(<dyn std::error::Error>::is::<tonic::TimeoutExpired>)
}

/// Whether a status was made here, by the transport, rather than sent by the driver.
pub(crate) fn broke(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}

fn reason(status: &Status) -> String {
    let mut deepest: &dyn std::error::Error = status;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}

/// Keeps the identity current for as long as anybody uses the driver.
async fn supervise(shared: Weak<Shared>, mut lost: watch::Receiver<Option<Arc<Identity>>>) {
    let mut silent = false;
    loop {
        if lost.wait_for(Option::is_none).await.is_err() {
            return;
        }
        let Some(shared) = shared.upgrade() else { return };
        match identify(&shared).await {
            Ok(identity) => {
                tracing::info!(driver = identity.name, "the CSI driver is ready");
                silent = false;
                shared.identity.send_replace(Some(Arc::new(identity)));
            }
            Err(status) => {
                if !silent {
                    tracing::warn!(
                        error = status.message(),
                        "the CSI driver is not ready; probing it every second"
                    );
                    silent = true;
                }
                drop(shared);
                tokio::time::sleep(PROBING).await;
            }
        }
    }
}

async fn identify(shared: &Shared) -> Result<Identity, Status> {
    let mut client = IdentityClient::new(shared.wire.clone());
    let mut asked = client.clone();
    let ready = shared
        .ask(None, ASKING, v1::ProbeRequest {}, |request| async move { asked.probe(request).await })
        .await?;
    if ready.ready == Some(false) {
        return Err(Status::unavailable("the driver says that it is not ready yet"));
    }
    let mut asked = client.clone();
    let info = shared
        .ask(None, ASKING, v1::GetPluginInfoRequest {}, |request| async move {
            asked.get_plugin_info(request).await
        })
        .await?;
    if info.name.is_empty() {
        return Err(Status::internal("the driver has no name (GetPluginInfo)"));
    }
    let name = Some(info.name.as_str());
    let plugin = shared
        .ask(name, ASKING, v1::GetPluginCapabilitiesRequest {}, |request| async move {
            client.get_plugin_capabilities(request).await
        })
        .await?;
    let services: HashSet<Service> = plugin
        .capabilities
        .iter()
        .filter_map(|capability| match &capability.r#type {
            Some(plugin_capability::Type::Service(service)) => Some(service.r#type()),
            _ => None,
        })
        .collect();
    let (controller, tells_condition) = if services.contains(&Service::ControllerService) {
        controller_capabilities(shared, name).await?
    } else {
        Default::default()
    };
    let group = if services.contains(&Service::GroupControllerService) {
        snapshots::group_capabilities(shared, name).await?
    } else {
        HashSet::new()
    };
    let node = match node_capabilities(shared, name).await {
        Err(status) if status.code() == Code::Unimplemented => HashSet::new(),
        answer => answer?,
    };
    Ok(Identity { name: info.name, services, controller, tells_condition, node, group })
}

async fn controller_capabilities(
    shared: &Shared,
    name: Option<&str>,
) -> Result<(HashSet<ControllerCapability>, bool), Status> {
    let mut client = ControllerClient::new(shared.wire.clone());
    let answer = shared
        .ask(name, ASKING, v1::ControllerGetCapabilitiesRequest {}, |request| async move {
            client.controller_get_capabilities(request).await
        })
        .await?;
    let types = answer.capabilities.iter().filter_map(|capability| {
        let controller_service_capability::Type::Rpc(rpc) = capability.r#type.as_ref()?;
        Some(rpc)
    });
    let tells_condition = types.clone().any(|rpc| rpc.r#type == health::VOLUME_CONDITION);
    Ok((types.map(controller_service_capability::Rpc::r#type).collect(), tells_condition))
}

async fn node_capabilities(shared: &Shared, name: Option<&str>) -> Result<HashSet<NodeCapability>, Status> {
    let mut client = NodeClient::new(shared.wire.clone());
    let answer = shared
        .ask(name, ASKING, v1::NodeGetCapabilitiesRequest {}, |request| async move {
            client.node_get_capabilities(request).await
        })
        .await?;
    let types = answer.capabilities.iter().filter_map(|capability| {
        let node_service_capability::Type::Rpc(rpc) = capability.r#type.as_ref()?;
        Some(rpc.r#type())
    });
    Ok(types.collect())
}

/// A status as Go's sidecars write it, which is what people search for.
pub(crate) fn describe(status: &Status) -> String {
    format!("rpc error: code = {} desc = {}", berth_csi::code::go_name(status.code()), status.message())
}
