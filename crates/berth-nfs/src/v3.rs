//! NFS version 3 (RFC 1813): one procedure per request.

mod files;
pub(crate) mod mount;
pub mod wire;

use std::time::Duration;

use self::wire::status;
use crate::{
    metrics::Meter,
    rpc::{Connection, Credential, Endpoint, Idle, Procedure},
    status::Fault,
    xdr::{Decoder, Encoder},
};

/// The number of the NFS service.
pub const PROGRAM: u32 = 100_003;
/// The number of the MOUNT service.
pub const MOUNT_PROGRAM: u32 = 100_005;

pub mod procedure {
    //! The procedures of NFS version 3, by number.
    #![expect(missing_docs, reason = "the names are those of RFC 1813, which says what each does")]

    pub const NULL: u32 = 0;
    pub const GETATTR: u32 = 1;
    pub const SETATTR: u32 = 2;
    pub const LOOKUP: u32 = 3;
    pub const ACCESS: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const CREATE: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const SYMLINK: u32 = 10;
    pub const MKNOD: u32 = 11;
    pub const REMOVE: u32 = 12;
    pub const RMDIR: u32 = 13;
    pub const RENAME: u32 = 14;
    pub const LINK: u32 = 15;
    pub const READDIR: u32 = 16;
    pub const READDIRPLUS: u32 = 17;
    pub const FSSTAT: u32 = 18;
    pub const FSINFO: u32 = 19;
    pub const PATHCONF: u32 = 20;
    pub const COMMIT: u32 = 21;
}

/// A connection to the NFS service.
#[derive(Debug)]
pub(crate) struct Client {
    connection: Connection,
    credential: Credential,
}

impl Client {
    pub(crate) async fn open(
        endpoint: &Endpoint,
        credential: Credential,
        meter: &Meter,
    ) -> Result<Self, Fault> {
        Ok(Self { connection: Connection::open(endpoint, meter).await?, credential })
    }

    pub(crate) fn on_reserved_port(&self) -> bool {
        self.connection.on_reserved_port()
    }

    /// Calls a procedure, whatever its status.
    async fn call(&self, number: u32, arguments: Encoder) -> Result<Decoder, Fault> {
        let procedure = Procedure { program: PROGRAM, version: 3, number };
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
