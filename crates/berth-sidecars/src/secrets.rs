//! Secrets for the driver: which one a class means for a claim, and what it holds.
//!
//! A class names its secrets by templates (`${pvc.namespace}`, …). What they hold is never formatted, only handed to a
//! call.

mod snapshot;

use std::collections::BTreeMap;

use berth_core::names::{KUBERNETES_PARAMETER_PREFIX, SECRET_NAME_PARAMETER, SECRET_NAMESPACE_PARAMETER};
use berth_kube::{Cluster, Key};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Secret, SecretReference};

use crate::failure::Failure;

pub(crate) use self::snapshot::{SnapshotPurpose, snapshot_parameters, snapshot_reference};

/// What a secret is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purpose {
    /// It is sent with CreateVolume and DeleteVolume.
    Provisioner,
    /// It is sent with ControllerPublishVolume and ControllerUnpublishVolume.
    ControllerPublish,
    /// It is sent with NodeStageVolume.
    NodeStage,
    /// It is sent with NodePublishVolume.
    NodePublish,
    /// It is sent with ControllerExpandVolume.
    ControllerExpand,
    /// It is sent with NodeExpandVolume.
    NodeExpand,
    /// It is sent with ControllerModifyVolume.
    ControllerModify,
}

/// The parameters that name a secret for every purpose that has none of its own.
const FALLBACK: (&str, &str) = (SECRET_NAME_PARAMETER, SECRET_NAMESPACE_PARAMETER);

impl Purpose {
    pub(crate) const ALL: [Self; 7] = [
        Self::Provisioner,
        Self::ControllerPublish,
        Self::NodeStage,
        Self::NodePublish,
        Self::ControllerExpand,
        Self::NodeExpand,
        Self::ControllerModify,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Provisioner => "provisioner",
            Self::ControllerPublish => "controller-publish",
            Self::NodeStage => "node-stage",
            Self::NodePublish => "node-publish",
            Self::ControllerExpand => "controller-expand",
            Self::NodeExpand => "node-expand",
            Self::ControllerModify => "controller-modify",
        }
    }

    /// The parameters that name it: name and namespace.
    fn keys(self) -> (String, String) {
        let name = self.name();
        (
            format!("{KUBERNETES_PARAMETER_PREFIX}{name}-secret-name"),
            format!("{KUBERNETES_PARAMETER_PREFIX}{name}-secret-namespace"),
        )
    }

    /// How they were called before there was a prefix.
    fn old_keys(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Provisioner => Some(("csiProvisionerSecretName", "csiProvisionerSecretNamespace")),
            Self::ControllerPublish => {
                Some(("csiControllerPublishSecretName", "csiControllerPublishSecretNamespace"))
            }
            Self::NodeStage => Some(("csiNodeStageSecretName", "csiNodeStageSecretNamespace")),
            Self::NodePublish => Some(("csiNodePublishSecretName", "csiNodePublishSecretNamespace")),
            Self::ControllerExpand | Self::NodeExpand | Self::ControllerModify => None,
        }
    }
}

/// Whether a parameter with the reserved prefix names a secret.
pub(crate) fn is_key(parameter: &str) -> bool {
    parameter == FALLBACK.0
        || parameter == FALLBACK.1
        || Purpose::ALL.iter().any(|purpose| {
            let (name, namespace) = purpose.keys();
            parameter == name || parameter == namespace
        })
}

/// The secret that a class's parameters name for a purpose; `None` if they name none. Without a claim (it may be gone
/// when a volume is deleted) only the volume's name can be filled in.
pub(crate) fn reference(
    parameters: &BTreeMap<String, String>,
    purpose: Purpose,
    volume: &str,
    claim: Option<&PersistentVolumeClaim>,
) -> Result<Option<SecretReference>, Failure> {
    let Some((name, namespace)) = templates(parameters, purpose)? else { return Ok(None) };
    let mut tokens = BTreeMap::from([("pv.name".to_owned(), volume.to_owned())]);
    if let Some(claim) = claim {
        tokens.insert("pvc.namespace".to_owned(), claim.metadata.namespace.clone().unwrap_or_default());
    }
    let namespace = expand(namespace, &tokens).and_then(|text| label(text, 63, false)).map_err(|wrong| {
        Failure::refused(format!("the namespace of the {} secret, {namespace:?}, {wrong}", purpose.name()))
    })?;
    if let Some(claim) = claim {
        tokens.insert("pvc.name".to_owned(), claim.metadata.name.clone().unwrap_or_default());
        for (key, value) in claim.metadata.annotations.iter().flatten() {
            tokens.insert(format!("pvc.annotations['{key}']"), value.clone());
        }
    }
    let name = expand(name, &tokens).and_then(|text| label(text, 253, true)).map_err(|wrong| {
        Failure::refused(format!("the name of the {} secret, {name:?}, {wrong}", purpose.name()))
    })?;
    Ok(Some(SecretReference { name: Some(name), namespace: Some(namespace) }))
}

