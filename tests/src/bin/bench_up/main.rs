//! Measures `berth up` of the release binary: from exec to ready, from claim to mounted pod and back, one, twenty and a
//! thousand at once, and what it holds in memory; beside what a real cluster of one node takes.
//!
//! Nothing here fails because of a figure: it is for reading. `SINGLES` (50), `MANY` (1000) and `PROBED` (500) choose how much is done,
//! `NODES` (1) on how many nodes.

use std::{env, fs, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use berth_e2e::{
    driver::binary,
    machine::command,
    observe::Observer,
    table::{Figures, Quantity, Table, Target, count},
    times::{Times, seconds},
    up::Machine,
};
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};

mod cost;
mod load;
mod probes;
mod start;
mod steps;

use load::{Load, Took};
use start::{Started, start};

/// What the figures are compared with; measured on an idle machine of this size.
const OTHER: &str = "Kubernetes 1.36";
/// How many are taken through their life together.
const FEW: usize = 20;

// One thread makes all the calls: on two cores, Berth has the other one to itself.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match interruptible().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-up: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures everything; a signal drops it where it stands, and with it pods, volumes and directories.
async fn interruptible() -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        done = measure() => done,
        _ = interrupt.recv() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("told to stop"),
    }
}

async fn measure() -> Result<()> {
    println!("{}", conditions()?);
    let (singles, many) = (number("SINGLES", 50)?, number("MANY", 1000)?);
    let mut machine = Machine::new_with(&[&format!("--nodes={}", number("NODES", 1)?)])?;
    let fresh = start(&mut machine).await?;
    drop(fresh.client);
    machine.signal(rustix::process::Signal::TERM)?;
    let again = start(&mut machine).await?;
    let client = again.client.clone();
    println!("{}", starts((fresh.api, fresh.node), &again));

    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut resident = Figures::beside(OTHER, "Resident memory");
    let other = Some("about 1,000 MB".to_owned());
    resident.add("idle", cost::resident(&machine)?, Some(at_most_mb(60.0)), other);

    println!("{}", one_by_one(&machine, &client, singles).await?);
    println!("{}", steps::table(machine.data())?);
    println!("{}", together(&machine, &client, many, &mut resident).await?);
    println!("{}", probes::measure(&machine, &client, number("PROBED", 500)?).await?);
    println!("{resident}");
    drop(client);
    machine.finish()
}

/// What the figures depend on besides the code.
fn conditions() -> Result<String> {
    let binary = binary()?;
    let size = u32::try_from(fs::metadata(&binary)?.len()).context("the binary is beyond measure")?;
    let version = command(&binary).arg("--version").output().context("ask the binary for its version")?;
    let cores = std::thread::available_parallelism()?;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let load = fs::read_to_string("/proc/loadavg")?;
    Ok(format!(
        "{}, {}; {cores} cores, Linux {}; load average {} before the first start\n",
        String::from_utf8_lossy(&version.stdout).trim(),
        Quantity::Megabytes(f64::from(size) / 1e6),
        kernel.trim(),
        load.split(' ').next().unwrap_or_default(),
    ))
}

fn number(name: &str, usual: usize) -> Result<usize> {
    match env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is not a number: {text:?}")),
        Err(_) => Ok(usual),
    }
}

fn starts(fresh: (Duration, Duration), again: &Started) -> Figures {
    let mut figures = Figures::beside(OTHER, "From exec");
    let (api, node) = (Duration::from_millis(200), Duration::from_millis(500));
    figures.add("API ready, empty data directory", seconds(fresh.0), Some(below(api)), None);
    figures.add("node ready, empty data directory", seconds(fresh.1), Some(below(node)), None);
    figures.add("API ready, again", seconds(again.api), Some(below(api)), None);
    figures.add("node ready, again", seconds(again.node), Some(below(node)), None);
    figures
}

