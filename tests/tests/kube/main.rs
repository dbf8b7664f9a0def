//! Berth on real Kubernetes, which `make test-kube` starts.
//!
//! The first word of a test's name is the level of the testbed that it needs: `controllers` has everything but a kubelet,
//! whose part the tests play (`hollow`), and `node` has one.

mod cluster;
mod controllers;
mod hollow;
mod kinds;
mod node;
mod objects;
