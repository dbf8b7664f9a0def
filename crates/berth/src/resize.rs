//! `berth resize statefulset/NAME SIZE`: larger claims for a StatefulSet, and a template that asks for the same.
//!
//! Kubernetes lets nobody change the claim templates of a StatefulSet. So the claims grow first, one by one and while their
//! pods run; then the set is deleted without its pods (`orphan`) and created again with the larger template, and takes back
//! pods, claims and revisions. Between these two requests the set exists only in a ConfigMap, from which the next run of
//! the command creates it should this one be killed.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use berth_core::Quantity;
use berth_core::names::LAST_APPLIED;
use berth_kube::{Cluster, storage};
use clap::Args as ClapArgs;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as KubernetesQuantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy,
};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::time::Instant;

use crate::machine::ClusterArgs;

/// How often the sizes of the claims are read.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The key of the set in its ConfigMap.
const SET: &str = "statefulset.json";

/// Grow the claims of a StatefulSet and their template, without stopping its pods.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// What to resize: statefulset/NAME
    #[arg(value_name = "KIND/NAME")]
    what: String,

    /// The new size of each claim, such as 20Gi
    #[arg(value_parser = parse_size)]
    size: String,

    /// The namespace of the StatefulSet
    #[arg(long, short = 'n', default_value = "default")]
    namespace: String,

    /// The claim template to resize; needed if there are several
    #[arg(long, value_name = "NAME")]
    template: Option<String>,

    /// How many seconds to wait for the volumes to grow
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    timeout: u64,

    #[command(flatten)]
    cluster: ClusterArgs,
}

fn parse_size(text: &str) -> Result<String, String> {
    let size: Quantity = text.parse().map_err(|_| format!("{text:?} is no size: write 20Gi or 500Mi"))?;
    if size.thousandths() <= 0 {
        return Err("a size is larger than 0".to_owned());
    }
    Ok(text.to_owned())
}

/// Grows the claims, then replaces the set.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let name = parse(&args.what)?;
    let (cluster, _) = args.cluster.connect().await?;
    let resize = Resize::new(&cluster, &args, name);
    resize.finish_interrupted().await?;
    let set = resize.sets.get_opt(name).await.context("read the StatefulSet")?;
    let Some(set) = set else {
        bail!("there is no StatefulSet {name} in the namespace {}", args.namespace);
    };
    let template = resize.template(&set)?;
    let claims = resize.claims(&template).await?;
    resize.check(&set, &template, &claims).await?;
    resize.grow(&claims).await?;
    resize.wait(&claims).await?;
    resize.replace(&set, &template).await
}

fn parse(what: &str) -> anyhow::Result<&str> {
    let Some((kind, name)) = what.split_once('/') else {
        bail!("{what:?} names no kind: write statefulset/{what}");
    };
    ensure!(
        matches!(kind, "statefulset" | "statefulsets" | "sts"),
        "a {kind} cannot be resized; statefulset/NAME can, and a single claim by its spec.resources.requests.storage"
    );
    ensure!(!name.is_empty(), "the name is missing after {what}");
    Ok(name)
}

struct Resize<'a> {
    sets: Api<StatefulSet>,
    all_claims: Api<PersistentVolumeClaim>,
    records: Api<ConfigMap>,
    client: &'a Client,
    args: &'a Args,
    name: &'a str,
    size: i128,
}

impl<'a> Resize<'a> {
    fn new(cluster: &'a Cluster, args: &'a Args, name: &'a str) -> Self {
        let client = cluster.client();
        Self {
            sets: Api::namespaced(client.clone(), &args.namespace),
            all_claims: Api::namespaced(client.clone(), &args.namespace),
            records: Api::namespaced(client.clone(), &args.namespace),
            client,
            args,
            name,
            size: storage::units(&KubernetesQuantity(args.size.clone())),
        }
    }

    fn record_name(&self) -> String {
        format!("berth-resize-{}", self.name)
    }

    /// Creates the set that an earlier run deleted and did not create again.
    async fn finish_interrupted(&self) -> anyhow::Result<()> {
        let record =
            self.records.get_opt(&self.record_name()).await.context("read the record of an earlier run")?;
        let Some(record) = record else { return Ok(()) };
        if self.sets.get_opt(self.name).await?.is_none() {
            let text = record.data.as_ref().and_then(|data| data.get(SET));
            let text = text.with_context(|| {
                format!("the ConfigMap {} has no {SET}: is it of something else?", self.record_name())
            })?;
            let set: StatefulSet =
                serde_json::from_str(text).context("read the set that an earlier run deleted")?;
            self.create(&set).await?;
            println!("statefulset/{} created again: an earlier run was interrupted", self.name);
        }
        // A set that is still there was not deleted yet; it is read anew.
        self.forget().await
    }

