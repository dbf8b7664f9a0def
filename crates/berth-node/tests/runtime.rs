//! Real containers on this machine; they need root.

#[path = "runtime/exec.rs"]
mod exec;
#[path = "runtime/life.rs"]
mod life;
#[path = "runtime/logs.rs"]
mod logs;
#[path = "runtime/place.rs"]
mod place;
#[path = "runtime/world.rs"]
mod world;
