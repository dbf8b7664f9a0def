//! Probes of running containers: startup, liveness and readiness, with the kubelet's rules.
//!
//! Each run of a container that has probes gets one task. Until its startup probe has succeeded, neither of the others
//! runs and the container counts as not started. A container with a readiness probe is not ready before that succeeds;
//! one whose startup or liveness probe fails is stopped, and its restart policy decides what follows. A result counts
//! once it came as often in a row as its threshold says. What a probe finds goes to the pod's worker, which decides.
//!
//! Events: `Unhealthy`.

use std::sync::Arc;
use std::time::Duration;

use berth_kube::Severity;
use berth_runtime::{ContainerId, ExecCall, ExecOutput, State};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, Pod, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::{Interval, MissedTickBehavior, interval_at, timeout};

use super::Pods;
use super::decide::Health;
use crate::plugins::expand;

/// How much of what a command prints goes into an event.
const LONGEST_OUTPUT: usize = 10 << 10;
/// How much of an answer is read to find its status.
const LONGEST_STATUS_LINE: usize = 4 << 10;
/// How long the last output of a command is waited for that has ended, as another process may keep it open.
const LAST_OUTPUT: Duration = Duration::from_millis(100);

/// A kind of probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Startup,
    Liveness,
    Readiness,
}

impl Kind {
    pub(super) fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Self::Startup => container.startup_probe.as_ref(),
            Self::Liveness => container.liveness_probe.as_ref(),
            Self::Readiness => container.readiness_probe.as_ref(),
        }
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// What the probes of one run have found so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Findings {
    pub(super) health: Health,
    /// The probe because of which the container must be stopped.
    pub(super) failed: Option<Kind>,
}

/// The probes of one run of a container, which end when this is dropped.
#[derive(Debug)]
pub(super) struct Probes {
    findings: Arc<Mutex<Findings>>,
    task: AbortHandle,
}

impl Drop for Probes {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Probes {
    /// Begins to probe a run that was started at this time and is as healthy as `health` says.
    pub(super) fn start(
        pods: &Arc<Pods>,
        pod: &Arc<Pod>,
        container: &Container,
        id: &ContainerId,
        started: Timestamp,
        health: Health,
    ) -> Self {
        let findings = Arc::new(Mutex::new(Findings { health, failed: None }));
        let prober = Prober {
            pods: pods.clone(),
            pod: pod.clone(),
            container: container.clone(),
            id: id.clone(),
            started,
            findings: findings.clone(),
        };
        let shutdown = pods.options.cluster.shutdown().clone();
        let task = tokio::spawn(async move {
            shutdown.run_until_cancelled(prober.run()).await;
        });
        Self { findings, task: task.abort_handle() }
    }

