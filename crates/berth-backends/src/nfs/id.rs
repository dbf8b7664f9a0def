//! Ids as csi-driver-nfs writes them: where a volume or snapshot is, and what becomes of it, is all in its id.
//!
//! ```text
//! volume    server#share#subDir#uuid#onDelete     uuid: the name, where the class gives a subDir; onDelete: not "delete"
//!           server#share#subDir                   as older versions wrote it, also with the uuid
//!           server/share/subDir                   as the oldest wrote it
//! snapshot  server#share#name#name#source         source: the volume's uuid, or its subDir
//! ```
//! An id comes from anybody who may write a PersistentVolume, so each part is checked: none leads out of its share,
//! out of its directory, or into what the driver keeps for itself.

use std::fmt;

use super::record::key_of;
use crate::{Error, Result};

/// Where the driver keeps what it has to remember, in the root of a share.
pub(super) const PRIVATE: &str = ".berth";
const SEPARATOR: char = '#';
const MAX_NAME: usize = 255;
const MAX_PATH: usize = 1024;

/// An exported directory of a server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ShareName {
    /// Its name or address.
    pub(super) server: String,
    /// The path, without slashes at its ends; empty for the root.
    pub(super) share: String,
}

/// A directory strictly below a share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SubPath(String);

/// What becomes of a volume's directory when the volume is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDelete {
    /// The directory is removed.
    #[default]
    Delete,
    /// The directory stays as it is.
    Retain,
    /// It gets another name and stays.
    Archive,
}

/// A volume, as read from its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeRef {
    pub(super) share: ShareName,
    pub(super) dir: SubPath,
    /// The volume's name, where its directory is not called so.
    pub(super) uuid: String,
    /// As the class has it, where that is not "delete".
    pub(super) on_delete: String,
}

/// A snapshot, as read from its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SnapshotRef {
    pub(super) share: ShareName,
    /// Also the directory it is in.
    pub(super) name: String,
    /// What its archive is called, without the ending.
    pub(super) source: String,
}

impl ShareName {
    /// Checks a server and a share.
    pub(super) fn new(server: &str, share: &str) -> Result<Self> {
        let server = server.trim_matches('/');
        let odd = |c: char| c.is_whitespace() || c.is_control() || c == '/' || c == '\\' || c == SEPARATOR;
        if server.is_empty() {
            return Err(invalid("server is missing: give the name or address of the NFS server"));
        }
        if server.contains(odd) || server.starts_with(['-', '.']) {
            return Err(invalid(format!("server {server:?} is not the name or address of a server")));
        }
        let share = share.trim_matches('/');
        check_parts("share", share)?;
        Ok(Self { server: server.to_owned(), share: share.to_owned() })
    }

    /// The shares around it, if the server exports them, each with the directory that this one is there; the nearest last.
    pub(super) fn around(&self) -> Vec<(Self, SubPath)> {
        let cuts = self.share.match_indices('/').map(|(at, _)| (&self.share[..at], &self.share[at + 1..]));
        let named = |(outer, below): (&str, &str)| {
            (Self { server: self.server.clone(), share: outer.to_owned() }, SubPath(below.to_owned()))
        };
        cuts.map(named).collect()
    }

    /// The directory that another share is in this one, if it lies in it.
    pub(super) fn directory_of(&self, other: &Self) -> Option<SubPath> {
        let below = other.share.strip_prefix(&self.share)?;
        let below = if self.share.is_empty() { below } else { below.strip_prefix('/')? };
        (self.server == other.server && !below.is_empty()).then(|| SubPath(below.to_owned()))
    }

    /// A digest, for the tokens of listings.
    pub(super) fn key(&self) -> String {
        key_of(&format!("{}#{}", self.server, self.share))
    }

    /// The path as servers know it.
    pub(super) fn path(&self) -> String {
        format!("/{}", self.share)
    }
}

impl fmt::Display for ShareName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.server.contains(':') && !self.server.starts_with('[') {
            return write!(f, "[{}]:/{}", self.server, self.share);
        }
        write!(f, "{}:/{}", self.server, self.share)
    }
}

impl SubPath {
    /// Checks a path; `field` is what it is called in the sentence that refuses it.
    pub(super) fn new(field: &str, text: &str) -> Result<Self> {
        let parts = check_parts(field, text)?;
        match parts.first() {
            None => Err(invalid(format!("{field} names no directory below the share"))),
            Some(first) if first.eq_ignore_ascii_case(PRIVATE) => {
                Err(invalid(format!("{field} {text:?} lies in {PRIVATE}, which is the driver's own")))
            }
            Some(_) => Ok(Self(parts.join("/"))),
        }
    }

    /// The path, without slashes at its ends.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// The first name in it: two directories that overlap have it in common.
    pub(super) fn first(&self) -> &str {
        self.0.split('/').next().unwrap_or(&self.0)
    }

