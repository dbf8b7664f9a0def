//! Services: defaults, validation, columns, and which of them need an address.
//!
//! The address itself is picked where objects are written (`rest/addresses.rs`), because it depends on all other Services.

use std::net::{IpAddr, Ipv4Addr};

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::field::Path;
use super::names;
use super::read::{
    at, default, default_pointer, has, is_empty, items, items_mut, keep, map, name, number, text,
};
use super::selector::label_causes;
use super::table::{AGE, Column, NAME, labels, string, wide};
use super::{NameRule, Rules, age};
use crate::resource::Cause;

/// What `spec.clusterIP` says of a Service that wants no address.
pub(crate) const HEADLESS: &str = "None";

const CLUSTER_IP: &str = "ClusterIP";
const NODE_PORT: &str = "NodePort";
const LOAD_BALANCER: &str = "LoadBalancer";
const EXTERNAL_NAME: &str = "ExternalName";
const IPV4: &str = "IPv4";
/// How long a client keeps its endpoint, in seconds, if the Service does not say.
const AFFINITY: i64 = 10800;
const LONGEST_AFFINITY: i64 = 86400;
const COLUMNS: &[Column] = &[
    NAME,
    string("Type", "How the Service is reached."),
    string("Cluster-IP", "The address at which it answers, if any."),
    string("External-IP", "Where it is reached from outside."),
    string("Port(s)", "The ports at which it answers."),
    AGE,
    wide("Selector", "Which pods answer."),
];

/// The rules of Services.
pub(super) struct Service;

impl Rules for Service {
    fn default(&self, object: &mut Value) {
        let spec = map(object, &["spec"]);
        default(spec, "sessionAffinity", "None");
        default(spec, "type", CLUSTER_IP);
        default_affinity(spec);
        let kind = spec.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        if kind != EXTERNAL_NAME {
            default_pointer(spec, "internalTrafficPolicy", "Cluster");
        }
        if matches!(kind.as_str(), NODE_PORT | LOAD_BALANCER) {
            default(spec, "externalTrafficPolicy", "Cluster");
        }
        if kind == LOAD_BALANCER {
            default_pointer(spec, "allocateLoadBalancerNodePorts", true);
        }
        for port in items_mut(object, &["spec", "ports"]).filter_map(Value::as_object_mut) {
            default(port, "protocol", "TCP");
            let number = port.get("port").cloned().unwrap_or_default();
            let target = port.get("targetPort").unwrap_or(&Value::Null);
            if is_empty(target) || *target == json!(0) {
                port.insert("targetPort".to_owned(), number);
            }
        }
        default_families(object);
    }

