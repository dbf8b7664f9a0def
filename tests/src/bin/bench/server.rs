//! A driver as a child process, Berth's or the other, with what its process costs.

use std::{
    env, fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use berth_e2e::{
    Csi,
    driver::{PATIENCE, binary},
    machine::command,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::table::Quantity;

/// The unit of CPU time in `/proc`: Linux promises 100 to user space, whatever its own clock does.
const TICK: Duration = Duration::from_millis(10);

/// Which driver is measured.
#[derive(Debug, Clone)]
pub(crate) enum Subject {
    /// `berth driver local` with directory volumes.
    Berth,
    /// `hostpathplugin`, at this path.
    HostPath(PathBuf),
}

/// A running driver; killed when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    log: PathBuf,
    /// Clients of it, over one connection, as a sidecar has.
    pub(crate) csi: Csi,
    /// From exec to the first answer that it is ready.
    pub(crate) start: Duration,
}

impl Subject {
    /// The `hostpathplugin` that `HOSTPATH_BIN` names, if any.
    pub(crate) fn host_path() -> Option<Self> {
        env::var_os("HOSTPATH_BIN").map(|path| Self::HostPath(path.into()))
    }

    fn program(&self) -> Result<PathBuf> {
        match self {
            Self::Berth => binary(),
            Self::HostPath(path) => Ok(path.clone()),
        }
    }

    fn arguments(&self, endpoint: &str, data: &Path) -> Vec<String> {
        let data = data.display().to_string();
        let words: &[&str] = match self {
            Self::Berth => &[
                "driver",
                "local",
                "--node-id",
                "node-1",
                "--kind",
                "dir",
                "--overcommit",
                "1000",
                "--endpoint",
                endpoint,
                "--data-dir",
                &data,
            ],
            Self::HostPath(_) => &["--nodeid", "node-1", "--endpoint", endpoint, "--statedir", &data],
        };
        words.iter().map(ToString::to_string).collect()
    }
}

impl Server {
    /// Starts the driver with its socket and log in `dir` and waits until it is ready.
    pub(crate) async fn start(subject: &Subject, dir: &Path, data: &Path) -> Result<Self> {
        let (socket, log) = (dir.join("csi.sock"), dir.join("driver.log"));
        let endpoint = format!("unix://{}", socket.display());
        let out = fs::File::options().create(true).append(true).open(&log).context("open the log")?;
        let csi = Csi::connect(&endpoint)?;
        let mut driver = command(subject.program()?);
        driver.args(subject.arguments(&endpoint, data));
        driver.stdin(Stdio::null()).stdout(Stdio::null()).stderr(out);
        let began = Instant::now();
        let child = driver.spawn().context("start the driver")?;
        let mut server = Self { child, log, csi, start: Duration::ZERO };
        loop {
            if let Some(status) = server.child.try_wait()? {
                bail!("the driver ended with {status} instead of serving; {}", server.log_tail());
            }
            // A gRPC channel that was refused waits for a while before it tries again; a socket does not.
            if UnixStream::connect(&socket).is_ok() && server.csi.probe().await.is_ok_and(|ready| ready) {
                server.start = began.elapsed();
                return Ok(server);
            }
            ensure!(began.elapsed() < PATIENCE, "the driver does not become ready; {}", server.log_tail());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Asks the driver to stop and waits for it.
    pub(crate) async fn stop(mut self) -> Result<()> {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .context("a child has a process id")?;
        kill_process(pid, Signal::TERM).context("stop the driver")?;
        let asked = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(asked.elapsed() < PATIENCE, "the driver does not stop; {}", self.log_tail());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// What it has in memory.
    pub(crate) fn resident(&self) -> Result<Quantity> {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.child.id())).context("read its status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("it has no memory")?;
        let kibibytes: u32 =
            line.trim().trim_end_matches("kB").trim_end().parse().context("read its memory")?;
        Ok(Quantity::Megabytes(f64::from(kibibytes) * 1024.0 / 1e6))
    }

    /// The CPU time it has used so far, in user and kernel mode.
    pub(crate) fn cpu(&self) -> Result<Duration> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).context("read its times")?;
        // The name in parentheses may hold anything; utime and stime are the 12th and 13th words after it.
        let (_, rest) = stat.rsplit_once(')').context("its times have an unknown form")?;
        let words = rest.split_whitespace().skip(11).take(2);
        let ticks: u32 = words.map(|word| word.parse::<u32>().unwrap_or_default()).sum();
        Ok(TICK * ticks)
    }

    fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        format!("the end of its log:\n{}", lines[lines.len().saturating_sub(20)..].join("\n"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
