//! Speaks CSI v1.13.
//!
//! - [`v1`]: messages, clients and server traits; secrets never appear in their `Debug`.
//! - [`Endpoint`], [`Listener`], [`serve`], [`connect`]: gRPC over Unix sockets and TCP.
//! - [`in_process`]: the same services for callers in the same process, without a socket.
//! - [`Client`]: calls a driver: deadline, what a broken call means, what the driver can do, metrics.
//! - [`CallLayer`]: what happens around every call: deadline, log line, metrics, running to the end.
//! - [`code`]: which answers are final.
//! - [`remarks`]: warnings and progress for people, beside an answer.
//! - [`registration`]: how a driver introduces itself to a node.
//! - [`kubernetes`]: access modes and volume modes of Kubernetes as capabilities of CSI.

mod authority;
mod call_layer;
mod client;
pub mod code;
mod endpoint;
pub mod kubernetes;
mod metrics;
pub mod registrar;
pub mod registration;
pub mod remarks;
mod transport;
pub mod v1;

pub use call_layer::{CallLayer, Calls, Deadline};
pub use client::{
    Call, Client, ControllerCapability, GroupCapability, Identity, NodeCapability, PluginService,
    from_transport,
};
pub use endpoint::{Endpoint, EndpointError};
pub use metrics::Metrics;
pub use transport::{BindError, GRACE_PERIOD, Listener, connect, in_process, serve};
