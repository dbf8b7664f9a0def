//! Requests as an authorizer sees them, and the rules that allow them.

use http::Method;
use serde_json::Value;

use crate::deploy::manifests::Manifests;

/// What somebody asks of the API server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Asked {
    pub(crate) verb: String,
    pub(crate) group: String,
    /// With its subresource: `persistentvolumeclaims/status`.
    pub(crate) resource: String,
    /// Empty if in all, or in none.
    pub(crate) namespace: String,
    /// Empty if there is none.
    pub(crate) name: String,
}

impl Asked {
    /// Reads a request; nothing if it is for no resource.
    pub(crate) fn read(method: &Method, path: &str, query: &str) -> Option<Self> {
        let mut parts = path.trim_matches('/').split('/');
        let group = match parts.next()? {
            "api" => String::new(),
            "apis" => parts.next()?.to_owned(),
            _ => return None,
        };
        let _version = parts.next()?;
        let mut rest: Vec<&str> = parts.collect();
        let mut namespace = String::new();
        if rest.len() > 2 && rest[0] == "namespaces" {
            rest[1].clone_into(&mut namespace);
            rest.drain(..2);
        }
        let (resource, name) = ((*rest.first()?).to_owned(), rest.get(1).copied().unwrap_or_default());
        let resource = rest.get(2).map_or(resource.clone(), |sub| format!("{resource}/{sub}"));
        // A list of the objects of one name is authorized by that name.
        let selected = query.split('&').find_map(|pair| {
            pair.strip_prefix("fieldSelector=metadata.name%3D")
                .or_else(|| pair.strip_prefix("fieldSelector=metadata.name="))
        });
        let watched = query.split('&').any(|pair| matches!(pair, "watch=true" | "watch=1"));
        let verb = match (method.as_str(), name.is_empty()) {
            ("GET", true) if watched => "watch",
            ("GET", true) => "list",
            ("GET", false) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", true) => "deletecollection",
            ("DELETE", false) => "delete",
            _ => return None,
        };
        let name = match verb {
            "list" | "watch" | "deletecollection" => selected.unwrap_or_default(),
            _ => name,
        };
        Some(Self { verb: verb.to_owned(), group, resource, namespace, name: name.to_owned() })
    }

    fn kind(&self) -> String {
        kind(&self.verb, &self.group, &self.resource)
    }
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}/{})", self.kind(), self.namespace, self.name)
    }
}

/// A verb on a resource, in one word for tables: `get persistentvolumes`, `list leases.coordination.k8s.io`.
fn kind(verb: &str, group: &str, resource: &str) -> String {
    if group.is_empty() { format!("{verb} {resource}") } else { format!("{verb} {resource}.{group}") }
}

/// One verb on one resource that an account is allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allowed {
    verb: String,
    group: String,
    resource: String,
    /// The namespace; empty means all of them.
    namespace: String,
    /// Every one if empty.
    name: String,
}

impl Allowed {
    /// All that a service account's bindings allow it.
    pub(crate) fn to(account: &str, manifests: &Manifests) -> Vec<Self> {
        let mut all = Vec::new();
        for (binding, role) in [("ClusterRoleBinding", "ClusterRole"), ("RoleBinding", "Role")] {
            for binding in manifests.of_kind(binding) {
                let subjects = binding["subjects"].as_array().unwrap();
                if !subjects.iter().any(|subject| subject["name"] == account) {
                    continue;
                }
                assert_eq!(binding["roleRef"]["kind"], role, "{binding:#}");
                let role = manifests.get(role, binding["roleRef"]["name"].as_str().unwrap());
                let namespace = binding["metadata"]["namespace"].as_str().unwrap_or_default();
                for rule in role["rules"].as_array().unwrap() {
                    all.extend(Self::by(rule, namespace));
                }
            }
        }
        all
    }

    /// All that a ClusterRole allows whoever is bound to it in the whole cluster.
    pub(crate) fn in_role(role: &Value) -> Vec<Self> {
        role["rules"].as_array().unwrap().iter().flat_map(|rule| Self::by(rule, "")).collect()
    }

