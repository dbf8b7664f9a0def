//! The Identity service.

use berth_csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
    identity_server::Identity,
    plugin_capability::{Service, Type, VolumeExpansion, service},
};
use tonic::{Request, Response, Status};

use super::{Driver, Reply};

#[tonic::async_trait]
impl Identity for Driver {
    async fn get_plugin_info(&self, _: Request<GetPluginInfoRequest>) -> Reply<GetPluginInfoResponse> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.config.name.clone(),
            vendor_version: self.config.version.clone(),
            manifest: [].into(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Reply<GetPluginCapabilitiesResponse> {
        let (services, expansions) = self.features.plugin();
        let services = services.into_iter().filter(|service| self.offers(*service));
        let expansions = expansions.into_iter().filter(|_| self.offers_controller());
        let capabilities = services
            .map(|service| Type::Service(Service { r#type: service.into() }))
            .chain(expansions.map(|kind| Type::VolumeExpansion(VolumeExpansion { r#type: kind.into() })))
            .map(|capability| PluginCapability { r#type: Some(capability) })
            .collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Reply<ProbeResponse> {
        // `ready: false` would mean "still starting"; a plugin that is not healthy answers FAILED_PRECONDITION.
        self.backend
            .ready()
            .await
            .map_err(|error| Status::failed_precondition(Status::from(error).message()))?;
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}

impl Driver {
    /// Whether this process offers what the capability announces.
    fn offers(&self, service: service::Type) -> bool {
        use service::Type::{
            ControllerService, GroupControllerService, SnapshotAccessibilityConstraints,
            SnapshotMetadataService, Unknown, VolumeAccessibilityConstraints,
        };
        match service {
            ControllerService | GroupControllerService | SnapshotMetadataService => self.offers_controller(),
            VolumeAccessibilityConstraints | SnapshotAccessibilityConstraints => true,
            Unknown => false,
        }
    }
}
