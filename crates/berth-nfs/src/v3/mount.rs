//! What version 3 needs beside NFS itself: the portmapper (RFC 1833) and MOUNT (RFC 1813, appendix I).

use super::{MOUNT_PROGRAM as MOUNT, PROGRAM as NFS, wire};
use crate::{
    Handle, Kind, Reason, Target,
    metrics::Meter,
    rpc::{Connection, Credential, Endpoint, Procedure},
    status::{Fault, Status},
    xdr::Encoder,
};

const PORTMAPPER: u16 = 111;
const TCP: u32 = 6;
const MOST_FLAVORS: usize = 64;
const AUTH_SYS: u32 = 1;
/// Where servers listen that do without a portmapper.
pub(crate) const NFS_PORT: u16 = 2049;

/// Where a server's NFS service of version 3 listens.
pub(crate) async fn nfs_port(
    target: &Target,
    endpoint: &Endpoint,
    credential: Credential,
) -> Result<u16, Fault> {
    if let Some(port) = target.options.port {
        return Ok(port);
    }
    match port_of(NFS, endpoint, credential).await {
        Ok(0) | Err(Fault::Unreachable(_)) => Ok(NFS_PORT),
        other => other,
    }
}

/// Asks for the root of an export; `endpoint` is that of the NFS service.
pub(crate) async fn mount(
    target: &Target,
    endpoint: &Endpoint,
    credential: Credential,
) -> Result<Handle, Fault> {
    let port = match target.options.mount_port {
        Some(port) => port,
        None => match port_of(MOUNT, endpoint, credential).await {
            // Servers without a portmapper often serve both on one port.
            Ok(0) | Err(Fault::Unreachable(_)) => endpoint.port,
            Ok(port) => port,
            Err(fault) => return Err(fault),
        },
    };
    let connection = Connection::open(&Endpoint { port, ..endpoint.clone() }, &Meter::default()).await?;
    let mut arguments = Encoder::default();
    arguments.opaque(target.absolute().as_bytes());
    let procedure = Procedure { program: MOUNT, version: 3, number: 1 };
    let mut answer = connection.call(procedure, credential, arguments).await?;
    match answer.u32()? {
        0 => {}
        13 => return Err(Fault::Other(Reason::new(Kind::Permission, "the server does not export it to us"))),
        10006 => return Err(Fault::Status(Status(10006))),
        // These numbers are those of NFS.
        other => return Err(Fault::Status(Status(other))),
    }
    let root = wire::handle(&mut answer)?;
    let flavors = answer.count(4)?.min(MOST_FLAVORS);
    let mut sys = flavors == 0;
    for _ in 0..flavors {
        // AUTH_NONE servers take anything.
        sys |= matches!(answer.u32()?, 0 | AUTH_SYS);
    }
    if !sys {
        let text = "the export wants another security flavour than sec=sys";
        return Err(Fault::Other(Reason::new(Kind::Permission, text)));
    }
    Ok(root)
}

/// Asks the portmapper; 0 means that the service is not there.
async fn port_of(program: u32, endpoint: &Endpoint, credential: Credential) -> Result<u16, Fault> {
    // No portmapper cares for our port.
    let endpoint = Endpoint { port: PORTMAPPER, reserved: Some(false), ..endpoint.clone() };
    let connection = Connection::open(&endpoint, &Meter::default()).await?;
    let mut arguments = Encoder::default();
    arguments.u32(program).u32(3).u32(TCP).u32(0);
    let procedure = Procedure { program: 100_000, version: 2, number: 3 };
    let port = connection.call(procedure, credential, arguments).await?.u32()?;
    u16::try_from(port).map_err(|_| Fault::Malformed("a port is larger than 65535"))
}
