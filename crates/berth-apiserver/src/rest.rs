//! The REST verbs over the store: a tower service that speaks the Kubernetes API.

mod catalog;
mod content;
mod error;
mod query;
mod route;

pub use content::Body;
pub use error::{Answer, Failure};
