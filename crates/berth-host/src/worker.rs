//! Processes that do work which may never end, one request after the other, and are killed when it takes too long.
//!
//! A worker is this program again, started with an argument that names its role. It has one thread and shares no memory
//! with anybody: requests and answers are JSON documents on a socket, its standard input. A worker that has answered waits
//! for the next request, so that a call costs two messages and not a new process.

use std::{
    ffi::OsString,
    io::{self, Read as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, OnceLock, Weak,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Signal, set_parent_process_death_signal},
};
use serde::{Serialize, de::DeserializeOwned};

/// How long a worker that was killed may take to end before it is left to itself.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// How long workers without a request are kept; one is kept for as long as there is somebody to call it.
const IDLE_LIFETIME: Duration = Duration::from_secs(10);
/// Threads that start processes or wait for their end need little.
const SMALL_STACK: usize = 64 << 10;

/// The workers of one role.
#[derive(Debug)]
pub struct Workers {
    program: PathBuf,
    arguments: Vec<OsString>,
    idle: Arc<Mutex<Idle>>,
}

/// Workers without a request.
#[derive(Debug, Default)]
struct Idle {
    /// With the time since when; the one that was used last is used next.
    workers: Vec<(Worker, Instant)>,
    /// Whether somebody will end those that are of no use.
    is_watched: bool,
}

impl Workers {
    /// Workers of `program`, whose `main` begins with [`serve`] for this role. None is started before the first call.
    pub fn new(program: &Path, role: &str) -> Self {
        Self::with_arguments(program, [role.into()].into())
    }

    pub(crate) fn with_arguments(program: &Path, arguments: Vec<OsString>) -> Self {
        Self { program: program.to_owned(), arguments, idle: Arc::default() }
    }

    /// Has a worker handle `request`, and blocks until its answer.
    ///
    /// A worker that has not answered at the deadline is killed: errno `ETIMEDOUT`, and what it was doing will not have an
    /// effect later, unless the kernel keeps it from dying. One that dies before it answers is errno `EINTR`.
    pub fn call<A: DeserializeOwned>(&self, request: &impl Serialize, deadline: Duration) -> io::Result<A> {
        let answer = self.exchange(&serde_json::to_vec(request)?, deadline)?;
        Ok(serde_json::from_slice(&answer)?)
    }

    fn exchange(&self, request: &[u8], deadline: Duration) -> io::Result<Vec<u8>> {
        let mut worker = loop {
            let idle = self.idle.lock().workers.pop();
            let is_new = idle.is_none();
            let mut worker = match idle {
                Some((worker, _)) => worker,
                None => Worker::start(&self.program, &self.arguments)?,
            };
            match worker.send(request, deadline) {
                Ok(()) => break worker,
                // Somebody has killed it while it had nothing to do.
                Err(_) if !is_new => {}
                Err(error) => return Err(error),
            }
        };
        let answer = worker.receive(deadline)?;
        self.keep(worker);
        Ok(answer)
    }

    /// Keeps a worker for the next request.
    fn keep(&self, worker: Worker) {
        let mut idle = self.idle.lock();
        idle.workers.push((worker, Instant::now()));
        if idle.workers.len() > 1 && !idle.is_watched {
            idle.is_watched = order(Order::Watch(Arc::downgrade(&self.idle))).is_ok();
        }
    }
}

/// A process and the socket to it; it ends when this is dropped.
#[derive(Debug)]
struct Worker {
    socket: Option<UnixStream>,
    child: Option<Child>,
}

impl Worker {
    fn start(program: &Path, arguments: &[OsString]) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        #[expect(clippy::disallowed_methods, reason = "every request has its deadline")]
        let mut command = Command::new(program);
        command.args(arguments).current_dir("/");
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { child: Some(start_process(command)?), socket: Some(ours) })
    }

    fn socket(&self) -> &UnixStream {
        self.socket.as_ref().expect("the socket is there until the worker is dropped")
    }

    fn send(&mut self, request: &[u8], deadline: Duration) -> io::Result<()> {
        self.socket().set_write_timeout(Some(at_least_a_little(deadline)))?;
        write_message(&mut self.socket(), request).inspect_err(|_| self.kill())
    }

    fn receive(&mut self, deadline: Duration) -> io::Result<Vec<u8>> {
        self.socket().set_read_timeout(Some(at_least_a_little(deadline)))?;
        match read_message(&mut self.socket()) {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(Errno::INTR.into()),
            Err(error) => {
                self.kill();
                let late = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
                Err(if late { Errno::TIMEDOUT.into() } else { error })
            }
        }
    }

    /// Ends the process, and waits until it has ended, or for a while.
    fn kill(&mut self) {
        let Some(child) = &mut self.child else { return };
        let _ = child.kill();
        // Its end of the socket closes with it.
        let _ = self.socket().set_read_timeout(Some(KILL_GRACE));
        let _ = self.socket().read(&mut [0; 64]);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.socket = None;
        let Some(mut child) = self.child.take() else { return };
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        // It is about to end, or stuck where not even a kill reaches it. Somebody has to see it end one day.
        let waiter = thread::Builder::new().name("worker's end".to_owned()).stack_size(SMALL_STACK);
        let _ = waiter.spawn(move || child.wait());
    }
}

