//! `/etc/hosts`, `/etc/resolv.conf` and the host name of a pod, as the kubelet writes them.

use std::fmt::Write as _;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Pod, PodSpec};

use super::{PodNetwork, uses_host_network};

/// The longest host name that Linux takes.
const LONGEST_HOSTNAME: usize = 64;
/// What a resolver takes of name servers, of search domains, and of the text of these.
const MOST_SERVERS: usize = 3;
const MOST_SEARCHES: usize = 32;
const LONGEST_SEARCH: usize = 2048;

/// By which names a pod knows itself.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::pods) struct Identity {
    /// What its containers have as their host name.
    pub(in crate::pods) hostname: String,
    /// Its name without a domain.
    name: String,
    /// Its name with the domain of its Service, if it names one.
    full: Option<String>,
}

/// The names of a pod, or why it cannot have them.
pub(in crate::pods) fn identity(pod: &Pod, domain: &str) -> Result<Identity, String> {
    let spec = pod.spec.as_ref();
    let text = |text: Option<&String>| text.filter(|text| !text.is_empty()).cloned();
    let own = text(spec.and_then(|spec| spec.hostname.as_ref())).or(pod.metadata.name.clone());
    // A host name has at most 63 characters, and does not end in a dash or a dot.
    let name: String = own.unwrap_or_default().chars().take(63).collect();
    let name = name.trim_end_matches(['-', '.']).to_owned();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let subdomain = text(spec.and_then(|spec| spec.subdomain.as_ref()));
    let full = subdomain.map(|subdomain| format!("{name}.{subdomain}.{namespace}.svc.{domain}"));
    let wants_full = spec.and_then(|spec| spec.set_hostname_as_fqdn) == Some(true);
    let hostname = match &full {
        Some(full) if wants_full && full.len() > LONGEST_HOSTNAME => {
            return Err(format!(
                "setHostnameAsFQDN: the host name {full} is too long ({LONGEST_HOSTNAME} characters is the max, {} \
                 characters requested)",
                full.len()
            ));
        }
        Some(full) if wants_full => full.clone(),
        _ => name.clone(),
    };
    Ok(Identity { hostname, name, full })
}

/// The text of `/etc/hosts`; `machine` is that of the node's, which pods on its network see.
pub(super) fn hosts(pod: &Pod, identity: &Identity, address: IpAddr, machine: &str) -> String {
    let mut text = if uses_host_network(pod) {
        format!("# Kubernetes-managed hosts file (host network).\n{machine}")
    } else {
        let mut text = "# Kubernetes-managed hosts file.\n\
                        127.0.0.1\tlocalhost\n\
                        ::1\tlocalhost ip6-localhost ip6-loopback\n\
                        fe00::\tip6-localnet\n\
                        fe00::\tip6-mcastprefix\n\
                        fe00::1\tip6-allnodes\n\
                        fe00::2\tip6-allrouters\n"
            .to_owned();
        let names = identity.full.iter().chain([&identity.name]);
        let names: Vec<&str> = names.map(String::as_str).collect();
        let _ = writeln!(text, "{address}\t{}", names.join("\t"));
        text
    };
    let aliases = pod.spec.as_ref().and_then(|spec| spec.host_aliases.as_ref()).into_iter().flatten();
    for (index, alias) in aliases.enumerate() {
        if index == 0 {
            text.push_str("\n# Entries added by HostAliases.\n");
        }
        let names: Vec<&str> = alias.hostnames.iter().flatten().map(String::as_str).collect();
        let _ = writeln!(text, "{}\t{}", alias.ip, names.join("\t"));
    }
    text
}

/// What a file like `/etc/resolv.conf` says.
#[derive(Debug, Default, PartialEq, Eq)]
struct Resolver {
    servers: Vec<String>,
    searches: Vec<String>,
    options: Vec<String>,
}

