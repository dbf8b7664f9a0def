//! The part of DigitalOcean's API that the driver uses, one function for each call.
//!
//! What is retried here is what cannot do harm twice: reading, deleting, and what the account's limit of requests refused.
//! A request that may or may not have been carried out is an [`Failure::Unclear`], and its caller looks what became of it.

use std::{fmt, time::Duration};

use berth_core::Backoff;
use hyper::{
    Method, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, USER_AGENT},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    Error, Result,
    cloud::{Answer, Deadline, Endpoint, Http, Limiter},
};

/// The most entries that a page may have.
const PAGE: u64 = 200;
/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(30);
/// How often a request is sent that can be repeated without harm.
const ATTEMPTS: u32 = 4;
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), longest: Duration::from_secs(4) };
/// Where the provider refuses a request and does not say for how long.
const PAUSE: Duration = Duration::from_secs(5);
/// After a refusal: the account's 250 requests a minute, less some for others who use the account.
const CAREFUL_RATE: f64 = 3.5;

/// A token of the API. It is sent, and never formatted.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// The token without the white space around it; an error if it cannot be one.
    pub fn new(token: &str) -> Result<Self> {
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::invalid("the token is empty, or has characters that no token has"));
        }
        Ok(Self(token.to_owned()))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

/// Why a call of the API did not succeed.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// The provider answered, and nothing was done.
    Refused {
        status: u16,
        /// The request and the provider's words, with the number of the request.
        said: String,
    },
    /// Whether anything was done is not known.
    Unclear(String),
    /// Nothing was sent, because the account may not send any more before the call's end.
    Held(String),
}

impl Failure {
    pub(super) fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Unclear(_) | Self::Held(_) => None,
        }
    }

    pub(super) fn is_missing(&self) -> bool {
        self.status() == Some(404)
    }

    /// Whether the provider's words contain these, in whatever case.
    pub(super) fn says(&self, words: &str) -> bool {
        matches!(self, Self::Refused { said, .. } if said.to_lowercase().contains(words))
    }

    /// Whether an event of the same droplet or volume is under way, so that this one has to wait.
    pub(super) fn is_pending(&self) -> bool {
        self.says("pending event") || self.says("in progress") || self.says("being processed")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { said, .. } | Self::Unclear(said) | Self::Held(said) => f.write_str(said),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let said = failure.to_string();
        match failure.status() {
            None => Self::Unavailable(said),
            Some(_) if failure.says("limit exceeded") || failure.says("cannot attach more") => {
                Self::Exhausted(said)
            }
            Some(_) if failure.is_pending() => Self::Busy(said),
            Some(401 | 403) => Self::Denied(said),
            Some(400) => Self::Invalid(said),
            Some(_) => Self::Precondition(said),
        }
    }
}

pub(super) type Outcome<T> = std::result::Result<T, Failure>;

/// A volume as the API has it.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct DoVolume {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) size_gigabytes: u64,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(super) description: String,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(super) droplet_ids: Vec<u64>,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(super) tags: Vec<String>,
}

/// A region, as the API describes it.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Region {
    pub(super) slug: String,
}

/// A snapshot of a volume.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct DoSnapshot {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) resource_id: String,
    pub(super) created_at: String,
    pub(super) min_disk_size: u64,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(super) regions: Vec<String>,
}

/// A droplet, of which only what it has attached matters.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Droplet {
    pub(super) id: u64,
    #[serde(default, deserialize_with = "null_is_default")]
    pub(super) volume_ids: Vec<String>,
    #[serde(default)]
    pub(super) region: Option<Region>,
}

/// Something that the provider does to a volume and that takes time.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Action {
    pub(super) id: u64,
    pub(super) status: String,
}

/// What an account may have.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Account {
    #[serde(default)]
    pub(super) volume_limit: u64,
}

/// A volume to make.
#[derive(Debug, Serialize)]
pub(super) struct NewDoVolume<'a> {
    pub(super) region: &'a str,
    pub(super) name: &'a str,
    pub(super) description: &'a str,
    pub(super) size_gigabytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) snapshot_id: Option<&'a str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    pub(super) tags: &'a [String],
}

