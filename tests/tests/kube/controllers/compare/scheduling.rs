//! The scheduler: which node a pod gets, and what is said of one that gets none. A choice between nodes that suit equally is made at
//! random, so that no scenario leaves one.

use anyhow::Result;
use serde_json::{Value, json};

use super::compare;
use super::kubelet::DRIVER;
use super::side::Side;
use crate::kinds::{CAPACITY, CLAIM, CLASS, CSI_DRIVER, NODE, POD, PRIORITY_CLASS, VOLUME, text};
use crate::objects::merged;

fn pod(name: &str, more: Value) -> Value {
    let spec = json!({"terminationGracePeriodSeconds": 1, "containers": [{"name": "main", "image": "any"}]});
    json!({"metadata": {"name": name, "labels": {"app": name}}, "spec": merged(spec, more)})
}

fn of_size(cpu: &str) -> Value {
    json!({"containers": [{"name": "main", "image": "any", "resources": {"requests": {"cpu": cpu}}}]})
}

fn claim(name: &str, class: &str, size: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "storageClassName": class, "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}},
    }})
}

fn using(name: &str, claims: &[&str]) -> Value {
    let volume = |claim: &&str| json!({"name": claim, "persistentVolumeClaim": {"claimName": claim}});
    pod(name, json!({"volumes": claims.iter().map(volume).collect::<Vec<Value>>()}))
}

async fn runs(side: &Side, name: &str) -> Result<()> {
    side.until(POD, name, "runs", |pod| pod["status"]["phase"] == "Running").await.map(drop)
}

