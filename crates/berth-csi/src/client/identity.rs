//! Who a driver is and what it can do: asked once per connection, not per call.

use std::collections::HashSet;
use std::time::Duration;

use tonic::{Code, Status};

use super::Client;
use crate::v1::{
    self, controller_service_capability, group_controller_service_capability, node_service_capability,
    plugin_capability,
};

pub use crate::v1::controller_service_capability::rpc::Type as ControllerCapability;
pub use crate::v1::group_controller_service_capability::rpc::Type as GroupCapability;
pub use crate::v1::node_service_capability::rpc::Type as NodeCapability;
pub use crate::v1::plugin_capability::service::Type as PluginService;

/// The number of the controller capability VOLUME_CONDITION, which CSI 1.13 has taken away.
const VOLUME_CONDITION: i32 = 11;

/// Who a driver is and what it can do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Its name, as it stands in StorageClass.provisioner and CSIDriver.
    pub name: String,
    /// What the plugin as a whole offers.
    pub services: HashSet<PluginService>,
    /// What its Controller service can do.
    pub controller: HashSet<ControllerCapability>,
    /// Whether it reports its volumes' condition as drivers did before CSI 1.13 (VOLUME_CONDITION).
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

    /// Whether volumes are accessible from some nodes only (topology).
    pub fn has_topology(&self) -> bool {
        self.services.contains(&PluginService::VolumeAccessibilityConstraints)
    }

    /// Whether volumes are attached to nodes by calls.
    pub fn attaches(&self) -> bool {
        self.services.contains(&PluginService::ControllerService)
            && self.can(ControllerCapability::PublishUnpublishVolume)
    }
}

impl Client {
    /// Asks a driver that is ready who it is and what all its services can do, each question within `timeout`.
    ///
    /// Refused if the driver says that it is not ready, or has no name.
    pub async fn identify(&self, timeout: Duration) -> Result<Identity, Status> {
        *self.shared.driver_name.write() = None;
        let ready = self.call(timeout, v1::ProbeRequest {}).await?.ready;
        if ready == Some(false) {
            return Err(Status::unavailable("the driver says that it is not ready yet"));
        }
        let name = self.call(timeout, v1::GetPluginInfoRequest {}).await?.name;
        if name.is_empty() {
            return Err(Status::internal("the driver has no name (GetPluginInfo)"));
        }
        *self.shared.driver_name.write() = Some(name.clone());
        let mut identity = Identity { name, ..Identity::default() };
        let plugin = self.call(timeout, v1::GetPluginCapabilitiesRequest {}).await?;
        identity.services = plugin
            .capabilities
            .iter()
            .filter_map(|capability| match &capability.r#type {
                Some(plugin_capability::Type::Service(service)) => Some(service.r#type()),
                _ => None,
            })
            .collect();
        if identity.services.contains(&PluginService::ControllerService) {
            let answer = self.call(timeout, v1::ControllerGetCapabilitiesRequest {}).await?;
            for capability in answer.capabilities {
                let Some(controller_service_capability::Type::Rpc(rpc)) = capability.r#type else { continue };
                identity.controller.insert(rpc.r#type());
                identity.tells_condition |= rpc.r#type == VOLUME_CONDITION;
            }
        }
        if identity.services.contains(&PluginService::GroupControllerService) {
            let answer = self.call(timeout, v1::GroupControllerGetCapabilitiesRequest {}).await?;
            identity.group = answer
                .capabilities
                .iter()
                .filter_map(|capability| {
                    let group_controller_service_capability::Type::Rpc(rpc) = capability.r#type.as_ref()?;
                    Some(rpc.r#type())
                })
                .collect();
        }
        identity.node = match self.node_capabilities(timeout).await {
            Err(status) if status.code() == Code::Unimplemented => HashSet::new(),
            answer => answer?,
        };
        Ok(identity)
    }

    /// Asks what the driver's Node service can do.
    pub async fn node_capabilities(&self, timeout: Duration) -> Result<HashSet<NodeCapability>, Status> {
        let answer = self.call(timeout, v1::NodeGetCapabilitiesRequest {}).await?;
        let types = answer.capabilities.iter().filter_map(|capability| {
            let node_service_capability::Type::Rpc(rpc) = capability.r#type.as_ref()?;
            Some(rpc.r#type())
        });
        Ok(types.collect())
    }
}
