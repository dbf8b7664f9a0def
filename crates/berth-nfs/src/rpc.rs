//! ONC RPC (RFC 5531) over TCP: the form of calls and answers, and connections that carry them.

mod connection;
mod dial;
mod message;
mod record;
mod shared_connection;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    connection::{Connection, Pending},
    dial::{Endpoint, random},
    message::{Credential, Groups, Procedure},
    shared_connection::{Idle, SharedConnection},
};
