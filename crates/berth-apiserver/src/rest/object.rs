//! Objects: read from bodies and checked against their kind, and the metadata that the server keeps.

use jiff::{Timestamp, ToSpan};
use serde_json::{Map, Value};

use super::content::{self, Format};
use super::error::{Answer, Failure};
use super::registry::{Registry, Served};
use super::request::FieldValidation;
use crate::resource::{Cause, CauseReason};
use crate::rules::read;
use crate::schema::{self, Type, time};

/// Characters of generated names: none that make words or look alike.
const NAME_CHARACTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const NAME_RANDOM: usize = 5;
const NAME_MAX: usize = 63;

/// `metadata`, made if it is not there.
pub(crate) fn metadata(object: &mut Value) -> &mut Map<String, Value> {
    read::map(object, &["metadata"])
}

/// A text in `metadata`.
pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    read::text(object, &["metadata", field])
}

/// Whether it is being deleted.
pub(crate) fn is_deleting(object: &Value) -> bool {
    read::has(object, &["metadata", "deletionTimestamp"])
}

/// The finalizers in `metadata.finalizers`, in their order; empty if the object has none.
pub(crate) fn finalizers(object: &Value) -> Vec<&str> {
    read::items(object, &["metadata", "finalizers"]).iter().filter_map(Value::as_str).collect()
}

/// Replaces its finalizers; none at all leaves the field out.
pub(crate) fn set_finalizers(object: &mut Value, finalizers: Vec<String>) {
    let metadata = metadata(object);
    if finalizers.is_empty() {
        metadata.remove("finalizers");
    } else {
        metadata.insert("finalizers".to_owned(), finalizers.into());
    }
}

/// The time as metadata carries it.
pub(crate) fn now() -> String {
    time::write(Timestamp::now())
}

/// The time so many seconds from now.
pub(crate) fn after(seconds: i64) -> String {
    time::write(Timestamp::now().checked_add(seconds.seconds()).unwrap_or(Timestamp::MAX))
}

/// Gives a new object what only the server may give.
pub(crate) fn begin(object: &mut Value) -> Answer<()> {
    let uid = new_uid()?;
    let metadata = metadata(object);
    for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "resourceVersion"] {
        metadata.remove(field);
    }
    metadata.insert("uid".to_owned(), uid.into());
    metadata.insert("creationTimestamp".to_owned(), now().into());
    Ok(())
}

/// Keeps what an update may not change.
pub(crate) fn carry_over(new: &mut Value, old: &Value) {
    let old = read::at(old, &["metadata"]).clone();
    let metadata = metadata(new);
    for field in ["generation", "creationTimestamp", "selfLink"] {
        match old.get(field) {
            Some(value) => metadata.insert(field.to_owned(), value.clone()),
            None => metadata.remove(field),
        };
    }
    for field in ["uid", "deletionGracePeriodSeconds"] {
        if let (Some(value), None) =
            (old.get(field), metadata.get(field).filter(|have| !read::is_empty(have)))
        {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
    match old.get("deletionTimestamp") {
        Some(value) => metadata.insert("deletionTimestamp".to_owned(), value.clone()),
        None => metadata.remove("deletionTimestamp"),
    };
}

/// Who manages which fields.
pub(crate) fn managers(object: &Value) -> Value {
    read::at(object, &["metadata", "managedFields"]).clone()
}

/// Says who manages which fields.
pub(crate) fn set_managers(object: &mut Value, managers: Value) {
    if managers.is_null() {
        metadata(object).remove("managedFields");
    } else {
        metadata(object).insert("managedFields".to_owned(), managers);
    }
}

/// Adds one to `metadata.generation`, which counts as 0 where it is missing.
pub(crate) fn bump_generation(object: &mut Value) {
    let generation = read::number(object, &["metadata", "generation"]).unwrap_or(0);
    metadata(object).insert("generation".to_owned(), (generation + 1).into());
}

/// A name from a prefix.
pub(crate) fn generate_name(prefix: &str) -> Answer<String> {
    let mut end = prefix.len().min(NAME_MAX - NAME_RANDOM);
    while !prefix.is_char_boundary(end) {
        end -= 1;
    }
    let bytes: [u8; NAME_RANDOM] = crate::auth::random().map_err(Failure::internal)?;
    let mut name = prefix[..end].to_owned();
    for byte in bytes {
        let index = usize::from(byte) % NAME_CHARACTERS.len();
        name.extend(NAME_CHARACTERS.get(index).map(|&character| char::from(character)));
    }
    Ok(name)
}

/// A random UUID (version 4) for `metadata.uid`. Fails only if the system gives no random numbers.
pub(crate) fn new_uid() -> Answer<String> {
    let mut bytes: [u8; 16] = crate::auth::random().map_err(Failure::internal)?;
    // Version 4, variant 1.
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let number = u128::from_be_bytes(bytes);
    let text = format!("{number:032x}");
    Ok(format!("{}-{}-{}-{}-{}", &text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]))
}

/// How much of a body that is not understood is shown.
const SUMMARY: usize = 30;

/// What a body is expected to hold.
pub(crate) struct Expected<'a> {
    pub(crate) api_version: &'a str,
    pub(crate) kind: &'a str,
    pub(crate) type_: &'a Type,
    pub(crate) registry: &'a Registry,
}

