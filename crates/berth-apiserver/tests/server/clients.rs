//! The API as its clients know it: kube-rs's watchers, reflectors and controllers, in process and over TLS.
//!
//! They run through churn, with restarts of the server, slow readers and expired versions; at the end each must know
//! exactly what a list shows. `BERTH_EVENTS` says how many changes are made.

mod churn;
mod finalizers;
mod go;
mod in_process;
mod watching;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};

use self::churn::Churn;
use self::in_process::InProcess;
use crate::served::Served;

/// Fewer than the changes made while a slow reader rests: it is told that its version expired.
const HISTORY: usize = 2000;
const PATIENCE: Duration = Duration::from_secs(180);

fn events(default: usize) -> usize {
    std::env::var("BERTH_EVENTS").map_or(default, |events| events.parse().unwrap())
}

async fn client_of(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_in_process_miss_nothing_over_restarts_and_expired_versions() {
    let dir = tempfile::tempdir().unwrap();
    let server = InProcess::start(dir.path(), HISTORY).await;
    let churn = Arc::new(Churn::new(server.client(), events(50_000)));
    let watching = watching::start(&churn, &server.client());
    let restarts = async {
        for eighth in 1..8 {
            churn.reach(churn.total() * eighth / 8).await;
            churn.announce_restart();
            server.restart(dir.path()).await;
        }
    };
    tokio::join!(churn.run(), restarts);
    watching.end(&churn).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_over_tls_miss_nothing_when_the_server_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path(), HISTORY);
    let client = client_of(&dir.path().join("kubeconfig")).await;
    let churn = Arc::new(Churn::new(client.clone(), events(50_000) / 5));
    let watching = watching::start(&churn, &client);
    let kills = async {
        for quarter in 1..4 {
            churn.reach(churn.total() * quarter / 4).await;
            churn.announce_restart();
            served.kill();
            tokio::task::block_in_place(|| served.start_again());
        }
    };
    tokio::join!(churn.run(), kills);
    watching.end(&churn).await;
}
