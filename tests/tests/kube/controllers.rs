//! `berth controller local` and `berth node local` beside kube-controller-manager and kube-scheduler.

mod attach;
mod capacity;
mod change;
mod groups;
mod per_node;
mod snapshots;
mod topology;
mod volumes;
