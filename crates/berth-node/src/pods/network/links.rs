//! The variables that name the Services of a pod's namespace (`enableServiceLinks`), as the kubelet sets them.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, Service};

/// The variables of the Services that have an address, in the order of their names.
pub(in crate::pods) fn service_links(pod: &Pod, services: &[Arc<Service>]) -> Vec<(String, String)> {
    if pod.spec.as_ref().is_some_and(|spec| spec.enable_service_links == Some(false)) {
        return Vec::new();
    }
    let mut services: Vec<&Arc<Service>> = services.iter().collect();
    services.sort_by(|one, other| one.metadata.name.cmp(&other.metadata.name));
    services.into_iter().flat_map(|service| links(service)).collect()
}

fn links(service: &Service) -> Vec<(String, String)> {
    let upper = |text: &str| text.to_uppercase().replace('-', "_");
    let spec = service.spec.clone().unwrap_or_default();
    let address = spec.cluster_ip.filter(|address| !address.is_empty() && address != "None");
    let (Some(address), Some(name)) = (address, service.metadata.name.as_deref()) else { return Vec::new() };
    let name = upper(name);
    let ports = spec.ports.unwrap_or_default();
    let Some(first) = ports.first() else { return Vec::new() };
    let protocol = |port: &k8s_openapi::api::core::v1::ServicePort| {
        port.protocol.as_deref().unwrap_or("TCP").to_lowercase()
    };
    let mut all = vec![
        (format!("{name}_SERVICE_HOST"), address.clone()),
        (format!("{name}_SERVICE_PORT"), first.port.to_string()),
    ];
    for port in &ports {
        if let Some(port_name) = port.name.as_deref().filter(|name| !name.is_empty()) {
            all.push((format!("{name}_SERVICE_PORT_{}", upper(port_name)), port.port.to_string()));
        }
    }
    all.push((format!("{name}_PORT"), format!("{}://{address}:{}", protocol(first), first.port)));
    for port in &ports {
        let (number, protocol) = (port.port, protocol(port));
        let prefix = format!("{name}_PORT_{number}_{}", protocol.to_uppercase());
        all.push((prefix.clone(), format!("{protocol}://{address}:{number}")));
        all.push((format!("{prefix}_PROTO"), protocol));
        all.push((format!("{prefix}_PORT"), number.to_string()));
        all.push((format!("{prefix}_ADDR"), address.clone()));
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn services_with_an_address_are_named() {
        let service = |spec| {
            let object = json!({ "metadata": { "name": "my-db" }, "spec": spec });
            Arc::new(serde_json::from_value::<Service>(object).unwrap())
        };
        let with = service(json!({ "clusterIP": "127.9.0.5", "ports": [{ "port": 5432, "name": "sql" }] }));
        let pod = Pod::default();
        let set = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            service_links(&pod, std::slice::from_ref(&with)),
            [
                set("MY_DB_SERVICE_HOST", "127.9.0.5"),
                set("MY_DB_SERVICE_PORT", "5432"),
                set("MY_DB_SERVICE_PORT_SQL", "5432"),
                set("MY_DB_PORT", "tcp://127.9.0.5:5432"),
                set("MY_DB_PORT_5432_TCP", "tcp://127.9.0.5:5432"),
                set("MY_DB_PORT_5432_TCP_PROTO", "tcp"),
                set("MY_DB_PORT_5432_TCP_PORT", "5432"),
                set("MY_DB_PORT_5432_TCP_ADDR", "127.9.0.5"),
            ]
        );
        let headless = service(json!({ "clusterIP": "None", "ports": [{ "port": 5432 }] }));
        assert_eq!(service_links(&pod, &[headless]), []);
        let without: Pod =
            serde_json::from_value(json!({ "spec": { "containers": [], "enableServiceLinks": false } }))
                .unwrap();
        assert_eq!(service_links(&without, &[with]), []);
    }
}
