//! The kinds of local volumes, and what each takes as parameters.

use std::{fmt, str::FromStr};

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use berth_host::{btrfs::Compression, io_limit::Limits};
use serde::{Deserialize, Serialize};

use crate::{Error, Parameters, Result};

/// How a volume's bytes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A btrfs subvolume with a quota group: capacity enforced, snapshots instant.
    Btrfs,
    /// A file on a loop device, with a filesystem or raw: capacity enforced, on any filesystem.
    Image,
    /// A plain directory: capacity reported, not enforced.
    Dir,
}

impl Kind {
    /// As it stands in a StorageClass.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Image => "image",
            Self::Dir => "dir",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "btrfs" => Ok(Self::Btrfs),
            "image" => Ok(Self::Image),
            "dir" => Ok(Self::Dir),
            other => Err(Error::Invalid(format!("kind {other:?} is none of btrfs, image, dir"))),
        }
    }
}

/// What a copy of a volume of kind dir must be, as the parameter `consistency` of a StorageClass (for clones) or a
/// snapshot class says. Volumes of the other kinds are always copied at one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Consistency {
    /// As it was at one instant; where that cannot be had, there is no copy.
    #[default]
    Strict,
    /// A copy whose files are of different moments will do; it is reported as one.
    BestEffort,
}

impl Consistency {
    /// The name of the parameter in a class.
    pub(super) const PARAMETER: &'static str = "consistency";
}

impl FromStr for Consistency {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "strict" => Ok(Self::Strict),
            "best-effort" => Ok(Self::BestEffort),
            other => Err(Error::Invalid(format!("consistency {other:?} is neither strict nor best-effort"))),
        }
    }
}

/// What can be tuned on this machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tunable<'a> {
    /// Names that are taken and kept but do nothing, as the host-path driver has them.
    pub(super) without_effect: &'a [String],
    /// Whether what is made in a directory inherits its noatime flag; on btrfs it does not.
    pub(super) noatime: bool,
}

/// A volume's mutable parameters, read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Tuning {
    /// btrfs: how new data is compressed.
    pub(super) compression: Option<Compression>,
    /// dir: whether reading files made from now on leaves their access time alone.
    pub(super) noatime: Option<bool>,
    /// image: how far the kernel reads ahead.
    pub(super) read_ahead_kb: Option<u64>,
    /// image: I/O limits of the device.
    pub(super) limits: Limits,
}

impl Tuning {
    /// Reads mutable parameters for a volume of `kind`. Names the first that is unknown, wrong, or not to be had.
    pub(super) fn parse(kind: Kind, parameters: &Parameters, tunable: &Tunable<'_>) -> Result<Self> {
        let mut tuning = Self::default();
        for (key, value) in parameters {
            if key.starts_with(KUBERNETES_PARAMETER_PREFIX) || tunable.without_effect.contains(key) {
                continue;
            }
            let known = match (kind, key.as_str()) {
                (Kind::Btrfs, "compression") => {
                    tuning.compression = Some(parse_compression(value)?);
                    true
                }
                (Kind::Dir, "noatime") if tunable.noatime => {
                    tuning.noatime = Some(parse_with(key, value, "true or false")?);
                    true
                }
                (Kind::Image, "readAheadKb") => {
                    tuning.read_ahead_kb = Some(parse_with(key, value, "a number of KiB")?);
                    true
                }
                (Kind::Image, "readBps" | "writeBps" | "readIops" | "writeIops") => {
                    *limit(&mut tuning.limits, key) = parse_limit(key, value)?;
                    true
                }
                _ => false,
            };
            if !known {
                return Err(Error::Invalid(format!(
                    "mutable parameter {key:?} cannot be applied to a volume of kind {kind}; it takes {}",
                    match kind {
                        Kind::Btrfs => "compression",
                        Kind::Image => "readAheadKb, readBps, writeBps, readIops, writeIops",
                        Kind::Dir if tunable.noatime => "noatime",
                        Kind::Dir => "none on this filesystem",
                    }
                )));
            }
        }
        if tuning.limits != Limits::default() && !berth_host::io_limit::available() {
            let key = parameters.keys().find(|key| key.ends_with("ps")).map_or("readBps", String::as_str);
            return Err(Error::Invalid(format!(
                "mutable parameter {key:?} cannot be applied on this machine: it has no cgroup I/O controller"
            )));
        }
        Ok(tuning)
    }
}

fn parse_compression(value: &str) -> Result<Compression> {
    match value {
        "none" => Ok(Compression::None),
        "zlib" => Ok(Compression::Zlib),
        "lzo" => Ok(Compression::Lzo),
        "zstd" => Ok(Compression::Zstd),
        other => Err(Error::Invalid(format!("compression {other:?} is none of none, zlib, lzo, zstd"))),
    }
}

fn parse_with<T: FromStr>(key: &str, value: &str, what: &str) -> Result<T> {
    value.parse().map_err(|_| Error::Invalid(format!("{key} must be {what}, not {value:?}")))
}

/// A limit in bytes (quantities such as 10Mi are fine) or operations per second; 0 is no limit.
fn parse_limit(key: &str, value: &str) -> Result<Option<u64>> {
    let number = match value.parse::<berth_core::Capacity>() {
        Ok(capacity) => capacity.bytes(),
        Err(_) => return Err(Error::Invalid(format!("{key} must be a number per second, not {value:?}"))),
    };
    Ok((number > 0).then_some(number))
}

fn limit<'a>(limits: &'a mut Limits, key: &str) -> &'a mut Option<u64> {
    match key {
        "readBps" => &mut limits.read_bps,
        "writeBps" => &mut limits.write_bps,
        "readIops" => &mut limits.read_iops,
        _ => &mut limits.write_iops,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: Kind, pairs: &[(&str, &str)]) -> Result<Tuning> {
        let parameters = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let without_effect = ["fake".to_owned()];
        Tuning::parse(kind, &parameters, &Tunable { without_effect: &without_effect, noatime: true })
    }

    #[test]
    fn each_kind_takes_its_own_parameters_and_names_any_other() {
        for (kind, key, value) in [
            (Kind::Btrfs, "compression", "zstd"),
            (Kind::Dir, "noatime", "false"),
            (Kind::Image, "readAheadKb", "512"),
            (Kind::Dir, "csi.storage.k8s.io/pvc/name", "x"),
            (Kind::Dir, "fake", "x"),
        ] {
            assert!(parse(kind, &[(key, value)]).is_ok(), "{kind} {key}");
        }
        for (kind, key, value) in [
            (Kind::Dir, "compression", "zstd"),
            (Kind::Image, "noatime", "true"),
            (Kind::Btrfs, "noatime", "true"),
            (Kind::Btrfs, "compression", "brotli"),
            (Kind::Image, "readAheadKb", "-1"),
            (Kind::Image, "readBps", "fast"),
            (Kind::Dir, "XXX_FakeKey", "x"),
        ] {
            let error = parse(kind, &[(key, value)]).unwrap_err();
            assert!(
                matches!(&error, Error::Invalid(message) if message.contains(key)),
                "{kind} {key}: {error}"
            );
        }
    }
}
