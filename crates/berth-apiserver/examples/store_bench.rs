//! Measures the store: `store_bench speed DIR`, and with 200,000 objects `store_bench fill DIR`, then `open DIR`.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use berth_apiserver::store::{Change, Collection, Expect, Key, Options, Store};
use bytes::Bytes;

#[global_allocator]
static ALLOCATOR: berth_host::allocator::Allocator = berth_host::allocator::Allocator;

const MANY: u64 = 200_000;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn claims() -> Collection {
    Collection::from("persistentvolumeclaims")
}

fn claim(number: u64) -> Key {
    Key::new(claims(), format!("namespace-{}", number % 50), format!("claim-{number:06}"))
}

/// An object of about 1 KB, made the way a serializer makes it.
fn contents(round: u64) -> Change {
    Change::put(move |revision| {
        let mut text = Vec::new();
        text.extend_from_slice(
            format!(r#"{{"metadata":{{"resourceVersion":"{revision}"}},"round":{round}"#).as_bytes(),
        );
        text.extend_from_slice(format!(r#","spec":"{}"}}"#, "s".repeat(950)).as_bytes());
        Bytes::from(text)
    })
}

fn row(what: &str, value: impl std::fmt::Display) {
    println!("{what:<58} {value}");
}

fn resident() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    let kilobytes =
        line.and_then(|line| line.split_whitespace().nth(1)).and_then(|number| number.parse::<u64>().ok());
    format!("{} MB", kilobytes.unwrap_or(0) / 1024)
}

/// Runs writers until `total` puts are done; returns how long it took and every latency, sorted.
async fn put_all(store: &Store, writers: u64, total: u64, round: u64) -> (Duration, Vec<Duration>) {
    let next = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..writers {
        let (store, next) = (store.clone(), next.clone());
        running.spawn(async move {
            let mut latencies = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= total {
                    return latencies;
                }
                let key = claim(number % MANY);
                let expect = if store.get(&key).is_some() { Expect::Present } else { Expect::Absent };
                let begun = Instant::now();
                store.write(key, expect, contents(round)).await.expect("the disk takes it");
                latencies.push(begun.elapsed());
            }
        });
    }
    let mut latencies = running.join_all().await.concat();
    latencies.sort_unstable();
    (start.elapsed(), latencies)
}

fn report(what: &str, (took, latencies): &(Duration, Vec<Duration>)) {
    let of = |percent: usize| latencies[(latencies.len() - 1) * percent / 100];
    #[expect(clippy::cast_precision_loss, reason = "for people to read")]
    let rate = latencies.len() as f64 / took.as_secs_f64();
    row(what, format!("{rate:.0}/s  p50 {:?}  p99 {:?}  max {:?}", of(50), of(99), of(100)));
}

async fn speed(dir: &Path) -> Outcome {
    let (store, _) = Store::open(dir, Options::default())?;
    for _ in 0..2 {
        report("durable writes of 1 KB, 1 writer", &put_all(&store, 1, 5_000, 0).await);
        report("durable writes of 1 KB, 64 writers", &put_all(&store, 64, 60_000, 1).await);
    }
    let start = Instant::now();
    let mut listed = Vec::new();
    for object in store.view(&claims()).range(None, None).take(5_000) {
        listed.extend_from_slice(&object.bytes);
        listed.push(b',');
    }
    row("list of 5,000 objects into one buffer", format!("{:?}, {} bytes", start.elapsed(), listed.len()));
    fan_out(&store, 100, 10_000).await?;
    row("resident at the end", resident());
    Ok(())
}

async fn fan_out(store: &Store, watchers: u64, events: u64) -> Outcome {
    let from = store.revision();
    let mut watching = tokio::task::JoinSet::new();
    for _ in 0..watchers {
        let mut watch = store.watch(&claims(), from)?;
        watching.spawn(async move {
            let mut seen = 0;
            while seen < events {
                seen += watch.next().await.map_or(events, |batch| batch.len() as u64);
            }
        });
    }
    let start = Instant::now();
    let (wrote, _) = put_all(store, 64, events, 2).await;
    watching.join_all().await;
    let rate = u128::from(events * watchers) * 1000 / start.elapsed().as_millis().max(1);
    let what = format!("{events} durable writes seen by {watchers} watchers");
    row(&what, format!("{rate} events/s, written in {wrote:?}, seen in {:?}", start.elapsed()));
    Ok(())
}

async fn fill(dir: &Path) -> Outcome {
    let (store, _) = Store::open(dir, Options::default())?;
    report("creating 200,000 objects, 256 writers", &put_all(&store, 256, MANY, 0).await);
    row("resident with 200,000 objects, just made", resident());
    report(
        "changing them 2.5 times, with rewrites of the journal",
        &put_all(&store, 64, MANY * 5 / 2, 1).await,
    );
    row("resident after that, history full", resident());
    row("journal", format!("{} MB", std::fs::metadata(dir.join("objects"))?.len() >> 20));
    Ok(())
}

fn open(dir: &Path) -> Outcome {
    let start = Instant::now();
    let (store, opened) = Store::open(dir, Options::default())?;
    row("opening", format!("{:?}, {} objects, {} damaged", start.elapsed(), opened.objects, opened.damaged));
    row("resident", resident());
    let start = Instant::now();
    let view = store.view(&claims());
    row("view", format!("{:?}", start.elapsed()));
    let start = Instant::now();
    let bytes: usize = view.range(None, None).map(|object| object.bytes.len()).sum();
    row("walking through it", format!("{:?}, {} MB", start.elapsed(), bytes >> 20));
    let start = Instant::now();
    let found = (0..MANY).filter(|number| store.get(&claim(*number)).is_some()).count();
    row("getting each object, with its key made", format!("{:?} for {found}", start.elapsed()));
    Ok(())
}

fn main() -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["speed", dir] => runtime.block_on(speed(Path::new(dir))),
        ["fill", dir] => runtime.block_on(fill(Path::new(dir))),
        ["open", dir] => open(Path::new(dir)),
        _ => Err("usage: store_bench speed|fill|open DIR".into()),
    }
}
