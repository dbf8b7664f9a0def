//! Who is to be refreshed when something changes: which volumes refer to which objects, and whose tokens end when.

use std::collections::{BTreeMap, HashMap, HashSet};

use parking_lot::{Mutex, MutexGuard};
use std::time::Duration;

use jiff::Timestamp;
use tokio::task::AbortHandle;

use super::super::Refresh;
use super::super::objects::References;

/// What a volume can refer to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Subject {
    ConfigMap {
        namespace: String,
        name: String,
    },
    Secret {
        namespace: String,
        name: String,
    },
    /// The pod itself, by uid.
    Pod(String),
}

/// The volumes of this node and what they refer to.
pub(super) struct Interest {
    refresh: Refresh,
    known: Mutex<Registrations>,
}

#[derive(Default)]
struct Registrations {
    /// The pods that refer to something.
    pods: HashMap<Subject, HashSet<String>>,
    /// By pod, then by volume.
    volumes: HashMap<String, BTreeMap<String, Registered>>,
}

#[derive(Default)]
struct Registered {
    subjects: HashSet<Subject>,
    due: Option<AbortHandle>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(due) = &self.due {
            due.abort();
        }
    }
}

impl Interest {
    pub(super) fn new(refresh: Refresh) -> Self {
        Self { refresh, known: Mutex::default() }
    }

    /// Remembers what a volume refers to, in place of what it referred to before.
    pub(super) fn register(&self, pod_uid: &str, volume: &str, namespace: &str, references: &References) {
        let namespace = || namespace.to_owned();
        let config_maps = references
            .config_maps
            .iter()
            .map(|name| Subject::ConfigMap { namespace: namespace(), name: name.clone() });
        let secrets = references
            .secrets
            .iter()
            .map(|name| Subject::Secret { namespace: namespace(), name: name.clone() });
        let pod = references.pod.then(|| Subject::Pod(pod_uid.to_owned()));
        let subjects: HashSet<Subject> = config_maps.chain(secrets).chain(pod).collect();
        let mut known = self.known();
        let registered =
            known.volumes.entry(pod_uid.to_owned()).or_default().entry(volume.to_owned()).or_default();
        let before = std::mem::replace(&mut registered.subjects, subjects.clone());
        known.drop_unused(pod_uid, before);
        for subject in subjects {
            known.pods.entry(subject).or_default().insert(pod_uid.to_owned());
        }
    }

    /// Refreshes the volume's pod at `when`, unless another time is set before.
    pub(super) fn refresh_at(&self, pod_uid: &str, volume: &str, when: Option<Timestamp>) {
        let mut known = self.known();
        let Some(registered) = known.volumes.get_mut(pod_uid).and_then(|volumes| volumes.get_mut(volume))
        else {
            return;
        };
        if let Some(due) = registered.due.take() {
            due.abort();
        }
        let Some(when) = when else { return };
        let (refresh, uid) = (self.refresh.clone(), pod_uid.to_owned());
        let wait = Duration::try_from(when.duration_since(Timestamp::now())).unwrap_or_default();
        registered.due = Some(
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                refresh(&uid);
            })
            .abort_handle(),
        );
    }

    /// Forgets what a volume of a pod refers to, and its pending refresh.
    pub(super) fn forget(&self, pod_uid: &str, volume: &str) {
        let mut known = self.known();
        let Some(volumes) = known.volumes.get_mut(pod_uid) else { return };
        let mut gone = volumes.remove(volume).unwrap_or_default();
        if volumes.is_empty() {
            known.volumes.remove(pod_uid);
        }
        known.drop_unused(pod_uid, std::mem::take(&mut gone.subjects));
    }

    /// Forgets all volumes of a pod.
    pub(super) fn forget_pod(&self, pod_uid: &str) {
        let mut known = self.known();
        let volumes = known.volumes.remove(pod_uid).unwrap_or_default();
        for mut registered in volumes.into_values() {
            known.drop_unused(pod_uid, std::mem::take(&mut registered.subjects));
        }
    }

    /// Has the volumes of every pod that refers to `subject` set up again.
    pub(super) fn changed(&self, subject: &Subject) {
        let pods = self.known().pods.get(subject).cloned().unwrap_or_default();
        for uid in pods {
            (self.refresh)(&uid);
        }
    }

    fn known(&self) -> MutexGuard<'_, Registrations> {
        self.known.lock()
    }
}

impl Registrations {
    /// Removes the pod from subjects to which none of its volumes refers any more.
    fn drop_unused(&mut self, pod_uid: &str, subjects: HashSet<Subject>) {
        for subject in subjects {
            let used = self.volumes.get(pod_uid).is_some_and(|volumes| {
                volumes.values().any(|registered| registered.subjects.contains(&subject))
            });
            if used {
                continue;
            }
            if let Some(pods) = self.pods.get_mut(&subject) {
                pods.remove(pod_uid);
                if pods.is_empty() {
                    self.pods.remove(&subject);
                }
            }
        }
    }
}
