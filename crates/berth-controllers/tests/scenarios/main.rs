//! The control loops on a whole API server: objects are created and deleted, and what becomes of them is compared.
//!
//! The server is the embedded one, in process. With KUBECONFIG_REAL naming a kubeconfig, the same scenarios run on that
//! cluster instead (its own controllers must be off, and one test must run at a time: `--test-threads=1`).

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod attaching;
mod blind;
mod budgets;
mod counting;
mod crash;
mod fakes;
mod placement;
mod protection;
mod reclaim;
mod rollouts;
mod room;
mod scheduling;
mod stateful;
mod unseen_class;
mod volumes;

/// The PV controller and the protections: what every scenario of volumes needs.
fn volume_loops(client: &kube::Client) -> berth_testkit::Loops {
    berth_testkit::Loops::new(client)
        .with(berth_controllers::persistent_volumes::run)
        .with(berth_controllers::protection::run)
}
