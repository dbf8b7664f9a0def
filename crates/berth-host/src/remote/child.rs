//! Work in a child process, which can be killed at a deadline, and left behind if not even that ends it.
//!
//! The child shares this process's memory, as one that posix_spawn makes does until it runs its program: a copy of the page
//! tables, and then of every page that either side writes, costs many times what is done there. It has a stack and a table
//! of open files of its own.
#![expect(unsafe_code, reason = "a child shares this process's memory while it makes system calls")]

use std::{
    ffi::{c_int, c_void},
    io::{self, Read as _},
    mem::MaybeUninit,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    ptr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    mm::{MapFlags, MprotectFlags, ProtFlags},
    pipe::{PipeFlags, pipe_with},
    process::{Pid, Signal, WaitOptions, pidfd_send_signal, set_parent_process_death_signal, waitpid},
};

use crate::Error;

/// How long a child that is killed may take to end before it is left to itself.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// Before it are standard input, output and error.
const FIRST_OWN: RawFd = 3;

/// Why a child did not do its work.
pub(super) struct Failure {
    pub(super) errno: Errno,
    /// What the kernel said besides.
    said: String,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self { errno, said: String::new() }
    }
}

impl Failure {
    pub(super) fn while_doing(self, doing: String) -> Error {
        Error::new(doing + &self.said, self.errno)
    }
}

/// Runs `work` in a child until the deadline. What it writes to its pipe is told if it fails.
pub(super) fn in_child(
    deadline: Duration,
    work: impl FnOnce(&OwnedFd) -> Result<(), Errno>,
) -> Result<(), Failure> {
    hear_child(deadline, None, work).map(drop)
}

/// Runs `work` in a child until the deadline. What it writes to its pipe is kept, up to what a pipe holds.
///
/// `work` runs beside the other threads and must not wait for any of them: it neither allocates nor takes a lock. Of this
/// process's open files it has `file` alone: another one may be a lock, which would be held for as long as the child waits,
/// whoever has let go of it here.
pub(super) fn hear_child<W: FnOnce(&OwnedFd) -> Result<(), Errno>>(
    deadline: Duration,
    file: Option<BorrowedFd<'_>>,
    work: W,
) -> Result<Vec<u8>, Failure> {
    let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let keep = [Some(write_end.as_raw_fd()), file.map(|file| file.as_raw_fd())];
    let mut job = Job { work: Some(work), keep, answer: &write_end };
    let stack = Stack::take()?;
    // SAFETY: the job, and all that it borrows, stays until the child has ended, or is stuck in the kernel with a kill
    // pending and will never come back to use it.
    let child = match unsafe { start(run::<W>, &stack, (&raw mut job).cast()) } {
        Ok(child) => child,
        Err(errno) => {
            stack.give_back();
            return Err(errno.into());
        }
    };
    let code = child.wait(deadline, stack)?;
    // The child's copy is closed; with ours, what it wrote has an end.
    drop(write_end);
    let mut said = Vec::new();
    let _ = io::Read::by_ref(&mut std::fs::File::from(read_end)).take(4096).read_to_end(&mut said);
    if code == 0 {
        return Ok(said);
    }
    Err(Failure { errno: Errno::from_raw_os_error(code), said: sentences(&said) })
}

/// What the kernel logs: one message a line, a letter for its level, a space, the text.
fn sentences(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let lines: Vec<&str> = text.lines().filter_map(|line| line.get(2..)).map(str::trim).collect();
    if lines.is_empty() { String::new() } else { format!(" ({})", lines.join("; ")) }
}

/// What a child is to do.
struct Job<'a, W> {
    work: Option<W>,
    /// The files that it has.
    keep: [Option<RawFd>; 2],
    answer: &'a OwnedFd,
}

