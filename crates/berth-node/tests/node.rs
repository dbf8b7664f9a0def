//! A whole node on an API server in process: real containers, real mounts; needs root.

#[path = "node/life.rs"]
mod life;
#[path = "node/restart.rs"]
mod restart;
#[path = "node/volumes.rs"]
mod volumes;
#[path = "node/world.rs"]
mod world;
