//! The twin as an HTTP server: what happens to every call, whichever provider it is meant for.
//!
//! A call is counted, has its credentials checked, passes the rate limit, and suffers the faults that are asked for; then the
//! provider's module answers it. Paths that begin with `/_twin` steer the twin (`admin.rs`), and `/_node/ID` is the metadata
//! service as the instance of that id sees it. Only loopback addresses are served: credentials travel in the clear here.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use berth_host::path::Dir;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::account::{Account, Delays, Quotas, Refusal, uuid};
use crate::admin;
use crate::aliyun::Aliyun;
use crate::digitalocean::DigitalOcean;
use crate::faults::{Answer, Effects, Fault, Faults};
use crate::limits::{Allowance, Limiter, RateLimit};
use crate::media;
use crate::records::Instance;

/// The file that says where a twin listens.
const RUNNING: &str = "cloud.json";
const LOCK: &str = "cloud.lock";
/// The file with the address of the last start.
const ADDRESS: &str = "address";
/// No request of these APIs is larger.
const LARGEST_BODY: usize = 1 << 20;
/// How long until a connection is accepted after one could not be.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long calls under way get to end.
const DRAIN: Duration = Duration::from_secs(2);

/// Whose API is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Provider {
    /// DigitalOcean's REST API, version 2.
    DigitalOcean {
        /// The bearer token that is accepted.
        token: String,
    },
    /// Alibaba Cloud's ECS API, version 2014-05-26.
    Aliyun {
        /// The id of the access key that is accepted.
        access_key_id: String,
        /// The secret by which requests are signed.
        access_key_secret: String,
        /// Devices appear as those of NVMe disks, and not as those of virtio disks.
        nvme: bool,
    },
}

/// A server of the account that is there from the start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceOptions {
    /// Its id, by which the metadata service is asked too.
    pub id: String,
    /// Where it stands; the region's first zone if `None`.
    pub zone: Option<String>,
    /// Its size, by the provider's name.
    pub kind: Option<String>,
    /// Attached disks appear as block devices of this machine.
    pub devices: bool,
}

/// How a twin is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Whose API is served, and to whom.
    pub provider: Provider,
    /// The region of the account.
    pub region: String,
    /// Where it listens; a loopback address. Port 0 takes that of the last start if it is free, and any other one if not.
    pub listen: SocketAddr,
    /// Where everything is kept.
    pub data_dir: PathBuf,
    /// Where the links to devices appear, one directory for each instance; `devices` in the data directory if `None`.
    pub devices: Option<PathBuf>,
    /// The servers of the account; those of an earlier start stay.
    pub instances: Vec<InstanceOptions>,
    /// How much the account may have.
    pub quotas: Quotas,
    /// How long work takes.
    pub delays: Delays,
    /// How many calls are taken.
    pub rate_limit: RateLimit,
    /// What goes wrong, one `CALL=EFFECT[,after=N][,times=N]` each.
    pub faults: Vec<String>,
}

/// Why a twin does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What it was asked for makes no sense.
    #[error("{0}")]
    Options(String),
    /// Its data cannot be read or written.
    #[error("{0}")]
    Data(String),
    /// Another twin runs in the directory.
    #[error("a twin already runs in {0}")]
    InUse(PathBuf),
    /// The address cannot be listened on.
    #[error("listen on {0}: {1}")]
    Listen(SocketAddr, std::io::Error),
}

impl From<berth_host::Error> for Error {
    fn from(error: berth_host::Error) -> Self {
        Self::Data(error.sentence())
    }
}

/// One call of the API.
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) request_id: String,
}

impl Call {
    /// The parts of the path between its slashes.
    pub(crate) fn segments(&self) -> Vec<&str> {
        self.path.split('/').filter(|part| !part.is_empty()).collect()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The query's parameters, decoded, in their order.
    pub(crate) fn parameters(&self) -> Vec<(String, String)> {
        decode_form(&self.query)
    }

    pub(crate) fn parameter(&self, name: &str) -> Option<String> {
        self.parameters().into_iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// How the caller reached this server.
    pub(crate) fn host(&self) -> &str {
        self.header("host")
    }
}

/// The pairs of a query or of a form.
pub(crate) fn decode_form(text: &str) -> Vec<(String, String)> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        })
        .collect()
}

fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = text.get(at + 1..at + 3).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (bytes[at], escaped) {
            (b'%', Some(byte)) => {
                decoded.push(byte);
                at += 2;
            }
            (b'+', _) => decoded.push(b' '),
            (byte, _) => decoded.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// An answer before it becomes HTTP.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) body: Body,
    pub(crate) headers: Vec<(&'static str, String)>,
}

/// What an answer holds.
#[derive(Debug)]
pub(crate) enum Body {
    Json(Value),
    Text(String),
    Empty,
}

impl Reply {
    pub(crate) fn json(status: StatusCode, body: Value) -> Self {
        Self { status, body: Body::Json(body), headers: Vec::new() }
    }

    pub(crate) fn text(status: StatusCode, body: impl Into<String>) -> Self {
        Self { status, body: Body::Text(body.into()), headers: Vec::new() }
    }

    pub(crate) fn empty(status: StatusCode) -> Self {
        Self { status, body: Body::Empty, headers: Vec::new() }
    }

    pub(crate) fn with_header(mut self, name: &'static str, value: String) -> Self {
        self.headers.push((name, value));
        self
    }

    fn into_response(self) -> http::Response<Full<Bytes>> {
        let (kind, body) = match self.body {
            Body::Json(value) => ("application/json; charset=utf-8", value.to_string()),
            Body::Text(text) => ("text/plain; charset=utf-8", text),
            Body::Empty => ("", String::new()),
        };
        let mut response = http::Response::new(Full::new(Bytes::from(body)));
        *response.status_mut() = self.status;
        let content_type = Some(("content-type", kind.to_owned())).filter(|_| !kind.is_empty());
        for (name, value) in self.headers.into_iter().chain(content_type) {
            if let Ok(value) = HeaderValue::from_str(&value) {
                response.headers_mut().insert(HeaderName::from_static(name), value);
            }
        }
        response
    }
}

/// What only one provider knows.
#[async_trait]
pub(crate) trait Api: Send + Sync {
    /// The name by which the call is counted and by which faults choose it.
    fn kind(&self, call: &Call) -> String;
    /// Refuses callers without the right credentials.
    fn authenticate(&self, call: &Call) -> Result<(), Reply>;
    /// What calls are counted by for the rate limit.
    fn limited_by(&self, kind: &str) -> String;
    async fn answer(&self, twin: &Twin, call: &Call, effects: &Effects) -> Reply;
    /// The answer of a server that fails with this status.
    fn failure(&self, call: &Call, status: StatusCode) -> Reply;
    /// The answer to a call beyond the rate limit.
    fn throttled(&self, call: &Call, retry_after: Duration) -> Reply;
    /// What the answer tells of the rate limit and of the request.
    fn decorate(&self, call: &Call, reply: Reply, allowance: Option<&Allowance>) -> Reply;
    /// The metadata service, as this instance sees it.
    fn metadata(&self, instance: &Instance, path: &str, call: &Call) -> Reply;
    /// Checks a new server of the account and fills in what was not said.
    fn instance(&self, options: &InstanceOptions) -> Result<Instance, String>;
}

/// How often each kind of call was made.
#[derive(Debug, Default, Clone, Serialize)]
pub(crate) struct Counts {
    pub(crate) total: u64,
    pub(crate) throttled: u64,
    pub(crate) calls: BTreeMap<String, u64>,
}

/// What the file of a running twin says.
#[derive(Debug, Serialize)]
struct Running<'a> {
    pid: u32,
    url: &'a str,
    devices: &'a Path,
    metadata: BTreeMap<String, String>,
}

