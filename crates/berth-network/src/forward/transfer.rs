//! Passes on what comes to one port of a Service.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// How long an endpoint may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// After how long without a datagram it is forgotten who sent the last.
const IDLE: Duration = Duration::from_secs(60);
/// The largest datagram that there can be, in bytes.
const DATAGRAM: usize = 65_536;
/// How many clients of a port are remembered at a time.
const CLIENTS: usize = 4096;
/// How long to pause if no connection can be accepted, for want of file descriptors perhaps.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The endpoints of a port, and whose turn it is.
#[derive(Debug)]
pub(super) struct Targets {
    all: Mutex<Vec<SocketAddr>>,
    turn: AtomicUsize,
    affinity: Option<Duration>,
    /// Which endpoint a client had last, and when.
    last: Mutex<HashMap<IpAddr, (SocketAddr, Instant)>>,
}

impl Targets {
    pub(super) fn new(all: Vec<SocketAddr>, affinity: Option<Duration>) -> Self {
        Self { all: Mutex::new(all), turn: AtomicUsize::new(0), affinity, last: Mutex::default() }
    }

    pub(super) fn set(&self, all: Vec<SocketAddr>) {
        *self.all.lock() = all;
    }

    /// The endpoints in the order in which a client is to try them.
    fn for_client(&self, client: IpAddr) -> Vec<SocketAddr> {
        let mut all = self.all.lock().clone();
        if all.is_empty() {
            return all;
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % all.len();
        all.rotate_left(turn);
        if let Some(kept) = self.affinity {
            let known = self.last.lock().get(&client).copied();
            let index = known
                .filter(|(_, at)| at.elapsed() < kept)
                .and_then(|(last, _)| all.iter().position(|one| *one == last));
            if let Some(index) = index {
                all[..=index].rotate_right(1);
            }
        }
        all
    }

    fn note(&self, client: IpAddr, target: SocketAddr) {
        if self.affinity.is_none() {
            return;
        }
        let mut last = self.last.lock();
        if last.len() >= CLIENTS {
            last.clear();
        }
        last.insert(client, (target, Instant::now()));
    }

    fn contains(&self, target: SocketAddr) -> bool {
        self.all.lock().contains(&target)
    }
}

/// The endpoint of each client that sent a datagram lately, and the socket by which it is reached.
type Clients = Arc<Mutex<HashMap<SocketAddr, (SocketAddr, Arc<UdpSocket>)>>>;

/// Listens at the address of a Service.
pub(super) fn listen(at: SocketAddr) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Receives datagrams at the address of a Service.
pub(super) fn bind(at: SocketAddr) -> io::Result<UdpSocket> {
    let socket = std::net::UdpSocket::bind(at)?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket)
}

