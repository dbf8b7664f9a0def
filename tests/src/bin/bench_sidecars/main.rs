//! Measures `berth controller local` on real Kubernetes, which `make bench-sidecars` starts: claims bound and deleted,
//! volumes attached and detached, memory, renewals of the lease; beside what the Go components take.
//!
//! Nothing here fails because of a figure: it is for reading. `CLAIMS` (1000), `FILLED` (2400) and `FULL` (10000) choose
//! how much is done; `LIFTED` says that kube-controller-manager runs without its limit on requests.

use std::{env, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result};
use berth_e2e::{
    driver::binary,
    observe::Observer,
    program::Program,
    table::{Figures, Quantity, Target, count},
    times::seconds,
};
use futures_util::StreamExt as _;
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Namespace, Node},
    storage::v1::{CSIDriver, CSINode, StorageClass},
};
use kube::{
    Api, Client, Config,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};

mod load;

use load::Load;

const OTHER: &str = "Go";
/// Of the namespace, the node, the class and the driver.
const NAME: &str = "bench";
const DRIVER: &str = "bench.berth.test";
/// Long enough for a few renewals of the lease.
const LEASE: Duration = Duration::from_secs(20);

// One thread makes all the calls: the cores are for what is measured.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match measure().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-sidecars: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn measure() -> Result<()> {
    let kubeconfig = env::var_os("KUBECONFIG_REAL")
        .map(PathBuf::from)
        .context("KUBECONFIG_REAL names no cluster; `make bench-sidecars` starts one and runs this")?;
    let config = Kubeconfig::read_from(&kubeconfig)?;
    let client =
        Client::try_from(Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?)?;
    let dir = tempfile::Builder::new().prefix("bench-").rand_bytes(5).tempdir()?;
    prepare(&client).await?;
    let begin = || {
        let args = [
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--endpoint=unix://{}", dir.path().join("csi.sock").display()),
            format!("--data-dir={}", dir.path().join("data").display()),
            format!("--node-id={NAME}"),
            format!("--driver-name={DRIVER}"),
            "--leader-election".to_owned(),
            format!("--leader-election-namespace={NAME}"),
            "--controllers=provisioner,attacher,resizer,snapshotter".to_owned(),
        ];
        let words: Vec<&str> =
            ["controller", "local", "--attach"].into_iter().chain(args.iter().map(String::as_str)).collect();
        Program::start(&binary()?, &words, &[], dir.path().join("log"))
    };
    let mut program = begin()?;
    program.says(" ready ").await?;
    let lifted = env::var_os("LIFTED").is_some_and(|value| !value.is_empty());
    if lifted {
        without_limits(&client, &mut program, begin).await?;
    } else {
        with_limits(&client).await?;
    }
    program.stop().await
}

/// What can be measured while kube-controller-manager is held back: that Berth is not what holds it.
async fn with_limits(client: &Client) -> Result<()> {
    let (load, mut observer) = (Load::new(client), Observer::of_volumes(client).await?);
    let few = number("FEW", 200)?;
    let mut figures =
        Figures::beside(OTHER, "With kube-controller-manager's limits (about 5 claims per second)");
    let bound = load.bind(0..few, &mut observer).await?;
    figures.add(format!("{few} claims bound"), seconds(bound), None, Some("60 s".into()));
    let gone = load.unbind(0..few, &mut observer).await?;
    figures.add(format!("{few} of them gone"), seconds(gone), None, Some("85 s".into()));
    println!("{figures}");
    Ok(())
}

