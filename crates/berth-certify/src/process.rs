//! The driver as a process: starting and killing it, and inspecting it from outside.
//!
//! A driver that is reached by its socket is found by the socket's peer, so that one in a container needs no hooks: its mounts are
//! in `/proc/PID/mountinfo`, its files below `/proc/PID/root`.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use berth_csi::{Client, Endpoint, v1};
use berth_host::mount::{self, MountInfo};
use berth_host::service::{Service, Start};
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

/// How long a driver may take until it answers after its start.
pub const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a driver that starts is asked whether it answers.
const START_PAUSE: Duration = Duration::from_millis(10);
/// How long one question to a driver that starts may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// How a driver is reached.
#[derive(Debug, Clone)]
pub enum Launch {
    /// It runs already and listens there.
    Endpoint(Endpoint),
    /// It is started, with `CSI_ENDPOINT` in its environment, and can be killed and started again.
    Program(Start),
}

/// A driver that was started here, or found behind a socket.
#[derive(Debug)]
pub struct DriverProcess {
    endpoint: Endpoint,
    start: Option<Start>,
    log: Option<PathBuf>,
    service: Mutex<Option<Service>>,
    peer: Mutex<Option<u32>>,
}

impl DriverProcess {
    /// Starts the driver, or finds the one that runs, and waits until it answers.
    ///
    /// In the arguments of a program `{endpoint}`, `{node}` and `{dir}` are replaced; its socket and its log lie in `directory`.
    pub async fn open(launch: &Launch, directory: &Path, node: &str) -> io::Result<Self> {
        let process = match launch {
            Launch::Endpoint(endpoint) => Self {
                endpoint: endpoint.clone(),
                start: None,
                log: None,
                service: Mutex::default(),
                peer: Mutex::default(),
            },
            Launch::Program(start) => {
                let endpoint = Endpoint::Unix(directory.join("csi.sock"));
                Self {
                    start: Some(prepared(start, &endpoint, directory, node)),
                    endpoint,
                    log: Some(directory.join("driver.log")),
                    service: Mutex::default(),
                    peer: Mutex::default(),
                }
            }
        };
        process.run().await?;
        Ok(process)
    }

    /// The endpoint that the driver serves.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether the driver was started here, so that it can be killed.
    pub fn is_own(&self) -> bool {
        self.start.is_some()
    }

    /// The file with what the driver printed, if it was started here.
    pub fn log(&self) -> Option<&Path> {
        self.log.as_deref()
    }

    /// Starts the program if it does not run, and waits until it answers.
    pub async fn run(&self) -> io::Result<()> {
        if let (Some(start), Some(log)) = (&self.start, &self.log) {
            let ended = self.service.lock().as_ref().is_none_or(|service| service.ended().is_some());
            if ended {
                let service = Service::start(start.clone(), log).map_err(io::Error::other)?;
                *self.service.lock() = Some(service);
            }
        }
        let begun = Instant::now();
        loop {
            // A connection of its own: one that is refused makes the channel of others wait.
            let asked = Client::connect(&self.endpoint).call(PROBE_TIMEOUT, v1::ProbeRequest {}).await;
            let error = match asked {
                Ok(answer) if answer.ready != Some(false) => break,
                Ok(_) => "Probe answers that it is not ready".to_owned(),
                // A driver without a dependency answers FAILED_PRECONDITION; it is there.
                Err(status) if !berth_csi::from_transport(&status) && begun.elapsed() > PROBE_TIMEOUT => {
                    break;
                }
                Err(status) => status.message().to_owned(),
            };
            if let Some(status) = self.service.lock().as_ref().and_then(Service::ended) {
                return Err(io::Error::other(format!("the driver ended ({status}){}", self.last_words())));
            }
            if begun.elapsed() > START_TIMEOUT {
                return Err(io::Error::other(format!(
                    "the driver does not answer on {} within {START_TIMEOUT:?}: {error}{}",
                    self.endpoint,
                    self.last_words()
                )));
            }
            tokio::time::sleep(START_PAUSE).await;
        }
        *self.peer.lock() = peer_of(&self.endpoint).await;
        Ok(())
    }

