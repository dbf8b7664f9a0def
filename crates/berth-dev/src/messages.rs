//! Messages of CSI as JSON for people, and answers that a person gives in the place of the driver.
//!
//! The text of a message is its `Debug`, which leaves out what the protocol marks as secret; here it becomes JSON, with the names of the
//! protocol. Fields with their default value are left out, as in protobuf's own JSON.

use berth_csi::{code, full, v1};
use bytes::{BufMut as _, Bytes, BytesMut};
use jiff::Timestamp;
use prost::Message;
use serde_json::{Map, Number, Value};
use tonic::Code;

use crate::record::short;

/// The bytes before a message: whether it is compressed, and its length.
const FRAME_HEAD: usize = 5;

/// Whether a call is about volumes or snapshots, rather than about the driver itself, and so is stopped or broken if no method is named.
pub(crate) fn concerns_volumes(method: &str) -> bool {
    let asks = ["GetCapabilities", "NodeGetInfo", "GetCapacity", "NodeGetVolumeStats"];
    !method.starts_with("/csi.v1.Identity/") && !asks.iter().any(|name| short(method).ends_with(name))
}

/// The method of CSI with this name; `NodeStage` is short for `NodeStageVolume`.
pub(crate) fn method_named(name: &str) -> Option<&'static str> {
    let methods = || v1::METHODS.iter().map(|(method, _)| *method);
    let exact = methods().find(|method| short(method).eq_ignore_ascii_case(name));
    exact.or_else(|| methods().find(|method| short(method).eq_ignore_ascii_case(&format!("{name}Volume"))))
}

/// Whether a method takes one message and answers with one, as far as CSI knows it.
pub(crate) fn is_unary(method: &str) -> bool {
    v1::METHODS.iter().any(|(known, streams)| *known == method && !streams)
}

/// The message of a frame, if it is whole and not compressed.
pub(crate) fn payload(frame: &Bytes) -> Option<Bytes> {
    let length = u32::from_be_bytes(frame.get(1..FRAME_HEAD)?.try_into().ok()?);
    let whole = frame[0] == 0 && usize::try_from(length).ok()? == frame.len() - FRAME_HEAD;
    whole.then(|| frame.slice(FRAME_HEAD..))
}

/// A message in its frame.
pub(crate) fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(FRAME_HEAD + message.len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).expect("a message of CSI is far shorter than 4 GiB"));
    frame.put_slice(message);
    frame.freeze()
}

/// Request and answer as JSON; null for what is not known.
pub(crate) fn to_json(method: &str, request: &Bytes, response: Option<&Bytes>) -> (Value, Value) {
    let described =
        full::described(method, request, response).or_else(|| full::described(method, request, None));
    let (request, response) = described.unwrap_or_default();
    (parse(&request), parse(&response))
}

/// The text of a `Debug` as JSON.
fn parse(text: &str) -> Value {
    let mut reader = Reader { rest: text.trim() };
    match reader.value() {
        // A message without fields is its name alone.
        Some(Value::String(_)) if !text.starts_with('"') => Value::Object(Map::new()),
        Some(value) => value,
        None => Value::Null,
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn eat(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let Some(rest) = self.rest.strip_prefix(token) else { return false };
        self.rest = rest;
        true
    }

    fn value(&mut self) -> Option<Value> {
        self.rest = self.rest.trim_start();
        if self.eat(crate::secrets::STRIPPED) {
            return Some(Value::String(crate::secrets::STRIPPED.to_owned()));
        }
        match self.rest.chars().next()? {
            '"' => self.text().map(Value::String),
            '[' => self.list(),
            '{' => self.fields('{', |reader| {
                reader.value().map(|key| key.as_str().map_or_else(|| key.to_string(), str::to_owned))
            }),
            '-' | '0'..='9' => self.number(),
            _ => self.named(),
        }
    }

    fn text(&mut self) -> Option<String> {
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.rest = &self.rest[at + 1..];
                    return Some(text);
                }
                '\\' => match chars.next()?.1 {
                    'n' => text.push('\n'),
                    'r' => text.push('\r'),
                    't' => text.push('\t'),
                    '0' => text.push('\0'),
                    'u' => {
                        let digits: String = chars
                            .by_ref()
                            .skip(1)
                            .map(|(_, digit)| digit)
                            .take_while(|digit| *digit != '}')
                            .collect();
                        text.push(u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)?);
                    }
                    other => text.push(other),
                },
                other => text.push(other),
            }
        }
        None
    }

    fn list(&mut self) -> Option<Value> {
        self.eat("[").then_some(())?;
        let mut items = Vec::new();
        while !self.eat("]") {
            items.push(self.value()?);
            self.eat(",");
        }
        Some(Value::Array(items))
    }

    /// Fields in braces, without those that have their default value.
    fn fields(&mut self, open: char, key: impl Fn(&mut Self) -> Option<String>) -> Option<Value> {
        self.eat(open.encode_utf8(&mut [0; 4])).then_some(())?;
        let mut fields = Map::new();
        while !self.eat("}") {
            let key = key(self)?;
            self.eat(":").then_some(())?;
            let value = self.value()?;
            self.eat(",");
            if !is_default(&value) {
                fields.insert(key, value);
            }
        }
        Some(Value::Object(fields))
    }

    fn number(&mut self) -> Option<Value> {
        let end = self
            .rest
            .find(|c: char| !matches!(c, '-' | '+' | '.' | 'e' | '0'..='9'))
            .unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        digits.parse::<Number>().ok().map(Value::Number)
    }

    fn word(&mut self) -> Option<String> {
        self.rest = self.rest.trim_start();
        let end =
            self.rest.find(|c: char| !(c.is_alphanumeric() || "_#:".contains(c))).unwrap_or(self.rest.len());
        // The colon after a field's name is not part of it.
        let word = self.rest[..end].trim_end_matches(':');
        self.rest = &self.rest[word.len()..];
        (!word.is_empty()).then(|| word.strip_prefix("r#").unwrap_or(word).to_owned())
    }

    /// A structure, a variant with a value, or a word.
    fn named(&mut self) -> Option<Value> {
        let word = self.word()?;
        if self.rest.starts_with(" {") {
            return self.fields('{', Self::word);
        }
        if self.eat("(") {
            let bare = self.rest.starts_with(|c: char| c.is_alphabetic());
            let inner = self.value()?;
            self.eat(",");
            self.eat(")").then_some(())?;
            if word == "Some" {
                return Some(inner);
            }
            // A message without fields, such as BlockVolume.
            let inner = if bare && inner.is_string() { Value::Object(Map::new()) } else { inner };
            return Some(Value::Object([(snake(&word), inner)].into_iter().collect()));
        }
        Some(match word.as_str() {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            "None" => Value::Null,
            _ => Value::String(snake(&word).to_uppercase()),
        })
    }
}

