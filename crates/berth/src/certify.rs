//! `berth certify`: tests any CSI driver, and prints a report.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use berth_certify::process::Launch;
use berth_certify::report::{CheckResult, Report, Status};
use berth_certify::rules::Rule;
use berth_core::Capacity;
use berth_csi::Endpoint;
use berth_host::service::Start;
use clap::Args as ClapArgs;

use crate::sidecars::go;

/// The exit status if nothing could be tested.
pub(crate) const UNTESTED: u8 = 2;

/// Test a CSI driver: protocol, error codes, idempotency, crashes, concurrency, data, leaks and secrets.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Exit status: 0 no MUST failed, 1 one did, 2 the driver could not be tested, or the command line is wrong"
)]
pub(crate) struct Args {
    /// A driver that runs: unix:///path/to.sock
    #[arg(long, value_name = "URL", conflicts_with = "program", required_unless_present_any = ["program", "explain", "list"])]
    endpoint: Option<Endpoint>,

    /// Where volumes are mounted, as the driver sees it; also its socket and log [default: a temporary directory]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,

    /// How long a call may take
    #[arg(long, default_value = "30s", value_parser = go::positive_duration, value_name = "DURATION")]
    timeout: Duration,

    /// The size of volumes
    #[arg(long, default_value = "1Gi", value_name = "SIZE")]
    size: Capacity,

    /// A parameter of new volumes, as in a StorageClass; may be given several times
    #[arg(long = "parameter", value_name = "KEY=VALUE", value_parser = pair)]
    parameters: Vec<(String, String)>,

    /// A parameter to change by ControllerModifyVolume; may be given several times
    #[arg(long = "mutable-parameter", value_name = "KEY=VALUE", value_parser = pair)]
    mutable_parameters: Vec<(String, String)>,

    /// A parameter of new snapshots; may be given several times
    #[arg(long = "snapshot-parameter", value_name = "KEY=VALUE", value_parser = pair)]
    snapshot_parameters: Vec<(String, String)>,

    /// A file of KEY=VALUE lines: secrets that the driver needs, sent with every call that takes secrets
    #[arg(long, value_name = "FILE")]
    secrets: Option<PathBuf>,

    /// The filesystem to ask for [default: the driver's choice]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    fs_type: String,

    /// Use volumes as block devices
    #[arg(long)]
    block: bool,

    /// Only these checks, or groups of checks
    #[arg(long, value_delimiter = ',', value_name = "ID")]
    only: Vec<String>,

    /// Not these checks, or groups of checks
    #[arg(long, value_delimiter = ',', value_name = "ID")]
    skip: Vec<String>,

    /// Say what a check is about, and what to do if it fails
    #[arg(long, value_name = "ID", exclusive = true)]
    explain: Option<String>,

    /// List all checks with their severity and rule
    #[arg(long, exclusive = true)]
    list: bool,

    /// Print only what failed or was not run
    #[arg(long, short = 'q')]
    quiet: bool,

    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write the report for build servers, in the form of JUnit
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,

    /// Write the report as one HTML file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Write a badge, as SVG
    #[arg(long, value_name = "FILE")]
    badge: Option<PathBuf>,

