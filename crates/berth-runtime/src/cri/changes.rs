//! What happens to containers by itself: they end, and their logs grow.

use std::{
    fs,
    path::PathBuf,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::MissedTickBehavior;
use tonic::{Code, transport::Channel};

use super::{
    Container, Cri, Inner, LOOK_UP, PAUSE,
    calls::answer,
    v1::{self, runtime_service_client::RuntimeServiceClient},
};
use crate::{
    Result,
    log::{ROTATE_AT, log_files},
};

/// How often containers are listed where there are no events.
const POLL: Duration = Duration::from_millis(500);
/// How often logs are looked at whether they have grown too long.
const LOGS: Duration = Duration::from_secs(10);

/// Follows the ends of containers for as long as there is somebody who wants to know.
pub(super) async fn watch_containers(runtime: Weak<Inner>, mut client: RuntimeServiceClient<Channel>) {
    let (stopped, deleted) = (
        i32::from(v1::ContainerEventType::ContainerStoppedEvent),
        i32::from(v1::ContainerEventType::ContainerDeletedEvent),
    );
    loop {
        let events = client.get_container_events(v1::GetEventsRequest {}).await;
        let Some(inner) = runtime.upgrade() else { return };
        let cri = Cri(inner);
        match events {
            Ok(events) => {
                let mut events = events.into_inner();
                // What ended before there were events, or while the runtime was away.
                note(cri.observe_ended().await);
                drop(cri);
                while let Ok(Some(event)) = events.message().await {
                    let Some(inner) = runtime.upgrade() else { return };
                    let cri = Cri(inner);
                    if event.container_event_type == stopped || event.container_event_type == deleted {
                        let named =
                            |container: &&Arc<Container>| container.name.get() == Some(&event.container_id);
                        let container = cri.lock().values().find(named).cloned();
                        if let Some(container) = container {
                            note(cri.observe(&container).await);
                        }
                    }
                }
            }
            Err(status) if status.code() == Code::Unimplemented => {
                if cri.lock().values().any(|container| container.is_running()) {
                    note(cri.observe_ended().await);
                    drop(cri);
                    tokio::time::sleep(POLL).await;
                } else {
                    let started = cri.0.started.clone();
                    drop(cri);
                    started.notified().await;
                }
                continue;
            }
            Err(_) => drop(cri),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn note(observed: Result<()>) {
    if let Err(error) = observed {
        tracing::debug!(error = error.sentence(), "the state of containers is not known");
    }
}

/// Has logs begin anew that have grown too long, at intervals, as the kubelet does it.
pub(super) async fn rotate_logs(runtime: Weak<Inner>) {
    let mut ticks = tokio::time::interval(LOGS);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(inner) = runtime.upgrade() else { return };
        let cri = Cri(inner);
        let running: Vec<Arc<Container>> =
            cri.lock().values().filter(|container| container.is_running()).cloned().collect();
        for container in running {
            let (Some(log), Some(name)) = (container.log.get(), container.name.get()) else { continue };
            if !fs::metadata(log).is_ok_and(|seen| seen.len() >= ROTATE_AT) {
                continue;
            }
            let names: Vec<PathBuf> = log_files(log).collect();
            for pair in names.windows(2).rev() {
                if let [newer, older] = pair {
                    // Those that are not there yet are no reason to stop.
                    let _ = fs::rename(newer, older);
                }
            }
            let request = v1::ReopenContainerLogRequest { container_id: name.clone() };
            let mut client = cri.client();
            note(answer("reopen a log", LOOK_UP, client.reopen_container_log(request)).await.map(drop));
        }
    }
}