/// A twin that can serve.
pub struct Twin {
    pub(crate) account: Arc<Account>,
    pub(crate) api: Box<dyn Api>,
    pub(crate) faults: Faults,
    pub(crate) limiter: Limiter,
    pub(crate) counts: Mutex<Counts>,
    /// Who answers where no instance is named.
    first_instance: String,
    listener: TcpListener,
    url: String,
    devices: PathBuf,
    data: Dir,
    _lock: std::fs::File,
}

impl Twin {
    /// Opens the account, makes its devices, and listens.
    pub async fn open(options: Options) -> Result<Arc<Self>, Error> {
        if !options.listen.ip().is_loopback() {
            return Err(Error::Options(format!(
                "{} is no loopback address, and a twin's credentials travel in the clear: listen on 127.0.0.1",
                options.listen
            )));
        }
        let faults: Result<Vec<_>, _> = options.faults.iter().map(|fault| Fault::parse(fault)).collect();
        let faults = faults.map_err(Error::Options)?;
        let data_dir = std::path::absolute(&options.data_dir)
            .map_err(|error| Error::Data(format!("{}: {error}", options.data_dir.display())))?;
        let (data, lock) = take(&data_dir)?;
        data.remove_written(RUNNING)?;
        let devices = options.devices.clone().unwrap_or_else(|| data_dir.join("devices"));
        let devices = std::path::absolute(&devices)
            .map_err(|error| Error::Data(format!("{}: {error}", devices.display())))?;
        let (api, rules): (Box<dyn Api>, _) = match &options.provider {
            Provider::DigitalOcean { token } => {
                let api = DigitalOcean::new(token.clone(), options.region.clone());
                (Box::new(api), DigitalOcean::RULES)
            }
            Provider::Aliyun { access_key_id, access_key_secret, nvme } => {
                let api =
                    Aliyun::new(access_key_id.clone(), access_key_secret.clone(), options.region.clone());
                (Box::new(api), if *nvme { Aliyun::NVME_RULES } else { Aliyun::RULES })
            }
        };
        let account = Account::open(&data, &devices, rules, options.quotas.clone(), options.delays)
            .map_err(Error::Data)?;
        for wanted in &options.instances {
            let instance = api.instance(wanted).map_err(Error::Options)?;
            if !account.records().instances.contains_key(&instance.id) {
                account.put_instance(&instance).map_err(|error| Error::Data(format!("{error:?}")))?;
            }
        }
        let listener =
            listen(options.listen, &data).await.map_err(|error| Error::Listen(options.listen, error))?;
        let address = listener.local_addr().map_err(|error| Error::Listen(options.listen, error))?;
        data.write_atomically(ADDRESS, address.to_string().as_bytes())?;
        let first_instance = options.instances.first().map(|one| one.id.clone());
        let first_instance =
            first_instance.or_else(|| account.records().instances.keys().next().cloned()).unwrap_or_default();
        Ok(Arc::new(Self {
            account: Arc::new(account),
            api,
            faults: Faults::new(faults),
            limiter: Limiter::new(options.rate_limit),
            counts: Mutex::default(),
            first_instance,
            listener,
            url: format!("http://{address}"),
            devices,
            data,
            _lock: lock,
        }))
    }

    /// Where the API is, such as `http://127.0.0.1:4321`.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The base of the metadata service as this instance sees it.
    pub fn metadata_url(&self, instance: &str) -> String {
        format!("{}/_node/{instance}", self.url)
    }

    /// Where an instance finds the devices of its disks by id.
    pub fn devices_of(&self, instance: &str) -> PathBuf {
        self.account.devices_of(instance)
    }

    /// Switches a server on or off, as a power cut does: one without power has no devices.
    pub fn set_power(&self, instance: &str, on: bool) -> Result<(), Error> {
        match self.account.set_power(instance, on) {
            Ok(_) => Ok(()),
            Err(Refusal::NoInstance) => Err(Error::Options(format!("there is no instance {instance}"))),
            Err(refusal) => Err(Error::Data(format!("{refusal:?}"))),
        }
    }

