//! The figures of nodes in the words of the kubelet's `/stats/summary` and of metrics.k8s.io.

use std::collections::BTreeMap;

use berth_apiserver::pods::{Amounts, PodUsage, Usage};
use berth_node::{ContainerFigure, Figure, Figures, VolumeUsage};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};

/// The summary of a node: the machine, and each pod that runs with its containers and volumes.
pub(super) fn build(node: &str, volumes: &[VolumeUsage], figures: &Figures) -> Value {
    let time = figures.time;
    let mut pods: BTreeMap<String, (&Pod, Vec<&ContainerFigure>, Vec<Value>)> = BTreeMap::new();
    for container in &figures.containers {
        let uid = container.pod.uid().unwrap_or_default();
        pods.entry(uid).or_insert_with(|| (&container.pod, Vec::new(), Vec::new())).1.push(container);
    }
    for volume in volumes {
        let uid = volume.pod.uid().unwrap_or_default();
        pods.entry(uid).or_insert_with(|| (&volume.pod, Vec::new(), Vec::new())).2.push(volume_stats(volume));
    }
    let pods: Vec<Value> = pods
        .into_values()
        .map(|(pod, containers, volumes)| {
            let mut sum = Figure::default();
            for container in &containers {
                sum.usage += container.figure.usage;
                sum.nano_cores += container.figure.nano_cores;
            }
            let containers: Vec<Value> = containers
                .iter()
                .map(|container| {
                    json!({
                        "name": container.name,
                        "startTime": started(pod, &container.name),
                        "cpu": cpu(time, &container.figure),
                        "memory": memory(time, &container.figure),
                    })
                })
                .collect();
            json!({
                "podRef": {"name": pod.name_any(), "namespace": pod.namespace(), "uid": pod.uid()},
                "startTime": pod.status.as_ref().and_then(|status| status.start_time.clone()),
                "containers": containers,
                "cpu": cpu(time, &sum),
                "memory": memory(time, &sum),
                "process_stats": {"process_count": sum.usage.pids},
                "volume": volumes,
            })
        })
        .collect();
    json!({
        "node": {"nodeName": node, "cpu": cpu(time, &figures.node), "memory": memory(time, &figures.node)},
        "pods": pods,
    })
}

/// When a container was started, as the pod's status has it.
fn started(pod: &Pod, container: &str) -> Value {
    let status = pod.status.as_ref();
    let all = status.into_iter().flat_map(|status| {
        let others = status.init_container_statuses.iter().flatten();
        status.container_statuses.iter().flatten().chain(others)
    });
    let mut running = all.filter(|status| status.name == container);
    let running = running.find_map(|status| status.state.as_ref()?.running.as_ref()?.started_at.clone());
    json!(running)
}

fn cpu(time: Timestamp, figure: &Figure) -> Value {
    json!({
        "time": time.to_string(),
        "usageNanoCores": figure.nano_cores,
        "usageCoreNanoSeconds": figure.usage.cpu,
    })
}

fn memory(time: Timestamp, figure: &Figure) -> Value {
    json!({
        "time": time.to_string(),
        "usageBytes": figure.usage.memory,
        "workingSetBytes": figure.usage.working_set,
        "rssBytes": figure.usage.anonymous,
    })
}

/// Bytes and inodes of a volume in the kubelet's words.
fn volume_stats(usage: &VolumeUsage) -> Value {
    let mut stats = json!({
        "name": usage.name,
        "pvcRef": {"name": usage.claim.name, "namespace": usage.claim.namespace},
        "time": Timestamp::now().to_string(),
        "usedBytes": usage.bytes.used,
        "availableBytes": usage.bytes.available,
        "capacityBytes": usage.bytes.total,
    });
    if let Some(inodes) = usage.inodes {
        stats["inodesUsed"] = inodes.used.into();
        stats["inodesFree"] = inodes.available.into();
        stats["inodes"] = inodes.total.into();
    }
    stats
}

/// What metrics.k8s.io shows of these nodes.
pub(super) fn usage(nodes: Vec<(String, Figures)>) -> Usage {
    let amounts =
        |figure: &Figure| Amounts { nano_cores: figure.nano_cores, working_set: figure.usage.working_set };
    let mut usage = Usage::default();
    for (name, figures) in nodes {
        usage.window = usage.window.max(figures.window);
        usage.nodes.push((name, amounts(&figures.node)));
        for of_pod in figures.containers.chunk_by(|a, b| a.pod.uid() == b.pod.uid()) {
            let Some(first) = of_pod.first() else { continue };
            let containers = of_pod.iter().map(|one| (one.name.clone(), amounts(&one.figure))).collect();
            let (namespace, name) = (first.pod.namespace().unwrap_or_default(), first.pod.name_any());
            usage.pods.push(PodUsage { namespace, name, containers });
        }
    }
    usage
}
