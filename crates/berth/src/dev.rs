//! `berth dev`: a machine around a driver that is being written, with every call shown and judged.
//!
//! ```text
//! driver ◄── proxy (berth-dev) ◄── sidecars and node of a fresh machine (stack) ◄── sample class, claim and pod
//! ```
//!
//! The machine lies in a temporary directory and is removed at the end. `--once` walks the samples through their life and says by its exit
//! status whether the driver did well; otherwise the view stays until the person quits.

mod leftovers;
mod samples;

use std::ffi::OsString;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use berth_certify::process::Launch;
use berth_csi::{Endpoint, Identity};
use berth_dev::announced::never_called;
use berth_dev::faults::Fault;
use berth_dev::project::{FILE, Project};
use berth_dev::record::{Event, Events};
use berth_dev::{CALLERS_WAIT, StepFilter, Workbench, check_endpoint, lines, record, view};
use berth_host::service::Start;
use clap::Args as ClapArgs;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use self::leftovers::Workspace;
pub(crate) use self::leftovers::clean_up;
use self::samples::Samples;
use crate::sidecars::go;
use crate::stack::{self, Stack};
use crate::timeline::TimelineRecorder;
use crate::{down, logging};

/// The exit status if the driver could not be run.
pub(crate) const NOT_RUN: u8 = 2;
/// How long samples may take to go when a person quits.
const QUIT_TIMEOUT: Duration = Duration::from_secs(20);

/// How many events that came before the view are shown in it.
const MOST_EARLIER: usize = 100;

/// Run a driver that you write on a machine of its own, and show every call that it gets.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Faults: kill@NodeStage:before|during|after, repeat=2, drop-answer@CreateVolume, timeout=1s@RPC, delay=200ms@RPC, \
                  concurrent=8@RPC, code=UNAVAILABLE@RPC, reorder; behind a slash which calls: /3 the first three of each RPC, /30% by chance, \
                  /all. Without @RPC all calls about volumes are meant.\n\n\
                  Without a driver, berth.toml of this directory says how it is built and run; `berth new` writes one.\n\n\
                  Exit status: 0 no rule was broken and everything was cleaned up, 1 otherwise, 2 the driver could not be run, or the command line \
                  is wrong"
)]
pub(crate) struct Args {
    /// Walk the samples through their life once, without the view, and exit
    #[arg(long)]
    once: bool,

    /// Stop before each call about volumes, or of these RPCs, until you let it go on or answer it
    #[arg(long, value_name = "RPC", num_args = 0.., value_delimiter = ',', require_equals = true)]
    step: Option<Vec<String>>,

    /// What to do to calls; may be given several times
    #[arg(long = "fault", value_name = "SPEC")]
    faults: Vec<Fault>,

    /// What the choices of faults follow from; the same number makes the same choices
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Write everything that happens into this file, one line of JSON each, without secrets
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Print everything that happens as lines of JSON instead of the view
    #[arg(long)]
    json: bool,

    /// A driver that runs: unix:///path/to.sock
    #[arg(long, value_name = "URL", conflicts_with_all = ["flex", "program"])]
    endpoint: Option<Endpoint>,

    /// A FlexVolume driver: its executable, in a directory vendor~driver
    #[arg(long, value_name = "SCRIPT", conflicts_with = "program")]
    flex: Option<PathBuf>,

    /// Where to keep the machine meanwhile; it is removed afterwards [default: a temporary directory]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// With --once, how long the samples may take to run, and then to go
    #[arg(long, default_value = "60s", value_parser = go::positive_duration, value_name = "DURATION")]
    timeout: Duration,

    #[command(flatten)]
    logging: logging::Logging,

    /// The driver and its arguments, in which {endpoint}, {node} and {dir} are replaced; CSI_ENDPOINT and NODE_ID are in its environment
    #[arg(last = true, value_name = "DRIVER")]
    program: Vec<OsString>,
}

/// Runs the driver until the person quits, or once; the exit status says how it did.
pub(crate) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    match develop(args).await {
        Ok(true) => Ok(ExitCode::SUCCESS),
        Ok(false) => Ok(ExitCode::FAILURE),
        Err(error) => {
            eprintln!("berth: the driver could not be run: {error:#}");
            Ok(ExitCode::from(NOT_RUN))
        }
    }
}

