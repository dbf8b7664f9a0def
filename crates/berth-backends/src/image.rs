//! What every backend needs whose volumes are images: files that hold a filesystem, used through loop devices.
//!
//! An image is formatted only if it is provably blank, and beside itself (`berth_host::format`), so that a crash leaves
//! either no filesystem or a whole one; anything unknown on it is left alone.

use std::{path::Path, time::Duration};

use berth_core::{Access, Capacity, CapacityRange, VolumeCapability};
use berth_host::{
    format::{self, Content, Filesystem},
    mount, usage,
};

use crate::{Amounts, Error, Result, Usage};

const EBUSY: i32 = rustix::io::Errno::BUSY.raw_os_error();

/// What an image is called in its volume's directory.
pub(crate) const IMAGE: &str = "image";
/// Sizes are multiples of this, the block size of every filesystem here.
pub(crate) const UNIT: u64 = 4096;
/// The size of a volume for which none is asked.
pub(crate) const DEFAULT_SIZE: Capacity = Capacity::gibibytes(1);
/// How long a tool may work on an image.
pub(crate) const TOOL_DEADLINE: Duration = Duration::from_secs(120);

/// The filesystem that the capabilities ask for on an image; raw volumes have none.
pub(crate) fn filesystem_asked(capabilities: &[VolumeCapability]) -> Result<Option<Filesystem>> {
    let mut asked = None;
    for capability in capabilities {
        let Access::Mount { fs_type, .. } = &capability.access else { return Ok(None) };
        let fs = parse_filesystem(fs_type)?.unwrap_or(Filesystem::Ext4);
        if asked.is_some_and(|asked| asked != fs) {
            return Err(Error::Invalid(
                "the volume capabilities ask for two different filesystems".to_owned(),
            ));
        }
        asked = Some(fs);
    }
    Ok(asked.or(Some(Filesystem::Ext4)))
}

/// Reads a filesystem type as it stands in a capability, where it says one.
pub(crate) fn parse_filesystem(fs_type: &str) -> Result<Option<Filesystem>> {
    if fs_type.is_empty() {
        return Ok(None);
    }
    fs_type.parse().map(Some).map_err(|_| {
        Error::Invalid(format!("fs_type {fs_type:?} cannot be made here; a volume takes ext4, xfs or btrfs"))
    })
}

/// The capacity of a new volume: what was asked for, if an image that holds `filesystem` may be long enough.
pub(crate) fn choose_size(range: &CapacityRange, filesystem: Option<Filesystem>) -> Result<Capacity> {
    let size = range.choose(DEFAULT_SIZE);
    check_length(range, length(size.bytes(), filesystem), filesystem)?;
    Ok(size)
}

/// How long the image of a volume of `size` bytes is that holds `filesystem`, or is raw: a multiple of [`UNIT`], and no
/// less than the filesystem needs. The volume's capacity stays what was asked for, so that a restore or a clone that asks
/// for the same is not too small.
pub(crate) fn length(size: u64, filesystem: Option<Filesystem>) -> u64 {
    let least = filesystem.map_or(UNIT, format::minimum_size);
    size.max(least).next_multiple_of(UNIT)
}

/// Refuses an image that would be longer than the caller allows, in words that name the smallest sizes.
pub(crate) fn check_length(range: &CapacityRange, length: u64, filesystem: Option<Filesystem>) -> Result<()> {
    let Some(limit) = range.limit().filter(|limit| length > limit.bytes()) else { return Ok(()) };
    let smallest = |fs: Filesystem| format!("{fs} {}", Capacity::new(format::minimum_size(fs)));
    let why = match filesystem {
        Some(fs) if length == format::minimum_size(fs) => format!(
            "the smallest volumes are {}, {} and {}",
            smallest(Filesystem::Ext4),
            smallest(Filesystem::Btrfs),
            smallest(Filesystem::Xfs)
        ),
        _ => format!("images are multiples of {UNIT} bytes"),
    };
    let what = filesystem.map_or_else(|| "a raw volume".to_owned(), |fs| format!("a volume with {fs}"));
    Err(Error::OutOfRange(format!(
        "{what} of this size takes {length} bytes, which is above limit_bytes ({}); {why}",
        limit.bytes()
    )))
}

