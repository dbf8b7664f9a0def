//! Ephemeral containers, which are added to a pod that runs by a subresource of its own, and stay as they are.

use serde_json::Value;

use super::super::field::Path;
use super::super::read::{at, has, items, map, name, same, text};
use super::{containers, volumes};
use crate::resource::Cause;

/// What other containers may have and these may not.
const FORBIDDEN: [&str; 7] = [
    "ports",
    "livenessProbe",
    "readinessProbe",
    "startupProbe",
    "lifecycle",
    "resizePolicy",
    "restartPolicy",
];

/// The pod as it was, with the ephemeral containers of the new one.
pub(crate) fn prepare(new: &mut Value, old: &Value) {
    let wanted = at(new, &["spec", "ephemeralContainers"]).clone();
    let managed = at(new, &["metadata", "managedFields"]).clone();
    *new = old.clone();
    if !wanted.is_null() {
        map(new, &["spec"]).insert("ephemeralContainers".to_owned(), wanted);
    }
    if !managed.is_null() {
        map(new, &["metadata"]).insert("managedFields".to_owned(), managed);
    }
}

/// Checks a pod that got ephemeral containers.
pub(crate) fn validate(new: &Value, old: &Value) -> Vec<Cause> {
    let path = Path::new("spec").child("ephemeralContainers");
    let spec = at(new, &["spec"]);
    let (known, _) = volumes::causes(spec, name(new), &Path::new("spec").child("volumes"));
    let mut causes = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    let others = || items(spec, &["containers"]).iter().chain(items(spec, &["initContainers"]));
    for (index, container) in items(spec, &["ephemeralContainers"]).iter().enumerate() {
        let path = path.index(index);
        causes.extend(containers::container_causes(container, &known, &path));
        let name = text(container, &["name"]);
        if names.contains(&name) || others().any(|other| text(other, &["name"]) == name) {
            causes.push(path.child("name").duplicate(name));
        }
        names.push(name);
        let target = text(container, &["targetContainerName"]);
        if !target.is_empty() && !others().any(|other| text(other, &["name"]) == target) {
            causes.push(path.child("targetContainerName").not_found(target));
        }
        let given = FORBIDDEN.iter().filter(|field| has(container, &[field]));
        causes.extend(
            given.map(|field| path.child(field).forbidden("cannot be set for an Ephemeral Container")),
        );
        if at(container, &["resources"]).as_object().is_some_and(|resources| !resources.is_empty()) {
            causes.push(path.child("resources").forbidden("cannot be set for an Ephemeral Container"));
        }
        for (number, mount) in items(container, &["volumeMounts"]).iter().enumerate() {
            for field in
                ["subPath", "subPathExpr"].into_iter().filter(|field| !text(mount, &[field]).is_empty())
            {
                let path = path.child("volumeMounts").index(number).child(field);
                causes.push(path.forbidden("cannot be set for an Ephemeral Container"));
            }
        }
    }
    for before in items(old, &["spec", "ephemeralContainers"]) {
        let name = text(before, &["name"]);
        let after = items(spec, &["ephemeralContainers"]).iter().find(|after| text(after, &["name"]) == name);
        match after {
            None => causes
                .push(path.forbidden(format!("existing ephemeral containers {name:?} may not be removed\n"))),
            Some(after) if !same(after, before) => causes
                .push(path.forbidden(format!("existing ephemeral containers {name:?} may not be changed\n"))),
            Some(_) => {}
        }
    }
    causes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(ephemeral: &Value) -> Value {
        json!({ "metadata": { "name": "p", "labels": { "a": "b" } }, "spec": {
            "containers": [{ "name": "main" }], "ephemeralContainers": ephemeral } })
    }

    fn container(name: &str) -> Value {
        json!({ "name": name, "image": "busybox", "imagePullPolicy": "Always",
            "terminationMessagePolicy": "File", "resources": {} })
    }

    #[test]
    fn only_the_ephemeral_containers_change() {
        let (old, mut new) = (pod(&json!([])), pod(&json!([container("debug")])));
        new["metadata"]["labels"] = json!({});
        new["spec"]["containers"][0]["image"] = "other".into();
        prepare(&mut new, &old);
        assert_eq!(new, pod(&json!([container("debug")])));
        assert_eq!(validate(&new, &old), []);
    }

    #[test]
    fn what_is_not_allowed_is_refused_by_its_field() {
        let with = |field: &str, value: Value| {
            let mut container = container("debug");
            container[field] = value;
            container
        };
        for (ephemeral, before, field) in [
            (json!([container("main")]), json!([]), "spec.ephemeralContainers[0].name"),
            (json!([container("a"), container("a")]), json!([]), "spec.ephemeralContainers[1].name"),
            (
                json!([with("targetContainerName", json!("none"))]),
                json!([]),
                "spec.ephemeralContainers[0].targetContainerName",
            ),
            (
                json!([with("ports", json!([{ "containerPort": 80, "protocol": "TCP" }]))]),
                json!([]),
                "spec.ephemeralContainers[0].ports",
            ),
            (
                json!([with("resources", json!({ "limits": { "cpu": "1" } }))]),
                json!([]),
                "spec.ephemeralContainers[0].resources",
            ),
            (json!([]), json!([container("debug")]), "spec.ephemeralContainers"),
            (json!([with("image", json!("other"))]), json!([container("debug")]), "spec.ephemeralContainers"),
        ] {
            let causes = validate(&pod(&ephemeral), &pod(&before));
            assert!(causes.iter().any(|cause| cause.field == field), "{field} is not in {causes:?}");
        }
        let target = json!([with("targetContainerName", json!("main"))]);
        assert_eq!(validate(&pod(&target), &pod(&json!([]))), []);
    }
}
