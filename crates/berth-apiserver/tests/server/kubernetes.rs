//! Our types, protobuf, patches and field ownership do what Kubernetes' own Go libraries do.
//!
//! The libraries are asked through a small Go program (`generate/peer`); Go and its module registry are needed.

mod apply;
mod custom;
mod decoding;
mod patches;
mod peer;
mod protobuf;
pub(crate) mod random;
mod types;
