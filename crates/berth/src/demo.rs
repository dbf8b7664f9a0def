//! `berth demo`: one volume's life, from claim to pod and away again, as it happens.

use std::future::Future;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use berth_kube::{Cluster, Key, storage};
use clap::Args as ClapArgs;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Api, LogParams};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::broadcast;

use crate::driver::BACKENDS;
use crate::stack::{self, Stack};
use crate::timeline::{Step, TimelineRecorder};
use crate::{logging, machine, rootless};

/// How long any one step may take before the walk is given up.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
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
    let timeline = logging::start(&args.logging.quieter("error"));
    let directory = match &args.data_dir {
        Some(path) if path.exists() => {
            bail!("{} exists; the demo wants a directory of its own", path.display())
        }
        Some(path) => path.clone(),
        None => std::env::temp_dir().join(format!("berth-demo-{}", std::process::id())),
    };
    let options = stack::Options {
        drivers: BACKENDS.iter().filter(|backend| backend.name == "local").copied().collect(),
        ..stack::Options::temporary(&directory)?
    };
    let outcome = walk(&options, &timeline, args.no_pause).await;
    let cleaned = crate::down::remove(&directory).await;
    outcome?;
    cleaned?;
    println!(
        "Everything was removed: mounts, processes and files. `berth up` runs the same on this machine until you stop it."
    );
    Ok(())
}

async fn walk(options: &stack::Options, timeline: &TimelineRecorder, no_pause: bool) -> anyhow::Result<()> {
    let printer = Printer { paced: !no_pause && std::io::stdout().is_terminal(), begun: Instant::now() };
    printer.chapter("Start", "an API server, the control loops, a driver and a node, in this one process");
    if let Some(limits) = rootless::limits() {
        println!("  {limits}");
    }
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let stack = Stack::start(options.clone(), timeline, |what, _| printer.line("berth", what, None)).await?;
    let mut steps = timeline.listen();
    // Whoever interrupts it waits until all is stopped, or something would be left.
    let outcome = tokio::select! {
        outcome = life(&stack.cluster, &printer, &mut steps) => outcome,
        _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow::anyhow!("stopped by a signal")),
        failure = stack.failed() => Err(anyhow::anyhow!(failure)),
    };
    let stopped = stack.stop().await;
    outcome.and(stopped)
}

