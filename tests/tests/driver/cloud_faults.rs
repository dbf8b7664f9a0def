//! Clouds that fail and drivers that are killed: whatever happens, the calls succeed in the end, and the account has exactly the
//! disks and snapshots that were asked for.
//!
//! `BERTH_CLOUD_KILLS` sets at how many of a walk's API calls the driver is killed (0 is at each of them); `BERTH_CRASH_SEED` repeats
//! the choice of a run.

use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::Mounted;
use berth_e2e::cloud::{ALIYUN, CloudBench, GIB, PROVIDERS, Provider, attach, detach, expand, mount, stage};
use berth_e2e::content::Random;
use berth_e2e::csi::{from_snapshot, from_volume};
use tonic::{Code, Status};

/// Actions of the twin are quick, so that a walk is.
const QUICK: [&str; 8] = [
    "--delay",
    "attach=20ms",
    "--delay",
    "detach=20ms",
    "--delay",
    "resize=20ms",
    "--delay",
    "snapshot=20ms",
];

/// Runs a test for each provider.
async fn for_each(test: impl AsyncFn(&'static Provider) -> Result<()>) -> Result<()> {
    for provider in PROVIDERS {
        test(provider).await.with_context(|| format!("the cloud is {}", provider.name))?;
    }
    Ok(())
}

/// The code that a call must fail with.
fn refused<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code) -> Result<String> {
    let status = outcome.err().context("the call succeeded")?;
    ensure!(status.code() == code, "{status}");
    Ok(status.message().to_owned())
}

fn number(name: &str) -> Result<Option<u64>> {
    let value = std::env::var(name).ok();
    value.map(|text| text.parse().with_context(|| format!("{name} is {text:?}, not a number"))).transpose()
}

