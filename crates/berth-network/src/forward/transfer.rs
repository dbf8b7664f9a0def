//! Passes on what comes to one port of a Service.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::accept::accept;

/// How long an endpoint may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// After how long without a datagram either way a client is forgotten.
const IDLE: Duration = Duration::from_secs(60);
/// The largest datagram that there can be, in bytes.
const DATAGRAM: usize = 65_536;
/// How many clients of a port are remembered at a time.
const CLIENTS: usize = 4096;

/// The endpoints of a port, and whose turn it is.
#[derive(Debug)]
pub(super) struct Targets {
    all: Mutex<Vec<SocketAddr>>,
    turn: AtomicUsize,
    /// How long a client keeps its endpoint, if it does.
    affinity: Mutex<Option<Duration>>,
    /// Which endpoint a client had last, and when.
    last: Mutex<HashMap<IpAddr, (SocketAddr, Instant)>>,
}

impl Targets {
    pub(super) fn new(all: Vec<SocketAddr>, affinity: Option<Duration>) -> Self {
        Self {
            all: Mutex::new(all),
            turn: AtomicUsize::new(0),
            affinity: Mutex::new(affinity),
            last: Mutex::default(),
        }
    }

    pub(super) fn set(&self, all: Vec<SocketAddr>, affinity: Option<Duration>) {
        *self.all.lock() = all;
        *self.affinity.lock() = affinity;
        if affinity.is_none() {
            self.last.lock().clear();
        }
    }

