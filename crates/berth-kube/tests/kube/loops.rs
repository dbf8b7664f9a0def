//! Caches, writes, queues and events on the embedded API server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use berth_kube::{Backoff, Cluster, Key, Loop, Next, Queue, Recorder};
use berth_testkit::{EmbeddedServer, PATIENCE};
use k8s_openapi::api::core::v1::{ConfigMap, Event};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

struct Running {
    cluster: Cluster,
    api: Api<ConfigMap>,
    _stop: DropGuard,
    _server: EmbeddedServer,
}

async fn running() -> Running {
    let server = EmbeddedServer::start().await;
    let shutdown = CancellationToken::new();
    let cluster = Cluster::new(server.client(), shutdown.clone());
    let api = Api::namespaced(server.client(), "default");
    Running { cluster, api, _stop: shutdown.drop_guard(), _server: server }
}

fn config(name: &str, value: &str) -> ConfigMap {
    let mut config = ConfigMap::default();
    config.metadata.name = Some(name.to_owned());
    config.metadata.namespace = Some("default".to_owned());
    config.data = Some(BTreeMap::from([("value".to_owned(), value.to_owned())]));
    config
}

fn value(config: &ConfigMap) -> String {
    config.data.as_ref().and_then(|data| data.get("value")).cloned().unwrap_or_default()
}

#[tokio::test]
async fn subscribers_hear_of_what_is_there_and_of_every_change_in_order() {
    let running = running().await;
    running.api.create(&PostParams::default(), &config("a", "1")).await.unwrap();
    let cache = running.cluster.cache::<ConfigMap>();
    cache.synced().await;
    let (sender, mut heard) = mpsc::unbounded_channel();
    cache.subscribe(move |before, after| {
        let text = |object: Option<&Arc<ConfigMap>>| object.map(|object| value(object));
        if after.or(before).is_some_and(|object| object.metadata.name.as_deref() == Some("a")) {
            sender.send((text(before), text(after))).unwrap();
        }
    });
    let patch = Patch::Merge(serde_json::json!({"data": {"value": "2"}}));
    running.api.patch("a", &PatchParams::default(), &patch).await.unwrap();
    running.api.delete("a", &DeleteParams::default()).await.unwrap();
    let some = |text: &str| Some(text.to_owned());
    for expected in [(None, some("1")), (some("1"), some("2")), (some("2"), None)] {
        assert_eq!(tokio::time::timeout(PATIENCE, heard.recv()).await.unwrap().unwrap(), expected);
    }
}

#[tokio::test]
async fn a_write_is_in_the_cache_when_it_returns() {
    let running = running().await;
    let cache = running.cluster.cache::<ConfigMap>();
    cache.synced().await;
    for round in 0..50 {
        let name = format!("own-{round}");
        let created = running.cluster.create(&config(&name, "1")).await.unwrap();
        assert_eq!(value(&cache.get(&Key::new("default", &name)).unwrap()), "1");
        running
            .cluster
            .update(created.as_ref(), |config| {
                config.data.get_or_insert_default().insert("value".to_owned(), "2".to_owned());
            })
            .await
            .unwrap();
        assert_eq!(value(&cache.get(&Key::new("default", &name)).unwrap()), "2");
    }
}

#[tokio::test]
async fn a_write_based_on_an_old_state_is_a_conflict_and_changes_nothing() {
    let running = running().await;
    let old = running.cluster.create(&config("a", "1")).await.unwrap();
    let set = |text: &'static str| {
        move |config: &mut ConfigMap| {
            config.data.get_or_insert_default().insert("value".to_owned(), text.to_owned());
        }
    };
    running.cluster.update(old.as_ref(), set("2")).await.unwrap();
    let refused = running.cluster.update(old.as_ref(), set("3")).await.unwrap_err();
    assert!(refused.is_conflict(), "{refused:?}");
    assert_eq!(value(&running.api.get("a").await.unwrap()), "2");
    assert!(running.cluster.create(&config("a", "4")).await.unwrap_err().is_already_exists());
    assert!(running.cluster.fetch::<ConfigMap>(&Key::new("default", "b")).await.unwrap().is_none());
    running.cluster.delete(old.as_ref()).await.unwrap();
    running.cluster.delete(old.as_ref()).await.unwrap();
}

