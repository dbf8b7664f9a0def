//! Twins over HTTP, as drivers see them: real requests, real loop devices.
#![expect(clippy::unwrap_used, reason = "a test says by a panic what went wrong")]

mod aliyun;
mod client;
mod digitalocean;
