//! The checks against a reference driver with one switch per rule: each switch makes exactly its check fail.
//!
//! The reference driver is Berth's local driver with plain directories, behind a layer that breaks one rule ([`switches`]). It runs as a
//! process of its own, because checks kill it: this test program again, which then serves instead of testing.
#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it should be")]

mod driver;
mod switches;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use berth_certify::Options;
use berth_certify::process::Launch;
use berth_certify::report::{Report, Status};
use berth_host::service::Start;

/// The size of volumes: small, so that many fit.
const SIZE: i64 = 64 << 20;
/// How many runs go on at once.
const AT_ONCE: usize = 8;

/// The reference driver, when this program is started as one; nothing otherwise.
#[test]
fn serve_as_the_reference_driver() {
    if let Ok(switch) = std::env::var(driver::SWITCH) {
        driver::serve(&switch);
    }
}

/// The groups of checks that a switch could disturb; all with the environment variable `BERTH_CERTIFY_ALL`, which takes long.
fn groups(switch: &str) -> Vec<String> {
    if switch.is_empty() || std::env::var_os("BERTH_CERTIFY_ALL").is_some() {
        return Vec::new();
    }
    let group = match switch.split('.').collect::<Vec<_>>()[..] {
        ["errors", of, ..] => format!("errors.{of}"),
        ["stats", ..] => "stats".to_owned(),
        [group, ..] => group.to_owned(),
        [] => String::new(),
    };
    let provoking =
        ["identity.node-info", "lifecycle", "errors.delete", "list.new", "health.storage", "call"]
            .map(str::to_owned);
    provoking.into_iter().chain([group]).collect()
}

/// Tests the reference driver with a switch on.
async fn certified(switch: &str, image: bool) -> Report {
    let directory = tempfile::tempdir().unwrap();
    let pairs = [
        (driver::SWITCH, switch),
        (driver::DATA, "{dir}/data"),
        (driver::IMAGE, if image { "1" } else { "" }),
    ];
    let start = Start {
        program: std::env::current_exe().unwrap().into(),
        args: ["--exact", "serve_as_the_reference_driver", "--nocapture"].map(Into::into).to_vec(),
        environment: pairs.map(|(name, value)| (name.into(), value.into())).to_vec(),
    };
    let mut options = Options::new(Launch::Program(start), directory.path().to_owned());
    let (key, value) = if image { ("readAheadKb", "512") } else { ("noatime", "true") };
    options.mutable_parameters = [(key.to_owned(), value.to_owned())].into();
    options.size = SIZE;
    options.only = groups(switch);
    if switch == "call.answers" {
        options.timeout = Duration::from_secs(4);
    }
    let report = berth_certify::run(options, |_| {}).await.unwrap();
    unmount_below(directory.path());
    report
}

/// Takes away what a switch left mounted.
fn unmount_below(directory: &Path) {
    let mounts = berth_host::mount::mounts().unwrap();
    for mount in mounts.into_iter().rev().filter(|mount| mount.target.starts_with(directory)) {
        let _ = rustix::mount::unmount(&mount.target, rustix::mount::UnmountFlags::DETACH);
    }
}

fn failures(report: &Report) -> Vec<String> {
    let failed = report.results.iter().filter(|result| result.status == Status::Failed);
    failed.map(|result| format!("{}: {}", result.rule.id, result.detail)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reference_driver_without_a_switch_passes_everything() {
    for image in [false, true] {
        let report = certified("", image).await;
        assert_eq!(failures(&report), Vec::<String>::new());
        let not_run = report.ids(Status::NotRun);
        let expected: &[&str] = if image {
            &["metadata.allocated", "metadata.delta", "metadata.offset"]
        } else {
            // A directory has the size of its disk, and is on no loop device.
            &[
                "data.restore-larger",
                "data.grow",
                "metadata.allocated",
                "metadata.delta",
                "metadata.offset",
                "leak.loop-devices",
            ]
        };
        assert_eq!(not_run, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_switch_makes_exactly_its_check_fail() {
    let only = std::env::var("BERTH_SWITCH").ok();
    let ids: Vec<&'static str> = switches::all()
        .iter()
        .map(|switch| switch.check)
        .filter(|id| only.as_ref().is_none_or(|only| id.starts_with(only.as_str())))
        .collect();
    assert!(only.is_some() || ids.len() >= 60, "only {} switches", ids.len());
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "two switches have the same name");
    let mut wrong = Vec::new();
    for chunk in ids.chunks(AT_ONCE) {
        let mut runs = tokio::task::JoinSet::new();
        for &id in chunk {
            runs.spawn(async move { (id, certified(id, false).await) });
        }
        while let Some(run) = runs.join_next().await {
            let (id, report) = run.unwrap();
            let failed = failures(&report);
            let missed = failed.len() != 1 || !failed[0].starts_with(&format!("{id}:"));
            if missed {
                eprintln!("{id} failed {failed:#?}");
                wrong.push(format!("{id} failed {failed:#?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} of {} switches:\n{}", wrong.len(), ids.len(), wrong.join("\n"));
}
