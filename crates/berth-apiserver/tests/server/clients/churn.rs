//! Objects that are made, changed and removed without end, by several writers at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;

use super::PATIENCE;

const WRITERS: usize = 16;
const SLOTS: usize = 40;
/// How often a writer passes over its slots from making objects to removing them.
const PASSES: usize = 5;
/// How long a writer waits before it asks a server again that was not there.
const AGAIN: Duration = Duration::from_millis(20);

/// The changes that are to be made, and how many were.
pub(crate) struct Churn {
    client: Client,
    total: usize,
    made: watch::Sender<usize>,
    restarts: watch::Sender<usize>,
}

impl Churn {
    pub(crate) fn new(client: Client, total: usize) -> Self {
        Self { client, total, made: watch::Sender::new(0), restarts: watch::Sender::new(0) }
    }

    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Waits until so many changes were made.
    pub(crate) async fn reach(&self, changes: usize) {
        self.made.subscribe().wait_for(|made| *made >= changes).await.unwrap();
    }

    /// Tells slow readers to let go of what they hold, since the server is about to stop.
    pub(crate) fn announce_restart(&self) {
        self.restarts.send_modify(|restarts| *restarts += 1);
    }

    /// Rests until so many more changes were made, or the server is restarted, or all is done.
    pub(crate) async fn rest(&self, changes: usize) {
        let mut restarts = self.restarts.subscribe();
        let target = (*self.made.borrow() + changes).min(self.total);
        tokio::select! {
            () = self.reach(target) => {}
            _ = restarts.changed() => {}
        }
    }

    /// Starts all writers and returns when each has made all of its changes.
    pub(crate) async fn run(self: &Arc<Self>) {
        let writers: Vec<_> = (0..WRITERS).map(|writer| tokio::spawn(self.clone().write(writer))).collect();
        for writer in writers {
            writer.await.unwrap();
        }
    }

    async fn write(self: Arc<Self>, writer: usize) {
        let api: Api<ConfigMap> = Api::default_namespaced(self.client.clone());
        // Each begins elsewhere, so that they do not end all together where hardly an object is left.
        let mut round = writer * PASSES * SLOTS / WRITERS;
        while *self.made.borrow() < self.total {
            round += 1;
            let name = format!("c{writer}-{}", round * 7 % SLOTS);
            match change(&api, &name, round).await {
                Ok(()) => self.made.send_modify(|made| *made += 1),
                // The object is there after all, or gone: a write before a restart was not answered.
                Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
                Err(kube::Error::Api(status)) => panic!("{name}: {status:?}"),
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    /// Every object's resource version, from a list, when the server can be asked.
    pub(crate) async fn list(&self) -> BTreeMap<String, String> {
        let api: Api<ConfigMap> = Api::default_namespaced(self.client.clone());
        let list = tokio::time::timeout(PATIENCE, async {
            loop {
                match api.list(&ListParams::default()).await {
                    Ok(list) => return list,
                    Err(_) => tokio::time::sleep(AGAIN).await,
                }
            }
        });
        list.await.unwrap().iter().map(|map| (map.name_any(), version(map))).collect()
    }
}

pub(crate) fn version(map: &ConfigMap) -> String {
    map.resource_version().expect("every object has a version")
}

async fn change(api: &Api<ConfigMap>, name: &str, round: usize) -> kube::Result<()> {
    // An object lives for some rounds over its slot, then it goes.
    match round / SLOTS % PASSES {
        0 => {
            let mut map = ConfigMap::default();
            map.metadata.name = Some(name.to_owned());
            map.data = Some([("filling".to_owned(), "x".repeat(500))].into());
            api.create(&PostParams::default(), &map).await.map(|_| ())
        }
        4 => api.delete(name, &DeleteParams::default()).await.map(|_| ()),
        _ => {
            let data = json!({ "data": { "round": round.to_string() } });
            api.patch(name, &PatchParams::default(), &Patch::Merge(data)).await.map(|_| ())
        }
    }
}
