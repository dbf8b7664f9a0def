//! A server is frozen, killed, comes back with other handles, is read-only, full or slow, while volumes are made,
//! published, read and deleted: no call outlives its deadline, nobody else waits, and everything comes right.

use std::{fs, io::ErrorKind};

use anyhow::{Result, ensure};
use berth_e2e::{machine, slow::SlowLine};
use tonic::Code;

use crate::{
    calls::{Call, Kind, Outcome},
    scene::{DEADLINE, PATIENT, STORM, Scene},
    world::Server,
};

/// The code of a call, OK for one that succeeded.
fn code(outcome: &Outcome) -> Code {
    outcome.result.as_ref().err().map_or(Code::Ok, tonic::Status::code)
}

fn messages(outcome: &Outcome) -> &[String] {
    outcome.result.as_deref().unwrap_or_default()
}

/// What a server that is away does to each call.
fn check_absence(outcomes: &[Outcome]) -> Result<()> {
    for outcome in outcomes {
        let code = code(outcome);
        let right = match outcome.call {
            // A pod can always end.
            (Kind::Unpublish, _) => code == Code::Ok,
            (Kind::Health, _) => messages(outcome).iter().any(|reason| reason == "ServerUnreachable"),
            (Kind::Stats, _) | (_, PATIENT) => code == Code::Unavailable,
            _ => matches!(code, Code::DeadlineExceeded | Code::Unavailable),
        };
        ensure!(right, "{outcome:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_frozen_holds_nobody_up() -> Result<()> {
    for version in ["4.1", "3"] {
        let mut scene = Scene::set(Server::start(version)?, None).await?;
        scene.bad.control("stop")?;
        let reader = scene.read()?;
        check_absence(&Box::pin(scene.storm(&STORM)).await)?;
        let stats = scene.caller.make(&scene.share, (Kind::Stats, "used"), DEADLINE).await;
        // Who knows that a server is silent says so, and does not ask again.
        let is_known = stats.result.as_ref().is_err_and(|status| status.message().contains("a moment ago"));
        ensure!(code(&stats) == Code::Unavailable && is_known, "{stats:?}");
        scene.bad.control("cont")?;
        scene.converges(reader).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_is_used_again_when_it_is_back() -> Result<()> {
    for version in ["3", "4.1"] {
        let mut scene = Scene::set(Server::start(version)?, None).await?;
        scene.bad.control("kill")?;
        let reader = scene.read()?;
        check_absence(&Box::pin(scene.storm(&STORM)).await)?;
        scene.bad.control("start")?;
        scene.converges(reader).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_with_other_handles_is_found_again() -> Result<()> {
    for version in ["4.1", "3"] {
        let mut scene = Scene::set(Server::start(version)?, None).await?;
        scene.bad.control("kill")?;
        // Restored from a backup, say: the same names, other files.
        let (export, copy) = (scene.bad.export(), scene.bad.dir().join("copy"));
        machine::run("cp", &["-a", &export.display().to_string(), &copy.display().to_string()])?;
        fs::remove_dir_all(&export)?;
        fs::rename(&copy, &export)?;
        scene.bad.control("start")?;
        scene.until_answered().await?;
        let stale = fs::read_to_string(scene.share.target("used").join("dir/file"));
        ensure!(
            stale.as_ref().is_err_and(|error| error.kind() == ErrorKind::StaleNetworkFileHandle),
            "{stale:?}"
        );
        // Who hears that the files are gone has heard the server.
        let [stats, health] = [Kind::Stats, Kind::Health].map(|kind| (kind, "used"));
        let stats = scene.caller.make(&scene.share, stats, DEADLINE).await;
        let health = scene.caller.make(&scene.share, health, DEADLINE).await;
        ensure!(
            code(&stats) == Code::Unavailable && messages(&health) == ["StaleHandle"],
            "{stats:?} {health:?}"
        );
        for outcome in Box::pin(scene.storm(&STORM)).await {
            let right = match outcome.call.0 {
                Kind::Health => messages(&outcome).iter().any(|reason| reason == "StaleHandle"),
                Kind::Stats => matches!(code(&outcome), Code::Ok | Code::Unavailable),
                _ => code(&outcome) == Code::Ok,
            };
            ensure!(right, "{outcome:?}");
        }
        // The pod that had the old files gets the new ones at the same place when it is published again.
        scene.caller.until_done(&scene.share, (Kind::Publish, "used")).await;
        let reader = scene.read()?;
        scene.converges(reader).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_read_only_says_so_and_can_still_be_read() -> Result<()> {
    for version in ["3", "4.1"] {
        let mut scene = Scene::set(Server::start(version)?, None).await?;
        for command in ["kill", "set access=RO", "start"] {
            scene.bad.control(command)?;
        }
        scene.until_answered().await?;
        let reader = scene.read()?;
        for outcome in Box::pin(scene.storm(&STORM)).await {
            let right = match outcome.call.0 {
                Kind::Publish | Kind::Unpublish | Kind::Stats => code(&outcome) == Code::Ok,
                Kind::Health => messages(&outcome) == ["ReadOnly"],
                _ => code(&outcome) == Code::FailedPrecondition,
            };
            ensure!(right, "{outcome:?}");
        }
        let idle = scene.share.target("idle");
        ensure!(fs::read_to_string(idle.join("dir/file"))? == "idle", "it can be read");
        let refused = fs::write(idle.join("new"), "").map_err(|error| error.kind());
        ensure!(refused == Err(ErrorKind::ReadOnlyFilesystem), "{refused:?}");
        for command in ["kill", "set access=RW", "start"] {
            scene.bad.control(command)?;
        }
        scene.converges(reader).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_full_says_so_and_deleting_helps() -> Result<()> {
    let scene = Scene::set(Server::start_on_disk("4.1", 24)?, None).await?;
    let ballast = scene.bad.export().join("ballast");
    let filled = fill(&ballast);
    ensure!(filled == ErrorKind::StorageFull, "{filled:?}");
    let reader = scene.read()?;
    // What is deleted makes room, so that comes later.
    let calls: Vec<Call> = STORM.into_iter().filter(|(kind, _)| *kind != Kind::Delete).collect();
    for outcome in Box::pin(scene.storm(&calls)).await {
        let right = match outcome.call.0 {
            Kind::Create | Kind::Snapshot => code(&outcome) == Code::ResourceExhausted,
            // A few bytes may fit into what a file has already.
            Kind::Expand => matches!(code(&outcome), Code::Ok | Code::ResourceExhausted),
            Kind::Health => messages(&outcome) == ["ShareFull"],
            _ => code(&outcome) == Code::Ok,
        };
        ensure!(right, "{outcome:?}");
    }
    let refused = fs::write(scene.share.target("used").join("new"), vec![0; 64 << 10]);
    ensure!(refused.is_err_and(|error| error.kind() == ErrorKind::StorageFull), "who writes hears of it");
    let deleted = scene.caller.make(&scene.share, (Kind::Delete, "doomed"), DEADLINE).await;
    ensure!(code(&deleted) == Code::Ok, "{deleted:?}");
    fs::remove_file(&ballast)?;
    scene.converges(reader).await
}

/// Writes until there is no room, not even for a directory.
fn fill(path: &std::path::Path) -> ErrorKind {
    use std::io::Write as _;
    let mut file = match fs::File::create(path) {
        Ok(file) => file,
        Err(error) => return error.kind(),
    };
    for size in [1 << 20, 4 << 10, 1 << 10] {
        let block = vec![b'f'; size];
        while file.write_all(&block).and_then(|()| file.sync_data()).is_ok() {}
    }
    file.write_all(&vec![0; 1 << 10]).map_or_else(|error| error.kind(), |()| ErrorKind::Other)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_slow_is_waited_for_until_the_deadline() -> Result<()> {
    let server = Server::start("4.1")?;
    let line = SlowLine::to(server.port())?;
    let scene = Scene::set(server, Some(line.port)).await?;
    line.slow_down(1 << 10);
    let reader = scene.read()?;
    for outcome in Box::pin(scene.storm(&STORM)).await {
        let right = match outcome.call.0 {
            Kind::Unpublish => code(&outcome) == Code::Ok,
            _ => matches!(code(&outcome), Code::Ok | Code::DeadlineExceeded | Code::Unavailable),
        };
        ensure!(right, "{outcome:?}");
    }
    line.hurry();
    scene.converges(reader).await
}