    /// Whether one of them is the other, or lies in it.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.contains(other) || other.contains(self)
    }

    /// Whether the other is this directory, or lies in it.
    pub(super) fn contains(&self, other: &Self) -> bool {
        other.0.strip_prefix(&self.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// The directory of this path below this one.
    pub(super) fn join(&self, below: &Self) -> Self {
        Self(format!("{}/{}", self.0, below.0))
    }

    /// Itself and every directory around it, the outermost first.
    pub(super) fn with_parents(&self) -> Vec<Self> {
        let parents = self.0.match_indices('/').map(|(at, _)| Self(self.0[..at].to_owned()));
        parents.chain([self.clone()]).collect()
    }

    /// The last name in it.
    pub(super) fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// The directory it is in, unless that is the share itself.
    pub(super) fn parent(&self) -> Option<Self> {
        self.0.rsplit_once('/').map(|(parent, _)| Self(parent.to_owned()))
    }

    /// Where its directory goes when it is archived; `attempt` distinguishes those that had the same name.
    pub(super) fn archived(&self, attempt: u32) -> Self {
        match attempt {
            0 => Self(format!("archived-{}", self.0)),
            _ => Self(format!("archived-{}-{}", self.0, attempt + 1)),
        }
    }
}

impl fmt::Display for SubPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl OnDelete {
    /// As a class or a flag has it; upper and lower case are the same, nothing is `None`.
    pub fn parse(text: &str) -> Result<Option<Self>> {
        match text.to_ascii_lowercase().as_str() {
            "" => Ok(None),
            "delete" => Ok(Some(Self::Delete)),
            "retain" => Ok(Some(Self::Retain)),
            "archive" => Ok(Some(Self::Archive)),
            _ => Err(invalid(format!("onDelete {text:?} is none of delete, retain, archive"))),
        }
    }
}

impl VolumeRef {
    /// Reads an id; the sentence says why it is none.
    pub(super) fn parse(id: &str) -> Result<Self> {
        let parts: Vec<&str> = id.split(SEPARATOR).collect();
        let (server, share, dir, uuid, on_delete) = match parts[..] {
            [server, share, dir] => (server, share, dir, "", ""),
            [server, share, dir, uuid] => (server, share, dir, uuid, ""),
            [server, share, dir, uuid, on_delete, ..] => (server, share, dir, uuid, on_delete),
            _ => {
                let oldest = id.split_once('/').and_then(|(server, rest)| {
                    let (share, dir) = rest.rsplit_once('/')?;
                    Some((server, share, dir, "", ""))
                });
                oldest.ok_or_else(|| invalid(format!("{id:?} is not the id of an NFS volume")))?
            }
        };
        if !uuid.is_empty() {
            check_name("the volume's name", uuid)?;
        }
        OnDelete::parse(on_delete)?;
        Ok(Self {
            share: ShareName::new(server, share)?,
            dir: SubPath::new("subDir", dir)?,
            uuid: uuid.to_owned(),
            on_delete: on_delete.to_owned(),
        })
    }

    /// What the id says becomes of it, if it says anything.
    pub(super) fn on_delete(&self) -> Option<OnDelete> {
        OnDelete::parse(&self.on_delete).ok().flatten()
    }

    /// What a snapshot's archive of it is called.
    pub(super) fn archive_name(&self) -> &str {
        if self.uuid.is_empty() { self.dir.name() } else { &self.uuid }
    }
}

impl fmt::Display for VolumeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShareName { server, share } = &self.share;
        let on_delete = match self.on_delete() {
            Some(OnDelete::Retain | OnDelete::Archive) => self.on_delete.as_str(),
            Some(OnDelete::Delete) | None => "",
        };
        write!(f, "{server}#{share}#{}#{}#{on_delete}", self.dir, self.uuid)
    }
}

impl SnapshotRef {
    /// A snapshot that is to be taken.
    pub(super) fn new(share: ShareName, name: &str, source: &VolumeRef) -> Result<Self> {
        check_name("the snapshot's name", name)?;
        Ok(Self { share, name: name.to_owned(), source: source.archive_name().to_owned() })
    }

    /// Reads an id; the sentence says why it is none.
    pub(super) fn parse(id: &str) -> Result<Self> {
        let parts: Vec<&str> = id.split(SEPARATOR).collect();
        let [server, share, name, directory, source] = parts[..] else {
            return Err(invalid(format!("{id:?} is not the id of an NFS snapshot")));
        };
        if name != directory {
            return Err(invalid(format!("{id:?} names two snapshots, {name:?} and {directory:?}")));
        }
        check_name("the snapshot's name", name)?;
        check_name("the archive's name", source)?;
        Ok(Self { share: ShareName::new(server, share)?, name: name.to_owned(), source: source.to_owned() })
    }
}

