//! The drivers of clouds against twins of their providers, with real block devices: csi-sanity, every spec that the cloud can do.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use berth_e2e::cloud::{ALIYUN, CloudBench, DIGITALOCEAN, Provider};
use berth_e2e::sanity::{self, Outcome, SPECS};

/// The suite does hundreds of things, one after the other.
const QUICK: [&str; 10] = [
    "--delay",
    "attach=10ms",
    "--delay",
    "detach=10ms",
    "--delay",
    "resize=10ms",
    "--delay",
    "snapshot=10ms",
    "--delay",
    "modify=10ms",
];

/// What csi-sanity is told of a provider, and what its skips may be.
struct Suite {
    provider: &'static Provider,
    /// The parameters of volumes that are changed.
    mutable: Option<&'static str>,
    /// Words in the names of specs about what the provider has no call for.
    cannot: &'static [&'static str],
}

/// It has no attachments for reading only, no parameters that change, no snapshots of groups, and does not say how volumes are.
const OF_DIGITALOCEAN: Suite = Suite {
    provider: &DIGITALOCEAN,
    mutable: None,
    cannot: &[
        "readonly",
        "already published but is incompatible",
        "ModifyVolume",
        "volume attribute class",
        "VolumeGroupSnapshot",
        "GroupController",
        "Health",
    ],
};

/// It has no attachments for reading only, and does not say how volumes are.
const OF_ALIYUN: Suite = Suite {
    provider: &ALIYUN,
    mutable: Some("burstingEnabled: \"true\"\ndiskTags/team: blue\n"),
    cannot: &["readonly", "already published but is incompatible", "Health"],
};

fn run(suite: &Suite, bench: &CloudBench, access: &str) -> Result<Outcome> {
    let dir = bench.dir();
    let file = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let parameters = dir.join("parameters.yaml");
    let lines: Vec<String> =
        suite.provider.parameters.iter().map(|(key, value)| format!("{key}: {value}\n")).collect();
    fs::write(&parameters, lines.concat())?;
    let mut args = vec![
        format!("--csi.endpoint={}", bench.endpoint()),
        file("csi.mountdir", &dir.join("mount")),
        file("csi.stagingdir", &dir.join("staging")),
        format!("--csi.testvolumeaccesstype={access}"),
        "--csi.testnodevolumeattachlimit".to_owned(),
        "--csi.testvolumesize=1073741824".to_owned(),
        "--csi.testvolumeexpandsize=2147483648".to_owned(),
        file("csi.testvolumeparameters", &parameters),
    ];
    if let Some(mutable) = suite.mutable {
        let path = dir.join("mutable.yaml");
        fs::write(&path, mutable)?;
        args.push(file("csi.testvolumemutableparameters", &path));
    }
    sanity::run(dir, &args)
}

async fn conforms(suite: &Suite, access: &str) -> Result<()> {
    let bench = CloudBench::start(suite.provider, &QUICK, &[]).await?;
    let outcome = tokio::task::block_in_place(|| run(suite, &bench, access));
    let outcome = outcome.with_context(|| bench.log())?;
    writeln!(std::io::stderr(), "csi-sanity, {} with {access} access: {outcome}", suite.provider.name)?;
    let failures = outcome.failures.join("\n");
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{failures}\n{}", bench.log());
    let can = |skipped: &&String| !suite.cannot.iter().any(|word| skipped.contains(word));
    let unexpected: Vec<_> = outcome.skipped.iter().filter(can).collect();
    ensure!(unexpected.is_empty(), "skipped: {unexpected:#?}");
    ensure!(outcome.count("passed") + outcome.skipped.len() == SPECS, "{outcome}");
    tokio::time::timeout(Duration::from_secs(60), bench.purge()).await?
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_volumes_of_digitalocean_conform() -> Result<()> {
    conforms(&OF_DIGITALOCEAN, "mount").await
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_volumes_of_digitalocean_conform() -> Result<()> {
    conforms(&OF_DIGITALOCEAN, "block").await
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_volumes_of_aliyun_conform() -> Result<()> {
    conforms(&OF_ALIYUN, "mount").await
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_volumes_of_aliyun_conform() -> Result<()> {
    conforms(&OF_ALIYUN, "block").await
}

/// The groups of checks that take seconds; all with the environment variable `BERTH_CERTIFY_ALL`, which take minutes.
const QUICK_CHECKS: [&str; 9] =
    ["identity", "lifecycle", "errors", "limits", "repeat", "list", "group", "modify", "topology"];

/// Certify of the driver on its twin: it keeps every rule, and leaves nothing in the account.
async fn is_certified(suite: &Suite) -> Result<()> {
    // Certify names a node of its own in the environment.
    let node = ["--node-id", suite.provider.instance];
    let bench = CloudBench::start(suite.provider, &QUICK, &node).await?;
    let pairs = |flag: &str, pairs: &[(&str, &str)]| -> Vec<String> {
        pairs.iter().flat_map(|(key, value)| [flag.to_owned(), format!("{key}={value}")]).collect()
    };
    // Only xfs grows while it is mounted where CAP_SYS_RESOURCE is missing, as in many containers.
    let mut words: Vec<String> =
        ["certify", "--quiet", "--size", "1Gi", "--fs-type", "xfs"].map(str::to_owned).into();
    words.extend(pairs("--parameter", suite.provider.parameters));
    if suite.mutable.is_some() {
        words.extend(pairs("--mutable-parameter", &[("diskTags/team", "blue")]));
    }
    if std::env::var_os("BERTH_CERTIFY_ALL").is_none() {
        words.extend(QUICK_CHECKS.iter().flat_map(|group| ["--only".to_owned(), (*group).to_owned()]));
    }
    words.push("--".to_owned());
    let binary = berth_e2e::driver::binary()?;
    words.push(binary.display().to_string());
    words.extend(bench.driver_words("{dir}/state", "{endpoint}"));
    let mut certify = berth_e2e::machine::command(&binary);
    certify.args(&words).envs(suite.provider.credentials.iter().copied());
    let said = tokio::task::block_in_place(|| certify.output())?;
    let report = String::from_utf8_lossy(&said.stdout);
    writeln!(
        std::io::stderr(),
        "certify, {}: {}",
        suite.provider.name,
        report.lines().last().unwrap_or_default()
    )?;
    ensure!(said.status.success(), "{report}\n{}", String::from_utf8_lossy(&said.stderr));
    ensure!(report.lines().last().is_some_and(|line| line.contains(" 0 failed ")), "{report}");
    bench.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_of_digitalocean_keeps_every_rule() -> Result<()> {
    is_certified(&OF_DIGITALOCEAN).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_of_aliyun_keeps_every_rule() -> Result<()> {
    is_certified(&OF_ALIYUN).await
}
