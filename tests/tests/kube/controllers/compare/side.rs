//! One of the two clusters of a comparison, and what a scenario does with it.

use std::ops::Deref;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use berth_testkit::{Loops, TestCluster};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, EvictParams};
use serde_json::{Value, json};
use tokio_util::sync::DropGuard;

use super::kubelet::{DRIVER, Kubelets};
use super::normal::Names;
use crate::cluster::real;
use crate::kinds::{
    BUDGET, CLAIM, CLASS, CRON_JOB, CSI_DRIVER, DAEMON_SET, DEPLOYMENT, EVENT, JOB, Kind, NAMESPACE, NODE,
    POD, PRIORITY_CLASS, REPLICA_SET, REVISION, SERVICE_ACCOUNT, STATEFUL_SET, VOLUME, text,
};
use crate::objects::Objects;

/// The kinds of which all objects are compared.
const KINDS: [Kind; 12] = [
    STATEFUL_SET,
    DAEMON_SET,
    DEPLOYMENT,
    REPLICA_SET,
    REVISION,
    JOB,
    CRON_JOB,
    BUDGET,
    POD,
    CLAIM,
    VOLUME,
    NODE,
];
/// The label of a scenario's namespace.
const OURS: &str = "test/compare";
/// Whoever has not written anything for so long has nothing more to write.
const QUIET: Duration = Duration::from_secs(2);
/// Something may change all the time, such as a count of events.
const RESTLESS: Duration = Duration::from_secs(30);

/// How often Kubernetes' controller looks which nodes there are; whether it has looked cannot be seen.
const NODE_MONITOR_PERIOD: Duration = Duration::from_secs(6);

/// A cluster with its control loops and its nodes. It derefs to the objects of the scenario's namespace.
pub(crate) struct Side {
    pub(crate) name: &'static str,
    objects: Objects,
    kubelets: Kubelets,
    pub(crate) names: Names,
    /// Berth's own API server and loops.
    berth: Option<(TestCluster, Loops, Option<DropGuard>)>,
    checkpoints: Vec<Checkpoint>,
    remarks: Vec<Value>,
    begun: Instant,
}

/// The objects and events that there were at a point of a scenario.
pub(crate) struct Checkpoint {
    pub(crate) name: String,
    pub(crate) objects: Vec<(Kind, Vec<Value>)>,
    pub(crate) events: Vec<Value>,
    /// What the scenario remarked until then.
    pub(crate) remarks: Vec<Value>,
}

impl Deref for Side {
    type Target = Objects;

    fn deref(&self) -> &Objects {
        &self.objects
    }
}

impl Side {
    /// The real cluster, without what an earlier scenario left.
    pub(crate) async fn kubernetes(scenario: &str) -> Result<Self> {
        let (_, mut config) = real().await?;
        // A refused eviction is an answer.
        config.default_retry = false;
        let client = Client::try_from(config)?;
        let namespace = format!("{scenario}-{}", std::process::id());
        let objects = Objects::new(client, namespace);
        for left in objects.list(NAMESPACE).await? {
            if !left["metadata"]["labels"][OURS].is_null() {
                let name = text(&left, "/metadata/name");
                objects.delete(NAMESPACE, name).await?;
                let of_it = Objects::new(objects.client(), name.to_owned());
                for pod in of_it.list(POD).await? {
                    of_it.remove_pod(text(&pod, "/metadata/name")).await?;
                }
                objects.gone(NAMESPACE, name).await?;
            }
        }
        let has_nodes = !objects.list(NODE).await?.is_empty();
        for kind in [NODE, VOLUME, PRIORITY_CLASS] {
            for object in objects.list(kind).await? {
                let name = text(&object, "/metadata/name");
                if !name.starts_with("system-") {
                    objects.delete(kind, name).await?;
                }
            }
        }
        if has_nodes {
            tokio::time::sleep(NODE_MONITOR_PERIOD).await;
        }
        Self::with("Kubernetes", objects, None).await
    }

    /// Berth's API server and loops, in this process.
    pub(crate) async fn berth(scenario: &str) -> Result<Self> {
        let cluster = TestCluster::embedded().await;
        let loops = Loops::new(&cluster.client)
            .with(berth_controllers::persistent_volumes::run)
            .with(berth_controllers::protection::run)
            .with(berth_controllers::ephemeral::run)
            .with(berth_controllers::scheduler::run)
            .with(|cluster| {
                let forced = berth_controllers::attach_detach::FORCE_DETACH_AFTER;
                berth_controllers::attach_detach::run(cluster, None, forced)
            })
            .with(|cluster| berth_controllers::nodes::run(cluster, berth_controllers::nodes::GRACE_PERIOD))
            .with(berth_controllers::services::run)
            .with(berth_controllers::workloads::run);
        let namespace = format!("{scenario}-{}", std::process::id());
        let objects = Objects::new(cluster.client.clone(), namespace);
        let collector = cluster.collect_garbage();
        Self::with("Berth", objects, Some((cluster, loops, collector))).await
    }

