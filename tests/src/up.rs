//! A whole machine: `berth up` as a child process, used with kubectl as a person would.

use std::{
    fs,
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, ExitStatus, Output, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use tempfile::TempDir;

use crate::{driver, machine};

pub mod churn;
pub mod kubectl;
mod leftovers;
pub mod user;

pub use leftovers::Leftovers;
use user::User;

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The node's name on every machine.
pub const NODE: &str = "node-1";

/// A temporary directory with a data directory in it, and `berth up` on that; everything goes when it is dropped.
#[derive(Debug)]
pub struct Machine {
    child: Option<Child>,
    dir: TempDir,
    data: PathBuf,
    /// Further words of the command line of `berth up`.
    args: Vec<String>,
    /// A shell command that runs before `berth up`, in a mount namespace with it.
    before: Option<String>,
    /// Who runs it, if not root.
    user: Option<User>,
    stopped_well: bool,
}

impl Machine {
    /// A machine that is ready for pods.
    pub fn start() -> Result<Self> {
        let machine = Self::new()?;
        Self::run(machine)
    }

    /// A machine whose data directory is this one, which may lie on a disk of its own.
    pub fn start_in(data: PathBuf) -> Result<Self> {
        let mut machine = Self::new()?;
        machine.data = data;
        Self::run(machine)
    }

    /// The same with further words on its command line.
    pub fn start_in_with(data: PathBuf, args: &[&str]) -> Result<Self> {
        let mut machine = Self::new_with(args)?;
        machine.data = data;
        Self::run(machine)
    }

    /// A machine with further words on its command line.
    pub fn start_with(args: &[&str]) -> Result<Self> {
        Self::run(Self::new_with(args)?)
    }

    /// A machine of an ordinary user, whose home is the directory around the machine's.
    pub fn start_as(prepare: impl FnOnce(User) -> Result<User>, args: &[&str]) -> Result<Self> {
        let mut machine = Self::new_with(args)?;
        machine.user = Some(prepare(User::new(machine.dir.path())?)?);
        Self::run(machine)
    }

    /// A directory for a machine with further words on its command line, and nothing that runs yet.
    pub fn new_with(args: &[&str]) -> Result<Self> {
        let mut machine = Self::new()?;
        machine.args = args.iter().map(ToString::to_string).collect();
        Ok(machine)
    }

    /// A machine that runs in a mount namespace of its own, where a shell command ran before.
    pub fn start_after(before: &str) -> Result<Self> {
        let mut machine = Self::new()?;
        machine.before = Some(before.to_owned());
        Self::run(machine)
    }

    /// A directory for a machine, and nothing that runs yet.
    pub fn new() -> Result<Self> {
        // The path stays short: a socket's may have 107 bytes.
        let dir =
            tempfile::Builder::new().prefix("up-").rand_bytes(5).tempdir().context("make a directory")?;
        // With a program of its own every process of this machine can be told from those of others.
        let (binary, own) = (driver::binary()?, dir.path().join("berth"));
        if fs::hard_link(&binary, &own).is_err() {
            fs::copy(&binary, &own).context("copy the binary")?;
        }
        let data = dir.path().join("data");
        Ok(Self { child: None, data, dir, args: Vec::new(), before: None, user: None, stopped_well: false })
    }

    fn run(mut self) -> Result<Self> {
        self.restart()?;
        Ok(self)
    }

    /// Starts `berth up` (again) and waits until it says that everything is ready.
    pub fn restart(&mut self) -> Result<()> {
        self.begin()?;
        self.wait_until_ready()
    }

    /// Starts `berth up` without waiting for anything.
    pub fn begin(&mut self) -> Result<()> {
        let log = fs::File::create(self.dir.path().join("up.log")).context("open the log")?;
        let words = ["up", "--listen", "127.0.0.1:0", "--node-name", NODE];
        let mut up = match &self.before {
            None => self.command(&words),
            Some(before) => {
                let script = format!("{before} && exec \"$0\" \"$@\"");
                let mut up = machine::command("unshare");
                up.args(["--mount", "sh", "-c", &script]).arg(self.dir.path().join("berth")).args(words);
                up.env("BERTH_DATA_DIR", &self.data).env_remove("KUBECONFIG");
                up
            }
        };
        up.args(&self.args).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.child = Some(up.spawn().context("start berth up")?);
        self.stopped_well = false;
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        // The last thing on the screen.
        while !self.log().contains("berth down") {
            let child = self.child.as_mut().context("nothing was started")?;
            if let Some(status) = child.try_wait()? {
                bail!("berth up ended with {status}; {}", self.log_tail());
            }
            ensure!(Instant::now() < deadline, "berth up is not ready; {}", self.log_tail());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Kills `berth up` as a power cut would; pods go on.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("nothing runs")?;
        child.kill()?;
        let status = child.wait()?;
        ensure!(status.signal() == Some(9), "it had ended by itself with {status}; {}", self.log_tail());
        Ok(())
    }

    /// Tells it to stop with a signal, and returns how it ended.
    pub fn signal(&mut self, signal: Signal) -> Result<ExitStatus> {
        let mut child = self.child.take().context("nothing runs")?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a child has an id")?;
        rustix::process::kill_process(pid, signal)?;
        let status = wait(&mut child).with_context(|| self.log_tail())?;
        self.stopped_well = status.success();
        Ok(status)
    }

    /// A command of this machine's program, about its data directory.
    pub fn command(&self, args: &[&str]) -> std::process::Command {
        let program = self.dir.path().join("berth");
        let mut command = match &self.user {
            Some(user) => user.command(&program),
            None => machine::command(program),
        };
        command.args(args).env("BERTH_DATA_DIR", &self.data).env_remove("KUBECONFIG");
        command
    }

    /// Runs one to its end.
    pub fn berth(&self, args: &[&str]) -> Result<Output> {
        self.command(args).stdin(Stdio::null()).output().with_context(|| format!("run berth {args:?}"))
    }

    /// Runs one that must succeed; gives what it printed.
    pub fn says(&self, args: &[&str]) -> Result<String> {
        let output = self.berth(args)?;
        let (printed, complaint) = texts(&output);
        ensure!(output.status.success(), "berth {args:?} ended with {}: {complaint}{printed}", output.status);
        Ok(printed)
    }

    /// Runs one that must fail; gives its complaint.
    pub fn refuses(&self, args: &[&str]) -> Result<String> {
        let output = self.berth(args)?;
        let (printed, complaint) = texts(&output);
        ensure!(!output.status.success(), "berth {args:?} succeeded: {printed}");
        Ok(complaint)
    }

    /// What `berth explain` prints for an object, such as `pvc/data`; its exit status must be 3 if the object is stuck,
    /// and 0 if not.
    pub fn explain(&self, what: &str) -> Result<String> {
        self.explain_with(what, &mut self.command(&["explain", what]))
    }

    /// The same for a command that was changed.
    pub fn explain_with(&self, what: &str, command: &mut std::process::Command) -> Result<String> {
        let output = command.stdin(Stdio::null()).output().with_context(|| format!("explain {what}"))?;
        let (printed, complaint) = texts(&output);
        let expected = if printed.contains("\nStuck: ") { 3 } else { 0 };
        ensure!(
            output.status.code() == Some(expected),
            "explain {what} ended with {}: {complaint}{printed}",
            output.status
        );
        Ok(printed)
    }

    /// The machine's data directory.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// The temporary directory around it.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The process id of `berth up`.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.child.as_ref().context("nothing runs")?.id())
    }

    /// What `berth up` printed since it was started last.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("up.log")).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        format!("the end of its log:\n{}", lines[lines.len().saturating_sub(60)..].join("\n"))
    }

    /// Looks at the machine until this holds, or says what it saw last.
    pub fn until<T>(&self, what: &str, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            ensure!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops everything with `berth down`, and checks that nothing but the data directory is left.
    pub fn finish(mut self) -> Result<()> {
        self.says(&["down"])?;
        if let Some(mut child) = self.child.take() {
            let status = wait(&mut child)?;
            ensure!(status.success(), "berth up ended with {status}; {}", self.log_tail());
        }
        self.stopped_well = true;
        self.nothing_left().context("after berth down")
    }

    /// Checks that nothing is mounted and nothing runs, and waits for the end of loop devices.
    pub fn nothing_left(&self) -> Result<()> {
        let left = Leftovers::of(self.dir())?;
        ensure!(
            left.mounts.is_empty() && left.processes.is_empty() && left.groups.is_empty(),
            "there is {left:#?}"
        );
        machine::until_detached(|| machine::loops_below(self.dir()))
    }

    /// The objects of a kind in all namespaces.
    pub fn all(&self, kind: &str) -> Result<Vec<Value>> {
        let mut list: Value = serde_json::from_str(&self.kubectl(&["get", kind, "-A", "-o", "json"])?)?;
        Ok(serde_json::from_value(list["items"].take())?)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if !self.stopped_well {
            eprintln!("berth up in {}: {}", self.data.display(), self.log_tail());
        }
        if let Err(error) = leftovers::clear(self.dir.path()) {
            eprintln!("could not clean up after a test: {error:#}");
            // Removing the tree now would reach into whatever is still mounted.
            self.dir.disable_cleanup(true);
        }
    }
}

/// Waits for a child's end, but not for ever.
pub fn wait(child: &mut Child) -> Result<ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            bail!("it does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What a program printed: its output, and its complaints.
pub fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}
