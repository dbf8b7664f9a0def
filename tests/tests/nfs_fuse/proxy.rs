//! A slow line between a driver and its server.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinSet,
};

/// How often a piece is passed on.
const TICK: Duration = Duration::from_millis(50);
const TICKS_PER_SECOND: usize = 20;
/// What counts as no limit.
const FAST: usize = 1 << 30;

/// Passes on what two sides say to each other, as fast as it may; it ends when it is dropped.
pub(crate) struct Proxy {
    port: u16,
    rate: Arc<AtomicUsize>,
    _passing: JoinSet<()>,
}

impl Proxy {
    /// Listens for connections to a port of this machine, without any limit yet.
    pub(crate) async fn start(to: u16) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let rate = Arc::new(AtomicUsize::new(FAST));
        let mut passing = JoinSet::new();
        passing.spawn(accept(listener, to, rate.clone()));
        Ok(Self { port, rate, _passing: passing })
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Passes on so many bytes per second from now on, in each direction of each connection.
    pub(crate) fn slow(&self, bytes_per_second: usize) {
        self.rate.store(bytes_per_second, Ordering::Relaxed);
    }

    pub(crate) fn fast(&self) {
        self.rate.store(FAST, Ordering::Relaxed);
    }
}

async fn accept(listener: TcpListener, to: u16, rate: Arc<AtomicUsize>) {
    let mut passing = JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        let Ok(server) = TcpStream::connect(("127.0.0.1", to)).await else { continue };
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        passing.spawn(pass(from_client, to_server, rate.clone()));
        passing.spawn(pass(from_server, to_client, rate.clone()));
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, rate: Arc<AtomicUsize>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let now = rate.load(Ordering::Relaxed);
        let most = (now / TICKS_PER_SECOND).clamp(1, buffer.len());
        let Ok(length @ 1..) = from.read(&mut buffer[..most]).await else { return };
        if now < FAST {
            tokio::time::sleep(TICK).await;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