    /// The claim template that is meant.
    fn template(&self, set: &StatefulSet) -> anyhow::Result<String> {
        let templates: Vec<String> = templates(set).iter().map(ResourceExt::name_any).collect();
        match (&self.args.template, templates.as_slice()) {
            (_, []) => bail!("statefulset/{} has no volumeClaimTemplates", self.name),
            (Some(named), all) if all.contains(named) => Ok(named.clone()),
            (Some(named), all) => bail!("there is no claim template {named}; there are {}", all.join(", ")),
            (None, [only]) => Ok(only.clone()),
            (None, all) => bail!("choose a claim template by --template: {}", all.join(", ")),
        }
    }

    /// The claims of a template, those of pods that were scaled away included, by ordinals.
    async fn claims(&self, template: &str) -> anyhow::Result<Vec<PersistentVolumeClaim>> {
        let prefix = format!("{template}-{}-", self.name);
        let all = self.all_claims.list(&ListParams::default()).await.context("list the claims")?.items;
        let mut claims: Vec<(u64, PersistentVolumeClaim)> = all
            .into_iter()
            .filter_map(|claim| {
                let ordinal = claim.name_any().strip_prefix(&prefix)?.parse().ok()?;
                Some((ordinal, claim))
            })
            .collect();
        claims.sort_by_key(|(ordinal, _)| *ordinal);
        Ok(claims.into_iter().map(|(_, claim)| claim).collect())
    }

    /// Refuses, before anything is changed, what could not be carried out.
    async fn check(
        &self,
        set: &StatefulSet,
        template: &str,
        claims: &[PersistentVolumeClaim],
    ) -> anyhow::Result<()> {
        let mut classes: BTreeMap<String, bool> = BTreeMap::new();
        let in_set = templates(set).iter().filter(|known| known.name_any() == template);
        for claim in claims.iter().chain(in_set) {
            let what = if claim.namespace().is_some() { "claim" } else { "claim template" };
            let asked = storage::requested(claim);
            ensure!(
                asked <= self.size,
                "{what} {} asks for {} already, and a volume never shrinks: choose a larger size than {}",
                claim.name_any(),
                shown(claim),
                self.args.size
            );
        }
        for claim in claims.iter().filter(|claim| storage::requested(claim) < self.size) {
            let name = claim.name_any();
            ensure!(
                storage::is_bound(claim),
                "claim {name} is not bound yet, and only a bound claim can grow"
            );
            let class = storage::class_of_claim(claim).to_owned();
            if !classes.contains_key(&class) {
                let api: Api<StorageClass> = Api::all(self.client.clone());
                let known = api.get_opt(&class).await.with_context(|| format!("read the class {class}"))?;
                let expands = known.is_some_and(|class| class.allow_volume_expansion == Some(true));
                classes.insert(class.clone(), expands);
            }
            ensure!(
                classes.get(&class) == Some(&true),
                "claim {name} is of the class {class:?}, which has no allowVolumeExpansion: true"
            );
        }
        Ok(())
    }

    async fn grow(&self, claims: &[PersistentVolumeClaim]) -> anyhow::Result<()> {
        let change = json!({ "spec": { "resources": { "requests": { "storage": self.args.size } } } });
        for claim in claims.iter().filter(|claim| storage::requested(claim) < self.size) {
            let name = claim.name_any();
            let patched = self.all_claims.patch(&name, &PatchParams::default(), &Patch::Merge(&change)).await;
            patched.with_context(|| format!("ask for {} in claim {name}", self.args.size))?;
            println!("pvc/{name}: asked for {} instead of {}", self.args.size, shown(claim));
        }
        Ok(())
    }