    async fn with(
        name: &'static str,
        objects: Objects,
        berth: Option<(TestCluster, Loops, Option<DropGuard>)>,
    ) -> Result<Self> {
        let kubelets = Kubelets::start(objects.client()).await;
        let names = Names::follow(objects.client(), &objects.namespace).await;
        let namespace = json!({"metadata": {"name": objects.namespace, "labels": {OURS: ""}}});
        objects.create(NAMESPACE, namespace).await?;
        if berth.is_some() && objects.find(SERVICE_ACCOUNT, "default").await?.is_none() {
            objects.create(SERVICE_ACCOUNT, json!({"metadata": {"name": "default"}})).await?;
        }
        objects.until(SERVICE_ACCOUNT, "default", "is there", |_| true).await?;
        let capacity = json!({"spec": {"storageCapacity": false}});
        if objects.find(CSI_DRIVER, DRIVER).await?.is_some() {
            objects.patch(CSI_DRIVER, DRIVER, capacity).await?;
        } else {
            let spec = json!({"attachRequired": false});
            objects.create(CSI_DRIVER, json!({"metadata": {"name": DRIVER}, "spec": spec})).await?;
        }
        if objects.find(CLASS, "made").await?.is_none() {
            let class = json!({
                "metadata": {"name": "made"}, "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer",
                "allowVolumeExpansion": true,
            });
            objects.create(CLASS, class).await?;
        }
        Ok(Self {
            name,
            objects,
            kubelets,
            names,
            berth,
            checkpoints: Vec::new(),
            remarks: Vec::new(),
            begun: Instant::now(),
        })
    }

    /// Notes how long the scenario has taken to come here.
    pub(crate) fn step(&self, what: &str) {
        println!("{:7.1} s  {:10}  {what}", self.begun.elapsed().as_secs_f64(), self.name);
    }

    /// Makes nodes that are ready.
    pub(crate) async fn nodes(&mut self, names: &[&str]) -> Result<()> {
        for name in names {
            self.kubelets.add(name, json!({})).await?;
        }
        Ok(())
    }

    /// Makes a node with more labels.
    pub(crate) async fn node(&mut self, name: &str, labels: Value) -> Result<()> {
        self.kubelets.add(name, labels).await
    }

    /// From the beginning to the end, it does not matter on which node something happens: it is chosen at random.
    pub(crate) fn nodes_are_alike(&self) {
        self.names.hide_nodes();
    }

    /// Has a node fall silent.
    pub(crate) fn fail_node(&self, name: &str) {
        self.kubelets.fail(name);
    }

    /// Has a node that fell silent say that it is alive.
    pub(crate) async fn revive_node(&mut self, name: &str) -> Result<()> {
        self.kubelets.revive(name).await
    }

    /// Takes a node away, with all that runs there.
    pub(crate) async fn remove_node(&self, name: &str) -> Result<()> {
        self.kubelets.remove(name).await
    }

    /// Waits for a moment of the minute between two seconds.
    pub(crate) async fn after_second(&self, first: i64, last: i64) {
        let now = k8s_openapi::jiff::Timestamp::now().as_second() % 60;
        if !(first..=last).contains(&now) {
            let wait = (first - now).rem_euclid(60).unsigned_abs();
            tokio::time::sleep(Duration::from_secs(wait)).await;
        }
    }

    /// Asks for the eviction of a pod; gives what is answered.
    pub(crate) async fn evict(&self, pod: &str) -> Result<Value> {
        let pods: Api<Pod> = Api::namespaced(self.client(), &self.namespace);
        match pods.evict(pod, &EvictParams::default()).await {
            Ok(_) => Ok(json!("evicted")),
            Err(kube::Error::Api(status)) => Ok(serde_json::to_value(status)?),
            Err(error) => Err(error.into()),
        }
    }

    /// Something that is to be equal on both sides besides objects and events.
    pub(crate) fn remark(&mut self, remark: Value) {
        self.remarks.push(remark);
    }

    /// Waits until nothing changes any more, and keeps what there is then, to be compared.
    pub(crate) async fn checkpoint(&mut self, name: &str) -> Result<()> {
        self.step(name);
        let (mut last, mut since) = (Vec::new(), Instant::now());
        let begun = Instant::now();
        let checkpoint = loop {
            let checkpoint = self.observe(name).await?;
            let versions = checkpoint.versions();
            if versions != last {
                (last, since) = (versions, Instant::now());
            }
            if since.elapsed() > QUIET {
                break checkpoint;
            }
            ensure!(begun.elapsed() < RESTLESS, "{}, {name}: objects change all the time", self.name);
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        self.checkpoints.push(checkpoint);
        Ok(())
    }

    async fn observe(&self, name: &str) -> Result<Checkpoint> {
        let mut objects = Vec::new();
        for kind in KINDS {
            objects.push((kind, self.list(kind).await?));
        }
        let mut events = self.list(EVENT).await?;
        let of_cluster = Objects::new(self.client(), "default".to_owned());
        events.extend(of_cluster.list(EVENT).await?.into_iter().filter(|event| {
            // On the real cluster those of earlier scenarios are there still.
            self.names.is_about_known(event)
        }));
        Ok(Checkpoint { name: name.to_owned(), objects, events, remarks: self.remarks.clone() })
    }

    /// Takes everything away, and gives the checkpoints.
    pub(crate) async fn finish(mut self) -> Result<(Names, Vec<Checkpoint>)> {
        if let Some((_, loops, _)) = self.berth.take() {
            loops.stop().await;
        } else {
            self.delete(NAMESPACE, &self.objects.namespace).await?;
            self.until_all("no pods are left", POD, <[Value]>::is_empty).await?;
            for node in self.list(NODE).await? {
                self.kubelets.remove(text(&node, "/metadata/name")).await?;
            }
            // A node of the same name would be the same to it.
            tokio::time::sleep(NODE_MONITOR_PERIOD).await;
        }
        self.step("finished");
        self.kubelets.stop().await;
        Ok((self.names, self.checkpoints))
    }
}

impl Checkpoint {
    fn versions(&self) -> Vec<(String, String)> {
        let objects = self.objects.iter().flat_map(|(_, objects)| objects).chain(&self.events);
        let field = |object: &Value, path: &str| text(object, path).to_owned();
        objects
            .map(|object| (field(object, "/metadata/uid"), field(object, "/metadata/resourceVersion")))
            .collect()
    }
}
