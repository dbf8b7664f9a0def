//! What is to be done about an object whose owners, or whose namespace, go: pure decisions.

use serde_json::Value;

use crate::rules::namespace::KUBERNETES;
use crate::rules::read::{at, flag, has, items, text};
use crate::store::Key;

/// Keeps an owner until its dependents are gone.
pub(super) const FOREGROUND: &str = "foregroundDeletion";
/// Keeps an owner until its dependents have forgotten it.
pub(super) const ORPHAN: &str = "orphan";
const PODS: &str = "pods";

/// An object as far as owners matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) key: Key,
    pub(super) uid: String,
    /// The resource version at which the object was read; it becomes a precondition of the steps on this object.
    pub(super) version: String,
    pub(super) owners: Vec<Owner>,
    /// It is marked to be deleted.
    pub(super) deleting: bool,
    /// It waits until its dependents are gone.
    pub(super) foreground: bool,
    /// It waits until its dependents have forgotten it.
    pub(super) orphan: bool,
}

/// A reference to an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) group: String,
    pub(super) version: String,
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) uid: String,
    /// The owner cannot go before this dependent.
    pub(super) blocks: bool,
}

/// What became of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnerState {
    /// The owner exists, and does not wait for its dependents.
    Solid,
    /// It is there, and waits for its dependents to go.
    Waiting,
    /// It is not there any more.
    Dangling,
    /// It is not known: its kind is not served, or its record may be lost.
    Unknown,
}

/// How dependents are treated when their owner is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    Background,
    Foreground,
    Orphan,
}

/// The object that was decided about: another of the same name is none of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) key: Key,
    pub(super) uid: String,
    /// Its resource version when it was decided.
    pub(super) version: String,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Delete the object, if it is still as it was.
    Delete { target: Target, policy: Policy },
    /// Take references to these owners away.
    DropOwners { target: Target, owners: Vec<String> },
    /// Let the object's owners go before it does.
    Unblock { target: Target },
    /// Take a finalizer away.
    DropFinalizer { target: Target, finalizer: &'static str },
    /// Decide about this one, too.
    Visit { key: Key },
    /// Take the namespace's own finalizer away.
    Finalize { namespace: String },
    /// Give the namespace what every namespace has.
    NamespaceDefaults { namespace: String },
}

impl Item {
    /// Reads from an object's metadata what decides about its collection.
    pub(super) fn read(key: &Key, object: &Value) -> Self {
        let metadata = at(object, &["metadata"]);
        let owners = items(metadata, &["ownerReferences"])
            .iter()
            .map(|owner| {
                let (group, version) = group_and_version(text(owner, &["apiVersion"]));
                Owner {
                    group: group.to_owned(),
                    version: version.to_owned(),
                    kind: text(owner, &["kind"]).to_owned(),
                    name: text(owner, &["name"]).to_owned(),
                    uid: text(owner, &["uid"]).to_owned(),
                    blocks: flag(owner, &["blockOwnerDeletion"]),
                }
            })
            .collect();
        let finalizer =
            |name: &str| items(metadata, &["finalizers"]).iter().any(|f| f.as_str() == Some(name));
        Self {
            key: key.clone(),
            uid: text(metadata, &["uid"]).to_owned(),
            version: text(metadata, &["resourceVersion"]).to_owned(),
            owners,
            deleting: has(metadata, &["deletionTimestamp"]),
            foreground: finalizer(FOREGROUND),
            orphan: finalizer(ORPHAN),
        }
    }

    /// The object as it was read.
    pub(super) fn target(&self) -> Target {
        Target { key: self.key.clone(), uid: self.uid.clone(), version: self.version.clone() }
    }

    /// Whether it names the owner with this uid.
    pub(super) fn depends_on(&self, owner: &str) -> bool {
        self.owners.iter().any(|reference| reference.uid == owner)
    }

    fn blocks(&self, owner: &str) -> bool {
        self.owners.iter().any(|reference| reference.uid == owner && reference.blocks)
    }

    /// How to delete it so that what its finalizers say of its dependents stays true.
    fn policy(&self) -> Policy {
        match (self.orphan, self.foreground) {
            (true, _) => Policy::Orphan,
            (false, true) => Policy::Foreground,
            (false, false) => Policy::Background,
        }
    }
}

/// The two parts of an `apiVersion`; the core group has no name.
pub(super) fn group_and_version(api_version: &str) -> (&str, &str) {
    api_version.rsplit_once('/').unwrap_or(("", api_version))
}

