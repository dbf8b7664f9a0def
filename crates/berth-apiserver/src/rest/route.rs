//! From a path to what it names.

use std::borrow::Cow;

/// What a path names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/`
    Paths,
    /// `/version`
    Version,
    /// `/healthz`, `/livez` or `/readyz`, perhaps with one check's name.
    Health { which: &'static str, check: Option<String> },
    /// `/metrics`
    Metrics,
    /// `/openapi/v2`
    OpenApiV2,
    /// `/openapi/v3`
    OpenApiV3Index,
    /// `/openapi/v3/apis/G/V`, without the prefix.
    OpenApiV3(String),
    /// `/api`
    CoreVersions,
    /// `/apis`
    Groups,
    /// `/apis/G`
    Group(String),
    /// `/api/v1` or `/apis/G/V`
    Resources { group: String, version: String },
    /// A resource, one of its objects, or what is below that.
    Objects(Target),
    /// The keys that verify service account tokens, and where to find them.
    OpenIdConfiguration,
    /// `/openid/v1/jwks`
    Keys,
}

/// A resource, one of its objects, or a subresource of that.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) group: String,
    pub(crate) version: String,
    /// The old `/watch/` prefix was there.
    pub(crate) watch: bool,
    pub(crate) namespace: Option<String>,
    pub(crate) plural: String,
    pub(crate) name: Option<String>,
    pub(crate) subresource: Option<String>,
}

/// Reads a path; `None` when nothing is served there.
pub(crate) fn parse(path: &str) -> Option<Route> {
    let path = path.strip_prefix('/').unwrap_or(path);
    let path = path.strip_suffix('/').unwrap_or(path);
    let mut parts = Vec::with_capacity(8);
    for part in path.split('/') {
        parts.push(decode(part)?);
    }
    let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
    Some(match parts.as_slice() {
        [""] => Route::Paths,
        ["version"] => Route::Version,
        ["healthz", rest @ ..] => health("healthz", rest)?,
        ["livez", rest @ ..] => health("livez", rest)?,
        ["readyz", rest @ ..] => health("readyz", rest)?,
        ["metrics"] => Route::Metrics,
        ["openapi", "v2"] => Route::OpenApiV2,
        ["openapi", "v3"] => Route::OpenApiV3Index,
        ["openapi", "v3", rest @ ..] => Route::OpenApiV3(rest.join("/")),
        [".well-known", "openid-configuration"] => Route::OpenIdConfiguration,
        ["openid", "v1", "jwks"] => Route::Keys,
        ["api"] => Route::CoreVersions,
        ["apis"] => Route::Groups,
        ["api", version] => Route::Resources { group: String::new(), version: (*version).to_owned() },
        ["apis", group] => Route::Group((*group).to_owned()),
        ["apis", group, version] => {
            Route::Resources { group: (*group).to_owned(), version: (*version).to_owned() }
        }
        ["api", version, rest @ ..] => Route::Objects(target("", version, rest)?),
        ["apis", group, version, rest @ ..] => Route::Objects(target(group, version, rest)?),
        _ => return None,
    })
}

fn health(which: &'static str, rest: &[&str]) -> Option<Route> {
    match rest {
        [] => Some(Route::Health { which, check: None }),
        [check] => Some(Route::Health { which, check: Some((*check).to_owned()) }),
        _ => None,
    }
}

fn target(group: &str, version: &str, rest: &[&str]) -> Option<Target> {
    let (watch, rest) = match rest {
        ["watch", rest @ ..] if !rest.is_empty() => (true, rest),
        rest => (false, rest),
    };
    let mut target =
        Target { group: group.to_owned(), version: version.to_owned(), watch, ..Target::default() };
    // `namespaces/x/status` is the namespace's own; `namespaces/x/pods` lies in it.
    let rest = match rest {
        // Without a name it is not all namespaces, but none.
        ["namespaces", namespace, _, ..] if namespace.is_empty() || namespace.contains('/') => return None,
        ["namespaces", namespace, sub @ ("status" | "finalize")] => {
            "namespaces".clone_into(&mut target.plural);
            target.name = Some((*namespace).to_owned());
            target.subresource = Some((*sub).to_owned());
            return Some(target);
        }
        ["namespaces", namespace, plural, rest @ ..] => {
            target.namespace = Some((*namespace).to_owned());
            (*plural).clone_into(&mut target.plural);
            rest
        }
        [plural, rest @ ..] => {
            (*plural).clone_into(&mut target.plural);
            rest
        }
        [] => return None,
    };
    match rest {
        [] => {}
        [name] => target.name = Some((*name).to_owned()),
        [name, subresource] => {
            target.name = Some((*name).to_owned());
            target.subresource = Some((*subresource).to_owned());
        }
        _ => return None,
    }
    if target.plural.is_empty()
        || target.name.as_deref().is_some_and(|name| name.is_empty() || name.contains('/'))
    {
        return None;
    }
    Some(target)
}

/// Undoes percent encoding; `None` when that is broken or does not give text.
pub(crate) fn decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains('%') {
        return Some(Cow::Borrowed(text));
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'%' {
            let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok())?;
            bytes.push(u8::from_str_radix(hex, 16).ok()?);
            rest = &tail[2..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn objects(path: &str) -> Target {
        match parse(path) {
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
        assert_eq!(
            (finalize.plural.as_str(), finalize.subresource.as_deref()),
            ("namespaces", Some("finalize"))
        );
        let pods = objects("/api/v1/namespaces/a/pods");
        assert_eq!((pods.plural.as_str(), pods.namespace.as_deref()), ("pods", Some("a")));
    }

    #[test]
    fn names_are_decoded_and_broken_ones_lead_nowhere() {
        let role = objects("/apis/rbac.authorization.k8s.io/v1/clusterroles/system%3Anode");
        assert_eq!(role.name.as_deref(), Some("system:node"));
        assert_eq!(parse("/api/v1/pods/%zz"), None);
        assert_eq!(parse("/api/v1/pods/%c3"), None);
        assert_eq!(parse("/nowhere"), None);
        assert_eq!(parse("/api/v1/pods/a/b/c"), None);
        for nameless in
            ["namespaces//pods", "namespaces//pods/a", "namespaces//finalize", "watch/namespaces//pods"]
        {
            assert_eq!(parse(&format!("/api/v1/{nameless}")), None, "{nameless}");
        }
        assert_eq!(parse("/api/v1/namespaces/a%2Fb/pods"), None);
    }
}