/// The size of a volume of `now` bytes after it has grown into the range.
pub(crate) fn choose_growth(range: &CapacityRange, now: u64) -> Result<Capacity> {
    let wanted = range.required().unwrap_or(Capacity::ZERO).max(Capacity::new(now));
    if range.limit().is_some_and(|limit| wanted.round_up(UNIT) > limit) {
        return Err(Error::OutOfRange(format!(
            "the volume has {now} bytes and would need {}, which is above limit_bytes; volumes never shrink",
            wanted.bytes()
        )));
    }
    Ok(wanted)
}

/// Makes sure that the image holds a filesystem, and the one that is wanted if one is; formats it with `default` only
/// if it is provably blank, and returns whether it did.
pub(crate) fn prepare(
    image: &Path,
    default: Filesystem,
    wanted: Option<Filesystem>,
) -> Result<(Filesystem, berth_host::Change)> {
    match format::probe(image)? {
        Content::Blank => {
            format::make(image, default, TOOL_DEADLINE)?;
            Ok((default, berth_host::Change::Made))
        }
        found => Ok((recognise(found, wanted)?, berth_host::Change::AlreadyTrue)),
    }
}

/// The filesystem that was found, if it is one that can be mounted, and the one that is wanted if one is.
pub(crate) fn recognise(found: Content, wanted: Option<Filesystem>) -> Result<Filesystem> {
    match found {
        Content::Filesystem(found) if wanted.is_none_or(|wanted| wanted == found) => Ok(found),
        Content::Filesystem(found) => Err(Error::Invalid(format!(
            "the volume holds {}, and fs_type asks for {}; it is not formatted again",
            found.as_str(),
            wanted.map_or("", Filesystem::as_str)
        ))),
        Content::Blank => {
            Err(Error::Precondition("the volume is blank, and not formatted to be read only".to_owned()))
        }
        Content::Other(what) => Err(Error::Precondition(format!(
            "the volume is not blank and holds no filesystem that is known here ({what}); it is not formatted"
        ))),
    }
}

/// ext4 grows mounted only for those with CAP_SYS_RESOURCE.
pub(crate) fn grows_only_unmounted(filesystem: Filesystem, error: &berth_host::Error) -> bool {
    filesystem == Filesystem::Ext4 && error.kind() == std::io::ErrorKind::PermissionDenied
}

/// What the caller asks for, and what an image needs.
pub(crate) fn mount_options(filesystem: Filesystem, flags: &[String], read_only: bool) -> mount::Options {
    let mut options = disk_options(filesystem, flags, read_only);
    // What is deleted inside goes back to the disk; btrfs does so by itself.
    if filesystem != Filesystem::Btrfs {
        ensure(&mut options, "discard", "nodiscard");
    }
    options
}

/// What the caller asks for, and what a filesystem on a disk of its own needs.
pub(crate) fn disk_options(filesystem: Filesystem, flags: &[String], read_only: bool) -> mount::Options {
    let mut options = mount::parse_options(flags);
    options.attributes.read_only |= read_only;
    if filesystem == Filesystem::Xfs {
        // A restored volume has its source's UUID.
        ensure(&mut options, "nouuid", "nouuid");
    }
    options
}

fn ensure(options: &mut mount::Options, option: &str, opposite: &str) {
    if !options.filesystem.iter().any(|given| given == option || given == opposite) {
        options.filesystem.push(option.to_owned());
    }
}

/// How full the filesystem is that is mounted there.
pub(crate) fn usage_of_mount(path: &Path) -> Result<Usage> {
    let space = usage::space(path)?;
    let used = space.total.saturating_sub(space.free);
    let inodes = Amounts {
        total: space.inodes_total,
        used: space.inodes_total.saturating_sub(space.inodes_free),
        available: space.inodes_free,
    };
    let bytes = Amounts { total: space.total, used, available: space.available };
    Ok(Usage { bytes, inodes: Some(inodes) })
}

/// What cannot be unmounted because it is in use is the caller's to wait for.
pub(crate) fn busy(error: berth_host::Error, path: &Path) -> Error {
    if error.errno() == Some(EBUSY) {
        return Error::Precondition(format!("{} is still in use by some process", path.display()));
    }
    error.into()
}

/// A filesystem that refuses its options is the caller's mistake, not the machine's.
pub(crate) fn refused_options(error: berth_host::Error, options: &[String]) -> Error {
    if error.kind() == std::io::ErrorKind::InvalidInput && !options.is_empty() {
        return Error::Invalid(format!("mount options {}: {}", options.join(","), error.sentence()));
    }
    error.into()
}
