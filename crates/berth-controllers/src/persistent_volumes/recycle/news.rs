//! What is told of a recycler pod is told of its volume too, where people look.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{Event, ObjectReference, PersistentVolume, Pod};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt as _};
use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use berth_kube::{Cluster, Recorder, Severity, reference};

use super::NAMESPACE;

/// The recycler pods that are listened to, by uid; cheap to clone.
#[derive(Clone, Default)]
pub(in crate::persistent_volumes) struct News {
    ends: Arc<Mutex<HashMap<String, CancellationToken>>>,
}

impl News {
    /// Tells of the volume what is told of the pod, until the pod is gone.
    pub(super) fn follow(
        &self,
        cluster: &Cluster,
        recorder: &Recorder,
        volume: &PersistentVolume,
        pod: &Pod,
    ) {
        let Some(uid) = pod.uid() else { return };
        let end = cluster.shutdown().child_token();
        let mut ends = self.ends();
        if ends.contains_key(&uid) {
            return;
        }
        ends.insert(uid.clone(), end.clone());
        drop(ends);
        let events = Api::namespaced(cluster.client().clone(), NAMESPACE);
        let told = tell(events, recorder.clone(), reference(volume), uid);
        tokio::spawn(async move {
            tokio::select! {
                () = end.cancelled() => {}
                () = told => {}
            }
        });
    }

    /// A recycler pod is gone.
    pub(in crate::persistent_volumes) fn end(&self, pod: &Pod) {
        if let Some(end) = pod.metadata.uid.as_ref().and_then(|uid| self.ends().remove(uid)) {
            end.cancel();
        }
    }

    fn ends(&self) -> MutexGuard<'_, HashMap<String, CancellationToken>> {
        self.ends.lock()
    }
}

async fn tell(events: Api<Event>, recorder: Recorder, volume: ObjectReference, pod: String) {
    let config = watcher::Config::default().fields(&format!("involvedObject.uid={pod}"));
    let mut stream = std::pin::pin!(watcher::watcher(events, config).default_backoff());
    while let Some(event) = stream.next().await {
        // Counted up is not news.
        let Ok(watcher::Event::Apply(event) | watcher::Event::InitApply(event)) = event else { continue };
        let is_new = event.count.is_none_or(|count| count <= 1);
        if let (Some(message), true) = (&event.message, is_new) {
            let severity =
                if event.type_.as_deref() == Some("Warning") { Severity::Warning } else { Severity::Normal };
            recorder.tell(volume.clone(), severity, "RecyclerPod", format!("Recycler pod: {message}"));
        }
    }
}
