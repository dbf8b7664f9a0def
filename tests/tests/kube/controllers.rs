//! `berth controller local` beside kube-controller-manager and kube-scheduler.

mod attach;
mod change;
mod groups;
mod snapshots;
mod topology;
mod volumes;
