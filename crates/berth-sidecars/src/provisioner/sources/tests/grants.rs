//! Which grants allow which reference.

use berth_core::names::CLONING_PROTECTION;
use berth_csi::Endpoint;
use berth_kube::{Cluster, Key};
use berth_testkit::EmbeddedServer;
use k8s_openapi::api::core::v1::{Event, Namespace, PersistentVolume};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::driver::{Driver, Identity, Service};
use crate::node_topology::NodeTopology;
use crate::provisioner::sources::*;
use crate::provisioner::{Options, PerNode};

const DRIVER: &str = "d.example.com";

async fn make<K>(api: Api<K>, object: Value) -> K
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned + Serialize,
{
    api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap()
}

/// A cluster that knows grants, with a claim `golden/image` whose volume is there.
async fn golden(client: &Client) {
    let definition = json!({
        "metadata": { "name": "referencegrants.gateway.networking.k8s.io" },
        "spec": {
            "group": "gateway.networking.k8s.io", "scope": "Namespaced",
            "names": { "kind": "ReferenceGrant", "plural": "referencegrants", "singular": "referencegrant" },
            "versions": [{ "name": "v1beta1", "served": true, "storage": true, "schema": {
                "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
            } }],
        },
    });
    make::<CustomResourceDefinition>(Api::all(client.clone()), definition).await;
    make::<Namespace>(Api::all(client.clone()), json!({ "metadata": { "name": "golden" } })).await;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), "golden");
    let claim = json!({
        "metadata": { "name": "image" },
        "spec": { "accessModes": ["ReadWriteOnce"], "storageClassName": "fast", "volumeName": "v",
            "resources": { "requests": { "storage": "1Gi" } } },
    });
    let claim = make(claims.clone(), claim).await;
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let volume = json!({
        "metadata": { "name": "v" },
        "spec": { "accessModes": ["ReadWriteOnce"], "capacity": { "storage": "1Gi" },
            "csi": { "driver": DRIVER, "volumeHandle": "h" },
            "claimRef": { "name": "image", "namespace": "golden", "uid": claim.uid() } },
    });
    make(volumes.clone(), volume).await;
    let bound = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
    claims.patch_status("image", &PatchParams::default(), &bound).await.unwrap();
    volumes.patch_status("v", &PatchParams::default(), &bound).await.unwrap();
}

#[tokio::test]
async fn a_claim_of_another_namespace_is_a_source_only_while_that_namespace_grants_it() {
    let server = EmbeddedServer::start().await;
    let client = server.client();
    golden(&client).await;
    let shutdown = CancellationToken::new();
    let cluster = Cluster::new(client.clone(), shutdown.clone());
    let nobody: Endpoint = format!("unix://{}/nobody.sock", server.directory().display()).parse().unwrap();
    let identity = Identity { name: DRIVER.to_owned(), ..Identity::default() };
    let options = Options { cross_namespace_sources: true, ..Options::default() };
    let provisioner = Provisioner::new(&cluster, Driver::connect(&nobody), options, &identity, None);
    provisioner.claims.synced().await;
    provisioner.volumes.synced().await;
    // As an API server with the gate would keep it.
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": { "name": "copy", "namespace": "dev", "uid": "u" },
        "spec": { "resources": { "requests": { "storage": "1Gi" } },
            "dataSourceRef": { "kind": "PersistentVolumeClaim", "name": "image", "namespace": "golden" } },
        "status": { "phase": "Pending" },
    }))
    .unwrap();
    let source = || Source::of(&claim, true).unwrap();
    let Err(Unprepared::Failed(refused)) = provisioner.resolve_source(&claim, source()).await else {
        panic!("it is granted")
    };
    let refused = refused.to_string();
    assert!(refused.contains("accessing golden/image") && refused.contains("ReferenceGrant"), "{refused}");
    assert!(!provisioner.needs_source(&claim).await, "nobody may keep other people's claims without a grant");
    // Nor does anybody learn whether it is there, and where.
    let own_node = OwnNode::new(PerNode::new("n1"), NodeTopology(None));
    let mut missing = claim.clone();
    missing.spec.as_mut().unwrap().data_source_ref.as_mut().unwrap().name = "missing".to_owned();
    for claim in [&claim, &missing] {
        let found = provisioner.node_of_source(claim, &own_node).await;
        assert!(matches!(&found, Err(Failure::Refused(why)) if why.contains("ReferenceGrant")), "{found:?}");
    }

    let grants: Api<ReferenceGrant> = Api::namespaced(client.clone(), "golden");
    let grant = json!({
        "metadata": { "name": "images" },
        "spec": { "from": [{ "group": "", "kind": "PersistentVolumeClaim", "namespace": "dev" }],
            "to": [{ "group": "", "kind": "PersistentVolumeClaim" }] },
    });
    make(grants, grant).await;
    assert!(provisioner.needs_source(&claim).await);
    assert!(provisioner.resolve_source(&claim, source()).await.unwrap().is_some());
    assert_eq!(provisioner.node_of_source(&claim, &own_node).await.unwrap().as_deref(), Some("n1"));
    assert_eq!(provisioner.node_of_source(&missing, &own_node).await.unwrap(), None);
    let kept = Api::<PersistentVolumeClaim>::namespaced(client, "golden").get("image").await.unwrap();
    assert!(kept.finalizers().iter().any(|finalizer| finalizer == CLONING_PROTECTION));
    shutdown.cancel();
}

