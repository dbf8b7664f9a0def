//! Talking to the kernel: requests are read one after the other, done side by side, and can be given up.

use std::{
    collections::HashMap,
    io::IoSlice,
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use tokio::{
    runtime,
    sync::{Notify, Semaphore},
    time::sleep,
};

use crate::{
    filesystem::{Filesystem, Outcome},
    users::is_killed,
    wire::{
        self, Answer, Arguments, Header, LARGEST_REQUEST, LARGEST_TRANSFER, MINOR, forget_attributes, op,
        out_header,
    },
};

/// Requests that are at the server at the same time.
const AT_ONCE: usize = 64;
/// Requests that the kernel sends ahead of anybody who waits for them.
const BACKGROUND: u16 = 64;
const PAGE: u32 = 4096;
/// How often a caller that got a signal is asked whether it is being killed.
const WATCH: Duration = Duration::from_millis(100);
/// A caller that cannot be inspected is released when it got a signal and has waited so long.
const LET_GO: Duration = Duration::from_secs(5);

mod flag {
    //! What both sides can do.
    pub(super) const ASYNC_READ: u32 = 1;
    pub(super) const BIG_WRITES: u32 = 1 << 5;
    pub(super) const DO_READDIRPLUS: u32 = 1 << 13;
    pub(super) const READDIRPLUS_AUTO: u32 = 1 << 14;
    pub(super) const ASYNC_DIO: u32 = 1 << 15;
    pub(super) const PARALLEL_DIROPS: u32 = 1 << 18;
    pub(super) const MAX_PAGES: u32 = 1 << 22;
}

/// A mounted filesystem's other end.
#[derive(Debug)]
pub(crate) struct Session {
    device: OwnedFd,
    filesystem: Arc<Filesystem>,
    running: Mutex<HashMap<u64, Arc<Running>>>,
    places: Semaphore,
}

/// A request that somebody waits for.
#[derive(Debug)]
struct Running {
    pid: u32,
    since: Instant,
    given_up: Notify,
}

impl Session {
    pub(crate) fn new(device: OwnedFd, filesystem: Filesystem) -> Arc<Self> {
        Arc::new(Self {
            device,
            filesystem: Arc::new(filesystem),
            running: Mutex::default(),
            places: Semaphore::new(AT_ONCE),
        })
    }

    pub(crate) fn filesystem(&self) -> &Filesystem {
        &self.filesystem
    }

    /// Serves until the filesystem is unmounted; blocks.
    pub(crate) fn serve(self: &Arc<Self>, runtime: &runtime::Handle) -> rustix::io::Result<()> {
        let mut buffer = vec![0; LARGEST_REQUEST];
        loop {
            match rustix::io::read(&self.device, &mut buffer[..]) {
                Ok(length) => self.take(&buffer[..length], runtime),
                // A request was given up before it was read.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                // A forced unmount aborts the connection: a request that is just then being copied ends in the second.
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn take(self: &Arc<Self>, message: &[u8], runtime: &runtime::Handle) {
        let Some((header, mut from)) = wire::parse(message) else { return };
        match header.opcode {
            op::INIT => self.send(&header, init(&mut from).map(Outcome::from)),
            op::FORGET => {
                if let Ok(count) = from.u64() {
                    self.filesystem.forget(header.node, count);
                }
            }
            op::BATCH_FORGET => drop(self.forget_all(&mut from)),
            op::INTERRUPT => {
                if let Ok(unique) = from.u64() {
                    self.interrupt(unique, runtime);
                }
            }
            _ => self.run(header, from, runtime),
        }
    }

    fn forget_all(&self, from: &mut Arguments) -> Result<(), Errno> {
        let count = from.u32()?;
        from.skip(4)?;
        for _ in 0..count {
            self.filesystem.forget(from.u64()?, from.u64()?);
        }
        Ok(())
    }

    fn running(&self) -> MutexGuard<'_, HashMap<u64, Arc<Running>>> {
        self.running.lock()
    }

    fn run(self: &Arc<Self>, header: Header, from: Arguments, runtime: &runtime::Handle) {
        let running = Arc::new(Running { pid: header.pid, since: Instant::now(), given_up: Notify::new() });
        // The kernel does not interrupt what was not read, so nobody can come too early.
        self.running().insert(header.unique, running.clone());
        let this = self.clone();
        runtime.spawn(async move {
            let work = async {
                let _place = this.places.acquire().await.map_err(|_| Errno::IO)?;
                this.filesystem.answer(header, from).await
            };
            let outcome = tokio::select! {
                outcome = work => outcome,
                () = running.given_up.notified() => Err(Errno::INTR),
            };
            this.running().remove(&header.unique);
            this.send(&header, outcome);
        });
    }

    /// Somebody who waits got a signal. As on any disk, only one that kills ends the wait; it may be yet to come, and
    /// the kernel notifies only of the first.
    fn interrupt(self: &Arc<Self>, unique: u64, runtime: &runtime::Handle) {
        let this = self.clone();
        runtime.spawn(async move {
            loop {
                let Some(running) = this.running().get(&unique).cloned() else { return };
                if is_killed(running.pid).unwrap_or_else(|| running.since.elapsed() >= LET_GO) {
                    running.given_up.notify_one();
                    return;
                }
                sleep(WATCH).await;
            }
        });
    }

    fn send(&self, header: &Header, outcome: Result<Outcome, Errno>) {
        let (errno, outcome) = match outcome {
            Ok(outcome) => (0, outcome),
            Err(errno) => (errno.raw_os_error(), Outcome::default()),
        };
        if let Some(node) = outcome.outdated {
            // Unknown to the kernel means that there is nothing to forget.
            let _ = rustix::io::write(&self.device, &forget_attributes(node));
        }
        let body = outcome.body.as_bytes();
        let head = out_header(header.unique, errno, body.len());
        let sent = rustix::io::writev(&self.device, &[IoSlice::new(&head), IoSlice::new(body)]);
        if sent.is_err() {
            for node in outcome.counted {
                self.filesystem.forget(node, 1);
            }
        }
    }
}

/// Agrees on what both sides can do.
fn init(from: &mut Arguments) -> Result<Answer, Errno> {
    let (major, minor, read_ahead, offered) = (from.u32()?, from.u32()?, from.u32()?, from.u32()?);
    if major != 7 || minor < MINOR {
        return Err(Errno::PROTO);
    }
    let flags = flag::ASYNC_READ
        | flag::BIG_WRITES
        | flag::DO_READDIRPLUS
        | flag::READDIRPLUS_AUTO
        | flag::ASYNC_DIO
        | flag::PARALLEL_DIROPS
        | flag::MAX_PAGES;
    let pages = u16::try_from(LARGEST_TRANSFER / PAGE).expect("a transfer is a few hundred pages");
    let mut body = Answer::default();
    body.u32(7).u32(MINOR).u32(read_ahead.max(LARGEST_TRANSFER)).u32(flags & offered);
    body.u16(BACKGROUND).u16(BACKGROUND / 4 * 3).u32(LARGEST_TRANSFER).u32(1).u16(pages).u16(0);
    body.u32(0).bytes(&[0; 28]);
    Ok(body)
}
