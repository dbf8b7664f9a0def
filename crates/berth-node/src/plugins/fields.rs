//! What a pod can know of itself: its fields, and the resources of its containers.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use berth_core::Quantity as Amount;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceFieldSelector};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::objects::NodeFacts;

/// Why there is no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoValue {
    /// There is no such field, or pods cannot ask for it.
    #[error("unsupported fieldPath: {0}")]
    Field(String),
    /// Only labels and annotations have keys.
    #[error("fieldPath {0:?} does not support subscript")]
    Subscript(String),
    /// There is no such container.
    #[error("container {0} not found")]
    Container(String),
    /// Pods cannot ask for this resource.
    #[error("unsupported container resource : {0}")]
    Resource(String),
    /// The pod or the node has a number that is none.
    #[error("{0:?} is not a quantity such as 500m or 1Gi")]
    Quantity(String),
    /// The node has no address yet.
    #[error("the node has no address yet")]
    Address,
}

/// The value of a field as an environment variable has it.
pub(super) fn field_value(pod: &Pod, field_path: &str, node: &NodeFacts) -> Result<String, NoValue> {
    let (spec, status) = (pod.spec.as_ref(), pod.status.as_ref());
    let value = match field_path {
        "spec.nodeName" => spec.and_then(|spec| spec.node_name.clone()),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()),
        "status.hostIP" => Some(node.addresses.first().ok_or(NoValue::Address)?.clone()),
        "status.hostIPs" if node.addresses.is_empty() => return Err(NoValue::Address),
        "status.hostIPs" => Some(node.addresses.join(",")),
        "status.podIP" => status.and_then(|status| status.pod_ip.clone()),
        "status.podIPs" => status.map(|status| {
            let ips = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
            ips.collect::<Vec<_>>().join(",")
        }),
        _ => return metadata_value(pod, field_path),
    };
    Ok(value.unwrap_or_default())
}

/// The value of a field as a file of a volume has it: only what may change while the pod runs, and its names.
pub(super) fn metadata_value(pod: &Pod, field_path: &str) -> Result<String, NoValue> {
    let metadata = &pod.metadata;
    let one = |map: &Option<BTreeMap<String, String>>, key: &str| {
        map.as_ref().and_then(|map| map.get(key)).cloned()
    };
    if let Some((path, key)) = subscript(field_path) {
        let value = match path {
            "metadata.labels" => one(&metadata.labels, key),
            "metadata.annotations" => one(&metadata.annotations, key),
            _ => return Err(NoValue::Subscript(field_path.to_owned())),
        };
        return Ok(value.unwrap_or_default());
    }
    match field_path {
        "metadata.name" => Ok(metadata.name.clone().unwrap_or_default()),
        "metadata.namespace" => Ok(metadata.namespace.clone().unwrap_or_default()),
        "metadata.uid" => Ok(metadata.uid.clone().unwrap_or_default()),
        "metadata.labels" => Ok(lines(metadata.labels.as_ref())),
        "metadata.annotations" => Ok(lines(metadata.annotations.as_ref())),
        _ => Err(NoValue::Field(field_path.to_owned())),
    }
}

/// The value of a container's resource, in the selector's unit, rounded up. The selector names the container, or it
/// is `own`. A limit that the container does not have is what the node has.
pub(super) fn resource_value(
    pod: &Pod,
    own: Option<&Container>,
    selector: &ResourceFieldSelector,
    node: &NodeFacts,
) -> Result<String, NoValue> {
    let container = match selector.container_name.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => find(pod, name).ok_or_else(|| NoValue::Container(name.to_owned()))?,
        None => own.ok_or_else(|| NoValue::Container(String::new()))?,
    };
    let unsupported = || NoValue::Resource(selector.resource.clone());
    let (list, name) = selector.resource.split_once('.').ok_or_else(unsupported)?;
    let is_common = matches!(name, "cpu" | "memory" | "ephemeral-storage");
    if !is_common && !name.starts_with("hugepages-") {
        return Err(unsupported());
    }
    let resources = container.resources.as_ref();
    let own = |list: Option<&BTreeMap<String, Quantity>>| list.and_then(|list| list.get(name)).cloned();
    let value = match list {
        "requests" => own(resources.and_then(|resources| resources.requests.as_ref())),
        "limits" => own(resources.and_then(|resources| resources.limits.as_ref()))
            .filter(|limit| limit.0.parse() != Ok(Amount::ZERO))
            // Huge pages are never promised twice, so a container without a limit has none.
            .or_else(|| {
                if is_common {
                    pod_limit(pod, name).or_else(|| node.allocatable.get(name).cloned())
                } else {
                    None
                }
            }),
        _ => return Err(unsupported()),
    };
    let read = |text: &str| {
        let amount: Amount = text.parse().map_err(|_| NoValue::Quantity(text.to_owned()))?;
        Ok(if name == "cpu" { amount.thousandths() } else { amount.value().into() })
    };
    let value = read(value.as_ref().map_or("0", |value| &value.0))?;
    let divisor = match read(selector.divisor.as_ref().map_or("1", |divisor| &divisor.0))? {
        0 => read("1")?,
        divisor => divisor,
    };
    Ok((value.div_euclid(divisor) + i128::from(value.rem_euclid(divisor) != 0)).to_string())
}

fn pod_limit(pod: &Pod, name: &str) -> Option<Quantity> {
    pod.spec.as_ref()?.resources.as_ref()?.limits.as_ref()?.get(name).cloned()
}

fn find<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    let spec = pod.spec.as_ref()?;
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .find(|container| container.name == name)
}

/// `metadata.labels['a']` is `metadata.labels` and `a`.
fn subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['").filter(|(path, _)| !path.is_empty())
}

/// `key="value"`, one a line.
fn lines(map: Option<&BTreeMap<String, String>>) -> String {
    let lines: Vec<String> =
        map.into_iter().flatten().map(|(key, value)| format!("{key}={}", quoted(value))).collect();
    lines.join("\n")
}

/// A text as Go quotes it, which is what readers of such files expect.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        let _ = match c {
            '"' | '\\' => write!(quoted, "\\{c}"),
            '\u{7}' => write!(quoted, "\\a"),
            '\u{8}' => write!(quoted, "\\b"),
            '\u{c}' => write!(quoted, "\\f"),
            '\n' => write!(quoted, "\\n"),
            '\r' => write!(quoted, "\\r"),
            '\t' => write!(quoted, "\\t"),
            '\u{b}' => write!(quoted, "\\v"),
            c if is_printable(c) => write!(quoted, "{c}"),
            c if c <= '\u{7f}' => write!(quoted, "\\x{:02x}", u32::from(c)),
            c if c <= '\u{ffff}' => write!(quoted, "\\u{:04x}", u32::from(c)),
            c => write!(quoted, "\\U{:08x}", u32::from(c)),
        };
    }
    quoted.push('"');
    quoted
}

fn is_printable(c: char) -> bool {
    // `Debug` escapes what cannot be printed; behind a letter it leaves combining marks as they are, as Go does.
    c == '\'' || !format!("{:?}", format_args!("a{c}").to_string()).contains('\\')
}

#[cfg(test)]
mod tests;
