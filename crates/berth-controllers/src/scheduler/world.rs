//! Where the scheduler looks objects up: the caches, and plain maps in tests.

use std::sync::Arc;

use berth_kube::{Cache, Cluster, Index, Key};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};

use berth_kube::storage;

/// The objects a decision rests on.
pub(super) trait World {
    fn nodes(&self) -> Vec<Arc<Node>>;
    fn pod(&self, key: &Key) -> Option<Arc<Pod>>;
    fn namespace(&self, name: &str) -> Option<Arc<Namespace>>;
    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>>;
    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>>;
    fn class(&self, name: &str) -> Option<Arc<StorageClass>>;
    fn driver(&self, name: &str) -> Option<Arc<CSIDriver>>;
    fn csi_node(&self, name: &str) -> Option<Arc<CSINode>>;
    fn attachments(&self, node: &str) -> Vec<Arc<VolumeAttachment>>;
    fn capacities(&self, class: &str) -> Vec<Arc<CSIStorageCapacity>>;
    fn budgets(&self) -> Vec<Arc<PodDisruptionBudget>>;
    /// Volumes that are reserved for this claim, and those of its class that are reserved for nobody.
    fn candidates(&self, claim: &PersistentVolumeClaim) -> Vec<Arc<PersistentVolume>>;
}

/// The caches, and who points at what.
pub(super) struct Caches {
    pub(super) pods: Cache<Pod>,
    pub(super) nodes: Cache<Node>,
    pub(super) namespaces: Cache<Namespace>,
    pub(super) claims: Cache<PersistentVolumeClaim>,
    pub(super) volumes: Cache<PersistentVolume>,
    pub(super) classes: Cache<StorageClass>,
    pub(super) drivers: Cache<CSIDriver>,
    pub(super) csi_nodes: Cache<CSINode>,
    pub(super) attachments: Cache<VolumeAttachment>,
    pub(super) capacities: Cache<CSIStorageCapacity>,
    pub(super) budgets: Cache<PodDisruptionBudget>,
    /// Pods without a node, by the claims they use.
    pub(super) pending_by_claim: Index<Pod, Key>,
    volumes_by_claim: Index<PersistentVolume, Key>,
    free_by_class: Index<PersistentVolume, String>,
    attachments_by_node: Index<VolumeAttachment, String>,
    capacities_by_class: Index<CSIStorageCapacity, String>,
}

impl Caches {
    pub(super) fn new(cluster: &Cluster) -> Self {
        let pods: Cache<Pod> = cluster.cache();
        let volumes: Cache<PersistentVolume> = cluster.cache();
        let attachments: Cache<VolumeAttachment> = cluster.cache();
        let capacities: Cache<CSIStorageCapacity> = cluster.cache();
        Self {
            nodes: cluster.cache(),
            namespaces: cluster.cache(),
            claims: cluster.cache(),
            classes: cluster.cache(),
            drivers: cluster.cache(),
            csi_nodes: cluster.cache(),
            budgets: cluster.cache(),
            pending_by_claim: pods.index(|pod| {
                let pending = storage::node_of_pod(pod).is_empty();
                storage::claims_of_pod(pod).into_iter().filter(|_| pending).map(|claim| claim.key).collect()
            }),
            volumes_by_claim: volumes.index(|volume| storage::claim_of_volume(volume).into_iter().collect()),
            free_by_class: volumes.index(|volume| {
                let free = storage::claim_of_volume(volume).is_none();
                free.then(|| storage::class_of_volume(volume).to_owned()).into_iter().collect()
            }),
            attachments_by_node: attachments.index(|attachment| vec![attachment.spec.node_name.clone()]),
            capacities_by_class: capacities.index(|capacity| vec![capacity.storage_class_name.clone()]),
            pods,
            volumes,
            attachments,
            capacities,
        }
    }
}

impl World for Caches {
    fn nodes(&self) -> Vec<Arc<Node>> {
        self.nodes.list()
    }

    fn pod(&self, key: &Key) -> Option<Arc<Pod>> {
        self.pods.get(key)
    }

    fn namespace(&self, name: &str) -> Option<Arc<Namespace>> {
        self.namespaces.named(name)
    }

    fn claim(&self, key: &Key) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.get(key)
    }

    fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.volumes.named(name)
    }

    fn class(&self, name: &str) -> Option<Arc<StorageClass>> {
        self.classes.named(name)
    }

    fn driver(&self, name: &str) -> Option<Arc<CSIDriver>> {
        self.drivers.named(name)
    }

    fn csi_node(&self, name: &str) -> Option<Arc<CSINode>> {
        self.csi_nodes.named(name)
    }

    fn attachments(&self, node: &str) -> Vec<Arc<VolumeAttachment>> {
        self.attachments_by_node.get(node)
    }

    fn capacities(&self, class: &str) -> Vec<Arc<CSIStorageCapacity>> {
        self.capacities_by_class.get(class)
    }

    fn budgets(&self) -> Vec<Arc<PodDisruptionBudget>> {
        self.budgets.list()
    }

    fn candidates(&self, claim: &PersistentVolumeClaim) -> Vec<Arc<PersistentVolume>> {
        let mut found = self.volumes_by_claim.get(&Key::of(claim));
        found.extend(self.free_by_class.get(storage::class_of_claim(claim)));
        found
    }
}