impl Resolver {
    fn parse(text: &str) -> Self {
        let mut resolver = Self::default();
        for line in text.lines() {
            let mut words = line.split_whitespace().map(str::to_owned);
            match words.next().as_deref() {
                Some("nameserver") => resolver.servers.extend(words.next()),
                // The last line of these counts.
                Some("search" | "domain") => resolver.searches = words.collect(),
                Some("options") => resolver.options.extend(words),
                _ => {}
            }
        }
        resolver
    }

    /// Adds what a pod wants besides; its options win over those of the same name.
    fn add(&mut self, spec: &PodSpec) {
        let Some(wanted) = &spec.dns_config else { return };
        let add = |list: &mut Vec<String>, more: Option<&Vec<String>>| {
            for item in more.into_iter().flatten() {
                if !list.contains(item) {
                    list.push(item.clone());
                }
            }
        };
        add(&mut self.servers, wanted.nameservers.as_ref());
        add(&mut self.searches, wanted.searches.as_ref());
        for option in wanted.options.iter().flatten() {
            let Some(name) = &option.name else { continue };
            self.options.retain(|known| known.split(':').next() != Some(name.as_str()));
            self.options.push(match &option.value {
                Some(value) => format!("{name}:{value}"),
                None => name.clone(),
            });
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut searches: Vec<&str> = Vec::new();
        let mut length = 0;
        for search in self.searches.iter().take(MOST_SEARCHES) {
            length += search.len() + 1;
            if length > LONGEST_SEARCH {
                break;
            }
            searches.push(search);
        }
        if !searches.is_empty() {
            let _ = writeln!(text, "search {}", searches.join(" "));
        }
        for server in self.servers.iter().take(MOST_SERVERS) {
            let _ = writeln!(text, "nameserver {server}");
        }
        if !self.options.is_empty() {
            let _ = writeln!(text, "options {}", self.options.join(" "));
        }
        text
    }
}

/// The text of `/etc/resolv.conf`; `machine` is that of the node's.
pub(super) fn resolver(pod: &Pod, network: &PodNetwork, machine: &str) -> String {
    let spec = pod.spec.clone().unwrap_or_default();
    let on_host = uses_host_network(pod);
    let machine = Resolver::parse(machine);
    let of_cluster = match spec.dns_policy.as_deref() {
        Some("None" | "Default") => None,
        Some("ClusterFirstWithHostNet") => network.nameserver,
        // As the kubelet: a pod on the node's network has the node's names unless it asks for others.
        _ if on_host => None,
        _ => network.nameserver,
    };
    let mut resolver = match of_cluster {
        Some(server) => {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let domain = &network.domain;
            let own = [format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.clone()];
            Resolver {
                servers: vec![server.to_string()],
                searches: own.into_iter().chain(machine.searches).collect(),
                options: vec!["ndots:5".to_owned()],
            }
        }
        None if spec.dns_policy.as_deref() == Some("None") => Resolver::default(),
        None => machine,
    };
    resolver.add(&spec);
    resolver.text()
}

/// The text of `/etc/nsswitch.conf` for a container, if the machine's asks others for names before `/etc/resolv.conf`: these
/// know no names of Services.
pub(super) fn name_services(machine: &str) -> Option<String> {
    let is_hosts = |line: &str| line.trim_start().starts_with("hosts:");
    let line = machine.lines().find(|line| is_hosts(line))?;
    let sources: Vec<&str> = line.split_whitespace().skip(1).take_while(|source| *source != "dns").collect();
    let has_dns = line.split_whitespace().any(|source| source == "dns");
    if has_dns && sources.iter().all(|source| *source == "files") {
        return None;
    }
    let lines = machine.lines().map(|line| if is_hosts(line) { "hosts: files dns" } else { line });
    Some(lines.flat_map(|line| [line, "\n"]).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: &Value) -> Pod {
        let object = json!({ "metadata": { "name": "web-0", "namespace": "shop" }, "spec": spec });
        serde_json::from_value(object).unwrap()
    }

    fn network() -> PodNetwork {
        PodNetwork { nameserver: Some([127, 9, 0, 10].into()), ..PodNetwork::default() }
    }

    const MACHINE: &str =
        "# a comment\nnameserver 192.0.2.1\nsearch example.com\noptions timeout:1 ndots:1\n";

    #[test]
    fn a_pod_of_a_headless_service_knows_its_name() {
        let named = pod(&json!({ "hostname": "web-0", "subdomain": "web", "containers": [] }));
        let own = identity(&named, "cluster.local").unwrap();
        assert_eq!(own.hostname, "web-0");
        let text = hosts(&named, &own, [127, 9, 8, 1].into(), "");
        assert!(text.ends_with("127.9.8.1\tweb-0.web.shop.svc.cluster.local\tweb-0\n"), "{text}");
        let full = pod(&json!({ "subdomain": "web", "setHostnameAsFQDN": true, "containers": [] }));
        assert_eq!(identity(&full, "cluster.local").unwrap().hostname, "web-0.web.shop.svc.cluster.local");
        let long = pod(&json!({ "subdomain": "w".repeat(60), "setHostnameAsFQDN": true, "containers": [] }));
        assert!(
            identity(&long, "cluster.local")
                .unwrap_err()
                .contains("is too long (64 characters is the max, 89")
        );
    }

    #[test]
    fn host_aliases_follow_and_the_machines_names_stay_on_its_network() {
        let aliased = pod(&json!({
            "hostNetwork": true, "containers": [], "hostAliases": [{ "ip": "192.0.2.9", "hostnames": ["a", "b"] }],
        }));
        let names = identity(&aliased, "cluster.local").unwrap();
        let text = hosts(&aliased, &names, [192, 0, 2, 1].into(), "192.0.2.1 machine\n");
        assert!(text.starts_with("# Kubernetes-managed hosts file (host network).\n192.0.2.1 machine\n"));
        assert!(text.ends_with("\n# Entries added by HostAliases.\n192.0.2.9\ta\tb\n"));
    }

    #[test]
    fn policies_choose_the_name_server() {
        let cluster = "search shop.svc.cluster.local svc.cluster.local cluster.local example.com\n\
                       nameserver 127.9.0.10\noptions ndots:5\n";
        let machine = "search example.com\nnameserver 192.0.2.1\noptions timeout:1 ndots:1\n";
        for (spec, expected) in [
            (json!({ "containers": [] }), cluster),
            (json!({ "containers": [], "dnsPolicy": "ClusterFirst" }), cluster),
            (json!({ "containers": [], "dnsPolicy": "ClusterFirst", "hostNetwork": true }), machine),
            (
                json!({ "containers": [], "dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true }),
                cluster,
            ),
            (json!({ "containers": [], "dnsPolicy": "Default" }), machine),
            (
                json!({ "containers": [], "dnsPolicy": "None", "dnsConfig": {
                    "nameservers": ["192.0.2.5"], "searches": ["a.example"], "options": [{ "name": "ndots", "value": "2" }, { "name": "edns0" }],
                } }),
                "search a.example\nnameserver 192.0.2.5\noptions ndots:2 edns0\n",
            ),
            (
                json!({ "containers": [], "dnsPolicy": "Default", "dnsConfig": {
                    "nameservers": ["192.0.2.1", "192.0.2.5"], "options": [{ "name": "ndots", "value": "3" }],
                } }),
                "search example.com\nnameserver 192.0.2.1\nnameserver 192.0.2.5\noptions timeout:1 ndots:3\n",
            ),
        ] {
            assert_eq!(resolver(&pod(&spec), &network(), MACHINE), expected, "{spec}");
        }
        let without = PodNetwork::default();
        assert_eq!(resolver(&pod(&json!({ "containers": [] })), &without, MACHINE), machine);
    }

    #[test]
    fn names_are_asked_of_the_resolver_alone() {
        assert_eq!(name_services("hosts: files dns\n"), None);
        assert_eq!(name_services("hosts:          files dns myhostname\n"), None);
        assert_eq!(name_services(""), None);
        assert_eq!(
            name_services("passwd: files\nhosts: mymachines resolve [!UNAVAIL=return] files dns\n")
                .as_deref(),
            Some("passwd: files\nhosts: files dns\n")
        );
    }
}