#[tokio::test]
async fn a_node_is_selected_for_a_claim_without_a_grant_and_its_provisioner_says_why_there_is_no_volume() {
    let server = EmbeddedServer::start().await;
    let client = server.client();
    golden(&client).await;
    let shutdown = CancellationToken::new();
    let cluster = Cluster::new(client.clone(), shutdown.clone());
    let nobody: Endpoint = format!("unix://{}/nobody.sock", server.directory().display()).parse().unwrap();
    let identity = Identity {
        name: DRIVER.to_owned(),
        services: [Service::ControllerService].into(),
        controller: [ControllerCapability::CreateDeleteVolume, ControllerCapability::CloneVolume].into(),
        ..Identity::default()
    };
    let options = Options { cross_namespace_sources: true, ..Options::default() };
    let at_once = PerNode { base_delay: Duration::ZERO, max_delay: Duration::ZERO, ..PerNode::new("n1") };
    let own_node = OwnNode::new(at_once, NodeTopology(None));
    let provisioner =
        Provisioner::new(&cluster, Driver::connect(&nobody), options, &identity, Some(own_node));
    provisioner.claims.synced().await;
    provisioner.volumes.synced().await;
    let class: StorageClass =
        serde_json::from_value(json!({ "metadata": { "name": "now" }, "provisioner": DRIVER })).unwrap();
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), "default");
    let claim = json!({
        "metadata": { "name": "copy" },
        "spec": { "accessModes": ["ReadWriteOnce"], "storageClassName": "now",
            "resources": { "requests": { "storage": "1Gi" } },
            "dataSourceRef": { "kind": "PersistentVolumeClaim", "name": "image" } },
    });
    // As an API server with the gate would keep it.
    let with_namespace = |mut claim: PersistentVolumeClaim| {
        let source = claim.spec.as_mut().unwrap().data_source_ref.as_mut().unwrap();
        source.namespace = Some("golden".to_owned());
        Arc::new(claim)
    };
    let claim = with_namespace(make(claims.clone(), claim).await);
    let own_node = provisioner.own_node.as_ref().unwrap();
    let next = provisioner.try_select_own_node(own_node, &claim, &class, &identity).await.unwrap();
    assert_eq!(next, Next::Done);
    let claim = with_namespace(claims.get("copy").await.unwrap());
    assert_eq!(claim.annotations()[SELECTED_NODE], "n1");
    let refused = provisioner.provision(&claim, &class, &identity, "pvc-u").await.unwrap_err();
    assert!(refused.to_string().contains("ReferenceGrant"), "{refused}");
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let said = async {
        loop {
            let all = events.list(&ListParams::default()).await.unwrap();
            if let Some(event) = all.into_iter().next() {
                return event;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let event = tokio::time::timeout(Duration::from_secs(30), said).await.unwrap();
    assert_eq!(event.reason.as_deref(), Some("ProvisioningFailed"));
    assert!(event.message.unwrap().contains("ReferenceGrant"));
    shutdown.cancel();
}

fn allows(grant: &Value) -> bool {
    let grant: ReferenceGrant = serde_json::from_value(json!({ "metadata": {}, "spec": grant })).unwrap();
    let wanted = Reference {
        group: "snapshot.storage.k8s.io",
        kind: "VolumeSnapshot",
        key: Key::new("golden", "image"),
    };
    grant.spec.allows("dev", &wanted)
}

#[test]
fn a_grant_must_name_the_claims_namespace_and_the_sources_kind_and_may_name_the_source() {
    let from = json!({ "group": "", "kind": "PersistentVolumeClaim", "namespace": "dev" });
    let to = json!({ "group": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot" });
    let with = |object: &Value, key: &str, value: &str| {
        let mut object = object.clone();
        object[key] = value.into();
        object
    };
    let rows = [
        ("all of a kind", vec![from.clone()], vec![to.clone()], true),
        ("this one", vec![from.clone()], vec![with(&to, "name", "image")], true),
        ("no name is every name", vec![from.clone()], vec![with(&to, "name", "")], true),
        ("another one", vec![from.clone()], vec![with(&to, "name", "other")], false),
        (
            "one of several",
            vec![with(&from, "namespace", "other"), from.clone()],
            vec![with(&to, "name", "other"), to.clone()],
            true,
        ),
        ("another kind", vec![from.clone()], vec![with(&to, "kind", "PersistentVolumeClaim")], false),
        ("another group", vec![from.clone()], vec![with(&to, "group", "")], false),
        ("another namespace", vec![with(&from, "namespace", "prod")], vec![to.clone()], false),
        ("not for claims", vec![with(&from, "kind", "Pod")], vec![to.clone()], false),
        ("not for core's claims", vec![with(&from, "group", "x")], vec![to.clone()], false),
        ("from nobody", vec![], vec![to], false),
        ("to nothing", vec![from], vec![], false),
    ];
    for (row, from, to, expected) in rows {
        assert_eq!(allows(&json!({ "from": from, "to": to })), expected, "{row}");
    }
    assert!(!allows(&json!({})));
}