/// The whole life of a child; it ends with the error's number.
extern "C" fn run<W: FnOnce(&OwnedFd) -> Result<(), Errno>>(job: *mut c_void) -> c_int {
    // SAFETY: it is what `hear_child` gave to `start`, which nobody touches before this child has ended.
    let job = unsafe { &mut *job.cast::<Job<'_, W>>() };
    let Some(work) = job.work.take() else { return Errno::INVAL.raw_os_error() };
    match alone(&job.keep).and_then(|()| work(job.answer)) {
        Ok(()) => 0,
        Err(errno) => errno.raw_os_error().min(255),
    }
}

/// In a child: keeps none of its parent's files but these and the first three, and ends when the parent does, as there
/// is nobody then to end it at its deadline.
fn alone(keep: &[Option<RawFd>; 2]) -> Result<(), Errno> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let mut next = FIRST_OWN;
    loop {
        let kept = keep.iter().flatten().copied().filter(|&file| file >= next).min();
        if kept != Some(next) {
            let last = kept.map_or(RawFd::MAX, |file| file - 1);
            close_range(next, last)?;
        }
        match kept {
            Some(file) => next = file + 1,
            None => return Ok(()),
        }
    }
}

fn close_range(first: RawFd, last: RawFd) -> Result<(), Errno> {
    // SAFETY: the files are this child's copies, and nothing of it uses them.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// A child, and the file that tells of its end.
struct Child {
    number: Pid,
    exit: OwnedFd,
}

/// Starts `run(job)` in a child, in which no signal is handled: the handlers' memory is this process's.
///
/// # Safety
///
/// `run` must be sound beside this process's threads, with a `job` that stays for as long as the child can run.
unsafe fn start(
    run: extern "C" fn(*mut c_void) -> c_int,
    stack: &Stack,
    job: *mut c_void,
) -> Result<Child, Errno> {
    let flags = libc::CLONE_VM | libc::CLONE_PIDFD | libc::SIGCHLD;
    let mut exit: c_int = -1;
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are written before they are read. The child begins on a stack of its own that is large enough, and
    // the kernel writes the descriptor before it returns here.
    let number = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let number = libc::clone(run, stack.top(), flags, job, &raw mut exit);
        let failed = last_errno();
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        Pid::from_raw(number).filter(|_| number > 0).ok_or(failed)?
    };
    // SAFETY: the kernel has just made it, for us.
    let exit = unsafe { OwnedFd::from_raw_fd(exit) };
    Ok(Child { number, exit })
}

impl Child {
    /// Its exit code; it is killed at the deadline.
    fn wait(self, deadline: Duration, stack: Stack) -> Result<i32, Errno> {
        if !self.ends(deadline) {
            let _ = pidfd_send_signal(&self.exit, Signal::KILL);
            if !self.ends(KILL_GRACE) {
                // Stuck where not even a kill reaches it; somebody has to see it end one day.
                std::thread::spawn(move || self.reap(stack));
                return Err(Errno::TIMEDOUT);
            }
            self.reap(stack)?;
            return Err(Errno::TIMEDOUT);
        }
        self.reap(stack)
    }

    fn reap(&self, stack: Stack) -> Result<i32, Errno> {
        let ended = loop {
            match waitpid(Some(self.number), WaitOptions::empty()) {
                Err(Errno::INTR) => {}
                ended => break ended,
            }
        };
        match ended? {
            Some((_, status)) => {
                stack.give_back();
                Ok(status.exit_status().unwrap_or(Errno::INTR.raw_os_error()))
            }
            None => Err(Errno::CHILD),
        }
    }

    fn ends(&self, within: Duration) -> bool {
        let deadline = Instant::now() + within;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.exit, PollFlags::IN)], timeout.as_ref()) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(Errno::INTR) if !left.is_zero() => {}
                Err(_) => return false,
            }
        }
    }
}

/// The memory of a child's stack. One that is dropped is leaked: who knows whether its child has ended.
struct Stack {
    base: ptr::NonNull<c_void>,
}

// SAFETY: it is a piece of memory that nobody else has.
unsafe impl Send for Stack {}

/// Those that no child has: unmapping memory is dear where there are many threads.
static STACKS: Mutex<Vec<Stack>> = Mutex::new(Vec::new());

impl Stack {
    /// More than a few system calls need, and taken only as far as it is used.
    const SIZE: usize = 256 << 10;
    /// Nothing is below the stack: one that is too small ends its child.
    const GUARD: usize = 64 << 10;

    fn take() -> Result<Self, Errno> {
        let known = STACKS.lock().pop();
        match known {
            Some(stack) => Ok(stack),
            None => Self::map(),
        }
    }

