//! What the API server asks of the nodes: logs, commands, connections, figures.

use std::collections::BTreeMap;

use async_trait::async_trait;
use berth_apiserver::pods::{
    AttachOptions, Connection, ExecOptions, ExecSession, LogOptions, LogSource, LogStream, Pods, PodsError,
    Usage,
};
use berth_kube::storage;
use berth_node::FigureReader;
use berth_node::node::{self, Node};
use berth_runtime::{AttachCall, ExecInput, ExecOutput, TerminalSize};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{RwLock, mpsc};

use super::summary;

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

#[async_trait]
impl Pods for NodePods {
    async fn stats(&self, name: &str) -> Option<Value> {
        let (volumes, figures) = {
            let nodes = self.nodes.read().await;
            let node = nodes.get(name)?;
            (node.usage().clone(), node.figures().clone())
        };
        let (volumes, figures) = tokio::join!(volumes.read(), figures.read());
        Some(summary::build(name, &volumes, &figures))
    }

    async fn usage(&self) -> Usage {
        let readers: Vec<(String, FigureReader)> = {
            let nodes = self.nodes.read().await;
            nodes.iter().map(|(name, node)| (name.clone(), node.figures().clone())).collect()
        };
        let read = readers.into_iter().map(async |(name, reader)| (name, reader.read().await));
        summary::usage(join_all(read).await)
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
        let mut exec = node.exec(&pod, &options.container, call).await.map_err(refused)?;
        let streams = (exec.stdin.take(), exec.stdout.take(), exec.stderr.take());
        Ok(session(streams, async move |mut sizes| {
            loop {
                tokio::select! {
                    ended = exec.wait() => return ended,
                    Some(size) = sizes.recv() => note_size(exec.resize(terminal_size(size))),
                }
            }
        }))
    }

    async fn attach(&self, pod: &Value, options: AttachOptions) -> Result<ExecSession, PodsError> {
        let (nodes, pod) = (self.nodes.read().await, parse(pod)?);
        let node = node_of(&nodes, &pod)?;
        let AttachOptions { container, stdin, stdout, stderr } = options;
        let call = AttachCall { stdin, stdout, stderr };
        let mut attached = node.attach(&pod, &container, call).await.map_err(refused)?;
        let streams = (attached.stdin.take(), attached.stdout.take(), attached.stderr.take());
        Ok(session(streams, async move |mut sizes| {
            loop {
                tokio::select! {
                    () = attached.ended() => return Ok(0),
                    Some(size) = sizes.recv() => note_size(attached.resize(terminal_size(size))),
                }
            }
        }))
    }

    async fn connect(&self, pod: &Value, port: u16) -> Result<Connection, PodsError> {
        let (nodes, pod) = (self.nodes.read().await, parse(pod)?);
        let stream = node_of(&nodes, &pod)?.connect(&pod, port).await.map_err(refused)?;
        Ok(Box::new(stream))
    }
}

/// Standard input, output and error of a process in a container.
type Streams = (Option<ExecInput>, Option<ExecOutput>, Option<ExecOutput>);

/// A process in a container; `follow` sets the sizes that its terminal gets, and returns its exit code.
fn session<F>(streams: Streams, follow: impl FnOnce(mpsc::Receiver<(u16, u16)>) -> F) -> ExecSession
where
    F: Future<Output = Result<i32, String>> + Send + 'static,
{
    let (resize, sizes) = mpsc::channel(4);
    let boxed = |output: ExecOutput| Box::new(output) as Box<dyn AsyncRead + Send + Unpin>;
    let (stdin, stdout, stderr) = streams;
    let stdin = stdin.map(|input| Box::new(input) as Box<dyn AsyncWrite + Send + Unpin>);
    let (stdout, stderr) = (stdout.map(boxed), stderr.map(boxed));
    ExecSession { stdin, stdout, stderr, resize: Some(resize), exit: follow(sizes).boxed() }
}

fn terminal_size((width, height): (u16, u16)) -> TerminalSize {
    TerminalSize { width, height }
}

fn note_size(resized: berth_runtime::Result<()>) {
    if let Err(error) = resized {
        tracing::debug!(%error, "a terminal did not take its new size");
    }
}
