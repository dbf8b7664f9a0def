//! What the probes of many pods cost: two of each pod every ten seconds, by TCP and by HTTP.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{
    table::{Figures, Target, count},
    times::seconds,
    up::Machine,
};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::cost;

const CALLERS: usize = 16;
/// Twice the period of the probes.
const MEASURED: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs so many pods with probes, and measures `berth up` while nothing else happens.
pub(crate) async fn measure(machine: &Machine, client: &Client, pods: usize) -> Result<Figures> {
    let listener = TcpListener::bind("0.0.0.0:0").await?;
    let port = listener.local_addr()?.port();
    let server = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                // Who connects to see whether it can asks for nothing.
                if let Ok(1..) = stream.read(&mut [0; 1024]).await {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
                }
            });
        }
    });
    let api: Api<Pod> = Api::default_namespaced(client.clone());
    let made = stream::iter(0..pods).map(|number| {
        let api = api.clone();
        async move {
            let pod = json!({
                "metadata": { "name": format!("probed-{number}") },
                "spec": { "terminationGracePeriodSeconds": 0, "containers": [{
                    "name": "main", "image": "busybox", "command": ["sleep", "1000000"],
                    "readinessProbe": { "tcpSocket": { "port": port } },
                    "livenessProbe": { "httpGet": { "port": port, "path": "/healthz" } },
                }] },
            });
            api.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
            anyhow::Ok(())
        }
    });
    made.buffer_unordered(CALLERS).try_collect::<()>().await.context("make pods with probes")?;
    let deadline = Instant::now() + PATIENCE;
    while ready(&api).await? < pods {
        ensure!(Instant::now() < deadline, "not all pods with probes are ready");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let (begun, before) = (Instant::now(), cost::cpu(machine)?);
    tokio::time::sleep(MEASURED).await;
    let used = cost::cpu(machine)?.saturating_sub(before).div_f64(begun.elapsed().as_secs_f64());
    let mut figures = Figures::beside("", "Probes");
    let aim = Some(Target::Below(seconds(Duration::from_millis(50))));
    figures.add(
        format!("CPU time per second with {} pods, two probes each every 10 s", count(pods)),
        seconds(used),
        aim,
        None,
    );
    server.abort();
    api.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    while !api.list(&ListParams::default().limit(1)).await?.items.is_empty() {
        ensure!(Instant::now() < deadline + PATIENCE, "the pods with probes do not go");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(figures)
}

async fn ready(api: &Api<Pod>) -> Result<usize> {
    let pods = api.list(&ListParams::default()).await?;
    let is_ready = |pod: &&Pod| {
        let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
        conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True")
    };
    Ok(pods.items.iter().filter(is_ready).count())
}
