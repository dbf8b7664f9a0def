//! A node: makes volumes available to pods, and runs pods.
//!
//! [`pods`] decides from a pod and its containers what to do next; [`volumes`] makes what the pods want and what is
//! mounted the same; [`plugin`] is what it asks of each kind of volume ([`plugins`] has them); [`registration`] lets CSI
//! drivers join; [`machine`] keeps the Node object; `berth_runtime` runs containers. [`layout`] is where things lie on disk.

pub mod layout;
pub mod machine;
pub mod node;
pub mod plugin;
pub mod plugins;
pub mod pods;
pub mod registration;
pub mod tokens;
pub mod volumes;
