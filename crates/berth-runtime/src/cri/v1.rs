//! Messages and clients of package `runtime.v1`, the Container Runtime Interface, generated from `proto/cri.proto`.

#![allow(
    missing_docs,
    unreachable_pub,
    dead_code,
    clippy::enum_variant_names,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]

#[rustfmt::skip]
mod generated;

pub use self::generated::*;
