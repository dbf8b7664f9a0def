//! One request and its answer, as both servers get it and as it is recorded.

use std::collections::BTreeMap;
use std::time::Duration;

use berth_apiserver::schema::{built_in, protobuf};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::differential::corpus::{Step, Text};
use crate::differential::normal;
use crate::differential::peers::{Peer, Received};

/// How often `await` asks again.
const PATIENCE: usize = 200;

/// What a server answered, without what differs from one time to the next.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    /// The format, without parameters.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) media: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) warnings: Vec<String>,
    #[serde(default)]
    pub(crate) body: Value,
}

/// A request that is ready to be sent.
pub(crate) struct Ready {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Bytes,
    /// How many lines of the answer to wait for; all of it when absent.
    pub(crate) lines: Option<usize>,
}

/// Sends one step; keeps what it saves.
pub(crate) async fn ask(peer: &Peer, step: &Step, saved: &mut BTreeMap<String, String>) -> Answer {
    let mut received = peer.send(prepare(step, saved)).await;
    for _ in 0..PATIENCE {
        if !step.await_found || received.code != 404 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        received = peer.send(prepare(step, saved)).await;
    }
    let body = read_body(step, &received);
    for (name, pointer) in &step.saves {
        let value = body.pointer(pointer).cloned().unwrap_or_default();
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        saved.insert(name.clone(), text);
    }
    let media = received.media.split(';').next().unwrap_or_default().to_owned();
    let mut answer = Answer { code: received.code, media, warnings: received.warnings, body };
    normal::normalise(&mut answer, step);
    answer
}

fn prepare(step: &Step, saved: &BTreeMap<String, String>) -> Ready {
    let fill = |text: &str| {
        let filled = saved
            .iter()
            .fold(text.to_owned(), |text, (name, value)| text.replace(&format!("{{{name}}}"), value));
        match filled.split_once("{long:") {
            // `{long:N}` stands for N letters.
            Some((before, after)) => {
                let (count, after) = after.split_once('}').expect("{long:N} ends");
                format!("{before}{}{after}", "x".repeat(count.parse().expect("a number")))
            }
            None => filled,
        }
    };
    let mut headers = vec![("user-agent".to_owned(), "differential/1".to_owned())];
    headers.extend(step.headers.iter().cloned());
    if let Some(wanted) = &step.wanted_format {
        headers.push(("accept".to_owned(), accept(wanted)));
    }
    let body = match &step.body {
        Text::None => Bytes::new(),
        Text::Raw(text) => fill(text).into(),
        Text::Json(value) => match step.body_format.as_deref() {
            Some("protobuf") => seal(&serde_json::from_str(&fill(&value.to_string())).expect("still JSON")),
            Some("yaml") => serde_saphyr::to_string(value).expect("JSON is YAML").into(),
            _ => fill(&value.to_string()).into(),
        },
    };
    if !body.is_empty() {
        let format = step.body_format.as_deref().unwrap_or("json");
        headers.push(("content-type".to_owned(), content_type(format).to_owned()));
    }
    Ready { method: step.method.clone(), path: fill(&step.path), headers, body, lines: step.take }
}

fn content_type(format: &str) -> &str {
    match format {
        "json" => "application/json",
        "yaml" => "application/yaml",
        "merge" => "application/merge-patch+json",
        "strategic" => "application/strategic-merge-patch+json",
        "json-patch" => "application/json-patch+json",
        "apply" => "application/apply-patch+yaml",
        "protobuf" => "application/vnd.kubernetes.protobuf",
        other => other,
    }
}

fn accept(format: &str) -> String {
    let shaped = |shape: &str| format!("application/json;as={shape};v=v1;g=meta.k8s.io");
    match format {
        "table" => shaped("Table"),
        "partial" => shaped("PartialObjectMetadata"),
        "partials" => shaped("PartialObjectMetadataList"),
        "aggregated" => "application/json;as=APIGroupDiscoveryList;v=v2;g=apidiscovery.k8s.io".to_owned(),
        other => content_type(other).to_owned(),
    }
}

fn seal(object: &Value) -> Bytes {
    let text = |key: &str| object[key].as_str().unwrap_or_default();
    let (group, version) = text("apiVersion").rsplit_once('/').unwrap_or(("", text("apiVersion")));
    let type_ = built_in(group, version, text("kind")).expect("a built-in kind");
    protobuf::encode(&type_, object).expect("the body can be encoded").into()
}

fn read_body(step: &Step, received: &Received) -> Value {
    if step.take.is_some() && received.code == 200 {
        let lines = received.body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let events = lines.map(|line| serde_json::from_slice(line).unwrap_or(Value::Null));
        return events.take(step.take.unwrap_or_default()).collect();
    }
    let text = || String::from_utf8_lossy(&received.body).into_owned();
    match received.media.split(';').next().unwrap_or_default() {
        "application/json" => serde_json::from_slice(&received.body).unwrap_or_else(|_| text().into()),
        "application/yaml" => serde_saphyr::from_slice(&received.body).unwrap_or_else(|_| text().into()),
        "application/vnd.kubernetes.protobuf" => open(&received.body),
        _ => text().into(),
    }
}

fn open(body: &[u8]) -> Value {
    let envelope = protobuf::Envelope::open(body).expect("an answer in protobuf has its envelope");
    let (group, version) =
        envelope.api_version.rsplit_once('/').unwrap_or(("", envelope.api_version.as_str()));
    match built_in(group, version, &envelope.kind) {
        Some(type_) => protobuf::decode(&type_, body).expect("an answer in protobuf can be read"),
        None => format!("{} {}", envelope.api_version, envelope.kind).into(),
    }
}