/// All that an orchestrator does with volumes of one name, from nothing to nothing, each call repeated until it succeeds.
async fn walk(bench: &mut CloudBench, name: &str) -> Result<()> {
    let (provider, server) = (bench.provider, bench.provider.instance);
    let dir = bench.dir().to_owned();
    let made = bench.insist("create", async |csi| provider.create(&csi, name, 1, None).await).await?;
    ensure!(made.bytes == GIB, "{made:?}");
    let made = bench.insist("attach", async |csi| attach(&csi, &made, server).await).await?;
    let mounted = bench.insist("mount", async |csi| mount(&csi, &made, &dir).await).await?;
    fs::write(mounted.target.join("file"), name)?;
    let taken = format!("{name}-snapshot");
    let snapshot = bench.insist("snapshot", async |csi| csi.ready_snapshot(&taken, &made.id).await).await?;
    let source = || Some(from_snapshot(&snapshot.snapshot_id));
    let copy = format!("{name}-restored");
    let restored =
        bench.insist("restore", async |csi| provider.create(&csi, &copy, 2, source()).await).await?;
    ensure!(restored.bytes == 2 * GIB, "{restored:?}");
    let source = || Some(from_volume(&made.id));
    let copy = format!("{name}-cloned");
    let cloned = bench.insist("clone", async |csi| provider.create(&csi, &copy, 1, source()).await).await?;
    let grown = bench.insist("expand", async |csi| expand(&csi, &made.id, 2).await).await?;
    ensure!(grown == 2 * GIB, "{grown}");
    bench.owns(&[&made.id, &restored.id, &cloned.id], &[&snapshot.snapshot_id]).await?;
    ensure!(fs::read_to_string(mounted.target.join("file"))? == name);

    bench.insist("unmount", async |csi| csi.unmount(&mounted).await).await?;
    bench.insist("detach", async |csi| detach(&csi, &made.id, server).await).await?;
    ensure!(bench.account.servers_of(&made.id)?.is_empty(), "it is still attached");
    for id in [&made.id, &restored.id, &cloned.id] {
        bench.insist("delete", async |csi| csi.delete(id).await).await?;
    }
    let id = &snapshot.snapshot_id;
    bench.insist("delete the snapshot", async |csi| csi.delete_snapshot(id).await).await?;
    bench.owns(&[], &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_at_any_call_of_the_api_leaves_what_was_asked_for() -> Result<()> {
    let points = number("BERTH_CLOUD_KILLS")?.unwrap_or(6);
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    let seed = number("BERTH_CRASH_SEED")?.unwrap_or_else(|| now.into());
    eprintln!("BERTH_CRASH_SEED={seed}");
    for_each(async |provider| {
        let mut bench = CloudBench::start(provider, &QUICK, &[]).await?;
        let before = bench.account.calls()?["total"].as_u64().context("a number")?;
        walk(&mut bench, "whole").await?;
        let calls = bench.account.calls()?["total"].as_u64().context("a number")? - before;
        let mut chosen: Vec<(u64, &str)> =
            (0..calls).flat_map(|call| [(call, "hang-before"), (call, "hang-after")]).collect();
        let mut random = Random::new(seed);
        while points > 0 && chosen.len() as u64 > points {
            let out = random.below(chosen.len() as u64);
            chosen.remove(usize::try_from(out)?);
        }
        for (call, effect) in &chosen {
            bench.kills = 0;
            bench.account.fault(&format!("*={effect},after={call}"))?;
            let name = format!("k{call}-{effect}");
            walk(&mut bench, &name).await.with_context(|| format!("killed at call {call} ({effect})"))?;
            // A walk may have a call more or less than the first had, by how long its actions took.
            ensure!(bench.kills == 1 || calls - call < 8, "call {call} of {calls} was not reached");
            bench.account.clear_faults()?;
        }
        eprintln!("{}: {calls} calls, killed at {} of them", provider.name, chosen.len());
        bench.finish().await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_is_down_for_a_while_delays_and_breaks_nothing() -> Result<()> {
    for_each(async |provider| {
        let mut bench = CloudBench::start(provider, &QUICK, provider.located).await?;
        let (server, csi) = (provider.instance, bench.csi()?);
        let made = provider.create(&csi, "first", 1, None).await?;
        let made = attach(&csi, &made, server).await?;
        let mounted = mount(&csi, &made, bench.dir()).await?;
        bench.kill_twin()?;
        // What needs no API goes on.
        fs::write(mounted.target.join("file"), "kept")?;
        ensure!(!csi.stats(&mounted).await?.is_empty());
        refused(provider.create(&csi, "second", 1, None).await, Code::Unavailable)?;
        refused(detach(&csi, &made.id, server).await, Code::Unavailable)?;
        // A driver starts all the same, and serves its node.
        bench.kill_driver()?;
        bench.start_driver().await?;
        ensure!(!bench.csi()?.stats(&mounted).await?.is_empty());
        bench.start_twin().await?;
        let second =
            bench.insist("create", async |csi| provider.create(&csi, "second", 1, None).await).await?;
        bench.owns(&[&made.id, &second.id], &[]).await?;
        ensure!(fs::read_to_string(mounted.target.join("file"))? == "kept");
        bench.insist("unmount", async |csi| csi.unmount(&mounted).await).await?;
        bench.insist("detach", async |csi| detach(&csi, &made.id, server).await).await?;
        for id in [&made.id, &second.id] {
            bench.insist("delete", async |csi| csi.delete(id).await).await?;
        }
        bench.finish().await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_api_and_one_that_refuses_for_being_asked_too_often_are_waited_for() -> Result<()> {
    for_each(async |provider| {
        let mut bench = CloudBench::start(provider, &QUICK, &[]).await?;
        for (name, fault) in [
            ("slow", "*=slow:200ms,times=always"),
            ("throttled", "*=throttle,times=4"),
            ("bad", "*=before:503,times=2"),
        ] {
            bench.account.fault(fault)?;
            // No call fails: the first attempt is enough.
            let made =
                provider.create(&bench.csi()?, name, 1, None).await.with_context(|| fault.to_owned())?;
            let made =
                attach(&bench.csi()?, &made, provider.instance).await.with_context(|| fault.to_owned())?;
            detach(&bench.csi()?, &made.id, provider.instance).await.with_context(|| fault.to_owned())?;
            bench.csi()?.delete(&made.id).await.with_context(|| fault.to_owned())?;
            bench.account.clear_faults()?;
        }
        // Whoever waits less than the API takes is told so, and gets one disk by asking again.
        bench.account.fault(&format!("{}=slow:3s", provider.calls.create))?;
        let mut request = tonic::Request::new(provider.new_volume("impatient", 1));
        request.set_timeout(Duration::from_secs(1));
        let early = bench.csi()?.controller.create_volume(request).await;
        ensure!(early.is_err(), "{early:?}");
        let made =
            bench.insist("create", async |csi| provider.create(&csi, "impatient", 1, None).await).await?;
        bench.owns(&[&made.id], &[]).await?;
        bench.insist("delete", async |csi| csi.delete(&made.id).await).await?;
        bench.finish().await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_fails_after_the_work_leads_to_no_second_disk_or_snapshot() -> Result<()> {
    for_each(async |provider| {
        let bench = CloudBench::start(provider, &QUICK, &[]).await?;
        let (server, calls) = (provider.instance, &provider.calls);
        let csi = bench.csi()?;
        for effect in ["after:500", "after:502", "drop-after"] {
            for call in [calls.create, calls.attach, calls.snapshot, calls.resize, calls.detach, calls.delete]
            {
                bench.account.fault(&format!("{call}={effect}"))?;
            }
            let name = format!("lost-{}", effect.replace(':', "-"));
            let made = twice(async || provider.create(&csi, &name, 1, None).await).await?;
            bench.owns(&[&made.id], &[]).await?;
            twice(async || attach(&csi, &made, server).await).await?;
            ensure!(bench.account.servers_of(&made.id)? == [server]);
            let snapshot = twice(async || csi.snapshot(&name, &made.id).await).await?.snapshot_id;
            bench.owns(&[&made.id], &[&snapshot]).await?;
            ensure!(twice(async || expand(&csi, &made.id, 2).await).await? == 2 * GIB);
            twice(async || detach(&csi, &made.id, server).await).await?;
            twice(async || csi.delete(&made.id).await).await?;
            twice(async || csi.delete_snapshot(&snapshot).await).await?;
            ensure!(bench.account.faults_are_over()?, "a fault has not happened");
            bench.account.clear_faults()?;
        }
        bench.finish().await
    })
    .await
}

/// Repeats a call once if it fails for a while.
async fn twice<T>(call: impl AsyncFn() -> Result<T, Status>) -> Result<T> {
    match call().await {
        Err(status) if matches!(status.code(), Code::Unavailable | Code::Aborted) => Ok(call().await?),
        outcome => Ok(outcome?),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_that_errors_fails_the_call_at_once_and_can_be_repeated() -> Result<()> {
    for_each(async |provider| {
        let bench = CloudBench::start(provider, &QUICK, &[]).await?;
        let (server, calls) = (provider.instance, &provider.calls);
        let made = provider.create(&bench.csi()?, "data", 1, None).await?;
        let begun = Instant::now();
        bench.account.fault(&format!("{}=errored", calls.attach))?;
        let said = refused(attach(&bench.csi()?, &made, server).await, Code::Internal)?;
        ensure!(said.contains("attach"), "{said}");
        ensure!(bench.account.servers_of(&made.id)?.is_empty());
        let made = attach(&bench.csi()?, &made, server).await?;
        bench.account.fault(&format!("{}=errored", calls.resize))?;
        // ECS answers a request to grow when the disk has grown, so there the request itself fails.
        let status = expand(&bench.csi()?, &made.id, 2).await.err().context("the call succeeded")?;
        ensure!(matches!(status.code(), Code::Internal | Code::Unavailable), "{status}");
        ensure!(expand(&bench.csi()?, &made.id, 2).await? == 2 * GIB);
        bench.account.fault(&format!("{}=errored", calls.detach))?;
        refused(detach(&bench.csi()?, &made.id, server).await, Code::Internal)?;
        ensure!(bench.account.servers_of(&made.id)? == [server]);
        detach(&bench.csi()?, &made.id, server).await?;
        ensure!(begun.elapsed() < Duration::from_secs(20), "an action that errored was waited for");
        bench.csi()?.delete(&made.id).await?;
        bench.finish().await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_is_late_or_has_another_name_is_found_and_one_that_never_comes_is_said() -> Result<()> {
    for_each(async |provider| {
        let mut bench = CloudBench::start(provider, &QUICK, &[]).await?;
        let (server, call) = (provider.instance, provider.calls.attach);
        for (name, effect) in [("late", "late-device:1s"), ("other", "other-name")] {
            bench.account.fault(&format!("{call}={effect}"))?;
            let made = provider.create(&bench.csi()?, name, 1, None).await?;
            let made = attach(&bench.csi()?, &made, server).await?;
            let mounted =
                mount(&bench.csi()?, &made, bench.dir()).await.with_context(|| effect.to_owned())?;
            bench.csi()?.unmount(&mounted).await?;
            detach(&bench.csi()?, &made.id, server).await?;
            bench.csi()?.delete(&made.id).await?;
        }
        bench.account.fault(&format!("{call}=no-device"))?;
        let made = provider.create(&bench.csi()?, "never", 1, None).await?;
        let made = attach(&bench.csi()?, &made, server).await?;
        let mounted = Mounted::paths(&made.id, bench.dir())?;
        let status = stage(&bench.csi()?, &made, &mounted, Duration::from_secs(2)).await.err();
        let status = status.context("a disk without a device was staged")?;
        ensure!(
            matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled),
            "{status}"
        );
        // The call is over when its driver has noticed it, too.
        bench.account.clear_faults()?;
        bench.insist("unmount", async |csi| csi.unmount(&mounted).await).await?;
        detach(&bench.csi()?, &made.id, server).await?;
        // Attached again, it comes.
        let made = attach(&bench.csi()?, &made, server).await?;
        let mounted = mount(&bench.csi()?, &made, bench.dir()).await?;
        bench.csi()?.unmount(&mounted).await?;
        detach(&bench.csi()?, &made.id, server).await?;
        bench.csi()?.delete(&made.id).await?;
        bench.finish().await
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_snapshots_is_taken_once_whatever_answer_is_lost_and_goes_with_its_members() -> Result<()>
{
    // DigitalOcean has no such call.
    let provider = &ALIYUN;
    let bench = CloudBench::start(provider, &QUICK, &[]).await?;
    let csi = bench.csi()?;
    let one = provider.create(&csi, "one", 1, None).await?;
    let two = provider.create(&csi, "two", 1, None).await?;
    let sources = [one.id.as_str(), two.id.as_str()];
    for (name, effect) in [("plain", None), ("failed", Some("after:500")), ("dropped", Some("drop-after"))] {
        if let Some(effect) = effect {
            for call in ["CreateSnapshotGroup", "TagResources", "DeleteSnapshotGroup"] {
                bench.account.fault(&format!("{call}={effect}"))?;
            }
        }
        let taken = twice(async || csi.group_snapshot(name, &sources).await).await?;
        let id = &taken.group_snapshot_id;
        let members: Vec<&str> = taken.snapshots.iter().map(|one| one.snapshot_id.as_str()).collect();
        bench.owns(&sources, &members).await?;
        ensure!(taken.snapshots.iter().all(|one| one.group_snapshot_id == *id), "{taken:?}");
        let mut of: Vec<&str> = taken.snapshots.iter().map(|one| one.source_volume_id.as_str()).collect();
        of.sort_unstable();
        ensure!(of.len() == 2 && sources.iter().all(|source| of.contains(source)), "{of:?}");
        let again = csi.ready_group_snapshot(name, &sources).await?;
        ensure!(again.group_snapshot_id == *id && again.snapshots.len() == 2, "{again:?}");
        refused(csi.group_snapshot(name, &sources[..1]).await, Code::AlreadyExists)?;
        let said = refused(csi.delete_snapshot(members[0]).await, Code::InvalidArgument)?;
        ensure!(said.contains(id), "{said}");
        // A member is a snapshot like any other.
        let copy = format!("{name}-restored");
        let source = Some(from_snapshot(members[0]));
        let restored = provider.create(&csi, &copy, 1, source).await?;
        csi.delete(&restored.id).await?;
        let members: Vec<String> = members.iter().map(ToString::to_string).collect();
        twice(async || csi.delete_group_snapshot(id, &members).await).await?;
        bench.owns(&sources, &[]).await?;
        bench.account.clear_faults()?;
    }
    // One that errors, which may be after the first answer, is removed and taken anew.
    bench.account.fault("CreateSnapshotGroup=errored")?;
    let taken = twice(async || csi.ready_group_snapshot("errored", &sources).await).await?;
    let members: Vec<String> = taken.snapshots.iter().map(|one| one.snapshot_id.clone()).collect();
    bench.owns(&sources, &members.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    csi.delete_group_snapshot(&taken.group_snapshot_id, &members).await?;
    for id in sources {
        csi.delete(id).await?;
    }
    bench.finish().await
}
