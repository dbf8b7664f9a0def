//! Those who watch the churn, each in its own way, and what they must know at the end.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::controller::{Action, Config as Concurrency, Controller};
use kube::runtime::reflector::Store;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt, reflector};
use kube::{Api, Client, ResourceExt};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::churn::{Churn, version};
use super::{HISTORY, PATIENCE};

/// Asks again soon: servers here are back within moments.
struct Steady;

impl Iterator for Steady {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(50))
    }
}

impl Backoff for Steady {
    fn reset(&mut self) {}
}

/// While kube-rs lists anew, its controller is triggered by the new objects and reconciles the old ones, which its store
/// shows until the list is complete; it does so no more once that takes less than this.
const SETTLED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq)]
enum Pace {
    Fast,
    Slow,
}

/// The watches, and what they know.
pub(crate) struct Watching {
    stores: Vec<(&'static str, Store<ConfigMap>)>,
    reconciled: Arc<Reconciled>,
    expired: Arc<Mutex<usize>>,
    tasks: JoinSet<()>,
}

/// The newest version of each object that the controller was given.
type Reconciled = Mutex<HashMap<String, String>>;

/// Checks that objects only go forward.
#[derive(Default)]
struct Order {
    seen: HashMap<String, u64>,
}

impl Order {
    fn check(&mut self, event: &Event<ConfigMap>) {
        match event {
            Event::Init => self.seen.clear(),
            Event::InitDone => {}
            Event::InitApply(map) | Event::Apply(map) => {
                let new = version(map).parse().unwrap();
                let old = self.seen.insert(map.name_any(), new);
                assert!(old.is_none_or(|old| old < new), "{} from {old:?} to {new}", map.name_any());
            }
            Event::Delete(map) => {
                let old = self.seen.remove(&map.name_any());
                let new: u64 = version(map).parse().unwrap();
                assert!(old.is_some_and(|old| old < new), "{} is gone: {old:?}, {new}", map.name_any());
            }
        }
    }
}

async fn watch(
    api: Api<ConfigMap>,
    config: watcher::Config,
    writer: reflector::store::Writer<ConfigMap>,
    pace: Pace,
    churn: Arc<Churn>,
    expired: Arc<Mutex<usize>>,
) {
    let mut events = pin!(reflector(writer, watcher(api, config)).backoff(Steady));
    let mut order = Order::default();
    let mut count = 0;
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => order.check(&event),
            Err(watcher::Error::WatchError(status)) => {
                assert_eq!((status.code, &*status.reason), (410, "Expired"));
                *expired.lock() += 1;
            }
            Err(_) => {}
        }
        count += 1;
        if pace == Pace::Slow && count % 500 == 0 {
            churn.rest(HISTORY * 3).await;
        }
    }
}

/// Starts a reflector by lists in pages, one by a streaming list, a slow one, and a controller.
pub(crate) fn start(churn: &Arc<Churn>, client: &Client) -> Watching {
    let mut tasks = JoinSet::new();
    let mut stores = Vec::new();
    let expired = Arc::<Mutex<usize>>::default();
    let api: Api<ConfigMap> = Api::default_namespaced(client.clone());
    let kinds = [
        ("pages", watcher::Config::default().page_size(100), Pace::Fast),
        ("streaming", watcher::Config::default().streaming_lists(), Pace::Fast),
        ("cached", watcher::Config::default().any_semantic().timeout(2), Pace::Fast),
        ("slow", watcher::Config::default(), Pace::Slow),
    ];
    for (name, config, pace) in kinds {
        let (reader, writer) = reflector::store();
        stores.push((name, reader));
        tasks.spawn(watch(api.clone(), config, writer, pace, churn.clone(), expired.clone()));
    }
    let reconciled = Arc::<Reconciled>::default();
    let controller = Controller::new(api, watcher::Config::default());
    stores.push(("controller's store", controller.store()));
    tasks.spawn(control(controller, reconciled.clone()));
    Watching { stores, reconciled, expired, tasks }
}

async fn control(controller: Controller<ConfigMap>, reconciled: Arc<Reconciled>) {
    let reconcile = |map: Arc<ConfigMap>, reconciled: Arc<Reconciled>| async move {
        reconciled.lock().insert(map.name_any(), version(&map));
        Ok::<_, Infallible>(Action::await_change())
    };
    controller
        .with_config(Concurrency::default().concurrency(8).debounce(SETTLED))
        .trigger_backoff(Steady)
        .run(reconcile, |_, error, _| match *error {}, reconciled)
        .for_each(|_| std::future::ready(()))
        .await;
}

impl Watching {
    /// Waits until all know what a list shows, and fails if one does not come to know it.
    pub(crate) async fn end(mut self, churn: &Churn) {
        let listed = churn.list().await;
        assert!(listed.len() > 100, "{} objects are left", listed.len());
        let mut ticks = tokio::time::interval(Duration::from_millis(20));
        let agreed = async {
            while !self.behind(&listed).is_empty() {
                tokio::select! {
                    _ = ticks.tick() => {}
                    Some(ended) = self.tasks.join_next() => ended.unwrap(),
                }
            }
        };
        let agreed = tokio::time::timeout(PATIENCE, agreed).await.is_ok();
        assert!(agreed, "not as listed: {:?}", self.behind(&listed));
        assert_eq!(churn.list().await, listed);
        assert!(*self.expired.lock() > 0, "no version expired");
    }

    /// Who does not know what is listed.
    fn behind(&self, listed: &BTreeMap<String, String>) -> Vec<&'static str> {
        let mut behind = Vec::new();
        for (name, store) in &self.stores {
            let known: BTreeMap<_, _> =
                store.state().iter().map(|map| (map.name_any(), version(map))).collect();
            if known != *listed {
                behind.push(*name);
            }
        }
        let reconciled = self.reconciled.lock();
        if listed.iter().any(|(name, version)| reconciled.get(name) != Some(version)) {
            behind.push("controller");
        }
        behind
    }
}
