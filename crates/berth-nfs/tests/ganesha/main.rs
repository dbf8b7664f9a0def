//! The client against a real server, Ganesha, in every version that both speak.

#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod failures;
mod files;
mod lies;
mod portmapper;
mod server;
mod trees;
