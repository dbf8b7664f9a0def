//! The server, spoken to byte by byte: what a client may rely on, and what one that lies can do.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod boundaries;
mod files;
mod hostile;
mod names;
mod world;
