//! The API server as others meet it: well-behaved clients and bad ones, kubectl, kill -9, and Kubernetes' own libraries, with
//! which types, patches and field ownership are compared; kube-apiserver, whose answers are compared; random input; and the
//! store below it.
#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod abuse;
mod clients;
mod differential;
mod fuzz;
#[allow(dead_code, reason = "shared with the benchmark")]
mod http;
mod killed;
mod kubectl;
mod kubernetes;
mod served;
mod store;