    /// Serves until `stop`; devices that nobody uses are taken away then, and made again at the next start.
    pub async fn serve(self: Arc<Self>, stop: CancellationToken) -> Result<(), Error> {
        self.account.resume();
        let metadata = self.account.records().instances.keys().cloned().collect::<Vec<_>>();
        let metadata = metadata.into_iter().map(|id| (id.clone(), self.metadata_url(&id))).collect();
        let running = Running { pid: std::process::id(), url: &self.url, devices: &self.devices, metadata };
        let running = serde_json::to_vec_pretty(&running).expect("plain fields become JSON");
        self.data.write_atomically(RUNNING, &running)?;
        let connections = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = stop.cancelled() => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    connections.spawn(self.clone().serve_connection(stream, stop.clone()));
                }
                Err(error) => {
                    // Most likely there are too many open files, which only time mends.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        connections.close();
        let _ = tokio::time::timeout(DRAIN, connections.wait()).await;
        self.data.remove_file(RUNNING)?;
        let account = self.account.clone();
        let _ = tokio::task::spawn_blocking(move || account.release()).await;
        Ok(())
    }

    async fn serve_connection(self: Arc<Self>, stream: TcpStream, stop: CancellationToken) {
        let twin = self.clone();
        let service = hyper::service::service_fn(move |request| {
            let twin = twin.clone();
            async move { twin.respond(request).await }
        });
        let connection =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            // A client that breaks off is no news.
            _ = connection.as_mut() => {}
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                let _ = connection.await;
            }
        }
    }

    /// Answers a request, or does not.
    async fn respond(
        self: Arc<Self>,
        request: http::Request<Incoming>,
    ) -> Result<http::Response<Full<Bytes>>, NoAnswer> {
        let (parts, body) = request.into_parts();
        let Ok(body) = Limited::new(body, LARGEST_BODY).collect().await else {
            return Ok(Reply::text(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large").into_response());
        };
        let call = Call {
            method: parts.method,
            // A request by way of a proxy names the whole address; only its path counts.
            path: parts.uri.path().to_owned(),
            query: parts.uri.query().unwrap_or_default().to_owned(),
            headers: parts.headers,
            body: body.to_bytes(),
            request_id: uuid(),
        };
        // The work goes on when the caller hangs up.
        let answered = tokio::spawn(async move { self.answer(&call).await });
        let reply = match answered.await {
            // Until the caller closes the connection, or the twin ends.
            Ok(Err(NoAnswer::Hangs)) => std::future::pending().await,
            Ok(reply) => reply?,
            Err(error) => {
                tracing::error!(%error, "a call panicked");
                Reply::empty(StatusCode::INTERNAL_SERVER_ERROR)
            }
        };
        Ok(reply.into_response())
    }

    async fn answer(&self, call: &Call) -> Answered {
        let segments = call.segments();
        match segments.as_slice() {
            ["_twin", rest @ ..] => return Ok(admin::answer(self, call, rest)),
            ["_node", instance, rest @ ..] => return self.answer_metadata(call, instance, rest).await,
            ["metadata" | "latest", ..] => {
                return self.answer_metadata(call, &self.first_instance, &segments).await;
            }
            _ => {}
        }
        let kind = self.api.kind(call);
        self.count(&kind, false);
        let mut allowance = None;
        let reply = if let Err(refused) = self.api.authenticate(call) {
            refused
        } else {
            allowance = self.limiter.take(&self.api.limited_by(&kind), Timestamp::now());
            match allowance.and_then(|allowance| allowance.retry_after) {
                Some(after) => {
                    self.count(&kind, true);
                    self.api.throttled(call, after)
                }
                None => self.answer_with_faults(call, &kind).await?,
            }
        };
        let reply = self.api.decorate(call, reply, allowance.as_ref());
        tracing::debug!(%kind, status = reply.status.as_u16(), request = call.request_id, "answered");
        Ok(reply)
    }

    async fn answer_with_faults(&self, call: &Call, kind: &str) -> Answered {
        let effects = self.faults.strike(kind);
        tokio::time::sleep(effects.slow).await;
        let instead = |answer| match answer {
            Answer::Drop => Err(NoAnswer::Dropped),
            Answer::Hang => Err(NoAnswer::Hangs),
            Answer::Status(status) => {
                let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                Ok(self.api.failure(call, status))
            }
            Answer::Throttled => {
                self.count(kind, true);
                Ok(self.api.throttled(call, Duration::from_secs(1)))
            }
        };
        if let Some(answer) = effects.before {
            return instead(answer);
        }
        let reply = self.api.answer(self, call, &effects).await;
        match effects.after {
            Some(answer) => instead(answer),
            None => Ok(reply),
        }
    }

    async fn answer_metadata(&self, call: &Call, instance: &str, rest: &[&str]) -> Answered {
        self.count("metadata", false);
        let effects = self.faults.strike("metadata");
        tokio::time::sleep(effects.slow).await;
        match effects.before.or(effects.after) {
            Some(Answer::Drop) => return Err(NoAnswer::Dropped),
            Some(Answer::Hang) => return Err(NoAnswer::Hangs),
            Some(Answer::Throttled) => return Ok(Reply::empty(StatusCode::TOO_MANY_REQUESTS)),
            Some(Answer::Status(status)) => {
                return Ok(Reply::empty(StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY)));
            }
            None => {}
        }
        let Some(instance) = self.account.records().instances.get(instance).cloned() else {
            return Ok(Reply::text(StatusCode::NOT_FOUND, "not found"));
        };
        Ok(self.api.metadata(&instance, &rest.join("/"), call))
    }

    fn count(&self, kind: &str, throttled: bool) {
        let mut counts = self.counts.lock();
        if throttled {
            counts.throttled += 1;
        } else {
            counts.total += 1;
            *counts.calls.entry(kind.to_owned()).or_default() += 1;
        }
    }
}

