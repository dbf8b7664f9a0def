//! A node of a cluster: makes volumes available to pods, and runs pods.
//!
//! It does what the kubelet does for storage, with the kubelet's layout on disk, its event texts and its registration
//! protocol, so that any CSI driver can join. [`node::Node`] is the whole node; the rest is reached through it.
//!
//! ```text
//!  Pod (watch) ─► pods ── what each pod wants ─► volumes ── plan ─► plugins ─► CSI driver, tmpfs, files
//!                  │                               ▲ attached?        │
//!                  │ all volumes are mounted       │                  └─ registration: drivers join by a socket
//!                  ▼                             machine ─► Node, CSINode, Lease
//!              berth_runtime ─► containers
//! ```
//!
//! - `pods` decides, from a pod and its containers, what to start and stop (`pods/decide.rs`, a pure function), and
//!   writes the pod's status.
//! - `volumes` compares what pods want with what is mounted and plans the difference (`volumes/plan.rs`, a pure
//!   function); one worker at a time per device, none waits for another's.
//! - `plugin` is the interface of a kind of volume; `plugins` holds them: CSI, FlexVolume, emptyDir, hostPath,
//!   local, nfs, configMap, secret, downwardAPI, projected.
//! - `registration` lets CSI drivers join; `machine` keeps the Node and CSINode objects; `tokens` keeps the tokens of
//!   service accounts; `layout` says where things lie on disk.
//!
//! # Invariants
//!
//! - What may have happened is undone, even if nobody wants it any more: a call that fails without saying that nothing
//!   was done leaves its volume *uncertain*, and after a restart everything found on disk is.
//! - A volume is recorded on disk before its driver is called, and reported as in use before it is staged.
//! - Containers do not depend on this process: a restart finds them again and restarts none.
//! - What is removed with a pod never reaches outside its directory, nor below a mount point.
//! - No secret is written to a log, an event or an error.
//!
//! Start reading at `Pods::run_pod` in `pods.rs`, then `Volumes::settle` in `volumes.rs`. To add a kind of volume,
//! implement `Plugin` (`plugin.rs`) and add it to `plugins::plugins`.
//!
//! # Example
//!
//! ```no_run
//! use berth_kube::Cluster;
//! use berth_node::node::{Error, Node, Options};
//!
//! async fn run(cluster: Cluster, program: std::path::PathBuf) -> Result<(), Error> {
//!     let mut node = Node::start(Options {
//!         cluster,
//!         name: "node-1".to_owned(),
//!         directory: "/var/lib/node-1".into(),
//!         runtime: Default::default(),
//!         program,
//!         labels: Default::default(),
//!         address: None,
//!         lease_duration: None,
//!         network: berth_node::PodNetwork::default(),
//!         environment: Vec::new(),
//!         hidden: Vec::new(),
//!         stand_ins: Vec::new(),
//!         volume_plugins: None,
//!         csi_timeout: None,
//!         attach_timeout: None,
//!         volume_plugin_timeouts: berth_flex::Timeouts::default(),
//!         pod_pids_limit: None,
//!         nfs: None,
//!     })
//!     .await?;
//!     // Works until the cluster's shutdown; pods go on running.
//!     node.ended().await;
//!     Ok(())
//! }
//! ```

mod ids;
mod images;
pub mod layout;
mod machine;
mod metrics;
pub mod node;
mod plugin;
mod plugins;
mod pods;
mod registration;
mod stats;
mod tokens;
mod usage;
mod volumes;

pub use plugin::{Certainty, Failed};
pub use plugins::{NfsMounts, NfsShare};
pub use pods::{PodAddresses, PodNetwork, StandIn};
pub use registration::Drivers;
pub use stats::{ContainerFigure, Figure, FigureReader, Figures};
pub use usage::{Amounts, UsageReader, VolumeUsage};