    /// Returns what was found so far.
    pub(super) fn findings(&self) -> Findings {
        *self.findings.lock()
    }
}

/// Returns whether a container has any probe.
pub(super) fn has_probes(container: &Container) -> bool {
    [Kind::Startup, Kind::Liveness, Kind::Readiness].into_iter().any(|kind| kind.of(container).is_some())
}

/// Returns the health of a container that was just started.
pub(super) fn initial_health(container: &Container) -> Health {
    let started = container.startup_probe.is_none();
    Health { started, ready: started && container.readiness_probe.is_none() }
}

/// Returns the health of a run that an earlier life of this process started, as the pod's status has it.
pub(super) fn known_health(pod: &Pod, container: &Container, attempt: u32) -> Health {
    let status = pod.status.as_ref();
    let init = status.and_then(|status| status.init_container_statuses.as_ref()).into_iter().flatten();
    let main = status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten();
    let known = init.chain(main).find(|status| status.name == container.name).filter(|status| {
        let running = status.state.as_ref().is_some_and(|state| state.running.is_some());
        running && u32::try_from(status.restart_count) == Ok(attempt)
    });
    known.map_or_else(
        || initial_health(container),
        |status| Health { started: status.started == Some(true), ready: status.ready },
    )
}

/// Returns why a probe of a container cannot be run by this node.
pub(super) fn refuse(container: &Container) -> Option<String> {
    [Kind::Startup, Kind::Liveness, Kind::Readiness].into_iter().find_map(|kind| {
        let probe = kind.of(container)?;
        let https = probe.http_get.as_ref().is_some_and(|get| get.scheme.as_deref() == Some("HTTPS"));
        let what = if https {
            "httpGet with the scheme HTTPS"
        } else if probe.grpc.is_some() {
            "grpc"
        } else {
            return None;
        };
        let field = kind.as_str().to_lowercase();
        Some(format!(
            "container {}: {what} is not supported in {field}Probe: use exec, httpGet or tcpSocket",
            container.name
        ))
    })
}

/// Counts equal results in a row.
#[derive(Debug, Default)]
struct Streak {
    is_success: bool,
    length: u32,
}

impl Streak {
    /// Adds a result; whether it came so often in a row that it counts.
    fn reaches_threshold(&mut self, is_success: bool, probe: &Probe) -> bool {
        self.length = if self.length > 0 && self.is_success == is_success { self.length + 1 } else { 1 };
        self.is_success = is_success;
        let threshold = if is_success {
            probe.success_threshold.unwrap_or(1)
        } else {
            probe.failure_threshold.unwrap_or(3)
        };
        self.length >= u32::try_from(threshold).unwrap_or(1)
    }
}

struct Prober {
    pods: Arc<Pods>,
    pod: Arc<Pod>,
    container: Container,
    id: ContainerId,
    started: Timestamp,
    findings: Arc<Mutex<Findings>>,
}

impl Prober {
    async fn run(&self) {
        if let Some(probe) = &self.container.startup_probe
            && !self.findings.lock().health.started
        {
            if !self.result(Kind::Startup, probe, &mut self.ticks(probe)).await {
                self.change(|findings| findings.failed = Some(Kind::Startup));
                return;
            }
            let ready = self.container.readiness_probe.is_none();
            self.change(|findings| findings.health = Health { started: true, ready });
        }
        let liveness = async {
            let Some(probe) = &self.container.liveness_probe else { return };
            let mut ticks = self.ticks(probe);
            while self.result(Kind::Liveness, probe, &mut ticks).await {}
            self.change(|findings| findings.failed = Some(Kind::Liveness));
        };
        let readiness = async {
            let Some(probe) = &self.container.readiness_probe else { return };
            let mut ticks = self.ticks(probe);
            loop {
                let ready = self.result(Kind::Readiness, probe, &mut ticks).await;
                self.change(|findings| findings.health.ready = ready);
            }
        };
        tokio::join!(liveness, readiness);
    }

