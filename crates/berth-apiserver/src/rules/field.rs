//! Paths of fields and the causes that name them, in the words of Kubernetes' validation errors.

use std::fmt;

use serde_json::Value;

use crate::resource::{Cause, CauseReason};

/// The path of a field as errors spell it: `spec.volumes[0].name`, `spec.capacity[storage]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Path(String);

impl Path {
    /// A path of one field.
    pub(crate) fn new(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// A field of the object at this path.
    #[must_use]
    pub(crate) fn child(&self, name: &str) -> Self {
        if self.0.is_empty() { Self::new(name) } else { Self(format!("{}.{name}", self.0)) }
    }

    /// An item of the list at this path.
    #[must_use]
    pub(crate) fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    /// An entry of the map at this path.
    #[must_use]
    pub(crate) fn key(&self, key: &str) -> Self {
        Self(format!("{}[{key}]", self.0))
    }

    /// The value is not allowed there.
    pub(crate) fn invalid(&self, value: impl Into<Value>, detail: impl AsRef<str>) -> Cause {
        self.with_value(CauseReason::Invalid, "Invalid value", &value.into(), detail.as_ref())
    }

    /// As [`Self::invalid`], for a structure that Kubernetes shows with its program's own field names.
    pub(crate) fn invalid_shown(&self, shown: &str, detail: &str) -> Cause {
        self.plain(CauseReason::Invalid, &format!("Invalid value: {shown}"), detail)
    }

    /// As [`Self::not_supported`], for a structure that Kubernetes shows with its program's own field names.
    pub(crate) fn not_supported_shown(&self, shown: &str, known: &[&str]) -> Cause {
        let known = known.iter().map(|k| quote(k)).collect::<Vec<_>>().join(", ");
        let label = format!("Unsupported value: {shown}");
        self.plain(CauseReason::NotSupported, &label, &format!("supported values: {known}"))
    }

    /// One [`Self::invalid`] for each complaint about the text.
    pub(crate) fn each_invalid(&self, value: &str, complaints: Vec<String>) -> Vec<Cause> {
        complaints.into_iter().map(|complaint| self.invalid(value, complaint)).collect()
    }

    /// Another item has the value already.
    pub(crate) fn duplicate(&self, value: impl Into<Value>) -> Cause {
        self.with_value(CauseReason::Duplicate, "Duplicate value", &value.into(), "")
    }

    /// The value names something that does not exist.
    pub(crate) fn not_found(&self, value: impl Into<Value>) -> Cause {
        self.with_value(CauseReason::NotFound, "Not found", &value.into(), "")
    }

    /// The value is none of the known ones.
    pub(crate) fn not_supported(&self, value: impl Into<Value>, known: &[&str]) -> Cause {
        let known = known.iter().map(|k| quote(k)).collect::<Vec<_>>().join(", ");
        let detail = if known.is_empty() { known } else { format!("supported values: {known}") };
        self.with_value(CauseReason::NotSupported, "Unsupported value", &value.into(), &detail)
    }

    /// A value has to be there.
    pub(crate) fn required(&self, detail: impl AsRef<str>) -> Cause {
        self.plain(CauseReason::Required, "Required value", detail.as_ref())
    }

    /// No such value may be there.
    pub(crate) fn forbidden(&self, detail: impl AsRef<str>) -> Cause {
        self.plain(CauseReason::Forbidden, "Forbidden", detail.as_ref())
    }

    /// The text is too long.
    pub(crate) fn too_long(&self, limit: usize) -> Cause {
        let unit = if limit == 1 { "byte" } else { "bytes" };
        self.plain(CauseReason::TooLong, "Too long", &format!("may not be more than {limit} {unit}"))
    }

    fn with_value(&self, reason: CauseReason, label: &str, value: &Value, detail: &str) -> Cause {
        let shown = match value {
            Value::String(text) => quote(text),
            other => other.to_string(),
        };
        self.plain(reason, &format!("{label}: {shown}"), detail)
    }

    fn plain(&self, reason: CauseReason, label: &str, detail: &str) -> Cause {
        let message = if detail.is_empty() { label.to_owned() } else { format!("{label}: {detail}") };
        Cause { reason, message, field: self.0.clone() }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text in quotes, with what Go's `%q` escapes escaped.
pub(crate) fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            c if (c as u32) < 0x20 || c == '\u{7f}' => {
                quoted.extend(format!("\\x{:02x}", c as u32).chars());
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// The unified difference of two values' indented JSON, for the refusals that show what may not change.
pub(super) fn difference(old: &Value, new: &Value) -> String {
    /// A spec is small; one that is not would make a message nobody reads.
    const LINES: usize = 2000;
    let pretty = |value: &Value| -> String {
        let text = serde_json::to_string_pretty(value).unwrap_or_default().replace("  ", " ");
        text.lines().take(LINES).fold(String::new(), |text, line| text + line + "\n")
    };
    let (old, new) = (pretty(old), pretty(new));
    similar::TextDiff::from_lines(&old, &new).unified_diff().context_radius(3).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn causes_read_as_kubernetes_writes_them() {
        let path = Path::new("spec").child("volumes").index(0).child("name");
        assert_eq!(
            path.invalid("a\"b", "is odd").to_string(),
            "spec.volumes[0].name: Invalid value: \"a\\\"b\": is odd"
        );
        assert_eq!(path.invalid(3, "").message, "Invalid value: 3");
        assert_eq!(
            path.invalid(json!({"b": 1, "a": null}), "x").message,
            "Invalid value: {\"a\":null,\"b\":1}: x"
        );
        assert_eq!(path.required("").message, "Required value");
        assert_eq!(path.forbidden("no").message, "Forbidden: no");
        assert_eq!(path.duplicate("x").message, "Duplicate value: \"x\"");
        assert_eq!(path.too_long(63).message, "Too long: may not be more than 63 bytes");
        assert_eq!(
            path.not_supported("x", &["a", "b"]).message,
            "Unsupported value: \"x\": supported values: \"a\", \"b\""
        );
        assert_eq!(Path::new("spec").child("capacity").key("storage").to_string(), "spec.capacity[storage]");
    }

    #[test]
    fn only_the_surroundings_of_changes_are_shown() {
        let old = json!({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6});
        let new = json!({"a": 1, "b": 2, "c": 3, "d": 4, "e": 7, "f": 6});
        assert_eq!(
            difference(&old, &new),
            "@@ -3,6 +3,6 @@\n  \"b\": 2,\n  \"c\": 3,\n  \"d\": 4,\n- \"e\": 5,\n+ \"e\": 7,\n  \"f\": 6\n }\n"
        );
        assert_eq!(difference(&old, &old), "");
    }
}
