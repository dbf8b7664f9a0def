//! `configMap`, `secret`, `downwardAPI` and `projected`: files made of objects, kept current while the pod runs.
//!
//! One mechanism for all four: [`render`] says what the files are, [`writer`] puts them into the volume so that nobody
//! sees half of a change, and [`interest`] asks for another `set_up` as soon as something that they are made of
//! changes, or a token among them is due. Only configMaps lie on disk, the others in memory.

mod interest;
mod render;
mod writer;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use async_trait::async_trait;
use berth_core::names::{CONFIG_MAP_PLUGIN, DOWNWARD_API_PLUGIN, PROJECTED_PLUGIN, SECRET_PLUGIN};
use berth_host::path::Dir;
use berth_kube::{Cache, Key};
use berth_runtime::blocking;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, ProjectedVolumeSource, Secret, Volume};

use self::interest::{Interest, Subject};
use self::render::{Tree, as_projected, render, tokens_of};
use super::objects::{Objects, References};
use super::scratch::{Medium, Scratch};
use super::{Host, Refresh, containers, fs_group};
use crate::plugin::{Failed, Placed, Plugin, PodVolume, Ready, Source};
use crate::tokens::{Token, Tokens};

/// How long a token lives where the volume does not say.
const TOKEN_SECONDS: i64 = 3600;

/// One of the four kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    ConfigMap,
    Secret,
    DownwardApi,
    Projected,
}

impl Form {
    const ALL: [Self; 4] = [Self::ConfigMap, Self::Secret, Self::DownwardApi, Self::Projected];

    fn plugin(self) -> &'static str {
        match self {
            Self::ConfigMap => CONFIG_MAP_PLUGIN,
            Self::Secret => SECRET_PLUGIN,
            Self::DownwardApi => DOWNWARD_API_PLUGIN,
            Self::Projected => PROJECTED_PLUGIN,
        }
    }

    fn is_of(self, volume: &Volume) -> bool {
        match self {
            Self::ConfigMap => volume.config_map.is_some(),
            Self::Secret => volume.secret.is_some(),
            Self::DownwardApi => volume.downward_api.is_some(),
            Self::Projected => volume.projected.is_some(),
        }
    }

    /// A configMap's content is not secret, and memory is dear.
    fn medium(self) -> Medium {
        if self == Self::ConfigMap { Medium::Disk } else { Medium::Memory { size: None } }
    }
}

/// The plugin for one of the four kinds.
struct Projected {
    form: Form,
    shared: Arc<Shared>,
}

/// What the four have in common.
struct Shared {
    host: Host,
    tokens: Tokens,
    interest: Interest,
    pods: Cache<Pod>,
}

/// The plugins for the four kinds.
pub(super) fn plugins(host: &Host, tokens: &Tokens, refresh: Refresh) -> Vec<Arc<dyn Plugin>> {
    let shared = Arc::new(Shared {
        host: host.clone(),
        tokens: tokens.clone(),
        interest: Interest::new(refresh),
        pods: host.cluster.cache_where(&format!("spec.nodeName={}", host.node)),
    });
    follow(&shared);
    Form::ALL.map(|form| Arc::new(Projected { form, shared: shared.clone() }) as Arc<dyn Plugin>).into()
}

/// Asks for a refresh when something changes that a volume is made of.
fn follow(shared: &Arc<Shared>) {
    let (cluster, all) = (&shared.host.cluster, shared.clone());
    cluster.cache::<ConfigMap>().on_change(move |object| {
        let Key { namespace, name } = Key::of(object.as_ref());
        all.interest.changed(&Subject::ConfigMap { namespace, name });
    });
    let all = shared.clone();
    cluster.cache::<Secret>().on_change(move |object| {
        let Key { namespace, name } = Key::of(object.as_ref());
        all.interest.changed(&Subject::Secret { namespace, name });
    });
    let all = shared.clone();
    shared.pods.subscribe(move |before, after| {
        let (before, after) = (before.map(|pod| &pod.metadata), after.map(|pod| &pod.metadata));
        match (before, after) {
            (Some(before), Some(after)) => {
                if before.labels != after.labels || before.annotations != after.annotations {
                    all.interest.changed(&Subject::Pod(after.uid.clone().unwrap_or_default()));
                }
            }
            (Some(before), None) => {
                let uid = before.uid.as_deref().unwrap_or_default();
                all.interest.forget_pod(uid);
                all.tokens.forget(uid);
            }
            (None, _) => {}
        }
    });
}