/// Passes connections on until `close`; those that are open stay open until one side ends them.
pub(super) async fn serve_tcp(listener: TcpListener, targets: Arc<Targets>, close: CancellationToken) {
    while let Some(accepted) = close.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((client, from)) => {
                tokio::spawn(pass(client, from, targets.clone()));
            }
            Err(error) => {
                tracing::debug!(%error, "a connection to a Service was not accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

async fn pass(mut client: TcpStream, from: SocketAddr, targets: Arc<Targets>) {
    for target in targets.for_client(from.ip()) {
        let Ok(Ok(mut endpoint)) = timeout(CONNECT, TcpStream::connect(target)).await else { continue };
        targets.note(from.ip(), target);
        let _ = (client.set_nodelay(true), endpoint.set_nodelay(true));
        // How it ends is between the two.
        let _ = copy_bidirectional(&mut client, &mut endpoint).await;
        return;
    }
}

/// Passes datagrams on, and the answers back to whoever sent the last from the same address, until `close`.
pub(super) async fn serve_udp(socket: UdpSocket, targets: Arc<Targets>, close: CancellationToken) {
    let socket = Arc::new(socket);
    let clients = Clients::default();
    let mut buffer = vec![0; DATAGRAM];
    while let Some(received) = close.run_until_cancelled(socket.recv_from(&mut buffer)).await {
        let Ok((length, from)) = received else { continue };
        let known = clients.lock().get(&from).cloned().filter(|(target, _)| targets.contains(*target));
        let endpoint = if let Some((_, endpoint)) = known {
            endpoint
        } else {
            let Some(target) = targets.for_client(from.ip()).into_iter().next() else { continue };
            let Ok(endpoint) = connected(target).await else { continue };
            targets.note(from.ip(), target);
            let endpoint = Arc::new(endpoint);
            let mut known = clients.lock();
            if known.len() >= CLIENTS {
                continue;
            }
            known.insert(from, (target, endpoint.clone()));
            tokio::spawn(answer(socket.clone(), endpoint.clone(), from, clients.clone(), close.clone()));
            endpoint
        };
        let _ = endpoint.send(&buffer[..length]).await;
    }
}

async fn connected(target: SocketAddr) -> io::Result<UdpSocket> {
    let endpoint = UdpSocket::bind(("0.0.0.0", 0)).await?;
    endpoint.connect(target).await?;
    Ok(endpoint)
}

/// Passes the answers of an endpoint back to a client, until there are none for a while.
async fn answer(
    socket: Arc<UdpSocket>,
    endpoint: Arc<UdpSocket>,
    client: SocketAddr,
    clients: Clients,
    close: CancellationToken,
) {
    let mut buffer = vec![0; DATAGRAM];
    while let Some(Ok(Ok(length))) =
        close.run_until_cancelled(timeout(IDLE, endpoint.recv(&mut buffer))).await
    {
        let _ = socket.send_to(&buffer[..length], client).await;
    }
    let mut known = clients.lock();
    if known.get(&client).is_some_and(|(_, current)| Arc::ptr_eq(current, &endpoint)) {
        known.remove(&client);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[test]
    fn endpoints_take_turns_unless_a_client_stays_with_one() {
        let all: Vec<SocketAddr> = (1..=3).map(|last| SocketAddr::from(([127, 9, 8, last], 80))).collect();
        let client = IpAddr::from([127, 0, 0, 1]);
        let turns = Targets::new(all.clone(), None);
        let first: Vec<SocketAddr> = (0..4).map(|_| turns.for_client(client)[0]).collect();
        assert_eq!(first, [all[0], all[1], all[2], all[0]]);
        let stays = Targets::new(all.clone(), Some(Duration::from_secs(60)));
        stays.note(client, all[2]);
        for _ in 0..4 {
            let order = stays.for_client(client);
            assert!(order[0] == all[2] && order.len() == 3);
        }
        stays.set(all[..2].to_vec());
        assert_eq!(stays.for_client(client).len(), 2);
    }

    #[tokio::test]
    async fn a_connection_goes_to_an_endpoint_that_accepts_it() {
        let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let alive = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let targets = Arc::new(Targets::new(vec![dead, alive.local_addr().unwrap()], None));
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let (at, close) = (listener.local_addr().unwrap(), CancellationToken::new());
        let forwarding = tokio::spawn(serve_tcp(listener, targets, close.clone()));
        for _ in 0..4 {
            let mut client = TcpStream::connect(at).await.unwrap();
            let (mut server, _) = alive.accept().await.unwrap();
            client.write_all(b"ping").await.unwrap();
            client.shutdown().await.unwrap();
            let mut text = String::new();
            server.read_to_string(&mut text).await.unwrap();
            server.write_all(b"pong").await.unwrap();
            drop(server);
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert_eq!((text.as_str(), answer.as_str()), ("ping", "pong"));
        }
        close.cancel();
        forwarding.await.unwrap();
        assert!(TcpStream::connect(at).await.is_err());
    }

    #[tokio::test]
    async fn answers_to_datagrams_come_back() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let targets = Arc::new(Targets::new(vec![server.local_addr().unwrap()], None));
        let socket = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let (at, close) = (socket.local_addr().unwrap(), CancellationToken::new());
        let forwarding = tokio::spawn(serve_udp(socket, targets, close.clone()));
        let client = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        client.connect(at).await.unwrap();
        for text in ["one", "two"] {
            client.send(text.as_bytes()).await.unwrap();
            let mut buffer = [0; 16];
            let (length, from) = server.recv_from(&mut buffer).await.unwrap();
            server.send_to(&buffer[..length], from).await.unwrap();
            let length = client.recv(&mut buffer).await.unwrap();
            assert_eq!(&buffer[..length], text.as_bytes());
        }
        close.cancel();
        forwarding.await.unwrap();
    }
}
