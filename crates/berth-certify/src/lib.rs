//! Tests any CSI driver: the rules of the specification as checks, for `berth certify` and `berth dev`.
//!
//! ```text
//!  run ──► Session ──► calls, each judged by rules::judge ──► driver
//!   │        └──────► inspects: /proc/PID/mountinfo, /proc/PID/root, loop devices, open files, children
//!   └─ every row of checks::all ──► Report: text, JSON, JUnit, HTML, badge
//! ```
//!
//! - [`mod@rules`] judges one observed call by its request, its answer, and the mounts before and after it. A proxy between a
//!   caller and a driver can use it alone.
//! - `checks` is the table: a check is a row with its id, its level (MUST, SHOULD or INFO), the section of the specification, the rule in our
//!   words, advice, what it needs, and the code that tests it. Each group of rows is a file.
//! - `session` makes the calls: each carries a secret of its own, has a deadline, is judged, and is undone after its check.
//! - [`process`] starts, kills and observes the driver.
//! - [`report`] is what a run found.
//!
//! This tests a driver, which it starts or connects to as `launch` says, and prints how many rules were checked:
//! ```no_run
//! use berth_certify::{Options, process::Launch};
//!
//! # async fn test(launch: Launch) -> std::io::Result<()> {
//! let report = berth_certify::run(Options::new(launch, "/tmp/certify".into()), |result| println!("{}", result.rule.id)).await?;
//! println!("{} rules", report.results.len());
//! # Ok(())
//! # }
//! ```
//!
//! What holds: a check that could not run is never counted as passed. A call that is not answered in time is not tried again, so that
//! a driver that hangs fails only the checks that need this call. After each check its volumes are gone.
//!
//! Start reading at `checks.rs`, then with a short group, `checks/staging.rs`.

mod checks;
pub mod process;
pub mod report;
pub mod rules;
mod session;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::process::Launch;
use crate::report::{CheckResult, Report};
use crate::rules::Rule;

/// What is tested, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// How the driver is reached.
    pub launch: Launch,
    /// Where volumes are mounted, as the driver sees it; also the socket and the log of a driver that is started.
    pub directory: PathBuf,
    /// How long a call may take.
    pub timeout: Duration,
    /// The size of volumes in bytes.
    pub size: i64,
    /// The parameters of new volumes, as of a StorageClass.
    pub parameters: BTreeMap<String, String>,
    /// Parameters that ControllerModifyVolume sets; without them that call is not tested.
    pub mutable_parameters: BTreeMap<String, String>,
    /// The parameters of new snapshots.
    pub snapshot_parameters: BTreeMap<String, String>,
    /// Secrets that the driver needs; they are sent with every call that has secrets.
    pub secrets: BTreeMap<String, String>,
    /// The filesystem that is asked for; empty for the driver's own choice.
    pub fs_type: String,
    /// Volumes are block devices.
    pub block: bool,
    /// Ids of checks, or their beginnings; all if empty.
    pub only: Vec<String>,
    /// Ids of checks, or their beginnings, that are left out.
    pub skip: Vec<String>,
}

impl Options {
    /// Everything, with volumes of 1 GiB and 30 seconds for a call.
    pub fn new(launch: Launch, directory: PathBuf) -> Self {
        Self {
            launch,
            directory,
            timeout: Duration::from_secs(30),
            size: 1 << 30,
            parameters: BTreeMap::new(),
            mutable_parameters: BTreeMap::new(),
            snapshot_parameters: BTreeMap::new(),
            secrets: BTreeMap::new(),
            fs_type: String::new(),
            block: false,
            only: Vec::new(),
            skip: Vec::new(),
        }
    }

    /// Whether a check is asked for.
    fn selects(&self, id: &str) -> bool {
        let names = |names: &[String]| names.iter().any(|name| matches(name, id));
        (self.only.is_empty() || names(&self.only)) && !names(&self.skip)
    }
}

/// Whether a name is the id of a check, or one of its groups: `errors` is all of `errors.…`.
fn matches(name: &str, id: &str) -> bool {
    id.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.') || name.ends_with('.'))
}

/// Tests a driver; `heard` gets each result as it comes. An error means that nothing could be tested.
pub async fn run(options: Options, heard: impl FnMut(&CheckResult)) -> io::Result<Report> {
    checks::run(options, heard).await
}

/// Every rule that is checked, in the order of the report.
pub fn rules() -> Vec<&'static Rule> {
    let of_one_call = |id| rules::RULES.iter().any(|rule| rule.id == id);
    let checks = checks::all().iter().map(|check| &check.rule).filter(|rule| !of_one_call(rule.id));
    checks.chain(rules::RULES.iter().copied()).collect()
}

/// The names that are neither a check nor a group of checks.
pub fn unknown(names: &[String]) -> Vec<&str> {
    let rules = rules();
    let known = |name: &&String| rules.iter().any(|rule| matches(name, rule.id));
    names.iter().filter(|name| !known(name)).map(String::as_str).collect()
}
