//! Measures what the proxy of `berth dev` adds to a call: the same calls of the same driver, with and without it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use berth_certify::process::Launch;
use berth_csi::{CallLayer, Client, Endpoint, Listener, Metrics, v1};
use berth_dev::record::Events;
use berth_dev::{Options, StepFilter, Workbench};
use berth_testkit::FakeDriver;

const TIMEOUT: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() {
    let calls: u32 = std::env::var("CALLS").ok().and_then(|text| text.parse().ok()).unwrap_or(5000);
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let endpoint = Endpoint::Unix(directory.path().join("driver.sock"));
    let listener = Listener::bind(&endpoint).await.expect("the socket is free");
    let layer = CallLayer::new(Metrics::unregistered("bench"), None);
    let driver = FakeDriver::new("bench");
    tokio::spawn(berth_csi::serve(listener, driver.routes(), layer, std::future::pending::<()>()));
    let (events, mut receiver) = Events::new(None).expect("no file is opened");
    tokio::spawn(async move { while receiver.recv().await.is_some() {} });
    let options = Options {
        launch: Launch::Endpoint(endpoint.clone()),
        directory: directory.path().to_owned(),
        socket: directory.path().join("proxy.sock"),
        top: directory.path().to_owned(),
        node: "bench".to_owned(),
        build: String::new(),
        watch: Vec::new(),
        faults: Vec::new(),
        seed: 1,
        step: StepFilter::Off,
    };
    let bench = Workbench::open(options, Arc::new(events)).await.expect("the driver is there");
    let direct = Client::connect(&endpoint);
    let proxied = Client::connect(&Endpoint::Unix(bench.socket().to_owned()));
    println!(
        "{calls} calls one after the other, milliseconds per call: median without the proxy, with it, difference"
    );
    measure("Probe", calls, &direct, &proxied, || v1::ProbeRequest {}).await;
    measure("NodeStageVolume", calls, &direct, &proxied, || v1::NodeStageVolumeRequest {
        volume_id: "volume".to_owned(),
        staging_target_path: "/nowhere".to_owned(),
        ..v1::NodeStageVolumeRequest::default()
    })
    .await;
}

async fn measure<C: berth_csi::Call>(
    name: &str,
    calls: u32,
    direct: &Client,
    proxied: &Client,
    request: impl Fn() -> C,
) {
    // Alternately, so that whatever else the machine does meets both.
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..calls {
        without.push(timed(direct, request()).await);
        with.push(timed(proxied, request()).await);
    }
    let (without, with) = (median(without), median(with));
    println!("{name:<20} {without:.3} {with:.3} {:.3}", with - without);
}

async fn timed<C: berth_csi::Call>(client: &Client, request: C) -> f64 {
    let begun = Instant::now();
    // Whether the driver knows the volume makes no difference to the time.
    let _ = client.call(TIMEOUT, request).await;
    begun.elapsed().as_secs_f64() * 1000.0
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}
