//! Twins over HTTP, as drivers see them: real requests, real loop devices.

mod aliyun;
mod client;
mod digitalocean;
