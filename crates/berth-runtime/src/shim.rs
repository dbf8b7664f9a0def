//! Process 1 of a container: starts its command, and stays until that has ended; how a process of ours becomes a command.
//!
//! It holds little memory, as there is one per container: the work that needs some is done by its child, on the way to
//! becoming the command.

use std::{
    ffi::{CString, OsStr, OsString},
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use berth_host::{Doing as _, Error, Result};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{FileType, Mode, OFlags},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::{PipeFlags, pipe_with},
    process::{Gid, Pid, Uid, WaitOptions, WaitStatus},
    pty::OpenptFlags,
};

use crate::{
    ContainerSpec, SPEC_FILE,
    launcher::{receive, send},
    log::{Log, Stream},
    root,
    status::{KILL_ALL, Record},
    sys::{self, Kind, Signals},
};

/// What a command without a `PATH` is looked for in.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Passed on to the command.
const FORWARDED: [i32; 8] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGCONT,
];
const CHUNK: usize = 16 << 10;
/// How many chunks are still read when everybody who wrote has been killed: more than any pipe holds.
const LAST_CHUNKS: usize = 128;

/// What a shim is given to work with.
pub(crate) struct Job {
    pub(crate) record: Record,
    /// Closed when the command runs or has failed to.
    pub(crate) started: OwnedFd,
    pub(crate) state: OwnedFd,
    pub(crate) log_directory: OwnedFd,
    pub(crate) log_name: OsString,
    pub(crate) host: OwnedFd,
    pub(crate) terminal: bool,
    pub(crate) keep_stdin: bool,
}

/// Is process 1 of a container until its end.
pub(crate) fn run(job: Job) -> ! {
    let Job { mut record, started, state, log_directory, log_name, host, terminal, keep_stdin } = job;
    let start = || -> Result<(Log, Child, Vec<Output>)> {
        let log = Log::open(log_directory, log_name)
            .map_err(|error| Error::new("open the container's log", error))?;
        let (child, pipes) = Child::start(&state, &host, terminal, keep_stdin)?;
        drop((state, host));
        let outputs = child.wait_for_exec(pipes)?;
        Ok((log, child, outputs))
    };
    let (log, child, outputs) = match start() {
        Ok(running) => running,
        Err(error) => {
            record.failed(&error.sentence());
            sys::exit(1);
        }
    };
    record.started();
    drop(started);
    let mut pump = Pump { log, outputs, buffer: Vec::with_capacity(CHUNK) };
    let status = pump.run(&child);
    sys::kill_others();
    pump.finish();
    let signal = status.terminating_signal();
    record.exited(status.exit_status().or(signal.map(|signal| 128 + signal)).unwrap_or(255), signal);
    sys::exit(0)
}

/// The container's command, and what it takes to follow it.
struct Child {
    pid: Pid,
    signals: Signals,
    /// Tells of failures on the way to the command, and ends with `exec`.
    channel: OwnedFd,
    _stdin: Option<OwnedFd>,
}

impl Child {
    fn start(
        state: &OwnedFd,
        host: &OwnedFd,
        terminal: bool,
        keep_stdin: bool,
    ) -> Result<(Self, [OwnedFd; 2])> {
        let prepare = |errno: Errno| Error::new("prepare to start the command", errno);
        let _ = rustix::process::setsid();
        sys::reset_signals();
        let wanted: Vec<i32> = FORWARDED.into_iter().chain([libc::SIGCHLD, KILL_ALL]).collect();
        let signals = Signals::take(&wanted).map_err(|error| Error::new("listen for signals", error))?;
        let (channel, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(prepare)?;
        let (stdout, stdout_end) = pipe_with(PipeFlags::CLOEXEC).map_err(prepare)?;
        let (stderr, stderr_end) = pipe_with(PipeFlags::CLOEXEC).map_err(prepare)?;
        let (stdin_end, stdin) = pipe_with(PipeFlags::CLOEXEC).map_err(prepare)?;
        if let Some(pid) = sys::clone(Kind::Child).map_err(|error| Error::new("start a process", error))? {
            let stdin = keep_stdin.then_some(stdin);
            return Ok((Self { pid, signals, channel, _stdin: stdin }, [stdout, stderr]));
        }
        drop(stdin);
        let pipes = Pipes { stdin: stdin_end, stdout: stdout_end, stderr: stderr_end };
        let Err(error) = become_command(state, host, terminal.then_some(&theirs), &pipes);
        let _ = send(&theirs, error.sentence().as_bytes(), &[]);
        sys::exit(1)
    }

    /// Waits until the command runs; its outputs, which are the pipes or the terminal it got instead.
    fn wait_for_exec(&self, [stdout, stderr]: [OwnedFd; 2]) -> Result<Vec<Output>> {
        let mut terminal = None;
        loop {
            let mut message = [0; 4096];
            let (length, mut fds) = receive(&self.channel, &mut message)
                .map_err(|errno| Error::new("start the command", errno))?;
            match (fds.pop(), length) {
                (Some(master), _) => terminal = Some(master),
                (None, 0) => break,
                (None, _) => {
                    let why = String::from_utf8_lossy(&message[..length]).into_owned();
                    return Err(Error::new("failed to start the container", std::io::Error::other(why)));
                }
            }
        }
        let outputs = match terminal {
            Some(master) => vec![("stdout", master)],
            None => vec![("stdout", stdout), ("stderr", stderr)],
        };
        let open = |(name, fd)| {
            rustix::fs::fcntl_setfl(&fd, OFlags::NONBLOCK)
                .map_err(|errno| Error::new("read the output", errno))?;
            Ok(Output { fd: Some(fd), stream: Stream::new(name) })
        };
        outputs.into_iter().map(open).collect()
    }

    /// Deals with every signal that has arrived; the status of the command when it has ended.
    fn deal_with_signals(&self) -> Option<WaitStatus> {
        let mut ended = None;
        while let Some(signal) = self.signals.next() {
            match signal {
                libc::SIGCHLD => ended = ended.or(self.reap()),
                KILL_ALL => sys::kill_others(),
                other => sys::kill(self.pid, other),
            }
        }
        ended
    }

    fn reap(&self) -> Option<WaitStatus> {
        let mut ended = None;
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            if pid == self.pid {
                ended = Some(status);
            }
        }
        ended
    }
}