fn is_default(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_i64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Bool(true) => false,
        Value::Object(fields) => fields.is_empty(),
    }
}

/// A name such as `SingleNodeWriter` in the form `single_node_writer`.
fn snake(word: &str) -> String {
    let mut text = String::new();
    for (at, c) in word.char_indices() {
        if c.is_uppercase() && at > 0 {
            text.push('_');
        }
        text.extend(c.to_lowercase());
    }
    text
}

/// An answer that a person gives in the place of the driver.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum HandAnswer {
    /// OK, with this encoded message.
    Message(Vec<u8>),
    /// A code other than OK, and its message.
    Refusal(Code, String),
}

/// Reads an answer: `CODE MESSAGE`, or `OK`, for what makes a new volume or snapshot with its id behind.
pub(crate) fn answer_by_hand(method: &str, request: &[u8], text: &str) -> Result<HandAnswer, String> {
    let (word, rest) = text.trim().split_once(char::is_whitespace).unwrap_or((text.trim(), ""));
    let code = code_named(word)?;
    if code != Code::Ok {
        let message = if rest.trim().is_empty() { "answered by hand" } else { rest.trim() };
        return Ok(HandAnswer::Refusal(code, message.to_owned()));
    }
    let id = rest.trim().to_owned();
    let has_id = || {
        if id.is_empty() {
            Err(format!("give the id that {} answers with: OK ID", short(method)))
        } else {
            Ok(())
        }
    };
    let unreadable = |error: prost::DecodeError| format!("the request cannot be read: {error}");
    let message = match short(method) {
        "CreateVolume" => {
            has_id()?;
            let request = v1::CreateVolumeRequest::decode(request).map_err(unreadable)?;
            let capacity_bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
            let content_source = request.volume_content_source;
            let volume =
                v1::Volume { volume_id: id, capacity_bytes, content_source, ..v1::Volume::default() };
            v1::CreateVolumeResponse { volume: Some(volume) }.encode_to_vec()
        }
        "CreateSnapshot" => {
            has_id()?;
            let request = v1::CreateSnapshotRequest::decode(request).map_err(unreadable)?;
            let snapshot = v1::Snapshot {
                snapshot_id: id,
                source_volume_id: request.source_volume_id,
                creation_time: Some(prost_types::Timestamp {
                    seconds: Timestamp::now().as_second(),
                    nanos: 0,
                }),
                ready_to_use: true,
                ..v1::Snapshot::default()
            };
            v1::CreateSnapshotResponse { snapshot: Some(snapshot) }.encode_to_vec()
        }
        "ControllerExpandVolume" => {
            let request = v1::ControllerExpandVolumeRequest::decode(request).map_err(unreadable)?;
            let capacity_bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
            v1::ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: false }
                .encode_to_vec()
        }
        "DeleteVolume"
        | "DeleteSnapshot"
        | "ControllerPublishVolume"
        | "ControllerUnpublishVolume"
        | "ControllerModifyVolume"
        | "NodeStageVolume"
        | "NodeUnstageVolume"
        | "NodePublishVolume"
        | "NodeUnpublishVolume"
        | "NodeExpandVolume" => Vec::new(),
        other => {
            return Err(format!("{other} has to be answered by the driver, or with a code other than OK"));
        }
    };
    Ok(HandAnswer::Message(message))
}

