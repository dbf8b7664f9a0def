//! Sockets: listening, serving until the shutdown, and connecting.

use std::fs::{self, DirBuilder, File, Permissions};
use std::future::ready;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixSocket, UnixStream};
use tokio::sync::oneshot;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Server};
use tower::{Layer, service_fn};

use crate::authority::Lenient;
use crate::{CallLayer, Calls, Endpoint, Tls};

/// How long calls under way may take to finish after the signal to stop.
pub const GRACE_PERIOD: Duration = Duration::from_secs(10);

/// How many calls one connection may have under way; more wait in the client.
const CONCURRENT_CALLS: u32 = 1024;

/// How many connections may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Pause after a failed accept: without one, a lack of file descriptors would turn into a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An endpoint that is being listened on; dropped, it removes its socket if that is still its own.
#[derive(Debug)]
pub struct Listener {
    endpoint: Endpoint,
    socket: Socket,
}

/// The file comes first and so goes first: while the listener is open, the kernel gives its inode number to no
/// other file.
#[derive(Debug)]
enum Socket {
    Unix(SocketFile, UnixListener),
    Tcp(TcpListener, Option<Tls>),
}

/// Why an endpoint cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The directory of the socket is missing and cannot be made.
    #[error("creating the directory {path}")]
    Directory {
        /// The directory that could not be made.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something that is not a socket has the name; it is left alone.
    #[error("{0} exists and is not a socket")]
    NotASocket(PathBuf),
    /// Another process answers there.
    #[error("another process is listening on {0}")]
    InUse(PathBuf),
    /// A socket is there, and whether anybody listens on it is not known; it is left alone.
    #[error("finding out whether anybody listens on {path}")]
    Unclear {
        /// The socket that somebody may listen on.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A socket that nobody listens on cannot be removed.
    #[error("removing the abandoned socket {path}")]
    Abandoned {
        /// The path of the socket that is still there.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Anything else about the address.
    #[error("listening on {endpoint}")]
    Listen {
        /// The endpoint that was asked for.
        endpoint: Endpoint,
        /// What the kernel said.
        source: io::Error,
    },
}

impl Listener {
    /// Listens on an endpoint.
    ///
    /// A Unix socket has mode 0600 from its first moment; a missing directory is made with mode 0750. A socket
    /// left behind by a process that is gone is replaced; one that somebody answers on, and anything that is not
    /// a socket, is refused and left alone.
    ///
    /// TCP without TLS has neither encryption nor authentication; a warning in the log says so.
    pub async fn bind(endpoint: &Endpoint) -> Result<Self, BindError> {
        let failed = |source| BindError::Listen { endpoint: endpoint.clone(), source };
        match endpoint {
            Endpoint::Unix(path) => {
                let (listener, file) = listen_on_path(path, &failed).await?;
                Ok(Self { endpoint: endpoint.clone(), socket: Socket::Unix(file, listener) })
            }
            Endpoint::Tcp { host, port, tls } => {
                let listener = TcpListener::bind((host.as_str(), *port)).await.map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                let endpoint = Endpoint::Tcp { host: host.clone(), port, tls: tls.clone() };
                if tls.is_none() {
                    tracing::warn!(
                        %endpoint,
                        "CSI is served over TCP WITHOUT encryption and WITHOUT authentication: whoever reaches this port can \
                         create, delete and mount volumes, and secrets cross the network in plain text; use a Unix socket \
                         or TLS"
                    );
                }
                Ok(Self { endpoint, socket: Socket::Tcp(listener, tls.clone()) })
            }
        }
    }

    /// Where clients find it: as asked for, with the port the kernel chose in place of 0.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
}

/// Serves until `shutdown` completes, then lets calls under way finish for at most [`GRACE_PERIOD`].
///
/// At the signal the socket is removed at once, so that a successor can take the place. Calls whose callers no
/// longer wait are waited for like all others.
pub async fn serve(
    listener: Listener,
    routes: Routes,
    layer: CallLayer,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    match listener.socket {
        Socket::Unix(file, listener) => {
            let incoming = UnixListenerStream::new(listener).map(|accepted| accepted.map(Lenient::new));
            serve_incoming(Server::builder(), incoming, Some(file), routes, layer, shutdown).await
        }
        Socket::Tcp(listener, tls) => {
            let server = match tls {
                Some(tls) => tls.server(Server::builder())?,
                None => Server::builder(),
            };
            let incoming = TcpListenerStream::new(listener)
                .map(|accepted| accepted.and_then(|stream| stream.set_nodelay(true).map(|()| stream)));
            serve_incoming(server, incoming, None, routes, layer, shutdown).await
        }
    }
}

/// A channel to an endpoint that connects when first used and again whenever the connection broke.
///
/// Assumes a Tokio runtime. While nobody listens, calls are answered with UNAVAILABLE.
pub fn connect(endpoint: &Endpoint) -> Channel {
    // The connector decides where to go; this is what becomes `:authority`, and what CSI clients send there.
    let plain = Channel::from_static("http://localhost");
    match endpoint.clone() {
        Endpoint::Unix(path) => plain.connect_with_connector_lazy(service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        })),
        Endpoint::Tcp { host, port, tls } => {
            let channel = match tls {
                Some(tls) => tls.client(&host),
                None => Ok(plain),
            };
            let connector = service_fn(move |_| {
                let host = host.clone();
                async move {
                    let stream = TcpStream::connect((host.as_str(), port)).await?;
                    stream.set_nodelay(true)?;
                    io::Result::Ok(TokioIo::new(stream))
                }
            });
            match channel {
                Ok(channel) => channel.connect_with_connector_lazy(connector),
                // The host is no name that a certificate could have: every call says so.
                Err(error) => {
                    let text = berth_core::error_chain(&error);
                    Channel::from_static("http://localhost").connect_with_connector_lazy(service_fn(
                        move |_| ready(Err::<TokioIo<TcpStream>, _>(io::Error::other(text.clone()))),
                    ))
                }
            }
        }
    }
}

