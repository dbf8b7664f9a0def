//! What is done to an image on a node, in a process of its own: it opens files of the share and mounts what is on them,
//! which waits as long as the server does, and a process can be killed.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
    time::Duration,
};

use berth_host::{
    Change,
    format::{self, Content, Filesystem},
    helper::Helper,
    loopdev::{self, LoopDevice},
    mount,
    worker::{self, Workers},
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{COPIED, mount::refused, parameters::OwnerAndMode};
use crate::{
    Error, Result,
    image::{self, IMAGE, TOOL_DEADLINE},
};

/// What is to be done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Work {
    /// Mount the filesystem in an image, made and grown before as needed.
    Mount {
        /// The volume's directory on the mounted share.
        share: PathBuf,
        /// The existing directory where the image is mounted.
        at: PathBuf,
        /// As the capability has it.
        fs_type: String,
        read_only: bool,
        /// Owner and mode of the root directory of the filesystem.
        ownership: OwnerAndMode,
    },
    /// Let a mounted filesystem have all of its image.
    Grow {
        share: PathBuf,
        /// Where it is mounted.
        at: PathBuf,
        /// The least that the image shall have.
        size: u64,
    },
}

/// Why it was not done.
#[derive(Debug, Serialize, Deserialize)]
enum Failure {
    Invalid(String),
    Precondition(String),
    Busy(String),
    /// The machine or the server refused.
    Host {
        doing: String,
        errno: i32,
    },
    /// Whatever else went wrong.
    Other(String),
}

/// The process that works on image volumes.
pub const IMAGE_WORKER: Helper = Helper {
    argument: "__nfs-image",
    run: || worker::serve(|work: Work| work.perform().map_err(Failure::from)),
};

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Invalid(sentence) => Self::Invalid(sentence),
            Error::Busy(sentence) => Self::Busy(sentence),
            Error::Precondition(sentence) => Self::Precondition(sentence),
            Error::Host(host) => match host.errno() {
                Some(errno) => Self::Host { doing: host.to_string(), errno },
                None => Self::Other(host.sentence()),
            },
            other => Self::Other(other.to_string()),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Invalid(sentence) => Self::Invalid(sentence),
            Failure::Busy(sentence) => Self::Busy(sentence),
            Failure::Precondition(sentence) => Self::Precondition(sentence),
            Failure::Other(sentence) => Self::State(sentence),
            Failure::Host { doing, errno } => {
                of_server(berth_host::Error::new(doing, io::Error::from_raw_os_error(errno)))
            }
        }
    }
}

/// An error of the machine, which may be the server's.
fn of_server(error: berth_host::Error) -> Error {
    match error.errno().map(Errno::from_raw_os_error) {
        Some(Errno::TIMEDOUT | Errno::STALE | Errno::IO | Errno::ACCESS) => refused(&error),
        _ => error.into(),
    }
}

/// The processes that work on images.
#[derive(Debug)]
pub(super) struct ImageWorkers(Workers);

impl ImageWorkers {
    /// `program` is one whose `main` intercepts [`IMAGE_WORKER`].
    pub(super) fn new(program: &Path) -> Self {
        Self(Workers::new(program, IMAGE_WORKER.argument))
    }

    /// Has the work done; blocks up to the deadline.
    pub(super) fn run(&self, work: &Work, deadline: Duration) -> Result<()> {
        let done: std::result::Result<(), Failure> = self
            .0
            .call(work, deadline)
            .map_err(|error| of_server(berth_host::Error::new("work on an image", error)))?;
        Ok(done?)
    }
}

impl Work {
    fn perform(&self) -> Result<()> {
        match self {
            Self::Mount { share, at, fs_type, read_only, ownership } => {
                mount_image(share, at, fs_type, *read_only, *ownership)
            }
            Self::Grow { share, at, size } => grow(share, at, *size),
        }
    }
}

fn mount_image(
    share: &Path,
    at: &Path,
    fs_type: &str,
    read_only: bool,
    ownership: OwnerAndMode,
) -> Result<()> {
    let image = share.join(IMAGE);
    match fs::symlink_metadata(&image) {
        Ok(found) if found.is_file() => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(host("read the attributes of", &image, error));
        }
        _ => return Err(Error::Precondition("the volume's image is gone from its directory".to_owned())),
    }
    let wanted = image::parse_filesystem(fs_type)?;
    if read_only {
        let found = image::recognise(format::probe(&image)?, wanted)?;
        return attach(&image, at, found, read_only);
    }
    let (found, formatted) = image::prepare(&image, wanted.unwrap_or(Filesystem::Ext4), wanted)?;
    own_copy(share, &image, found)?;
    attach(&image, at, found, read_only)?;
    let finished = grow_fresh(&image, at, found).and_then(|()| apply_ownership(at, ownership, formatted));
    if finished.is_err() {
        mount::unmount(at)?;
    }
    finished
}

