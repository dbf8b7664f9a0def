//! From a process of ours to the command of a container: user, signals, directory, `exec`.

use std::{
    ffi::{CString, OsStr},
    io,
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode},
    io::Errno,
    process::{Gid, Uid},
};

use crate::sys;
use berth_host::{Doing as _, Error, Result};

/// What a command without a `PATH` is looked for in.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A command, and as whom and where it runs.
pub(crate) struct Command<'a> {
    pub(crate) words: &'a [String],
    pub(crate) env: &'a [(String, String)],
    pub(crate) working_dir: Option<&'a Path>,
    pub(crate) user: Option<u32>,
    pub(crate) group: Option<u32>,
    pub(crate) groups: &'a [u32],
}

/// Standard input, output and error of a command.
pub(crate) struct Stdio<'a> {
    pub(crate) input: BorrowedFd<'a>,
    pub(crate) output: BorrowedFd<'a>,
    pub(crate) error: BorrowedFd<'a>,
    /// Whether they are a terminal, which the command then controls.
    pub(crate) terminal: bool,
}

impl Command<'_> {
    /// Becomes the command, in a new session; returns only why that failed.
    pub(crate) fn become_it(&self, stdio: &Stdio<'_>) -> Error {
        match self.prepare(stdio) {
            Ok(()) => self.exec(),
            Err(error) => error,
        }
    }

    fn prepare(&self, stdio: &Stdio<'_>) -> Result<()> {
        let start = "start a session";
        rustix::process::setsid().map_err(|errno| Error::new(start, errno))?;
        let user = Uid::from_raw(self.user.unwrap_or(0));
        if self.user.is_some() {
            // So that the command can open /dev/stdout. What is no pipe or terminal of ours is not ours to give away:
            // without input it is /dev/null, which may be the host's.
            for fd in [stdio.input, stdio.output, stdio.error] {
                if stdio.terminal || is_pipe(fd) {
                    let _ = rustix::fs::fchown(fd, Some(user), None);
                }
            }
        }
        if stdio.terminal {
            rustix::process::ioctl_tiocsctty(stdio.input)
                .map_err(|errno| Error::new("take the terminal", errno))?;
        }
        rustix::stdio::dup2_stdin(stdio.input)
            .and_then(|()| rustix::stdio::dup2_stdout(stdio.output))
            .and_then(|()| rustix::stdio::dup2_stderr(stdio.error))
            .map_err(|errno| Error::new("connect standard input and output", errno))?;
        sys::close_at_exec();
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let directory = self.working_dir.unwrap_or(Path::new("/"));
        rustix::process::chdir(directory).doing("change to the working directory", directory)?;
        let groups: Vec<Gid> = self.groups.iter().copied().map(Gid::from_raw).collect();
        rustix::thread::set_thread_groups(&groups)
            .and_then(|()| rustix::thread::set_thread_gid(Gid::from_raw(self.group.unwrap_or(0))))
            .and_then(|()| rustix::thread::set_thread_uid(user))
            .map_err(|errno| Error::new(format!("become user {}", user.as_raw()), errno))?;
        sys::reset_signals();
        Ok(())
    }

    fn exec(&self) -> Error {
        let Some(name) = self.words.first() else { return failed("", "no command") };
        let strings = || -> std::result::Result<_, std::ffi::NulError> {
            let arguments: Vec<CString> = self
                .words
                .iter()
                .map(|argument| CString::new(argument.as_str()))
                .collect::<std::result::Result<_, _>>()?;
            let environment: Vec<CString> = self
                .env
                .iter()
                .map(|(key, value)| CString::new(format!("{key}={value}")))
                .collect::<std::result::Result<_, _>>()?;
            Ok((arguments, environment))
        };
        let Ok((arguments, environment)) = strings() else {
            return failed(name, "a NUL byte in its arguments or environment");
        };
        let mut denied = false;
        for program in self.candidates(name) {
            let Ok(program) = CString::new(program.into_os_string().into_encoded_bytes()) else { continue };
            match sys::execve(&program, &arguments, &environment) {
                Errno::NOENT | Errno::NOTDIR => {}
                Errno::ACCESS => denied = true,
                errno => return Error::new(format!("exec: {name:?}"), errno),
            }
        }
        match (denied, name.contains('/')) {
            (true, _) => failed(name, "permission denied"),
            (false, true) => failed(name, &format!("stat {name}: no such file or directory")),
            (false, false) => failed(name, "executable file not found in $PATH"),
        }
    }

    fn candidates(&self, name: &str) -> Vec<PathBuf> {
        if name.contains('/') {
            return vec![name.into()];
        }
        let path = self.env.iter().rev().find(|(key, _)| key == "PATH").map(|(_, value)| value.as_str());
        std::env::split_paths(OsStr::new(path.unwrap_or(DEFAULT_PATH)))
            .map(|directory| directory.join(name))
            .collect()
    }
}

fn is_pipe(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(fd).is_ok_and(|seen| FileType::from_raw_mode(seen.st_mode) == FileType::Fifo)
}

fn failed(name: &str, why: &str) -> Error {
    Error::new(format!("exec: {name:?}"), io::Error::other(why.to_owned()))
}

impl<'a> Stdio<'a> {
    /// A terminal as all three.
    pub(crate) fn terminal(terminal: &'a impl AsFd) -> Self {
        let terminal = terminal.as_fd();
        Self { input: terminal, output: terminal, error: terminal, terminal: true }
    }
}
