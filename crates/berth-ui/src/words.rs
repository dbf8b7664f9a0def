//! The words of the views: one or two per trouble, from a closed set, and sentences.

use crate::finding::{Severity, Trouble};

/// The state that a shape stands for.
pub(crate) fn state(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "bad",
        Severity::Warning => "warn",
        Severity::Note => "off",
    }
}

/// How a volume in this trouble is called in a table.
pub(crate) fn word(trouble: Trouble) -> &'static str {
    use Trouble as T;
    match trouble {
        T::ClassMissing => "No such class",
        T::NoClass | T::SnapshotClassMissing => "No class",
        T::NoVolumeFits => "No volume fits",
        T::NamedVolumeUnusable => "Wrong volume",
        T::NoProvisioner | T::NoSnapshotter => "Not taken up",
        T::ProvisioningFailed => "Not created",
        T::ProvisioningSilent => "No progress",
        T::DataSourceUnusable | T::SnapshotSourceMissing => "No source",
        T::ClaimLost => "Lost",
        T::ClaimInUse | T::ClaimFinalizer | T::VolumeInUse | T::VolumeFinalizer | T::SnapshotFinalizer => {
            "Terminating"
        }
        T::ResizeFailed | T::NoResizer => "Not expanded",
        T::ResizeWaitsForNode => "Grows on mount",
        T::ModifyFailed => "Not modified",
        T::ClaimUnused => "Unused",
        T::PodClaimMissing | T::PodClaimForeign => "No claim",
        T::PodUnschedulable => "No node",
        T::MultiAttach => "Used elsewhere",
        T::AttachFailed | T::AttachmentFailed | T::NoAttacher => "Not attached",
        T::MountFailed => "Not mounted",
        T::DriverNotOnNode => "No driver",
        T::PodStuckOnNode => "Pod stuck",
        T::VolumeReleased => "Released",
        T::VolumeDeleteFailed | T::VolumeNotDeleted => "Not deleted",
        T::VolumeNodeGone | T::AttachmentNodeGone => "Node gone",
        T::VolumeTwice => "Named twice",
        T::VolumeFull => "Full",
        T::AttachmentVolumeGone => "Volume gone",
        T::DetachmentFailed => "Not detached",
        T::SnapshotFailed => "Failed",
        T::SnapshotLeaked => "Leaked",
        T::DriverAway => "Not registered",
        T::DriverOnTooFewNodes => "Too few nodes",
        T::DriverPodFailing => "Driver fails",
        T::SidecarSkew => "Versions differ",
        T::SeveralDefaultClasses => "Two defaults",
        T::NodeNotReady => "Not ready",
        T::NodeVolumeLimit => "Node full",
        T::CapacityStale => "Stale",
        T::CapacityMissing => "No capacity",
    }
}

/// A cause or an advice as a sentence: with a capital, unless it begins with a name, and a full stop.
pub(crate) fn sentence(text: &str) -> String {
    let text = text.trim();
    let first = text.split_whitespace().next().unwrap_or_default();
    let is_word = first.chars().all(|letter| letter.is_ascii_lowercase());
    let mut letters = text.chars();
    let mut out = match letters.next() {
        Some(letter) if is_word => letter.to_uppercase().chain(letters).collect(),
        _ => text.to_owned(),
    };
    if !out.is_empty() && !out.ends_with(['.', '!', '?']) {
        out.push('.');
    }
    out
}

/// A text that somebody else wrote, for a terminal: control characters, which could change it, become spaces.
pub fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

/// A size as people read it.
pub(crate) fn gib(bytes: i128) -> String {
    #[expect(clippy::cast_precision_loss, reason = "it is shown with one digit")]
    let (value, unit) = match bytes {
        bytes if bytes >= 1 << 40 => (bytes as f64 / f64::from(1 << 20) / f64::from(1 << 20), "TiB"),
        bytes if bytes >= 1 << 30 => (bytes as f64 / f64::from(1 << 30), "GiB"),
        bytes => (bytes as f64 / f64::from(1 << 20), "MiB"),
    };
    let text = format!("{value:.1}");
    format!("{}\u{a0}{unit}", text.strip_suffix(".0").unwrap_or(&text))
}

/// A number with its noun in the singular or the plural: `1 claim`, `2 claims`.
pub fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_becomes_a_sentence_and_a_name_stays_as_it_is() {
        assert_eq!(sentence("no pod uses the claim"), "No pod uses the claim.");
        assert_eq!(sentence("berth-local is gone."), "berth-local is gone.");
        assert_eq!(sentence(""), "");
    }

    #[test]
    fn what_could_change_a_terminal_is_not_printed() {
        assert_eq!(printable("no\u{1b}[2J room\n\u{9b}x"), "no [2J room  x");
    }

    #[test]
    fn every_trouble_has_a_word_that_fits_its_column() {
        for trouble in Trouble::ALL {
            assert!((3..=15).contains(&word(*trouble).len()), "{trouble}");
        }
    }
}
