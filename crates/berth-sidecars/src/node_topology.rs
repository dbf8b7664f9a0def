//! The topology of the driver's own node, for components that run on every node and work only for theirs.

use std::collections::BTreeMap;
use std::time::Duration;

use berth_csi::v1::NodeGetInfoRequest;
use berth_kube::selectors;
use k8s_openapi::api::core::v1::PersistentVolume;

use crate::driver::Driver;

/// How long to wait before the driver is asked again where it is.
const ASKING: Duration = Duration::from_secs(1);

/// The topology segments of the node that the driver runs on; `None` if the driver announces no topology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeTopology(pub(crate) Option<BTreeMap<String, String>>);

impl NodeTopology {
    /// Asks the driver for its topology until it answers.
    pub(crate) async fn find(driver: &Driver, timeout: Duration) -> Self {
        loop {
            match driver.call(timeout, NodeGetInfoRequest {}).await {
                Ok(info) => return Self(info.accessible_topology.map(|topology| topology.segments)),
                Err(status) => {
                    let error = berth_csi::code::status_text(&status);
                    tracing::warn!(
                        error,
                        "the driver does not answer with its topology (NodeGetInfo); asking again"
                    );
                    tokio::time::sleep(ASKING).await;
                }
            }
        }
    }

    /// Whether a volume can be used here; one without node affinity can be used everywhere.
    pub(crate) fn reaches(&self, volume: &PersistentVolume) -> bool {
        let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref()?.required.as_ref());
        match (affinity, &self.0) {
            // Nothing but its topology is known of the node, so a field of it never matches.
            (Some(affinity), Some(segments)) => selectors::node_selector(affinity, "", segments),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_is_reached_from_the_places_of_its_affinity_and_from_everywhere_without_one() {
        let volume = |affinity: serde_json::Value| -> PersistentVolume {
            serde_json::from_value(json!({"spec": {"nodeAffinity": affinity}})).unwrap()
        };
        let expression = json!({"key": "example.com/node", "operator": "In", "values": ["a"]});
        let of_a = volume(json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}));
        let of_all = volume(json!(null));
        let at = |node: &str| NodeTopology(Some([("example.com/node".to_owned(), node.to_owned())].into()));
        assert!(at("a").reaches(&of_a));
        assert!(!at("b").reaches(&of_a));
        assert!(at("b").reaches(&of_all));
        assert!(NodeTopology(None).reaches(&of_a), "a driver without topology reaches every node");
    }
}
