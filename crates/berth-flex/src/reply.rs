//! What a driver prints: one JSON object, read as Go's decoder reads it.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

/// A driver's answer to any call-out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reply {
    /// Whether the driver did what it was asked.
    pub status: Status,
    /// A sentence for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// The device's path, of `attach` and `waitforattach`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The volume's name, of `getvolumename`; the kubelet does not use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_name: Option<String>,
    /// Whether the volume is attached, of `isattached`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attached: Option<bool>,
    /// What the driver can do, of `init`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<Capabilities>,
    /// The volume's new size, of `expandvolume`; the kubelet does not use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_new_size: Option<i64>,
}

/// How a call-out ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Status {
    /// The driver did what it was asked, or found it done.
    Success,
    /// The driver could not do it, and its message says why.
    Failure,
    /// The driver does not know the call-out: the caller does without, where it can.
    NotSupported,
    /// Any other text, which counts as a failure; empty where there is no `status`.
    Other(String),
    /// The reply has no status, which counts as a failure.
    #[default]
    Missing,
}

/// What a driver says in its reply to `init` that it can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[expect(clippy::struct_excessive_bools, reason = "these are the fields of the protocol")]
pub struct Capabilities {
    /// Volumes are attached to nodes before they are mounted there.
    pub attach: bool,
    /// Files may be given an SELinux label.
    pub selinux_relabel: bool,
    /// The usage of a mounted volume may be asked of the filesystem.
    pub supports_metrics: bool,
    /// Files are given to the pod's group by the node.
    pub fs_group: bool,
    /// The node grows the filesystem after an expansion.
    #[serde(rename = "requiresFSResize")]
    pub requires_fs_resize: bool,
}

impl Default for Capabilities {
    /// What the kubelet takes to be so where a driver does not say.
    fn default() -> Self {
        Self {
            attach: true,
            selinux_relabel: true,
            supports_metrics: false,
            fs_group: true,
            requires_fs_resize: true,
        }
    }
}

/// Why what a driver printed is not a reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// The driver printed nothing, or only blanks.
    #[error("it printed nothing")]
    Empty,
    /// What the driver printed is no text.
    #[error("it printed what is not UTF-8")]
    NotUtf8,
    /// What the driver printed is no JSON object.
    #[error("it printed what is not a JSON object ({why}): {said}")]
    NotJson {
        /// What is wrong with it, and where.
        why: String,
        /// The beginning of what it printed.
        said: String,
    },
    /// The driver printed something behind its reply.
    #[error("it printed something behind its JSON object: {0}")]
    SeveralDocuments(String),
    /// A field is of another type than the protocol's.
    #[error("field {field:?} of its reply is not {expected}")]
    WrongType {
        /// The field, as the driver spells it.
        field: String,
        /// What it should be.
        expected: &'static str,
    },
}

/// As much of a driver's output as goes into an error.
const SHOWN: usize = 200;

impl Reply {
    /// The reply of a call-out that did what it should.
    pub fn success() -> Self {
        Self { status: Status::Success, ..Self::default() }
    }

    /// The reply of a call-out that could not.
    pub fn failure(message: impl Into<String>) -> Self {
        Self { status: Status::Failure, message: message.into(), ..Self::default() }
    }

    /// The reply to a call-out that the driver does not know.
    pub fn not_supported() -> Self {
        Self { status: Status::NotSupported, ..Self::default() }
    }

    /// Reads what a driver printed.
    ///
    /// Names of fields count in any case, the last of several, `null` as if it were not there; unknown ones are ignored.
    pub fn parse(output: &[u8]) -> Result<Self, ReplyError> {
        let text = std::str::from_utf8(output).map_err(|_| ReplyError::NotUtf8)?;
        if text.trim().is_empty() {
            return Err(ReplyError::Empty);
        }
        let mut documents = serde_json::Deserializer::from_str(text).into_iter::<Fields>();
        let fields = match documents.next() {
            Some(Ok(fields)) => fields.0,
            Some(Err(error)) => {
                return Err(ReplyError::NotJson { why: error.to_string(), said: shown(text) });
            }
            None => return Err(ReplyError::Empty),
        };
        let rest = &text[documents.byte_offset()..];
        if !rest.trim().is_empty() {
            return Err(ReplyError::SeveralDocuments(shown(rest.trim())));
        }
        let mut reply = Self::default();
        for (name, value) in fields.into_iter().filter(|(_, value)| !value.is_null()) {
            reply.set(&name, value)?;
        }
        Ok(reply)
    }

