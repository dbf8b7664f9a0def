//! Writes the status of a pod, one write at a time, and lets Kubernetes forget a pod of which nothing is left.

use berth_kube::{Key, Next};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Preconditions};

use super::status::merged;
use super::{Error, Pods};

impl Pods {
    pub(super) async fn report(&self, uid: &str) -> Result<Next, Error> {
        let Some(entry) = self.entry(uid) else { return Ok(Next::Done) };
        let Some(seen) = entry.latest() else { return Ok(Next::Done) };
        // The cache also has what we wrote ourselves.
        let pod = self.cache.get(&Key::of(seen.as_ref())).filter(|pod| pod.uid().as_deref() == Some(uid));
        let Some(pod) = pod else { return Ok(Next::Done) };
        let (status, finished) = {
            let told = entry.told();
            (told.status.clone(), told.finished)
        };
        if let Some(status) = status {
            let written = self.options.cluster.update_status(pod.as_ref(), |pod| put(pod, status)).await;
            match written {
                Ok(_) => {}
                Err(error) if error.is_not_found() => return Ok(Next::Done),
                Err(error) => return Err(error.into()),
            }
        }
        if finished {
            let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
            let parameters = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            };
            self.options.cluster.delete_with(pod.as_ref(), &parameters).await?;
        }
        Ok(Next::Done)
    }
}

/// Puts a status into a pod as it is by now: the times of conditions that did not change stay, and so does what others
/// have written meanwhile.
fn put(pod: &mut Pod, status: PodStatus) {
    let old = pod.status.take().unwrap_or_default();
    let conditions =
        merged(old.conditions.as_deref().unwrap_or_default(), status.conditions.unwrap_or_default());
    pod.status = Some(PodStatus {
        phase: status.phase,
        reason: status.reason.or(old.reason),
        message: status.message.or(old.message),
        conditions: Some(conditions),
        container_statuses: status.container_statuses,
        init_container_statuses: status.init_container_statuses,
        host_ip: status.host_ip,
        host_ips: status.host_ips,
        pod_ip: status.pod_ip,
        pod_ips: status.pod_ips,
        start_time: old.start_time.clone().or(status.start_time),
        qos_class: old.qos_class.clone().or(status.qos_class),
        observed_generation: status.observed_generation,
        ..old
    });
}