type Answered = Result<Reply, NoAnswer>;

/// Why there is no answer to a request: a fault asks for it.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error("the connection is closed, as a fault asks for")]
    Dropped,
    #[error("nothing is answered, as a fault asks for")]
    Hangs,
}

fn take(data_dir: &Path) -> Result<(Dir, std::fs::File), Error> {
    let data = Dir::ensure(data_dir, 0o700)?;
    match data.lock_exclusively(LOCK) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            Err(Error::InUse(data_dir.to_owned()))
        }
        lock => Ok((data, lock?)),
    }
}

/// Listens; where any port will do, at that of the last start, where drivers still expect the twin.
async fn listen(address: SocketAddr, data: &Dir) -> std::io::Result<TcpListener> {
    let last = std::fs::read_to_string(data.path().join(ADDRESS)).ok();
    let last = last.and_then(|text| text.trim().parse::<SocketAddr>().ok());
    if address.port() == 0
        && let Some(last) = last.filter(|last| last.ip() == address.ip())
        && let Ok(listener) = TcpListener::bind(last).await
    {
        return Ok(listener);
    }
    TcpListener::bind(address).await
}

/// Takes the devices of a twin away that was killed; its disks stay, and the next start makes their devices again.
///
/// A device that is in use goes away when its last user does.
pub fn release(data_dir: &Path) -> Result<(), Error> {
    if !data_dir.join(LOCK).exists() {
        return Ok(());
    }
    let (_, lock) = take(data_dir)?;
    media::detach_all(data_dir)?;
    drop(lock);
    Ok(())
}

/// Removes everything of a twin that does not run: devices, links, disks and records.
///
/// A device that is in use goes away when its last user does.
pub fn purge(data_dir: &Path) -> Result<(), Error> {
    if !data_dir.exists() {
        return Ok(());
    }
    // A directory of something else is left alone.
    if !data_dir.join(LOCK).exists() {
        return Err(Error::Data(format!("{} is not the directory of a twin", data_dir.display())));
    }
    let (_, lock) = take(data_dir)?;
    media::detach_all(data_dir)?;
    berth_host::path::remove_tree(data_dir)?;
    drop(lock);
    Ok(())
}