    fn set(&mut self, name: &str, value: Value) -> Result<(), ReplyError> {
        match name.to_ascii_lowercase().as_str() {
            "status" => self.status = Status::from(text(name, value)?),
            "message" => self.message = text(name, value)?,
            "device" => self.device = Some(text(name, value)?),
            "volumename" => self.volume_name = Some(text(name, value)?),
            "attached" => self.attached = Some(truth(name, &value)?),
            "volumenewsize" => {
                let wrong = || ReplyError::WrongType { field: name.to_owned(), expected: "a whole number" };
                self.volume_new_size = Some(value.as_i64().ok_or_else(wrong)?);
            }
            "capabilities" => {
                let wrong = || ReplyError::WrongType { field: name.to_owned(), expected: "an object" };
                let fields: Fields = serde_json::from_value(value).map_err(|_| wrong())?;
                let capabilities = self.capabilities.get_or_insert_default();
                for (name, value) in fields.0.into_iter().filter(|(_, value)| !value.is_null()) {
                    capabilities.set(&name, &value)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

impl Capabilities {
    fn set(&mut self, name: &str, value: &Value) -> Result<(), ReplyError> {
        let field = match name.to_ascii_lowercase().as_str() {
            "attach" => &mut self.attach,
            "selinuxrelabel" => &mut self.selinux_relabel,
            "supportsmetrics" => &mut self.supports_metrics,
            "fsgroup" => &mut self.fs_group,
            "requiresfsresize" => &mut self.requires_fs_resize,
            _ => return Ok(()),
        };
        *field = truth(name, value)?;
        Ok(())
    }
}

fn text(field: &str, value: Value) -> Result<String, ReplyError> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(ReplyError::WrongType { field: field.to_owned(), expected: "a text" }),
    }
}

fn truth(field: &str, value: &Value) -> Result<bool, ReplyError> {
    value.as_bool().ok_or(ReplyError::WrongType { field: field.to_owned(), expected: "true or false" })
}

/// The beginning of a text, on one line.
pub(crate) fn shown(text: &str) -> String {
    let beginning: String = text.trim().chars().take(SHOWN).collect();
    let more = if text.trim().chars().nth(SHOWN).is_some() { "…" } else { "" };
    format!("{beginning:?}{more}")
}

impl From<String> for Status {
    fn from(text: String) -> Self {
        match text.as_str() {
            "Success" => Self::Success,
            "Failure" => Self::Failure,
            "Not supported" => Self::NotSupported,
            _ => Self::Other(text),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "Success",
            Self::Failure => "Failure",
            Self::NotSupported => "Not supported",
            Self::Other(text) => text,
            Self::Missing => "",
        })
    }
}

impl Serialize for Status {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The fields of an object in the order in which they stand, each as often as it does.
struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Reply, ReplyError> {
        Reply::parse(text.as_bytes())
    }

    #[test]
    fn names_of_fields_count_in_any_case_and_the_last_of_several() {
        let reply = parse(
            r#" {"STATUS":"Success","Message":"m","device":"/dev/a","Device":"/dev/b","Attached":true,"volumeNAME":"v",
                "volumeNewSize":5,"message":null,"more":{"status":"Failure"},"Capabilities":{"ATTACH":false,"x":1}}
            "#,
        )
        .unwrap();
        let capabilities = Capabilities { attach: false, ..Capabilities::default() };
        assert_eq!(
            reply,
            Reply {
                status: Status::Success,
                message: "m".to_owned(),
                device: Some("/dev/b".to_owned()),
                volume_name: Some("v".to_owned()),
                attached: Some(true),
                capabilities: Some(capabilities),
                volume_new_size: Some(5),
            }
        );
        assert_eq!(parse(&serde_json::to_string(&reply).unwrap()).unwrap(), reply);
    }

    #[test]
    fn a_status_is_exact() {
        for (text, status) in [
            (r#"{"status":"Success"}"#, Status::Success),
            (r#"{"status":"Not supported"}"#, Status::NotSupported),
            (r#"{"status":"Failure"}"#, Status::Failure),
            (r#"{"status":"success"}"#, Status::Other("success".to_owned())),
            (r#"{"status":""}"#, Status::Other(String::new())),
            (r#"{"status":null}"#, Status::Missing),
            ("{}", Status::Missing),
        ] {
            assert_eq!(parse(text).unwrap().status, status, "{text}");
        }
    }

    #[test]
    fn capabilities_that_are_not_named_are_the_kubelets_defaults() {
        let capabilities = |text: &str| parse(text).unwrap().capabilities;
        let all = Capabilities::default();
        assert!(all.attach && all.fs_group && all.selinux_relabel && all.requires_fs_resize);
        assert!(!all.supports_metrics);
        assert_eq!(capabilities(r#"{"status":"Success","capabilities":{}}"#), Some(all));
        assert_eq!(capabilities(r#"{"status":"Success","capabilities":null}"#), None);
        let said = r#"{"capabilities":{"attach":false,"selinuxRelabel":false,"supportsMetrics":true,"fsGroup":false,"requiresFSResize":false}}"#;
        assert_eq!(
            capabilities(said),
            Some(Capabilities {
                attach: false,
                selinux_relabel: false,
                supports_metrics: true,
                fs_group: false,
                requires_fs_resize: false,
            })
        );
    }

    #[test]
    fn what_is_no_reply_is_refused_with_the_reason() {
        for (text, expected) in [
            ("", "it printed nothing"),
            (" \n", "it printed nothing"),
            (
                "mount: bad option",
                "is not a JSON object (expected value at line 1 column 1): \"mount: bad option\"",
            ),
            ("{", "is not a JSON object (EOF"),
            ("[]", "is not a JSON object (invalid type: sequence, expected an object"),
            (r#"{"status":"Success"}{"status":"Success"}"#, "behind its JSON object: \"{"),
            (r#"{"status":"Success"} done"#, "behind its JSON object: \"done\""),
            (r#"{"status":1}"#, "field \"status\" of its reply is not a text"),
            (r#"{"Attached":"true"}"#, "field \"Attached\" of its reply is not true or false"),
            (r#"{"capabilities":[]}"#, "field \"capabilities\" of its reply is not an object"),
            (r#"{"capabilities":{"attach":"no"}}"#, "field \"attach\" of its reply is not true or false"),
            (r#"{"volumeNewSize":1.5}"#, "field \"volumeNewSize\" of its reply is not a whole number"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert_eq!(Reply::parse(b"{\"status\":\"\xff\"}"), Err(ReplyError::NotUtf8));
    }
}