#[tokio::test]
async fn an_edit_is_made_to_the_newest_state_and_again_when_somebody_else_was_quicker() {
    let running = running().await;
    let old = running.cluster.create(&config("a", "1")).await.unwrap();
    let patch = Patch::Merge(serde_json::json!({"data": {"other": "kept"}}));
    running.api.patch("a", &PatchParams::default(), &patch).await.unwrap();
    let mut calls = 0;
    let edited = running.cluster.edit(old.as_ref(), |config| {
        calls += 1;
        config.data.get_or_insert_default().insert("value".to_owned(), "2".to_owned());
    });
    let edited = edited.await.unwrap().expect("it is there");
    assert_eq!((calls, value(&edited).as_str()), (2, "2"));
    assert_eq!(edited.data.as_ref().unwrap()["other"], "kept");

    running.api.delete("a", &DeleteParams::default()).await.unwrap();
    let set = |config: &mut ConfigMap| config.data = None;
    assert!(running.cluster.edit(edited.as_ref(), set).await.unwrap().is_none(), "it is gone");
    running.cluster.create(&config("a", "new")).await.unwrap();
    assert!(running.cluster.edit(edited.as_ref(), set).await.unwrap().is_none(), "another one is there");
    assert_eq!(value(&running.api.get("a").await.unwrap()), "new");
}

#[tokio::test]
async fn a_loop_looks_at_what_is_there_and_at_what_changes_once_its_caches_are_complete() {
    let running = running().await;
    running.cluster.create(&config("a", "1")).await.unwrap();
    let (configs, events) = (running.cluster.cache::<ConfigMap>(), running.cluster.cache::<Event>());
    let queue = running.cluster.queue("test", Backoff::default());
    let (sender, mut looked_at) = mpsc::unbounded_channel();
    let (known, complete) = (configs.clone(), events.clone());
    let control = Loop::new(&running.cluster, &queue)
        .keyed(&configs)
        .also(&events, |event| event.involved_object.name.clone().map(|name| Key::new("default", name)))
        .run(1, move |key| {
            let _ = sender.send((key.name.clone(), known.get(&key).map(|config| value(&config))));
            let complete = complete.clone();
            async move {
                complete.synced().await;
                Ok::<_, berth_kube::Error>(Next::Done)
            }
        });
    let control = tokio::spawn(control);
    let mut next = async || loop {
        let (name, value) = tokio::time::timeout(PATIENCE, looked_at.recv()).await.unwrap().unwrap();
        if name == "a" {
            return value;
        }
    };
    assert_eq!(next().await.as_deref(), Some("1"));
    let recorder = Recorder::new(&running.cluster, "tester", "");
    recorder.normal(configs.get(&Key::new("default", "a")).unwrap().as_ref(), "Tested", "by name");
    assert_eq!(next().await.as_deref(), Some("1"), "an event about it counts");
    running.api.delete("a", &DeleteParams::default()).await.unwrap();
    assert_eq!(next().await, None);
    running.cluster.shutdown().cancel();
    tokio::time::timeout(PATIENCE, control).await.expect("a loop ends with its cluster").unwrap();
}

#[tokio::test]
async fn a_write_keeps_annotations_that_the_cache_does_not() {
    const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
    let running = running().await;
    let mut applied = config("a", "1");
    applied.metadata.annotations = Some(BTreeMap::from([(LAST_APPLIED.to_owned(), "{}".to_owned())]));
    running.api.create(&PostParams::default(), &applied).await.unwrap();
    let seen = running.cluster.fetch::<ConfigMap>(&Key::new("default", "a")).await.unwrap().unwrap();
    assert!(!seen.metadata.annotations.iter().flatten().any(|(name, _)| name == LAST_APPLIED));
    let clear = |config: &mut ConfigMap| config.metadata.annotations = None;
    running.cluster.update(seen.as_ref(), clear).await.unwrap();
    let annotations = running.api.get("a").await.unwrap().metadata.annotations.unwrap_or_default();
    assert!(annotations.contains_key(LAST_APPLIED), "{annotations:?}");
}

