//! One more process in a running container (`exec`), and the process of ours that watches over it.
//!
//! The joiner is no member of the container's mount namespace, only its child is: whoever waits for the container to be
//! gone does not wait for us. It kills what it started when its caller closes the control socket, or dies.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{Mode, OFlags},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process_group, pidfd_open},
    pty::OpenptFlags,
    termios::{Winsize, tcsetwinsize},
    thread::{ThreadNameSpaceType, move_into_thread_name_spaces},
};
use serde::{Deserialize, Serialize};

use crate::{
    ContainerSpec, IdRange, Security,
    cgroup::Membership,
    launcher::{Command, Launcher, Stdio, receive, send},
    owner::Owner,
    status::Shim,
    sys::{self, Kind},
};
use berth_host::{Error, Result};

/// The descriptors that a joiner gets besides those of a control group.
pub(crate) const FDS: usize = 6;
const STARTED: u8 = b'S';
const FAILED: u8 = b'F';
const EXITED: u8 = b'X';

/// What to run in a container; user, environment and directory are those of the container.
#[derive(Clone, Default)]
pub struct ExecCall {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Whether it gets a terminal.
    pub tty: bool,
    /// Whether it gets input; otherwise its standard input is at its end.
    pub stdin: bool,
    /// The size of the terminal.
    pub size: Option<TerminalSize>,
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TerminalSize {
    /// The number of columns.
    pub width: u16,
    /// The number of rows.
    pub height: u16,
}

/// Our ends of a process that is being started in a container; none of the streams blocks.
#[derive(Debug)]
pub(crate) struct Joined {
    /// Answers with [`Reply`]s; the process is killed when it is closed.
    pub(crate) control: UnixStream,
    /// Its standard input, if it has one.
    pub(crate) stdin: Option<OwnedFd>,
    /// Its standard output, or its terminal.
    pub(crate) stdout: OwnedFd,
    /// Its standard error, if that is not its terminal.
    pub(crate) stderr: Option<OwnedFd>,
}

/// What a joiner says over the control socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The command was started and runs.
    Started,
    /// The command could not be started.
    Failed(String),
    /// The command has ended; 128 and the signal if one ended it.
    Exited(i32),
}

impl Reply {
    /// Reads a whole reply from the front of what was received; `None` if more is needed.
    ///
    /// The second value is how much of `bytes` it was. A failure is the last thing that is said: `ended` says whether
    /// everything has been received.
    pub(crate) fn parse(bytes: &[u8], ended: bool) -> Option<(Self, usize)> {
        match bytes {
            [STARTED, ..] => Some((Self::Started, 1)),
            [FAILED, why @ ..] if ended => {
                Some((Self::Failed(String::from_utf8_lossy(why).into_owned()), bytes.len()))
            }
            [EXITED, a, b, c, d, ..] => Some((Self::Exited(i32::from_le_bytes([*a, *b, *c, *d])), 5)),
            _ => None,
        }
    }
}

/// What a joiner has to do; goes over the control socket because command and environment may hold secrets.
#[derive(Serialize, Deserialize)]
struct Request {
    command: Vec<String>,
    env: Vec<(String, String)>,
    working_dir: Option<PathBuf>,
    user: Option<u32>,
    group: Option<u32>,
    groups: Vec<u32>,
    user_namespace: Option<IdRange>,
    security: Security,
    oom_score_adj: Option<i32>,
    tty: bool,
}

