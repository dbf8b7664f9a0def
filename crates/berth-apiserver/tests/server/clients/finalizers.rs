//! kube-rs's finalizers, whose JSON patches test for what is not there.

use std::convert::Infallible;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::controller::Action;
use kube::runtime::finalizer::{Event, finalizer};

use super::HISTORY;
use super::in_process::InProcess;

const NAME: &str = "berth.test/cleanup";

async fn reconcile(api: &Api<ConfigMap>) -> &'static str {
    let Some(map) = api.get_opt("guarded").await.unwrap() else { return "gone" };
    let mut step = "";
    let act = |event| {
        step = match event {
            Event::Apply(_) => "applied",
            Event::Cleanup(_) => "cleaned up",
        };
        async { Ok::<_, Infallible>(Action::await_change()) }
    };
    finalizer(api, NAME, Arc::new(map), act).await.unwrap();
    step
}

#[tokio::test]
async fn a_finalizer_guards_an_object_until_it_was_cleaned_up() {
    let dir = tempfile::tempdir().unwrap();
    let server = InProcess::start(dir.path(), HISTORY).await;
    let api: Api<ConfigMap> = Api::default_namespaced(server.client());
    let mut map = ConfigMap::default();
    map.metadata.name = Some("guarded".to_owned());
    api.create(&PostParams::default(), &map).await.unwrap();
    assert_eq!(reconcile(&api).await, "", "the finalizer is added first");
    assert_eq!(reconcile(&api).await, "applied");
    let deleted = api.delete("guarded", &DeleteParams::default()).await.unwrap();
    assert!(deleted.left().unwrap().metadata.deletion_timestamp.is_some());
    assert_eq!(reconcile(&api).await, "cleaned up");
    assert_eq!(reconcile(&api).await, "gone");
}
