//! The transport and the layer around each call, over real sockets and within the process.

#![expect(clippy::unwrap_used, reason = "the allowance for tests does not reach the functions they share")]

mod calls;
mod logs;
mod plugin;
mod sockets;
