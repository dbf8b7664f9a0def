//! Versions of CSI that a driver says it speaks.

use std::fmt;

/// A version of CSI 1: minor and patch number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version {
    minor: u64,
    patch: u64,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1.{}.{}", self.minor, self.patch)
    }
}

/// The highest version of CSI 1 in a list; later ones need not be compatible, earlier ones are not.
pub(super) fn highest(versions: &[String]) -> Option<Version> {
    versions.iter().filter_map(|text| parse(text)).max()
}

fn parse(text: &str) -> Option<Version> {
    let mut numbers = text.trim().trim_start_matches('v').split('.');
    let mut next = || numbers.next().map(|number| number.parse::<u64>().ok());
    let (major, minor, patch) = (next()??, next()??, next());
    let patch = match patch {
        Some(patch) => patch?,
        None => 0,
    };
    (major == 1).then_some(Version { minor, patch })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_one_of_csi_1_counts() {
        let highest = |versions: &[&str]| {
            highest(&versions.iter().map(ToString::to_string).collect::<Vec<_>>())
                .map(|version| version.to_string())
        };
        assert_eq!(highest(&["1.0.0"]).as_deref(), Some("1.0.0"));
        assert_eq!(highest(&["v1.2", "1.10.1", "1.9.9"]).as_deref(), Some("1.10.1"));
        assert_eq!(highest(&["0.3.0", "2.0.0", "1.1.0"]).as_deref(), Some("1.1.0"));
        for none in [&[][..], &["0.3.0"], &["2.0.0"], &["1"], &["one.two"], &["1.x.0"], &[""]] {
            assert_eq!(highest(none), None, "{none:?}");
        }
    }
}
