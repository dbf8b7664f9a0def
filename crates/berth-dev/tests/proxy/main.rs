//! The proxy between a client and a driver, both in this process: what passes, what is recorded, and what faults and steps do.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_certify::process::Launch;
use berth_csi::{CallLayer, Client, Endpoint, Listener, Metrics, v1};
use berth_dev::record::{CallRecord, Event, Events};
use berth_dev::{CALLERS_WAIT, Options, StepFilter, Workbench};
use berth_testkit::{FakeDriver, FaultKind};
use bytes::Bytes;
use futures_util::FutureExt as _;
use http_body_util::{BodyExt as _, Full};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tonic::Code;

const LONG: Duration = Duration::from_secs(60);
const CANARY: &str = "canary-5f1d8a";

/// A driver behind a proxy.
struct Bench {
    workbench: Arc<Workbench>,
    events: mpsc::UnboundedReceiver<Event>,
    directory: tempfile::TempDir,
}

impl Bench {
    async fn open(
        endpoint: PathBuf,
        directory: tempfile::TempDir,
        faults: &[&str],
        step: StepFilter,
    ) -> Self {
        let record = directory.path().join("record.jsonl");
        let (events, receiver) = Events::new(Some(&record)).unwrap();
        let options = Options {
            launch: Launch::Endpoint(Endpoint::Unix(endpoint)),
            directory: directory.path().to_owned(),
            socket: directory.path().join("proxy.sock"),
            top: directory.path().to_owned(),
            node: "node".to_owned(),
            build: String::new(),
            watch: Vec::new(),
            faults: faults.iter().map(|text| text.parse().unwrap()).collect(),
            seed: 1,
            step,
        };
        let workbench = Workbench::open(options, Arc::new(events)).await.unwrap();
        Self { workbench, events: receiver, directory }
    }

    /// A fake driver behind the proxy.
    async fn with(driver: &Arc<FakeDriver>, faults: &[&str], step: StepFilter) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let endpoint = directory.path().join("driver.sock");
        let listener = Listener::bind(&Endpoint::Unix(endpoint.clone())).await.unwrap();
        let layer = CallLayer::new(Metrics::unregistered("fake"), None);
        tokio::spawn(berth_csi::serve(listener, driver.routes(), layer, std::future::pending::<()>()));
        Self::open(endpoint, directory, faults, step).await
    }

    fn client(&self) -> Client {
        Client::connect(&Endpoint::Unix(self.workbench.socket().to_owned()))
    }

    /// The calls of a method that were recorded so far.
    async fn calls(&mut self, name: &str) -> Vec<CallRecord> {
        self.workbench.settled().await;
        let mut calls = Vec::new();
        while let Some(Some(event)) = self.events.recv().now_or_never() {
            if let Event::Call(call) = event
                && call.name() == name
            {
                calls.push(call);
            }
        }
        calls
    }
}

fn create(name: &str) -> v1::CreateVolumeRequest {
    let capability = v1::VolumeCapability {
        access_mode: Some(v1::volume_capability::AccessMode {
            mode: v1::volume_capability::access_mode::Mode::SingleNodeWriter.into(),
        }),
        access_type: Some(v1::volume_capability::AccessType::Mount(
            v1::volume_capability::MountVolume::default(),
        )),
    };
    v1::CreateVolumeRequest {
        name: name.to_owned(),
        volume_capabilities: vec![capability],
        secrets: [("password".to_owned(), CANARY.to_owned())].into(),
        ..v1::CreateVolumeRequest::default()
    }
}

