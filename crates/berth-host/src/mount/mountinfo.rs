//! The kernel's table of mounts, `/proc/self/mountinfo`.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
};

use super::{observe, plain};
use crate::error::{Doing as _, Result};

const MOUNTINFO: &str = "/proc/self/mountinfo";

/// One mount of this process's mount namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountInfo {
    /// The id of the mount; the kernel reuses it once the mount is gone.
    pub id: u64,
    /// The id of the mount this one sits on.
    pub parent: u64,
    /// Major and minor number of the filesystem's device.
    pub device: (u32, u32),
    /// The directory of the filesystem that is the root of this mount.
    pub root: PathBuf,
    /// Where it is mounted.
    pub target: PathBuf,
    /// The filesystem type, such as `ext4` or `fuse.berth`.
    pub fs_type: String,
    /// What was mounted, as the filesystem reports it.
    pub source: String,
    /// The options of this mount, such as `ro,noatime`.
    pub options: String,
    /// What is mounted below it is mounted below its copies, too.
    pub is_shared: bool,
    /// Options of the filesystem, shared by all its mounts.
    pub super_options: String,
}

/// Every mount this process sees.
pub fn mounts() -> Result<Vec<MountInfo>> {
    let table = fs::read(MOUNTINFO).doing("read", MOUNTINFO)?;
    parse(&table).doing("parse", MOUNTINFO)
}

/// Every mount that another process sees, with paths as they are below its root directory.
pub fn mounts_of(process: u32) -> Result<Vec<MountInfo>> {
    let path = format!("/proc/{process}/mountinfo");
    let table = fs::read(&path).doing("read", &path)?;
    parse(&table).doing("parse", &path)
}

/// The topmost mount exactly at `target`, or `None`.
pub fn mount_of(target: &Path) -> Result<Option<MountInfo>> {
    match observe(target) {
        Ok(Some(seen)) if seen.is_root => Ok(mounts()?.into_iter().find(|mount| mount.id == seen.mount_id)),
        Ok(_) => Ok(None),
        Err(_) => listed_at(target),
    }
}

/// Whether what is mounted below a path shows in copies of its mount: in other mount namespaces, and in containers.
pub fn is_shared(path: &Path) -> Result<bool> {
    let path = fs::canonicalize(path).doing("resolve", path)?;
    let around = mounts()?.into_iter().filter(|mount| path.starts_with(&mount.target));
    // Of several at one place the last is on top.
    let nearest = around.max_by_key(|mount| mount.target.components().count());
    Ok(nearest.is_some_and(|mount| mount.is_shared))
}

/// As `mount_of`, by name alone: a filesystem that has failed or lost its server does not answer for itself.
pub(crate) fn listed_at(target: &Path) -> Result<Option<MountInfo>> {
    Ok(topmost(layers_at(target)?))
}

/// Everything mounted at a path, by name alone.
pub(crate) fn layers_at(target: &Path) -> Result<Vec<MountInfo>> {
    let target = plain(target);
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else { return Ok(Vec::new()) };
    let parent = fs::canonicalize(if parent == Path::new("") { Path::new(".") } else { parent })
        .doing("resolve", parent)?;
    Ok(layers(mounts()?, &parent.join(name)))
}

fn layers(mounts: Vec<MountInfo>, target: &Path) -> Vec<MountInfo> {
    mounts.into_iter().filter(|mount| mount.target == target).collect()
}

/// The topmost of the mounts at a path.
pub(crate) fn topmost(layers: Vec<MountInfo>) -> Option<MountInfo> {
    let covered: Vec<_> = layers.iter().map(|mount| mount.parent).collect();
    layers.into_iter().rfind(|mount| !covered.contains(&mount.id))
}

fn parse(table: &[u8]) -> io::Result<Vec<MountInfo>> {
    table
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("line {:?}", String::from_utf8_lossy(line)),
                )
            })
        })
        .collect()
}

