//! CSI drivers: the services of the spec over one [`Backend`] trait, and the backends.
//!
//! A request is parsed ([`call`]), checked against the spec's rules and against what is known of the volume
//! ([`services`]), and only then reaches a backend, in the words of `berth-core`. What a backend can do stands in one
//! table ([`Features`]), which decides both what is advertised and what is refused as unimplemented.
//!
//! The way of a volume: `services::controller` → [`Backend::create_volume`] → `services::node` →
//! [`Backend::stage`] → [`Backend::publish_source`] → a bind mount at the target (`target.rs`).

pub mod backend;
pub mod call;
mod features;
mod image;
mod ledger;
pub mod local;
mod locks;
pub mod nfs;
pub mod services;
mod target;

pub use backend::Backend;
pub use features::{Feature, Features};
pub use services::Driver;
