//! The secrets that passed by, so that they can be removed from everything that is shown.
//!
//! Messages lose the fields that the protocol marks. What a driver prints, answers in an error or puts into a context may still hold the
//! values of such fields: these are remembered here, and replaced wherever they appear.

use std::collections::BTreeSet;

use berth_certify::rules::secrets_of;
use berth_core::names::SERVICE_ACCOUNT_TOKENS;
use berth_csi::v1;
use parking_lot::RwLock;
use prost::Message as _;
use serde_json::Value;

/// What stands in the place of a secret.
pub(crate) const STRIPPED: &str = "***stripped***";

/// The values of secrets that passed by.
#[derive(Debug, Default)]
pub(crate) struct Secrets {
    values: RwLock<BTreeSet<String>>,
}

impl Secrets {
    /// Remembers the secrets of a request, by the name of its method.
    pub(crate) fn learn(&self, method: &str, request: &[u8]) {
        let mut found: Vec<String> = secrets_of(method, request).into_values().collect();
        if method == "NodePublishVolume"
            && let Ok(request) = v1::NodePublishVolumeRequest::decode(request)
            && let Some(tokens) = request.volume_context.get(SERVICE_ACCOUNT_TOKENS)
        {
            found.extend(token_values(tokens));
        }
        if found.iter().any(|value| !self.values.read().contains(value)) {
            self.values.write().extend(found);
        }
    }

    /// Remembers values that are known to be secret, if they are long enough to be recognised.
    pub(crate) fn add(&self, values: impl IntoIterator<Item = String>) {
        self.values.write().extend(values.into_iter().filter(|value| value.len() >= 6));
    }

    /// A text without any of them.
    pub(crate) fn hide(&self, text: &str) -> String {
        let values = self.values.read();
        // A secret may hold another, which is the shorter one.
        let mut values: Vec<&String> = values.iter().filter(|value| text.contains(value.as_str())).collect();
        values.sort_by_key(|value| std::cmp::Reverse(value.len()));
        values.into_iter().fold(text.to_owned(), |text, value| text.replace(value.as_str(), STRIPPED))
    }

    /// Whether a text holds one of them.
    pub(crate) fn is_in(&self, text: &str) -> bool {
        self.values.read().iter().any(|value| text.contains(value.as_str()))
    }

    /// A JSON value without any of them, in keys and in texts.
    pub(crate) fn hide_in(&self, value: Value) -> Value {
        if self.values.read().is_empty() {
            return value;
        }
        match value {
            Value::String(text) => Value::String(self.hide(&text)),
            Value::Array(items) => items.into_iter().map(|item| self.hide_in(item)).collect(),
            Value::Object(fields) => {
                fields.into_iter().map(|(key, value)| (self.hide(&key), self.hide_in(value))).collect()
            }
            other => other,
        }
    }
}

/// The tokens of a pod's service account, which come as JSON by audience.
fn token_values(tokens: &str) -> Vec<String> {
    let read: Value = serde_json::from_str(tokens).unwrap_or_default();
    let audiences = read.as_object().into_iter().flat_map(|audiences| audiences.values());
    audiences
        .filter_map(|token| token["token"].as_str())
        .filter(|token| token.len() >= 6)
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_that_passed_is_hidden_everywhere() {
        let secrets = Secrets::default();
        let request = v1::NodePublishVolumeRequest {
            secrets: [
                ("password".to_owned(), "canary-1234".to_owned()),
                ("pin".to_owned(), "canary".to_owned()),
            ]
            .into(),
            volume_context: [(
                SERVICE_ACCOUNT_TOKENS.to_owned(),
                r#"{"a": {"token": "tokentoken"}}"#.to_owned(),
            )]
            .into(),
            ..v1::NodePublishVolumeRequest::default()
        };
        assert_eq!(secrets.hide("canary-1234"), "canary-1234", "nothing is known yet");
        secrets.learn("NodePublishVolume", &request.encode_to_vec());
        assert_eq!(
            secrets.hide("mount -o pass=canary-1234,tokentoken"),
            "mount -o pass=***stripped***,***stripped***"
        );
        let value = serde_json::json!({"a": ["x canary-1234"], "canary": 1});
        let shown = secrets.hide_in(value).to_string();
        assert!(!shown.contains("canary"), "{shown}");
        assert!(secrets.is_in("a canary b") && !secrets.is_in("nothing"));
    }
}
