//! The name of a driver, in an object and in the plugin directory.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A driver's name as it stands in an object: `vendor/driver`, or `driver` alone.
///
/// Neither part can lead out of the plugin directory: each begins and ends with a letter or a digit, and has no slash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DriverName(String);

/// A text that is not the name of a driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the name of a FlexVolume driver: vendor/driver, where vendor is a DNS name in lower case and driver has \
     at most 63 letters, digits, '-', '_' or '.', beginning and ending with a letter or a digit"
)]
pub struct InvalidName(String);

impl DriverName {
    /// The name of the driver that lies in a directory of this name, such as `vendor~driver`.
    pub fn from_directory(directory: &str) -> Result<Self, InvalidName> {
        directory.replace('~', "/").parse()
    }

    /// The name of the driver's directory: `vendor~driver`.
    pub fn directory(&self) -> String {
        self.0.replace('/', "~")
    }

    /// The name of the executable in it: the part behind the vendor.
    pub fn executable(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }

    /// The vendor, where the name has one.
    pub fn vendor(&self) -> Option<&str> {
        self.0.split_once('/').map(|(vendor, _)| vendor)
    }

    /// The executable's path below a plugin directory.
    pub fn path_below(&self, plugins: &Path) -> PathBuf {
        plugins.join(self.directory()).join(self.executable())
    }

    /// Returns the name as it stands in an object.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DriverName {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let (vendor, driver) = match text.split_once('/') {
            Some((vendor, driver)) => (Some(vendor), driver),
            None => (None, text),
        };
        let is_vendor = vendor.is_none_or(|vendor| {
            vendor.len() <= 253
                && vendor.split('.').all(|label| {
                    is_word(label, |c| c.is_ascii_lowercase() || c.is_ascii_digit(), |c| c == '-')
                })
        });
        let is_driver = driver.len() <= 63
            && is_word(driver, |c| c.is_ascii_alphanumeric(), |c| matches!(c, '-' | '_' | '.'));
        if is_vendor && is_driver { Ok(Self(text.to_owned())) } else { Err(InvalidName(text.to_owned())) }
    }
}

/// Whether a text begins and ends with a character of one kind, and has those of either kind between.
fn is_word(text: &str, at_ends: impl Fn(char) -> bool, inside: impl Fn(char) -> bool) -> bool {
    text.starts_with(&at_ends) && text.ends_with(&at_ends) && text.chars().all(|c| at_ends(c) || inside(c))
}

impl fmt::Display for DriverName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_directory_and_an_executable() {
        let name = DriverName::from_directory("k8s.example~NFS_1").unwrap();
        assert_eq!(name.as_str(), "k8s.example/NFS_1");
        assert_eq!(name.path_below("/p".as_ref()), Path::new("/p/k8s.example~NFS_1/NFS_1"));
        let name: DriverName = "dummy".parse().unwrap();
        assert_eq!((name.path_below("/p".as_ref()), name.vendor()), ("/p/dummy/dummy".into(), None));
    }

    #[test]
    fn a_name_cannot_lead_elsewhere() {
        let long = "d".repeat(64);
        for text in [
            "",
            "/",
            "a/",
            "/b",
            "a/b/c",
            "../x",
            "a/..",
            "a/.",
            "a/.hidden",
            "A/b",
            "a b/c",
            "a/b c",
            "a_/b",
            "a/b\0",
            "a/b\n",
            "a..b/c",
            &long,
        ] {
            assert!(text.parse::<DriverName>().is_err(), "{text:?}");
        }
    }
}