    /// Returns how the program ended, when it has; never for a driver that was not started here.
    pub async fn ended(&self) -> ExitStatus {
        loop {
            let running = self.service.lock().as_ref().map(|service| (service.pid(), service.ended()));
            let pid = match running {
                Some((_, Some(status))) => return status,
                Some((pid, None)) => pid,
                None => std::future::pending().await,
            };
            let exit = i32::try_from(pid).ok().and_then(Pid::from_raw);
            let exit = exit.and_then(|pid| pidfd_open(pid, PidfdFlags::NONBLOCK).ok());
            #[expect(
                deprecated,
                reason = "its successor is unsafe for types that could give up their descriptor; OwnedFd cannot"
            )]
            if let Some(Ok(exit)) = exit.map(AsyncFd::new) {
                let _ = exit.readable().await;
            }
            // The thread that waits for the process learns its status a moment later.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Kills the program with SIGKILL, also one that a script started in its place; does nothing to a driver that was not started here.
    pub fn kill(&self) -> io::Result<()> {
        let service = self.service.lock();
        let Some(service) = service.as_ref().filter(|service| service.ended().is_none()) else {
            return Ok(());
        };
        let peer = self.peer.lock().filter(|pid| *pid != service.pid());
        if let Some(pid) = peer.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        service.kill().map_err(io::Error::other)
    }

    /// Ends the program, if it was started here.
    pub fn stop(&self) {
        if let Some(service) = self.service.lock().take() {
            service.stop(Duration::from_secs(10));
        }
    }

    /// The process id of the driver, if it is on this machine.
    pub fn pid(&self) -> Option<u32> {
        let own = self.service.lock().as_ref().filter(|service| service.ended().is_none()).map(Service::pid);
        // The program may be a script that starts the driver.
        self.peer.lock().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()).or(own)
    }

    /// Every mount that the driver sees.
    pub fn mounts(&self) -> Option<Vec<MountInfo>> {
        mount::mounts_of(self.pid()?).ok()
    }

    /// Where the driver's root directory can be seen.
    pub fn root(&self) -> Option<PathBuf> {
        let root = PathBuf::from(format!("/proc/{}/root", self.pid()?));
        fs::metadata(&root).is_ok().then_some(root)
    }

    /// How many files the driver has open.
    pub fn open_files(&self) -> Option<usize> {
        Some(fs::read_dir(format!("/proc/{}/fd", self.pid()?)).ok()?.count())
    }

    /// The processes that the driver started, and those that they started.
    pub fn descendants(&self) -> BTreeSet<u32> {
        let mut found = BTreeSet::new();
        let Some(pid) = self.pid() else { return found };
        let mut parents = vec![pid];
        let processes: Vec<(u32, u32)> = processes();
        while let Some(parent) = parents.pop() {
            for (child, _) in processes.iter().filter(|(_, of)| *of == parent) {
                if found.insert(*child) {
                    parents.push(*child);
                }
            }
        }
        found
    }

    /// The command lines of the driver and of what it started that hold a text.
    pub fn command_lines_with(&self, text: &str) -> Vec<String> {
        let own = self.pid().into_iter();
        let lines = own.chain(self.descendants()).filter_map(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            Some(String::from_utf8_lossy(&line).replace('\0', " "))
        });
        lines.filter(|line| line.contains(text)).collect()
    }

    /// The end of the log, for a message.
    fn last_words(&self) -> String {
        let text = self.log.as_ref().and_then(|log| fs::read_to_string(log).ok()).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        match lines.as_slice() {
            [] => String::new(),
            [.., _] => format!("; its log ends with:\n{}", lines[lines.len().saturating_sub(5)..].join("\n")),
        }
    }
}

/// The process that listens on a Unix socket.
async fn peer_of(endpoint: &Endpoint) -> Option<u32> {
    let Endpoint::Unix(path) = endpoint else { return None };
    let stream = UnixStream::connect(path).await.ok()?;
    u32::try_from(stream.peer_cred().ok()?.pid()?).ok().filter(|pid| *pid != 0)
}

/// Every process and its parent.
fn processes() -> Vec<(u32, u32)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let parent = |pid: u32| -> Option<(u32, u32)> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name in parentheses may hold anything.
        let (_, rest) = stat.rsplit_once(')')?;
        Some((pid, rest.split_whitespace().nth(1)?.parse().ok()?))
    };
    entries.filter_map(|entry| parent(entry.file_name().to_str()?.parse().ok()?)).collect()
}

fn prepared(start: &Start, endpoint: &Endpoint, directory: &Path, node: &str) -> Start {
    let endpoint = endpoint.to_string();
    let directory = directory.display().to_string();
    let filled = |argument: &OsString| match argument.to_str() {
        Some(text) => {
            text.replace("{endpoint}", &endpoint).replace("{node}", node).replace("{dir}", &directory).into()
        }
        None => argument.clone(),
    };
    let mut environment: Vec<(OsString, OsString)> = [("CSI_ENDPOINT", endpoint.as_str()), ("NODE_ID", node)]
        .map(|(name, value)| (name.into(), value.into()))
        .into();
    environment.extend(start.environment.iter().map(|(name, value)| (name.clone(), filled(value))));
    Start { program: filled(&start.program), args: start.args.iter().map(filled).collect(), environment }
}