impl<'a> Expected<'a> {
    pub(crate) fn of(served: &'a Served, registry: &'a Registry) -> Self {
        Self {
            api_version: &served.api_version,
            kind: &served.resource.kind,
            type_: &served.schema,
            registry,
        }
    }

    fn version(&self) -> &str {
        self.api_version.rsplit('/').next().unwrap_or_default()
    }
}

/// Reads the object in a body, in the form that is served; `warnings` gets what is only worth mentioning.
pub(crate) fn decode(
    headers: &http::HeaderMap,
    bytes: &[u8],
    expected: &Expected<'_>,
    validation: FieldValidation,
    warnings: &mut Vec<String>,
) -> Answer<Value> {
    let format = content::body_format(headers)?;
    let (mut object, duplicates) =
        parse(format, bytes, expected.type_).map_err(|why| unrecognized(expected, &why, bytes))?;
    check_kind(&mut object, expected, bytes)?;
    settle(&mut object, &duplicates, expected, validation, warnings)?;
    Ok(object)
}

/// Reads a body in whatever format it is, and which keys stand in it twice.
pub(crate) fn parse(format: Format, bytes: &[u8], type_: &Type) -> Result<(Value, Vec<String>), String> {
    match format {
        Format::Json => parse_json(bytes),
        Format::Yaml => {
            let parsed = schema::json::parse_yaml(bytes, content::BODY_LIMIT)?;
            Ok((parsed.value, parsed.duplicates))
        }
        Format::Protobuf => {
            let decoded = schema::protobuf::decode(type_, bytes).map_err(|error| error.to_string())?;
            Ok((decoded, Vec::new()))
        }
    }
}

/// Reads YAML or JSON, whichever it is: what an apply patch may be.
pub(crate) fn parse_yaml(bytes: &[u8]) -> Result<Value, String> {
    if bytes.first() == Some(&b'{') {
        return serde_json::from_slice(bytes).map_err(|error| error.to_string());
    }
    schema::json::parse_yaml(bytes, content::BODY_LIMIT).map(|parsed| parsed.value)
}

fn parse_json(bytes: &[u8]) -> Result<(Value, Vec<String>), String> {
    let parsed = schema::json::parse(bytes)
        .map_err(|error| format!("couldn't get version/kind; json parse error: {error}"))?;
    // Nothing at all decodes as an empty object.
    if parsed.value.is_null() {
        return Ok((Value::Object(serde_json::Map::new()), Vec::new()));
    }
    if !parsed.value.is_object() {
        return Err("couldn't get version/kind; json parse error: the body is not an object".to_owned());
    }
    Ok((parsed.value, parsed.duplicates))
}

fn unrecognized(expected: &Expected<'_>, why: &str, bytes: &[u8]) -> Failure {
    let cut = bytes.get(..SUMMARY);
    let shown = cut.unwrap_or(bytes);
    let mut summary = match bytes.first() {
        None => "<empty>".to_owned(),
        Some(b'{') => String::from_utf8_lossy(shown).into_owned(),
        Some(_) => berth_core::hex(shown),
    };
    if cut.is_some() && bytes.len() > SUMMARY {
        summary.push_str(" ...");
    }
    let kind = expected.kind;
    Failure::bad_request(format!(
        "the object provided is unrecognized (must be of type {kind}): {why} ({summary})"
    ))
}

