//! With whom capacity objects go: the pod that this runs in, or what that pod belongs to.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::core::gvk::{GroupVersion, ParseGroupVersionError};
use kube::{Api, Client, ResourceExt as _};

/// Where to begin, and how far to go up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// The pod that this runs in.
    pub pod: String,
    /// 0 is the pod itself, 1 what it belongs to (a StatefulSet or DaemonSet), 2 what that belongs to (a Deployment).
    pub level: u8,
}

/// Why there is no owner yet.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoOwner {
    #[error("look up {kind} {name} in namespace {namespace}")]
    Request { kind: String, name: String, namespace: String, source: kube::Error },
    #[error("read the apiVersion of the owner of {name}")]
    Version { name: String, source: ParseGroupVersionError },
    #[error("{kind} {name} belongs to nothing; lower --capacity-ownerref-level")]
    Nothing { kind: String, name: String },
}

impl NoOwner {
    /// The error and its cause, for the log.
    pub(super) fn sentence(&self) -> String {
        berth_core::error_chain(self)
    }
}

/// The owner of the objects. The last step up needs no request, so no permission to read what is found.
pub(super) async fn find(client: &Client, namespace: &str, owner: &Owner) -> Result<OwnerReference, NoOwner> {
    let mut kind = GroupVersionKind::gvk("", "v1", "Pod");
    let mut name = owner.pod.clone();
    for left in (0..=owner.level).rev() {
        let resource = ApiResource::from_gvk(&kind);
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
        let object = api.get(&name).await.map_err(|source| NoOwner::Request {
            kind: kind.kind.clone(),
            name: name.clone(),
            namespace: namespace.to_owned(),
            source,
        })?;
        if left == 0 {
            let uid = object.uid().unwrap_or_default();
            return Ok(controller(&resource.api_version, &kind.kind, &name, &uid));
        }
        let next = object.owner_references().iter().find(|owner| owner.controller == Some(true));
        let Some(next) = next else { return Err(NoOwner::Nothing { kind: kind.kind, name }) };
        if left == 1 {
            return Ok(controller(&next.api_version, &next.kind, &next.name, &next.uid));
        }
        let version = next
            .api_version
            .parse::<GroupVersion>()
            .map_err(|source| NoOwner::Version { name: name.clone(), source })?;
        kind = GroupVersionKind::gvk(&version.group, &version.version, &next.kind);
        name.clone_from(&next.name);
    }
    unreachable!("the last round of the loop returns")
}

fn controller(api_version: &str, kind: &str, name: &str, uid: &str) -> OwnerReference {
    OwnerReference {
        api_version: api_version.to_owned(),
        kind: kind.to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

#[cfg(test)]
mod tests;
