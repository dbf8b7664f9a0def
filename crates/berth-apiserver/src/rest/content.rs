//! What clients send and get: formats, what they accept, and objects as they are stored, translated, as tables or as
//! metadata only.
//!
//! Events of both groups are one and the same objects: kept as the core group's, shown as the other's.

use std::convert::Infallible;
use std::time::Duration;

use berth_core::names::{EVENTS_V1, META_V1, META_V1BETA1};
use bytes::Bytes;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, WARNING,
};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::error::{Answer, Failure};
use super::registry::{Served, Stored};
use crate::rules::read;
use crate::schema::{self, protobuf};

/// The body of an answer.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The largest request body that is read.
pub(crate) const BODY_LIMIT: usize = 3 * 1024 * 1024;
/// How long a client may take to send it.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Smaller answers are not worth compressing.
const GZIP_FROM: usize = 128 * 1024;
const OFFERED: &str = "application/json, application/yaml, application/vnd.kubernetes.protobuf";
/// Kubernetes' own wrapping of protobuf messages.
pub(crate) const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// How bytes are to be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Json,
    Yaml,
    Protobuf,
}

/// What an answer is to be turned into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// The object as it is.
    Object,
    /// A `Table` with the columns of the kind, as `kubectl get` prints it.
    Table,
    /// A `PartialObjectMetadata`: the object's metadata without spec and status.
    PartialMetadata,
    /// A list of metadata.
    PartialMetadataList,
    /// All of discovery in one document.
    Discovery,
}

/// What the client wants to get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Accept {
    pub(crate) format: Format,
    pub(crate) shape: Shape,
    pub(crate) pretty: bool,
    /// Whether tables and metadata are wanted in their older version.
    pub(crate) beta: bool,
    pub(crate) gzip: bool,
}

impl Default for Accept {
    fn default() -> Self {
        Self { format: Format::Json, shape: Shape::Object, pretty: false, beta: false, gzip: false }
    }
}

struct Clause<'a> {
    media: &'a str,
    as_: Option<&'a str>,
    group: Option<&'a str>,
    version: Option<&'a str>,
    quality: f32,
}

fn clauses(header: &str) -> Vec<Clause<'_>> {
    let mut clauses: Vec<Clause<'_>> = header
        .split(',')
        .map(|clause| {
            let mut parts = clause.split(';').map(str::trim);
            let mut clause = Clause {
                media: parts.next().unwrap_or_default(),
                as_: None,
                group: None,
                version: None,
                quality: 1.0,
            };
            for (key, value) in parts.filter_map(|part| part.split_once('=')) {
                match key {
                    "as" => clause.as_ = Some(value),
                    "g" => clause.group = Some(value),
                    "v" => clause.version = Some(value),
                    "q" => clause.quality = value.parse().unwrap_or(0.0),
                    _ => {}
                }
            }
            clause
        })
        .filter(|clause| !clause.media.is_empty() && clause.quality > 0.0)
        .collect();
    clauses.sort_by(|a, b| b.quality.total_cmp(&a.quality));
    clauses
}

