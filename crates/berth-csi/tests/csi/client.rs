//! The client: answers, deadlines, and what a call that broke on the way is answered.

use std::time::Duration;

use berth_csi::v1::{GetPluginInfoRequest, ProbeRequest};
use berth_csi::{Client, Endpoint, from_transport, in_process};
use prometheus_client::registry::Registry;
use tonic::Code;

use crate::plugin::{PATIENCE, Plugin, Served, create, layer, scraped, take};

#[tokio::test]
async fn answers_and_the_drivers_own_errors_arrive_over_a_socket_and_within_the_process() {
    let served = Served::on_a_socket(None).await;
    let (layer, _registry) = layer(None);
    for client in
        [Client::connect(&served.endpoint), Client::in_process(in_process(Plugin::new().routes(), &layer))]
    {
        let mut request = create("v");
        request.parameters.insert("key".to_owned(), "x".repeat(100_000));
        let volume = client.call(PATIENCE, request.clone()).await.unwrap().volume.unwrap();
        assert_eq!((volume.volume_id, volume.volume_context), ("v".to_owned(), request.parameters));
        assert_eq!(client.call(PATIENCE, ProbeRequest {}).await.unwrap().ready, Some(true));
        let missing = client.call(PATIENCE, create("missing")).await.unwrap_err();
        assert_eq!((missing.code(), from_transport(&missing)), (Code::NotFound, false));
        assert_eq!(
            berth_csi::code::status_text(&missing),
            "rpc error: code = NotFound desc = the source is not there: über"
        );
        let absent = client.call(PATIENCE, GetPluginInfoRequest {}).await.unwrap_err();
        assert_eq!((absent.code(), from_transport(&absent)), (Code::Unimplemented, false));
    }
    served.stop().await.unwrap();
}

#[tokio::test]
async fn a_call_ends_at_its_deadline() {
    let served = Served::on_a_socket(None).await;
    let client = Client::connect(&served.endpoint);
    let late = client.call(Duration::from_millis(100), create("slow")).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
    served.plugin.gate.add_permits(1);
    take(&served.plugin.done, 1).await;
    served.stop().await.unwrap();
}

#[tokio::test]
async fn a_call_that_does_not_get_through_is_unavailable_and_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let client = Client::connect(&Endpoint::Unix(directory.path().join("nobody.sock")));
    let mut registry = Registry::default();
    client.measure(&mut registry);
    let status = client.call(PATIENCE, create("v")).await.unwrap_err();
    assert!(from_transport(&status), "{status:?}");
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "the call did not get through: No such file or directory (os error 2)");
    let text = scraped(&registry);
    let counted = "csi_sidecar_operations_seconds_count{driver_name=\"unknown-driver\",\
                   method_name=\"/csi.v1.Controller/CreateVolume\",grpc_status_code=\"Unavailable\"} 1";
    assert!(text.contains(counted), "{text}");
}