    /// The times at which a probe runs.
    fn ticks(&self, probe: &Probe) -> Interval {
        let due = self.started + seconds(probe.initial_delay_seconds, 0, 0);
        let delay = Duration::try_from(due.duration_since(Timestamp::now())).unwrap_or_default();
        let first = tokio::time::Instant::now() + delay;
        let mut ticks = interval_at(first, seconds(probe.period_seconds, 10, 1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }

    /// Probes until a result counts.
    async fn result(&self, kind: Kind, probe: &Probe, ticks: &mut Interval) -> bool {
        let mut streak = Streak::default();
        loop {
            ticks.tick().await;
            let checked = self.check(probe).await;
            if let Err(problem) = &checked {
                if !matches!(self.pods.options.runtime.state(&self.id), Some(State::Running { .. })) {
                    // It has ended by itself: nothing that a probe could say counts any more.
                    return std::future::pending().await;
                }
                let message = format!("{} probe failed: {problem}", kind.as_str());
                self.pods.emit(&self.pod, &self.container.name, Severity::Warning, "Unhealthy", message);
            }
            if streak.reaches_threshold(checked.is_ok(), probe) {
                return checked.is_ok();
            }
        }
    }

    fn change(&self, change: impl FnOnce(&mut Findings)) {
        let changed = {
            let mut findings = self.findings.lock();
            let before = *findings;
            change(&mut findings);
            *findings != before
        };
        if changed {
            self.pods.options.queue.add(self.id.pod_uid.clone());
        }
    }

    async fn check(&self, probe: &Probe) -> Result<(), String> {
        let at_most = seconds(probe.timeout_seconds, 1, 1);
        let check = async {
            if let Some(exec) = &probe.exec {
                self.exec(exec.command.as_deref().unwrap_or_default()).await
            } else if let Some(get) = &probe.http_get {
                self.http_get(get).await
            } else if let Some(socket) = &probe.tcp_socket {
                let (host, port) = (self.host(socket.host.as_ref()), self.port(&socket.port)?);
                let connected = TcpStream::connect((host.as_str(), port)).await;
                connected.map(drop).map_err(|error| format!("dial tcp {host}:{port}: {error}"))
            } else {
                Err("the probe names no action".to_owned())
            }
        };
        let late = |_| Err(format!("timed out after {}s", at_most.as_secs()));
        timeout(at_most, check).await.unwrap_or_else(late)
    }

    async fn exec(&self, command: &[String]) -> Result<(), String> {
        let fixed = |name: &str| {
            let all = self.container.env.iter().flatten();
            all.into_iter().rev().find(|variable| variable.name == name)?.value.as_deref()
        };
        let command = command.iter().map(|word| expand(word, fixed)).collect();
        let call = ExecCall { command, tty: false, stdin: false, size: None };
        let runtime = &self.pods.options.runtime;
        let mut exec = runtime.exec(&self.id, call).await.map_err(|error| error.sentence())?;
        let output = Mutex::new(Vec::new());
        let (stdout, stderr) = (exec.stdout.take(), exec.stderr.take());
        let code = {
            let mut collected = std::pin::pin!(async {
                tokio::join!(collect(stdout, &output), collect(stderr, &output));
            });
            tokio::select! {
                code = exec.wait() => {
                    // An elapsed time only means that another process keeps the output open.
                    let _ = timeout(LAST_OUTPUT, &mut collected).await;
                    code
                }
                () = &mut collected => exec.wait().await,
            }
        };
        if code == 0 {
            return Ok(());
        }
        let output = output.into_inner();
        let output = String::from_utf8_lossy(&output);
        let output = output.trim_end();
        Err(if output.is_empty() { format!("the command exited with {code}") } else { output.to_owned() })
    }

    async fn http_get(&self, get: &HTTPGetAction) -> Result<(), String> {
        let (host, port) = (self.host(get.host.as_ref()), self.port(&get.port)?);
        let named = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let path = get.path.as_deref().unwrap_or_default();
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let mut headers = vec![
            ("Host".to_owned(), named.clone()),
            ("User-Agent".to_owned(), "kube-probe/1.36".to_owned()),
            ("Accept".to_owned(), "*/*".to_owned()),
        ];
        for header in get.http_headers.iter().flatten() {
            headers.retain(|(name, _)| !name.eq_ignore_ascii_case(&header.name));
            headers.push((header.name.clone(), header.value.clone()));
        }
        headers.push(("Connection".to_owned(), "close".to_owned()));
        let lines: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let request = format!("GET {path} HTTP/1.1\r\n{}\r\n", lines.concat());
        let ask = async {
            let mut stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.write_all(request.as_bytes()).await?;
            let mut answer = Vec::new();
            while !answer.contains(&b'\n') && answer.len() < LONGEST_STATUS_LINE {
                if stream.read_buf(&mut answer).await? == 0 {
                    break;
                }
            }
            Ok::<_, std::io::Error>(answer)
        };
        let answer = ask.await.map_err(|error| format!("Get \"http://{named}{path}\": {error}"))?;
        match status_code(&answer) {
            Some(200..400) => Ok(()),
            Some(code) => Err(format!("HTTP probe failed with statuscode: {code}")),
            None => Err(format!("Get \"http://{named}{path}\": the answer is not HTTP/1.1")),
        }
    }

    fn host(&self, named: Option<&String>) -> String {
        let named = named.filter(|host| !host.is_empty());
        named.cloned().unwrap_or_else(|| self.pods.options.address.to_string())
    }

    fn port(&self, port: &IntOrString) -> Result<u16, String> {
        let number = match port {
            IntOrString::Int(number) => Some(*number),
            IntOrString::String(name) => {
                let ports = self.container.ports.iter().flatten();
                let mut named = ports.filter(|port| port.name.as_ref() == Some(name));
                named.next().map(|port| port.container_port).or_else(|| name.parse().ok())
            }
        };
        let valid = number.and_then(|number| u16::try_from(number).ok()).filter(|number| *number > 0);
        valid.ok_or_else(|| format!("the container has no port {port:?}"))
    }
}

/// Reads to the end, so that the writer does not have to wait, and keeps the beginning.
async fn collect(output: Option<ExecOutput>, kept: &Mutex<Vec<u8>>) {
    let Some(mut output) = output else { return };
    let mut buffer = vec![0; 4096];
    while let Ok(length @ 1..) = output.read(&mut buffer).await {
        let mut kept = kept.lock();
        let room = LONGEST_OUTPUT.saturating_sub(kept.len());
        kept.extend_from_slice(&buffer[..length.min(room)]);
    }
}

/// The status of an HTTP answer.
fn status_code(answer: &[u8]) -> Option<u16> {
    let line = answer.split(|byte| *byte == b'\n').next()?;
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    words.next()?.parse().ok()
}

fn seconds(given: Option<i32>, usual: u64, least: u64) -> Duration {
    let given = given.and_then(|seconds| u64::try_from(seconds).ok());
    Duration::from_secs(given.unwrap_or(usual).max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_counts_when_it_came_as_often_in_a_row_as_its_threshold() {
        let probe = |success, failure| Probe {
            success_threshold: Some(success),
            failure_threshold: Some(failure),
            ..Probe::default()
        };
        for (probe, results, expected) in [
            (probe(1, 3), "FFF", "--F"),
            (probe(1, 3), "FFSFF", "--S--"),
            (probe(2, 1), "SFSS", "-F-S"),
            (Probe::default(), "SFFF", "S--F"),
        ] {
            let mut streak = Streak::default();
            let counted: String = results
                .chars()
                .map(|result| if streak.reaches_threshold(result == 'S', &probe) { result } else { '-' })
                .collect();
            assert_eq!(counted, expected, "{results}");
        }
    }

    #[test]
    fn the_status_of_an_answer_is_its_second_word() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\n", Some(200)),
            ("HTTP/1.0 503\r\nA: b\r\n", Some(503)),
            ("HTTP/1.1 nonsense\r\n", None),
            ("SSH-2.0-OpenSSH\r\n", None),
            ("", None),
        ] {
            assert_eq!(status_code(answer.as_bytes()), expected, "{answer:?}");
        }
    }

    #[test]
    fn what_no_probe_has_confirmed_yet_is_neither_started_nor_ready() {
        let (some, none) = (Some(Probe::default()), None);
        for (startup, readiness, started, ready) in [
            (none.clone(), none.clone(), true, true),
            (none.clone(), some.clone(), true, false),
            (some.clone(), none.clone(), false, false),
            (some.clone(), some.clone(), false, false),
        ] {
            let container = Container {
                startup_probe: startup,
                readiness_probe: readiness,
                liveness_probe: some.clone(),
                ..Container::default()
            };
            assert_eq!(initial_health(&container), Health { started, ready });
        }
    }
}
