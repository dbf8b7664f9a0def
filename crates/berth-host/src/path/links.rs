//! Symbolic links, and what is swapped by them: made, read and replaced below a [`Dir`], never followed.

use rustix::{
    fs::{AtFlags, Mode, Uid},
    io::Errno,
};

use super::Dir;
use crate::error::{Doing as _, Result};

impl Dir {
    /// Where a symbolic link points to; none when there is no link of that name.
    pub fn link_target(&self, name: &str) -> Result<Option<String>> {
        self.check_name(name)?;
        match rustix::fs::readlinkat(self, name, Vec::new()) {
            Ok(target) => Ok(Some(target.to_string_lossy().into_owned())),
            // Not there, or no link.
            Err(Errno::NOENT | Errno::INVAL) => Ok(None),
            Err(error) => Err(error).doing("read the link", self.child_path(name)),
        }
    }

    /// Makes a symbolic link that must not exist yet.
    pub fn make_link(&self, name: &str, target: &str) -> Result<()> {
        self.check_name(name)?;
        rustix::fs::symlinkat(target, self, name).doing("make the link", self.child_path(name))
    }

    /// Renames an entry of this directory in one step over whatever has the new name.
    pub fn rename_over(&self, name: &str, new_name: &str) -> Result<()> {
        self.check_name(name)?;
        self.check_name(new_name)?;
        rustix::fs::renameat(self, name, self, new_name).doing("put in place", self.child_path(new_name))
    }

    /// Gives an entry, itself rather than what it points to, to a user.
    pub fn set_owner(&self, name: &str, uid: u32) -> Result<()> {
        self.check_name(name)?;
        rustix::fs::chownat(self, name, Some(Uid::from_raw(uid)), None, AtFlags::SYMLINK_NOFOLLOW)
            .doing("change the owner of", self.child_path(name))
    }

    /// Sets the mode of this directory.
    pub fn set_mode(&self, mode: u32) -> Result<()> {
        rustix::fs::fchmod(self, Mode::from_raw_mode(mode)).doing("set the mode of", self.path())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt as _};

    use super::*;

    #[test]
    fn links_are_made_read_and_replaced_and_never_followed() {
        let holder = tempfile::tempdir().unwrap();
        let (dir, outside) = (Dir::open(holder.path()).unwrap(), tempfile::tempdir().unwrap());
        dir.make_link("link", outside.path().to_str().unwrap()).unwrap();
        assert_eq!(dir.link_target("link").unwrap().as_deref(), outside.path().to_str());
        assert!(dir.make_link("link", "elsewhere").is_err());
        dir.make_link("new", "elsewhere").unwrap();
        dir.rename_over("new", "link").unwrap();
        assert_eq!(dir.link_target("link").unwrap().as_deref(), Some("elsewhere"));
        dir.create_file("file", 0o600).unwrap();
        assert_eq!(dir.link_target("file").unwrap(), None);
        assert_eq!(dir.link_target("missing").unwrap(), None);

        dir.make_link("to_file", "file").unwrap();
        dir.set_owner("to_file", 4321).unwrap();
        assert_eq!(fs::symlink_metadata(holder.path().join("to_file")).unwrap().uid(), 4321);
        assert_eq!(fs::metadata(holder.path().join("file")).unwrap().uid(), 0);
        dir.set_mode(0o2751).unwrap();
        assert_eq!(fs::metadata(holder.path()).unwrap().mode() & 0o7777, 0o2751);
    }

    #[test]
    fn a_name_is_never_a_path() {
        let holder = tempfile::tempdir().unwrap();
        let dir = Dir::open(holder.path()).unwrap();
        dir.create_file("file", 0o600).unwrap();
        for name in ["", ".", "..", "../file", "a/b", "/etc"] {
            assert!(dir.link_target(name).is_err(), "{name:?}");
            assert!(dir.make_link(name, "x").is_err(), "{name:?}");
            assert!(dir.rename_over("file", name).is_err(), "{name:?}");
            assert!(dir.rename_over(name, "file").is_err(), "{name:?}");
            assert!(dir.set_owner(name, 0).is_err(), "{name:?}");
        }
    }
}
