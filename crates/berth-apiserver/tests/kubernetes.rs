//! Our types, protobuf, patches and field ownership do what Kubernetes' own Go libraries do.
//!
//! The libraries are asked through a small Go program (`generate/peer`); Go and its module registry are needed.

#[path = "kubernetes/apply.rs"]
mod apply;
#[path = "kubernetes/custom.rs"]
mod custom;
#[path = "kubernetes/decoding.rs"]
mod decoding;
#[path = "kubernetes/patches.rs"]
mod patches;
#[path = "kubernetes/peer.rs"]
mod peer;
#[path = "kubernetes/protobuf.rs"]
mod protobuf;
#[path = "kubernetes/random.rs"]
mod random;
#[path = "kubernetes/types.rs"]
mod types;
