//! What every control loop needs of Kubernetes: one cache per kind, queues with backoff, writes that cannot overwrite
//! somebody else's, and events.
//!
//! A [`Loop`] names its caches and which keys a change puts into its [`Queue`], and for each key observes (from the
//! caches), plans (a pure function) and applies (through [`Cluster`]). Kubernetes is seen only as a `kube::Client`, so
//! the same loop runs on the embedded API server in process and on a cluster's over HTTPS.

mod cache;
mod cluster;
mod control;
mod error;
pub mod finalizers;
mod key;
mod kind;
pub mod leader;
mod metrics;
mod objects;
mod queue;
mod recorder;
pub mod selectors;
pub mod storage;
pub mod timeline;
mod watch;
mod write;

pub use berth_core::Backoff;
pub use cache::{Cache, Index};
pub use cluster::Cluster;
pub use control::Loop;
pub use error::{Error, Result};
pub use key::Key;
pub use kind::Kind;
#[doc(hidden)]
pub use kind::private as __private;
pub use metrics::Metrics;
pub use queue::{Failure, Next, Queue};
pub use recorder::{Recorder, Severity, reference};
