//! NFS version 3 (RFC 1813): one procedure per request.

mod files;
pub(crate) mod mount;
mod wire;

use std::time::Duration;

use self::wire::status;
use crate::{
    rpc::{Connection, Credential, Endpoint, Idle, Procedure},
    status::Fault,
    xdr::{Decoder, Encoder},
};

/// A connection to the NFS service.
#[derive(Debug)]
pub(crate) struct Client {
    connection: Connection,
    credential: Credential,
}

impl Client {
    pub(crate) async fn open(endpoint: &Endpoint, credential: Credential) -> Result<Self, Fault> {
        Ok(Self { connection: Connection::open(endpoint).await?, credential })
    }

    pub(crate) fn on_reserved_port(&self) -> bool {
        self.connection.on_reserved_port()
    }

    /// Calls a procedure, whatever its status.
    async fn call(&self, number: u32, arguments: Encoder) -> Result<Decoder, Fault> {
        let procedure = Procedure { program: 100_003, version: 3, number };
        self.connection.call(procedure, self.credential, arguments).await
    }

    /// Calls a procedure that must succeed.
    async fn ask(&self, number: u32, arguments: Encoder) -> Result<Decoder, Fault> {
        let mut answer = self.call(number, arguments).await?;
        status(&mut answer)?;
        Ok(answer)
    }
}

impl Idle for Client {
    fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    fn idle_for(&self) -> Duration {
        self.connection.idle_for()
    }
}
