//! What the same work would cost by csi-digitalocean's pattern, counted second by second under the same limit of requests.
//!
//! The facts are those of csi-digitalocean 4.16 and its sidecars. A CSI call makes its API calls one after the other. An action that was
//! begun is asked for every second until it is completed or the call's time is over. A droplet does one thing at a time: an action that
//! comes meanwhile is refused ("pending event"). A request beyond the limit is refused as well, and nothing waits for it: the CSI call
//! fails. A sidecar repeats a CSI call that failed after 1, 2, 4 and more seconds, at most 5 minutes, and has so many workers.

/// How often a sidecar waits longer after each failure, at most so many seconds.
const LONGEST_PAUSE: u64 = 300;
/// How many seconds csi-attacher gives a call.
const CALL: u64 = 15;

/// One kind of CSI call, for many volumes at once.
pub(super) struct Pattern {
    /// How many API calls an attempt makes before it waits for anything.
    pub(super) calls: u64,
    /// How many seconds its action takes, if it has one.
    pub(super) action: Option<u64>,
    /// How many calls a sidecar has under way at once.
    pub(super) workers: usize,
}

/// Where a CSI call is.
#[derive(Clone, Copy, PartialEq)]
enum Progress {
    /// To be tried at that second.
    Waiting(u64),
    /// Asking for its action until that second.
    Asking(u64),
    Done,
}

#[derive(Clone)]
struct Operation {
    server: usize,
    progress: Progress,
    pause: u64,
    /// When its action is completed, if one was begun.
    completed: Option<u64>,
}

impl Operation {
    fn failed(&mut self, now: u64) {
        self.progress = Progress::Waiting(now + self.pause);
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }
}

/// Requests in the minute that is under way.
struct Account {
    a_minute: u64,
    taken: u64,
    calls: u64,
}

impl Account {
    /// Makes a call; false if it is beyond the limit.
    fn call(&mut self) -> bool {
        self.calls += 1;
        self.taken += 1;
        self.taken <= self.a_minute
    }
}

impl Pattern {
    /// How many calls of the API so many volumes on so many servers cost, where so many calls are taken a minute.
    pub(super) fn count(&self, volumes: usize, servers: usize, a_minute: u64) -> u64 {
        let new = |number: usize| Operation {
            server: number % servers,
            progress: Progress::Waiting(0),
            pause: 1,
            completed: None,
        };
        let mut operations: Vec<Operation> = (0..volumes).map(new).collect();
        let mut busy_until = vec![0; servers];
        let mut account = Account { a_minute, taken: 0, calls: 0 };
        let mut now = 0;
        while operations.iter().any(|one| one.progress != Progress::Done) {
            if now % 60 == 0 {
                account.taken = 0;
            }
            for one in &mut operations {
                if let Progress::Asking(until) = one.progress {
                    if account.call() && one.completed.is_some_and(|at| at <= now) {
                        one.progress = Progress::Done;
                    } else if now >= until {
                        one.failed(now);
                    }
                }
            }
            let is_asking = |one: &&Operation| matches!(one.progress, Progress::Asking(_));
            let mut free = self.workers.saturating_sub(operations.iter().filter(is_asking).count());
            let mut due: Vec<&mut Operation> = operations
                .iter_mut()
                .filter(|one| matches!(one.progress, Progress::Waiting(at) if at <= now))
                .collect();
            due.sort_by_key(|one| if let Progress::Waiting(at) = one.progress { at } else { 0 });
            for one in due {
                if free == 0 {
                    break;
                }
                self.attempt(one, now, &mut account, &mut busy_until);
                free -= usize::from(matches!(one.progress, Progress::Asking(_)));
            }
            now += 1;
        }
        account.calls
    }

    /// One CSI call, until it is done, has failed, or waits for its action.
    fn attempt(&self, one: &mut Operation, now: u64, account: &mut Account, busy_until: &mut [u64]) {
        // The first call sees it if an action of an attempt before has been completed meanwhile.
        let is_completed = one.completed.is_some_and(|at| at <= now);
        for _ in 0..if is_completed { 1 } else { self.calls } {
            if !account.call() {
                return one.failed(now);
            }
        }
        one.progress = match self.action {
            Some(seconds) if !is_completed => {
                let busy = &mut busy_until[one.server];
                if *busy > now {
                    return one.failed(now);
                }
                *busy = now + seconds;
                one.completed = Some(*busy);
                Progress::Asking(now + CALL)
            }
            _ => Progress::Done,
        };
    }
}
