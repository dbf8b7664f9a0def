//! Bodies: what the client accepts, what it sends, and how answers are written.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use http::{HeaderValue, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use serde_json::Value;

use super::error::{Answer, Failure};
use crate::schema;

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
    /// Rows for people.
    Table,
    /// Only metadata.
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
pub(crate) async fn read<B>(body: B) -> Answer<Bytes>
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
            let text = serde_yaml_ng::to_string(value).unwrap_or_default();
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
        && let Ok(bytes) = schema::protobuf::encode(&type_, status)
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
}
