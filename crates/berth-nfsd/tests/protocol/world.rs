//! A server with a directory, and clients of it, for one test: gone when the test is, however it ends.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    time::Duration,
};

use berth_nfs::{
    Attributes, Change,
    rpc::record,
    v3::{MOUNT_PROGRAM, PROGRAM, procedure, wire},
    xdr::{Decoder, Encoder},
};
use berth_nfsd::{Options, Server};
use bytes::Bytes;
use tempfile::TempDir;
use tokio::{net::TcpSocket, runtime::Runtime, task::JoinHandle};
use tokio_util::sync::CancellationToken;

/// Nothing here takes longer, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A server; its directory and its state stay when it is restarted.
pub(crate) struct World {
    dir: TempDir,
    runtime: Runtime,
    options: Options,
    running: Option<(CancellationToken, JoinHandle<()>)>,
    pub(crate) address: SocketAddr,
}

impl World {
    pub(crate) fn start() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("export")).unwrap();
        fs::set_permissions(dir.path().join("export"), fs::Permissions::from_mode(0o777)).unwrap();
        let mut options = Options {
            directory: dir.path().join("export"),
            names: vec!["/export".into()],
            listen: "127.0.0.1:0".parse().unwrap(),
            allow: Vec::new(),
            state_directory: dir.path().join("state"),
            squash_root: false,
            allow_unprivileged_ports: false,
            handles: None,
            is_asynchronous: true,
        };
        change(&mut options);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let address = options.listen;
        let mut world = Self { dir, runtime, options, running: None, address };
        world.restart();
        world
    }

    /// Stops the server, if it runs, and starts it anew, as another process would.
    pub(crate) fn restart(&mut self) {
        self.stop();
        let server = self.runtime.block_on(Server::start(self.options.clone())).unwrap();
        self.address = server.address();
        let stop = CancellationToken::new();
        self.running = Some((stop.clone(), self.runtime.spawn(server.run(stop))));
    }

    /// Starts the server anew, with other options.
    pub(crate) fn set(&mut self, change: impl FnOnce(&mut Options)) {
        change(&mut self.options);
        self.restart();
    }

    /// What it was started with.
    pub(crate) fn options(&self) -> Options {
        self.options.clone()
    }

    fn stop(&mut self) {
        if let Some((stop, task)) = self.running.take() {
            stop.cancel();
            self.runtime.block_on(task).unwrap();
        }
    }

    /// The directory, as it is on the disk.
    pub(crate) fn export(&self) -> PathBuf {
        self.options.directory.clone()
    }

    /// The path of this name beside the exported directory, which no client may reach.
    pub(crate) fn outside_export(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A client on a port of root's, as this user.
    pub(crate) fn client(&self, uid: u32) -> Client {
        let stream = (600..1023).rev().find_map(|port| self.connect(Some(port)));
        Client::new(stream.expect("there is a port of root's"), uid)
    }

    /// A client on a port that anybody can have.
    pub(crate) fn unprivileged(&self) -> Client {
        Client::new(self.connect(None).unwrap(), 0)
    }

    fn connect(&self, port: Option<u16>) -> Option<TcpStream> {
        self.runtime.block_on(async {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_reuseaddr(true).unwrap();
            if let Some(port) = port {
                socket.bind(([127, 0, 0, 1], port).into()).ok()?;
            }
            let stream = socket.connect(self.address).await.ok()?.into_std().ok()?;
            stream.set_nonblocking(false).ok()?;
            stream.set_read_timeout(Some(PATIENCE)).ok()?;
            Some(stream)
        })
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop();
    }
}

/// One connection, and who it says that it is.
pub(crate) struct Client {
    stream: TcpStream,
    xid: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
}

/// What was made or found.
pub(crate) struct Found {
    pub(crate) handle: Vec<u8>,
    pub(crate) of: Attributes,
}