impl Launcher {
    /// Starts a process in a running container, which becomes a member of a control group.
    pub(crate) fn exec(
        &self,
        shim: &Shim,
        spec: &ContainerSpec,
        group: Option<&Membership>,
        call: &ExecCall,
    ) -> Result<Joined> {
        let exec = || format!("start a process in container {}", spec.name);
        let failed = |error: io::Error| Error::new(exec(), error);
        // Process 1 is not in the user namespace of its container.
        let process = match spec.user_namespace {
            Some(_) => Member::command(shim),
            None => Member::first(shim),
        }
        .map_err(failed)?;
        let streams = if call.tty { Streams::terminal(shim, call.size) } else { Streams::pipes(call.stdin) };
        let Streams { ours: [stdin, stdout, stderr], theirs } =
            streams.map_err(|error| Error::new(exec(), error))?;
        let (mut control, their_control) = UnixStream::pair().map_err(|error| Error::new(exec(), error))?;
        let [their_stdin, their_stdout, their_stderr] = &theirs;
        let fds = [
            their_control.as_fd(),
            process.pidfd.as_fd(),
            process.root.as_fd(),
            their_stdin.as_fd(),
            their_stdout.as_fd(),
            their_stderr.as_fd(),
        ];
        self.join(fds, group).map_err(|error| Error::new(exec(), error))?;
        drop((their_control, theirs));
        let request = Request {
            command: call.command.clone(),
            env: spec.env.clone(),
            working_dir: spec.working_dir.clone(),
            user: spec.user,
            group: spec.group,
            groups: spec.groups.clone(),
            user_namespace: spec.user_namespace,
            security: spec.security.clone(),
            oom_score_adj: spec.oom_score_adj,
            tty: call.tty,
        };
        let request =
            serde_json::to_vec(&request).map_err(|error| Error::new(exec(), io::Error::from(error)))?;
        let length = u32::try_from(request.len()).map_err(|_| Error::new(exec(), Errno::TOOBIG))?;
        control
            .write_all(&length.to_le_bytes())
            .and_then(|()| control.write_all(&request))
            .map_err(|error| Error::new(exec(), error))?;
        for end in [&stdin, &stdout, &stderr].into_iter().flatten() {
            rustix::fs::fcntl_setfl(end, OFlags::NONBLOCK).map_err(|errno| Error::new(exec(), errno))?;
        }
        let stdout = stdout.expect("every process has an output");
        Ok(Joined { control, stdin: stdin.filter(|_| call.stdin), stdout, stderr })
    }
}

/// A process of a container, whose namespaces another one joins.
struct Member {
    pidfd: OwnedFd,
    /// Its root directory, which is not always what its mount namespace calls its root.
    root: OwnedFd,
}

impl Member {
    /// Process 1 of a container.
    fn first(shim: &Shim) -> io::Result<Self> {
        let pidfd = shim.as_fd().try_clone_to_owned()?;
        Self::open(shim.pid(), pidfd)
    }

    /// The command of a container, which is process 2 in its pid namespace.
    fn command(shim: &Shim) -> io::Result<Self> {
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", shim.pid()))?;
        let is_second = |pid: &i32| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            pids.and_then(|pids| pids.split_whitespace().next_back()) == Some("2")
        };
        let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
        let pid = children.find(is_second).ok_or_else(|| io::Error::other("its command has ended"))?;
        let found =
            Self::open(pid, pidfd_open(Pid::from_raw(pid).ok_or(Errno::SRCH)?, PidfdFlags::empty())?)?;
        // Had the command ended before, another could have its pid. As long as it lives, process 1 does.
        if is_second(&pid) {
            sys::send_signal(shim.as_fd(), 0).map(|()| found)
        } else {
            Err(Errno::SRCH.into())
        }
    }

    fn open(pid: i32, pidfd: OwnedFd) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(format!("/proc/{pid}/root"), flags, Mode::empty())?;
        // Had the process ended before, the pid could have been another's.
        sys::send_signal(pidfd.as_fd(), 0)?;
        Ok(Self { pidfd, root })
    }
}

/// Gives a terminal another size; its processes get the signal.
pub(crate) fn resize(terminal: impl AsFd, size: TerminalSize) -> Result<()> {
    set_size(terminal.as_fd(), size).map_err(|errno| Error::new("resize a terminal", errno))
}

fn set_size(terminal: impl AsFd, size: TerminalSize) -> rustix::io::Result<()> {
    let size = Winsize { ws_row: size.height, ws_col: size.width, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size)
}

/// The two ends of standard input, output and error.
struct Streams {
    ours: [Option<OwnedFd>; 3],
    theirs: [OwnedFd; 3],
}

