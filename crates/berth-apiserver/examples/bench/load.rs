//! What is asked of a server while it is measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::Outcome;
use super::http::{Connection, Endpoint};
use super::table::Figures;

const CLIENTS: [usize; 2] = [1, 32];
/// What each of these numbers of clients asks for in all: the same of every server, so that both end up holding the same.
const REQUESTS: [usize; 2] = [5000, 20_000];
const LISTED: usize = 5000;
const WATCHERS: usize = 100;
const WATCHED_CHANGES: usize = 1000;

fn claims(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims")
}

fn claim(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name, "labels": { "app": "bench", "tier": "storage" } },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "bench",
            "resources": { "requests": { "storage": "1Gi" } }
        }
    })
}

fn volume(name: &str, claim: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "bench", "capacity": { "storage": "1Gi" },
            "claimRef": { "namespace": "many", "name": claim },
            "csi": { "driver": "bench.berth.dev", "volumeHandle": name }
        }
    })
}

/// One request, which must succeed.
async fn ask(connection: &mut Connection, method: &str, path: &str, body: &Value) -> Outcome<()> {
    let media = if method == "PATCH" { "application/strategic-merge-patch+json" } else { "application/json" };
    let reply = connection.send(method, path, media, body.to_string().as_bytes()).await?;
    if reply.status >= 300 {
        return Err(format!("{method} {path}: {} {}", reply.status, reply.json()).into());
    }
    Ok(())
}

async fn patch(connection: &mut Connection, collection: &str, name: &str, round: usize) -> Outcome<()> {
    let condition = json!({ "type": "Resizing", "status": "True", "message": format!("round {round}") });
    let body = json!({ "status": { "conditions": [condition] } });
    ask(connection, "PATCH", &format!("{collection}/{name}/status"), &body).await
}

async fn namespace(endpoint: &Endpoint, name: &str) -> Outcome<()> {
    let body = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } });
    ask(&mut endpoint.connect().await?, "POST", "/api/v1/namespaces", &body).await
}