    fn prepare_create(&self, object: &mut Value) {
        map(object, &[]).insert("status".to_owned(), json!({ "loadBalancer": {} }));
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        // A client that leaves the address out means the one that there is.
        if needs_address(new) && needs_address(old) && !has_address(new) {
            for field in ["clusterIP", "clusterIPs"] {
                let value = at(old, &["spec", field]).clone();
                map(new, &["spec"]).insert(field.to_owned(), value);
            }
        }
        if text(new, &["spec", "type"]) == EXTERNAL_NAME && text(old, &["spec", "type"]) != EXTERNAL_NAME {
            let same = |field| at(new, &["spec", field]) == at(old, &["spec", field]);
            let kept: Vec<&str> =
                ["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "internalTrafficPolicy"]
                    .into_iter()
                    .filter(|field| same(field))
                    .collect();
            let spec = map(new, &["spec"]);
            for field in kept {
                spec.remove(field);
            }
        }
        default_families(new);
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let path = Path::new("spec");
        let kind = text(object, &["spec", "type"]);
        let mut causes = kind_causes(object, kind, &path);
        causes.extend(port_causes(object, &path));
        causes.extend(label_causes(at(object, &["spec", "selector"]), &path.child("selector")));
        causes.extend(affinity_causes(object, &path));
        for (index, address) in items(object, &["spec", "externalIPs"]).iter().enumerate() {
            causes.extend(address_cause(address, &path.child("externalIPs").index(index)));
        }
        if !matches!(kind, CLUSTER_IP | NODE_PORT | LOAD_BALANCER | EXTERNAL_NAME) {
            let known = &[CLUSTER_IP, EXTERNAL_NAME, LOAD_BALANCER, NODE_PORT];
            causes.push(path.child("type").not_supported(kind, known));
        }
        let internal = text(object, &["spec", "internalTrafficPolicy"]);
        if !matches!(internal, "" | "Cluster" | "Local") {
            causes.push(path.child("internalTrafficPolicy").not_supported(internal, &["Cluster", "Local"]));
        }
        let external = text(object, &["spec", "externalTrafficPolicy"]);
        let is_external = matches!(kind, NODE_PORT | LOAD_BALANCER);
        if !external.is_empty() && !is_external {
            causes.push(
                path.child("externalTrafficPolicy")
                    .invalid(external, "may only be set for externally-accessible services"),
            );
        } else if is_external && !matches!(external, "Cluster" | "Local") {
            causes.push(path.child("externalTrafficPolicy").not_supported(external, &["Cluster", "Local"]));
        }
        causes.extend(family_causes(object, &path));
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        if needs_address(new) && needs_address(old) {
            let (before, after) = (text(old, &["spec", "clusterIP"]), text(new, &["spec", "clusterIP"]));
            let path = Path::new("spec").child("clusterIPs").index(0);
            let shown = at(new, &["spec", "clusterIPs"]).clone();
            if !before.is_empty() && after.is_empty() {
                causes.push(path.invalid(shown, "primary clusterIP can not be unset"));
            } else if !before.is_empty() && before != after {
                causes.push(path.invalid(shown, "may not change once set"));
            }
        }
        causes.extend(self.validate(new));
        causes
    }

    fn name_rule(&self) -> NameRule {
        NameRule::Label
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&'static str, String)> {
        let mut fields = super::metadata_fields(object);
        fields.push(("spec.clusterIP", text(object, &["spec", "clusterIP"]).to_owned()));
        fields.push(("spec.type", text(object, &["spec", "type"]).to_owned()));
        fields
    }

    fn columns(&self) -> &'static [Column] {
        COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let kind = text(object, &["spec", "type"]);
        let address = text(object, &["spec", "clusterIP"]);
        let external = items(object, &["spec", "externalIPs"]);
        let external: Vec<&str> = external.iter().filter_map(Value::as_str).collect();
        let ingress = items(object, &["status", "loadBalancer", "ingress"]);
        let ingress: Vec<&str> = ingress.iter().map(|entry| text(entry, &["ip"])).collect();
        let external = match kind {
            EXTERNAL_NAME => text(object, &["spec", "externalName"]).to_owned(),
            LOAD_BALANCER if ingress.is_empty() && external.is_empty() => "<pending>".to_owned(),
            _ if external.is_empty() && ingress.is_empty() => "<none>".to_owned(),
            _ => ingress.into_iter().chain(external).collect::<Vec<_>>().join(","),
        };
        let ports: Vec<String> = items(object, &["spec", "ports"]).iter().map(port_cell).collect();
        let ports = if ports.is_empty() { "<none>".to_owned() } else { ports.join(",") };
        vec![
            json!(name(object)),
            json!(kind),
            json!(super::table::or(address, "<none>")),
            json!(external),
            json!(ports),
            json!(age::of(object, now)),
            json!(labels(at(object, &["spec", "selector"]))),
        ]
    }
}

/// Whether a Service is of a type that has an address, be it none by its own wish.
pub(crate) fn needs_address(object: &Value) -> bool {
    matches!(text(object, &["spec", "type"]), CLUSTER_IP | NODE_PORT | LOAD_BALANCER)
}

/// Whether it has an address already, or wants none.
pub(crate) fn has_address(object: &Value) -> bool {
    !text(object, &["spec", "clusterIP"]).is_empty()
}

/// The address that a Service has or asks for.
pub(crate) fn address(object: &Value) -> Option<Ipv4Addr> {
    text(object, &["spec", "clusterIP"]).parse().ok()
}

fn default_affinity(spec: &mut Map<String, Value>) {
    match spec.get("sessionAffinity").and_then(Value::as_str) {
        Some("ClientIP") => {
            let config = spec.entry("sessionAffinityConfig").or_insert(Value::Null);
            if at(config, &["clientIP", "timeoutSeconds"]).is_null() {
                map(config, &["clientIP"]).insert("timeoutSeconds".to_owned(), json!(AFFINITY));
            }
        }
        Some("None") => {
            spec.remove("sessionAffinityConfig");
        }
        _ => {}
    }
}

