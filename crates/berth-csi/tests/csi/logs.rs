//! What the log says of each call, and what it never says.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock};

use berth_csi::in_process;
use berth_csi::v1::ProbeRequest;
use berth_csi::v1::controller_client::ControllerClient;
use berth_csi::v1::identity_client::IdentityClient;
use berth_csi::v1::snapshot_metadata_client::SnapshotMetadataClient;
use berth_csi::v1::{CreateVolumeRequest, GetMetadataAllocatedRequest};
use parking_lot::Mutex;
use serde_json::Value;
use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::plugin::{Plugin, Served, create, layer, take};

/// While there is only one subscriber, tracing asks whichever thread comes first to a callsite whether anybody is
/// interested in it, once for all threads; that may be the thread of a test that does not listen. With a second
/// subscriber all of them are asked.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| {
    Dispatch::new(tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_writer(io::sink).finish())
});

/// Everything this thread logs, as JSON.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn capture() -> (Self, tracing::subscriber::DefaultGuard) {
        LazyLock::force(&SECOND);
        let log = Self::default();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .with_max_level(LevelFilter::TRACE)
            .with_writer(log.clone())
            .finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }

    /// The lines about finished calls, one each. What is logged of a call in full, with its request, is not among them.
    fn finished(&self) -> Vec<Value> {
        let lines = self.text();
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let is_finish =
            |line: &Value| !line["fields"]["code"].is_null() && line["fields"]["request"].is_null();
        lines.filter(is_finish).collect()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn each_call_leaves_one_line_whose_level_follows_its_outcome() {
    let (log, _guard) = Log::capture();
    let (layer, _registry) = layer(None);
    let channel = in_process(Plugin::new().routes(), &layer);
    IdentityClient::new(channel.clone()).probe(ProbeRequest {}).await.unwrap();
    let mut controller = ControllerClient::new(channel.clone());
    controller.create_volume(create("fine")).await.unwrap();
    for name in ["missing", "broken", "panics"] {
        controller.create_volume(create(name)).await.unwrap_err();
    }
    let breaks = GetMetadataAllocatedRequest { snapshot_id: "breaks".to_owned(), ..Default::default() };
    let mut stream =
        SnapshotMetadataClient::new(channel).get_metadata_allocated(breaks).await.unwrap().into_inner();
    assert_eq!(log.finished().len(), 5, "a stream is not finished before its end");
    while let Ok(Some(_)) = stream.message().await {}

    let lines: Vec<_> = log
        .finished()
        .iter()
        .map(|line| {
            assert!(line["fields"]["duration_ms"].as_f64().is_some_and(|ms| ms >= 0.0), "{line}");
            assert_eq!(line["span"]["name"], "call");
            assert_eq!(line["span"]["rpc"], line["fields"]["rpc"]);
            let fields = &line["fields"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let words = [&line["level"], &fields["message"], &fields["error"]].map(text);
            (line["span"]["id"].as_u64().unwrap(), words.join(" | "))
        })
        .collect();
    let expected = [
        "DEBUG | Identity/Probe finished with OK | ",
        "INFO | Controller/CreateVolume finished with OK | ",
        "WARN | Controller/CreateVolume was refused with NOT_FOUND | the source is not there: über",
        "ERROR | Controller/CreateVolume failed with INTERNAL | the disk is broken",
        "ERROR | Controller/CreateVolume failed with INTERNAL | the handler panicked",
        "ERROR | SnapshotMetadata/GetMetadataAllocated failed with DATA_LOSS | a block is gone",
    ];
    assert_eq!(lines, (1..).zip(expected.map(str::to_owned)).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_call_past_its_deadline_is_logged_with_what_it_came_to_in_the_end() {
    let (log, _guard) = Log::capture();
    let served = Served::on_a_socket(Some(std::time::Duration::from_millis(20))).await;
    ControllerClient::new(served.channel()).create_volume(create("slow")).await.unwrap_err();
    assert!(log.text().contains("the deadline passed; the operation goes on"), "{}", log.text());
    assert_eq!(log.finished(), Vec::<Value>::new());
    served.plugin.gate.add_permits(1);
    take(&served.plugin.done, 1).await;
    served.layer.idle().await;
    let finished = log.finished();
    assert_eq!(finished.len(), 1);
    assert_eq!(finished[0]["fields"]["code"], "OK");
}

#[tokio::test]
async fn not_even_the_most_talkative_log_shows_a_secret() {
    let (log, _guard) = Log::capture();
    let served = Served::on_a_socket(None).await;
    let mut client = ControllerClient::new(served.channel());
    for name in ["fine", "missing", "panics"] {
        let secrets = [("password".to_owned(), "marker-of-a-secret".to_owned())].into();
        let request = CreateVolumeRequest { name: name.to_owned(), secrets, ..Default::default() };
        tracing::info!(?request, "asking");
        let _ = client.create_volume(request).await;
    }
    served.layer.idle().await;
    assert_eq!(log.finished().len(), 3);
    let text = log.text();
    assert!(text.contains("***stripped***"));
    assert!(text.contains("TRACE"), "the transport is heard too");
    assert!(!text.contains("marker-of-a-secret"), "{text}");
}