/// Whether the driver did well. An error means that it was not run.
async fn develop(args: Args) -> anyhow::Result<bool> {
    let project = Project::find(&std::env::current_dir()?)?.unwrap_or_default();
    let launch = launch(&args, &project)?;
    if matches!(launch, Launch::Endpoint(_))
        && let Some(fault) = args.faults.iter().find(|fault| fault.kills())
    {
        bail!("--fault {fault}: a driver that runs elsewhere cannot be killed; let `berth dev` start it");
    }
    let step = args
        .step
        .as_deref()
        .map_or(Ok(StepFilter::Off), StepFilter::parse)
        .map_err(|wrong| anyhow::anyhow!("--step: {wrong}"))?;
    let (events, receiver) = Events::new(args.record.as_deref()).context("--record")?;
    let events = Arc::new(events);
    let shows_view =
        !args.once && !args.json && std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
    let logging = args.logging.quieter(if shows_view { "off" } else { "error,berth_csi=off" });
    let timeline = logging::start(&logging);
    let mut front = Front::start(receiver, args.json);
    for line in leftovers::remove_killed().await {
        events.note(line);
    }
    let workspace = Workspace::create(args.data_dir.as_deref())?;
    let data_dir = workspace.path.clone();
    events.note(format!(
        "Machine in {0}; after a kill, `berth down --purge --data-dir {0}` cleans up",
        data_dir.display()
    ));
    let own = !matches!(launch, Launch::Endpoint(_));
    // What is given on the command line is not what the file says how to build.
    let from_file = own && args.program.is_empty() && args.flex.is_none();
    let options = berth_dev::Options {
        launch,
        directory: workspace.driver(),
        socket: data_dir.join("csi.sock"),
        top: data_dir.clone(),
        node: "berth".to_owned(),
        build: if from_file { project.build.clone() } else { String::new() },
        watch: match (&args.flex, from_file && !args.once) {
            (Some(script), _) => vec![script.clone()],
            (None, true) => project.watch.clone(),
            (None, false) => Vec::new(),
        },
        faults: args.faults.clone(),
        seed: args.seed,
        step,
    };
    let session = Session {
        once: args.once,
        patience: if args.step.is_some() { CALLERS_WAIT } else { args.timeout },
        shows_view,
        steps_by_lines: args.step.is_some() && !shows_view,
        project,
    };
    let outcome = session.run(options, &events, &timeline, &mut front).await;
    let removed = down::remove(&data_dir).await;
    if let Err(error) = &removed {
        events.fault(format!("✗ The machine could not be removed: {error:#}"));
    }
    drop(workspace);
    let did_well = outcome.as_ref().is_ok_and(|()| events.faults() == 0);
    if outcome.is_ok() {
        events.note(match events.faults() {
            0 => "No rule was broken, and everything was cleaned up".to_owned(),
            count => format!("✗ {count} faults; `berth certify --explain ID` says more about a rule"),
        });
    }
    front.finish().await;
    outcome.map(|()| did_well)
}

/// How the driver is reached: by the command line, or else by `berth.toml`.
fn launch(args: &Args, project: &Project) -> anyhow::Result<Launch> {
    if let Some(endpoint) = &args.endpoint {
        check_endpoint(endpoint).map_err(|wrong| anyhow::anyhow!("--endpoint: {wrong}"))?;
        return Ok(Launch::Endpoint(endpoint.clone()));
    }
    let words: Vec<OsString> = if let Some(script) = &args.flex {
        let script = std::path::absolute(script)?;
        anyhow::ensure!(script.is_file(), "--flex: there is no file {}", script.display());
        ["berth", "driver", "flex", "--state-dir", "{dir}/state", "--plugin"]
            .into_iter()
            .map(OsString::from)
            .chain([script.into_os_string()])
            .collect()
    } else if args.program.is_empty() {
        let command = project.command().map_err(|wrong| anyhow::anyhow!("{FILE}: run: {wrong}"))?;
        command.into_iter().map(OsString::from).collect()
    } else {
        args.program.clone()
    };
    let words = with_this_program(words)?;
    let Some((program, rest)) = words.split_first() else {
        bail!(
            "name a driver: -- ./my-driver, --endpoint unix:///…, --flex SCRIPT, or `run` in {FILE} of this directory"
        );
    };
    // Berth's own adapters then log each operation of a program.
    let environment = if std::env::var_os("BERTH_LOG").is_some() {
        Vec::new()
    } else {
        vec![("BERTH_LOG".into(), "info,berth_flex=debug,berth_backends=debug".into())]
    };
    Ok(Launch::Program(Start { program: program.clone(), args: rest.to_vec(), environment }))
}

