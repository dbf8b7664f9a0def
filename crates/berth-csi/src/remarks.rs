//! Sentences for people, in the gRPC metadata beside an answer: progress of work that goes on after the answer, and
//! warnings about a call that succeeded.
//!
//! CSI has no field for either. A sidecar that does not know these keys ignores them, on a socket as in one process;
//! Berth's own sidecars turn a warning into a Kubernetes event, and keep one about a snapshot as an annotation.

use tonic::metadata::{BinaryMetadataValue, MetadataMap, MetadataValue};

const PROGRESS: &str = "berth-progress";
/// Binary, because a sentence may name files and objects in any language.
const WARNING: &str = "berth-warning-bin";
/// Headers are limited on both sides, so a warning is cut after this many bytes,
const LONGEST_WARNING: usize = 1024;
/// and only this many are sent.
const MOST_WARNINGS: usize = 4;

/// What a driver said beside an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remarks {
    /// How far work is that the driver continues after its answer.
    pub progress: Option<String>,
    /// What the caller should know although the call succeeded, each a sentence.
    pub warnings: Vec<String>,
}

impl Remarks {
    /// Reads the remarks in an answer's metadata; what is not valid text is left out.
    pub fn of(metadata: &MetadataMap) -> Self {
        let progress = metadata.get(PROGRESS).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let warnings = metadata.get_all_bin(WARNING).iter().filter_map(|value| {
            let bytes = value.to_bytes().ok()?;
            let text = String::from_utf8(bytes.to_vec()).ok()?;
            let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            (!text.trim().is_empty()).then_some(text)
        });
        Self {
            progress: progress.filter(|progress| !progress.is_empty()),
            warnings: warnings.take(MOST_WARNINGS).collect(),
        }
    }
}

/// Puts progress into an answer's metadata; text that no header can carry is left out.
pub fn set_progress(metadata: &mut MetadataMap, text: &str) {
    if let Ok(value) = MetadataValue::try_from(text) {
        metadata.insert(PROGRESS, value);
    }
}

/// Adds warnings to an answer's metadata, the first few of them, and each cut to a length that a header can have.
pub fn add_warnings(metadata: &mut MetadataMap, warnings: &[String]) {
    for warning in warnings.iter().take(MOST_WARNINGS) {
        let end = warning.floor_char_boundary(LONGEST_WARNING);
        metadata.append_bin(WARNING, BinaryMetadataValue::from_bytes(&warning.as_bytes()[..end]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_back_and_text_that_no_header_can_carry_is_left_out() {
        let mut metadata = MetadataMap::new();
        assert_eq!(Remarks::of(&metadata), Remarks::default());
        set_progress(&mut metadata, "line\nfeed");
        assert_eq!(Remarks::of(&metadata).progress, None);
        set_progress(&mut metadata, "copied 1 GiB of 4 GiB (25 %)");
        assert_eq!(Remarks::of(&metadata).progress.as_deref(), Some("copied 1 GiB of 4 GiB (25 %)"));
    }

    #[test]
    fn warnings_are_read_back_in_order_and_stay_within_the_limits_of_headers() {
        let mut metadata = MetadataMap::new();
        let warnings = ["目录 in use\n".to_owned(), "ü".repeat(LONGEST_WARNING)];
        add_warnings(&mut metadata, &warnings);
        let read = Remarks::of(&metadata).warnings;
        assert_eq!(read[0], "目录 in use ");
        assert_eq!((read.len(), read[1].len()), (2, LONGEST_WARNING));

        add_warnings(&mut metadata, &vec!["more".to_owned(); 100]);
        assert_eq!(Remarks::of(&metadata).warnings.len(), MOST_WARNINGS);
    }
}