fn check_kind(object: &mut Value, expected: &Expected<'_>, bytes: &[u8]) -> Answer<()> {
    if !object.is_object() {
        return Err(unrecognized(expected, "couldn't get version/kind; no object", bytes));
    }
    for (field, default) in [("kind", expected.kind), ("apiVersion", expected.api_version)] {
        let given = read::at(object, &[field]);
        if given.is_null() || given == "" {
            object[field] = default.into();
        } else if !given.is_string() {
            let why = format!("couldn't get version/kind; json parse error: {field} is not a string");
            return Err(unrecognized(expected, &why, bytes));
        }
    }
    let api_version = read::text(object, &["apiVersion"]);
    let kind = read::text(object, &["kind"]);
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    if version.contains('/') {
        let why = format!("unexpected GroupVersion string: {api_version}");
        return Err(unrecognized(expected, &why, bytes));
    }
    if kind != expected.kind && expected.type_.unstructured {
        let cause = Cause {
            reason: CauseReason::Invalid,
            message: format!("Invalid value: {kind:?}: must be {}", expected.kind),
            field: "kind".to_owned(),
        };
        return Err(Failure::invalid_kind(group, kind, read::name(object), &[cause]));
    }
    let unknown = format!(
        "no kind {kind:?} is registered for version {api_version:?} in scheme \"pkg/runtime/scheme.go:111\""
    );
    if kind != expected.kind {
        let expected_group = expected.api_version.split_once('/').map_or("core", |(group, _)| group);
        let short = expected_group.split('.').next().unwrap_or_default();
        let why = if expected.registry.knows_kind(group, version, kind) {
            format!("converting (v1.{kind}) to ({short}.{}): unknown conversion", expected.kind)
        } else {
            unknown
        };
        return Err(Failure::bad_request(format!(
            "{kind} in version {version:?} cannot be handled as a {}: {why}",
            expected.kind
        )));
    }
    let known = expected.type_.unstructured || expected.registry.knows_kind(group, version, kind);
    if api_version != expected.api_version && !known {
        return Err(Failure::bad_request(format!(
            "{kind} in version {version:?} cannot be handled as a {}: {unknown}",
            expected.kind
        )));
    }
    if api_version != expected.api_version {
        return Err(Failure::bad_request(format!(
            "the API version in the data ({api_version}) does not match the expected API version ({})",
            expected.api_version
        )));
    }
    Ok(())
}

/// Brings an object into its type's form; unknown and repeated fields are refused, mentioned or ignored.
pub(crate) fn settle(
    object: &mut Value,
    duplicates: &[String],
    expected: &Expected<'_>,
    validation: FieldValidation,
    warnings: &mut Vec<String>,
) -> Answer<()> {
    let decoded = schema::decode(expected.type_, object);
    let refuse = |why: &str| {
        Failure::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: {why}",
            expected.kind,
            expected.version(),
            expected.kind
        ))
    };
    if let Some(error) = decoded.errors.first() {
        return Err(refuse(error));
    }
    if validation == FieldValidation::Ignore {
        return Ok(());
    }
    let mut found: Vec<String> = duplicates.iter().map(|path| format!("duplicate field {path:?}")).collect();
    found.extend(decoded.unknown.iter().map(|path| format!("unknown field {path:?}")));
    if found.is_empty() {
        return Ok(());
    }
    if validation == FieldValidation::Strict {
        return Err(refuse(&format!("strict decoding error: {}", found.join(", "))));
    }
    warnings.append(&mut found);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_names_keep_the_prefix_and_fit() {
        let name = generate_name("claim-").unwrap();
        assert!(name.starts_with("claim-") && name.len() == 11, "{name}");
        assert_eq!(generate_name(&"x".repeat(100)).unwrap().len(), 63);
    }

    #[test]
    fn uids_are_random_and_well_formed() {
        let uid = new_uid().unwrap();
        assert_eq!(uid.len(), 36);
        assert_eq!(uid.as_bytes()[14], b'4');
        assert_ne!(uid, new_uid().unwrap());
    }
}
