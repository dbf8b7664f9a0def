//! Directories and images of this machine that are named by their path, each mounted by itself: for a program that ends after
//! each call, and for storage that no driver made.
//!
//! A path has to lie below one of the roots that the configuration allows, and no symbolic link below a root is followed. An
//! image is mounted at a directory of the driver's own that is named after the target, bound from there at the target with the
//! attributes asked for, and unmounted where it was mounted first; its loop device goes with its last mount. Whoever works on
//! an image holds its lock, so that it never gets two devices.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Component, Path, PathBuf},
};

use berth_core::{Access, AccessKind, Capacity, Quantity, hex};
use berth_host::{
    format::{self, Filesystem},
    loopdev::{self, LoopDevice},
    mount::{self, Attributes, parse_options},
    path::Dir,
};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::{
    Error, FromParameters as _, NodeVolume, Result,
    image::{self, TOOL_DEADLINE},
};

/// Mounts directories and images below allowed roots.
#[derive(Debug, Clone)]
pub struct DirectVolumes {
    /// Directories below which volumes may lie.
    pub roots: Vec<PathBuf>,
    /// Where images are mounted for a moment, and the locks of images.
    pub dir: PathBuf,
}

/// What a volume's options say.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct VolumeOptions {
    path: PathBuf,
    #[serde(default, rename = "type")]
    kind: Kind,
    #[serde(default)]
    size: String,
    #[serde(default)]
    mount_options: String,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Kind {
    #[default]
    Directory,
    DirectoryOrCreate,
    Image,
    ImageOrCreate,
}

impl Kind {
    fn is_image(self) -> bool {
        matches!(self, Self::Image | Self::ImageOrCreate)
    }
}

/// A volume's path: a root, the directories below it, and its own name.
struct VolumePath {
    root: PathBuf,
    parent: String,
    name: String,
}

impl DirectVolumes {
    /// Mounts the volume at a target, which is an empty directory; the same volume there already is success.
    pub fn mount(&self, volume: &NodeVolume, target: &Path) -> Result<()> {
        volume.check_access(AccessKind::Mount)?;
        let options = VolumeOptions::from_parameters(&volume.context)?;
        let path = self.find(&options.path)?;
        let Access::Mount { fs_type, flags, .. } = &volume.capability.access else {
            return Err(Error::Unsupported("raw block access"));
        };
        let flags = [flags.as_slice(), std::slice::from_ref(&options.mount_options)].concat();
        let mut wanted = parse_options(&flags);
        wanted.attributes.read_only |= volume.read_only;
        if options.kind.is_image() {
            let size = parse_size(&options)?;
            return self.mount_image(
                &path,
                size,
                image::parse_filesystem(fs_type)?,
                &flags,
                wanted.attributes,
                target,
            );
        }
        if let Some(option) = wanted.filesystem.first() {
            return Err(Error::Invalid(format!(
                "mount option {option:?} cannot be applied to a directory, which has no filesystem of its own"
            )));
        }
        let directory = path.open_directory(options.kind == Kind::DirectoryOrCreate)?;
        if mount::is_mount_point(target)? {
            return same_directory(&options.path, target);
        }
        Ok(mount::bind_directory(&directory, target, wanted.attributes)?)
    }

    /// Takes away whatever is mounted at a target, and what a killed call left of mounting it.
    pub fn unmount(&self, target: &Path) -> Result<()> {
        mount::unmount(target)?;
        let scratch = self.scratch_of(target);
        mount::unmount(&scratch)?;
        let _ = fs::remove_dir(&scratch);
        Ok(())
    }

