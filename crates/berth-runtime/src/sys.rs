//! The system calls that containers need and no crate wraps.
#![expect(unsafe_code, reason = "clone3(2), signalfd(2), execve(2) and the like have no safe wrapper")]

use std::{
    ffi::CString,
    io, mem,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
    ptr,
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::{
    io::Errno,
    process::{Gid, Pid, Uid},
    thread::{CapabilitySets, capabilities, set_capabilities},
};

/// The flag of clone3(2), which does not fit into the type that the C library has for flags.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// What `clone` shares, and what is new.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// A child as of fork(2).
    Child,
    /// Process 1 of new mount, pid, uts and ipc namespaces, and a child of our parent.
    Container,
}

/// Goes on as two processes: `None` in the new one, which is a member of `group`, a control group of version 2.
///
/// The caller must have one thread, as every process of this module does.
pub(crate) fn clone(kind: Kind, group: Option<BorrowedFd<'_>>) -> io::Result<Option<Pid>> {
    let namespaces = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;
    let (flags, exit_signal) = match kind {
        Kind::Child => (0, libc::SIGCHLD),
        // The kernel takes the exit signal from the caller's own then, and wants none here.
        Kind::Container => (namespaces | libc::CLONE_PARENT, 0),
    };
    // SAFETY: all zeros is a `clone_args` that asks for nothing.
    let mut args: libc::clone_args = unsafe { mem::zeroed() };
    args.flags = u64::from(flags.cast_unsigned());
    args.exit_signal = u64::from(exit_signal.cast_unsigned());
    if let Some(group) = group {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(group.as_raw_fd().cast_unsigned());
    }
    // SAFETY: without a stack and CLONE_VM this is fork: the child goes on with a copy of this single-threaded process.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(i32::try_from(pid).ok().and_then(Pid::from_raw)),
    }
}

/// Gives this process a copy of its mount namespace for itself.
pub(crate) fn leave_mount_namespace() -> rustix::io::Result<()> {
    // SAFETY: no other thread shares the root or working directory that go along; descriptors stay as they are.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
}

/// Gives this process copies of its mount, uts and ipc namespaces, which belong to its user namespace.
pub(crate) fn own_namespaces() -> rustix::io::Result<()> {
    use rustix::thread::UnshareFlags;
    let namespaces = UnshareFlags::NEWNS | UnshareFlags::NEWUTS | UnshareFlags::NEWIPC;
    // SAFETY: no other thread shares the root or working directory that go along; descriptors stay as they are.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }
}

/// Makes files that belong to others. For a process of root with one thread.
pub(crate) fn making_files_of<T>(
    user: Uid,
    group: Gid,
    work: impl FnOnce() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    let become_owner = |user: Uid, group: Gid| {
        // SAFETY: neither call touches memory. They cannot fail for root.
        unsafe {
            libc::setfsgid(group.as_raw());
            libc::setfsuid(user.as_raw());
        }
    };
    become_owner(user, group);
    // Another user than root loses the rights over files by that.
    let made = capabilities(None)
        .and_then(|sets| set_capabilities(None, CapabilitySets { effective: sets.permitted, ..sets }))
        .and_then(|()| work());
    become_owner(Uid::ROOT, Gid::ROOT);
    made
}

/// Ends the process at once: no destructor, no exit handler.
pub(crate) fn exit(code: i32) -> ! {
    // SAFETY: _exit(2) has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Makes every descriptor from 3 on close at exec.
pub(crate) fn close_at_exec() {
    // SAFETY: only the flag of descriptors changes.
    unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// Closes every descriptor from 3 on. For a process that has opened none yet.
pub(crate) fn close_inherited() {
    // SAFETY: called before anything in this process owns a descriptor.
    unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, 0) };
}

/// Every signal does again what it does by default, and none is blocked.
pub(crate) fn reset_signals() {
    default_signals();
    unblock_signals();
}

/// Every signal does again what it does by default. Those that are blocked stay blocked, and wait.
pub(crate) fn default_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL runs no code of ours. Signals that cannot be set are refused, which is as well.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Blocks every signal: what arrives waits, also in a process 1, which would lose it otherwise.
pub(crate) fn block_signals() {
    // SAFETY: the set is initialized by sigfillset before it is used.
    unsafe {
        let mut all: libc::sigset_t = mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, ptr::null_mut());
    }
}

/// Blocks no signal any more.
pub(crate) fn unblock_signals() {
    // SAFETY: the set is initialized by sigemptyset before it is used.
    unsafe {
        let mut none: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}

/// Children that exit leave no zombie, and are not waited for.
pub(crate) fn ignore_children() {
    // SAFETY: SIG_IGN runs no code of ours.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Signals as something to read.
pub(crate) struct Signals(OwnedFd);

impl Signals {
    /// Blocks every signal; `wanted` can be read.
    pub(crate) fn take(wanted: &[i32]) -> io::Result<Self> {
        block_signals();
        // SAFETY: the set is initialized before it is used; the new descriptor is ours alone.
        unsafe {
            let mut set: libc::sigset_t = mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in wanted {
                libc::sigaddset(&raw mut set, *signal);
            }
            match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    /// The next signal that arrived.
    pub(crate) fn next(&self) -> Option<i32> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.0, &mut info) {
            // The number is the first field.
            Ok(length) if length == info.len() => {
                Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
            }
            _ => None,
        }
    }
}

impl std::os::fd::AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sends a signal to one process; one that is gone is none of our concern.
pub(crate) fn kill(pid: Pid, signal: i32) {
    // SAFETY: kill(2) touches no memory.
    unsafe { libc::kill(pid.as_raw_nonzero().get(), signal) };
}

/// Kills every process of the namespace but process 1, which calls this.
pub(crate) fn kill_others() {
    // SAFETY: kill(2) touches no memory.
    unsafe { libc::kill(-1, libc::SIGKILL) };
}

/// Sends a signal by descriptor, with no doubt about whom it reaches.
pub(crate) fn send_signal(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: without siginfo the call touches no memory of ours.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Becomes another program; returns only why that failed.
pub(crate) fn execve(program: &CString, arguments: &[CString], environment: &[CString]) -> Errno {
    let pointers = |strings: &[CString]| {
        strings.iter().map(|string| string.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: both arrays end with a null pointer, and the strings they point to outlive the call.
    unsafe { libc::execve(program.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    last_errno()
}

/// Has the kernel run a filter at every system call of this process and its children, in addition to those it has.
pub(crate) fn set_seccomp_filter(program: &[seccompiler::sock_filter]) -> io::Result<()> {
    let len = libc::c_ushort::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut().cast() };
    // SAFETY: `sock_filter` has the layout of the C type, and the kernel copies the program during the call.
    let set =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The time, in nanoseconds since 1970.
pub(crate) fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos()
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