/// The gRPC code of this name, such as UNAVAILABLE.
pub(crate) fn code_named(name: &str) -> Result<Code, String> {
    let known = (0..=16).map(Code::from_i32).find(|known| code::grpc_name(*known).eq_ignore_ascii_case(name));
    known.ok_or_else(|| format!("{name:?} is no gRPC code; write OK, UNAVAILABLE, NOT_FOUND, …"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn shown(method: &str, message: &impl Message) -> Value {
        to_json(method, &framed(&message.encode_to_vec()), None).0
    }

    #[test]
    fn messages_are_shown_with_the_names_of_the_protocol_and_without_secrets() {
        let mount = v1::volume_capability::MountVolume { fs_type: "ext4".to_owned(), ..Default::default() };
        let capability = v1::VolumeCapability {
            access_mode: Some(v1::volume_capability::AccessMode {
                mode: v1::volume_capability::access_mode::Mode::SingleNodeWriter.into(),
            }),
            access_type: Some(v1::volume_capability::AccessType::Mount(mount)),
        };
        let request = v1::CreateVolumeRequest {
            name: "a \"b\"\n\u{1}ü".to_owned(),
            capacity_range: Some(v1::CapacityRange { required_bytes: 7, limit_bytes: 0 }),
            volume_capabilities: vec![capability],
            parameters: [("key".to_owned(), "value".to_owned())].into(),
            secrets: [("password".to_owned(), "canary".to_owned())].into(),
            ..v1::CreateVolumeRequest::default()
        };
        let expected = json!({
            "name": "a \"b\"\n\u{1}ü",
            "capacity_range": {"required_bytes": 7},
            "volume_capabilities": [{
                "access_mode": {"mode": "SINGLE_NODE_WRITER"},
                "access_type": {"mount": {"fs_type": "ext4"}},
            }],
            "parameters": {"key": "value"},
            "secrets": "***stripped***",
        });
        assert_eq!(shown("/csi.v1.Controller/CreateVolume", &request), expected);
    }

    #[test]
    fn messages_without_fields_are_empty_objects() {
        assert_eq!(shown("/csi.v1.Identity/Probe", &v1::ProbeRequest {}), json!({}));
        let block = v1::VolumeCapability {
            access_mode: None,
            access_type: Some(v1::volume_capability::AccessType::Block(
                v1::volume_capability::BlockVolume {},
            )),
        };
        let request = v1::NodePublishVolumeRequest {
            volume_capability: Some(block),
            readonly: true,
            ..Default::default()
        };
        assert_eq!(
            shown("/csi.v1.Node/NodePublishVolume", &request),
            json!({"volume_capability": {"access_type": {"block": {}}}, "readonly": true})
        );
        assert_eq!(to_json("/other/Method", &framed(b"x"), None), (Value::Null, Value::Null));
    }

    #[test]
    fn methods_are_named_as_people_name_them() {
        assert_eq!(method_named("NodeStage"), Some("/csi.v1.Node/NodeStageVolume"));
        assert_eq!(method_named("createvolume"), Some("/csi.v1.Controller/CreateVolume"));
        assert_eq!(method_named("CreateVolumeX"), None);
        assert!(
            concerns_volumes("/csi.v1.Node/NodeStageVolume") && !concerns_volumes("/csi.v1.Identity/Probe")
        );
        assert!(!concerns_volumes("/csi.v1.Controller/ControllerGetCapabilities"));
    }

    #[test]
    fn answers_by_hand_are_whole_answers_or_refusals() {
        let request = v1::CreateVolumeRequest {
            capacity_range: Some(v1::CapacityRange { required_bytes: 7, limit_bytes: 0 }),
            ..Default::default()
        };
        let answer = |method, text| answer_by_hand(method, &request.encode_to_vec(), text);
        let HandAnswer::Message(made) = answer("/csi.v1.Controller/CreateVolume", "ok vol-1").unwrap() else {
            panic!()
        };
        let volume = v1::CreateVolumeResponse::decode(&*made).unwrap().volume.unwrap();
        assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), ("vol-1", 7));
        assert!(answer("/csi.v1.Controller/CreateVolume", "OK").unwrap_err().contains("OK ID"));
        assert_eq!(answer("/csi.v1.Node/NodePublishVolume", "OK"), Ok(HandAnswer::Message(Vec::new())));
        assert_eq!(
            answer("/csi.v1.Node/NodePublishVolume", "NOT_FOUND no such volume"),
            Ok(HandAnswer::Refusal(Code::NotFound, "no such volume".to_owned()))
        );
        assert!(answer("/csi.v1.Node/NodeGetInfo", "OK").is_err());
        assert!(answer("/csi.v1.Node/NodeGetInfo", "FINE").unwrap_err().contains("is no gRPC code"));
    }
}
