//! Any program as a child process of a test, with its output in a file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal};

use crate::machine;

/// How long anything may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(60);
/// What must not come from the machine that the tests run on.
const FOREIGN: [&str; 5] = ["KUBECONFIG", "POD_NAME", "POD_NAMESPACE", "BERTH_LOG", "CSI_ENDPOINT"];

/// A program of a test; killed when dropped, and its log shown unless it was stopped well.
#[derive(Debug)]
pub struct Program {
    child: Child,
    log: PathBuf,
    /// How long the log was before.
    begin: usize,
    stopped_well: bool,
}

impl Program {
    /// Starts a program with its output appended to `log`.
    pub fn start(program: &Path, args: &[&str], environment: &[(&str, &str)], log: PathBuf) -> Result<Self> {
        let file = fs::File::options().create(true).append(true).open(&log).context("open the log")?;
        let begin = usize::try_from(file.metadata()?.len())?;
        let mut command = machine::command(program);
        command.args(args).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        for name in FOREIGN {
            command.env_remove(name);
        }
        command.envs(environment.iter().copied());
        let child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        Ok(Self { child, log, begin, stopped_well: false })
    }

    /// All it has written so far.
    pub fn log(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(log.get(self.begin..).unwrap_or_default()).into_owned()
    }

    /// The process id of the program.
    pub fn pid(&self) -> Pid {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a child has an id")
    }

    /// What its log is named by.
    pub fn name(&self) -> String {
        self.log.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// How many bytes of memory it holds.
    pub fn resident(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("it has ended")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
    }

    /// Waits until the log holds this, and gives the line.
    pub async fn says(&mut self, text: &str) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(line) = self.log().lines().find(|line| line.contains(text)) {
                return Ok(line.to_owned());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended with {status} without saying {text:?}");
            }
            ensure!(Instant::now() < deadline, "it does not say {text:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Where it serves HTTP.
    pub async fn http(&mut self) -> Result<String> {
        let line = self.says("serving HTTP").await?;
        let address = line.split_once("address=").and_then(|(_, rest)| rest.split_whitespace().next());
        Ok(address.with_context(|| format!("no address in {line:?}"))?.to_owned())
    }

    /// Kills it as a power cut would.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        self.stopped_well = true;
        Ok(())
    }

    /// Asks it to stop, and checks that it ends well.
    pub async fn stop(mut self) -> Result<()> {
        rustix::process::kill_process(self.pid(), Signal::TERM)?;
        let status = self.ended().await?;
        self.stopped_well = status.success();
        ensure!(status.success(), "it ended with {status}");
        Ok(())
    }

    async fn ended(&mut self) -> Result<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "it does not end");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if !self.stopped_well {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(80)..].join("\n");
            eprintln!("--- the end of {}:\n{end}", self.log.display());
        }
    }
}
