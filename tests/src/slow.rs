//! A slow line: a port of this machine behind which another one is, so many bytes a second away.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};

/// So much is passed on at once, at most.
const PIECE: usize = 256 << 10;
/// How often a piece is passed on by a line that is slow.
const TICK: Duration = Duration::from_millis(50);
const TICKS_PER_SECOND: usize = 20;
/// As much as comes.
const UNLIMITED: usize = usize::MAX;

/// A line that is cut when it is dropped.
#[derive(Debug)]
pub struct SlowLine {
    /// The port on which the delayed connection begins.
    pub port: u16,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    bytes_per_second: AtomicUsize,
    is_cut: AtomicBool,
}

impl SlowLine {
    /// A line to a port, which is not slow yet.
    pub fn to(port: u16) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("open a slow line")?;
        let state =
            Arc::new(State { bytes_per_second: AtomicUsize::new(UNLIMITED), is_cut: AtomicBool::new(false) });
        let line = Self { port: listener.local_addr()?.port(), state: state.clone() };
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if state.is_cut.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (Ok(back), Ok(forth)) = (near.try_clone(), far.try_clone()) else { continue };
                let (there, here) = (state.clone(), state.clone());
                thread::spawn(move || carry(near, far, &there));
                thread::spawn(move || carry(forth, back, &here));
            }
        });
        Ok(line)
    }

    /// Takes from now on so much each second, each way, of every connection.
    pub fn slow_down(&self, bytes_per_second: usize) {
        self.state.bytes_per_second.store(bytes_per_second, Ordering::SeqCst);
    }

    /// Takes from now on as much as comes.
    pub fn hurry(&self) {
        self.state.bytes_per_second.store(UNLIMITED, Ordering::SeqCst);
    }
}

impl Drop for SlowLine {
    fn drop(&mut self) {
        self.state.is_cut.store(true, Ordering::SeqCst);
        // Whoever waits for a connection looks up.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut piece = vec![0; PIECE];
    loop {
        let rate = state.bytes_per_second.load(Ordering::SeqCst);
        let most = (rate / TICKS_PER_SECOND).clamp(1, PIECE);
        let Ok(length @ 1..) = from.read(&mut piece[..most]) else { break };
        if rate != UNLIMITED {
            thread::sleep(TICK);
        }
        if state.is_cut.load(Ordering::SeqCst) || to.write_all(&piece[..length]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
