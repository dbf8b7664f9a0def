//! A driver on the workbench: built, started, kept running behind the proxy, restarted when its sources change.
//!
//! What a person orders (restart, kill, faults, steps) are methods of [`Workbench`]. Mounts are left alone by all of it, so that every
//! restart shows whether the driver finds its volumes again.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use berth_certify::process::{DriverProcess, Launch};
use berth_certify::rules::{RULES, Rule};
use berth_core::Backoff;
use berth_csi::{Client, Endpoint, Identity, v1};
use bytes::Bytes;
use jiff::Timestamp;
use parking_lot::Mutex;
use prost::Message as _;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::faults::{Fault, Faults};
use crate::messages::to_json;
use crate::observe::{Observed, Observer};
use crate::proxy::{self, Reorder};
use crate::record::{BrokenRule, CallRecord, Event, Events, short};
use crate::secrets::Secrets;
use crate::step::{StepFilter, Steps};
use crate::watch::Watch;

/// How long a build may take.
const BUILD_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// How much of a build's output is kept.
const BUILD_OUTPUT: usize = 256 << 10;
/// How many lines of a failed build are shown.
const BUILD_LINES: usize = 20;
/// How many lines of the driver's log are kept for one call.
const LOG_LINES: u64 = 64 << 10;
/// How soon a driver that ended by itself is started again.
const RESTART: Backoff = Backoff { first: Duration::from_millis(200), longest: Duration::from_secs(10) };
/// How long one question about the driver may take.
const ASKING: Duration = Duration::from_secs(10);

/// What is worked on, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// How the driver is reached or started.
    pub launch: Launch,
    /// The driver's own directory: its socket, its log, and what `{dir}` stands for.
    pub directory: PathBuf,
    /// Where callers find the proxy.
    pub socket: PathBuf,
    /// Paths below it are shown without it.
    pub top: PathBuf,
    /// The name of the node, for `{node}` and `NODE_ID`.
    pub node: String,
    /// The command that builds the driver; empty if there is nothing to do.
    pub build: String,
    /// What is built again when it changes.
    pub watch: Vec<PathBuf>,
    /// What is done to calls.
    pub faults: Vec<Fault>,
    /// What the faults' choices follow from.
    pub seed: u64,
    /// Which calls wait for a decision.
    pub step: StepFilter,
}

/// A driver behind the proxy.
pub struct Workbench {
    pub(crate) process: DriverProcess,
    pub(crate) observer: Observer,
    pub(crate) faults: Mutex<Faults>,
    pub(crate) steps: Steps,
    pub(crate) secrets: Secrets,
    pub(crate) reorder: Reorder,
    pub(crate) closing: CancellationToken,
    pub(crate) events: Arc<Events>,
    options: Options,
    numbers: AtomicU64,
    /// How often the driver was stopped on purpose.
    interruptions: AtomicU64,
    /// Whether the driver answers, as far as is known.
    available: AtomicBool,
    orders: mpsc::UnboundedSender<Order>,
    observations: mpsc::UnboundedSender<Work>,
}

/// What the driver's task is to do.
enum Order {
    Restart,
    Rebuild(Vec<PathBuf>),
}

/// What the task that records is to do.
enum Work {
    Record(Box<Observation>),
    Flush(oneshot::Sender<()>),
}

/// A call as it was observed, before it is made readable.
pub(crate) struct Observation {
    pub(crate) number: u64,
    pub(crate) time: Timestamp,
    pub(crate) method: String,
    /// The frames of the messages.
    pub(crate) request: Bytes,
    pub(crate) response: Option<Bytes>,
    pub(crate) code: &'static str,
    pub(crate) message: String,
    pub(crate) duration: Duration,
    pub(crate) observed: Option<Observed>,
    pub(crate) broken: Vec<BrokenRule>,
    pub(crate) faults: Vec<String>,
}

impl Observation {
    /// A call of which nothing was observed, answered with OK.
    pub(crate) fn without_driver(number: u64, method: String, request: Bytes) -> Self {
        Self {
            number,
            time: Timestamp::now(),
            method,
            request,
            response: None,
            code: "OK",
            message: String::new(),
            duration: Duration::ZERO,
            observed: None,
            broken: Vec::new(),
            faults: Vec::new(),
        }
    }
}

