//! What the backends of clouds share: HTTP, limits of rates, lookups that are put together, queues, and disks on a node.
//!
//! ```text
//!  digitalocean/, aliyun/           the provider's calls, and what CSI makes of them
//!       │ controller                     │ node
//!  client.rs    what is sent again   node.rs      format, mount, grow, measure
//!  limiter.rs   when it may go       device.rs    which block device a disk is
//!  http.rs      one request
//!  failure.rs   what went wrong
//!  lookup.rs    many as one
//!  queue.rs     one instance at a time
//!  wait.rs      when to look again
//!  leftovers.rs what a crash leaves
//!  driver.rs    both, composed
//! ```

mod client;
mod device;
mod driver;
mod failure;
mod http;
pub(crate) mod leftovers;
mod limiter;
mod lookup;
mod node;
mod page;
mod queue;
#[cfg(test)]
pub(crate) mod scripted;
mod size;
mod wait;

pub use self::client::Secret;
pub(crate) use self::{
    client::{AGENT, Client, Message, Protocol, Verdict, null_is_default, parse},
    device::{DiskNames, Finder, Identity},
    driver::{CloudNode, check_start, compose, controller},
    failure::{Failure, Outcome, Refusal, is_final},
    http::{Answer, Endpoint, Http},
    leftovers::{ClonesBySnapshot, keep_removing},
    limiter::Limiter,
    lookup::{Found, Lookups, look_up},
    node::{DiskNode, Disks},
    page::page_of,
    queue::Queues,
    size::{GIB, Sizes},
    wait::{Deadline, Durations, FEW_ENOUGH, Pace, Waiting},
};
