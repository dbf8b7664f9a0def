//! ONC RPC (RFC 5531) over TCP: the form of calls and answers, and connections that carry them.
//!
//! The forms are public, for a server to use.

mod connection;
mod dial;
mod message;
pub mod record;
mod shared_connection;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    connection::{Connection, Pending},
    dial::Endpoint,
    shared_connection::{Idle, SharedConnection},
};
pub use self::{
    dial::random,
    message::{Call, Credential, Groups, Procedure, Unreadable, accepted, refused},
};
pub use crate::status::Refusal;
