//! csi-sanity, the CSI community's conformance suite: where it is, and what its report says.

use std::{
    collections::BTreeMap,
    fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::machine;

/// How many specs csi-sanity v5.6.0 has that are not marked pending upstream.
pub const SPECS: usize = 102;

/// What the suite's JSON report says.
#[derive(Debug)]
pub struct Outcome {
    states: BTreeMap<String, usize>,
    /// Specs that failed, each with its words.
    pub failures: Vec<String>,
    /// Specs that were skipped.
    pub skipped: Vec<String>,
    /// Every spec: its blocks, from the outermost on, and its sentence.
    pub specs: Vec<Vec<String>>,
}

/// Runs the suite in `dir` with these arguments, and reads its report.
pub fn run(dir: &Path, args: &[String]) -> Result<Outcome> {
    run_by(machine::command(program()?), dir, args)
}

/// As [`run`], by a command that runs [`program`].
pub fn run_by(mut command: Command, dir: &Path, args: &[String]) -> Result<Outcome> {
    let report = dir.join("report.json");
    let output = command
        .arg(format!("--ginkgo.json-report={}", report.display()))
        .args(args)
        .args(["--ginkgo.no-color", "--ginkgo.timeout=10m"])
        .current_dir(dir)
        .output()
        .context("start csi-sanity")?;
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let text = fs::read_to_string(&report).with_context(|| format!("csi-sanity wrote no report:\n{said}"))?;
    Outcome::parse(&text)
}

/// Where the suite is, which `make deps` builds.
pub fn program() -> Result<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin/csi-sanity");
    ensure!(path.is_file(), "there is no csi-sanity: build it first with `make deps`");
    Ok(path)
}

impl Outcome {
    fn parse(report: &str) -> Result<Self> {
        let suites: Value = serde_json::from_str(report).context("parse csi-sanity's report")?;
        let mut outcome =
            Self { states: BTreeMap::new(), failures: Vec::new(), skipped: Vec::new(), specs: Vec::new() };
        let specs =
            suites.as_array().into_iter().flatten().filter_map(|suite| suite["SpecReports"].as_array());
        for spec in specs.flatten().filter(|spec| spec["LeafNodeType"] == "It") {
            let state = spec["State"].as_str().context("a spec has a state")?;
            *outcome.states.entry(state.to_owned()).or_default() += 1;
            let path =
                spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let name: Vec<&str> = path.chain(spec["LeafNodeText"].as_str()).collect();
            outcome.specs.push(name.iter().map(ToString::to_string).collect());
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

    /// How many specs ended like this.
    pub fn count(&self, state: &str) -> usize {
        self.states.get(state).copied().unwrap_or_default()
    }
}

/// A failure's own words, without the dump of the structures behind them.
fn first_lines(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| *line != "{");
    lines.collect::<Vec<_>>().join(" ")
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (passed, pending) = (self.count("passed"), self.count("pending"));
        write!(f, "{passed} passed, {} failed, ", self.failures.len())?;
        write!(f, "{} skipped, {pending} pending", self.count("skipped"))
    }
}
