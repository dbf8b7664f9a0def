//! The rules of CSI as checks, for any driver.
//!
//! [`rules`] judges one observed call by its request, its answer, and the mounts before and after it.
//! [`report`] is what a run of all checks found.

pub mod report;
pub mod rules;
