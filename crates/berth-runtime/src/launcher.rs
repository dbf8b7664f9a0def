//! Starts containers: from the caller's request to the command that has become process 2 of a new container.
//!
//! Three processes take part, each of them this program: the caller ([`Launcher`]), the launcher ([`serve`]), of which
//! every container is a clone, and process 1 of the container ([`run`]), which starts the command and stays until it has
//! ended. Process 1 holds little memory, as there is one per container: the work that needs some is done by its child, on
//! the way to becoming the command.
//!
//! Cloning a small process with one thread is safe and fast, where a fork of the caller, with its threads and memory,
//! is neither; and all containers share the memory of the program. The launcher lives in a mount namespace with nothing
//! but the host's root, because a new mount namespace is a copy of the old one, and a node has thousands of mounts.

use std::{
    ffi::{CString, OsStr, OsString},
    fs::OpenOptions,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt as _, ffi::OsStringExt as _, fs::OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    process,
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{CWD, FileType, Mode, OFlags},
    io::Errno,
    mount::OpenTreeFlags,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
    pipe::{PipeFlags, pipe_with},
    process::{Gid, Pid, Uid, WaitOptions, WaitStatus},
    pty::OpenptFlags,
};

use crate::{
    ContainerSpec, SPEC_FILE, Security, TERMINATION_FILE,
    attach::{self, Attachments},
    cgroup::{Membership, Prepared, was_out_of_memory},
    joiner,
    log::{Log, Stream},
    owner::Owner,
    root,
    status::{self, KILL_ALL, Record},
    sys::{self, Kind, Signals},
};
use berth_host::{Doing as _, Error, Result, namespace::is_restricted, user_namespace::UserNamespace};

/// The argument that makes a program the launcher.
pub(crate) const ARGUMENT: &str = "__containers";

const LAUNCH: u8 = b'L';
const JOIN: u8 = b'J';
/// The descriptors that a new container gets besides those of its user namespace and its control group.
const LAUNCH_FDS: usize = 5;
const TERMINAL: u8 = 1;
const KEEP_STDIN: u8 = 2;
/// Standard input is for the first who is attached alone.
const STDIN_ONCE: u8 = 8;
/// The control group is one of version 2.
const UNIFIED: u8 = 4;
/// There is a user namespace for the command.
const USER_NAMESPACE: u8 = 16;
/// Those of a process that joins a container, and of the control groups that it becomes a member of.
pub(crate) const MOST_FDS: usize = 13;
const LONGEST_MESSAGE: usize = 4096;

/// Where a command without a `PATH` is searched.
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

/// Starts containers, and processes in running ones.
#[derive(Debug)]
pub(crate) struct Launcher {
    program: PathBuf,
    process: Mutex<Process>,
}

impl Launcher {
    /// Starts a launcher from `program`, whose `main` intercepts [`crate::LAUNCHER`].
    pub(crate) fn start(program: &Path) -> Result<Self> {
        Ok(Self { program: program.to_owned(), process: Mutex::new(Process::start(program)?) })
    }

    /// Starts the container of an existing directory in which nothing was started before.
    ///
    /// What is returned is at its end when the command runs, or cannot: [`crate::status::read_status`] returns which.
    pub(crate) fn launch(
        &self,
        directory: &Path,
        spec: &ContainerSpec,
        group: Option<&Prepared>,
        namespace: Option<&UserNamespace>,
    ) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let state = rustix::fs::open(directory, flags, Mode::empty()).doing("open", directory)?;
        write_files(directory, spec)?;
        let (log_directory, log_name) = match (spec.log.parent(), spec.log.file_name()) {
            // The shim keeps it, and root in the container finds it in /proc: no `..` may lead from there to the host.
            (Some(parent), Some(name)) => (
                root::clone_tree(CWD, parent, OpenTreeFlags::empty())
                    .doing("open the log directory", parent)?,
                name,
            ),
            _ => return Err(Errno::INVAL).doing("open the log", &spec.log),
        };
        let status = status::create(directory)?;
        let (started, theirs) = pipe_with(PipeFlags::CLOEXEC).doing("start the container in", directory)?;
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        let options = flag(spec.tty, TERMINAL)
            | flag(spec.stdin, KEEP_STDIN)
            | flag(spec.stdin_once, STDIN_ONCE)
            | flag(group.is_some_and(|group| group.membership.is_unified()), UNIFIED)
            | flag(namespace.is_some(), USER_NAMESPACE);
        let mut message = vec![LAUNCH, options];
        message.extend_from_slice(log_name.as_bytes());
        let attach =
            attach::listener(state.as_fd()).doing("make the socket of the container in", directory)?;
        let mut fds =
            vec![status.as_fd(), theirs.as_fd(), state.as_fd(), log_directory.as_fd(), attach.as_fd()];
        fds.extend(namespace.map(AsFd::as_fd));
        if let Some(group) = group {
            fds.push(group.events.as_fd());
            fds.extend(group.membership.fds());
        }
        self.send(&message, &fds).doing("start the container in", directory)?;
        Ok(started)
    }

    /// Has a joiner talk over `control`, with a container and standard streams to use, and become a member of a group.
    pub(crate) fn join(
        &self,
        fds: [BorrowedFd<'_>; joiner::FDS],
        group: Option<&Membership>,
    ) -> io::Result<()> {
        let unified = group.is_some_and(Membership::is_unified);
        let fds: Vec<BorrowedFd<'_>> =
            fds.into_iter().chain(group.into_iter().flat_map(Membership::fds)).collect();
        self.send(&[JOIN, if unified { UNIFIED } else { 0 }], &fds)
    }

    fn send(&self, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut process = self.process.lock();
        match send(process.socket(), message, fds) {
            // Somebody has killed it; containers do not depend on it, so another one does as well.
            Err(Errno::PIPE | Errno::CONNRESET) => {
                *process = Process::start(&self.program).map_err(io::Error::other)?;
                Ok(send(process.socket(), message, fds)?)
            }
            sent => Ok(sent?),
        }
    }
}

