//! What a volume or a container refers to besides its pod: ConfigMaps, Secrets, the node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use berth_kube::{Cluster, Key, Kind};
use k8s_openapi::api::core::v1::{ConfigMap, Container, Node, Pod, ProjectedVolumeSource, Secret};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::plugin::Failed;

/// What pods can know of their node.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NodeFacts {
    /// The node's addresses, the internal ones first.
    pub addresses: Vec<String>,
    /// What pods can have of it, by resource.
    pub allocatable: BTreeMap<String, Quantity>,
}

impl NodeFacts {
    /// The facts of a node.
    pub(crate) fn of(node: &Node) -> Self {
        let Some(status) = &node.status else { return Self::default() };
        let addresses = status.addresses.as_deref().unwrap_or_default();
        let addresses = ["InternalIP", "ExternalIP"]
            .into_iter()
            .flat_map(|kind| addresses.iter().filter(move |address| address.type_ == kind))
            .map(|address| address.address.clone())
            .collect();
        Self { addresses, allocatable: status.allocatable.clone().unwrap_or_default() }
    }

    /// The facts of the node of this name.
    pub(crate) async fn read(cluster: &Cluster, name: &str) -> Result<Self, Failed> {
        match read::<Node>(cluster, &Key::cluster(name)).await? {
            Some(node) => Ok(Self::of(&node)),
            None => Err(Failed::unchanged(format!(
                "node {name:?} not found: it is told what it has once it is registered"
            ))),
        }
    }
}

/// The names of what is referred to, all in the pod's namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct References {
    pub(super) config_maps: BTreeSet<String>,
    pub(super) secrets: BTreeSet<String>,
    /// Something of the pod itself that may change.
    pub(super) pod: bool,
    pub(super) node: bool,
}

impl References {
    /// What a volume refers to.
    pub(super) fn of_volume(volume: &ProjectedVolumeSource) -> Self {
        let mut references = Self::default();
        for source in volume.sources.iter().flatten() {
            references.config_maps.extend(source.config_map.iter().map(|source| source.name.clone()));
            references.secrets.extend(source.secret.iter().map(|source| source.name.clone()));
            for item in source.downward_api.iter().flat_map(|source| source.items.iter().flatten()) {
                references.pod |= item.field_ref.is_some();
                references.node |= item.resource_field_ref.is_some();
            }
        }
        references
    }

    /// What a container's environment refers to.
    fn of_container(container: &Container) -> Self {
        let mut references = Self::default();
        for source in container.env_from.iter().flatten() {
            references.config_maps.extend(source.config_map_ref.iter().map(|source| source.name.clone()));
            references.secrets.extend(source.secret_ref.iter().map(|source| source.name.clone()));
        }
        for source in container.env.iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            references.config_maps.extend(source.config_map_key_ref.iter().map(|source| source.name.clone()));
            references.secrets.extend(source.secret_key_ref.iter().map(|source| source.name.clone()));
            references.node |= source.resource_field_ref.is_some()
                || source
                    .field_ref
                    .as_ref()
                    .is_some_and(|field| field.field_path.starts_with("status.hostIP"));
        }
        references
    }
}

/// The objects that are referred to, as far as they exist. Holds secrets: has no `Debug`.
#[derive(Clone, Default)]
pub(crate) struct Objects {
    pub(super) config_maps: BTreeMap<String, Arc<ConfigMap>>,
    pub(super) secrets: BTreeMap<String, Arc<Secret>>,
    pub(super) node: NodeFacts,
}

impl Objects {
    /// What the environment of a pod's container refers to.
    pub(crate) async fn of_container(
        cluster: &Cluster,
        pod: &Pod,
        container: &Container,
    ) -> Result<Self, Failed> {
        Self::read(cluster, pod, &References::of_container(container)).await
    }

    pub(super) async fn read(cluster: &Cluster, pod: &Pod, references: &References) -> Result<Self, Failed> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut objects = Self::default();
        for name in &references.config_maps {
            if let Some(object) = read(cluster, &Key::new(namespace, name)).await? {
                objects.config_maps.insert(name.clone(), object);
            }
        }
        for name in &references.secrets {
            if let Some(object) = read(cluster, &Key::new(namespace, name)).await? {
                objects.secrets.insert(name.clone(), object);
            }
        }
        if references.node {
            let name = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
            objects.node = NodeFacts::read(cluster, name).await?;
        }
        Ok(objects)
    }
}

/// An object from the cache, or from the API server where the cache does not have it (yet).
async fn read<K: Kind>(cluster: &Cluster, key: &Key) -> Result<Option<Arc<K>>, Failed> {
    if key.name.is_empty() {
        return Ok(None);
    }
    match cluster.cache::<K>().get(key) {
        Some(object) => Ok(Some(object)),
        None => cluster.fetch(key).await.map_err(|error| Failed::unchanged(error.chain())),
    }
}
