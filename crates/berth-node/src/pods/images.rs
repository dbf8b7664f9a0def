//! The images of containers, for a runtime that has them: found or pulled before a container is made, by the rules and in the
//! words of the kubelet.
//!
//! Events: `Pulling`, `Pulled`, `Failed`, `BackOff`, `ErrImageNeverPull`, `FailedToRetrieveImagePullSecret`.

use std::collections::BTreeMap;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use berth_kube::{Key, Severity, reference};
use berth_runtime::{Credentials, Image, Images};
use k8s_openapi::api::core::v1::{Container, Pod, Secret};
use serde::Deserialize;

use super::Pods;
use super::decide::ContainerRecord;

/// Why a container waits whose image was not pulled just now.
pub(super) const PULL_FAILED: &str = "ErrImagePull";
/// Why it waits until the next attempt.
const PULL_LATER: &str = "ImagePullBackOff";
/// Why it waits if its image is not there and must not be pulled.
const NEVER_PULLED: &str = "ErrImageNeverPull";
/// Why it waits if the runtime could not be asked for the image.
const NOT_INSPECTED: &str = "ImageInspectError";

/// The registry of images that name none, and how some programs write its name.
const USUAL_REGISTRY: &str = "docker.io";
const USUAL_REGISTRY_OF_DOCKER: &str = "index.docker.io";

/// Whether a reason is about an image, so that an event has it instead of the message.
pub(super) fn is_about_image(reason: &str) -> bool {
    matches!(reason, PULL_FAILED | PULL_LATER | NEVER_PULLED | NOT_INSPECTED)
}

impl Pods {
    /// Finds or pulls the image of a container, as its policy says.
    pub(super) async fn ensure_image(
        &self,
        images: &dyn Images,
        pod: &Pod,
        container: &Container,
    ) -> Result<Image, (&'static str, String)> {
        let name = container.image.as_deref().unwrap_or_default();
        let policy = container.image_pull_policy.as_deref().unwrap_or_else(|| usual_policy(name));
        let emit = |severity, reason: &str, message: String| {
            self.emit(pod, &container.name, severity, reason, message);
        };
        let known = images.find(name).await.map_err(|error| (NOT_INSPECTED, error.sentence()))?;
        match (known, policy) {
            (Some(known), "IfNotPresent" | "Never") => {
                let message = format!("Container image {name:?} already present on machine");
                emit(Severity::Normal, "Pulled", message);
                return Ok(known);
            }
            (None, "Never") => {
                let message = format!("Container image {name:?} is not present with pull policy of Never");
                emit(Severity::Warning, NEVER_PULLED, message.clone());
                return Err((NEVER_PULLED, message));
            }
            _ => {}
        }
        let credentials = self.credentials(pod, name).await;
        emit(Severity::Normal, "Pulling", format!("Pulling image {name:?}"));
        let begun = Instant::now();
        match images.pull(name, &credentials).await {
            Ok(image) => {
                let took = begun.elapsed().as_secs_f64();
                let message = format!(
                    "Successfully pulled image {name:?} in {took:.3}s. Image size: {} bytes.",
                    image.size
                );
                emit(Severity::Normal, "Pulled", message);
                Ok(image)
            }
            Err(error) => {
                let why = error.sentence();
                emit(Severity::Warning, "Failed", format!("Failed to pull image {name:?}: {why}"));
                Err((PULL_FAILED, why))
            }
        }
    }

    /// Says of a container whose image could not be pulled that it waits for the next attempt.
    pub(super) fn note_pull_later(&self, pod: &Pod, container: &Container, known: &mut ContainerRecord) {
        let Some(problem) = known.problem.as_mut().filter(|problem| problem.reason == PULL_FAILED) else {
            return;
        };
        let name = container.image.as_deref().unwrap_or_default();
        let waits = format!("Back-off pulling image {name:?}");
        problem.message = format!("{waits}: {PULL_FAILED}: {}", problem.message);
        problem.reason = PULL_LATER;
        self.emit(pod, &container.name, Severity::Normal, "BackOff", waits);
        self.emit(pod, &container.name, Severity::Warning, "Failed", format!("Error: {PULL_LATER}"));
    }

    /// Who the pod is to the registry of an image, by the secrets it names.
    async fn credentials(&self, pod: &Pod, image: &str) -> Vec<Credentials> {
        let secrets = pod.spec.as_ref().and_then(|spec| spec.image_pull_secrets.as_ref());
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for named in secrets.into_iter().flatten() {
            match self.options.cluster.fetch::<Secret>(&Key::new(namespace, &named.name)).await {
                Ok(Some(secret)) => found.extend(of_secret(&secret, image)),
                Ok(None) | Err(_) => missing.push(named.name.as_str()),
            }
        }
        if !missing.is_empty() {
            let message = format!(
                "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
                missing.join(", ")
            );
            let reason = "FailedToRetrieveImagePullSecret";
            self.options.recorder.record(reference(pod), Severity::Warning, reason, message);
        }
        found
    }
}

