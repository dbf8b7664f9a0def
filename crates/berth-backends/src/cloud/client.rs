//! Requests of one account: when they go, and which are sent again.
//!
//! What is sent again is what cannot do harm twice: what the provider did not take, and what its caller says is the same
//! however often it is done. A request that may or may not have been carried out is a [`Failure::Unclear`], and its caller
//! looks what became of it.

use std::{fmt, time::Duration};

use berth_core::Backoff;
use hyper::{Method, header::HeaderName};

use super::{Answer, Deadline, Endpoint, Failure, Http, Limiter, Outcome};
use crate::{Error, Result};

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(30);
/// How often a request is sent that can be repeated without harm.
const ATTEMPTS: u32 = 4;
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), longest: Duration::from_secs(4) };

/// What this program calls itself.
pub(crate) const AGENT: &str = concat!("berth/", env!("CARGO_PKG_VERSION"));

/// A secret of an account. It is sent, or signs what is sent, and is never formatted.
#[derive(Clone)]
pub struct Secret(String);

impl Secret {
    /// The secret without the white space around it; an error, which calls it `what`, if it cannot be one.
    pub fn new(what: &str, secret: &str) -> Result<Self> {
        let secret = secret.trim();
        if secret.is_empty() || !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::Invalid(format!("the {what} is empty, or has characters that no {what} has")));
        }
        Ok(Self(secret.to_owned()))
    }

    /// Its text, to be sent or to sign with.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A request as it travels.
pub(crate) struct Message {
    pub(crate) method: Method,
    /// The path below the endpoint, with its query.
    pub(crate) path: String,
    pub(crate) headers: Vec<(HeaderName, String)>,
    pub(crate) body: Option<Vec<u8>>,
}

/// What an answer means.
pub(crate) enum Verdict {
    Done,
    /// The provider took nothing, because there were too many requests; the next may come after this pause.
    Pause(Duration),
    Failed(Failure),
}

/// How one provider is spoken to.
pub(crate) trait Protocol: Send + Sync {
    /// What the provider is called in errors.
    const PROVIDER: &'static str;

    type Request: Send + Sync;

    /// What the request is called in errors: nothing that is secret, and nothing long.
    fn name(&self, request: &Self::Request) -> String;

    /// The request as it is sent now. One that is sent again may have to be signed again.
    fn message(&self, request: &Self::Request, endpoint: &Endpoint) -> Message;

    /// What the answer means; what it says of the account's limit is told to the limiter.
    fn judge(&self, what: &str, answer: &Answer, limiter: &Limiter) -> Verdict;
}

/// The API of one account.
#[derive(Debug)]
pub(crate) struct Client<P> {
    pub(crate) protocol: P,
    http: Http,
    endpoint: Endpoint,
    limiter: Limiter,
}

impl<P: Protocol> Client<P> {
    /// Sends requests there, as the limiter allows.
    pub(crate) fn new(protocol: P, endpoint: Endpoint, limiter: Limiter) -> Result<Self> {
        Ok(Self { protocol, http: Http::new(&endpoint)?, endpoint, limiter })
    }

    /// Sends a request that does the same if it is sent twice, again if need be.
    pub(crate) async fn repeated(&self, request: &P::Request, until: Deadline) -> Outcome<Answer> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.once(request, until).await {
                Err(Failure::Unclear(why)) if attempt < ATTEMPTS => {
                    let pause = BACKOFF.pause(attempt);
                    if until.left(pause) < pause {
                        return Err(Failure::Unclear(why));
                    }
                    tracing::debug!(%why, "asking {} again", P::PROVIDER);
                    tokio::time::sleep(pause).await;
                }
                outcome => return outcome,
            }
        }
    }

    /// Sends a request once it is its turn, and again only if the provider did not take it.
    pub(crate) async fn once(&self, request: &P::Request, until: Deadline) -> Outcome<Answer> {
        let what = self.protocol.name(request);
        let mut attempt = 0;
        loop {
            attempt += 1;
            if !self.limiter.turn(until.instant()).await {
                return Err(Failure::Held(format!(
                    "{what}: {} takes no more requests of this account for now",
                    P::PROVIDER
                )));
            }
            let Message { method, path, headers, body } = self.protocol.message(request, &self.endpoint);
            let time = until.left(REQUEST).max(Duration::from_secs(1));
            let answer = match self.http.send(method, &self.endpoint.join(&path), &headers, body, time).await
            {
                Ok(answer) => answer,
                // The API is out of reach for a moment, perhaps.
                Err(unsent) if !unsent.maybe_sent && attempt < ATTEMPTS && !until.is_over() => {
                    tokio::time::sleep(until.left(BACKOFF.pause(attempt))).await;
                    continue;
                }
                Err(unsent) => return Err(Failure::Unclear(format!("{what}: {}", unsent.why))),
            };
            match self.protocol.judge(&what, &answer, &self.limiter) {
                Verdict::Done => return Ok(answer),
                Verdict::Failed(failure) => return Err(failure),
                Verdict::Pause(pause) => {
                    self.limiter.complained(pause);
                    tracing::debug!(?pause, what, "{} asks for a pause", P::PROVIDER);
                }
            }
        }
    }
}

/// Reads a JSON answer.
pub(crate) fn parse<T: serde::de::DeserializeOwned>(what: &str, answer: &Answer) -> Outcome<T> {
    serde_json::from_slice(&answer.body)
        .map_err(|error| Failure::Unclear(format!("{what}: the answer cannot be understood: {error}")))
}

/// Reads a field that may be `null`.
pub(crate) fn null_is_default<'de, D: serde::Deserializer<'de>, T: serde::Deserialize<'de> + Default>(
    deserializer: D,
) -> std::result::Result<T, D::Error> {
    Ok(<Option<T> as serde::Deserialize>::deserialize(deserializer)?.unwrap_or_default())
}
