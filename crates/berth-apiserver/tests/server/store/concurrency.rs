//! Many writers, many watchers, readers in between.

use std::collections::BTreeMap;

use berth_apiserver::store::EventKind;
use tokio::task::JoinSet;

use super::*;

const WRITERS: usize = 64;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_conflicting_updates_exactly_one_wins() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    let mut revision = create(&store, pod("a"), "0").await.revision;
    for _ in 0..20 {
        let mut writers = JoinSet::new();
        for writer in 0..WRITERS {
            let store = store.clone();
            writers.spawn(async move {
                let written =
                    store.write(pod("a"), Expect::Revision(revision), text(&format!("{writer}"))).await;
                match written {
                    Ok(object) => Some(object),
                    Err(WriteError::Conflict(winner)) => {
                        let seen = store.get(&pod("a")).unwrap();
                        assert!(seen.revision >= winner.revision, "refused because of what nobody can see");
                        None
                    }
                    Err(error) => panic!("{error}"),
                }
            });
        }
        let winners: Vec<_> = writers.join_all().await.into_iter().flatten().collect();
        assert_eq!(winners.len(), 1);
        assert_eq!(store.get(&pod("a")).as_ref(), winners.first());
        revision = winners[0].revision;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn every_watcher_sees_dense_and_ordered_revisions_that_add_up_to_the_objects() {
    const CHANGES: usize = 40;
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    let mut watchers = JoinSet::new();
    for _ in 0..8 {
        let mut watch = store.watch(&pods(), 0).unwrap();
        watchers.spawn(async move {
            let (mut objects, mut newest) = (BTreeMap::new(), 0);
            while newest < (WRITERS * CHANGES) as u64 {
                for event in watch.next().await.unwrap() {
                    newest += 1;
                    assert_eq!((event.revision, event.object.revision), (newest, newest));
                    let old = match event.kind {
                        EventKind::Deleted => objects.remove(&event.object.key),
                        _ => objects.insert(event.object.key.clone(), event.object.clone()),
                    };
                    assert_eq!(old, event.previous);
                    assert_eq!(event.previous.is_none(), event.kind == EventKind::Added);
                }
                assert_eq!(watch.revision(), newest.max(watch.revision()));
            }
            objects
        });
    }
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        writers.spawn(async move {
            let mut last = 0;
            for change in 0..CHANGES {
                let key = pod(&format!("p{writer}"));
                let written = match change % 4 {
                    0 => store.write(key.clone(), Expect::Absent, text("new")).await,
                    3 if writer % 2 == 0 => store.write(key.clone(), Expect::Revision(last), gone()).await,
                    3 => delete(&store, key.clone()).await,
                    _ => store.write(key.clone(), Expect::Revision(last), text("changed")).await,
                };
                let written = written.unwrap();
                assert!(written.revision > last);
                last = written.revision;
                let seen = store.get(&key);
                assert_eq!(seen.is_none(), change % 4 == 3, "not visible when it returned");
            }
        });
    }
    writers.join_all().await;
    for objects in watchers.join_all().await {
        let view = store.view(&pods());
        assert!(objects.values().eq(view.range(None, None)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn pages_are_consistent_while_writers_run() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    for index in 0..200 {
        create(&store, pod(&format!("p{index:03}")), "0").await;
    }
    let writer = tokio::spawn({
        let store = store.clone();
        async move {
            for round in 0u32..600 {
                // All objects always exist but one, and their number is the same at every odd revision.
                let key = pod(&format!("p{:03}", (round * 37) % 200));
                delete(&store, key.clone()).await.unwrap();
                create(&store, key, &round.to_string()).await;
            }
        }
    });
    let mut lists = 0;
    while !writer.is_finished() {
        let first = store.view(&pods());
        let expected: Vec<_> = first.range(None, None).cloned().collect();
        let mut got: Vec<Arc<Object>> = first.range(None, None).take(30).cloned().collect();
        loop {
            let last = got.last().unwrap().key.clone();
            let page = store.view_at(&pods(), first.revision()).unwrap();
            let after = Some((&*last.namespace, &*last.name));
            let more: Vec<_> = page.range(Some("default"), after).take(30).cloned().collect();
            if more.is_empty() {
                break;
            }
            got.extend(more);
            tokio::task::yield_now().await;
        }
        assert!(got == expected, "a list at {} is torn", first.revision());
        lists += 1;
    }
    writer.await.unwrap();
    assert!(lists > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_write_nobody_waits_for_any_more_is_made_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    for index in 0..50 {
        let write = store.write(pod(&format!("p{index}")), Expect::Absent, text("x"));
        tokio::select! { biased; _ = write => {}, () = std::future::ready(()) => {} }
    }
    drop(store);
    let (store, opened) = open(dir.path());
    assert_eq!((opened.objects, store.revision()), (50, 50));
}