/// What to do about an object, given what became of its owners (in their order) and who depends on it.
pub(super) fn decide(item: &Item, owners: &[OwnerState], dependents: &[Item]) -> Vec<Step> {
    if item.deleting {
        return decide_deleting(item, dependents);
    }
    let target = item.target();
    if item.owners.is_empty() || owners.contains(&OwnerState::Unknown) {
        return Vec::new();
    }
    let in_state = |states: &[OwnerState]| -> Vec<String> {
        let matching = item.owners.iter().zip(owners).filter(|(_, state)| states.contains(state));
        matching.map(|(owner, _)| owner.uid.clone()).collect()
    };
    let going = in_state(&[OwnerState::Waiting, OwnerState::Dangling]);
    if owners.contains(&OwnerState::Solid) {
        return if going.is_empty() { Vec::new() } else { vec![Step::DropOwners { target, owners: going }] };
    }
    if owners.contains(&OwnerState::Waiting) && !dependents.is_empty() {
        // Two that wait for each other would wait for ever. It is deleted once it holds nobody back.
        if item.owners.iter().any(|owner| owner.blocks)
            && dependents.iter().any(|dependent| dependent.deleting && dependent.foreground)
        {
            return vec![Step::Unblock { target }];
        }
        return vec![Step::Delete { target, policy: Policy::Foreground }];
    }
    vec![Step::Delete { target, policy: item.policy() }]
}

fn decide_deleting(item: &Item, dependents: &[Item]) -> Vec<Step> {
    let target = item.target();
    if item.orphan {
        let forget = |dependent: &Item| Step::DropOwners {
            target: dependent.target(),
            owners: vec![item.uid.clone()],
        };
        let mut steps: Vec<Step> = dependents.iter().map(forget).collect();
        steps.push(Step::DropFinalizer { target, finalizer: ORPHAN });
        return steps;
    }
    if !item.foreground {
        return Vec::new();
    }
    let visit = dependents.iter().filter(|dependent| !dependent.deleting);
    let mut steps: Vec<Step> = visit.map(|dependent| Step::Visit { key: dependent.key.clone() }).collect();
    if !dependents.iter().any(|dependent| dependent.blocks(&item.uid)) {
        steps.push(Step::DropFinalizer { target, finalizer: FOREGROUND });
    }
    steps
}

