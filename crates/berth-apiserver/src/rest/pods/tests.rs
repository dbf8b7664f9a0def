//! What is asked for, and the channels of a command, without a server around them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::{FutureExt as _, SinkExt as _};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::{mpsc, oneshot};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::pods::ExecSession;

fn pod(containers: &[&str]) -> Value {
    let containers: Vec<Value> = containers.iter().map(|name| json!({ "name": name })).collect();
    json!({
        "metadata": { "name": "p" },
        "spec": { "initContainers": [{ "name": "init" }], "containers": containers },
    })
}

#[test]
fn a_container_is_named_or_the_only_one_or_the_default() {
    let two = pod(&["a", "b"]);
    assert_eq!(container(None, &pod(&["a"])).unwrap(), "a");
    assert_eq!(container(Some("init"), &two).unwrap(), "init");
    let refused = |named, pod: &Value| {
        let failure = container(named, pod).unwrap_err();
        assert_eq!((failure.code, failure.reason), (400, "BadRequest"));
        failure.message
    };
    assert_eq!(
        refused(None, &two),
        "a container name must be specified for pod p, choose one of: [init a b]"
    );
    assert_eq!(refused(Some("c"), &two), "container c is not valid for pod p");
    let mut annotated = two;
    annotated["metadata"]["annotations"] = json!({ DEFAULT_CONTAINER: "b" });
    assert_eq!(container(None, &annotated).unwrap(), "b");
    annotated["metadata"]["annotations"] = json!({ DEFAULT_CONTAINER: "gone" });
    assert!(container(None, &annotated).is_err());
}

#[test]
fn the_wanted_part_of_a_log_is_read_from_the_query() {
    let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
    let options = |query: &str| log_options(&Query::parse(query), "p", now);
    assert_eq!(options("").unwrap(), LogOptions::default());
    let query = "follow=true&previous=1&sinceSeconds=60&tailLines=0&limitBytes=5&timestamps=true&stream=All";
    let expected = LogOptions {
        follow: true,
        previous: true,
        since: Some("2026-01-01T00:00:00Z".parse().unwrap()),
        tail_lines: Some(0),
        limit_bytes: Some(5),
        timestamps: true,
        ..LogOptions::default()
    };
    assert_eq!(options(query).unwrap(), expected);
    let since = options("sinceTime=2026-01-01T00%3A00%3A00Z").unwrap().since;
    assert_eq!(since, expected.since);
}

#[test]
fn a_part_of_a_log_that_makes_no_sense_is_refused_in_kubernetes_words() {
    let refused = |query: &str| log_options(&Query::parse(query), "p", Timestamp::now()).unwrap_err();
    for (query, message) in [
        ("tailLines=-1", "tailLines: Invalid value: -1: must be greater than or equal to 0"),
        ("limitBytes=0", "limitBytes: Invalid value: 0: must be greater than 0"),
        ("sinceSeconds=0", "sinceSeconds: Invalid value: 0: must be greater than 0"),
        (
            "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z",
            "[]: Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified",
        ),
        (
            "stream=Both",
            "stream: Unsupported value: \"Both\": supported values: \"All\", \"Stderr\", \"Stdout\"",
        ),
        (
            "stream=Stdout&tailLines=1",
            "[]: Forbidden: `tailLines` and specific `stream` are mutually exclusive for now",
        ),
    ] {
        let failure = refused(query);
        assert_eq!(failure.code, 422, "{query}");
        assert_eq!(failure.message, format!("PodLogOptions \"p\" is invalid: {message}"));
    }
    assert_eq!(refused("tailLines=many").code, 400);
    assert_eq!(refused("sinceTime=yesterday").code, 400);
}

#[test]
fn a_command_is_read_from_the_query_and_not_shown() {
    let options = |query: &str| exec_options(&Query::parse(query), &pod(&["a"]));
    let given = options("command=sh&command=-c&command=echo+secret&stdin=true&stdout=1&stderr=1&tty=true");
    let given = given.unwrap();
    assert_eq!(given.command, ["sh", "-c", "echo secret"]);
    assert!(given.stdin && given.stdout && !given.stderr && given.tty);
    assert!(!format!("{given:?}").contains("secret"));
    assert!(check_runnable(&given, Subresource::Exec).is_ok());
    for incomplete in ["stdout=1", "command=sh"] {
        assert_eq!(check_runnable(&options(incomplete).unwrap(), Subresource::Exec).unwrap_err().code, 400);
    }
}

/// A client and the command at the other end of its channels.
struct Pair {
    client: WebSocketStream<DuplexStream>,
    stdin: DuplexStream,
    stdout: DuplexStream,
    stderr: DuplexStream,
    sizes: mpsc::Receiver<(u16, u16)>,
    exit: oneshot::Sender<Result<i32, String>>,
    shutdown: CancellationToken,
    served: tokio::task::JoinHandle<()>,
}

impl Pair {
    async fn new(protocol: Protocol) -> Self {
        let (near, far) = duplex(64 << 10);
        let (stdin, command_stdin) = duplex(64);
        let (stdout, command_stdout) = duplex(1 << 20);
        let (stderr, command_stderr) = duplex(64);
        let (resize, sizes) = mpsc::channel(1);
        let (exit, exited) = oneshot::channel();
        let session = ExecSession {
            stdin: Some(Box::new(command_stdin)),
            stdout: Some(Box::new(command_stdout)),
            stderr: Some(Box::new(command_stderr)),
            resize: Some(resize),
            exit: async { exited.await.unwrap_or_else(|_| Err("killed".to_owned())) }.boxed(),
        };
        let shutdown = CancellationToken::new();
        let token = shutdown.clone();
        let served = tokio::spawn(async move { channels::serve(far, protocol, Ok(session), &token).await });
        let client = WebSocketStream::from_raw_socket(near, Role::Client, None).await;
        Self { client, stdin, stdout, stderr, sizes, exit, shutdown, served }
    }