/// Fills in the one of `clusterIP` and `clusterIPs` that is missing, and the families of addresses.
fn default_families(object: &mut Value) {
    if !needs_address(object) {
        return;
    }
    let is_selectorless = is_empty(at(object, &["spec", "selector"]));
    let spec = map(object, &["spec"]);
    let one = spec.get("clusterIP").and_then(Value::as_str).unwrap_or_default().to_owned();
    let first =
        spec.get("clusterIPs").and_then(|list| list.get(0)).and_then(Value::as_str).map(str::to_owned);
    match (one.is_empty(), first) {
        (false, None) => {
            spec.insert("clusterIPs".to_owned(), json!([one]));
        }
        (true, Some(first)) => {
            spec.insert("clusterIP".to_owned(), json!(first));
        }
        _ => {}
    }
    let headless = spec.get("clusterIP").is_some_and(|address| address == HEADLESS);
    let both = headless && is_selectorless && spec.get("ipFamilyPolicy").is_none_or(Value::is_null);
    default_pointer(spec, "ipFamilyPolicy", if both { "RequireDualStack" } else { "SingleStack" });
    if spec.get("ipFamilies").is_none_or(is_empty) {
        let families = if both { json!([IPV4, "IPv6"]) } else { json!([IPV4]) };
        spec.insert("ipFamilies".to_owned(), families);
    }
}

fn kind_causes(object: &Value, kind: &str, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let headless = text(object, &["spec", "clusterIP"]) == HEADLESS;
    let no_ports = items(object, &["spec", "ports"]).is_empty();
    if no_ports && !headless && kind != EXTERNAL_NAME {
        causes.push(path.child("ports").required(""));
    }
    match kind {
        LOAD_BALANCER | NODE_PORT if headless => {
            let why = format!("may not be set to 'None' for {kind} services");
            causes.push(path.child("clusterIPs").index(0).invalid(HEADLESS, why));
        }
        EXTERNAL_NAME => {
            if has_address(object) || !items(object, &["spec", "clusterIPs"]).is_empty() {
                causes.push(path.child("clusterIPs").forbidden("may not be set for ExternalName services"));
            }
            for field in ["ipFamilies", "ipFamilyPolicy"] {
                if !is_empty(at(object, &["spec", field])) {
                    causes.push(path.child(field).forbidden("may not be set for ExternalName services"));
                }
            }
            let given = text(object, &["spec", "externalName"]);
            let external = given.strip_suffix('.').unwrap_or(given);
            if external.is_empty() {
                causes.push(path.child("externalName").required(""));
            } else {
                causes.extend(path.child("externalName").each_invalid(given, names::subdomain(external)));
            }
        }
        _ => {}
    }
    causes
}

fn port_causes(object: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    let ports = items(object, &["spec", "ports"]);
    let (mut seen_names, mut seen_ports) = (Vec::new(), Vec::new());
    for (index, port) in ports.iter().enumerate() {
        let path = path.child("ports").index(index);
        let name = text(port, &["name"]);
        if name.is_empty() && ports.len() > 1 {
            causes.push(path.child("name").required(""));
        } else if !name.is_empty() {
            causes.extend(path.child("name").each_invalid(name, names::label(name)));
            if seen_names.contains(&name) {
                causes.push(path.child("name").duplicate(name));
            }
            seen_names.push(name);
        }
        let number = number(port, &["port"]).unwrap_or_default();
        causes.extend(port_cause(number, &path.child("port")));
        let protocol = text(port, &["protocol"]);
        if protocol.is_empty() {
            causes.push(path.child("protocol").required(""));
        } else if !matches!(protocol, "TCP" | "UDP" | "SCTP") {
            causes.push(path.child("protocol").not_supported(protocol, &["SCTP", "TCP", "UDP"]));
        }
        match at(port, &["targetPort"]) {
            Value::String(named) => {
                causes.extend(path.child("targetPort").each_invalid(named, names::port(named)));
            }
            number => {
                causes.extend(port_cause(number.as_i64().unwrap_or_default(), &path.child("targetPort")));
            }
        }
        let application = text(port, &["appProtocol"]);
        if !application.is_empty() {
            causes.extend(path.child("appProtocol").each_invalid(application, names::qualified(application)));
        }
        if seen_ports.contains(&(number, protocol)) {
            causes.push(path.duplicate(json!({ "port": number, "protocol": protocol })));
        }
        seen_ports.push((number, protocol));
    }
    causes
}

