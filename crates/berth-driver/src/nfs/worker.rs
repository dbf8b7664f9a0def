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
    loopdev::{self, LoopDevice},
    mount, serving,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Signal, set_parent_process_death_signal},
};
use serde::{Deserialize, Serialize};

use super::{content::COPIED, mount::refused, parameters::Look};
use crate::{
    backend::{Error, Result},
    image::{self, IMAGE, TOOL_DEADLINE},
};

/// The argument that makes a program do such work.
const ARGUMENT: &str = "__nfs-image";
/// How the process tells apart what the system said and what it says itself.
const INVALID: Errno = Errno::BADRQC;
const PRECONDITION: Errno = Errno::MEDIUMTYPE;
const BUSY: Errno = Errno::AGAIN;

/// What is to be done.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Work {
    /// Mount the filesystem in an image, made and grown before as needed.
    Mount {
        /// The volume's directory.
        share: PathBuf,
        /// An existing directory.
        at: PathBuf,
        /// As the capability has it.
        fs_type: String,
        read_only: bool,
        /// How the filesystem's own directory is to look.
        look: Look,
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

/// Takes over the process when it was started to work on an image; otherwise returns at once.
pub fn intercept() {
    if std::env::args_os().nth(1).is_none_or(|argument| argument != ARGUMENT) {
        return;
    }
    let done = alone().and_then(|()| told()).and_then(|work| work.perform());
    serving::answer(match &done {
        Ok(()) => Ok(()),
        Err((errno, sentence)) => Err((errno.raw_os_error(), sentence)),
    });
    std::process::exit(i32::from(done.is_err()));
}

/// Ends this process with the driver that started it: the next one would work on the same files beside it.
fn alone() -> Outcome<()> {
    let failed = |errno: Errno| (errno, "watch over the driver".to_owned());
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(failed)?;
    // It may have ended before that; then nobody reads what is said here.
    let said = std::io::stdout();
    let mut reader = [PollFd::new(&said, PollFlags::empty())];
    poll(&mut reader, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).map_err(failed)?;
    if reader[0].revents().contains(PollFlags::ERR) { Err(failed(Errno::PIPE)) } else { Ok(()) }
}

type Outcome<T> = std::result::Result<T, (Errno, String)>;

fn told() -> Outcome<Work> {
    let words = serving::words().map_err(|error| (Errno::IO, error.sentence()))?;
    let [work] = &words[..] else { return Err((Errno::INVAL, "there is no work to do".to_owned())) };
    serde_json::from_slice(work).map_err(|error| (Errno::INVAL, error.to_string()))
}

impl Work {
    /// Has `program`, one whose `main` begins with [`intercept`], do the work; blocks up to the deadline.
    pub(super) fn run(&self, program: &Path, deadline: Duration) -> Result<()> {
        let text = serde_json::to_string(self).map_err(|error| Error::State(error.to_string()))?;
        serving::start(program, [ARGUMENT], &[text.as_ref()], deadline).map_err(|error| {
            match error.errno().map(Errno::from_raw_os_error) {
                Some(INVALID) => Error::Invalid(error.to_string()),
                Some(PRECONDITION) => Error::Precondition(error.to_string()),
                Some(BUSY) => Error::Busy(error.to_string()),
                Some(Errno::TIMEDOUT | Errno::STALE | Errno::IO | Errno::ACCESS) => refused(&error),
                _ => error.into(),
            }
        })
    }

    fn perform(&self) -> Outcome<()> {
        let done = match self {
            Self::Mount { share, at, fs_type, read_only, look } => {
                mount_image(share, at, fs_type, *read_only, *look)
            }
            Self::Grow { share, at, size } => grow(share, at, *size),
        };
        done.map_err(|error| match error {
            Error::Invalid(sentence) => (INVALID, sentence),
            Error::Busy(sentence) => (BUSY, sentence),
            Error::Host(host) => (host.errno().map_or(Errno::IO, Errno::from_raw_os_error), host.to_string()),
            other => (PRECONDITION, other.to_string()),
        })
    }
}

fn mount_image(share: &Path, at: &Path, fs_type: &str, read_only: bool, look: Look) -> Result<()> {
    let image = share.join(IMAGE);
    match fs::symlink_metadata(&image) {
        Ok(found) if found.is_file() => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(host("look at", &image, error)),
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
    let finished = grow_fresh(&image, at, found).and_then(|()| dress(at, look, formatted));
    if finished.is_err() {
        mount::unmount(at)?;
    }
    finished
}

/// Makes a copied filesystem one that can be mounted beside its original.
fn own_copy(share: &Path, image: &Path, found: Filesystem) -> Result<()> {
    let mark = share.join(COPIED);
    match fs::symlink_metadata(&mark) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        seen => seen.map_err(|error| host("look at", &mark, error))?,
    };
    format::renew_identity(found, image, TOOL_DEADLINE)?;
    fs::remove_file(&mark).map_err(|error| host("remove", &mark, error))
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
fn dress(at: &Path, look: Look, formatted: Change) -> Result<()> {
    let now = fs::metadata(at).map_err(|error| host("look at", at, error))?;
    if formatted == Change::Made && (look.uid.is_some() || look.gid.is_some()) {
        chown(at, look.uid, look.gid).map_err(|error| host("give away", at, error))?;
    }
    match look.mode {
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
    let length = image.metadata().map_err(|error| host("look at", &path, error))?.len();
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
