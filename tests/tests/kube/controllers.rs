//! `berth controller local` and `berth node local` beside kube-controller-manager and kube-scheduler.

mod attach;
mod capacity;
mod change;
mod compare;
mod distributed;
mod groups;
mod see;
mod snapshots;
mod topology;
mod volumes;
