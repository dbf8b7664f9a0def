//! A real terminal for tests: tmux, which runs a program in a pseudo-terminal and says what its screen shows.

use std::{
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::machine;

/// How long anything on the screen may take to appear.
const PATIENCE: Duration = Duration::from_secs(60);

/// A terminal with one program in it; both end when this is dropped.
#[derive(Debug)]
pub struct Terminal {
    directory: TempDir,
    socket: PathBuf,
}

impl Terminal {
    /// Runs a command, with its environment, in a terminal of this size.
    pub fn start(command: &Command, width: u16, height: u16) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("tty-").rand_bytes(5).tempdir()?;
        let terminal = Self { socket: directory.path().join("tmux"), directory };
        let (width, height) = (width.to_string(), height.to_string());
        let mut tmux = terminal.tmux(&["new-session", "-d", "-x", &width, "-y", &height]);
        for (name, value) in command.get_envs() {
            if let (Some(name), Some(value)) = (name.to_str(), value.and_then(|value| value.to_str())) {
                tmux.arg("-e").arg(format!("{name}={value}"));
            }
        }
        tmux.env_remove("KUBECONFIG").env_remove("TMUX").env("LC_ALL", "C.UTF-8");
        // What is left on the screen can be read after the end of the program.
        tmux.arg("--").arg("sh").arg("-c").arg("\"$@\"; echo \"ended with $?\"; exec sleep 1000").arg("sh");
        tmux.arg(command.get_program()).args(command.get_args());
        let output = tmux.output().context("start tmux: testbed/deps.sh installs it")?;
        ensure!(output.status.success(), "tmux: {}", String::from_utf8_lossy(&output.stderr));
        Ok(terminal)
    }

    fn tmux(&self, args: &[&str]) -> Command {
        let mut tmux = machine::command("tmux");
        tmux.args(["-u", "-f", "/dev/null", "-S"]).arg(&self.socket).args(args);
        tmux.env("HOME", self.directory.path());
        tmux
    }

    fn run(&self, args: &[&str]) -> Result<String> {
        let output = self.tmux(args).output().context("run tmux")?;
        ensure!(output.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What the screen shows.
    pub fn screen(&self) -> Result<String> {
        self.run(&["capture-pane", "-p"])
    }

    /// The same, with the codes for colours.
    pub fn coloured_screen(&self) -> Result<String> {
        self.run(&["capture-pane", "-e", "-p"])
    }

    /// Types keys: characters, or names such as `Down` and `Enter`.
    pub fn press(&self, keys: &[&str]) -> Result<()> {
        self.run(&[&["send-keys"], keys].concat()).map(drop)
    }

    /// Makes the window this large.
    pub fn resize(&self, width: u16, height: u16) -> Result<()> {
        self.run(&["resize-window", "-x", &width.to_string(), "-y", &height.to_string()]).map(drop)
    }

    /// Waits until the screen is so; gives what it shows then.
    pub fn until(&self, what: &str, so: impl Fn(&str) -> bool) -> Result<String> {
        let begun = Instant::now();
        loop {
            let screen = self.screen()?;
            if so(&screen) {
                return Ok(screen);
            }
            if begun.elapsed() > PATIENCE {
                bail!("the screen never {what}:\n{screen}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the screen shows this.
    pub fn shows(&self, text: &str) -> Result<String> {
        self.until(&format!("shows {text:?}"), |screen| screen.contains(text))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.run(&["kill-server"]);
    }
}
