//! What a caller sees: answers, deadlines, streams; and what becomes of the handler.

use std::time::Duration;

use berth_csi::v1::controller_client::ControllerClient;
use berth_csi::v1::identity_client::IdentityClient;
use berth_csi::v1::node_client::NodeClient;
use berth_csi::v1::snapshot_metadata_client::SnapshotMetadataClient;
use berth_csi::v1::{GetMetadataAllocatedRequest, NodeGetInfoRequest, ProbeRequest, ProbeResponse};
use berth_csi::{Endpoint, in_process};
use bytes::Bytes;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::{Body as HttpBody, StdError};
use tonic::{Code, Request, Status};

use crate::plugin::{PATIENCE, Plugin, Served, create, layer, scraped, take};

fn blocks_of(snapshot: &str) -> GetMetadataAllocatedRequest {
    GetMetadataAllocatedRequest { snapshot_id: snapshot.to_owned(), ..Default::default() }
}

fn outcome<T: std::fmt::Debug>(answer: Result<T, Status>) -> String {
    match answer {
        Ok(message) => format!("{message:?}"),
        Err(status) => format!("{:?} {:?}", status.code(), status.message()),
    }
}

/// One call of each kind, and what came back.
async fn answers_over<C>(channel: C) -> Vec<String>
where
    C: GrpcService<Body> + Clone,
    C::Error: Into<StdError>,
    C::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <C::ResponseBody as HttpBody>::Error: Into<StdError> + Send,
{
    let mut outcomes = Vec::new();
    let mut identity = IdentityClient::new(channel.clone());
    outcomes.push(outcome(identity.probe(ProbeRequest {}).await.map(tonic::Response::into_inner)));
    let mut controller = ControllerClient::new(channel.clone());
    for name in ["fine", "missing", "broken", "panics"] {
        outcomes.push(outcome(controller.create_volume(create(name)).await.map(tonic::Response::into_inner)));
    }
    outcomes.push(outcome(NodeClient::new(channel.clone()).node_get_info(NodeGetInfoRequest {}).await));
    outcomes.push(outcome(call_by_path(channel.clone(), "/csi.v1.Controller/MakeCoffee").await));
    let mut metadata = SnapshotMetadataClient::new(channel);
    for snapshot in ["fine", "missing", "breaks"] {
        match metadata.get_metadata_allocated(blocks_of(snapshot)).await {
            Err(status) => outcomes.push(outcome::<()>(Err(status))),
            Ok(stream) => {
                let mut stream = stream.into_inner();
                while let Some(message) = stream.message().await.transpose() {
                    let broken = message.is_err();
                    outcomes.push(outcome(message.map(|block| block.volume_capacity_bytes)));
                    if broken {
                        break;
                    }
                }
            }
        }
    }
    outcomes
}

