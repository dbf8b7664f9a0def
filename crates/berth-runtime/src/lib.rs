//! Runs containers as processes of this machine: one process tree each, in its own mount, pid, uts and ipc namespaces, on
//! a private view of the host's files. Knows no Kubernetes object.
//!
//! [`Runtime`] starts, stops and removes containers, finds them again after a restart, and starts further processes in them
//! ([`Runtime::exec`]) or joins their streams ([`Runtime::attach`]); [`ContainerSpec`] is what one is made of, [`State`] and [`Exit`] what became of it, [`logs()`] what
//! it wrote.
//!
//! Three kinds of processes take part, all of them this same program (its `main` intercepts [`LAUNCHER`]):
//!
//! ```text
//!  Runtime ──socket──► launcher ──clone──► process 1 of a container (shim) ──► the command
//!                          └─────clone──► joiner ──setns──► one more process in a running container (exec)
//! ```
//!
//! - The launcher (`launcher.rs`) is started once. It has one thread and a mount namespace that holds the host's root
//!   and nothing else, so that a container is one cheap `clone` of it, whatever is mounted on the host.
//! - A shim is process 1 of each container. It starts the command, forwards signals, collects zombies, writes the
//!   log, and leaves in the container's directory how it ended.
//! - A joiner puts one more process into a running container (`exec`), and ends it when the caller goes away.
//!
//! A container's directory holds `spec.json` (what to run), `status` (what became of it, and a lock that is held for
//! exactly as long as the container lives), `attach` (a socket) and `termination-log`.
//!
//! # Invariants
//!
//! - A container does not depend on the process that started it: that may be killed, and the next [`Processes::open`] finds it again.
//! - A container that was started once is never started twice under the same [`ContainerId`].
//! - Nothing of a container's files is left when it has ended, besides its directory and its log.
//! - A container has a control group (`cgroup.rs`) for as long as it lives, where the machine has them, and no longer.
//! - Paths inside a container never lead out of it (`root.rs`).
//!
//! A container is isolated so that pods do not disturb each other or the host by accident. It is no security
//! boundary: it sees the files of the host, and unless another user is asked for, its process is root of the host, with the
//! capabilities of its [`Security`].
//!
//! Start reading at [`Runtime::start`] (`runtime.rs`), then `Launcher::launch` and `run` (`launcher.rs`).
//!
//! # Example
//!
//! ```no_run
//! use berth_runtime::{ContainerSpec, LAUNCHER, Limits, PodSettings, Processes, Runtime as _, Security};
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), berth_runtime::Error> {
//!     berth_host::helper::intercept(&[LAUNCHER]);
//!     let program = std::env::current_exe().expect("there is /proc");
//!     let runtime = Processes::open("/var/lib/containers".as_ref(), &program)?;
//!     let id = runtime
//!         .start(ContainerSpec {
//!             pod_uid: "uid".into(),
//!             pod_name: "pod".into(),
//!             namespace: "default".into(),
//!             name: "main".into(),
//!             attempt: 0,
//!             hostname: "pod".into(),
//!             command: vec!["/bin/echo".into(), "hello".into()],
//!             env: Vec::new(),
//!             working_dir: None,
//!             user: None,
//!             group: None,
//!             groups: Vec::new(),
//!             user_namespace: None,
//!             security: Security::default(),
//!             limits: Limits::default(),
//!             pod_limits: Limits::default(),
//!             oom_score_adj: None,
//!             read_only_root: false,
//!             stdin: false,
//!             stdin_once: false,
//!             tty: false,
//!             mounts: Vec::new(),
//!             devices: Vec::new(),
//!             hidden: Vec::new(),
//!             log: "/var/log/main.log".into(),
//!             termination_message_path: None,
//!             image: None,
//!             pod: PodSettings::default(),
//!             target: None,
//!         })
//!         .await?;
//!     println!("exited with {}", runtime.exited(&id).await.code);
//!     runtime.remove(&id).await
//! }
//! ```

mod attach;
mod cgroup;
mod cri;
mod exec;
mod interface;
mod joiner;
mod launcher;
mod log;
mod logs;
mod owner;
mod processes;
mod root;
mod runtime;
mod security;
mod status;
mod sys;

use std::{fmt, path::PathBuf};

use berth_host::helper::Helper;
pub use berth_host::user_namespace::IdRange;
use serde::{Deserialize, Serialize};

pub use self::{
    attach::{AttachCall, Attached},
    cgroup::{Limits, Usage, groups_of, remove_groups},
    cri::{Cri, endpoint_of},
    exec::{Exec, ExecInput, ExecOutput},
    interface::{Credentials, Image, Images, KnownContainer, Runtime},
    joiner::{ExecCall, TerminalSize},
    log::log_files,
    logs::{LogOptions, LogStream, logs},
    processes::TICK,
    root::find_sub_path,
    runtime::{ContainerId, Error, Processes, Result},
    security::{Capabilities, Security},
    status::{Exit, Found, Reason, Shim, State, find},
};

/// The file with the specification in a container's directory.
const SPEC_FILE: &str = "spec.json";

/// The file in a container's directory that appears inside it at the termination message path.
const TERMINATION_FILE: &str = "termination-log";

/// What a container is made of and runs.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a yes or no of its own")]
pub struct ContainerSpec {
    /// The uid of the pod the container belongs to.
    pub pod_uid: String,
    /// The name of that pod.
    pub pod_name: String,
    /// The namespace of that pod.
    pub namespace: String,
    /// The name of the container in the pod.
    pub name: String,
    /// How often the container was started before.
    pub attempt: u32,
    /// The hostname that the container sees.
    pub hostname: String,
    /// The program, found by the `PATH` of `env` when it is a bare name, and its arguments.
    pub command: Vec<String>,
    /// The whole environment of the command; nothing of ours is added.
    pub env: Vec<(String, String)>,
    /// Where the command starts, made when it is missing; `/` when not given.
    pub working_dir: Option<PathBuf>,
    /// The user it runs as; root when not given.
    pub user: Option<u32>,
    /// Its primary group; that of root when not given.
    pub group: Option<u32>,
    /// The supplementary groups of the command, besides its primary one.
    pub groups: Vec<u32>,
    /// The ids of the machine that are those of the container, which then has a user namespace: its root is nobody outside,
    /// and files on disk keep the ids that they have inside.
    #[serde(default)]
    pub user_namespace: Option<IdRange>,
    /// What its processes may do.
    #[serde(default)]
    pub security: Security,
    /// What its processes may take of the machine, where [`Runtime::limits_containers`] says so.
    #[serde(default)]
    pub limits: Limits,
    /// What all containers of the pod together may take.
    #[serde(default)]
    pub pod_limits: Limits,
    /// How readily the kernel kills its processes when the machine has no memory left, from -1000 to 1000.
    #[serde(default)]
    pub oom_score_adj: Option<i32>,
    /// Whether only volumes, `/dev` and `/proc` can be written.
    pub read_only_root: bool,
    /// Whether standard input stays open, empty, instead of being at its end.
    pub stdin: bool,
    /// Whether standard input ends when the first who is attached to it ends theirs.
    #[serde(default)]
    pub stdin_once: bool,
    /// Whether the command gets a terminal.
    pub tty: bool,
    /// What of the host appears inside.
    pub mounts: Vec<Mount>,
    /// Which devices of the host appear inside.
    pub devices: Vec<Device>,
    /// Directories of the host that are empty inside.
    pub hidden: Vec<PathBuf>,
    /// The file its output goes to; [`log_files`] has the names of the older files beside it.
    pub log: PathBuf,
    /// Where the command may leave a last message.
    pub termination_message_path: Option<PathBuf>,
    /// What it runs; for a runtime with [`Images`] alone.
    #[serde(default)]
    pub image: Option<ImageRun>,
    /// What it has in common with the other containers of its pod; for such a runtime alone.
    #[serde(default)]
    pub pod: PodSettings,
    /// The container of its pod whose processes it sees, if not only its own; for such a runtime alone.
    #[serde(default)]
    pub target: Option<String>,
}

/// An image, and how it is run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRun {
    /// What the runtime knows it by.
    pub id: String,
    /// What the pod calls it.
    pub name: String,
    /// The arguments; those of the image if neither they nor a command are given.
    pub args: Vec<String>,
    /// The user of the image, if that is named and not numbered, and no other is asked for.
    pub user_name: Option<String>,
}