/// What a secret holds; empty without a reference.
pub(crate) async fn read(
    cluster: &Cluster,
    reference: Option<&SecretReference>,
) -> Result<BTreeMap<String, String>, Failure> {
    let Some(reference) = reference else { return Ok(BTreeMap::new()) };
    let key =
        Key::new(reference.namespace.clone().unwrap_or_default(), reference.name.clone().unwrap_or_default());
    let secret = cluster.fetch::<Secret>(&key).await?;
    let secret = secret.ok_or_else(|| {
        Failure::refused(format!(
            "failed to get secret {} in namespace {}: it does not exist",
            key.name, key.namespace
        ))
    })?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(secret.data.iter().flatten().map(|(name, value)| (name.clone(), text(&value.0))).collect())
}

/// What a secret holds, for deleting: one that is gone must not keep a volume for ever, as the driver may not need it.
pub(crate) async fn read_if_there(
    cluster: &Cluster,
    reference: Option<&SecretReference>,
) -> Result<BTreeMap<String, String>, Failure> {
    match read(cluster, reference).await {
        Err(Failure::Refused(why)) => {
            tracing::warn!(why, "deleting a volume without its secret");
            Ok(BTreeMap::new())
        }
        secrets => secrets,
    }
}

/// The templates of a purpose's secret: its own, the old spelling of its own, or those for everything.
fn templates(
    parameters: &BTreeMap<String, String>,
    purpose: Purpose,
) -> Result<Option<(&String, &String)>, Failure> {
    let (name, namespace) = purpose.keys();
    let new = (parameters.get(&name), parameters.get(&namespace));
    let old = purpose
        .old_keys()
        .map_or((None, None), |(name, namespace)| (parameters.get(name), parameters.get(namespace)));
    let fallback = (parameters.get(FALLBACK.0), parameters.get(FALLBACK.1));
    let used = |pair: &(Option<&String>, Option<&String>)| pair.0.is_some() || pair.1.is_some();
    let chosen = match (used(&new), used(&old)) {
        (true, true) => {
            return Err(Failure::refused(format!(
                "the StorageClass names the {} secret both by {name} and by its deprecated parameter; remove the latter",
                purpose.name()
            )));
        }
        (true, false) => new,
        (false, true) => old,
        (false, false) => fallback,
    };
    match chosen {
        (None, None) => Ok(None),
        (Some(name), Some(namespace)) if !name.is_empty() && !namespace.is_empty() => {
            Ok(Some((name, namespace)))
        }
        _ => Err(Failure::refused(format!(
            "either name and namespace for {} secrets specified, Both must be specified",
            purpose.name()
        ))),
    }
}

/// Fills in `${token}` and `$token`.
fn expand(template: &str, tokens: &BTreeMap<String, String>) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = template;
    while let Some(dollar) = rest.find('$') {
        text.push_str(&rest[..dollar]);
        let after = &rest[dollar + 1..];
        let (token, left) = if let Some(braced) = after.strip_prefix('{') {
            braced.split_once('}').ok_or("has a ${ without a }")?
        } else {
            let end = after.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(after.len());
            after.split_at(end)
        };
        let value = tokens.get(token).ok_or_else(|| {
            let known: Vec<_> = tokens.keys().map(String::as_str).collect();
            format!("has the unknown token {token:?}; known here: {}", known.join(", "))
        })?;
        text.push_str(value);
        rest = left;
    }
    text.push_str(rest);
    Ok(text)
}

/// A DNS label, or with dots a subdomain.
fn label(text: String, longest: usize, dots: bool) -> Result<String, String> {
    let part = |part: &str| {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !part.is_empty() && part.bytes().all(allowed) && !part.starts_with('-') && !part.ends_with('-')
    };
    let valid = text.len() <= longest && if dots { text.split('.').all(part) } else { part(&text) };
    if valid { Ok(text) } else { Err(format!("becomes {text:?}, which is no valid name")) }
}

#[cfg(test)]
mod tests;
