//! How a driver introduces itself to a node: messages, client and server trait of package `pluginregistration`,
//! generated from `proto/registration.proto`.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]

#[rustfmt::skip]
mod generated;

pub use self::generated::*;

/// The type under which CSI drivers register.
pub const CSI_PLUGIN: &str = "CSIPlugin";