impl Workbench {
    /// Builds and starts the driver, and opens the proxy. An error means that there is nothing to work with.
    pub async fn open(options: Options, events: Arc<Events>) -> io::Result<Arc<Self>> {
        if !options.build.is_empty() {
            events.note(format!("Building: {}", options.build));
            build(&options.build).await.map_err(io::Error::other)?;
        }
        let process = DriverProcess::open(&options.launch, &options.directory, &options.node).await?;
        let listener = UnixListener::bind(&options.socket)?;
        let (orders, ordered) = mpsc::unbounded_channel();
        let (observations, work) = mpsc::unbounded_channel();
        let watch = if options.watch.is_empty() { None } else { Some(Watch::new(options.watch.clone())?) };
        let bench = Arc::new(Self {
            observer: Observer::new(options.top.clone(), &options.directory),
            faults: Mutex::new(Faults::new(options.seed, options.faults.clone())),
            steps: Steps::new(options.step.clone()),
            process,
            options,
            events,
            secrets: Secrets::default(),
            reorder: Reorder::default(),
            closing: CancellationToken::new(),
            numbers: AtomicU64::new(0),
            interruptions: AtomicU64::new(0),
            available: AtomicBool::new(true),
            orders,
            observations,
        });
        tokio::spawn(proxy::serve(bench.clone(), listener));
        tokio::spawn(bench.clone().record(work));
        tokio::spawn(bench.clone().keep_running(ordered));
        if let Some(watch) = watch {
            tokio::spawn(bench.clone().follow_sources(watch));
        }
        Ok(bench)
    }

    /// Who the driver is and what it announces, asked without the proxy.
    pub async fn identify(&self) -> Result<Identity, String> {
        let asked = Client::connect(self.process.endpoint()).identify(ASKING).await;
        asked.map_err(|status| self.secrets.hide(&berth_csi::code::status_text(&status)))
    }

    /// Where events are published.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Where callers find the driver.
    pub fn socket(&self) -> &Path {
        &self.options.socket
    }

    /// The process id of the driver.
    pub fn pid(&self) -> Option<u32> {
        self.process.pid()
    }

    /// Removes these values from everything that is shown, also before a call carries them.
    pub fn hide(&self, values: impl IntoIterator<Item = String>) {
        self.secrets.add(values);
    }

    /// What the driver has mounted or attached: all mounts that it sees below the workbench, and all loop devices with files there.
    pub fn leftovers(&self) -> Vec<String> {
        let top = &self.options.top;
        let mounts = self.process.mounts().unwrap_or_default();
        let pods = top.join("node");
        let mounted = mounts.iter().filter(|mount| mount.target.starts_with(&pods));
        let mounted = mounted.map(|mount| format!("{} is still mounted", mount.target.display()));
        let loops = crate::observe::loop_devices();
        let attached = loops.iter().filter(|(_, backing)| Path::new(backing).starts_with(top));
        mounted
            .chain(attached.map(|(device, backing)| format!("/dev/{device} still holds {backing}")))
            .collect()
    }

    /// Stops the driver and starts it again.
    pub fn restart(&self) {
        let _ = self.orders.send(Order::Restart);
    }

    /// Kills the driver with SIGKILL; it is started again.
    pub fn kill(&self) {
        self.kill_driver("by hand", "");
    }

    /// Sends every call twice, or no longer; says which.
    pub fn toggle_repeat(&self) {
        let on = self.faults.lock().toggle_repeat();
        self.events.note(if on { "Every call is sent twice" } else { "Calls are sent once" });
    }

    /// Adds a fault by its description; an empty one removes all.
    pub fn add_fault(&self, text: &str) -> Result<(), String> {
        if text.trim().is_empty() {
            self.faults.lock().clear();
            self.events.note("No faults");
            return Ok(());
        }
        let fault: Fault = text.trim().parse()?;
        if fault.kills() && !self.process.is_own() {
            return Err("a driver that runs elsewhere cannot be killed".to_owned());
        }
        self.events.note(format!("Fault: {fault}"));
        self.faults.lock().add(fault);
        Ok(())
    }

    /// The faults that are on.
    pub fn faults(&self) -> Vec<String> {
        self.faults.lock().list()
    }

    /// Whether calls wait for a decision.
    pub fn is_stepping(&self) -> bool {
        self.steps.is_on()
    }

    /// Sends the call that has waited longest; says whether there was one.
    pub fn step_next(&self) -> bool {
        self.steps.next()
    }

    /// Lets all calls go on.
    pub fn step_off(&self) {
        self.steps.run_on();
    }

    /// Has every call about volumes wait.
    pub fn step_on(&self) {
        self.steps.stop_each();
    }

    /// Answers the call that has waited longest in the place of the driver.
    pub fn answer(&self, text: &str) -> Result<(), String> {
        self.steps.answer(text)
    }

    /// Returns when everything that was observed so far is published.
    pub async fn settled(&self) {
        let (done, settled) = oneshot::channel();
        if self.observations.send(Work::Flush(done)).is_ok() {
            let _ = settled.await;
        }
    }

