//! csi-sanity, the CSI community's conformance suite, against the real binary: every spec, none skipped.

use std::{collections::BTreeSet, fs, io::Write as _, path::Path};

use anyhow::{Result, ensure};
use berth_e2e::{
    DiskType, Testbed, driver,
    program::Program,
    sanity::{self, Outcome, SPECS},
};

struct Suite<'a> {
    parameters: &'a str,
    mutable: &'a str,
    access: &'a str,
    verbosity: &'a str,
}

async fn run(disk: DiskType, suite: Suite<'_>) -> Result<()> {
    let bed = Testbed::start(disk, &["--attach", "--max-volumes-per-node", "4", suite.verbosity]).await?;
    let outcome = sanity(&bed, &suite)?;
    // Not by `println`: the numbers are of interest when everything is well, too.
    let (what, on) = (suite.parameters, disk.as_str());
    writeln!(std::io::stderr(), "csi-sanity, {what} with {} access on {on}: {outcome}", suite.access)?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}", outcome.failures.join("\n"));
    ensure!(outcome.count("skipped") == 0, "skipped: {:?}", outcome.skipped);
    ensure!(outcome.count("passed") == SPECS, "{outcome}");
    ensure!(outcome.count("pending") == 1, "{outcome}");
    bed.finish().await
}

fn sanity(bed: &Testbed, suite: &Suite<'_>) -> Result<Outcome> {
    let parameters = bed.dir().join("parameters.yaml");
    let mutable = bed.dir().join("mutable.yaml");
    fs::write(&parameters, suite.parameters)?;
    fs::write(&mutable, suite.mutable)?;
    let file = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let args = [
        format!("--csi.endpoint=unix://{}", bed.dir().join("csi.sock").display()),
        file("csi.mountdir", &bed.dir().join("mount")),
        file("csi.stagingdir", &bed.dir().join("staging")),
        file("csi.testvolumeparameters", &parameters),
        file("csi.testvolumemutableparameters", &mutable),
        format!("--csi.testvolumeaccesstype={}", suite.access),
        "--csi.testnodevolumeattachlimit".to_owned(),
        "--csi.testvolumesize=1073741824".to_owned(),
        "--csi.testvolumeexpandsize=1610612736".to_owned(),
    ];
    sanity::run(bed.dir(), &args)
}

#[tokio::test(flavor = "multi_thread")]
async fn btrfs_subvolumes_conform() -> Result<()> {
    run(
        DiskType::Btrfs,
        Suite { parameters: "kind: btrfs", mutable: "compression: zstd", access: "mount", verbosity: "-v=2" },
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_images_conform() -> Result<()> {
    run(
        DiskType::Xfs,
        Suite {
            parameters: "kind: image",
            mutable: "readAheadKb: \"512\"",
            access: "mount",
            verbosity: "-v=2",
        },
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_images_conform() -> Result<()> {
    run(
        DiskType::Xfs,
        Suite {
            parameters: "kind: image",
            mutable: "readAheadKb: \"512\"",
            access: "block",
            verbosity: "-v=2",
        },
    )
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_conform_while_calls_are_logged_in_full() -> Result<()> {
    run(
        DiskType::Ext4,
        Suite { parameters: "kind: dir", mutable: "noatime: \"true\"", access: "mount", verbosity: "-v=5" },
    )
    .await
}

/// The example driver of `examples/mycsi` conforms in all that it announces.
#[tokio::test(flavor = "multi_thread")]
async fn the_example_driver_conforms() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let endpoint = format!("unix://{}", path("csi.sock"));
    let settings = [
        ("MYCSI_ROOT", path("root")),
        ("STATE_DIR", path("state")),
        ("CSI_ENDPOINT", endpoint.clone()),
        ("NODE_ID", "node-1".to_owned()),
    ];
    let settings: Vec<(&str, &str)> = settings.iter().map(|(name, value)| (*name, &**value)).collect();
    let mycsi = Program::start(&driver::built("mycsi")?, &[], &settings, dir.path().join("mycsi.log"))?;
    fs::write(dir.path().join("parameters.yaml"), "share: /home/nfsdata")?;
    let args = [
        format!("--csi.endpoint={endpoint}"),
        format!("--csi.mountdir={}", path("mount")),
        format!("--csi.stagingdir={}", path("staging")),
        format!("--csi.testvolumeparameters={}", path("parameters.yaml")),
        "--csi.testvolumesize=1073741824".to_owned(),
    ];
    let outcome = sanity::run(dir.path(), &args)?;
    writeln!(std::io::stderr(), "csi-sanity, examples/mycsi: {outcome}")?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}", outcome.failures.join("\n"));
    ensure!(outcome.count("passed") >= 32, "{outcome}");
    mycsi.stop().await
}

/// The blocks of csi-sanity that are whole services, which the table does not name.
const SERVICES: [&str; 3] = ["Controller Service", "GroupController Service", "Identity Service"];

#[test]
fn the_table_of_certify_has_every_spec_of_csi_sanity_and_no_check_that_is_none() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let args = ["--ginkgo.dry-run".to_owned(), "--csi.endpoint=unix:///nowhere.sock".to_owned()];
    let listed = sanity::run(dir.path(), &args)?;
    ensure!(listed.count("passed") == SPECS && listed.count("pending") == 1, "{listed}");
    let plain = |block: &str| block.split(" [").next().unwrap_or(block).to_owned();
    let name = |spec: &Vec<String>| {
        let blocks = spec.iter().map(|block| plain(block));
        blocks.filter(|block| !SERVICES.contains(&block.as_str())).collect::<Vec<_>>().join(" › ")
    };
    let specs: BTreeSet<String> = listed.specs.iter().map(name).collect();
    ensure!(specs.len() == listed.specs.len(), "two specs have one name");

    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/certify-sanity.md"))?;
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "));
    let rows: Vec<(&str, &str)> = rows.filter(|(_, checks)| checks.starts_with('`')).collect();
    let named: BTreeSet<String> = rows.iter().map(|(spec, _)| (*spec).to_owned()).collect();
    let differ: Vec<_> = specs.symmetric_difference(&named).collect();
    ensure!(differ.is_empty() && rows.len() == named.len(), "not in both: {differ:#?}");

    let listed = berth_e2e::machine::command(driver::binary()?).args(["certify", "--list"]).output()?;
    let listed = String::from_utf8(listed.stdout)?;
    let known: BTreeSet<&str> = listed.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    let checks = rows.iter().flat_map(|(_, checks)| checks.split(", "));
    let unknown: Vec<_> = checks.filter(|check| !known.contains(check.trim_matches('`'))).collect();
    ensure!(unknown.is_empty(), "certify has no check {unknown:?}");
    Ok(())
}