/// What the policy is of a container that names none.
fn usual_policy(image: &str) -> &'static str {
    let name = image.rsplit('/').next().unwrap_or_default();
    let is_fixed = image.contains('@') || name.split_once(':').is_some_and(|(_, tag)| tag != "latest");
    if is_fixed { "IfNotPresent" } else { "Always" }
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, Login>,
}

#[derive(Deserialize)]
struct Login {
    username: Option<String>,
    password: Option<String>,
    /// `username:password` in Base64, which most programs write.
    auth: Option<String>,
}

/// The credentials in a secret that are for the registry of an image, those for the longest path first.
fn of_secret(secret: &Secret, image: &str) -> Vec<Credentials> {
    let data = |key: &str| secret.data.as_ref()?.get(key).map(|value| value.0.as_slice());
    let config = data(".dockerconfigjson").and_then(|json| serde_json::from_slice::<DockerConfig>(json).ok());
    let older = || data(".dockercfg").and_then(|json| serde_json::from_slice(json).ok());
    let logins = config.map(|config| config.auths).or_else(older).unwrap_or_default();
    let mut fitting: Vec<_> = logins.iter().filter(|(place, _)| is_for(place, image)).collect();
    fitting.sort_by_key(|(place, _)| std::cmp::Reverse(place.len()));
    fitting.into_iter().filter_map(|(_, login)| login.credentials()).collect()
}

impl Login {
    fn credentials(&self) -> Option<Credentials> {
        if let (Some(user), Some(password)) = (&self.username, &self.password) {
            return Some(Credentials { user: user.clone(), password: password.clone() });
        }
        let decoded = STANDARD.decode(self.auth.as_ref()?.trim()).ok()?;
        let text = String::from_utf8(decoded).ok()?;
        let (user, password) = text.split_once(':')?;
        Some(Credentials { user: user.to_owned(), password: password.trim_end_matches('\0').to_owned() })
    }
}

/// Whether a place such as `https://index.docker.io/v1/` or `registry:5000/team` is where an image comes from.
fn is_for(place: &str, image: &str) -> bool {
    let place = place.trim_start_matches("https://").trim_start_matches("http://");
    let place = place.trim_end_matches('/').trim_end_matches("/v1").trim_end_matches("/v2");
    let (host, path) = place.split_once('/').unwrap_or((place, ""));
    let usual = |host: &str| {
        if host == USUAL_REGISTRY_OF_DOCKER { USUAL_REGISTRY.to_owned() } else { host.to_owned() }
    };
    let (registry, repository) = match image.split_once('/') {
        Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => (first, rest),
        _ => (USUAL_REGISTRY, image),
    };
    let below = repository
        .strip_prefix(path)
        .is_some_and(|rest| path.is_empty() || rest.is_empty() || rest.starts_with(['/', ':', '@']));
    usual(host) == usual(registry) && below
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    #[test]
    fn an_image_of_a_fixed_version_is_pulled_once() {
        for (image, policy) in [
            ("busybox", "Always"),
            ("busybox:latest", "Always"),
            ("busybox:1.36", "IfNotPresent"),
            ("registry:5000/team/app", "Always"),
            ("registry:5000/team/app:2", "IfNotPresent"),
            ("app@sha256:0123", "IfNotPresent"),
        ] {
            assert_eq!(usual_policy(image), policy, "{image}");
        }
    }

    #[test]
    fn credentials_are_for_the_registry_and_the_path_that_they_name() {
        for (place, image, expected) in [
            ("https://index.docker.io/v1/", "busybox", true),
            ("docker.io", "team/app:1", true),
            ("registry:5000", "registry:5000/app", true),
            ("registry:5000/team", "registry:5000/team/app", true),
            ("registry:5000/team", "registry:5000/teams/app", false),
            ("registry:5000", "other:5000/app", false),
            ("registry:5000", "busybox", false),
        ] {
            assert_eq!(is_for(place, image), expected, "{place} {image}");
        }
    }

    #[test]
    fn both_kinds_of_secrets_are_read_and_the_longest_path_comes_first() {
        let secret = |key: &str, json: &str| Secret {
            data: Some(BTreeMap::from([(key.to_owned(), ByteString(json.as_bytes().to_vec()))])),
            ..Secret::default()
        };
        let new = r#"{"auths": {"r.io": {"auth": "YTpi"}, "r.io/x": {"username": "c", "password": "d"}}}"#;
        let own = |user: &str, password: &str| Credentials { user: user.into(), password: password.into() };
        assert_eq!(of_secret(&secret(".dockerconfigjson", new), "r.io/x/y"), [own("c", "d"), own("a", "b")]);
        let old = r#"{"r.io": {"auth": "YTpi"}}"#;
        assert_eq!(of_secret(&secret(".dockercfg", old), "r.io/x"), [own("a", "b")]);
        assert!(of_secret(&secret(".dockercfg", "nonsense"), "r.io/x").is_empty());
    }
}
