//! One watch: lists the objects of a kind page by page, then follows their changes.
//!
//! It knows objects only as JSON, so that it is compiled once and not for every kind. A watch that ends goes on where it
//! ended; one that was away for too long (410) lists again. Whatever else fails is tried again after a pause that grows.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use futures_util::AsyncBufReadExt as _;
use http::header::{ACCEPT_ENCODING, HeaderValue};
use kube::Client;
use kube::api::{ListParams, WatchParams};
use kube::core::Status;
use kube::core::request::Request as Requests;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

/// How many objects are listed at a time.
pub(crate) const PAGE: u32 = 500;
/// A server ends a watch after 290 s; one that is silent for longer has lost its connection without a word.
const WATCH_IDLE_LIMIT: Duration = Duration::from_secs(295);

/// Who takes in what a watch brings.
pub(crate) trait Sink: Send + Sync {
    /// A list begins; what it does not bring is gone when it is complete.
    fn begin_list(&self);
    /// A list brought an object.
    fn listed(&self, json: &[u8]) -> serde_json::Result<()>;
    /// A list is complete.
    fn end_list(&self);
    /// An object came or changed; says its version.
    fn applied(&self, json: &[u8]) -> serde_json::Result<Option<String>>;
    /// An object is gone; says its last version.
    fn deleted(&self, json: &[u8]) -> serde_json::Result<Option<String>>;
    /// Nothing comes any more.
    fn end(&self);
}

