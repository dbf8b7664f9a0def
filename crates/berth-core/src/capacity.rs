//! Sizes in bytes, and the range a caller will accept.

use std::{fmt, str::FromStr};

use crate::Quantity;

/// A number of bytes that fits CSI's int64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Capacity(u64);

/// Why a size or a range of sizes is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCapacity {
    /// A negative number of bytes.
    #[error("{field} is negative ({value})")]
    Negative {
        /// The name of the CSI field.
        field: &'static str,
        /// The value that the caller sent.
        value: i64,
    },
    /// Nothing could satisfy the range.
    #[error("required_bytes ({required}) is larger than limit_bytes ({limit})")]
    Reversed {
        /// The least the caller takes.
        required: Capacity,
        /// The most the caller takes.
        limit: Capacity,
    },
    /// Not a Kubernetes quantity.
    #[error("{0:?} is not a size such as 10Gi, 500M or 1048576")]
    NotAQuantity(String),
}

impl Capacity {
    /// A size of no bytes.
    pub const ZERO: Self = Self(0);
    /// The largest size CSI can express.
    pub const MAX: Self = Self(i64::MAX as u64);

    /// A size; more than CSI can express becomes [`Capacity::MAX`].
    pub const fn new(bytes: u64) -> Self {
        if bytes > Self::MAX.0 { Self::MAX } else { Self(bytes) }
    }

    /// A size of so many MiB (2^20 bytes).
    pub const fn mebibytes(count: u64) -> Self {
        Self::new(count.saturating_mul(1 << 20))
    }

    /// A size of so many GiB (2^30 bytes).
    pub const fn gibibytes(count: u64) -> Self {
        Self::new(count.saturating_mul(1 << 30))
    }

    /// The number of bytes.
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// The number of bytes as CSI writes it.
    pub const fn as_i64(self) -> i64 {
        self.0.cast_signed()
    }

    /// The smallest multiple of `unit` that is not smaller.
    #[must_use]
    pub const fn round_up(self, unit: u64) -> Self {
        match self.0.checked_next_multiple_of(unit) {
            Some(bytes) => Self::new(bytes),
            None => Self::MAX,
        }
    }

    /// What is left after taking `other` away, at least nothing.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        for (unit, name) in UNITS {
            if self.0 >= unit {
                let tenths = u128::from(self.0) * 10 / u128::from(unit);
                return if tenths % 10 == 0 {
                    write!(f, "{} {name}", tenths / 10)
                } else {
                    write!(f, "{}.{} {name}", tenths / 10, tenths % 10)
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

impl FromStr for Capacity {
    type Err = InvalidCapacity;

    /// A Kubernetes quantity of at least one digit, rounded up to whole bytes.
    fn from_str(text: &str) -> Result<Self, InvalidCapacity> {
        let bytes = text.parse::<Quantity>().ok().and_then(|quantity| quantity.bytes());
        // Kubernetes reads a unit without a number as zero, which nobody means as a size.
        bytes
            .filter(|_| text.bytes().any(|byte| byte.is_ascii_digit()))
            .and_then(|bytes| u64::try_from(bytes).ok())
            .map(Self)
            .ok_or_else(|| InvalidCapacity::NotAQuantity(text.chars().take(64).collect()))
    }
}

/// The sizes a caller will accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CapacityRange {
    required: Option<Capacity>,
    limit: Option<Capacity>,
}

impl CapacityRange {
    /// From CSI's fields, where zero means "not given".
    pub fn new(required: i64, limit: i64) -> Result<Self, InvalidCapacity> {
        let given = |field, value: i64| match u64::try_from(value) {
            Err(_) => Err(InvalidCapacity::Negative { field, value }),
            Ok(0) => Ok(None),
            Ok(bytes) => Ok(Some(Capacity(bytes))),
        };
        let range =
            Self { required: given("required_bytes", required)?, limit: given("limit_bytes", limit)? };
        match (range.required, range.limit) {
            (Some(required), Some(limit)) if required > limit => {
                Err(InvalidCapacity::Reversed { required, limit })
            }
            _ => Ok(range),
        }
    }

    /// The least the caller takes.
    pub fn required(&self) -> Option<Capacity> {
        self.required
    }

    /// The most the caller takes.
    pub fn limit(&self) -> Option<Capacity> {
        self.limit
    }

    /// Whether a volume of this size satisfies the caller.
    pub fn contains(&self, size: Capacity) -> bool {
        self.required.is_none_or(|required| size >= required) && self.limit.is_none_or(|limit| size <= limit)
    }

    /// The size to make: what is required, or `default` where nothing is, never above the limit.
    pub fn choose(&self, default: Capacity) -> Capacity {
        match (self.required, self.limit) {
            (Some(required), _) => required,
            (None, Some(limit)) => default.min(limit),
            (None, None) => default,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, bytes) in [
            ("0", 0),
            ("1048576", 1 << 20),
            ("10Gi", 10 << 30),
            ("1.5Gi", 3 << 29),
            ("500M", 500_000_000),
            ("1k", 1000),
            ("0.5Ki", 512),
            ("1.", 1),
        ] {
            assert_eq!(text.parse::<Capacity>(), Ok(Capacity(bytes)), "{text}");
        }
        for text in ["", "Gi", "-1", "1e3x", "99999999999999999999", "9Ei9", "16Ei", "١Gi", "1 Gi"] {
            assert!(text.parse::<Capacity>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_range_refuses_what_nothing_can_satisfy() {
        assert!(matches!(
            CapacityRange::new(-1, 0),
            Err(InvalidCapacity::Negative { field: "required_bytes", .. })
        ));
        assert!(matches!(
            CapacityRange::new(0, i64::MIN),
            Err(InvalidCapacity::Negative { field: "limit_bytes", .. })
        ));
        assert!(matches!(CapacityRange::new(2, 1), Err(InvalidCapacity::Reversed { .. })));
        assert_eq!(CapacityRange::new(0, 0), Ok(CapacityRange::default()));
    }

    #[test]
    fn a_size_is_chosen_within_the_range() {
        let default = Capacity::gibibytes(1);
        let choose = |required, limit| CapacityRange::new(required, limit).unwrap().choose(default).bytes();
        assert_eq!(choose(0, 0), 1 << 30);
        assert_eq!(choose(5, 0), 5);
        assert_eq!(choose(0, 7), 7);
        assert_eq!(choose(0, i64::MAX), 1 << 30);
    }

    #[test]
    fn sizes_are_shown_in_the_unit_people_use() {
        assert_eq!(Capacity::gibibytes(1).to_string(), "1 GiB");
        assert_eq!(Capacity::mebibytes(1536).to_string(), "1.5 GiB");
        assert_eq!(Capacity::new(512).to_string(), "512 B");
        assert_eq!(Capacity::MAX.round_up(1 << 20), Capacity::MAX);
    }
}
