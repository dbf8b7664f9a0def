//! Reads, views, watches and expectations, one writer at a time.

use std::time::Duration;

use berth_apiserver::store::{
    EventKind::{self, Added, Deleted, Modified},
    Expired, Watch,
};

use super::*;

fn names<'a>(objects: impl Iterator<Item = &'a Arc<Object>>) -> Vec<String> {
    objects.map(|object| format!("{}/{}", object.key.namespace, object.key.name)).collect()
}

async fn texts(watch: &mut Watch) -> Vec<(EventKind, String)> {
    watch.next().await.unwrap().iter().map(|event| (event.kind, text_of(&event.object))).collect()
}

fn tiny(history_events: usize, history_bytes: usize) -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = Store::open(dir.path(), Options { history_events, history_bytes }).unwrap();
    (dir, store)
}

#[tokio::test]
async fn expectations_decide_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (store, opened) = open(dir.path());
    assert_eq!(opened, Opened { objects: 0, revision: 0, damaged: 0 });
    assert!(matches!(delete(&store, pod("a")).await, Err(WriteError::Missing)));
    assert!(matches!(store.write(pod("a"), Expect::Absent, gone()).await, Err(WriteError::Missing)));
    assert!(matches!(store.write(pod("a"), Expect::Revision(1), text("x")).await, Err(WriteError::Missing)));
    let first = create(&store, pod("a"), "one").await;
    assert_eq!((first.revision, text_of(&first)), (1, "one".to_owned()));
    assert!(
        matches!(store.write(pod("a"), Expect::Absent, text("x")).await, Err(WriteError::Exists(it)) if it == first)
    );
    let second = store.write(pod("a"), Expect::Revision(1), text("two")).await.unwrap();
    assert!(
        matches!(store.write(pod("a"), Expect::Revision(1), gone()).await, Err(WriteError::Conflict(it)) if it == second)
    );
    assert_eq!(store.get(&pod("a")), Some(second));
    let last = store.write(pod("a"), Expect::Revision(2), gone()).await.unwrap();
    assert_eq!((last.revision, store.get(&pod("a")), store.revision()), (3, None, 3));
}

#[tokio::test]
async fn a_view_is_ordered_can_be_entered_anywhere_and_never_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    for (namespace, name) in
        [("b", "x"), ("a", "y"), ("a", "x"), ("a-b", "x"), ("", "x"), ("b", "a"), ("aa", "x")]
    {
        create(&store, Key::new(pods(), namespace, name), "").await;
    }
    create(&store, Key::new("nodes".into(), "", "n"), "").await;
    let view = store.view(&pods());
    assert_eq!((view.len(), view.revision()), (7, 8));
    assert_eq!(names(view.range(None, None)), ["/x", "a/x", "a/y", "a-b/x", "aa/x", "b/a", "b/x"]);
    assert_eq!(names(view.range(Some("a"), None)), ["a/x", "a/y"]);
    assert_eq!(names(view.range(Some(""), None)), ["/x"]);
    assert_eq!(names(view.range(None, Some(("a", "x")))), ["a/y", "a-b/x", "aa/x", "b/a", "b/x"]);
    assert_eq!(names(view.range(Some("a"), Some(("a", "x")))), ["a/y"]);
    assert_eq!(names(view.range(Some("a"), Some(("", "x")))), ["a/x", "a/y"]);
    assert_eq!(names(view.range(Some("a"), Some(("b", "")))), [""; 0]);
    assert_eq!(names(view.range(Some("c"), None)), [""; 0]);
    assert_eq!(view.get("b", "a").unwrap().revision, 6);
    delete(&store, Key::new(pods(), "a", "x")).await.unwrap();
    assert_eq!((view.len(), store.view(&pods()).len()), (7, 6));
    assert!(store.view(&"configmaps".into()).is_empty());
}

