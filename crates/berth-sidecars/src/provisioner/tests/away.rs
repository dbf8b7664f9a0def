//! Claims that are looked at while the driver is away.

use berth_csi::Endpoint;
use berth_kube::{Cluster, Key, Next};
use berth_testkit::EmbeddedServer;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::driver::{Driver, Identity};
use crate::provisioner::{Options, Provisioner};

const DRIVER: &str = "away.example.com";

#[tokio::test]
async fn a_claim_that_needs_nothing_does_not_need_the_driver() {
    let server = EmbeddedServer::start().await;
    let client = server.client();
    let class = json!({ "metadata": { "name": "fast" }, "provisioner": DRIVER });
    let class: StorageClass = serde_json::from_value(class).unwrap();
    Api::all(client.clone()).create(&PostParams::default(), &class).await.unwrap();
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), "default");
    for (name, class, provisioner) in [("ours", "fast", DRIVER), ("foreign", "slow", "other.example.com")] {
        let claim = json!({
            "metadata": {
                "name": name, "annotations": { "volume.kubernetes.io/storage-provisioner": provisioner },
            },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": class,
                "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        claims.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    }
    let shutdown = CancellationToken::new();
    let cluster = Cluster::new(client, shutdown.clone());
    let nobody: Endpoint = format!("unix://{}/nobody.sock", server.directory().display()).parse().unwrap();
    let identity = Identity { name: DRIVER.to_owned(), ..Identity::default() };
    let provisioner =
        Provisioner::new(&cluster, Driver::connect(&nobody), Options::default(), &identity, None);
    provisioner.claims.synced().await;
    provisioner.classes.synced().await;
    provisioner.volumes.synced().await;
    let foreign = provisioner.sync_claim(&Key::new("default", "foreign")).await;
    assert!(matches!(foreign, Ok(Next::Done)), "{foreign:?}");
    let ours = provisioner.sync_claim(&Key::new("default", "ours")).await;
    assert!(ours.is_err_and(|failure| failure.to_string().contains("does not answer")));
    shutdown.cancel();
}
