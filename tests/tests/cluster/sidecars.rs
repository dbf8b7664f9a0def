//! The sidecars as programs: together, each under its upstream name, and beside Berth's own driver, on the embedded API
//! server.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod cluster;
mod combined;
mod crash;
mod embedded;
mod gate;
mod health;
mod metrics;
mod names;
mod probes;
mod takeover;
mod tls;