/// What is to be done to a volume.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub(super) enum Do<'a> {
    Attach { droplet_id: u64, region: &'a str },
    Detach { droplet_id: u64, region: &'a str },
    Resize { size_gigabytes: u64, region: &'a str },
}

fn null_is_default<'de, D: serde::Deserializer<'de>, T: Deserialize<'de> + Default>(
    deserializer: D,
) -> std::result::Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// The API of one account.
#[derive(Debug)]
pub(super) struct Api {
    http: Http,
    endpoint: Endpoint,
    token: Token,
    limiter: Limiter,
}

#[derive(Deserialize)]
struct Complaint {
    #[serde(default)]
    id: String,
    #[serde(default)]
    message: String,
    #[serde(default)]
    request_id: Option<String>,
}

macro_rules! wrapped {
    ($($name:ident { $field:ident: $type:ty })*) => {$(
        #[derive(Deserialize)]
        struct $name { $field: $type }
    )*};
}
wrapped! {
    OneVolume { volume: DoVolume }
    OneSnapshot { snapshot: DoSnapshot }
    OneDroplet { droplet: Droplet }
    OneAccount { account: Account }
    MaybeAction { action: Option<Action> }
    OneAction { action: Action }
}

/// One page of a listing, with the name of its entries left open.
#[derive(Deserialize)]
struct Listed<T> {
    #[serde(alias = "volumes", alias = "snapshots", alias = "droplets")]
    entries: Vec<T>,
    #[serde(default)]
    links: Links,
    #[serde(default)]
    meta: Option<Meta>,
}

#[derive(Deserialize, Default)]
struct Links {
    #[serde(default)]
    pages: Option<Pages>,
}

#[derive(Deserialize)]
struct Pages {
    #[serde(default)]
    next: Option<String>,
}

#[derive(Deserialize)]
struct Meta {
    total: u64,
}

impl Api {
    /// At most `rate` requests a second, if that is not 0.
    pub(super) fn new(endpoint: Endpoint, token: Token, rate: f64) -> Result<Self> {
        Ok(Self { http: Http::new(&endpoint)?, endpoint, token, limiter: Limiter::new(rate, CAREFUL_RATE) })
    }

    pub(super) async fn account(&self, until: Deadline) -> Outcome<Account> {
        Ok(self.read::<OneAccount>("v2/account", until).await?.account)
    }

    pub(super) async fn volume(&self, id: &str, until: Deadline) -> Outcome<Option<DoVolume>> {
        if !is_plain(id) {
            return Ok(None);
        }
        missing_is_none(
            self.read::<OneVolume>(&format!("v2/volumes/{id}"), until).await.map(|one| one.volume),
        )
    }

    /// The volumes of that name, of which there is at most one in a region.
    pub(super) async fn volumes_named(
        &self,
        name: &str,
        region: &str,
        until: Deadline,
    ) -> Outcome<Vec<DoVolume>> {
        self.list(&format!("v2/volumes?name={name}&region={region}"), until).await
    }

    pub(super) async fn volumes(&self, region: &str, until: Deadline) -> Outcome<Vec<DoVolume>> {
        self.list(&format!("v2/volumes?region={region}"), until).await
    }

    /// How many volumes the account has in all regions.
    pub(super) async fn volume_count(&self, until: Deadline) -> Outcome<u64> {
        let page: Listed<DoVolume> = self.read("v2/volumes?page=1&per_page=1", until).await?;
        Ok(page.meta.map_or(page.entries.len() as u64, |meta| meta.total))
    }

    pub(super) async fn create_volume(&self, new: &NewDoVolume<'_>, until: Deadline) -> Outcome<DoVolume> {
        Ok(self.write::<OneVolume>("v2/volumes", new, until).await?.volume)
    }

    pub(super) async fn delete_volume(&self, id: &str, until: Deadline) -> Outcome<()> {
        self.delete(&format!("v2/volumes/{id}"), id, until).await
    }

    /// Begins an action; `None` if the provider says that there is nothing to wait for.
    pub(super) async fn act(&self, volume: &str, what: &Do<'_>, until: Deadline) -> Outcome<Option<Action>> {
        if !is_plain(volume) {
            return Err(Failure::Refused { status: 404, said: format!("there is no volume {volume:?}") });
        }
        Ok(self.write::<MaybeAction>(&format!("v2/volumes/{volume}/actions"), what, until).await?.action)
    }

    pub(super) async fn action(&self, volume: &str, action: u64, until: Deadline) -> Outcome<Action> {
        Ok(self.read::<OneAction>(&format!("v2/volumes/{volume}/actions/{action}"), until).await?.action)
    }

    pub(super) async fn droplet(&self, id: u64, until: Deadline) -> Outcome<Option<Droplet>> {
        missing_is_none(
            self.read::<OneDroplet>(&format!("v2/droplets/{id}"), until).await.map(|one| one.droplet),
        )
    }

    pub(super) async fn droplets(&self, until: Deadline) -> Outcome<Vec<Droplet>> {
        self.list("v2/droplets", until).await
    }

    pub(super) async fn snapshot(&self, id: &str, until: Deadline) -> Outcome<Option<DoSnapshot>> {
        if !is_plain(id) {
            return Ok(None);
        }
        missing_is_none(
            self.read::<OneSnapshot>(&format!("v2/snapshots/{id}"), until).await.map(|one| one.snapshot),
        )
    }

    /// All snapshots of volumes, in all regions.
    pub(super) async fn snapshots(&self, until: Deadline) -> Outcome<Vec<DoSnapshot>> {
        self.list("v2/snapshots?resource_type=volume", until).await
    }

    pub(super) async fn create_snapshot(
        &self,
        volume: &str,
        name: &str,
        tags: &[String],
        until: Deadline,
    ) -> Outcome<DoSnapshot> {
        #[derive(Serialize)]
        struct New<'a> {
            volume_id: &'a str,
            name: &'a str,
            description: &'a str,
            #[serde(skip_serializing_if = "<[String]>::is_empty")]
            tags: &'a [String],
        }
        let new = New { volume_id: volume, name, description: super::CREATED_BY, tags };
        Ok(self.write::<OneSnapshot>(&format!("v2/volumes/{volume}/snapshots"), &new, until).await?.snapshot)
    }

    pub(super) async fn delete_snapshot(&self, id: &str, until: Deadline) -> Outcome<()> {
        self.delete(&format!("v2/snapshots/{id}"), id, until).await
    }

    /// Puts a tag on a volume, and makes the tag if there is none.
    pub(super) async fn tag(&self, tag: &str, volume: &str, until: Deadline) -> Outcome<()> {
        let resources = serde_json::json!({
            "resources": [{ "resource_id": volume, "resource_type": "volume" }],
        });
        let path = format!("v2/tags/{tag}/resources");
        match self.request(Method::POST, &path, Some(body(&resources)), until).await {
            Err(failure) if failure.is_missing() => {}
            tagged => return tagged.map(drop),
        }
        let made =
            self.request(Method::POST, "v2/tags", Some(body(&serde_json::json!({ "name": tag }))), until);
        match made.await {
            // Somebody else made it at the same time.
            Err(failure) if matches!(failure.status(), Some(409 | 422)) => {}
            made => drop(made?),
        }
        self.request(Method::POST, &path, Some(body(&resources)), until).await.map(drop)
    }

    /// All pages of a listing.
    async fn list<T: DeserializeOwned>(&self, path: &str, until: Deadline) -> Outcome<Vec<T>> {
        let mut all = Vec::new();
        let separator = if path.contains('?') { '&' } else { '?' };
        for page in 1u64.. {
            let listed: Listed<T> =
                self.read(&format!("{path}{separator}page={page}&per_page={PAGE}"), until).await?;
            let is_empty = listed.entries.is_empty();
            all.extend(listed.entries);
            if is_empty || listed.links.pages.is_none_or(|pages| pages.next.is_none()) {
                break;
            }
        }
        Ok(all)
    }

    async fn read<T: DeserializeOwned>(&self, path: &str, until: Deadline) -> Outcome<T> {
        parse("GET", path, &self.repeated(Method::GET, path, until).await?)
    }

    async fn delete(&self, path: &str, id: &str, until: Deadline) -> Outcome<()> {
        if !is_plain(id) {
            return Ok(());
        }
        match self.repeated(Method::DELETE, path, until).await {
            Err(failure) if failure.is_missing() => Ok(()),
            deleted => deleted.map(drop),
        }
    }

    async fn write<T: DeserializeOwned>(
        &self,
        path: &str,
        content: &(impl Serialize + Sync),
        until: Deadline,
    ) -> Outcome<T> {
        parse("POST", path, &self.request(Method::POST, path, Some(body(content)), until).await?)
    }

    /// Sends a request that does the same if it is sent twice, again if need be.
    async fn repeated(&self, method: Method, path: &str, until: Deadline) -> Outcome<Answer> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.request(method.clone(), path, None, until).await {
                Err(Failure::Unclear(why)) if attempt < ATTEMPTS => {
                    let pause = BACKOFF.pause(attempt);
                    if until.left(pause) < pause {
                        return Err(Failure::Unclear(why));
                    }
                    tracing::debug!(%why, "asking DigitalOcean again");
                    tokio::time::sleep(pause).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// Sends a request once it is its turn, and again only if the provider did not take it.
    async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        until: Deadline,
    ) -> Outcome<Answer> {
        let what = format!("{method} {}", path.split('?').next().unwrap_or_default());
        let mut headers: Vec<(HeaderName, String)> = vec![
            (AUTHORIZATION, format!("Bearer {}", self.token.0)),
            (USER_AGENT, concat!("berth/", env!("CARGO_PKG_VERSION")).to_owned()),
        ];
        if body.is_some() {
            headers.push((CONTENT_TYPE, "application/json".to_owned()));
        }
        let url = self.endpoint.join(path);
        let mut attempt = 0;
        loop {
            attempt += 1;
            if !self.limiter.turn(until.instant()).await {
                return Err(Failure::Held(format!(
                    "{what}: DigitalOcean takes no more requests of this account for now"
                )));
            }
            let time = until.left(REQUEST).max(Duration::from_secs(1));
            let answer = match self.http.send(method.clone(), &url, &headers, body.clone(), time).await {
                Ok(answer) => answer,
                // The API is out of reach for a moment, perhaps.
                Err(unsent) if !unsent.maybe_sent && attempt < ATTEMPTS && !until.is_over() => {
                    tokio::time::sleep(until.left(BACKOFF.pause(attempt))).await;
                    continue;
                }
                Err(unsent) => return Err(Failure::Unclear(format!("{what}: {}", unsent.why))),
            };
            if let (Some(remaining), Some(reset)) =
                (answer.number("ratelimit-remaining"), answer.number("ratelimit-reset"))
                && answer.status != StatusCode::TOO_MANY_REQUESTS
            {
                self.limiter.told(remaining, reset);
            }
            if answer.status == StatusCode::TOO_MANY_REQUESTS {
                let pause = answer.number("retry-after").map_or(PAUSE, Duration::from_secs);
                self.limiter.complained(pause.max(Duration::from_millis(250)));
                tracing::debug!(?pause, what, "DigitalOcean asks for a pause");
                continue;
            }
            if answer.status.is_success() {
                return Ok(answer);
            }
            return Err(refusal(&what, &answer));
        }
    }
}

/// What the provider said when it did not do what it was asked.
fn refusal(what: &str, answer: &Answer) -> Failure {
    let complaint: Option<Complaint> = serde_json::from_slice(&answer.body).ok();
    let number = complaint
        .as_ref()
        .and_then(|complaint| complaint.request_id.clone())
        .or_else(|| answer.header("x-request-id").map(ToOwned::to_owned));
    let number = number.map_or_else(String::new, |number| format!(" (request {number})"));
    let words = match complaint {
        Some(complaint) if !complaint.id.is_empty() => format!("{}: {}", complaint.id, complaint.message),
        _ => String::from_utf8_lossy(&answer.body).chars().take(200).collect(),
    };
    let status = answer.status.as_u16();
    let said = format!("{what}: {status} {words}{number}");
    // A server that failed may have done the work before.
    if status >= 500 || status == 408 { Failure::Unclear(said) } else { Failure::Refused { status, said } }
}

fn parse<T: DeserializeOwned>(method: &str, path: &str, answer: &Answer) -> Outcome<T> {
    serde_json::from_slice(&answer.body).map_err(|error| {
        let path = path.split('?').next().unwrap_or_default();
        Failure::Unclear(format!("{method} {path}: the answer cannot be understood: {error}"))
    })
}

fn body(content: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(content).expect("a request always becomes JSON")
}

/// Whether an id can stand in a path as it is; the provider has no other ids.
fn is_plain(id: &str) -> bool {
    !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

fn missing_is_none<T>(outcome: Outcome<T>) -> Outcome<Option<T>> {
    match outcome {
        Err(failure) if failure.is_missing() => Ok(None),
        outcome => outcome.map(Some),
    }
}
