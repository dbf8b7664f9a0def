//! The driver of a cloud: its account is the controller, its disks are the node.

use std::sync::Arc;

use berth_core::{NodeId, Topology};

use super::{DiskNode, Disks};
use crate::{
    Attachment, CapacityInfo, Cloning, Controller, ControllerBuilder, Driver, Error, Expansion, Listing,
    Node, Placement, Result, Snapshots,
};

/// What this node is.
#[derive(Debug)]
pub(crate) struct CloudNode<D> {
    pub(crate) id: NodeId,
    pub(crate) topology: Topology,
    pub(crate) disks: Arc<DiskNode<D>>,
    /// How many volumes it takes, if that is known.
    pub(crate) limit: Option<u32>,
}

impl<D: Disks> CloudNode<D> {
    /// The node's part of a driver.
    pub(crate) fn part(&self) -> Node {
        let node = Node::binding(self.id.clone(), &self.disks)
            .staging(&self.disks)
            .stats(&self.disks)
            .expansion(&self.disks)
            .topology(self.topology.clone());
        match self.limit {
            Some(limit) => node.max_volumes(limit),
            None => node,
        }
    }
}

/// What every cloud offers a controller; more can be added.
pub(crate) fn controller<A>(account: &Arc<A>) -> ControllerBuilder<A::Plan>
where
    A: Placement + Listing + CapacityInfo + Cloning + Snapshots + Attachment + Expansion,
{
    Controller::new(account)
        .placement(account)
        .listing(account)
        .capacity(account)
        .cloning(account)
        .snapshots(account)
        .attachment(account)
        .expansion(account)
}

/// A driver with the parts that it was opened for.
pub(crate) fn compose<D: Disks>(
    mut driver: Driver,
    controller: Option<Controller>,
    node: Option<&CloudNode<D>>,
) -> Driver {
    if let Some(controller) = controller {
        driver = driver.controller(controller);
    }
    if let Some(node) = node {
        driver = driver.node(node.part());
    }
    driver
}

/// Whether a controller starts after its first request: one whose credentials are refused does not, one whose API cannot be reached
/// now does.
pub(crate) fn check_start(provider: &str, credentials: &str, answered: Result<()>) -> Result<()> {
    match answered {
        Err(Error::Denied(why)) => Err(Error::Denied(format!("the {credentials} is not accepted: {why}"))),
        Err(error) => {
            tracing::warn!(%error, "{provider} does not answer; the driver starts all the same");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}
