//! Who may connect, how much may be under way at once, and which thread does it.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use berth_core::{Network, hex};
use berth_nfs::rpc::{
    Call,
    record::{self, Failure},
};
use bytes::{Bytes, BytesMut};
use ring::{
    digest,
    rand::{SecureRandom as _, SystemRandom},
};
use tokio::{
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    export::{Export, Handles},
    mount::Names,
    replies::Replies,
    service::{self, Origin},
    workers::Workers,
};

/// Connections at once; more are closed.
const MOST_CONNECTIONS: usize = 128;
/// Calls under way, of all clients and of one connection: what comes beyond is not read until there is room. A call has up to 1 MiB.
const MOST_CALLS: usize = 128;
const MOST_CALLS_OF_CONNECTION: usize = 32;
/// Threads that wait for the disk.
const THREADS: usize = 16;
/// A connection on which nothing whole comes for so long is closed; clients connect again when they want to.
const IDLE: Duration = Duration::from_secs(600);
/// How long a client may take to take an answer.
const WRITE: Duration = Duration::from_secs(60);
/// How long to wait when no connection can be accepted, for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Ports below this are root's.
const UNPRIVILEGED: u16 = 1024;
const KEY: usize = 32;

/// What is served, where, and to whom.
#[derive(Debug, Clone)]
pub struct Options {
    /// The directory to serve.
    pub directory: PathBuf,
    /// What clients may call it, beside its own path.
    pub names: Vec<PathBuf>,
    /// Where to listen, for NFS and MOUNT; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Who may connect, beside this machine. Needed to listen on other addresses than loopback.
    pub allow: Vec<Network>,
    /// Where the key is kept that signs handles, so that they are good after a restart.
    pub state_directory: PathBuf,
    /// Root is to be nobody (65534).
    pub squash_root: bool,
    /// Serve clients on ports that any user can use, too: a user of an allowed machine can then pass for any other.
    pub allow_unprivileged_ports: bool,
    /// How files are found; `None` takes the kernel's handles where there are some.
    pub handles: Option<Handles>,
    /// Answer before changes are on the disk.
    pub is_asynchronous: bool,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Everybody could connect to the server.
    #[error(
        "{0} can be reached from other machines: say which may connect (--allow), or listen on 127.0.0.1"
    )]
    NotLoopback(SocketAddr),
    /// A name that is no absolute path.
    #[error("{0:?} cannot be what clients call the directory: it is no absolute path without `..`")]
    Name(PathBuf),
    /// The directory cannot be served.
    #[error("cannot serve {}", path.display())]
    Directory {
        /// The directory that was to be served.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Clients could read the key.
    #[error("the key of the server would lie in {}, which clients can read: keep it somewhere else", .0.display())]
    KeyIsServed(PathBuf),
    /// There is no key.
    #[error("cannot read or make the key of the server in {}", path.display())]
    Key {
        /// Where it is kept.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The address is taken, or not this machine's.
    #[error("cannot listen on {address}")]
    Listen {
        /// Where the server was to listen.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The threads did not start.
    #[error("cannot start the server's threads")]
    Threads(#[source] berth_host::Error),
}

/// A server that listens; [`Server::run`] serves.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    export: Export,
    names: Names,
    replies: Replies,
    workers: Workers,
    allow: Vec<Network>,
    squash_root: bool,
    allow_unprivileged_ports: bool,
    calls: Arc<Semaphore>,
}

/// An answer that is to be sent, with what makes room for the next call when it is.
type Answer = (Vec<Bytes>, [OwnedSemaphorePermit; 2]);

impl Server {
    /// Opens the directory, listens and starts the threads. Needs root.
    pub async fn start(options: Options) -> Result<Self, Error> {
        if !options.listen.ip().to_canonical().is_loopback() && options.allow.is_empty() {
            return Err(Error::NotLoopback(options.listen));
        }
        let wrong = |path: &&PathBuf| {
            !path.is_absolute() || path.components().any(|part| part == std::path::Component::ParentDir)
        };
        if let Some(name) = options.names.iter().find(wrong) {
            return Err(Error::Name(name.clone()));
        }
        let failed = |source: io::Error| Error::Directory { path: options.directory.clone(), source };
        let directory = fs::canonicalize(&options.directory).map_err(failed)?;
        let key = key(&options.state_directory, &directory)?;
        let export = Export::open(&directory, &key, options.handles, !options.is_asynchronous)
            .map_err(|errno| failed(errno.into()))?;
        let listen = |source| Error::Listen { address: options.listen, source };
        let listener = TcpListener::bind(options.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let mut paths = vec![directory];
        paths.extend(options.names);
        let clients = options.allow.iter().map(ToString::to_string).chain(["localhost".to_owned()]).collect();
        let shared = Arc::new(Shared {
            export,
            names: Names { paths, clients },
            replies: Replies::default(),
            workers: Workers::start(THREADS).map_err(Error::Threads)?,
            allow: options.allow,
            squash_root: options.squash_root,
            allow_unprivileged_ports: options.allow_unprivileged_ports,
            calls: Arc::new(Semaphore::new(MOST_CALLS)),
        });
        Ok(Self { listener, address, shared })
    }

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How files are found by their handles.
    pub fn handles(&self) -> Handles {
        self.shared.export.handles()
    }

    /// What clients may call the directory, its own path first.
    pub fn names(&self) -> &[PathBuf] {
        &self.shared.names.paths
    }

    /// Serves until this is cancelled; what is under way then is done, and not answered.
    pub async fn run(self, shutdown: CancellationToken) {
        let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = shutdown.cancelled() => return,
            };
            while connections.try_join_next().is_some() {}
            let (stream, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            if !self.shared.may_connect(peer.ip()) {
                tracing::warn!("refused a connection from {peer}, which is not on the list (--allow)");
                continue;
            }
            let Ok(permit) = room.clone().try_acquire_owned() else {
                tracing::warn!("refused a connection from {peer}: there are {MOST_CONNECTIONS} already");
                continue;
            };
            let shared = self.shared.clone();
            connections.spawn(async move {
                serve(shared, stream, peer).await;
                drop(permit);
            });
        }
    }
}

impl Shared {
    fn may_connect(&self, from: IpAddr) -> bool {
        from.to_canonical().is_loopback() || self.allow.iter().any(|network| network.contains(from))
    }

    /// Does a call, unless the same was done already, and gives its answer.
    fn answer(&self, from: SocketAddr, record: &Bytes, call: Call) -> Vec<Bytes> {
        let origin = Origin {
            is_trusted: self.allow_unprivileged_ports || from.port() < UNPRIVILEGED,
            squash_root: self.squash_root,
        };
        let is_done_once = service::is_done_once(call.procedure);
        let perform = || record::framed(service::perform(&self.export, &self.names, origin, call));
        if is_done_once { self.replies.once(from.ip(), record, perform) } else { perform() }
    }
}

/// Serves one connection to its end.
async fn serve(shared: Arc<Shared>, stream: TcpStream, peer: SocketAddr) {
    // Without it an answer waits for the next one.
    let _ = stream.set_nodelay(true);
    let (read, mut write) = stream.into_split();
    let (answers, mut to_send) = mpsc::unbounded_channel::<Answer>();
    let sending = async {
        while let Some((answer, room)) = to_send.recv().await {
            match timeout(WRITE, record::send(&mut write, answer.into_iter())).await {
                Ok(Ok(())) => drop(room),
                _ => return,
            }
        }
    };
    let mut sending = std::pin::pin!(sending);
    tokio::select! {
        // The answers that are not there yet are still sent.
        () = receive(shared, read, peer, answers) => sending.await,
        () = &mut sending => {}
    }
}

/// Reads calls and has them done, until something comes that is none.
async fn receive(
    shared: Arc<Shared>,
    mut socket: OwnedReadHalf,
    peer: SocketAddr,
    answers: mpsc::UnboundedSender<Answer>,
) {
    let own = Arc::new(Semaphore::new(MOST_CALLS_OF_CONNECTION));
    let mut buffer = BytesMut::new();
    loop {
        let record = match timeout(IDLE, record::receive(&mut socket, &mut buffer, || {})).await {
            Ok(Ok(record)) => record,
            Ok(Err(Failure::TooLong)) => {
                tracing::warn!(
                    "closed a connection from {peer}: a call is longer than {} bytes",
                    record::LONGEST
                );
                return;
            }
            _ => return,
        };
        let (Ok(one), Ok(other)) =
            (own.clone().acquire_owned().await, shared.calls.clone().acquire_owned().await)
        else {
            return;
        };
        let call = match service::read(record.clone()) {
            Ok(call) => call,
            Err(Some(refusal)) => {
                let _ = answers.send((record::framed(refusal), [one, other]));
                continue;
            }
            Err(None) => {
                tracing::warn!("closed a connection from {peer}: what it sends is no call");
                return;
            }
        };
        let (serving, answers) = (shared.clone(), answers.clone());
        shared.workers.run(move || {
            let answer = serving.answer(peer, &record, call);
            // The connection may be gone meanwhile.
            let _ = answers.send((answer, [one, other]));
        });
    }
}

/// The key that signs the handles of a directory: made at the first start, and kept.
fn key(state: &Path, directory: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source: io::Error| Error::Key { path: state.to_owned(), source };
    let is_served = |state: &Path| state.starts_with(directory);
    if std::path::absolute(state).is_ok_and(|state| is_served(&state)) {
        return Err(Error::KeyIsServed(state.to_owned()));
    }
    berth_host::path::Dir::ensure(state, 0o700)
        .map_err(|error| failed(io::Error::other(error.sentence())))?;
    let state = fs::canonicalize(state).map_err(failed)?;
    if is_served(&state) {
        return Err(Error::KeyIsServed(state));
    }
    let hash = digest::digest(&digest::SHA256, directory.as_os_str().as_encoded_bytes());
    let path = state.join(format!("{}.key", hex(&hash.as_ref()[..8])));
    match fs::read(&path) {
        Ok(key) if key.len() == KEY => return Ok(key),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let mut key = vec![0; KEY];
    SystemRandom::new().fill(&mut key).map_err(|_| failed(io::Error::other("there is no randomness")))?;
    berth_host::files::write_private(&path, &key).map_err(failed)?;
    Ok(key)
}
