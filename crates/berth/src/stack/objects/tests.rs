//! What there is from the start, on an API server of its own.

use berth_testkit::EmbeddedServer;
use kube::ResourceExt as _;

use super::*;
use crate::driver::BACKENDS;

#[tokio::test]
async fn the_local_driver_comes_with_default_classes_of_volumes_snapshots_and_groups() {
    let server = EmbeddedServer::start().await;
    let client = server.client();
    let local = BACKENDS.iter().find(|backend| backend.name == "local").unwrap();
    // What is there already is left alone.
    for _ in 0..2 {
        ensure(client.clone(), vec![(local.objects)(names::LOCAL_DRIVER)]).await.unwrap();
    }
    for (group, kind, default) in [
        ("storage.k8s.io", "StorageClass", "storageclass.kubernetes.io/is-default-class"),
        ("snapshot.storage.k8s.io", "VolumeSnapshotClass", "snapshot.storage.kubernetes.io/is-default-class"),
        (
            "groupsnapshot.storage.k8s.io",
            "VolumeGroupSnapshotClass",
            "groupsnapshot.storage.kubernetes.io/is-default-class",
        ),
    ] {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let class = Api::<DynamicObject>::all_with(client.clone(), &resource).get(CLASS).await.unwrap();
        assert_eq!(class.annotations()[default], "true", "{kind}");
    }
}
