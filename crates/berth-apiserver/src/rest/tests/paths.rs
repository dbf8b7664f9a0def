//! What a path names.

use super::super::{Route, Target, parse_path};

fn objects(path: &str) -> Target {
    match parse_path(path) {
        Some(Route::Objects(target)) => target,
        other => panic!("{path}: {other:?}"),
    }
}

#[test]
fn a_path_names_a_collection_an_object_or_a_subresource() {
    let all = objects("/api/v1/persistentvolumeclaims");
    assert_eq!((all.plural.as_str(), all.namespace, all.name), ("persistentvolumeclaims", None, None));
    let one = objects("/apis/apps/v1/namespaces/a/statefulsets/b/scale");
    assert_eq!((one.group.as_str(), one.version.as_str()), ("apps", "v1"));
    assert_eq!((one.namespace.as_deref(), one.name.as_deref()), (Some("a"), Some("b")));
    assert_eq!(one.subresource.as_deref(), Some("scale"));
}

#[test]
fn a_namespace_has_subresources_and_holds_resources() {
    let namespace = objects("/api/v1/namespaces/a");
    assert_eq!((namespace.plural.as_str(), namespace.name.as_deref()), ("namespaces", Some("a")));
    let finalize = objects("/api/v1/namespaces/a/finalize");
    assert_eq!((finalize.plural.as_str(), finalize.subresource.as_deref()), ("namespaces", Some("finalize")));
    let pods = objects("/api/v1/namespaces/a/pods");
    assert_eq!((pods.plural.as_str(), pods.namespace.as_deref()), ("pods", Some("a")));
}

#[test]
fn names_are_decoded_and_broken_ones_lead_nowhere() {
    let role = objects("/apis/rbac.authorization.k8s.io/v1/clusterroles/system%3Anode");
    assert_eq!(role.name.as_deref(), Some("system:node"));
    assert_eq!(parse_path("/api/v1/pods/%zz"), None);
    assert_eq!(parse_path("/api/v1/pods/%c3"), None);
    assert_eq!(parse_path("/nowhere"), None);
    assert_eq!(parse_path("/api/v1/pods/a/b/c"), None);
    for nameless in
        ["namespaces//pods", "namespaces//pods/a", "namespaces//finalize", "watch/namespaces//pods"]
    {
        assert_eq!(parse_path(&format!("/api/v1/{nameless}")), None, "{nameless}");
    }
    assert_eq!(parse_path("/api/v1/namespaces/a%2Fb/pods"), None);
}
