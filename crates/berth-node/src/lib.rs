//! A node: makes volumes available to pods, and runs pods.
//!
//! `pods` decides from a pod and its containers what to do next; `volumes` makes what the pods want and what is
//! mounted the same; `plugin` is what it asks of each kind of volume (`plugins` has them); `registration` lets CSI
//! drivers join; `machine` keeps the Node object; `berth_runtime` runs containers. `layout` is where things lie on disk.

pub mod layout;
mod machine;
pub mod node;
mod plugin;
mod plugins;
mod pods;
mod registration;
mod tokens;
mod volumes;

pub use registration::Drivers;