/// What to watch, and for whom.
pub(crate) struct Watch {
    pub(crate) client: Client,
    /// As it is called in the log.
    pub(crate) kind: Cow<'static, str>,
    pub(crate) path: String,
    pub(crate) fields: String,
    pub(crate) labels: String,
    pub(crate) sink: Arc<dyn Sink>,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Kube(#[from] kube::Error),
    #[error("read the changes")]
    Read(#[from] std::io::Error),
    #[error("decode what the API server sent")]
    Decode(#[from] serde_json::Error),
    #[error("the API server sent no resource version")]
    NoVersion,
}

impl Error {
    /// What is to be followed is too old for the API server.
    fn is_gone(&self) -> bool {
        matches!(self, Self::Kube(kube::Error::Api(status)) if status.code == 410)
    }
}

impl From<kube::core::request::Error> for Error {
    fn from(error: kube::core::request::Error) -> Self {
        Self::Kube(kube::Error::BuildRequest(error))
    }
}

/// A page of a list.
#[derive(Deserialize)]
pub(crate) struct Page<'a> {
    #[serde(default)]
    pub(crate) metadata: PageMeta,
    #[serde(borrow)]
    pub(crate) items: Option<Vec<&'a RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PageMeta {
    resource_version: Option<String>,
    pub(crate) r#continue: Option<String>,
}

#[derive(Deserialize)]
struct Change<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: PageMeta,
}

impl Watch {
    /// Runs until the shutdown.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.follow() => {}
        }
        self.sink.end();
    }

    async fn follow(&self) {
        let mut failures = 0;
        let mut version = None;
        loop {
            match &version {
                None => match self.list().await {
                    Ok(listed) => {
                        failures = 0;
                        version = Some(listed);
                    }
                    Err(error) => self.pause(&mut failures, &error).await,
                },
                Some(from) => version = self.changes(from.clone(), &mut failures).await,
            }
        }
    }

    /// Lists everything; the version up to which that is complete.
    async fn list(&self) -> Result<String, Error> {
        self.sink.begin_list();
        let mut parameters = ListParams {
            field_selector: selector(&self.fields),
            label_selector: selector(&self.labels),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        loop {
            let request = Requests::new(self.path.as_str()).list(&parameters)?;
            let text = self.client.request_text(request).await?;
            let page: Page<'_> = serde_json::from_str(&text)?;
            for object in page.items.into_iter().flatten() {
                self.sink.listed(object.get().as_bytes())?;
            }
            let given = |text: Option<String>| text.filter(|text| !text.is_empty());
            parameters.continue_token = given(page.metadata.r#continue);
            if parameters.continue_token.is_none() {
                let version = given(page.metadata.resource_version).ok_or(Error::NoVersion)?;
                self.sink.end_list();
                return Ok(version);
            }
        }
    }

    /// Follows changes from a version on until the watch ends; where to go on, `None` if a list must come first.
    async fn changes(&self, mut version: String, failures: &mut u32) -> Option<String> {
        let mut lines = match self.open(&version).await {
            Ok(lines) => lines,
            Err(error) => {
                self.pause(failures, &error).await;
                return (!error.is_gone()).then_some(version);
            }
        };
        let mut line = Vec::new();
        loop {
            line.clear();
            match tokio::time::timeout(WATCH_IDLE_LIMIT, lines.read_until(b'\n', &mut line)).await {
                // The end of the answer, or of a connection that broke.
                Ok(Ok(0)) | Err(_) => return Some(version),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    if !is_end(&error) {
                        self.pause(failures, &error.into()).await;
                    }
                    return Some(version);
                }
            }
            match self.take(&line) {
                Ok(Some(now)) => {
                    *failures = 0;
                    version = now;
                }
                Ok(None) => {}
                Err(error) => {
                    self.pause(failures, &error).await;
                    if error.is_gone() || matches!(error, Error::NoVersion) {
                        return None;
                    }
                }
            }
        }
    }

    async fn open(&self, version: &str) -> Result<impl futures_util::AsyncBufRead + Unpin + use<>, Error> {
        let parameters = WatchParams {
            field_selector: selector(&self.fields),
            label_selector: selector(&self.labels),
            bookmarks: true,
            ..WatchParams::default()
        };
        let mut request = Requests::new(self.path.as_str()).watch(&parameters, version)?;
        // Some servers compress each change by itself, of which the client would read only the first.
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        Ok(Box::pin(self.client.request_stream(request).await?))
    }

    /// Takes in one change; the version it brings, `None` if the line was cut short.
    fn take(&self, line: &[u8]) -> Result<Option<String>, Error> {
        let change: Change<'_> = match serde_json::from_slice(line) {
            Ok(change) => change,
            Err(error) if error.is_eof() => return Ok(None),
            Err(error) => {
                return Err(match serde_json::from_slice::<Status>(line) {
                    Ok(status) => kube::Error::Api(status.boxed()).into(),
                    Err(_) => error.into(),
                });
            }
        };
        let object = change.object.get().as_bytes();
        let version = match &*change.kind {
            "ADDED" | "MODIFIED" => self.sink.applied(object)?,
            "DELETED" => self.sink.deleted(object)?,
            "BOOKMARK" => serde_json::from_slice::<Bookmark>(object)?.metadata.resource_version,
            _ => {
                let status: Status = serde_json::from_slice(object)?;
                return Err(kube::Error::Api(status.boxed()).into());
            }
        };
        version.filter(|version| !version.is_empty()).map(Some).ok_or(Error::NoVersion)
    }

    async fn pause(&self, failures: &mut u32, error: &Error) {
        let wait = Duration::from_millis(10_u64 << (*failures).min(10));
        *failures += 1;
        let (kind, error) = (&*self.kind, berth_core::error_chain(error));
        tracing::warn!(kind, error, "watch interrupted; trying again in {wait:?}");
        tokio::time::sleep(wait).await;
    }
}

fn selector(text: &str) -> Option<String> {
    Some(text.to_owned()).filter(|text| !text.is_empty())
}

/// Whether a connection was cut off: as good as an end.
fn is_end(error: &std::io::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let io = error.downcast_ref::<std::io::Error>();
        let kind = io.map(std::io::Error::kind);
        if matches!(kind, Some(std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::TimedOut))
            || error.to_string().contains("unexpected EOF during chunk")
        {
            return true;
        }
        cause = match io.and_then(std::io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    false
}
