//! How far an archive is that is being written.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

use berth_core::Capacity;

/// Bytes of files that are copied, of how many; the copy counts them, and anybody may read them.
#[derive(Debug, Default)]
pub(super) struct Progress {
    done: AtomicU64,
    total: OnceLock<u64>,
}

impl Progress {
    /// So much more is copied.
    pub(super) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// How much there is in all, as far as that can be known while files change.
    pub(super) fn set_total(&self, bytes: u64) {
        self.total.get_or_init(|| bytes);
    }

    /// Says how much was copied, as an event shows it.
    pub(super) fn words(&self) -> String {
        let done = self.done.load(Ordering::Relaxed);
        let copied = Capacity::new(done);
        match self.total.get().copied().filter(|&total| total > 0) {
            None => format!("copied {copied} so far"),
            Some(total) => {
                // Files may have grown since they were measured.
                let percent = (u128::from(done) * 100 / u128::from(total)).min(100);
                format!("copied {copied} of {} ({percent} %)", Capacity::new(total))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_reported_with_its_percentage_as_soon_as_the_total_is_known() {
        let progress = Progress::default();
        progress.add(3 << 29);
        assert_eq!(progress.words(), "copied 1.5 GiB so far");
        progress.set_total(0);
        assert_eq!(progress.words(), "copied 1.5 GiB so far");
        let progress = Progress::default();
        progress.set_total(8 << 30);
        assert_eq!(progress.words(), "copied 0 B of 8 GiB (0 %)");
        progress.add(6 << 29);
        assert_eq!(progress.words(), "copied 3 GiB of 8 GiB (37 %)");
        progress.add(9 << 30);
        assert_eq!(progress.words(), "copied 12 GiB of 8 GiB (100 %)");
    }
}
