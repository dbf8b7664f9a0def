//! Which controller an object belongs to: a controller adopts objects that its selector chooses and no other controller has,
//! and releases those that it no longer chooses.

use std::sync::Arc;

use berth_kube::selectors::{is_empty, label_selector, labels};
use berth_kube::{Cache, Cluster, Index, Key, Kind, Result};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use kube::ResourceExt as _;

/// The objects of a kind, by the owner that controls them.
pub(super) struct Dependents<K> {
    pub(super) cache: Cache<K>,
    by_owner: Index<K, String>,
    /// Those that no owner controls, by namespace.
    orphans: Index<K, String>,
}

impl<K: Kind> Dependents<K> {
    pub(super) fn new(cluster: &Cluster) -> Self {
        let cache: Cache<K> = cluster.cache();
        Self {
            by_owner: cache.index(|object| {
                controller(object.meta()).map(|owner| owner.uid.clone()).into_iter().collect()
            }),
            orphans: cache.index(|object| {
                let is_orphan = controller(object.meta()).is_none();
                object.namespace().filter(|_| is_orphan).into_iter().collect()
            }),
            cache,
        }
    }

    /// The objects that the owner with a uid controls.
    pub(super) fn of(&self, uid: &str) -> Vec<Arc<K>> {
        self.by_owner.get(uid)
    }
}

/// The owner that controls an object.
pub(super) fn controller(meta: &ObjectMeta) -> Option<&OwnerReference> {
    meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// The reference by which an object is its controller's.
pub(super) fn reference<O: Kind>(owner: &O) -> OwnerReference {
    OwnerReference {
        api_version: O::api_version(&()).into_owned(),
        kind: O::kind(&()).into_owned(),
        name: owner.meta().name.clone().unwrap_or_default(),
        uid: owner.meta().uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Whether a selector chooses an object; one that asks for nothing chooses nothing.
pub(super) fn chooses(selector: &LabelSelector, meta: &ObjectMeta) -> bool {
    !is_empty(selector) && label_selector(selector, labels(meta.labels.as_ref()))
}

/// The objects that are the owner's by `is_ours`: those that it controls already, and those that nobody controls, which it
/// adopts. Those that it controls and that are not its own it releases. An owner that is being deleted does neither. What
/// is adopted gets the `finalizer`, and what is released loses it.
pub(super) async fn claim<O: Kind, K: Kind>(
    cluster: &Cluster,
    owner: &O,
    finalizer: Option<&'static str>,
    is_ours: impl Fn(&ObjectMeta) -> bool + Send,
    objects: &Dependents<K>,
) -> Result<Vec<Arc<K>>> {
    let is_deleted = owner.meta().deletion_timestamp.is_some();
    let mut ours = Vec::new();
    for object in objects.of(&owner.uid().unwrap_or_default()) {
        if is_ours(object.meta()) {
            ours.push(object);
        } else if !is_deleted {
            release(cluster, owner, finalizer, object.as_ref()).await?;
        }
    }
    let orphans = objects.orphans.get(&owner.namespace().unwrap_or_default());
    let mut orphans = orphans
        .into_iter()
        .filter(|orphan| orphan.meta().deletion_timestamp.is_none() && is_ours(orphan.meta()))
        .peekable();
    if is_deleted || orphans.peek().is_none() {
        return Ok(ours);
    }
    // An owner that is gone by now must not adopt: nobody would ever remove what it adopted.
    let fresh = cluster.fetch::<O>(&Key::of(owner)).await?;
    let there = fresh.is_some_and(|fresh| {
        fresh.meta().uid == owner.meta().uid && fresh.meta().deletion_timestamp.is_none()
    });
    if !there {
        return Ok(ours);
    }
    for orphan in orphans {
        let adopted = cluster
            .update(orphan.as_ref(), |orphan| {
                orphan.meta_mut().owner_references.get_or_insert_default().push(reference(owner));
                if let Some(finalizer) = finalizer.filter(|name| !has_finalizer(orphan.meta(), name)) {
                    orphan.finalizers_mut().push(finalizer.to_owned());
                }
            })
            .await;
        match adopted {
            Ok(adopted) => ours.push(adopted),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(ours)
}

/// Whether an object has a finalizer.
pub(super) fn has_finalizer(meta: &ObjectMeta, finalizer: &str) -> bool {
    meta.finalizers.iter().flatten().any(|name| name == finalizer)
}

async fn release<O: Kind, K: Kind>(
    cluster: &Cluster,
    owner: &O,
    finalizer: Option<&'static str>,
    object: &K,
) -> Result<()> {
    let uid = owner.meta().uid.clone().unwrap_or_default();
    let released = cluster
        .update(object, |object| {
            if let Some(owners) = &mut object.meta_mut().owner_references {
                owners.retain(|owner| owner.uid != uid);
            }
            if let Some(finalizers) = &mut object.meta_mut().finalizers {
                finalizers.retain(|name| Some(name.as_str()) != finalizer);
            }
        })
        .await;
    match released {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}
