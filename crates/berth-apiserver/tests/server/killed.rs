//! A server that is killed in the middle of its work, again and again, under clients that write and watch over TLS.
//!
//! `BERTH_KILLS` says how often. Every acknowledged write must be there afterwards, resource versions must not go back,
//! and a watch must go on where it was or be told that it cannot.

mod watching;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::watching::{Model, follow};
use crate::http::{Connection, Endpoint, Reply};
use crate::served::Served;

const WRITERS: usize = 8;
const SLOTS: u64 = 5;
const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";

/// Whatever the server does, it does within this.
const PATIENCE: Duration = Duration::from_secs(60);

/// The last acknowledged state of an object.
#[derive(Debug, Clone, PartialEq)]
struct State {
    version: u64,
    round: Option<String>,
}

/// What one writer knows of its objects; only it writes to them.
#[derive(Debug, Default)]
struct WrittenObjects {
    objects: HashMap<String, State>,
    /// The object whose write was not answered.
    in_doubt: Option<String>,
    round: u64,
}

fn version_of(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok()).unwrap_or(0)
}

fn round_of(object: &Value) -> Option<String> {
    let map = object["data"]["round"].as_str();
    map.or_else(|| object["status"]["conditions"][0]["message"].as_str()).map(str::to_owned)
}

fn config_map(name: &str, round: u64) -> Value {
    let data = json!({ "round": round.to_string(), "filling": "x".repeat(1000) });
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": data })
}

fn claim(name: &str) -> Value {
    let spec = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name }, "spec": spec })
}

/// One write of a writer: makes, changes and removes a config map in turn, or changes a claim's status.
async fn write(connection: &mut Connection, name: &str, have: &State, round: u64) -> std::io::Result<Reply> {
    let is_claim = name.ends_with("-0");
    let collection = if is_claim { CLAIMS } else { MAPS };
    let path = format!("{collection}/{name}");
    match (have.version, is_claim) {
        (0, true) => connection.json("POST", collection, &claim(name)).await,
        (0, false) => connection.json("POST", collection, &config_map(name, round)).await,
        (_, true) => {
            let condition = json!({ "type": "Resizing", "status": "True", "message": round.to_string() });
            let change = json!({ "status": { "conditions": [condition] } }).to_string();
            let media = "application/strategic-merge-patch+json";
            connection.send("PATCH", &format!("{path}/status"), media, change.as_bytes()).await
        }
        (_, false) if round.is_multiple_of(7) => connection.json("DELETE", &path, &json!({})).await,
        (version, false) => {
            let mut changed = config_map(name, round);
            changed["metadata"]["resourceVersion"] = version.to_string().into();
            connection.json("PUT", &path, &changed).await
        }
    }
}

/// Writes until the server is gone.
async fn write_on(
    endpoint: Endpoint,
    writer: usize,
    known: Arc<Mutex<WrittenObjects>>,
    answered: Arc<AtomicUsize>,
) {
    let Ok(mut connection) = endpoint.connect().await else { return };
    loop {
        let (name, have, round) = {
            let mut known = known.lock();
            known.round += 1;
            let name = format!("w{writer}-{}", known.round % SLOTS);
            known.in_doubt = Some(name.clone());
            let have = known.objects.get(&name).cloned().unwrap_or(State { version: 0, round: None });
            (name, have, known.round)
        };
        let Ok(reply) = write(&mut connection, &name, &have, round).await else { return };
        let object = reply.json();
        assert!(matches!(reply.status, 200 | 201), "{name} at {have:?}: {object}");
        let mut known = known.lock();
        known.in_doubt = None;
        if object["kind"] == "Status" {
            known.objects.remove(&name);
        } else {
            let state = State { version: version_of(&object), round: round_of(&object) };
            assert!(state.version > have.version, "{name} went from {have:?} to {state:?}");
            known.objects.insert(name, state);
        }
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

/// All objects of the writers, by name, and the version of the lists.
async fn list(connection: &mut Connection) -> (HashMap<String, State>, u64) {
    let mut found = HashMap::new();
    let mut newest = 0;
    for collection in [MAPS, CLAIMS] {
        let list = connection.get(collection).await.unwrap().json();
        newest = newest.max(version_of(&list));
        for object in list["items"].as_array().unwrap() {
            let state = State { version: version_of(object), round: round_of(object) };
            assert!(state.version <= version_of(&list));
            found.insert(object["metadata"]["name"].as_str().unwrap().to_owned(), state);
        }
    }
    (found, newest)
}

/// Compares what a writer knows with what is there; only the write that was not answered may differ.
fn check(writer: usize, known: &mut WrittenObjects, found: &HashMap<String, State>) {
    let in_doubt = known.in_doubt.take();
    for slot in 0..SLOTS {
        let name = format!("w{writer}-{slot}");
        let (have, is) = (known.objects.get(&name).cloned(), found.get(&name).cloned());
        if have == is {
            continue;
        }
        assert_eq!(in_doubt.as_ref(), Some(&name), "acknowledged {have:?}, found {is:?}");
        if let Some(is) = is {
            assert!(is.version > have.as_ref().map_or(0, |have| have.version), "{name} went back");
            known.objects.insert(name, is);
        } else {
            known.objects.remove(&name);
        }
    }
}

async fn wait_until(count: &AtomicUsize, wanted: usize) {
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    let reached = async {
        while count.load(Ordering::Relaxed) < wanted {
            ticks.tick().await;
        }
    };
    tokio::time::timeout(PATIENCE, reached).await.expect("the writers get on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_while_it_writes_has_lost_nothing_it_acknowledged() {
    let kills: usize = std::env::var("BERTH_KILLS").map_or(24, |kills| kills.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), 1000);
    let known: Vec<_> = (0..WRITERS).map(|_| Arc::new(Mutex::new(WrittenObjects::default()))).collect();
    let mut model = Model::default();
    let mut newest = 0;
    for kill in 0..kills {
        let answered = Arc::new(AtomicUsize::new(0));
        let mut writers = JoinSet::new();
        for (writer, known) in known.iter().enumerate() {
            writers.spawn(write_on(served.endpoint.clone(), writer, known.clone(), answered.clone()));
        }
        let watcher = tokio::spawn(follow(served.endpoint.clone(), MAPS, model));
        wait_until(&answered, [30, 120, 400, 10][kill % 4] + kill * 13 % 50).await;
        served.kill();
        while let Some(ended) = writers.join_next().await {
            ended.unwrap();
        }
        model = tokio::time::timeout(PATIENCE, watcher).await.unwrap().unwrap();
        served.start_again();
        let mut connection = served.endpoint.connect().await.unwrap();
        let (found, version) = list(&mut connection).await;
        assert!(version >= newest, "kill {kill}: from {newest} back to {version}");
        assert!(version >= model.version, "kill {kill}: a watch was told of {}", model.version);
        newest = version;
        for (writer, known) in known.iter().enumerate() {
            check(writer, &mut known.lock(), &found);
            newest = newest.max(known.lock().objects.values().map(|it| it.version).max().unwrap_or(0));
        }
    }
    assert!(model.expired + model.resumed >= kills / 2, "{model:?}");
    model.catches_up(&served.endpoint, MAPS).await;
}
