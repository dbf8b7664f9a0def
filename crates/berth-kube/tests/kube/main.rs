//! berth-kube on the embedded API server.

mod leader;
mod loops;
