//! The protocol as published and as generated, and its transport, the layer around each call and the client, over real
//! sockets and within the process.

#![expect(clippy::unwrap_used, reason = "the allowance for tests does not reach the functions they share")]

mod calls;
mod client;
mod descriptor;
mod generated;
mod logs;
#[rustfmt::skip]
mod messages;
mod plugin;
mod secrets;
mod sockets;
mod tls;
