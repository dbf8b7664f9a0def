//! `berth nodes`: the nodes of a cluster, stopping and starting those of `berth up --nodes`, and forgetting one that is lost.
//!
//! Stopping and starting is an annotation of the Node, on which `berth up` acts (`stack/nodes.rs`). Forgetting works on any
//! cluster: it removes the objects that only a node can use which does not come back, and which nobody else removes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use berth_core::names::{
    HOSTPATH_TOPOLOGY_NODE, NODE_LABEL_PREFIX, NODE_POWER, NODE_POWERED, OUT_OF_SERVICE, TOPOLOGY_NODE,
};
use berth_kube::{Cluster, Key, Kind, selectors, storage};
use clap::{Args as ClapArgs, Subcommand};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, CSIStorageCapacity, VolumeAttachment};
use kube::ResourceExt as _;

use crate::machine::{self, ClusterArgs};
use crate::stack::nodes::{OFF, ON};

/// How long a node may take to stop or to start.
const NODE_TIMEOUT: Duration = Duration::from_secs(90);
/// Where nodes renew their leases.
const LEASES: &str = "kube-node-lease";

/// List the nodes of a cluster, stop and start those of `berth up --nodes`, forget one that is lost.
#[derive(Debug, ClapArgs)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<Action>,

    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the nodes: whether they are on, ready and tainted, and how many pods and volumes they have.
    List {
        #[command(flatten)]
        cluster: ClusterArgs,
    },
    /// Stop a node of `berth up --nodes` as by a power cut: its processes are killed, its mounts are gone, its lease ends.
    Stop(One),
    /// Start a node again that was stopped.
    Start(One),
    /// Remove the objects of a node that is lost for good: volumes that are on no other node, attachments, capacity, the Node.
    Forget {
        #[command(flatten)]
        node: One,

        /// Also delete the claims of its volumes, so that workloads make new ones
        #[arg(long)]
        delete_claims: bool,

        /// Only print what would be removed
        #[arg(long)]
        dry_run: bool,
    },
}

/// The node that a command is about, and its cluster.
#[derive(Debug, ClapArgs)]
struct One {
    /// The name of the Node object, as `berth nodes` lists it
    #[arg(value_name = "NODE")]
    name: String,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Lists, stops, starts or forgets nodes, and prints what was done.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    match args.command.unwrap_or(Action::List { cluster: args.cluster }) {
        Action::List { cluster } => {
            let (cluster, _) = cluster.connect().await?;
            print!("{}", list(&cluster).await?);
        }
        Action::Stop(one) => {
            let (cluster, _) = one.cluster.connect().await?;
            switch(&cluster, &one.name, OFF).await?;
            println!(
                "Node {} is off, as after a power cut. Kubernetes learns of it when its lease ends.",
                one.name
            );
            println!(
                "If it stays off: kubectl taint node {} {OUT_OF_SERVICE}=nodeshutdown:NoExecute moves its pods",
                one.name
            );
        }
        Action::Start(one) => {
            let (cluster, _) = one.cluster.connect().await?;
            let node = switch(&cluster, &one.name, ON).await?;
            println!("Node {} is on.", one.name);
            if has_taint(&node, OUT_OF_SERVICE) {
                println!("It takes no pods yet: kubectl taint node {} {OUT_OF_SERVICE}-", one.name);
            }
        }
        Action::Forget { node, delete_claims, dry_run } => {
            let (cluster, _) = node.cluster.connect().await?;
            forget(&cluster, &node.name, delete_claims, dry_run).await?;
        }
    }
    Ok(())
}

fn has_taint(node: &Node, key: &str) -> bool {
    node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).any(|taint| taint.key == key)
}

async fn list(cluster: &Cluster) -> anyhow::Result<String> {
    let nodes: Vec<Node> = cluster.fetch_all("").await.context("list the nodes")?;
    let pods: Vec<Pod> = cluster.fetch_all("").await.context("list the pods")?;
    let volumes: Vec<PersistentVolume> = cluster.fetch_all("").await.context("list the volumes")?;
    let mut rows = vec![["NAME", "POWER", "READY", "PODS", "VOLUMES", "TAINTS"].map(str::to_owned)];
    for node in &nodes {
        let name = node.name_any();
        let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        let taints: Vec<_> = taints.map(|taint| format!("{}:{}", taint.key, taint.effect)).collect();
        let here = |pod: &&Pod| storage::node_of_pod(pod) == name && !storage::is_over(pod);
        let on_node = pods.iter().filter(here).count();
        let lost = Lost::new(&name, Some(node), &nodes);
        rows.push([
            name.clone(),
            node.annotations().get(NODE_POWERED).cloned().unwrap_or_else(|| "-".to_owned()),
            if machine::is_ready(node) { "yes" } else { "no" }.to_owned(),
            on_node.to_string(),
            volumes.iter().filter(|volume| lost.is_only_node_of(volume)).count().to_string(),
            if taints.is_empty() { "-".to_owned() } else { taints.join(",") },
        ]);
    }
    Ok(table(&rows))
}

fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// Switches a node, and returns when `berth up` says that it is done.
async fn switch(cluster: &Cluster, name: &str, wanted: &str) -> anyhow::Result<Node> {
    let key = Key::cluster(name);
    let find = async || cluster.fetch::<Node>(&key).await.with_context(|| format!("read the node {name}"));
    let Some(node) = find().await? else { bail!("there is no node {name}; `berth nodes` lists them") };
    ensure!(
        node.annotations().contains_key(NODE_POWERED),
        "node {name} is not one of several nodes of `berth up --nodes`, and cannot be stopped or started alone"
    );
    let change = |node: &mut Node| {
        if wanted == OFF {
            node.annotations_mut().insert(NODE_POWER.to_owned(), OFF.to_owned());
        } else {
            node.annotations_mut().remove(NODE_POWER);
        }
    };
    cluster.edit(&*node, change).await.with_context(|| format!("switch the node {name}"))?;
    let begun = Instant::now();
    loop {
        let Some(node) = find().await? else { bail!("the node {name} was removed meanwhile") };
        if node.annotations().get(NODE_POWERED).is_some_and(|power| power == wanted) {
            return Ok((*node).clone());
        }
        ensure!(
            begun.elapsed() < NODE_TIMEOUT,
            "node {name} is not {wanted} after {NODE_TIMEOUT:?}; does `berth up` run, with as many --nodes as before?"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A node that does not come back, and those that are left.
struct Lost<'a> {
    name: &'a str,
    labels: BTreeMap<String, String>,
    others: Vec<&'a Node>,
}

impl<'a> Lost<'a> {
    /// The labels are those of its Node; without one, those by which drivers that have volumes on one node name it.
    fn new(name: &'a str, node: Option<&Node>, all: &'a [Node]) -> Self {
        let keys = [
            TOPOLOGY_NODE.to_owned(),
            HOSTPATH_TOPOLOGY_NODE.to_owned(),
            format!("{NODE_LABEL_PREFIX}hostname"),
        ];
        let mut labels: BTreeMap<_, _> = keys.into_iter().map(|key| (key, name.to_owned())).collect();
        if let Some(node) = node {
            labels.extend(node.labels().clone());
        }
        Self { name, labels, others: all.iter().filter(|node| node.name_any() != name).collect() }
    }

    /// Whether this node can use it and no other.
    fn alone(&self, chooses: impl Fn(&str, &BTreeMap<String, String>) -> bool) -> bool {
        chooses(self.name, &self.labels)
            && !self.others.iter().any(|node| chooses(&node.name_any(), node.labels()))
    }

    fn is_only_node_of(&self, volume: &PersistentVolume) -> bool {
        let affinity = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref());
        let required = affinity.and_then(|affinity| affinity.required.as_ref());
        required.is_some_and(|required| {
            self.alone(|name, labels| selectors::node_selector(required, name, labels))
        })
    }

    fn is_only_topology_of(&self, capacity: &CSIStorageCapacity) -> bool {
        capacity.node_topology.as_ref().is_some_and(|topology| {
            !selectors::is_empty(topology)
                && self.alone(|_, labels| selectors::label_selector(topology, labels))
        })
    }
}

async fn forget(cluster: &Cluster, name: &str, delete_claims: bool, dry_run: bool) -> anyhow::Result<()> {
    let nodes: Vec<Node> = cluster.fetch_all("").await.context("list the nodes")?;
    let node = nodes.iter().find(|node| node.name_any() == name);
    if let Some(node) = node {
        ensure!(
            !machine::is_ready(node),
            "node {name} is ready: a node is forgotten when it is lost. Stop it first; nothing was removed"
        );
        ensure!(
            node.annotations().get(NODE_POWERED).is_none_or(|power| power == OFF),
            "node {name} is on; `berth nodes stop {name}` stops it. Nothing was removed"
        );
    }
    let lost = Lost::new(name, node, &nodes);
    let volumes: Vec<PersistentVolume> = cluster.fetch_all("").await.context("list the volumes")?;
    let attachments: Vec<VolumeAttachment> = cluster.fetch_all("").await.context("list the attachments")?;
    let capacities: Vec<CSIStorageCapacity> = cluster.fetch_all("").await.context("list the capacities")?;
    let volumes: Vec<_> = volumes.iter().filter(|volume| lost.is_only_node_of(volume)).collect();
    let remover = Remover { cluster, dry_run };
    for attachment in attachments.iter().filter(|attachment| attachment.spec.node_name == name) {
        remover.remove(attachment).await?;
    }
    for capacity in capacities.iter().filter(|capacity| lost.is_only_topology_of(capacity)) {
        remover.remove(capacity).await?;
    }
    let mut kept = Vec::new();
    for volume in volumes {
        remover.remove(volume).await?;
        let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
        let Some(reference) = reference else { continue };
        let key = Key::new(
            reference.namespace.clone().unwrap_or_default(),
            reference.name.clone().unwrap_or_default(),
        );
        let claim = cluster.fetch::<PersistentVolumeClaim>(&key).await?;
        let Some(claim) =
            claim.filter(|claim| reference.uid.is_none() || claim.metadata.uid == reference.uid)
        else {
            continue;
        };
        if delete_claims {
            println!("PersistentVolumeClaim {key}");
            if !dry_run {
                cluster.delete(&*claim).await.with_context(|| format!("delete the claim {key}"))?;
            }
        } else {
            kept.push(key.to_string());
        }
    }
    if let Some(node) = cluster.fetch::<CSINode>(&Key::cluster(name)).await? {
        remover.remove(&*node).await?;
    }
    if let Some(lease) = cluster.fetch::<Lease>(&Key::new(LEASES, name)).await? {
        remover.remove(&*lease).await?;
    }
    if let Some(node) = node {
        remover.remove(node).await?;
    }
    if !kept.is_empty() {
        println!("Their claims stay, and are Lost: {} (--delete-claims deletes them)", kept.join(", "));
    }
    println!("{} {name}.", if dry_run { "Would forget" } else { "Forgot" });
    Ok(())
}

struct Remover<'a> {
    cluster: &'a Cluster,
    dry_run: bool,
}