async fn is_refused(side: &Side, name: &str) -> Result<()> {
    let refused = |pod: &Value| {
        let conditions = pod["status"]["conditions"].as_array();
        conditions.is_some_and(|all| {
            all.iter().any(|one| one["type"] == "PodScheduled" && one["status"] == "False")
        })
    };
    side.until(POD, name, "is refused", refused).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_fit_nowhere_are_told_why() -> Result<()> {
    compare("scheduling-refused", async |side| {
        side.create(POD, pod("early", json!({}))).await?;
        is_refused(side, "early").await?;
        side.checkpoint("without nodes").await?;
        side.node("node-a", json!({"zone": "one"})).await?;
        runs(side, "early").await?;
        side.delete(POD, "early").await?;
        side.gone(POD, "early").await?;
        side.node("node-b", json!({"zone": "two"})).await?;
        side.patch(NODE, "node-b", json!({"spec": {"taints": [{"key": "own", "value": "x", "effect": "NoSchedule"}]}}))
            .await?;
        side.node("node-c", json!({"zone": "two"})).await?;
        side.patch(NODE, "node-c", json!({"spec": {"unschedulable": true}})).await?;
        side.until(NODE, "node-c", "is tainted", |node| !node["spec"]["taints"].is_null()).await?;
        side.create(POD, pod("selects", json!({"nodeSelector": {"zone": "three"}}))).await?;
        side.create(POD, pod("selects-tainted", json!({"nodeSelector": {"zone": "two"}}))).await?;
        side.create(POD, pod("large", of_size("5"))).await?;
        let mut port = pod("port", json!({}));
        port["spec"]["containers"][0]["ports"] = json!([{"containerPort": 80, "hostPort": 80}]);
        side.create(POD, port.clone()).await?;
        runs(side, "port").await?;
        port["metadata"]["name"] = json!("same-port");
        side.create(POD, port).await?;
        let terms = json!([{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["four"]}]}]);
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        side.create(POD, pod("affine", json!({"affinity": affinity}))).await?;
        side.create(POD, pod("gated", json!({"schedulingGates": [{"name": "example.com/wait"}]}))).await?;
        side.create(POD, pod("foreign", json!({"schedulerName": "other"}))).await?;
        for name in ["selects", "selects-tainted", "large", "same-port", "affine"] {
            is_refused(side, name).await?;
        }
        side.checkpoint("refused").await?;
        side.patch(POD, "gated", json!({"spec": {"schedulingGates": null}})).await?;
        runs(side, "gated").await?;
        side.patch(NODE, "node-b", json!({"spec": {"taints": null}})).await?;
        runs(side, "selects-tainted").await?;
        runs(side, "same-port").await?;
        side.checkpoint("some were let in").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_seek_and_avoid_each_other() -> Result<()> {
    compare("scheduling-affinity", async |side| {
        side.node("node-a", json!({"zone": "one"})).await?;
        side.create(POD, pod("first", json!({}))).await?;
        runs(side, "first").await?;
        side.node("node-b", json!({"zone": "two"})).await?;
        let term = |app: &str, key: &str| json!({"labelSelector": {"matchLabels": {"app": app}}, "topologyKey": key});
        let affinity = |kind: &str, term: Value| {
            json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
        };
        side.create(POD, pod("beside", affinity("podAffinity", term("first", "zone")))).await?;
        runs(side, "beside").await?;
        side.create(POD, pod("apart", affinity("podAntiAffinity", term("first", "kubernetes.io/hostname")))).await?;
        runs(side, "apart").await?;
        // Its own labels are enough for the first of its kind, unless a node has no such label.
        side.create(POD, pod("nowhere", affinity("podAffinity", term("absent", "zone")))).await?;
        is_refused(side, "nowhere").await?;
        side.create(POD, pod("own", affinity("podAffinity", term("own", "rack")))).await?;
        is_refused(side, "own").await?;
        // The anti-affinity of those that are there counts too.
        let mut alike = pod("first-again", affinity("podAntiAffinity", term("apart", "zone")));
        alike["metadata"]["labels"]["app"] = json!("first");
        side.create(POD, alike).await?;
        runs(side, "first-again").await?;
        let mut unwanted = pod("unwanted", json!({"nodeSelector": {"zone": "two"}}));
        unwanted["metadata"]["labels"]["app"] = json!("first");
        side.create(POD, unwanted).await?;
        is_refused(side, "unwanted").await?;
        let mut both = pod("both", affinity("podAntiAffinity", term("first", "zone")));
        both["spec"]["nodeSelector"] = json!({"zone": "one"});
        side.create(POD, both).await?;
        is_refused(side, "both").await?;
        side.checkpoint("placed").await?;
        side.delete(POD, "apart").await?;
        runs(side, "unwanted").await?;
        side.checkpoint("the one it was kept from is gone").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_are_spread() -> Result<()> {
    compare("scheduling-spread", async |side| {
        side.node("node-a", json!({"zone": "one"})).await?;
        side.node("node-b", json!({"zone": "two"})).await?;
        let spread = |name: &str, key: &str, node: &str| {
            let constraint = json!({
                "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app": "spread"}},
            });
            // Affinity and not a selector: nodes that the pod does not want would not count.
            let mut pod = pod(name, json!({"topologySpreadConstraints": [constraint]}));
            pod["metadata"]["labels"]["app"] = json!("spread");
            if !node.is_empty() {
                pod["spec"]["topologySpreadConstraints"][0]["nodeAffinityPolicy"] = json!("Ignore");
                pod["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": node});
            }
            pod
        };
        side.create(POD, spread("on-a", "zone", "node-a")).await?;
        runs(side, "on-a").await?;
        side.create(POD, spread("again-on-a", "zone", "node-a")).await?;
        is_refused(side, "again-on-a").await?;
        side.create(POD, spread("without-key", "rack", "")).await?;
        is_refused(side, "without-key").await?;
        side.checkpoint("refused").await?;
        side.create(POD, spread("free", "zone", "")).await?;
        runs(side, "free").await?;
        runs(side, "again-on-a").await?;
        side.checkpoint("spread").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn important_pods_take_the_place_of_others() -> Result<()> {
    compare("scheduling-preemption", async |side| {
        for (name, value) in [("high", 1000), ("low", 10)] {
            side.create(PRIORITY_CLASS, json!({"metadata": {"name": name}, "value": value})).await?;
        }
        side.create(
            PRIORITY_CLASS,
            json!({"metadata": {"name": "meek"}, "value": 1000, "preemptionPolicy": "Never"}),
        )
        .await?;
        side.node("node-a", json!({})).await?;
        let of_class = |name: &str, class: &str, cpu: &str| {
            pod(name, merged(of_size(cpu), json!({"priorityClassName": class})))
        };
        side.create(POD, of_class("first", "low", "2")).await?;
        runs(side, "first").await?;
        side.create(POD, of_class("second", "low", "1")).await?;
        runs(side, "second").await?;
        side.create(POD, of_class("meek", "meek", "2")).await?;
        is_refused(side, "meek").await?;
        side.create(POD, of_class("equal", "low", "2")).await?;
        is_refused(side, "equal").await?;
        side.checkpoint("nobody has to go").await?;
        side.delete(POD, "meek").await?;
        side.delete(POD, "equal").await?;
        side.create(POD, of_class("important", "high", "3")).await?;
        runs(side, "important").await?;
        side.checkpoint("one had to go").await?;
        side.create(POD, of_class("huge", "high", "5")).await?;
        is_refused(side, "huge").await?;
        side.checkpoint("nobody helps").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volumes_decide_where_pods_may_run() -> Result<()> {
    compare("scheduling-volumes", async |side| {
        side.nodes(&["node-a", "node-b"]).await?;
        if side.find(CLASS, "nobody").await?.is_none() {
            side.create(CLASS, json!({"metadata": {"name": "nobody"}, "provisioner": "kubernetes.io/no-provisioner",
                "volumeBindingMode": "WaitForFirstConsumer"})).await?;
        }
        side.create(POD, using("no-claim", &["absent"])).await?;
        is_refused(side, "no-claim").await?;
        side.create(CLAIM, claim("no-class", "none-of-this-name", "1Gi")).await?;
        side.create(POD, using("no-class", &["no-class"])).await?;
        is_refused(side, "no-class").await?;
        side.create(CLAIM, claim("no-volume", "nobody", "1Gi")).await?;
        side.create(POD, using("no-volume", &["no-volume"])).await?;
        is_refused(side, "no-volume").await?;
        side.checkpoint("refused").await?;
        let terms = json!([{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-b"]}]}]);
        let volume = json!({"metadata": {"name": "on-b"}, "spec": {
            "storageClassName": "nobody", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "2Gi"},
            "local": {"path": "/volume"}, "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
        }});
        side.create(VOLUME, volume).await?;
        runs(side, "no-volume").await?;
        let mut elsewhere = using("elsewhere", &["no-volume"]);
        elsewhere["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-a"});
        side.create(POD, elsewhere).await?;
        is_refused(side, "elsewhere").await?;
        side.checkpoint("a volume came").await?;
        let made = claim("made", "made", "1Gi");
        side.create(CLAIM, made).await?;
        let mut here = using("here", &["made"]);
        here["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-a"});
        side.create(POD, here).await?;
        runs(side, "here").await?;
        let once = merged(claim("once", "made", "1Gi"), json!({}));
        let mut once = once;
        once["spec"]["accessModes"] = json!(["ReadWriteOncePod"]);
        side.create(CLAIM, once).await?;
        let mut alone = using("alone", &["once"]);
        alone["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-a"});
        side.create(POD, alone).await?;
        runs(side, "alone").await?;
        side.create(POD, using("second", &["once"])).await?;
        is_refused(side, "second").await?;
        side.checkpoint("volumes were made").await?;
        for pod in side.list(POD).await? {
            side.delete(POD, text(&pod, "/metadata/name")).await?;
        }
        side.until_all("the pods are gone", POD, <[Value]>::is_empty).await?;
        for claim in side.list(CLAIM).await? {
            side.delete(CLAIM, text(&claim, "/metadata/name")).await?;
        }
        side.until_all("the claims are gone", CLAIM, <[Value]>::is_empty).await?;
        side.until_all("one volume is left", VOLUME, |volumes| volumes.len() == 1).await?;
        side.until(VOLUME, "on-b", "is released", |volume| volume["status"]["phase"] == "Released").await?;
        side.checkpoint("all deleted").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_pods_prefer_decides_between_nodes_that_suit() -> Result<()> {
    compare("scheduling-preferred", async |side| {
        side.node("node-a", json!({"zone": "one"})).await?;
        side.node("node-b", json!({"zone": "two"})).await?;
        let selector = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["two"]}]});
        let weighted = json!([{"weight": 100, "preference": selector}]);
        let affinity = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}});
        side.create(POD, pod("wants-b", json!({"affinity": affinity}))).await?;
        runs(side, "wants-b").await?;
        let near = json!({"labelSelector": {"matchLabels": {"app": "wants-b"}}, "topologyKey": "zone"});
        for (name, kind) in [("near-b", "podAffinity"), ("far-from-b", "podAntiAffinity")] {
            let weighted = json!([{"weight": 100, "podAffinityTerm": near}]);
            let affinity = json!({kind: {"preferredDuringSchedulingIgnoredDuringExecution": weighted}});
            side.create(POD, pod(name, json!({"affinity": affinity}))).await?;
            runs(side, name).await?;
        }
        // The node with less on it, by far.
        let mut large = pod("large", of_size("3"));
        large["spec"]["nodeSelector"] = json!({"zone": "two"});
        side.create(POD, large).await?;
        runs(side, "large").await?;
        side.create(POD, pod("small", of_size("1"))).await?;
        runs(side, "small").await?;
        let constraint = json!({
            "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app": "small"}},
        });
        side.create(POD, pod("spread", json!({"topologySpreadConstraints": [constraint]}))).await?;
        runs(side, "spread").await?;
        let soft = json!([{"key": "own", "value": "x", "effect": "PreferNoSchedule"}]);
        side.patch(NODE, "node-a", json!({"spec": {"taints": soft}})).await?;
        side.create(POD, pod("avoids-a", json!({}))).await?;
        runs(side, "avoids-a").await?;
        side.checkpoint("placed").await
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_claims_of_a_pod_need_room_on_its_node() -> Result<()> {
    compare("scheduling-capacity", async |side| {
        side.node("node-a", json!({})).await?;
        side.node("node-b", json!({})).await?;
        side.patch(CSI_DRIVER, DRIVER, json!({"spec": {"storageCapacity": true}})).await?;
        for (node, room) in [("node-a", "3Gi"), ("node-b", "1Gi")] {
            let topology = json!({"matchLabels": {"kubernetes.io/hostname": node}});
            side.create(
                CAPACITY,
                json!({"metadata": {"name": node}, "storageClassName": "made", "capacity": room,
                "nodeTopology": topology}),
            )
            .await?;
        }
        for (name, size) in [("huge", "5Gi"), ("large", "2Gi"), ("one", "2Gi"), ("two", "2Gi")] {
            side.create(CLAIM, claim(name, "made", size)).await?;
        }
        side.create(POD, using("huge", &["huge"])).await?;
        is_refused(side, "huge").await?;
        side.create(POD, using("large", &["large"])).await?;
        runs(side, "large").await?;
        side.checkpoint("one claim each").await?;
        side.create(POD, using("both", &["one", "two"])).await?;
        let judged =
            |pod: &Value| pod["status"]["phase"] == "Running" || !pod["status"]["conditions"].is_null();
        side.until(POD, "both", "is judged", judged).await?;
        side.checkpoint("two claims of one pod").await?;
        side.patch(CSI_DRIVER, DRIVER, json!({"spec": {"storageCapacity": false}})).await.map(drop)
    })
    .await
}
