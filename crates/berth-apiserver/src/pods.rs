//! What a node does for the API server: give a pod's log, run commands in a pod, and connect to it.
//!
//! HTTP stays on this side: whoever implements [`Pods`] sees a pod, what is asked for, and streams.

use std::fmt;
use std::io;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use jiff::Timestamp;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

/// Serves the logs of pods and runs commands in them.
///
/// The pod is there, is assigned to a node, and has the container; whether that runs is for the node to say.
#[async_trait]
pub trait Pods: Send + Sync {
    /// The log of a container; it is no longer read when the stream is dropped.
    async fn logs(&self, pod: &Value, options: LogOptions) -> Result<LogStream, PodsError>;

    /// What a node counts, as the kubelet's `/stats/summary` has it; `None` if it is not this node.
    async fn stats(&self, node: &str) -> Option<Value> {
        let _ = node;
        None
    }

    /// What nodes and pods take of processor and memory at the moment.
    async fn usage(&self) -> Usage {
        Usage::default()
    }

    /// Runs a command in a container.
    async fn exec(&self, pod: &Value, options: ExecOptions) -> Result<ExecSession, PodsError>;

    /// Joins the streams of a container's own process, which goes on when the session is dropped.
    async fn attach(&self, pod: &Value, options: AttachOptions) -> Result<ExecSession, PodsError>;

    /// Connects to a port of a pod.
    async fn connect(&self, pod: &Value, port: u16) -> Result<Connection, PodsError>;
}

/// What nodes and pods take, as metrics.k8s.io has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// The nodes, by name.
    pub nodes: Vec<(String, Amounts)>,
    /// The pods that run.
    pub pods: Vec<PodUsage>,
    /// Over how long processor time was measured.
    pub window: Duration,
}

/// What the containers of a pod take.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodUsage {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub name: String,
    /// Its containers that run, by name.
    pub containers: Vec<(String, Amounts)>,
}

/// What a node or a container takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Processor time per second, in nanoseconds.
    pub nano_cores: u64,
    /// Bytes of memory that cannot be had back without harm.
    pub working_set: u64,
}

/// Bytes to and from a port.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection to a port of a pod.
pub type Connection = Box<dyn Duplex>;

/// A log in pieces of any size.
pub type LogStream = BoxStream<'static, io::Result<Bytes>>;

/// Which part of a log is wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// The container, always one that the pod has.
    pub container: String,
    /// Whether the log goes on until the container ends.
    pub follow: bool,
    /// Whether the log of the container's last run is meant, before its restart.
    pub previous: bool,
    /// Only what was written since then.
    pub since: Option<Timestamp>,
    /// Only so many lines from the end.
    pub tail_lines: Option<u64>,
    /// Only so many bytes, even if that cuts a line.
    pub limit_bytes: Option<u64>,
    /// Whether every line begins with its time and a blank.
    pub timestamps: bool,
    /// Which of the container's outputs.
    pub stream: LogSource,
}

/// Which of a container's outputs a log has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogSource {
    /// Both, as they were written.
    #[default]
    All,
    /// The log has only what the container wrote to its standard output.
    Stdout,
    /// The log has only what the container wrote to its standard error.
    Stderr,
}

/// What is to be run, and what of its input and output is wanted.
///
/// `Debug` does not print the command: it may have secrets among its arguments.
#[derive(Clone, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a yes or no of its own in the API")]
pub struct ExecOptions {
    /// The container, always one that the pod has.
    pub container: String,
    /// The program and its arguments, at least one.
    pub command: Vec<String>,
    /// Whether the client sends input.
    pub stdin: bool,
    /// Whether it takes the output.
    pub stdout: bool,
    /// Whether it takes the error output; never with a terminal, which has but one output.
    pub stderr: bool,
    /// Whether the command runs on a terminal.
    pub tty: bool,
}

impl fmt::Debug for ExecOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { container, stdin, stdout, stderr, tty, .. } = self;
        f.debug_struct("ExecOptions")
            .field("container", container)
            .field("stdin", stdin)
            .field("stdout", stdout)
            .field("stderr", stderr)
            .field("tty", tty)
            .finish_non_exhaustive()
    }
}

/// Which streams of a container are joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachOptions {
    /// The container, always one that the pod has.
    pub container: String,
    /// Whether the client sends input.
    pub stdin: bool,
    /// Whether it takes the output.
    pub stdout: bool,
    /// Whether it takes the error output; never with a terminal, which has but one output.
    pub stderr: bool,
}

/// A command that runs; dropping the session kills it.
pub struct ExecSession {
    /// Takes its input; shut down and dropped when the client has no more.
    pub stdin: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    /// Gives its output, or all that a terminal shows.
    pub stdout: Option<Box<dyn AsyncRead + Send + Unpin>>,
    /// Gives its error output.
    pub stderr: Option<Box<dyn AsyncRead + Send + Unpin>>,
    /// Takes new sizes of the terminal: columns, then rows.
    pub resize: Option<mpsc::Sender<(u16, u16)>>,
    /// Its exit code, or why there is none.
    pub exit: BoxFuture<'static, Result<i32, String>>,
}

impl fmt::Debug for ExecSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecSession").finish_non_exhaustive()
    }
}

/// Why there is no log or no command; the text is what the client gets to read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PodsError {
    /// What is asked for cannot be had as things are, such as the log of a container that has not started (400).
    #[error("{0}")]
    BadRequest(String),
    /// There is no such thing, such as the program to run (404).
    #[error("{0}")]
    NotFound(String),
    /// The node failed (500).
    #[error("{0}")]
    Internal(String),
}
