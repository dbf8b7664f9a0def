//! The components beside a driver on a real API server and a real driver: objects in, objects, volumes and events out.

#![expect(missing_docs, reason = "tests")]

mod bench;
mod local;
