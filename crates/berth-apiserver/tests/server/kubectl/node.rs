//! A node without containers: logs that tell what was asked for, and commands that are functions.

use std::sync::Arc;

use async_trait::async_trait;
use berth_apiserver::pods::{
    AttachOptions, Connection, ExecOptions, ExecSession, LogOptions, LogStream, Pods, PodsError,
};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, stream};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::{CancellationToken, DropGuard};

/// What the tests see of the node, and tell it.
#[derive(Default)]
pub(crate) struct Node {
    /// Lets a followed log go on.
    pub(crate) more: Arc<Notify>,
    /// Told when a command begins to wait.
    pub(crate) waits: Notify,
    /// Cancelled when the command that waits is dropped.
    pub(crate) dropped: CancellationToken,
}

#[async_trait]
impl Pods for Node {
    async fn logs(&self, pod: &Value, options: LogOptions) -> Result<LogStream, PodsError> {
        if options.previous {
            let why = "previous terminated container \"main\" in pod \"p\" not found";
            return Err(PodsError::BadRequest(why.to_owned()));
        }
        let first = Bytes::from(format!("{} {options:?}\n", pod["metadata"]["name"]));
        let head = stream::once(async { Ok(first) });
        if !options.follow {
            return Ok(head.boxed());
        }
        let more = self.more.clone();
        let rest = stream::once(async move {
            more.notified().await;
            Ok(Bytes::from_static(b"more\n"))
        });
        Ok(head.chain(rest).boxed())
    }

    async fn exec(&self, _: &Value, options: ExecOptions) -> Result<ExecSession, PodsError> {
        let (near, far) = duplex(64 << 10);
        let (resize, sizes) = mpsc::channel(4);
        let (stdout, command_stdout) = duplex(64 << 10);
        let (stderr, command_stderr) = duplex(64 << 10);
        let command = Running { stdin: far, stdout: command_stdout, stderr: command_stderr, sizes };
        let exit = match options.command[0].as_str() {
            "cat" => command.cat().boxed(),
            "fail" => command.fail().boxed(),
            "size" => command.size().boxed(),
            "wait" => {
                self.waits.notify_one();
                command.wait(self.dropped.clone().drop_guard()).boxed()
            }
            other => return Err(PodsError::NotFound(format!("there is no program {other:?}"))),
        };
        Ok(ExecSession {
            stdin: options.stdin.then(|| Box::new(near) as _),
            stdout: options.stdout.then(|| Box::new(stdout) as _),
            stderr: options.stderr.then(|| Box::new(stderr) as _),
            resize: options.tty.then_some(resize),
            exit,
        })
    }

    async fn attach(&self, pod: &Value, options: AttachOptions) -> Result<ExecSession, PodsError> {
        let AttachOptions { container, stdin, stdout, stderr } = options;
        let command = vec!["cat".to_owned()];
        self.exec(pod, ExecOptions { container, command, stdin, stdout, stderr, tty: false }).await
    }

    async fn connect(&self, _: &Value, port: u16) -> Result<Connection, PodsError> {
        Err(PodsError::Internal(format!("nothing listens on port {port}")))
    }
}

/// A command and the other ends of its streams.
struct Running {
    stdin: DuplexStream,
    stdout: DuplexStream,
    stderr: DuplexStream,
    sizes: mpsc::Receiver<(u16, u16)>,
}

impl Running {
    async fn cat(mut self) -> Result<i32, String> {
        let copied = tokio::io::copy(&mut self.stdin, &mut self.stdout).await;
        copied.map(|_| 0).map_err(|error| error.to_string())
    }

    async fn fail(mut self) -> Result<i32, String> {
        self.stdout.write_all(b"so far\n").await.map_err(|error| error.to_string())?;
        self.stderr.write_all(b"no further\n").await.map_err(|error| error.to_string())?;
        Ok(7)
    }

    /// Tells the size of the terminal, then what is typed up to the end of the line.
    async fn size(mut self) -> Result<i32, String> {
        let (columns, rows) = self.sizes.recv().await.ok_or("no terminal")?;
        let text = format!("{columns} x {rows}\r\n");
        self.stdout.write_all(text.as_bytes()).await.map_err(|error| error.to_string())?;
        Ok(0)
    }

    async fn wait(mut self, _dropped: DropGuard) -> Result<i32, String> {
        let _ = self.stdin.read(&mut [0]).await;
        std::future::pending().await
    }
}