impl fmt::Display for SnapshotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ShareName { server, share } = &self.share;
        write!(f, "{server}#{share}#{name}#{name}#{}", self.source, name = self.name)
    }
}

/// Refuses a name that could not be one directory of the share, or would make an id ambiguous.
pub(super) fn check_name(what: &str, name: &str) -> Result<()> {
    match SubPath::new(what, name) {
        Ok(_) if name.contains(['/', '\\']) => Err(invalid(format!("{what} {name:?} holds a slash"))),
        Ok(path) if path.as_str() == name => Ok(()),
        Ok(_) => Err(invalid(format!("{what} {name:?} is no plain name"))),
        Err(error) => Err(error),
    }
}

/// The names in a path; neither of its ends nor `.` counts.
fn check_parts<'a>(field: &str, text: &'a str) -> Result<Vec<&'a str>> {
    let refuse = |why: &str| Err(invalid(format!("{field} {text:?} {why}")));
    if text.len() > MAX_PATH {
        return Err(invalid(format!("{field} is {} bytes long, the limit is {MAX_PATH}", text.len())));
    }
    if text.contains(char::is_control) {
        return refuse("holds a control character");
    }
    if text.contains(SEPARATOR) {
        return refuse("holds a '#', which separates the parts of a volume's id");
    }
    let parts: Vec<&str> = text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.iter().any(|part| part.split('\\').any(|piece| piece == "..")) {
        return refuse("leads through \"..\"");
    }
    if parts.iter().any(|part| part.len() > MAX_NAME) {
        return refuse("holds a name of more than 255 bytes");
    }
    Ok(parts)
}