impl Remover<'_> {
    /// Deletes an object, whatever keeps it: those who would take their finalizers away are lost with the node.
    async fn remove<K: Kind>(&self, object: &K) -> anyhow::Result<()> {
        let (kind, key) = (K::kind(&()), Key::of(object));
        println!("{kind} {key}");
        if self.dry_run {
            return Ok(());
        }
        let removed = async {
            self.cluster.delete(object).await?;
            let release = |object: &mut K| object.meta_mut().finalizers = None;
            self.cluster.edit(object, release).await.map(|_| ())
        };
        removed.await.with_context(|| format!("remove the {kind} {key}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(name: &str, zone: &str) -> Node {
        let labels = json!({ "topology.berth.dev/node": name, "zone": zone });
        serde_json::from_value(json!({ "metadata": { "name": name, "labels": labels } })).unwrap()
    }

    fn volume(key: &str, values: &[&str]) -> PersistentVolume {
        let terms = json!([{ "matchExpressions": [{ "key": key, "operator": "In", "values": values }] }]);
        let affinity = json!({ "required": { "nodeSelectorTerms": terms } });
        serde_json::from_value(json!({ "metadata": { "name": "v" }, "spec": { "nodeAffinity": affinity } }))
            .unwrap()
    }

    #[test]
    fn only_what_no_other_node_can_use_goes_with_a_lost_node() {
        let nodes = [node("a", "x"), node("b", "x"), node("c", "y")];
        let a = Lost::new("a", Some(&nodes[0]), &nodes);
        assert!(a.is_only_node_of(&volume("topology.berth.dev/node", &["a"])));
        assert!(!a.is_only_node_of(&volume("topology.berth.dev/node", &["b"])));
        assert!(!a.is_only_node_of(&volume("topology.berth.dev/node", &["a", "b"])));
        assert!(!a.is_only_node_of(&volume("zone", &["x"])), "b is in the zone, too");
        assert!(!a.is_only_node_of(&PersistentVolume::default()));
        assert!(Lost::new("c", Some(&nodes[2]), &nodes).is_only_node_of(&volume("zone", &["y"])));
        // Its Node is gone already.
        let gone = Lost::new("gone", None, &nodes);
        assert!(gone.is_only_node_of(&volume("topology.berth.dev/node", &["gone"])));
        assert!(gone.is_only_node_of(&volume("kubernetes.io/hostname", &["gone"])));
        assert!(!gone.is_only_node_of(&volume("zone", &["x"])));
    }
}
