//! The kinds of objects that the program knows, and what is compiled once for each of them.
//!
//! Reading and writing the JSON of a kind is more code than most loops. So it is made once, where the kind is declared
//! by [`crate::kinds!`], and not in every crate and for every way to read it.

use std::fmt::Debug;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{
    ConfigMap, Endpoints, Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret,
    Service, ServiceAccount,
};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::storage::v1::{
    CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment, VolumeAttributesClass,
};
use kube::Resource;
use serde::{Serialize, de::DeserializeOwned};
use tokio_util::sync::CancellationToken;

use crate::cluster::{Cluster, Selector};
use crate::{Cache, Key, Result, write};

/// A kind of object known when the program is built; declared with [`crate::kinds!`].
pub trait Kind:
    Resource<DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// Reads an object from JSON.
    fn decode(json: &[u8]) -> serde_json::Result<Self>;

    /// Writes an object as JSON.
    fn encode(&self) -> serde_json::Result<Vec<u8>>;

    #[doc(hidden)]
    fn operations() -> Operations<Self>;
}

/// Declares types as kinds: `kinds!(VolumeSnapshot, VolumeSnapshotContent);`
#[macro_export]
macro_rules! kinds {
    ($($kind:ty),* $(,)?) => {
        $(
            impl $crate::Kind for $kind {
                #[inline(never)]
                fn decode(json: &[u8]) -> $crate::__private::JsonResult<Self> {
                    $crate::__private::decode(json)
                }

                #[inline(never)]
                fn encode(&self) -> $crate::__private::JsonResult<Vec<u8>> {
                    $crate::__private::encode(self)
                }

                #[inline(never)]
                fn operations() -> $crate::__private::Operations<Self> {
                    $crate::__private::Operations::new()
                }
            }
        )*
    };
}

kinds!(
    CSIDriver,
    CSINode,
    CSIStorageCapacity,
    ConfigMap,
    ControllerRevision,
    CronJob,
    DaemonSet,
    Deployment,
    EndpointSlice,
    Endpoints,
    Event,
    Job,
    Lease,
    Namespace,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    PodDisruptionBudget,
    ReplicaSet,
    Secret,
    Service,
    ServiceAccount,
    StatefulSet,
    StorageClass,
    VolumeAttachment,
    VolumeAttributesClass,
);

#[doc(hidden)]
pub mod private {
    use serde::{Serialize, de::DeserializeOwned};
    pub use serde_json::Result as JsonResult;

    pub use super::Operations;

    pub fn decode<K: DeserializeOwned>(json: &[u8]) -> JsonResult<K> {
        serde_json::from_slice(json)
    }

    pub fn encode<K: Serialize>(object: &K) -> JsonResult<Vec<u8>> {
        serde_json::to_vec(object)
    }
}

/// What becomes of a request.
type Reply<'a, T> = BoxFuture<'a, Result<T>>;

/// A change of an object that may have to be made again.
pub(crate) type Change<'a, K> = Box<dyn FnMut(&mut K) + Send + 'a>;

type Edit<K> = for<'a> fn(&'a Cluster, &'static str, K, Change<'a, K>) -> Reply<'a, Option<Arc<K>>>;

/// What is done with objects of a kind, as functions that are compiled where the kind is declared.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Operations<K> {
    pub(crate) cache: fn(&Cluster, Selector) -> Cache<K>,
    pub(crate) watch: fn(&Cluster, &str, Selector, CancellationToken) -> Cache<K>,
    pub(crate) create: for<'a> fn(&'a Cluster, &K) -> Reply<'a, Arc<K>>,
    pub(crate) fetch: for<'a> fn(&'a Cluster, Key) -> Reply<'a, Option<Arc<K>>>,
    pub(crate) list: for<'a> fn(&'a Cluster, &str, Selector) -> Reply<'a, Vec<K>>,
    pub(crate) write: for<'a> fn(&'a Cluster, &'static str, &K, K) -> Reply<'a, Arc<K>>,
    pub(crate) edit: Edit<K>,
    pub(crate) remove_finalizer: for<'a> fn(&'a Cluster, &K, String) -> Reply<'a, ()>,
}

impl<K: Kind> Operations<K> {
    #[doc(hidden)]
    pub fn new() -> Self {
        Self {
            cache: Cluster::selected,
            watch: Cluster::watched,
            create: write::create,
            fetch: write::fetch,
            list: write::list,
            write: write::send_difference,
            edit: write::edit,
            remove_finalizer: write::remove_finalizer,
        }
    }
}
