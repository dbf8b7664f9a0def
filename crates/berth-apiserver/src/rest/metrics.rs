//! metrics.k8s.io: what nodes and pods take of processor and memory, for `kubectl top`. Nothing of it is stored: nodes are
//! asked when somebody asks.

use std::time::Duration;

use http::Response;
use serde_json::{Value, json};

use super::error::{Answer, Failure};
use super::list::Filter;
use super::{Accept, Body, Call, Shape, content, object};
use crate::pods::{Amounts, PodUsage};
use crate::resource::Resource;
use crate::store::{Collection, Key};

/// The API group of the metrics.
pub(super) const GROUP: &str = "metrics.k8s.io";
const VERSION: &str = "v1beta1";
const VERBS: &[&str] = &["get", "list"];

/// What is served of it.
pub(super) fn resources() -> Vec<Resource> {
    let resource = |kind: &str, plural: &str, namespaced| Resource {
        group: GROUP.into(),
        version: VERSION.into(),
        kind: kind.into(),
        list_kind: format!("{kind}List").into(),
        plural: plural.into(),
        singular: "".into(),
        short_names: Vec::new(),
        categories: Vec::new(),
        namespaced,
        subresources: Vec::new(),
        verbs: VERBS,
        built_in: true,
    };
    vec![resource("NodeMetrics", "nodes", false), resource("PodMetrics", "pods", true)]
}

impl Call {
    /// One object of metrics.k8s.io, or a list of them.
    pub(super) async fn usage(self) -> Answer<Response<Body>> {
        let filter = self.filter()?;
        let Some(pods) = self.api.inner.options.pods.clone() else { return Err(Failure::no_such_path()) };
        let usage = pods.usage().await;
        let (window, is_node) = (window(usage.window), !self.served.resource.namespaced);
        let mut items = Vec::new();
        if is_node {
            for (name, amounts) in usage.nodes {
                let object = json!({ "window": window, "usage": quantities(amounts) });
                items.extend(self.described(&filter, "", &name, object));
            }
        } else {
            for PodUsage { namespace, name, containers } in usage.pods {
                if !self.namespace.is_empty() && namespace != self.namespace {
                    continue;
                }
                let containers: Vec<Value> = containers
                    .into_iter()
                    .map(|(name, amounts)| json!({ "name": name, "usage": quantities(amounts) }))
                    .collect();
                let object = json!({ "window": window, "containers": containers });
                items.extend(self.described(&filter, &namespace, &name, object));
            }
        }
        let accept = Accept { shape: Shape::Object, ..self.accept };
        if !self.name.is_empty() {
            let found = items.into_iter().find(|item| object::text(item, "name") == self.name);
            let found = found.ok_or_else(|| Failure::not_found(&self.served.resource, &self.name))?;
            return Ok(content::respond(200, accept, &found));
        }
        let list = json!({
            "kind": &*self.served.resource.list_kind, "apiVersion": self.served.api_version, "metadata": {}, "items": items,
        });
        Ok(content::respond(200, accept, &list))
    }

    /// The figures of a node or pod with its name and labels, if it is still there and wanted.
    fn described(&self, filter: &Filter, namespace: &str, name: &str, mut object: Value) -> Option<Value> {
        let key = Key::new(Collection::from(&*self.served.resource.plural), namespace, name);
        let stored = self.store().get(&key).filter(|stored| filter.matches(&self.served, stored))?;
        let stored: Value = serde_json::from_slice(&stored.bytes).ok()?;
        let now = object::now();
        let mut metadata = json!({ "name": name, "creationTimestamp": now });
        if !namespace.is_empty() {
            metadata["namespace"] = namespace.into();
        }
        if let Some(labels) = stored.pointer("/metadata/labels") {
            metadata["labels"] = labels.clone();
        }
        object["kind"] = (&*self.served.resource.kind).into();
        object["apiVersion"] = self.served.api_version.as_str().into();
        object["metadata"] = metadata;
        object["timestamp"] = now.into();
        Some(object)
    }
}

/// As metrics-server writes them.
fn quantities(amounts: Amounts) -> Value {
    json!({ "cpu": format!("{}n", amounts.nano_cores), "memory": format!("{}Ki", amounts.working_set / 1024) })
}

/// A duration as Go writes it.
fn window(window: Duration) -> String {
    format!("{}.{:03}s", window.as_secs(), window.subsec_millis())
}
