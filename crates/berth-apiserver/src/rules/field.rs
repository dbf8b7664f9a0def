//! Paths of fields and the causes that name them, in the words of Kubernetes' validation errors.

use std::fmt::{self, Write as _};

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

    /// As [`Self::invalid`], for what is not shown.
    pub(crate) fn invalid_alone(&self, detail: &str) -> Cause {
        self.plain(CauseReason::Invalid, "Invalid value", detail)
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

    /// The list has too many items.
    pub(crate) fn too_many(&self, count: usize, most: usize) -> Cause {
        let detail = format!("must have at most {most} items");
        self.plain(CauseReason::TooMany, &format!("Too many: {count}"), &detail)
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

/// The unified difference of two values' indented JSON, for the refusals that show what may not change. A spec is small; of one
/// that is not, the beginning is shown, because nobody reads more, and an answer names it twice.
pub(super) fn difference(old: &Value, new: &Value) -> String {
    /// How many lines are compared, how many of the difference are shown, and how many bytes of each.
    const COMPARED: usize = 2000;
    const SHOWN: usize = 100;
    const LONGEST: usize = 200;
    let lines = |value: &Value| -> Vec<String> {
        let text = serde_json::to_string_pretty(value).unwrap_or_default().replace("  ", " ");
        text.lines().map(|line| format!("{line}\n")).collect()
    };
    let (old, new) = (lines(old), lines(new));
    // What both begin with needs no comparing, but for what is shown around a change.
    let equal = old.iter().zip(&new).take_while(|(old, new)| old == new).count().saturating_sub(3);
    let equal = if old.len().max(new.len()) > COMPARED { equal } else { 0 };
    let part = |lines: &[String]| lines.iter().skip(equal).take(COMPARED).cloned().collect::<String>();
    let (old, new) = (part(&old), part(&new));
    let difference = similar::TextDiff::from_lines(&old, &new).unified_diff().context_radius(3).to_string();
    let mut shown = String::new();
    for line in difference.lines().take(SHOWN) {
        let end = (0..=LONGEST.min(line.len())).rev().find(|end| line.is_char_boundary(*end)).unwrap_or(0);
        shown.push_str(&line[..end]);
        shown.push_str(if end < line.len() { "…\n" } else { "\n" });
    }
    let left_out = difference.lines().count().saturating_sub(SHOWN);
    if left_out > 0 {
        let _ = writeln!(shown, "… and {left_out} more lines");
    }
    shown
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

    #[test]
    fn a_large_difference_is_cut_and_a_late_one_is_found() {
        let (old, long) = (json!({"a": "ü".repeat(700_000)}), json!({"a": "ö".repeat(700_000)}));
        let shown = difference(&old, &long);
        assert!(shown.len() < 1000 && shown.contains("- \"a\": \"ü") && shown.contains('…'), "{shown}");
        let numbers = |from: u32| json!((from..from + 5000).collect::<Vec<_>>());
        let shown = difference(&numbers(0), &numbers(10_000));
        assert!(shown.len() < 4000 && shown.ends_with("more lines\n"), "{shown}");
        let mut late = numbers(0);
        late[4000] = json!(1);
        let shown = difference(&numbers(0), &late);
        assert!(shown.contains("- 4000,\n+ 1,\n"), "{shown}");
    }
}