/// What to do about a namespace, given what is left in it.
pub(super) fn decide_namespace(namespace: &Value, left: &[Item]) -> Vec<Step> {
    let held = items(namespace, &["spec", "finalizers"]).iter().any(|f| f.as_str() == Some(KUBERNETES));
    if !has(namespace, &["metadata", "deletionTimestamp"]) || !held {
        return Vec::new();
    }
    if left.is_empty() {
        return vec![Step::Finalize { namespace: text(namespace, &["metadata", "name"]).to_owned() }];
    }
    // As long as a pod runs it may need all the rest.
    let is_pod = |item: &Item| item.key.collection.as_str() == PODS;
    let pods_first = left.iter().any(is_pod);
    left.iter()
        .filter(|item| !item.deleting && is_pod(item) == pods_first)
        .map(|item| Step::Delete { target: item.target(), policy: Policy::Background })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::Collection;

    fn key(name: &str) -> Key {
        Key::new(Collection::new("things"), "ns", name)
    }

    fn item(name: &str, metadata: &Value) -> Item {
        let mut metadata = metadata.clone();
        metadata["uid"] = json!(format!("uid-{name}"));
        metadata["resourceVersion"] = json!("7");
        Item::read(&key(name), &json!({ "metadata": metadata }))
    }

    fn target(name: &str) -> Target {
        Target { key: key(name), uid: format!("uid-{name}"), version: "7".to_owned() }
    }

    fn owned(name: &str, owners: &[&str], blocks: bool) -> Item {
        let reference = |owner: &&str| json!({"apiVersion": "apps/v1", "kind": "Thing", "name": owner, "uid": format!("uid-{owner}"), "blockOwnerDeletion": blocks});
        item(name, &json!({"ownerReferences": owners.iter().map(reference).collect::<Vec<_>>()}))
    }

    fn going(name: &str, finalizer: &str) -> Item {
        item(name, &json!({"deletionTimestamp": "t", "finalizers": [finalizer]}))
    }

    fn delete(name: &str, policy: Policy) -> Step {
        Step::Delete { target: target(name), policy }
    }

    #[test]
    fn objects_are_read() {
        let read = owned("a", &["o"], true);
        assert_eq!((read.owners[0].group.as_str(), read.owners[0].name.as_str()), ("apps", "o"));
        assert!(read.blocks("uid-o") && !read.deleting);
        assert!(going("a", "orphan").orphan);
    }

    #[test]
    fn an_object_goes_when_its_last_owner_is_gone() {
        use OwnerState::{Dangling, Solid, Unknown, Waiting};
        let child = owned("a", &["o", "p"], false);
        assert_eq!(decide(&child, &[Solid, Solid], &[]), []);
        assert_eq!(decide(&child, &[Dangling, Dangling], &[]), [delete("a", Policy::Background)]);
        assert_eq!(decide(&child, &[Dangling, Waiting], &[]), [delete("a", Policy::Background)]);
        assert_eq!(decide(&child, &[Dangling, Unknown], &[]), []);
        assert_eq!(
            decide(&child, &[Solid, Dangling], &[]),
            [Step::DropOwners { target: target("a"), owners: vec!["uid-p".to_owned()] }]
        );
        assert_eq!(decide(&item("a", &json!({})), &[], &[]), []);
    }

    #[test]
    fn dependents_of_an_object_that_goes_in_the_foreground_go_first() {
        let child = owned("a", &["o"], true);
        let grandchild = owned("b", &["a"], true);
        assert_eq!(decide(&child, &[OwnerState::Waiting], &[grandchild]), [delete("a", Policy::Foreground)]);
        let parent = going("o", FOREGROUND);
        let blocking = owned("a", &["o"], true);
        assert_eq!(decide(&parent, &[], &[blocking]), [Step::Visit { key: key("a") }]);
        let free = owned("a", &["o"], false);
        let done = Step::DropFinalizer { target: target("o"), finalizer: FOREGROUND };
        assert_eq!(decide(&parent, &[], &[free]), [Step::Visit { key: key("a") }, done.clone()]);
        assert_eq!(decide(&parent, &[], &[]), [done]);
    }

    #[test]
    fn owners_that_wait_for_each_other_are_let_go() {
        let child = owned("a", &["o"], true);
        let mut circular = owned("b", &["a"], true);
        circular.deleting = true;
        circular.foreground = true;
        let circular = [circular];
        assert_eq!(
            decide(&child, &[OwnerState::Waiting], &circular),
            [Step::Unblock { target: target("a") }]
        );
        let unblocked = owned("a", &["o"], false);
        assert_eq!(decide(&unblocked, &[OwnerState::Waiting], &circular), [delete("a", Policy::Foreground)]);
    }

    #[test]
    fn orphans_forget_their_owner() {
        let parent = going("o", ORPHAN);
        let child = owned("a", &["o"], true);
        assert_eq!(
            decide(&parent, &[], &[child]),
            [
                Step::DropOwners { target: target("a"), owners: vec!["uid-o".to_owned()] },
                Step::DropFinalizer { target: target("o"), finalizer: ORPHAN }
            ]
        );
    }

    #[test]
    fn an_object_that_goes_anyway_is_left_alone() {
        let other = going("a", "example.com/x");
        assert_eq!(decide(&other, &[OwnerState::Dangling], &[]), []);
    }

    #[test]
    fn a_namespace_goes_when_it_is_empty() {
        let namespace = json!({"metadata": {"name": "n", "deletionTimestamp": "t"}, "spec": {"finalizers": ["kubernetes"]}});
        let left = [item("a", &json!({})), going("b", "example.com/x")];
        assert_eq!(decide_namespace(&namespace, &left), [delete("a", Policy::Background)]);
        assert_eq!(decide_namespace(&namespace, &left[1..]), []);
        assert_eq!(decide_namespace(&namespace, &[]), [Step::Finalize { namespace: "n".to_owned() }]);
        let alive = json!({"metadata": {"name": "n"}, "spec": {"finalizers": ["kubernetes"]}});
        assert_eq!(decide_namespace(&alive, &left), []);
        let done = json!({"metadata": {"name": "n", "deletionTimestamp": "t"}, "spec": {}});
        assert_eq!(decide_namespace(&done, &[]), []);
    }

    #[test]
    fn the_pods_of_a_namespace_go_first() {
        let namespace = json!({"metadata": {"name": "n", "deletionTimestamp": "t"},
            "spec": {"finalizers": ["kubernetes"]}});
        let mut pod = item("p", &json!({}));
        pod.key = Key::new(Collection::new(PODS), "ns", "p");
        let left = [item("a", &json!({})), pod.clone()];
        let pod_goes = Step::Delete { target: pod.target(), policy: Policy::Background };
        assert_eq!(decide_namespace(&namespace, &left), [pod_goes]);
        pod.deleting = true;
        assert_eq!(decide_namespace(&namespace, &[item("a", &json!({})), pod]), []);
        assert_eq!(decide_namespace(&namespace, &left[..1]), [delete("a", Policy::Background)]);
    }
}
