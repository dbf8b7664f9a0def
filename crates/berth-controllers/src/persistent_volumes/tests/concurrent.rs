//! The pool with many claims at a time: no volume goes to two, none is forgotten, and nobody waits in vain.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kube::ResourceExt as _;
use parking_lot::Mutex;

use super::super::pool::Pool;
use super::{Key, PersistentVolume, claim, volume};

fn woken() -> (Pool, Arc<Mutex<Vec<String>>>) {
    let woken: Arc<Mutex<Vec<String>>> = Arc::default();
    let list = woken.clone();
    (Pool::new(move |key| list.lock().push(key.name)), woken)
}

fn take(list: &Mutex<Vec<String>>) -> Vec<String> {
    std::mem::take(&mut *list.lock())
}

fn key(name: &str) -> Key {
    Key::new("ns", name)
}

#[test]
fn a_volume_that_is_promised_is_nobody_elses_until_the_turn_ends() {
    let (pool, woken) = woken();
    pool.volume_changed("v", Some(&Arc::new(volume("v 1Gi Available"))));
    let (one, other) = (pool.turn(key("one")), pool.turn(key("other")));
    assert!(one.find(&claim("one 1Gi Pending")).is_some());
    assert!(other.find(&claim("other 1Gi Pending")).is_none());
    drop(other);
    assert!(take(&woken).is_empty());
    // The first one failed: the volume is still free, and the one that waits hears of it.
    drop(one);
    assert_eq!(take(&woken), ["other"]);
    // While it is promised, a third finds nothing; then the promise is kept.
    assert!(pool.turn(key("third")).find(&claim("third 1Gi Pending")).is_none());
    assert!(pool.turn(key("other")).find(&claim("other 1Gi Pending")).is_some());
}

#[test]
fn a_volume_that_was_bound_is_not_offered_again() {
    let (pool, woken) = woken();
    pool.volume_changed("v", Some(&Arc::new(volume("v 1Gi Available"))));
    let turn = pool.turn(key("one"));
    assert!(turn.find(&claim("one 1Gi Pending")).is_some());
    assert!(pool.turn(key("other")).find(&claim("other 1Gi Pending")).is_none());
    pool.volume_changed("v", Some(&Arc::new(volume("v 1Gi Available ref=one:u bbc"))));
    drop(turn);
    assert!(take(&woken).is_empty());
    // It is free again: recycled, or unbound.
    pool.volume_changed("v", Some(&Arc::new(volume("v 1Gi Available"))));
    assert_eq!(take(&woken), ["other"]);
    pool.volume_changed("v", None);
    assert!(pool.turn(key("other")).find(&claim("other 1Gi Pending")).is_none());
}

#[test]
fn a_new_volume_wakes_the_claim_that_leaves_least_unused_and_fits() {
    let (pool, woken) = woken();
    for text in [
        "small 1Gi Pending",
        "large 4Gi Pending",
        "huge 9Gi Pending",
        "other 1Gi Pending class=gold",
        "picky 5Gi Pending selector",
    ] {
        let claim = claim(text);
        assert!(pool.turn(Key::of(&claim)).find(&claim).is_none());
    }
    pool.volume_changed("v1", Some(&Arc::new(volume("v1 5Gi Available"))));
    assert_eq!(take(&woken), ["large"]);
    pool.volume_changed("v2", Some(&Arc::new(volume("v2 5Gi Available labels"))));
    assert_eq!(take(&woken), ["picky"]);
    pool.volume_changed("v3", Some(&Arc::new(volume("v3 5Gi Available block"))));
    pool.volume_changed("v4", Some(&Arc::new(volume("v4 5Gi Released"))));
    assert!(take(&woken).is_empty());
    // The claim is gone: its turn passes the volume on.
    drop(pool.turn(key("large")));
    assert_eq!(take(&woken), ["small"]);
}