struct Pipes {
    stdin: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

/// Goes into the container's root and becomes its command; with a `channel`, on a new terminal which is sent there.
fn become_command(
    state: &OwnedFd,
    host: &OwnedFd,
    channel: Option<&OwnedFd>,
    pipes: &Pipes,
) -> Result<std::convert::Infallible> {
    let spec = read_spec(state)?;
    root::enter(&spec, state.as_fd(), host.as_fd())?;
    let command = Command {
        words: &spec.command,
        env: &spec.env,
        working_dir: spec.working_dir.as_deref(),
        user: spec.user,
        group: spec.group,
        groups: &spec.groups,
    };
    if let Some(channel) = channel {
        let terminal = open_terminal(channel).map_err(|errno| Error::new("open a terminal", errno))?;
        return Err(command.become_it(&Stdio::terminal(&terminal)));
    }
    let null;
    let input = if spec.stdin {
        pipes.stdin.as_fd()
    } else {
        null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, rustix::fs::Mode::empty())
            .map_err(|errno| Error::new("open /dev/null in the container", errno))?;
        null.as_fd()
    };
    let stdio = Stdio { input, output: pipes.stdout.as_fd(), error: pipes.stderr.as_fd(), terminal: false };
    Err(command.become_it(&stdio))
}

fn read_spec(state: &OwnedFd) -> Result<ContainerSpec> {
    let read = || -> std::io::Result<ContainerSpec> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(state, SPEC_FILE, flags, rustix::fs::Mode::empty())?;
        Ok(serde_json::from_reader(std::io::BufReader::new(std::fs::File::from(file)))?)
    };
    read().map_err(|error| Error::new("read the container's specification", error))
}

fn open_terminal(channel: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/pts/ptmx", flags, rustix::fs::Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    let peer = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = rustix::pty::ioctl_tiocgptpeer(&master, peer)?;
    send(channel, b"terminal", &[master.as_fd()])?;
    Ok(terminal)
}

struct Output {
    fd: Option<OwnedFd>,
    stream: Stream,
}

/// Brings what the container writes into its log.
struct Pump {
    log: Log,
    outputs: Vec<Output>,
    buffer: Vec<u8>,
}

impl Pump {
    /// Works until the command has ended.
    fn run(&mut self, child: &Child) -> WaitStatus {
        loop {
            // The command may have ended before anybody looked at the signals.
            if let Some(status) = child.deal_with_signals() {
                return status;
            }
            let mut fds = vec![PollFd::new(&child.signals, PollFlags::IN)];
            fds.extend(
                self.outputs
                    .iter()
                    .filter_map(|output| Some(PollFd::new(output.fd.as_ref()?, PollFlags::IN))),
            );
            let _ = poll(&mut fds, None);
            for output in &mut self.outputs {
                read(output, &mut self.log, &mut self.buffer);
            }
        }
    }

    /// Reads what is left when everybody who wrote has been killed.
    fn finish(mut self) {
        for output in &mut self.outputs {
            for _ in 0..LAST_CHUNKS {
                if !read(output, &mut self.log, &mut self.buffer) {
                    break;
                }
            }
            self.log.finish(&mut output.stream);
        }
    }
}

/// Reads once, if there is something; whether there was.
fn read(output: &mut Output, log: &mut Log, buffer: &mut Vec<u8>) -> bool {
    let Some(fd) = &output.fd else { return false };
    buffer.clear();
    match rustix::io::read(fd, rustix::buffer::spare_capacity(buffer)) {
        Ok(1..) => {
            log.write(&mut output.stream, buffer);
            true
        }
        Err(Errno::AGAIN | Errno::INTR) => false,
        // A terminal that nobody has open any more says EIO.
        Ok(0) | Err(_) => {
            output.fd = None;
            log.finish(&mut output.stream);
            false
        }
    }
}

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
