//! Checks of a pod's containers: names, images, ports, environment, mounts, resources, probes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::super::field::Path;
use super::super::quantity;
use super::super::read::{at, entries, flag, has, items, number, text};
use super::super::{names, sources};
use crate::resource::Cause;

const PULL: [&str; 3] = ["Always", "IfNotPresent", "Never"];
const PROTOCOLS: [&str; 3] = ["SCTP", "TCP", "UDP"];
const PROPAGATIONS: [&str; 3] = ["Bidirectional", "HostToContainer", "None"];
const INIT_ONLY: &str = "may not be set for init containers without restartPolicy=Always";

type Volumes<'a> = BTreeMap<&'a str, &'a Value>;

/// Checks all containers of a pod's spec.
pub(super) fn causes(spec: &Value, volumes: &Volumes<'_>, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut seen = BTreeSet::new();
    let containers = items(spec, &["containers"]);
    if containers.is_empty() {
        causes.push(path.child("containers").required(""));
    }
    for (index, container) in containers.iter().enumerate() {
        let path = path.child("containers").index(index);
        causes.extend(container_causes(container, volumes, &path));
        let name = text(container, &["name"]);
        if !seen.insert(name) {
            causes.push(path.child("name").duplicate(name));
        }
        causes.extend(probe_causes(container, &path));
    }
    for (index, container) in items(spec, &["initContainers"]).iter().enumerate() {
        let path = path.child("initContainers").index(index);
        causes.extend(container_causes(container, volumes, &path));
        let name = text(container, &["name"]);
        if !seen.insert(name) {
            causes.push(path.child("name").duplicate(name));
        }
        if text(container, &["restartPolicy"]) == "Always" {
            causes.extend(probe_causes(container, &path));
        } else {
            let early = ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"];
            let given = early.iter().filter(|field| has(container, &[field]));
            causes.extend(given.map(|field| path.child(field).forbidden(INIT_ONLY)));
        }
    }
    causes
}

pub(super) fn container_causes(container: &Value, volumes: &Volumes<'_>, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    match text(container, &["name"]) {
        "" => causes.push(path.child("name").required("")),
        name => causes.extend(path.child("name").each_invalid(name, names::label(name))),
    }
    let image = text(container, &["image"]);
    if image.is_empty() {
        causes.push(path.child("image").required(""));
    } else if image.trim().len() != image.len() {
        let detail = "must not have leading or trailing whitespace";
        causes.push(path.child("image").invalid(image, detail));
    }
    match text(container, &["terminationMessagePolicy"]) {
        "File" | "FallbackToLogsOnError" => {}
        "" => causes.push(path.child("terminationMessagePolicy").required("")),
        other => {
            let path = path.child("terminationMessagePolicy");
            causes.push(path.not_supported(other, &["File", "FallbackToLogsOnError"]));
        }
    }
    causes.extend(port_causes(container, &path.child("ports")));
    causes.extend(variable_causes(container, &path.child("env")));
    causes.extend(mount_causes(container, volumes, &path.child("volumeMounts")));
    causes.extend(device_causes(container, volumes, &path.child("volumeDevices")));
    match text(container, &["imagePullPolicy"]) {
        "" => causes.push(path.child("imagePullPolicy").required("")),
        policy if PULL.contains(&policy) => {}
        other => causes.push(path.child("imagePullPolicy").not_supported(other, &PULL)),
    }
    causes.extend(resource_causes(at(container, &["resources"]), &path.child("resources")));
    causes
}

fn port_causes(container: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut seen = BTreeSet::new();
    for (index, port) in items(container, &["ports"]).iter().enumerate() {
        let path = path.index(index);
        let name = text(port, &["name"]);
        if !name.is_empty() {
            let complaints = names::port(name);
            if complaints.is_empty() && !seen.insert(name) {
                causes.push(path.child("name").duplicate(name));
            }
            causes.extend(path.child("name").each_invalid(name, complaints));
        }
        let range = || names::in_range(1, 65535);
        match number(port, &["containerPort"]).unwrap_or_default() {
            0 => causes.push(path.child("containerPort").required("")),
            1..=65535 => {}
            number => causes.push(path.child("containerPort").invalid(number, range())),
        }
        match number(port, &["hostPort"]).unwrap_or_default() {
            0..=65535 => {}
            number => causes.push(path.child("hostPort").invalid(number, range())),
        }
        match text(port, &["protocol"]) {
            "" => causes.push(path.child("protocol").required("")),
            protocol if PROTOCOLS.contains(&protocol) => {}
            other => causes.push(path.child("protocol").not_supported(other, &PROTOCOLS)),
        }
    }
    causes
}

