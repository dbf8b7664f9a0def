//! Repeats the events of a recycler pod on its volume, where people look for them.

use berth_core::names::events;
use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Event, ObjectReference, PersistentVolume, Pod};
use kube::ResourceExt as _;
use parking_lot::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

use berth_kube::{Cluster, Recorder, Severity, reference};

use super::NAMESPACE;

/// The recycler pods that are listened to, by uid; cheap to clone.
#[derive(Clone, Default)]
pub(in crate::persistent_volumes) struct RecyclerEvents {
    ends: Arc<Mutex<HashMap<String, CancellationToken>>>,
}

impl RecyclerEvents {
    /// Repeats the pod's events on the volume, until the pod is gone.
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
        let events = cluster.watch::<Event>(NAMESPACE, &format!("involvedObject.uid={uid}"), end);
        let (recorder, volume) = (recorder.clone(), reference(volume));
        events.subscribe(move |before, after| {
            // Counted up is not news; an event may be new and have happened several times.
            if let (None, Some(event)) = (before, after) {
                record_for_volume(&recorder, &volume, event);
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

fn record_for_volume(recorder: &Recorder, volume: &ObjectReference, event: &Event) {
    if let Some(message) = &event.message {
        let severity =
            if event.type_.as_deref() == Some("Warning") { Severity::Warning } else { Severity::Normal };
        recorder.record(volume.clone(), severity, events::RECYCLER_POD, format!("Recycler pod: {message}"));
    }
}
