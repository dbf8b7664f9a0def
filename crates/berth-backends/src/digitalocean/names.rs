//! What volumes and snapshots are called at DigitalOcean, and what their descriptions say.
//!
//! The API takes only some names, so another is turned into one that it takes, always the same. It does not remember what
//! a volume was copied from; the description does.

use berth_core::hex;
use sha2::{Digest as _, Sha256};

/// The longest name that the API takes.
const LONGEST: usize = 64;
/// How much of a name is kept beside its hash.
const KEPT: usize = 44;

/// What every description begins with, as upstream's driver writes it.
pub(super) const CREATED_BY: &str = "Created by DigitalOcean CSI driver";
/// What snapshots are called that exist only while a volume is cloned.
pub(super) const CLONE_PREFIX: &str = "berth-clone-";

/// The name itself if the API takes it (lowercase letters, digits and `-`, a letter first, at most 64), else one made of it.
pub(super) fn api_name(name: &str) -> String {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let begins = |name: &str| name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase());
    let is_ours = name.starts_with(CLONE_PREFIX);
    if name.len() <= LONGEST && begins(name) && name.bytes().all(is_allowed) && !is_ours {
        return name.to_owned();
    }
    let lower = name.to_ascii_lowercase();
    let mut plain: String = lower
        .chars()
        .map(|c| if u8::try_from(c).is_ok_and(is_allowed) { c } else { '-' })
        .take(KEPT)
        .collect();
    if !begins(&plain) || is_ours {
        plain.insert_str(0, "v-");
    }
    format!("{plain}-{}", &hex(&Sha256::digest(name.as_bytes())[..8]))
}

/// The name of the snapshot that a clone is made of.
pub(super) fn clone_name(volume: &str) -> String {
    format!("{CLONE_PREFIX}{}", &hex(&Sha256::digest(volume.as_bytes())[..12]))
}

/// What a volume was made of, and how large it shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) from: From,
    /// Its size in GiB once it is complete: it begins with the size of the snapshot.
    pub(super) size: u64,
}

/// Where a volume's content came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum From {
    Snapshot(String),
    /// A volume, by a snapshot that is removed afterwards.
    Volume {
        id: String,
        by: String,
    },
}

impl Origin {
    /// The description of such a volume.
    pub(super) fn describe(&self) -> String {
        let from = match &self.from {
            From::Snapshot(id) => format!("snapshot={id}"),
            From::Volume { id, by } => format!("volume={id} by={by}"),
        };
        format!("{CREATED_BY}: {from} size={}", self.size)
    }

    /// What a description says; `None` for a volume that was not copied, or that somebody else made.
    pub(super) fn of(description: &str) -> Option<Self> {
        let words = description.strip_prefix(CREATED_BY)?.strip_prefix(": ")?;
        let word = |key: &str| {
            words.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('=')).map(ToOwned::to_owned)
        };
        let size = word("size")?.parse().ok()?;
        let from = match (word("snapshot"), word("volume"), word("by")) {
            (Some(id), None, None) => From::Snapshot(id),
            (None, Some(id), Some(by)) => From::Volume { id, by },
            _ => return None,
        };
        Some(Self { from, size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_becomes_one_that_the_api_takes_and_no_two_the_same() {
        let fine = format!("a{}", "b".repeat(63));
        for name in ["pvc-0d2a", "a", &fine] {
            assert_eq!(api_name(name), name);
        }
        let long = "n".repeat(128);
        let others =
            ["PVC-1", "pvc_1", "1abc", "-x", &long, &long[..127], &fine.repeat(2), "träger", "berth-clone-x"];
        let mut seen = std::collections::HashSet::new();
        for name in others {
            let made = api_name(name);
            assert!(made.len() <= LONGEST && api_name(&made) == made, "{made}");
            assert!(!made.starts_with(CLONE_PREFIX), "{made}");
            assert_eq!(api_name(name), made);
            assert!(seen.insert(made));
        }
        assert!(clone_name(&fine).len() <= LONGEST);
    }

    #[test]
    fn a_description_says_what_a_volume_was_copied_from() {
        let volume = From::Volume { id: "v-1".to_owned(), by: "s-2".to_owned() };
        for from in [From::Snapshot("s-1".to_owned()), volume] {
            let origin = Origin { from, size: 20 };
            assert_eq!(Origin::of(&origin.describe()), Some(origin));
        }
        for other in
            [CREATED_BY, "", "my disk: snapshot=1 size=2", "Created by DigitalOcean CSI driver: size=1"]
        {
            assert_eq!(Origin::of(other), None, "{other}");
        }
    }
}
