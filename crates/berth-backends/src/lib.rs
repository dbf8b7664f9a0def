//! Berth's own backends: volumes on this machine's disk ([`local`]) and on NFS servers ([`nfs`]).
//!
//! Each is composed of the traits of `berth-driver`, which is re-exported here.

mod image;
pub mod local;
pub mod nfs;

pub use berth_driver::*;

/// Runs work that makes system calls on a thread that may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let outcome = tokio::task::spawn_blocking(work).await;
    outcome.unwrap_or_else(|panic| Err(Error::State(format!("the operation did not end: {panic}"))))
}
