//! The control loops of Kubernetes storage.

mod amount;
pub mod attach_detach;
mod claims;
pub mod scheduler;
mod selectors;
pub mod persistent_volumes;
pub mod protection;
pub mod ephemeral;
pub mod expand;
