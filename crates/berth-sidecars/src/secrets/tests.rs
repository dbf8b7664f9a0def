//! Which secret a class means, row by row.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::*;

fn claim() -> PersistentVolumeClaim {
    PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some("data".into()),
            namespace: Some("shop".into()),
            annotations: Some(BTreeMap::from([("team/key".into(), "blue".into())])),
            ..ObjectMeta::default()
        },
        ..PersistentVolumeClaim::default()
    }
}

fn parameters(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn resolved(purpose: Purpose, pairs: &[(&str, &str)]) -> Result<Option<(String, String)>, String> {
    match reference(&parameters(pairs), purpose, "pvc-1", Some(&claim())) {
        Ok(found) => Ok(found.map(|secret| (secret.namespace.unwrap(), secret.name.unwrap()))),
        Err(failure) => Err(failure.to_string()),
    }
}

const NAME: &str = "csi.storage.k8s.io/provisioner-secret-name";
const NAMESPACE: &str = "csi.storage.k8s.io/provisioner-secret-namespace";

#[test]
fn templates_are_filled_in_with_what_each_may_name() {
    for (namespace, name, expected) in [
        ("static", "static", Ok(("static", "static"))),
        ("${pvc.namespace}", "${pvc.name}", Ok(("shop", "data"))),
        ("${pv.name}", "${pv.name}-${pvc.namespace}.x", Ok(("pvc-1", "pvc-1-shop.x"))),
        ("ns", "${pvc.annotations['team/key']}", Ok(("ns", "blue"))),
        ("${pvc.name}", "x", Err("unknown token \"pvc.name\"")),
        ("${pvc.annotations['team/key']}", "x", Err("unknown token")),
        ("ns", "${pvc.annotations['none']}", Err("unknown token")),
        ("ns", "$bad", Err("unknown token \"bad\"")),
        ("ns", "${pv.name", Err("without a }")),
        ("ns", "Upper", Err("no valid name")),
        ("with.dot", "x", Err("no valid name")),
        ("-ns", "x", Err("no valid name")),
        ("", "x", Err("Both must be specified")),
        ("ns", "", Err("Both must be specified")),
    ] {
        let found = resolved(Purpose::Provisioner, &[(NAME, name), (NAMESPACE, namespace)]);
        match (found, expected) {
            (Ok(Some((in_namespace, called))), Ok(expected)) => {
                assert_eq!((in_namespace.as_str(), called.as_str()), expected);
            }
            (Err(text), Err(expected)) => assert!(text.contains(expected), "{text}"),
            (found, expected) => panic!("{namespace} {name}: {found:?}, expected {expected:?}"),
        }
    }
}

#[test]
fn every_purpose_has_its_own_parameters_and_falls_back_to_those_for_everything() {
    for purpose in Purpose::ALL {
        let (name, namespace) = purpose.keys();
        let own = [(name.as_str(), "own"), (namespace.as_str(), "ns")];
        let all = [(FALLBACK.0, "all"), (FALLBACK.1, "ns")];
        assert_eq!(resolved(purpose, &own), Ok(Some(("ns".into(), "own".into()))), "{purpose:?}");
        assert_eq!(resolved(purpose, &all), Ok(Some(("ns".into(), "all".into()))), "{purpose:?}");
        let both: Vec<_> = own.iter().chain(&all).copied().collect();
        assert_eq!(resolved(purpose, &both), Ok(Some(("ns".into(), "own".into()))), "{purpose:?}");
        assert_eq!(resolved(purpose, &[]), Ok(None));
        assert!(resolved(purpose, &own[..1]).is_err(), "{purpose:?}: a name without a namespace");
        assert!(resolved(purpose, &own[1..]).is_err(), "{purpose:?}: a namespace without a name");
    }
}

#[test]
fn the_old_names_of_parameters_work_alone_but_not_beside_the_new_ones() {
    for purpose in
        [Purpose::Provisioner, Purpose::ControllerPublish, Purpose::NodeStage, Purpose::NodePublish]
    {
        let (name, namespace) = purpose.old_keys().unwrap();
        let old = [(name, "old"), (namespace, "ns")];
        assert_eq!(resolved(purpose, &old), Ok(Some(("ns".into(), "old".into()))), "{purpose:?}");
        let (name, namespace) = purpose.keys();
        let both: Vec<_> =
            old.iter().copied().chain([(name.as_str(), "new"), (namespace.as_str(), "ns")]).collect();
        assert!(resolved(purpose, &both).unwrap_err().contains("deprecated"), "{purpose:?}");
    }
}

#[test]
fn without_a_claim_only_the_volume_can_be_named() {
    let by_volume = parameters(&[(NAME, "${pv.name}"), (NAMESPACE, "ns")]);
    assert!(reference(&by_volume, Purpose::Provisioner, "pvc-1", None).unwrap().is_some());
    let by_claim = parameters(&[(NAME, "${pvc.name}"), (NAMESPACE, "ns")]);
    assert!(reference(&by_claim, Purpose::Provisioner, "pvc-1", None).is_err());
}

#[test]
fn parameters_that_name_secrets_are_known_as_such() {
    for purpose in Purpose::ALL {
        let (name, namespace) = purpose.keys();
        assert!(is_key(&name) && is_key(&namespace));
    }
    assert!(is_key(FALLBACK.0) && is_key(FALLBACK.1));
    assert!(!is_key("csi.storage.k8s.io/fstype") && !is_key("csiProvisionerSecretName"));
}