/// Writes the arguments of a call.
pub(crate) fn arguments(write: impl FnOnce(&mut Encoder)) -> Encoder {
    let mut to = Encoder::default();
    write(&mut to);
    to
}

impl Client {
    fn new(stream: TcpStream, uid: u32) -> Self {
        Self { stream, xid: 1, uid, gid: uid, groups: Vec::new() }
    }

    /// A call as bytes, without its record's header.
    pub(crate) fn message(&mut self, program: u32, number: u32, arguments: Encoder) -> Vec<u8> {
        self.xid += 1;
        let mut message = Encoder::default();
        message.u32(self.xid).u32(0).u32(2).u32(program).u32(3).u32(number);
        let mut credential = Encoder::default();
        credential.u32(0).opaque(b"test").u32(self.uid).u32(self.gid).length(self.groups.len());
        self.groups.iter().for_each(|group| {
            credential.u32(*group);
        });
        message.u32(1).length(credential.len()).append(credential).u32(0).u32(0).append(arguments);
        message.finish().concat()
    }

    /// Sends bytes as they are.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a message as one record.
    pub(crate) fn send_record(&mut self, message: &[u8]) -> std::io::Result<()> {
        let header = (u32::try_from(message.len()).unwrap() | 1 << 31).to_be_bytes();
        self.stream.write_all(&[&header[..], message].concat())
    }

    /// The next record, or nothing if the connection was closed.
    pub(crate) fn receive(&mut self) -> Option<Bytes> {
        let mut header = [0; 4];
        self.stream.read_exact(&mut header).ok()?;
        let length = (u32::from_be_bytes(header) & !(1 << 31)) as usize;
        assert!(length <= record::LONGEST + 4096, "an answer is too long: {length}");
        let mut message = vec![0; length];
        self.stream.read_exact(&mut message).ok()?;
        Some(message.into())
    }

    /// Sends a message and gives what follows the RPC header of the answer: `Err` has the number of the refusal.
    pub(crate) fn exchange(&mut self, message: &[u8]) -> Option<Result<Decoder, u32>> {
        self.send_record(message).ok()?;
        let mut answer = Decoder::new(self.receive()?);
        assert_eq!(answer.u32().unwrap().to_be_bytes(), message[..4], "the xid");
        assert_eq!(answer.u32(), Ok(1));
        if answer.u32().unwrap() != 0 {
            return Some(Err(1000 + answer.u32().unwrap()));
        }
        answer.u32().unwrap();
        answer.opaque(0).unwrap();
        match answer.u32().unwrap() {
            0 => Some(Ok(answer)),
            refusal => Some(Err(refusal)),
        }
    }

    /// Calls a procedure of NFS: its status, and what follows.
    pub(crate) fn nfs(&mut self, number: u32, arguments: Encoder) -> (u32, Decoder) {
        let message = self.message(PROGRAM, number, arguments);
        let mut results = self.exchange(&message).expect("an answer").expect("it is accepted");
        (results.u32().unwrap(), results)
    }

    /// The status of a call alone.
    pub(crate) fn status(&mut self, number: u32, write: impl FnOnce(&mut Encoder)) -> u32 {
        self.nfs(number, arguments(write)).0
    }

    /// Mounts a path, and gives its handle.
    pub(crate) fn mount(&mut self, path: &str) -> Result<Vec<u8>, u32> {
        let message = self.message(
            MOUNT_PROGRAM,
            1,
            arguments(|to| {
                to.opaque(path.as_bytes());
            }),
        );
        let mut results = self.exchange(&message).expect("an answer").expect("it is accepted");
        match results.u32().unwrap() {
            0 => Ok(results.opaque(64).unwrap().to_vec()),
            status => Err(status),
        }
    }

    pub(crate) fn root(&mut self) -> Vec<u8> {
        self.mount("/export").unwrap()
    }

