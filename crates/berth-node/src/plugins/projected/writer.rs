//! Puts files into a volume so that whoever reads them sees all of one version or all of the next.
//!
//! The files lie in a directory of their own, named by the time, to which the link `..data` points; each name at the
//! top of the volume is a link through `..data`. A new version is written beside the old one and takes its place by one
//! rename. What a crash left at any point is completed or removed by the next call, and nothing is written when the
//! files are already as they should be.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write as _};

use berth_host::ownership::{GroupPolicy, apply_group};
use berth_host::path::{Dir, Kind};
use berth_host::{Change, Error, Result};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::render::{File, Tree};

const DATA: &str = "..data";
const NEXT_DATA: &str = "..data_tmp";
const DIRECTORY_MODE: u32 = 0o755;

/// Makes the volume hold exactly these files, all given to the group if there is one.
pub(super) fn write(volume: &Dir, tree: &Tree, group: Option<u32>) -> Result<Change> {
    write_in_steps(volume, tree, group, &mut |_| Ok(()))
}

/// As [`write`]; `done` hears of each step, and its error stops there, as a crash would.
fn write_in_steps(
    volume: &Dir,
    tree: &Tree,
    group: Option<u32>,
    done: &mut dyn FnMut(&'static str) -> Result<()>,
) -> Result<Change> {
    let current = volume.link_target(DATA)?.filter(|name| is_version(name));
    remove_versions_but(volume, current.as_deref())?;
    done("clean")?;
    let change = match &current {
        Some(current) if holds(volume, current, tree)? => Change::AlreadyTrue,
        _ => {
            let version = new_version(volume)?;
            done("directory")?;
            put_files(&volume.dir(&version)?, tree, done)?;
            if let Some(gid) = group {
                apply_group(volume, gid, GroupPolicy::Always, true)?;
            }
            done("files")?;
            volume.remove_file(NEXT_DATA)?;
            volume.make_link(NEXT_DATA, &version)?;
            done("next link")?;
            volume.rename_over(NEXT_DATA, DATA)?;
            done("swap")?;
            Change::Made
        }
    };
    show(volume, tree, done)?;
    hide(volume, tree)?;
    done("hidden")?;
    let current = volume.link_target(DATA)?;
    remove_versions_but(volume, current.as_deref())?;
    Ok(change)
}

/// Whether a name is one that [`new_version`] gives: `..2026_01_31_23_59_59.0123456789`.
fn is_version(name: &str) -> bool {
    let Some((time, number)) = name.strip_prefix("..").and_then(|name| name.split_once('.')) else {
        return false;
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits(number) && time.split('_').count() == 6 && time.split('_').all(digits)
}

fn new_version(volume: &Dir) -> Result<String> {
    let now = Timestamp::now().to_zoned(TimeZone::UTC);
    let time = now.strftime("..%Y_%m_%d_%H_%M_%S");
    let first = now.subsec_nanosecond();
    for number in first..=first.saturating_add(1000) {
        let name = format!("{time}.{number}");
        if volume.make_dir(&name, DIRECTORY_MODE)? == Change::Made {
            return Ok(name);
        }
    }
    Err(Error::new(
        format!("find a new name in {}", volume.path().display()),
        io::Error::from(io::ErrorKind::AlreadyExists),
    ))
}

fn remove_versions_but(volume: &Dir, current: Option<&str>) -> Result<()> {
    for entry in volume.entries()? {
        if let Some(name) = entry.name.to_str()
            && entry.kind == Kind::Directory
            && is_version(name)
            && Some(name) != current
        {
            volume.remove_tree(name)?;
        }
    }
    Ok(())
}

fn put_files(version: &Dir, tree: &Tree, done: &mut dyn FnMut(&'static str) -> Result<()>) -> Result<()> {
    for (path, File { bytes, mode, owner }) in tree {
        let (parents, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut parent: Option<Dir> = None;
        for element in parents.split('/').filter(|element| !element.is_empty()) {
            parent = Some(parent.as_ref().unwrap_or(version).ensure_dir(element, DIRECTORY_MODE)?);
        }
        let parent = parent.as_ref().unwrap_or(version);
        let mut file = parent.create_file(name, *mode)?;
        file.write_all(bytes)
            .map_err(|error| Error::new(format!("write {}", parent.child_path(name).display()), error))?;
        if let Some(uid) = owner {
            parent.set_owner(name, *uid)?;
        }
        done("file")?;
    }
    Ok(())
}

/// Whether a version holds exactly these files.
fn holds(volume: &Dir, version: &str, tree: &Tree) -> Result<bool> {
    let version = match volume.dir(version) {
        Ok(version) => version,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let mut found = BTreeSet::new();
    list(&version, "", &mut found)?;
    if !found.iter().eq(tree.keys()) {
        return Ok(false);
    }
    for (path, file) in tree {
        let mut bytes = Vec::with_capacity(file.bytes.len());
        version
            .open_file(path, false)?
            .read_to_end(&mut bytes)
            .map_err(|error| Error::new(format!("read {}", version.child_path(path).display()), error))?;
        if bytes != file.bytes {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The paths of everything below that is no directory.
fn list(directory: &Dir, prefix: &str, found: &mut BTreeSet<String>) -> Result<()> {
    for entry in directory.entries()? {
        let name = entry.name.to_string_lossy();
        let path = if prefix.is_empty() { name.clone().into_owned() } else { format!("{prefix}/{name}") };
        if entry.kind == Kind::Directory {
            list(&directory.dir(&name)?, &path, found)?;
        } else {
            found.insert(path);
        }
    }
    Ok(())
}

/// Makes the links at the top, for those that are missing or lead elsewhere.
fn show(volume: &Dir, tree: &Tree, done: &mut dyn FnMut(&'static str) -> Result<()>) -> Result<()> {
    for (name, file) in tops(tree) {
        let target = format!("{DATA}/{name}");
        if volume.link_target(name)?.as_ref() == Some(&target) {
            continue;
        }
        // A directory of that name is where another volume is mounted into this one.
        if volume.dir(name).is_ok() {
            continue;
        }
        volume.remove_file(NEXT_DATA)?;
        volume.make_link(NEXT_DATA, &target)?;
        if let Some(uid) = file.owner {
            volume.set_owner(NEXT_DATA, uid)?;
        }
        volume.rename_over(NEXT_DATA, name)?;
        done("link")?;
    }
    Ok(())
}

/// Removes the links at the top to what is not there any more.
fn hide(volume: &Dir, tree: &Tree) -> Result<()> {
    let shown: BTreeSet<&str> = tops(tree).map(|(name, _)| name).collect();
    for entry in volume.entries()? {
        let Some(name) = entry.name.to_str().filter(|name| !shown.contains(name)) else { continue };
        let ours = entry.kind == Kind::Symlink
            && volume
                .link_target(name)?
                .is_some_and(|target| target.strip_prefix(DATA).is_some_and(|rest| rest.starts_with('/')));
        if ours || name == NEXT_DATA {
            volume.remove_file(name)?;
        }
    }
    Ok(())
}

/// The first element of each path.
fn tops(tree: &Tree) -> impl Iterator<Item = (&str, &File)> {
    tree.iter().map(|(path, file)| (path.split_once('/').map_or(path.as_str(), |(first, _)| first), file))
}

#[cfg(test)]
mod tests;