pub(super) fn port_cause(number: i64, path: &Path) -> Option<Cause> {
    (!(1..=65535).contains(&number)).then(|| path.invalid(number, names::in_range(1, 65535)))
}

pub(super) fn address_cause(address: &Value, path: &Path) -> Option<Cause> {
    let address = address.as_str().unwrap_or_default();
    let why = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
    address.parse::<IpAddr>().is_err().then(|| path.invalid(address, why))
}

fn affinity_causes(object: &Value, path: &Path) -> Vec<Cause> {
    let affinity = text(object, &["spec", "sessionAffinity"]);
    if !matches!(affinity, "None" | "ClientIP") {
        return vec![path.child("sessionAffinity").not_supported(affinity, &["ClientIP", "None"])];
    }
    if affinity == "None" {
        return Vec::new();
    }
    let timeout =
        number(object, &["spec", "sessionAffinityConfig", "clientIP", "timeoutSeconds"]).unwrap_or(0);
    if (1..=LONGEST_AFFINITY).contains(&timeout) {
        return Vec::new();
    }
    let path = path.child("sessionAffinityConfig").child("clientIP").child("timeoutSeconds");
    vec![path.invalid(timeout, format!("must be greater than 0 and less than {LONGEST_AFFINITY}"))]
}

fn family_causes(object: &Value, path: &Path) -> Vec<Cause> {
    if !needs_address(object) {
        return Vec::new();
    }
    let mut causes = Vec::new();
    let policy = text(object, &["spec", "ipFamilyPolicy"]);
    let free =
        text(object, &["spec", "clusterIP"]) == HEADLESS && is_empty(at(object, &["spec", "selector"]));
    if !matches!(policy, "SingleStack" | "PreferDualStack" | "RequireDualStack") {
        let known = &["SingleStack", "PreferDualStack", "RequireDualStack"];
        causes.push(path.child("ipFamilyPolicy").not_supported(policy, known));
    } else if policy == "RequireDualStack" && !free {
        let why = "this cluster is not configured for dual-stack services";
        causes.push(path.child("ipFamilyPolicy").invalid(policy, why));
    }
    for (index, family) in items(object, &["spec", "ipFamilies"]).iter().enumerate() {
        let path = path.child("ipFamilies").index(index);
        match family.as_str() {
            Some(IPV4) => {}
            Some("IPv6") if free => {}
            Some("IPv6") => causes.push(path.invalid("IPv6", "not configured on this cluster")),
            _ => causes.push(path.not_supported(family.clone(), &[IPV4, "IPv6"])),
        }
    }
    let addresses = items(object, &["spec", "clusterIPs"]);
    let list = path.child("clusterIPs");
    for (index, address) in addresses.iter().enumerate() {
        if address != HEADLESS {
            causes.extend(address_cause(address, &list.index(index)));
        }
    }
    if addresses.len() > 1 && !free {
        let why = "may only hold up to 1 value";
        causes.push(list.invalid(Value::Array(addresses.to_vec()), why));
    }
    let one = text(object, &["spec", "clusterIP"]);
    if addresses.first().is_some_and(|first| first != one) {
        causes.push(list.invalid(Value::Array(addresses.to_vec()), "first value must match `clusterIP`"));
    }
    causes
}