    /// The driver and its arguments, in which {endpoint}, {node} and {dir} are replaced; CSI_ENDPOINT and NODE_ID are in its environment
    #[arg(last = true, value_name = "DRIVER")]
    program: Vec<OsString>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Tests the driver; the exit status says how that ended.
pub(crate) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.list {
        for rule in berth_certify::rules() {
            println!("{:<6} {:<32} {}", rule.level, rule.id, rule.rule);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(id) = &args.explain {
        return Ok(explain(id));
    }
    let named = [args.only.as_slice(), args.skip.as_slice()].concat();
    if let Some(name) = berth_certify::unknown(&named).first() {
        eprintln!(
            "berth: there is no check and no group of checks {name:?}; `berth certify --list` shows all"
        );
        return Ok(ExitCode::from(UNTESTED));
    }
    match certify(&args).await {
        Ok(report) => Ok(if report.counts().failed_must > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }),
        Err(error) => {
            eprintln!("berth: the driver could not be tested: {error:#}");
            Ok(ExitCode::from(UNTESTED))
        }
    }
}

fn explain(id: &str) -> ExitCode {
    let Some(rule) = berth_certify::rules().into_iter().find(|rule| rule.id == id) else {
        eprintln!("berth: there is no check {id:?}; `berth certify --list` shows all");
        return ExitCode::from(UNTESTED);
    };
    let Rule { id, level, section, rule, advice } = rule;
    println!("{id} ({level})\n\n{rule}\n\nCSI specification: {section}\nTo do: {advice}");
    ExitCode::SUCCESS
}

async fn certify(args: &Args) -> anyhow::Result<Report> {
    let own_directory;
    let directory = if let Some(directory) = &args.directory {
        std::path::absolute(directory)?
    } else {
        own_directory = TemporaryDirectory::new()?;
        own_directory.0.clone()
    };
    let launch = match (&args.endpoint, args.program.split_first()) {
        (Some(endpoint), _) => Launch::Endpoint(endpoint.clone()),
        (None, Some((program, rest))) => {
            Launch::Program(Start { program: program.clone(), args: rest.to_vec(), environment: Vec::new() })
        }
        (None, None) => anyhow::bail!("name a driver: --endpoint unix:///…, or -- ./my-driver"),
    };
    let mut options = berth_certify::Options::new(launch, directory);
    options.timeout = args.timeout;
    options.size = i64::try_from(args.size.bytes()).context("--size is too large")?;
    options.parameters = args.parameters.iter().cloned().collect();
    options.mutable_parameters = args.mutable_parameters.iter().cloned().collect();
    options.snapshot_parameters = args.snapshot_parameters.iter().cloned().collect();
    if let Some(path) = &args.secrets {
        let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        // A line that is not understood may be a secret, and is not shown.
        let pairs: Result<_, _> =
            lines.map(|line| pair(line).map_err(|_| "a line is not KEY=VALUE")).collect();
        options.secrets = pairs.map_err(|wrong| anyhow::anyhow!("{}: {wrong}", path.display()))?;
    }
    options.fs_type.clone_from(&args.fs_type);
    options.block = args.block;
    options.only.clone_from(&args.only);
    options.skip.clone_from(&args.skip);
    let colours = std::io::stdout().is_terminal();
    let report = berth_certify::run(options, |result| {
        if !args.quiet || result.status != Status::Passed {
            println!("{}", coloured(result, colours));
            let _ = std::io::stdout().flush();
        }
    })
    .await?;
    println!("\n{}", report.summary());
    let forms = [
        (&args.json, report.json()),
        (&args.junit, report.junit()),
        (&args.html, report.html()),
        (&args.badge, report.badge()),
    ];
    for (path, text) in forms {
        if let Some(path) = path {
            std::fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
        }
    }
    Ok(report)
}

fn coloured(result: &CheckResult, colours: bool) -> String {
    let line = result.line();
    let colour = match result.status {
        Status::Passed => "32",
        Status::Failed => "31",
        Status::NotRun => "33",
    };
    if colours { format!("\x1b[{colour}m{line}\x1b[0m") } else { line }
}

/// A directory that is removed at the end, unless something is still mounted there.
struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    fn new() -> anyhow::Result<Self> {
        let number = jiff::Timestamp::now().as_nanosecond();
        let path = std::env::temp_dir().join(format!("berth-certify-{}-{number}", std::process::id()));
        berth_host::path::Dir::ensure(&path, 0o700)?;
        Ok(Self(path))
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        let mounts = berth_host::mount::mounts().unwrap_or_default();
        if mounts.iter().any(|mount| mount.target.starts_with(&self.0)) {
            eprintln!("berth: something is still mounted below {}, which is left", self.0.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