/// Finds what the client wants most among what it can get here.
///
/// `protobuf` says whether that is offered at this place.
pub(crate) fn negotiate(headers: &HeaderMap, protobuf: bool) -> Answer<Accept> {
    let gzip = headers
        .get(ACCEPT_ENCODING)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.split(',').any(|one| one.trim().split(';').next() == Some("gzip")));
    let header = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if header.trim().is_empty() {
        return Ok(Accept { gzip, ..Accept::default() });
    }
    let mut known_format = false;
    for clause in clauses(header) {
        let format = match clause.media {
            "application/json" | "*/*" | "application/*" => Format::Json,
            "application/yaml" => Format::Yaml,
            PROTOBUF if protobuf => Format::Protobuf,
            _ => continue,
        };
        known_format = true;
        let (shape, beta) = match (clause.as_, clause.group, clause.version) {
            (None, _, _) => (Shape::Object, false),
            (Some(as_), Some("meta.k8s.io"), Some(version @ ("v1" | "v1beta1"))) => {
                let shape = match as_ {
                    "Table" => Shape::Table,
                    "PartialObjectMetadata" => Shape::PartialMetadata,
                    "PartialObjectMetadataList" => Shape::PartialMetadataList,
                    _ => continue,
                };
                (shape, version == "v1beta1")
            }
            (Some("APIGroupDiscoveryList"), Some("apidiscovery.k8s.io"), Some("v2")) => {
                (Shape::Discovery, false)
            }
            _ => continue,
        };
        // Tables and metadata exist as protobuf too, but nobody asks for them without offering JSON next.
        if format == Format::Protobuf && shape != Shape::Object {
            continue;
        }
        return Ok(Accept { format, shape, pretty: false, beta, gzip });
    }
    Err(if known_format { Failure::unknown_shape(OFFERED) } else { Failure::not_acceptable(OFFERED) })
}

/// The format of a request's body.
pub(crate) fn body_format(headers: &HeaderMap) -> Answer<Format> {
    match media_type(headers) {
        "" | "application/json" | "*/*" => Ok(Format::Json),
        "application/yaml" => Ok(Format::Yaml),
        PROTOBUF => Ok(Format::Protobuf),
        _ => Err(Failure::unsupported_media_type(OFFERED)),
    }
}

/// The media type of a request's body, without parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> &str {
    let header = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    header.split(';').next().unwrap_or_default().trim()
}

/// Reads a request's body, up to the limit.
pub(crate) async fn read_body<B>(body: B) -> Answer<Bytes>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let read = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, BODY_LIMIT).collect());
    let Ok(read) = read.await else { return Err(Failure::timeout()) };
    match read {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            Err(Failure::too_large(format!("Request entity too large: limit is {BODY_LIMIT}")))
        }
        Err(error) => Err(Failure::bad_request(format!("cannot read the request's body: {error}"))),
    }
}

/// An answer of a JSON value in the format that is wanted.
pub(crate) fn respond(code: u16, accept: Accept, value: &Value) -> Response<Body> {
    match accept.format {
        Format::Yaml => {
            let text = serde_saphyr::to_string(value).unwrap_or_default();
            respond_bytes(code, "application/yaml", accept.gzip, text.into())
        }
        Format::Json | Format::Protobuf if accept.pretty => {
            let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
            text.push(b'\n');
            respond_bytes(code, "application/json", accept.gzip, text.into())
        }
        Format::Json | Format::Protobuf => {
            let mut text = serde_json::to_vec(value).unwrap_or_default();
            text.push(b'\n');
            respond_bytes(code, "application/json", accept.gzip, text.into())
        }
    }
}

/// An answer of a `Status` in the format that is wanted, protobuf included.
pub(crate) fn respond_status(code: u16, accept: Accept, status: &Value) -> Response<Body> {
    let accept = Accept { shape: Shape::Object, ..accept };
    if accept.format == Format::Protobuf
        && let Some(type_) = schema::built_in_type("meta.Status")
        && let Ok(bytes) = protobuf::encode(&type_, status)
    {
        return respond_bytes(code, PROTOBUF, false, bytes.into());
    }
    respond(code, accept, status)
}

/// An answer of bytes as they are, compressed when that pays.
pub(crate) fn respond_bytes(code: u16, media: &'static str, gzip: bool, bytes: Bytes) -> Response<Body> {
    let (bytes, encoding) = if gzip && bytes.len() >= GZIP_FROM {
        (compress(&bytes), Some(HeaderValue::from_static("gzip")))
    } else {
        (bytes, None)
    };
    let mut response = Response::new(Full::new(bytes).boxed_unsync());
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    if let Some(encoding) = encoding {
        headers.insert(CONTENT_ENCODING, encoding);
    }
    response
}

/// An answer in plain text.
pub(crate) fn respond_text(code: u16, text: impl Into<Bytes>) -> Response<Body> {
    respond_bytes(code, "text/plain; charset=utf-8", false, text.into())
}