/// See proc_pid_mountinfo(5): six fields, any number of optional ones, a dash, three fields.
fn parse_line(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut next = || fields.next();
    let id = number(next()?)?;
    let parent = number(next()?)?;
    let (major, minor) = std::str::from_utf8(next()?).ok()?.split_once(':')?;
    let root = unescape(next()?);
    let target = unescape(next()?);
    let options = text(next()?);
    let mut is_shared = false;
    loop {
        match next()? {
            b"-" => break,
            field => is_shared |= field.starts_with(b"shared:"),
        }
    }
    let fs_type = text(next()?);
    let source = text(next()?);
    // Not every filesystem escapes what it prints here, so a space may be part of it.
    let super_options = fields.map(text).collect::<Vec<_>>().join(" ");
    Some(MountInfo {
        id,
        parent,
        device: (major.parse().ok()?, minor.parse().ok()?),
        root: root.into(),
        target: target.into(),
        fs_type,
        source,
        options,
        is_shared,
        super_options,
    })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn text(field: &[u8]) -> String {
    unescape(field).to_string_lossy().into_owned()
}

/// Undoes the kernel's `\ooo` for space, tab, newline, backslash and hash.
fn unescape(field: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let escaped = if byte == b'\\' { tail.get(..3).and_then(octal) } else { None };
        plain.push(escaped.unwrap_or(byte));
        rest = if escaped.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(plain)
}

fn octal(digits: &[u8]) -> Option<u8> {
    let digits = OsStr::from_bytes(digits).to_str()?;
    if !digits.bytes().all(|digit| (b'0'..=b'7').contains(&digit)) {
        return None;
    }
    u8::from_str_radix(digits, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> MountInfo {
        parse_line(text.as_bytes()).unwrap_or_else(|| panic!("{text} parses"))
    }

    #[test]
    fn a_line_gives_all_its_fields_whatever_number_of_optional_ones() {
        for optional in ["", "shared:7 ", "shared:7 master:2 propagate_from:1 unbindable "] {
            let text =
                format!("36 35 98:0 /mnt1 /mnt2 rw,noatime {optional}- ext3 /dev/root rw,errors=continue");
            assert_eq!(
                line(&text),
                MountInfo {
                    id: 36,
                    parent: 35,
                    device: (98, 0),
                    root: "/mnt1".into(),
                    target: "/mnt2".into(),
                    fs_type: "ext3".into(),
                    source: "/dev/root".into(),
                    options: "rw,noatime".into(),
                    is_shared: !optional.is_empty(),
                    super_options: "rw,errors=continue".into(),
                }
            );
        }
    }

    #[test]
    fn octal_escapes_are_undone_and_other_backslashes_kept() {
        for (escaped, plain) in [
            (r"/a\040b", "/a b"),
            (r"/a\011b\012c", "/a\tb\nc"),
            (r"/a\134040", r"/a\040"),
            (r"/a\043b", "/a#b"),
            (r"/a\08b", r"/a\08b"),
            (r"/a\04", r"/a\04"),
            (r"/a\777", r"/a\777"),
            (r"/a\", r"/a\"),
        ] {
            assert_eq!(unescape(escaped.as_bytes()), plain, "{escaped}");
        }
    }

    #[test]
    fn an_empty_source_and_spaces_in_super_options_are_understood() {
        assert_eq!(line("1 2 0:5 / /x rw - tmpfs  rw").source, "");
        assert_eq!(line("1 2 0:5 / /x rw - fuse.odd src rw,a=b c").super_options, "rw,a=b c");
        assert_eq!(line("1 2 0:5 / /x rw - proc none").super_options, "");
    }

    #[test]
    fn a_path_that_is_not_utf8_survives() {
        let mount = parse_line(b"1 2 0:5 / /x\xff\\040y rw - tmpfs t rw").unwrap();
        assert_eq!(mount.target.as_os_str().as_bytes(), b"/x\xff y");
    }

    #[test]
    fn a_line_cut_short_is_an_error_not_a_missing_mount() {
        for text in
            ["", "36", "36 35 98 / /x rw - a b c", "36 35 98:0 / /x rw shared:1", "x 35 98:0 / /x rw - a b c"]
        {
            assert!(parse_line(text.as_bytes()).is_none(), "{text}");
        }
        assert!(parse(b"36 35 98:0 / /x rw - a b c\nrubbish\n").is_err());
    }

    #[test]
    fn the_topmost_of_a_stack_is_the_one_nothing_sits_on() {
        let at = |id, parent, target: &str| MountInfo {
            target: target.into(),
            ..line(&format!("{id} {parent} 0:5 / /x rw - tmpfs t rw"))
        };
        let table = vec![at(5, 4, "/x"), at(3, 1, "/x"), at(4, 3, "/x"), at(9, 1, "/y")];
        assert_eq!(topmost(layers(table.clone(), Path::new("/x"))).map(|mount| mount.id), Some(5));
        assert_eq!(topmost(layers(table, Path::new("/z"))), None);
    }
}
