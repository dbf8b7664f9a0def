//! Endpoints and EndpointSlices: where a Service's traffic goes.

use std::net::IpAddr;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::field::Path;
use super::metadata::immutable;
use super::names;
use super::read::{at, default_pointer, items, items_mut, map, name, number, text};
use super::service::{address_cause, port_cause};
use super::table::{AGE, Column, NAME, string};
use super::{Rules, age};
use crate::resource::Cause;

const ENDPOINTS_COLUMNS: &[Column] = &[NAME, string("Endpoints", "Where the traffic goes."), AGE];
const SLICE_COLUMNS: &[Column] = &[
    NAME,
    string("AddressType", "What kind of addresses it holds."),
    string("Ports", "The ports of all its endpoints."),
    string("Endpoints", "The addresses."),
    AGE,
];
/// How many endpoints a cell names.
const SHOWN: usize = 3;
const MOST_ENDPOINTS: usize = 1000;
const MOST_ADDRESSES: usize = 100;
const MOST_PORTS: usize = 20_000;

/// The rules of Endpoints.
pub(super) struct Endpoints;

impl Rules for Endpoints {
    fn default(&self, object: &mut Value) {
        for subset in items_mut(object, &["subsets"]) {
            for port in items_mut(subset, &["ports"]).filter_map(Value::as_object_mut) {
                super::read::default(port, "protocol", "TCP");
            }
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        let mut causes = Vec::new();
        for (index, subset) in items(object, &["subsets"]).iter().enumerate() {
            let path = Path::new("subsets").index(index);
            let (ready, others) = (items(subset, &["addresses"]), items(subset, &["notReadyAddresses"]));
            if ready.is_empty() && others.is_empty() {
                causes.push(path.required("must specify `addresses` or `notReadyAddresses`"));
            }
            for (field, addresses) in [("addresses", ready), ("notReadyAddresses", others)] {
                for (index, address) in addresses.iter().enumerate() {
                    let path = path.child(field).index(index);
                    causes.extend(address_cause(at(address, &["ip"]), &path.child("ip")));
                    causes.extend(hostname_causes(address, &path));
                }
            }
            causes.extend(port_causes(items(subset, &["ports"]), &path.child("ports"), true));
        }
        causes
    }

    fn columns(&self) -> &'static [Column] {
        ENDPOINTS_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let mut all = Vec::new();
        for subset in items(object, &["subsets"]) {
            let ports = items(subset, &["ports"]);
            for address in items(subset, &["addresses"]) {
                let ip = text(address, &["ip"]);
                if ports.is_empty() {
                    all.push(ip.to_owned());
                }
                let number = |port| number(port, &["port"]).unwrap_or_default();
                all.extend(ports.iter().map(|port| format!("{ip}:{}", number(port))));
            }
        }
        vec![json!(name(object)), json!(few(&all, "<none>")), json!(age::of(object, now))]
    }
}

/// The rules of EndpointSlices.
pub(super) struct EndpointSlice;

impl Rules for EndpointSlice {
    fn default(&self, object: &mut Value) {
        for port in items_mut(object, &["ports"]).filter_map(Value::as_object_mut) {
            default_pointer(port, "name", "");
            default_pointer(port, "protocol", "TCP");
        }
        let object = map(object, &[]);
        for field in ["endpoints", "ports"] {
            default_pointer(object, field, json!([]));
        }
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        const TYPES: &[&str] = &["FQDN", "IPv4", "IPv6"];
        let mut causes = Vec::new();
        let kind = text(object, &["addressType"]);
        if kind.is_empty() {
            causes.push(Path::new("addressType").required(""));
        } else if !TYPES.contains(&kind) {
            causes.push(Path::new("addressType").not_supported(kind, TYPES));
        }
        let endpoints = items(object, &["endpoints"]);
        if endpoints.len() > MOST_ENDPOINTS {
            causes.push(Path::new("endpoints").too_many(endpoints.len(), MOST_ENDPOINTS));
            return causes;
        }
        for (index, endpoint) in endpoints.iter().enumerate() {
            let path = Path::new("endpoints").index(index);
            let addresses = items(endpoint, &["addresses"]);
            let list = path.child("addresses");
            match addresses.len() {
                0 => causes.push(list.required("must contain at least 1 address")),
                MOST_ADDRESSES.. if addresses.len() > MOST_ADDRESSES => {
                    causes.push(list.too_many(addresses.len(), MOST_ADDRESSES));
                }
                _ => {}
            }
            for (index, address) in addresses.iter().enumerate() {
                causes.extend(slice_address_causes(kind, address, &list.index(index)));
            }
            causes.extend(hostname_causes(endpoint, &path));
        }
        causes.extend(port_causes(items(object, &["ports"]), &Path::new("ports"), false));
        causes
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        let kind = |object| at(object, &["addressType"]);
        let mut causes = self.validate(new);
        causes.extend(immutable(kind(new), kind(old), &Path::new("addressType")));
        causes
    }

    fn columns(&self) -> &'static [Column] {
        SLICE_COLUMNS
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let port = |port| number(port, &["port"]).map_or_else(|| "*".to_owned(), |port| port.to_string());
        let ports: Vec<String> = items(object, &["ports"]).iter().map(port).collect();
        let addresses = items(object, &["endpoints"]).iter().flat_map(|end| items(end, &["addresses"]));
        let addresses: Vec<String> = addresses.filter_map(Value::as_str).map(str::to_owned).collect();
        vec![
            json!(name(object)),
            json!(text(object, &["addressType"])),
            json!(few(&ports, "<unset>")),
            json!(few(&addresses, "<unset>")),
            json!(age::of(object, now)),
        ]
    }
}

