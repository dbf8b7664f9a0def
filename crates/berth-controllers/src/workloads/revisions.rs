//! ControllerRevisions: the templates that a StatefulSet or a DaemonSet has had, numbered, the last one being the template
//! that it has now.
//!
//! `kubectl rollout history` and `rollout undo` read them, so that their data is what upstream's is: a patch that replaces
//! the template.

use std::collections::HashSet;
use std::sync::Arc;

use berth_core::names::LAST_APPLIED;
use berth_kube::{Cluster, Key, Kind, Result};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::ResourceExt as _;
use kube::api::ObjectMeta;
use serde_json::{Value, json};

use super::deployments::template::hash;
use super::ownership::{Dependents, claim, controller, reference};
use super::workload::{Workload, is_selected};

/// The revisions of a workload, oldest first, and the one of its template.
pub(super) struct History {
    pub(super) all: Vec<Arc<ControllerRevision>>,
    pub(super) newest: Arc<ControllerRevision>,
    /// How often the name of a new revision was taken by another template.
    pub(super) collisions: i32,
}

impl History {
    /// Makes the last revision that of the template: it is there, or an older one becomes the last, or it is created.
    /// `hash_label` is the label that has the hash of the template. `None` if the owner is being deleted and has lost its
    /// revision: that goes with the owner, or stays without it, and is not to be taken again.
    pub(super) async fn observe<W: Workload>(
        cluster: &Cluster,
        owner: &W,
        template: &PodTemplateSpec,
        hash_label: &str,
        revisions: &Dependents<ControllerRevision>,
        mut collisions: i32,
    ) -> Result<Option<Self>> {
        let mut all = claim(cluster, owner, None, |meta| is_selected(owner, meta), revisions).await?;
        all.sort_by_key(|revision| (revision.revision, created(revision), revision.name_any()));
        let data = data(template);
        let next = all.last().map_or(1, |last| last.revision + 1);
        let equal = all.iter().rposition(|revision| is_data(revision, &data));
        if let Some(at) = equal {
            let mut newest = all.remove(at);
            if at != all.len() {
                newest = cluster.update(newest.as_ref(), |revision| revision.revision = next).await?;
            }
            all.push(newest.clone());
            return Ok(Some(Self { all, newest, collisions }));
        }
        if owner.meta().deletion_timestamp.is_some() {
            return Ok(None);
        }
        loop {
            let revision = new(owner, template, hash_label, &data, next, collisions);
            let newest = match cluster.create(&revision).await {
                Ok(created) => created,
                Err(error) if error.is_already_exists() => {
                    let there = cluster.fetch::<ControllerRevision>(&Key::of(&revision)).await?;
                    let Some(there) = there.filter(|there| is_data(there, &data)) else {
                        collisions += 1;
                        continue;
                    };
                    // One that an earlier owner left, and the cache does not show as left yet.
                    if controller(&there.metadata).is_none() {
                        cluster
                            .update(there.as_ref(), |there| {
                                there.owner_references_mut().push(reference(owner));
                            })
                            .await?
                    } else {
                        there
                    }
                }
                Err(error) => return Err(error),
            };
            all.push(newest.clone());
            return Ok(Some(Self { all, newest, collisions }));
        }
    }

    /// Deletes the oldest of those that are not `live` (by name) beyond a limit.
    pub(super) async fn truncate(
        &self,
        cluster: &Cluster,
        live: &HashSet<String>,
        limit: Option<i32>,
    ) -> Result<()> {
        let limit = usize::try_from(limit.unwrap_or(10)).unwrap_or(0);
        let old: Vec<_> = self.all.iter().filter(|revision| !live.contains(&revision.name_any())).collect();
        for revision in old.iter().take(old.len().saturating_sub(limit)) {
            cluster.delete(revision.as_ref()).await?;
        }
        Ok(())
    }
}

/// The template that a revision has; `None` if it is somebody else's data.
pub(super) fn template(revision: &ControllerRevision) -> Option<PodTemplateSpec> {
    let mut template = revision.data.as_ref()?.0.pointer("/spec/template")?.clone();
    template.as_object_mut()?.remove("$patch");
    serde_json::from_value(template).ok()
}

fn data(template: &PodTemplateSpec) -> Value {
    let mut template = serde_json::to_value(template).unwrap_or_default();
    // The API server may add a null time to a template.
    if let Some(meta) = template.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.retain(|_, value| !value.is_null());
    }
    template["$patch"] = json!("replace");
    json!({ "spec": { "template": template } })
}

fn is_data(revision: &ControllerRevision, data: &Value) -> bool {
    // Read by the same types, so that a field that one of both leaves out makes no difference.
    template(revision).map(|template| self::data(&template)).as_ref() == Some(data)
}

fn created(revision: &ControllerRevision) -> Option<jiff::Timestamp> {
    revision.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

fn new<O: Kind>(
    owner: &O,
    template: &PodTemplateSpec,
    hash_label: &str,
    data: &Value,
    revision: i64,
    collisions: i32,
) -> ControllerRevision {
    let hash = hash(template, collisions);
    let mut labels = template.metadata.clone().unwrap_or_default().labels.unwrap_or_default();
    labels.insert(hash_label.to_owned(), hash.clone());
    let mut annotations = owner.annotations().clone();
    annotations.remove(LAST_APPLIED);
    let mut name = owner.name_any();
    name.truncate(253 - 1 - hash.len());
    ControllerRevision {
        metadata: ObjectMeta {
            name: Some(format!("{name}-{hash}")),
            namespace: owner.namespace(),
            labels: Some(labels),
            annotations: Some(annotations).filter(|annotations| !annotations.is_empty()),
            owner_references: Some(vec![reference(owner)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(data.clone())),
        revision,
    }
}
