//! What a call to a driver needs besides the volume: secrets, the attachment's data, tokens. Nothing of it is logged.

use std::collections::BTreeMap;

use berth_core::names::SERVICE_ACCOUNT_TOKENS;
use berth_kube::Key;
use berth_kube::storage::attachment_name;
use k8s_openapi::api::core::v1::{Pod, Secret, SecretReference};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use serde_json::{Map, Value, json};
use tonic::Code;

use super::Csi;
use super::rules::Rules;
use crate::plugin::Failed;

/// How long a token lives whose request does not say.
const TOKEN_SECONDS: i64 = 3600;

impl Csi {
    /// The content of a secret; `what` is the field that names it.
    pub(super) async fn secret(
        &self,
        what: &str,
        reference: Option<&SecretReference>,
    ) -> Result<BTreeMap<String, String>, Failed> {
        let Some(reference) = reference else { return Ok(BTreeMap::new()) };
        let key = Key::new(
            reference.namespace.as_deref().unwrap_or_default(),
            reference.name.as_deref().unwrap_or_default(),
        );
        let failed = |why: &str| Failed::unchanged(format!("fetching {what} {key} failed: {why}"));
        let secret = self.cluster.fetch::<Secret>(&key).await.map_err(|error| failed(&error.chain()))?;
        let secret = secret.ok_or_else(|| failed(&format!("secrets {:?} not found", key.name)))?;
        let mut content = BTreeMap::new();
        for (name, bytes) in secret.data.iter().flatten() {
            let text = std::str::from_utf8(&bytes.0).map_err(|_| {
                failed(&format!("the value of {name:?} is not text, and CSI knows only text"))
            })?;
            content.insert(name.clone(), text.to_owned());
        }
        Ok(content)
    }

    /// What attaching the volume brought, as it stands in its VolumeAttachment now.
    pub(super) async fn publish_context(
        &self,
        rules: &Rules,
        driver: &str,
        handle: &str,
    ) -> Result<BTreeMap<String, String>, Failed> {
        if !rules.attach {
            return Ok(BTreeMap::new());
        }
        let name = attachment_name(driver, handle, &self.node);
        let failed =
            |why: String| Failed::unchanged(format!("volume attachment {name} of volume {handle}: {why}"));
        let attachment = self.cluster.fetch::<VolumeAttachment>(&Key::cluster(&name)).await;
        let attachment = attachment.map_err(|error| failed(error.chain()))?;
        let attachment = attachment.ok_or_else(|| {
            failed(
                "not found; a CSIDriver object with attachRequired: false says that a driver needs none"
                    .to_owned(),
            )
        })?;
        let status = attachment.status.clone().unwrap_or_default();
        if !status.attached {
            let error = status.attach_error.and_then(|error| error.message);
            return Err(failed(error.unwrap_or_else(|| "not attached yet".to_owned())));
        }
        Ok(status.attachment_metadata.unwrap_or_default())
    }

    /// What the driver said when it attached no further volume to the node, as the node has as many as it can have.
    pub(super) async fn exhausted(&self, driver: &str, handle: &str) -> Option<String> {
        let name = attachment_name(driver, handle, &self.node);
        let attachment = self.cluster.fetch::<VolumeAttachment>(&Key::cluster(&name)).await.ok()??;
        let error = attachment.status.as_ref()?.attach_error.as_ref()?;
        let exhausted = error.error_code == Some(Code::ResourceExhausted as i32);
        exhausted.then(|| error.message.clone().unwrap_or_default())
    }

    /// The tokens that the driver wants, as one entry of a context or of secrets; none if it wants none.
    pub(super) async fn token_entry(
        &self,
        rules: &Rules,
        pod: &Pod,
    ) -> Result<BTreeMap<String, String>, Failed> {
        if rules.tokens.is_empty() {
            return Ok(BTreeMap::new());
        }
        let mut tokens = Map::new();
        for request in &rules.tokens {
            let audiences: Vec<String> =
                Some(request.audience.clone()).filter(|audience| !audience.is_empty()).into_iter().collect();
            let seconds = request.expiration_seconds.unwrap_or(TOKEN_SECONDS);
            let token = self.tokens.token(pod, &audiences, seconds).await?;
            let expires = jiff::Timestamp::from_second(token.expires.as_second()).unwrap_or(token.expires);
            tokens.insert(
                request.audience.clone(),
                json!({ "token": token.token, "expirationTimestamp": expires.to_string() }),
            );
        }
        Ok(BTreeMap::from([(SERVICE_ACCOUNT_TOKENS.to_owned(), Value::Object(tokens).to_string())]))
    }
}
