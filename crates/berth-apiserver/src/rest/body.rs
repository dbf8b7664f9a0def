//! Objects in request bodies: read, checked against their kind, unknown fields reported.

use serde_json::Value;

use super::content::{self, Format};
use super::error::{Answer, Failure};
use super::object;
use super::query::FieldValidation;
use super::registry::{Registry, Served};
use crate::resource::{Cause, CauseReason};
use crate::rules::read;
use crate::schema::{self, Type};

/// How much of a body that is not understood is shown.
const SUMMARY: usize = 30;
/// Deeper than the YAML parser goes.
const YAML_NESTING: usize = 256;
/// Warnings are cut to this many bytes in all.
const WARNINGS_LIMIT: usize = 4096;

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
        Format::Yaml => Ok((parse_yaml(bytes)?, Vec::new())),
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
    check_nesting(bytes)?;
    serde_yaml_ng::from_slice(bytes).map_err(|error| error.to_string())
}

/// The YAML parser refuses deep nesting only at the end, after a time that grows with the square of the depth. Brackets
/// in texts are counted too; that many that are not closed are no text.
fn check_nesting(bytes: &[u8]) -> Result<(), String> {
    let mut depth = 0_usize;
    for byte in bytes {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > YAML_NESTING {
            return Err(format!("yaml: exceeded max depth of {YAML_NESTING}"));
        }
    }
    Ok(())
}

fn parse_json(bytes: &[u8]) -> Result<(Value, Vec<String>), String> {
    let parsed = schema::json::parse(bytes).map_err(|error| {
        format!("couldn't get version/kind; json parse error: {}", go_words(&error, bytes))
    })?;
    // Nothing at all decodes as an empty object.
    if parsed.value.is_null() {
        return Ok((Value::Object(serde_json::Map::new()), Vec::new()));
    }
    if !parsed.value.is_object() {
        let kind = match &parsed.value {
            Value::Array(_) => "array",
            Value::String(_) => "string",
            Value::Number(_) => "number",
            Value::Bool(_) => "bool",
            Value::Null | Value::Object(_) => "null",
        };
        return Err(format!(
            "couldn't get version/kind; json parse error: json: cannot unmarshal {kind} into Go value of type struct \
             {{ APIVersion string \"json:\\\"apiVersion,omitempty\\\"\"; Kind string \"json:\\\"kind,omitempty\\\"\" }}"
        ));
    }
    Ok((parsed.value, parsed.duplicates))
}

/// The commonest complaints about JSON, as Go words them.
pub(crate) fn go_words(error: &serde_json::Error, bytes: &[u8]) -> String {
    if error.is_eof() {
        return "unexpected end of JSON input".to_owned();
    }
    let line = bytes.split(|&byte| byte == b'\n').nth(error.line().saturating_sub(1)).unwrap_or_default();
    let at = line.get(error.column().saturating_sub(1)).copied().map(char::from);
    let text = error.to_string();
    match at {
        Some(at) if text.starts_with("expected value") => {
            format!("invalid character {at:?} looking for beginning of value")
        }
        Some(at) if text.starts_with("key must be a string") => {
            format!("invalid character {at:?} looking for beginning of object key string")
        }
        Some(at) if text.starts_with("trailing characters") => {
            format!("invalid character {at:?} after top-level value")
        }
        _ => text,
    }
}

fn unrecognized(expected: &Expected<'_>, why: &str, bytes: &[u8]) -> Failure {
    let cut = bytes.get(..SUMMARY);
    let shown = cut.unwrap_or(bytes);
    let mut summary = match bytes.first() {
        None => "<empty>".to_owned(),
        Some(b'{') => String::from_utf8_lossy(shown).into_owned(),
        Some(_) => object::hexadecimal(shown),
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

/// Brings a patched object into its type's form; complaints are worded as for patches.
pub(crate) fn settle_patched(
    served: &Served,
    object: &mut Value,
    validation: FieldValidation,
    warnings: &mut Vec<String>,
) -> Answer<()> {
    let before = object.clone();
    let decoded = schema::decode(&served.schema, object);
    let refuse = |why: &str| {
        let cause = crate::resource::Cause {
            reason: crate::resource::CauseReason::Invalid,
            message: format!("Invalid value: {:?}: {why}", before.to_string()),
            field: "patch".to_owned(),
        };
        Failure::invalid_kind("", "", "", &[cause])
    };
    if let Some(error) = decoded.errors.first() {
        return Err(refuse(error));
    }
    if read::text(object, &["kind"]) != &*served.resource.kind
        || read::text(object, &["apiVersion"]) != served.api_version
    {
        return Err(refuse("kind and apiVersion may not be changed"));
    }
    let found: Vec<String> = decoded.unknown.iter().map(|path| format!("unknown field {path:?}")).collect();
    match validation {
        FieldValidation::Strict if !found.is_empty() => {
            Err(refuse(&format!("strict decoding error: {}", found.join(", "))))
        }
        FieldValidation::Warn => {
            warnings.extend(found);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Leaves what is worth mentioning in `Warning` headers.
pub(crate) fn warn(response: &mut http::Response<super::Body>, warnings: &[String]) {
    let mut length = 0;
    for warning in warnings {
        length += warning.len();
        if length > WARNINGS_LIMIT {
            return;
        }
        let clean: String = warning.chars().filter(|c| !c.is_control()).collect();
        let text = format!("299 - \"{}\"", clean.replace('\\', "\\\\").replace('"', "\\\""));
        if let Ok(value) = http::HeaderValue::from_str(&text) {
            response.headers_mut().append(http::header::WARNING, value);
        }
    }
}