async fn call_by_path<C>(channel: C, path: &'static str) -> Result<ProbeResponse, Status>
where
    C: GrpcService<Body>,
    C::Error: Into<StdError>,
    C::ResponseBody: HttpBody<Data = Bytes> + Send + 'static,
    <C::ResponseBody as HttpBody>::Error: Into<StdError> + Send,
{
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let codec = tonic_prost::ProstCodec::<ProbeRequest, ProbeResponse>::default();
    let path = http::uri::PathAndQuery::from_static(path);
    client.unary(Request::new(ProbeRequest {}), path, codec).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_socket_and_the_process_itself_give_the_same_answers() {
    let served = Served::on_a_socket(None).await;
    let (layer, _registry) = layer(None);
    let over_socket = answers_over(served.channel()).await;
    let within = answers_over(in_process(Plugin::new().routes(), &layer)).await;
    assert_eq!(over_socket, within);
    let expected = [
        "ProbeResponse { ready: Some(true) }",
        "volume_id: \"fine\"",
        "NotFound \"the source is not there: über\"",
        "Internal \"the disk is broken\"",
        "Internal \"the handler of this call panicked",
        "Unimplemented",
        "Unimplemented",
        "1",
        "2",
        "NotFound \"no such snapshot\"",
        "1",
        "2",
        "DataLoss \"a block is gone\"",
    ];
    assert_eq!(within.len(), expected.len(), "{within:#?}");
    for (answer, expected) in within.iter().zip(expected) {
        assert!(answer.contains(expected), "{answer} instead of {expected}");
    }
}

#[tokio::test]
async fn a_handler_finishes_although_its_client_went_away() {
    let served = Served::on_a_socket(None).await;
    let channel = served.channel();
    let mut client = ControllerClient::new(channel.clone());
    let call = tokio::spawn(async move { client.create_volume(create("slow")).await });
    take(&served.plugin.began, 1).await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    // On the same connection the cancellation is ahead of this call, so the server has seen it by now.
    IdentityClient::new(channel).probe(ProbeRequest {}).await.unwrap();

    served.plugin.gate.add_permits(1);
    take(&served.plugin.done, 1).await;
    timeout(PATIENCE, served.layer.idle()).await.unwrap();
    let counted = r#"_count{driver_name="test.berth",method_name="/csi.v1.Controller/CreateVolume",grpc_status_code="OK"} 1"#;
    assert!(scraped(&served.registry).contains(counted), "{}", scraped(&served.registry));
}

#[tokio::test]
async fn a_handler_in_the_same_process_finishes_although_its_caller_went_away() {
    let plugin = Plugin::new();
    let (layer, _registry) = layer(None);
    let mut client = ControllerClient::new(in_process(plugin.routes(), &layer));
    let call = tokio::spawn(async move { client.create_volume(create("slow")).await });
    take(&plugin.began, 1).await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    plugin.gate.add_permits(1);
    take(&plugin.done, 1).await;
}

#[tokio::test]
async fn no_caller_waits_longer_than_the_maximum_and_the_handler_goes_on() {
    let served = Served::on_a_socket(Some(Duration::from_millis(50))).await;
    let mut client = ControllerClient::new(served.channel());
    let status = client.create_volume(create("slow")).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(status.message().contains("goes on in the background"), "{status}");
    served.plugin.gate.add_permits(1);
    take(&served.plugin.done, 1).await;
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_names_a_timeout_gets_its_answer_then() {
    let plugin = Plugin::new();
    let (layer, _registry) = layer(Some(Duration::from_secs(600)));
    let mut client = ControllerClient::new(in_process(plugin.routes(), &layer));
    let mut request = Request::new(create("slow"));
    request.set_timeout(Duration::from_secs(7));
    let began = tokio::time::Instant::now();
    let status = client.create_volume(request).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    assert!(status.message().contains("can be retried"), "{status}");
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(7) && took < Duration::from_secs(8), "{took:?}");
}

#[tokio::test]
async fn a_timeout_that_the_client_itself_does_not_watch_is_answered_by_the_layer() {
    let served = Served::on_a_socket(None).await;
    let Endpoint::Unix(path) = &served.endpoint else { panic!("the plugin is on a Unix socket") };
    // A tonic channel would end the call itself, with words of its own.
    let stream = TokioIo::new(UnixStream::connect(path).await.unwrap());
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let channel = tower::service_fn(move |request: http::Request<Body>| sender.clone().send_request(request));
    let mut client = ControllerClient::with_origin(channel, http::Uri::from_static("http://localhost"));
    for _ in 0..20 {
        let mut request = Request::new(create("slow"));
        request.set_timeout(Duration::from_millis(5));
        let status = client.create_volume(request).await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        assert!(status.message().contains("goes on in the background"), "{status}");
    }
    served.plugin.gate.add_permits(20);
    take(&served.plugin.done, 20).await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_cut_off_at_the_deadline_after_what_was_ready() {
    let (layer, registry) = layer(Some(Duration::from_secs(5)));
    let mut client = SnapshotMetadataClient::new(in_process(Plugin::new().routes(), &layer));
    let mut stream = client.get_metadata_allocated(blocks_of("endless")).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().volume_capacity_bytes, 1);
    assert_eq!(stream.message().await.unwrap().unwrap().volume_capacity_bytes, 2);
    assert_eq!(stream.message().await.unwrap_err().code(), Code::DeadlineExceeded);
    assert!(scraped(&registry).contains(r#"grpc_status_code="DeadlineExceeded"} 1"#));
}

#[tokio::test]
async fn one_connection_carries_hundreds_of_calls_at_once() {
    const CALLS: u32 = 500;
    let served = Served::on_a_socket(None).await;
    let client = ControllerClient::new(served.channel());
    let mut calls = JoinSet::new();
    for _ in 0..CALLS {
        let mut client = client.clone();
        calls.spawn(async move { client.create_volume(create("slow")).await });
    }
    take(&served.plugin.began, CALLS).await;
    assert!(scraped(&served.registry).contains(&format!(r#"in_flight{{driver_name="test.berth"}} {CALLS}"#)));
    served.plugin.gate.add_permits(CALLS as usize);
    while let Some(answer) = calls.join_next().await {
        answer.unwrap().unwrap();
    }
    timeout(PATIENCE, served.layer.idle()).await.unwrap();
    assert!(scraped(&served.registry).contains(r#"in_flight{driver_name="test.berth"} 0"#));
}

#[tokio::test]
async fn every_call_is_counted_under_its_method_and_code() {
    let (layer, registry) = layer(None);
    answers_over(in_process(Plugin::new().routes(), &layer)).await;
    let mut endless = SnapshotMetadataClient::new(in_process(Plugin::new().routes(), &layer))
        .get_metadata_allocated(blocks_of("endless"))
        .await
        .unwrap()
        .into_inner();
    endless.message().await.unwrap();
    drop(endless);
    layer.idle().await;

    let text = scraped(&registry);
    for (method, code, count) in [
        ("/csi.v1.Identity/Probe", "OK", 1),
        ("/csi.v1.Controller/CreateVolume", "OK", 1),
        ("/csi.v1.Controller/CreateVolume", "NotFound", 1),
        ("/csi.v1.Controller/CreateVolume", "Internal", 2),
        ("/csi.v1.Node/NodeGetInfo", "Unimplemented", 1),
        ("unknown", "Unimplemented", 1),
        ("/csi.v1.SnapshotMetadata/GetMetadataAllocated", "OK", 1),
        ("/csi.v1.SnapshotMetadata/GetMetadataAllocated", "NotFound", 1),
        ("/csi.v1.SnapshotMetadata/GetMetadataAllocated", "DataLoss", 1),
        ("/csi.v1.SnapshotMetadata/GetMetadataAllocated", "Canceled", 1),
    ] {
        let labels = format!(r#"driver_name="test.berth",method_name="{method}",grpc_status_code="{code}""#);
        let line = format!("csi_plugin_operations_seconds_count{{{labels}}} {count}\n");
        assert!(text.contains(&line), "{line} is missing from\n{text}");
    }
    for bucket in ["0.001", "0.1", "0.25", "2.5", "15.0", "120.0", "600.0", "+Inf"] {
        assert!(text.contains(&format!(r#"le="{bucket}""#)), "{bucket} is missing from\n{text}");
    }
    assert!(text.contains("csi_plugin_operations_in_flight{driver_name=\"test.berth\"} 0\n"), "{text}");
}
