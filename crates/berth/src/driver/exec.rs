//! `berth driver exec`: a program as a CSI driver, with one JSON document each way for each operation.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use berth_backends::exec::{Config, Exec};
use berth_backends::services;
use berth_core::NodeId;
use berth_host::files::write_private;
use berth_host::path::Dir;
use clap::{ArgMatches, Args as ClapArgs, FromArgMatches as _};

use super::{Backend, Opened, Replaced};
use crate::stack::objects::Objects;

/// In the state directory: the path of the program that was served last, and whether it stays.
const PROGRAM: &str = "program";

pub(super) const BACKEND: Backend = Backend {
    name: "exec",
    about: "A program as a CSI driver: it is run for each operation, with JSON on its input and output",
    separable: true,
    flags: Args::augment_args,
    driver_name: |matches| {
        Args::from_arg_matches(matches).ok().and_then(|args| args.driver_name).unwrap_or_default()
    },
    open: |matches, mode| Box::pin(async move { open(&Args::from_arg_matches(&matches)?, mode).await }),
    embedded_flags: EmbeddedArgs::augment_args,
    embedded,
    // What it is called and whether it attaches is known when it runs.
    objects: |_| Objects { driver: None, classes: Vec::new(), snapshot_classes: Vec::new() },
    replaced: Replaced::NOTHING,
};

/// A program as a CSI driver.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "Volumes")]
struct Args {
    /// The program, which is run with the name of the operation as its argument (docs/exec.md)
    #[arg(long, value_name = "PATH")]
    program: PathBuf,

    /// Keep processes of the program running, with one line of JSON for each operation; it is run with the argument serve
    #[arg(long)]
    stays: bool,

    /// The most processes of a program that is kept running; each does one operation at a time
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64), value_name = "COUNT")]
    processes: u8,

    /// The id of this node, which is the name of its Node object [default: the host's name]
    #[arg(long, alias = "nodeid", env = "NODE_ID", value_name = "NAME")]
    node_id: Option<NodeId>,

    /// The driver's name, as it stands in StorageClasses [default: the one that the program gives itself]
    #[arg(long, alias = "drivername", value_name = "NAME")]
    driver_name: Option<String>,

    /// Where records of volumes and of what is mounted are kept
    #[arg(long, default_value = "/var/lib/berth/exec", value_name = "DIR")]
    state_dir: PathBuf,

    /// How long an operation may take; then the program is killed with all its process group
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "SECONDS")]
    call_timeout_seconds: u64,
}

/// How a program runs in `berth up`.
#[derive(Debug, ClapArgs)]
#[command(next_help_heading = "The program that is a driver")]
struct EmbeddedArgs {
    /// The program of the driver exec
    #[arg(long = "exec-program", value_name = "PATH")]
    exec_program: Option<PathBuf>,

    /// Keep the program of the driver exec running, with one line of JSON for each operation
    #[arg(long = "exec-stays")]
    exec_stays: bool,
}

fn embedded(up: &ArgMatches, directory: &Path, node: &str) -> Vec<OsString> {
    let mut words =
        vec!["--state-dir".into(), directory.as_os_str().to_owned(), "--node-id".into(), node.into()];
    // `berth down` takes volumes away without the flags of `berth up`.
    let noted = || {
        let noted = std::fs::read_to_string(directory.join(PROGRAM)).ok()?;
        let (stays, program) = noted.split_once('\n')?;
        Some((PathBuf::from(program), stays == "stays"))
    };
    let given = up.get_one::<PathBuf>("exec_program").cloned();
    if let Some((program, stays)) = given.map(|given| (given, up.get_flag("exec_stays"))).or_else(noted) {
        words.extend(["--program".into(), program.into_os_string()]);
        words.extend(stays.then(|| OsString::from("--stays")));
    }
    words
}

async fn open(args: &Args, mode: services::Mode) -> anyhow::Result<Opened> {
    let node = match &args.node_id {
        Some(node) => node.clone(),
        None => super::node_id()?,
    };
    let state_dir = std::path::absolute(&args.state_dir)?;
    let program = std::path::absolute(&args.program)?;
    Dir::ensure(&state_dir, 0o700)?;
    let (noted, how) = (state_dir.join(PROGRAM), if args.stays { "stays" } else { "runs" });
    write_private(&noted, format!("{how}\n{}", program.display()).as_bytes())
        .with_context(|| format!("write {}", noted.display()))?;
    let config = Config {
        program: program.clone(),
        node,
        state_dir: state_dir.clone(),
        call_timeout: Duration::from_secs(args.call_timeout_seconds),
        processes: args.stays.then_some(usize::from(args.processes)),
    };
    let exec = Exec::start(config).await.with_context(|| format!("start {}", program.display()))?;
    let name = args
        .driver_name
        .as_deref()
        .or(exec.name())
        .context("the program answers no \"name\" to describe; give one with --driver-name")?;
    let driver = exec.driver(name, env!("CARGO_PKG_VERSION"), mode)?;
    Ok(Opened {
        driver: driver.open(services::Config::new(&state_dir))?,
        remark: format!("the program {}", program.display()),
        drain: Box::new(|_| Box::pin(async {})),
    })
}
