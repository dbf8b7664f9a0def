//! Runs control loops on Kubernetes: one cache per kind, queues with backoff, writes that overwrite nobody else's, events
//! and leader election.
//!
//! ```text
//!  API server ──watch──▶ Cache ──subscribe──▶ Loop ──keys──▶ Queue ──key──▶ work
//!      ▲                   ▲ Index                            ▲ backoff       │ observe (caches), plan (pure),
//!      │                   └───── own writes, at once ────────┼───────────────┤ apply (Cluster)
//!      └───────────────── Cluster::{create, update, edit, delete}, Recorder ──┘
//! ```
//!
//! - [`Cluster`] is a `kube::Client` with its caches; clones share them. It reads and writes objects.
//! - [`Cache`] and [`Index`] hold the objects of one kind, as they were last watched or written here.
//! - [`Loop`] says which changes put which keys into a [`Queue`], and runs the work on them.
//! - [`Recorder`] records events; [`leader::Elector`] runs work while a Lease is held; [`Metrics`] are client-go's.
//! - [`snapshots`] has the types of snapshots, which are custom resources;
//!   [`storage`] has the relations between claims, volumes, pods and nodes; [`selectors`] matches labels.
//!
//! Every loop relies on these invariants:
//!
//! - A key is worked on by one worker at a time, and again if something changed meanwhile.
//! - No key is worked on before the first list of every cache that its loop names is complete.
//! - What was written here is in the caches when the write returns.
//! - A write names the version that it was decided by, so it never undoes a change that was not seen.
//! - Kubernetes is seen only as a `kube::Client`: the same loop runs on the embedded API server in process and on a
//!   cluster's over HTTPS.
//!
//! Start reading at [`Loop`], then `queue.rs`, `cache.rs` and `write.rs`. A whole controller, which labels every claim
//! that is bound:
//!
//! ```no_run
//! use berth_kube::{Backoff, Cluster, Error, Loop, Next};
//! use k8s_openapi::api::core::v1::PersistentVolumeClaim;
//! use kube::ResourceExt as _;
//! use tokio_util::sync::CancellationToken;
//!
//! async fn label_bound_claims(client: kube::Client, shutdown: CancellationToken) {
//!     let cluster = Cluster::new(client, shutdown);
//!     let claims = cluster.cache::<PersistentVolumeClaim>();
//!     let queue = cluster.queue("bound-claims", Backoff::default());
//!     let work = |key| {
//!         let (cluster, claims) = (cluster.clone(), claims.clone());
//!         async move {
//!             if let Some(claim) = claims.get(&key).filter(|claim| berth_kube::storage::is_bound(claim)) {
//!                 let label = |claim: &mut PersistentVolumeClaim| {
//!                     claim.labels_mut().insert("example.com/bound".into(), "true".into());
//!                 };
//!                 cluster.edit(claim.as_ref(), label).await?;
//!             }
//!             Ok::<_, Error>(Next::Done)
//!         }
//!     };
//!     Loop::new(&cluster, &queue).keyed(&claims).run(4, work).await;
//! }
//! ```

mod cache;
mod cluster;
mod error;
pub mod finalizers;
mod key;
mod kind;
pub mod leader;
mod metrics;
mod objects;
pub mod provisionable;
mod queue;
mod recorder;
pub mod resources;
pub mod selectors;
pub mod snapshots;
pub mod storage;
pub mod timeline;
mod watch;
mod write;

pub use berth_core::Backoff;
pub use cache::{Cache, Index};
pub use cluster::Cluster;
pub use error::{Error, Result};
pub use key::Key;
pub use kind::Kind;
#[doc(hidden)]
pub use kind::private as __private;
pub use metrics::Metrics;
pub use queue::{Failure, Loop, Next, Queue};
pub use recorder::{Recorder, Severity, reference};
