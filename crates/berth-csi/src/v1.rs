//! Messages, clients and server traits of package `csi.v1`, generated from `proto/csi.proto`.
//!
//! A field marked `csi_secret` shows up in `Debug` as `***stripped***`, whatever it holds.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::pedantic,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]

use std::collections::BTreeMap;
use std::fmt;

#[rustfmt::skip]
mod generated;

pub use self::generated::*;

/// Stands in for a map of secrets in `Debug`: says whether there are any, never which.
struct Stripped<'a>(&'a BTreeMap<String, String>);

impl fmt::Debug for Stripped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("{}") } else { f.write_str("***stripped***") }
    }
}