fn variable_causes(container: &Value, path: &Path) -> Vec<Cause> {
    const SOURCES: [&str; 5] =
        ["fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"];
    let mut causes = Vec::new();
    for (index, variable) in items(container, &["env"]).iter().enumerate() {
        let path = path.index(index);
        match text(variable, &["name"]) {
            "" => causes.push(path.child("name").required("")),
            name => causes.extend(path.child("name").each_invalid(name, names::variable(name))),
        }
        let source = at(variable, &["valueFrom"]);
        if source.is_null() {
            continue;
        }
        let path = path.child("valueFrom");
        for reference in ["configMapKeyRef", "secretKeyRef"] {
            if !has(source, &[reference]) {
                continue;
            }
            let path = path.child(reference);
            if text(source, &[reference, "name"]).is_empty() {
                causes.push(path.child("name").required(""));
            }
            match text(source, &[reference, "key"]) {
                "" => causes.push(path.child("key").required("")),
                key => causes.extend(path.child("key").each_invalid(key, names::config_key(key))),
            }
        }
        if has(source, &["fieldRef"]) && text(source, &["fieldRef", "fieldPath"]).is_empty() {
            causes.push(path.child("fieldRef").child("fieldPath").required(""));
        }
        let given = SOURCES.iter().filter(|name| has(source, &[name])).count();
        if given == 0 {
            let detail = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`";
            causes.push(path.invalid("", detail));
        } else if !text(variable, &["value"]).is_empty() {
            causes.push(path.invalid("", "may not be specified when `value` is not empty"));
        } else if given > 1 {
            causes.push(path.invalid("", "may not have more than one field specified at a time"));
        }
    }
    causes
}

fn mount_causes(container: &Value, volumes: &Volumes<'_>, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut points = BTreeSet::new();
    let devices = items(container, &["volumeDevices"]);
    let privileged = flag(container, &["securityContext", "privileged"]);
    for (index, mount) in items(container, &["volumeMounts"]).iter().enumerate() {
        let within = path.index(index);
        let (name, point) = (text(mount, &["name"]), text(mount, &["mountPath"]));
        if name.is_empty() {
            causes.push(within.child("name").required(""));
        }
        if !volumes.contains_key(name) {
            causes.push(within.child("name").not_found(name));
        }
        if point.is_empty() {
            causes.push(within.child("mountPath").required(""));
        }
        if !points.insert(point) {
            causes.push(within.child("mountPath").invalid(point, "must be unique"));
        }
        if devices.iter().any(|device| text(device, &["name"]) == name) {
            causes.push(within.child("name").invalid(name, "must not already exist in volumeDevices"));
        }
        if devices.iter().any(|device| text(device, &["devicePath"]) == point) {
            let detail = "must not already exist as a path in volumeDevices";
            causes.push(within.child("mountPath").invalid(point, detail));
        }
        let (sub, expression) = (text(mount, &["subPath"]), text(mount, &["subPathExpr"]));
        // Upstream leaves the index out from here on.
        causes.extend(sources::descending(sub, &path.child("subPath")));
        if !expression.is_empty() && !sub.is_empty() {
            let detail = "subPathExpr and subPath are mutually exclusive";
            causes.push(within.child("subPathExpr").invalid(expression, detail));
        }
        causes.extend(sources::descending(expression, &path.child("subPathExpr")));
        causes.extend(propagation_causes(mount, privileged, path));
    }
    causes
}

fn propagation_causes(mount: &Value, privileged: bool, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let propagation = text(mount, &["mountPropagation"]);
    if has(mount, &["mountPropagation"]) {
        let path = path.child("mountPropagation");
        if !PROPAGATIONS.contains(&propagation) {
            causes.push(path.not_supported(propagation, &PROPAGATIONS));
        }
        if propagation == "Bidirectional" && !privileged {
            let detail = "Bidirectional mount propagation is available only to privileged containers";
            causes.push(path.forbidden(detail));
        }
    }
    let path = path.child("recursiveReadOnly");
    match text(mount, &["recursiveReadOnly"]) {
        "" | "Disabled" => {}
        "Enabled" | "IfPossible" => {
            if !flag(mount, &["readOnly"]) {
                causes.push(path.forbidden("may only be specified when readOnly is true"));
            }
            if !matches!(propagation, "" | "None") {
                let detail = "may only be specified when mountPropagation is None or not specified";
                causes.push(path.forbidden(detail));
            }
        }
        other => causes.push(path.not_supported(other, &["Disabled", "Enabled", "IfPossible"])),
    }
    causes
}

fn device_causes(container: &Value, volumes: &Volumes<'_>, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let (mut taken_names, mut taken_paths) = (BTreeSet::new(), BTreeSet::new());
    let mounts = items(container, &["volumeMounts"]);
    for (index, device) in items(container, &["volumeDevices"]).iter().enumerate() {
        let path = path.index(index);
        let (name, point) = (text(device, &["name"]), text(device, &["devicePath"]));
        if name.is_empty() {
            causes.push(path.child("name").required(""));
        }
        if !name.is_empty() && !taken_names.insert(name) {
            causes.push(path.child("name").invalid(name, "must be unique"));
        }
        match volumes.get(name) {
            Some(volume) if !has(volume, &["persistentVolumeClaim"]) && !has(volume, &["ephemeral"]) => {
                let detail =
                    "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                causes.push(path.child("name").invalid(name, detail));
            }
            Some(_) => {}
            None => causes.push(path.child("name").not_found(name)),
        }
        if point.is_empty() {
            causes.push(path.child("devicePath").required(""));
        }
        if point.split('/').any(|part| part == "..") {
            causes.push(path.child("devicePath").invalid(point, "can not contain backsteps ('..')"));
        } else if !taken_paths.insert(point) {
            causes.push(path.child("devicePath").invalid(point, "must be unique"));
        }
        if mounts.iter().any(|mount| text(mount, &["name"]) == name) {
            causes.push(path.child("name").invalid(name, "must not already exist in volumeMounts"));
        }
        if mounts.iter().any(|mount| text(mount, &["mountPath"]) == point) {
            let detail = "must not already exist as a path in volumeMounts";
            causes.push(path.child("devicePath").invalid(point, detail));
        }
    }
    causes
}

fn resource_causes(resources: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let limits = at(resources, &["limits"]);
    for list in ["limits", "requests"] {
        let list_path = path.child(list);
        for (resource, value) in entries(resources, &[list]) {
            let path = list_path.key(resource);
            causes.extend(resource_name_causes(resource, &path));
            let quantity = match quantity::from_value(value) {
                Ok(quantity) => quantity,
                Err(error) => {
                    causes.push(path.invalid(value.clone(), error.to_string()));
                    continue;
                }
            };
            if quantity.is_negative() {
                causes.push(path.invalid(quantity.to_string(), "must be greater than or equal to 0"));
            }
            let limit = quantity::from_value(at(limits, &[resource]));
            if let Ok(limit) = limit
                && list == "requests"
                && quantity > limit
            {
                let detail = format!("must be less than or equal to {resource} limit of {limit}");
                causes.push(list_path.invalid(quantity.to_string(), detail));
            }
        }
    }
    causes
}

fn resource_name_causes(resource: &str, path: &Path) -> Vec<Cause> {
    let causes = path.each_invalid(resource, names::qualified(resource));
    if !causes.is_empty() || resource.contains('/') {
        return causes;
    }
    let standard =
        matches!(resource, "cpu" | "memory" | "ephemeral-storage") || resource.starts_with("hugepages-");
    if standard {
        return Vec::new();
    }
    vec![
        path.invalid(resource, "must be a standard resource type or fully qualified"),
        path.invalid(resource, "must be a standard resource for containers"),
    ]
}

fn probe_causes(container: &Value, path: &Path) -> Vec<Cause> {
    const HANDLERS: [&str; 4] = ["exec", "httpGet", "tcpSocket", "grpc"];
    let mut causes = Vec::new();
    for kind in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let probe = at(container, &[kind]);
        if probe.is_null() {
            continue;
        }
        let path = path.child(kind);
        let given: Vec<&&str> = HANDLERS.iter().filter(|handler| has(probe, &[handler])).collect();
        causes.extend(
            given
                .iter()
                .skip(1)
                .map(|handler| path.child(handler).forbidden("may not specify more than 1 handler type")),
        );
        if given.is_empty() {
            causes.push(path.required("must specify a handler type"));
        }
        if has(probe, &["exec"]) && items(probe, &["exec", "command"]).is_empty() {
            causes.push(path.child("exec").child("command").required(""));
        }
        for handler in ["httpGet", "tcpSocket"] {
            let port = at(probe, &[handler, "port"]);
            let number = port.as_i64().unwrap_or_default();
            if has(probe, &[handler]) && !port.is_string() && !(1..=65535).contains(&number) {
                let path = path.child(handler).child("port");
                causes.push(path.invalid(number, names::in_range(1, 65535)));
            }
        }
        for field in
            ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"]
        {
            if let Some(value) = number(probe, &[field]).filter(|value| *value < 0) {
                causes.push(path.child(field).invalid(value, "must be greater than or equal to 0"));
            }
        }
        if let Some(threshold) = number(probe, &["successThreshold"])
            && kind != "readinessProbe"
            && threshold != 1
        {
            causes.push(path.child("successThreshold").invalid(threshold, "must be 1"));
        }
    }
    causes
}
