//! `berth demo`: one volume's life, from claim to pod and away again, as it happens.

use std::future::Future;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args as ClapArgs;
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::{Api, DeleteParams, LogParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::broadcast;

use crate::driver::BACKENDS;
use crate::sidecars::SIDECARS;
use crate::stack::{self, Stack};
use crate::timeline::{Keeper, Step};
use crate::{logging, machine};

/// How long any one step may take before the walk is given up.
const PATIENCE: Duration = Duration::from_secs(60);
const CLAIM: &str = "demo";
const POD: &str = "demo";
const NAMESPACE: &str = "default";

/// Walk one volume through its life: Provision, Attach, Mount, write, expand, delete.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Where to keep everything meanwhile; it is removed afterwards [default: a temporary directory]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// Do not pause between the steps
    #[arg(long)]
    no_pause: bool,

    #[command(flatten)]
    logging: logging::Logging,
}

/// Starts a machine of its own, walks, and removes it all.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    machine::require_root("demo")?;
    let timeline = logging::start(&args.logging.quieter("error"));
    let directory = match &args.data_dir {
        Some(path) if path.exists() => {
            bail!("{} exists; the demo wants a directory of its own", path.display())
        }
        Some(path) => path.clone(),
        None => std::env::temp_dir().join(format!("berth-demo-{}", std::process::id())),
    };
    let options = options_in(&directory)?;
    let outcome = walk(&options, &timeline, args.no_pause).await;
    let cleaned = crate::down::remove(&directory).await;
    outcome?;
    cleaned?;
    println!("Nothing is left: no mount, no process, no file. `berth up` starts the real thing.");
    Ok(())
}

fn options_in(directory: &std::path::Path) -> anyhow::Result<stack::Options> {
    Ok(stack::Options {
        data_dir: directory.to_owned(),
        listen: "127.0.0.1:0".parse().context("parse a constant")?,
        kubeconfig: None,
        node_name: "berth".to_owned(),
        drivers: BACKENDS.iter().filter(|backend| backend.name == "local").copied().collect(),
        sidecars: SIDECARS.to_vec(),
        flags: crate::up::default_flags()?,
    })
}

async fn walk(options: &stack::Options, timeline: &Keeper, no_pause: bool) -> anyhow::Result<()> {
    let teller = Teller { paced: !no_pause && std::io::stdout().is_terminal(), begun: Instant::now() };
    teller.chapter("Start", "an API server, the control loops, a driver and a node, in this one process");
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let stack = Stack::start(options.clone(), timeline, |what, _| teller.line("berth", what, None)).await?;
    let mut steps = timeline.listen();
    // Whoever interrupts it waits until all is stopped, or something would be left.
    let told = tokio::select! {
        told = life(&stack.client, &teller, &mut steps) => told,
        _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow::anyhow!("told to stop")),
    };
    let stopped = stack.stop().await;
    told.and(stopped)
}

async fn life(client: &Client, teller: &Teller, steps: &mut broadcast::Receiver<Step>) -> anyhow::Result<()> {
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let volumes: Api<PersistentVolume> = Api::all(client.clone());

    teller
        .chapter("Claim", "a claim for 64Mi of the class berth-local; nothing is made until a pod wants it")
        .await_pause()
        .await;
    claims.create(&PostParams::default(), &serde_json::from_value(claim())?).await?;
    teller.line("you", "kubectl apply -f claim.yaml", None);

    teller.chapter("Provision, Attach, Mount", "a pod uses the claim").await_pause().await;
    let begun = Instant::now();
    pods.create(&PostParams::default(), &serde_json::from_value(pod())?).await?;
    teller.line("you", "kubectl apply -f pod.yaml", None);
    let running = until(&pods, POD, |pod: Option<&Pod>| phase(pod) == Some("Running"));
    let pod = follow(running, steps, teller).await?.context("the pod is gone")?;
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
    teller.line("node", &format!("the pod runs on {node}, its volume mounted"), Some(begun.elapsed()));

    teller.chapter("Write", "what the pod wrote to its volume").await_pause().await;
    let written = until_logged(&pods).await?;
    teller.line("pod", written.trim_end(), None);

    teller.chapter("Expand", "the claim is changed to 128Mi while the pod runs").await_pause().await;
    let begun = Instant::now();
    let patch = json!({"spec": {"resources": {"requests": {"storage": "128Mi"}}}});
    claims.patch(CLAIM, &PatchParams::default(), &Patch::Merge(patch)).await?;
    let grown = until(&claims, CLAIM, |claim: Option<&PersistentVolumeClaim>| {
        capacity(claim).as_deref() == Some("128Mi")
    });
    let claim = follow(grown, steps, teller).await?.context("the claim is gone")?;
    teller.line("node", "the claim has 128Mi", Some(begun.elapsed()));

    teller.chapter("Delete", "the pod, then the claim; the volume goes with it").await_pause().await;
    let begun = Instant::now();
    pods.delete(POD, &DeleteParams::default()).await?;
    claims.delete(CLAIM, &DeleteParams::default()).await?;
    let volume = claim.spec.as_ref().and_then(|spec| spec.volume_name.clone()).unwrap_or_default();
    let gone = until(&volumes, &volume, |volume: Option<&PersistentVolume>| volume.is_none());
    follow(gone, steps, teller).await?;
    teller.line("berth", "pod, claim, attachment, volume and data are gone", Some(begun.elapsed()));
    Ok(())
}

