//! Starts a program without a copy of this process.
//!
//! `fork` copies the page tables of the caller, which takes milliseconds in a process of some hundred megabytes, and every page that
//! either side then writes is copied too. Here the child borrows the memory of its parent, whose calling thread stands still
//! until the program is loaded or could not be: what `posix_spawn` does, which cannot ask to die with its parent.
#![expect(
    unsafe_code,
    reason = "a child that shares memory makes system calls until it has a program of its own"
)]

use std::{
    env,
    ffi::{CStr, CString, OsStr, c_char, c_int, c_void},
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd as _, OwnedFd, RawFd},
        unix::{ffi::OsStrExt as _, process::ExitStatusExt as _},
    },
    path::Path,
    process::ExitStatus,
    ptr,
    sync::atomic::{AtomicI32, Ordering},
};

use rustix::{
    fs::{Access, access},
    io::fcntl_dupfd_cloexec,
    process::{Pid, WaitId, WaitIdOptions, waitid},
};

/// The stack on which the child makes its system calls.
const STACK: usize = 64 << 10;
const LAST_SIGNAL: c_int = 64;

/// A started program, in a process group of its own; it is killed when the thread that started it ends.
#[derive(Debug)]
pub(super) struct Process {
    /// Its number, which is also that of its process group.
    pub(super) pid: Pid,
    /// Becomes readable when the program has ended.
    pub(super) exit: OwnedFd,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Waits until the program has ended.
    pub(super) fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            match self.ask(WaitIdOptions::EXITED) {
                Ok(Some(status)) => return Ok(status),
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// How the program ended, if it has.
    pub(super) fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.ask(WaitIdOptions::EXITED | WaitIdOptions::NOHANG)
    }

    /// The kernel says once how a program ended.
    fn ask(&mut self, options: WaitIdOptions) -> io::Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = waitid(WaitId::PidFd(self.exit.as_fd()), options)?.as_ref().map(status_of);
        }
        Ok(self.ended)
    }
}

fn status_of(status: &rustix::process::WaitIdStatus) -> ExitStatus {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => ExitStatus::from_raw(code << 8),
        (None, signal) => ExitStatus::from_raw(signal.unwrap_or_default()),
    }
}

/// Starts `program`, looked up in `PATH` if it has no slash, with these three standard streams and the environment of this
/// process, in which `variables` are set.
pub(super) fn spawn<A: AsRef<OsStr>>(
    program: &OsStr,
    args: impl IntoIterator<Item = A>,
    variables: &[(String, String)],
    streams: [OwnedFd; 3],
) -> io::Result<Process> {
    let path = c_string(find(program)?.as_os_str())?;
    let args = args.into_iter().map(|arg| c_string(arg.as_ref()));
    let words = [c_string(program)].into_iter().chain(args).collect::<io::Result<Vec<_>>>()?;
    let inherited = env::vars_os().filter(|(name, _)| variables.iter().all(|(own, _)| *name != **own));
    let inherited = inherited.map(|(name, value)| c_string(&[name, value].join(OsStr::new("="))));
    let own = variables.iter().map(|(name, value)| c_string(OsStr::new(&format!("{name}={value}"))));
    let environment = inherited.chain(own).collect::<io::Result<Vec<_>>>()?;
    let [input, output, errors] = streams;
    let streams = [above(input)?, above(output)?, above(errors)?];
    let plan = Plan {
        path,
        words: pointers(&words),
        environment: pointers(&environment),
        streams: streams.each_ref().map(AsRawFd::as_raw_fd),
        parent: rustix::process::getpid().as_raw_nonzero().get(),
        errno: AtomicI32::new(0),
    };
    start(&plan)
}

/// A descriptor above those of the standard streams, which would otherwise be replaced before it is used.
fn above(stream: OwnedFd) -> io::Result<OwnedFd> {
    if stream.as_raw_fd() > 2 { Ok(stream) } else { Ok(fcntl_dupfd_cloexec(stream, 3)?) }
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// The pointers to some strings, with a null behind them.
fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect()
}

fn find(program: &OsStr) -> io::Result<std::path::PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Ok(program.into());
    }
    let paths = env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin:/sbin:/bin".into());
    let is_program = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    let found =
        env::split_paths(&paths).map(|directory| directory.join(program)).find(|path| is_program(path));
    found.ok_or_else(|| rustix::io::Errno::NOENT.into())
}

/// All that the child needs, made before it starts: it must not allocate.
struct Plan {
    path: CString,
    words: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    streams: [RawFd; 3],
    parent: c_int,
    /// Why the program could not be started; written by the child.
    errno: AtomicI32,
}

fn start(plan: &Plan) -> io::Result<Process> {
    let mut stack = vec![0_u128; STACK / size_of::<u128>()];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    let mut pidfd: c_int = -1;
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: no signal is handled by this thread until the mask is put back, so that none is in the child before its handlers are
    // gone. The child has a stack of its own, aligned to 16 bytes and large enough; it reads `plan`, which outlives it
    // because this call returns when the child has another program or is dead (CLONE_VFORK). `pidfd` may be written.
    let pid = unsafe {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let top = stack.as_mut_ptr().add(stack.len()).cast::<c_void>();
        let argument = ptr::from_ref(plan).cast_mut().cast::<c_void>();
        let pid = libc::clone(child, top, flags, argument, &raw mut pidfd);
        let error = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        if pid < 0 {
            return Err(error);
        }
        pid
    };
    // SAFETY: the kernel has opened this descriptor for this call.
    let exit = unsafe { OwnedFd::from_raw_fd(pidfd) };
    let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::from(io::ErrorKind::Other))?;
    let mut process = Process { pid, exit, ended: None };
    match plan.errno.load(Ordering::Relaxed) {
        0 => Ok(process),
        errno => {
            process.wait()?;
            Err(io::Error::from_raw_os_error(errno))
        }
    }
}

/// What the child does: only system calls, on the memory of its parent, which it changes nowhere but in `errno`.
extern "C" fn child(plan: *mut c_void) -> c_int {
    // SAFETY: `start` gives a plan that lives until this function has ended or has become another program.
    let plan = unsafe { &*plan.cast::<Plan>() };
    // SAFETY: each of these calls may be made between fork and exec. The handlers of signals are the child's own copy.
    unsafe {
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        for signal in 1..=LAST_SIGNAL {
            // What this process ignores, the program ignores too, but for the signal that Rust's library ignores for all. The
            // signals of the kernel and of the C library are refused, and need no change.
            let mut now: libc::sigaction = std::mem::zeroed();
            let known = libc::sigaction(signal, ptr::null(), &raw mut now) == 0;
            if known && (now.sa_sigaction != libc::SIG_IGN || signal == libc::SIGPIPE) {
                libc::sigaction(signal, &raw const default, ptr::null_mut());
            }
        }
        let failed = libc::setpgid(0, 0) != 0
            || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0
            || (0..3).zip(plan.streams).any(|(number, stream)| libc::dup2(stream, number) < 0);
        // The parent may have died before it was to be followed: the child then has another.
        if !failed && libc::getppid() == plan.parent {
            let mut none = MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigemptyset(none.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut());
            let path: &CStr = &plan.path;
            libc::execve(path.as_ptr(), plan.words.as_ptr(), plan.environment.as_ptr());
        }
        let errno = io::Error::last_os_error().raw_os_error().filter(|errno| *errno != 0);
        plan.errno.store(errno.unwrap_or(libc::ESRCH), Ordering::Relaxed);
        libc::_exit(127)
    }
}
