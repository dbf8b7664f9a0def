//! Protobuf: filled objects of all kinds, written by Go and by us, read by us and by Go.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_apiserver::schema::{built_in_kinds, decode, protobuf};
use serde_json::{Value, json};

use super::peer::{about, ask};

/// Kinds that are not objects of the API by themselves.
const APART: [&str; 2] = ["WatchEvent", "PartialObjectMetadata"];

fn filled(group: &str, version: &str, kind: &str, seed: u64) -> (Value, Vec<u8>) {
    let mut question = about("fill", (group, version, kind));
    question["seed"] = json!(seed);
    let answer = ask(&question);
    let bytes = BASE64.decode(answer["protobuf"].as_str().unwrap_or_else(|| panic!("{answer}")));
    (answer["object"].clone(), bytes.expect("the peer writes base64"))
}

#[test]
fn what_go_writes_we_read_and_write_byte_for_byte() {
    for (group, version, kind, type_) in built_in_kinds().filter(|(_, _, kind, _)| !APART.contains(kind)) {
        for seed in 0..12 {
            let (object, bytes) = filled(group, version, kind, seed);
            let read = protobuf::decode(&type_, &bytes).unwrap_or_else(|e| panic!("{kind} {seed}: {e}"));
            assert_eq!(read, object, "{kind} {seed}");
            let written = protobuf::encode(&type_, &object).unwrap_or_else(|e| panic!("{kind} {seed}: {e}"));
            assert_eq!(BASE64.encode(&written), BASE64.encode(&bytes), "{kind} {seed}");
        }
    }
}

#[test]
fn filled_objects_are_unchanged_by_strict_decoding() {
    for (group, version, kind, type_) in built_in_kinds().filter(|(_, _, kind, _)| !APART.contains(kind)) {
        let (object, _) = filled(group, version, kind, 77);
        let mut decoded = object.clone();
        let found = decode(&type_, &mut decoded);
        assert!(found.unknown.is_empty() && found.errors.is_empty(), "{kind}: {found:?}");
        assert_eq!(decoded, object, "{kind}");
    }
}

#[test]
fn what_we_write_go_reads() {
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "",
            "resources": {"requests": {"storage": "1536Mi"}}}, "status": {}});
    let kind = ("", "v1", "PersistentVolumeClaim");
    let type_ = berth_apiserver::schema::built_in(kind.0, kind.1, kind.2).unwrap();
    let mut question = about("decode", kind);
    question["protobuf"] = BASE64.encode(protobuf::encode(&type_, &claim).unwrap()).into();
    assert_eq!(ask(&question)["object"], claim);
}