/// Creates so many claims, shared among clients.
async fn create_claims(endpoint: &Endpoint, namespace: &'static str, total: usize) -> Outcome<()> {
    let next = Arc::new(AtomicUsize::new(0));
    each_client(endpoint, CLIENTS[1], move |mut connection, _| {
        let next = next.clone();
        async move {
            let mut number = next.fetch_add(1, Ordering::Relaxed);
            while number < total {
                ask(&mut connection, "POST", &claims(namespace), &claim(&format!("claim-{number:06}")))
                    .await?;
                number = next.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
    })
    .await
}

/// Runs one task for each of so many clients.
async fn each_client<F>(
    endpoint: &Endpoint,
    clients: usize,
    run: impl Fn(Connection, usize) -> F,
) -> Outcome<()>
where
    F: Future<Output = Outcome<()>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for client in 0..clients {
        tasks.spawn(run(endpoint.connect().await?, client));
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "at most millions")]
fn per_second(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}

/// Puts every load on a server.
pub(crate) async fn run(endpoint: &Endpoint, figures: &mut Figures) -> Outcome<()> {
    namespace(endpoint, "bench").await?;
    namespace(endpoint, "listed").await?;
    for (slot, clients) in CLIENTS.into_iter().enumerate() {
        figures.creates[slot] = creates(endpoint, clients, REQUESTS[slot]).await?;
    }
    create_claims(endpoint, "listed", LISTED).await?;
    figures.list = list(endpoint).await?;
    for (slot, clients) in CLIENTS.into_iter().enumerate() {
        figures.patches[slot] = patches(endpoint, clients, REQUESTS[slot]).await?;
    }
    figures.fan_out = fan_out(endpoint).await?;
    Ok(())
}

async fn creates(endpoint: &Endpoint, clients: usize, requests: usize) -> Outcome<f64> {
    let collection = claims("bench");
    rate(endpoint, clients, requests, move |mut connection, _, number| {
        let collection = collection.clone();
        async move {
            ask(&mut connection, "POST", &collection, &claim(&format!("claim-{clients}-{number}"))).await?;
            Ok(connection)
        }
    })
    .await
}

/// Each client has claims of its own: what is measured is not how conflicts are solved.
async fn patches(endpoint: &Endpoint, clients: usize, requests: usize) -> Outcome<f64> {
    let collection = claims("listed");
    rate(endpoint, clients, requests, move |mut connection, client, number| {
        let collection = collection.clone();
        async move {
            let name = format!("claim-{:06}", (client * 100 + number % 100) % LISTED);
            patch(&mut connection, &collection, &name, number + clients).await?;
            Ok(connection)
        }
    })
    .await
}

/// How many of so many requests are answered per second to so many clients, each asking one after the other.
async fn rate<F>(
    endpoint: &Endpoint,
    clients: usize,
    requests: usize,
    request: impl Fn(Connection, usize, usize) -> F + Clone + Send + 'static,
) -> Outcome<f64>
where
    F: Future<Output = Outcome<Connection>> + Send + 'static,
{
    let next = Arc::new(AtomicUsize::new(0));
    let begin = Instant::now();
    each_client(endpoint, clients, |mut connection, client| {
        let (next, request) = (next.clone(), request.clone());
        async move {
            let mut number = next.fetch_add(1, Ordering::Relaxed);
            while number < requests {
                connection = request(connection, client, number).await?;
                number = next.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
    })
    .await?;
    Ok(per_second(requests, begin.elapsed()))
}

/// The median of some lists.
async fn list(endpoint: &Endpoint) -> Outcome<Duration> {
    let mut connection = endpoint.connect().await?;
    let mut times = Vec::new();
    for _ in 0..7 {
        let begin = Instant::now();
        let reply = connection.get(&claims("listed")).await?;
        times.push(begin.elapsed());
        let found = reply.json()["items"].as_array().map_or(0, Vec::len);
        if found != LISTED {
            return Err(format!("{found} claims were listed").into());
        }
    }
    times.sort();
    Ok(times[times.len() / 2])
}

/// How many events per second reach watchers while many clients make changes.
async fn fan_out(endpoint: &Endpoint) -> Outcome<f64> {
    let collection = claims("listed");
    let list = endpoint.connect().await?.get(&format!("{collection}?limit=1")).await?.json();
    let version = list["metadata"]["resourceVersion"].as_str().unwrap_or_default();
    let path = format!("{collection}?watch=true&resourceVersion={version}");
    let mut watchers = JoinSet::new();
    for _ in 0..WATCHERS {
        let mut lines = endpoint.connect().await?.watch(&path).await?;
        watchers.spawn(async move {
            let mut seen = 0;
            while seen < WATCHED_CHANGES {
                seen += lines.count().await?;
            }
            Ok::<_, std::io::Error>(())
        });
    }
    let begin = Instant::now();
    let next = Arc::new(AtomicUsize::new(0));
    let writers = each_client(endpoint, CLIENTS[1], |mut connection, _| {
        let (next, collection) = (next.clone(), collection.clone());
        async move {
            let mut number = next.fetch_add(1, Ordering::Relaxed);
            while number < WATCHED_CHANGES {
                patch(&mut connection, &collection, &format!("claim-{number:06}"), 1_000_000).await?;
                number = next.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
    });
    writers.await?;
    while let Some(ended) = watchers.join_next().await {
        ended??;
    }
    Ok(per_second(WATCHED_CHANGES * WATCHERS, begin.elapsed()))
}

/// Creates so many claims and volumes; says how many per second.
pub(crate) async fn fill(endpoint: &Endpoint, objects: usize) -> Outcome<f64> {
    namespace(endpoint, "many").await?;
    let begin = Instant::now();
    create_claims(endpoint, "many", objects).await?;
    let next = Arc::new(AtomicUsize::new(0));
    let volumes = each_client(endpoint, CLIENTS[1], |mut connection, _| {
        let next = next.clone();
        async move {
            let mut number = next.fetch_add(1, Ordering::Relaxed);
            while number < objects {
                let body = volume(&format!("volume-{number:06}"), &format!("claim-{number:06}"));
                ask(&mut connection, "POST", "/api/v1/persistentvolumes", &body).await?;
                number = next.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
    });
    volumes.await?;
    Ok(per_second(2 * objects, begin.elapsed()))
}

/// How many claims there are, counted page by page.
pub(crate) async fn count(endpoint: &Endpoint) -> Outcome<usize> {
    let mut connection = endpoint.connect().await?;
    let (mut total, mut token) = (0, String::new());
    loop {
        let page = connection.get(&format!("{}?limit=5000&continue={token}", claims("many"))).await?.json();
        total += page["items"].as_array().map_or(0, Vec::len);
        match page["metadata"]["continue"].as_str() {
            Some(next) if !next.is_empty() => next.clone_into(&mut token),
            _ => return Ok(total),
        }
    }
}
