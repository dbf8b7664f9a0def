//! Admission of objects to namespaces, of claims, and of pods, case by case.

use super::*;

struct Objects(Vec<(&'static str, Value)>);

impl Reader for Objects {
    fn get(&self, _group: &str, resource: &str, namespace: &str, wanted: &str) -> Option<Value> {
        let named =
            |object: &Value| name(object) == wanted && text(object, &["metadata", "namespace"]) == namespace;
        self.0.iter().find(|(of, object)| *of == resource && named(object)).map(|(_, object)| object.clone())
    }

    fn list(&self, _group: &str, resource: &str) -> Vec<Value> {
        self.0.iter().filter(|(of, _)| *of == resource).map(|(_, object)| object.clone()).collect()
    }
}

fn cluster() -> Objects {
    let class = |name: &str, created: &str, default: bool, grows: bool| {
        json!({"metadata": {"name": name, "creationTimestamp": created,
            "annotations": {"storageclass.kubernetes.io/is-default-class": default.to_string()}}, "allowVolumeExpansion": grows})
    };
    Objects(vec![
        ("namespaces", json!({"metadata": {"name": "default"}, "status": {"phase": "Active"}})),
        ("namespaces", json!({"metadata": {"name": "going"}, "status": {"phase": "Terminating"}})),
        (
            "serviceaccounts",
            json!({"metadata": {"name": "default", "namespace": "default"}, "imagePullSecrets": [{"name": "pull"}]}),
        ),
        (
            "serviceaccounts",
            json!({"metadata": {"name": "bare", "namespace": "default"}, "automountServiceAccountToken": false}),
        ),
        ("storageclasses", class("old", "2020-01-01T00:00:00Z", true, true)),
        ("storageclasses", class("new", "2021-01-01T00:00:00Z", true, false)),
        ("storageclasses", class("other", "2022-01-01T00:00:00Z", false, true)),
    ])
}

fn resource(group: &str, kind: &str, plural: &str, namespaced: bool) -> Resource {
    Resource {
        group: group.into(),
        version: "v1".into(),
        kind: kind.into(),
        list_kind: format!("{kind}List").into(),
        plural: plural.into(),
        singular: kind.to_lowercase().into(),
        short_names: Vec::new(),
        categories: Vec::new(),
        namespaced,
        subresources: Vec::new(),
        verbs: &[],
        built_in: true,
    }
}

fn claims() -> Resource {
    resource("", "PersistentVolumeClaim", "persistentvolumeclaims", true)
}

fn pods() -> Resource {
    resource("", "Pod", "pods", true)
}

fn claim(namespace: &str, size: &str) -> Value {
    json!({"metadata": {"name": "c", "namespace": namespace}, "spec": {"resources": {"requests": {"storage": size}}}})
}

fn pod() -> Value {
    json!({"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": [{"name": "c"}]}})
}

#[test]
fn nothing_is_created_where_there_is_no_namespace() {
    let reader = cluster();
    let denied = admit(Operation::Create, &claims(), &mut claim("none", "1"), None, &reader).unwrap_err();
    assert_eq!(
        denied,
        Denied { code: 404, reason: "NotFound", message: "namespaces \"none\" not found".to_owned() }
    );
    let denied = admit(Operation::Create, &claims(), &mut claim("going", "1"), None, &reader).unwrap_err();
    assert_eq!(
        denied.message,
        "persistentvolumeclaims \"c\" is forbidden: unable to create new content in namespace going because it is being terminated"
    );
    let mut object = claim("going", "1");
    let old = object.clone();
    assert!(admit(Operation::Update, &claims(), &mut object, Some(&old), &reader).is_ok());
    assert!(admit(Operation::Delete, &claims(), &mut claim("none", "1"), None, &reader).is_ok());
}

#[test]
fn some_namespaces_stay() {
    let namespaces = resource("", "Namespace", "namespaces", false);
    let mut object = json!({"metadata": {"name": "default"}});
    let denied = admit(Operation::Delete, &namespaces, &mut object, None, &cluster()).unwrap_err();
    assert_eq!(denied.message, "namespaces \"default\" is forbidden: this namespace may not be deleted");
    let mut object = json!({"metadata": {"name": "mine"}});
    assert!(admit(Operation::Delete, &namespaces, &mut object, None, &cluster()).is_ok());
}

#[test]
fn claims_get_the_newest_default_class_and_a_finalizer() {
    let mut object = claim("default", "1");
    admit(Operation::Create, &claims(), &mut object, None, &cluster()).unwrap();
    assert_eq!(object["spec"]["storageClassName"], "new");
    assert_eq!(object["metadata"]["finalizers"], json!(["kubernetes.io/pvc-protection"]));
    for given in [json!(""), json!("other")] {
        let mut object = claim("default", "1");
        object["spec"]["storageClassName"] = given.clone();
        admit(Operation::Create, &claims(), &mut object, None, &cluster()).unwrap();
        assert_eq!(object["spec"]["storageClassName"], given);
    }
    let mut volume = json!({"metadata": {"name": "pv", "finalizers": ["x/y"]}});
    let volumes = resource("", "PersistentVolume", "persistentvolumes", false);
    admit(Operation::Create, &volumes, &mut volume, None, &cluster()).unwrap();
    assert_eq!(volume["metadata"]["finalizers"], json!(["x/y", "kubernetes.io/pv-protection"]));
}

#[test]
fn claims_grow_only_where_their_class_lets_them() {
    let grow = |phase: &str, class: &str| {
        let mut old = claim("default", "1Gi");
        old["status"] = json!({"phase": phase});
        old["spec"]["storageClassName"] = json!(class);
        let mut new = old.clone();
        new["spec"]["resources"]["requests"]["storage"] = json!("2Gi");
        admit(Operation::Update, &claims(), &mut new, Some(&old), &cluster()).map_err(|denied| denied.message)
    };
    assert_eq!(grow("Bound", "other"), Ok(()));
    assert_eq!(
        grow("Pending", "other").unwrap_err(),
        "persistentvolumeclaims \"c\" is forbidden: Only bound persistent volume claims can be expanded"
    );
    for class in ["new", "none", ""] {
        assert_eq!(
            grow("Bound", class).unwrap_err(),
            format!("persistentvolumeclaims \"c\" is forbidden: {RESIZE}")
        );
    }
}

#[test]
fn pods_run_as_a_service_account_that_exists() {
    let mut object = pod();
    admit(Operation::Create, &pods(), &mut object, None, &cluster()).unwrap();
    let spec = &object["spec"];
    assert_eq!(spec["serviceAccountName"], "default");
    assert_eq!(spec["imagePullSecrets"], json!([{"name": "pull"}]));
    let volume = spec["volumes"][0]["name"].as_str().unwrap();
    assert_eq!(volume.len(), "kube-api-access-".len() + 5);
    assert_eq!(
        spec["containers"][0]["volumeMounts"],
        json!([{"name": volume, "readOnly": true, "mountPath": SERVICE_ACCOUNT_DIRECTORY}])
    );
    assert_eq!(
        spec["volumes"][0]["projected"]["sources"][0],
        json!({"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}})
    );
    let mut object = pod();
    object["spec"]["serviceAccountName"] = json!("none");
    assert_eq!(
        admit(Operation::Create, &pods(), &mut object, None, &cluster()).unwrap_err().message,
        "pods \"p\" is forbidden: error looking up service account default/none: serviceaccount \"none\" not found"
    );
    let mut object = pod();
    object["spec"]["serviceAccountName"] = json!("bare");
    admit(Operation::Create, &pods(), &mut object, None, &cluster()).unwrap();
    assert!(object["spec"].get("volumes").is_none());
}

#[test]
fn pods_get_a_priority_and_tolerations() {
    let mut object = pod();
    admit(Operation::Create, &pods(), &mut object, None, &cluster()).unwrap();
    let spec = &object["spec"];
    assert_eq!((&spec["priority"], &spec["preemptionPolicy"]), (&json!(0), &json!("PreemptLowerPriority")));
    assert_eq!(spec["tolerations"].as_array().unwrap().len(), 2);
    let mut new = pod();
    complete_update(&pods(), &mut new, &object, &cluster());
    assert_eq!((&new["spec"]["priority"], &new["spec"]["tolerations"]), (&json!(0), &spec["tolerations"]));
    let mut object = pod();
    object["spec"]["priorityClassName"] = json!("none");
    assert_eq!(
        admit(Operation::Create, &pods(), &mut object, None, &cluster()).unwrap_err().message,
        "pods \"p\" is forbidden: no PriorityClass with name none was found"
    );
    let mut object = pod();
    object["spec"]["priority"] = json!(5);
    assert!(admit(Operation::Create, &pods(), &mut object, None, &cluster()).is_err());
}
