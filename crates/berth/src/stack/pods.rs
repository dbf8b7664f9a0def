//! Logs and exec: what the API server asks of the nodes.

use std::collections::BTreeMap;

use async_trait::async_trait;
use berth_apiserver::pods::{ExecOptions, ExecSession, LogOptions, LogSource, LogStream, Pods, PodsError};
use berth_kube::storage;
use berth_node::node::{self, Node};
use berth_runtime::TerminalSize;
use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{RwLock, mpsc};

/// The nodes that are on, by name.
#[derive(Default)]
pub(super) struct NodePods {
    nodes: RwLock<BTreeMap<String, Node>>,
}

impl NodePods {
    /// From now on this node is asked for its pods.
    pub(super) async fn set(&self, name: &str, node: Node) {
        self.nodes.write().await.insert(name.to_owned(), node);
    }

    /// Waits until a node has ended its work.
    pub(super) async fn ended(&self, name: &str) {
        let node = self.nodes.write().await.remove(name);
        if let Some(mut node) = node {
            node.ended().await;
        }
    }
}

/// The node of a pod among those that are on.
fn node_of<'a>(nodes: &'a BTreeMap<String, Node>, pod: &Pod) -> Result<&'a Node, PodsError> {
    let name = storage::node_of_pod(pod);
    let unreachable =
        || PodsError::Internal(format!("the node {name} is not ready yet, is stopping, or is off"));
    nodes.get(name).ok_or_else(unreachable)
}

fn refused(error: node::Error) -> PodsError {
    match error {
        node::Error::Unready(text) => PodsError::BadRequest(text),
        error => PodsError::Internal(error.to_string()),
    }
}

fn parse(pod: &Value) -> Result<Pod, PodsError> {
    serde_json::from_value(pod.clone()).map_err(|error| PodsError::Internal(format!("read the pod: {error}")))
}

/// Bytes and inodes of a volume in the kubelet's words.
fn volume_stats(usage: &berth_node::VolumeUsage) -> Value {
    let mut stats = json!({
        "name": usage.name,
        "pvcRef": {"name": usage.claim.name, "namespace": usage.claim.namespace},
        "time": jiff::Timestamp::now().to_string(),
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

#[async_trait]
impl Pods for NodePods {
    async fn stats(&self, name: &str) -> Option<Value> {
        let reader = {
            let nodes = self.nodes.read().await;
            nodes.get(name)?.usage().clone()
        };
        let mut pods: Vec<Value> = Vec::new();
        let mut usages = reader.read().await;
        usages.sort_by_key(|usage| usage.pod.uid());
        for of_pod in usages.chunk_by(|a, b| a.pod.uid() == b.pod.uid()) {
            let pod = &of_pod[0].pod;
            pods.push(json!({
                "podRef": {"name": pod.name_any(), "namespace": pod.namespace(), "uid": pod.uid()},
                "startTime": pod.status.as_ref().and_then(|status| status.start_time.clone()),
                "volume": of_pod.iter().map(volume_stats).collect::<Vec<_>>(),
            }));
        }
        Some(json!({"node": {"nodeName": name}, "pods": pods}))
    }

    async fn logs(&self, pod: &Value, options: LogOptions) -> Result<LogStream, PodsError> {
        let (nodes, pod) = (self.nodes.read().await, parse(pod)?);
        let node = node_of(&nodes, &pod)?;
        let log_options = berth_runtime::LogOptions {
            follow: options.follow,
            tail_lines: options.tail_lines,
            since: options.since,
            limit_bytes: options.limit_bytes,
            timestamps: options.timestamps,
            stream: match options.stream {
                LogSource::All => None,
                LogSource::Stdout => Some(berth_runtime::LogStream::Stdout),
                LogSource::Stderr => Some(berth_runtime::LogStream::Stderr),
            },
        };
        node.logs(&pod, &options.container, options.previous, log_options).await.map_err(refused)
    }

    async fn exec(&self, pod: &Value, options: ExecOptions) -> Result<ExecSession, PodsError> {
        let (nodes, pod) = (self.nodes.read().await, parse(pod)?);
        let node = node_of(&nodes, &pod)?;
        let call = berth_runtime::ExecCall {
            command: options.command,
            tty: options.tty,
            stdin: options.stdin,
            size: None,
        };
        let exec = node.exec(&pod, &options.container, call).await.map_err(refused)?;
        Ok(session(exec))
    }
}

fn session(mut exec: berth_runtime::Exec) -> ExecSession {
    let (resize, mut sizes) = mpsc::channel::<(u16, u16)>(4);
    let boxed = |output: berth_runtime::ExecOutput| Box::new(output) as Box<dyn AsyncRead + Send + Unpin>;
    let stdin = exec.stdin.take().map(|input| Box::new(input) as Box<dyn AsyncWrite + Send + Unpin>);
    let (stdout, stderr) = (exec.stdout.take().map(boxed), exec.stderr.take().map(boxed));
    let exit = async move {
        loop {
            tokio::select! {
                code = exec.wait() => return Ok(code),
                Some((width, height)) = sizes.recv() => {
                    if let Err(error) = exec.resize(TerminalSize { width, height }) {
                        tracing::debug!(%error, "a terminal did not take its new size");
                    }
                }
            }
        }
    };
    ExecSession { stdin, stdout, stderr, resize: Some(resize), exit: exit.boxed() }
}