    /// Makes an image, and the filesystem in it that is mounted at `target`, at least as large as `size`; a directory is as
    /// large as the disk that it is on.
    pub fn grow(&self, volume: &NodeVolume, target: &Path, size: Capacity) -> Result<()> {
        let options = VolumeOptions::from_parameters(&volume.context)?;
        let path = self.find(&options.path)?;
        if !options.kind.is_image() {
            return Ok(());
        }
        let image = path.path();
        let _lock = self.lock(&image)?;
        path.open_directory_above()?;
        let Some(device) = attached(&image)? else {
            return Err(Error::Precondition(format!("{} is not mounted here", image.display())));
        };
        let file = OpenOptions::new().write(true).custom_flags(libc_nofollow()).open(&image);
        let file = file.map_err(|error| host("open", &image, error))?;
        let length = size.round_up(image::UNIT).bytes();
        if file.metadata().map_err(|error| host("read the size of", &image, error))?.len() < length {
            file.set_len(length)
                .and_then(|()| file.sync_all())
                .map_err(|error| host("extend", &image, error))?;
        }
        loopdev::refresh_capacity(device.number())?;
        let filesystem = image::recognise(format::probe(&image)?, None)?;
        match format::grow_mounted(filesystem, target) {
            Err(error) if image::grows_only_unmounted(filesystem, &error) => Err(Error::Precondition(
                "the image is larger now, and this machine can grow its ext4 only while it is not mounted: that needs \
                 CAP_SYS_RESOURCE; it grows when it is mounted next"
                    .to_owned(),
            )),
            grown => Ok(grown.map(drop)?),
        }
    }

    fn mount_image(
        &self,
        path: &VolumePath,
        size: Option<Capacity>,
        wanted: Option<Filesystem>,
        flags: &[String],
        attributes: Attributes,
        target: &Path,
    ) -> Result<()> {
        let image = path.path();
        let _lock = self.lock(&image)?;
        path.open_directory_above()?;
        if mount::is_mount_point(target)? {
            return same_image(&image, target);
        }
        ensure_image(&image, size, wanted.unwrap_or(Filesystem::Ext4))?;
        let scratch = self.scratch_of(target);
        mount::unmount(&scratch)?;
        Dir::ensure(&scratch, 0o700)?;
        let mounted = mount_at(&image, wanted, flags, &scratch)
            .and_then(|()| Ok(mount::bind(&scratch, target, attributes)?));
        mount::unmount(&scratch)?;
        let _ = fs::remove_dir(&scratch);
        mounted
    }

    /// The part of a path that is below a root; refuses what is below none.
    fn find(&self, path: &Path) -> Result<VolumePath> {
        let plain =
            path.is_absolute() && path.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
        let found = self.roots.iter().find_map(|root| Some((root, path.strip_prefix(root).ok()?)));
        let split = found.and_then(|(root, below)| {
            let (parent, name) = (below.parent()?.to_str()?, below.file_name()?.to_str()?);
            Some(VolumePath { root: root.clone(), parent: parent.to_owned(), name: name.to_owned() })
        });
        split.filter(|_| plain).ok_or_else(|| {
            let roots: Vec<_> = self.roots.iter().map(|root| root.display().to_string()).collect();
            Error::Invalid(format!(
                "path {:?} is not a path without \"..\" below one of the directories that this driver may use: {}",
                path.display(),
                roots.join(", ")
            ))
        })
    }

    fn lock(&self, image: &Path) -> Result<fs::File> {
        let locked = Dir::ensure(&self.dir, 0o700)?.lock_exclusively(&format!("{}.lock", digest(image)));
        locked.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                Error::Busy(format!("another call works on {}; try again", image.display()))
            }
            _ => error.into(),
        })
    }

    fn scratch_of(&self, target: &Path) -> PathBuf {
        self.dir.join(digest(target))
    }
}

impl VolumePath {
    fn path(&self) -> PathBuf {
        self.root.join(&self.parent).join(&self.name)
    }

    /// The directory that the volume lies in, which no symbolic link leads to.
    fn open_directory_above(&self) -> Result<Dir> {
        let root = Dir::open(&self.root)?;
        if self.parent.is_empty() { Ok(root) } else { Ok(root.dir(&self.parent)?) }
    }

    fn open_directory(&self, create: bool) -> Result<Dir> {
        if create {
            let mut dir = Dir::ensure(&self.root, 0o755)?;
            for part in Path::new(&self.parent).join(&self.name).components() {
                let Component::Normal(name) = part else { continue };
                dir = dir.ensure_dir(&name.to_string_lossy(), 0o755)?;
            }
            return Ok(dir);
        }
        match self.open_directory_above().and_then(|dir| Ok(dir.dir(&self.name)?)) {
            Err(Error::Host(error)) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::NotFound { what: "directory", id: self.path().display().to_string() })
            }
            opened => opened,
        }
    }
}