    /// Closes the proxy and stops the driver.
    pub async fn close(self: Arc<Self>) {
        self.steps.run_on();
        self.settled().await;
        self.closing.cancel();
        self.interruptions.fetch_add(1, Ordering::SeqCst);
        let bench = self.clone();
        let _ = tokio::task::spawn_blocking(move || bench.process.stop()).await;
        let _ = std::fs::remove_file(&self.options.socket);
    }

    pub(crate) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn interruptions(&self) -> u64 {
        self.interruptions.load(Ordering::SeqCst)
    }

    pub(crate) fn is_available(&self) -> bool {
        self.available.load(Ordering::SeqCst)
    }

    pub(crate) fn observed(&self, observation: Observation) {
        let _ = self.observations.send(Work::Record(Box::new(observation)));
    }

    /// Kills the driver at a moment of a call, and waits until it is gone.
    pub(crate) fn kill_driver(&self, moment: &str, method: &str) {
        if !self.process.is_own() {
            self.events.note("The driver runs elsewhere and cannot be killed here");
            return;
        }
        self.interrupt();
        let what = if method.is_empty() { moment.to_owned() } else { format!("{moment} {}", short(method)) };
        self.events.note(format!("The driver is killed {what}"));
        // The process goes at once; waiting for it takes no longer than the kernel needs.
        if let Err(error) = tokio::task::block_in_place(|| self.process.kill()) {
            self.events.note(format!("The driver cannot be killed: {error}"));
        }
    }

    fn interrupt(&self) {
        self.available.store(false, Ordering::SeqCst);
        self.interruptions.fetch_add(1, Ordering::SeqCst);
    }

    /// A command that shows what the driver sees of the path that a call is about.
    pub(crate) fn inspection(&self, method: &str, message: &[u8]) -> String {
        let path = match short(method) {
            "NodePublishVolume" => v1::NodePublishVolumeRequest::decode(message).map(|call| call.target_path),
            "NodeUnpublishVolume" => {
                v1::NodeUnpublishVolumeRequest::decode(message).map(|call| call.target_path)
            }
            "NodeStageVolume" => {
                v1::NodeStageVolumeRequest::decode(message).map(|call| call.staging_target_path)
            }
            "NodeUnstageVolume" => {
                v1::NodeUnstageVolumeRequest::decode(message).map(|call| call.staging_target_path)
            }
            _ => Ok(String::new()),
        };
        let path = path.ok().filter(|path| !path.is_empty());
        let path = path.unwrap_or_else(|| self.options.directory.display().to_string());
        match self.process.pid() {
            Some(pid) => format!("nsenter --target {pid} --mount --wd=/ -- ls -la {path}"),
            None => format!("ls -la {path}"),
        }
    }

    /// Starts the driver again whenever it has ended, and when that is ordered.
    async fn keep_running(self: Arc<Self>, mut orders: mpsc::UnboundedReceiver<Order>) {
        let mut crashes = 0;
        loop {
            let order = tokio::select! {
                () = self.closing.cancelled() => return,
                order = orders.recv() => order,
                status = self.process.ended() => {
                    crashes = if self.is_available() { crashes + 1 } else { 0 };
                    if crashes > 0 {
                        self.crashed(status);
                        tokio::time::sleep(RESTART.exact_pause(crashes)).await;
                    }
                    self.start_again(&mut crashes).await;
                    continue;
                }
            };
            match order {
                None => return,
                Some(Order::Rebuild(changed)) => {
                    let names: Vec<_> = changed.iter().map(|path| path.display().to_string()).collect();
                    self.events.note(format!("Changed: {}", names.join(", ")));
                    if !self.options.build.is_empty() {
                        self.events.note(format!("Building: {}", self.options.build));
                        if let Err(output) = build(&self.options.build).await {
                            self.events.note(format!(
                                "The build failed; the driver that runs stays.\n{}",
                                self.secrets.hide(&output)
                            ));
                            continue;
                        }
                    }
                }
                Some(Order::Restart) => {}
            }
            self.interrupt();
            let bench = self.clone();
            let _ = tokio::task::spawn_blocking(move || bench.process.stop()).await;
            self.start_again(&mut crashes).await;
        }
    }

    fn crashed(&self, status: ExitStatus) {
        self.available.store(false, Ordering::SeqCst);
        let log = self.process.log().map(|log| log_end(log, 5)).unwrap_or_default();
        let log = if log.is_empty() { String::new() } else { format!("\n{log}") };
        self.events.fault(self.secrets.hide(&format!("✗ The driver ended by itself ({status}){log}")));
    }

