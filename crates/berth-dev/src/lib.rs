//! The proxy of `berth dev`, between a CSI driver and its callers: it shows calls, checks them by the rules of CSI, delays and breaks them.
//!
//! ```text
//!  sidecars, node ──► proxy ──► driver (started, killed, rebuilt by the workbench)
//!                       │
//!                       ├─ step:    a call waits for a person
//!                       ├─ faults:  kill, repeat, delay, drop the answer, …, by a seed
//!                       ├─ observe: mounts, loop devices and files before and after
//!                       └─ judge:   the rules of berth-certify for one call
//!                              │
//!                            record::Event ──► lines, JSON, a file, or the view in the terminal
//! ```
//!
//! What holds: the bytes of requests and answers are forwarded unchanged. No event holds a secret ([`record`]). The same seed breaks the same calls ([`faults`]). A build that
//! fails leaves the driver running ([`Workbench`]).
//!
//! Start reading at `proxy.rs`, where a call passes; `workbench.rs` keeps the driver running.

pub mod announced;
pub mod faults;
pub mod lines;
mod messages;
mod observe;
pub mod project;
mod proxy;
pub mod record;
mod secrets;
mod step;
pub mod view;
mod watch;
mod workbench;

pub use observe::loop_devices;
pub use proxy::CALLERS_WAIT;
pub use step::StepFilter;
pub use workbench::{Options, Workbench, check_endpoint};
