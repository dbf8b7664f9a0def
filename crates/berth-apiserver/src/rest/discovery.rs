//! Discovery: which groups, versions and resources there are, in the old lists and in one document.

use berth_core::names::API_DISCOVERY_V2;
use serde_json::{Map, Value, json};

use super::registry::{Group, Registry, Served, Version};
use crate::resource::{Resource, Subresource};

/// The answer to `/api`: the only version of the core group, and the `address` to reach it at.
pub(crate) fn core_versions(address: &str) -> Value {
    json!({
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{ "clientCIDR": "0.0.0.0/0", "serverAddress": address }],
    })
}

/// The answer to `/apis`: all groups but the core group, each with its versions.
pub(crate) fn groups(registry: &Registry) -> Value {
    let groups: Vec<Value> = named(registry).map(group_value).collect();
    json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups })
}

/// The answer to `/apis/G`: one group with its versions, of which the first is preferred.
pub(crate) fn group(group: &Group) -> Value {
    let mut value = group_value(group);
    value["kind"] = "APIGroup".into();
    value["apiVersion"] = "v1".into();
    value
}

fn named(registry: &Registry) -> impl Iterator<Item = &Group> {
    registry.groups.iter().filter(|group| !group.name.is_empty())
}

fn group_value(group: &Group) -> Value {
    let versions: Vec<Value> = group
        .versions
        .iter()
        .map(|version| {
            json!({ "groupVersion": format!("{}/{}", group.name, version.name), "version": &*version.name })
        })
        .collect();
    let preferred = versions.first().cloned().unwrap_or_default();
    json!({ "name": &*group.name, "versions": versions, "preferredVersion": preferred })
}

/// The answer to `/api/v1` and `/apis/G/V`: the resources and subresources of one version. The core group's name is
/// empty.
pub(crate) fn resources(group: &str, version: &Version) -> Value {
    let mut list = Vec::new();
    for served in &version.resources {
        list.push(resource_value(&served.resource));
        for &subresource in &served.resource.subresources {
            list.push(subresource_value(&served.resource, subresource));
        }
    }
    let group_version =
        if group.is_empty() { version.name.to_string() } else { format!("{group}/{}", version.name) };
    let mut value = json!({ "kind": "APIResourceList", "groupVersion": group_version, "resources": list });
    if !group.is_empty() {
        value["apiVersion"] = "v1".into();
    }
    value
}

fn resource_value(resource: &Resource) -> Value {
    let mut value = json!({
        "name": &*resource.plural,
        "singularName": &*resource.singular,
        "namespaced": resource.namespaced,
        "kind": &*resource.kind,
        "verbs": resource.verbs,
    });
    extras(&mut value, resource);
    value
}

fn extras(value: &mut Value, resource: &Resource) {
    if !resource.short_names.is_empty() {
        value["shortNames"] = resource.short_names.iter().map(AsRef::<str>::as_ref).collect();
    }
    if !resource.categories.is_empty() {
        value["categories"] = resource.categories.iter().map(AsRef::<str>::as_ref).collect();
    }
}

/// Which kind a subresource speaks, if not its resource's own: group, version, kind.
fn spoken(subresource: Subresource) -> Option<(&'static str, &'static str, &'static str)> {
    Some(match subresource {
        Subresource::Scale => ("autoscaling", "v1", "Scale"),
        Subresource::Eviction => ("policy", "v1", "Eviction"),
        Subresource::Token => ("authentication.k8s.io", "v1", "TokenRequest"),
        Subresource::Binding => ("", "v1", "Binding"),
        Subresource::Exec => ("", "v1", "PodExecOptions"),
        Subresource::Attach => ("", "v1", "PodAttachOptions"),
        Subresource::PortForward => ("", "v1", "PodPortForwardOptions"),
        Subresource::Status | Subresource::Log | Subresource::Finalize | Subresource::EphemeralContainers => {
            return None;
        }
    })
}

fn verbs(subresource: Subresource) -> &'static [&'static str] {
    match subresource {
        Subresource::Status | Subresource::Scale | Subresource::EphemeralContainers => {
            &["get", "patch", "update"]
        }
        Subresource::Binding | Subresource::Eviction | Subresource::Token => &["create"],
        Subresource::Exec | Subresource::Attach | Subresource::PortForward => &["create", "get"],
        Subresource::Log => &["get"],
        Subresource::Finalize => &["update"],
    }
}

fn subresource_value(resource: &Resource, subresource: Subresource) -> Value {
    let mut value = json!({
        "name": format!("{}/{}", resource.plural, subresource.name()),
        "singularName": "",
        "namespaced": resource.namespaced,
        "kind": &*resource.kind,
        "verbs": verbs(subresource),
    });
    if let Some((group, version, kind)) = spoken(subresource) {
        value["kind"] = kind.into();
        if !group.is_empty() {
            value["group"] = group.into();
            value["version"] = version.into();
        }
    }
    value
}

/// Everything in one document: the core group's half for `/api`, the others' for `/apis`.
pub(crate) fn aggregated(registry: &Registry, core: bool) -> Value {
    let groups: Vec<Value> = registry
        .groups
        .iter()
        .filter(|group| group.name.is_empty() == core)
        .map(|group| {
            let versions: Vec<Value> = group
                .versions
                .iter()
                .map(|version| {
                    let resources: Vec<Value> =
                        version.resources.iter().map(|served| aggregated_resource(served)).collect();
                    json!({ "version": &*version.name, "resources": resources, "freshness": "Current" })
                })
                .collect();
            let mut metadata = Map::new();
            if !core {
                metadata.insert("name".to_owned(), (&*group.name).into());
            }
            json!({ "metadata": metadata, "versions": versions })
        })
        .collect();
    json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": API_DISCOVERY_V2, "metadata": {}, "items": groups,
    })
}

fn aggregated_resource(served: &Served) -> Value {
    let resource = &served.resource;
    let own = if resource.built_in {
        kind_value("", "", &resource.kind)
    } else {
        kind_value(&resource.group, &resource.version, &resource.kind)
    };
    let mut value = json!({
        "resource": &*resource.plural,
        "responseKind": own,
        "scope": if resource.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": &*resource.singular,
        "verbs": resource.verbs,
    });
    extras(&mut value, resource);
    if !resource.subresources.is_empty() {
        value["subresources"] = resource
            .subresources
            .iter()
            .map(|&subresource| {
                // Of built-in kinds, only one of another group is listed with its group and version.
                let kind = match spoken(subresource) {
                    None => own.clone(),
                    Some(("", _, kind)) => kind_value("", "", kind),
                    Some((group, version, kind)) => kind_value(group, version, kind),
                };
                json!({
                    "subresource": subresource.name(),
                    "responseKind": kind,
                    "verbs": verbs(subresource),
                })
            })
            .collect();
    }
    value
}

fn kind_value(group: &str, version: &str, kind: &str) -> Value {
    json!({ "group": group, "version": version, "kind": kind })
}