fn port_cell(port: &Value) -> String {
    let (number_, protocol) = (number(port, &["port"]).unwrap_or_default(), text(port, &["protocol"]));
    match number(port, &["nodePort"]) {
        Some(node) if node != 0 && has(port, &["nodePort"]) => format!("{number_}:{node}/{protocol}"),
        _ => format!("{number_}/{protocol}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(spec: &Value) -> Value {
        let mut object = json!({ "metadata": { "name": "s" }, "spec": spec });
        Service.default(&mut object);
        object
    }

    fn causes(spec: &Value) -> Vec<String> {
        Service.validate(&made(spec)).into_iter().map(|cause| cause.to_string()).collect()
    }

    #[test]
    fn what_is_left_out_is_filled_in() {
        let object = made(&json!({ "ports": [{ "port": 80 }], "selector": { "a": "b" } }));
        assert_eq!(
            object["spec"],
            json!({
                "type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
                "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "selector": { "a": "b" },
                "ports": [{ "port": 80, "protocol": "TCP", "targetPort": 80 }],
            })
        );
        let object = made(&json!({ "clusterIP": "None", "sessionAffinity": "ClientIP" }));
        assert_eq!(object["spec"]["clusterIPs"], json!(["None"]));
        assert_eq!(object["spec"]["ipFamilyPolicy"], "RequireDualStack");
        assert_eq!(
            object["spec"]["sessionAffinityConfig"],
            json!({ "clientIP": { "timeoutSeconds": 10800 } })
        );
        assert_eq!(Service.validate(&object), []);
        let object = made(&json!({ "type": "ExternalName", "externalName": "example.com" }));
        assert!(object["spec"].get("ipFamilies").is_none() && Service.validate(&object).is_empty());
    }

    #[test]
    fn wrong_services_are_refused() {
        let ports = json!([{ "port": 80 }]);
        for (spec, expected) in [
            (json!({}), "spec.ports: Required value"),
            (
                json!({ "ports": [{ "port": 0 }] }),
                "spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive",
            ),
            (
                json!({ "ports": [{ "port": 1 }, { "port": 2, "name": "b" }] }),
                "spec.ports[0].name: Required value",
            ),
            (
                json!({ "ports": [{ "port": 1, "name": "a" }, { "port": 2, "name": "a" }] }),
                "spec.ports[1].name: Duplicate value: \"a\"",
            ),
            (
                json!({ "ports": ports, "type": "Odd" }),
                "spec.type: Unsupported value: \"Odd\": supported values: \"ClusterIP\", \"ExternalName\", \"LoadBalancer\", \"NodePort\"",
            ),
            (
                json!({ "ports": ports, "type": "NodePort", "clusterIP": "None" }),
                "spec.clusterIPs[0]: Invalid value: \"None\": may not be set to 'None' for NodePort services",
            ),
            (json!({ "type": "ExternalName" }), "spec.externalName: Required value"),
            (
                json!({ "ports": ports, "ipFamilies": ["IPv6"] }),
                "spec.ipFamilies[0]: Invalid value: \"IPv6\": not configured on this cluster",
            ),
            (
                json!({ "ports": ports, "sessionAffinity": "Always" }),
                "spec.sessionAffinity: Unsupported value: \"Always\": supported values: \"ClientIP\", \"None\"",
            ),
            (
                json!({ "ports": ports, "clusterIP": "x" }),
                "spec.clusterIPs[0]: Invalid value: \"x\": must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
            ),
        ] {
            let found = causes(&spec);
            assert!(found.contains(&expected.to_owned()), "{spec}: {found:?}");
        }
    }

    #[test]
    fn an_address_does_not_change_and_may_be_left_out() {
        let ports = json!([{ "port": 80 }]);
        let old = made(&json!({ "ports": ports, "clusterIP": "127.9.0.5" }));
        let mut new = made(&json!({ "ports": ports }));
        Service.prepare_update(&mut new, &old);
        assert_eq!(new["spec"]["clusterIPs"], json!(["127.9.0.5"]));
        assert_eq!(Service.validate_update(&new, &old), []);
        let other = made(&json!({ "ports": ports, "clusterIP": "127.9.0.6" }));
        assert_eq!(
            Service.validate_update(&other, &old)[0].to_string(),
            "spec.clusterIPs[0]: Invalid value: [\"127.9.0.6\"]: may not change once set"
        );
        let mut renamed = old.clone();
        renamed["spec"]["type"] = json!("ExternalName");
        renamed["spec"]["externalName"] = json!("example.com");
        Service.prepare_update(&mut renamed, &old);
        assert!(address(&renamed).is_none());
        assert_eq!(Service.validate_update(&renamed, &old), []);
    }

    #[test]
    fn rows_are_spelled_as_kubectl_shows_them() {
        let object = made(&json!({
            "ports": [{ "port": 80 }, { "port": 53, "protocol": "UDP", "name": "b" }], "clusterIP": "127.9.0.5",
            "selector": { "a": "b" },
        }));
        let cells = Service.cells(&object, Timestamp::UNIX_EPOCH);
        assert_eq!(
            cells[1..5],
            [json!("ClusterIP"), json!("127.9.0.5"), json!("<none>"), json!("80/TCP,53/UDP")]
        );
        assert_eq!(cells[6], "a=b");
    }
}
