//! The part of DigitalOcean's API that the driver uses, one function for each call.
//!
//! What is retried here is what cannot do harm twice: reading, deleting, and what the account's limit of requests refused.
//! A request that may or may not have been carried out is an [`Failure::Unclear`], and its caller looks what became of it.

use std::time::Duration;

use hyper::{
    Method, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, USER_AGENT},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    Result,
    cloud::{
        AGENT, Answer, Client, Deadline, Endpoint, Failure, Limiter, Message, Outcome, Protocol, Refusal,
        Secret, Verdict, null_is_default, parse,
    },
};

/// The most entries that a page may have.
const PAGE: u64 = 200;
/// Where the provider refuses a request and does not say for how long.
const PAUSE: Duration = Duration::from_secs(5);
/// The account's 250 requests a minute, less some for others who use the account: always, and evenly spaced after a refusal.
const MOST_A_MINUTE: usize = 225;
const CAREFUL_RATE: f64 = 3.5;

/// Whether what was asked for is not there.
pub(super) fn is_missing(failure: &Failure) -> bool {
    failure.status() == Some(404)
}

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

/// The API of one account.
#[derive(Debug)]
pub(super) struct Api(Client<Bearer>);

/// Requests with the account's token.
#[derive(Debug)]
struct Bearer(Secret);

/// A request to the API, before it is signed and sent.
struct Asked {
    method: Method,
    /// The path with its query.
    path: String,
    body: Option<Vec<u8>>,
}

impl Asked {
    fn name(&self) -> String {
        format!("{} {}", self.method, self.path.split('?').next().unwrap_or_default())
    }
}

impl Protocol for Bearer {
    const PROVIDER: &'static str = super::PROVIDER;

    type Request = Asked;

    fn name(&self, request: &Asked) -> String {
        request.name()
    }

    fn message(&self, request: &Asked, _: &Endpoint) -> Message {
        let mut headers: Vec<(HeaderName, String)> =
            vec![(AUTHORIZATION, format!("Bearer {}", self.0.reveal())), (USER_AGENT, AGENT.to_owned())];
        if request.body.is_some() {
            headers.push((CONTENT_TYPE, "application/json".to_owned()));
        }
        let (method, path) = (request.method.clone(), request.path.clone());
        Message { method, path, headers, body: request.body.clone() }
    }

    fn judge(&self, what: &str, answer: &Answer, limiter: &Limiter) -> Verdict {
        if answer.status == StatusCode::TOO_MANY_REQUESTS {
            let pause = answer.number("retry-after").map_or(PAUSE, Duration::from_secs);
            return Verdict::Pause(pause.max(Duration::from_millis(250)));
        }
        if let (Some(remaining), Some(reset)) =
            (answer.number("ratelimit-remaining"), answer.number("ratelimit-reset"))
        {
            limiter.observe_quota(remaining, reset);
        }
        if answer.status.is_success() { Verdict::Done } else { Verdict::Failed(refusal(what, answer)) }
    }
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
    pub(super) fn new(endpoint: Endpoint, token: Secret, rate: f64) -> Result<Self> {
        let limiter = Limiter::new(rate, CAREFUL_RATE).within(MOST_A_MINUTE, Duration::from_secs(60));
        Ok(Self(Client::new(Bearer(token), endpoint, limiter)?))
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
            return Err(Failure::Refused {
                meaning: Refusal::Precondition,
                status: 404,
                code: "not_found".to_owned(),
                said: format!("there is no volume {volume:?}"),
            });
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
        match self.0.once(&post(&path, &resources), until).await {
            Err(failure) if is_missing(&failure) => {}
            tagged => return tagged.map(drop),
        }
        match self.0.once(&post("v2/tags", &serde_json::json!({ "name": tag })), until).await {
            // Somebody else made it at the same time.
            Err(failure) if matches!(failure.status(), Some(409 | 422)) => {}
            made => drop(made?),
        }
        self.0.once(&post(&path, &resources), until).await.map(drop)
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
        let asked = Asked { method: Method::GET, path: path.to_owned(), body: None };
        parse(&asked.name(), &self.0.repeated(&asked, until).await?)
    }

    async fn delete(&self, path: &str, id: &str, until: Deadline) -> Outcome<()> {
        if !is_plain(id) {
            return Ok(());
        }
        let asked = Asked { method: Method::DELETE, path: path.to_owned(), body: None };
        match self.0.repeated(&asked, until).await {
            Err(failure) if is_missing(&failure) => Ok(()),
            deleted => deleted.map(drop),
        }
    }

    async fn write<T: DeserializeOwned>(
        &self,
        path: &str,
        content: &(impl Serialize + Sync),
        until: Deadline,
    ) -> Outcome<T> {
        let asked = post(path, content);
        parse(&asked.name(), &self.0.once(&asked, until).await?)
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
    let words = match &complaint {
        Some(complaint) if !complaint.id.is_empty() => format!("{}: {}", complaint.id, complaint.message),
        _ => String::from_utf8_lossy(&answer.body).chars().take(200).collect(),
    };
    let status = answer.status.as_u16();
    let said = format!("{what}: {status} {words}{number}");
    // A server that failed may have done the work before.
    if status >= 500 || status == 408 {
        return Failure::Unclear(said);
    }
    let lower = said.to_lowercase();
    let says = |any: &[&str]| any.iter().any(|words| lower.contains(words));
    let meaning = match status {
        _ if says(&["limit exceeded", "cannot attach more"]) => Refusal::Exhausted,
        // An event of the same droplet or volume is under way.
        _ if says(&["pending event", "in progress", "being processed"]) => Refusal::Busy,
        401 | 403 => Refusal::Denied,
        400 => Refusal::Invalid,
        _ => Refusal::Precondition,
    };
    Failure::Refused {
        meaning,
        status,
        code: complaint.map(|complaint| complaint.id).unwrap_or_default(),
        said,
    }
}

fn post(path: &str, content: &impl Serialize) -> Asked {
    let body = serde_json::to_vec(content).expect("a request always becomes JSON");
    Asked { method: Method::POST, path: path.to_owned(), body: Some(body) }
}

/// Whether an id can stand in a path as it is; the provider has no other ids.
fn is_plain(id: &str) -> bool {
    !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

fn missing_is_none<T>(outcome: Outcome<T>) -> Outcome<Option<T>> {
    match outcome {
        Err(failure) if is_missing(&failure) => Ok(None),
        outcome => outcome.map(Some),
    }
}