#[tokio::test]
async fn an_index_follows_its_objects() {
    let running = running().await;
    let cache = running.cluster.cache::<ConfigMap>();
    cache.synced().await;
    let by_value = cache.index(|config| vec![value(config)]);
    let created = running.cluster.create(&config("a", "x")).await.unwrap();
    running.cluster.create(&config("b", "x")).await.unwrap();
    assert_eq!(by_value.get("x").len(), 2);
    running
        .cluster
        .update(created.as_ref(), |config| {
            config.data.get_or_insert_default().insert("value".to_owned(), "y".to_owned());
        })
        .await
        .unwrap();
    assert_eq!(by_value.get("x").len(), 1);
    assert_eq!(by_value.get("y").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_key_is_worked_on_by_one_at_a_time_and_again_if_it_changed_meanwhile() {
    let queue: Queue<u32> = Queue::new("test", Backoff::default());
    let (busy, most, runs) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let stop = CancellationToken::new();
    let again = queue.clone();
    for _ in 0..3 {
        queue.add(7);
    }
    let work = {
        let (busy, most, runs, stop) = (busy.clone(), most.clone(), runs.clone(), stop.clone());
        move |key| {
            let (busy, most, runs, stop, again) =
                (busy.clone(), most.clone(), runs.clone(), stop.clone(), again.clone());
            async move {
                most.fetch_max(busy.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                match runs.fetch_add(1, Ordering::SeqCst) {
                    0 => again.add(key),
                    _ => stop.cancel(),
                }
                tokio::task::yield_now().await;
                busy.fetch_sub(1, Ordering::SeqCst);
                Ok::<_, berth_kube::Error>(Next::Done)
            }
        }
    };
    queue.run(4, stop, work).await;
    assert_eq!((most.load(Ordering::SeqCst), runs.load(Ordering::SeqCst)), (1, 2));
}

#[derive(Debug, thiserror::Error)]
#[error("no luck")]
struct NoLuck;
impl berth_kube::Failure for NoLuck {}

#[tokio::test(start_paused = true)]
async fn failures_come_again_after_a_growing_pause_and_a_panic_is_one() {
    let backoff = Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(5) };
    let queue: Queue<&str> = Queue::new("test", backoff);
    queue.add("key");
    let times = Arc::new(Mutex::new(Vec::new()));
    let stop = CancellationToken::new();
    let work = {
        let (times, stop) = (times.clone(), stop.clone());
        move |_| {
            let (times, stop) = (times.clone(), stop.clone());
            async move {
                let runs = {
                    let mut times = times.lock();
                    times.push(tokio::time::Instant::now());
                    times.len()
                };
                match runs {
                    1 => panic!("on purpose"),
                    2..=4 => Err(NoLuck),
                    _ => {
                        stop.cancel();
                        Ok(Next::Done)
                    }
                }
            }
        }
    };
    queue.run(1, stop, work).await;
    let times = times.lock();
    let pauses: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
    for (pause, at_least) in pauses.iter().zip([1.0, 2.0, 4.0, 5.0]) {
        assert!((at_least..=at_least * 1.26).contains(pause), "{pauses:?}");
    }
}

#[tokio::test]
async fn the_same_event_again_is_counted_and_a_long_message_is_cut() {
    let running = running().await;
    let recorder = Recorder::new(&running.cluster, "tester", "here");
    let about = running.cluster.create(&config("a", "1")).await.unwrap();
    recorder.warning(about.as_ref(), "Broken", "ü".repeat(2000));
    for _ in 0..5 {
        recorder.normal(about.as_ref(), "Fine", "all is well");
    }
    recorder.normal(about.as_ref(), "Last", "done");
    let events: Api<Event> = Api::namespaced(running.cluster.client().clone(), "default");
    let cache = running.cluster.cache::<Event>();
    let (sender, mut last) = mpsc::unbounded_channel();
    cache.subscribe(move |_, after| {
        if after.is_some_and(|event| event.reason.as_deref() == Some("Last")) {
            let _ = sender.send(());
        }
    });
    tokio::time::timeout(PATIENCE, last.recv()).await.unwrap().unwrap();
    let events = events.list(&ListParams::default()).await.unwrap().items;
    let of = |reason: &str| {
        events.iter().filter(|event| event.reason.as_deref() == Some(reason)).collect::<Vec<_>>()
    };
    assert_eq!(of("Fine").len(), 1);
    assert_eq!(of("Broken").len(), 1);
    assert!(of("Broken")[0].message.as_ref().unwrap().len() <= 1024);
    assert_eq!(of("Broken")[0].involved_object.uid, about.metadata.uid);
}

#[tokio::test]
async fn the_first_event_of_each_kind_is_written_for_five_thousand_objects_at_once() {
    let names = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
    let (heard, mut all) = (names.clone(), mpsc::unbounded_channel());
    let sender = all.0;
    let server = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let (heard, sender) = (heard.clone(), sender.clone());
        async move {
            let body = request.into_body().collect_bytes().await?;
            let event: Event = serde_json::from_slice(&body)?;
            let (about, reason) = (event.involved_object.name.unwrap(), event.reason.unwrap());
            heard.lock().insert((about, reason));
            let _ = sender.send(());
            Ok::<_, tower::BoxError>(http::Response::new(kube::client::Body::from(body.to_vec())))
        }
    });
    let cluster = Cluster::new(kube::Client::new(server, "default"), CancellationToken::new());
    let recorder = Recorder::new(&cluster, "tester", "");
    for reason in ["ExternalProvisioning", "Provisioning"] {
        for number in 0..5000 {
            let about = config(&format!("claim-{number}"), "");
            recorder.normal(&about, reason, "waiting for a volume");
            recorder.normal(&about, reason, "waiting for a volume");
        }
    }
    for _ in 0..10_000 {
        tokio::time::timeout(PATIENCE, all.1.recv()).await.expect("every event is written").unwrap();
    }
    assert_eq!(names.lock().len(), 10_000);
}

