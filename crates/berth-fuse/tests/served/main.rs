//! A share of a real server, in user space, served through FUSE: what programs see of it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod failures;
mod files;
mod rights;
mod world;
