//! The parameters of a request: its query string, and the options of a write in it.

use std::borrow::Cow;

use super::error::{Answer, Failure};
use crate::resource::{Cause, CauseReason};

/// Undoes percent encoding; `None` when that is broken or does not give text.
pub(crate) fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(Cow::Borrowed(text));
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'%' {
            let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok())?;
            bytes.push(u8::from_str_radix(hex, 16).ok()?);
            rest = &tail[2..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

/// A query string, decoded.
#[derive(Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

/// How strictly unknown fields are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

/// What a write is asked to do besides writing.
#[derive(Clone, Debug)]
pub(crate) struct WriteOptions {
    pub(crate) dry_run: bool,
    pub(crate) field_manager: Option<String>,
    pub(crate) field_validation: FieldValidation,
    pub(crate) force: bool,
}

impl Query {
    pub(crate) fn parse(text: &str) -> Self {
        let mut pairs = Vec::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            pairs.push((plus(key), plus(value)));
        }
        Self(pairs)
    }

    /// The first value of a parameter; an empty one counts as not given.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.iter().find(|(have, _)| have == key);
        found.map(|(_, value)| value.as_str()).filter(|value| !value.is_empty())
    }

    /// Sets a parameter that the path implies.
    pub(crate) fn set(&mut self, key: &str, value: &str) {
        self.0.retain(|(have, _)| have != key);
        self.0.push((key.to_owned(), value.to_owned()));
    }

    /// All values of a parameter, empty ones too.
    pub(crate) fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(have, _)| have == key).map(|(_, value)| value.as_str())
    }

    /// A yes or no: everything but "0" and "false" is a yes, also the bare name.
    pub(crate) fn flag(&self, key: &str) -> bool {
        let found = self.0.iter().find(|(have, _)| have == key);
        found.is_some_and(|(_, value)| !matches!(value.as_str(), "0" | "false" | "False" | "FALSE"))
    }

    /// Like [`Self::flag`], when it makes a difference whether it is there.
    pub(crate) fn flag_if_given(&self, key: &str) -> Option<bool> {
        self.0.iter().any(|(have, _)| have == key).then(|| self.flag(key))
    }

    /// The whole number that a parameter holds; `None` where the parameter is missing, 400 where it is no number.
    pub(crate) fn number(&self, key: &str) -> Answer<Option<i64>> {
        let Some(text) = self.get(key) else { return Ok(None) };
        let number = text.parse().map_err(|_| {
            Failure::bad_request(format!("{key}: Invalid value: {text:?}: must be a whole number"))
        })?;
        Ok(Some(number))
    }

    /// The options that all writes share; `kind` names them in complaints.
    pub(crate) fn write_options(&self, kind: &str) -> Answer<WriteOptions> {
        let mut causes = Vec::new();
        let dry_run: Vec<&str> = self.all("dryRun").collect();
        if dry_run.iter().any(|value| *value != "All") {
            causes.push(not_supported("dryRun", &list_text(&dry_run), &["All"]));
        }
        let field_validation = match self.get("fieldValidation") {
            None | Some("Warn") => FieldValidation::Warn,
            Some("Ignore") => FieldValidation::Ignore,
            Some("Strict") => FieldValidation::Strict,
            Some(other) => {
                causes.push(not_supported(
                    "fieldValidation",
                    &format!("{other:?}"),
                    &["", "Ignore", "Strict", "Warn"],
                ));
                FieldValidation::Warn
            }
        };
        let field_manager = self.get("fieldManager").map(str::to_owned);
        if let Some(manager) = &field_manager {
            causes.extend(manager_causes(manager));
        }
        if !causes.is_empty() {
            return Err(Failure::invalid_options(kind, &causes));
        }
        Ok(WriteOptions {
            dry_run: !dry_run.is_empty(),
            field_manager,
            field_validation,
            force: self.flag("force"),
        })
    }

    /// What the query says of a deletion, in the shape of `DeleteOptions`.
    pub(crate) fn delete_options(&self) -> Answer<serde_json::Map<String, serde_json::Value>> {
        let mut options = serde_json::Map::new();
        if let Some(grace) = self.number("gracePeriodSeconds")? {
            options.insert("gracePeriodSeconds".to_owned(), grace.into());
        }
        if let Some(policy) = self.get("propagationPolicy") {
            options.insert("propagationPolicy".to_owned(), policy.into());
        }
        if let Some(orphan) = self.flag_if_given("orphanDependents") {
            options.insert("orphanDependents".to_owned(), orphan.into());
        }
        let dry_run: Vec<serde_json::Value> = self.all("dryRun").map(Into::into).collect();
        if !dry_run.is_empty() {
            options.insert("dryRun".to_owned(), dry_run.into());
        }
        Ok(options)
    }
}

/// The complaint that a value is none of the known ones.
pub(crate) fn not_supported(field: &str, value: &str, known: &[&str]) -> Cause {
    let known: Vec<String> = known.iter().map(|one| format!("{one:?}")).collect();
    Cause {
        reason: CauseReason::NotSupported,
        message: format!("Unsupported value: {value}: supported values: {}", known.join(", ")),
        field: field.to_owned(),
    }
}

/// The complaint that a value may not be given.
pub(crate) fn forbidden(field: &str, why: &str) -> Cause {
    Cause { reason: CauseReason::Forbidden, message: format!("Forbidden: {why}"), field: field.to_owned() }
}

fn manager_causes(manager: &str) -> Vec<Cause> {
    let mut causes = Vec::new();
    if manager.len() > 128 {
        causes.push(Cause {
            reason: CauseReason::TooLong,
            message: "Too long: may not be more than 128 bytes".to_owned(),
            field: "fieldManager".to_owned(),
        });
    }
    if let Some((index, character)) = manager.char_indices().find(|(_, c)| c.is_control()) {
        causes.push(Cause {
            reason: CauseReason::Invalid,
            message: format!(
                "Invalid value: \"{}\": invalid character U+{:04X} (at position {index})",
                manager.escape_debug().to_string().replace("\\0", "\\x00"),
                u32::from(character)
            ),
            field: "fieldManager".to_owned(),
        });
    }
    causes
}

fn list_text(values: &[&str]) -> String {
    let quoted: Vec<String> = values.iter().map(|value| format!("{value:?}")).collect();
    format!("[{}]", quoted.join(","))
}

fn plus(text: &str) -> String {
    let spaced = if text.contains('+') { Cow::Owned(text.replace('+', " ")) } else { Cow::Borrowed(text) };
    decode(&spaced).map_or_else(|| spaced.clone().into_owned(), Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_and_a_bare_name_is_a_yes() {
        let query = Query::parse("watch&labelSelector=a%3Db%2Cc+in+%28d%29&limit=5&pretty=false");
        assert!(query.flag("watch"));
        assert!(!query.flag("pretty"));
        assert_eq!(query.get("labelSelector"), Some("a=b,c in (d)"));
        assert_eq!(query.number("limit").unwrap(), Some(5));
        assert!(Query::parse("limit=x").number("limit").is_err());
    }

    #[test]
    fn unknown_ways_of_validation_and_dry_runs_are_refused() {
        let failure = Query::parse("dryRun=Some").write_options("CreateOptions").unwrap_err();
        assert_eq!(failure.code, 422);
        let failure = Query::parse("fieldValidation=Maybe").write_options("CreateOptions").unwrap_err();
        assert_eq!(
            failure.message,
            "CreateOptions.meta.k8s.io \"\" is invalid: fieldValidation: Unsupported value: \"Maybe\": \
             supported values: \"\", \"Ignore\", \"Strict\", \"Warn\""
        );
    }
}