#[tokio::test]
async fn the_last_count_of_an_event_that_is_repeated_within_a_second_is_written() {
    let running = running().await;
    let recorder = Recorder::new(&running.cluster, "tester", "");
    let about = running.cluster.create(&config("a", "1")).await.unwrap();
    let (sender, mut counts) = mpsc::unbounded_channel();
    running.cluster.cache::<Event>().subscribe(move |_, after| {
        if let Some(event) = after {
            let _ = sender.send(event.count.unwrap_or_default());
        }
    });
    let mut count = async || tokio::time::timeout(PATIENCE, counts.recv()).await.unwrap().unwrap();
    recorder.normal(about.as_ref(), "Fine", "all is well");
    assert_eq!(count().await, 1);
    for _ in 0..4 {
        recorder.normal(about.as_ref(), "Fine", "all is well");
    }
    while count().await < 5 {}
}

#[tokio::test]
async fn counts_that_wait_are_written_before_the_process_ends() {
    let running = running().await;
    let cluster = running.cluster.named("tester");
    let recorder = Recorder::new(&cluster, "tester", "");
    let about = running.cluster.create(&config("a", "1")).await.unwrap();
    let events: Api<Event> = Api::namespaced(running.cluster.client().clone(), "default");
    recorder.normal(about.as_ref(), "Fine", "all is well");
    let first = async || events.list(&ListParams::default()).await.unwrap().items.into_iter().next();
    let written = async {
        while first().await.is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, written).await.unwrap();
    // A count waits for a second after the last one, and an object that has many events for minutes.
    for _ in 0..4 {
        recorder.normal(about.as_ref(), "Fine", "all is well");
    }
    running.cluster.finish_events(PATIENCE).await;
    assert_eq!(first().await.unwrap().count, Some(5));
    // It is not waited for an API server that is gone.
    let nobody = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, tower::BoxError>>()
    });
    let cluster = Cluster::new(kube::Client::new(nobody, "default"), CancellationToken::new());
    let recorder = Recorder::new(&cluster, "tester", "");
    recorder.normal(about.as_ref(), "Fine", "all is well");
    cluster.finish_events(Duration::from_millis(10)).await;
}

#[tokio::test(start_paused = true)]
async fn a_measured_queue_tells_what_waits_what_is_worked_on_and_how_long() {
    let mut registry = prometheus_client::registry::Registry::default();
    let metrics = berth_kube::Metrics::register(&mut registry);
    let lines = || {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    };
    let nobody = tower::service_fn(|_: http::Request<kube::client::Body>| async {
        Err::<http::Response<kube::client::Body>, tower::BoxError>("there is no server".into())
    });
    let stop = CancellationToken::new();
    let cluster = Cluster::new(kube::Client::new(nobody, "default"), stop.clone()).measured(&metrics);
    let backoff = Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(1) };
    let queue: Queue<u32> = cluster.queue("tested", backoff);
    for key in [1, 2, 2] {
        queue.add(key);
    }
    assert!(lines().contains("workqueue_depth{name=\"tested\"} 2"), "{}", lines());

    let work = |key| {
        let stop = stop.clone();
        async move {
            tokio::time::sleep(Duration::from_secs(4)).await;
            if key == 1 {
                // Failed, and then told to stop.
                return Err(NoLuck);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
            stop.cancel();
            Ok(Next::Done)
        }
    };
    let watch = async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        lines()
    };
    let ((), during) = tokio::join!(queue.run(2, stop.clone(), work), watch);
    for line in [
        "workqueue_unfinished_work_seconds{name=\"tested\"} 6.0",
        "workqueue_longest_running_processor_seconds{name=\"tested\"} 3.0",
        "workqueue_depth{name=\"tested\"} 0",
    ] {
        assert!(during.contains(line), "{line} is not in\n{during}");
    }
    queue.add(3);
    drop(queue);
    for line in [
        "workqueue_adds_total{name=\"tested\"} 3",
        "workqueue_queue_duration_seconds_count{name=\"tested\"} 2",
        "workqueue_work_duration_seconds_sum{name=\"tested\"} 8.5",
        "workqueue_retries_total{name=\"tested\"} 1",
        "workqueue_unfinished_work_seconds{name=\"tested\"} 0.0",
        // What a queue that ended left in it waits for nobody.
        "workqueue_depth{name=\"tested\"} 0",
    ] {
        assert!(lines().contains(line), "{line} is not in\n{}", lines());
    }
}
