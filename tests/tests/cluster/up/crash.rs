//! kill -9 of `berth up` at random moments while claims and pods come and go.
//!
//! `BERTH_UP_KILLS` says how often (5), `BERTH_CRASH_SEED` repeats a run's choices.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use berth_e2e::{
    content::Random,
    up::{
        Leftovers, Machine,
        churn::{self, Api},
    },
};
use tokio::sync::watch;

use crate::up::until_empty;

const WORKERS: u64 = 3;
/// What the pod that outlives every kill does: it counts its lives, and is found by its words.
const ANCHOR: &str = "echo life >> /data/lives; exec sleep 424242";

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_left_by_kills() -> Result<()> {
    let kills = number("BERTH_UP_KILLS")?.unwrap_or(5);
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    let seed = number("BERTH_CRASH_SEED")?.unwrap_or_else(|| now.into());
    eprintln!("kills of berth up: seed {seed}, {kills} kills");
    let lives = kill_and_look(seed, kills).await.with_context(|| format!("with seed {seed}"))?;
    eprintln!("kills of berth up: {lives} claims lived");
    Ok(())
}

pub(super) fn number(name: &str) -> Result<Option<u64>> {
    let value = std::env::var(name).ok();
    value.map(|text| text.parse().with_context(|| format!("{name} is {text:?}, not a number"))).transpose()
}

async fn kill_and_look(seed: u64, kills: u64) -> Result<u64> {
    let mut random = Random::new(seed);
    let mut machine = Machine::start()?;
    let api = Api::of(&machine).await?;
    api.create("persistentvolumeclaims", &churn::claim("anchor", 16)).await?;
    api.create("pods", &churn::pod("anchor", "anchor", ANCHOR)).await?;
    api.until_phase("anchor", "Running").await?;
    let anchor = Anchor::of(&machine)?;

    let (stop, stopped) = watch::channel(false);
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let random = Random::new(random.number());
            tokio::spawn(churn::live(api.clone(), worker, random, stopped.clone()))
        })
        .collect();
    for kill in 0..kills {
        // Long lives, short ones, and some that end before they are ready.
        let longest = *random.pick(&[300, 1000, 3000]);
        tokio::time::sleep(Duration::from_millis(random.below(longest))).await;
        machine.kill().with_context(|| format!("at kill {kill}"))?;
        anchor.check(&machine).with_context(|| format!("after kill {kill}"))?;
        if random.below(3) == 0 {
            machine.begin()?;
            tokio::time::sleep(Duration::from_millis(random.below(400))).await;
            machine.kill().with_context(|| format!("at the start after kill {kill}"))?;
        }
        machine.restart().with_context(|| format!("after kill {kill}"))?;
        api.find(&machine).await?;
        anchor.check(&machine).with_context(|| format!("after start {kill}"))?;
    }
    stop.send_replace(true);
    let mut lives = 0;
    for worker in workers {
        lives += worker.await?.map_err(|error| with_steps(&machine, error))?;
    }
    ensure!(lives >= WORKERS, "only {lives} claims lived");

    let pod = api.get("pods", "anchor").await?.context("the anchor is gone")?;
    ensure!(pod["status"]["phase"] == "Running", "{pod:#}");
    ensure!(pod["status"]["containerStatuses"][0]["restartCount"] == 0, "{pod:#}");
    ensure!(machine.exec("anchor", "cat /data/lives; echo more >> /data/lives")? == "life\n");
    anchor.check(&machine)?;
    api.delete("pods", "anchor").await?;
    api.delete("persistentvolumeclaims", "anchor").await?;
    until_empty(&machine)?;
    check_directories(&machine)?;
    machine.finish()?;
    Ok(lives)
}

/// Adds what the timeline tells of the claim that an error names.
fn with_steps(machine: &Machine, error: anyhow::Error) -> anyhow::Error {
    let claim = error.to_string().split(' ').next_back().unwrap_or_default().to_owned();
    let steps = std::fs::read_to_string(machine.data().join("timeline.jsonl")).unwrap_or_default();
    let volume = steps
        .lines()
        .find(|line| line.contains("CreateVolume") && line.contains(&format!("/{claim}\"")))
        .and_then(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .map_or_else(|| claim.clone(), |step| crate::up::text(&step, "/volume").to_owned());
    let reported: Vec<&str> =
        steps.lines().filter(|line| line.contains(&claim) || line.contains(&volume)).collect();
    error.context(format!("its steps:\n{}", reported.join("\n")))
}

/// The pod that must not notice anything.
struct Anchor {
    process: i32,
    mounts: Vec<PathBuf>,
}

impl Anchor {
    fn of(machine: &Machine) -> Result<Self> {
        // The pod runs as soon as its shell does, and that counts the life first.
        let process = machine.until("the anchor sleeps", || Ok(process(machine).ok()))?;
        let mounts = Leftovers::of(machine.dir())?.mounts;
        ensure!(mounts.len() >= 2, "the anchor's volume is not mounted: {mounts:?}");
        Ok(Self { process, mounts })
    }

    fn check(&self, machine: &Machine) -> Result<()> {
        ensure!(process(machine)? == self.process, "the pod's process was replaced");
        let mounts = Leftovers::of(machine.dir())?.mounts;
        let gone: Vec<_> = self.mounts.iter().filter(|mount| !mounts.contains(mount)).collect();
        ensure!(gone.is_empty(), "no longer mounted: {gone:?}");
        Ok(())
    }
}

fn process(machine: &Machine) -> Result<i32> {
    let processes = Leftovers::of(machine.dir())?.processes;
    let found = processes.iter().find(|(_, words)| words.starts_with("sleep 424242"));
    Ok(found.with_context(|| format!("the pod does not run: {processes:?}"))?.0)
}

/// No volume, no pod's or container's directory is left.
fn check_directories(machine: &Machine) -> Result<()> {
    let empty = [
        "local/volumes",
        "local/incoming",
        "local/trash",
        "node/pods",
        "node/containers",
        "node/logs",
        "node/plugins/kubernetes.io/csi/local.berth.dev",
    ];
    for name in empty {
        let dir = machine.data().join(name);
        machine
            .until(&format!("{name} is empty"), || {
                if !dir.exists() {
                    return Ok(Some(()));
                }
                let left = berth_e2e::machine::listing(&dir).unwrap_or_default();
                Ok(left.is_empty().then_some(()))
            })
            .with_context(|| format!("{name}: {:?}", berth_e2e::machine::listing(&dir)))?;
    }
    Ok(())
}
