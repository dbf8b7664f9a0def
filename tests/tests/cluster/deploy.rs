//! The manifests of `deploy/`: taken by the API server, fit for the pod security that they claim, and with roles that allow
//! what the programs in them do and nothing else.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod clouds;
mod cluster;
mod door;
mod manifests;
mod nfs;
mod pods;
mod roles;
mod scenario;
mod used;
mod viewers;