/// Where a command runs `berth`, this program is meant, wherever it is installed.
fn with_this_program(mut words: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let is_prefix = |word: &OsString| {
        word == "env" || word.to_str().is_some_and(|word| word.contains('=') && !word.starts_with('-'))
    };
    if let Some(program) = words.iter_mut().find(|word| !is_prefix(word)).filter(|word| *word == "berth") {
        *program = std::env::current_exe()?.into_os_string();
    }
    Ok(words)
}

/// One run of a driver.
struct Session {
    once: bool,
    patience: Duration,
    shows_view: bool,
    steps_by_lines: bool,
    project: Project,
}

impl Session {
    /// Runs the driver and the machine, and stops both. An error means that the driver was not run.
    async fn run(
        &self,
        options: berth_dev::Options,
        events: &Arc<Events>,
        timeline: &TimelineRecorder,
        front: &mut Front,
    ) -> anyhow::Result<()> {
        let data_dir = options.top.clone();
        let quit = on_signals()?;
        let opening = Workbench::open(options, events.clone());
        let bench = quit.run_until_cancelled(opening).await.context("interrupted")??;
        let ran = self.with_machine(&bench, &data_dir, timeline, front, &quit).await;
        bench.close().await;
        ran
    }

    async fn with_machine(
        &self,
        bench: &Arc<Workbench>,
        data_dir: &std::path::Path,
        timeline: &TimelineRecorder,
        front: &mut Front,
        quit: &CancellationToken,
    ) -> anyhow::Result<()> {
        let events = bench.events();
        let identity = bench
            .identify()
            .await
            .map_err(|error| anyhow::anyhow!("asking the driver who it is: {error}"))?;
        self.introduce(bench, &identity);
        let samples = Samples::find(
            &std::env::current_dir()?,
            &identity.name,
            identity.attaches(),
            &self.project.class,
        )?;
        bench.hide(samples.secrets());
        let machine = stack::Options {
            foreign_drivers: vec![bench.socket().to_owned()],
            call_timeout: Some(CALLERS_WAIT),
            ..stack::Options::temporary(data_dir)?
        };
        let starting = Stack::start(machine, timeline, |_, _| {});
        let stack = quit.run_until_cancelled(starting).await.context("interrupted")??;
        events.note(format!("Ready: KUBECONFIG={}", stack.running.kubeconfig.display()));
        if self.steps_by_lines {
            step_by_lines(bench.clone());
        }
        let outcome = if self.once {
            let walked = quit.run_until_cancelled(self.walk(bench, &stack, &samples)).await;
            walked.unwrap_or_else(|| Err(anyhow::anyhow!("interrupted")))
        } else {
            self.stay(bench, &stack, &samples, &identity, front, quit).await
        };
        if let Err(error) = outcome {
            events.fault(format!("✗ {error:#}"));
        }
        bench.settled().await;
        stack.stop().await
    }

    /// Says who the driver is and which calls it will never get.
    fn introduce(&self, bench: &Workbench, identity: &Identity) {
        let events = bench.events();
        let pid = bench.pid().map_or_else(String::new, |pid| format!(", process {pid}"));
        events.note(format!("Driver {}{pid}", identity.name));
        if !self.project.name.is_empty() && self.project.name != identity.name {
            events.note(format!("{FILE} calls it {}", self.project.name));
        }
        for line in never_called(identity) {
            events.note(line);
        }
    }

    /// Applies the samples, waits until the pod runs, and deletes them again.
    async fn walk(&self, bench: &Workbench, stack: &Stack, samples: &Samples) -> anyhow::Result<()> {
        let events = bench.events();
        events.note(format!("Samples: {}", samples.origin));
        samples.apply(stack.cluster.client()).await?;
        let ready = samples.until_ready(&stack.cluster, self.patience).await;
        match &ready {
            Ok(()) => events.note("The pod runs, with its volume mounted; pod and claim are deleted"),
            Err(error) => events.fault(format!("✗ {error:#}")),
        }
        samples.delete(&stack.cluster, self.patience).await?;
        bench.settled().await;
        for left in bench.leftovers() {
            events.fault(format!("✗ {left}, although pod and claim are gone"));
        }
        Ok(())
    }

