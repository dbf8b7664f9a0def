//! Mount options as people write them, split into what the mount carries and what its filesystem reads.

use rustix::mount::MountAttrFlags;
use serde::{Deserialize, Serialize};

/// Per-mount attributes, applied before the mount becomes visible.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is one independent attribute of the kernel's")]
pub struct Attributes {
    /// Refuse writes through this mount.
    pub read_only: bool,
    /// Ignore set-user-ID, set-group-ID and file capabilities.
    pub nosuid: bool,
    /// Refuse to open device nodes.
    pub nodev: bool,
    /// Refuse to execute files.
    pub noexec: bool,
    /// Refuse to follow symbolic links.
    pub nosymfollow: bool,
    /// Leave the access times of directories alone.
    pub nodiratime: bool,
    /// When access times are written.
    pub atime: Atime,
}

/// When a mount writes access times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Atime {
    /// As the source of a bind has it; for a new filesystem the kernel's choice, `Relatime`.
    #[default]
    Default,
    /// At most daily, or when older than the last change.
    Relatime,
    /// Access times are never updated.
    Noatime,
    /// Access times are updated on every access.
    Strictatime,
}

/// Mount options split into per-mount attributes and what is left for the filesystem.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// What the mount itself carries.
    pub attributes: Attributes,
    /// What the filesystem has to understand, one option per entry, quotes removed.
    pub filesystem: Vec<String>,
}

impl Attributes {
    /// These attributes as the kernel's flags.
    pub(super) fn flags(self) -> MountAttrFlags {
        let mut flags = match self.atime {
            Atime::Default | Atime::Relatime => MountAttrFlags::MOUNT_ATTR_RELATIME,
            Atime::Noatime => MountAttrFlags::MOUNT_ATTR_NOATIME,
            Atime::Strictatime => MountAttrFlags::MOUNT_ATTR_STRICTATIME,
        };
        flags.set(MountAttrFlags::MOUNT_ATTR_RDONLY, self.read_only);
        flags.set(MountAttrFlags::MOUNT_ATTR_NOSUID, self.nosuid);
        flags.set(MountAttrFlags::MOUNT_ATTR_NODEV, self.nodev);
        flags.set(MountAttrFlags::MOUNT_ATTR_NOEXEC, self.noexec);
        flags.set(MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW, self.nosymfollow);
        flags.set(MountAttrFlags::MOUNT_ATTR_NODIRATIME, self.nodiratime);
        flags
    }

    /// Takes over `option` if it is an attribute; `false` leaves it for the filesystem.
    fn set(&mut self, option: &str) -> bool {
        match option {
            "ro" | "rw" => self.read_only = option == "ro",
            "nosuid" | "suid" => self.nosuid = option == "nosuid",
            "nodev" | "dev" => self.nodev = option == "nodev",
            "noexec" | "exec" => self.noexec = option == "noexec",
            "nosymfollow" | "symfollow" => self.nosymfollow = option == "nosymfollow",
            "nodiratime" | "diratime" => self.nodiratime = option == "nodiratime",
            "noatime" => self.atime = Atime::Noatime,
            "relatime" => self.atime = Atime::Relatime,
            "strictatime" => self.atime = Atime::Strictatime,
            "atime" | "norelatime" | "nostrictatime" => self.atime = Atime::Default,
            _ => return false,
        }
        true
    }
}

/// Splits `flags`, each of which may hold several options separated by commas; a later option beats an earlier one.
///
/// Commas within double quotes do not separate (`context="…:c1,c2"`). Options that only speak to mount(8) or an
/// init system (`defaults`, `_netdev`, `nofail`, `auto`, `bind`, `x-…`) are dropped. Superblock flags (`sync`,
/// `dirsync`, `lazytime`) stay with the filesystem, where the kernel takes them for every type.
pub fn parse_options(flags: &[String]) -> Options {
    let mut options = Options::default();
    for option in flags.iter().flat_map(|flag| split(flag)) {
        if !is_for_userspace(&option) && !options.attributes.set(&option) {
            options.filesystem.push(option);
        }
    }
    options
}

fn is_for_userspace(option: &str) -> bool {
    matches!(option, "" | "defaults" | "_netdev" | "nofail" | "auto" | "noauto" | "bind" | "rbind")
        || option.starts_with("x-")
        || option.starts_with("X-")
}

fn split(flag: &str) -> Vec<String> {
    let (mut parts, mut part, mut quoted) = (Vec::new(), String::new(), false);
    for c in flag.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => parts.push(std::mem::take(&mut part)),
            c => part.push(c),
        }
    }
    parts.push(part);
    parts.iter().map(|part| part.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &[&str]) -> Options {
        parse_options(&flags.iter().map(|&flag| flag.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn attributes_are_taken_and_the_rest_stays_in_order() {
        let options = parse(&["ro,data=ordered", "nodev", "discard,noatime", "noexec, nosuid"]);
        assert_eq!(options.filesystem, ["data=ordered", "discard"]);
        assert_eq!(
            options.attributes,
            Attributes {
                read_only: true,
                nosuid: true,
                nodev: true,
                noexec: true,
                atime: Atime::Noatime,
                ..Attributes::default()
            }
        );
    }

    #[test]
    fn a_later_option_beats_an_earlier_one() {
        for (flags, expected) in [
            (vec!["ro", "rw"], Attributes::default()),
            (vec!["ro,rw,ro"], Attributes { read_only: true, ..Attributes::default() }),
            (vec!["nosuid,nodev,noexec,nodiratime", "suid,dev,exec,diratime"], Attributes::default()),
            (vec!["noatime,strictatime"], Attributes { atime: Atime::Strictatime, ..Attributes::default() }),
            (vec!["noatime,atime"], Attributes::default()),
            (vec!["strictatime", "relatime"], Attributes { atime: Atime::Relatime, ..Attributes::default() }),
        ] {
            let options = parse(&flags);
            assert_eq!((options.attributes, options.filesystem), (expected, vec![]), "{flags:?}");
        }
    }

    #[test]
    fn what_only_userspace_reads_is_dropped_and_superblock_flags_are_kept() {
        let options =
            parse(&["defaults,_netdev,nofail,bind,x-systemd.automount,,", "", "sync,dirsync,lazytime"]);
        assert_eq!(options.attributes, Attributes::default());
        assert_eq!(options.filesystem, ["sync", "dirsync", "lazytime"]);
    }

    #[test]
    fn a_comma_within_quotes_does_not_separate() {
        let options = parse(&[r#"context="system_u:object_r:container_file_t:s0:c1,c2",ro"#]);
        assert_eq!(options.filesystem, ["context=system_u:object_r:container_file_t:s0:c1,c2"]);
        assert!(options.attributes.read_only);
    }
}