    async fn start_again(&self, crashes: &mut u32) {
        match self.process.run().await {
            Ok(()) => {
                self.available.store(true, Ordering::SeqCst);
                let pid = self.process.pid().map_or_else(String::new, |pid| format!(" (process {pid})"));
                self.events.note(format!("The driver runs again{pid}"));
            }
            Err(error) => {
                *crashes += 1;
                self.events.fault(self.secrets.hide(&format!("✗ The driver does not start: {error}")));
                tokio::select! {
                    () = self.closing.cancelled() => {}
                    () = tokio::time::sleep(RESTART.exact_pause(*crashes)) => {}
                }
            }
        }
    }

    async fn follow_sources(self: Arc<Self>, mut watch: Watch) {
        loop {
            let changes = tokio::select! {
                () = self.closing.cancelled() => return,
                changes = watch.changed() => changes,
            };
            if !changes.is_empty() {
                let _ =
                    self.orders.send(Order::Rebuild(changes.into_iter().map(|change| change.path).collect()));
            }
        }
    }

    /// Makes what was observed readable, and publishes it.
    async fn record(self: Arc<Self>, mut work: mpsc::UnboundedReceiver<Work>) {
        loop {
            let work = tokio::select! {
                biased;
                work = work.recv() => work,
                () = self.closing.cancelled() => None,
            };
            match work {
                Some(Work::Record(observation)) => {
                    let record = self.readable(*observation);
                    self.events.publish(Event::Call(record));
                }
                Some(Work::Flush(done)) => drop(done.send(())),
                None => return,
            }
        }
    }

    fn readable(&self, observation: Observation) -> CallRecord {
        let (request, response) =
            to_json(&observation.method, &observation.request, observation.response.as_ref());
        let range = observation.observed.as_ref().map_or((0, 0), |observed| observed.log);
        let log = self.process.log().map(|log| log_part(log, range)).unwrap_or_default();
        let mut broken = observation.broken;
        if self.secrets.is_in(&log)
            && let Some(rule) = rule("secret.log")
        {
            broken.push(BrokenRule::new(rule, "the driver printed a secret into its log".to_owned()));
        }
        for broken in &mut broken {
            broken.found = self.secrets.hide(&broken.found);
        }
        let effects =
            observation.observed.map(|observed| self.observer.effects(observed)).unwrap_or_default();
        CallRecord {
            number: observation.number,
            time: observation.time,
            method: observation.method,
            code: observation.code.to_owned(),
            message: self.secrets.hide(&observation.message),
            duration_us: u64::try_from(observation.duration.as_micros()).unwrap_or(u64::MAX),
            request: self.secrets.hide_in(request),
            response: self.secrets.hide_in(response),
            effects: effects.iter().map(|line| self.secrets.hide(line)).collect(),
            broken,
            faults: observation.faults,
            log: log.lines().map(|line| self.secrets.hide(line)).collect(),
        }
    }
}

/// The rule that a call without an answer breaks.
pub(crate) fn unanswered(method: &str, why: &str) -> Option<BrokenRule> {
    let found = format!("{} was not answered: {why}", short(method));
    rule("call.answers").map(|rule| BrokenRule::new(rule, found))
}

/// A rule of `berth certify`.
fn rule(id: &str) -> Option<&'static Rule> {
    RULES
        .iter()
        .copied()
        .find(|rule| rule.id == id)
        .or_else(|| berth_certify::rules().into_iter().find(|rule| rule.id == id))
}

/// Runs the command that builds the driver; the end of its output is the error.
async fn build(command: &str) -> Result<(), String> {
    let words = ["-c".to_owned(), command.to_owned()];
    let run =
        move || berth_host::exec::run_foreign(Path::new("/bin/sh"), &words, BUILD_TIMEOUT, BUILD_OUTPUT);
    let ended = tokio::task::spawn_blocking(run).await.map_err(|error| error.to_string())?;
    let ended = ended.map_err(|error| error.to_string())?;
    if ended.status == Ok(0) {
        return Ok(());
    }
    let output = String::from_utf8_lossy(&ended.output).into_owned();
    Err(format!("`{command}` failed:\n{}", last_lines(&output, BUILD_LINES)))
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn log_end(log: &Path, lines: usize) -> String {
    last_lines(&std::fs::read_to_string(log).unwrap_or_default(), lines)
}

/// A part of the log, by its bytes.
fn log_part(log: &Path, (from, to): (u64, u64)) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take((to - from).min(LOG_LINES)).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    if to > from { read().unwrap_or_default() } else { String::new() }
}

/// The socket of an endpoint as an argument of a person: TCP with TLS cannot be read by a proxy.
pub fn check_endpoint(endpoint: &Endpoint) -> Result<(), String> {
    match endpoint {
        Endpoint::Tcp { tls: Some(_), .. } => {
            Err("a connection with TLS cannot be watched; give a Unix socket".to_owned())
        }
        _ => Ok(()),
    }
}