#[async_trait]
impl Plugin for Projected {
    fn name(&self) -> &'static str {
        self.form.plugin()
    }

    fn serves(&self, source: &Source) -> bool {
        matches!(source, Source::Inline(volume) if self.form.is_of(volume))
    }

    async fn set_up(&self, volume: &PodVolume) -> Result<Ready, Failed> {
        let source = match &volume.source {
            Source::Inline(inline) => as_projected(inline),
            Source::Persistent { .. } => None,
        };
        let source = source.ok_or_else(|| Failed::unchanged("the volume is not made of objects"))?;
        let (shared, uid) = (&self.shared, volume.pod_uid());
        let pod = shared.newest(&volume.pod);
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let references = References::of_volume(&source);
        // Before anything is read, so that no change is missed.
        shared.interest.register(uid, &volume.name, namespace, &references);
        let tree = match shared.tree(&pod, &source, &references).await {
            Ok((tree, due)) => {
                shared.interest.refresh_at(uid, &volume.name, due);
                tree
            }
            Err(failed) => {
                if shared.pods.get(&Key::of(pod.as_ref())).is_none() {
                    shared.interest.forget(uid, &volume.name);
                }
                return Err(failed);
            }
        };
        let (host, form, name) = (shared.host.clone(), self.form, volume.name.clone());
        Ok(blocking(move || place(&host, form, &pod, &name, &tree)).await?)
    }

    async fn tear_down(&self, placed: &Placed) -> Result<(), Failed> {
        self.shared.interest.forget(&placed.pod_uid, &placed.spec_name);
        if self.form == Form::Projected {
            self.shared.tokens.forget(&placed.pod_uid);
        }
        let (host, form, placed) = (self.shared.host.clone(), self.form, placed.clone());
        let remove =
            move || Scratch::new(&host.layout, form.plugin(), &placed.pod_uid, &placed.spec_name)?.remove();
        Ok(blocking(remove).await?)
    }
}

impl Shared {
    /// The pod as it is now: its labels may have changed since the caller read it.
    fn newest(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        let known = self.pods.get(&Key::of(pod.as_ref()));
        known.filter(|known| known.metadata.uid == pod.metadata.uid).unwrap_or_else(|| pod.clone())
    }

    /// The files of a volume, and when a token among them is due.
    async fn tree(
        &self,
        pod: &Pod,
        source: &ProjectedVolumeSource,
        references: &References,
    ) -> Result<(Tree, Option<jiff::Timestamp>), Failed> {
        let objects = Objects::read(&self.host.cluster, pod, references).await?;
        let mut tokens: Vec<Token> = Vec::new();
        for wanted in tokens_of(source) {
            let audiences: Vec<String> =
                wanted.audience.iter().filter(|audience| !audience.is_empty()).cloned().collect();
            let seconds = wanted.expiration_seconds.unwrap_or(TOKEN_SECONDS);
            tokens.push(self.tokens.token(pod, &audiences, seconds).await?);
        }
        let tree =
            render(pod, source, &objects, &tokens).map_err(|error| Failed::unchanged(error.to_string()))?;
        Ok((tree, tokens.iter().map(|token| token.renew).min()))
    }
}

fn place(host: &Host, form: Form, pod: &Pod, name: &str, tree: &Tree) -> berth_host::Result<Ready> {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let scratch = Scratch::new(&host.layout, form.plugin(), uid, name)?;
    let (directory, is_new) = match scratch.open_ready(form.medium())? {
        Some(directory) => (directory, false),
        None => (scratch.make(form.medium())?, true),
    };
    for path in nested_mount_points(pod, name) {
        make_mount_point(&directory, &path)?;
    }
    writer::write(&directory, tree, fs_group(pod))?;
    if is_new {
        scratch.mark_ready()?;
    }
    Ok(Ready { path: scratch.path() })
}

/// Where in the volume other volumes are mounted: it is read-only to the runtime, which cannot make those places.
fn nested_mount_points(pod: &Pod, volume: &str) -> Vec<String> {
    let mut nested = Vec::new();
    for container in containers(pod) {
        let mounts: Vec<(&str, String)> =
            container.mounts.iter().map(|mount| (mount.name.as_str(), plain(&mount.mount_path))).collect();
        for (_, outer) in mounts.iter().filter(|(name, _)| *name == volume) {
            let outer = format!("{}/", outer.trim_end_matches('/'));
            nested.extend(mounts.iter().filter_map(|(_, path)| path.strip_prefix(&outer)).map(str::to_owned));
        }
    }
    nested.retain(|path| !path.is_empty() && !path.split('/').any(|element| element == ".."));
    nested.sort();
    nested.dedup();
    // Those inside of another are that one's business.
    let all = nested.clone();
    nested.retain(|path| {
        !all.iter().any(|outer| path.strip_prefix(outer.as_str()).is_some_and(|rest| rest.starts_with('/')))
    });
    nested
}

/// A path without empty and `.` elements.
fn plain(path: &str) -> String {
    let parts = path.split('/').filter(|part| !matches!(*part, "" | "."));
    parts.fold(String::new(), |path, part| path + "/" + part)
}

fn make_mount_point(volume: &Dir, path: &str) -> berth_host::Result<()> {
    let mut directory: Option<Dir> = None;
    for element in path.split('/') {
        let parent = directory.as_ref().unwrap_or(volume);
        // A link is the way to a file of the volume, which is then what is mounted upon.
        if parent.link_target(element)?.is_some() {
            return Ok(());
        }
        directory = Some(parent.ensure_dir(element, 0o755)?);
    }
    Ok(())
}
