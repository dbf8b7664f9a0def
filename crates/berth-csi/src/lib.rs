//! CSI v1.13 over gRPC, for both sides: messages, transport, what happens around every call, and a client.
//!
//! Drivers, sidecars and the node meet only here: a sidecar or a node calls a driver through [`Client`], and a driver's
//! services are reached through [`serve`] on a socket or [`in_process`] without one. Both ways run the same [`CallLayer`].
//!
//! ```text
//!  sidecar, node                                   driver
//!  Client::call ──► Unix socket or TCP ──► Listener, serve ──► CallLayer ──► services
//!        └────────► in_process (no socket) ─────────────────────────┘
//! ```
//!
//! This asks a driver for its name, whatever driver it is:
//! ```no_run
//! use std::time::Duration;
//! use berth_csi::{Client, Endpoint, v1::GetPluginInfoRequest};
//!
//! # async fn ask() -> Result<(), Box<dyn std::error::Error>> {
//! let endpoint: Endpoint = "unix:///run/berth/csi.sock".parse()?;
//! let driver = Client::connect(&endpoint);
//! let plugin = driver.call(Duration::from_secs(10), GetPluginInfoRequest {}).await?;
//! println!("{} {}", plugin.name, plugin.vendor_version);
//! # Ok(())
//! # }
//! ```
//!
//! | module or type | what it is for |
//! |---|---|
//! | [`v1`], [`registration`] | messages, clients and server traits, generated from the published protocols and checked in |
//! | [`Endpoint`], [`Tls`], [`Listener`], [`serve`], [`connect`], [`in_process`] | transport |
//! | [`CallLayer`] | around every call a driver serves: deadline, log line, metrics, running to the end |
//! | [`Client`] | around every call a sidecar or node makes: deadline, what a broken call means, metrics, the driver's capabilities |
//! | [`code`] | which gRPC codes are final |
//! | [`remarks`] | warnings and progress for people, beside an answer |
//! | [`registrar`] | introduces a driver to the kubelet |
//! | [`kubernetes`] | access modes and volume modes of Kubernetes as capabilities of CSI |
//!
//! What holds, and which tests check it:
//! - No secret appears in a message's `Debug`, in a log line or in an error (`tests/csi/secrets.rs`, `logs.rs`).
//! - With TLS, a driver answers only clients that show a certificate of its authority (`tests/csi/tls.rs`).
//! - A call that a driver has begun runs to its end, whatever its client does (`tests/csi/calls.rs`).
//! - Only a code that the driver itself sent can be final; whatever the transport made of a call is UNAVAILABLE or
//!   DEADLINE_EXCEEDED (`client.rs`).
//! - The generated code is that of the published protocol, number by number (`tests/csi/descriptor.rs`, `generated.rs`).
//!
//! Start reading at `client.rs` for the caller's side, at `call_layer.rs` for the driver's.

mod authority;
mod call_layer;
mod client;
pub mod code;
mod endpoint;
pub mod full;
pub mod kubernetes;
mod metrics;
pub mod registrar;
pub mod registration;
pub mod remarks;
mod tls;
mod transport;
pub mod v1;

pub use authority::Lenient;
pub use call_layer::{CallLayer, Calls, Deadline};
pub use client::{
    AsBytes, Call, Client, ControllerCapability, GroupCapability, Identity, NodeCapability, PluginService,
    from_transport,
};
pub use endpoint::{Endpoint, EndpointError, NotTcp};
pub use metrics::{ClientMetrics, Metrics};
pub use tls::{Tls, TlsError};
pub use transport::{BindError, GRACE_PERIOD, Listener, connect, in_process, serve};
