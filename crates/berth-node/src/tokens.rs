//! Tokens of service accounts, each bound to one pod: asked for once, kept, and renewed well before they end.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use berth_kube::Cluster;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::Api;
use kube::api::PostParams;
use parking_lot::Mutex;

use crate::plugin::Failed;

/// However long a token lives, it is renewed after this time.
const OLDEST: SignedDuration = SignedDuration::from_hours(24);
/// Renewals come up to this much earlier, so that tokens issued together are not renewed together.
const SPREAD_SECONDS: u64 = 10;
/// When to try again after the API server refused to renew a token that is still good.
const RETRY: SignedDuration = SignedDuration::from_mins(1);

/// A token of a service account; its `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "named as in the status of a TokenRequest")]
pub(crate) struct Token {
    /// What the API server issued.
    pub token: String,
    /// When the API server stops accepting it.
    pub expires: Timestamp,
    /// When it should be asked for again.
    pub renew: Timestamp,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("expires", &self.expires)
            .field("renew", &self.renew)
            .finish_non_exhaustive()
    }
}

/// The tokens of this node's pods; cheap to clone.
#[derive(Clone)]
pub(crate) struct Tokens {
    cluster: Cluster,
    kept: Arc<Mutex<HashMap<Want, Token>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Want {
    namespace: String,
    account: String,
    pod: String,
    pod_uid: String,
    audiences: Vec<String>,
    seconds: i64,
}

impl Tokens {
    /// No tokens yet; they are asked for through `cluster`.
    pub(crate) fn new(cluster: &Cluster) -> Self {
        Self { cluster: cluster.clone(), kept: Arc::default() }
    }

    /// A token of the pod's service account that is good for a fifth of its life at least, unless the API server
    /// refuses to renew it. No audiences means the API server's own.
    pub(crate) async fn token(
        &self,
        pod: &Pod,
        audiences: &[String],
        expiration_seconds: i64,
    ) -> Result<Token, Failed> {
        let want = Want::new(pod, audiences, expiration_seconds);
        let now = Timestamp::now();
        let known = self.kept().get(&want).cloned();
        if let Some(token) = known.as_ref().filter(|token| now < token.renew) {
            return Ok(token.clone());
        }
        let token = match (self.request(&want).await, known) {
            (Ok(token), _) => token,
            (Err(error), Some(old)) if now < old.expires => {
                tracing::warn!(pod = %format_args!("{}/{}", want.namespace, want.pod), account = want.account, error,
                    "a token could not be renewed; the pod keeps the old one");
                Token { renew: (now + RETRY).min(old.expires), ..old }
            }
            (Err(error), Some(_)) => {
                return Err(Failed::unchanged(format!("token expired and refresh failed: {error}")));
            }
            (Err(error), None) => return Err(Failed::unchanged(format!("failed to fetch token: {error}"))),
        };
        self.kept().insert(want, token.clone());
        Ok(token)
    }

    /// Forgets the tokens of a pod that is gone.
    pub(crate) fn forget(&self, pod_uid: &str) {
        self.kept().retain(|want, _| want.pod_uid != pod_uid);
    }

    async fn request(&self, want: &Want) -> Result<Token, String> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.cluster.client().clone(), &want.namespace);
        let request = TokenRequest { spec: Some(want.spec()), ..TokenRequest::default() };
        let answer = accounts
            .create_token_request(&want.account, &PostParams::default(), &request)
            .await
            .map_err(|error| format!("service account {}/{}: {error}", want.namespace, want.account))?;
        let seconds = answer.spec.and_then(|spec| spec.expiration_seconds).unwrap_or(want.seconds);
        let status = answer.status.unwrap_or_default();
        match (status.token, status.expiration_timestamp) {
            (Some(token), Some(expires)) => {
                Ok(Token { token, expires: expires.0, renew: renewal(expires.0, seconds, spread()) })
            }
            _ => Err("the API server's answer holds no token".to_owned()),
        }
    }

    fn kept(&self) -> parking_lot::MutexGuard<'_, HashMap<Want, Token>> {
        self.kept.lock()
    }
}

impl Want {
    fn new(pod: &Pod, audiences: &[String], seconds: i64) -> Self {
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone());
        Self {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            account: account.filter(|name| !name.is_empty()).unwrap_or_else(|| "default".to_owned()),
            pod: pod.metadata.name.clone().unwrap_or_default(),
            pod_uid: pod.metadata.uid.clone().unwrap_or_default(),
            audiences: audiences.to_vec(),
            seconds,
        }
    }

    fn spec(&self) -> TokenRequestSpec {
        TokenRequestSpec {
            audiences: Some(self.audiences.clone()),
            expiration_seconds: Some(self.seconds),
            bound_object_ref: Some(BoundObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(self.pod.clone()),
                uid: Some(self.pod_uid.clone()),
            }),
        }
    }
}

/// When a token that ends at `expires` after `seconds` of life is renewed: at 80 % of it, or after a day.
fn renewal(expires: Timestamp, seconds: i64, spread: SignedDuration) -> Timestamp {
    let late = SignedDuration::from_secs(seconds / 5);
    let aged = SignedDuration::from_secs(seconds).saturating_sub(OLDEST);
    expires.checked_sub(late.max(aged).saturating_add(spread)).unwrap_or(Timestamp::MIN)
}

fn spread() -> SignedDuration {
    let chance = RandomState::new().hash_one(0) % (SPREAD_SECONDS * 1000);
    SignedDuration::from_millis(i64::try_from(chance).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_renewed_at_four_fifths_of_its_life_or_after_a_day() {
        let issued = Timestamp::from_second(1_000_000).unwrap();
        let after = |seconds: i64, spread: i64| {
            let expires = issued + SignedDuration::from_secs(seconds);
            renewal(expires, seconds, SignedDuration::from_secs(spread)).as_second() - issued.as_second()
        };
        assert_eq!(after(600, 0), 480);
        assert_eq!(after(3600, 0), 2880);
        assert_eq!(after(3600, 10), 2870);
        assert_eq!(after(30 * 3600, 0), 24 * 3600);
        assert_eq!(after(365 * 24 * 3600, 0), 24 * 3600);
    }

    #[test]
    fn a_token_is_not_shown_by_debug() {
        let token = Token { token: "hunter2".to_owned(), expires: Timestamp::MAX, renew: Timestamp::MIN };
        assert!(!format!("{token:?} {:#?}", Some(&token)).contains("hunter2"));
    }
}
