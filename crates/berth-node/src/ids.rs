//! Users and groups that pods ask for, where not every one exists: a node without root has those of its user namespace.

use berth_host::namespace::Ids;
use k8s_openapi::api::core::v1::Pod;

/// Refuses a pod that names a user or a group that does not exist on this node, in a sentence that names the field.
pub(crate) fn check_pod(pod: &Pod) -> Result<(), String> {
    let asked = asked(pod);
    if asked.is_empty() { Ok(()) } else { check(&Ids::read(), &asked) }
}

/// A field of a pod that names a user or a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Id {
    User(u32),
    Group(&'static str, u32),
}

/// The users and groups that a pod and its containers name.
fn asked(pod: &Pod) -> Vec<Id> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let number = |id: &i64| u32::try_from(*id).ok();
    let whole = spec.security_context.iter();
    let groups =
        whole.clone().flat_map(|context| context.supplemental_groups.iter().flatten()).filter_map(number);
    let fs_group = whole.clone().filter_map(|context| context.fs_group.as_ref().and_then(number));
    let mut asked: Vec<Id> = groups.map(|group| Id::Group("supplementalGroups", group)).collect();
    asked.extend(fs_group.map(|group| Id::Group("fsGroup", group)));
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let of_containers = containers.filter_map(|container| container.security_context.as_ref());
    let of_containers = of_containers.map(|context| (context.run_as_user, context.run_as_group));
    let of_pod = whole.map(|context| (context.run_as_user, context.run_as_group));
    for (user, group) in of_pod.chain(of_containers) {
        asked.extend(user.as_ref().and_then(number).map(Id::User));
        asked.extend(group.as_ref().and_then(number).map(|group| Id::Group("runAsGroup", group)));
    }
    asked
}

fn check(ids: &Ids, asked: &[Id]) -> Result<(), String> {
    for id in asked {
        let (field, id, what, exist) = match *id {
            Id::User(user) if !ids.has_user(user) => ("runAsUser", user, "users", ids.describe_users()),
            Id::Group(field, group) if !ids.has_group(group) || (group != 0 && !ids.can_set_groups) => {
                (field, group, "groups", ids.describe_groups())
            }
            _ => continue,
        };
        return Err(format!(
            "{field} {id} does not exist on this node, which runs without root and has the {what} {exist}. Others need \
             newuidmap, newgidmap, and a range for this user in /etc/subuid and /etc/subgid"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_does_not_exist_is_named_with_its_field() {
        let one = Ids::parse("0 1000 1", "0 1000 1", "deny");
        let range = Ids::parse("0 1000 1\n1 100000 65536", "0 1000 1\n1 100000 65536", "allow");
        let all = Ids::parse("0 0 4294967295", "0 0 4294967295", "allow");
        for (ids, whole, own, refused) in [
            (&one, json!({}), json!({}), None),
            (&one, json!({"runAsUser": 0, "runAsGroup": 0, "fsGroup": 0}), json!({}), None),
            (&one, json!({"runAsUser": 1000}), json!({}), Some("runAsUser 1000")),
            (&one, json!({}), json!({"runAsUser": 7}), Some("runAsUser 7")),
            (&one, json!({}), json!({"runAsGroup": 8}), Some("runAsGroup 8")),
            (&one, json!({"fsGroup": 2000}), json!({}), Some("fsGroup 2000")),
            (&range, json!({"runAsUser": 65534, "fsGroup": 2000}), json!({}), None),
            (&range, json!({"supplementalGroups": [70000]}), json!({}), Some("supplementalGroups 70000")),
            (&all, json!({"runAsUser": 70000, "fsGroup": 4_000_000_000_u32}), json!({}), None),
        ] {
            let container = json!({"name": "c", "securityContext": own});
            let pod = json!({"spec": {"securityContext": whole, "containers": [container]}});
            let pod: Pod = serde_json::from_value(pod).unwrap();
            let answer = check(ids, &asked(&pod));
            match refused {
                None => assert_eq!(answer, Ok(()), "{whole} {own}"),
                Some(words) => {
                    let why = answer.unwrap_err();
                    assert!(why.starts_with(words) && why.contains("without root"), "{why}");
                }
            }
        }
    }
}
