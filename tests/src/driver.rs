//! The real binary as a child process.

use std::{
    env, fs,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{csi::Csi, machine::command};

/// How long a start, a stop or a background task may take before the test gives up.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How a driver is started.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Further words of the command line.
    pub args: Vec<String>,
}

/// A running `berth driver local`; killed when dropped, and its log shown unless it was stopped well before.
#[derive(Debug)]
pub struct Driver {
    child: Child,
    dir: PathBuf,
    data: PathBuf,
    settings: Settings,
    stopped_well: bool,
}

impl Settings {
    /// The given words in addition to endpoint, node and data directory.
    pub fn with(args: &[&str]) -> Self {
        Self { args: args.iter().map(ToString::to_string).collect() }
    }
}

impl Driver {
    /// Starts the driver with its socket and log in `dir` and waits until it answers.
    pub async fn start(dir: &Path, data: &Path, settings: Settings) -> Result<Self> {
        let child = spawn(dir, data, &settings)?;
        let mut driver = Self { child, dir: dir.into(), data: data.into(), settings, stopped_well: false };
        driver.wait_until_ready().await?;
        Ok(driver)
    }

    /// Kills the driver as a power cut would, without a chance to tidy up.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("kill the driver")?;
        let status = self.child.wait()?;
        ensure!(
            status.signal() == Some(9),
            "the driver had ended by itself with {status}; {}",
            self.log_tail()
        );
        Ok(())
    }

    /// Asks the driver to stop and returns how it ended.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        rustix::process::kill_process(
            pid.context("a child has a process id")?,
            rustix::process::Signal::TERM,
        )?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                self.stopped_well = status.success();
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "the driver does not stop; {}", self.log_tail());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts it again on the same data directory, after it was killed or stopped.
    pub async fn restart(&mut self) -> Result<()> {
        self.child = spawn(&self.dir, &self.data, &self.settings)?;
        self.stopped_well = false;
        self.wait_until_ready().await
    }

    /// The address of its socket.
    pub fn endpoint(&self) -> String {
        endpoint(&self.dir)
    }

    /// The driver's data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// The driver's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A new connection to it.
    pub fn connect(&self) -> Result<Csi> {
        Csi::connect(&self.endpoint())
    }

    /// All it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("driver.log")).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        format!("the end of its log:\n{}", lines[lines.len().saturating_sub(60)..].join("\n"))
    }

    async fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut pause = Duration::from_millis(2);
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("the driver ended with {status} instead of serving; {}", self.log_tail());
            }
            // A connection that was refused once waits before it tries again, so each attempt has its own.
            match self.connect()?.probe().await {
                Ok(true) => return Ok(()),
                Err(status) if Instant::now() > deadline => {
                    bail!("the driver does not answer: {status}; {}", self.log_tail())
                }
                Ok(false) | Err(_) => {}
            }
            ensure!(Instant::now() < deadline, "the driver does not become ready; {}", self.log_tail());
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A test that fails returns early, without stopping the driver; its output is shown only then.
        if !self.stopped_well {
            eprintln!("driver on {}: {}", self.data.display(), self.log_tail());
        }
    }
}

/// The binary under test: `BERTH_BIN`, else the one cargo built beside this test.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = env::var_os("BERTH_BIN") {
        return Ok(path.into());
    }
    built("berth")
}

/// A program that cargo built beside this test.
pub fn built(name: &str) -> Result<PathBuf> {
    // target/<profile>/deps/<test> and target/<profile>/<bin>
    let own = env::current_exe().context("find the test's own executable")?;
    let beside = own.ancestors().skip(1).take(2).map(|dir| dir.join(name)).find(|path| path.is_file());
    beside.with_context(|| {
        format!("there is no {name} near {}: build it first with `cargo build -p {name}`", own.display())
    })
}

fn endpoint(dir: &Path) -> String {
    format!("unix://{}", dir.join("csi.sock").display())
}

fn spawn(dir: &Path, data: &Path, settings: &Settings) -> Result<Child> {
    let log =
        fs::File::options().create(true).append(true).open(dir.join("driver.log")).context("open the log")?;
    let mut driver = command(binary()?);
    driver.args(["driver", "local", "--node-id", "node-1", "--endpoint", &endpoint(dir), "--data-dir"]);
    driver.arg(data).args(&settings.args);
    driver.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    driver.spawn().context("start the driver")
}
