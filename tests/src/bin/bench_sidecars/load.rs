//! Claims and attachments: made, waited for, and deleted again, with the time that takes.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use berth_e2e::observe::Observer;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::{
    core::v1::{PersistentVolume, PersistentVolumeClaim},
    storage::v1::VolumeAttachment,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;

use crate::{DRIVER, NAME};

/// How many requests of a load are under way at once.
const CALLERS: usize = 32;

/// Makes and deletes claims and attachments.
pub(crate) struct Load {
    claims: Api<PersistentVolumeClaim>,
    volumes: Api<PersistentVolume>,
    attachments: Api<VolumeAttachment>,
}

impl Load {
    pub(crate) fn new(client: &Client) -> Self {
        Self {
            claims: Api::namespaced(client.clone(), NAME),
            volumes: Api::all(client.clone()),
            attachments: Api::all(client.clone()),
        }
    }

    /// Makes the claims of these numbers, and waits until all claims up to them are bound.
    pub(crate) async fn bind(&self, numbers: Range<usize>, observer: &mut Observer) -> Result<Duration> {
        let (begun, end) = (Instant::now(), numbers.end);
        let made = stream::iter(numbers).map(|number| async move {
            let claim = json!({
                "metadata": {"name": name(number)},
                "spec": {
                    "storageClassName": NAME, "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Mi"}},
                },
            });
            self.claims.create(&PostParams::default(), &serde_json::from_value(claim)?).await?;
            anyhow::Ok(())
        });
        made.buffer_unordered(CALLERS).try_collect::<()>().await.context("make claims")?;
        observer.until("all claims are bound", |seen| seen.bound.len() == end).await?;
        Ok(begun.elapsed())
    }

    /// Deletes the claims of these numbers, and waits until nothing is left.
    pub(crate) async fn unbind(&self, numbers: Range<usize>, observer: &mut Observer) -> Result<Duration> {
        let begun = Instant::now();
        let deleted = stream::iter(numbers).map(|number| async move {
            self.claims.delete(&name(number), &DeleteParams::default()).await?;
            anyhow::Ok(())
        });
        deleted.buffer_unordered(CALLERS).try_collect::<()>().await.context("delete claims")?;
        observer
            .until("claims and volumes are gone", |seen| seen.claims.is_empty() && seen.volumes.is_empty())
            .await?;
        Ok(begun.elapsed())
    }

    /// Asks for so many volumes to be attached and waits until they are, and the same for detached.
    pub(crate) async fn attach(&self, count: usize, observer: &mut Observer) -> Result<(Duration, Duration)> {
        let volumes = self.volumes.list(&ListParams::default()).await?.items;
        let names: Vec<String> = volumes.iter().map(PersistentVolume::name_any).take(count).collect();
        let begun = Instant::now();
        let made = stream::iter(&names).map(|volume| async move {
            let attachment = json!({
                "metadata": {"name": format!("bench-{volume}")},
                "spec": {
                    "attacher": DRIVER, "nodeName": NAME, "source": {"persistentVolumeName": volume},
                },
            });
            self.attachments.create(&PostParams::default(), &serde_json::from_value(attachment)?).await?;
            anyhow::Ok(())
        });
        made.buffer_unordered(CALLERS).try_collect::<()>().await.context("make attachments")?;
        observer.until("all are attached", |seen| seen.attached.len() == names.len()).await?;
        let attached = begun.elapsed();
        let begun = Instant::now();
        let deleted = stream::iter(&names).map(|volume| async move {
            self.attachments.delete(&format!("bench-{volume}"), &DeleteParams::default()).await?;
            anyhow::Ok(())
        });
        deleted.buffer_unordered(CALLERS).try_collect::<()>().await.context("delete attachments")?;
        observer.until("all are detached", |seen| seen.attachments.is_empty()).await?;
        Ok((attached, begun.elapsed()))
    }
}

fn name(number: usize) -> String {
    format!("bench-{number}")
}
