//! The indexes of an indexed Job, as its status writes them: `0-2,5,7`.

use std::collections::BTreeSet;
use std::fmt;

/// A set of indexes as ordered intervals that neither touch nor overlap; both ends belong to an interval.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Indexes(Vec<(usize, usize)>);

impl Indexes {
    /// Reads those below `completions`; what cannot be read is left out.
    pub(super) fn parse(text: &str, completions: usize) -> Self {
        let mut intervals = Vec::new();
        for part in text.split(',') {
            let mut limits = part.split('-').map(str::parse::<usize>);
            let Some(Ok(first)) = limits.next() else { continue };
            let last = match limits.next() {
                None => first,
                Some(Ok(last)) => last.min(completions.saturating_sub(1)),
                Some(Err(_)) => continue,
            };
            if first < completions && first <= last {
                intervals.push((first, last));
            }
        }
        Self::merged(intervals)
    }

    fn merged(mut intervals: Vec<(usize, usize)>) -> Self {
        intervals.sort_unstable();
        let mut merged: Vec<(usize, usize)> = Vec::with_capacity(intervals.len());
        for (first, last) in intervals {
            match merged.last_mut() {
                Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    /// The indexes of both sets.
    #[must_use]
    pub(super) fn union(&self, other: &Self) -> Self {
        Self::merged(self.0.iter().chain(&other.0).copied().collect())
    }

    /// How many there are.
    pub(super) fn total(&self) -> usize {
        self.0.iter().map(|(first, last)| last - first + 1).sum()
    }

    pub(super) fn contains(&self, index: usize) -> bool {
        let after = self.0.partition_point(|(first, _)| *first <= index);
        after.checked_sub(1).is_some_and(|at| self.0[at].1 >= index)
    }

    /// How many indexes are in both sets.
    pub(super) fn common(&self, other: &Self) -> usize {
        let overlap = |(first, last): &(usize, usize)| -> usize {
            let of = other.0.iter().map(|(from, to)| {
                let (from, to) = (*first.max(from), *last.min(to));
                if from <= to { to - from + 1 } else { 0 }
            });
            of.sum()
        };
        self.0.iter().map(overlap).sum()
    }

    /// The smallest `count` indexes below `completions` that are not in the set.
    pub(super) fn missing(&self, count: usize, completions: usize) -> Vec<usize> {
        let mut missing = Vec::new();
        let mut next = 0;
        for (first, last) in self.0.iter().copied().chain([(completions, completions)]) {
            missing.extend((next..first.min(completions)).take(count - missing.len()));
            next = last + 1;
        }
        missing
    }
}

impl FromIterator<usize> for Indexes {
    fn from_iter<I: IntoIterator<Item = usize>>(indexes: I) -> Self {
        let ordered: BTreeSet<usize> = indexes.into_iter().collect();
        Self::merged(ordered.into_iter().map(|index| (index, index)).collect())
    }
}

impl fmt::Display for Indexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                1 => write!(f, "{comma}{first},{last}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}
