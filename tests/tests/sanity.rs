//! csi-sanity, the CSI community's conformance suite, against the real binary: every spec, none skipped.

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use berth_e2e::{DiskType, Testbed, machine};
use serde_json::Value;

/// How many specs csi-sanity v5.6.0 has that are not marked pending upstream.
const SPECS: usize = 102;

struct Suite<'a> {
    parameters: &'a str,
    mutable: &'a str,
    access: &'a str,
}

async fn run(disk: DiskType, suite: Suite<'_>) -> Result<()> {
    let bed = Testbed::start(disk, &["--attach", "--max-volumes-per-node", "4"]).await?;
    let report = bed.dir().join("report.json");
    let output = sanity(&bed, &suite, &report)?;
    let text =
        fs::read_to_string(&report).with_context(|| format!("csi-sanity wrote no report:\n{output}"))?;
    let outcome = Outcome::parse(&text)?;
    // Not by `println`: the numbers are of interest when everything is well, too.
    let (what, on) = (suite.parameters, disk.as_str());
    writeln!(std::io::stderr(), "csi-sanity, {what} with {} access on {on}: {outcome}", suite.access)?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}", outcome.failures.join("\n"));
    ensure!(outcome.count("skipped") == 0, "skipped: {:?}", outcome.skipped);
    ensure!(outcome.count("passed") == SPECS, "{outcome}");
    ensure!(outcome.count("pending") == 1, "{outcome}");
    bed.finish().await
}

fn sanity(bed: &Testbed, suite: &Suite<'_>, report: &Path) -> Result<String> {
    let parameters = bed.dir().join("parameters.yaml");
    let mutable = bed.dir().join("mutable.yaml");
    fs::write(&parameters, suite.parameters)?;
    fs::write(&mutable, suite.mutable)?;
    let file = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let output = machine::command(sanity_binary()?)
        .arg(format!("--csi.endpoint=unix://{}", bed.dir().join("csi.sock").display()))
        .arg(file("csi.mountdir", &bed.dir().join("mount")))
        .arg(file("csi.stagingdir", &bed.dir().join("staging")))
        .arg(file("csi.testvolumeparameters", &parameters))
        .arg(file("csi.testvolumemutableparameters", &mutable))
        .arg(file("ginkgo.json-report", report))
        .arg(format!("--csi.testvolumeaccesstype={}", suite.access))
        .args(["--csi.testnodevolumeattachlimit", "--csi.testvolumesize=1073741824"])
        .args(["--csi.testvolumeexpandsize=1610612736", "--ginkgo.no-color", "--ginkgo.timeout=10m"])
        .current_dir(bed.dir())
        .output()
        .context("start csi-sanity")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr))
}

fn sanity_binary() -> Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin/csi-sanity");
    ensure!(path.is_file(), "there is no csi-sanity: build it first with `make deps`");
    Ok(path)
}

/// What the suite's JSON report says.
struct Outcome {
    states: BTreeMap<String, usize>,
    failures: Vec<String>,
    skipped: Vec<String>,
}

impl Outcome {
    fn parse(report: &str) -> Result<Self> {
        let suites: Value = serde_json::from_str(report).context("parse csi-sanity's report")?;
        let mut outcome = Self { states: BTreeMap::new(), failures: Vec::new(), skipped: Vec::new() };
        let specs =
            suites.as_array().into_iter().flatten().filter_map(|suite| suite["SpecReports"].as_array());
        for spec in specs.flatten().filter(|spec| spec["LeafNodeType"] == "It") {
            let state = spec["State"].as_str().context("a spec has a state")?;
            *outcome.states.entry(state.to_owned()).or_default() += 1;
            let path =
                spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let name: Vec<&str> = path.chain(spec["LeafNodeText"].as_str()).collect();
            match state {
                "passed" | "pending" => {}
                "skipped" => outcome.skipped.push(name.join(" ")),
                _ => outcome.failures.push(format!(
                    "{}: {} ({})",
                    name.join(" "),
                    first_lines(spec["Failure"]["Message"].as_str().unwrap_or(state)),
                    spec["Failure"]["Location"]["LineNumber"]
                )),
            }
        }
        Ok(outcome)
    }

    fn count(&self, state: &str) -> usize {
        self.states.get(state).copied().unwrap_or_default()
    }
}

/// A failure's own words, without the dump of the structures behind them.
fn first_lines(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| *line != "{");
    lines.collect::<Vec<_>>().join(" ")
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (passed, pending) = (self.count("passed"), self.count("pending"));
        write!(f, "{passed} passed, {} failed, ", self.failures.len())?;
        write!(f, "{} skipped, {pending} pending", self.count("skipped"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn btrfs_subvolumes_conform() -> Result<()> {
    run(DiskType::Btrfs, Suite { parameters: "kind: btrfs", mutable: "compression: zstd", access: "mount" })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_images_conform() -> Result<()> {
    run(DiskType::Xfs, Suite { parameters: "kind: image", mutable: "readAheadKb: \"512\"", access: "mount" })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_images_conform() -> Result<()> {
    run(DiskType::Xfs, Suite { parameters: "kind: image", mutable: "readAheadKb: \"512\"", access: "block" })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_conform() -> Result<()> {
    run(DiskType::Ext4, Suite { parameters: "kind: dir", mutable: "noatime: \"true\"", access: "mount" })
        .await
}
