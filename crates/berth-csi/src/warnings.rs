//! What people should know of a call that succeeded, in the metadata beside its answer.
//!
//! CSI has no field for it. Callers that do not know the metadata are not disturbed by it, on a socket as in one process.

use tonic::metadata::{MetadataMap, MetadataValue};

/// Sent as bytes: a warning may name a directory in any script.
const KEY: &str = "berth-warning-bin";

/// Adds warnings to an answer's metadata.
pub fn add(metadata: &mut MetadataMap, warnings: &[String]) {
    for warning in warnings {
        metadata.append_bin(KEY, MetadataValue::from_bytes(warning.as_bytes()));
    }
}

/// The warnings in an answer's metadata.
pub fn read(metadata: &MetadataMap) -> Vec<String> {
    let values = metadata.get_all_bin(KEY).iter();
    let texts = values.filter_map(|value| String::from_utf8(value.to_bytes().ok()?.to_vec()).ok());
    texts.filter(|text| !text.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_warning_is_read_as_it_was_added() {
        let mut metadata = MetadataMap::new();
        assert!(read(&metadata).is_empty());
        let warnings = ["directory \"größe\" is kept".to_owned(), "two\nlines".to_owned()];
        add(&mut metadata, &warnings);
        assert_eq!(read(&metadata), warnings);
    }
}
