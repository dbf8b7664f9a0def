//! The Identity service: the name of the driver, what it announces, and whether it is ready.

use berth_csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
    identity_server::Identity,
    plugin_capability::{Service, Type, VolumeExpansion},
};
use tonic::{Request, Response, Status};

use super::{Reply, Services};

#[tonic::async_trait]
impl Identity for Services {
    async fn get_plugin_info(&self, _: Request<GetPluginInfoRequest>) -> Reply<GetPluginInfoResponse> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.name.clone(),
            vendor_version: self.version.clone(),
            manifest: [].into(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Reply<GetPluginCapabilitiesResponse> {
        let services = self.announced.services.iter();
        let expansion = self.announced.expansion.iter();
        let capabilities = services
            .map(|&service| Type::Service(Service { r#type: service.into() }))
            .chain(expansion.map(|&kind| Type::VolumeExpansion(VolumeExpansion { r#type: kind.into() })))
            .map(|capability| PluginCapability { r#type: Some(capability) })
            .collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Reply<ProbeResponse> {
        // `ready: false` would mean "still starting"; a plugin that is not healthy answers FAILED_PRECONDITION.
        self.ready().await.map_err(|error| Status::failed_precondition(Status::from(error).message()))?;
        Ok(Response::new(ProbeResponse { ready: Some(true) }))
    }
}