fn claim() -> serde_json::Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM},
        "spec": {
            "storageClassName": stack::objects::CLASS, "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "64Mi"}},
        },
    })
}

fn pod() -> serde_json::Value {
    let command =
        "echo hello from $HOSTNAME > /data/hello; cat /data/hello; df -h /data | tail -1; exec sleep 1000000";
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD},
        "spec": {
            "containers": [{
                "name": "writer", "image": "busybox", "command": ["sh", "-c", command],
                "env": [{"name": "HOSTNAME", "value": POD}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": CLAIM}}],
        },
    })
}

fn phase(pod: Option<&Pod>) -> Option<&str> {
    pod?.status.as_ref()?.phase.as_deref()
}

fn capacity(claim: Option<&PersistentVolumeClaim>) -> Option<String> {
    Some(claim?.status.as_ref()?.capacity.as_ref()?.get("storage")?.0.clone())
}

/// What the pod printed, as soon as it printed it all.
async fn until_logged(pods: &Api<Pod>) -> anyhow::Result<String> {
    let parameters = LogParams { follow: true, ..LogParams::default() };
    let mut lines = futures_util::AsyncBufReadExt::lines(pods.log_stream(POD, &parameters).await?);
    let mut text = String::new();
    for _ in 0..2 {
        let line = tokio::time::timeout(PATIENCE, lines.next()).await.context("the pod wrote nothing")?;
        text.push_str(&line.context("the log ended")??);
        text.push_str("; ");
    }
    Ok(text.trim_end_matches("; ").to_owned())
}

/// Waits until an object is (or is no longer) as it should be; gives its last state, `None` if it is gone.
async fn until<K>(api: &Api<K>, name: &str, done: impl Fn(Option<&K>) -> bool) -> anyhow::Result<Option<K>>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let wait = async {
        loop {
            let now = api.get_opt(name).await?;
            if done(now.as_ref()) {
                return Ok(now);
            }
            let version =
                now.as_ref().and_then(ResourceExt::resource_version).unwrap_or_else(|| "0".to_owned());
            let parameters = WatchParams::default().fields(&format!("metadata.name={name}"));
            let mut changes = std::pin::pin!(api.watch(&parameters, &version).await?);
            while let Some(change) = changes.try_next().await? {
                match change {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) if done(Some(&object)) => {
                        return Ok(Some(object));
                    }
                    WatchEvent::Deleted(_) if done(None) => return Ok(None),
                    _ => {}
                }
            }
        }
    };
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(outcome) => outcome,
        Err(_) => bail!("{name} is not as it should be after {PATIENCE:?}"),
    }
}

/// Tells the steps while something is awaited.
async fn follow<T>(
    awaited: impl Future<Output = anyhow::Result<T>>,
    steps: &mut broadcast::Receiver<Step>,
    teller: &Teller,
) -> anyhow::Result<T> {
    let mut awaited = std::pin::pin!(awaited);
    let outcome = loop {
        tokio::select! {
            biased;
            step = steps.recv() => if let Ok(step) = step { teller.step(&step) },
            outcome = &mut awaited => break outcome,
        }
    };
    while let Ok(step) = steps.try_recv() {
        teller.step(&step);
    }
    outcome
}

/// Prints the walk.
struct Teller {
    paced: bool,
    begun: Instant,
}

impl Teller {
    fn chapter(&self, title: &str, text: &str) -> &Self {
        let (bold, plain) = if std::io::stdout().is_terminal() { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
        println!("\n{bold}{title}{plain}: {text}");
        self
    }

    /// Gives a person time to read.
    async fn await_pause(&self) {
        let _ = std::io::stdout().flush();
        if self.paced {
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
    }

    fn step(&self, step: &Step) {
        let state = if step.state.is_empty() { String::new() } else { format!(" → {}", step.state) };
        let error = if step.error.is_empty() { String::new() } else { format!(" failed: {}", step.error) };
        self.line(&step.component, &format!("{}{state}{error}", step.call), Some(step.duration()));
    }

    fn line(&self, who: &str, what: &str, took: Option<Duration>) {
        let took = took.map_or_else(String::new, |took| format!("{:.1} ms", took.as_secs_f64() * 1000.0));
        println!("  {:>7.3} s  {who:<22} {what:<52} {took:>10}", self.begun.elapsed().as_secs_f64());
    }
}
