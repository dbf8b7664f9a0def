//! What the backends of clouds share: HTTP, limits of rates, lookups that are put together, queues, and disks on a node.
//!
//! ```text
//!  digitalocean/, aliyun/           the provider's calls, and what CSI makes of them
//!       │ controller                     │ node
//!  http.rs      one request          node.rs      format, mount, grow, measure
//!  limiter.rs   when it may go       device.rs    which block device a disk is
//!  lookup.rs    many as one
//!  queue.rs     one instance at a time
//! ```

mod device;
mod http;
mod limiter;
mod lookup;
mod node;
mod page;
mod queue;
#[cfg(test)]
pub(crate) mod scripted;
mod size;
mod wait;

pub(crate) use self::{
    device::{DiskNames, Finder, Identity},
    http::{Answer, Endpoint, Http},
    limiter::Limiter,
    lookup::Lookups,
    node::{DiskNode, Disks},
    page::page_of,
    queue::Queues,
    size::{GIB, Sizes},
    wait::{Deadline, Pace},
};