#[tokio::test]
async fn a_collection_is_seen_as_it_was_at_every_revision_in_the_history() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    let mut then = vec![(0, Vec::new())];
    for round in 0..60u32 {
        let key = pod(&format!("p{}", round % 7));
        match round % 5 {
            0..3 => drop(store.write(key.clone(), Expect::Absent, text(&format!("{round}"))).await),
            3 => drop(store.write(key.clone(), Expect::Present, text(&format!("{round}"))).await),
            _ => drop(delete(&store, key).await),
        }
        let view = store.view(&pods());
        then.push((view.revision(), view.range(None, None).cloned().collect()));
    }
    for (revision, objects) in &then {
        for _ in 0..2 {
            let view = store.view_at(&pods(), *revision).unwrap();
            assert_eq!(view.revision(), *revision);
            assert_eq!(&view.range(None, None).cloned().collect::<Vec<_>>(), objects, "at {revision}");
        }
    }
    let future = store.revision() + 1;
    assert!(store.view_at(&pods(), future).is_err());
}

#[tokio::test]
async fn a_watch_from_any_revision_sees_every_later_event_once() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    create(&store, pod("a"), "one").await;
    store.write(pod("a"), Expect::Present, text("two")).await.unwrap();
    create(&store, Key::new("nodes".into(), "", "n"), "other").await;
    delete(&store, pod("a")).await.unwrap();
    create(&store, pod("a"), "three").await;
    let all = [(Added, "one"), (Modified, "two"), (Deleted, "gone"), (Added, "three")];
    let all = all.map(|(kind, text)| (kind, text.to_owned()));
    for (after, skipped) in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3)] {
        let mut watch = store.watch(&pods(), after).unwrap();
        assert_eq!(texts(&mut watch).await, all[skipped..], "after {after}");
        assert_eq!(watch.revision(), 5);
    }
    let mut watch = store.watch(&pods(), 0).unwrap();
    let events = watch.next().await.unwrap();
    let previous: Vec<_> = events.iter().map(|event| event.previous.as_ref().map(|it| it.revision)).collect();
    assert_eq!(previous, [None, Some(1), Some(2), None]);
    let (mut ahead, next) = (store.watch(&pods(), 6).unwrap(), pod("b"));
    create(&store, next.clone(), "six").await;
    create(&store, pod("c"), "seven").await;
    assert_eq!(texts(&mut ahead).await, [(Added, "seven".to_owned())], "from the future on");
}

#[tokio::test]
async fn an_idle_watch_keeps_up_with_what_happens_elsewhere_and_may_be_abandoned_at_any_time() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    let mut watch = store.watch(&pods(), 0).unwrap();
    create(&store, Key::new("nodes".into(), "", "n"), "").await;
    assert_eq!(watch.revision(), 1);
    let waited = tokio::time::timeout(Duration::from_millis(1), watch.next()).await;
    assert!(waited.is_err());
    create(&store, pod("a"), "one").await;
    assert_eq!(watch.revision(), 1);
    assert_eq!(texts(&mut watch).await.len(), 1);
    let ((), event) = tokio::join!(async { drop(create(&store, pod("b"), "two").await) }, watch.next());
    assert_eq!((event.unwrap()[0].revision, watch.revision()), (3, 3));
}

#[tokio::test]
async fn the_history_is_bounded_by_events_and_by_bytes_and_says_when_it_has_moved_on() {
    for (events, bytes) in [(10, usize::MAX), (usize::MAX, 10 * 300)] {
        let (_dir, store) = tiny(events, bytes);
        let mut slow = store.watch(&pods(), 0).unwrap();
        for index in 0..30 {
            create(&store, pod(&format!("p{index:02}")), "").await;
        }
        let Err(Expired { requested: 0, oldest }) = slow.next().await else {
            panic!("the history has no end")
        };
        assert!((15..=20).contains(&oldest), "{oldest}");
        assert_eq!(store.watch(&pods(), oldest - 1).unwrap_err(), Expired { requested: oldest - 1, oldest });
        assert!(store.view_at(&pods(), oldest - 1).is_err());
        let seen = store.watch(&pods(), oldest).unwrap().next().await.unwrap();
        assert_eq!(seen.len() as u64, 30 - oldest);
        assert_eq!(store.view_at(&pods(), oldest).unwrap().len() as u64, oldest);
        assert!(store.watch(&"nodes".into(), 0).is_ok(), "nothing ever happened to the nodes");
    }
}

#[tokio::test]
async fn waiting_for_a_revision_ends_when_it_is_there_or_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    assert!(store.wait_for(0, Duration::ZERO).await);
    assert!(!store.wait_for(1, Duration::from_millis(1)).await);
    let (reached, _) = tokio::join!(store.wait_for(1, Duration::from_secs(60)), create(&store, pod("a"), ""));
    assert!(reached);
}