    /// All that a rule allows in a namespace, or everywhere.
    fn by(rule: &Value, namespace: &str) -> Vec<Self> {
        let words = |field: &str| -> Vec<String> {
            let words = rule[field].as_array().into_iter().flatten();
            words.map(|word| word.as_str().unwrap().to_owned()).collect()
        };
        let mut names = words("resourceNames");
        if names.is_empty() {
            names.push(String::new());
        }
        let mut all = Vec::new();
        for group in words("apiGroups") {
            for resource in words("resources") {
                for verb in words("verbs") {
                    assert!(verb != "*" && resource != "*" && group != "*", "{rule:#}: nothing needs all");
                    for name in &names {
                        all.push(Self {
                            verb: verb.clone(),
                            group: group.clone(),
                            resource: resource.clone(),
                            namespace: namespace.to_owned(),
                            name: name.clone(),
                        });
                    }
                }
            }
        }
        all
    }

    /// Whether this allows a request.
    pub(crate) fn covers(&self, asked: &Asked) -> bool {
        self.verb == asked.verb
            && self.group == asked.group
            && self.resource == asked.resource
            && (self.namespace.is_empty() || self.namespace == asked.namespace)
            && (self.name.is_empty() || self.name == asked.name)
    }

    /// In one word: `get persistentvolumes`.
    pub(crate) fn kind(&self) -> String {
        kind(&self.verb, &self.group, &self.resource)
    }
}

#[test]
fn requests_are_read_as_an_authorizer_reads_them() {
    let storage = "storage.k8s.io";
    for (method, path, query, expected) in [
        (
            Method::GET,
            "/api/v1/persistentvolumes",
            "limit=500",
            Some(("list", "", "persistentvolumes", "", "")),
        ),
        (Method::GET, "/api/v1/nodes", "watch=true&x=y", Some(("watch", "", "nodes", "", ""))),
        (
            Method::GET,
            "/api/v1/nodes",
            "limit=500&fieldSelector=metadata.name%3Da",
            Some(("list", "", "nodes", "", "a")),
        ),
        (Method::GET, "/api/v1/namespaces/a", "", Some(("get", "", "namespaces", "", "a"))),
        (Method::GET, "/api/v1/namespaces/a/pods/b", "", Some(("get", "", "pods", "a", "b"))),
        (Method::POST, "/api/v1/namespaces/a/events", "", Some(("create", "", "events", "a", ""))),
        (
            Method::PATCH,
            "/api/v1/namespaces/a/pods/b/status",
            "",
            Some(("patch", "", "pods/status", "a", "b")),
        ),
        (
            Method::DELETE,
            "/apis/storage.k8s.io/v1/namespaces/a/csistoragecapacities/b",
            "",
            Some(("delete", storage, "csistoragecapacities", "a", "b")),
        ),
        (
            Method::DELETE,
            "/apis/storage.k8s.io/v1/csinodes",
            "",
            Some(("deletecollection", storage, "csinodes", "", "")),
        ),
        (Method::GET, "/apis/storage.k8s.io/v1", "", None),
        (Method::GET, "/version", "", None),
    ] {
        let read = Asked::read(&method, path, query);
        let read = read.as_ref().map(|asked| {
            (
                asked.verb.as_str(),
                asked.group.as_str(),
                asked.resource.as_str(),
                asked.namespace.as_str(),
                asked.name.as_str(),
            )
        });
        assert_eq!(read, expected, "{method} {path}?{query}");
    }
}

#[test]
fn a_rule_covers_its_verbs_resources_names_and_namespace_only() {
    let rule = serde_json::json!({
        "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["leader"],
        "verbs": ["get", "update"],
    });
    let allowed = Allowed::by(&rule, "berth-system");
    let covers = |method: Method, path: &str| {
        let asked = Asked::read(&method, path, "").unwrap();
        allowed.iter().filter(|allowed| allowed.covers(&asked)).count()
    };
    let own = "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases";
    assert_eq!(covers(Method::GET, &format!("{own}/leader")), 1);
    assert_eq!(covers(Method::PUT, &format!("{own}/leader")), 1);
    assert_eq!(covers(Method::PATCH, &format!("{own}/leader")), 0);
    assert_eq!(covers(Method::GET, &format!("{own}/other")), 0);
    assert_eq!(covers(Method::GET, own), 0);
    assert_eq!(covers(Method::GET, "/apis/coordination.k8s.io/v1/namespaces/a/leases/leader"), 0);
    assert_eq!(covers(Method::GET, "/api/v1/namespaces/berth-system/leases/leader"), 0);
}
