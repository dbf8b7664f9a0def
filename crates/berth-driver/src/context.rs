//! What comes with a call beside its arguments.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use parking_lot::Mutex;
use tonic::Response;

/// Until when a call's answer is of use, with which secrets it comes, and for whom.
#[derive(Debug, Clone, Default)]
pub struct Context {
    deadline: Option<Instant>,
    secrets: Secrets,
    claim: Option<Claim>,
    pod: Option<Pod>,
    about: Arc<BTreeMap<String, String>>,
    /// Shared by clones, so that a warning from a task or a thread of the call is not lost.
    warnings: Arc<Mutex<Vec<String>>>,
}

impl Context {
    /// The context of a call. `about` are the class's parameters or the volume's context, among which Kubernetes says
    /// for whom it asks.
    pub fn new(deadline: Option<Instant>, secrets: Secrets, about: &BTreeMap<String, String>) -> Self {
        let text = |key: &str| about.get(&format!("{KUBERNETES_PARAMETER_PREFIX}{key}")).cloned();
        let or_empty = |key| text(key).unwrap_or_default();
        let claim = text("pvc/name").map(|name| Claim {
            name,
            namespace: or_empty("pvc/namespace"),
            volume: or_empty("pv/name"),
        });
        let pod = text("pod.name").map(|name| Pod {
            name,
            namespace: or_empty("pod.namespace"),
            uid: or_empty("pod.uid"),
            service_account: or_empty("serviceAccount.name"),
        });
        let about = Arc::new(about.clone());
        Self { deadline, secrets, claim, pod, about, warnings: Arc::default() }
    }

    /// When the caller stops waiting. The call is not cancelled then: it goes on, and a repeated call finds its result.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// How long the caller still waits.
    pub fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// The secrets that the class names for this call.
    pub fn secrets(&self) -> &Secrets {
        &self.secrets
    }

    /// The claim that a volume is made for, where the provisioner says it (`--extra-create-metadata`).
    pub fn claim(&self) -> Option<&Claim> {
        self.claim.as_ref()
    }

    /// What the call repeats of a volume's context, or the class's parameters it comes with; empty where it does neither.
    /// Storage that has no record of a volume learns here what a PersistentVolume says of it.
    pub fn volume_context(&self) -> &BTreeMap<String, String> {
        &self.about
    }

    /// Tells the caller something that a person should know although the call succeeds: a sentence that goes to this
    /// driver's log and, beside the answer, to the sidecar. Berth's sidecars record it as an event (`VolumeDeleteWarning`,
    /// else `DriverWarning`) on the volume, claim or snapshot; others ignore it. Nothing is sent where the call fails: then
    /// the error is what the caller learns.
    pub fn warn(&self, sentence: impl Into<String>) {
        let sentence = sentence.into();
        tracing::warn!("{sentence}");
        let mut warnings = self.warnings.lock();
        if !warnings.contains(&sentence) {
            warnings.push(sentence);
        }
    }

    /// What was warned of so far.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().clone()
    }

    /// An answer with the warnings of its call.
    pub(crate) fn reply<T>(&self, message: T) -> Response<T> {
        let mut answer = Response::new(message);
        berth_csi::remarks::add_warnings(answer.metadata_mut(), &self.warnings());
        answer
    }

    /// The pod that a volume is published to, where the CSIDriver object asks for it (`podInfoOnMount`).
    pub fn pod(&self) -> Option<&Pod> {
        self.pod.as_ref()
    }
}

/// The PersistentVolumeClaim that a volume is made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The name of the claim, as the CreateVolume call has it.
    pub name: String,
    /// The namespace of the claim; empty if the call does not say it.
    pub namespace: String,
    /// The name of the PersistentVolume that it will get.
    pub volume: String,
}

/// The pod that a volume is published to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// The name of the pod, as the NodePublishVolume call has it.
    pub name: String,
    /// The namespace of the pod; empty if the call does not say it.
    pub namespace: String,
    /// The pod's UID, as Kubernetes gave it.
    pub uid: String,
    /// The name of its service account.
    pub service_account: String,
}

/// The secrets of a call. They are read by name and never formatted.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secrets(BTreeMap<String, String>);

impl Secrets {
    /// The secret of that name; upper and lower case are the same.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// All of them, for storage that passes them on.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<BTreeMap<String, String>> for Secrets {
    fn from(secrets: BTreeMap<String, String>) -> Self {
        Self(secrets)
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_is_read_from_what_kubernetes_adds() {
        let pairs = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect::<BTreeMap<_, _>>()
        };
        let about = pairs(&[
            ("kind", "dir"),
            ("csi.storage.k8s.io/pvc/name", "data"),
            ("csi.storage.k8s.io/pvc/namespace", "shop"),
            ("csi.storage.k8s.io/pv/name", "pvc-1"),
        ]);
        let context = Context::new(None, pairs(&[("token", "hush")]).into(), &about);
        let claim = context.claim().unwrap();
        assert_eq!((&*claim.name, &*claim.namespace, &*claim.volume), ("data", "shop", "pvc-1"));
        assert_eq!((context.pod(), context.remaining()), (None, Duration::MAX));
        assert_eq!(context.secrets().get("Token"), Some("hush"));
        assert!(!format!("{context:?}").contains("hush"));
    }
}