fn write_files(directory: &Path, spec: &ContainerSpec) -> Result<()> {
    let path = directory.join(SPEC_FILE);
    let json = serde_json::to_vec(spec).map_err(io::Error::from).doing("write", &path)?;
    let create = |path: &Path, mode: u32| {
        OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path)
    };
    create(&path, 0o600).and_then(|mut file| io::Write::write_all(&mut file, &json)).doing("write", &path)?;
    let path = directory.join(TERMINATION_FILE);
    let file = create(&path, 0o666).doing("create", &path)?;
    // Whoever the container runs as may write it, whatever our umask.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(0o666)).doing("set the mode of", &path)
}

/// A launcher that runs; it ends when this is dropped.
#[derive(Debug)]
struct Process {
    socket: Option<OwnedFd>,
    child: process::Child,
}

impl Process {
    fn start(program: &Path) -> Result<Self> {
        let start = "start the launcher of containers from";
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .doing(start, program)?;
        #[expect(clippy::disallowed_methods, reason = "the launcher ends by itself when we close its socket")]
        let child = process::Command::new(program)
            .arg(ARGUMENT)
            .env_clear()
            .stdin(theirs)
            .stdout(process::Stdio::null())
            .stderr(process::Stdio::null())
            .spawn()
            .doing(start, program)?;
        let process = Self { socket: Some(ours), child };
        let mut greeting = [0; LONGEST_MESSAGE];
        let (length, _) = receive(process.socket(), &mut greeting).doing(start, program)?;
        match &greeting[..length] {
            b"ready" => Ok(process),
            [] => Err(io::Error::other("it ended at once")).doing(start, program),
            why => Err(io::Error::other(String::from_utf8_lossy(why).into_owned())).doing(start, program),
        }
    }

    fn socket(&self) -> &OwnedFd {
        self.socket.as_ref().expect("the socket is there until the process is dropped")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.socket = None;
        let _ = self.child.wait();
    }
}

/// Is the launcher until its caller is gone.
pub(crate) fn serve() -> ! {
    sys::close_inherited();
    sys::reset_signals();
    sys::ignore_children();
    let _ = rustix::process::setsid();
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let socket = rustix::stdio::stdin();
    let host = match open_host_namespace().and_then(|host| root::leave_host_mounts().map(|()| host)) {
        Ok(host) => host,
        Err(error) => {
            let _ = send(socket, error.sentence().as_bytes(), &[]);
            sys::exit(1);
        }
    };
    let _ = send(socket, b"ready", &[]);
    loop {
        let mut message = [0; LONGEST_MESSAGE];
        match receive(socket, &mut message) {
            Ok((0, _)) => sys::exit(0),
            Ok((length, fds)) => answer(&message[..length], fds, &host),
            Err(Errno::INTR) => {}
            Err(_) => sys::exit(1),
        }
    }
}

fn open_host_namespace() -> Result<OwnedFd> {
    let path = "/proc/self/ns/mnt";
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).doing("open", path)
}