/// Makes a copied filesystem one that can be mounted beside its original.
fn own_copy(share: &Path, image: &Path, found: Filesystem) -> Result<()> {
    let marker = share.join(COPIED);
    match fs::symlink_metadata(&marker) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        seen => seen.map_err(|error| host("read the attributes of", &marker, error))?,
    };
    format::renew_identity(found, image, TOOL_DEADLINE)?;
    fs::remove_file(&marker).map_err(|error| host("remove", &marker, error))
}

/// Mounts the image. It goes to the device that it is on, if somebody else's mount namespace has kept it there.
fn attach(image: &Path, at: &Path, filesystem: Filesystem, read_only: bool) -> Result<()> {
    let options = image::mount_options(filesystem, &[], read_only);
    let share = image.parent().unwrap_or(Path::new("/"));
    let device = match loopdev::attached_below(share)?.first() {
        None => LoopDevice::attach(image, loopdev::Options { read_only, direct_io: true, autoclear: true })?,
        Some(old) => LoopDevice::open_if_attached(old.number, image)?
            .filter(|_| old.read_only == read_only)
            .ok_or_else(|| Error::Busy("the image is still being let go of; try again".to_owned()))?,
    };
    Ok(mount::filesystem(device.path(), at, filesystem.as_str(), options.attributes, &options.filesystem)?)
}

/// Grows what was just mounted to the size of its image; unmounted for a moment where it must be.
fn grow_fresh(image: &Path, at: &Path, filesystem: Filesystem) -> Result<()> {
    match format::grow_mounted(filesystem, at) {
        Err(error) if image::grows_only_unmounted(filesystem, &error) => {}
        grown => return Ok(grown.map(drop)?),
    }
    let device = mount::mount_of(at)?.and_then(|found| loopdev::number_of(&found.source));
    mount::unmount(at)?;
    let device = device.ok_or_else(|| Error::State("an image is on no loop device".to_owned()))?;
    match loopdev::detach(device) {
        Ok(_) => {
            format::grow_unmounted(filesystem, image, TOOL_DEADLINE)?;
        }
        // A pod's own mount, in a namespace of its own, still holds the filesystem; it is grown another time.
        Err(error) if error.errno() == Some(Errno::BUSY.raw_os_error()) => {}
        Err(error) => return Err(error.into()),
    }
    attach(image, at, filesystem, false)
}

/// Gives the filesystem's own directory its mode, and its owner if it was just made.
fn apply_ownership(at: &Path, ownership: OwnerAndMode, formatted: Change) -> Result<()> {
    let now = fs::metadata(at).map_err(|error| host("read the attributes of", at, error))?;
    if formatted == Change::Made && (ownership.uid.is_some() || ownership.gid.is_some()) {
        chown(at, ownership.uid, ownership.gid).map_err(|error| host("give away", at, error))?;
    }
    // The setgid bit is the kubelet's, for `fsGroup`.
    match ownership.mode.map(|mode| mode | now.mode() & 0o2000) {
        Some(mode) if mode != now.mode() & 0o7777 => {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(at, mode).map_err(|error| host("set the mode of", at, error))
        }
        _ => Ok(()),
    }
}

fn grow(share: &Path, at: &Path, size: u64) -> Result<()> {
    let path = share.join(IMAGE);
    // Opened anew, it is as long as the server says.
    let image = fs::OpenOptions::new().read(true).write(true).open(&path);
    let image = image.map_err(|error| host("open", &path, error))?;
    let length = image.metadata().map_err(|error| host("read the attributes of", &path, error))?.len();
    if length < size {
        // The controller has made it longer, while it was replaced by its formatted self.
        image.set_len(size).and_then(|()| image.sync_all()).map_err(|error| host("grow", &path, error))?;
    }
    let device = mount::mount_of(at)?.map(|found| found.source).unwrap_or_default();
    let number = loopdev::number_of(&device)
        .ok_or_else(|| Error::Precondition(format!("{} is not the filesystem of an image", at.display())))?;
    loopdev::refresh_capacity(number)?;
    let Content::Filesystem(filesystem) = format::probe(Path::new(&device))? else {
        return Err(Error::Precondition("the volume holds no filesystem that could grow".to_owned()));
    };
    match format::grow_mounted(filesystem, at) {
        Err(error) if image::grows_only_unmounted(filesystem, &error) => Err(Error::Precondition(
            "this machine can grow this filesystem only while it is not mounted; it will be grown when the volume is \
             published again after its last pod is gone"
                .to_owned(),
        )),
        grown => Ok(grown.map(drop)?),
    }
}

fn host(doing: &str, path: &Path, error: io::Error) -> Error {
    berth_host::Error::new(format!("{doing} {}", path.display()), error).into()
}