fn invalid(sentence: impl Into<String>) -> Error {
    Error::Invalid(sentence.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(id: &str) -> VolumeRef {
        VolumeRef::parse(id).unwrap()
    }

    #[test]
    fn every_form_of_a_volume_id_is_read() {
        for (id, server, share, dir, uuid, on_delete) in [
            ("nfs.svc#share#pvc-1##", "nfs.svc", "share", "pvc-1", "", None),
            ("nfs.svc#share#pvc-1", "nfs.svc", "share", "pvc-1", "", None),
            ("nfs.svc#a/b#dir/sub#pvc-1#", "nfs.svc", "a/b", "dir/sub", "pvc-1", None),
            ("nfs.svc#a/b#dir#pvc-1", "nfs.svc", "a/b", "dir", "pvc-1", None),
            ("10.0.0.1##pvc-1##retain", "10.0.0.1", "", "pvc-1", "", Some(OnDelete::Retain)),
            ("fd00::1#s#d#pvc-1#Archive", "fd00::1", "s", "d", "pvc-1", Some(OnDelete::Archive)),
            (
                "nfs.svc#share#pvc-1##delete#later#more",
                "nfs.svc",
                "share",
                "pvc-1",
                "",
                Some(OnDelete::Delete),
            ),
            ("nfs.svc/share/pvc-1", "nfs.svc", "share", "pvc-1", "", None),
            ("nfs.svc/a/b/pvc-1", "nfs.svc", "a/b", "pvc-1", "", None),
            ("nfs.svc//pvc-1", "nfs.svc", "", "pvc-1", "", None),
        ] {
            let read = volume(id);
            assert_eq!((read.share.server.as_str(), read.share.share.as_str()), (server, share), "{id}");
            assert_eq!((read.dir.as_str(), read.uuid.as_str()), (dir, uuid), "{id}");
            assert_eq!(read.on_delete(), on_delete, "{id}");
        }
    }

    #[test]
    fn what_leads_astray_is_no_id() {
        for id in [
            "",
            "pvc-1",
            "a#b",
            "a/b",
            "#share#pvc",
            "nfs#share#",
            "nfs#share##pvc-1#",
            "nfs#share#..#u#",
            "nfs#share#a/../../b##",
            "nfs#..#pvc##",
            "nfs#a/../..#pvc##",
            "nfs#share#a\\..\\..\\b##",
            "nfs#share#/##",
            "nfs#share#./.##",
            "nfs#share#.berth##",
            "nfs#share#.BERTH/volumes##",
            "nfs#share#pvc##sometimes",
            "nfs#share#pvc#../x#",
            "nfs#share#pvc#a/b#",
            "n/fs#share#pvc##",
            "n fs#share#pvc##",
            "-o#share#pvc##",
            "nfs#share#a\u{7f}##",
            "nfs/share/..",
            "nfs/../pvc",
            "../share/pvc",
        ] {
            assert!(matches!(VolumeRef::parse(id), Err(Error::Invalid(_))), "{id:?}");
        }
        let long = format!("nfs#share#{}##", "x".repeat(256));
        assert!(VolumeRef::parse(&long).is_err());
    }

    #[test]
    fn a_volume_id_is_written_as_csi_driver_nfs_writes_it() {
        for id in ["nfs.svc#share#pvc-1##", "nfs.svc#a/b#dir/sub#pvc-1#retain", "nfs.svc##x#pvc-1#Archive"] {
            assert_eq!(volume(id).to_string(), id);
        }
        assert_eq!(volume("nfs.svc/a/b/pvc-1").to_string(), "nfs.svc#a/b#pvc-1##");
        assert_eq!(volume("nfs#/share/#/dir//sub/.//#u#DELETE").to_string(), "nfs#share#dir/sub#u#");
    }

    #[test]
    fn a_snapshot_id_names_its_directory_twice() {
        let id = "nfs.svc#share#snapshot-1#snapshot-1#pvc-1";
        let read = SnapshotRef::parse(id).unwrap();
        assert_eq!((read.name.as_str(), read.source.as_str()), ("snapshot-1", "pvc-1"));
        assert_eq!(read.to_string(), id);
        for id in [
            "nfs#s#n#n",
            "nfs#s#n#n#p#x",
            "nfs#s#n#m#p",
            "nfs#s#..#..#p",
            "nfs#s#n#n#../p",
            "nfs#s#n#n#",
            "nfs#s#a/b#a/b#p",
            "nfs#..#n#n#p",
            "#s#n#n#p",
            "nfs#s#.berth#.berth#p",
            "nfs#s#n#n#a/p",
            "nfs#s#./n#./n#p",
        ] {
            assert!(matches!(SnapshotRef::parse(id), Err(Error::Invalid(_))), "{id:?}");
        }
    }

    #[test]
    fn a_snapshot_is_named_after_the_volumes_name_or_directory() {
        let share = ShareName::new("nfs", "s").unwrap();
        let of = |id: &str| SnapshotRef::new(share.clone(), "snap", &volume(id)).unwrap().to_string();
        assert_eq!(of("nfs#s#dir/sub#pvc-1#"), "nfs#s#snap#snap#pvc-1");
        assert_eq!(of("nfs#s#pvc-2##"), "nfs#s#snap#snap#pvc-2");
        assert!(SnapshotRef::new(share.clone(), "a/b", &volume("nfs#s#x##")).is_err());
        assert!(SnapshotRef::new(share, "a#b", &volume("nfs#s#x##")).is_err());
    }

    #[test]
    fn an_archived_directory_stays_below_its_share() {
        let dir = SubPath::new("subDir", "team/app").unwrap();
        assert_eq!(dir.archived(0).as_str(), "archived-team/app");
        assert_eq!(dir.archived(1).as_str(), "archived-team/app-2");
        assert_eq!((dir.name(), dir.parent().unwrap().as_str()), ("app", "team"));
        assert_eq!(dir.parent().unwrap().parent(), None);
    }

    /// Text made of what ids are made of, and of what leads astray.
    fn random_text(state: &mut u64) -> String {
        const PIECES: [&str; 16] = [
            "#", "/", "..", ".", "a", "pvc-1", "\\", "nfs", ".berth", "retain", "\u{1}", "ü", "//", "#..#",
            "%", " ",
        ];
        let mut next = || {
            *state ^= *state << 13;
            *state ^= *state >> 7;
            *state ^= *state << 17;
            usize::try_from(*state >> 40).unwrap()
        };
        let length = next() % 12;
        (0..length).map(|_| PIECES[next() % PIECES.len()]).collect()
    }

    #[test]
    fn whatever_is_read_as_an_id_is_safe_and_reads_back_the_same() {
        let mut state = 0x5eed_u64;
        let mut read = 0;
        for _ in 0..200_000 {
            let text = random_text(&mut state);
            if let Ok(volume) = VolumeRef::parse(&text) {
                read += 1;
                let safe = |path: &str| {
                    path.split('/').all(|part| !["", ".", ".."].contains(&part) && !part.contains("\\..\\"))
                };
                assert!(safe(volume.dir.as_str()), "{text:?} → {volume:?}");
                assert!(!volume.dir.as_str().to_lowercase().starts_with(".berth/"), "{text:?}");
                assert!(!volume.share.path().split('/').any(|part| part == ".."), "{text:?}");
                let again = VolumeRef::parse(&volume.to_string()).unwrap();
                assert_eq!(again.to_string(), volume.to_string(), "{text:?}");
                assert_eq!((&again.dir, &again.share), (&volume.dir, &volume.share), "{text:?}");
            }
            if let Ok(snapshot) = SnapshotRef::parse(&text) {
                assert_eq!(SnapshotRef::parse(&snapshot.to_string()).unwrap(), snapshot, "{text:?}");
            }
        }
        assert!(read > 1000, "only {read} texts were ids: the test covers nothing");
    }
}