    /// The endpoints in the order in which a client is to try them.
    fn for_client(&self, client: IpAddr) -> Vec<SocketAddr> {
        let mut all = self.all.lock().clone();
        if all.is_empty() {
            return all;
        }
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % all.len();
        all.rotate_left(turn);
        let affinity = *self.affinity.lock();
        if let Some(kept) = affinity {
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
        if self.affinity.lock().is_none() {
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

/// A client that sends datagrams, and the endpoint that gets them.
#[derive(Debug)]
struct Client {
    target: SocketAddr,
    /// The socket by which the endpoint is reached.
    endpoint: UdpSocket,
    /// When a datagram last went either way.
    last: Mutex<Instant>,
    /// Ends when the client is forgotten.
    end: CancellationToken,
}

impl Client {
    fn note(&self) {
        *self.last.lock() = Instant::now();
    }
}

/// The clients of one port, by the addresses that they send from.
#[derive(Debug)]
struct Clients {
    known: Mutex<HashMap<SocketAddr, Arc<Client>>>,
    /// How many are remembered at a time.
    most: usize,
    /// What is received from endpoints, for all of them: each datagram is taken out at once.
    buffer: Mutex<Vec<u8>>,
}

impl Clients {
    fn new(most: usize) -> Self {
        Self { known: Mutex::default(), most, buffer: Mutex::new(vec![0; DATAGRAM]) }
    }

    fn get(&self, from: SocketAddr) -> Option<Arc<Client>> {
        self.known.lock().get(&from).cloned()
    }

    /// Remembers a client; if there are too many, the one that was silent for the longest time is forgotten.
    fn insert(&self, from: SocketAddr, client: Arc<Client>) {
        let mut known = self.known.lock();
        if let Some(before) = known.remove(&from) {
            before.end.cancel();
        }
        if known.len() >= self.most
            && let Some(oldest) = known.iter().min_by_key(|(_, one)| *one.last.lock()).map(|(from, _)| *from)
            && let Some(oldest) = known.remove(&oldest)
        {
            oldest.end.cancel();
        }
        known.insert(from, client);
    }

    /// Forgets a client, unless another endpoint has taken its place.
    fn remove(&self, from: SocketAddr, client: &Arc<Client>) {
        let mut known = self.known.lock();
        if known.get(&from).is_some_and(|current| Arc::ptr_eq(current, client)) {
            known.remove(&from);
        }
    }

    /// The next datagram from a client's endpoint; `None` if there was no datagram either way for a while, or if nobody
    /// receives what the client sends.
    async fn next_answer(&self, client: &Client) -> Option<Vec<u8>> {
        loop {
            let deadline = *client.last.lock() + IDLE;
            match timeout_at(deadline, client.endpoint.readable()).await {
                Ok(Ok(())) => {
                    let mut buffer = self.buffer.lock();
                    match client.endpoint.try_recv(&mut buffer) {
                        Ok(length) => return Some(buffer[..length].to_vec()),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(_) => return None,
                    }
                }
                // The client may have sent something meanwhile.
                Err(_) if client.last.lock().elapsed() < IDLE => {}
                _ => return None,
            }
        }
    }
}

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
    while let Some(accepted) = close.run_until_cancelled(accept(&listener)).await {
        match accepted {
            Ok((client, from)) => {
                tokio::spawn(pass(client, from, targets.clone()));
            }
            Err(error) => {
                tracing::debug!(%error, "a connection to a Service was not accepted");
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
    serve_clients(socket, targets, Clients::new(CLIENTS), close).await;
}

async fn serve_clients(socket: UdpSocket, targets: Arc<Targets>, clients: Clients, close: CancellationToken) {
    let (socket, clients) = (Arc::new(socket), Arc::new(clients));
    let mut buffer = vec![0; DATAGRAM];
    while let Some(received) = close.run_until_cancelled(socket.recv_from(&mut buffer)).await {
        let Ok((length, from)) = received else { continue };
        let known = clients.get(from).filter(|known| targets.contains(known.target));
        let client = if let Some(known) = known {
            known
        } else {
            let Some(target) = targets.for_client(from.ip()).into_iter().next() else { continue };
            let Ok(endpoint) = connected(target).await else { continue };
            targets.note(from.ip(), target);
            let (last, end) = (Mutex::new(Instant::now()), close.child_token());
            let client = Arc::new(Client { target, endpoint, last, end });
            clients.insert(from, client.clone());
            tokio::spawn(answer(socket.clone(), client.clone(), from, clients.clone()));
            client
        };
        client.note();
        let _ = client.endpoint.send(&buffer[..length]).await;
    }
}

async fn connected(target: SocketAddr) -> io::Result<UdpSocket> {
    let endpoint = UdpSocket::bind(("0.0.0.0", 0)).await?;
    endpoint.connect(target).await?;
    Ok(endpoint)
}

/// Passes the answers of an endpoint back to a client, until the client is forgotten.
async fn answer(socket: Arc<UdpSocket>, client: Arc<Client>, from: SocketAddr, clients: Arc<Clients>) {
    while let Some(Some(datagram)) = client.end.run_until_cancelled(clients.next_answer(&client)).await {
        client.note();
        let _ = socket.send_to(&datagram, from).await;
    }
    clients.remove(from, &client);
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
        stays.set(all[..2].to_vec(), Some(Duration::from_secs(60)));
        assert_eq!(stays.for_client(client).len(), 2);
    }

    #[test]
    fn a_change_of_the_affinity_counts_from_the_next_connection_on() {
        let all: Vec<SocketAddr> = (1..=3).map(|last| SocketAddr::from(([127, 9, 8, last], 80))).collect();
        let client = IpAddr::from([127, 0, 0, 1]);
        let targets = Targets::new(all.clone(), None);
        targets.note(client, all[1]);
        targets.set(all.clone(), Some(Duration::from_secs(60)));
        assert_eq!(targets.for_client(client)[0], all[0], "without an affinity nothing was noted");
        targets.note(client, all[0]);
        assert_eq!([0; 3].map(|_| targets.for_client(client)[0]), [all[0]; 3]);
        targets.set(all.clone(), None);
        let turns = [0; 3].map(|_| targets.for_client(client)[0]);
        assert!(all.iter().all(|one| turns.contains(one)), "{turns:?}");
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
    /// A port with room for two clients, before an endpoint that says how many bytes it got from where.
    async fn port_of_two() -> (SocketAddr, Arc<Targets>, UdpSocket, CancellationToken) {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let targets = Arc::new(Targets::new(vec![server.local_addr().unwrap()], None));
        let socket = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let (at, close) = (socket.local_addr().unwrap(), CancellationToken::new());
        tokio::spawn(serve_clients(socket, targets.clone(), Clients::new(2), close.clone()));
        (at, targets, server, close)
    }

    /// Sends a datagram; returns from where the endpoint got it.
    async fn sent(client: &UdpSocket, at: SocketAddr, server: &UdpSocket) -> SocketAddr {
        client.send_to(b"question", at).await.unwrap();
        let (_, from) = server.recv_from(&mut [0; 16]).await.unwrap();
        from
    }

    #[tokio::test]
    async fn of_too_many_clients_the_one_that_is_silent_is_forgotten() {
        let (at, _, server, close) = port_of_two().await;
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(UdpSocket::bind("127.0.0.1:0").await.unwrap());
        }
        let first = sent(&clients[0], at, &server).await;
        sent(&clients[1], at, &server).await;
        assert_eq!(sent(&clients[0], at, &server).await, first, "a client that is known keeps its socket");
        let third = sent(&clients[2], at, &server).await;
        assert_eq!(sent(&clients[0], at, &server).await, first, "it sent later than the second");
        assert_eq!(sent(&clients[2], at, &server).await, third);
        for (client, text) in clients.iter().zip(["one", "two", "three"]).skip(1) {
            let from = sent(client, at, &server).await;
            server.send_to(text.as_bytes(), from).await.unwrap();
            let mut buffer = [0; 16];
            let (length, _) = client.recv_from(&mut buffer).await.unwrap();
            assert_eq!(&buffer[..length], text.as_bytes());
        }
        close.cancel();
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_gets_no_answers_keeps_its_endpoint_while_it_sends() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let endpoint = connected(server.local_addr().unwrap()).await.unwrap();
        let client = Client {
            target: server.local_addr().unwrap(),
            endpoint,
            last: Mutex::new(Instant::now()),
            end: CancellationToken::new(),
        };
        let (clients, begun) = (Clients::new(2), Instant::now());
        let sends = async {
            for _ in 0..4 {
                tokio::time::sleep(IDLE / 2).await;
                client.note();
            }
        };
        let (answer, ()) = tokio::join!(clients.next_answer(&client), sends);
        assert_eq!(answer, None);
        assert!(begun.elapsed() >= IDLE * 3, "it was forgotten after {:?}", begun.elapsed());
    }
}
