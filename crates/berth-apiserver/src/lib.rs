//! The embedded Kubernetes API: a durable, versioned, watchable store, and the REST verbs over it.
//!
//! Not a general Kubernetes: it serves the kinds that storage needs, and those so exactly that kubectl, kube-rs,
//! client-go and Berth's own controllers cannot tell. An object is a JSON value from the wire to the disk; what its
//! fields are is known from one compact table ([`schema`]), which drives strict decoding, protobuf, strategic merge,
//! server-side apply and OpenAPI alike.

pub mod auth;
pub mod collect;
pub mod patch;
pub mod pods;
pub mod resource;
pub mod rest;
mod rules;
pub mod schema;
pub mod server;
pub mod store;

#[doc(hidden)]
pub use rules::{FieldSelector, LabelSelector, parse_field_selector, parse_label_selector};