/// A channel to services in this process: the same layer around each call, no socket and no HTTP/2.
pub fn in_process(routes: Routes, layer: &CallLayer) -> Calls {
    layer.layer(routes.prepare())
}

async fn serve_incoming<S, I>(
    server: Server,
    incoming: S,
    file: Option<SocketFile>,
    routes: Routes,
    layer: CallLayer,
    shutdown: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error>
where
    S: Stream<Item = io::Result<I>>,
    I: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let incoming = incoming.then(|accepted| async move {
        if let Err(error) = &accepted {
            tracing::warn!(%error, "accepting a connection failed");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
        accepted
    });
    let (stopping, stopped) = oneshot::channel();
    let signal = async move {
        shutdown.await;
        // Here and not later, while the listener is still open: see `Socket`.
        drop(file);
        // Fails only if nobody waits, and then the server is gone already.
        let _ = stopping.send(());
    };
    let finished = async {
        server
            .max_concurrent_streams(CONCURRENT_CALLS)
            .layer(layer.clone())
            .add_routes(routes)
            .serve_with_incoming_shutdown(incoming, signal)
            .await?;
        layer.idle().await;
        Ok(())
    };
    let out_of_patience = async {
        if stopped.await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(GRACE_PERIOD).await;
    };
    tokio::select! {
        result = finished => result,
        () = out_of_patience => {
            tracing::warn!("stopping although calls are still under way after {} s", GRACE_PERIOD.as_secs());
            Ok(())
        }
    }
}

async fn listen_on_path(
    path: &Path,
    failed: &impl Fn(io::Error) -> BindError,
) -> Result<(UnixListener, SocketFile), BindError> {
    if let Some(directory) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o750).create(directory);
        made.map_err(|source| BindError::Directory { path: directory.to_owned(), source })?;
    }
    let socket = UnixSocket::new_stream().map_err(failed)?;
    // Linux makes the file with the mode the socket has before it is bound, so no umask has to be changed and
    // the file never has another mode.
    let descriptor = File::from(socket.as_fd().try_clone_to_owned().map_err(failed)?);
    descriptor.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;

    match socket.bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            remove_abandoned(path).await?;
            socket.bind(path).map_err(failed)?;
        }
        bound => bound.map_err(failed)?,
    }
    let file = SocketFile::at(path).map_err(failed)?;
    Ok((socket.listen(BACKLOG).map_err(failed)?, file))
}

/// Removes the socket at `path` if nobody listens on it.
async fn remove_abandoned(path: &Path) -> Result<(), BindError> {
    let unclear = |source| BindError::Unclear { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => return Err(BindError::NotASocket(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unclear(error)),
    }
    match UnixStream::connect(path).await {
        Ok(_) => return Err(BindError::InUse(path.to_owned())),
        // Somebody listens, but has not accepted for so long that the queue is full.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(BindError::InUse(path.to_owned()));
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unclear(error)),
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(BindError::Abandoned { path: path.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

/// The file of a bound socket, known by its inode: under the same name there may soon be another's.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn at(path: &Path) -> io::Result<Self> {
        let found = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), device: found.dev(), inode: found.ino() })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (self.device, self.inode));
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "removing the socket failed");
        }
    }
}
