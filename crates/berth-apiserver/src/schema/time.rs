//! Times as Kubernetes reads and writes them: RFC 3339, in UTC, whole seconds or microseconds.

use jiff::Timestamp;
use jiff::fmt::temporal::DateTimeParser;

/// A text that is not a time, in Go's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("parsing time {text:?} as {layout:?}: cannot parse {text:?} as \"2006\"")]
pub struct Error {
    text: String,
    layout: &'static str,
}

const SECONDS: &str = "2006-01-02T15:04:05Z07:00";
const MICROS: &str = "2006-01-02T15:04:05.000000Z07:00";

/// Reads an RFC 3339 time.
pub fn parse(text: &str) -> Option<Timestamp> {
    // The parser knows more forms than RFC 3339: years of six digits, blanks, named zones.
    let plain = text.len() >= 20 && text.as_bytes()[10] == b'T' && !text.contains('[');
    if plain { DateTimeParser::new().parse_timestamp(text).ok() } else { None }
}

/// The canonical text of a time in whole seconds.
pub fn canonical(text: &str) -> Result<String, Error> {
    let time = parse(text).ok_or_else(|| Error { text: text.to_owned(), layout: SECONDS })?;
    Ok(write(time))
}

/// The canonical text of a time in microseconds.
pub fn canonical_micro(text: &str) -> Result<String, Error> {
    let time = parse(text).ok_or_else(|| Error { text: text.to_owned(), layout: MICROS })?;
    Ok(write_micro(time))
}

/// Writes a time in whole seconds; fractions are cut off.
pub fn write(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Writes a time in microseconds; finer fractions are cut off.
pub fn write_micro(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_utc_without_fractions() {
        assert_eq!(canonical("2026-01-02T03:04:05Z").as_deref(), Ok("2026-01-02T03:04:05Z"));
        assert_eq!(canonical("2026-01-02T03:04:05.999+02:00").as_deref(), Ok("2026-01-02T01:04:05Z"));
        assert_eq!(
            canonical_micro("2026-01-02T03:04:05.1234567Z").as_deref(),
            Ok("2026-01-02T03:04:05.123456Z")
        );
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "yesterday", "2026-01-02", "2026-13-02T03:04:05Z", "2026-01-02 03:04:05Z"] {
            assert!(canonical(text).is_err(), "{text}");
        }
    }
}