/// What all containers of a pod have in common.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a field of its own in a pod")]
pub struct PodSettings {
    /// Whether they see all processes of the machine.
    pub host_processes: bool,
    /// Whether they share the machine's shared memory and message queues.
    pub host_ipc: bool,
    /// Whether they see each other's processes.
    pub shares_processes: bool,
    /// Whether one of them is privileged.
    pub privileged: bool,
    /// Whether the groups of the image's user count only if the pod asks for them.
    pub only_own_groups: bool,
    /// Settings of the kernel, by name.
    pub sysctls: Vec<(String, String)>,
    /// The handler of the runtime that runs them; its usual one if `None`.
    pub handler: Option<String>,
    /// The labels of the pod.
    pub labels: Vec<(String, String)>,
}

/// A directory or file of the host that appears in a container, with all that is mounted below it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    /// Where it is on the host; its last component must not be a symbolic link.
    pub source: PathBuf,
    /// The directory or file below `source` that appears instead of it; a directory is made when it is missing. Symbolic
    /// links are followed as long as they stay below `source`, whatever changes there meanwhile.
    #[serde(default)]
    pub sub_path: Option<PathBuf>,
    /// Whether setuid bits, file capabilities and device nodes in it have no effect.
    #[serde(default)]
    pub restricted: bool,
    /// Where it appears, made when it is missing. A symbolic link there is followed, but never out of the container.
    pub target: PathBuf,
    /// Whether writes to it are refused.
    pub read_only: bool,
    /// Whether writes to what is mounted below it are refused, too, where writes to it are.
    #[serde(default)]
    pub recursive_read_only: bool,
    /// Which later mounts are seen on the other side.
    pub propagation: Propagation,
}

/// Which mounts that are made later below a mounted directory are seen on the other side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Propagation {
    /// Mounts made on one side later are not seen on the other.
    None,
    /// Those of the host, in the container.
    #[default]
    HostToContainer,
    /// Those of each side, on the other; the source must lie on a shared mount.
    Bidirectional,
}

/// A device of the host that appears in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The device on the host.
    pub source: PathBuf,
    /// The path of the device node in the container.
    pub target: PathBuf,
    /// Whether its file mode refuses writes; root is not bound by that, only by a device that is itself read-only.
    pub read_only: bool,
}

/// The process that starts containers.
pub const LAUNCHER: Helper = Helper { argument: launcher::ARGUMENT, run: launcher::serve };

/// Runs work that may wait, for a disk or another process, on a thread where it holds nobody else up.
///
/// A panic of the work goes on in the caller. Once the runtime shuts down, the work may not be begun any more, and this
/// does not return.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_cancelled) => std::future::pending().await,
        },
    }
}

impl fmt::Debug for ContainerSpec {
    // Command and environment may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContainerSpec")
            .field("pod_uid", &self.pod_uid)
            .field("namespace", &self.namespace)
            .field("pod_name", &self.pod_name)
            .field("name", &self.name)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}