fn compress(bytes: &[u8]) -> Bytes {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    // Writing to memory does not fail.
    let written = encoder.write_all(bytes).and_then(|()| encoder.finish());
    written.unwrap_or_default().into()
}

/// Warnings are cut to this many bytes in all.
const WARNINGS_LIMIT: usize = 4096;

/// Leaves what is worth mentioning in `Warning` headers.
pub(crate) fn warn(response: &mut Response<Body>, warnings: &[String]) {
    let mut length = 0;
    for warning in warnings {
        length += warning.len();
        if length > WARNINGS_LIMIT {
            return;
        }
        let clean: String = warning.chars().filter(|c| !c.is_control()).collect();
        let text = format!("299 - \"{}\"", clean.replace('\\', "\\\\").replace('"', "\\\""));
        if let Ok(value) = HeaderValue::from_str(&text) {
            response.headers_mut().append(WARNING, value);
        }
    }
}

/// What a table's rows carry of their objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Include {
    Nothing,
    Metadata,
    Object,
}

impl Include {
    pub(crate) fn parse(text: Option<&str>) -> Answer<Self> {
        match text {
            None | Some("Metadata") => Ok(Self::Metadata),
            Some("None") => Ok(Self::Nothing),
            Some("Object") => Ok(Self::Object),
            Some(other) => Err(Failure::bad_request(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {other:?}: must be \
                 'Metadata', 'Object', 'None', or empty"
            ))),
        }
    }
}

/// How one client wants to see the objects of one resource.
pub(crate) struct Presenter<'a> {
    pub(crate) served: &'a Served,
    pub(crate) accept: Accept,
    pub(crate) include: Include,
}