/// The size of an image that is to be made, where one is given.
fn parse_size(options: &VolumeOptions) -> Result<Option<Capacity>> {
    if options.size.is_empty() {
        return Ok(None);
    }
    let bytes = options.size.parse::<Quantity>().ok().and_then(|size| size.bytes());
    match bytes.and_then(|bytes| u64::try_from(bytes).ok()).filter(|bytes| *bytes > 0) {
        Some(bytes) if options.kind == Kind::ImageOrCreate => Ok(Some(Capacity::new(bytes))),
        Some(_) => Err(Error::invalid("size is for type ImageOrCreate alone")),
        None => Err(Error::Invalid(format!("size {:?} is not a size such as 1Gi", options.size))),
    }
}

/// Makes the image where it is missing and has a size.
fn ensure_image(image: &Path, size: Option<Capacity>, filesystem: Filesystem) -> Result<()> {
    match (fs::symlink_metadata(image), size) {
        (Ok(found), _) if found.is_file() => Ok(()),
        (Ok(_), _) => Err(Error::Precondition(format!("{} is not a regular file", image.display()))),
        (Err(error), Some(size)) if error.kind() == io::ErrorKind::NotFound => {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(image);
            let length = image::length(size.bytes(), Some(filesystem));
            made.and_then(|file| file.set_len(length).and_then(|()| file.sync_all()))
                .map_err(|error| host("make", image, error))
        }
        (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::NotFound { what: "image", id: image.display().to_string() })
        }
        (Err(error), _) => Err(host("read the attributes of", image, error)),
    }
}

/// Mounts an image, formatted if it is blank, and grows its filesystem to the image's size.
fn mount_at(image: &Path, wanted: Option<Filesystem>, flags: &[String], at: &Path) -> Result<()> {
    for may_grow_unmounted in [true, false] {
        let (device, filesystem) = if let Some(device) = attached(image)? {
            (device, image::recognise(format::probe(image)?, wanted)?)
        } else {
            let (filesystem, _) = image::prepare(image, wanted.unwrap_or(Filesystem::Ext4), wanted)?;
            let options = loopdev::Options { read_only: false, direct_io: true, autoclear: true };
            (LoopDevice::attach(image, options)?, filesystem)
        };
        // For reading only, too: the same filesystem may be written at another target.
        let options = image::mount_options(filesystem, flags, false);
        let attributes = Attributes { read_only: false, ..options.attributes };
        mount::filesystem(device.path(), at, filesystem.as_str(), attributes, &options.filesystem)?;
        match format::grow_mounted(filesystem, at) {
            Err(error) if may_grow_unmounted && image::grows_only_unmounted(filesystem, &error) => {
                mount::unmount(at)?;
                let number = device.number();
                drop(device);
                // In use elsewhere, it stays as large as it is.
                if loopdev::detach(number).is_ok() {
                    format::grow_unmounted(filesystem, image, TOOL_DEADLINE)?;
                }
            }
            Err(error) if image::grows_only_unmounted(filesystem, &error) => return Ok(()),
            grown => return Ok(grown.map(drop)?),
        }
    }
    Ok(())
}

/// The device that an image is on.
fn attached(image: &Path) -> Result<Option<LoopDevice>> {
    for found in loopdev::attached_below(image)? {
        if let Some(device) = LoopDevice::open_if_attached(found.number, image)?.filter(|_| !found.read_only)
        {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

fn same_directory(directory: &Path, target: &Path) -> Result<()> {
    let identity = |path: &Path| {
        let found =
            fs::symlink_metadata(path).map_err(|error| host("read the attributes of", path, error))?;
        Ok::<_, Error>((found.dev(), found.ino()))
    };
    if identity(directory)? == identity(target)? { Ok(()) } else { Err(taken(target)) }
}

fn same_image(image: &Path, target: &Path) -> Result<()> {
    let number = mount::mount_of(target)?.and_then(|found| loopdev::number_of(&found.source));
    let device = number.map_or(Ok(None), |number| LoopDevice::open_if_attached(number, image))?;
    device.map(drop).ok_or_else(|| taken(target))
}

fn taken(target: &Path) -> Error {
    Error::Precondition(format!(
        "something else is mounted at {} already; unmount it first",
        target.display()
    ))
}

fn digest(path: &Path) -> String {
    hex(&Sha256::digest(path.as_os_str().as_encoded_bytes())[..16])
}

fn libc_nofollow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()
}

fn host(doing: &str, path: &Path, error: io::Error) -> Error {
    berth_host::Error::new(format!("{doing} {}", path.display()), error).into()
}
