//! What a watch and our own writes tell, in any order.

use serde_json::json;

use super::*;

fn object(name: &str, revision: u64, class: &str) -> CSIStorageCapacity {
    let object = json!({
        "metadata": { "name": name, "resourceVersion": revision.to_string() },
        "storageClassName": class, "nodeTopology": { "matchLabels": { "zone": "z1" } },
    });
    serde_json::from_value(object).unwrap()
}

fn capacity_key(class: &str) -> CapacityKey {
    CapacityKey { class: class.to_owned(), segment: [("zone".to_owned(), "z1".to_owned())].into() }
}

fn names(objects: &[Arc<CSIStorageCapacity>]) -> Vec<String> {
    objects.iter().map(|object| object.name_any()).collect()
}

#[test]
fn a_watch_brings_and_takes_objects_and_says_what_was_new() {
    let objects = Objects::new();
    assert!(objects.take(watcher::Event::Init).is_empty());
    assert_eq!(names(&objects.take(watcher::Event::InitApply(object("a", 1, "fast")))), ["a"]);
    assert!(objects.take(watcher::Event::InitDone).is_empty());
    assert!(*objects.synced.borrow());
    assert_eq!(names(&objects.take(watcher::Event::Apply(object("b", 2, "fast")))), ["b"]);
    assert_eq!(names(&objects.at(&capacity_key("fast"))), ["a", "b"]);
    assert!(objects.take(watcher::Event::Apply(object("b", 2, "fast"))).is_empty(), "known");
    assert_eq!(names(&objects.take(watcher::Event::Delete(object("a", 3, "fast")))), ["a"]);
    assert!(objects.take(watcher::Event::Delete(object("a", 3, "fast"))).is_empty(), "known to be gone");
    assert_eq!(names(&objects.at(&capacity_key("fast"))), ["b"]);
    assert!(objects.at(&capacity_key("slow")).is_empty());
}

#[test]
fn what_a_new_list_does_not_bring_is_gone_unless_it_was_written_since() {
    let objects = Objects::new();
    for name in ["a", "b"] {
        objects.take(watcher::Event::Apply(object(name, 2, "fast")));
    }
    objects.take(watcher::Event::Init);
    objects.take(watcher::Event::InitApply(object("b", 4, "fast")));
    objects.observe(&Arc::new(object("c", 5, "fast")));
    assert_eq!(names(&objects.take(watcher::Event::InitDone)), ["a"]);
    assert_eq!(names(&objects.at(&capacity_key("fast"))), ["b", "c"]);
}

#[test]
fn an_own_write_is_known_at_once_and_an_old_answer_brings_nothing_back() {
    let objects = Objects::new();
    objects.observe(&Arc::new(object("a", 5, "fast")));
    assert_eq!(names(&objects.at(&capacity_key("fast"))), ["a"]);
    assert!(objects.take(watcher::Event::Apply(object("a", 5, "fast"))).is_empty(), "our own");
    objects.take(watcher::Event::Delete(object("a", 7, "fast")));
    objects.observe(&Arc::new(object("a", 6, "fast")));
    assert!(objects.get("a").is_none(), "deleted since");
    objects.observe(&Arc::new(object("b", 8, "fast")));
    objects.forget("b");
    assert!(objects.list().is_empty() && objects.at(&capacity_key("fast")).is_empty());
}