    /// Applies the samples, and shows what happens until the person quits.
    async fn stay(
        &self,
        bench: &Arc<Workbench>,
        stack: &Stack,
        samples: &Samples,
        identity: &Identity,
        front: &mut Front,
        quit: &CancellationToken,
    ) -> anyhow::Result<()> {
        let events = bench.events();
        events.note(format!("Samples: {}", samples.origin));
        let using = async {
            samples.apply(stack.cluster.client()).await?;
            match samples.until_ready(&stack.cluster, self.patience).await {
                Ok(()) => events.note("The pod runs, with its volume mounted"),
                Err(error) => events.note(format!("{error:#}")),
            }
            std::future::pending::<()>().await;
            anyhow::Ok(())
        };
        let watching = async {
            if self.shows_view {
                front.view(bench, identity.name.clone()).await?;
            } else {
                std::future::pending::<()>().await;
            }
            anyhow::Ok(())
        };
        tokio::select! {
            failed = using => failed?,
            watched = watching => watched?,
            () = quit.cancelled() => {}
        }
        bench.step_off();
        events.note("Stopping: pod and claim are deleted");
        samples.delete(&stack.cluster, QUIT_TIMEOUT).await
    }
}

/// Cancelled by the first SIGINT or SIGTERM; a second one ends the process at once.
fn on_signals() -> anyhow::Result<CancellationToken> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let quit = CancellationToken::new();
    tokio::spawn({
        let quit = quit.clone();
        async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if quit.is_cancelled() {
                    eprintln!(
                        "berth: stopped at once; `berth down` or the next `berth dev` cleans up what is left"
                    );
                    std::process::exit(1);
                }
                quit.cancel();
            }
        }
    });
    Ok(quit)
}

/// Lets a person step by lines on the standard input; at its end all calls go on.
fn step_by_lines(bench: Arc<Workbench>) {
    // A thread, because nothing interrupts a read; it ends with the process.
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let (word, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
            let done = match word {
                "n" | "" => {
                    // Whoever is quicker than the caller waits for the next call.
                    while bench.is_stepping() && !bench.step_next() {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    Ok(())
                }
                "c" => {
                    bench.step_off();
                    Ok(())
                }
                "a" => bench.answer(rest),
                _ => Err(format!("{word:?} is none of n, c and a")),
            };
            if let Err(wrong) = done {
                bench.events().note(wrong);
            }
        }
        bench.step_off();
    });
}

/// Who shows events: lines or JSON on the standard output, or the view while it is there.
struct Front {
    json: bool,
    printer: Option<Printer>,
}

/// A task that prints events until it is stopped, and then gives back what it printed, and where more comes from.
struct Printer {
    stop: CancellationToken,
    task: JoinHandle<(Vec<Event>, mpsc::UnboundedReceiver<Event>)>,
}

impl Front {
    fn start(events: mpsc::UnboundedReceiver<Event>, json: bool) -> Self {
        Self { json, printer: Some(Printer::start(events, json)) }
    }

    /// Shows the view in the place of lines until the person quits.
    async fn view(&mut self, bench: &Arc<Workbench>, title: String) -> anyhow::Result<()> {
        let printer = self.printer.take().context("something prints already")?;
        let (earlier, mut events) = printer.finish().await;
        let shown = view::run(bench, earlier, &mut events, title).await;
        self.printer = Some(Printer::start(events, self.json));
        shown.context("show the view")
    }

    /// Prints what is left.
    async fn finish(mut self) {
        if let Some(printer) = self.printer.take() {
            printer.finish().await;
        }
    }
}

impl Printer {
    fn start(mut events: mpsc::UnboundedReceiver<Event>, json: bool) -> Self {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut printed = Vec::new();
            loop {
                let event = tokio::select! {
                    biased;
                    event = events.recv() => event,
                    () = stopped.cancelled() => None,
                };
                let Some(event) = event else { return (printed, events) };
                print(&event, json);
                // Before the view starts only a few come; whoever has no view wants none back.
                if printed.len() < MOST_EARLIER {
                    printed.push(event);
                }
            }
        });
        Self { stop, task }
    }

    async fn finish(self) -> (Vec<Event>, mpsc::UnboundedReceiver<Event>) {
        self.stop.cancel();
        self.task.await.expect("printing does not panic")
    }
}

fn print(event: &Event, json: bool) {
    let mut out = std::io::stdout().lock();
    let text =
        if json { record::line(event).unwrap_or_default() } else { lines::text(event, out.is_terminal()) };
    // Whoever closed the output does not want to know.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_takes_the_place_of_berth_in_a_command() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let own = std::env::current_exe().unwrap().into_os_string();
        let replaced = with_this_program(words("env ROOT=/x berth driver exec berth")).unwrap();
        assert_eq!(replaced, [&words("env ROOT=/x")[..], &[own], &words("driver exec berth")].concat());
        assert_eq!(with_this_program(words("./driver berth")).unwrap(), words("./driver berth"));
    }
}
