//! How much more can be promised.
//!
//! Promised is what volumes may grow to; used is what they occupy of that. What a volume occupies is gone from the
//! disk's free space already, so what can still be promised is the free space, plus what volumes use, minus what
//! they were promised; over-commit multiplies the former.

use berth_core::Capacity;

use super::Inner;
use crate::{Error, Parameters, Result};

/// A size promised to a volume that has no record yet; taken back unless kept.
#[derive(Debug)]
pub(super) struct Reservation<'a> {
    inner: &'a Inner,
    pool: Option<String>,
    bytes: u64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.inner.state().release(self.pool.as_deref(), self.bytes);
    }
}

impl Inner {
    /// Promises `bytes` more, if there is room.
    pub(super) fn reserve(&self, parameters: &Parameters, bytes: u64) -> Result<Reservation<'_>> {
        let space = self.root.free_space()?;
        let disk = Capacity::new(space.total);
        if self.config.pools.is_empty() && bytes > scale(disk, self.config.overcommit).bytes() {
            return Err(Error::OutOfRange(format!(
                "{} is more than the disk behind {} could ever hold ({disk})",
                Capacity::new(bytes),
                self.root.path().display()
            )));
        }
        let pool = parameters.get("kind").cloned();
        // Looked at and taken in one go, so that two volumes cannot both take the last of it.
        let mut state = self.state();
        let available = self.available_in(&state, parameters, space.available);
        if bytes > available.bytes() {
            return Err(Error::Exhausted(format!(
                "{} is asked for and {available} can still be promised{}",
                Capacity::new(bytes),
                pool.as_ref()
                    .filter(|pool| self.config.pools.contains_key(*pool))
                    .map_or_else(String::new, |pool| format!(" in pool {pool:?}"))
            )));
        }
        state.reserve(pool.as_deref(), bytes);
        drop(state);
        Ok(Reservation { inner: self, pool, bytes })
    }

    pub(super) fn available(&self, parameters: &Parameters) -> Result<Capacity> {
        let free = self.root.free_space()?.available;
        Ok(self.available_in(&self.state(), parameters, free))
    }

    fn available_in(&self, state: &super::State, parameters: &Parameters, free: u64) -> Capacity {
        if !self.config.pools.is_empty() {
            let pools = self
                .config
                .pools
                .iter()
                .filter(|(pool, _)| parameters.get("kind").is_none_or(|kind| kind == *pool));
            let left = pools.map(|(pool, size)| size.bytes().saturating_sub(state.promised_in(pool)));
            return Capacity::new(left.max().unwrap_or_default());
        }
        let base = scale(Capacity::new(free.saturating_add(state.used())), self.config.overcommit);
        base.saturating_sub(Capacity::new(state.promised()))
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an over-commit factor needs no exact bytes"
)]
fn scale(size: Capacity, factor: f64) -> Capacity {
    if (factor - 1.0).abs() < f64::EPSILON {
        size
    } else {
        Capacity::new((size.bytes() as f64 * factor) as u64)
    }
}