    /// Waits until every volume has the size, or only waits for a pod to use it.
    async fn wait(&self, claims: &[PersistentVolumeClaim]) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(self.args.timeout);
        for claim in claims {
            let name = claim.name_any();
            loop {
                let Some(claim) = self.all_claims.get_opt(&name).await? else {
                    println!("pvc/{name}: gone");
                    break;
                };
                let status = claim.status.clone().unwrap_or_default();
                let capacity = storage::bytes(status.capacity.as_ref()).unwrap_or(0);
                if capacity >= self.size {
                    println!("pvc/{name}: {}", self.args.size);
                    break;
                }
                let conditions = status.conditions.unwrap_or_default();
                let has = |kind: &str| conditions.iter().any(|condition| condition.type_ == kind);
                // The volume has grown. Its filesystem follows with the next start of a pod, if the node cannot grow it while
                // it is mounted, or nobody has mounted it.
                if has("FileSystemResizePending") && (has("NodeResizeError") || !self.is_used(&name).await?) {
                    println!(
                        "pvc/{name}: the volume has {}, and its filesystem grows when a pod starts with it",
                        self.args.size
                    );
                    break;
                }
                if Instant::now() >= deadline {
                    let why = conditions
                        .iter()
                        .filter_map(|condition| condition.message.clone())
                        .collect::<Vec<_>>();
                    bail!(
                        "pvc/{name} has not grown within {} s{}{}; the template is unchanged. `berth explain pvc/{name} -n {}` \
                         says what it waits for; run this command again to go on",
                        self.args.timeout,
                        if why.is_empty() { "" } else { ": " },
                        why.join("; "),
                        self.args.namespace
                    );
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
        Ok(())
    }

    async fn is_used(&self, claim: &str) -> anyhow::Result<bool> {
        let pods: Api<k8s_openapi::api::core::v1::Pod> =
            Api::namespaced(self.client.clone(), &self.args.namespace);
        let pods = pods.list(&ListParams::default()).await.context("list the pods")?.items;
        Ok(pods.iter().any(|pod| {
            !storage::is_over(pod) && storage::claims_of_pod(pod).iter().any(|used| used.key.name == claim)
        }))
    }

    /// Replaces the set by one whose template has the size; its pods go on.
    async fn replace(&self, set: &StatefulSet, template: &str) -> anyhow::Result<()> {
        let mut wanted = StatefulSet {
            metadata: ObjectMeta {
                name: set.metadata.name.clone(),
                namespace: set.metadata.namespace.clone(),
                labels: set.metadata.labels.clone(),
                annotations: set.metadata.annotations.clone(),
                finalizers: set.metadata.finalizers.clone(),
                owner_references: set.metadata.owner_references.clone(),
                ..ObjectMeta::default()
            },
            spec: set.spec.clone(),
            status: None,
        };
        // What kubectl applied last has the old size, which its next apply would compare with.
        if let Some(annotations) = &mut wanted.metadata.annotations {
            annotations.remove(LAST_APPLIED);
        }
        let templates = wanted.spec.as_mut().and_then(|spec| spec.volume_claim_templates.as_mut());
        let mut changed = false;
        for known in templates.into_iter().flatten().filter(|known| known.name_any() == template) {
            let requests = known
                .spec
                .get_or_insert_default()
                .resources
                .get_or_insert_default()
                .requests
                .get_or_insert_default();
            let size = KubernetesQuantity(self.args.size.clone());
            let before = requests.insert("storage".to_owned(), size);
            changed = before.is_none_or(|before| storage::units(&before) != self.size);
        }
        if !changed {
            println!("statefulset/{}: its template asks for {} already", self.name, self.args.size);
            return Ok(());
        }
        self.save(&wanted).await?;
        let preconditions = Preconditions { uid: set.uid(), resource_version: None };
        let parameters = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Orphan),
            preconditions: Some(preconditions),
            ..DeleteParams::default()
        };
        self.sets.delete(self.name, &parameters).await.context("delete the StatefulSet without its pods")?;
        let deadline = Instant::now() + Duration::from_secs(self.args.timeout);
        while self.sets.get_opt(self.name).await?.is_some_and(|now| now.uid() == set.uid()) {
            ensure!(
                Instant::now() < deadline,
                "statefulset/{} is not gone within {} s: does a finalizer hold it? Run this command again to go on",
                self.name,
                self.args.timeout
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.create(&wanted).await?;
        self.forget().await?;
        println!(
            "statefulset/{}: its template asks for {} now; its pods were not stopped",
            self.name, self.args.size
        );
        Ok(())
    }

    async fn save(&self, set: &StatefulSet) -> anyhow::Result<()> {
        let record = ConfigMap {
            metadata: ObjectMeta { name: Some(self.record_name()), ..ObjectMeta::default() },
            data: Some(BTreeMap::from([(SET.to_owned(), serde_json::to_string(set)?)])),
            ..ConfigMap::default()
        };
        self.records
            .create(&PostParams::default(), &record)
            .await
            .context("save the StatefulSet in a ConfigMap")?;
        Ok(())
    }

    async fn create(&self, set: &StatefulSet) -> anyhow::Result<()> {
        match self.sets.create(&PostParams::default(), set).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.reason == "AlreadyExists" => Ok(()),
            Err(error) => Err(error).with_context(|| {
                format!(
                    "create the StatefulSet again; it is in the ConfigMap {}, and running this command again tries once more",
                    self.record_name()
                )
            }),
        }
    }

    async fn forget(&self) -> anyhow::Result<()> {
        match self.records.delete(&self.record_name(), &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error).context("delete the ConfigMap with the StatefulSet"),
            Ok(_) => Ok(()),
        }
    }
}

fn templates(set: &StatefulSet) -> &[PersistentVolumeClaim] {
    set.spec.as_ref().and_then(|spec| spec.volume_claim_templates.as_deref()).unwrap_or_default()
}

/// The size that a claim asks for, as it is written.
fn shown(claim: &PersistentVolumeClaim) -> String {
    let requests = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    requests
        .and_then(|requests| requests.get("storage"))
        .map_or_else(|| "nothing".to_owned(), |size| size.0.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_kinds_that_make_no_sense_are_refused_with_the_reason() {
        assert_eq!(parse_size("20Gi").unwrap(), "20Gi");
        assert_eq!(parse_size("big").unwrap_err(), "\"big\" is no size: write 20Gi or 500Mi");
        assert_eq!(parse_size("0").unwrap_err(), "a size is larger than 0");
        assert_eq!(parse("sts/web").unwrap(), "web");
        assert!(parse("web").unwrap_err().to_string().contains("write statefulset/web"));
        assert!(parse("deployment/web").unwrap_err().to_string().contains("a deployment cannot be resized"));
        assert!(parse("sts/").unwrap_err().to_string().contains("name is missing"));
    }
}