fn answer(message: &[u8], fds: Vec<OwnedFd>, host: &OwnedFd) {
    match message {
        [LAUNCH, options, log_name @ ..] => {
            let mut fds = fds;
            let group = fds.split_off(fds.len().min(LAUNCH_FDS));
            let Ok([status, started, state, log_directory, attach]) = <[OwnedFd; LAUNCH_FDS]>::try_from(fds)
            else {
                return;
            };
            let mut group = group.into_iter();
            let namespace = if options & USER_NAMESPACE == 0 { None } else { group.next() };
            let out_of_memory = group.next();
            let group = Membership::new(options & UNIFIED != 0, group.collect());
            let log_name = OsString::from_vec(log_name.to_vec());
            let mut record = Record::new(status);
            // Who reads the pid may send a signal before the new process listens for signals.
            sys::block_signals();
            let cloned = sys::clone(Kind::Container, None);
            if !matches!(cloned, Ok(None)) {
                sys::unblock_signals();
            }
            match cloned {
                Ok(Some(pid)) => record.pid(pid),
                Ok(None) => {
                    let Some(host) = leave_launcher(host) else { sys::exit(1) };
                    run(Job {
                        record,
                        started,
                        state,
                        log_directory,
                        log_name,
                        host,
                        attach,
                        namespace,
                        group,
                        out_of_memory,
                        options: *options,
                    });
                }
                Err(error) => record.failed(&Error::new("make the container's namespaces", error).sentence()),
            }
        }
        [JOIN, options] => {
            let mut fds = fds;
            let group = fds.split_off(fds.len().min(joiner::FDS));
            let Ok(fds) = <[OwnedFd; joiner::FDS]>::try_from(fds) else { return };
            // Without a clone there is no answer, and the caller sees the control socket closed.
            if let Ok(None) = sys::clone(Kind::Child, None) {
                let _ = leave_launcher(host);
                joiner::run(fds, &Membership::new(options & UNIFIED != 0, group));
            }
        }
        _ => {}
    }
}

/// In a clone: lets go of the socket, by which the caller and the launcher learn of each other's end.
fn leave_launcher(host: &OwnedFd) -> Option<OwnedFd> {
    rustix::stdio::dup2_stdin(rustix::stdio::stdout()).ok()?;
    host.try_clone().ok()
}

/// What a shim is given to work with.
pub(crate) struct Job {
    pub(crate) record: Record,
    /// Closed when the command runs or has failed to.
    pub(crate) started: OwnedFd,
    pub(crate) state: OwnedFd,
    pub(crate) log_directory: OwnedFd,
    pub(crate) log_name: OsString,
    pub(crate) host: OwnedFd,
    /// Where clients come who want to be attached.
    pub(crate) attach: OwnedFd,
    /// The user namespace that the command is to be in.
    pub(crate) namespace: Option<OwnedFd>,
    /// The control group that the command is to be a member of.
    pub(crate) group: Membership,
    /// Says whether something in that group was killed for want of memory.
    pub(crate) out_of_memory: Option<OwnedFd>,
    /// How its standard streams are to be.
    pub(crate) options: u8,
}

/// Is process 1 of a container until its end.
pub(crate) fn run(job: Job) -> ! {
    let Job { mut record, started, state, log_directory, log_name, host, namespace, group, .. } = job;
    let start = || -> Result<(Log, Child, Vec<Output>)> {
        let log = Log::open(log_directory, log_name)
            .map_err(|error| Error::new("open the container's log", error))?;
        let (child, pipes) = Child::start(&state, &host, namespace.as_ref(), &group, job.options)?;
        // Root in the container finds what is open here in /proc.
        drop((state, host, namespace, group));
        let outputs = child.wait_for_exec(pipes)?;
        Ok((log, child, outputs))
    };
    let (log, mut child, outputs) = match start() {
        Ok(running) => running,
        Err(error) => {
            record.failed(&error.sentence());
            sys::exit(1);
        }
    };
    record.started();
    drop(started);
    let attachments = Attachments::new(Some(job.attach));
    let mut pump = Pump { log, outputs, attachments, buffer: Vec::with_capacity(CHUNK) };
    let status = pump.run(&mut child);
    sys::kill_others();
    pump.finish();
    let signal = status.terminating_signal();
    let out_of_memory = job.out_of_memory.as_ref().is_some_and(was_out_of_memory);
    let code = status.exit_status().or(signal.map(|signal| 128 + signal)).unwrap_or(255);
    record.exited(code, signal, out_of_memory);
    sys::exit(0)
}