    async fn send(&mut self, bytes: &'static [u8]) {
        self.client.send(Message::Binary(Bytes::from_static(bytes))).await.unwrap();
    }

    /// The next message with content, or `None` at the proper end.
    async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            match self.client.next().await?.ok()? {
                Message::Binary(bytes) => return Some(bytes.to_vec()),
                Message::Close(_) => return None,
                _ => {}
            }
        }
    }

    async fn status(&mut self) -> Value {
        let message = self.next().await.unwrap();
        assert_eq!(message[0], 3);
        serde_json::from_slice(&message[1..]).unwrap()
    }
}

#[tokio::test]
async fn input_output_and_sizes_travel_on_their_channels() {
    let mut pair = Pair::new(Protocol::V5).await;
    pair.send(b"\0hello").await;
    pair.send(b"\x04{\"Width\":80,\"Height\":24}").await;
    let mut hello = [0; 5];
    pair.stdin.read_exact(&mut hello).await.unwrap();
    assert_eq!((&hello, pair.sizes.recv().await), (b"hello", Some((80, 24))));
    pair.send(b"\xff\0").await;
    assert_eq!(pair.stdin.read(&mut hello).await.unwrap(), 0, "the input has ended");
    pair.stdout.write_all(b"out").await.unwrap();
    assert_eq!(pair.next().await.unwrap(), b"\x01out");
    pair.stderr.write_all(b"err").await.unwrap();
    assert_eq!(pair.next().await.unwrap(), b"\x02err");
    pair.stdout.write_all(b"last").await.unwrap();
    drop((pair.stdout.shutdown().await, pair.stderr.shutdown().await));
    let Pair { exit, .. } = &mut pair;
    std::mem::replace(exit, oneshot::channel().0).send(Ok(0)).unwrap();
    assert_eq!(pair.next().await.unwrap(), b"\x01last");
    assert_eq!(pair.status().await["status"], "Success");
    assert_eq!(pair.next().await, None);
    pair.served.await.unwrap();
}

#[tokio::test]
async fn an_exit_code_is_told_and_an_output_that_stays_open_holds_nothing_up() {
    let mut pair = Pair::new(Protocol::V4).await;
    pair.send(b"\xff\0").await;
    pair.send(b"\0x").await;
    assert_eq!(pair.stdin.read_u8().await.unwrap(), b'x', "the fourth version cannot end its input");
    std::mem::replace(&mut pair.exit, oneshot::channel().0).send(Ok(3)).unwrap();
    let status = pair.status().await;
    assert_eq!((&status["status"], &status["reason"]), (&json!("Failure"), &json!("NonZeroExitCode")));
    assert_eq!(status["details"]["causes"], json!([{ "reason": "ExitCode", "message": "3" }]));
    assert_eq!(pair.next().await, None);
}

#[tokio::test]
async fn a_command_is_dropped_when_its_client_goes_or_the_server_ends() {
    let mut pair = Pair::new(Protocol::V5).await;
    drop(pair.client);
    pair.served.await.unwrap();
    assert_eq!(pair.stdin.read(&mut [0]).await.unwrap(), 0);
    assert!(pair.exit.is_closed());
    let mut pair = Pair::new(Protocol::V5).await;
    pair.shutdown.cancel();
    assert_eq!(pair.next().await, None);
    pair.served.await.unwrap();
    assert!(pair.exit.is_closed());
}

/// Input that nobody reads and that never fails.
struct Deaf;

impl AsyncWrite for Deaf {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Pending
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

#[tokio::test]
async fn output_comes_while_the_command_reads_no_input() {
    let (near, far) = duplex(1 << 10);
    let (mut stdout, command_stdout) = duplex(64);
    let session = ExecSession {
        stdin: Some(Box::new(Deaf)),
        stdout: Some(Box::new(command_stdout)),
        stderr: None,
        resize: None,
        exit: std::future::pending().boxed(),
    };
    let served = tokio::spawn(async move {
        channels::serve(far, Protocol::V5, Ok(session), &CancellationToken::new()).await;
    });
    let (mut sink, mut stream) = WebSocketStream::from_raw_socket(near, Role::Client, None).await.split();
    let sending = tokio::spawn(async move {
        while sink.send(Message::Binary(Bytes::from_static(&[0; 1000]))).await.is_ok() {}
    });
    for text in ["one", "two"] {
        stdout.write_all(text.as_bytes()).await.unwrap();
        let message = loop {
            if let Message::Binary(bytes) = stream.next().await.unwrap().unwrap() {
                break bytes;
            }
        };
        assert_eq!(&message[1..], text.as_bytes());
    }
    sending.abort();
    served.abort();
}

#[tokio::test]
async fn a_node_that_refuses_is_heard_on_the_channel_of_the_outcome() {
    let (near, far) = duplex(1 << 10);
    let refused = Err(PodsError::BadRequest("container a is not running".to_owned()).into());
    let client = async {
        let mut client = WebSocketStream::from_raw_socket(near, Role::Client, None).await;
        let message = client.next().await.unwrap().unwrap().into_data();
        serde_json::from_slice::<Value>(&message[1..]).unwrap()
    };
    let token = CancellationToken::new();
    let (status, ()) = tokio::join!(client, channels::serve(far, Protocol::V5, refused, &token));
    assert_eq!((&status["code"], &status["message"]), (&json!(400), &json!("container a is not running")));
}
