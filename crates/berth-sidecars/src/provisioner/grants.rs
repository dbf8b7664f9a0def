//! Sources in other namespaces: allowed by whoever owns them there, with a ReferenceGrant.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::api::ListParams;
use kube::{Api, CustomResource, ResourceExt as _};
use serde::{Deserialize, Serialize};

use super::Provisioner;
use super::source::Reference;
use crate::failure::Failure;

/// Whom a namespace allows to refer to which of its objects; of it, what is read here.
#[derive(CustomResource, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[kube(
    group = "gateway.networking.k8s.io",
    version = "v1beta1",
    kind = "ReferenceGrant",
    namespaced,
    schema = "disabled"
)]
pub(super) struct ReferenceGrantSpec {
    #[serde(default)]
    from: Vec<From>,
    #[serde(default)]
    to: Vec<To>,
}

/// Who may refer.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
struct From {
    #[serde(default)]
    group: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    namespace: String,
}

/// To what; to all of a kind if there is no name.
#[derive(Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
struct To {
    #[serde(default)]
    group: String,
    #[serde(default)]
    kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl ReferenceGrantSpec {
    fn allows(&self, namespace: &str, wanted: &Reference<'_>) -> bool {
        let from = self.from.iter().any(|from| {
            from.group.is_empty() && from.kind == "PersistentVolumeClaim" && from.namespace == namespace
        });
        let to = |to: &To| {
            let name = to.name.as_deref().filter(|name| !name.is_empty());
            to.group == wanted.group
                && to.kind == wanted.kind
                && name.is_none_or(|name| name == wanted.key.name)
        };
        from && self.to.iter().any(to)
    }
}

impl Provisioner {
    /// Refuses a claim whose source is in another namespace that does not grant it.
    pub(super) async fn check_granted(&self, claim: &PersistentVolumeClaim) -> Result<(), Failure> {
        let own = claim.namespace().unwrap_or_default();
        let Some(wanted) = Reference::of(claim).filter(|wanted| wanted.key.namespace != own) else {
            return Ok(());
        };
        let namespace = wanted.key.namespace.as_str();
        let grants: Api<ReferenceGrant> = Api::namespaced(self.cluster.client().clone(), namespace);
        let grants =
            grants.list(&ListParams::default()).await.map_err(|source| berth_kube::Error::Request {
                action: "list",
                kind: "ReferenceGrant".to_owned(),
                name: namespace.to_owned(),
                source: Box::new(source),
            })?;
        if grants.iter().any(|grant| grant.spec.allows(&own, &wanted)) {
            return Ok(());
        }
        Err(Failure::refused(format!(
            "accessing {namespace}/{} of {} dataSource from {own}/{} isn't allowed; it needs a ReferenceGrant in \
             namespace {namespace}",
            wanted.key.name,
            wanted.kind,
            claim.name_any()
        )))
    }
}

#[cfg(test)]
mod tests;
