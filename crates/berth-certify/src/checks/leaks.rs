//! What is left when everything is undone, and where secrets turn up.
#![expect(clippy::unused_async, reason = "the rows of the table are asynchronous")]

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Session, broken, ensure, not_run};

/// So many volumes are made and taken down to see what is left of them.
const CYCLES: usize = 6;
/// A driver may keep a few files open, such as a log that it has begun.
const FEW: usize = 3;
/// How often command lines are read while a driver works.
const GLANCE: Duration = Duration::from_millis(2);
/// How long what ends in the background may take to end.
const SETTLE: Duration = Duration::from_secs(5);

checks! {
    "leak.undone" Must "DeleteVolume": "Everything that the calls of this run made could be undone.";
        "See which call failed; a volume that cannot be deleted costs money."; [] undone;
    "leak.mounts" Must "NodeUnstageVolume": "After all calls no mount of this run is left.";
        "Unmount everything that stage and publish mounted, in the order of the calls."; [Need::Sight] mounts;
    "leak.loop-devices" Must "NodeUnstageVolume": "After all calls no loop device that held a volume of this run is attached.";
        "Detach loop devices when unstaging, or attach them with autoclear."; [Need::Sight] loop_devices;
    "leak.directories" Should "NodeUnpublishVolume": "After all calls there is nothing of the driver below the directory of the targets.";
        "Remove what the driver made beside target_path."; [Need::Sight] directories;
    "leak.files" Must "Operational Recommendations": "Volumes that come and go leave no open files in the driver.";
        "Close devices, directories and connections with the volume."; [Need::Volumes, Need::Sight] files;
    "leak.children" Must "Operational Recommendations": "Volumes that come and go leave no processes behind, zombies included.";
        "Wait for children; end what served a mount when it is unmounted."; [Need::Volumes, Need::Sight] children;
    "secret.log" Must "Secrets Requirements": "No secret is in the driver's log.";
        "Log requests without their secrets: fields that the protocol marks csi_secret."; [Need::Program] log;
    "secret.command-line" Must "Secrets Requirements": "No secret is in the command line of the driver or of what it starts.";
        "Give secrets to tools by a file or by standard input: everybody on the machine can read command lines."; [Need::Volumes, Need::Sight] command_line;
}

async fn undone(session: &Session) -> Outcome {
    let stuck = session.stuck();
    ensure(stuck.is_empty(), || format!("{} could not be undone, such as {}", stuck.len(), stuck[0]))
}

fn mounts_left(session: &Session) -> Vec<String> {
    let mounts = session.driver.mounts().unwrap_or_default();
    let own = mounts.into_iter().filter(|mount| mount.target.starts_with(session.directory()));
    own.map(|mount| mount.target.display().to_string()).collect()
}

async fn mounts(session: &Session) -> Outcome {
    let left = mounts_left(session);
    ensure(left.is_empty(), || format!("{} are mounted, such as {}", left.len(), left[0]))
}

async fn loop_devices(session: &Session) -> Outcome {
    if session.loop_devices().is_empty() {
        return not_run("no volume of this run was on a loop device");
    }
    // The kernel detaches a device a moment after its last user.
    let begun = std::time::Instant::now();
    loop {
        let left = session.loop_devices_left();
        if left.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > SETTLE {
            return broken(format!("{} are attached, such as {}", left.len(), left[0]));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn directories(session: &Session) -> Outcome {
    let path = session.seen(&session.directory().display().to_string());
    let listed = fs::read_dir(path).or_not_run("listing the directory of the targets")?;
    let names = listed.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    // A target that is not removed is a rule of its own.
    let foreign: Vec<_> =
        names.filter(|name| !name.starts_with("staging-") && !name.starts_with("target-")).collect();
    ensure(foreign.is_empty(), || format!("it holds {foreign:?}"))
}

async fn cycle(session: &Session) -> Outcome {
    let prepared = session.published(&session.volume().await?).await?;
    session.take_down(&prepared).await
}

async fn files(session: &Session) -> Outcome {
    for _ in 0..2 {
        cycle(session).await?;
    }
    let count = || session.driver.open_files();
    let Some(before) = count() else { return not_run("the driver's open files cannot be counted") };
    for _ in 0..CYCLES {
        cycle(session).await?;
    }
    let begun = std::time::Instant::now();
    loop {
        let after = count().unwrap_or_default();
        if after <= before + FEW {
            return Ok(());
        }
        if begun.elapsed() > SETTLE {
            return broken(format!(
                "{before} files were open, {after} are after {CYCLES} volumes came and went"
            ));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn children(session: &Session) -> Outcome {
    for _ in 0..2 {
        cycle(session).await?;
    }
    let before = session.driver.descendants();
    for _ in 0..CYCLES {
        cycle(session).await?;
    }
    let begun = std::time::Instant::now();
    loop {
        let after = session.driver.descendants();
        let new: BTreeSet<_> = after.difference(&before).collect();
        // One or two may be a worker that is kept for the next call.
        if new.len() < FEW {
            return Ok(());
        }
        if begun.elapsed() > SETTLE {
            return broken(format!(
                "{} processes are left after {CYCLES} volumes came and went: {new:?}",
                new.len()
            ));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn log(session: &Session) -> Outcome {
    let Some(path) = session.driver.log() else { return not_run("the driver's log is not known") };
    let text = fs::read(path).or_not_run("reading the driver's log")?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().find(|line| line.contains(session.canary()));
    ensure(line.is_none(), || format!("the log holds a secret: {}", line.unwrap_or_default()))
}

async fn command_line(session: &Session) -> Outcome {
    let ended = Arc::new(AtomicBool::new(false));
    let work = async {
        let outcome = cycle(session).await;
        ended.store(true, Ordering::Relaxed);
        outcome
    };
    let watch = async {
        loop {
            let found = session.driver.command_lines_with(session.canary());
            if let Some(line) = found.into_iter().next() {
                return Some(line);
            }
            if ended.load(Ordering::Relaxed) {
                return None;
            }
            tokio::time::sleep(GLANCE).await;
        }
    };
    let (outcome, found) = tokio::join!(work, watch);
    outcome?;
    ensure(found.is_none(), || format!("a command line holds a secret: {}", found.unwrap_or_default()))
}
