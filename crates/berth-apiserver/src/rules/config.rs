//! ConfigMap, Secret and ServiceAccount.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use berth_core::names::{
    BASIC_AUTH_SECRET, DOCKER_CONFIG_SECRET, DOCKERCFG_SECRET, SERVICE_ACCOUNT_NAME,
    SERVICE_ACCOUNT_TOKEN_SECRET, SSH_AUTH_SECRET, TLS_SECRET,
};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::read::{annotation, at, default, entries, flag, map, name, same, text};
use super::table::{AGE, Column, NAME, string};
use super::{Rules, age, metadata_fields, names};
use crate::resource::Cause;

/// The most that a ConfigMap or Secret may hold.
const SIZE: usize = 1024 * 1024;
const FIXED: &str = "field is immutable when `immutable` is set";
const CONFIG_COLUMNS: &[Column] = &[NAME, string("Data", "How many keys it has."), AGE];
const SECRET_COLUMNS: &[Column] =
    &[NAME, string("Type", "What kind of secret it is."), string("Data", "How many keys it has."), AGE];
const ACCOUNT_COLUMNS: &[Column] = &[NAME, AGE];

/// The rules of config maps.
pub(super) struct ConfigMap;

impl Rules for ConfigMap {
    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        let mut size = 0;
        for (key, value) in entries(object, &["data"]) {
            let path = Path::new("data").key(key);
            causes.extend(path.each_invalid(key, names::config_key(key)));
            if !at(object, &["binaryData", key]).is_null() {
                causes.push(path.invalid(key, "duplicate of key present in binaryData"));
            }
            size += value.as_str().map_or(0, str::len);
        }
        for (key, value) in entries(object, &["binaryData"]) {
            causes.extend(Path::new("binaryData").key(key).each_invalid(key, names::config_key(key)));
            size += decoded_length(value);
        }
        if size > SIZE {
            // Upstream names no field, which prints so.
            causes.push(Path::new("[]").too_long(SIZE));
        }
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = fixed_causes(new, old, &["data", "binaryData"]);
        causes.extend(self.validate(new));
        causes
    }

    fn columns(&self) -> &'static [Column] {
        CONFIG_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let keys = entries(object, &["data"]).count() + entries(object, &["binaryData"]).count();
        vec![json!(name(object)), json!(keys), json!(age::of(object, now))]
    }
}

/// The rules of secrets.
pub(super) struct Secret;

impl Rules for Secret {
    fn default(&self, object: &mut Value) {
        let object = map(object, &[]);
        default(object, "type", "Opaque");
        if let Some(Value::Object(texts)) = object.remove("stringData") {
            let data = object.entry("data").or_insert(json!({}));
            if !data.is_object() {
                *data = json!({});
            }
            for (key, value) in texts {
                data[key] = json!(STANDARD.encode(value.as_str().unwrap_or_default()));
            }
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("data");
        let mut causes = Vec::new();
        let mut size = 0;
        for (key, value) in entries(object, &["data"]) {
            causes.extend(path.key(key).each_invalid(key, names::config_key(key)));
            size += decoded_length(value);
        }
        if size > SIZE {
            causes.push(path.too_long(SIZE));
        }
        causes.extend(type_causes(object, &path));
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes: Vec<Cause> =
            immutable(at(new, &["type"]), at(old, &["type"]), &Path::new("type")).into_iter().collect();
        causes.extend(fixed_causes(new, old, &["data"]));
        causes.extend(self.validate(new));
        causes
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&'static str, String)> {
        let mut fields = metadata_fields(object);
        fields.push(("type", text(object, &["type"]).to_owned()));
        fields
    }

    fn columns(&self) -> &'static [Column] {
        SECRET_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let keys = entries(object, &["data"]).count();
        vec![json!(name(object)), json!(text(object, &["type"])), json!(keys), json!(age::of(object, now))]
    }
}

/// The rules of service accounts.
pub(super) struct ServiceAccount;

impl Rules for ServiceAccount {
    fn columns(&self) -> &'static [Column] {
        ACCOUNT_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![json!(name(object)), json!(age::of(object, now))]
    }
}

fn fixed_causes(new: &Value, old: &Value, fields: &[&str]) -> Vec<Cause> {
    if !flag(old, &["immutable"]) {
        return Vec::new();
    }
    let mut causes = Vec::new();
    if !flag(new, &["immutable"]) {
        causes.push(Path::new("immutable").forbidden(FIXED));
    }
    let changed = fields.iter().filter(|field| !same(at(new, &[field]), at(old, &[field])));
    causes.extend(changed.map(|field| Path::new(field).forbidden(FIXED)));
    causes
}

fn type_causes(object: &Value, path: &Path) -> Vec<Cause> {
    let has = |key: &str| !at(object, &["data", key]).is_null();
    let missing = |keys: &[&str]| -> Vec<Cause> {
        keys.iter().filter(|key| !has(key)).map(|key| path.key(key).required("")).collect()
    };
    let json_at = |key: &str| -> Vec<Cause> {
        let decoded = decode(at(object, &["data", key]).as_str().unwrap_or_default());
        match serde_json::from_slice::<serde_json::Map<String, Value>>(&decoded) {
            _ if !has(key) => vec![path.key(key).required("")],
            Ok(_) => Vec::new(),
            Err(error) => vec![path.key(key).invalid("<secret contents redacted>", error.to_string())],
        }
    };
    match text(object, &["type"]) {
        SERVICE_ACCOUNT_TOKEN_SECRET => {
            let key = SERVICE_ACCOUNT_NAME;
            let path = Path::new("metadata").child("annotations").key(key);
            if annotation(object, key).is_empty() { vec![path.required("")] } else { Vec::new() }
        }
        DOCKERCFG_SECRET => json_at(".dockercfg"),
        DOCKER_CONFIG_SECRET => json_at(".dockerconfigjson"),
        BASIC_AUTH_SECRET => {
            let keys = ["username", "password"];
            if keys.iter().any(|key| has(key)) { Vec::new() } else { missing(&keys) }
        }
        SSH_AUTH_SECRET => {
            let key = "ssh-privatekey";
            let empty = decoded_length(at(object, &["data", key])) == 0;
            if empty { vec![path.key(key).required("")] } else { Vec::new() }
        }
        TLS_SECRET => missing(&["tls.crt", "tls.key"]),
        _ => Vec::new(),
    }
}

