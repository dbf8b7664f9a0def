//! Many watches, and watches that nobody reads.

use tokio::task::JoinSet;

use super::{MAPS, MB, PATIENCE, Victim, put_map};

const MANY: u64 = 2000;
/// TLS and HTTP buffers of both directions, mostly.
const PER_WATCH: u64 = 150 << 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_watches_all_hear_of_a_change_and_cost_little() {
    let mut victim = Victim::start(1000);
    let before = victim.served.resident();
    let mut watches = JoinSet::new();
    for _ in 0..MANY {
        let path = format!("{MAPS}?watch=true&fieldSelector=metadata.name%3Dnews");
        let mut lines = victim.connect().await.watch(&path).await.unwrap();
        watches.spawn(async move {
            let line = lines.next().await.unwrap().unwrap();
            (String::from_utf8(line).unwrap(), lines)
        });
    }
    let grown = victim.served.resident().saturating_sub(before);
    assert!(grown < MANY * PER_WATCH, "{MANY} watches take {} MB", grown / MB);
    put_map(&mut victim.connect().await, "news", "good").await;
    let mut open = Vec::new();
    let heard = async {
        while let Some(watch) = watches.join_next().await {
            let (line, lines) = watch.unwrap();
            assert!(line.starts_with(r#"{"type":"ADDED","#), "{line}");
            open.push(lines);
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.expect("all watches hear of it");
    victim.is_well().await;
    drop(open);
    victim.is_well().await;
}

/// Watches that are asked for, and never read.
async fn unread(victim: &Victim, path: &str, count: usize) -> Vec<crate::http::Lines> {
    let mut watches = Vec::new();
    for _ in 0..count {
        watches.push(victim.connect().await.watch(path).await.unwrap());
    }
    watches
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_nobody_reads_hold_no_more_than_a_piece() {
    let mut victim = Victim::start(100);
    let mut connection = victim.connect().await;
    let version = put_map(&mut connection, "big-0", "first").await.json();
    let version = version["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    // History is full of these before anybody watches.
    let text = "x".repeat(500_000);
    for round in 0..60 {
        put_map(&mut connection, &format!("big-{}", round % 5), &format!("{round} {text}")).await;
    }
    let before = victim.served.resident();
    let path = format!("{MAPS}?watch=true&resourceVersion={version}");
    let from_history = unread(&victim, &path, 30).await;
    let from_state = unread(&victim, &format!("{MAPS}?watch=true"), 30).await;
    for round in 0..100 {
        put_map(&mut connection, &format!("big-{}", round % 5), &format!("{round} {text}")).await;
    }
    let grown = victim.served.resident().saturating_sub(before);
    // A piece and a socket's buffer for each of the watches, and what 100 more changes add to the history.
    assert!(grown < 60 * 3 * MB + 64 * MB, "60 unread watches take {} MB", grown / MB);
    victim.is_well().await;
    drop((from_history, from_state));
    victim.is_well().await;
}
