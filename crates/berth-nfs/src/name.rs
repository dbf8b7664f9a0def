//! What files are called: names in a directory, and the handles a server gives out.

use std::fmt;

use bytes::Bytes;

/// Longer names exist on no filesystem.
const LONGEST_NAME: usize = 255;

/// One name in a directory: any bytes but `/` and NUL, and neither `.` nor `..`, so that it never leads elsewhere.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Bytes);

/// A name that no directory can hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} cannot be a file's name: {why}")]
pub struct InvalidName {
    name: String,
    why: &'static str,
}

impl Name {
    /// Checks that a name can be that of one entry of a directory.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, InvalidName> {
        let bytes = bytes.as_ref();
        Self::check(bytes)?;
        Ok(Self(Bytes::copy_from_slice(bytes)))
    }

    pub(crate) fn from_bytes(bytes: Bytes) -> Result<Self, InvalidName> {
        Self::check(&bytes)?;
        Ok(Self(bytes))
    }

    fn check(bytes: &[u8]) -> Result<(), InvalidName> {
        let why = match bytes {
            b"" => "it is empty",
            b"." | b".." => "it means a directory",
            _ if bytes.contains(&b'/') => "it has a slash",
            _ if bytes.contains(&0) => "it has a zero byte",
            _ if bytes.len() > LONGEST_NAME => "it is longer than 255 bytes",
            _ => return Ok(()),
        };
        let shown = &bytes[..bytes.len().min(LONGEST_NAME + 1)];
        Err(InvalidName { name: String::from_utf8_lossy(shown).into_owned(), why })
    }

    /// The name, if it is text.
    pub fn to_str(&self) -> Option<&str> {
        std::str::from_utf8(&self.0).ok()
    }

    /// The name as it is.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for Name {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

/// A server's name for one file, good until the file is gone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Handle(Bytes);

impl Handle {
    /// The most any version allows.
    pub(crate) const LONGEST: usize = 128;

    pub(crate) fn new(bytes: Bytes) -> Self {
        Self(bytes)
    }

    /// The handle as the server wrote it.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_never_leads_elsewhere() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"/", b"a\0b", &[b'x'; 256]] {
            assert!(Name::new(bad).is_err(), "{bad:?}");
        }
        for good in [&b"a"[..], b"...", b".hidden", b"\xff\xfe", "ü".as_bytes(), &[b'x'; 255]] {
            assert_eq!(Name::new(good).unwrap().as_bytes(), good);
        }
        assert_eq!(
            Name::new("a/b").unwrap_err().to_string(),
            r#""a/b" cannot be a file's name: it has a slash"#
        );
    }
}
