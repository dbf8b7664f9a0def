//! What every runtime does for the node above it, whether containers are processes of this machine or another program runs them.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::io::AsyncReadExt as _;

use crate::{
    AttachCall, Attached, ContainerId, ContainerSpec, Error, Exec, ExecCall, ExecOutput, Exit, Result, State,
    Usage,
};

/// How long the last output of a command is waited for that has ended, as another process may keep it open.
const LAST_OUTPUT: Duration = Duration::from_millis(100);

/// Runs containers, and finds them again after a restart of this process.
///
/// # Guarantees
///
/// - Containers do not depend on this process.
/// - A container that was started once is never started twice under the same [`ContainerId`].
/// - Whatever removes or stops is done already, or can be repeated, when the thing is not there.
#[async_trait]
pub trait Runtime: fmt::Debug + Send + Sync {
    /// The name and version of the runtime, such as `containerd://1.6.20`; the name begins the ids of its containers.
    fn version(&self) -> String;

    /// The images of the runtime; `None` if containers run the machine's own files.
    fn images(&self) -> Option<&dyn Images> {
        None
    }

    /// Whether containers are limited as their specification says; if not, why not, in one sentence.
    fn limits_containers(&self) -> std::result::Result<(), &str>;

    /// What each container that runs has taken of the machine; takes a while.
    async fn usages(&self) -> Vec<(ContainerId, Usage)>;

    /// Every container there is.
    fn containers(&self) -> Vec<KnownContainer>;

    /// The uids of pods of which there is something besides containers.
    fn pods(&self) -> Vec<String> {
        Vec::new()
    }

    /// Starts a container and returns when its command runs, or could not be started and the container has exited.
    ///
    /// One that was started before, whatever became of it, is left as it is. Goes on to its end when dropped.
    async fn start(&self, spec: ContainerSpec) -> Result<ContainerId>;

    /// The state of a container; `None` when there is none of that name, or it is being started.
    fn state(&self, id: &ContainerId) -> Option<State>;

    /// The id of a container as the status of its pod has it.
    fn address(&self, id: &ContainerId) -> String;

    /// The image that a container was made of, by its digest.
    fn image(&self, _id: &ContainerId) -> Option<String> {
        None
    }

    /// Waits until nothing of a container is left.
    async fn exited(&self, id: &ContainerId) -> Exit;

    /// Asks a container to end, kills everything in it when the grace is over, and waits until nothing is left.
    async fn stop(&self, id: &ContainerId, grace: Duration) -> Exit;

    /// Forgets an exited container; its log stays. One that is not there is as good.
    async fn remove(&self, id: &ContainerId) -> Result<()>;

    /// Stops what holds the containers of a pod together, once they have all exited.
    async fn stop_pod(&self, _uid: &str) -> Result<()> {
        Ok(())
    }

    /// Removes what holds the containers of a pod together, with what is left of them.
    async fn remove_pod(&self, _uid: &str) -> Result<()> {
        Ok(())
    }

    /// Joins the standard streams of a running container's command.
    async fn attach(&self, id: &ContainerId, call: AttachCall) -> Result<Attached>;

    /// Starts one more process in a running container.
    async fn exec(&self, id: &ContainerId, call: ExecCall) -> Result<Exec>;

    /// Runs a command in a running container; gives its exit code and the first `kept` bytes that it printed. The command is
    /// killed when this is dropped.
    async fn run(&self, id: &ContainerId, command: Vec<String>, kept: usize) -> Result<(i32, Vec<u8>)> {
        let mut exec = self.exec(id, ExecCall { command, tty: false, stdin: false, size: None }).await?;
        let output = Mutex::new(Vec::new());
        let (stdout, stderr) = (exec.stdout.take(), exec.stderr.take());
        let code = {
            let mut collected = std::pin::pin!(async {
                tokio::join!(collect(stdout, &output, kept), collect(stderr, &output, kept));
            });
            tokio::select! {
                code = exec.wait() => {
                    // An elapsed time only means that another process keeps the output open.
                    let _ = tokio::time::timeout(LAST_OUTPUT, &mut collected).await;
                    code
                }
                () = &mut collected => exec.wait().await,
            }
        };
        Ok((code.map_err(Error::Exec)?, output.into_inner()))
    }
}

/// Reads to the end, so that the writer does not have to wait, and keeps the beginning.
async fn collect(output: Option<ExecOutput>, kept: &Mutex<Vec<u8>>, most: usize) {
    let Some(mut output) = output else { return };
    let mut buffer = vec![0; 4096];
    while let Ok(length @ 1..) = output.read(&mut buffer).await {
        let mut kept = kept.lock();
        let room = most.saturating_sub(kept.len());
        kept.extend_from_slice(&buffer[..length.min(room)]);
    }
}

/// The images that a runtime has and pulls.
#[async_trait]
pub trait Images: Send + Sync {
    /// The image of a name, if it is on this machine.
    async fn find(&self, name: &str) -> Result<Option<Image>>;

    /// Pulls an image, with the first of these credentials that its registry takes.
    async fn pull(&self, name: &str, credentials: &[Credentials]) -> Result<Image>;
}

/// An image on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Image {
    /// What the runtime knows it by.
    pub id: String,
    /// The number of the user that its command runs as, if it names one by a number.
    pub user: Option<u32>,
    /// The name of that user, if it names one.
    pub user_name: Option<String>,
    /// Its size in bytes.
    pub size: u64,
}

/// Who one is to a registry of images.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The name of the account.
    pub user: String,
    /// Its password or token.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

/// A container of a runtime, with the names of its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownContainer {
    /// Which one it is.
    pub id: ContainerId,
    /// The namespace of its pod.
    pub namespace: String,
    /// The name of its pod.
    pub pod_name: String,
    /// Whether it runs, or how it ended.
    pub state: State,
}
