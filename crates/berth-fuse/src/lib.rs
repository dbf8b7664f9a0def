//! Serves an NFS share as a filesystem of this machine through FUSE, by the user-space client: for machines whose
//! kernel has no NFS.
//!
//! ```text
//!  program ─► kernel ─► /dev/fuse ─► session ─► filesystem ─► berth_nfs::Share ─► NFS server
//!                                       │ wire: messages        │ nodes: files that the kernel knows
//!                                       │ users: who asks       │ patience: how long a server is waited for
//! ```
//!
//! Each mounted share is served by a process of its own ([`start`]), the same program under another argument
//! ([`SERVER`]), so a mount does not depend on the process that made it, and ends when it is unmounted. In a container it
//! ends with the container. Nothing restarts it: the NFS backend mounts the share anew when it is next needed.
//!
//! Guarantees:
//! - the server decides about every right: it is asked as the calling process, with its uid, gid and groups;
//! - a write is at the server when it returns, on its disk after fsync and close; if the server restarts in between,
//!   it is written again. Whoever opens a file sees what was there when somebody else closed it;
//! - a server that does not answer is waited for as the mount options say (`hard`, `soft`, `softerr`, `timeo`,
//!   `retrans`), and whoever waits can be killed;
//! - a file that is removed while it is open stays until it is closed, under a name that begins with `.nfs`.
//!
//! Locks (flock, fcntl) hold on this machine only, as with the mount option `local_lock=all`.
//!
//! Start reading at [`serve`], then `session.rs` (requests of the kernel) and `filesystem.rs` (what each means to the
//! server).

mod filesystem;
mod nodes;
mod patience;
mod session;
mod users;
mod wire;

use std::{
    ffi::{OsStr, OsString},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use berth_host::{
    helper::Helper,
    remote::{self, Filesystem as Mountable, RemoteMounts},
    serving,
};
use berth_nfs::{Nfs, Options, Target};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};

use self::{filesystem::Filesystem, patience::Patience, session::Session};

/// The process that serves one share.
pub const SERVER: Helper = Helper { argument: "__nfs-fuse", run: run_server };
/// Threads that speak to the server; each mounted share has them.
const THREADS: usize = 2;
/// How long what is still to be written may take after the last user is gone.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the mount itself may take, which asks nobody.
const MOUNT: Duration = Duration::from_secs(10);

/// A share to be mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Name or address of the server.
    pub server: String,
    /// The exported directory on that server.
    pub path: String,
    /// Mount options as nfs(5) has them, one each.
    pub options: Vec<String>,
    /// The existing directory where the share is mounted.
    pub at: PathBuf,
}

/// Why a share cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The mount options make no sense, or nobody here can honour them.
    #[error("mount options: {0}")]
    Options(String),
    /// The server does not give the share.
    #[error(transparent)]
    Share(#[from] berth_nfs::Error),
    /// This machine does not mount it.
    #[error("{}", .0.sentence())]
    Machine(#[from] berth_host::Error),
}

impl Error {
    fn errno(&self) -> i32 {
        match self {
            Self::Options(_) => Errno::INVAL.raw_os_error(),
            Self::Share(error) => patience::errno(error).raw_os_error(),
            Self::Machine(error) => error.errno().unwrap_or(Errno::IO.raw_os_error()),
        }
    }

    /// The error with its reasons.
    fn sentence(&self) -> String {
        berth_core::error_chain(self)
    }
}

/// Has `program` serve a share, and returns when it is mounted.
///
/// `program` is one whose `main` intercepts [`SERVER`] and `berth_host::remote::MOUNT_WORKER`. Whatever goes wrong, nothing stays behind.
pub fn start(program: &Path, mount: &Mount, deadline: Duration) -> berth_host::Result<()> {
    let mut words: Vec<&OsStr> = vec![mount.at.as_os_str(), mount.server.as_ref(), mount.path.as_ref()];
    words.extend(mount.options.iter().map(OsStr::new));
    // For people who read the list of processes; options may have come from a secret.
    let share = format!("{}:{}", mount.server, mount.path);
    let args = [OsStr::new(SERVER.argument), share.as_ref(), mount.at.as_os_str()];
    serving::start(program, args, &words, deadline).inspect_err(|_| {
        let _ = RemoteMounts::new(program).end(&mount.at, MOUNT);
    })
}

fn run_server() -> ! {
    let served = read_mount().and_then(|mount| serve(&mount, || serving::answer(Ok(()))));
    let code = match served {
        Ok(()) => 0,
        Err(error) => {
            serving::answer(Err((error.errno(), &error.sentence())));
            1
        }
    };
    std::process::exit(code);
}

fn read_mount() -> Result<Mount, Error> {
    let mut words = serving::words()?.into_iter();
    let at = words.next().map(OsString::from_vec).unwrap_or_default().into();
    let mut words = words.map(|word| String::from_utf8_lossy(&word).into_owned());
    let (server, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    Ok(Mount { server, path, options: words.collect(), at })
}

/// Mounts a share, says so, and serves it until it is unmounted.
pub fn serve(mount: &Mount, ready: impl FnOnce()) -> Result<(), Error> {
    let patience =
        Patience::parse(mount.options.iter().flat_map(|list| list.split(','))).map_err(Error::Options)?;
    let mut options = Options::parse(&mount.options).map_err(|error| Error::Options(error.to_string()))?;
    options.timeout = patience.attempt();
    let target = Target { server: mount.server.clone(), path: mount.path.clone(), options };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .map_err(|error| berth_host::Error::new("start threads", error))?;
    let nfs = Nfs::new();
    let share = runtime.block_on(nfs.share(&target))?;
    let device = open_device()?;
    let session = {
        let _inside = runtime.enter();
        Session::new(device.try_clone().map_err(failed)?, Filesystem::new(nfs, share, patience))
    };
    mount_device(&device, &target, &mount.at)?;
    // The filesystem ends with the last of these.
    drop(device);
    ready();
    let served = session.serve(runtime.handle());
    let tasks = session.filesystem().tasks();
    tasks.close();
    let _ = runtime.block_on(async { tokio::time::timeout(FLUSH_TIMEOUT, tasks.wait()).await });
    runtime.shutdown_background();
    served.map_err(|errno| failed(errno.into()))
}

const DEVICE: &str = "/dev/fuse";

fn failed(error: std::io::Error) -> Error {
    berth_host::Error::new(format!("use {DEVICE}"), error).into()
}

fn open_device() -> Result<OwnedFd, Error> {
    match rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Err(errno @ Errno::ACCESS) => {
            let why = "an NFS share is mounted through /dev/fuse, which this user may not open; an administrator can allow \
                       it (chmod 0666 /dev/fuse)";
            Err(berth_host::Error::new(why, errno).into())
        }
        opened => opened.map_err(|errno| failed(errno.into())),
    }
}

fn mount_device(device: &OwnedFd, target: &Target, at: &Path) -> Result<(), Error> {
    let options = [
        format!("fd={}", device.as_raw_fd()),
        "rootmode=40000".to_owned(),
        "user_id=0".to_owned(),
        "group_id=0".to_owned(),
        "allow_other".to_owned(),
        format!("max_read={}", wire::LARGEST_TRANSFER),
        "subtype=nfs".to_owned(),
    ];
    // The kernel does not wait for the process behind the device; our parent watches over this one.
    let fs_type = "fuse".to_owned();
    Ok(remote::mount_here(Mountable { fs_type, source: target.to_string(), options: options.into() }, at)?)
}
