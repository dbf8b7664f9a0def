//! How far a work is that goes on after its answer: words for people, in the metadata beside the answer.
//!
//! CSI has no field for it. Whoever does not know of the words is not disturbed by them, on a socket as in one process.

use tonic::metadata::{MetadataMap, MetadataValue};

const KEY: &str = "berth-progress";

/// Adds the words to an answer's metadata, if they can be sent.
pub fn tell(metadata: &mut MetadataMap, words: &str) {
    if let Ok(value) = MetadataValue::try_from(words) {
        metadata.insert(KEY, value);
    }
}

/// The words in an answer's metadata.
pub fn told(metadata: &MetadataMap) -> Option<String> {
    let words = metadata.get(KEY)?.to_str().ok()?;
    Some(words.to_owned()).filter(|words| !words.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_is_read_and_what_cannot_be_sent_is_left_out() {
        let mut metadata = MetadataMap::new();
        assert_eq!(told(&metadata), None);
        tell(&mut metadata, "line\nfeed");
        assert_eq!(told(&metadata), None);
        tell(&mut metadata, "copied 1 GiB of 4 GiB (25 %)");
        assert_eq!(told(&metadata).as_deref(), Some("copied 1 GiB of 4 GiB (25 %)"));
    }
}