/// The container's command, and what it takes to follow it.
struct Child {
    pid: Pid,
    signals: Signals,
    /// Reports failures on the way to the command, and ends with `exec`.
    channel: OwnedFd,
    /// Its input, as long as somebody may still be attached to it.
    stdin: Option<OwnedFd>,
    /// The first who is attached takes the input along.
    stdin_once: bool,
}

impl Child {
    /// Starts a child that goes into the container's root and becomes its command, with the streams that the options ask
    /// for; gives the child and its standard output and error.
    fn start(
        state: &OwnedFd,
        host: &OwnedFd,
        namespace: Option<&OwnedFd>,
        group: &Membership,
        options: u8,
    ) -> Result<(Self, [OwnedFd; 2])> {
        let prepare = |errno: Errno| Error::new("prepare to start the command", errno);
        let _ = rustix::process::setsid();
        sys::default_signals();
        let wanted: Vec<i32> = FORWARDED.into_iter().chain([libc::SIGCHLD, KILL_ALL]).collect();
        let signals = Signals::take(&wanted).map_err(|error| Error::new("listen for signals", error))?;
        let (channel, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(prepare)?;
        let (stdout, stdout_end) = pipe_with(PipeFlags::CLOEXEC).map_err(prepare)?;
        let (stderr, stderr_end) = pipe_with(PipeFlags::CLOEXEC).map_err(prepare)?;
        let (stdin_end, stdin) = pipe_with(PipeFlags::CLOEXEC).map_err(prepare)?;
        let cloned = sys::clone(Kind::Child, group.to_clone_into());
        if let Some(pid) = cloned.map_err(|error| Error::new("start a process", error))? {
            let stdin = (options & KEEP_STDIN != 0).then_some(stdin);
            let stdin_once = options & STDIN_ONCE != 0;
            return Ok((Self { pid, signals, channel, stdin, stdin_once }, [stdout, stderr]));
        }
        drop(stdin);
        let become_command = || -> Result<std::convert::Infallible> {
            let spec = read_spec(state)?;
            let owner = namespace.zip(spec.user_namespace).map(|(namespace, range)| Owner {
                namespace: namespace.as_fd(),
                range,
                is_first: true,
            });
            root::enter(&spec, state.as_fd(), host.as_fd(), owner)?;
            let command = Command {
                words: &spec.command,
                env: &spec.env,
                working_dir: spec.working_dir.as_deref(),
                user: spec.user,
                group: spec.group,
                groups: &spec.groups,
                owner,
                security: &spec.security,
                control_group: group,
                oom_score_adj: spec.oom_score_adj,
            };
            if options & TERMINAL != 0 {
                let terminal =
                    open_terminal(&theirs).map_err(|errno| Error::new("open a terminal", errno))?;
                return Err(command.become_it(&Stdio::terminal(&terminal)));
            }
            let null;
            let input = if spec.stdin {
                stdin_end.as_fd()
            } else {
                null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                    .map_err(|errno| Error::new("open /dev/null in the container", errno))?;
                null.as_fd()
            };
            let (output, error) = (stdout_end.as_fd(), stderr_end.as_fd());
            Err(command.become_it(&Stdio { input, output, error, terminal: false }))
        };
        let Err(error) = become_command();
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
                    return Err(Error::new("failed to start the container", io::Error::other(why)));
                }
            }
        }
        let is_terminal = terminal.is_some();
        let outputs = match terminal {
            Some(master) => vec![("stdout", master)],
            None => vec![("stdout", stdout), ("stderr", stderr)],
        };
        let open = |(name, fd)| {
            rustix::fs::fcntl_setfl(&fd, OFlags::NONBLOCK)
                .map_err(|errno| Error::new("read the output", errno))?;
            Ok(Output { is_terminal, fd: Some(fd), stream: Stream::new(name) })
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

    /// What the command's input is written to, for one who is attached.
    fn give_input(&mut self) -> Option<OwnedFd> {
        if self.stdin_once { self.stdin.take() } else { self.stdin.as_ref()?.try_clone().ok() }
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

fn read_spec(state: &OwnedFd) -> Result<ContainerSpec> {
    let read = || -> io::Result<ContainerSpec> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(state, SPEC_FILE, flags, Mode::empty())?;
        Ok(serde_json::from_reader(io::BufReader::new(std::fs::File::from(file)))?)
    };
    read().map_err(|error| Error::new("read the container's specification", error))
}

fn open_terminal(channel: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = rustix::fs::open("/dev/pts/ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    let peer = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let terminal = rustix::pty::ioctl_tiocgptpeer(&master, peer)?;
    send(channel, b"terminal", &[master.as_fd()])?;
    Ok(terminal)
}

struct Output {
    is_terminal: bool,
    fd: Option<OwnedFd>,
    stream: Stream,
}

/// Brings what the container writes into its log.
struct Pump {
    log: Log,
    outputs: Vec<Output>,
    attachments: Attachments,
    buffer: Vec<u8>,
}

impl Pump {
    /// Works until the command has ended.
    fn run(&mut self, child: &mut Child) -> WaitStatus {
        loop {
            // The command may have ended before the signals were read.
            if let Some(status) = child.deal_with_signals() {
                return status;
            }
            let mut fds = vec![PollFd::new(&child.signals, PollFlags::IN)];
            fds.extend(
                self.outputs
                    .iter()
                    .filter_map(|output| Some(PollFd::new(output.fd.as_ref()?, PollFlags::IN))),
            );
            fds.extend(self.attachments.poll_fds());
            let _ = poll(&mut fds, None);
            drop(fds);
            for number in 0..self.outputs.len() {
                self.read(number);
            }
            let terminal = self.outputs.first().filter(|output| output.is_terminal);
            let terminal = terminal.and_then(|output| output.fd.as_ref());
            self.attachments.serve(|| match terminal {
                Some(terminal) => terminal.try_clone().ok(),
                None => child.give_input(),
            });
        }
    }

    /// Reads what is left when everybody who wrote has been killed.
    fn finish(mut self) {
        for number in 0..self.outputs.len() {
            for _ in 0..LAST_CHUNKS {
                if !self.read(number) {
                    break;
                }
            }
            if let Some(output) = self.outputs.get_mut(number) {
                self.log.finish(&mut output.stream);
            }
        }
    }

    /// Reads once from one of the outputs, if there is something; whether there was.
    fn read(&mut self, number: usize) -> bool {
        let Some(output) = self.outputs.get_mut(number) else { return false };
        let Some(fd) = &output.fd else { return false };
        self.buffer.clear();
        match rustix::io::read(fd, rustix::buffer::spare_capacity(&mut self.buffer)) {
            Ok(1..) => {
                self.log.write(&mut output.stream, &self.buffer);
                self.attachments.forward(number, &self.buffer);
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => false,
            // A terminal that nobody has open any more says EIO.
            Ok(0) | Err(_) => {
                output.fd = None;
                self.log.finish(&mut output.stream);
                false
            }
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
    pub(crate) owner: Option<Owner<'a>>,
    pub(crate) security: &'a Security,
    pub(crate) control_group: &'a Membership,
    pub(crate) oom_score_adj: Option<i32>,
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
        self.control_group.join().map_err(|errno| Error::new("join the control group", errno))?;
        if let Some(score) = self.oom_score_adj {
            // Without the right to lower it, it is that of Berth, which is as low.
            let _ = std::fs::write("/proc/self/oom_score_adj", score.to_string());
        }
        let user = Uid::from_raw(self.user.unwrap_or(0));
        let streams_owner = match &self.owner {
            Some(owner) => Some(owner.outside(user)?),
            None => self.user.map(|_| user),
        };
        if streams_owner.is_some() {
            // So that the command can open /dev/stdout. What is no pipe or terminal of ours is not ours to give away:
            // without input it is /dev/null, which may be the host's.
            for fd in [stdio.input, stdio.output, stdio.error] {
                if stdio.terminal || is_pipe(fd) {
                    let _ = rustix::fs::fchown(fd, streams_owner, None);
                }
            }
        }
        if stdio.terminal {
            rustix::process::ioctl_tiocsctty(stdio.input)
                .map_err(|errno| Error::new("take the terminal", errno))?;
        }
        if let Some(owner) = &self.owner {
            owner.enter()?;
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
        let grouped = match rustix::thread::set_thread_groups(&groups) {
            // In a user namespace with one group the list cannot be changed. It names no group that exists there.
            Err(Errno::PERM) if groups.is_empty() && is_restricted() => Ok(()),
            set => set,
        };
        grouped
            .and_then(|()| rustix::thread::set_thread_gid(Gid::from_raw(self.group.unwrap_or(0))))
            .map_err(|errno| Error::new("take the groups of the container", errno))?;
        sys::reset_signals();
        self.security.apply(user)
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

/// Sends one message with descriptors.
pub(crate) fn send(socket: impl AsFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    rustix::io::retry_on_intr(|| {
        sendmsg(&socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Receives one message with its descriptors; length 0 is the end.
pub(crate) fn receive(socket: impl AsFd, message: &mut [u8]) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(&socket, &mut [IoSliceMut::new(message)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    Ok((received.bytes, fds.collect()))
}