impl Presenter<'_> {
    /// Whether stored bytes can be sent as they are.
    pub(crate) fn is_plain(&self) -> bool {
        self.accept.format == Format::Json
            && self.accept.shape == Shape::Object
            && self.served.stored == Stored::Same
            && !self.accept.pretty
    }

    /// An object of the store as the client wants it.
    pub(crate) fn object(&self, mut object: Value) -> Value {
        from_store(self.served, &mut object);
        match self.accept.shape {
            Shape::Object | Shape::Discovery => object,
            Shape::Table => self.table(&[object], None, true),
            Shape::PartialMetadata | Shape::PartialMetadataList => {
                self.partial(&object, "PartialObjectMetadata")
            }
        }
    }

    /// Like [`Self::object`], for an event of a watch: only the first table names its columns.
    pub(crate) fn event(&self, mut object: Value, first: bool) -> Value {
        if self.accept.shape == Shape::Table {
            from_store(self.served, &mut object);
            return self.table(&[object], None, first);
        }
        self.object(object)
    }

    /// A list of objects of the store as the client wants it.
    fn list(&self, objects: Vec<Value>, metadata: Value) -> Value {
        let objects = objects.into_iter().map(|mut object| {
            from_store(self.served, &mut object);
            object
        });
        match self.accept.shape {
            Shape::Table => self.table(&objects.collect::<Vec<_>>(), Some(metadata), true),
            Shape::PartialMetadata | Shape::PartialMetadataList => {
                let items: Vec<Value> =
                    objects.map(|object| self.partial(&object, "PartialObjectMetadata")).collect();
                let version = self.meta_version();
                json!({
                    "kind": "PartialObjectMetadataList", "apiVersion": version, "metadata": metadata,
                    "items": items,
                })
            }
            Shape::Object | Shape::Discovery => json!({
                "kind": &*self.served.resource.list_kind,
                "apiVersion": self.served.api_version,
                "metadata": metadata,
                "items": objects.map(|object| self.item(object)).collect::<Vec<_>>(),
            }),
        }
    }

    /// An object in a list: the list says what kind it is, except for custom resources.
    fn item(&self, mut object: Value) -> Value {
        if self.served.resource.built_in && self.accept.format != Format::Protobuf {
            read::drop(&mut object, "apiVersion");
            read::drop(&mut object, "kind");
        }
        object
    }

    /// The answer with one object, given as stored bytes.
    pub(crate) fn respond_stored(&self, code: u16, bytes: &Bytes) -> Answer<Response<Body>> {
        if self.is_plain() {
            return Ok(respond_bytes(code, "application/json", self.accept.gzip, bytes.clone()));
        }
        let object = serde_json::from_slice(bytes).map_err(Failure::internal)?;
        self.respond(code, object)
    }

    /// The answer with one object of the store.
    pub(crate) fn respond(&self, code: u16, object: Value) -> Answer<Response<Body>> {
        let object = self.object(object);
        if self.accept.format != Format::Protobuf {
            return Ok(respond(code, self.accept, &object));
        }
        let bytes = protobuf::encode(&self.served.schema, &object).map_err(Failure::internal)?;
        Ok(respond_bytes(code, PROTOBUF, self.accept.gzip, bytes.into()))
    }

    /// The answer with a list of objects of the store.
    pub(crate) fn respond_list(&self, objects: Vec<Value>, metadata: Value) -> Answer<Response<Body>> {
        let list = self.list(objects, metadata);
        if self.accept.format != Format::Protobuf {
            return Ok(respond(200, self.accept, &list));
        }
        let bytes = protobuf::encode_list(&self.served.schema, &list).map_err(Failure::internal)?;
        Ok(respond_bytes(200, PROTOBUF, self.accept.gzip, bytes.into()))
    }

    fn meta_version(&self) -> &'static str {
        if self.accept.beta { META_V1BETA1 } else { META_V1 }
    }

    fn partial(&self, object: &Value, kind: &str) -> Value {
        json!({
            "kind": kind, "apiVersion": self.meta_version(), "metadata": read::at(object, &["metadata"]),
        })
    }

    fn table(&self, objects: &[Value], metadata: Option<Value>, columns: bool) -> Value {
        let now = Timestamp::now();
        let rows: Vec<Value> = objects
            .iter()
            .map(|object| {
                let mut row = Map::new();
                row.insert("cells".to_owned(), self.served.rules.cells(object, now).into());
                if let Some(condition) = self.completed(object) {
                    row.insert("conditions".to_owned(), json!([condition]));
                }
                match self.include {
                    Include::Nothing => {
                        row.insert("object".to_owned(), Value::Null);
                    }
                    Include::Metadata => {
                        let partial = json!({
                            "kind": "PartialObjectMetadata", "apiVersion": self.meta_version(),
                            "metadata": read::at(object, &["metadata"]),
                        });
                        row.insert("object".to_owned(), partial);
                    }
                    Include::Object => {
                        row.insert("object".to_owned(), object.clone());
                    }
                }
                Value::Object(row)
            })
            .collect();
        let metadata = metadata.unwrap_or_else(|| match objects {
            [object] => json!({ "resourceVersion": read::text(object, &["metadata", "resourceVersion"]) }),
            _ => json!({}),
        });
        let columns = if columns { self.columns() } else { Vec::new() };
        json!({
            "kind": "Table", "apiVersion": self.meta_version(), "metadata": metadata,
            "columnDefinitions": if columns.is_empty() { Value::Null } else { columns.into() }, "rows": rows,
        })
    }

    /// The mark of a pod that is done, by which clients leave its row out.
    fn completed(&self, object: &Value) -> Option<Value> {
        if !self.served.resource.group.is_empty() || &*self.served.resource.kind != "Pod" {
            return None;
        }
        let phase = read::text(object, &["status", "phase"]);
        let message = match phase {
            "Succeeded" => "The pod has completed successfully.",
            "Failed" => "The pod failed.",
            _ => return None,
        };
        Some(json!({ "type": "Completed", "status": "True", "reason": phase, "message": message }))
    }

    fn columns(&self) -> Vec<Value> {
        let column = |name: &str, type_: &str, format: &str, description: &str, priority: i64| {
            json!({
                "name": name, "type": type_, "format": format, "description": description,
                "priority": priority,
            })
        };
        let columns = self.served.rules.columns().iter();
        columns.map(|c| column(&c.name, &c.type_, &c.format, &c.description, c.priority)).collect()
    }
}

