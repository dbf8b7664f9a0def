//! Ids and names as they travel over CSI: opaque, bounded, free of control characters.

use std::{fmt, str::FromStr};

/// Longest id taken. The spec's default is 128 bytes, but handles of other drivers that Berth serves (an NFS server,
/// share and directory in one string) are longer.
const MAX_ID: usize = 1024;
/// Longest name taken: the spec's limit for a string field.
const MAX_NAME: usize = 128;

/// Why a string is no id or name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// It is the empty string.
    #[error("{0} is missing")]
    Empty(&'static str),
    /// It is longer than what is taken.
    #[error("{what} is {length} bytes long, the limit is {limit}")]
    TooLong {
        /// What the string should have been.
        what: &'static str,
        /// Its length in bytes.
        length: usize,
        /// The longest that is taken.
        limit: usize,
    },
    /// It holds a control character.
    #[error("{0} holds a control character")]
    ControlCharacter(&'static str),
}

fn check(text: &str, what: &'static str, limit: usize) -> Result<(), InvalidId> {
    if text.is_empty() {
        return Err(InvalidId::Empty(what));
    }
    if text.len() > limit {
        return Err(InvalidId::TooLong { what, length: text.len(), limit });
    }
    if text.chars().any(char::is_control) {
        return Err(InvalidId::ControlCharacter(what));
    }
    Ok(())
}

macro_rules! text_type {
    ($(#[$doc:meta])* $name:ident, $what:literal, $limit:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Box<str>);

        impl $name {
            /// The text as it travels over CSI.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                check(text, $what, $limit)?;
                Ok(Self(text.into()))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &self.0)
            }
        }
    };
}

text_type!(
    /// What a driver calls a volume.
    VolumeId, "volume id", MAX_ID
);
text_type!(
    /// What a driver calls a snapshot.
    SnapshotId, "snapshot id", MAX_ID
);
text_type!(
    /// What a driver calls snapshots taken together.
    GroupSnapshotId, "group snapshot id", MAX_ID
);
text_type!(
    /// What a driver calls a node.
    NodeId, "node id", MAX_ID
);
text_type!(
    /// What the caller wants a volume, snapshot or group to be known by; makes its creation idempotent.
    Name, "name", MAX_NAME
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_128_bytes_is_taken_and_one_more_is_not() {
        assert!("n".repeat(128).parse::<Name>().is_ok());
        let error = "n".repeat(129).parse::<Name>().unwrap_err();
        assert_eq!(error.to_string(), "name is 129 bytes long, the limit is 128");
    }

    #[test]
    fn empty_and_control_characters_are_refused_by_name() {
        assert_eq!("".parse::<VolumeId>().unwrap_err().to_string(), "volume id is missing");
        assert!("a\0b".parse::<VolumeId>().is_err());
        assert!("a\nb".parse::<SnapshotId>().is_err());
        assert!("server#share#träger/..".parse::<VolumeId>().is_ok(), "an id is opaque");
    }
}