async fn life(
    cluster: &Cluster,
    printer: &Printer,
    steps: &mut broadcast::Receiver<Step>,
) -> anyhow::Result<()> {
    printer
        .chapter(
            "Claim",
            "a claim for 64Mi of the class berth-local; its volume is created when a pod uses it",
        )
        .await_pause()
        .await;
    let claim: PersistentVolumeClaim = serde_json::from_value(claim())?;
    let claim = cluster.create(&claim).await?;
    printer.line("demo", &format!("create PersistentVolumeClaim {CLAIM} (64Mi)"), None);

    printer.chapter("Provision, Attach, Mount", "a pod uses the claim").await_pause().await;
    let begun = Instant::now();
    let pod: Pod = serde_json::from_value(pod_manifest())?;
    let pod = cluster.create(&pod).await?;
    printer.line("demo", &format!("create Pod {POD}"), None);
    let is_running = |pod: Option<&Pod>| pod.is_some_and(|pod| storage::phase_of_pod(pod) == "Running");
    let running = machine::until(cluster, STEP_TIMEOUT, Key::of(pod.as_ref()), is_running);
    let pod = follow(running, steps, printer).await?.context("the pod was deleted")?;
    let node = storage::node_of_pod(&pod);
    printer.line("node", &format!("the pod runs on {node} with its volume mounted"), Some(begun.elapsed()));

    printer.chapter("Write", "what the pod wrote to its volume").await_pause().await;
    let written = until_logged(&Api::namespaced(cluster.client().clone(), NAMESPACE)).await?;
    printer.line("pod", written.trim_end(), None);

    printer.chapter("Expand", "the claim is changed to 128Mi while the pod runs").await_pause().await;
    let begun = Instant::now();
    cluster.edit(claim.as_ref(), |claim| request(claim, "128Mi")).await?;
    printer.line("demo", &format!("change PersistentVolumeClaim {CLAIM} to 128Mi"), None);
    let has_grown = |claim: Option<&PersistentVolumeClaim>| capacity(claim).as_deref() == Some("128Mi");
    let answered = |claim: Option<&PersistentVolumeClaim>| has_grown(claim) || growth_is_refused(claim);
    let grown = machine::until(cluster, STEP_TIMEOUT, Key::of(claim.as_ref()), answered);
    let mut claim = follow(grown, steps, printer).await?.context("the claim was deleted")?;
    let mut pod = pod;
    if !has_grown(Some(&claim)) {
        // The kernel grows a mounted ext4 only for processes with CAP_SYS_RESOURCE, which many containers lack.
        printer.line(
            "demo",
            &format!("delete and create Pod {POD}: the volume grows while it is not mounted"),
            None,
        );
        cluster.delete(pod.as_ref()).await?;
        let deleted =
            machine::until(cluster, STEP_TIMEOUT, Key::of(pod.as_ref()), |pod: Option<&Pod>| pod.is_none());
        follow(deleted, steps, printer).await?;
        pod = cluster.create(&serde_json::from_value::<Pod>(pod_manifest())?).await?;
        let grown = machine::until(cluster, STEP_TIMEOUT, Key::of(claim.as_ref()), has_grown);
        claim = follow(grown, steps, printer).await?.context("the claim was deleted")?;
    }
    printer.line("node", "the claim has 128Mi", Some(begun.elapsed()));

    printer.chapter("Delete", "the pod, then the claim; the volume goes with it").await_pause().await;
    let begun = Instant::now();
    cluster.delete(pod.as_ref()).await?;
    printer.line("demo", &format!("delete Pod {POD}"), None);
    cluster.delete(claim.as_ref()).await?;
    printer.line("demo", &format!("delete PersistentVolumeClaim {CLAIM}"), None);
    let volume = Key::cluster(storage::volume_name(&claim));
    let deleted =
        machine::until(cluster, STEP_TIMEOUT, volume, |volume: Option<&PersistentVolume>| volume.is_none());
    follow(deleted, steps, printer).await?;
    printer.line("berth", "pod, claim, attachment, volume and data are deleted", Some(begun.elapsed()));
    Ok(())
}

fn claim() -> serde_json::Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM, "namespace": NAMESPACE},
        "spec": {
            "storageClassName": stack::objects::CLASS, "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "64Mi"}},
        },
    })
}

fn pod_manifest() -> serde_json::Value {
    let command =
        "echo hello from $HOSTNAME > /data/hello; cat /data/hello; df -h /data | tail -1; exec sleep 1000000";
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": POD, "namespace": NAMESPACE},
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

/// Makes a claim ask for this much.
fn request(claim: &mut PersistentVolumeClaim, size: &str) {
    let resources = claim.spec.get_or_insert_default().resources.get_or_insert_default();
    resources.requests.get_or_insert_default().insert("storage".to_owned(), Quantity(size.to_owned()));
}

/// Whether the driver answered that the volume cannot grow while it is mounted.
fn growth_is_refused(claim: Option<&PersistentVolumeClaim>) -> bool {
    let conditions = claim.and_then(|claim| claim.status.as_ref()?.conditions.as_ref());
    conditions.is_some_and(|conditions| {
        conditions.iter().any(|condition| condition.type_ == "NodeResizeError" && condition.status == "True")
    })
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
        let line = tokio::time::timeout(STEP_TIMEOUT, lines.next()).await.context("the pod wrote nothing")?;
        text.push_str(&line.context("the log ended")??);
        text.push_str("; ");
    }
    Ok(text.trim_end_matches("; ").to_owned())
}

/// Prints the steps while something is awaited.
async fn follow<T>(
    awaited: impl Future<Output = anyhow::Result<T>>,
    steps: &mut broadcast::Receiver<Step>,
    printer: &Printer,
) -> anyhow::Result<T> {
    let mut awaited = std::pin::pin!(awaited);
    let outcome = loop {
        tokio::select! {
            biased;
            step = steps.recv() => if let Ok(step) = step { printer.step(&step) },
            outcome = &mut awaited => break outcome,
        }
    };
    while let Ok(step) = steps.try_recv() {
        printer.step(&step);
    }
    outcome
}

/// Prints the chapters and steps of the demo with the time since its start.
struct Printer {
    paced: bool,
    begun: Instant,
}

impl Printer {
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
