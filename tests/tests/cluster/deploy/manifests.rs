//! The objects of a directory of `deploy/`, as kustomize makes them, and what must be so about each.

use std::path::PathBuf;
use std::process::Stdio;

use berth_e2e::machine;
use berth_e2e::up::kubectl;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde_json::{Value, json};

use crate::deploy::cluster::Cluster;

/// The only kind in `deploy/` that the embedded API server does not serve.
const NOT_SERVED: &str = "PodDisruptionBudget";

/// The directories that a person applies.
pub(crate) const DRIVERS: [&str; 4] = ["local", "nfs", "digitalocean", "aliyun"];

/// Objects in the order in which they are applied.
pub(crate) struct Manifests(Vec<Value>);

impl Manifests {
    /// Builds a directory of `deploy/`.
    pub(crate) fn build(name: &str) -> Self {
        let dir = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy")).join(name);
        let built = machine::command(kubectl::program())
            .arg("kustomize")
            .arg(dir)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let text = String::from_utf8(built.stdout).unwrap();
        Self(serde_saphyr::from_multiple(&text).unwrap())
    }

    /// What the embedded API server takes.
    pub(crate) fn served(&self) -> Vec<Value> {
        self.0.iter().filter(|object| object["kind"] != NOT_SERVED).cloned().collect()
    }

    /// The objects of a kind.
    pub(crate) fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |object| object["kind"] == kind)
    }

    /// An object that is there.
    pub(crate) fn get(&self, kind: &str, name: &str) -> &Value {
        self.of_kind(kind).find(|object| object["metadata"]["name"] == name).unwrap()
    }
}

#[tokio::test]
async fn every_object_is_taken_by_the_api_server_with_no_field_unknown() {
    let cluster = Cluster::start().await;
    cluster.apply(&Manifests::build("snapshot-crds").served(), &[]);
    cluster.apply(&Manifests::build("base").served(), &[]);
    for driver in DRIVERS {
        let all = Manifests::build(driver).served();
        let taken = cluster.apply(&all, &["--dry-run=server", "--validate=strict"]);
        assert_eq!(taken.lines().count(), all.len(), "{taken}");
    }

    // A mistake would be seen.
    let mut wrong = Manifests::build("local").get("CSIDriver", "local.berth.dev").clone();
    wrong["spec"]["attachRequire"] = json!(false);
    let refused = cluster.try_apply(&[wrong], &["--dry-run=server", "--validate=strict"]).unwrap_err();
    assert!(refused.to_string().contains("attachRequire"), "{refused:#}");
}

#[test]
fn what_the_embedded_api_server_does_not_serve_has_only_fields_that_its_kind_has() {
    for (driver, count) in [("local", 1), ("nfs", 2), ("digitalocean", 2), ("aliyun", 2)] {
        let manifests = Manifests::build(driver);
        let budgets: Vec<&Value> = manifests.of_kind(NOT_SERVED).collect();
        assert_eq!(budgets.len(), count, "{driver}");
        for budget in budgets {
            let typed: PodDisruptionBudget = serde_json::from_value(budget.clone()).unwrap();
            assert_eq!(&serde_json::to_value(typed).unwrap(), budget);
        }
    }
}

#[test]
fn everything_says_to_what_it_belongs_and_in_which_namespace_it_is() {
    for object in DRIVERS.iter().flat_map(|driver| Manifests::build(driver).0) {
        let metadata = &object["metadata"];
        assert_eq!(metadata["labels"]["app.kubernetes.io/part-of"], "berth", "{object:#}");
        let lives = ["Deployment", "DaemonSet", "Role", "RoleBinding", "ServiceAccount", NOT_SERVED];
        if lives.iter().any(|kind| object["kind"] == *kind) {
            assert_eq!(metadata["namespace"], "berth-system", "{object:#}");
        }
    }
}