    fn map() -> Result<Self, Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::STACK | MapFlags::NORESERVE;
        // SAFETY: new memory, at an address that the kernel chooses, of which the lowest part is made unusable.
        let base = unsafe {
            let base = rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                Self::SIZE,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?;
            rustix::mm::mprotect(base, Self::GUARD, MprotectFlags::empty())?;
            base
        };
        ptr::NonNull::new(base).map(|base| Self { base }).ok_or(Errno::NOMEM)
    }

    /// Stacks grow downwards.
    fn top(&self) -> *mut c_void {
        // SAFETY: one past the end of the same mapping, which is aligned as a page is.
        unsafe { self.base.as_ptr().cast::<u8>().add(Self::SIZE).cast() }
    }

    /// For the next child, now that there is none on it.
    fn give_back(self) {
        STACKS.lock().push(self);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::fd::AsFd as _,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn a_child_that_waits_is_killed_at_the_deadline() {
        let took = || {
            let begun = Instant::now();
            let outcome = in_child(Duration::from_millis(50), |_| {
                loop {
                    // SAFETY: waits for a signal.
                    unsafe { libc::pause() };
                }
            });
            assert_eq!(outcome.unwrap_err().errno, Errno::TIMEDOUT);
            begun.elapsed()
        };
        // A busy machine is slow at times, and who waits for the grace to end is so always.
        assert!((0..10).any(|_| took() < KILL_GRACE));
    }

    #[test]
    fn a_child_that_waits_holds_no_lock_of_its_parent() {
        // The child's too, as all memory is.
        static WAITS: AtomicBool = AtomicBool::new(false);
        static MAY_END: AtomicBool = AtomicBool::new(false);
        let scratch = tempfile::tempdir().unwrap();
        let dir = crate::path::Dir::open(scratch.path()).unwrap();
        let lock = dir.lock_exclusively("lock").unwrap();
        let waiting = std::thread::spawn(|| {
            in_child(Duration::from_secs(60), |_| {
                WAITS.store(true, Ordering::Release);
                while !MAY_END.load(Ordering::Acquire) {
                    // SAFETY: waits a millisecond.
                    unsafe { libc::usleep(1000) };
                }
                Ok(())
            })
        });
        while !WAITS.load(Ordering::Acquire) && !waiting.is_finished() {
            std::thread::yield_now();
        }
        drop(lock);
        // Another test's child may have it until it runs its program; this one would for as long as it waits.
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Err(error) = dir.lock_exclusively("lock") {
            assert!(Instant::now() < deadline, "somebody has it still: {}", error.sentence());
        }
        assert!(!waiting.is_finished(), "the child was not there to hold it");
        MAY_END.store(true, Ordering::Release);
        assert!(waiting.join().unwrap().is_ok());
    }

    #[test]
    fn a_child_has_the_file_that_it_needs_and_no_other() {
        let (read_end, write_end) = pipe_with(PipeFlags::empty()).unwrap();
        let said = hear_child(SOON, Some(write_end.as_fd()), |answer| {
            for file in FIRST_OWN..1024 {
                // SAFETY: asks whether it is open; nobody else uses this copy.
                if unsafe { libc::fcntl(file, libc::F_GETFD) } >= 0 {
                    rustix::io::write(answer, &file.to_ne_bytes())?;
                }
            }
            Ok(())
        });
        let mut open: Vec<RawFd> =
            said.ok().unwrap().chunks(4).map(|file| RawFd::from_ne_bytes(file.try_into().unwrap())).collect();
        assert_eq!(open.len(), 2, "{open:?}");
        open.retain(|file| *file != write_end.as_raw_fd());
        assert_eq!(open.len(), 1, "the file, and where it answers");
        drop(read_end);
    }

    #[test]
    fn many_children_at_once_give_their_own_answers() {
        let ask = |caller: u32| {
            for number in 0..200_u32 {
                let question = caller * 1000 + number;
                let said = hear_child(SOON, None, |answer| {
                    rustix::io::write(answer, &question.to_ne_bytes())?;
                    if number % 3 == 0 { Err(Errno::NOTTY) } else { Ok(()) }
                });
                match said {
                    Ok(said) => assert_eq!(said, question.to_ne_bytes()),
                    Err(failure) => assert_eq!((failure.errno, number % 3), (Errno::NOTTY, 0)),
                }
            }
        };
        std::thread::scope(|scope| {
            for caller in 0..8 {
                scope.spawn(move || ask(caller));
            }
        });
    }
}