    pub(crate) fn attributes(&mut self, handle: &[u8]) -> Result<Attributes, u32> {
        let (status, mut results) = self.nfs(
            procedure::GETATTR,
            arguments(|to| {
                to.opaque(handle);
            }),
        );
        if status == 0 { Ok(wire::attributes(&mut results).unwrap()) } else { Err(status) }
    }

    pub(crate) fn lookup(&mut self, directory: &[u8], name: &str) -> Result<Found, u32> {
        let (status, mut results) = self.nfs(
            procedure::LOOKUP,
            arguments(|to| {
                to.opaque(directory).opaque(name.as_bytes());
            }),
        );
        if status != 0 {
            return Err(status);
        }
        let handle = results.opaque(64).unwrap().to_vec();
        Ok(Found { handle, of: wire::maybe_attributes(&mut results).unwrap().unwrap() })
    }

    /// Makes something by CREATE, MKDIR, SYMLINK or MKNOD.
    pub(crate) fn make(
        &mut self,
        number: u32,
        directory: &[u8],
        name: &str,
        rest: impl FnOnce(&mut Encoder),
    ) -> Result<Found, u32> {
        let (status, mut results) = self.nfs(
            number,
            arguments(|to| {
                to.opaque(directory).opaque(name.as_bytes());
                rest(to);
            }),
        );
        if status != 0 {
            return Err(status);
        }
        assert_eq!(results.bool(), Ok(true));
        let handle = results.opaque(64).unwrap().to_vec();
        Ok(Found { handle, of: wire::maybe_attributes(&mut results).unwrap().unwrap() })
    }

    /// Creates a file that must not be there.
    pub(crate) fn create(&mut self, directory: &[u8], name: &str, mode: u32) -> Result<Found, u32> {
        self.make(procedure::CREATE, directory, name, |to| wire::change(to.u32(1), &Change::mode(mode)))
    }

    pub(crate) fn make_directory(&mut self, directory: &[u8], name: &str, mode: u32) -> Result<Found, u32> {
        self.make(procedure::MKDIR, directory, name, |to| wire::change(to, &Change::mode(mode)))
    }

    /// Writes, and gives the verifier.
    pub(crate) fn write(
        &mut self,
        file: &[u8],
        offset: u64,
        data: &[u8],
        stable: u32,
    ) -> Result<[u8; 8], u32> {
        let (status, mut results) = self.nfs(
            procedure::WRITE,
            arguments(|to| {
                to.opaque(file).u64(offset).length(data.len()).u32(stable).opaque(data);
            }),
        );
        if status != 0 {
            return Err(status);
        }
        changed(&mut results);
        assert_eq!((results.u32(), results.u32()), (Ok(u32::try_from(data.len()).unwrap()), Ok(stable)));
        Ok(results.fixed().unwrap())
    }

    pub(crate) fn read(&mut self, file: &[u8], offset: u64, count: u32) -> Result<(Vec<u8>, bool), u32> {
        let (status, mut results) = self.nfs(
            procedure::READ,
            arguments(|to| {
                to.opaque(file).u64(offset).u32(count);
            }),
        );
        if status != 0 {
            return Err(status);
        }
        wire::maybe_attributes(&mut results).unwrap().unwrap();
        let (length, end) = (results.u32().unwrap(), results.bool().unwrap());
        let data = results.opaque(1 << 20).unwrap();
        assert_eq!(data.len(), length as usize);
        Ok((data.to_vec(), end))
    }
}

/// What was before a change (size, seconds of the two times), and what is after.
pub(crate) fn changed(results: &mut Decoder) -> (Option<(u64, u32, u32)>, Option<Attributes>) {
    let before = wire::optional(results, |from| {
        let size = from.u64()?;
        let modified = wire::time(from)?;
        let changed = wire::time(from)?;
        Ok((size, modified.nanoseconds, changed.nanoseconds))
    });
    (before.unwrap(), wire::maybe_attributes(results).unwrap())
}
