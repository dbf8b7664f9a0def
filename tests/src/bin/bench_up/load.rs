//! Claims and pods: made, waited for, and deleted again, with the time that takes.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use berth_e2e::observe::{ObservedObjects, Observer};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::{
    core::v1::{PersistentVolumeClaim, Pod},
    storage::v1::StorageClass,
};
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

/// The class that comes with `berth up`.
const CLASS: &str = "berth-local";
/// The same, but for claims that do not wait for a pod.
const AT_ONCE: &str = "bench-at-once";
/// How many requests of a load are under way at once.
const CALLERS: usize = 16;

/// How long a load took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Took {
    /// From the first request to the last pod that runs.
    pub(crate) running: Duration,
    /// From the first deletion until nothing is left: pods, claims, attachments, volumes.
    pub(crate) gone: Duration,
}

/// Makes and deletes claims and pods.
pub(crate) struct Load {
    claims: Api<PersistentVolumeClaim>,
    pods: Api<Pod>,
}

impl Load {
    pub(crate) fn new(client: &Client) -> Self {
        Self {
            claims: Api::default_namespaced(client.clone()),
            pods: Api::default_namespaced(client.clone()),
        }
    }

    /// Takes so many claims with a pod each through their life, all at once.
    pub(crate) async fn live(&self, count: usize, observer: &mut Observer) -> Result<Took> {
        let running = self.run(count, observer).await?;
        let gone = self.end(count, observer).await?;
        Ok(Took { running, gone })
    }

    /// Makes claims with pods, and waits until all run.
    pub(crate) async fn run(&self, count: usize, observer: &mut Observer) -> Result<Duration> {
        let begun = Instant::now();
        let made = stream::iter(0..count).map(|number| async move {
            self.claims.create(&PostParams::default(), &claim(number, CLASS)?).await?;
            self.pods.create(&PostParams::default(), &pod(number)?).await?;
            anyhow::Ok(())
        });
        made.buffer_unordered(CALLERS).try_collect::<()>().await.context("make claims and pods")?;
        observer.until("all pods run", |seen| seen.running.len() == count).await?;
        Ok(begun.elapsed())
    }

    /// Deletes what `run` made, and waits until nothing is left of it.
    pub(crate) async fn end(&self, count: usize, observer: &mut Observer) -> Result<Duration> {
        let begun = Instant::now();
        let deleted = stream::iter(0..count).map(|number| async move {
            self.pods.delete(&name(number), &DeleteParams::default()).await?;
            self.claims.delete(&name(number), &DeleteParams::default()).await?;
            anyhow::Ok(())
        });
        deleted.buffer_unordered(CALLERS).try_collect::<()>().await.context("delete pods and claims")?;
        observer.until("everything is gone", ObservedObjects::is_empty).await?;
        Ok(begun.elapsed())
    }

    /// Makes claims that are bound without pods.
    pub(crate) async fn bind(&self, count: usize, observer: &mut Observer) -> Result<Duration> {
        let begun = Instant::now();
        let made = stream::iter(0..count).map(|number| async move {
            self.claims.create(&PostParams::default(), &claim(number, AT_ONCE)?).await?;
            anyhow::Ok(())
        });
        made.buffer_unordered(CALLERS).try_collect::<()>().await.context("make claims")?;
        observer.until("all claims are bound", |seen| seen.bound.len() == count).await?;
        Ok(begun.elapsed())
    }

    /// Deletes what `bind` made.
    pub(crate) async fn unbind(&self, count: usize, observer: &mut Observer) -> Result<Duration> {
        let begun = Instant::now();
        let deleted = stream::iter(0..count).map(|number| async move {
            self.claims.delete(&name(number), &DeleteParams::default()).await?;
            anyhow::Ok(())
        });
        deleted.buffer_unordered(CALLERS).try_collect::<()>().await.context("delete claims")?;
        observer.until("everything is gone", ObservedObjects::is_empty).await?;
        Ok(begun.elapsed())
    }
}

/// Makes the class for [`Load::bind`].
pub(crate) async fn class_at_once(client: &Client) -> Result<()> {
    let classes: Api<StorageClass> = Api::all(client.clone());
    let provisioner = classes.get(CLASS).await?.provisioner;
    let class =
        json!({"metadata": {"name": AT_ONCE}, "provisioner": provisioner, "volumeBindingMode": "Immediate"});
    classes.create(&PostParams::default(), &serde_json::from_value(class)?).await?;
    Ok(())
}

fn name(number: usize) -> String {
    format!("bench-{number}")
}

fn claim(number: usize, class: &str) -> Result<PersistentVolumeClaim> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name(number)},
        "spec": {
            "storageClassName": class,
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Mi"}},
        },
    }))?)
}

fn pod(number: usize) -> Result<Pod> {
    let command = "echo written > /data/file && exec sleep 1000000";
    Ok(serde_json::from_value(json!({
        "metadata": {"name": name(number)},
        "spec": {
            "containers": [{
                "name": "main", "image": "busybox", "command": ["sh", "-c", command],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": name(number)}}],
        },
    }))?)
}