impl Streams {
    fn pipes(stdin: bool) -> io::Result<Self> {
        let (their_stdin, our_stdin) = if stdin {
            let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
            (theirs, Some(ours))
        } else {
            (File::open("/dev/null")?.into(), None)
        };
        let (our_stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
        let (our_stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
        let ours = [our_stdin, Some(our_stdout), Some(our_stderr)];
        Ok(Self { ours, theirs: [their_stdin, their_stdout, their_stderr] })
    }

    /// A terminal of the container, so that it has a name there.
    fn terminal(shim: &Shim, size: Option<TerminalSize>) -> io::Result<Self> {
        let path = format!("/proc/{}/root/dev/pts/ptmx", shim.pid());
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let master = rustix::fs::open(path, flags, Mode::empty())?;
        // Had the shim ended before, the pid could have been another's.
        sys::send_signal(shim.as_fd(), 0)?;
        rustix::pty::unlockpt(&master)?;
        let peer = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = rustix::pty::ioctl_tiocgptpeer(&master, peer)?;
        if let Some(size) = size {
            set_size(&master, size)?;
        }
        let theirs = [terminal.try_clone()?, terminal.try_clone()?, terminal];
        Ok(Self { ours: [Some(master.try_clone()?), Some(master), None], theirs })
    }
}

/// Is a joiner until what it started has ended.
pub(crate) fn run([control, pidfd, root, stdin, stdout, stderr]: [OwnedFd; FDS], group: &Membership) -> ! {
    let container = Member { pidfd, root };
    sys::reset_signals();
    let _ = rustix::process::setsid();
    let mut control = UnixStream::from(control);
    let start = || -> Result<Pid> {
        let request = read_request(&mut control).map_err(|error| Error::new("read what to run", error))?;
        start(&request, &container, group, &[stdin, stdout, stderr])
    };
    let child = match start() {
        Ok(child) => child,
        Err(error) => {
            let _ = control.write_all(&[&[FAILED], error.sentence().as_bytes()].concat());
            sys::exit(1);
        }
    };
    drop(container);
    let _ = control.write_all(&[STARTED]);
    let code = wait(child, &control);
    let _ = control.write_all(&[&[EXITED][..], &code.to_le_bytes()].concat());
    sys::exit(0)
}

fn read_request(control: &mut UnixStream) -> io::Result<Request> {
    let mut length = [0; 4];
    control.read_exact(&mut length)?;
    let length = usize::try_from(u32::from_le_bytes(length)).map_err(io::Error::other)?;
    let mut request = vec![0; length];
    control.read_exact(&mut request)?;
    Ok(serde_json::from_slice(&request)?)
}

/// Starts the child, and waits until it is the command.
fn start(request: &Request, container: &Member, group: &Membership, stdio: &[OwnedFd; 3]) -> Result<Pid> {
    let join = |errno: Errno| Error::new("join the container", errno);
    move_into_thread_name_spaces(container.pidfd.as_fd(), ThreadNameSpaceType::PROCESS_ID).map_err(join)?;
    let (channel, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(join)?;
    let cloned = sys::clone(Kind::Child, group.to_clone_into());
    let Some(child) = cloned.map_err(|error| Error::new("start a process", error))? else {
        let error = become_command(request, container, group, stdio);
        let _ = send(&theirs, error.sentence().as_bytes(), &[]);
        sys::exit(1)
    };
    drop(theirs);
    let mut message = [0; 4096];
    let (length, _) = receive(&channel, &mut message).map_err(join)?;
    if length == 0 {
        return Ok(child);
    }
    let why = String::from_utf8_lossy(&message[..length]).into_owned();
    Err(Error::new("failed to exec in container", io::Error::other(why)))
}

fn become_command(
    request: &Request,
    container: &Member,
    group: &Membership,
    [stdin, stdout, stderr]: &[OwnedFd; 3],
) -> Error {
    let namespaces = ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION;
    let joined = move_into_thread_name_spaces(container.pidfd.as_fd(), namespaces)
        .and_then(|()| rustix::process::fchdir(&container.root))
        .and_then(|()| rustix::process::chroot("."));
    if let Err(errno) = joined {
        return Error::new("join the container", errno);
    }
    let command = Command {
        words: &request.command,
        env: &request.env,
        working_dir: request.working_dir.as_deref(),
        user: request.user,
        group: request.group,
        groups: &request.groups,
        owner: request.user_namespace.map(|range| Owner {
            namespace: container.pidfd.as_fd(),
            range,
            is_first: false,
        }),
        security: &request.security,
        control_group: group,
        oom_score_adj: request.oom_score_adj,
    };
    let (input, output, error) = (stdin.as_fd(), stdout.as_fd(), stderr.as_fd());
    command.become_it(&Stdio { input, output, error, terminal: request.tty })
}

/// The exit code of the child, which is killed with its process group when the caller hangs up.
fn wait(child: Pid, control: &UnixStream) -> i32 {
    let exit = pidfd_open(child, PidfdFlags::empty()).ok();
    if let Some(exit) = &exit {
        loop {
            let mut fds = [PollFd::new(exit, PollFlags::IN), PollFd::new(control, PollFlags::IN)];
            if poll(&mut fds, None).is_err() {
                continue;
            }
            if !fds[0].revents().is_empty() {
                break;
            }
            if !fds[1].revents().is_empty() {
                let _ = kill_process_group(child, Signal::KILL);
                sys::kill(child, libc::SIGKILL);
                break;
            }
        }
    }
    match rustix::process::waitpid(Some(child), WaitOptions::empty()) {
        Ok(Some((_, status))) => {
            status.exit_status().or(status.terminating_signal().map(|signal| 128 + signal)).unwrap_or(255)
        }
        _ => 255,
    }
}