async fn without_limits(
    client: &Client,
    program: &mut Program,
    again: impl Fn() -> Result<Program>,
) -> Result<()> {
    let (claims, filled, full) = (number("CLAIMS", 1000)?, number("FILLED", 2400)?, number("FULL", 10_000)?);
    let (load, mut observer) = (Load::new(client), Observer::of_volumes(client).await?);
    let mut memory = Figures::beside(OTHER, "Resident memory at rest, driver included");
    memory.add("idle", resident(program).await?, Some(at_most_mb(15.0)), Some("242 MB".into()));

    let mut figures = Figures::beside(OTHER, "Without limits on requests to the API");
    let below = |time: u64| Some(Target::Below(Quantity::Seconds(Duration::from_secs(time).as_secs_f64())));
    let many = count(claims);
    let bound = load.bind(0..claims, &mut observer).await?;
    figures.add(format!("{many} claims bound"), seconds(bound), below(11), Some("22 s".into()));
    let (attached, detached) = load.attach(claims, &mut observer).await?;
    figures.add(format!("{many} volumes attached"), seconds(attached), below(10), None);
    figures.add(format!("{many} of them detached"), seconds(detached), below(10), None);
    let gone = load.unbind(0..claims, &mut observer).await?;
    figures.add(format!("{many} claims gone"), seconds(gone), below(12), Some("23 s".into()));

    load.bind(0..filled, &mut observer).await?;
    let name = format!("{} claims", count(filled));
    memory.add(name, resident(program).await?, Some(at_most_mb(30.0)), Some("358 MB".into()));
    let more = load.bind(filled..full, &mut observer).await?;
    figures.add(format!("{} more claims bound", count(full - filled)), seconds(more), None, None);
    let name = format!("{} claims", count(full));
    memory.add(
        name,
        resident(program).await?,
        Some(at_most_mb(60.0)),
        Some("400 MB for each of four".into()),
    );

    let renewals = renewals(client).await?;
    program.kill()?;
    *program = again()?;
    program.says(" ready ").await?;
    memory.add("the same, after a restart", resident(program).await?, Some(at_most_mb(60.0)), None);
    let gone = load.unbind(0..full, &mut observer).await?;
    figures.add(format!("{} claims gone", count(full)), seconds(gone), None, None);
    memory.add("afterwards", resident(program).await?, None, None);
    println!("{figures}\n{memory}\n  {renewals} renewals of leases in {LEASE:?}, at most 4 wanted");
    Ok(())
}

/// Everything that a cluster with such a driver and one node has.
async fn prepare(client: &Client) -> Result<()> {
    let topology = "topology.berth.dev/node";
    let create = PostParams::default();
    let driver = json!({"metadata": {"name": DRIVER}, "spec": {"attachRequired": true}});
    Api::<CSIDriver>::all(client.clone()).create(&create, &typed(driver)?).await?;
    let namespace = json!({"metadata": {"name": NAME}});
    Api::<Namespace>::all(client.clone()).create(&create, &typed(namespace)?).await?;
    let class = json!({"metadata": {"name": NAME}, "provisioner": DRIVER, "volumeBindingMode": "Immediate"});
    Api::<StorageClass>::all(client.clone()).create(&create, &typed(class)?).await?;
    let node = json!({"metadata": {"name": NAME, "labels": {topology: NAME}}});
    Api::<Node>::all(client.clone()).create(&create, &typed(node)?).await?;
    let csi_node = json!({
        "metadata": {"name": NAME},
        "spec": {"drivers": [{"name": DRIVER, "nodeID": NAME, "topologyKeys": [topology]}]},
    });
    Api::<CSINode>::all(client.clone()).create(&create, &typed(csi_node)?).await?;
    Ok(())
}

fn typed<K: serde::de::DeserializeOwned>(object: Value) -> Result<K> {
    Ok(serde_json::from_value(object)?)
}

/// How often leases in the namespace were renewed in a while, as their versions tell.
async fn renewals(client: &Client) -> Result<u64> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), NAME);
    let mut watch = Box::pin(kube::runtime::watcher(leases, kube::runtime::watcher::Config::default()));
    let mut renewed = 0;
    let counting = async {
        while let Some(event) = watch.next().await {
            if matches!(event, Ok(kube::runtime::watcher::Event::Apply(_))) {
                renewed += 1;
            }
        }
    };
    let _ = tokio::time::timeout(LEASE, counting).await;
    Ok(renewed)
}

/// What a program takes at rest: it gives back what a load left within ten seconds.
async fn resident(program: &Program) -> Result<Quantity> {
    tokio::time::sleep(Duration::from_secs(20)).await;
    let kibibytes = u32::try_from(program.resident()? >> 10)?;
    let figure = Quantity::Megabytes(f64::from(kibibytes) * 1024.0 / 1e6);
    // The tables come at the end; whoever waits for them sees that it goes on.
    eprintln!("bench-sidecars: {figure} resident");
    Ok(figure)
}

fn at_most_mb(size: f64) -> Target {
    Target::AtMost(Quantity::Megabytes(size))
}

fn number(name: &str, usual: usize) -> Result<usize> {
    match env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is not a number: {text:?}")),
        Err(_) => Ok(usual),
    }
}