#[test]
fn a_promised_volume_that_does_not_fit_any_more_goes_to_somebody_else() {
    let (pool, woken) = woken();
    let picky = claim("picky 1Gi Pending selector");
    assert!(pool.turn(key("picky")).find(&picky).is_none());
    pool.volume_changed("v", Some(&Arc::new(volume("v 1Gi Available labels"))));
    assert_eq!(take(&woken), ["picky"]);
    pool.volume_changed("v", Some(&Arc::new(volume("v 1Gi Available"))));
    assert!(pool.turn(key("any")).find(&claim("any 1Gi Pending")).is_none());
    assert!(pool.turn(key("picky")).find(&picky).is_none());
    assert_eq!(take(&woken), ["any"]);
}

#[test]
fn many_volumes_at_once_wake_each_waiting_claim_once() {
    const CLAIMS: usize = 100;
    let (pool, woken) = woken();
    let claims: Vec<_> = (0..CLAIMS).map(|n| claim(&format!("c{n} 1Gi Pending"))).collect();
    for claim in &claims {
        assert!(pool.turn(Key::of(claim)).find(claim).is_none());
    }
    for n in 0..CLAIMS {
        pool.volume_changed(&format!("v{n}"), Some(&Arc::new(volume(&format!("v{n} 1Gi Available")))));
    }
    let each = take(&woken);
    assert_eq!(each.len(), CLAIMS);
    assert_eq!(each.iter().collect::<HashSet<_>>().len(), CLAIMS);
    for claim in &claims {
        let turn = pool.turn(Key::of(claim));
        let found = turn.find(claim).unwrap();
        let mut bound = (*found).clone();
        bound.status.as_mut().unwrap().phase = Some("Bound".to_owned());
        pool.volume_changed(&bound.name_any(), Some(&Arc::new(bound)));
    }
    assert!(take(&woken).is_empty(), "a volume was passed on");
}

/// Threads take and give back volumes at random; at the end every claim has one, and all are different.
#[test]
fn however_many_look_at_once_every_claim_gets_a_volume_of_its_own() {
    const CLAIMS: usize = 300;
    let queue: Arc<Mutex<Vec<String>>> = Arc::new(Mutex::new((0..CLAIMS).map(|n| format!("c{n}")).collect()));
    let wake = queue.clone();
    let pool = Pool::new(move |key| wake.lock().push(key.name));
    let bound: Mutex<HashMap<String, String>> = Mutex::default();
    let busy: Mutex<HashSet<String>> = Mutex::default();
    let free: Vec<Arc<PersistentVolume>> =
        (0..CLAIMS).map(|n| Arc::new(volume(&format!("v{n} {}Gi Available", 1 + n % 7)))).collect();
    let done = || bound.lock().len() == CLAIMS;
    let work = |seed: usize| {
        let mut random = seed;
        while !done() {
            let Some(name) = queue.lock().pop() else {
                std::thread::yield_now();
                continue;
            };
            if !busy.lock().insert(name.clone()) {
                // One worker per key, as in the real queue.
                queue.lock().insert(0, name);
                continue;
            }
            let turn = pool.turn(key(&name));
            let mut again = false;
            if !bound.lock().values().any(|owner| *owner == name)
                && let Some(volume) = turn.find(&claim(&format!("{name} 1Gi Pending")))
            {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if random.is_multiple_of(3) {
                    again = true;
                } else {
                    let taken = bound.lock().insert(volume.name_any(), name.clone());
                    assert_eq!(taken, None, "{} was given twice", volume.name_any());
                    let mut after = (*volume).clone();
                    after.status.as_mut().unwrap().phase = Some("Bound".to_owned());
                    pool.volume_changed(&after.name_any(), Some(&Arc::new(after)));
                }
            }
            drop(turn);
            busy.lock().remove(&name);
            if again {
                queue.lock().push(name);
            }
        }
    };
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            let work = &work;
            scope.spawn(move || work(seed));
        }
        for volume in &free {
            pool.volume_changed(&volume.name_any(), Some(volume));
        }
    });
    let owners: HashSet<String> = bound.into_inner().into_values().collect();
    assert_eq!(owners.len(), CLAIMS);
}