fn decode(text: &str) -> Vec<u8> {
    STANDARD.decode(text).unwrap_or_default()
}

fn decoded_length(value: &Value) -> usize {
    value.as_str().map_or(0, |text| text.trim_end_matches('=').len() * 3 / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(causes: Vec<Cause>) -> Vec<String> {
        causes.into_iter().map(|cause| cause.to_string()).collect()
    }

    #[test]
    fn sizes_are_those_of_the_decoded_data() {
        for (plain, coded) in [("", ""), ("a", "YQ=="), ("ab", "YWI="), ("abc", "YWJj")] {
            assert_eq!(decoded_length(&json!(coded)), plain.len());
        }
    }

    #[test]
    fn plain_texts_of_a_secret_are_stored_as_data() {
        let mut object = json!({"data": {"a": "eA=="}, "stringData": {"a": "y", "b": "z"}});
        Secret.default(&mut object);
        assert_eq!(object, json!({"data": {"a": "eQ==", "b": "eg=="}, "type": "Opaque"}));
    }

    #[test]
    fn secrets_have_what_their_type_asks_for() {
        let secret = |kind: &str, data: Value| json!({"type": kind, "data": data});
        for (object, expected) in [
            (secret("kubernetes.io/tls", json!({"tls.crt": ""})), vec!["data[tls.key]: Required value"]),
            (
                secret("kubernetes.io/basic-auth", json!({})),
                vec!["data[username]: Required value", "data[password]: Required value"],
            ),
            (secret("kubernetes.io/basic-auth", json!({"password": ""})), vec![]),
            (secret("kubernetes.io/ssh-auth", json!({})), vec!["data[ssh-privatekey]: Required value"]),
            (
                secret("kubernetes.io/service-account-token", json!({})),
                vec!["metadata.annotations[kubernetes.io/service-account.name]: Required value"],
            ),
            (
                secret("kubernetes.io/dockerconfigjson", json!({})),
                vec!["data[.dockerconfigjson]: Required value"],
            ),
            (secret("kubernetes.io/dockerconfigjson", json!({".dockerconfigjson": "e30="})), vec![]),
            (secret("example.com/any", json!({})), vec![]),
        ] {
            assert_eq!(texts(Secret.validate(&object)), expected);
        }
        let bad = texts(Secret.validate(&secret("kubernetes.io/dockercfg", json!({".dockercfg": "eA=="}))));
        assert!(bad[0].starts_with("data[.dockercfg]: Invalid value: \"<secret contents redacted>\": "));
    }

    #[test]
    fn keys_and_sizes_are_checked() {
        assert!(ConfigMap.validate(&json!({"data": {"a": "b"}, "binaryData": {"c": "ZA=="}})).is_empty());
        assert_eq!(
            texts(ConfigMap.validate(&json!({"data": {"..": ""}}))),
            ["data[..]: Invalid value: \"..\": must not be '..'"]
        );
        assert_eq!(
            texts(ConfigMap.validate(&json!({"data": {"a": ""}, "binaryData": {"a": ""}}))),
            ["data[a]: Invalid value: \"a\": duplicate of key present in binaryData"]
        );
        assert_eq!(
            texts(ConfigMap.validate(&json!({"data": {"a": "x".repeat(SIZE + 1)}})))[0],
            "[]: Too long: may not be more than 1048576 bytes"
        );
        assert!(
            texts(Secret.validate(&json!({"data": {"a b": ""}})))[0]
                .starts_with("data[a b]: Invalid value: \"a b\": a valid config key must")
        );
    }

    #[test]
    fn immutable_ones_do_not_change() {
        let old = json!({"immutable": true, "data": {"a": "eA=="}, "type": "Opaque"});
        let mut new = old.clone();
        new["metadata"] = json!({"labels": {"x": "y"}});
        assert!(Secret.validate_update(&new, &old).is_empty());
        new["data"] = json!({});
        new["immutable"] = json!(false);
        new["type"] = json!("other");
        assert_eq!(
            texts(Secret.validate_update(&new, &old)),
            [
                "type: Invalid value: \"other\": field is immutable",
                "immutable: Forbidden: field is immutable when `immutable` is set",
                "data: Forbidden: field is immutable when `immutable` is set",
            ]
        );
        assert_eq!(ConfigMap.validate_update(&new, &old).len(), 2);
    }

    #[test]
    fn rows_count_keys() {
        let now = Timestamp::UNIX_EPOCH;
        let object =
            json!({"metadata": {"name": "c"}, "data": {"a": ""}, "binaryData": {"b": ""}, "type": "Opaque"});
        assert_eq!(ConfigMap.cells(&object, now), [json!("c"), json!(2), json!("<unknown>")]);
        assert_eq!(Secret.cells(&object, now), [json!("c"), json!("Opaque"), json!(1), json!("<unknown>")]);
    }
}
