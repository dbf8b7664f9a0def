//! What the controllers of all workloads share: the cache of their kind, the workloads that a change of a pod or a
//! ReplicaSet concerns, adoption, events and the status.
//!
//! A controller adds the objects that it makes, as [`Dependents`] or as `Pods`, declares its loop over them, and decides in
//! its `plan`.

use std::sync::Arc;
use std::time::Duration;

use berth_core::names::JOB_TRACKING;
use berth_kube::{Cache, Cluster, Index, Key, Kind, Next, Recorder, Result};
use k8s_openapi::api::apps::v1::{
    DaemonSet, DaemonSetStatus, Deployment, DeploymentStatus, ReplicaSet, ReplicaSetStatus, StatefulSet,
    StatefulSetStatus,
};
use k8s_openapi::api::batch::v1::{CronJob, CronJobStatus, Job, JobStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kube::ResourceExt as _;

use super::ownership::{Dependents, chooses, claim, controller};

/// A kind of object whose controller makes others from a template.
pub(super) trait Workload: Kind {
    type Status: PartialEq;

    /// The finalizer that the objects of the workload have until they are counted.
    const FINALIZER: Option<&'static str> = None;

    /// The labels of the objects that the workload has; `None` if it finds them by their owner alone.
    fn selector(&self) -> Option<&LabelSelector>;

    fn status(&self) -> Option<&Self::Status>;

    fn set_status(&mut self, status: Self::Status);
}

macro_rules! workloads {
    ($($kind:ident: $status:ident),*) => {
        $(
            impl Workload for $kind {
                type Status = $status;

                fn selector(&self) -> Option<&LabelSelector> {
                    self.spec.as_ref().map(|spec| &spec.selector)
                }

                fn status(&self) -> Option<&$status> {
                    self.status.as_ref()
                }

                fn set_status(&mut self, status: $status) {
                    self.status = Some(status);
                }
            }
        )*
    };
}

workloads!(
    DaemonSet: DaemonSetStatus,
    Deployment: DeploymentStatus,
    ReplicaSet: ReplicaSetStatus,
    StatefulSet: StatefulSetStatus
);

impl Workload for Job {
    type Status = JobStatus;

    const FINALIZER: Option<&'static str> = Some(JOB_TRACKING);

    fn selector(&self) -> Option<&LabelSelector> {
        self.spec.as_ref()?.selector.as_ref()
    }

    fn status(&self) -> Option<&JobStatus> {
        self.status.as_ref()
    }

    fn set_status(&mut self, status: JobStatus) {
        self.status = Some(status);
    }
}

impl Workload for CronJob {
    type Status = CronJobStatus;

    fn selector(&self) -> Option<&LabelSelector> {
        None
    }

    fn status(&self) -> Option<&CronJobStatus> {
        self.status.as_ref()
    }

    fn set_status(&mut self, status: CronJobStatus) {
        self.status = Some(status);
    }
}

/// Whether a workload's selector chooses an object.
pub(super) fn is_selected<W: Workload>(workload: &W, object: &ObjectMeta) -> bool {
    workload.selector().is_some_and(|selector| chooses(selector, object))
}

/// All workloads of a kind, and how their controller writes.
pub(super) struct Workloads<W> {
    pub(super) cluster: Cluster,
    pub(super) recorder: Recorder,
    pub(super) cache: Cache<W>,
    by_namespace: Index<W, String>,
    has: fn(&W, &ObjectMeta) -> bool,
}

impl<W: Workload> Workloads<W> {
    /// The workloads of a cluster, for the controller `component`. `has` says whether an object is one of a workload's if no
    /// other controller has it: [`is_selected`], or a stricter rule.
    pub(super) fn new(cluster: &Cluster, component: &str, has: fn(&W, &ObjectMeta) -> bool) -> Self {
        let cluster = cluster.named(component);
        let cache: Cache<W> = cluster.cache();
        Self {
            recorder: Recorder::new(&cluster, component, ""),
            by_namespace: cache.index(|workload| workload.namespace().into_iter().collect()),
            cluster,
            cache,
            has,
        }
    }

    /// The workloads of a namespace.
    pub(super) fn in_namespace(&self, namespace: &str) -> Vec<Arc<W>> {
        self.by_namespace.get(namespace)
    }

    /// The workloads that the change of an object concerns: the one that controls it, or those that may adopt it.
    pub(super) fn concerned<K: Kind>(&self, before: Option<&Arc<K>>, after: Option<&Arc<K>>) -> Vec<Key> {
        let mut keys = Vec::new();
        for object in before.into_iter().chain(after) {
            let namespace = object.namespace().unwrap_or_default();
            if let Some(owner) = controller(object.meta()) {
                if owner.kind == W::kind(&()) {
                    keys.push(Key::new(namespace, owner.name.clone()));
                }
                continue;
            }
            let workloads = self.in_namespace(&namespace).into_iter();
            let adopting = workloads.filter(|workload| (self.has)(workload, object.meta()));
            keys.extend(adopting.map(|workload| Key::of(workload.as_ref())));
        }
        keys
    }

    /// The objects of a kind that a workload has, after adopting those that became its own and releasing those that are not
    /// its own any more.
    pub(super) async fn claim<K: Kind>(&self, workload: &W, objects: &Dependents<K>) -> Result<Vec<Arc<K>>> {
        claim(&self.cluster, workload, W::FINALIZER, |object| (self.has)(workload, object), objects).await
    }

    /// Writes a workload's status, if it is another one than before.
    pub(super) async fn write_status(&self, workload: &W, status: W::Status) -> Result<()> {
        if workload.status() != Some(&status) {
            self.cluster.update_status(workload, |workload| workload.set_status(status)).await?;
        }
        Ok(())
    }
}

/// To reconcile again after some seconds, if nothing changes before.
pub(super) fn again_after(seconds: Option<i64>) -> Next {
    seconds.map_or(Next::Done, |seconds| Next::After(Duration::from_secs(seconds.unsigned_abs())))
}