/// One claim with a pod after the other, and the writes of one such life.
async fn one_by_one(machine: &Machine, client: &Client, singles: usize) -> Result<String> {
    let (load, mut observer) = (Load::new(client), Observer::of_all(client).await?);
    let (mut running, mut gone) = (Times::default(), Times::default());
    let cpu = cost::cpu(machine)?;
    for _ in 0..singles {
        let took = load.live(1, &mut observer).await?;
        running.add(took.running);
        gone.add(took.gone);
    }
    let mut figures = Figures::beside(
        OTHER,
        format!("A claim with a pod, {singles} times (WaitForFirstConsumer, local driver)"),
    );
    for (what, percent) in [("median", 50), ("90 %", 90), ("longest", 100)] {
        let (aim, other) = if percent == 50 {
            (Some(below(Duration::from_millis(150))), Some("3.3 to 5.4 s".to_owned()))
        } else {
            (None, None)
        };
        figures.add(format!("created to Running, {what}"), running.percentile(percent), aim, other);
    }
    for (what, percent) in [("median", 50), ("90 %", 90), ("longest", 100)] {
        let (aim, other) = if percent == 50 {
            (Some(below(Duration::from_millis(300))), Some("15 s".to_owned()))
        } else {
            (None, None)
        };
        figures.add(format!("deleted to gone, {what}"), gone.percentile(percent), aim, other);
    }
    let cpu = cost::cpu(machine)?.saturating_sub(cpu) / u32::try_from(singles.max(1)).unwrap_or(u32::MAX);
    figures.add("CPU time of one such life", seconds(cpu), None, None);
    Ok(format!("{figures}\n{}", writes(&observer, singles)))
}

fn writes(observer: &Observer, lives: usize) -> Table {
    let all = observer.take_writes();
    let per_life = |writes: usize| {
        let (writes, lives) =
            (u32::try_from(writes).unwrap_or(u32::MAX), u32::try_from(lives).unwrap_or(u32::MAX));
        format!("{:.1}", f64::from(writes) / f64::from(lives.max(1)))
    };
    let mut table = Table::new("Writes to the API per such life", &["", "writes"]);
    for ((kind, verb), writes) in &all {
        table.add(vec![format!("{verb} {kind}"), per_life(*writes)]);
    }
    table.add(vec!["all".into(), per_life(all.values().sum())]);
    table
}

/// Twenty and many at once; what that holds in memory goes into `resident`.
async fn together(
    machine: &Machine,
    client: &Client,
    many: usize,
    resident: &mut Figures,
) -> Result<Figures> {
    let (load, mut observer) = (Load::new(client), Observer::of_volumes(client).await?);
    let mut figures = Figures::beside(OTHER, "At once");
    let Took { running, gone } = load.live(FEW, &mut observer).await?;
    let aim = Some(below(Duration::from_secs(1)));
    figures.add(format!("{FEW} claims with pods Running"), seconds(running), aim, Some("12 s".into()));
    figures.add(format!("{FEW} of them gone"), seconds(gone), None, Some("32 s".into()));

    load::class_at_once(client).await?;
    let all = count(many);
    figures.add(format!("{all} claims bound"), seconds(load.bind(many, &mut observer).await?), None, None);
    resident.add(format!("{all} bound claims"), cost::resident(machine)?, Some(at_most_mb(150.0)), None);
    figures.add(format!("{all} of them gone"), seconds(load.unbind(many, &mut observer).await?), None, None);

    let running = load.run(many, &mut observer).await?;
    let aim = Some(below(Duration::from_secs(60)));
    figures.add(format!("{all} claims with pods Running"), seconds(running), aim, None);
    resident.add(format!("{all} pods"), cost::resident(machine)?, None, None);
    let (shims, private) = cost::shims(machine)?;
    resident.note(format!("{} shims, private", count(shims)), private.to_string());
    figures.add(format!("{all} of them gone"), seconds(load.end(many, &mut observer).await?), None, None);
    resident.add("afterwards", cost::resident(machine)?, None, None);
    Ok(figures)
}

fn below(time: Duration) -> Target {
    Target::Below(seconds(time))
}

fn at_most_mb(size: f64) -> Target {
    Target::AtMost(Quantity::Megabytes(size))
}