/// The first few of a list, and how many there are more.
fn few(all: &[String], none: &str) -> String {
    if all.is_empty() {
        return none.to_owned();
    }
    let shown = all.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(",");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} + {more} more..."),
    }
}

fn hostname_causes(endpoint: &Value, path: &Path) -> Vec<Cause> {
    match text(endpoint, &["hostname"]) {
        "" => Vec::new(),
        hostname => path.child("hostname").each_invalid(hostname, names::label(hostname)),
    }
}

fn slice_address_causes(kind: &str, address: &Value, path: &Path) -> Vec<Cause> {
    let shown = address.as_str().unwrap_or_default();
    match (kind, shown.parse::<IpAddr>()) {
        ("IPv4", Ok(IpAddr::V6(_))) => vec![path.invalid(shown, "must be an IPv4 address")],
        ("IPv6", Ok(IpAddr::V4(_))) => vec![path.invalid(shown, "must be an IPv6 address")],
        ("IPv4" | "IPv6", _) => address_cause(address, path).into_iter().collect(),
        ("FQDN", _) => path.each_invalid(shown, names::subdomain(shown)),
        _ => Vec::new(),
    }
}

fn port_causes(ports: &[Value], path: &Path, numbered: bool) -> Vec<Cause> {
    if ports.len() > MOST_PORTS {
        return vec![path.too_many(ports.len(), MOST_PORTS)];
    }
    let mut causes = Vec::new();
    let mut seen = Vec::new();
    for (index, port) in ports.iter().enumerate() {
        let path = path.index(index);
        let name = text(port, &["name"]);
        if name.is_empty() && numbered && ports.len() > 1 {
            causes.push(path.child("name").required(""));
        }
        if !name.is_empty() {
            causes.extend(path.child("name").each_invalid(name, names::label(name)));
        }
        if !numbered && seen.contains(&name) {
            causes.push(path.child("name").duplicate(name));
        }
        seen.push(name);
        let protocol = text(port, &["protocol"]);
        if !matches!(protocol, "TCP" | "UDP" | "SCTP") {
            causes.push(path.child("protocol").not_supported(protocol, &["SCTP", "TCP", "UDP"]));
        }
        match number(port, &["port"]) {
            None if !numbered => {}
            port => causes.extend(port_cause(port.unwrap_or_default(), &path.child("port"))),
        }
    }
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(kind: &str, addresses: &Value) -> Value {
        let mut object = json!({ "addressType": kind, "endpoints": [{ "addresses": addresses }] });
        EndpointSlice.default(&mut object);
        object
    }

    #[test]
    fn wrong_slices_are_refused() {
        let text = |object: &Value| {
            EndpointSlice.validate(object).into_iter().map(|cause| cause.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(text(&slice("IPv4", &json!(["127.1.2.3"]))), [] as [&str; 0]);
        assert_eq!(
            text(&slice("IPv4", &json!([]))),
            ["endpoints[0].addresses: Required value: must contain at least 1 address"]
        );
        assert_eq!(
            text(&slice("IPv6", &json!(["127.1.2.3"]))),
            ["endpoints[0].addresses[0]: Invalid value: \"127.1.2.3\": must be an IPv6 address"]
        );
        assert_eq!(text(&slice("", &json!(["a"]))), ["addressType: Required value"]);
        let mut ports = slice("IPv4", &json!(["127.1.2.3"]));
        ports["ports"] =
            json!([{ "name": "a", "port": 0, "protocol": "TCP" }, { "name": "a", "protocol": "TCP" }]);
        assert_eq!(
            text(&ports),
            [
                "ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive",
                "ports[1].name: Duplicate value: \"a\"",
            ]
        );
        let (old, new) = (slice("IPv4", &json!(["127.1.2.3"])), slice("FQDN", &json!(["a.example"])));
        assert_eq!(EndpointSlice.validate_update(&new, &old).len(), 1);
    }

    #[test]
    fn wrong_endpoints_are_refused() {
        let text = |subset: Value| {
            let mut object = json!({ "subsets": [subset] });
            Endpoints.default(&mut object);
            Endpoints.validate(&object).into_iter().map(|cause| cause.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(
            text(json!({ "addresses": [{ "ip": "127.1.2.3" }], "ports": [{ "port": 1 }] })),
            [] as [&str; 0]
        );
        assert_eq!(
            text(json!({})),
            ["subsets[0]: Required value: must specify `addresses` or `notReadyAddresses`"]
        );
        assert_eq!(text(json!({ "notReadyAddresses": [{ "ip": "x" }] })).len(), 1);
    }

    #[test]
    fn rows_name_the_first_few() {
        let object = json!({ "subsets": [{
            "addresses": [{ "ip": "127.0.0.1" }, { "ip": "127.0.0.2" }],
            "ports": [{ "port": 1 }, { "port": 2 }],
        }] });
        assert_eq!(
            Endpoints.cells(&object, Timestamp::UNIX_EPOCH)[1],
            "127.0.0.1:1,127.0.0.1:2,127.0.0.2:1 + 1 more..."
        );
        assert_eq!(
            EndpointSlice.cells(&slice("IPv4", &json!(["127.0.0.1"])), Timestamp::UNIX_EPOCH)[2],
            "<unset>"
        );
    }
}