fn at_least_a_little(deadline: Duration) -> Duration {
    deadline.max(Duration::from_millis(1))
}

/// What the thread does that all workers have.
enum Order {
    /// Start a process. It is killed with the thread that started it, so that has to live as long as this program.
    Start(Box<Command>, mpsc::Sender<io::Result<Child>>),
    /// End those that are of no use for a while, all but one.
    Watch(Weak<Mutex<Idle>>),
}

fn start_process(command: Command) -> io::Result<Child> {
    let (sender, outcome) = mpsc::channel();
    order(Order::Start(Box::new(command), sender))?;
    outcome.recv().map_err(io::Error::other)?
}

fn order(order: Order) -> io::Result<()> {
    static THREAD: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let thread = if let Some(thread) = THREAD.get() {
        thread
    } else {
        let (sender, orders) = mpsc::channel();
        let thread = thread::Builder::new().name("workers".to_owned()).stack_size(SMALL_STACK);
        thread.spawn(move || follow(&orders))?;
        THREAD.get_or_init(|| sender)
    };
    thread.send(order).map_err(|_| io::Error::other("the thread that starts processes has ended"))
}

fn follow(orders: &mpsc::Receiver<Order>) {
    let mut watched: Vec<Weak<Mutex<Idle>>> = Vec::new();
    loop {
        let wait = if watched.is_empty() { Duration::MAX } else { IDLE_LIFETIME / 4 };
        match orders.recv_timeout(wait) {
            Ok(Order::Start(mut command, outcome)) => {
                let started = command.spawn();
                // With it goes the worker's end of the socket, so that the worker alone has it.
                drop(command);
                let _ = outcome.send(started);
            }
            Ok(Order::Watch(idle)) => watched.push(idle),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        watched.retain(|idle| idle.upgrade().is_some_and(|idle| trim(&mut idle.lock())));
    }
}

/// Ends workers that have been of no use for a while; whether there is still more than one.
fn trim(idle: &mut Idle) -> bool {
    let unused = idle.workers.iter().take_while(|(_, since)| since.elapsed() > IDLE_LIFETIME).count();
    let most = idle.workers.len().saturating_sub(1);
    idle.workers.drain(..unused.min(most));
    idle.is_watched = idle.workers.len() > 1;
    idle.is_watched
}

/// Answers the requests of the process that started this one, and ends the process when there are no more.
pub fn serve<Q: DeserializeOwned, A: Serialize>(handle: impl FnMut(Q) -> A) -> ! {
    let served = answer_requests(handle);
    std::process::exit(i32::from(served.is_err()));
}

/// Handles requests until there are no more.
pub(crate) fn answer_requests<Q: DeserializeOwned, A: Serialize>(
    mut handle: impl FnMut(Q) -> A,
) -> io::Result<()> {
    // A signal from the terminal is for the caller, which may need its workers to stop in order.
    let _ = rustix::process::setsid();
    // What a worker does after its caller has died would meet what the next one does.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let input = rustix::stdio::stdin();
    let mut caller = [PollFd::new(&input, PollFlags::empty())];
    poll(&mut caller, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if caller[0].revents().contains(PollFlags::HUP) {
        return Ok(());
    }
    let mut socket = UnixStream::from(rustix::io::dup(input)?);
    while let Some(request) = read_message(&mut socket)? {
        let answer = handle(serde_json::from_slice(&request)?);
        write_message(&mut socket, &serde_json::to_vec(&answer)?)?;
    }
    Ok(())
}

/// A message is its length and its bytes.
fn write_message(to: &mut impl io::Write, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    to.write_all(&[&length.to_ne_bytes(), message].concat())
}

/// The next message; none at the end.
fn read_message(from: &mut impl io::Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; size_of::<u32>()];
    match from.read_exact(&mut length) {
        Err(error)
            if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) =>
        {
            return Ok(None);
        }
        read => read?,
    }
    let mut message = vec![0; usize::try_from(u32::from_ne_bytes(length)).map_err(io::Error::other)?];
    from.read_exact(&mut message)?;
    Ok(Some(message))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// Workers of this test program: the test named `test` serves.
    pub(crate) fn workers_of(test: &str) -> Workers {
        let arguments = [test, "--exact", "--ignored", "--nocapture", "--test-threads=1"];
        Workers::with_arguments(Path::new("/proc/self/exe"), arguments.map(OsString::from).into())
    }

    /// Whether this program was started by [`workers_of`] and not by somebody who runs all tests.
    pub(crate) fn is_worker() -> bool {
        rustix::fs::fstat(rustix::stdio::stdin())
            .is_ok_and(|input| rustix::fs::FileType::from_raw_mode(input.st_mode).is_socket())
    }

    #[derive(Debug, serde::Serialize, serde::Deserialize)]
    enum Question {
        Echo(u32),
        Wait,
        OpenFiles,
        End,
    }

    #[test]
    #[ignore = "other tests start it as a process"]
    fn worker_process() {
        if !is_worker() {
            return;
        }
        answer_requests(|question: Question| match question {
            Question::Echo(number) => vec![number],
            Question::Wait => loop {
                thread::park();
            },
            Question::OpenFiles => (3..1024)
                .filter(|file| {
                    let found = std::fs::metadata(format!("/proc/self/fd/{file}"));
                    found.is_ok_and(|found| found.mode() & 0o170_000 == 0o100_000)
                })
                .collect(),
            Question::End => std::process::exit(0),
        })
        .unwrap();
    }

    fn workers() -> Workers {
        workers_of("worker::tests::worker_process")
    }

    fn ask(workers: &Workers, question: &Question, deadline: Duration) -> io::Result<Vec<u32>> {
        workers.call(question, deadline)
    }

    #[test]
    fn a_worker_is_used_again() {
        let workers = workers();
        for number in 0..10 {
            assert_eq!(ask(&workers, &Question::Echo(number), SOON).unwrap(), [number]);
        }
        assert_eq!(workers.idle.lock().workers.len(), 1);
    }

    #[test]
    fn a_worker_that_waits_is_killed_at_the_deadline_and_replaced() {
        let workers = workers();
        ask(&workers, &Question::Echo(1), SOON).unwrap();
        let process = workers.idle.lock().workers[0].0.child.as_ref().unwrap().id();
        let error = ask(&workers, &Question::Wait, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::TIMEDOUT.raw_os_error()));
        assert!(workers.idle.lock().workers.is_empty());
        // Its socket is closed a moment before the process has ended.
        let killed = Instant::now();
        loop {
            let state = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            if state.is_empty() || state.contains(") Z ") || state.contains(") X ") {
                break;
            }
            assert!(killed.elapsed() < SOON, "{state}");
            thread::yield_now();
        }
        assert_eq!(ask(&workers, &Question::Echo(2), SOON).unwrap(), [2]);
    }

    #[test]
    fn a_worker_that_died_is_replaced_and_one_that_dies_at_work_is_an_error() {
        let workers = workers();
        ask(&workers, &Question::Echo(1), SOON).unwrap();
        {
            let mut idle = workers.idle.lock();
            let child = idle.workers[0].0.child.as_mut().unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(ask(&workers, &Question::Echo(2), SOON).unwrap(), [2]);
        let error = ask(&workers, &Question::End, SOON).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::INTR.raw_os_error()));
    }

    #[test]
    fn a_worker_holds_no_lock_of_its_parent() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = crate::path::Dir::open(scratch.path()).unwrap();
        let lock = dir.lock_exclusively("lock").unwrap();
        let workers = workers();
        assert_eq!(ask(&workers, &Question::OpenFiles, SOON).unwrap(), [0; 0]);
        drop(lock);
        // A child of another test may have it until it runs its program.
        let deadline = Instant::now() + SOON;
        while let Err(error) = dir.lock_exclusively("lock") {
            assert!(Instant::now() < deadline, "somebody has it still: {}", error.sentence());
        }
    }

    #[test]
    fn many_callers_at_once_get_their_own_answers() {
        let workers = workers();
        thread::scope(|scope| {
            for caller in 0..8 {
                let workers = &workers;
                scope.spawn(move || {
                    for number in 0..50 {
                        let question = caller * 1000 + number;
                        assert_eq!(ask(workers, &Question::Echo(question), SOON).unwrap(), [question]);
                    }
                });
            }
        });
        assert!(workers.idle.lock().workers.len() <= 8);
        for (_, since) in &mut workers.idle.lock().workers {
            *since -= IDLE_LIFETIME + Duration::from_secs(1);
        }
        assert!(!trim(&mut workers.idle.lock()));
        assert_eq!(workers.idle.lock().workers.len(), 1);
    }
}