/// From the form in the store to the form that is served.
pub(crate) fn from_store(served: &Served, object: &mut Value) {
    match &served.stored {
        Stored::Same => {}
        Stored::CoreEvents => from_core(object),
        Stored::As(_) => object["apiVersion"] = served.api_version.as_str().into(),
    }
}

/// Brings an object of the store to the version that is stored now; whether an earlier one had written it.
pub(crate) fn renew(served: &Served, object: &mut Value) -> bool {
    let Stored::As(api_version) = &served.stored else { return false };
    let is_old = object["apiVersion"] != *api_version;
    if is_old {
        object["apiVersion"] = api_version.as_str().into();
    }
    is_old
}

/// From the form that is served to the form in the store.
pub(crate) fn to_store(served: &Served, object: &mut Value) {
    match &served.stored {
        Stored::Same => {}
        Stored::CoreEvents => to_core(object),
        Stored::As(api_version) => object["apiVersion"] = api_version.as_str().into(),
    }
}

/// Core field, and the same field in events.k8s.io.
const EVENT_FIELDS: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// From events.k8s.io to the core group.
fn to_core(event: &mut Value) {
    rename_fields(event, "v1", |(core, new)| (new, core));
}

/// From the core group to events.k8s.io.
fn from_core(event: &mut Value) {
    rename_fields(event, EVENTS_V1, |(core, new)| (core, new));
}

fn rename_fields(
    event: &mut Value,
    api_version: &str,
    direction: fn((&'static str, &'static str)) -> (&'static str, &'static str),
) {
    let Some(fields) = event.as_object_mut() else { return };
    let mut moved = Map::new();
    for (from, to) in EVENT_FIELDS.iter().copied().map(direction) {
        if let Some(value) = fields.remove(from) {
            moved.insert(to.to_owned(), value);
        }
    }
    fields.append(&mut moved);
    fields.retain(|name, value| !(name.starts_with("reporting") && value == ""));
    fields.insert("apiVersion".to_owned(), api_version.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accept(header: &'static str) -> Answer<Accept> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static(header));
        negotiate(&headers, true)
    }

    #[test]
    fn the_first_offer_that_exists_is_taken() {
        let table = accept("application/json;as=Table;v=v1;g=meta.k8s.io,application/json").unwrap();
        assert_eq!((table.format, table.shape), (Format::Json, Shape::Table));
        let other = accept("application/json;as=Novel;v=v1;g=meta.k8s.io,application/yaml").unwrap();
        assert_eq!((other.format, other.shape), (Format::Yaml, Shape::Object));
        let discovery =
            accept("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json");
        assert_eq!(discovery.unwrap().shape, Shape::Discovery);
    }

    #[test]
    fn quality_orders_the_offers() {
        let wanted = accept("application/json;q=0.5, application/vnd.kubernetes.protobuf").unwrap();
        assert_eq!(wanted.format, Format::Protobuf);
        assert_eq!(accept("*/*").unwrap().format, Format::Json);
    }

    #[test]
    fn what_is_not_offered_is_not_acceptable() {
        let failure = accept("text/html").unwrap_err();
        assert_eq!((failure.code, failure.reason), (406, "NotAcceptable"));
    }

    #[test]
    fn an_event_survives_the_way_there_and_back() {
        let core = json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e" }, "message": "m", "reason": "r",
            "involvedObject": { "kind": "Pod" }, "count": 2, "source": { "component": "c" },
        });
        let mut event = core.clone();
        from_core(&mut event);
        assert_eq!((&event["note"], &event["regarding"]["kind"]), (&json!("m"), &json!("Pod")));
        assert_eq!(event.get("message"), None);
        to_core(&mut event);
        assert_eq!(event, core);
    }
}
