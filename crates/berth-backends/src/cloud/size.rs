//! Sizes of disks, which providers count in GiB.

use berth_core::{Capacity, CapacityRange};

use crate::{Error, Result};

/// One GiB in bytes.
pub(crate) const GIB: u64 = 1 << 30;

/// The sizes that a provider makes disks in, in GiB.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) least: u64,
    pub(crate) most: u64,
    /// Where none is asked for.
    pub(crate) default: u64,
}

impl Sizes {
    /// The size of a new disk in GiB: what is asked for, rounded up. The limit counts where it is all that is given.
    pub(crate) fn choose(&self, range: &CapacityRange) -> Result<u64> {
        let size = match (range.required(), range.limit()) {
            (Some(required), _) => gibibytes(required).max(self.least),
            (None, Some(limit)) if limit.bytes() / GIB >= self.least => (limit.bytes() / GIB).min(self.most),
            (None, Some(_)) => self.least,
            (None, None) => self.default,
        };
        self.check(range, size)
    }

    /// The size in GiB of a disk that has `now` and shall grow into the range.
    pub(crate) fn grow(&self, range: &CapacityRange, now: u64) -> Result<u64> {
        self.check(range, range.required().map_or(now, gibibytes).max(now))
    }

    fn check(&self, range: &CapacityRange, size: u64) -> Result<u64> {
        if size > self.most {
            return Err(Error::OutOfRange(format!(
                "{size} GiB are asked for, and the largest disk has {} GiB",
                self.most
            )));
        }
        match range.limit() {
            Some(limit) if Capacity::gibibytes(size) > limit => Err(Error::OutOfRange(format!(
                "a disk has whole GiB and at least {}, so it would have {size} GiB, which is above limit_bytes ({})",
                self.least,
                limit.bytes()
            ))),
            _ => Ok(size),
        }
    }
}

/// The size in gibibytes, rounded up.
fn gibibytes(size: Capacity) -> u64 {
    size.bytes().div_ceil(GIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_and_never_down() {
        let sizes = Sizes { least: 1, most: 16384, default: 16 };
        let half = GIB / 2;
        for (required, limit, size) in [
            (0, 0, Some(16)),
            (3 * half, 0, Some(2)),
            (1, 0, Some(1)),
            (2 * GIB, 2 * GIB, Some(2)),
            (2 * GIB + 1, 3 * GIB, Some(3)),
            (0, 5 * GIB + half, Some(5)),
            (0, 1 << 50, Some(16384)),
            (half, GIB, Some(1)),
            // No whole GiB is in the range.
            (3 * half, 3 * half, None),
            (0, half, None),
            (16385 * GIB, 0, None),
        ] {
            let range = CapacityRange::new(required.cast_signed(), limit.cast_signed()).unwrap();
            let chosen = sizes.choose(&range);
            assert_eq!(chosen.as_ref().ok(), size.as_ref(), "{required} {limit} {chosen:?}");
            assert!(chosen.is_ok() || matches!(chosen, Err(Error::OutOfRange(_))));
        }
        let range = |required: u64, limit: u64| {
            CapacityRange::new(required.cast_signed(), limit.cast_signed()).unwrap()
        };
        assert_eq!(sizes.grow(&range(3 * half, 0), 1).unwrap(), 2);
        assert_eq!(sizes.grow(&range(3 * half, 0), 7).unwrap(), 7, "never smaller");
        assert!(sizes.grow(&range(17 << 40, 0), 7).is_err());
        assert!(sizes.grow(&range(3 * half, 3 * half), 1).is_err());
    }
}
