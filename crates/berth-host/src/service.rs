//! Long-lived child processes: a program that serves something until it is stopped or killed.
//!
//! The process ends with this one, because a thread that lives as long as the child is its parent to the kernel. It leads a
//! process group of its own, which ends with it when the [`Service`] is dropped.

use std::{
    ffi::OsString,
    fs::File,
    io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::{
    error::{Doing as _, Result},
    exec::die_with_parent,
};

/// How long a killed process may take to be gone; one that is stuck in the kernel is left.
const KILL_GRACE: Duration = Duration::from_secs(5);

/// A program that runs beside this one.
#[derive(Debug)]
pub struct Service {
    pid: Pid,
    ended: Arc<(Mutex<Option<ExitStatus>>, Condvar)>,
}

/// What a service is started with.
#[derive(Debug, Clone, Default)]
pub struct Start {
    /// The program, looked up in `PATH` if it has no slash.
    pub program: OsString,
    /// The arguments that the program is started with.
    pub args: Vec<OsString>,
    /// What is added to the environment of this process.
    pub environment: Vec<(OsString, OsString)>,
}

impl Service {
    /// Starts a program with its output appended to the file `log`.
    pub fn start(start: Start, log: &Path) -> Result<Self> {
        let output = File::options().create(true).append(true).open(log).doing("open the log", log)?;
        let program = start.program.clone();
        let ended = Arc::new((Mutex::new(None), Condvar::new()));
        let (sender, started) = mpsc::channel();
        let notified = Arc::clone(&ended);
        let parent = thread::Builder::new().name("service".to_owned()).spawn(move || {
            let child = spawn(start, output);
            match child {
                Ok(mut child) => {
                    let _ = sender.send(Ok(Pid::from_child(&child)));
                    let status = child.wait().unwrap_or_else(|_| ExitStatus::from_raw(-1));
                    *notified.0.lock() = Some(status);
                    notified.1.notify_all();
                }
                Err(error) => drop(sender.send(Err(error))),
            }
        });
        parent.doing("start", Path::new(&program))?;
        let pid = started.recv().unwrap_or_else(|_| Err(io::Error::other("the thread that starts it ended")));
        Ok(Self { pid: pid.doing("start", Path::new(&program))?, ended })
    }

    /// The process id, also after its end.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// How the process ended, if it has.
    pub fn ended(&self) -> Option<ExitStatus> {
        *self.ended.0.lock()
    }

    /// Kills the process alone with SIGKILL, and waits until it is gone.
    pub fn kill(&self) -> Result<()> {
        self.signal(Signal::KILL).doing("kill", self.pid().to_string())?;
        self.wait(KILL_GRACE);
        Ok(())
    }

    /// Asks the process to stop with SIGTERM, waits no longer than `patience`, and then kills it.
    pub fn stop(&self, patience: Duration) {
        let _ = self.signal(Signal::TERM);
        if self.wait(patience).is_none() {
            let _ = self.kill();
        }
    }

    /// Waits for the end of the process, no longer than `patience`.
    pub fn wait(&self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        let mut status = self.ended.0.lock();
        while status.is_none() && !self.ended.1.wait_until(&mut status, deadline).timed_out() {}
        *status
    }

    /// Under the lock: the number of a process that was waited for may belong to another one.
    fn signal(&self, signal: Signal) -> io::Result<()> {
        let status = self.ended.0.lock();
        if status.is_none() {
            kill_process(self.pid, signal)?;
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        {
            let status = self.ended.0.lock();
            if status.is_none() {
                let _ = kill_process_group(self.pid, Signal::KILL);
            }
        }
        self.wait(KILL_GRACE);
    }
}

fn spawn(start: Start, output: File) -> io::Result<Child> {
    #[expect(
        clippy::disallowed_methods,
        reason = "this is where services are started; they end with this process"
    )]
    let mut command = Command::new(&start.program);
    command.args(start.args).envs(start.environment);
    command.process_group(0).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    die_with_parent(&mut command);
    command.spawn()
}