/// A driver that answers every method with what it was sent, and says in the trailers what it heard.
async fn echo(listener: UnixListener) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let service = service_fn(|request: http::Request<hyper::body::Incoming>| async {
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            trailers.insert("x-path", request.uri().path().parse().unwrap());
            trailers.insert(
                "x-metadata",
                request.headers().get("x-metadata").cloned().unwrap_or("none".parse().unwrap()),
            );
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let body = Full::new(body).with_trailers(async move { Some(Ok::<_, Infallible>(trailers)) });
            Ok::<_, Infallible>(http::Response::new(body))
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .serve_connection(TokioIo::new(stream), service);
        tokio::spawn(connection);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_pass_unchanged_also_those_of_methods_that_csi_does_not_have() {
    let directory = tempfile::tempdir().unwrap();
    let endpoint = directory.path().join("driver.sock");
    tokio::spawn(echo(UnixListener::bind(&endpoint).unwrap()));
    let mut bench = Bench::open(endpoint, directory, &[], StepFilter::Off).await;
    let stream = UnixStream::connect(bench.workbench.socket()).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let bytes: Bytes = (0..100_000_u32).map(|number| u8::try_from(number % 251).unwrap()).collect();
    // The second is one of CSI, with a message that is none.
    for path in ["/other.Service/Method", "/csi.v1.Controller/CreateVolume"] {
        let request = http::Request::post(format!("http://localhost{path}"))
            .header("content-type", "application/grpc")
            .header("x-metadata", "kept")
            .body(Full::new(bytes.clone()))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap().into_body().collect().await.unwrap();
        let trailers = answer.trailers().unwrap().clone();
        assert_eq!(answer.to_bytes(), bytes, "{path}");
        assert_eq!(
            (&trailers["x-path"], &trailers["x-metadata"]),
            (&path.parse().unwrap(), &"kept".parse().unwrap())
        );
    }
    let seen = bench.calls("Method").await;
    assert_eq!((seen.len(), seen[0].code.as_str()), (1, "OK"));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_recorded_and_judged() {
    let driver = FakeDriver::new("fake");
    let mut bench = Bench::with(&driver, &[], StepFilter::Off).await;
    let client = bench.client();
    let volume = client.call(LONG, create("a")).await.unwrap().volume.unwrap();
    let target = bench.directory.path().join("target").display().to_string();
    let publish = v1::NodePublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        target_path: target.clone(),
        volume_capability: create("a").volume_capabilities.pop(),
        ..v1::NodePublishVolumeRequest::default()
    };
    client.call(LONG, publish).await.unwrap();
    let recorded = bench.calls("NodePublishVolume").await;
    assert_eq!(recorded.len(), 1);
    assert_eq!(recorded[0].request["volume_id"], volume.volume_id);
    assert_eq!(recorded[0].request["volume_capability"]["access_mode"]["mode"], "SINGLE_NODE_WRITER");
    let broken: Vec<_> = recorded[0].broken.iter().map(|broken| (broken.id, broken.found.clone())).collect();
    let found = format!("NodePublishVolume answered OK, nothing is mounted at target_path {target}");
    assert_eq!(broken, [("call.published", found)], "the fake driver mounts nothing");
    assert_eq!(bench.workbench.events().faults(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_is_in_any_event_or_in_the_recording() {
    let driver = FakeDriver::new("fake");
    driver.on(|_: v1::CreateVolumeRequest| {
        let volume = v1::Volume {
            volume_id: "vol".to_owned(),
            volume_context: [("leaked".to_owned(), format!("key={CANARY}"))].into(),
            ..v1::Volume::default()
        };
        Ok(v1::CreateVolumeResponse { volume: Some(volume) })
    });
    driver.on(|_: v1::DeleteVolumeRequest| {
        Err(tonic::Status::internal(format!("mount -o password={CANARY} failed")))
    });
    let mut bench = Bench::with(&driver, &[], StepFilter::parse(&["CreateVolume".to_owned()]).unwrap()).await;
    let client = bench.client();
    let made = tokio::spawn({
        let client = client.clone();
        async move { client.call(LONG, create("a")).await }
    });
    let held = bench.events.recv().await.unwrap();
    let Event::Held(held) = &held else { panic!("{held:?}") };
    assert!(held.request["name"] == "a" && !held.request.to_string().contains(CANARY), "{held:?}");
    assert!(held.inspect.starts_with("nsenter --target "), "{held:?}");
    assert!(bench.workbench.step_next());
    made.await.unwrap().unwrap();
    let deleted = client
        .call(LONG, v1::DeleteVolumeRequest { volume_id: "vol".to_owned(), ..Default::default() })
        .await;
    assert!(deleted.unwrap_err().message().contains(CANARY), "callers get what the driver said");
    bench.workbench.settled().await;
    let recorded = std::fs::read_to_string(bench.directory.path().join("record.jsonl")).unwrap();
    assert!(recorded.contains("call.secret-in-answer") && recorded.contains("***stripped***"), "{recorded}");
    assert!(!recorded.contains(CANARY), "{recorded}");
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_happen_to_the_calls_that_they_name() {
    let driver = FakeDriver::new("fake");
    let faults = [
        "repeat=2@DeleteVolume",
        "drop-answer@CreateVolume",
        "code=RESOURCE_EXHAUSTED@ControllerPublish/2",
        "concurrent=4@NodeStage",
        "delay=50ms@NodeUnstage",
    ];
    let mut bench = Bench::with(&driver, &faults, StepFilter::Off).await;
    let client = bench.client();
    let lost = client.call(LONG, create("a")).await.unwrap_err();
    assert_eq!(lost.code(), Code::Unavailable, "{lost:?}");
    assert_eq!(driver.count("CreateVolume"), 1, "the driver did the work");
    let volume_id = client.call(LONG, create("a")).await.unwrap().volume.unwrap().volume_id;
    let attach = v1::ControllerPublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: "n".to_owned(),
        ..Default::default()
    };
    for _ in 0..2 {
        let refused = client.call(LONG, attach.clone()).await.unwrap_err();
        assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, "a fault of berth dev"));
    }
    assert_eq!(driver.count("ControllerPublishVolume"), 0);
    client.call(LONG, attach).await.unwrap();
    client
        .call(LONG, v1::NodeStageVolumeRequest { volume_id: volume_id.clone(), ..Default::default() })
        .await
        .unwrap();
    assert_eq!(driver.count("NodeStageVolume"), 4);
    let begun = Instant::now();
    client
        .call(
            LONG,
            v1::NodeUnstageVolumeRequest {
                volume_id: volume_id.clone(),
                staging_target_path: "/nowhere".to_owned(),
            },
        )
        .await
        .unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(50));
    let detach = v1::ControllerUnpublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: "n".to_owned(),
        ..Default::default()
    };
    client.call(LONG, detach).await.unwrap();
    client.call(LONG, v1::DeleteVolumeRequest { volume_id, ..Default::default() }).await.unwrap();
    assert_eq!(driver.count("DeleteVolume"), 2);
    let recorded = bench.calls("DeleteVolume").await;
    let faults: Vec<_> = recorded.iter().map(|call| call.faults.join(" ")).collect();
    assert_eq!(faults, ["repeat=2@DeleteVolume".to_owned(), format!("call {} again", recorded[0].number)]);
    assert_eq!(bench.workbench.events().faults(), 0, "the driver did nothing wrong");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_takes_too_long_is_given_up_and_one_that_a_person_holds_is_not() {
    let driver = FakeDriver::new("fake");
    driver.fail("DeleteVolume", "", FaultKind::Hang, 1);
    let step = StepFilter::parse(&["CreateVolume".to_owned()]).unwrap();
    let mut bench = Bench::with(&driver, &["timeout=200ms@DeleteVolume/all"], step).await;
    let client = bench.client();
    let late = client
        .call(CALLERS_WAIT, v1::DeleteVolumeRequest { volume_id: "x".to_owned(), ..Default::default() })
        .await;
    assert_eq!(late.unwrap_err().code(), Code::DeadlineExceeded);
    let made = tokio::spawn({
        let client = client.clone();
        async move { client.call(CALLERS_WAIT, create("a")).await }
    });
    while !matches!(bench.events.recv().await.unwrap(), Event::Held(_)) {}
    assert!(bench.workbench.answer("OK").is_err(), "an id is missing");
    bench.workbench.answer("OK by-hand").unwrap();
    assert_eq!(made.await.unwrap().unwrap().volume.unwrap().volume_id, "by-hand");
    assert_eq!(driver.count("CreateVolume"), 0);
    let recorded = bench.calls("CreateVolume").await;
    assert_eq!(recorded[0].faults, ["answered by hand"]);
    assert_eq!(recorded[0].response["volume"]["volume_id"], "by-hand");
}
