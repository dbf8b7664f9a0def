//! Addresses and names of Services on one machine, as kube-proxy and CoreDNS give them in a cluster.
//!
//! - [`block`] picks the loopback addresses of a machine: Services and pods have addresses of 127.0.0.0/8, which everybody on the
//!   machine can listen at and which nobody has to remove.
//! - [`forward`] listens at the addresses of Services and passes connections on to their endpoints.
//! - [`resolver`] answers what the names of Services and pods are, and asks others for all other names.
//!
//! Both read Services and EndpointSlices (`view.rs`), and so work beside any controller that writes those.
//!
//! # Invariants
//!
//! - A process that is killed leaves nothing behind: its sockets close, and no interface, route or rule was made.
//! - Nobody listens for a Service that has no endpoint, so that a client is refused at once, as in a cluster.
//! - A process that listens at all addresses is not kept from its port by a Service whose endpoints have the same port: nobody
//!   listens for that Service until one of its endpoints does. Where the target port is another one, or the endpoint listens at
//!   its own address, the forwarder has the port as soon as there is a ready endpoint, and then no other process can listen at
//!   that port of all addresses: the kernel refuses it (EADDRINUSE). Ports 443 and 53 are taken in this way by the Service
//!   `kubernetes` and the resolver.
//!
//! Start reading at [`forward::run`] and `Resolver::answer` (`resolver.rs`).

mod accept;
pub mod block;
pub mod forward;
pub mod resolver;
mod view;
